"""Kernels of calls with chunks use no name that hopper.py does not define."""

from __future__ import annotations

import builtins
import re
import symtable
from typing import Any

import pytest

from attngen.codegen.render import render
from attngen.spec import make_spec
from tests import chunks
from tests.helpers import stages_of

SLOPED = {"mask": {"expr": "3 * kv_idx <= q_pos - 1000"}, "heads": {"sharing": "gqa"}}
NAMED = {
    "mask": {"expr": "kv_idx < next_h + work_tile + kv_tile_start"}
    | {"params": {name: {"scalar": "int"} for name in ("next_h", "work_tile", "kv_tile_start")}}
}
SPECS: dict[str, tuple[dict[str, Any], int]] = {
    "causal, 64": (chunks.CASES["causal"], 64),
    "packed, 128": (chunks.CASES["packed"], 128),
    "streaming, 128": (chunks.CASES["streaming"], 128),
    "blocks, 128": (chunks.CASES["blocks"], 128),
    "causal, 256": (chunks.CASES["causal"], 256),
    "packed, 256": (chunks.CASES["packed"], 256),
    "rounds down": (SLOPED, 128),
    "names of other modules' variables": (NAMED, 128),
}


def source_of(name: str) -> str:
    data, head_dim = SPECS[name]
    more = {"head_dim": head_dim, "positions": {"chunk": 384}, "schedule": {"backend": "hopper"}}
    return render(stages_of(make_spec({"name": "chunks", **data, **more}))["legalize-gluon"])["hopper.py"]


@pytest.mark.parametrize("name", SPECS)
def test_every_name_is_defined(name: str) -> None:
    module = symtable.symtable(source_of(name), "hopper.py", "exec")
    known = {symbol.get_name() for symbol in module.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    known |= {table.get_name() for table in module.get_children()} | {*dir(builtins)}
    for function in module.get_children():
        used = {symbol.get_name() for symbol in function.get_symbols() if symbol.is_global()}
        assert used <= known, function.get_name()


def test_parameters_of_a_spec_are_not_assigned() -> None:
    source = source_of("names of other modules' variables")
    for name in ("next_h", "work_tile", "kv_tile_start"):
        assert {*re.findall(rf"^ *{name} = (.*)$", source, re.MULTILINE)} <= {f"_rematerialize({name})"}
        assert not re.search(rf"[(\s]{name},[^()]*\) = ", source)
