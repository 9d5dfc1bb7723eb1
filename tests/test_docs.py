"""The docs are right: excerpts of IR are real, tables are complete, links and commands name files that exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml
from packaging.requirements import Requirement

from attngen.builders import build_module
from attngen.cli import main
from attngen.errors import VerifyError
from attngen.ir import gl, launch, pipe, tile
from attngen.ir.printer import print_module
from attngen.lowering import pipeline
from attngen.lowering.pipeline import passes
from attngen.report.lanes import lanes, svg
from attngen.spec import make_spec, parse_spec
from attngen.targets.hopper import HOPPER
from attngen.targets.hopper import passes as hopper_passes
from attngen.verify import rules, verify, warp_specialized_rules
from attngen.verify.host import RULES as HOST_RULES
from attngen.verify.statements import RULES as STATEMENT_RULES
from docs.site import ir_reference
from tests.docs_common import PAGES, PATHS, Written, blocks, steps, text
from tests.helpers import ROOT, lowered, spec
from tests.hopper.common import after_passes, edited, hopper_spec
from tests.versions.__main__ import PAIRS

PASSES_TABLE = "| part of the pipeline | passes, in order |"  # the head of the table in docs/ir.md
EXECUTED_PAGES = [
    page
    for page in PAGES
    if page.startswith(("docs/getting", "docs/index", "docs/cookbook")) and page != "docs/cookbook/huggingface.md"
]
WITH_OUTPUT = re.compile(r"^```python\n(.*?)^```\n(?:\n*```text\n(.*?)^```)?", re.MULTILINE | re.DOTALL)


@pytest.mark.share(8)
def test_excerpts_of_ir_are_real() -> None:
    modules = [
        *lowered("causal_mqa").values(),
        *lowered("decode_mla").values(),
        *lowered("causal_d512_gqa").values(),
        pipeline.lower(
            make_spec(
                {"name": "chunks", "heads": {"sharing": "gqa"}, "head_dim": 128, "mask": "causal", "positions": {}}
            )
        ),
        *(
            m
            for name in (
                "causal_d256",
                "causal_gqa",
                "mla_dims",
                "full_mha",
                "alibi_mha",
                "cross_mha",
                "dense_bias_dropout_mha",
                "document_gqa",
                "temperature_mha",
                "window_gqa",
            )
            for m in after_passes(name).values()
        ),
    ]
    real = {line for module in modules for line in print_module(module).splitlines()}
    for page in ("docs/ir.md", "docs/hopper.md"):
        shown = [line for block in blocks(page, "ir") for line in block.splitlines()]
        assert shown and [line for line in shown if line not in real] == []


def table(page: str, first_row: str) -> list[list[str]]:
    """The cells of each row of the table of a page whose head is `first_row`."""
    body = text(page).partition(f"\n{first_row}\n")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in body.splitlines()[1:]]


def test_ir_md_names_every_pass_in_order() -> None:
    passes_in = [name for _, cell in table("docs/ir.md", PASSES_TABLE) for name in re.findall(r"`([\w-]+)`", cell)]
    assert passes_in == [p.name for p in passes(hopper_spec("causal_mqa"), build_module(spec("causal_mqa")))]


def test_ir_md_names_every_rule() -> None:
    """Each rule is named once, in one of the two tables or in the sentence about host programs."""
    page = text("docs/ir.md").partition("## What the verifier proves")[2]
    portable, specialized = (
        re.findall(r"`([\w-]+)`", " ".join(line.split("|")[2] for line in part.splitlines() if line.startswith("| ")))
        for part in page.partition("Of host programs")[0].split("Of warp-specialized kernels")
    )
    assert sorted(portable) == sorted(rules("triton")["target"])
    assert sorted(specialized) == sorted(warp_specialized_rules("hopper"))
    assert re.findall(r"`(host-[\w-]+)`", page) == list(HOST_RULES)


def test_the_reference_of_the_ir_has_every_op_pass_and_rule() -> None:
    """Each entry has a docstring. Each op has an example from a generated module, except those that no committed
    module has."""
    levels = list(ir_reference.ops().values())
    assert [entry.name for entry in levels[0]] == list(tile.TILE.own)
    assert [entry.name for entry in levels[1]] == list(pipe.PIPE.own)
    assert [entry.name for entry in levels[2]] == list(gl.GL.own)
    assert [entry.name for entry in levels[3]] == list(launch.HOST.own)
    of_chunks = {"load_tile_start", "write_tile_start", "read_tile_start", "prefetch_tile"}
    of_chunks |= {"gl_write_tile_start", "gl_read_tile_start"}
    without_example = {
        "write_tile_index",
        "write_index",
        "read_index",
        "comment",
        "place",
        "classify_blocks",
    } | of_chunks
    assert {entry.name for level in levels for entry in level if not entry.example} <= without_example
    entries = [entry for _, entry in ir_reference.all_entries()]
    assert [entry.name for entry in entries if not entry.says] == []
    page, passes_in = ir_reference.ir_page(), ir_reference.pass_entries()
    assert re.findall(r"^### `[\w-]+` \(\w+\) \{ #([\w-]+) \}$", page, re.MULTILINE) == [e.name for e in passes_in]
    assert {rule for of_phase in ir_reference.rule_entries().values() for rule in (e.name for e in of_phase)} == (
        {*rules("triton")["target"], *warp_specialized_rules("hopper"), *STATEMENT_RULES, *HOST_RULES}
    )


def test_the_reference_of_the_ir_prints_single_entries(capsys: pytest.CaptureFixture[str]) -> None:
    assert ir_reference.main(["wgmma", "ping-pong", "covers"]) == 0
    shown = capsys.readouterr().out
    assert re.findall(r"^([\w-]+) \(", shown, re.MULTILINE) == ["wgmma", "ping-pong", "covers"]
    assert ir_reference.main(["wgma"]) == 1 and "did you mean `wgmma`" in capsys.readouterr().err


def test_the_error_in_hopper_md_is_the_verifiers() -> None:
    with pytest.raises(VerifyError) as caught:
        verify(edited("causal_gqa", ("    consumer_release %k\n", "")))
    assert f"error: edited.ir: {caught.value}\n" in blocks("docs/hopper.md", "text")


def test_pictures_of_warp_groups_match_the_ir() -> None:
    """They are what `attngen dump specs/causal_gqa.yaml --after PASS --lanes docs/hopper/PASS.svg` writes, in light and
    in dark colours."""
    shown = re.findall(r"^!\[[^]]*\]\(hopper/([\w-]+)\.svg\)$", text("docs/hopper.md"), re.MULTILINE)
    files = {f"{name}{end}.svg" for name in shown for end in ("", "-dark")}
    assert files == {file.name for file in (ROOT / "docs/hopper").iterdir()} and shown
    for name in shown:
        module = after_passes("causal_gqa")[name]
        drawing = lanes(module, module.warp_specialized[0])
        for end, scheme in (("", "light"), ("-dark", "dark")):
            assert (ROOT / f"docs/hopper/{name}{end}.svg").read_text(encoding="utf-8") == svg(drawing, scheme), name


def test_the_kernel_in_ir_md_is_complete() -> None:
    """The example of a dump is the whole kernel @fwd of a committed module."""
    *_, shown = blocks("docs/ir.md", "ir")
    printed = (ROOT / "generated/causal_mqa/schedule.ir").read_text(encoding="utf-8")
    assert f"\n\n{shown}\n" in printed and shown.startswith("kernel @fwd ")


def test_files_that_contributing_md_names_exist() -> None:
    named = re.findall(r"`((?:attngen|templates|tests)/[\w/.]+\.\w+)`", text("CONTRIBUTING.md"))
    new = {"attngen/masks/lagged.py", "templates/hopper/gluon_X_Y.py.jinja"}  # an example, and a pattern
    assert named and [name for name in named if name not in new and not (ROOT / name).exists()] == []


def test_contributing_md_has_a_room_for_every_package() -> None:
    rooms = text("CONTRIBUTING.md").partition("## Which room")[2].partition("\n## ")[0]
    packages = {path.parent.name for path in (ROOT / "attngen").glob("*/__init__.py")}
    assert packages - {found.rstrip("/") for found in re.findall(r"`attngen/(\w+)", rooms)} == set()


@pytest.mark.share(4)
def test_the_theorems_in_theory_md_are_those_that_explain_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    (command,), (shown,) = blocks("docs/theory.md", "sh"), blocks("docs/theory.md", "text")
    with pytest.raises(SystemExit):
        main(command.split()[1:])
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page: str) -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text(page)) if "://" not in link]
    assert [link for link in links if not ((ROOT / page).parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_files_that_commands_name_exist(page: str) -> None:
    made = {"specs/my_attention.yaml", *(step.path for step in steps(page) if isinstance(step, Written))}
    named = PATHS.findall("".join(blocks(page, "sh")))
    assert [name for name in named if not (ROOT / name).exists() and name not in made] == []


@pytest.mark.parametrize("page", ["README.md", *EXECUTED_PAGES])
def test_yaml_is_a_spec(page: str) -> None:
    for block in blocks(page, "yaml"):
        parse_spec(block)


@pytest.mark.share(16)
@pytest.mark.parametrize("page", EXECUTED_PAGES)
def test_python_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The blocks of a page run in order, as one program, in the root of the project; each compares its results with
    PyTorch's. A block of text directly after one is what it prints."""
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.chdir(ROOT)
    program = ModuleType("page_of_the_docs")
    # torch.compile, which FlexAttention calls, looks up functions in the modules.
    monkeypatch.setitem(sys.modules, program.__name__, program)
    torch.manual_seed(0)
    assert (found := WITH_OUTPUT.findall(text(page)))
    for block, output in found:
        capsys.readouterr()
        exec(compile(block, page, "exec"), program.__dict__)
        assert not output or capsys.readouterr().out == output


@pytest.mark.share(4)
def test_the_quickstart_of_the_readme_prints_what_it_shows(tmp_path: Path) -> None:
    """Blocks of Python with their output directly after them run alone, in an empty folder, on a CPU."""
    shown = [(block, output) for block, output in WITH_OUTPUT.findall(text("README.md")) if output]
    assert shown or not re.search("^#+ Quickstart", text("README.md"), re.MULTILINE)
    for block, output in shown:
        hidden = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
        env = {**os.environ, **hidden, "ATTNGEN_CACHE_DIR": str(tmp_path / "cache")}
        done = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout == output, done.stderr


@pytest.mark.parametrize("page", EXECUTED_PAGES)
def test_keys_of_specs_in_tables_and_sentences_are_right(page: str) -> None:
    """Each, such as `mask: causal`, builds in a spec with the other keys that it needs; `a`, `b` are placeholders."""
    latent = {"backward": False, "head_dim": {"qk": 576, "v": 512}, "heads": {"sharing": "mqa"}, "cache": "paged"}
    for shown in re.findall(r"`((?:mask|score|heads|dropout|cache|kv|schedule): [^`]+)`", text(page)):
        data = yaml.safe_load(shown)
        cached = "cache" in data or "schedule" in data or data.get("mask") == "tree"
        needed = latent if "kv" in data else {"backward": False, "cache": "contiguous"} if cached else {}
        if "[a, b]" not in shown:
            make_spec({"name": "shown", "head_dim": 64} | needed | data)


def test_the_errors_in_getting_started_are_those_of_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (shown,) = (block for block in blocks("docs/getting-started.md", "text") if "$ cat specs/typo.yaml" in block)
    found = re.fullmatch(r"\$ cat (specs/typo\.yaml)\n(.*)\$ attngen (build specs/typo\.yaml)\n(.*)", shown, re.DOTALL)
    assert found
    path, content, command, errors = found.groups()
    (tmp_path / "specs").mkdir()
    (tmp_path / path).write_text(content)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(command.split())
    assert ended.value.code == 1 and capsys.readouterr().err == errors


def installs(target: str, *more: str) -> list[str]:
    """The arguments of each `pip install` that a target of the Makefile has, for an environment that is not there."""
    command = ["make", "-n", "VENV=/nowhere", target, *more]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return re.findall(r"-m pip install --quiet --disable-pip-version-check ([^;&]*[^;& ])", made)


def test_make_installs_tools_only_where_they_are_needed() -> None:
    runs = ["-e .", "--no-compile -r requirements-cpu.txt", "--no-compile --no-build-isolation -e ."]
    tools = ['-e ".[dev]"', '--no-compile --no-build-isolation -r requirements-dev.txt -e ".[dev]"']
    for target in ("demo", "verify", "regen", "ready"):
        assert installs(target) == runs, target
    for target in ("test", "lint", "gpu-test", "soak", "sanitize", "dev-ready"):
        assert installs(target) == runs + tools, target
    for target in ("docs", "docs-ready"):
        first, *docs = installs(target)[len(runs + tools) - 1 :]
        assert first == tools[-1] and docs, target
    for target in ("demo", "test", "docs"):
        assert installs(target, "VENV=system") == []


def test_make_installs_torch_from_another_index() -> None:
    torch = next(
        line for line in (ROOT / "requirements-cpu.txt").read_text().splitlines() if line.startswith("torch==")
    )
    existing, *pinned = installs("demo")
    assert installs("demo", "TORCH_INDEX=https://x/cpu") == [
        existing,
        f"--no-compile --no-deps --index-url https://x/cpu {torch}",
        *pinned,
    ]
    assert "TORCH_INDEX=https://download.pytorch.org/whl/cpu" in text("docs/getting-started.md")


def test_pins_are_of_the_packages_that_attngen_names() -> None:
    """Pins for running have the dependencies and what builds attngen, those of tools the rest of the extra `dev`."""

    def pins(file: str) -> dict[str, str]:
        lines = [Requirement(line) for line in text(file).splitlines() if not line.startswith("#")]
        return {pin.name.lower(): str(pin.specifier).removeprefix("==") for pin in lines}

    data = pytest.importorskip("tomllib", reason="Python 3.10 has none").loads(text("pyproject.toml"))
    extras = data["project"]["optional-dependencies"]
    runs_on = [*data["project"]["dependencies"], *data["build-system"]["requires"]]
    named = [*runs_on, *extras["plot"], *extras["transformers"], *extras["dev"]]
    wanted = [need for need in map(Requirement, named) if need.name != "attngen"]
    runs, tools = pins("requirements-cpu.txt"), pins("requirements-dev.txt")
    assert not runs.keys() & tools.keys()
    assert {need.name.lower() for need in wanted} == {*runs, *tools}
    assert runs.keys() == {Requirement(need).name for need in runs_on} | {"editables"}
    assert all(need.specifier.contains((runs | tools)[need.name.lower()]) for need in wanted)


def test_the_workflow_runs_targets_of_the_makefile() -> None:
    """The GPU job calls `make gpu-test`, which rebuilds and tests; the CPU job runs what CI runs, and the nightly job
    what CI leaves out."""
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())
    jobs = workflow["jobs"]
    commands = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in jobs.items()}
    gpu = ["make gpu-test VENV=system", "git diff --exit-code generated"]
    assert commands == {"cpu": [".ci/run"], "nightly": ["make nightly"], "gpu": gpu}
    assert {name: job["if"] for name, job in jobs.items()} == {
        "cpu": "github.event_name != 'schedule'",
        "nightly": "github.event_name == 'schedule'",
        "gpu": "github.event_name != 'schedule'",
    }
    assert "cron" in workflow[True]["schedule"][0]  # YAML's `on`
    makefile = (ROOT / "Makefile").read_text()
    nightly = makefile.partition("\nnightly: browser-ready verify-all\n")[2].partition("\n\n")[0]
    assert '-m "nightly or not nightly"' in nightly and "test_random_masks" in nightly
    assert nightly.endswith("$(MAKE) docs-check")
    assert "attngen verify --all\n" in makefile.partition("\nverify-all:")[2]
    assert "attngen verify --all --changed\n" in makefile.partition("\nverify:")[2]
    recipe = makefile.partition("\ngpu-test:")[2]
    assert "attngen build --all" in recipe and "pytest -m gpu" in recipe
    assert "attngen test --all --report docs/gpu-verification.md" in recipe


def test_versions_md_has_every_supported_pair_and_the_pinned_one() -> None:
    first, pinned = (
        next(iter(PAIRS)),
        dict(re.findall(r"^(torch|triton)==(.*)$", text("requirements-cpu.txt"), re.MULTILINE)),
    )
    least = dict(re.findall(r'^ +"(torch|triton)>=([\d.]+)"', text("pyproject.toml"), re.MULTILINE))
    assert PAIRS[pinned["torch"]] == pinned["triton"]
    assert (f"{least['torch']}.0", f"{least['triton']}.0") == (first, PAIRS[first])
    assert f"| suite | {' | '.join(f'torch {torch}, Triton {triton}' for torch, triton in PAIRS.items())} |" in text(
        "docs/versions.md"
    )


def test_docstrings_list_the_passes_of_hopper_in_their_order() -> None:
    names = [p.name for p in HOPPER.passes(lambda specialization, module: "none")]
    assert re.findall(r"^ ?\d+\. (\S+)", hopper_passes.__doc__ or "", re.MULTILINE) == names
    forward = re.findall(r"^    ([a-z-]+) {2}", pipeline.__doc__ or "", re.MULTILINE)
    assert len(forward) > 10 and forward == [name for name in names if name in forward]
