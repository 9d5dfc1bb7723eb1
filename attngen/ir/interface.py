"""What the generated wrapper launches: its kernels, the tensors each reads and writes, and its grid."""

from __future__ import annotations

import builtins
import re
from collections.abc import Iterator
from typing import NamedTuple

from attngen.errors import VerifyError
from attngen.ir.expr import cdiv, symbol
from attngen.ir.graph import Derived, GridAxis, Input, Kernel, Module
from attngen.ir.ops import AXIS_DIM, AXIS_EXTENT, Arg, Type
from attngen.ir.text import print_module

SHAPES = {
    "Q": ("B", "Hq", "Nq", "D_QK"),
    "K": ("B", "Hkv", "Nk", "D_QK"),
    "V": ("B", "Hkv", "Nk", "D_V"),
    "O": ("B", "Hq", "Nq", "D_V"),
    "LSE": ("B", "Hq", "Nq"),
    "LSE2": ("B", "Hq", "Nq"),
    "DELTA": ("B", "Hq", "Nq"),
}
STATISTICS = ("LSE", "LSE2", "DELTA")
SCALARS = {"scale": "f32", "Hq": "i32", "Hkv": "i32", "group": "i32", "Nq": "i32", "Nk": "i32"}
DROPOUT_SCALARS = {"dropout_threshold": "i32", "keep_scale": "f32"}
# Lists of the blocks that count. Tq and Tk are numbers of blocks; ranks[t] blocks of a row come before block t, so there is
# one rank more (Tq1, Tk1) than there are blocks.
BLOCK_LISTS = {
    "q": {"KV_RANK": ("B", "Hq", "Tq", "Tk1"), "KV_LIST": ("B", "Hq", "Tq", "Tk")},
    "kv": {"Q_RANK": ("B", "Hq", "Tk", "Tq1"), "Q_LIST": ("B", "Hq", "Tk", "Tq")},
}

# the wrapper's own names, which inputs may not have
WRAPPER = {"q", "k", "v", "out", "lse", "lse2", "delta", "dq", "dk", "dv", "grad_out", "grad_lse", "need_q", "need_kv", "inputs"}
WRAPPER |= {"block_mask", "kv_rank", "kv_list", "q_rank", "q_list", "dropout_p", "seed", *DROPOUT_SCALARS}
WRAPPER |= {"scale", "return_lse", "config", "grid", "ctx", "self", "math", "torch", "triton", "kernels", "attention"}


class Signature(NamedTuple):
    """The axis that a kernel's grid tiles, and its tensors; a gradient is shaped as what it is the gradient of."""

    own: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]


SIGNATURES = {
    "fwd": Signature("q", ("Q", "K", "V"), ("O", "LSE")),
    "delta": Signature("q", ("O", "dO", "LSE"), ("DELTA", "LSE2")),
    "dkdv": Signature("kv", ("Q", "K", "V", "dO", "LSE2", "DELTA"), ("dK", "dV")),
    "dk": Signature("kv", ("Q", "K", "V", "dO", "LSE2", "DELTA"), ("dK",)),
    "dv": Signature("kv", ("Q", "K", "dO", "LSE2"), ("dV",)),
    "dq": Signature("q", ("Q", "K", "V", "dO", "LSE2", "DELTA"), ("dQ",)),
}
KERNELS = (("fwd", "delta", "dkdv", "dq"), ("fwd", "delta", "dk", "dv", "dq"))  # of a module: the second for wide heads
DIRECTIONS = ("forward", "backward")


def kernels_of(module: Module, direction: str) -> tuple[Kernel, ...]:
    """The kernels that a module launches forward or backward."""
    return tuple(k for k in module.kernels if (k.name == "fwd") == (direction == "forward"))


def tensor_type(name: str) -> Type:
    """The type of a tensor of SIGNATURES in device memory."""
    return Type("f32" if name in STATISTICS else "T", SHAPES[name.removeprefix("d")])


def mask_tensors(inputs: tuple[Input, ...], derived: tuple[Derived, ...]) -> dict[str, Type]:
    """What a mask reads: its inputs, and the scalars per sequence that the wrapper derives from them."""
    return {i.name: Type(i.dtype, i.shape) for i in inputs} | {name: Type("i32", ("B",)) for d in derived for name in d.names}


def tensor_args(kernel: str, masked: dict[str, Type], blocks: bool = False, dropout: bool = False) -> list[Arg]:
    """The tensors of a kernel: what it reads, what its mask, its block lists and dropout read, what it writes."""
    signature = SIGNATURES[kernel]
    read = [Arg(name, "in", tensor_type(name)) for name in signature.reads]
    read += [Arg(name.upper(), "in", type_) for name, type_ in masked.items()]
    if blocks and kernel != "delta":
        read += [Arg(name, "in", Type("i32", dims)) for name, dims in BLOCK_LISTS[signature.own].items()]
    if dropout and kernel != "delta":
        read.append(Arg("SEED", "in", Type("i64")))
    return read + [Arg(name, "out", tensor_type(name)) for name in signature.writes]


def grid(own: str, sharing: str) -> tuple[GridAxis, ...]:
    """One program per tile of the axis, head and sequence; one that owns keys owns them for the whole group of query heads."""
    heads = {"q": "h", "kv": {"mha": "h", "gqa": "hkv", "mqa": ""}[sharing]}[own]
    extents = {"h": "Hq", "hkv": "Hkv"}
    tiles = GridAxis(own, cdiv(symbol(AXIS_EXTENT[own]), symbol(AXIS_DIM[own])))
    return tiles, *(GridAxis(h, symbol(extents[h])) for h in (heads,) if h), GridAxis("b", symbol("B"))


def verify_interface(module: Module) -> Module:
    """The module itself, if its kernels are those that the wrapper launches; VerifyError with a reason otherwise."""
    for reason in _reasons(module):
        raise VerifyError("interface", reason, print_module(module))
    return module


def _reasons(module: Module) -> Iterator[str]:
    have = [k.name for k in module.kernels]
    if sorted(have) not in map(sorted, KERNELS) or sorted(name for name, _ in module.schedules) != sorted(have):
        expected = " or ".join(map(", ".join, KERNELS))
        yield f"the kernels are {', '.join(have) or 'none'}; expected {expected}, and a schedule for each"
    given = mask_tensors(module.inputs, ())
    names = [*(i.name for i in module.inputs), *(name for d in module.derived for name in d.names)]
    for name in names:
        if names.count(name) > 1 or name in WRAPPER or hasattr(builtins, name) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            yield f"`{name}` is declared twice, is a name of the wrapper's own, or is not in small letters"
    for name, type_ in given.items():
        if type_.dtype not in ("b1", "i32", "f32") or not set(type_.dims) <= {"B", "Hq", "Nq", "Nk"}:
            yield f"`input {name} : {type_.dtype}[{', '.join(type_.dims)}]`; expected b1, i32 or f32 of B, Hq, Nq and Nk"
    for d in module.derived:
        if d.source not in given:
            yield f"`derive {' '.join(d.names)}` is of `{d.source}`, which is no input"
    if module.blocks and module.blocks.pattern and (module.blocks.pattern in WRAPPER or hasattr(builtins, module.blocks.pattern)):
        yield f"the pattern `{module.blocks.pattern}` is a name of the wrapper's own"
    read = {a.name.lower() for k in module.kernels for a in k.args if a.name not in SHAPES}
    for name in given:
        if name not in read and name not in {d.source for d in module.derived}:
            yield f"`input {name}` is read by no kernel"
    for kernel in module.kernels:
        for reason in _kernel_reasons(kernel, module):
            yield f"kernel @{kernel.name}: {reason}"


def _kernel_reasons(kernel: Kernel, module: Module) -> Iterator[str]:
    signature = SIGNATURES[kernel.name]
    right = grid(signature.own, module.sharing)
    if [(a.var, a.extent) for a in kernel.grid] != [(a.var, a.extent) for a in right]:
        yield f"the grid is not {', '.join(f'{a.var} in {a.extent}' for a in right)}, which is what the wrapper launches"
    masked = mask_tensors(module.inputs, module.derived)
    known = {arg.name: arg for arg in tensor_args(kernel.name, masked, module.blocks is not None, module.dropout)}
    scalars = {**SCALARS, **(DROPOUT_SCALARS if module.dropout else {})}
    known |= {name: Arg(name, "scalar", Type(dtype)) for name, dtype in scalars.items()}
    for arg in kernel.args:
        match = known.get(arg.name)
        if match is None or (arg.role, arg.type.dtype, arg.type.dims) != (match.role, match.type.dtype, match.type.dims):
            expected = f"`arg {match.role} : {match.type.dtype}[{', '.join(match.type.dims)}]`" if match else f"one of {', '.join(known)}"
            yield f"%{arg.name} is `arg {arg.role} : {arg.type.dtype}[{', '.join(arg.type.dims)}]`; expected {expected}"
    for name in signature.writes:
        if name not in {a.name for a in kernel.args}:
            yield f"%{name} is missing, which the wrapper expects it to write"
