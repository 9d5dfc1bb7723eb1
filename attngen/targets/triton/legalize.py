"""legalize-triton: make addresses, casts and padding explicit, as Triton requires.

before:  %k = load %K[b, h // group, kv, d_qk] check(kv if partial) : T[BLOCK_KV, D_QK] @sram
         %acc_next = dot %soft.p %v over(BLOCK_KV) acc(%rescaled)
after:   %K_head = base %K[b, h // group] : ptr[] @reg
         %k = load %K_head[kv, d_qk] check(kv if partial) : T[BLOCK_KV, D_QK] @sram
         %p_cast = map expr(p) uses(p=%soft.p) : T[BLOCK_Q, BLOCK_KV] @reg
         %acc_next = dot %p_cast %v over(BLOCK_KV) acc(%rescaled)
before:  %queries = loop q ranges(0 .. q_end) carry(dk=%dk_init, dv=%dv_init) body(@step) cls(full)
after:   %queries = loop q ranges(0 .. q_end) carry(dk=%dk_init, dv=%dv_init) body(@step) cls(full) recompute(yes)

- The address of a head is computed once, in 64 bits.
- Operands of a dot are cast to the tensors' element type, or to fp16 if the other operand was stored in 8 bits. fp32
  dots state their precision.
- A head dimension that is not a power of two is padded on chip (D_QK_PAD) and checked on every access.
- LLVM keeps loop invariants in registers, mainly offsets of rows. A loop without registers to spare recomputes them in
  each iteration: one that carries two accumulators or one of more than WIDE columns, or that contains another loop
  (docs/perf-log.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from attngen.heuristics import WIDE
from attngen.ir import WHOLE, Access, Kernel, Module, Op, Type, axis_of, symbol, tile
from attngen.ir.dtypes import by_precision
from attngen.transforms.base import Pass, padded


@dataclass(frozen=True)
class LegalizeTriton(Pass):
    name: ClassVar[str] = "legalize-triton"
    phase: ClassVar[str] = "target"

    def run(self, module: Module) -> Module:
        wide = tuple(n for n, d in module.widths.items() if d & (d - 1))
        precision = module.precision if by_precision(module.dtypes) else ""

        def legal(kernel: Kernel) -> Kernel:
            kernel = kernel.rewrite(lambda _, op: [_spare_registers(kernel, op, module.widths)])
            cast: set[str] = set()
            kernel = kernel.rewrite(lambda _, op: _cast_operands(kernel, op, precision, cast))
            kernel = _bases(kernel)
            return kernel.rewrite(lambda _, op: [padded(op, wide)])

        return replace(module.map_kernels(legal), phase=self.phase)


def _spare_registers(kernel: Kernel, op: Op, columns: dict[str, int]) -> Op:
    """A loop that recomputes its invariants if it has no registers to spare; other ops as they are."""
    if (
        not isinstance(op, tile.Loop) or op.var == "KV_splits"
    ):  # an accumulator of one row leaves registers for the rest
        return op
    accumulators = [dims for dims in (kernel.type_of(ref).dims for _, ref in op.carry) if len(dims) == 2]
    halves = kernel.traits.reads_quantised  # of one accumulator
    wide = (len(accumulators) > 1 and not halves) or any(
        dims[1] in WHOLE or columns.get(dims[1], 0) > WIDE // (1 + halves) for dims in accumulators
    )
    return replace(op, recompute=wide or (op.cls == "all" and not kernel.traits.prepares))


def _cast_operands(kernel: Kernel, op: Op, precision: str, cast: set[str]) -> list[Op]:
    """The casts that a dot needs, and the dot of the cast operands. Values in `cast` already have a cast."""
    if not isinstance(op, tile.Dot):
        return [op]
    casts: list[Op] = []
    renamed = {}
    dtype = "fp16" if "fp16" in {kernel.type_of(ref).dtype for ref in (op.a, op.b)} else "T"
    for ref in (op.a, op.b):
        source = kernel.type_of(ref)
        if source.dtype != dtype:
            short = ref.rpartition(".")[2]
            renamed[ref] = f"{short}_cast"
            if ref not in cast:
                casts.append(tile.Map(renamed[ref], symbol(short), ((short, ref),), replace(source, dtype=dtype)))
                cast.add(ref)
    operands = {k: v for k, v in renamed.items() if k != op.acc}
    return [*casts, replace(op.with_operands(operands), precision=precision)]


def _bases(kernel: Kernel) -> Kernel:
    """Compute one pointer per tensor and head, in the outermost block that knows the head."""
    parents = {loop.body: (kernel.graph.nodes[loop.name]["block"], loop.variables) for loop in kernel.loops}
    made: dict[tuple[str, str], tile.Base] = {}
    renamed: dict[str, Access] = {}

    for block in kernel.blocks:
        for op in block.ops:
            if not isinstance(op, (tile.Load, tile.Store)):
                continue
            access = op.dst if isinstance(op, tile.Store) else op.src
            if not access.axes() or isinstance(op, tile.Append) or (isinstance(op, tile.Load) and op.pages):
                continue  # rows at computed places of a cache have no common start
            scalars = tuple(i for i in access.index if not axis_of(i))
            if not any(scalars):
                continue  # its rows start where the tensor does
            needed = {str(s) for i in scalars for s in i.free_symbols}
            home = block.name
            while home in parents and needed.isdisjoint(parents[home][1]):
                home = parents[home][0]
            name = f"{access.tensor}_{'batch' if scalars == (symbol('b'),) else 'head'}"
            name += "".join(f"_{i}" for i in scalars[2:] if i.is_Integer)  # an entry, after its sequence and head
            made.setdefault((home, name), tile.Base(name, Access(access.tensor, scalars), Type("ptr", (), "reg")))
            renamed[op.name] = Access(name, tuple(i for i in access.index if axis_of(i)))

    def change(_: str, op: Op) -> list[Op]:
        if op.name not in renamed:
            return [op]
        moved: Any = op
        return [replace(moved, **{"dst" if isinstance(op, tile.Store) else "src": renamed[op.name]})]

    blocks = []
    for block in kernel.rewrite(change).blocks:
        bases = [base for (home, _), base in made.items() if home == block.name]
        first = next((i for i, op in enumerate(block.ops) if not isinstance(op, tile.Arg)), len(block.ops))
        blocks.append(replace(block, ops=(*block.ops[:first], *bases, *block.ops[first:])))
    return replace(kernel, blocks=tuple(blocks))
