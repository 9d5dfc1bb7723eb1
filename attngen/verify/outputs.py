"""The rule of what calls give beside the output: kernels that store it compute what its name says."""

from __future__ import annotations

from collections.abc import Iterator

import sympy

from attngen.ir.graph import Kernel, Module
from attngen.ir.names import OUTPUTS
from attngen.ir.ops import Loop, SoftmaxStep, Store, Yield
from attngen.verify.joins import LN2, ONE, is_
from attngen.verify.meaning import Values


def outputs(module: Module, kernel: Kernel) -> Iterator[str]:
    """A forward stores all outputs of the module. The largest score of a query is the maximum that the softmax keeps, without a sink."""
    stored = {kernel.accessed(op)[0].name: op.value for op in kernel.ops() if isinstance(op, Store)}
    steps = [op for op in kernel.ops() if isinstance(op, SoftmaxStep)]
    if not steps or "LSE" not in stored:
        return
    if missing := [name for name in module.outputs if OUTPUTS[name] not in stored]:
        yield f"it stores no {', '.join(OUTPUTS[name] for name in missing)}; expected it to, as the header says `outputs`"
        return
    values, last = Values(kernel), kernel.loops[-1]
    scale = values.of(steps[0].scale) if steps[0].scale else ONE
    if "max_score" in module.outputs:
        yield from is_(values, stored["MAX_SCORE"], LN2 * scale * _maximum(kernel, values, last, steps[0]))


def _maximum(kernel: Kernel, values: Values, last: Loop, step: SoftmaxStep) -> sympy.Expr:
    """What the loop has of the softmax's running maximum in the end; a symbol that nothing is equal to if it carries none."""
    ends = kernel.block(last.body).ops[-1]
    field = next((f for f, ref in ends.values if ref == f"{step.name}.m"), "") if isinstance(ends, Yield) else ""
    return values.of(f"{last.name}.{field}") if field else sympy.Symbol(f"{step.name}.m")
