"""Generated modules with torch.library, torch.compile, CUDA graphs, checkpoints, autocast, DDP and pickle."""

from __future__ import annotations

import copy
import os
import pickle
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from attngen.conformance.cases import Case, heads_for
from attngen.conformance.harness import load_module
from tests.conftest import CUDA
from tests.helpers import FEW, KINDS, ROOT, SPECS, built, target
from tests.helpers import spec as spec_of
from tests.test_numerics import problem, small

DROPPING = [name for name in KINDS if spec_of(name).dropout]


def options(name: str) -> dict[str, Any]:
    return {"dropout_p": 0.3, "seed": 5} if spec_of(name).dropout else {}


class Record(TorchDispatchMode):
    """Records the calls of attngen's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "attngen":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


@pytest.mark.share(32)
@pytest.mark.parametrize(
    ("name", "layout"),
    [(n, x) for n in KINDS for x in ("bhnd", "bnhd") if CUDA or x == "bhnd" or n in KINDS[:3]]
    # gradient inputs of several dimensions
    + [(n, "bhnd") for n in ("dense_bias_dropout_mha", "relative_bias_mha") if n not in KINDS],
)
def test_opcheck(name: str, layout: str, device: str) -> None:
    """Schema, autograd registration, fake implementation and AOT dispatch of all operators are right, for each set of
    requested gradients."""
    leaves, inputs, grads = problem(name, Case(1, *heads_for(spec_of(name), 2), 20, 30, layout), device)
    with Record() as record:
        out, lse = built(name).attention(*leaves, **inputs, **options(name), return_lse=True)
        torch.autograd.grad((out, lse), leaves, grads, retain_graph=True)
        torch.autograd.grad(out, leaves[0], grads[0], retain_graph=True)
        torch.autograd.grad(lse, leaves[1:], grads[1])
    programs = [call for call in record.calls if call[0] not in (built(name).FORWARD, built(name).BACKWARD)]
    assert len(programs) == len([d for d in target(name).derived if d.program])
    for op, given in programs:  # programs that prepare inputs of masks
        torch.library.opcheck(op, given)
    (forward, args), *backward = record.calls[len(programs) :]
    assert forward is built(name).FORWARD and [op for op, _ in backward] == [built(name).BACKWARD] * 3
    for x in args[:3]:
        assert x.requires_grad
    torch.library.opcheck(forward, args)
    for op, args in backward if layout == "bhnd" else backward[:1]:
        plain = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in args)  # second derivatives are refused
        torch.library.opcheck(op, plain)


@pytest.mark.share(16)
@pytest.mark.parametrize(
    ("name", "dynamic"),
    [
        (n, d)
        for n in KINDS
        for d in (False, None, True)
        if CUDA
        or n == "causal_dropout_mqa"
        or (d is None and n != "local_global_dropout_mha")  # other specs cover its blocks and its dropout
    ],
)
def test_compile(name: str, dynamic: bool | None, device: str) -> None:
    """A compiled call is one graph without breaks and gives the same bits. There is one static graph, and then at most
    one with symbolic sizes."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor" if CUDA else "aot_eager")
    attention, drop = built(name).attention, options(name)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, inputs: dict[str, torch.Tensor]) -> Any:
        return attention(q, k, v, **inputs, **drop, return_lse=True)

    compiled = torch.compile(call, backend=counter, fullgraph=True, dynamic=dynamic)
    lengths = [20, 45, 77, 130]
    if (
        CUDA or spec_of(name).mask.blocks()
    ):  # each length has more blocks or tiles than heads (on CUDA four lengths run)
        lengths = [270, 401, 530, 660] if CUDA else [140, 270, 333]
    lengths = lengths[:1] if dynamic is False else lengths if CUDA else lengths[:3]
    for n in lengths:
        leaves, inputs, grads = problem(name, Case(1, *heads_for(spec_of(name), 2), n, n + 13), device)
        results = [f(*leaves, inputs) for f in (call, compiled)]
        found = [(*r, *torch.autograd.grad(r, leaves, grads)) for r in results]
        assert all(a.equal(b) for a, b in zip(*found))
    # Torch first takes numbers for constants.
    whole = any(not i.shape for i in spec_of(name).inputs()) or "document" in name
    assert counter.frame_count <= (1 if dynamic is False else 2 + whole)


@pytest.mark.share(8)
@pytest.mark.parametrize("name", DROPPING)
def test_compiled_dropout_generates_other_bits_in_each_call(name: str, device: str) -> None:
    torch._dynamo.reset()
    (q, k, v), inputs, _ = problem(name, small(name, 33, 33), device)
    attention = built(name).attention
    compiled = torch.compile(lambda: attention(q, k, v, **inputs, dropout_p=0.5), backend="aot_eager", fullgraph=True)
    torch.manual_seed(0)
    first, second = compiled(), compiled()
    torch.manual_seed(0)
    assert compiled().equal(first) and not second.equal(first)


@pytest.mark.share(16)
@pytest.mark.parametrize("name", FEW)
def test_checkpoint_gives_the_same_bits(name: str, device: str) -> None:
    """With a dropout seed from torch's generator, the second forward drops the same weights as the first."""
    leaves, inputs, grads = problem(name, small(name, 33, 33), device)
    drop = {"dropout_p": 0.3} if spec_of(name).dropout else {}

    def call(*qkv: torch.Tensor) -> torch.Tensor:
        return built(name).attention(*qkv, **inputs, **drop)

    found = []
    for reentrant in (None, False, True):
        torch.manual_seed(3)
        out = call(*leaves) if reentrant is None else checkpoint(call, *leaves, use_reentrant=reentrant)
        torch.manual_seed(99)
        for x in leaves:
            x.grad = None
        out.backward(grads[0])  # reentrant checkpoints need it
        found.append([out, *(x.grad for x in leaves)])
    assert all(a.equal(b) for other in found[1:] for a, b in zip(found[0], other))


@pytest.mark.share(16)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FEW)
def test_autocast(name: str, dtype: torch.dtype, device: str) -> None:
    """fp32 and mixed arguments are computed in autocast's dtype if the module has it; gradients have the arguments'
    dtypes."""
    leaves, inputs, _ = problem(name, small(name, 33, 33), device)
    q, k, v = (x.detach().float().requires_grad_() for x in leaves)
    has = dtype in built(name).DTYPES
    with torch.autocast(device, dtype):
        out = built(name).attention(q, k, v.to(dtype) if has else v, **inputs, **options(name))
    assert out.dtype == (dtype if has else torch.float32)
    found = torch.autograd.grad(out.float().sum(), (q, k, v))
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in found)
    plain = [x.detach().to(out.dtype) for x in (q, k, v)]
    inputs |= {i.name: inputs[i.name].to(out.dtype) for i in spec_of(name).inputs() if i.dtype == "T"}
    assert built(name).attention(*plain, **inputs, **options(name)).equal(out)


@pytest.mark.parametrize("name", FEW)
def test_vmap_is_refused(name: str, device: str) -> None:
    leaves, inputs, _ = problem(name, small(name, 33, 33), device)
    stacked = [torch.stack([x.detach()] * 2) for x in leaves]
    with pytest.raises(
        NotImplementedError,
        match="attention: torch.func.vmap cannot map it; expected the mapped dimension as part of B",
    ):
        torch.func.vmap(lambda q, k, v: built(name).attention(q, k, v, **inputs, **options(name)))(*stacked)


@pytest.mark.share(16)
@pytest.mark.parametrize("name", FEW)
def test_second_derivatives_are_refused(name: str, device: str) -> None:
    """They are refused whether or not the incoming gradient requires one. First derivatives with a graph are right."""
    leaves, inputs, (grad, _) = problem(name, small(name, 33, 33), device)
    expected = torch.autograd.grad(built(name).attention(*leaves, **inputs, **options(name)), leaves, grad)
    for flowing in (grad, grad.clone().requires_grad_()):
        out = built(name).attention(*leaves, **inputs, **options(name))
        found = torch.autograd.grad(out, leaves, flowing, create_graph=True)
        assert all(a.equal(b) for a, b in zip(found, expected))
        with pytest.raises(
            RuntimeError,
            match="attention: its gradients cannot be differentiated again; expected only first derivatives",
        ):
            found[0].sum().backward()


@pytest.mark.parametrize("name", FEW)
def test_modules_are_copied_and_pickled(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    generated = __import__(f"generated.{name}", fromlist=["Attention"])
    module = torch.nn.Sequential(
        generated.Attention(scale=0.3, **({"dropout_p": 0.25} if spec_of(name).dropout else {}))
    ).eval()
    (q, k, v), inputs, _ = problem(name, small(name, 33, 33), device)
    expected = module[0](q, k, v, **inputs)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert repr(twin) == repr(module) and not twin.training
        assert twin[0](q, k, v, **inputs).equal(expected)


def test_two_imports_under_one_name_both_work(device: str) -> None:
    name = "causal_mqa"
    (q, k, v), _, _ = problem(name, small(name, 33, 33), device)
    first = load_module(ROOT / "generated" / name)
    second = load_module(ROOT / "generated" / name)
    assert first.FORWARD is not second.FORWARD
    assert first.attention(q, k, v).equal(second.attention(q, k, v))


# Loads a saved graph with a copy of the module in another folder, and compares the results of the graph.
LOAD = """
import importlib, sys, torch
sys.path.insert(0, sys.argv[1])
for number in range(int(sys.argv[2])):
    importlib.import_module(f"vendored{number}")
leaves, inputs, grads, expected = torch.load(sys.argv[4])
results = torch.export.load(sys.argv[3]).module()(*leaves, inputs)
found = (*results, *torch.autograd.grad(results, leaves, grads))
assert all(a.equal(b) for a, b in zip(found, expected, strict=True)), "the graph gives something else"
print("the same")
"""


@pytest.mark.share(64)
@pytest.mark.parametrize("name", FEW)
def test_a_saved_graph_runs_in_another_process(name: str, device: str, tmp_path: Path) -> None:
    """A graph by torch.export gives the same results and gradients at another length. Names of operators do not depend
    on the folder of a module."""
    generated = built(name)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = generated.Attention(scale=0.3)

        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, inputs: dict[str, torch.Tensor]) -> Any:
            return self.attention(q, k, v, **inputs, return_lse=True)

    leaves, inputs, _ = problem(name, small(name, 48, 48), device)
    length = torch.export.Dim.AUTO  # a wrapper may guard on a small number of blocks
    declared = {
        i.name: i.shape for i in spec_of(name).inputs()
    }  # others are per block, with the same number of blocks at both lengths
    lengths = {
        at: {i: length for i, d in enumerate(declared.get(at, ())) if d in ("Nq", "Nk")}
        if isinstance(x, torch.Tensor)
        else None
        for at, x in inputs.items()
    }
    exported = torch.export.export(Model().eval(), (*leaves, inputs), dynamic_shapes=(*[{2: length}] * 3, lengths))
    torch.export.save(exported, tmp_path / "model.pt2")
    numbers = {at: x for at, x in inputs.items() if not isinstance(x, torch.Tensor)}  # constants of the graph
    leaves, inputs, grads = problem(name, small(name, 60, 60), device)
    inputs |= numbers
    results = Model().eval()(*leaves, inputs)
    torch.save(
        (leaves, inputs, grads, (*results, *torch.autograd.grad(results, leaves, grads))), tmp_path / "values.pt"
    )
    # The operators of a second copy of a module have names that end in `_`, and other tests may have loaded copies.
    copies = 1 + len(operators := generated.OPERATORS.name) - len(operators.rstrip("_"))
    for number in range(copies):
        shutil.copytree(ROOT / "generated" / name, tmp_path / "elsewhere" / f"vendored{number}")
    arguments = [str(tmp_path / "elsewhere"), str(copies), str(tmp_path / "model.pt2"), str(tmp_path / "values.pt")]
    done = subprocess.run([sys.executable, "-c", LOAD, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "the same\n", done.stderr


LAZY = """
import importlib, os, sys, torch
for name in sys.argv[1:]:
    importlib.import_module("generated." + name)
    assert not torch.cuda.is_initialized(), name
    assert not os.path.exists(os.environ["TRITON_CACHE_DIR"]), name + ": something was compiled"
"""


@pytest.mark.share(16)
def test_importing_starts_nothing(tmp_path: Path) -> None:
    """Imports create no CUDA context and compile nothing."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {
        "TRITON_CACHE_DIR": str(tmp_path / "cache")
    }
    subprocess.run([sys.executable, "-c", LAZY, *SPECS], cwd=ROOT, env=env, check=True)


# Two processes train one model, each with half of the batch. Prints the norm of the gradients, which DDP makes equal in
# both.
DDP = """
import os, sys, torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from generated.causal_dropout_mqa import Attention
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.attention = nn.Linear(64, 64 * 4), nn.Linear(128, 64), Attention(dropout_p=0.2)
    def forward(self, x):
        q, k, v = self.qkv(x).split([128, 64, 64], -1)
        q, k, v = (t.unflatten(-1, (-1, 64)).transpose(1, 2) for t in (q, k, v))
        return self.out(self.attention(q, k, v, seed=int(os.environ["DROP"])).transpose(1, 2).flatten(2))
rank, device = int(os.environ["RANK"]), sys.argv[1]
dist.init_process_group("gloo")
torch.manual_seed(0)
model, x = Model(), torch.randn(4, 20, 64)
dtype = torch.float16 if device == "cpu" else torch.bfloat16
model.to(device), x.to(device)
ddp = DistributedDataParallel(model.to(device))
half = x.to(device).chunk(2)[rank]
with torch.autocast(device, dtype):
    loss = ddp(half).float().square().mean()
loss.backward()
single = Model().to(device)
single.load_state_dict(model.state_dict())
with torch.autocast(device, dtype):
    total = sum(single(part.to(device)).float().square().mean() for part in x.chunk(2)) / 2
total.backward()
for a, b in zip(model.parameters(), single.parameters()):
    assert (a.grad - b.grad).norm() <= 2e-2 * b.grad.norm(), (a.grad - b.grad).norm() / b.grad.norm()
print(f"{sum(p.grad.norm() for p in model.parameters()).item():.6f}", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.share(32)
def test_ddp_of_two_processes(device: str) -> None:
    """Both processes have the gradients of the whole batch."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    env = {
        **os.environ,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "DROP": "7",
        "OMP_NUM_THREADS": "1",
    }
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", DDP, device],
            cwd=ROOT,
            env={**env, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    results = [run.communicate(timeout=240) for run in runs]
    assert all(run.returncode == 0 for run in runs), results
    assert results[0][0] == results[1][0] and float(results[0][0]) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", KINDS)
def test_cuda_graphs(name: str, device: str) -> None:
    """A captured forward and backward gives the results of eager calls for new inputs; each replay has other dropout
    bits."""
    leaves, inputs, (grad, _) = problem(name, small(name, 129, 200), device)
    fresh, _, _ = problem(name, small(name, 129, 200), device)
    drop = {"dropout_p": 0.3} if spec_of(name).dropout else {}

    def step() -> tuple[torch.Tensor, ...]:
        out = built(name).attention(*leaves, **inputs, **drop)
        return out, *torch.autograd.grad(out, leaves, grad)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for x, y in zip(leaves, fresh):
            x.copy_(y.flip(2))
    torch.manual_seed(11)
    graph.replay()
    first = [x.clone() for x in captured]
    graph.replay()
    second = [x.clone() for x in captured]
    torch.manual_seed(11)
    graph.replay()
    assert all(a.equal(b) for a, b in zip(first, captured))
    assert all(a.equal(b) for a, b in zip(first, second)) != bool(drop)
    if not drop:
        assert all(a.equal(b) for a, b in zip(first, step()))
