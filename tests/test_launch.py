"""How wrappers launch kernels: what Triton looks at, what is remembered, and which calls go through torch's
dispatcher."""

from __future__ import annotations

import inspect
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.nvidia import driver as nvidia
from triton.knobs import HookChain, runtime_knobs

from attngen.codegen.host import variable
from attngen.ir.host import If
from attngen.ir.names import OF_OUTPUTS, WRAPPER
from tests.helpers import KINDS, built, spec, target

NAME = "full_mha"


class Compiled:
    """What Triton gives for a launch: its parts, which can be started as they are."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.started: list[tuple[Any, ...]] = []

    def run(self, *args: Any) -> None:
        self.started.append(args)


class Launcher:
    """A launcher as this Triton makes it for a kernel that takes two descriptors; what it would give the driver is
    noted."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid, launch_pdl = False, True

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[tuple[Any, ...]] = []
        self.filled: list[int] = []  # addresses of descriptors that were encoded
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
        """The arguments of each launch, after those of all kernels."""
        return [list(args[-1]) if self.packed else list(args[13:]) for args in self.started]


class Kernel:
    """Stands in for a kernel with two flags."""

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
    """A kernel of the runtime on fakes: stream 7 of device 1, a schedule for up to 100 rows and one for more."""

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
    """It gets addresses then, and a grid, numbers and strides of each call."""
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
        ({}, {"rows": 2000}, 1),  # another size alone
        ({}, {"rows": 50}, 2),  # another row of the schedule
        ({}, {"numbers": (0.5, 32)}, 1),  # another number of the same kind
        ({}, {"numbers": (0.5, 17)}, 2),  # one that 16 does not divide
        ({}, {"numbers": (0.5, 1)}, 2),
        ({}, {"numbers": (0.25, 16)}, 1),  # one that Triton does not look at
        ({}, {"strides": (1 << 20, 32)}, 1),
        ({}, {"strides": (64, 8)}, 2),
        ({}, {"strides": (64, 1)}, 2),
        ({"strides": (64, 1)}, {"strides": (64, 8)}, 2),
        ({}, {"strides": (1 << 31, 16)}, 2),  # one that takes 64 bits
        ({}, {"shift": 1}, 2),  # a tensor that starts at no multiple of 16 bytes
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
    """Strides and numbers are those of the call before; the tensor starts elsewhere, or a flag is another."""
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
    """As in a loop that decodes: keys and the strides of their cache grow by one row a call."""
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
    """An encoded descriptor among a kernel's arguments."""
    return [("encoded", x.data_ptr()), *x.shape, *x.stride()]


class DescribedCalls:
    """Calls of a kernel that gets its first and its third tensor by descriptor."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launcher = Launcher(monkeypatch)
        compiled = SimpleNamespace(function="function", packed_metadata="metadata", run=self.launcher)
        monkeypatch.setitem(CONFIG, "TMA", True)
        self.stage = Stage(monkeypatch, compiled, described=((0, "BLOCK_Q"), (2, "BLOCK_Q")))

    def start(self, *tensors: torch.Tensor, scale: float = 0.5) -> tuple[int, ...]:
        """Launch it; the strides that it gets. Triton looks at the first call alone, which compiles."""
        strides = tuple(s for x in tensors for s in x.stride()[:3])
        self.stage(200, tensors, (scale,), strides)
        return strides

    def __call__(self, *tensors: torch.Tensor, scale: float = 0.5) -> list[Any]:
        """The arguments that stand for the two tensors; the others are as they should be."""
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
    assert calls.launcher.filled == [q.data_ptr(), v.data_ptr()]  # once, to see that this Triton wraps its launcher so
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
    """Rows that start at no multiple of 16 bytes; and a tensor without rows, for which another stands in."""
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


def test_encoded_descriptors_take_no_more_memory_than_a_thousand_do(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, x = DescribedCalls(monkeypatch), torch.zeros(1, 1, 3000, 64, dtype=torch.float16)
    calls.start(x, x, x)
    for n in range(1, 3000):
        calls(x[:, :, :n], x, x)
    assert [0 < len(found) <= 1024 for found in known(calls)] == [True]


def known(calls: DescribedCalls) -> list[dict[Any, Any]]:
    """What is remembered of encoded descriptors, of each compiled kernel."""
    return [launches[1].described.known for launches in calls.stage.runtime.LAUNCHES.values()]


def test_a_launcher_that_is_wrapped_in_another_way_gets_descriptors_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that gives back nothing, as the copy of the wrapper would."""
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


def inputs(device: str) -> list[torch.Tensor]:
    return [torch.randn(1, 2, 20, 64, device=device, dtype=torch.float16) for _ in range(3)]


class Watch(TorchDispatchMode):
    """Notes the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_modes_see_the_operator(device: str) -> None:
    module = built(NAME)
    with Watch() as watch:
        module.attention(*inputs(device))
    assert any("_forward" in name and "attngen" in name for name in watch.names)


def test_only_tensors_of_torchs_own_are_plain(device: str) -> None:
    plain, (q, k, v) = built(NAME).runtime.is_plain, inputs(device)
    assert plain(q, k, v) and plain(torch.nn.Parameter(q), k, v)
    mine = k.as_subclass(type("Mine", (torch.Tensor,), {}))
    assert not any(plain(*three) for three in ((mine, k, v), (q, mine, v), (q, k, mine)))
    with Watch():
        assert not plain(q, k, v)


def test_a_guard_knows_the_kind_of_the_last_calls_tensors_and_no_other(device: str) -> None:
    module, (q, k, v) = built(NAME), inputs(device)
    rules = module.runtime.Rules("mha", 64, 64, (torch.float16, torch.float32), module.INTERPRETED)
    assert rules.admit(q, k, v)[3] and len(rules.guards) == 1
    knows, _ = rules.last
    assert knows(v, q, k) and knows(*(x[:, :1, :7].transpose(1, 2) for x in (q, k, v)))
    leaf, mine = k.clone().requires_grad_(), k.as_subclass(type("Mine", (torch.Tensor,), {}))
    others = (
        k.float(),
        mine,
        k.to_sparse(),
        k.to("meta"),
        torch._neg_view(k),
        k[0],
        torch.nn.Parameter(k),
        leaf,
        [k],
        None,
    )
    assert not any(knows(q, other, v) for other in others)
    with Watch():
        assert not knows(q, k, v)
    with torch.autocast(device, torch.float16):
        assert not knows(q, k, v)
    for _ in range(2):  # calls of two kinds in turn: each has its guard
        assert rules.admit(q, leaf, v)[3] and rules.last[0] is not knows
        assert rules.admit(q, k, v)[3] and rules.last[0] is knows
    assert len(rules.guards) == 2
    with pytest.raises(TypeError, match="k is torch.float32 and q torch.float16"):
        rules.admit(q, k.float(), v)
    for name, odd in (
        ("q", None),
        ("k", torch.nested.nested_tensor([k[0]])),
    ):  # torch ends the process if a guard is asked about these
        with pytest.raises(TypeError, match=f"{name} is a .*; expected a dense tensor"):
            rules.admit(**{"q": q, "k": k, "v": v, name: odd})


def test_no_call_spoils_the_guards_of_others(device: str) -> None:
    """A guard of a Parameter gives way to one of tensors, and one that is in use to none, where a call has one
    tensor twice."""
    module, (q, k, v) = built(NAME), inputs(device)
    rules = module.runtime.Rules("mha", 64, 64, (torch.float16,), module.INTERPRETED)
    with pytest.raises(ValueError, match="q has shape"):
        rules.admit(q[0], k[0], v[0])
    assert rules.admit(torch.nn.Parameter(q, requires_grad=False), k, v)[3] and not rules.last[0](q, k, v)
    assert rules.admit(q, k, v)[3] and rules.last[0](q, k, v)
    assert rules.admit(q, k, k)[3] and rules.last[0](q, k, v)
    assert len(rules.guards) == 1


def test_shapes_strides_and_alignment_are_told_apart(device: str) -> None:
    """Calls of several kinds one after another give what each gives alone."""
    module = built(NAME)
    storage = torch.randn(3, 2 * 20 * 64 + 1, device=device, dtype=torch.float16)
    shifted = [x[1:].view(1, 2, 20, 64) for x in storage]  # starts at no multiple of 16 bytes
    aligned = [x.clone() for x in shifted]
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in aligned]
    expected = module.attention(*aligned)
    for given in (shifted, turned, aligned, [shifted[0], aligned[1], turned[2]]):
        assert torch.equal(module.attention(*given), expected)


@pytest.mark.parametrize("name", sorted({*KINDS, "causal_padding_gqa"}))
def test_inputs_cannot_have_the_wrappers_own_names(name: str) -> None:
    module, made = built(name), spec(name)
    given = {i.name for i in made.inputs()} | {n for d in made.derived() for n in d.names}
    names = ("attention", "make_plan", "_forward", "_backward", "_count")
    functions = [inspect.unwrap(getattr(module, name)) for name in names if hasattr(module, name)]
    values = {
        ref
        for host in target(name).hosts
        for op in host.ops()
        for ref in (op.name, *(f"{op.name}.{f}" for f in op.results()))
    }
    values |= {
        f"{op.name}.{f}"
        for host in target(name).hosts
        for op in host.ops()
        if isinstance(op, If)
        for f in host.fields(op)
    }
    found = {n for f in functions for n in f.__code__.co_varnames if n.islower() and not n.endswith("_strides")} - given
    found -= OF_OUTPUTS if len(made.outputs) > 1 else set()  # which only such specs refuse
    assert found <= WRAPPER | {
        variable(ref) for ref in values
    }  # an input of such a value's name breaks the rule `host-arguments`


def test_a_tracer_sees_the_operator(device: str) -> None:
    module = built(NAME)
    traced = torch.jit.trace(lambda q, k, v: module.attention(q, k, v), inputs(device), check_trace=False)
    assert "_forward" in str(traced.graph)


def test_a_call_of_the_operator_vouches_for_no_other(device: str) -> None:
    """What the operator runs unchecked is refused by the function all the same."""
    module, (q, k, v) = built(NAME), inputs(device)
    module.FORWARD(q[:, :1], k, v, 0.1)
    with pytest.raises(ValueError, match="q has 1 heads and k 2"):
        module.attention(q[:, :1], k, v)


def test_gradients_are_the_same_whether_or_not_the_lse_is_asked_for(device: str) -> None:
    module, leaves = built(NAME), [x.requires_grad_() for x in inputs(device)]
    alone, (out, lse) = module.attention(*leaves), module.attention(*leaves, return_lse=True)
    assert alone.equal(out) and lse.requires_grad
    found = [torch.autograd.grad(x.float().square().sum(), leaves, retain_graph=True) for x in (alone, out)]
    assert all(a.equal(b) for a, b in zip(*found))
    assert all(x.isfinite().all() for x in torch.autograd.grad(lse.sum(), leaves[:2]))


class Backward:
    """The backward of a module that has been called with no tensors yet, and how often its host program has been
    run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str = NAME) -> None:
        self.module, self.runs = built(name), 0
        self.runtime, launch = self.module.runtime, self.module.runtime.Kernel.__call__
        monkeypatch.setattr(self.runtime, "STEPS", {})

        def launched(kernel: Any, *args: Any) -> None:
            self.runs += kernel.name == "dkdv"
            launch(kernel, *args)

        monkeypatch.setattr(self.runtime.Kernel, "__call__", launched)

    def __call__(self, *leaves: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
        """The gradients by distinct leaves, of an output that is not weighted evenly."""
        out = self.module.attention(*leaves, **options)
        return torch.autograd.grad(out.square().sum(), list(dict.fromkeys(leaves)))


def alike(found: Any, expected: Any) -> bool:
    return all(a.equal(b) and a.stride() == b.stride() for a, b in zip(found, expected, strict=True))


def test_a_backward_of_a_known_form_is_done_again_from_memory(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tensors that are elsewhere; other strides, lengths and scales are other forms."""
    backward, leaves = Backward(monkeypatch), [x.requires_grad_() for x in inputs(device)]
    moved = [x.detach().clone().requires_grad_() for x in leaves]
    turned = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in leaves]
    expected = backward(*leaves)
    again = backward(*moved)
    assert (
        alike(again, expected)
        and backward.runs == 1
        and not {x.data_ptr() for x in again} & {x.data_ptr() for x in expected}
    )
    assert (
        all(a.equal(b) and a.stride() == x.stride() for a, b, x in zip(backward(*turned), expected, turned))
        and backward.runs == 2
    )
    short = backward(*(x[:, :, :10] for x in leaves))
    assert backward.runs == 3 and alike(backward(*(x[:, :, :10] for x in moved)), short) and backward.runs == 3
    scaled = backward(*leaves, scale=0.5)
    assert (
        backward.runs == 4
        and not any(a.equal(b) for a, b in zip(scaled[:2], expected))
        and alike(backward(*moved), expected)
    )
    backward.runtime.forget_launches()
    assert alike(backward(*leaves), expected) and backward.runs == 5
    assert backward.runtime.NOTES.launches == backward.runtime.NOTES.zeros == []  # no tensor is held after a call


def test_a_backward_is_not_remembered_of_a_tensor_twice_or_of_an_odd_address(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In either order: with q, k and v that are one, or start at no multiple of 16 bytes, and then others of that
    form."""
    x, leaves = inputs(device)[0].requires_grad_(), [x.requires_grad_() for x in inputs(device)]
    odd = [torch.cat([y.new_zeros(1), y.detach().flatten()])[1:].view_as(y).requires_grad_() for y in leaves]
    forward, backward = Backward(monkeypatch), Backward(monkeypatch)
    calls = (x, x, x), odd, leaves
    expected = [forward(*call) for call in calls]
    assert forward.runs == 3 and len(forward.runtime.STEPS) == 1
    backward.runtime.STEPS.clear()
    for call, found in list(zip(calls, expected))[::-1]:
        assert alike(backward(*call), found)


def test_what_is_remembered_of_dropout_is_without_a_seed_or_for_any(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backward = Backward(monkeypatch, "causal_dropout_mqa")
    q, k, v = (x.requires_grad_() for x in inputs(device))
    leaves = q, k[:, :1], v[:, :1]
    options: list[dict[str, Any]] = [
        {},
        {"dropout_p": 0.5, "seed": 1},
        {"dropout_p": 0.5, "seed": 2},
        {"dropout_p": 0.25, "seed": 2},
    ]
    first = [backward(*leaves, **given) for given in options]
    assert backward.runs == 3 and alike([*map(torch.Tensor.sum, first[0])], [x.sum() for x in backward(*leaves)])
    assert all(alike(backward(*leaves, **given), found) for given, found in zip(options, first)) and backward.runs == 3
    assert not first[1][0].equal(first[2][0]) and not first[2][0].equal(first[3][0])


def test_ten_thousand_forms_take_no_more_memory_than_a_thousand(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = built(NAME).runtime
    monkeypatch.setattr(runtime, "STEPS", {})
    program = runtime.remembered(1)(lambda x, number: (x,))
    x = torch.zeros(1, device=device)
    for n in range(10_000):
        assert program(x, n)[0] is program(x, n)[0] is x
    assert 0 < len(runtime.STEPS) <= 1024


@pytest.mark.parametrize(
    "change", [lambda x: x.mT.contiguous().mT, lambda x: torch._neg_view(-x)], ids=["strides", "sign"]
)
def test_what_was_saved_may_come_back_in_another_form(change: Any, device: str) -> None:
    """Hooks of saved tensors give back the same values, in a form that kernels cannot read."""
    module, leaves = built(NAME), [x.requires_grad_() for x in inputs(device)]
    expected = torch.autograd.grad(module.attention(*leaves).sum(), leaves)
    places = [x.data_ptr() for x in leaves]
    every = change(torch.ones(1, 1)).is_neg()  # out and lse come back so, too
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: x, lambda x: change(x) if every or x.data_ptr() in places else x
    ):
        found = torch.autograd.grad(module.attention(*leaves).sum(), leaves)
    assert all(a.equal(b) for a, b in zip(found, expected))


def test_an_operator_is_recorded_only_where_gradients_are_wanted(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code calls it with gradients off. Forward mode is recorded even so."""
    module, leaves = built(NAME), [x.requires_grad_() for x in inputs(device)]
    recorded, apply = [], module.OPERATORS.recorded.apply
    monkeypatch.setattr(module.OPERATORS.recorded, "apply", lambda *args: recorded.append(args) or apply(*args))
    out, lse = module.FORWARD(*leaves, 0.1)
    assert len(recorded) == 1 and out.requires_grad and lse.requires_grad
    with torch.no_grad():
        results = module.FORWARD(*leaves, 0.1)
        assert len(recorded) == 1 and not any(x.requires_grad for x in results)
        assert all(x.equal(y) for x, y in zip(results, (out, lse)))
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(leaves[0].detach(), torch.ones_like(leaves[0]))
            results = module.FORWARD(dual, *leaves[1:], 0.1)
            assert len(recorded) == 2 and all(
                torch.autograd.forward_ad.unpack_dual(x).tangent is not None for x in results
            )
