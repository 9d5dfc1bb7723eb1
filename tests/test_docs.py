"""The docs say what is: excerpts of IR are real, tables are complete, links and commands lead to files that exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml

from attngen.builders import build_module
from attngen.cli import main
from attngen.errors import VerifyError
from attngen.ir.host import HOST_OPS
from attngen.ir.pipe import PIPE_OPS
from attngen.ir.text import print_module
from attngen.lowering.pipeline import passes
from attngen.report.timeline import lanes, svg
from attngen.spec import make_spec, parse_spec
from attngen.verify import rules, verify, warp_specialized_rules
from attngen.verify.host import RULES as HOST_RULES
from tests.helpers import ROOT, SPECS, lowered, spec
from tests.hopper.common import after, asking, edited
from tests.versions.__main__ import PAIRS

PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/ir.md",
    "docs/theory.md",
    "docs/fit.md",
    "docs/hopper.md",
    "docs/lm-training.md",
    "docs/versions.md",
    "docs/index.md",
    "docs/getting-started.md",
    *(f"docs/cookbook/{path.name}" for path in sorted((Path(__file__).parent.parent / "docs/cookbook").glob("*.md"))),
)
RUN = [
    page
    for page in PAGES
    if page.startswith(("docs/getting", "docs/cookbook")) and page != "docs/cookbook/huggingface.md"
]


def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text(page), re.MULTILINE | re.DOTALL)


def test_excerpts_of_ir_are_real() -> None:
    modules = [
        *lowered("causal_mqa").values(),
        *lowered("decode_mla").values(),
        *lowered("causal_d512_gqa").values(),
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
            for m in after(name).values()
        ),
    ]
    real = {line for module in modules for line in print_module(module).splitlines()}
    for page in ("docs/ir.md", "docs/hopper.md"):
        shown = [line for block in blocks(page, "ir") for line in block.splitlines()]
        assert shown and [line for line in shown if line not in real] == []


def test_every_rule_and_pass_is_explained() -> None:
    page = text("docs/ir.md")
    assert re.findall(r"^\| \w* ?\| `([\w-]+)` \|", page, re.MULTILINE) == list(rules("triton")["target"])
    assert re.findall(r"^\*\*([\w-]+)\*\* \((\w+)\)", page, re.MULTILINE) == [
        (p.name, p.phase) for p in passes(asking("causal_mqa"), build_module(spec("causal_mqa")))
    ]


def test_warp_specialized_kernels_are_explained() -> None:
    """Every op and every rule is in a table; the mistake that is shown gets the sentence that is shown."""
    page = text("docs/ir.md")
    tables = ("\n| op of roles | what it does |\n", "\n| rule | what holds of a divided kernel |\n")
    ops, listed = (
        re.findall(r"^\| `([\w-]+)` \|", page.partition(start)[2].partition("\n\n")[0], re.MULTILINE)
        for start in tables
    )
    assert ops == list(PIPE_OPS) and listed == list(warp_specialized_rules("hopper"))
    with pytest.raises(VerifyError) as caught:
        verify(edited("causal_gqa", ("    consumer_release %k\n", "")))
    assert f"error: edited.ir: {caught.value}\n" in blocks("docs/hopper.md", "text")


def test_pictures_of_roles_are_those_of_the_ir() -> None:
    """`attngen dump specs/causal_gqa.yaml --after PASS --lanes docs/hopper/PASS.svg` writes them."""
    shown = re.findall(r"^!\[[^]]*\]\(hopper/([\w-]+)\.svg\)$", text("docs/hopper.md"), re.MULTILINE)
    assert sorted(shown) == sorted(file.stem for file in (ROOT / "docs/hopper").iterdir()) and shown
    for name in shown:
        module = after("causal_gqa")[name]
        assert (ROOT / f"docs/hopper/{name}.svg").read_text(encoding="utf-8") == svg(
            lanes(module, module.warp_specialized[0])
        ), name


def test_host_programs_are_explained() -> None:
    """Every op and every rule is in a table, and the Python shown is printed: in this order, apart from lines that
    are left out."""
    page = text("docs/ir.md")
    ops, listed = (
        page.partition(start)[2].partition("\n\n")[0]
        for start in ("\n| op | what it does |\n", "\n| rule | what holds |\n")
    )
    assert re.findall(r"^\| `(\w+)` \|", ops, re.MULTILINE) == list(HOST_OPS)
    assert re.findall(r"^\| `([\w-]+)` \|", listed, re.MULTILINE) == list(HOST_RULES)
    printed = iter((ROOT / "generated/causal_mqa/__init__.py").read_text(encoding="utf-8").splitlines())
    (shown,) = blocks("docs/ir.md", "python")
    assert [line for line in shown.splitlines() if line not in printed] == []


def test_the_dry_run_names_files_that_exist() -> None:
    """Of what comes next: every existing file is there, and no new one."""
    section = text("docs/ir.md").partition("## What comes next touches")[2]
    named = re.findall(r"`((?:attngen|templates)/[\w/.]+\.\w+)`", section)
    new = {"attngen/builders/split_keys.py", "attngen/ir/names.py", "attngen/targets/registry.py"}
    assert named and [name for name in named if name not in new and not (ROOT / name).exists()] == []


def test_the_theorems_shown_are_what_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    (command,), (shown,) = blocks("docs/theory.md", "sh"), blocks("docs/theory.md", "text")
    with pytest.raises(SystemExit):
        main(command.split()[1:])
    assert capsys.readouterr().out == shown


def test_the_table_of_variants_is_complete() -> None:
    assert sorted(re.findall(r"^\| `(\w+)` \|", text("README.md"), re.MULTILINE)) == SPECS


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page: str) -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text(page)) if "://" not in link]
    assert [link for link in links if not ((ROOT / page).parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_files_that_commands_name_exist(page: str) -> None:
    named = re.findall(r"(?:specs|examples|generated|attngen|tests)/[\w/]+\.\w+", "".join(blocks(page, "sh")))
    made = {"specs/my_attention.yaml", "specs/lagged.yaml", "attngen/masks/lagged.py"}
    assert [name for name in named if not Path(ROOT / name).exists() and name not in made] == []


@pytest.mark.parametrize("page", ["README.md", *(page for page in PAGES if page in RUN or page == "docs/index.md")])
def test_yaml_is_a_spec(page: str) -> None:
    for block in blocks(page, "yaml"):
        parse_spec(block)


@pytest.mark.parametrize("page", RUN)
def test_python_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page in order, as one program, from the folder of the project: each holds its results against
    PyTorch's."""
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.chdir(ROOT)
    program = ModuleType("page_of_the_docs")
    monkeypatch.setitem(
        sys.modules, program.__name__, program
    )  # where torch.compile, which FlexAttention calls, looks for functions
    torch.manual_seed(0)
    assert (found := blocks(page, "python"))
    for block in found:
        exec(compile(block, page, "exec"), program.__dict__)


@pytest.mark.parametrize("page", RUN)
def test_keys_of_specs_in_tables_and_sentences_are_right(page: str) -> None:
    """Such as `mask: causal`, in a spec that has what they need beside them; `a` and `b` are placeholders."""
    latent = {"backward": False, "head_dim": {"qk": 576, "v": 512}, "heads": {"sharing": "mqa"}, "cache": "paged"}
    for shown in re.findall(r"`((?:mask|score|heads|dropout|cache|kv|schedule): [^`]+)`", text(page)):
        data = yaml.safe_load(shown)
        served = "cache" in data or "schedule" in data or data.get("mask") == "tree"
        beside = latent if "kv" in data else {"backward": False, "cache": "contiguous"} if served else {}
        if "[a, b]" not in shown:
            make_spec({"name": "shown", "head_dim": 64} | beside | data)


def test_the_mistakes_in_the_readme_are_what_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (shown,) = (block for block in blocks("README.md", "text") if "$ cat specs/typo.yaml" in block)
    found = re.fullmatch(r"\$ cat (specs/typo\.yaml)\n(.*)\$ attngen (build specs/typo\.yaml)\n(.*)", shown, re.DOTALL)
    assert found
    path, content, command, errors = found.groups()
    (tmp_path / "specs").mkdir()
    (tmp_path / path).write_text(content)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(command.split())
    assert ended.value.code == 1 and capsys.readouterr().err == errors


def test_make_takes_torch_from_an_index_of_its_own() -> None:
    def steps(*more: str) -> list[str]:
        made = subprocess.run(
            ["make", "-n", "VENV=/nowhere", "demo", *more], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        return re.findall(r"-m pip install --quiet --disable-pip-version-check ([^;&]*[^;& ])", made)

    torch = next(
        line for line in (ROOT / "requirements-cpu.txt").read_text().splitlines() if line.startswith("torch==")
    )
    existing, plain, own = steps()
    assert (existing, plain, own) == (
        '-e ".[dev]"',
        "--no-compile -r requirements-cpu.txt",
        "--no-deps --no-build-isolation -e .",
    )
    assert steps("TORCH_INDEX=https://x/cpu") == [
        existing,
        f"--no-compile --no-deps --index-url https://x/cpu {torch}",
        plain,
        own,
    ]
    assert "TORCH_INDEX=https://download.pytorch.org/whl/cpu" in text("README.md")


def test_the_workflow_runs_what_there_is() -> None:
    """Its GPU job calls make gpu-test, which rebuilds and tests; its CPU job what CI runs; its nightly job what that
    leaves out."""
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
    nightly = makefile.partition("\nnightly: verify-all\n")[2].partition("\n\n")[0]
    assert '-m "nightly or not nightly"' in nightly and "test_random_masks" in nightly
    assert "attngen verify --all\n" in makefile.partition("\nverify-all:")[2]
    assert "attngen verify --all --changed\n" in makefile.partition("\nverify:")[2]
    recipe = makefile.partition("\ngpu-test:")[2]
    assert "attngen build --all" in recipe and "pytest -m gpu" in recipe
    assert "attngen test --all --report docs/gpu-verification.md" in recipe


def test_the_page_of_versions_has_each_supported_pair_and_those_that_are_pinned() -> None:
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
