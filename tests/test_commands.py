"""Each command in the docs works. Those in the ```sh blocks of all pages have one kind each, by the rules of `kind`.

- `run`: a copy of the checkout runs them, page by page, in their order; what takes long runs every night.
- `cuda`: they need a GPU, and say so in one sentence where there is none.
- `parse`: they take minutes or do not end, so their arguments are parsed.
- `make`: `make -n` knows the target.
- `download`: pip would take a package from its index, which has to be one that pyproject.toml names.
- `elsewhere`: they change to another folder, or are about the reader's own git.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
import typer

from attngen.cli import app, main
from attngen.errors import SpecError
from tests.docs_common import BLOCK, PAGES, Command, Written, commands, steps, text
from tests.helpers import CUDA, ROOT

MEASURE = {"bench", "profile", "tune"}  # need a GPU, except with one of these options
SHOWS = {"bench": "--list", "tune": "--dry-run"}  # show what would be measured
WITHOUT_GPU = {"--dry-run", "--list", "--from", "--help", "-h"}
ENDLESS = re.compile(r"mkdocs|tests\..*|docs\.site\.check")
BROUGHT = {  # files that readers have
    "config.json": json.dumps(
        {
            "model_type": "llama",
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "vocab_size": 128,
            "dtype": "bfloat16",
        }
    )
}
WITH_COMMANDS = [page for page in PAGES if any(isinstance(step, Command) for step in steps(page))]


def kind(command: Command) -> str:
    """How a command is tested. The rules are those of the docstring above."""
    words, arguments = command.words, command.arguments
    if arguments is not None:
        if arguments[0] in MEASURE and not WITHOUT_GPU & {*arguments}:
            return "cuda"
        return "parse" if "--all" in arguments or "--compare" in arguments else "run"
    if command.names("make"):
        return "make"
    if command.names("pip") or words[:3] == ("python", "-m", "pip"):
        local = [word for word in words if word.startswith((".", "/", "dist/"))]
        return "run" if local or "install" not in words else "download"
    if command.names("python"):
        if words[1] == "-m":
            return "parse" if ENDLESS.fullmatch(words[2]) and "--help" not in words else "run"
        script = ROOT / words[1]
        needs_gpu = script.is_file() and "It needs a GPU" in script.read_text(encoding="utf-8")
        return "cuda" if needs_gpu and "--help" not in words else "run"
    if command.names("git", "cd", ".", "source", "exec"):
        return "elsewhere"
    if command.names("torchrun"):
        return "run"
    assert command.names("sed", "cat", "cp", "mkdir", "ls", "head", "export", "echo"), f"no rule for `{command.text}`"
    return "run"


def is_long(command: Command) -> bool:
    """Whether a command that is run takes more than some seconds."""
    arguments = command.arguments
    if arguments is not None:
        return arguments[0] in ("test", "verify")
    started = command.names("python", "torchrun")
    return started and "examples/" in command.text and "--help" not in command.words


def of_kind(page: str, *kinds: str) -> list[Command]:
    return [step for step in steps(page) if isinstance(step, Command) and kind(step) in kinds]


def test_commands_are_found() -> None:
    """They are in `sh` blocks, whose commands the tests below take; no page has another kind of block for them."""
    assert {"README.md", "CONTRIBUTING.md"} <= {*WITH_COMMANDS} and len(WITH_COMMANDS) > 5
    assert {found for page in PAGES for found, _ in BLOCK.findall(text(page))} & {"bash", "console", "shell"} == set()
    kinds = [kind(step) for page in PAGES for step in steps(page) if isinstance(step, Command)]
    assert {"run", "cuda", "parse", "make"} <= {*kinds} and len(kinds) > 50


def test_wrong_commands_are_noticed() -> None:
    for wrong in (
        "attngen biuld causal_mqa",
        "attngen build causl_mqa",
        "attngen build --al",
        "attngen tune --budget x",
    ):
        (command,) = commands(wrong)
        with pytest.raises((AssertionError, SpecError, *typer.BadParameter.__bases__)):  # an error of usage
            parse_attngen(command.arguments or [])
    with pytest.raises(AssertionError, match="no rule for `rm -r generated`"):
        kind(*commands("rm -r generated"))
    with pytest.raises(AssertionError, match="not a complete command"):
        commands('python -c "print(1)')


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_arguments_parse(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of attngen for all kinds, and of programs that are not run."""
    (tmp_path / "specs").mkdir()
    monkeypatch.chdir(tmp_path)
    for step in steps(page):
        if isinstance(step, Written) and step.path.startswith("specs/"):
            (tmp_path / step.path).touch()
        elif isinstance(step, Command) and (arguments := step.arguments):
            parse_attngen(arguments)
            if arguments[0] == "new":
                (tmp_path / "specs" / f"{arguments[1]}.yaml").touch()
    monkeypatch.chdir(ROOT)
    for command in of_kind(page, "parse"):
        if command.arguments is None:
            parse_module(command, monkeypatch)


def parse_attngen(arguments: list[str]) -> None:
    """Raise the error of typer or attngen if arguments are wrong."""
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    if arguments[0].startswith("-"):
        options = group.get_params(group.make_context("attngen", ["list"]))
        assert arguments[0] in {name for option in options for name in option.opts}
        return
    assert arguments[0] in group.commands, f"attngen has no command `{arguments[0]}`"
    if "--help" not in arguments and "-h" not in arguments:
        group.commands[arguments[0]].make_context(arguments[0], arguments[1:])


def parse_module(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run `python -m MODULE`, and stop it where it has parsed its arguments."""
    _, _, module, *arguments = command.words
    if module == "mkdocs":
        cli = pytest.importorskip("mkdocs.__main__").cli
        assert isinstance(cli, click.Group)
        cli.commands[arguments[0]].make_context(arguments[0], arguments[1:])
        return

    class ParsedError(Exception):
        pass

    parse = argparse.ArgumentParser.parse_args

    def stop(*args: object, **kwargs: object) -> None:
        parse(*args, **kwargs)  # type: ignore[call-overload]
        raise ParsedError

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        patch.setattr(sys, "argv", [module, *arguments])
        with pytest.raises(ParsedError):
            runpy.run_module(module, run_name="__main__")


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_make_knows_targets(page: str) -> None:
    """Also those in sentences, such as `make verify-all`."""
    for command in of_kind(page, "make"):
        done = subprocess.run([*command.words, "-n"], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, f"{command.text}: {done.stderr}"
    targets = set(re.findall(r"^([\w-]+):", text("Makefile"), re.MULTILINE))
    assert {*re.findall(r"`make ([a-z][\w-]*)", text(page))} <= targets


def test_packages_that_pip_downloads_are_known() -> None:
    """Attngen itself is not on an index."""
    project = pytest.importorskip("tomllib", reason="Python 3.10 has none").loads(text("pyproject.toml"))["project"]
    named = [*project["dependencies"], *(need for extra in project["optional-dependencies"].values() for need in extra)]
    known = {re.match(r"[\w-]+", need)[0].lower() for need in named} - {"attngen"}  # type: ignore[index]
    for page in WITH_COMMANDS:
        for command in of_kind(page, "download"):
            (*_, after) = " ".join(command.words).partition("install ")
            words = re.sub(r"--[\w-]*url[= ]\S+", "", after).split()
            packages = {re.split(r"[\[<>=!~]", word)[0].lower() for word in words if not word.startswith("-")}
            assert packages and packages <= known, f"{page}: {command.text}"


@pytest.mark.share(4)
@pytest.mark.skipif(CUDA, reason="there is a CUDA device")
@pytest.mark.parametrize("page", [page for page in WITH_COMMANDS if of_kind(page, "cuda")])
def test_commands_that_measure_say_that_they_need_a_gpu(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "specs", tmp_path / "specs")
    shutil.copytree(ROOT / "docs" / "bench", tmp_path / "docs" / "bench")
    for step in steps(page):
        if isinstance(step, Written):
            (tmp_path / step.path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / step.path).write_text(step.text)
    for command in of_kind(page, "cuda"):
        if (arguments := command.arguments) is None:
            continue  # a script, which is run below
        for name in re.findall(r"specs/(\w+)\.yaml", command.text):
            if not (tmp_path / "specs" / f"{name}.yaml").exists():
                (tmp_path / "specs" / f"{name}.yaml").write_text(f"name: {name}\nhead_dim: 64\n")
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        errors = capsys.readouterr().err
        assert ended.value.code == 1 and re.fullmatch(r"error: [^\n]*(CUDA|GPU)[^\n]*\n", errors), errors
        if option := SHOWS.get(arguments[0]):
            with pytest.raises(SystemExit) as ended:
                main([*arguments, option])
            shown = capsys.readouterr()
            assert not ended.value.code and shown.out, shown.err


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what commands read or write, and the files that readers bring."""
    for name in ("attngen", "specs", "generated", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if not path.name.startswith(".") and not (tmp_path / path.name).exists():
            (tmp_path / path.name).symlink_to(path)
    for name, content in BROUGHT.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "bin").mkdir()
    modules = {"python": "", "pip": "-m pip", "attngen": "-m attngen", "torchrun": "-m torch.distributed.run"}
    for program, module in modules.items():
        script = tmp_path / "bin" / program
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
        script.chmod(0o755)
    return tmp_path


@pytest.mark.share(32)
@pytest.mark.parametrize("page", [page for page in WITH_COMMANDS if any(not is_long(c) for c in of_kind(page, "run"))])
def test_quick_commands_run(page: str, checkout: Path) -> None:
    run_page(page, checkout, lambda command: kind(command) == "run" and not is_long(command))


@pytest.mark.nightly
@pytest.mark.parametrize("page", [page for page in WITH_COMMANDS if of_kind(page, "run", "cuda")])
def test_all_commands_run(page: str, checkout: Path) -> None:
    """And scripts that need a GPU say so."""
    run_page(
        page, checkout, lambda command: kind(command) == "run" or (kind(command) == "cuda" and not command.arguments)
    )


def run_page(page: str, checkout: Path, wanted: Callable[[Command], bool]) -> None:
    """Write the files that a page shows, and run commands of it, in their order. Those of kind `cuda` have to fail with
    the sentence that they need a GPU. pip installs nothing, and pytest only parses its arguments."""
    pip = {"NO_INDEX": "1", "NO_DEPS": "1", "DRY_RUN": "1", "NO_BUILD_ISOLATION": "0"}  # 0: build without isolation
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {f"PIP_{name}": value for name, value in pip.items()}
    env |= {name: str(checkout / folder) for name, folder in {"HOME": "home", "ATTNGEN_CACHE_DIR": "cache"}.items()}
    env |= {"PATH": f"{checkout / 'bin'}:{env['PATH']}", "PYTHONPATH": str(checkout)}
    for step in steps(page):
        if isinstance(step, Written):
            (checkout / step.path).write_text(step.text)
            continue
        if not wanted(step):
            continue
        shell = step.text.replace("-m pytest", "-m pytest --markers")
        done = subprocess.run(["bash", "-c", shell], cwd=checkout, env=env, capture_output=True, text=True)
        if kind(step) == "cuda":
            assert CUDA or (done.returncode and re.search("CUDA|GPU", done.stderr.splitlines()[-1])), done.stderr
            assert "Traceback" not in done.stderr, done.stderr
        else:
            assert done.returncode == 0, f"{page}: {step.text}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
