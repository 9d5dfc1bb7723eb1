"""Kernel launches by the runtime, on fakes of Triton: which launches Triton specializes, and which it replays."""

from __future__ import annotations

import inspect
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.backends.nvidia import driver as nvidia
from triton.knobs import HookChain, runtime_knobs

from tests.helpers import built

pytestmark = pytest.mark.numerics

NAME = "full_mha"


class Compiled:
    """Fake of a compiled kernel, which can be launched without Triton's JIT."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.started: list[tuple[Any, ...]] = []

    def run(self, *args: Any) -> None:
        self.started.append(args)


class Launcher:
    """A launcher as this Triton makes it for a kernel with two descriptors. It records the arguments for the driver."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid, launch_pdl = False, True

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[tuple[Any, ...]] = []
        self.filled: list[int] = []  # addresses of the encoded descriptors
        utils = SimpleNamespace(fill_tma_descriptor=self.fill, fill_tma_descriptor_tiled=self.fill)
        active = SimpleNamespace(utils=utils)
        monkeypatch.setattr(
            nvidia, "triton", SimpleNamespace(runtime=SimpleNamespace(driver=SimpleNamespace(active=active)))
        )
        tile = "tensordesc<fp16[1, 1, 64, 64]>"
        signature = dict(enumerate((tile, "*fp16", tile, "fp32", *["i32"] * 9, "constexpr", "constexpr")))
        meta = {"swizzle": 3, "elem_size": 2, "elem_type": 6, "block_size": [1, 1, 64, 64], "fp4_padded": False}
        self.launch = nvidia.wrap_handle_tensordesc(lambda *args: self.started.append(args), signature, [meta, meta])
        self.packed = "kernel_signature" in inspect.getsource(nvidia.CudaLauncher)
        if self.packed:
            self.arg_annotations, self.kernel_signature = "annotations", "signature"

    def fill(self, address: int, *form: Any) -> tuple[Any, ...]:
        self.filled.append(address)
        return "encoded", address

    def took(self) -> list[list[Any]]:
        """Return the arguments of each launch, without those that all kernels have."""
        return [list(args[-1]) if self.packed else list(args[13:]) for args in self.started]


class Kernel:
    """Fake of a JIT kernel with two constexpr parameters."""

    params = [SimpleNamespace(name=name, is_constexpr=name.isupper()) for name in ("x", "n", "BLOCK_Q", "TMA")]

    def __init__(self, compiled: Compiled | None) -> None:
        self.compiled = compiled
        self.calls: list[Any] = []

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **config: Any) -> Compiled | None:
            self.calls.append((grid, args, config))
            return self.compiled

        return launch


CONFIG = {"BLOCK_Q": 64, "TMA": False, "num_warps": 4}
FEW = {"BLOCK_Q": 16, "TMA": False, "num_warps": 1}


class Stage:
    """A kernel of the runtime with a fake Triton: stream 7 of device 1, a config for up to 100 rows and one for
    more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, compiled: Compiled | None, **options: Any) -> None:
        self.runtime = built(NAME).runtime
        active = SimpleNamespace(get_current_stream={1: 7}.__getitem__)
        self.knobs = runtime_knobs()
        fakes = {
            "runtime": SimpleNamespace(driver=SimpleNamespace(active=active)),
            "knobs": SimpleNamespace(runtime=self.knobs),
        }
        monkeypatch.setattr(
            self.runtime, "triton", SimpleNamespace(**fakes, next_power_of_2=triton.next_power_of_2, JITFunction=Kernel)
        )
        monkeypatch.setattr(self.runtime, "LAUNCHES", {})
        monkeypatch.setattr(self.runtime, "LAST", {})
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        self.kernel = Kernel(compiled)
        table = {"small": {("any", 2): ((100, FEW), (None, CONFIG))}}
        kernels = ModuleType("kernels")
        vars(kernels).update(small=self.kernel, SCHEDULES=table, INTERPRETED_AS="any", INTERPRETED_BYTES=2)
        self.launch = self.runtime.Kernel(kernels, "small", "BLOCK_Q", **options)

    def __call__(
        self, rows: int, tensors: tuple[Any, ...], numbers: tuple[Any, ...] = (), strides: tuple[int, ...] = (64, 16)
    ) -> None:
        self.launch(tensors[0], rows, 2, tensors, numbers, strides)


def test_triton_looks_at_the_first_launch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later launches get addresses, and the grid, numbers and strides of their call."""
    compiled, tensors = Compiled(), [torch.zeros(64, dtype=torch.float16) for _ in range(3)]
    stage = Stage(monkeypatch, compiled)
    for at, x in enumerate(tensors):
        stage(200 + 64 * at, (x, tensors[0]), (3 + at,), (64 + 16 * at, 16))
    assert stage.kernel.calls == [((8, 1, 1), (tensors[0], tensors[0], 3, 64, 16), CONFIG)]
    parts = (7, "function", "metadata", None, None, None)
    assert compiled.started == [
        (2 * (4 + at), 1, 1, *parts, tensors[at].data_ptr(), tensors[0].data_ptr(), 3 + at, 64 + 16 * at, 16, 64, False)
        for at in (1, 2)
    ]


@pytest.mark.parametrize(
    ("first", "second", "times"),
    [
        ({}, {"rows": 2000}, 1),  # only another size
        ({}, {"rows": 50}, 2),  # another config
        ({}, {"numbers": (0.5, 32)}, 1),  # another number of the same kind
        ({}, {"numbers": (0.5, 17)}, 2),  # not a multiple of 16
        ({}, {"numbers": (0.5, 1)}, 2),
        ({}, {"numbers": (0.25, 16)}, 1),  # not specialized by Triton
        ({}, {"strides": (1 << 20, 32)}, 1),
        ({}, {"strides": (64, 8)}, 2),
        ({}, {"strides": (64, 1)}, 2),
        ({"strides": (64, 1)}, {"strides": (64, 8)}, 2),
        ({}, {"strides": (1 << 31, 16)}, 2),  # needs 64 bits
        ({}, {"shift": 1}, 2),  # a tensor that is not aligned to 16 bytes
        ({"shift": 1}, {"shift": 3}, 1),
        ({}, {"dtype": torch.bfloat16}, 2),
    ],
)  # fmt: skip
def test_calls_share_what_is_compiled_for_their_kind(
    first: dict[str, Any], second: dict[str, Any], times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(monkeypatch, Compiled(), specialised=(1,))
    for change in (first, second):
        given = {"rows": 200, "numbers": (0.5, 16), "strides": (64, 16), "shift": 0, "dtype": torch.float16} | change
        x = torch.zeros(128, dtype=given.pop("dtype"))[given.pop("shift") :]
        stage(tensors=(x,), **given)
    assert len(stage.kernel.calls) == times


def test_a_call_like_the_last_one_is_held_against_its_alignment_and_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strides and numbers equal those of the call before, but the tensor has another alignment, or a flag another
    value."""
    compiled, x = Compiled(), torch.zeros(128, dtype=torch.float16)
    stage = Stage(monkeypatch, compiled, specialised=(1,), flags=("TMA",))
    for tensor, flag in ((x, False), (x[1:], False), (x, False), (x, True), (x[1:], False), (x, False)):
        stage.launch(tensor, 200, 2, (tensor,), (0.5, 16), (64, 16), (flag,))
    assert [(args[0].data_ptr() % 16, config["TMA"]) for _, args, config in stage.kernel.calls] == [
        (0, False),
        (2, False),
        (0, True),
    ]
    assert [(args[9] % 16, args[-1]) for args in compiled.started] == [(0, False), (2, False), (0, False)]


def test_ten_thousand_shapes_take_no_more_memory_than_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a decode loop the number of keys and the strides of their cache grow with each call."""
    stage, x = Stage(monkeypatch, Compiled()), torch.zeros(64, dtype=torch.float16)
    for n in range(1, 10_001):
        stage(n, (x,), (0.5, n), (n * 64, 64))
    assert len(stage.runtime.LAUNCHES) <= 4 and len(stage.runtime.LAST) == 1 and len(stage.kernel.calls) <= 8


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("set_by", ["chain", "assignment"])
def test_a_profiler_sees_every_launch(monkeypatch: pytest.MonkeyPatch, hook: str, set_by: str) -> None:
    compiled, x = Compiled(), torch.zeros(64, dtype=torch.float16)
    stage = Stage(monkeypatch, compiled)
    stage(200, (x,))
    chain = HookChain()
    chain.add(print)
    monkeypatch.setattr(stage.knobs, hook, chain if set_by == "chain" else print)
    stage(200, (x,))
    assert len(stage.kernel.calls) == 2 and not compiled.started


def test_the_interpreter_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stage, x = Stage(monkeypatch, None), torch.zeros(64, dtype=torch.float16)
    for _ in range(2):
        stage(200, (x,), (3,))
    assert [args for _, args, _ in stage.kernel.calls] == [(x, 3, 64, 16)] * 2


def described(x: torch.Tensor) -> list[Any]:
    """Return a kernel's arguments for an encoded descriptor."""
    return [("encoded", x.data_ptr()), *x.shape, *x.stride()]


class DescribedCalls:
    """Calls of a kernel that takes its first and its third tensor by descriptor."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launcher = Launcher(monkeypatch)
        compiled = SimpleNamespace(function="function", packed_metadata="metadata", run=self.launcher)
        monkeypatch.setitem(CONFIG, "TMA", True)
        self.stage = Stage(monkeypatch, compiled, described=((0, "BLOCK_Q"), (2, "BLOCK_Q")))

    def start(self, *tensors: torch.Tensor, scale: float = 0.5) -> tuple[int, ...]:
        """Launch the kernel and return its strides. Only the first call goes through Triton, and compiles."""
        strides = tuple(s for x in tensors for s in x.stride()[:3])
        self.stage(200, tensors, (scale,), strides)
        return strides

    def __call__(self, *tensors: torch.Tensor, scale: float = 0.5) -> list[Any]:
        """Return the arguments for the two described tensors, after a check of the others."""
        strides = self.start(*tensors, scale=scale)
        assert self.launcher.started[-1][:7] == (8, 1, 1, 7, "function", False, True)
        last = self.launcher.took()[-1]
        assert last[9:10] + last[19:] == [tensors[1].data_ptr(), scale, *strides, 64, True]
        return last[:9] + last[10:19]


def test_descriptors_are_encoded_once_for_each_place_and_form(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = DescribedCalls(monkeypatch)
    q, k, v = (torch.zeros(2, 3, 200, 64, dtype=torch.float16) for _ in range(3))
    short = [x[:, :, :150] for x in (q, k, v)]  # the same addresses and strides
    calls.start(q, k, v)
    ((_, args, _),) = calls.stage.kernel.calls
    assert args[0].base is q and args[1] is k and args[2].base is v
    assert calls.launcher.filled == [
        q.data_ptr(),
        v.data_ptr(),
    ]  # once, to find out whether this Triton wraps its launcher in this way
    for given, scale, filled in (
        ((q, k, v), 0.5, [q, v]),
        ((q, k, v), 0.25, []),
        ((q, k.clone(), v), 0.5, []),
        ((q, k, k), 0.5, [q, k]),
        (short, 0.5, [q, v]),
        ((q, k, v), 0.5, []),
        ((q.transpose(1, 2), k, v.transpose(1, 2)), 0.5, [q, v]),
        (short, 0.5, []),
    ):
        calls.launcher.filled.clear()
        assert calls(*given, scale=scale) == [*described(given[0]), *described(given[2])]
        assert calls.launcher.filled == [x.data_ptr() for x in filled]
    assert len(calls.stage.kernel.calls) == 1


def test_what_is_copied_for_a_descriptor_is_copied_in_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor is copied if its rows are not aligned to 16 bytes; one without rows is replaced by another."""
    calls = DescribedCalls(monkeypatch)
    q, narrow = (
        torch.zeros(2, 3, 200, 64, dtype=torch.float16),
        torch.ones(2, 3, 200, 68, dtype=torch.float16)[..., :64],
    )
    calls.start(q, q, narrow)
    for _ in range(2):
        (_, address), *form = calls(q, q, narrow)[9:]
        assert address != narrow.data_ptr() and form == [*narrow.shape, *narrow.contiguous().stride()]
    calls.start(q, q, q)
    assert calls(q, q, q[:, :, :0])[10:14] == [1, 1, 1, 64]
    assert not any(known(calls))


@pytest.mark.share(4)
def test_encoded_descriptors_take_no_more_memory_than_a_thousand_do(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, x = DescribedCalls(monkeypatch), torch.zeros(1, 1, 3000, 64, dtype=torch.float16)
    calls.start(x, x, x)
    for n in range(1, 3000):
        calls(x[:, :, :n], x, x)
    assert [0 < len(found) <= 1024 for found in known(calls)] == [True]


def known(calls: DescribedCalls) -> list[dict[Any, Any]]:
    """Return the cached descriptors of each compiled kernel."""
    return [launches[1].described.known for launches in calls.stage.runtime.LAUNCHES.values()]


def test_a_launcher_that_is_wrapped_in_another_way_gets_descriptors_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """This one returns nothing, unlike Triton's wrapper."""
    calls, x = DescribedCalls(monkeypatch), torch.zeros(2, 3, 200, 64, dtype=torch.float16)
    started: list[tuple[Any, ...]] = []
    launcher = started.append

    def wrapper(*args: Any) -> None:
        launcher(args)

    calls.launcher.launch = wrapper
    for _ in range(3):
        calls.start(x, x, x)
    given = [args[-1] if calls.launcher.packed else args[13:] for args in started]
    assert [(args[0].base is x, args[1], args[2].base is x) for args in given] == [(True, x.data_ptr(), True)] * 2
    assert not any(known(calls))


def test_a_launcher_that_wraps_no_other_gets_descriptors_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, x = Compiled(), torch.zeros(2, 3, 200, 64, dtype=torch.float16)
    monkeypatch.setitem(CONFIG, "TMA", True)
    stage = Stage(monkeypatch, compiled, described=((0, "BLOCK_Q"),))
    for _ in range(3):
        stage(200, (x, x))
    assert [(args[9].base is x, args[10]) for args in compiled.started] == [(True, x.data_ptr())] * 2


def test_a_version_without_a_kernels_parts_launches_the_public_way(monkeypatch: pytest.MonkeyPatch) -> None:
    stage, x = Stage(monkeypatch, SimpleNamespace(run=None)), torch.zeros(64, dtype=torch.float16)
    for _ in range(3):
        stage(200, (x,))
    assert len(stage.kernel.calls) == 3
