"""`attngen profile`: the CSV of ncu, predictions compared with measurements, and errors. Tests use a fake ncu, so none
needs a GPU."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from attngen import cli
from attngen.bench import profile as profiling
from attngen.bench.counters import METRICS, Bytes, Launch, command, parse, profile
from attngen.bench.profile import MARK, Call, attribute, predicted, predicted_naive, variants, write
from attngen.bench.profile_results import Found, Line, read, rows
from attngen.cost.roofline import Problem
from attngen.devices import DEVICES
from attngen.errors import AttngenError
from attngen.spec import make_spec
from tests.helpers import ROOT, spec, target

COLUMNS = ",".join(
    f'"{name}"'
    for name in (
        *("ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream", "Block Size"),
        *("Grid Size", "Device", "CC", "dram__bytes_read.sum", "dram__bytes_write.sum"),
        *("lts__t_sectors_srcunit_tex_op_read.sum", "lts__t_sectors_srcunit_tex_op_write.sum"),
    )
)
LAUNCH = '"{}","123","python3.12","127.0.0.1","{}","1","7","(128, 1, 1)","{}","0","9.0",{}'
RECORDED = f"""\
==PROF== Connected to process 123 (/usr/bin/python3.12)
==PROF== Profiling "fwd" - 0: 0%....50%....100% - 1 pass
==PROF== Disconnected from process 123
{COLUMNS}
"","","","","","","","","","","","byte","byte","sector","sector"
{LAUNCH.format(0, MARK, "(1, 1, 1)", '"128","0","1","1"')}
{LAUNCH.format(1, "fwd", "(128, 1, 1)", '"1,234,567,936","2,048","10,000","20"')}
"""


def test_launches_are_parsed_from_csv() -> None:
    assert parse(RECORDED) == [Launch(MARK, Bytes(128, 0, 32, 32)), Launch("fwd", Bytes(1234567936, 2048, 320000, 640))]
    scaled = RECORDED.replace('"byte","byte"', '"Kbyte","byte"').replace('"1,234,567,936"', '"1.5"')
    assert parse(scaled)[1].moved.dram_read == 1500
    general = RECORDED.replace("lts__t_sectors_srcunit_tex_op", "lts__t_sectors_op")
    assert parse(general) == parse(RECORDED)
    assert parse("==PROF== Connected\nhello") == []


@pytest.mark.parametrize("old, new", [('"1,234,567,936"', '"n/a"'), ('"byte","byte"', '"%","byte"')])
def test_a_counter_without_a_number_is_an_error(old: str, new: str) -> None:
    with pytest.raises(AttngenError, match="ncu gave no number for dram__bytes_read.sum of the kernel"):
        parse(RECORDED.replace(old, new))


# ---------------------------------------------------------------------------------------------- a fake of ncu

NCU = """\
#!{python}
import sys, time
log = sys.argv[sys.argv.index("--log-file") + 1]
metrics = sys.argv[sys.argv.index("--metrics") + 1]
print("started 0 first", flush=True)
{does}
"""


def fake_ncu(folder: Path, monkeypatch: pytest.MonkeyPatch, does: str) -> None:
    path = folder / "ncu"
    path.write_text(NCU.format(python=sys.executable, does=does))
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", str(folder))


def test_the_log_of_ncu_is_parsed_and_the_output_of_the_program_is_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_ncu(tmp_path, monkeypatch, f"open(log, 'w').write({RECORDED!r})")
    printed: list[str] = []
    assert profile("some.module", ["plan"], 60, printed.append) == parse(RECORDED)
    assert printed == ["started 0 first"]


def test_a_chip_without_some_counters_is_read_by_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lacks = "'==ERROR== Failed to find metric lts__t_sectors_srcunit_tex_op_read.sum'"
    fake_ncu(tmp_path, monkeypatch, f"open(log, 'w').write({lacks} if 'srcunit' in metrics else {RECORDED!r})")
    assert profile("some.module", [], 60, print) == parse(RECORDED)


@pytest.mark.parametrize(
    "does, reason",
    [
        (
            "open(log, 'w').write('==ERROR== ERR_NVGPUCTRPERM - The user does not have permission')",
            "lets only administrators read",
        ),
        (
            "open(log, 'w').write('==ERROR== Failed to initialize the profiler: LibraryNotLoaded')",
            "gives no access to the counters",
        ),
        (
            "open(log, 'w').write('==ERROR== The application returned an error code (1).')",
            "read no counters: The application returned",
        ),
        (
            "print('ModuleNotFoundError: No module named torch')",
            "read no counters: ModuleNotFoundError: No module named torch",
        ),
    ],
)
def test_an_ncu_that_reads_no_counter_is_one_sentence(
    does: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_ncu(tmp_path, monkeypatch, does)
    with pytest.raises(AttngenError, match=reason):
        profile("some.module", [], 60, lambda line: None)


@pytest.mark.share(4)
def test_an_ncu_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_ncu(tmp_path, monkeypatch, "time.sleep(600)")
    with pytest.raises(
        AttngenError, match="did not end within 1 s; expected fewer or smaller calls, or a larger --budget"
    ):
        profile("some.module", [], 1, lambda line: None)


def test_a_missing_ncu_or_device_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(AttngenError, match="`ncu` is not on the PATH; expected NVIDIA Nsight Compute"):
        profile("some.module", [], 60, print)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(AttngenError, match="needs|none that torch can use"):
        profiling.device_here()


def test_ncu_leaves_clocks_as_they_are_and_flushes_caches() -> None:
    line = command("ncu", METRICS[0], Path("x.csv"), "attngen.bench.profiled", ["plan.json"])
    text = " ".join(line)
    assert "--clock-control none --cache-control all --profile-from-start off" in text
    assert text.endswith("--log-file x.csv " + sys.executable + " -m attngen.bench.profiled plan.json")


def test_calls_are_marked_and_a_failing_call_is_reported(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The program that ncu runs makes every call twice; the second is counted."""
    import torch

    from attngen.bench import profiled

    counted: list[str] = []
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: counted.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: counted.append("stop"))
    for name in () if device == "cuda" else ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    module = str(ROOT / "generated" / "causal_fa1")
    calls = [
        {"name": f"{call} {direction}", "n": 70, "direction": direction, "module": path}
        for call, path in (("ours", module), ("naive", ""), ("none", str(tmp_path / "none")))
        for direction in ("forward", "backward")
    ]
    plan = {
        "spec": str(ROOT / "specs" / "causal_fa1.yaml"),
        "device": device,
        "batch": 1,
        "heads": 2,
        "kv_heads": 2,
        "calls": calls[:-1],
    }
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    profiled.main(str(tmp_path / "plan.json"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == [
        "started 0 ours forward",
        "started 1 ours backward",
        "started 2 naive forward",
        "started 3 naive backward",
    ]
    assert lines[4].startswith("failed 4 none forward FileNotFoundError: ") and len(lines) == 5
    assert counted == ["start", "stop"] * 4 + ["stop"]


# ---------------------------------------------------------------------------------------------- against predictions

H200 = DEVICES["H200"]
SIZES = Problem(batch=8, q_heads=16, kv_heads=16)


def sized(n: int) -> Problem:
    return Problem(8, 16, 16, n, n)


def test_flash_2_is_predicted_to_move_every_tensor_once() -> None:
    module, n = target("full_mha"), 4096
    _, moved = predicted(module, module.kernel("fwd"), H200, sized(n)) or pytest.fail("no tile fits")
    tensor, rows_ = 8 * 16 * n * 64 * 2, 8 * 16 * n * 4
    total = 4 * tensor + rows_
    assert moved.dram_read == 3 * tensor
    in_dram = 1 - H200.cache_bytes / total  # the rest stays in the L2
    assert moved.dram_written == pytest.approx((tensor + rows_) * in_dram)
    assert moved.l2_written == tensor + rows_
    assert moved.l2_read > 10 * moved.dram_read


@pytest.mark.share(8)
def test_flash_1_is_predicted_to_move_queries_and_sums_for_every_tile_of_keys() -> None:
    n, found = 4096, {}
    for order, tile, module in variants(make_spec({"name": "x", "head_dim": 64, "mask": "none"}), (32, 64)):
        tiles, moved = predicted(module, module.kernel("fwd"), H200, sized(n)) or pytest.fail("no tile fits")
        found[order, tile] = moved
        if tile:
            assert tiles == (f"{tile}x32" if order == "q_outer" else f"32x{tile}")
    stream = 8 * 16 * n * (64 * 2 + 64 * 4 + 8)  # q, accumulator, maximum and sum
    assert found["kv_outer", 64].dram_read == 2 * 8 * 16 * n * 64 * 2 + n // 64 * stream
    one, two = (found["kv_outer", t].dram for t in (32, 64))
    assert one / two == pytest.approx(2, rel=0.02)  # bytes are inversely proportional to the on-chip memory
    assert found["q_outer", 32].dram == found["q_outer", 64].dram
    assert found["q_outer", 32].l2_read / found["q_outer", 64].l2_read == pytest.approx(2, rel=0.02)


def launch(kernel: str, size: float = 1e6) -> Launch:
    return Launch(kernel, Bytes(size, size, 2 * size, 2 * size))


def test_each_launch_is_in_the_lines_of_its_call() -> None:
    """Failed calls are left out, with a sentence. Torch's kernels within a call of ours are one line, and naive
    attention is one line."""
    modules = {("kv_outer", None): target("causal_fa1")}
    calls = [
        Call("kv_outer", None, 512, "forward"),
        Call("kv_outer", None, 512, "backward"),
        Call("kv_outer", None, 1024, "forward"),
        Call("naive", None, 512, "forward"),
    ]
    printed = [
        "hello",
        "started 0 a",
        "failed 1 b OutOfMemoryError: no room",
        "started 2 c",
        "failed 2 c RuntimeError: no",
        "started 3 d",
    ]
    launches = [
        launch("fill"),
        *map(launch, (MARK, "fill", "fill", "fwd", "fwd_end")),
        launch(MARK),
        launch("fwd"),
        launch(MARK),
    ]
    launches += [launch("gemm"), launch("softmax")]
    lines, failed = attribute(calls, modules, launches, printed, H200, SIZES)
    seen = [(line.order, line.n, line.kernel, line.tiles, line.measured.dram) for line in lines]
    assert seen == [
        ("kv_outer", 512, "fwd", "64x64", 2e6),
        ("kv_outer", 512, "fwd_end", "", 2e6),
        ("kv_outer", 512, "torch", "", 4e6),
        ("naive", 512, "all", "", 4e6),
    ]
    assert [line.predicted is None for line in lines] == [False, False, True, False]
    assert failed == ["not profiled: b OutOfMemoryError: no room", "not profiled: c RuntimeError: no"]
    with pytest.raises(AttngenError, match="ncu profiled 1 calls, and 3 started"):
        attribute(calls, modules, [launch(MARK)], printed, H200, SIZES)


def test_naive_attention_moves_its_scores_four_times() -> None:
    moved = predicted_naive(target("full_mha"), "forward", sized(4096)).dram
    assert moved == 8 * 16 * (4 * 4096 * 64 + 4 * 4096 * 4096) * 2


def fake_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the GPU: each kernel of the i-th call moves 1e9 / (i + 1) bytes to DRAM and as many from it."""

    def run_plan(module: str, args: list[str], budget: float, say: Any) -> list[Launch]:
        plan = json.loads(Path(args[0]).read_text())
        found = []
        for i, call in enumerate(plan["calls"]):
            say(f"started {i} {call['name']}")
            names = {"q_outer": ["fwd"], "kv_outer": ["fwd", "fwd_end"]}.get(call["name"].split()[0], ["gemm"])
            found += [launch(MARK), *(launch(name, 1e9 / (i + 1)) for name in names)]
            assert not call["module"] or (Path(call["module"]) / "kernels.py").is_file()
        return found

    monkeypatch.setattr(profiling, "device_here", lambda: H200)
    monkeypatch.setattr(profiling, "find_ncu", lambda: "ncu")
    monkeypatch.setattr(profiling, "profile", run_plan)


@pytest.mark.share(8)
def test_the_command_prints_a_table_and_writes_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_device(monkeypatch)
    path = str(ROOT / "specs" / "causal_fa1.yaml")
    options = ["--seq", "512", "--tiles", "32", "--direction", "forward", "--out", str(tmp_path / "io")]
    with pytest.raises(SystemExit) as end:
        cli.main(["profile", path, *options])
    assert end.value.code in (0, None)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "causal_fa1 on H200: B=8, 16 heads, 16 K/V heads"
    assert sum(line.startswith("FlashAttention-1") for line in lines) == 2 * 2
    assert sum(line.startswith("FlashAttention-2") for line in lines) == 2
    assert sum(line.startswith("naive") for line in lines) == 1
    files = {p.name: p.read_bytes() for p in (tmp_path / "io").iterdir()}
    assert sorted(files) == ["profile-dark.svg", "profile.csv", "profile.json", "profile.svg"]
    data = json.loads(files["profile.json"])
    assert (data["device"], len(data["lines"])) == ("H200", 7)
    assert files["profile.csv"].count(b"\n") == 8
    assert b">FA1 order<" in files["profile.svg"]


def test_the_plot_is_the_same_for_the_same_figures(tmp_path: Path) -> None:
    moved = Bytes(1e9, 1e8, 1e10, 1e8)
    lines = [
        Line(o, t, n, "forward", "fwd", "", moved, moved)
        for o in ("q_outer", "kv_outer")
        for t in (32, 64)
        for n in (512, 1024)
    ]
    found = Found("H200", "x", 8, 16, 16, tuple(lines), ())
    first, second = ({p.name: p.read_bytes() for p in write(found, tmp_path / name)} for name in ("a", "b"))
    assert first == second
    assert rows(found)[0]["dram_ratio"] == 1
    assert read(first["profile.json"].decode()) == found


def test_without_matplotlib_the_tables_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(
        AttngenError, match=r"^no plot: matplotlib is not installed; `pip install attngen\[plot\]` brings it$"
    ):
        write(Found("H200", "x", 8, 16, 16, (), ()), tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"profile.csv", "profile.json"}


@pytest.mark.parametrize(
    "options, reason",
    [
        (["--seq", "4k"], "`4k`; expected integers separated by commas"),
        (["--tiles", "48"], "48 rows; expected 16, 32, 64, 128 or 256"),
        (["--kv-heads", "4"], "--kv-heads is for gqa"),
    ],
)
def test_a_wrong_option_is_one_sentence(options: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["profile", str(ROOT / "specs" / "causal_fa1.yaml"), *options])
    assert reason in " ".join(capsys.readouterr().err.split())


def test_a_spec_whose_bytes_depend_on_data_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["profile", str(ROOT / "specs" / "padding_mha.yaml")])
    assert "padding_mha reads `key_padding`, on which the bytes that move depend" in capsys.readouterr().err


@pytest.mark.share(8)
def test_both_loop_orders_are_profiled_where_the_spec_allows_both() -> None:
    assert [(order, tile) for order, tile, _ in variants(spec("causal_fa1"), ())] == [
        ("q_outer", None),
        ("kv_outer", None),
    ]
    assert [order for order, _, _ in variants(spec("causal_dropout_mqa"), ())] == ["q_outer"]
