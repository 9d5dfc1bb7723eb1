"""Schedules measured on a GPU: a kernel is launched as its module launches it, under one schedule after another.

This runs in processes of its own (attngen/tune/workers.py), which may hang or crash.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
from torch.autograd import forward_ad

from attngen.bench.cases import grids
from attngen.bench.cases.cache import CacheProblem
from attngen.bench.cases.problem import Inputs
from attngen.bench.peers.ours import over_cache
from attngen.bench.timing import Times, device_times
from attngen.conformance.harness import load_module, make_workload, torch_dtype
from attngen.conformance.oracle import relative_error
from attngen.errors import last_line
from attngen.heuristics import PACKED, SPLIT_KEYS_OF
from attngen.ir.graph import Config, Kernel, Module
from attngen.ir.heads import SHARINGS
from attngen.ir.sizes import Sizes
from attngen.ir.text import parse_module
from attngen.spec import Spec, load_spec
from attngen.targets.registry import SPECIALIZERS
from attngen.tiles.launches import constants, launch_options
from attngen.tune.tuner import Answer, Cell, home

WRONG = 1e-2  # relative difference from the results of the model's choice, at most
TOKENS, HIDDEN, GROUP = (
    16384,
    2048,
    4,
)  # of all sequences; of all query heads; query heads of a K/V head, where several share one
SPLIT_TOKENS = 2**17  # of all sequences in the cache, where its keys are dealt among programs
DEALING, SERVING = (
    "decode",
    ("decode", "prefill"),
)  # the kernel that deals keys, and all that are measured by calls over a cache
DROPOUT = {"dropout_p": 0.1, "seed": 0}
GRADIENTS = {"dq": "q", "dkdv": "kv", "dk": "k", "dv": "v"}  # of what a backward kernel takes part in

Timer = Callable[[Mapping[str, Callable[[int], object]], int], Mapping[str, Times]]


@dataclass
class Problem:
    """The inputs of one call, its output, and a gradient of that; of a call over a cache, `served`."""

    qkv: dict[str, torch.Tensor]
    given: dict[str, Any]  # keyword arguments
    served: CacheProblem | None = None
    out: torch.Tensor | None = None
    grad: torch.Tensor | None = None
    right: dict[str, tuple[torch.Tensor, ...]] = field(
        default_factory=dict
    )  # results under the model's schedules, by kernel


class Launch:
    """Stands in for a kernel: passes its launches on, and keeps the last one."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.params = kernel, getattr(kernel, "params", ())
        self.compiled: Any = None
        self.again: Callable[[], object] = lambda: None

    def __getitem__(self, grid: object) -> Callable[..., object]:
        def launch(*args: object, **options: object) -> object:
            self.again = partial(self.kernel[grid], *args, **options)
            self.compiled = self.again()
            return self.compiled

        return launch

    def turn(self, turn: int) -> object:
        """Launch it again, as `timing.Call`."""
        return self.again()

    @property
    def spilled_bytes(self) -> int:
        """Of each thread, in local memory."""
        return (
            4 * self.compiled.n_spills if self.compiled is not None else 0
        )  # nothing is compiled where it is interpreted


class Compile:
    """Stands in for a kernel: compiles it as a launch would, but launches nothing; or does nothing."""

    def __init__(self, kernel: Any, wanted: bool) -> None:
        self.kernel, self.params, self.wanted = kernel, getattr(kernel, "params", ()), wanted

    def __getitem__(self, grid: object) -> Callable[..., object]:
        def launch(*args: object, **options: object) -> None:
            if self.wanted:
                self.kernel.warmup(*args, grid=grid, **options)

        return launch


class Bench:
    """Measures schedules of the kernels of modules: their folders, and the files of their specs, by name."""

    def __init__(
        self, folder: Path, specs: Mapping[str, Path], device: str = "cuda", timer: Timer = device_times
    ) -> None:
        self.folder, self.device, self.timer = folder, device, timer
        self.specs: dict[str, Spec] = {name: load_spec(path) for name, path in specs.items()}
        self.modules: dict[str, ModuleType] = {}
        self.texts: dict[str, Module] = {}  # of the same
        self.problem: tuple[object, Problem] | None = None  # the last one

    def measure(self, cell: Cell, rows: Sequence[Config], rounds: int) -> list[Answer]:
        """Milliseconds of each round, under each schedule, all interleaved; or a sentence on why one cannot be
        taken."""
        module, problem = self._module(cell.spec), self._problem(cell)  # whose results are right: it is portable
        if cell.kernel not in problem.right:
            problem.right[cell.kernel] = self._results(module, problem, cell.kernel)
        answers: list[Answer] = []
        launches: dict[str, Callable[[int], object]] = {}
        for i, row in enumerate(rows):
            mine = self._module(home(cell.spec, row))
            file = _file(mine, row)
            launch = Launch(getattr(file, cell.kernel))
            with _scheduled(mine, self._kernel(cell), row), _standing_in(mine, {cell.kernel: launch}, file):
                results = self._results(mine, problem, cell.kernel)
            worst = max(relative_error(x, right) for x, right in zip(results, problem.right[cell.kernel]))
            if launch.spilled_bytes:
                answers.append(f"spills {launch.spilled_bytes:,} bytes")
            elif not worst < WRONG:
                answers.append(f"its results are {worst:.1e} away from those of the model's choice")
            else:
                answers.append(())
                launches[str(i)] = launch.turn
        times = self.timer(launches, rounds) if launches else {}
        return [times[str(i)].rounds if str(i) in times else answer for i, answer in enumerate(answers)]

    def compile(self, cell: Cell, config: Config) -> None:
        """Compile a kernel under a schedule into Triton's cache, as `measure` will launch it."""
        module = self._module(home(cell.spec, config))
        kernels, file = vars(module.kernels), _file(module, config)
        stand_ins = {name: Compile(kernels[name], False) for name in kernels["SCHEDULES"]}
        wanted = {cell.kernel: Compile(getattr(file, cell.kernel), True)}
        with _standing_in(module, stand_ins), _standing_in(module, wanted, file):
            problem = self._problem(cell, batch=None if cell.kernel == DEALING else 1)
            with _scheduled(module, self._kernel(cell), config):
                self._results(module, problem, cell.kernel)

    def _kernel(self, cell: Cell) -> Kernel:
        """The kernel of a cell as the folder of its module has it."""
        if cell.spec not in self.texts:
            path = self.folder / cell.spec / "schedule.ir"
            self.texts[cell.spec] = parse_module(path.read_text(encoding="utf-8"), str(path))
        return self.texts[cell.spec].kernel(cell.kernel)

    def _module(self, name: str) -> ModuleType:
        if name not in self.modules:
            self.modules[name] = load_module(self.folder / name)
        return self.modules[name]

    def _problem(self, cell: Cell, batch: int | None = None) -> Problem:
        at = (cell.spec, cell.rows, cell.dtype, cell.kernel in SERVING)
        if self.problem is None or self.problem[0] != at:
            self.problem = None  # its memory is free for the next one
            make = self._serve if cell.kernel in SERVING else self._make
            self.problem = at, make(cell, batch or max(1, TOKENS // cell.rows))
        return self.problem[1]

    def _serve(self, cell: Cell, batch: int) -> Problem:
        """A call over a cache: of a prompt, or, where keys are dealt, of so few queries that they are `rows` with
        all heads of a group."""
        spec = self.specs[cell.spec]
        heads = max(1, HIDDEN // spec.head_dim.v)
        shared = SHARINGS[spec.heads.sharing].kv_heads(heads, GROUP)
        heads, n_q, n_kv = min(heads, PACKED * shared), cell.rows, cell.rows
        if cell.kernel == DEALING:
            n_q, n_kv, batch = max(1, cell.rows * shared // heads), SPLIT_KEYS_OF, max(1, SPLIT_TOKENS // SPLIT_KEYS_OF)
        problem = CacheProblem(
            grids.Cell("", spec, cell.dtype, batch, heads, shared, n_q, n_kv), self.device, self.folder
        )
        x = problem.draw(0)
        return Problem({"q": x.q, "k": x.k, "v": x.v}, problem.given, problem)

    def _make(self, cell: Cell, batch: int) -> Problem:
        spec, dtype = self.specs[cell.spec], torch_dtype(cell.dtype)
        heads = max(1, HIDDEN // spec.head_dim.v)
        shared = SHARINGS[spec.heads.sharing].kv_heads(heads, GROUP)
        shapes = {"q": (heads, spec.head_dim.qk), "k": (shared, spec.head_dim.qk), "v": (shared, spec.head_dim.v)}
        qkv = {
            name: torch.randn(batch, h, cell.rows, d, device=self.device).to(dtype) for name, (h, d) in shapes.items()
        }
        sizes = Sizes(batch, heads, shared, cell.rows, cell.rows)
        given = make_workload(spec, sizes, dtype, self.device)
        return Problem({name: x.requires_grad_() for name, x in qkv.items()}, given | (DROPOUT if spec.dropout else {}))

    def _results(self, module: ModuleType, problem: Problem, kernel: str) -> tuple[torch.Tensor, ...]:
        """What a kernel takes part in: the output, its tangent, or gradients, whose forward runs once, under the
        model's schedules."""
        if problem.served:
            with torch.no_grad():
                return (
                    over_cache(module.attention.with_kvcache, problem.served)(
                        Inputs(**problem.qkv, learned=(), grad=problem.qkv["q"])
                    ),
                )
        if kernel == "fwd":
            with torch.no_grad():
                return (module.attention(**problem.qkv, **problem.given),)
        if kernel == "jvp":
            with forward_ad.dual_level():
                duals = {name: forward_ad.make_dual(x.detach(), x.detach().flip(2)) for name, x in problem.qkv.items()}
                return (forward_ad.unpack_dual(module.attention(**duals, **problem.given)).tangent,)
        if problem.out is None:
            problem.out = module.attention(**problem.qkv, **problem.given)
            problem.grad = torch.randn_like(problem.out)
        wanted = [problem.qkv[name] for name in GRADIENTS[kernel]]
        return torch.autograd.grad(problem.out, wanted, problem.grad, retain_graph=True)


def _file(module: ModuleType, config: Config) -> ModuleType:
    """The file of a module that has the kernel of a row. RuntimeError where it has divided kernels, which this
    Triton cannot run."""
    file: ModuleType | None = (
        module.runtime.divided(module.kernels, config.backend) if config.backend in SPECIALIZERS else module.kernels
    )
    if file is None:
        raise RuntimeError(f"Triton {triton.__version__} does not run kernels for {config.backend}")
    return file


@contextmanager
def _standing_in(module: ModuleType, stand_ins: Mapping[str, object], file: ModuleType | None = None) -> Iterator[None]:
    """A module with others in place of kernels of a file: of its own file of kernels, or another one."""
    kernels = vars(file or module.kernels)
    kept = {name: kernels[name] for name in stand_ins}
    kernels.update(stand_ins)
    module.runtime.forget_launches()  # so that kernels are launched by those that stand in for them
    try:
        yield
    finally:
        kernels.update(kept)
        module.runtime.forget_launches()


@contextmanager
def _scheduled(module: ModuleType, kernel: Kernel, config: Config) -> Iterator[None]:
    """The module with one schedule for a kernel, whatever the device and the number of rows. That of a divided
    kernel has no other."""
    if config.backend in SPECIALIZERS:
        yield
        return
    table = module.kernels.SCHEDULES
    kept = table[kernel.name]
    portable = [key for key in kept if len(key) == 2]  # not those of kernels that stand in for it
    names = kept[config.device, config.elem_bytes][0][1]
    known = {"num_stages": config.num_stages, **launch_options(kernel, config), **constants(kernel, config)}
    chosen = {name: known[name] for name in names}
    table[kernel.name] = dict.fromkeys(portable, ((None, chosen),))
    try:
        yield
    finally:
        table[kernel.name] = kept


def serve(requests: Connection, folder: Path, specs: Mapping[str, Path]) -> None:
    """Answer requests to measure, until there are none. The first answer says what measures."""
    bench = Bench(folder, specs)
    requests.send({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__})
    while True:
        try:
            cell, rows, rounds = requests.recv()
        except EOFError:
            return
        try:
            requests.send(bench.measure(cell, rows, rounds))
        except Exception as error:  # of Triton's, its tools' and the driver's many kinds
            requests.send([last_line(error)] * len(rows))
            if not _runs():
                return


def compile_some(folder: Path, specs: Mapping[str, Path], tasks: Sequence[tuple[Cell, Config]]) -> None:
    """Compile ahead what `serve` will measure, which says what does not compile."""
    bench = Bench(folder, specs)
    for cell, row in tasks:
        with suppress(Exception):
            bench.compile(cell, row)


def _runs() -> bool:
    """Whether the device still does: after an illegal access it does not, for this process."""
    with suppress(RuntimeError):
        torch.cuda.synchronize()
        return True
    return False
