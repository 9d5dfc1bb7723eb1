"""The table of families of transformers (docs/site/models.yaml): every row is what happens.

Each model is made with attngen, as a user makes it, and is compared with its eager attention: outputs and all
gradients, generated tokens. The layers that attngen runs, and those that it gives to eager attention, are counted.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from attngen.conformance.oracle import relative_error
from attngen.errors import AttngenError
from attngen.integrations.transformers import attend as attends
from attngen.integrations.transformers import fallback
from docs.site.models import models_page
from tests import transformers_models
from tests.helpers import ROOT
from tests.transformers_models import DECODERS, DEVICE, FAMILIES, WORDS, N, Tensor, calls, made, run

cache = transformers_models.cache  # a fixture
RUN = [name for name, family in FAMILIES.items() if family.outcome in ("yes", "falls back")]
GENERATE = [name for name in RUN if FAMILIES[name].generates]
LEFT = [name for name in FAMILIES if name not in RUN]


@contextmanager
def watched() -> Iterator[tuple[Counter[str], list[str]]]:
    """Count the layers that attngen runs and those that eager attention runs, and keep attngen's warnings."""
    count: Counter[str] = Counter()
    said: list[str] = []

    def counts(name: str) -> Any:
        function = getattr(attends, name)

        def call(*args: Any, **more: Any) -> Any:
            count[name] += 1
            return function(*args, **more)

        return call

    fallback.WARNED.clear()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        for name in ("_run", "run_by_eager"):
            patch.setattr(attends, name, counts(name))
        warnings.simplefilter("always")
        yield count, said
    said += [str(w.message) for w in caught if "attngen" in str(w.message)]


@pytest.mark.share(128)
@pytest.mark.parametrize("name", RUN)
def test_a_family_trains_as_the_table_says(name: str, device: str) -> None:
    """Outputs and all gradients agree in fp32, with padding on both sides, and, for some, packed and unpadded."""
    if torch.cuda.is_available() and torch.get_float32_matmul_precision() != "highest":
        pytest.fail("fp32 is not fp32 here")
    family, model = FAMILIES[name], made(name, "attngen")
    for call, counted in calls(name, N):
        expected = run(model, "eager", call, counted)
        with watched() as (count, said):
            found = run(model, "attngen", call, counted)
        assert (count["_run"], count["run_by_eager"]) == (family.layers, family.eager)
        assert bool(said) == bool(family.eager) and all(family.says in text for text in said)
        assert all(relative_error(x, y) < 2e-5 for x, y in zip(found, expected))


@pytest.mark.share(128)
@pytest.mark.parametrize("name", GENERATE)
def test_a_family_generates_as_the_table_says(name: str, device: str) -> None:
    """Tokens are the same, with padding on the left and windows and chunks shorter than the sequences, and, for some,
    with static caches."""
    family, model = FAMILIES[name], made(name, "attngen")
    asked = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "disable_compile": True}
    for kind in ("dynamic", "static") if name in (*DECODERS, "t5") else ("dynamic",):
        answers = []
        for how in ("eager", "attngen"):
            model.set_attn_implementation(how)
            with watched() as (count, said):
                asked |= {"eos_token_id": WORDS - 1, "cache_implementation": kind}
                answers.append(model.generate(**prompt(name), **asked))
        assert torch.equal(*answers)
        assert count["_run"] >= family.layers and bool(count["run_by_eager"]) == bool(family.eager)
        assert bool(said) == bool(family.eager)


def prompt(name: str) -> dict[str, Tensor]:
    """Return what `generate` gets: a batch that is padded on the left, or what a forward gets without the decoder's
    tokens."""
    if FAMILIES[name].inputs:
        call, _ = next(calls(name, N))
        return {key: x for key, x in call.items() if key != "decoder_input_ids"}
    ids = torch.randint(3, WORDS, (2, 11), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.share(8)
@pytest.mark.parametrize("name", LEFT)
def test_a_family_that_attngen_does_not_run_says_so(name: str, device: str) -> None:
    """A refusal is one sentence. A model with attention of its own never calls attngen."""
    family, error = FAMILIES[name], ""
    call, _ = next(calls(name, N))
    with watched() as (count, _):
        try:
            made(name, "attngen")(**call)
        except (AttngenError, KeyError) as found:
            error = f"{type(found).__name__}: {found}"
            assert isinstance(found, AttngenError) == (family.outcome == "refused")
    assert count["_run"] == family.layers and bool(error) == bool(family.says) and family.says in error


# ---------------------------------------------------------------------------------------------- the page


def test_the_page_of_models_has_every_row() -> None:
    page = models_page()
    assert re.search(r"transformers \d+\.\d+\.\d+\b(?! ;)", page)
    for family in FAMILIES.values():
        cells = rf"\| {re.escape(family.title)}<br>`{re.escape(family.type)}` \|"
        assert re.search(rf"^{cells}", page, re.MULTILINE), family.name
        assert family.where in page and bool(family.where) >= (family.outcome != "yes")
        assert family.outcome in ("own attention", "yes") or family.says


def test_the_number_of_families_in_the_readme_is_that_of_the_table() -> None:
    runs = sum(family.runs for family in FAMILIES.values())
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert set(re.findall(r"(\d+) Hugging Face model families", readme)) == {str(runs)}
