"""Run a suite of a few minutes under each supported pair of torch and Triton, and write docs/versions.md from the
results: `make versions`.

Each pair gets its own environment in a folder, which later runs reuse. This program needs only Python's own library.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import venv
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from attngen.versions import PAIRS

ROOT = Path(__file__).parents[2]
PAGE, FINDINGS = ROOT / "docs" / "versions.md", ROOT / "docs" / "versions.json"
# Packages, in addition to torch and Triton, that run and test generated modules. The interpreter of Triton 3.6 needs
# NumPy below 2.4.
PACKAGES = ("numpy<2.4", "jinja2", "sympy", "networkx", "pydantic", "pyyaml", "typer", "rich", "pytest", "hypothesis")
FILES = ("test_torch", "test_numerics", "test_private", "test_launch", "test_calls")
NAMES = "(causal_mqa or window_gqa or causal_dropout_mqa or padding_mha)"
# (title on the page, the test, its cases as the rest of pytest's -k)
CHECKS = (
    ("import of every module", "test_importing_starts_nothing", ""),
    (
        "interpreter: results and gradients against naive attention",
        "test_against_naive",
        f"129x129 and bhnd and {NAMES} and fp16",
    ),
    ("wrong calls get their sentence", "test_a_wrong_call_is_one_sentence", ""),
    ("`torch.library.opcheck`", "test_opcheck", "bhnd and (causal_dropout_mqa or padding_mha)"),
    ("`torch.compile`, one graph", "test_compile", "causal_dropout_mqa and None"),
    ("`torch.export`, loaded in another process", "test_a_saved_graph_runs_in_another_process", ""),
    ("checkpoints", "test_checkpoint_gives_the_same_bits", "causal_dropout_mqa"),
    ("autocast", "test_autocast", "causal_dropout_mqa"),
    (
        "vmap and second derivatives are refused",
        "test_vmap_is_refused or test_second_derivatives_are_refused",
        "causal_dropout_mqa",
    ),
    ("without each private interface: the same results", "test_without_one", ""),
    (
        "launches, on fakes of compiled kernels",
        "test_triton_looks_at_the_first_launch_alone or test_a_profiler_sees_every_launch",
        "",
    ),
)


def environment(folder: Path, torch: str) -> Path:
    """Return the Python of an environment with a version of torch and its Triton; create it if it does not exist."""
    python, expected = folder / f"torch-{torch}" / "bin" / "python", f"{torch} {PAIRS[torch]}"
    asked = "import torch, triton, pytest, hypothesis; print(torch.__version__.split('+')[0], triton.__version__)"
    if (
        python.exists()
        and subprocess.run([python, "-c", asked], capture_output=True, text=True).stdout.strip() == expected
    ):
        return python
    venv.create(python.parents[1], with_pip=True, clear=True)
    packages = (f"torch=={torch}", f"triton=={PAIRS[torch]}", *PACKAGES)
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages], check=True)
    return python


def printed_by(python: Path, module: str) -> Any:
    """Return the JSON that a module of tests/versions prints in that environment."""
    done = subprocess.run([python, "-m", f"tests.versions.{module}"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{python}: {module}: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def tested(python: Path, report: Path) -> dict[str, str]:
    """Return the outcome of each check: `12 passed`, or how many failed and which."""
    selection = " or ".join(f"(({tests}) and ({cases}))" if cases else f"({tests})" for _, tests, cases in CHECKS)
    files = [f"tests/{name}.py" for name in FILES]
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "--show-capture=no",
        "--tb=line",
        f"--junitxml={report}",
        "-k",
        selection,
    ]
    subprocess.run([python, "-m", "pytest", *files, *options], cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"})
    cases = ElementTree.parse(report).getroot().iter("testcase")
    found: dict[str, list[tuple[str, str]]] = {}
    for case in cases:
        outcome = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
        found.setdefault(case.attrib["name"].split("[")[0], []).append((outcome, case.attrib["name"]))
    return {
        title: _cell([x for name in found for x in found[name] if _is_of(name, tests)]) for title, tests, _ in CHECKS
    }


def _is_of(name: str, tests: str) -> bool:
    return any(name.startswith(test) for test in tests.split(" or "))


def _cell(cases: list[tuple[str, str]]) -> str:
    """Return a cell of the table. A check without any test is an error."""
    if not cases:
        return "**no test found**"
    counts = Counter(outcome for outcome, _ in cases)
    wrong = [f"`{name}`" for outcome, name in cases if outcome in ("failure", "error")]
    return ", ".join(f"{n} {outcome}" for outcome, n in sorted(counts.items())) + (
        f": {', '.join(wrong)}" if wrong else ""
    )


def compiled_cell(found: dict[str, Any]) -> str:
    """Return the findings about one target's kernels, in words."""
    parts = [f"{found['kernels']} kernels"]
    if found["spill"]:
        least, most = min(found["spill"].values()), max(found["spill"].values())
        parts.append(f"{len(found['spill'])} spill {least}{f' to {most:,}' if most > least else ''} bytes")
    for key, text in (
        ("more", "need more than predicted"),
        ("less", "need less"),
        ("do_not_fit", "do not fit"),
        ("failed", "do not compile"),
    ):
        parts += [f"{len(found[key])} {text}"] if found[key] else []
    findings = {
        "serialised": "serialised",
        "reused": "write operands in flight",
        "unset": "read what is not written",
        "bare": "overlap little",
    }
    for key, text in findings.items():
        parts += [f"{len(found[key])} {text}"] if found.get(key) else []
    return ", ".join(parts if len(parts) > 1 else [*parts, "as predicted"])


def table(heading: str, columns: dict[str, dict[str, str]]) -> list[str]:
    """Return the lines of a table with a column for each version, and a row for each key in any of them."""
    rows = list(dict.fromkeys(row for column in columns.values() for row in column))
    lines = [f"| {heading} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    return [
        *lines,
        *(f"| {row} | {' | '.join(column.get(row, 'not run') for column in columns.values())} |" for row in rows),
    ]


def page(runs: dict[str, dict[str, Any]], recorded: dict[str, Any]) -> str:
    """Return the text of docs/versions.md."""

    def columns(part: str) -> dict[str, dict[str, str]]:
        return {title: run[part] for title, run in runs.items()}

    certified = {f"Triton {v}": {t: compiled_cell(found) for t, found in of.items()} for v, of in recorded.items()}
    intro = (
        "`make versions` writes this page: a suite of a few minutes under each pair of torch and Triton that is "
        "supported, each in an environment of\nits own, on a CPU. "
        "Triton's interpreter runs kernels; no GPU has launched them here."
    )
    parts = [
        "# Versions\n",
        f"{intro}\n",
        *table("suite", columns("tests")),
        "\n## Private interfaces\n",
        "Which private interfaces `attngen/runtime/private.py` uses; where the table says `public`, it uses a public "
        "replacement\n"
        "(CPU builds have no `_cuda_getDevice`).\n",
        *table("interface", columns("private")),
        "\n## A sample, compiled\n",
        "Kernels of `causal_mqa`, compiled ahead of time, compared with the prediction of [fit.md](fit.md). Those of\n"
        "`hopper` are warp-specialized forwards, of `causal_mqa` and `causal_gqa`. Their machine code is read, too:\n"
        "no product is serialised, exponentials overlap products, nothing writes an operand of a product before its\n"
        "wait, and no path reads a uniform register that it has not written.\n",
        *table("target", columns("compiled")),
    ]
    if certified:
        parts += [
            "\n## All modules, compiled by other versions\n",
            "By `python -m tests.versions.compiled --all --write` in an environment with that Triton, by hand. The "
            "certificates in\n"
            "`report.json` are of the pinned version; `docs/versions.json` has the findings of others.\n",
            *table("target", certified),
        ]
    return "\n".join([*parts, ""])


def main() -> None:
    """Run the suite under the requested pairs, and write the page with the results of all pairs. Exit with an error if
    a check fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--torch",
        nargs="*",
        choices=PAIRS,
        default=list(PAIRS),
        help="versions of torch [default: all]; none: only write the page",
    )
    parser.add_argument(
        "--envs",
        type=Path,
        default=ROOT / ".versions",
        help="folder of the environments, some GB each [default: .versions]",
    )
    asked = parser.parse_args()
    asked.envs.mkdir(parents=True, exist_ok=True)
    for torch in asked.torch:
        python, start = environment(asked.envs, torch), time.perf_counter()
        title = f"torch {torch}, Triton {PAIRS[torch]}"
        run = {
            "tests": tested(python, asked.envs / f"torch-{torch}.xml"),
            "private": {
                f"`{name}`": "taken" if taken else "public" for name, taken in printed_by(python, "probe").items()
            },
            "compiled": {target: compiled_cell(found) for target, found in printed_by(python, "compiled").items()},
        }
        (asked.envs / f"torch-{torch}.json").write_text(json.dumps({title: run}), encoding="utf-8")
        print(f"{title}: {time.perf_counter() - start:.0f} s")
    runs: dict[str, Any] = {}
    for torch, triton in PAIRS.items():
        results = asked.envs / f"torch-{torch}.json"
        missing: dict[str, Any] = {f"torch {torch}, Triton {triton}": {"tests": {}, "private": {}, "compiled": {}}}
        runs |= json.loads(results.read_text(encoding="utf-8")) if results.exists() else missing
    findings = json.loads(FINDINGS.read_text(encoding="utf-8")) if FINDINGS.exists() else {}
    PAGE.write_text(page(runs, findings), encoding="utf-8")
    wrong = [
        f"{title}: {name}: {cell}"
        for title, run in runs.items()
        for name, cell in run["tests"].items()
        if not _is_right(cell)
    ]
    sys.exit("\n".join(wrong) or None)


def _is_right(cell: str) -> bool:
    return "passed" in cell and not any(word in cell for word in ("failure", "error"))


if __name__ == "__main__":
    main()
