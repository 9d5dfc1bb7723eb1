"""Each pass of Hopper makes, of the text before it, the text after it.

`python -m tests.hopper.test_texts` writes the texts.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest

from attngen.codegen.files import write_file
from attngen.ir import Module
from attngen.schedule.choice import choose
from attngen.schedule.table import committed
from attngen.spec import Spec
from attngen.targets.hopper import HOPPER
from attngen.transforms.base import Pass
from attngen.verify import verify
from tests import chunks
from tests.helpers import spec, stages_of
from tests.hopper import fused_backward
from tests.hopper.common import hopper_spec
from tests.hopper.texts import ALL, FIRST, FOLDER, PASSES, Texts

STEPS = [(texts, before, after) for texts in ALL for before, after in texts.steps()]


def spec_of(texts: Texts) -> Spec:
    """The spec that is lowered to the texts."""
    if texts.spec in fused_backward.CASES:
        return fused_backward.spec_for(texts.spec)
    if texts.spec.endswith(" of chunks"):
        mask, _, head_dim = texts.spec.removesuffix(" of chunks").partition(" ")
        return chunks.spec_of(mask, head_dim=int(head_dim or 128), schedule={"backend": "hopper"})
    return spec(texts.spec) if texts.kernel == "decode" else hopper_spec(texts.spec)


def passes_of(texts: Texts) -> dict[str, Pass]:
    """The passes of Hopper for the spec, by name."""
    first = HOPPER.passes(partial(choose, HOPPER, spec_of(texts).schedule, committed()))
    return {step.name: step for step in (*first, *HOPPER.lowering)}


def lowered(texts: Texts) -> dict[str, str]:
    """The texts that the spec is lowered to, by the name of the pass."""
    found: dict[str, Module] = {}
    stages = dict(stages_of(spec_of(texts)))
    *_, module = (made for name, made in stages.items() if name in PASSES)
    for step in HOPPER.lowering:
        stages[step.name] = module = step.run(module)
    for name, module in stages.items():
        reduced = texts.reduced(module)
        if name == FIRST or (name in PASSES and reduced.warp_specialized != [*found.values()][-1].warp_specialized):
            found[name] = reduced
    kept = {name for step in pairwise(found) if step[1] in texts.only or not texts.only for name in (FIRST, *step)}
    return {name: texts.text(name, module) for name, module in found.items() if name in kept}


@pytest.mark.parametrize(("texts", "before", "after"), STEPS, ids=str)
def test_a_pass_makes_the_text_after_it(texts: Texts, before: str, after: str) -> None:
    made = texts.reduced(verify(passes_of(texts)[after].run(verify(texts.module(before)))))
    assert texts.text(after, made) == texts.files[after].read_text(encoding="utf-8")


@pytest.mark.parametrize("texts", [texts for texts in ALL if not texts.only], ids=str)
def test_the_other_passes_leave_the_kernel_as_it_is(texts: Texts) -> None:
    for name, step in passes_of(texts).items():
        if name not in texts.files:
            module = texts.module(name)
            assert step.run(module).warp_specialized == module.warp_specialized, name


def test_every_pass_of_hopper_has_texts() -> None:
    assert {after for _, _, after in STEPS} == set(PASSES)


@pytest.mark.parametrize("texts", ALL, ids=str)
def test_the_text_of_a_file_is_printed_as_it_is_read(texts: Texts) -> None:
    for name, path in texts.files.items():
        assert texts.text(name, texts.module(name)) == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("texts", ALL, ids=str)
def test_specs_are_lowered_to_the_texts(texts: Texts) -> None:
    assert lowered(texts) == {name: path.read_text(encoding="utf-8") for name, path in texts.files.items()}


def main() -> None:
    for texts in ALL:
        made = lowered(texts)
        for name, path in texts.files.items():
            if name not in made:
                path.unlink()
        for name, text in made.items():
            write_file(FOLDER / str(texts) / f"{name}.ir", text)


if __name__ == "__main__":
    main()
