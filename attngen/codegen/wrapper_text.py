"""Source text in wrappers: declarations, checks of inputs and calls."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable

from attngen.codegen.host import sizes_of
from attngen.errors import AttngenError, suggest
from attngen.ir import Derived, Input, tile
from attngen.ir.names import BLOCKS, CHUNKS, FOUND, START_RANKS, STARTS
from attngen.scores import derive_functions
from attngen.targets.printing.layout import tuple_text

PYTHON_TYPES = {"i32": "int", "f32": "float"}
# Numbers of chunks, as source text.
OF_CHUNKS = {dim: FOUND[dim] for names in (STARTS, START_RANKS) for _, (dim,) in names.values()}
OF_CHUNKS |= {dim: FOUND[dim] for _, dim in CHUNKS.values()}
# Types in the schemas of torch's operators.
SCHEMA_TYPES = {"i32": "SymInt", "f32": "float", "dropout_threshold": "int"}


def promise_text(i: Input, names: dict[str, str], rows: str = "") -> str:
    """Return the source of the promises of an input.

    names: sizes that have other names at the place of the source. rows: the source of the number of elements that are
    checked in each row.
    """
    given = {name: names.get(value, value) for name, value in i.promises.items()} | ({"rows": rows} if rows else {})
    options = ", ".join(f"{name}={value}" for name, value in given.items())
    return f'runtime.promised("{i.name}", {i.name}, "{i.help}", {options})'


def declarations(operands: list[tile.Arg]) -> str:
    """Return the declaration of an operator's arguments to torch."""

    def type_of(a: tile.Arg) -> str:
        if a.role == "in":
            return "Tensor?" if a.name == "SEED" else "Tensor"
        return SCHEMA_TYPES.get(a.name, SCHEMA_TYPES[a.type.dtype])

    return ", ".join(f"{type_of(a)} {a.name.lower()}" for a in operands)


def call_text(d: Derived, names: dict[str, str]) -> str:
    """Return the Python source of a call that computes derived tensors; `names` maps sources to other names at the
    place of the call."""
    function = d.program.upper() if d.program else d.function
    return f"{function}({', '.join(names.get(s, size_text(s)) for s in d.sources)})"


def size_text(dim: str) -> str:
    """Return the Python source of a dimension of an input."""
    blocks = re.fullmatch(BLOCKS, dim)
    return f"-(-{blocks[1]} // {blocks[2]})" if blocks else OF_CHUNKS.get(dim, dim)


def sizes_in(text: str) -> list[str]:
    """Return statements that define the sizes used in a piece of source."""
    return sizes_of(re.findall(r"\w+", text))


def source_of(function: str) -> str:
    """Return the source of a function that a mask or modifier declares; raise AttngenError if none does."""
    known = derive_functions()
    if function not in known:
        raise AttngenError(
            f"`derive` names the function `{function}`, which no mask or modifier declares; {suggest(function, known)}"
        )
    return inspect.getsource(known[function])


def names_text(tensors: Iterable[str]) -> str:
    """Return source text: a tuple with the variable names of these tensors."""
    return tuple_text([f'"{name.lower()}"' for name in tensors])
