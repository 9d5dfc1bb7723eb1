"""Each mistake of the mutation table can still be made: the text that it replaces stands once in its file."""

from __future__ import annotations

import pytest

from tests.helpers import ROOT
from tests.mutation_table import MUTATIONS, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[mutation.what for mutation in MUTATIONS])
def test_the_text_that_a_mistake_replaces_stands_once(mutation: Mutation) -> None:
    assert (ROOT / mutation.file).read_text(encoding="utf-8").count(mutation.old) == 1
