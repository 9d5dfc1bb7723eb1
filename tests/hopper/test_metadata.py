"""Numbers of keys that lie beside their tiles in shared memory, and distances that are parted into rows and columns."""

from __future__ import annotations

import ast
import re

import pytest

from attngen.codegen.render import render
from attngen.errors import VerifyError
from attngen.heuristics import SHORT_ROWS
from attngen.ir.graph import Module, input_tensors
from attngen.ir.names import OF_CACHE, OF_OUTPUTS
from attngen.ir.pipe import Pipeline, ReadMetadata, ScaledIota
from attngen.ir.text import parse_module, print_kernel, print_module
from attngen.lang.names import name_problem
from attngen.lowering.pipeline import lower
from attngen.spec import make_spec
from attngen.targets.hopper.configs.common import keeps_columns, key_bytes, least_rows
from attngen.targets.hopper.passes.hoist_bias import HoistBias
from attngen.verify import verify
from tests.helpers import SPECS, target
from tests.hopper.common import after, edited, edited_module, kernel, whole
from tests.hopper.test_numerics import hold
from tests.hopper.test_passes import at, kinds, lines

DOCUMENTS, ALIBI = "document_gqa", "alibi_mha"


def asked(mask: object = "causal", score: list[object] | None = None, dim: object = 128) -> Module:
    """The module of a spec that asks for this backend."""
    return lower(
        make_spec(
            {"name": "asked", "head_dim": dim, "mask": mask, "score": score or [], "schedule": {"backend": "hopper"}}
        )
    )


# ---------------------------------------------------------------------------------------------- numbers beside tiles


def test_insert_pipelines_puts_numbers_of_keys_beside_their_tile() -> None:
    before, made = (lines(name, "step", DOCUMENTS) for name in ("warp-specialize", "insert-pipelines"))
    assert "%document_kv = load %DOCUMENT_KV[b, kv] check(kv if partial) : i32[BLOCK_KV] @reg" in before
    assert "%document_kv = read_metadata %DOCUMENT_KV_pipeline beside(%k) : i32[BLOCK_KV] @reg" in made
    assert at(made, "%s") < at(made, "%document_kv") < at(made, "%masked") < made.index("consumer_release %k")
    assert (
        lines("insert-pipelines", "entry", DOCUMENTS)[-1]
        == "%DOCUMENT_KV_pipeline = pipeline stages(num_stages) beside(%K_pipeline) : i32[BLOCK_KV] @sram"
    )
    assert lines("insert-pipelines", "copy", DOCUMENTS)[:2] == [
        "producer_load %DOCUMENT_KV_pipeline %DOCUMENT_KV[b, kv]",
        "producer_load %K_pipeline %K[b, h // group, kv, d_qk]",
    ]


def test_they_are_read_next_to_the_mask_under_the_products() -> None:
    step = kinds("software-pipeline-softmax", "step", DOCUMENTS)
    at = step.index("read_metadata")
    assert step.index("wgmma_wait") < at < step.index("consumer_release") and step[at - 1 : at + 2] == [
        "mask",
        "read_metadata",
        "mask",
    ]  # the first reads no data
    text = print_module(whole(DOCUMENTS))
    assert print_module(parse_module(text)) == text


def test_what_numbers_of_keys_are_looked_up_by_waits_for_their_tile() -> None:
    """The first of a document is read at its number, which lies beside the tile: after the tile is taken, and before
    it is given back."""
    starts = {"tensor": [9], "dtype": "int32"}
    own = {
        "expr": "kv_idx >= starts[ids[kv_idx]] + 3",
        "params": {"ids": {"tensor": ["Nk"], "dtype": "int32"}, "starts": starts},
    }
    text = print_kernel(asked({"all_of": ["causal", own]}).warp_specialized[0])
    step = [
        line.strip().split(" ")[0] for line in re.split(r"block @step\b", text)[1].split("\n  block ")[0].splitlines()
    ]
    names = [name for name in step if name in ("%k", "%ids", "%starts", "%masked", "consumer_release")]
    assert names.index("%k") < names.index("%ids") < names.index("%starts") < names.index("consumer_release")
    assert asked({"all_of": ["causal", own]}, dim=64).warp_specialized


IDS = {"expr": "ids[b, q_idx] == ids[b, kv_idx]", "params": {"ids": {"tensor": ["B", "Nk"], "dtype": "int32"}}}
DATA = {"all_of": ["causal", IDS]}


def test_numbers_of_listed_tiles_come_with_the_tiles() -> None:
    warp_specialized = asked(DATA).warp_specialized[0]
    text = print_kernel(warp_specialized)
    assert "%KV_TILES_pipeline = pipeline stages(num_stages) beside(%K_pipeline) : i32[] @sram" in text
    assert (
        "    producer_load %IDS_pipeline %IDS[b, kv]\n    write_tile_index %KV_TILES_pipeline\n"
        "    producer_load %K_pipeline %K[b, h, kv, d_qk]\n"
    ) in text
    assert "listed(%KV_LIST_row) tile_indices(%KV_TILES_pipeline)" in text
    printed = render(asked(DATA))["hopper.py"]
    assert (
        printed.count("kv_tile = read_index(kv_tiles_smem.index(k_stage))") == 2
        and printed.count("write_index(kv_tile, kv_tiles_smem.index(k_stage))") == 2
    )
    consumer = printed.partition("def fwd_consumer(")[2].partition("@gluon.jit")[0]
    assert "KV_LIST" not in consumer and "kv_ahead" not in consumer


BIAS = {"expr": "s + far[b, kv_idx]", "params": {"far": {"tensor": ["B", "Nk"], "dtype": "fp32"}}}
BLOCKS = {"block_sparse": {"block": 128}}


@pytest.mark.parametrize("mask", [BLOCKS, {"all_of": ["causal", BLOCKS]}], ids=["blocks", "causal"])
def test_numbers_of_tiles_do_not_come_where_the_tile_is_given_back_before_its_mask(mask: object) -> None:
    """The score is what reads beside the tile, and the mask needs positions alone."""
    module = asked(mask, [BIAS])
    assert (
        "write_tile_index " not in print_kernel(module.warp_specialized[0])
        and "read_index(kv_tiles" not in render(module)["hopper.py"]
    )


def test_a_mask_and_a_score_may_read_one_tensor() -> None:
    score = {"expr": "s + 0.1 * ids[b, kv_idx]", "params": IDS["params"]}
    module = asked(DATA, [score])
    pipelines = [
        op for op in module.warp_specialized[0].ops() if isinstance(op, Pipeline) and op.beside and op.type.dims
    ]
    (row,) = module.configs("fwd", "hopper")
    assert len(pipelines) == 1 and key_bytes(module, row) == 4 * row.block_kv * row.num_stages
    of = make_spec(
        {"name": "asked", "head_dim": 128, "mask": DATA, "score": [score], "schedule": {"backend": "hopper"}}
    )
    hold(module, "asked", 1, of=of)


def test_names_of_what_kernels_use_are_reserved() -> None:
    printed = [
        render(whole("causal_mha"))["hopper.py"],
        render(asked(DATA, ["alibi"]))["hopper.py"],
        render(whole("full_mha"))["hopper.py"],
        render(whole("causal_dropout_mqa"))["hopper.py"],
    ]
    for text in printed:
        helpers = {
            name
            for name in re.findall(r"^def (\w+)\(|^    (tma_(?:load|store)|cp_async) =", text, re.MULTILINE)
            for name in name
            if name
        }
        assert len(helpers) > 10 and not [
            name for name in helpers if not name.startswith(("fwd", "bwd", "jvp")) and not name_problem(name)
        ]
    for name in (
        "score_column",
        "tell_place",
        "fill_k",
        "work",
        "ids_smem",
        "k_stage",
        "tk_stage",
        "acc_part_flight",
        "gl",
        "tma",
    ):
        assert name_problem(name), name


@pytest.mark.parametrize("name", SPECS)
def test_variables_of_kernels_are_reserved(name: str) -> None:
    """A parameter of the name of one would be overwritten, or read in place of it."""
    made = target(name)
    inputs = sorted(input_tensors(made.inputs, made.derived).keys() | {i.name for i in made.inputs})
    reading = [
        k for k in (*made.kernels, *made.warp_specialized) if k.dots or k.counts_pairs or k.backend
    ]  # what a spec names
    functions = {k.name for k in reading} | {f"{k.name}_{b.name}" for k in made.warp_specialized for b in k.warp_groups}
    own = re.compile(rf"[dt]?({'|'.join(map(re.escape, inputs))})(_\w+)?") if inputs else re.compile("(?!)")
    for file, text in render(made).items():
        for function in ast.walk(ast.parse(text)) if file in ("kernels.py", "hopper.py") else ():
            if isinstance(function, ast.FunctionDef) and function.name in functions:
                stored = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
                found = stored | {arg.arg for arg in function.args.args}
                found -= OF_CACHE if made.cache else set()  # names of its own, which its spec alone cannot use
                found -= OF_OUTPUTS if len(made.outputs) > 1 else set()
                assert not [n for n in found if not name_problem(n) and not own.fullmatch(n)], function.name


@pytest.mark.parametrize("name", ["block_sparse_mha", DOCUMENTS])
def test_other_numbers_of_tiles_do_not(name: str) -> None:
    """Where nothing lies beside a tile, it is given back before the mask. Tiles that are not listed need no number."""
    assert "write_tile_index " not in print_kernel(kernel(name))


TOLD = {
    "no number": (
        "    write_tile_index %KV_TILES_pipeline\n",
        "",
        "expected listed tiles, and a ring that a role tells",
    ),
    "another ring": (
        "    write_tile_index %KV_TILES_pipeline\n",
        "    write_tile_index %K_pipeline\n",
        "does not take its places from %K_pipeline",
    ),
    "places of another ring": (
        "tile_indices(%KV_TILES_pipeline)",
        "tile_indices(%IDS_pipeline)",
        "does not take its places from %KV_TILES_pipeline",
    ),
    "no places": (" tile_indices(%KV_TILES_pipeline)", "", "does not take its places from %KV_TILES_pipeline"),
    "a tile given back too early": (
        "    %masked_1 = mask %s where",
        "    consumer_release %k\n    %masked_1 = mask %s where",
        "runs @step, which needs the place of a tile after it has given the tile back",
    ),
}


@pytest.mark.parametrize("what", TOLD)
def test_wrong_tellings_are_refused(what: str) -> None:
    old, new, reason = TOLD[what]
    with pytest.raises(VerifyError, match=f"`types`: .*{reason}"):
        verify(edited_module(asked(DATA), (old, new)))


TWO = {
    "expr": "ids[b, q_idx] == ids[b, kv_idx] and seg[b, kv_idx] < q_idx",
    "params": {name: {"tensor": ["B", "Nk"], "dtype": "int32"} for name in ("ids", "seg")},
}


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize(
    ("mask", "score"),
    [
        (DATA, []),
        (TWO, []),
        ("causal", [BIAS]),
        ("causal", ["alibi"]),
        ({"sliding_window": {"left": 9, "right": 0}}, ["alibi"]),
    ],
    ids=["data", "two", "bias", "alibi", "window"],
)
def test_they_compute_what_naive_attention_does(mask: object, score: list[object], dim: int) -> None:
    of = make_spec({"name": "asked", "head_dim": dim, "mask": mask, "score": score, "schedule": {"backend": "hopper"}})
    module = lower(of)
    for seed in range(4):
        hold(module, "asked", seed, of=of)


def test_other_loads_stay_with_the_consumer() -> None:
    """A number of rows, and one of 8 bits, which the threads' copies cannot have."""
    one = {"expr": "seen[b, kv_idx] and kv_idx <= q_idx", "params": {"seen": {"tensor": ["B", "Nk"], "dtype": "bool"}}}
    warp_specialized = asked(one).warp_specialized[0]
    assert not any(isinstance(op, ReadMetadata) for op in warp_specialized.ops())
    assert "%document_q = load" in print_kernel(kernel(DOCUMENTS))


def test_a_kernel_has_a_pipeline_for_each_tensor_of_numbers() -> None:
    module = asked(TWO)
    pipelines = [
        op for op in module.warp_specialized[0].ops() if isinstance(op, Pipeline) and op.beside and op.type.dims
    ]
    (row,) = module.configs("fwd", "hopper")
    assert len(pipelines) == 2 and key_bytes(module, row) == 2 * 4 * row.block_kv * row.num_stages
    text = render(module)["hopper.py"].partition("\ndef jvp_producer(")[0]
    assert (
        text.count("if k_loads >= STAGES:") == text.count("mbarrier.expect(k_full") == 2
        and text.count("load_row_vector(") == 1 + 4
    )


REFUSED = {
    "slots": (
        "beside(%K_pipeline) :",
        "beside(%Q_pipeline) :",
        "`types`: .* lies beside %Q_pipeline; expected as many slots",
    ),
    "a type": ("beside(%K_pipeline) : i32[BLOCK_KV]", "beside(%K_pipeline) : i32[BLOCK_Q]", "`types`"),
    "an order": (
        "    producer_load %DOCUMENT_KV_pipeline %DOCUMENT_KV[b, kv]\n    producer_load %K_pipeline %K[b, h // group, kv, d_qk]\n",
        "    producer_load %K_pipeline %K[b, h // group, kv, d_qk]\n    producer_load %DOCUMENT_KV_pipeline %DOCUMENT_KV[b, kv]\n",
        "`types`: .* is not among the fills of %K_pipeline and of what lies beside it",
    ),
    "a missing fill": (
        "    producer_load %DOCUMENT_KV_pipeline %DOCUMENT_KV[b, kv]\n",
        "",
        "`types`: .* is not among the fills of %K_pipeline and of what lies beside it",
    ),
    "another tile": (
        "read_metadata %DOCUMENT_KV_pipeline beside(%k) :",
        "read_metadata %DOCUMENT_KV_pipeline beside(%v) :",
        "`types`: .* reads from .* beside %v",
    ),
    "no tile": (
        "read_metadata %DOCUMENT_KV_pipeline beside(%k) :",
        "read_metadata %DOCUMENT_KV_pipeline beside(%s) :",
        "`types`: .* reads from .* beside %s",
    ),
    "a number of another type": (
        "beside(%k) : i32[BLOCK_KV]",
        "beside(%k) : f32[BLOCK_KV]",
        "`types`: .* of another type than",
    ),
    "a tile that is given back": (
        "    %document_kv = read_metadata %DOCUMENT_KV_pipeline beside(%k)",
        "    consumer_release %k\n    %document_kv = read_metadata %DOCUMENT_KV_pipeline beside(%k)",
        "`types`: .* where this block has not taken it, or has given it back",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_wrong_texts_are_refused(what: str) -> None:
    old, new, reason = REFUSED[what]
    with pytest.raises(VerifyError, match=f"rule {reason}"):
        verify(edited(DOCUMENTS, (old, new)))


def test_classes_of_tiles_share_a_loop_where_masks_read_such_numbers_or_tiles_are_listed() -> None:
    documents, listed = (render(whole(name))["hopper.py"] for name in (DOCUMENTS, "block_sparse_mha"))
    cut = documents.partition("                if at < partial_tiles:\n")[2]
    assert [line.strip().partition(" ")[0] for line in cut.splitlines()[2:8]] == [
        "kv_start",
        "kv_idx",
        "if",
        "s",
        "document_kv",
        "s",
    ]
    assert "document_kv = document_kv_smem.index(k_stage).load(gl.SliceLayout(0, SCORES))" in cut.splitlines()[6]
    assert (
        documents.count("for at in range(1, partial_tiles + full_tiles):")
        == listed.count("for at in range(1, partial")
        == 1
    )
    cut = listed.partition("                if at < partial_tiles:\n")[2].splitlines()
    assert cut[0].strip() == "kv_tile = kv_ahead" and cut[1].strip().startswith(
        "kv_ahead = tile_at(KV_LIST_row, kv_full_end_at + at + 1"
    )


# ---------------------------------------------------------------------------------------------- distances


def test_hoist_bias_parts_a_distance() -> None:
    before, made = (after(ALIBI)[name] for name in ("warp-specialize", "hoist-bias"))
    assert "score_scale2*abs(Nk - Nq - kv_idx + q_idx)" in print_kernel(before.warp_specialized[0])
    assert made.kernels == before.kernels
    step = lines("hoist-bias", "step", ALIBI)
    assert [line for line in step if line not in lines("warp-specialize", "step", ALIBI)] == [
        "%score_row = map expr(score_scale2*(Nk - Nq - kv_start + q_idx)) "
        "uses(Nk=%Nk, Nq=%Nq, score_scale2=%score_scale2) : f32[BLOCK_Q] @reg",
        "%score_column = scaled_iota %score_step kept(yes) : f32[BLOCK_KV] @reg",
        "%score = map expr(s*score_scale + score_column) "
        "uses(s=%s, score_scale=%score_scale, score_column=%score_column) : f32[BLOCK_Q, BLOCK_KV] @reg",
        "%soft = softmax_step %masked m(%m) shift(%score_row) : f32[BLOCK_Q, BLOCK_KV] @reg",
    ]
    assert "%score_step = map expr(-score_scale2) uses(score_scale2=%score_scale2) : f32[] @reg" in lines(
        "hoist-bias", "consumer", ALIBI
    )
    assert print_module(parse_module(print_module(made))) == print_module(made)


@pytest.mark.parametrize(
    ("mask", "score"),
    [
        ("none", "alibi"),  # the distance has both signs
        ("causal", {"expr": "s - 0.5 * (2 * kv_idx - q_idx)"}),  # two a key
        ("causal", {"expr": "s - 0.5 * (q_idx - kv_idx) * (q_idx - kv_idx)"}),  # no plain distance
        ("causal", {"expr": "30.0 * tanh((s - 0.5 * (q_idx - kv_idx)) / 30.0)"}),  # not a term of the score
        ("causal", {"expr": "s + 0.5 * kv_idx"}),  # no distance: positions may be large
        (
            "causal",
            {"expr": "s - 0.5 * abs(q_idx - kv_idx)"},
        ),  # of queries that are not aligned as the mask's: both signs
    ],
)
def test_other_scores_stay_whole(mask: str, score: object) -> None:
    module = asked(mask, [score])
    assert not any(isinstance(op, ScaledIota) for op in module.warp_specialized[0].ops())


@pytest.mark.parametrize("mask", ["kv_idx <= q_idx", "kv_idx >= q_idx", "kv_idx < q_idx and kv_idx > 3"])
@pytest.mark.parametrize("distance", ["q_idx - kv_idx", "kv_idx - q_idx"])
def test_a_mask_gives_a_distance_its_sign(mask: str, distance: str) -> None:
    warp_specialized = asked({"expr": mask}, [{"expr": f"s - 0.5 * abs({distance})"}]).warp_specialized[0]
    assert sum(isinstance(op, ScaledIota) for op in warp_specialized.ops()) == 2  # in the first tile, and in later ones
    assert "abs(" not in print_kernel(warp_specialized)


def test_a_score_that_something_else_reads_is_not_parted() -> None:
    module = after(ALIBI)["warp-specialize"]
    other = edited_module(
        module,
        (
            "    %rescaled = map",
            "    %more = reduce max %score over(BLOCK_KV) : f32[BLOCK_Q] @reg\n    %rescaled = map",
        ),
    )
    assert (
        HoistBias().run(module).warp_specialized != module.warp_specialized
        and HoistBias().run(other).warp_specialized == other.warp_specialized
    )


def test_registers_keep_columns_where_there_is_room() -> None:
    def kept(module: Module) -> bool:
        return keeps_columns(module, module.warp_specialized[0])

    window = {"sliding_window": {"left": 1023, "right": 0}}
    assert (
        kept(after(ALIBI)["warp-specialize"])
        and not kept(asked(window, ["alibi"]))
        and not kept(asked(score=["alibi"], dim=256))
    )


REFUSED_SHIFTS = {
    "a scale": (
        "shift(%score_row)",
        "scale(%score_scale) shift(%score_row)",
        "`types`: .* shifts scores by an f32 of each row",
    ),
    "a shift of keys": ("shift(%score_row)", "shift(%score_column)", "`types`: .* shifts scores by an f32 of each row"),
    "a ramp of rows": (
        "scaled_iota %score_step",
        "scaled_iota %score_row",
        "`types`: .* multiplies places of keys by one number",
    ),
}


@pytest.mark.parametrize("what", REFUSED_SHIFTS)
def test_wrong_shifts_are_refused(what: str) -> None:
    old, new, reason = REFUSED_SHIFTS[what]
    with pytest.raises(VerifyError, match=f"rule {reason}"):
        verify(edited_module(after(ALIBI)["hoist-bias"], (old, new)))


# ---------------------------------------------------------------------------------------------- from how many rows on


def test_short_calls_stay_portable_with_three_consumers() -> None:
    for name, least in (("causal_gqa", 64), ("full_mha", SHORT_ROWS), ("causal_mqa", 64)):
        module = target(name)
        row = module.configs("fwd", "hopper")[0]
        assert row.min_rows == least == least_rows(module, row), name
