"""Measure schedules on a GPU: launch a kernel in the same way as its module does, under one schedule after another.

This runs in separate processes (attngen/tune/workers.py), which may hang or crash.
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
from attngen.bench.peers.ours import cache_forward
from attngen.bench.timing import Times, device_times
from attngen.conformance.cases import make_workload, torch_dtype
from attngen.conformance.harness import load_module
from attngen.conformance.oracle import relative_error
from attngen.errors import last_line
from attngen.heuristics import CACHED_KEYS, PACKED
from attngen.ir import Config, Kernel, Module
from attngen.ir.heads import SHARINGS
from attngen.ir.parser import parse_module
from attngen.ir.sizes import Sizes
from attngen.spec import Spec, load_spec
from attngen.targets.registry import SPECIALIZERS
from attngen.tiles.launches import constants, launch_options
from attngen.tune.tuner import Answer, Cell, folder_name

WRONG = 1e-2  # largest relative difference from the results of the cost model's choice
TOKENS = 16384  # queries of all sequences
HIDDEN = 2048  # elements of all query heads
GROUP = 4  # query heads per K/V head, if they share one
CACHED_TOKENS = 2**17  # keys of all sequences in the KV cache, for split-KV kernels
SPLIT_KERNEL = "decode"  # the kernel with split-KV
CACHE_KERNELS = ("decode", "prefill")  # kernels that are measured by calls with a KV cache
DROPOUT = {"dropout_p": 0.1, "seed": 0}
GRADIENTS = {"dq": "q", "dkdv": "kv", "dk": "k", "dv": "v"}  # the gradients to which a backward kernel contributes

Timer = Callable[[Mapping[str, Callable[[int], object]], int], Mapping[str, Times]]


@dataclass
class Problem:
    """The inputs of one call, its output and the output's gradient; `cached` for a call with a KV cache."""

    qkv: dict[str, torch.Tensor]
    given: dict[str, Any]  # keyword arguments
    cached: CacheProblem | None = None
    out: torch.Tensor | None = None
    grad: torch.Tensor | None = None
    right: dict[str, tuple[torch.Tensor, ...]] = field(default_factory=dict)  # results of the model's choice, by kernel


class Launch:
    """A stand-in for a kernel that forwards its launches and keeps the last one."""

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

    def call(self, iteration: int) -> object:
        """Launch it again. This is a `timing.Call`."""
        return self.again()

    @property
    def spilled_bytes(self) -> int:
        """Bytes of local memory per thread for spilled registers."""
        return 4 * self.compiled.n_spills if self.compiled is not None else 0  # the interpreter compiles nothing


class Compile:
    """A stand-in for a kernel that, if `active`, compiles it in the same way as a launch, but launches nothing."""

    def __init__(self, kernel: Any, active: bool) -> None:
        self.kernel, self.params, self.active = kernel, getattr(kernel, "params", ()), active

    def __getitem__(self, grid: object) -> Callable[..., object]:
        def launch(*args: object, **options: object) -> None:
            if self.active:
                self.kernel.warmup(*args, grid=grid, **options)

        return launch


class Bench:
    """Measures schedules of modules' kernels. `folder` has the modules' folders; `specs` are the specs' files by
    name."""

    def __init__(
        self, folder: Path, specs: Mapping[str, Path], device: str = "cuda", timer: Timer = device_times
    ) -> None:
        self.folder, self.device, self.timer = folder, device, timer
        self.specs: dict[str, Spec] = {name: load_spec(path) for name, path in specs.items()}
        self.modules: dict[str, ModuleType] = {}
        self.texts: dict[str, Module] = {}  # their IR
        self.problem: tuple[object, Problem] | None = None  # the last problem and its key

    def measure(self, cell: Cell, configs: Sequence[Config], rounds: int) -> list[Answer]:
        """Return the milliseconds of each round under each schedule, all interleaved; or a sentence why a schedule
        cannot be used."""
        module, problem = self._module(cell.spec), self._problem(cell)  # the portable module gives the right results
        if cell.kernel not in problem.right:
            problem.right[cell.kernel] = self._results(module, problem, cell.kernel)
        answers: list[Answer] = []
        launches: dict[str, Callable[[int], object]] = {}
        for i, config in enumerate(configs):
            mine = self._module(folder_name(cell.spec, config))
            file = _file(mine, config)
            launch = Launch(getattr(file, cell.kernel))
            with _scheduled(mine, self._kernel(cell), config), _replaced(mine, {cell.kernel: launch}, file):
                results = self._results(mine, problem, cell.kernel)
            worst = max(relative_error(x, right) for x, right in zip(results, problem.right[cell.kernel]))
            if launch.spilled_bytes:
                answers.append(f"spills {launch.spilled_bytes:,} bytes")
            elif not worst < WRONG:
                answers.append(f"its results differ by {worst:.1e} from those of the model's choice")
            else:
                answers.append(())
                launches[str(i)] = launch.call
        times = self.timer(launches, rounds) if launches else {}
        return [times[str(i)].rounds if str(i) in times else answer for i, answer in enumerate(answers)]

    def compile(self, cell: Cell, config: Config) -> None:
        """Compile a kernel under a schedule into Triton's cache, for the launch by `measure`."""
        module = self._module(folder_name(cell.spec, config))
        kernels, file = vars(module.kernels), _file(module, config)
        stand_ins = {name: Compile(kernels[name], False) for name in kernels["SCHEDULES"]}
        active = {cell.kernel: Compile(getattr(file, cell.kernel), True)}
        with _replaced(module, stand_ins), _replaced(module, active, file):
            problem = self._problem(cell, batch=None if cell.kernel == SPLIT_KERNEL else 1)
            with _scheduled(module, self._kernel(cell), config):
                self._results(module, problem, cell.kernel)

    def _kernel(self, cell: Cell) -> Kernel:
        """Return the kernel of a cell from the IR in its module's folder."""
        if cell.spec not in self.texts:
            path = self.folder / cell.spec / "schedule.ir"
            self.texts[cell.spec] = parse_module(path.read_text(encoding="utf-8"), str(path))
        return self.texts[cell.spec].kernel(cell.kernel)

    def _module(self, name: str) -> ModuleType:
        if name not in self.modules:
            self.modules[name] = load_module(self.folder / name)
        return self.modules[name]

    def _problem(self, cell: Cell, batch: int | None = None) -> Problem:
        at = (cell.spec, cell.rows, cell.dtype, cell.kernel in CACHE_KERNELS)
        if self.problem is None or self.problem[0] != at:
            self.problem = None  # frees its memory for the next one
            make = self._make_cached if cell.kernel in CACHE_KERNELS else self._make
            self.problem = at, make(cell, batch or max(1, TOKENS // cell.rows))
        return self.problem[1]

    def _make_cached(self, cell: Cell, batch: int) -> Problem:
        """Return a call with a KV cache: a prompt, or for split-KV few queries, `cell.rows` with all heads of a
        group."""
        spec = self.specs[cell.spec]
        heads = max(1, HIDDEN // spec.head_dim.v)
        shared = SHARINGS[spec.heads.sharing].kv_heads(heads, GROUP)
        heads, n_q, n_kv = min(heads, PACKED * shared), cell.rows, cell.rows
        if cell.kernel == SPLIT_KERNEL:
            n_q, n_kv, batch = max(1, cell.rows * shared // heads), CACHED_KEYS, max(1, CACHED_TOKENS // CACHED_KEYS)
        problem = CacheProblem(
            grids.Cell("", spec, cell.dtype, batch, heads, shared, n_q, n_kv), self.device, self.folder
        )
        x = problem.make_inputs(0)
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
        """Return the results to which a kernel contributes: the output, its tangent, or gradients. The forward of
        gradients runs once, under the cost model's schedules."""
        if problem.cached:
            with torch.no_grad():
                return (
                    cache_forward(module.attention.with_kvcache, problem.cached)(
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
        leaves = [problem.qkv[name] for name in GRADIENTS[kernel]]
        return torch.autograd.grad(problem.out, leaves, problem.grad, retain_graph=True)


def _file(module: ModuleType, config: Config) -> ModuleType:
    """Return the file of a module with the kernel of a config. RuntimeError if this Triton cannot run the file's
    warp-specialized kernels."""
    file: ModuleType | None = (
        module.runtime.warp_specialized(module.kernels, config.backend)
        if config.backend in SPECIALIZERS
        else module.kernels
    )
    if file is None:
        raise RuntimeError(f"Triton {triton.__version__} does not run kernels for {config.backend}")
    return file


@contextmanager
def _replaced(module: ModuleType, stand_ins: Mapping[str, object], file: ModuleType | None = None) -> Iterator[None]:
    """Replace kernels of a module by stand-ins, in its file of portable kernels or in `file`."""
    kernels = vars(file or module.kernels)
    kept = {name: kernels[name] for name in stand_ins}
    kernels.update(stand_ins)
    module.runtime.forget_launches()  # cached launches would bypass the stand-ins
    try:
        yield
    finally:
        kernels.update(kept)
        module.runtime.forget_launches()


@contextmanager
def _scheduled(module: ModuleType, kernel: Kernel, config: Config) -> Iterator[None]:
    """Give a kernel of the module one schedule for any device and any number of rows. A module with a warp-specialized
    kernel already has only one for it."""
    if config.backend in SPECIALIZERS:
        yield
        return
    table = module.kernels.SCHEDULES
    kept = table[kernel.name]
    portable = [key for key in kept if len(key) == 2]  # not the keys of warp-specialized variants
    names = kept[config.device, config.elem_bytes][0][1]
    known = {"num_stages": config.num_stages, **launch_options(kernel, config), **constants(kernel, config)}
    chosen = {name: known[name] for name in names}
    table[kernel.name] = dict.fromkeys(portable, ((None, chosen),))
    try:
        yield
    finally:
        table[kernel.name] = kept


def serve(requests: Connection, folder: Path, specs: Mapping[str, Path]) -> None:
    """Answer requests to measure until the connection ends. The first answer names the GPU and the versions."""
    bench = Bench(folder, specs)
    requests.send({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__})
    while True:
        try:
            cell, configs, rounds = requests.recv()
        except EOFError:
            return
        try:
            requests.send(bench.measure(cell, configs, rounds))
        except Exception as error:  # Triton, its tools and the driver raise many kinds
            requests.send([last_line(error)] * len(configs))
            if not _runs():
                return


def compile_some(folder: Path, specs: Mapping[str, Path], tasks: Sequence[tuple[Cell, Config]]) -> None:
    """Compile schedules before `serve` measures them. Errors are ignored, because `serve` reports them."""
    bench = Bench(folder, specs)
    for cell, config in tasks:
        with suppress(Exception):
            bench.compile(cell, config)


def _runs() -> bool:
    """True if the device still works. After an illegal access it does not, for this process."""
    with suppress(RuntimeError):
        torch.cuda.synchronize()
        return True
    return False
