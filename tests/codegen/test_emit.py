"""Code generation needs only textual IR: edits of the text appear in the files, and equal texts give equal bytes."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys

import pytest

from attngen.certify.certificate import keep
from attngen.codegen.files import read_module
from attngen.codegen.render import render
from attngen.errors import AttngenError, VerifyError
from attngen.ir.parser import parse_module
from attngen.ir.printer import print_module
from attngen.lowering.pipeline import lower
from attngen.spec import parse_spec
from attngen.verify import verify
from tests.helpers import ROOT, SPECS, edit, lowered, portable, target

GENERATED = ROOT / "generated"


def emit(text):
    """Return the files that are generated from textual IR."""
    return render(verify(parse_module(text)))


@pytest.fixture(scope="module")
def ir():
    """The text of a causal module."""
    return print_module(portable("causal_mha"))


def between(text, start, end):
    return text.split(start, 1)[1].split(end, 1)[0]


@pytest.fixture(scope="module", params=SPECS)
def steps(request):
    """A spec's modules by pass. Pytest runs the tests of one spec together, so that each spec is lowered once."""
    return lowered(request.param)


@pytest.fixture(scope="module")
def files(steps):
    """The files of the spec's last module."""
    return render(steps["legalize-triton"])


@pytest.mark.share(64)
def test_the_text_after_every_pass_parses_to_itself(steps):
    before = ""
    for step, module in steps.items():
        text = print_module(module)
        if text != before:  # many passes leave the module as it is
            assert print_module(parse_module(text)) == text, step
        before = text


@pytest.mark.share(32)
def test_text_gives_the_files_that_build_gives(steps, files):
    assert emit(print_module(steps["legalize-triton"])) == files


def test_committed_modules_match_their_specs(steps, files):
    module = steps["legalize-triton"]
    assert read_module(GENERATED / module.name) == keep(module, files, GENERATED / module.name)


def test_there_is_no_module_without_a_spec():
    have = {p.name for p in GENERATED.iterdir() if (p / "schedule.ir").is_file()}
    assert {*SPECS} <= have <= {p.stem for p in (ROOT / "specs").glob("*.yaml")}


@pytest.mark.share(64)
def test_generated_bytes_do_not_depend_on_the_process():
    """Two new processes with different hash seeds generate the same bytes."""
    code = (
        "import hashlib, json, sys; from attngen.codegen.render import render; "
        "from attngen.lowering.pipeline import lower; from attngen.spec import load_spec; "
        "print([hashlib.sha256(json.dumps(render(lower(load_spec(p)))).encode()).hexdigest() for p in sys.argv[1:]])"
    )
    paths = [str(ROOT / "specs" / f"{name}.yaml") for name in ("window_gqa", "padding_mha")]
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code, *paths],
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        for seed in ("1", "77")
    ]
    first, second = (run.communicate(timeout=120)[0] for run in runs)
    assert first == second != b""


# ---------------------------------------------------------------------------------------------- edits by hand


def test_another_tile_size_appears_in_the_kernels(ir):
    config = next(
        line
        for line in between(ir, "schedule @fwd\n", "\n\n").splitlines()
        if line.startswith("  sm90 bytes=2 rows<=inf")
    )
    edited = "  sm90 bytes=2 rows<=inf : BLOCK_Q=32 BLOCK_KV=16 num_warps=2 num_stages=2"
    kernels = emit(edit(ir, (config, edited)))["kernels.py"]
    assert '(None, {"BLOCK_Q": 32, "BLOCK_KV": 16, "num_warps": 2, "num_stages": 2, "TMA": False})' in between(
        kernels, '("sm90", 2)', '("sm100", 2)'
    )


def test_one_more_stage_appears_in_the_kernels(ir):
    line = next(line for line in between(ir, "schedule @dq\n", "\n\n").splitlines() if line.startswith("  any "))
    stages = int(line.rpartition("=")[2])
    smaller = line.rpartition(" : ")[0] + f" : BLOCK_Q=16 BLOCK_KV=16 num_warps=4 num_stages={stages + 1}"
    kernels = emit(edit(ir, (line, smaller)))["kernels.py"]
    assert f'"BLOCK_Q": 16, "BLOCK_KV": 16, "num_warps": 4, "num_stages": {stages + 1}' in kernels


def test_a_full_loop_relabelled_partial_is_masked(ir):
    def loops(text):
        return between(emit(text)["kernels.py"], "def fwd(", "@triton.jit").split("for kv_tile in ")[1:]

    (full, partial), (edited, same) = loops(ir), loops(edit(ir, ("cls(full)", "cls(partial)")))
    assert "tl.where(kv_idx" not in full
    assert "mask=(kv_idx < Nk)" not in full
    assert "tl.where(kv_idx[None, :] <= (q_idx + Nk - Nq)[:, None], s" in edited
    assert edited.count("mask=(kv_idx < Nk)") == 2
    assert partial == same


def test_a_partial_loop_relabelled_full_is_refused(ir):
    with pytest.raises(VerifyError, match="full-is-proven"):
        emit(edit(ir, ("cls(partial)", "cls(full)")))


def test_a_tile_too_big_is_refused(ir):
    with pytest.raises(
        VerifyError, match="rule `fits`: .*needs .* bytes of shared memory .* and has .*; a smaller BLOCK_Q"
    ):
        emit(
            edit(
                ir,
                ("BLOCK_Q=", "BLOCK_Q=1024 BLOCK_KV=64 num_warps=4 num_stages=3\n  sm80 bytes=2 rows<=inf : BLOCK_Q="),
            )
        )


def test_a_derived_value_by_an_unknown_function_is_refused():
    text = edit(print_module(target("padding_mha")), ("= key_span(", "= key_spam("))
    with pytest.raises(
        AttngenError, match="^`derive` names the function `key_spam`, which no mask .*; did you mean `key_span`\\?$"
    ):
        emit(text)


# ---------------------------------------------------------------------------------------------- generated code

SOURCES = sorted(GENERATED.glob("*/*.py"))


@pytest.mark.share(16)
@pytest.mark.parametrize("path", SOURCES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_generated_code_compiles_and_depends_only_on_torch_and_triton(path):
    source = path.read_text()
    compile(source, str(path), "exec")
    assert source.endswith("\n")
    assert not source.endswith("\n\n")
    assert [n for n, line in enumerate(source.splitlines(), 1) if line != line.rstrip()] == []
    imported: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add("." if node.level else (node.module or "").split(".")[0])
    # Triton's interpreter needs numpy, which is imported inside a function.
    if source.count("import numpy") == source.count("\n    import numpy\n") == 1:
        imported.remove("numpy")
    assert imported <= {"torch", "triton", "."} | sys.stdlib_module_names


@pytest.mark.skipif(importlib.util.find_spec("ruff") is None, reason="needs ruff")
def test_generated_code_is_clean_for_the_linter():
    result = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "generated"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stdout


def test_block_lists_are_read_one_iteration_ahead():
    """The first entry is read before the loop. Each iteration reads the next one, also past a gap between merged
    ranges, but none past the end."""
    body = render(target("butterfly_gqa"))["kernels.py"].partition("def dkdv(")[2].partition("def dq(")[0]
    full, _, partial = body.partition("# tiles that the mask or the end of a tensor cuts")
    assert re.search(
        r"q_ahead = _tile_at\(Q_LIST_row, q_full_first_at, q_full_end_at > q_full_first_at, BLOCK // BLOCK_Q\)\n"
        r" *# tiles with nothing to mask.*\n"
        r" *for at in tl.range\(q_full_first_at, q_full_end_at, disable_licm=True\):\n"
        r" *q_tile = q_ahead\n"
        r" *q_ahead = _tile_at\(Q_LIST_row, at \+ 1, q_full_end_at > at \+ 1, BLOCK // BLOCK_Q\)\n",
        full,
    )
    jump = "q_at = tl.where(q_at < q_full_first_at, q_at, q_at + (q_full_end_at - q_full_first_at))"
    assert (
        f"q_at = q_first_at\n        {jump}\n        q_ahead = _tile_at(Q_LIST_row, q_at, q_stop > q_first_at," in full
    )
    assert "for at in tl.range(q_first_at, q_stop, disable_licm=True):\n            q_tile = q_ahead\n" in partial
    assert (
        f"            q_at = at + 1\n            {jump}\n"
        f"            q_ahead = _tile_at(Q_LIST_row, q_at, q_stop > at + 1,"
    ) in partial


@pytest.mark.share(8)
def test_loops_over_many_merged_ranges_fit_the_line_limit():
    seen = "{any_of: [{sliding_window: {left: 63}}, {expr: 'q_idx >= kv_idx + 200 and q_idx <= kv_idx + 300'}]}"
    text = f"{{name: merged, head_dim: 64, mask: {{all_of: [causal, {{block_sparse: {{block: 32}}}}, {seen}]}}}}"
    lines = render(lower(parse_spec(text)))["kernels.py"].splitlines()
    assert sum("q_at = tl.where(" in line for line in lines) > 4
    assert max(map(len, lines)) <= 140
