"""Digests of the code that Triton makes of every committed kernel, for every target, without a GPU: PTX, or AMD's
assembly.

The code counts without names, comments and line information, so renaming leaves every digest unchanged.

python -m tests.compiled_digests --write before.json      of all modules (20 minutes on two cores)
python -m tests.compiled_digests --against before.json    says which kernels have other code, and fails if any has
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attngen.certify.certificate import chosen
from attngen.devices import CLASSES, FALLBACK_CUDA
from attngen.ir import Config
from attngen.ir.parser import parse_module
from attngen.targets.common.ahead import compile_each, compiled
from attngen.targets.registry import maker_of

ROOT = Path(__file__).parent.parent
TARGETS = [name for name in CLASSES if name != FALLBACK_CUDA]
_DEBUG = re.compile(r'\s*\.section\s+"?\.debug')
_SECTION = re.compile(r"\s*\.(section|text|amdgpu_metadata)\b")
_OF_LINES = re.compile(
    r"\s*\.(loc|file|ident|cfi_\w+)\b|\s*(\$L__|\.L)(tmp|func_begin|func_end|info_string|debug\w*)\d*:"
)


def stripped(assembly: str, kernel: str, comment: str) -> str:
    """Assembly without the kernel's name, comments, line information and debug sections. `comment` starts a comment."""
    kept, debug = [], False
    for line in assembly.splitlines():
        if _SECTION.match(line):
            debug = bool(_DEBUG.match(line))
        line = line.split(comment)[0].rstrip()
        if not debug and line and not _OF_LINES.match(line):
            kept.append(line)
    return re.sub(rf"\b{kernel}(?=\b|_param_)", "kernel", "\n".join(kept))


@dataclass(frozen=True)
class Asked:
    """A kernel to compile: a config with its backend, the compiler's job without its file, and the file. Kernels that
    differ only in the file are compiled once."""

    config: Config
    job: Any
    file: Path


def digest_of(asked: Asked) -> str:
    """The digest of the code of one kernel; the compiler's sentence if it does not compile."""
    job = replace(asked.job, file=asked.file)
    done = compiled(maker_of(asked.config).compiler.source(job), job)
    if isinstance(done, str):
        return done
    code = done[0].asm
    text = stripped(code["ptx"], job.kernel, "//") if "ptx" in code else stripped(code["amdgcn"], job.kernel, ";")
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def digests(names: list[str]) -> dict[str, str]:
    """The digest of each kernel of the modules under each config that `attngen verify` compiles."""
    asked = {}
    for name in names or sorted(path.parent.name for path in (ROOT / "generated").glob("*/schedule.ir")):
        ir = ROOT / "generated" / name / "schedule.ir"
        module = parse_module(ir.read_text(encoding="utf-8"), str(ir))
        for kernel, config in chosen(module, TARGETS, False):
            maker = maker_of(config)
            tile = f"{config.tile}x{config.columns}x{config.num_warps}x{config.num_stages}"
            of = f"{config.device} {config.backend} {tile} {config.elem_bytes} {config.max_rows}"
            job = maker.compiler.job(module, kernel, config, ir.with_name(maker.file))
            key = f"{name} {kernel.stands_for} {kernel.name} {of}"
            asked[key] = Asked(replace(config, max_rows=None), replace(job, file=Path()), job.file)
    return dict(zip(asked, map(str, compile_each(digest_of, list(asked.values())))))


def main() -> int:
    """Write digests to a file, or compare them with those in one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module", nargs="*", help="modules, by name [default: all]")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--against", type=Path)
    asked = parser.parse_args()
    found = digests(asked.module)
    if asked.write:
        asked.write.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if not asked.against:
        return 0
    before = json.loads(asked.against.read_text(encoding="utf-8"))
    wanted = {key for key in before if not asked.module or key.split()[0] in asked.module}
    for key in sorted(wanted | found.keys()):
        if before.get(key) != found.get(key):
            print(f"{key}: {before.get(key, 'not there')} before, {found.get(key, 'not there')} now")
    same = sum(before.get(key) == found[key] for key in found)
    print(f"{same} of {len(wanted | found.keys())} kernels have the same code")
    return same != len(wanted | found.keys())


if __name__ == "__main__":
    sys.exit(main())
