"""Shared memory as Triton's compiler reports it, for GPUs that need not be here, is what the closed form predicts at most."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from attngen.analysis.sram import sram_bytes
from attngen.devices import CLASSES
from attngen.emit.files import write_module
from attngen.emit.render import render
from tests.helpers import target

# Prints the bytes of each kernel for a target; in a process of its own, because the tests' own Triton interprets.
COMPILE = """
import json, sys
import kernels
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

def kind(name):
    if name.startswith("stride_") or name in ("Hq", "Hkv", "group", "Nq", "Nk"):
        return "i32"
    return {"scale": "fp32", "LSE": "*fp32", "LSE2": "*fp32", "DELTA": "*fp32"}.get(name, "*fp16")

target, cls, found = GPUTarget(*json.loads(sys.argv[1])), sys.argv[2], {}
for name in ("fwd", "dkdv", "dq"):
    kernel, config = getattr(kernels, name), dict(kernels.SCHEDULES[name][cls, 2][-1][1])
    options = {key: config.pop(key) for key in ("num_warps", "num_stages")}
    signature = {arg: "constexpr" if arg in config else kind(arg) for arg in kernel.arg_names}
    constants = {(kernel.arg_names.index(arg),): value for arg, value in config.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, arg in enumerate(kernel.arg_names) if arg not in config and arg != "scale"}
    found[name] = triton.compile(ASTSource(kernel, signature, constants, aligned), target=target, options=options).metadata.shared
print(json.dumps(found))
"""


@pytest.mark.parametrize("gpu, cls", [(("cuda", 86, 32), "any"), (("hip", "gfx90a", 64), "gfx942"), (("cuda", 90, 32), "sm90")])
def test_what_is_compiled_needs_no_more_than_predicted(tmp_path, gpu, cls):
    module = target("mla_dims")
    write_module(render(module), tmp_path / "mla_dims")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(tmp_path / "mla_dims"), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", COMPILE, json.dumps(gpu), cls], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name, compiled in json.loads(done.stdout).items():
        row = [r for r in module.rows(name) if r.device == cls][-1]
        assert 0 < compiled <= sram_bytes(module, module.kernel(name), row) <= CLASSES[cls].smem_per_block, name
