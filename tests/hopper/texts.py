"""Hopper kernels as IR text after each pass: what tests of one pass start from, and what they expect.

A folder in tests/hopper/texts/ is for one kernel of one spec. `dce.ir` has the portable kernels from which the passes
of Hopper start. Each other file has the warp-specialized kernel after the pass of its name, if that pass changes it.
`python -m tests.hopper.test_texts` writes the files; read what changed in them before you commit it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path

from attngen.ir import Config, DoesNotFit, Kernel, Module
from attngen.ir.parser import parse_module
from attngen.ir.printer import print_module
from attngen.targets.hopper import HOPPER

FOLDER = Path(__file__).parent / "texts"
FIRST = "dce"
Rows = tuple[Config | DoesNotFit, ...]
PASSES = tuple(step.name for step in (*HOPPER.passes(lambda *_: ""), *HOPPER.lowering))


@dataclass(frozen=True)
class Texts:
    """The texts of one kernel.

    portable: the portable kernels in `dce.ir`: the kernel itself and those that its passes or the verifier ask for.
    only: the passes that have a file, and another one for their input. All passes that change the kernel if empty.
    """

    spec: str
    kernel: str
    portable: tuple[str, ...]
    only: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.spec}.{self.kernel}"

    @property
    def files(self) -> dict[str, Path]:
        """The files, by the name of the pass, in the order of the passes."""
        return {name: path for name in (FIRST, *PASSES) if (path := FOLDER / str(self) / f"{name}.ir").is_file()}

    def module(self, name: str) -> Module:
        """The module in the last file at or before this pass; not verified. With `only`, passes in between may have
        changed the kernel without a file."""
        order = (FIRST, *PASSES)
        return _read(self, [file for file in self.files if order.index(file) <= order.index(name)][-1])

    def steps(self) -> Iterator[tuple[str, str]]:
        """Yield the names of two files, of which the second one is what its pass makes of the first one."""
        yield from ((a, b) for a, b in pairwise(self.files) if not self.only or b in self.only)

    def text(self, name: str, module: Module) -> str:
        """The text of a file: the module after a pass, without the portable kernels, which no pass changes."""
        return print_module(module if name == FIRST else replace(module, kernels=()))

    def reduced(self, module: Module) -> Module:
        """A module with only the kernel, its portable kernels and their schedules."""

        def rows_of(name: str, rows: Rows) -> Rows:
            return rows if name == self.kernel else tuple(r for r in rows if getattr(r, "backend", "") != HOPPER.name)

        return replace(
            module,
            version="0",
            spec_hash="0",
            hosts=(),
            kernels=tuple(kernel for kernel in module.kernels if kernel.name in self.portable),
            warp_specialized=tuple(kernel for kernel in module.warp_specialized if kernel.name == self.kernel),
            schedules=tuple((name, rows_of(name, rows)) for name, rows in module.schedules if name in self.portable),
        )


ALL = (
    Texts("causal_gqa", "fwd", ("fwd",)),
    Texts("wide", "bwd", ("fwd", "bwd")),
    Texts("causal_gqa", "jvp", ("fwd", "jvp"), ("software-pipeline-tangents", "skip-masked-tiles")),
    Texts(
        "decode_mla",
        "decode",
        ("fwd", "decode", "combine"),
        ("split-d-warp-groups", "exchange-p", "software-pipeline-weights"),
    ),
    Texts("full_mha", "fwd", ("fwd",), ("ping-pong",)),
    Texts("alibi_mha", "fwd", ("fwd",), ("hoist-bias",)),
    Texts("window_gqa", "fwd", ("fwd",), ("split-boundary-masks",)),
    Texts("biased", "bwd", ("fwd", "bwd"), ("stage-score-bias",)),
    Texts("window of chunks", "fwd", ("fwd",), ("stage-tile-starts", "prefetch-work-tiles")),
    Texts("causal 64 of chunks", "fwd", ("fwd",), ("prefetch-work-tiles", "legalize-gluon")),
    Texts("window of chunks", "bwd", ("fwd", "bwd"), ("stage-tile-starts",)),
    Texts("causal of chunks", "bwd", ("fwd", "bwd"), ("load-before-lookups",)),
)


def texts_of(name: str, kernel: str) -> Texts:
    """The texts of a spec's kernel."""
    return next(texts for texts in ALL if (texts.spec, texts.kernel) == (name, kernel))


def kernel_after(name: str, kernel: str, after: str) -> Kernel | None:
    """The warp-specialized kernel of a spec after a pass; None if no text has it."""
    found = (t for t in ALL if (t.spec, t.kernel) == (name, kernel) and (after in t.files or not t.only))
    return next((texts.module(after).warp_specialized[0] for texts in found), None)


@cache
def _read(texts: Texts, name: str) -> Module:
    """A file as a module, with the portable kernels of `dce.ir`."""
    path = texts.files[name]
    module = parse_module(path.read_text(encoding="utf-8"), str(path))
    return module if name == FIRST else replace(module, kernels=_read(texts, FIRST).kernels)
