"""Compiles generated hopper.py files ahead of time, for a GPU that need not be here, and reads the machine code: prints JSON.

    python tests/hopper/aot.py 'generated/NAME' ...

Each folder's module is read from its schedule.ir. It is a process of its own, because Triton must not interpret there.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from attngen.backends.hopper.reuse import reused
from attngen.ir.graph import Module
from attngen.ir.text import parse_module

TYPES = {"f32": "fp32", "i32": "i32", "i64": "i64", "b1": "i1"}


def source(module: Module, folder: Path, dtype: str) -> GluonASTSource:
    """The forward's kernel, with the types of a call whose tensors are aligned."""
    spec = importlib.util.spec_from_file_location("hopper", folder / "hopper.py")
    assert spec and spec.loader
    file = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(file)
    row, args = module.rows("fwd", "hopper")[0], {arg.name: arg for arg in module.divided[0].args}
    tiles = {"BLOCK_Q": row.block_q, "BLOCK_KV": row.block_kv, "SLOTS": row.num_stages, "DROPOUT": True}
    params = [p.name for p in file.fwd.params]
    described = {params[at]: tiles.get(rows, rows) for at, rows in file.DESCRIBED["fwd"]}
    widths = {"D_QK": module.head_dim_qk, "D_V": module.head_dim_v}
    types: dict[str, str] = {}
    for name in params:
        arg = args.get(name)
        if name in described:
            block = [1, 1, described[name], widths[args[name].type.dims[-1]]]
            layout = gl.NVMMASharedLayout.get_default_for(block, {"bf16": gl.bfloat16, "fp16": gl.float16}[dtype])
            types[name] = f"tensordesc<{dtype}{block},{layout!r}>"
        elif name in tiles:
            types[name] = "constexpr"
        else:
            of = TYPES.get(arg.type.dtype, dtype) if arg else "i32"
            types[name] = f"*{of}" if name == "COUNTER" or (arg and arg.role != "scalar") else of
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(params) if types[n].startswith("*") or n.startswith("stride")}
    return GluonASTSource(file.fwd, types, {name: tiles[name] for name in params if name in tiles}, aligned)


def reading(folder: Path, dtype: str = "bf16") -> dict[str, Any]:
    """What the compiler says, and what its machine code holds."""
    module = parse_module((folder / "schedule.ir").read_text(encoding="utf-8"))
    triton.knobs.compilation.always_compile = triton.knobs.nvidia.dump_ptxas_log = True
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        made = triton.compile(source(module, folder, dtype), target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(made.asm["cubin"])
        cubin.flush()
        tool = [triton.knobs.nvidia.nvdisasm.path, "-c", cubin.name]
        sass = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
    log = said.getvalue()
    return {
        "shared": made.metadata.shared,
        "registers": max(int(n) for n in re.findall(r"Used (\d+) registers", log)),
        "spilled": sum(int(n) for n in re.findall(r"(\d+) bytes spill", log)),
        "serialised": "C75" in log,
        "reused": reused(sass),
        **_machine_code(sass),
    }


def _machine_code(sass: str) -> dict[str, Any]:
    ops = [m[1] for line in sass.splitlines() if (m := re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+.*)", line))]
    flying, under, all_ = False, 0, 0
    for op in ops:
        if re.match(r"HGMMA\S*\s+R\d+, R\d+, gdesc", op):  # a product with an operand in registers: P V
            flying = True
        elif op.startswith("MUFU.EX2"):
            under, all_ = under + flying, all_ + 1
        elif "DEPBAR" in op and "gsb0, 0x0" in op:
            flying = False
    counts = {name: sum(op.startswith(name) for op in ops) for name in ("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG", "HMMA")}
    return {**counts, "exponentials": all_, "under": under}


if __name__ == "__main__":
    print(json.dumps({folder: reading(Path(folder)) for folder in sys.argv[1:]}))
