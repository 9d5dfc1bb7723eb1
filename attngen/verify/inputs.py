"""What generated modules ask of a module as a whole: its orders of loops, schedules and host programs; its inputs
and their names."""

from __future__ import annotations

import builtins
import re
from collections.abc import Iterator

from attngen.errors import VerifyError
from attngen.ir.expr import parse
from attngen.ir.graph import Module
from attngen.ir.names import BLOCKS, INPUT_DIMS, LEARNED, OF_OUTPUTS, ORDERS, SHAPES, SOURCES, WRAPPER
from attngen.ir.ops import Type
from attngen.ir.text import print_module

_OPTIONS = r"grad|broadcast|size|(least|first)=-?\d+|most=(Nq|Nk)|rising"


def verify_interface(module: Module) -> Module:
    """The module itself, if its kernels are those that the wrapper launches; VerifyError with a reason otherwise."""
    for reason in _reasons(module):
        raise VerifyError("interface", reason, print_module(module))
    return module


def _reasons(module: Module) -> Iterator[str]:
    if module.order not in ORDERS:
        yield f"`order {module.order}`; expected {' or '.join(ORDERS)}"
    if [name for name, _ in module.schedules] != [
        kernel.name for kernel in (*module.kernels, *(k for k in module.warp_specialized if k.of))
    ]:
        have = ", ".join(name for name, _ in module.schedules) or "nothing"
        yield f"there are schedules for {have}; expected one for each kernel, in order"
    if "forward" not in {host.name for host in module.hosts}:
        yield f"the host programs are {', '.join(host.name for host in module.hosts) or 'none'}; expected forward among them"
    given = {i.name: Type(i.dtype, i.shape) for i in module.inputs}
    lengths = {i.name for i in module.inputs if i.is_size and Type(i.dtype, i.shape) == Type("i32")}
    names = [*(i.name for i in module.inputs), *(name for d in module.derived for name in d.names)]
    own = WRAPPER | {x.parts.lower() for x in module.learned}  # in which it has the parts of a gradient
    own |= {f"t{x.input}" for x in module.learned}  # and its tangent
    own |= OF_OUTPUTS if len(module.outputs) > 1 else set()
    if module.blocks is None or module.blocks.data:  # a call gives no list of blocks
        own -= {"block_mask"}
    for name in names:
        taken = name in own or hasattr(builtins, name) or name.endswith("_strides")
        if names.count(name) > 1 or taken or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            yield f"`{name}` is declared twice, is a name of the wrapper's own, or is not in small letters"
    for name, type_ in given.items():
        sized = all(d in INPUT_DIMS or d in lengths or d.isdigit() or re.fullmatch(BLOCKS, d) for d in type_.dims)
        if type_.dtype not in ("b1", "i32", "f32", "T") or not sized:
            yield f"`input {name} : {type_.dtype}[{', '.join(type_.dims)}]`; expected b1, i32, f32 or T of {', '.join(INPUT_DIMS)}, numbers"
        if not type_.dims and type_.dtype not in ("i32", "f32"):
            yield f"`input {name} : {type_.dtype}[]`; expected a number, i32 or f32"
    for i in module.inputs:
        for option in i.options:
            if not re.fullmatch(_OPTIONS, option):
                known = "grad, broadcast, size, least=n, most=Nq, most=Nk, first=n or rising"
                yield f"`input {i.name}` has the option `{option}`; expected {known}"
        if i.promises and i.dtype != "i32":
            yield f"`input {i.name}` is {i.dtype} and has the option `{next(iter(i.promises))}`; expected i32 for promises of numbers"
        if i.is_size and not (
            i.name in lengths and any(i.name in tensor.shape and not tensor.grad for tensor in module.inputs)
        ):
            yield f"`input {i.name}` has the option `size`; expected a number, i32, that is a dimension of an input without a gradient"
    programs = {
        host.name: tuple(a.name.lower() if a.role == "in" else a.name for a in host.args) for host in module.hosts
    }
    for d in module.derived:
        if d.program and d.program not in programs:
            yield f"`derive {' '.join(d.names)}` is of @{d.program}, which is no host program; the host programs are {', '.join(programs)}"
        if d.program and d.sources != programs.get(d.program, d.sources):
            takes = ", ".join(programs[d.program])
            yield f"`derive {' '.join(d.names)}` gives @{d.program} {', '.join(d.sources)}; expected its arguments, {takes}"
        for source in d.sources:
            if (
                source not in given
                and source not in SOURCES
                and not source.isdigit()
                and not re.fullmatch(BLOCKS, source)
            ):
                yield f"`derive {' '.join(d.names)}` is of `{source}`, which is no input"
        if len(d.names) != len(d.shapes) or d.dtype not in ("b1", "i32", "f32"):
            yield f"`derive {' '.join(d.names)}` needs a shape for each name, and is b1, i32 or f32"
    for x in module.learned:
        if not module.trains:
            yield f"`learn {x}`, and there is no host program backward; expected it, or no `learn`"
        if not any(i.name == x.input and i.grad and len(x.index) in (0, len(i.shape)) for i in module.inputs):
            yield f"`learn {x}` is of no input with the option grad"
        if stray := {str(s) for e in x.index for s in parse(e).free_symbols} - LEARNED:
            yield f"`learn {x}` has `{min(stray)}`; expected {', '.join(sorted(LEARNED))} and numbers"
    if (
        module.blocks
        and module.blocks.pattern
        and (module.blocks.pattern in WRAPPER or hasattr(builtins, module.blocks.pattern))
    ):
        yield f"the pattern `{module.blocks.pattern}` is a name of the wrapper's own"
    read = {a.name.lower() for k in module.kernels for a in k.args if a.name not in SHAPES}
    for name in given:
        used = name in read or name in {s for d in module.derived for s in d.sources}
        if not used and not any(a.name == name for k in module.kernels for a in k.args):
            yield f"`input {name}` is read by no kernel"
