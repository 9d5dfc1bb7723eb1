"""The tile-schedule IR: ops by dialect (`tile`, `pipe`, `host`), kernels and modules, expressions, text.

The names that most files need are here; others are in the files of this package.
"""

from __future__ import annotations

from attngen.ir.core import DTYPE_BYTES, TENSORS, Access, Fact, Type
from attngen.ir.dims import (
    AXIS_DIM,
    AXIS_EXTENT,
    COLUMN_DIM,
    GROUPED,
    MEMBER,
    PADDED,
    SIDES,
    SPLIT_DIM,
    TILED,
    WHOLE,
    axis_of,
    dimension,
    first_row,
    unpadded,
)
from attngen.ir.expr import (
    BITS,
    FUNCTIONS,
    INEQUALITIES,
    LARGEST,
    TO_INTEGER,
    Bool,
    Expr,
    cdiv,
    clamp,
    conjuncts,
    cos,
    divisor,
    erf,
    exp2,
    finite,
    flattened,
    floor,
    floordiv,
    log,
    log2,
    mod,
    nearest,
    portion,
    select,
    sigmoid,
    sin,
    symbol,
    symbol_names,
    trunc,
)
from attngen.ir.expr_text import parse, to_text
from attngen.ir.fields import Checks, Ranges, Uses
from attngen.ir.grid import REVERSED_GROUP, SPLIT_SYMBOLS, GridAxis, KVSplit
from attngen.ir.kernel import Kernel
from attngen.ir.module import (
    DEFAULT_BACKEND,
    PHASES,
    Blocks,
    Cache,
    Config,
    Derived,
    DoesNotFit,
    Input,
    InputGradient,
    Meaning,
    Module,
    Read,
    input_tensors,
    unit_of,
)
from attngen.ir.op import Block, Op, WarpGroup, only
