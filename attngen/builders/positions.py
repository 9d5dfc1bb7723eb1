"""Chunks of a sequence: the inputs by which a call says where its rows lie in the whole, and the kernels' names for
them.

Each rank of context parallelism has some chunks of a sequence, one after the other in its tensors. A call passes the
row at which each chunk starts in the whole sequence. Kernels compute with positions in the whole sequence, so masks,
modifiers, dropout and bounds of tiles are the same as in a call with all rows. Only tensors with a row for each query
or key of the call (Q, K, V, O, LSE, gradients) are addressed by rows of the call. Inputs of masks and modifiers are
about the whole sequence.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from attngen.ir import Derived, Input, Module, Op, Type, launch, symbol, tile, unit_of
from attngen.ir.names import CALL_ROWS, CHUNKS, START_RANKS, STARTS, WHOLE_LENGTHS, of_sequence
from attngen.lang.chunks import chunk_positions

LOOPS = {"q": "kv", "kv": "q"}  # program axis -> the axis that its loops run over


def chunk_inputs(chunk: int) -> tuple[Input, ...]:
    """Return the inputs of a module whose calls have chunks of `chunk` rows; none if it is 0."""
    if not chunk:
        return ()
    rows = ("queries", "keys")
    starts = (
        Input(
            name,
            "i32",
            (dim,),
            f"rows of the whole sequence at which the call's chunks of {what} start: multiples of {chunk}, rising",
            ("least=0", f"most={length}", "rising", f"multiple={chunk}"),
        )
        for (name, dim), what, length in zip(CHUNKS.values(), rows, WHOLE_LENGTHS.values())
    )
    lengths = (
        Input(n, "i32", (), f"{what} of the whole sequence", ("least=0",))
        for what, n in zip(rows, WHOLE_LENGTHS.values())
    )
    return *starts, *lengths


def chunk_derived(chunk: int) -> tuple[Derived, ...]:
    """Return what kernels read of the starts of chunks: positions of units, and their ranks; none without chunks."""
    if not chunk:
        return ()
    names, shapes = zip(*((name.lower(), dims) for names in (STARTS, START_RANKS) for name, dims in names.values()))
    sources = (*(name for name, _ in CHUNKS.values()), *WHOLE_LENGTHS.values(), str(chunk), str(unit_of(chunk)))
    return (Derived(names, shapes, chunk_positions.__name__, sources),)


def whole(dims: Iterable[str]) -> tuple[str, ...]:
    """Return the dimensions of a tensor about the whole sequence, as host programs name them."""
    return tuple(_whole(dim) for dim in dims)


def _whole(dim: str) -> str:
    size, slash, blocks = dim.partition("/")
    return f"{WHOLE_LENGTHS.get(size, size)}{slash}{blocks}"


def of_whole_input(i: Input) -> Input:
    """Return an input of a mask or modifier in a module whose calls have chunks."""
    options = ("=".join(map(_whole, option.split("="))) for option in i.options)
    return replace(i, shape=whole(i.shape), options=tuple(options))


def of_whole_derived(d: Derived) -> Derived:
    """Return derived tensors in a module whose calls have chunks."""
    return replace(d, shapes=tuple(map(whole, d.shapes)), sources=whole(d.sources))


def with_call_rows(type_: Type) -> Type:
    """Return the type of a tensor that has only the rows of the call."""
    return replace(type_, dims=tuple(CALL_ROWS.get(dim, dim) for dim in type_.dims))


def chunk_args(axis: str, adds: bool) -> list[tile.Arg]:
    """Return the arguments of a kernel that say where its rows lie.

    axis: the program axis. adds: whether programs add in an order, which is computed from the ranks of their tiles.
    """
    given = [*STARTS.values(), START_RANKS[LOOPS[axis]], *([START_RANKS[axis]] if adds else [])]
    return [tile.Arg(name, "in", Type("i32", dims)) for name, dims in given]


def of_call(type_: Type) -> Type:
    """Return the type of a tensor with the rows of the call, as host programs name its dimensions."""
    names = {rows: size for size, rows in CALL_ROWS.items()}
    return replace(type_, dims=tuple(names.get(dim, dim) for dim in type_.dims))


def of_whole_type(type_: Type) -> Type:
    """Return the type of a tensor about the whole sequence, as host programs name its dimensions."""
    return replace(type_, dims=whole(type_.dims))


def with_chunk_inputs(module: Module) -> Module:
    """Return the module with the inputs that say where chunks start; the other inputs are about the whole sequence."""
    if not module.chunk:
        return module
    return replace(
        module,
        inputs=(*map(of_whole_input, module.inputs), *chunk_inputs(module.chunk)),
        derived=(*map(of_whole_derived, module.derived), *chunk_derived(module.chunk)),
    )


def without_chunks(module: Module) -> Module:
    """Return the header of a module whose calls have chunks, as that of the same module with calls that have all
    rows."""
    if not module.chunk:
        return module
    own = {i.name for i in chunk_inputs(module.chunk)}
    inputs = (
        replace(i, shape=of_sequence(i.shape), options=tuple("=".join(of_sequence(o.split("="))) for o in i.options))
        for i in module.inputs
        if i.name not in own
    )
    derived = (
        replace(d, shapes=tuple(map(of_sequence, d.shapes)), sources=of_sequence(d.sources))
        for d in module.derived
        if d.function != chunk_positions.__name__
    )
    return replace(module, inputs=tuple(inputs), derived=tuple(derived), chunk=0)


def with_lengths(module: Module) -> Module:
    """Return the module with launches that pass the lengths of the whole sequence, and the rows of the call, to the
    kernels that compute positions."""
    placing = {kernel.name for kernel in module.kernels if kernel.traits.places}
    sizes = tuple((size, symbol(name)) for size, name in WHOLE_LENGTHS.items())
    sizes += tuple((rows, symbol(size)) for size, rows in CALL_ROWS.items())

    def change(op: Op) -> list[Op]:
        return [
            replace(op, sizes=(*op.sizes, *sizes)) if isinstance(op, launch.Launch) and op.kernel in placing else op
        ]

    return replace(module, hosts=tuple(host.rewrite(change) for host in module.hosts))
