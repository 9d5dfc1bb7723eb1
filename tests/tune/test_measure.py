"""Measurement of schedules: they are launched as the module launches them, checked against the model's choice, in
Triton's interpreter or on a GPU, and compiled ahead of time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch

from attngen.bench.timing import Times
from attngen.codegen.files import write_module
from attngen.codegen.render import render
from attngen.spec import load_spec
from attngen.tune import measure
from attngen.tune.measure import Bench
from attngen.tune.tuner import Cell, plan
from tests.helpers import ROOT

TEXT = (
    "name: small\nhead_dim: {qk: 32, v: 16}\nheads: {sharing: gqa}\n"
    "mask: {all_of: [causal, {key_padding: {lengths: true}}]}\n"
)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return the folder of a small module, its spec by name, and its plan."""
    folder = tmp_path_factory.mktemp("small")
    path = folder / "small.yaml"
    path.write_text(TEXT)
    made = plan(load_spec(path), "sm90")
    write_module(render(made.module), folder / "small")
    return folder, {"small": path}, made


@pytest.fixture
def small(written, monkeypatch):
    """The same, with problems that the interpreter runs quickly."""
    monkeypatch.setattr(measure, "TOKENS", 64)
    monkeypatch.setattr(measure, "HIDDEN", 32)
    return written


class Clock:
    """Launches each call once, and reports n milliseconds for the n-th."""

    def __call__(self, calls, rounds):
        self.results = {name: call(0) for name, call in calls.items()}
        return {name: Times((float(name),) * rounds) for name in calls}


@pytest.mark.share(8)
def test_each_kernel_is_measured_under_each_schedule(small, device):
    folder, specs, made = small
    bench = Bench(folder, specs, device, Clock())
    for (kernel, dtype, _), found in made.searches.items():
        kernels = bench._module("small").kernels
        before = [(getattr(kernels, name), table) for name, table in kernels.SCHEDULES.items()]
        configs = [replace(found.kept[0], block_q=q, block_kv=16, tma=tma) for q, tma in ((16, False), (32, True))]
        assert bench.measure(Cell("small", kernel, 32, dtype), configs, 2) == [(0.0, 0.0), (1.0, 1.0)]
        assert [(getattr(kernels, name), table) for name, table in kernels.SCHEDULES.items()] == before
    (_, problem) = bench.problem
    assert problem.qkv["q"].shape == (2, 2, 32, 32) and problem.qkv["v"].shape == (2, 1, 32, 16)
    assert problem.given["kv_lengths"].shape == (2,)


@pytest.fixture(scope="module", params=["contiguous", "{paged: {page_size: 16}}"])
def cached(request, tmp_path_factory):
    """The same for a module with a KV cache."""
    folder = tmp_path_factory.mktemp("cached")
    path = folder / "cached.yaml"
    text = "name: cached\nhead_dim: 32\nheads: {sharing: gqa}\nmask: causal\nbackward: false\ndtype: fp16\n"
    path.write_text(f"{text}cache: {request.param}\n")
    made = plan(load_spec(path), "sm90")
    write_module(render(made.module), folder / "cached")
    return folder, {"cached": path}, made


@pytest.mark.share(32)
def test_kernels_with_a_cache_are_measured_by_calls_with_a_cache(cached, device, monkeypatch):
    for name, number in (("TOKENS", 64), ("HIDDEN", 256), ("CACHED_KEYS", 96), ("CACHED_TOKENS", 192)):
        monkeypatch.setattr(measure, name, number)
    folder, specs, made = cached
    bench, seen = Bench(folder, specs, device, Clock()), []
    monkeypatch.setattr(measure.Launch, "__getitem__", recording(measure.Launch.__getitem__, seen))
    for kernel, rows, n_q, n_kv in (("decode", 4, 1, 96), ("decode", 64, 16, 96), ("prefill", 80, 80, 80)):
        chosen = made.searches[kernel, "fp16", rows < 64].kept[0]
        # Programs of two launches do not run at the same time on `any`.
        here = chosen.device if device == "cuda" else "any"
        schedules = [replace(chosen, device=here, block_kv=16, num_warps=w, tma=False) for w in (4, 8)]
        assert bench.measure(Cell("cached", kernel, rows, "fp16"), schedules, 2) == [(0.0, 0.0), (1.0, 1.0)]
        assert bench.problem[1].cached.sizes == (192 // 96 if kernel == "decode" else 1, 8, 2, n_q, n_kv)
        assert [options["num_warps"] for _, options in seen] == [4, 8]
        assert [options.get("maxnreg") for _, options in seen] == ([255, 255] if kernel == "decode" else [None, None])
        seen.clear()


def test_schedules_are_measured_on_sorted_documents(tmp_path):
    """Benchmarks have sorted document ids, not the random ids of tests, so loops are short."""
    problem = Bench(tmp_path, {"document_gqa": ROOT / "specs/document_gqa.yaml"}, "cpu")._make(
        Cell("document_gqa", "fwd", 2048, "bf16"), 1
    )
    (ids,) = problem.given["document_ids"]
    assert torch.equal(ids, ids.sort().values) and set(ids.tolist()) == {0, 1, 2}


@pytest.mark.share(4)
def test_the_measured_schedule_is_launched(small, device, monkeypatch):
    folder, specs, made = small
    bench, seen = Bench(folder, specs, device, Clock()), []
    monkeypatch.setattr(measure.Launch, "__getitem__", recording(measure.Launch.__getitem__, seen))
    chosen = made.searches["dq", "bf16", False].kept[0]
    configs = [replace(chosen, block_q=q, block_kv=16, num_stages=3, tma=tma) for q, tma in ((16, False), (32, True))]
    bench.measure(Cell("small", "dq", 32, "bf16"), configs, 1)
    names = ("BLOCK_Q", "num_stages", "TMA")
    launched = [(grid, *(options[name] for name in names)) for grid, options in seen]
    assert launched == [((2 * 2 * 2, 1, 1), 16, 3, False), ((1 * 2 * 2, 1, 1), 32, 3, True)]


def recording(getitem, seen):
    def spy(launch, grid):
        run = getitem(launch, grid)
        return lambda *args, **options: seen.append((grid, options)) or run(*args, **options)

    return spy


def test_schedules_that_differ_from_the_models_choice_or_spill_are_rejected(small, device, monkeypatch):
    folder, specs, made = small
    bench, cell, config = (
        Bench(folder, specs, device, Clock()),
        Cell("small", "fwd", 32, "bf16"),
        made.searches["fwd", "bf16", False].kept[0],
    )
    bench.measure(cell, [config], 1)
    problem = bench.problem[1]
    problem.right["fwd"] = (problem.right["fwd"][0] * 1.5,)
    assert bench.measure(cell, [config], 1) == ["its results differ by 3.3e-01 from those of the model's choice"]
    problem.right["fwd"] = (torch.full_like(problem.right["fwd"][0], float("nan")),)
    assert bench.measure(cell, [config], 1)[0].startswith("its results differ by nan")
    monkeypatch.setattr(measure.Launch, "spilled_bytes", 8)
    assert bench.measure(cell, [config], 1) == ["spills 8 bytes"]


def test_a_worker_answers_errors_with_a_sentence_and_continues_while_the_device_works(monkeypatch):
    class Broken:
        def __init__(self, *args):
            pass

        def measure(self, cell, configs, rounds):
            if cell == "wrong":
                raise RuntimeError("\n  no such thing\n  out of resources  \n")
            return [(1.0,)] * len(configs)

    monkeypatch.setattr(measure, "Bench", Broken)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    alive = iter([True, False])
    monkeypatch.setattr(measure, "_runs", lambda: next(alive))
    ours, theirs = Pipe()
    for request in (("good", [1, 2], 1), ("wrong", [1], 1), ("good", [1], 1), ("wrong", [1], 1), ("good", [1], 1)):
        ours.send(request)
    measure.serve(theirs, Path(), {})
    assert ours.recv()["gpu"] == "a GPU"
    failed = ["RuntimeError: out of resources"]
    assert [ours.recv() for _ in range(4)] == [[(1.0,), (1.0,)], failed, [(1.0,)], failed]
    assert (
        not ours.poll() and theirs.poll()
    )  # after the second error the device is gone: another process takes the rest


AHEAD = """
import json, sys
from pathlib import Path
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

class Driver:
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))

driver.set_active(Driver())
from attngen.ir.module import Config
from attngen.tune.measure import Bench
from attngen.tune.tuner import Cell
folder, path = map(Path, sys.argv[1:3])
config = Config(**json.loads(sys.argv[3]))
for rows, batch in ((128, 1), (256, 2)):
    bench = Bench(folder, {"small": path}, "cpu")
    module = bench._module("small")
    module.RULES.check = lambda *tensors: None  # tensors need not be on a GPU
    bench._make = lambda cell, _, make=bench._make: make(cell, batch)
    bench.compile(Cell("small", "dq", rows, "bf16"), config)
    print(*(len(getattr(module.kernels, name).device_caches[0][0]) for name in module.kernels.SCHEDULES))
"""


@pytest.mark.share(8)
def test_a_kernel_compiled_ahead_is_the_one_that_any_number_of_rows_launches(small, tmp_path):
    """A process without the interpreter compiles only the requested kernel, and the same one for other sizes."""
    folder, specs, made = small
    config = json.dumps(asdict(made.searches["dq", "bf16", False].kept[1]))
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", AHEAD, str(folder), str(specs["small"]), config]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.stdout.splitlines() == ["0 1 0 0 0 0 0"] * 2, done.stderr  # fwd, dq, delta, dkdv, dkdv_end, packed, jvp
    assert len(list(tmp_path.rglob("dq.cubin"))) == 1
