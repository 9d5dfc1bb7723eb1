"""Checks of a whole module before code is generated: its loop order, schedules and host programs, and the types, names
and options of its inputs."""

from __future__ import annotations

import builtins
import re
from collections.abc import Iterator

from attngen.errors import VerifyError
from attngen.ir import Module, Type, parse
from attngen.ir.names import (
    BLOCKS,
    GRADIENT_SYMBOLS,
    INPUT_DIMS,
    OF_OUTPUTS,
    ORDERS,
    SHAPES,
    SOURCES,
    WRAPPER,
    of_sequence,
)
from attngen.ir.printer import print_module

_OF_CHUNKS = ("q_len", "kv_len", "Cq", "Ck")  # dimensions of inputs in modules whose calls have chunks of a sequence
_OPTIONS = r"grad|broadcast|size|(least|first)=-?\d+|multiple=[1-9]\d*|most=(Nq|Nk|q_len|kv_len)|rising"


def verify_interface(module: Module) -> Module:
    """Return the module if generated code can have its interface; otherwise raise VerifyError with a reason."""
    for reasons in (_schedules, _names, _inputs, _derived, _gradients, _unused):
        for reason in reasons(module):
            raise VerifyError("interface", reason, print_module(module))
    return module


def _schedules(module: Module) -> Iterator[str]:
    """The loop order is known, each kernel has a schedule, and there is a forward."""
    if module.order not in ORDERS:
        yield f"`order {module.order}`; expected {' or '.join(ORDERS)}"
    kernels = (*module.kernels, *(k for k in module.warp_specialized if k.of))
    if [name for name, _ in module.schedules] != [kernel.name for kernel in kernels]:
        have = ", ".join(name for name, _ in module.schedules) or "nothing"
        yield f"there are schedules for {have}; expected one for each kernel, in order"
    if "forward" not in {host.name for host in module.hosts}:
        hosts = ", ".join(host.name for host in module.hosts) or "none"
        yield f"the host programs are {hosts}; expected forward among them"


def _names(module: Module) -> Iterator[str]:
    """Names of inputs and derived tensors are unique, and none is a variable of the wrapper."""
    wrapper = WRAPPER | {x.partials.lower() for x in module.input_gradients}  # partial sums of the gradients of inputs
    wrapper |= {f"t{x.input}" for x in module.input_gradients}  # tangents of these inputs
    wrapper |= OF_OUTPUTS if len(module.outputs) > 1 else set()
    if module.blocks is None or module.blocks.data:  # no call has a list of blocks as argument
        wrapper -= {"block_mask"}
    names = [*(i.name for i in module.inputs), *(name for d in module.derived for name in d.names)]
    for name in names:
        used = name in wrapper or hasattr(builtins, name) or name.endswith("_strides")
        if names.count(name) > 1 or used or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            yield f"`{name}` is declared twice, is a name of the wrapper's own, or is not in small letters"
    pattern = module.blocks.pattern if module.blocks else ""
    if pattern and (pattern in WRAPPER or hasattr(builtins, pattern)):
        yield f"the pattern `{pattern}` is a name of the wrapper's own"


def _inputs(module: Module) -> Iterator[str]:
    """Inputs have known types, dimensions and options."""
    lengths = {i.name for i in module.inputs if i.is_size and Type(i.dtype, i.shape) == Type("i32")}
    for i in module.inputs:
        sized = all(
            d in (*INPUT_DIMS, *(_OF_CHUNKS if module.chunk else ()))
            or d in lengths
            or d.isdigit()
            or re.fullmatch(BLOCKS, d)
            for d in i.shape
        )
        if i.dtype not in ("b1", "i32", "f32", "T") or not sized:
            found, dims = f"`input {i.name} : {i.dtype}[{', '.join(i.shape)}]`", ", ".join(INPUT_DIMS)
            yield f"{found}; expected b1, i32, f32 or T of {dims}, numbers"
        if not i.shape and i.dtype not in ("i32", "f32"):
            yield f"`input {i.name} : {i.dtype}[]`; expected a number, i32 or f32"
    for i in module.inputs:
        for option in i.options:
            if not re.fullmatch(_OPTIONS, option):
                known = "grad, broadcast, size, least=n, most=Nq, most=Nk, first=n, rising or multiple=n"
                yield f"`input {i.name}` has the option `{option}`; expected {known}"
        if i.promises and i.dtype != "i32":
            option = next(iter(i.promises))
            yield f"`input {i.name}` is {i.dtype} and has the option `{option}`; expected i32 for promises of numbers"
        is_dimension = any(i.name in other.shape and not other.grad for other in module.inputs)
        if i.is_size and not (i.name in lengths and is_dimension):
            yield (
                f"`input {i.name}` has the option `size`; expected a number, i32, that is a dimension of an input "
                f"without a gradient"
            )


def _derived(module: Module) -> Iterator[str]:
    """Derived tensors have known sources, a type, and a host program with these sources as arguments, if any."""
    inputs = {i.name for i in module.inputs}
    programs = {
        host.name: tuple(a.name.lower() if a.role == "in" else a.name for a in host.args) for host in module.hosts
    }
    for d in module.derived:
        derive = f"`derive {' '.join(d.names)}`"
        if d.program and d.program not in programs:
            known = ", ".join(programs)
            yield f"{derive} is of @{d.program}, which is no host program; the host programs are {known}"
        if d.program and of_sequence(d.sources) != programs.get(d.program, of_sequence(d.sources)):
            args = ", ".join(programs[d.program])
            yield f"{derive} gives @{d.program} {', '.join(d.sources)}; expected its arguments, {args}"
        for source in d.sources:
            if not (source in inputs or source in SOURCES or source.isdigit() or re.fullmatch(BLOCKS, source)):
                yield f"{derive} is of `{source}`, which is no input"
        if len(d.names) != len(d.shapes) or d.dtype not in ("b1", "i32", "f32"):
            yield f"{derive} needs a shape for each name, and is b1, i32 or f32"


def _gradients(module: Module) -> Iterator[str]:
    """Gradients of inputs need a backward, an input with the option grad, and indices of known names."""
    for x in module.input_gradients:
        if not module.trains:
            yield f"`gradient {x}`, and there is no host program backward; expected it, or no `gradient`"
        if not any(i.name == x.input and i.grad and len(x.index) in (0, len(i.shape)) for i in module.inputs):
            yield f"`gradient {x}` is of no input with the option grad"
        if stray := {str(s) for e in x.index for s in parse(e).free_symbols} - GRADIENT_SYMBOLS:
            yield f"`gradient {x}` has `{min(stray)}`; expected {', '.join(sorted(GRADIENT_SYMBOLS))} and numbers"


def _unused(module: Module) -> Iterator[str]:
    """Each input is read by a kernel, or by a function or host program that derives a tensor."""
    read = {a.name.lower() for k in module.kernels for a in k.args if a.name not in SHAPES}
    sources = {s for d in module.derived for s in d.sources}
    for i in module.inputs:
        if i.name not in read | sources and not any(a.name == i.name for k in module.kernels for a in k.args):
            yield f"`input {i.name}` is read by no kernel"
