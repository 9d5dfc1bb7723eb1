"""The rule `header`: the fields of a module's header."""

from __future__ import annotations

import keyword
from collections.abc import Iterable, Iterator
from typing import Any

from attngen.ir import Config, Kernel, Module, input_tensors
from attngen.ir.dtypes import ELEMENTS, agree
from attngen.ir.heads import SHARINGS
from attngen.ir.names import OUTPUTS
from attngen.targets.registry import BACKENDS

ROPES = range(16, 129, 16)  # sizes of the part of head_dim to which RoPE is applied


# Names that the header's mask and score may use, in addition to inputs and derived tensors.
NAMED = {"b", "h", "hkv", "q_idx", "kv_idx", "B", "Hq", "Hkv", "group", "Nq", "Nk"}


def header(module: Module, kernel: Kernel) -> Iterator[str]:
    """The header's fields have values that the compiler supports."""
    for key, value, known in (
        ("heads", module.sharing, tuple(SHARINGS)),
        ("precision", module.precision, ("ieee", "tf32")),
        ("backend", module.backend, tuple(BACKENDS)),
        *(
            ("backend", name, (module.backend, *_specializers(module, kernel)))
            for name in _named_backends(module, kernel)
        ),
        *(("dtype", d, tuple(ELEMENTS)) for d in module.dtypes),
        *((f"head_dim {n}", d, range(16, 513 + 128 * bool(module.rope), 8)) for n, d in module.head_dims),
    ):
        if value not in known:
            yield f"`{key} {value}`; expected one of {', '.join(map(str, known))}"
    if set(module.dtypes) <= ELEMENTS.keys():
        yield from _dtype_errors(module)
    if module.outputs != tuple(name for name in OUTPUTS if name in ("lse", *module.outputs)):
        yield f"`outputs {' '.join(module.outputs)}`; expected lse, and some of {', '.join(OUTPUTS)}, in this order"
    if module.rope and (
        module.cache is None or module.head_dim_qk != module.head_dim_v + module.rope or module.rope not in ROPES
    ):
        head_dim = module.head_dim_v + module.rope
        yield f"`latent rope={module.rope}`; expected a cache, a multiple of 16 up to 128, and head_dim qk {head_dim}"
    if module.blocks and (module.blocks.size & (module.blocks.size - 1) or not 16 <= module.blocks.size <= 4096):
        yield f"`blocks {module.blocks.size}`; expected a power of two from 16 to 4096"
    names = (*module.kernels, *(k for k in module.warp_specialized if k.of))
    for field, values in (("dtype", module.dtypes), ("kernel", tuple(k.name for k in names))):
        if not values or len(set(values)) < len(values):
            yield f"{field} `{' '.join(values)}`; expected one or more, each once"
    for text in (module.name, *(i.name for i in module.inputs)):
        if not text.isidentifier() or keyword.iskeyword(text):
            yield f"`{text}` is not an identifier"
    for text in (module.version, module.spec_hash, module.mask, module.score, *(i.help for i in module.inputs)):
        if set(text) & set('"\\{}'):  # these texts are printed inside strings
            yield f"`{text}` has a quote, a backslash or a brace"
    yield from _name_errors(module)


def _named_backends(module: Module, kernel: Kernel) -> list[str]:
    """The backends that a kernel's configs name."""
    return [config.backend for config in dict(module.schedules).get(kernel.name, ()) if isinstance(config, Config)]


def _specializers(module: Module, kernel: Kernel) -> list[str]:
    """The backends for which a kernel has a warp-specialized version."""
    return [other.backend for other in module.warp_specialized if other.name == kernel.name]


def _dtype_errors(module: Module) -> Iterator[str]:
    """The element types of a module have the same result and weight types. With a backward pass, each supports it."""
    if not agree(module.dtypes):
        yield (
            f"dtype `{' '.join(module.dtypes)}`, which kernels treat differently; expected types that agree on their "
            f"results and weights"
        )
    yield from (
        f"dtype `{d}`, and there is a host @backward; expected none"
        for d in module.dtypes
        if module.trains and not ELEMENTS[d].trains
    )


def _name_errors(module: Module) -> Iterator[str]:
    """The header's mask and score name only positions, sizes, inputs and derived tensors. A read has an index for each
    dimension."""
    tensors, meaning = input_tensors(module.inputs, module.derived), module.meaning
    known = NAMED | {i.name for i in module.inputs} | tensors.keys()
    for read in meaning.reads:
        if read.tensor not in tensors or len(read.index) != len(tensors[read.tensor].dims):
            yield f"`read {read.name} from {read.tensor}` is no element of an input or of a derived tensor"
        yield from (f"`read {read.name}` names `{s}`, which is not known there" for s in names_in(read.index) - known)
        known |= {read.name}
    mask = (meaning.where, meaning.by_key, *(e for fact in meaning.known for e in fact))
    yield from (f"`mask` names `{s}`, which is no position, size or input" for s in names_in(mask) - known)
    yield from (
        f"`score` names `{s}`, which is no position, size or input"
        for s in names_in((meaning.score, meaning.sink)) - known - {"s"}
    )


def names_in(expressions: Iterable[Any]) -> set[str]:
    return {str(s) for e in expressions if e is not None for s in e.free_symbols}
