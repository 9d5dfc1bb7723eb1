"""`attngen.build` and `attngen.load`: their arguments, results and errors, and modules of one name."""

from __future__ import annotations

import gc
import pickle
import shutil
import sys
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import attngen
from attngen import api
from attngen.cache import store
from attngen.codegen.files import write_module
from attngen.errors import AttngenError, SpecError
from attngen.spec import load_spec, make_spec
from attngen.specs import find_spec, known_specs
from tests import module_cache_common
from tests.helpers import ROOT, SPECS
from tests.module_cache_common import SPEC, is_right, qkv, script

cache, compiled = module_cache_common.cache, module_cache_common.compiled  # fixtures

YAML = (
    "name: mine\nhead_dim: 16\ndtype: fp16\nmask: causal\n"
    "schedule: {block_q: 16, block_kv: 16, stages: 1, warps: 4, backend: triton}\n"
)


def test_data_a_file_and_a_spec_give_one_module(tmp_path: Path, device: str, cache: Path, compiled: list[str]) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(YAML)
    module = attngen.build(SPEC)
    assert is_right(module, device)
    other_order = dict(reversed(SPEC.items()))
    for same in (dict(SPEC), other_order, OrderedDict(SPEC), path, str(path), load_spec(path), make_spec(SPEC)):
        assert attngen.build(same) is module
    assert compiled == ["mine"]
    assert [folder.name for folder in store.modules()] == [module.__name__.removeprefix("attngen.built.")]
    assert Path(str(module.__file__)).parent.parent == cache


@pytest.mark.share(4)
def test_a_file_that_changed_is_another_spec(tmp_path: Path, device: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(YAML)
    first = attngen.build(path)
    path.write_text(YAML.replace("causal", "none"))
    second = attngen.build(path)
    assert first is not second and is_right(second, device, causal=False)


def test_no_file_or_subpackage_replaces_a_function() -> None:
    """No file or subpackage has the name of a public function: importing it would replace the function."""
    attngen.build(SPEC)
    assert attngen.build is api.build and attngen.load is api.load
    for name in attngen.__all__:
        assert not (ROOT / "attngen" / f"{name}.py").exists() and not (ROOT / "attngen" / name / "__init__.py").exists()


def test_building_a_known_dict_takes_microseconds() -> None:
    attngen.build(SPEC)
    start = time.process_time()
    for _ in range(1000):
        attngen.build(dict(SPEC))
    assert time.process_time() - start < 0.5  # half a millisecond each; it takes some microseconds


EXPECTED = "expected the path of a YAML file, the name of a spec, a dict of plain data, or a Spec"
WRONG = [
    (None, f"attngen.build: got None; {EXPECTED}"),
    ([SPEC], f"attngen.build: got a value of type `list`; {EXPECTED}"),
    ({**SPEC, "mask": "casual"}, "spec: `mask` is `casual`, which is not a mask; did you mean `causal`?"),
    ({**SPEC, "mask": object()}, "spec: `mask`"),
    ({}, "spec: `name` is missing; expected "),
    ({**SPEC, "head_dim": 256, "schedule": {"block_q": 256}}, "spec: `schedule` does not fit: on "),
    (
        YAML,
        (
            "attngen.build: the text is not a path; expected the path of a YAML file, the name of a spec, or plain "
            "data, as yaml.safe_load gives"
        ),
    ),
    ("none/such.yaml", "none/such.yaml: there is no such file; `attngen new NAME` writes a spec to start from"),
    (
        "causal_gqq",
        "there is no spec `causal_gqq`; expected one of specs/, one that attngen ships, or a path; did you mean "
        "`causal_gqa`?",
    ),
    ("zzz", "there is no spec `zzz`; expected one of specs/, one that attngen ships, or a path; `attngen new NAME`"),
    ("./causal_gqa", "causal_gqa: there is no such file; "),
    (Path("causal_gqa"), "causal_gqa: there is no such file; "),
    (ROOT / "specs", f"{ROOT / 'specs'}: cannot be read (Is a directory); expected a YAML spec"),
]


@pytest.mark.parametrize(("wrong", "sentence"), WRONG)
def test_wrong_specs_get_one_sentence(wrong: Any, sentence: str, cache: Path) -> None:
    with pytest.raises(SpecError) as caught:
        attngen.build(wrong)
    assert (
        str(caught.value).startswith(sentence)
        and "\n" not in str(caught.value).removeprefix("spec: `name`").partition("\nspec")[0]
    )
    assert store.modules() == []


def test_a_name_is_a_spec_of_the_folder_or_a_shipped_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files and folders that have the name alone are not meant."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full_mha").mkdir()
    (tmp_path / "full_mha.yaml").write_text("name: other\nhead_dim: 64\n")
    (tmp_path / "causal_mha").write_text("name: bare\nhead_dim: 64\n")
    assert find_spec("full_mha") == ROOT / "specs" / "full_mha.yaml"
    assert find_spec("./causal_mha") == Path("causal_mha") and find_spec("full_mha.yaml") == Path("full_mha.yaml")
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs" / "causal_mha.yaml").write_text("name: own\nhead_dim: 16\nschedule: {backend: triton}\n")
    assert attngen.build("causal_mha") is attngen.build("specs/causal_mha.yaml")
    assert sorted(known_specs()) == SPECS and known_specs()["causal_mha"] == Path("specs/causal_mha.yaml")


def test_a_wrong_file_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "wide.yaml"
    path.write_text("name: wide\nhead_dim: 256\nschedule: {block_q: 256}\n")
    with pytest.raises(SpecError, match=rf"^{path}, line 3: `schedule` does not fit: on "):
        attngen.build(path)
    path.write_text("name: wide\nhead_dim: 63\n")
    with pytest.raises(SpecError, match=rf"^{path}, line 2: `head_dim` is the number 63; expected "):
        attngen.build(path)


def test_a_questionable_spec_gets_a_warning() -> None:
    with pytest.warns(UserWarning, match="^spec: `mask` ") as caught:
        attngen.build({**SPEC, "mask": {"expr": "kv_idx <= q_idx"}})
    assert caught[0].filename == __file__


def test_a_cache_that_cannot_be_written_gets_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(store.VARIABLE, str(tmp_path / "file"))
    with pytest.raises(
        AttngenError, match=r"/file/modules: cannot be written \(Not a directory\); name another folder in "
    ):
        attngen.build(SPEC)


@pytest.mark.share(16)
def test_two_modules_of_one_name_can_be_used_together(device: str) -> None:
    """They can be called, compiled into one graph, and pickled."""
    causal, full = attngen.build(SPEC), attngen.build({**SPEC, "mask": "none"})
    assert causal is not full and causal.FORWARD is not full.FORWARD
    assert is_right(causal, device) and is_right(full, device, causal=False)
    q, k, v = qkv(device)
    both = torch.compile(
        lambda: causal.attention(q, k, v) - full.attention(q, k, v), backend="aot_eager", fullgraph=True
    )
    assert both().equal(causal.attention(q, k, v) - full.attention(q, k, v)) and both().abs().max() > 0.1
    for module in (causal, full):
        assert pickle.loads(pickle.dumps(module.Attention()))(q, k, v).equal(module.attention(q, k, v))


def test_modules_that_differ_only_in_code_have_separate_operators(tmp_path: Path, device: str) -> None:
    """Two versions of attngen that give a spec the same schedule make such modules."""
    first = attngen.build(SPEC)
    folder = shutil.copytree(
        Path(str(first.__file__)).parent, tmp_path / "mine", ignore=shutil.ignore_patterns("__pycache__")
    )
    assert attngen.load(folder) is first
    with (folder / "runtime.py").open("a") as file:
        file.write("\nEDITED = True\n")
    second = attngen.load(folder)
    assert second.runtime.EDITED and not hasattr(first.runtime, "EDITED")
    assert first.FORWARD is not second.FORWARD
    assert is_right(first, device) and is_right(second, device)


def test_garbage_collection_pauses_while_a_module_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[bool] = []

    def lower(_: Any) -> Any:
        ran.append(gc.isenabled())
        raise AttngenError("enough")

    monkeypatch.setattr("attngen.lowering.pipeline.lower", lower)
    for before in (True, False):
        (gc.enable if before else gc.disable)()
        try:
            with pytest.raises(AttngenError, match="enough"):
                attngen.build(SPEC)
            assert gc.isenabled() == before
        finally:
            gc.enable()
    assert ran == [False, False]


def test_load_imports_a_folder_from_anywhere(tmp_path: Path, device: str) -> None:
    folder = tmp_path / "my modules" / "made-here"
    files = api._render(make_spec(SPEC), None)
    write_module(files, folder)
    module = attngen.load(str(folder))
    assert is_right(module, device) and attngen.load(folder) is module
    assert module.__name__.startswith("attngen.built.made_here_") and str(folder.parent) not in sys.path
    assert pickle.loads(pickle.dumps(module.attention)) is module.attention
    write_module(api._render(make_spec({**SPEC, "mask": "none"}), None), folder)
    assert is_right(attngen.load(folder), device, causal=False) and is_right(module, device)


def test_load_of_a_copy_works_after_the_first_is_removed(tmp_path: Path, device: str) -> None:
    for name in ("a", "b"):
        write_module(api._render(make_spec(SPEC), None), tmp_path / name / "mine")
    first = attngen.load(tmp_path / "a" / "mine")
    assert attngen.load(tmp_path / "b" / "mine") is first
    shutil.rmtree(tmp_path / "a")
    second = attngen.load(tmp_path / "b" / "mine")
    assert second is not first and is_right(second, device)


def test_load_refuses_other_folders_in_one_sentence(tmp_path: Path) -> None:
    def refused(path: Any) -> str:
        with pytest.raises(AttngenError) as caught:
            attngen.load(path)
        return str(caught.value)

    expected = "expected the folder of a generated module, as in `generated/causal_mqa`"
    assert (
        refused(None) == "attngen.load: got None; expected the path of a generated folder, as in `generated/causal_mqa`"
    )
    assert refused(tmp_path / "none") == f"{tmp_path}/none does not exist; {expected}"
    spec = ROOT / "specs" / "causal_mqa.yaml"
    assert refused(spec) == f"{spec} is not a folder; {expected}; `attngen.build` takes specs"
    assert (
        refused(tmp_path)
        == f"{tmp_path} is not a generated module (it has no __init__.py); `attngen build SPEC` writes one"
    )
    folder = shutil.copytree(
        ROOT / "generated" / "causal_mqa", tmp_path / "cut", ignore=shutil.ignore_patterns("__pycache__")
    )
    (folder / "kernels.py").write_text("def unswitch(")
    assert refused(folder) == (
        f"{folder}: cannot be imported (SyntaxError: '(' was never closed (kernels.py, line 1)); expected what "
        f"`attngen build` writes"
    )
    assert not [name for name in sys.modules if name.startswith("attngen.built.cut_")]


IMPORT_ATTNGEN = """
import sys
before = set(sys.modules)
import attngen
packages = {name.partition(".")[0] for name in set(sys.modules) - before}
print(attngen.__version__, sorted(packages - set(sys.stdlib_module_names)))
try:
    attngen.bild
except AttributeError as error:
    print(error)
import attngen.api
print({"torch", "triton", "sympy", "pydantic", "yaml", "filelock"} & set(sys.modules))
"""


def test_importing_attngen_imports_nothing_else() -> None:
    assert script(IMPORT_ATTNGEN).splitlines() == [
        f"{attngen.__version__} ['attngen']",
        "module `attngen` has no attribute `bild`",
        "set()",
    ]
