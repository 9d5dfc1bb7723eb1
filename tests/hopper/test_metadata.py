"""Row vectors of keys that are loaded with their tiles as metadata, and biases by distance that hoist-bias splits."""

from __future__ import annotations

import ast
import re

import pytest

from attngen.codegen.render import render
from attngen.errors import VerifyError
from attngen.heuristics import SHORT_ROWS
from attngen.ir import Module, input_tensors, only, pipe
from attngen.ir.names import OF_CACHE, OF_OUTPUTS
from attngen.ir.parser import parse_module
from attngen.ir.printer import print_kernel, print_module
from attngen.lang.names import name_problem
from attngen.lowering.pipeline import lower
from attngen.spec import make_spec
from attngen.targets.hopper.configs.forward import least_rows
from attngen.targets.hopper.configs.forward_schedule import keeps_column_bias, row_vector_bytes
from attngen.targets.hopper.passes.hoist_bias import HoistBias
from attngen.verify import verify
from tests.helpers import SPECS, target
from tests.hopper.common import edited, edited_module, forward_kernel, index_of, lines, lowered, op_kinds
from tests.hopper.test_numerics import compare_with_naive
from tests.hopper.texts import texts_of

DOCUMENTS, ALIBI = "document_gqa", "alibi_mha"
BIASED = texts_of(ALIBI, "fwd")


def lowered_with(mask: object = "causal", score: list[object] | None = None, dim: object = 128) -> Module:
    """The module of a spec for this backend, after the last pass."""
    return lower(
        make_spec(
            {"name": "asked", "head_dim": dim, "mask": mask, "score": score or [], "schedule": {"backend": "hopper"}}
        )
    )


# ---------------------------------------------------------------------------------------------- metadata of tiles


def test_insert_pipelines_loads_row_vectors_of_keys_as_metadata() -> None:
    before, made = (lines(name, "step", DOCUMENTS) for name in ("warp-specialize", "insert-pipelines"))
    assert "%document_kv = load %DOCUMENT_KV[b, kv] check(kv if partial) : i32[BLOCK_KV] @reg" in before
    assert "%document_kv = read_metadata %DOCUMENT_KV_pipeline tile(%k) : i32[BLOCK_KV] @reg" in made
    assert (
        index_of(made, "%s")
        < index_of(made, "%document_kv")
        < index_of(made, "%masked")
        < made.index("consumer_release %k")
    )
    assert (
        lines("insert-pipelines", "entry", DOCUMENTS)[-1]
        == "%DOCUMENT_KV_pipeline = pipeline stages(num_stages) metadata_of(%K_pipeline) : i32[BLOCK_KV] @sram"
    )
    assert lines("insert-pipelines", "copy", DOCUMENTS)[:2] == [
        "producer_load %DOCUMENT_KV_pipeline %DOCUMENT_KV[b, kv]",
        "producer_load %K_pipeline %K[b, h // group, kv, d_qk]",
    ]


def test_metadata_is_read_next_to_the_mask_while_products_run() -> None:
    step = op_kinds("software-pipeline-softmax", "step", DOCUMENTS)
    at = step.index("read_metadata")
    assert step.index("wgmma_wait") < at < step.index("consumer_release") and step[at - 1 : at + 2] == [
        "mask",
        "read_metadata",
        "mask",
    ]  # the first reads no data
    text = print_module(lowered(DOCUMENTS))
    assert print_module(parse_module(text)) == text


@pytest.mark.share(16)
def test_a_lookup_by_metadata_waits_for_the_tile() -> None:
    """The start of a document is read at the document's id, which is metadata of the tile: after the wait for the tile,
    and before its release."""
    starts = {"tensor": [9], "dtype": "int32"}
    own = {
        "expr": "kv_idx >= starts[ids[kv_idx]] + 3",
        "params": {"ids": {"tensor": ["Nk"], "dtype": "int32"}, "starts": starts},
    }
    text = print_kernel(lowered_with({"all_of": ["causal", own]}).warp_specialized[0])
    step = [
        line.strip().split(" ")[0] for line in re.split(r"block @step\b", text)[1].split("\n  block ")[0].splitlines()
    ]
    names = [name for name in step if name in ("%k", "%ids", "%starts", "%masked", "consumer_release")]
    assert names.index("%k") < names.index("%ids") < names.index("%starts") < names.index("consumer_release")
    assert lowered_with({"all_of": ["causal", own]}, dim=64).warp_specialized


IDS = {"expr": "ids[b, q_idx] == ids[b, kv_idx]", "params": {"ids": {"tensor": ["B", "Nk"], "dtype": "int32"}}}
DATA = {"all_of": ["causal", IDS]}


@pytest.mark.share(8)
def test_indices_of_listed_tiles_are_metadata_of_the_tiles() -> None:
    warp_specialized = lowered_with(DATA).warp_specialized[0]
    text = print_kernel(warp_specialized)
    assert "%KV_TILES_pipeline = pipeline stages(num_stages) metadata_of(%K_pipeline) : i32[] @sram" in text
    assert (
        "    producer_load %IDS_pipeline %IDS[b, kv]\n    write_tile_index %KV_TILES_pipeline\n"
        "    producer_load %K_pipeline %K[b, h, kv, d_qk]\n"
    ) in text
    assert "listed(%KV_LIST_row) tile_indices(%KV_TILES_pipeline)" in text
    printed = render(lowered_with(DATA))["hopper.py"]
    assert (
        printed.count("kv_tile = _read_index(KV_TILES_smem.index(K_stage))") == 2
        and printed.count("_write_index(kv_tile, KV_TILES_smem.index(K_stage))") == 2
    )
    consumer = printed.partition("def fwd_consumer(")[2].partition("@gluon.jit")[0]
    assert "KV_LIST" not in consumer and "kv_ahead" not in consumer


BIAS = {"expr": "s + far[b, kv_idx]", "params": {"far": {"tensor": ["B", "Nk"], "dtype": "fp32"}}}
BLOCKS = {"block_sparse": {"block": 128}}


@pytest.mark.share(8)
@pytest.mark.parametrize("mask", [BLOCKS, {"all_of": ["causal", BLOCKS]}], ids=["blocks", "causal"])
def test_tile_indices_are_no_metadata_where_the_tile_is_released_before_its_mask(mask: object) -> None:
    """Only the score reads metadata of the tile, and the mask needs only positions."""
    module = lowered_with(mask, [BIAS])
    assert (
        "write_tile_index " not in print_kernel(module.warp_specialized[0])
        and "_read_index(kv_tiles" not in render(module)["hopper.py"]
    )


@pytest.mark.share(4)
def test_a_mask_and_a_score_may_read_one_tensor() -> None:
    score = {"expr": "s + 0.1 * ids[b, kv_idx]", "params": IDS["params"]}
    module = lowered_with(DATA, [score])
    pipelines = [op for op in only(module.warp_specialized[0].ops(), pipe.Pipeline) if op.metadata_of and op.type.dims]
    (row,) = module.configs("fwd", "hopper")
    assert len(pipelines) == 1 and row_vector_bytes(module, row) == 4 * row.block_kv * row.num_stages
    of = make_spec(
        {"name": "asked", "head_dim": 128, "mask": DATA, "score": [score], "schedule": {"backend": "hopper"}}
    )
    compare_with_naive(module, "asked", 1, of=of)


@pytest.mark.share(8)
def test_names_of_helpers_in_kernels_are_reserved() -> None:
    printed = [
        render(lowered("causal_mha"))["hopper.py"],
        render(lowered_with(DATA, ["alibi"]))["hopper.py"],
        render(lowered("full_mha"))["hopper.py"],
        render(lowered("causal_dropout_mqa"))["hopper.py"],
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
    for name in ("score_column", "work", "_release_k", "IDS_smem", "K_stage", "acc_part_flight", "gl", "tma"):
        assert name_problem(name), name


@pytest.mark.share(16)
@pytest.mark.parametrize("name", SPECS)
def test_variables_of_kernels_are_reserved(name: str) -> None:
    """A parameter with such a name would be overwritten, or read in place of the variable."""
    made = target(name)
    inputs = sorted(input_tensors(made.inputs, made.derived).keys() | {i.name for i in made.inputs})
    kernels = [
        k for k in (*made.kernels, *made.warp_specialized) if k.traits.dots or k.traits.counts_pairs or k.backend
    ]  # kernels in which names of the spec occur
    functions = {k.name for k in kernels} | {f"{k.name}_{b.name}" for k in made.warp_specialized for b in k.warp_groups}
    own = re.compile(rf"[dt]?({'|'.join(map(re.escape, inputs))})(_\w+)?") if inputs else re.compile("(?!)")
    for file, text in render(made).items():
        for function in ast.walk(ast.parse(text)) if file in ("kernels.py", "hopper.py") else ():
            if isinstance(function, ast.FunctionDef) and function.name in functions:
                stored = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
                found = stored | {arg.arg for arg in function.args.args}
                found -= OF_CACHE if made.cache else set()  # names that only a spec with a cache cannot use
                found -= OF_OUTPUTS if len(made.outputs) > 1 else set()
                assert not [n for n in found if not name_problem(n) and not own.fullmatch(n)], function.name


@pytest.mark.parametrize("name", ["block_sparse_mha", DOCUMENTS])
def test_other_kernels_write_no_tile_indices(name: str) -> None:
    """A tile without metadata is released before the mask. Tiles that are not listed need no index."""
    assert "write_tile_index " not in print_kernel(forward_kernel(name))


TILE_INDICES_REFUSED = {
    "no index": (
        "    write_tile_index %KV_TILES_pipeline\n",
        "",
        "expected listed tiles, and a pipeline to which a warp group writes",
    ),
    "another pipeline": (
        "    write_tile_index %KV_TILES_pipeline\n",
        "    write_tile_index %K_pipeline\n",
        "does not take its tile indices from %K_pipeline",
    ),
    "indices of another pipeline": (
        "tile_indices(%KV_TILES_pipeline)",
        "tile_indices(%IDS_pipeline)",
        "does not take its tile indices from %KV_TILES_pipeline",
    ),
    "no indices": (" tile_indices(%KV_TILES_pipeline)", "", "does not take its tile indices from %KV_TILES_pipeline"),
    "a tile released too early": (
        "    %masked_1 = mask %s where",
        "    consumer_release %k\n    %masked_1 = mask %s where",
        "runs @step, which needs the index of a tile after it has released the tile",
    ),
}


@pytest.mark.parametrize("mistake", TILE_INDICES_REFUSED)
def test_wrong_tile_indices_are_refused(mistake: str) -> None:
    old, new, reason = TILE_INDICES_REFUSED[mistake]
    with pytest.raises(VerifyError, match=f"`types`: .*{reason}"):
        verify(edited_module(lowered_with(DATA), (old, new)))


TWO = {
    "expr": "ids[b, q_idx] == ids[b, kv_idx] and seg[b, kv_idx] < q_idx",
    "params": {name: {"tensor": ["B", "Nk"], "dtype": "int32"} for name in ("ids", "seg")},
}


@pytest.mark.share(32)
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
def test_results_are_those_of_naive_attention(mask: object, score: list[object], dim: int) -> None:
    of = make_spec({"name": "asked", "head_dim": dim, "mask": mask, "score": score, "schedule": {"backend": "hopper"}})
    module = lower(of)
    for seed in range(4):
        compare_with_naive(module, "asked", seed, of=of)


def test_other_loads_stay_with_the_consumer() -> None:
    """These are row vectors of queries, and elements of 8 bits, which cp.async cannot copy."""
    one = {"expr": "seen[b, kv_idx] and kv_idx <= q_idx", "params": {"seen": {"tensor": ["B", "Nk"], "dtype": "bool"}}}
    warp_specialized = lowered_with(one).warp_specialized[0]
    assert not any(only(warp_specialized.ops(), pipe.ReadMetadata))
    assert "%document_q = load" in print_kernel(forward_kernel(DOCUMENTS))


@pytest.mark.share(4)
def test_a_kernel_has_a_metadata_pipeline_for_each_tensor() -> None:
    module = lowered_with(TWO)
    pipelines = [op for op in only(module.warp_specialized[0].ops(), pipe.Pipeline) if op.metadata_of and op.type.dims]
    (row,) = module.configs("fwd", "hopper")
    assert len(pipelines) == 2 and row_vector_bytes(module, row) == 2 * 4 * row.block_kv * row.num_stages
    text = render(module)["hopper.py"].partition("\ndef jvp_producer(")[0]
    assert (
        text.count("if K_loads >= STAGES:") == text.count("mbarrier.expect(K_full") == 2
        and text.count("_load_row_vector(") == 1 + 4
    )


REFUSED = {
    "stages": (
        "metadata_of(%K_pipeline) :",
        "metadata_of(%Q_pipeline) :",
        "`types`: .* has metadata of the tiles of %Q_pipeline; expected as many stages",
    ),
    "a type": ("metadata_of(%K_pipeline) : i32[BLOCK_KV]", "metadata_of(%K_pipeline) : i32[BLOCK_Q]", "`types`"),
    "an order": (
        (
            "    producer_load %DOCUMENT_KV_pipeline %DOCUMENT_KV[b, kv]\n"
            "    producer_load %K_pipeline %K[b, h // group, kv, d_qk]\n"
        ),
        (
            "    producer_load %K_pipeline %K[b, h // group, kv, d_qk]\n"
            "    producer_load %DOCUMENT_KV_pipeline %DOCUMENT_KV[b, kv]\n"
        ),
        "`types`: .* is not among the loads of %K_pipeline and of its metadata",
    ),
    "a missing load": (
        "    producer_load %DOCUMENT_KV_pipeline %DOCUMENT_KV[b, kv]\n",
        "",
        "`types`: .* is not among the loads of %K_pipeline and of its metadata",
    ),
    "another tile": (
        "read_metadata %DOCUMENT_KV_pipeline tile(%k) :",
        "read_metadata %DOCUMENT_KV_pipeline tile(%v) :",
        "`types`: .* reads .* as metadata of %v",
    ),
    "no tile": (
        "read_metadata %DOCUMENT_KV_pipeline tile(%k) :",
        "read_metadata %DOCUMENT_KV_pipeline tile(%s) :",
        "`types`: .* reads .* as metadata of %s",
    ),
    "metadata of another type": (
        "tile(%k) : i32[BLOCK_KV]",
        "tile(%k) : f32[BLOCK_KV]",
        "`types`: .* has another type than",
    ),
    "a tile that has been released": (
        "    %document_kv = read_metadata %DOCUMENT_KV_pipeline tile(%k)",
        "    consumer_release %k\n    %document_kv = read_metadata %DOCUMENT_KV_pipeline tile(%k)",
        "`types`: .* where this block has not waited for it, or has released it",
    ),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_wrong_metadata_is_refused(mistake: str) -> None:
    old, new, reason = REFUSED[mistake]
    with pytest.raises(VerifyError, match=f"rule {reason}"):
        verify(edited(DOCUMENTS, (old, new)))


@pytest.mark.share(4)
def test_full_and_partial_tiles_share_a_loop_where_masks_read_metadata_or_tiles_are_listed() -> None:
    documents, listed = (render(lowered(name))["hopper.py"] for name in (DOCUMENTS, "block_sparse_mha"))
    branch = documents.partition("                if at < partial_tiles:\n")[2]
    assert [line.strip().partition(" ")[0] for line in branch.splitlines()[2:8]] == [
        "kv_start",
        "kv_idx",
        "if",
        "s",
        "document_kv",
        "s",
    ]
    assert "document_kv = DOCUMENT_KV_smem.index(K_stage).load(gl.SliceLayout(0, SCORES))" in branch.splitlines()[6]
    assert (
        documents.count("for at in range(1, partial_tiles + full_tiles):")
        == listed.count("for at in range(1, partial")
        == 1
    )
    branch = listed.partition("                if at < partial_tiles:\n")[2].splitlines()
    assert branch[0].strip() == "kv_tile = kv_ahead" and branch[1].strip().startswith(
        "kv_ahead = _tile_at(KV_LIST_row, kv_full_end_at + at + 1"
    )


# ---------------------------------------------------------------------------------------------- biases by distance


def test_hoist_bias_splits_a_distance_into_rows_and_columns() -> None:
    before, made = (BIASED.module(name) for name in ("warp-specialize", "hoist-bias"))
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


@pytest.mark.share(16)
@pytest.mark.parametrize(
    ("mask", "score"),
    [
        ("none", "alibi"),  # the distance has both signs
        ("causal", {"expr": "s - 0.5 * (2 * kv_idx - q_idx)"}),  # the distance counts each key twice
        ("causal", {"expr": "s - 0.5 * (q_idx - kv_idx) * (q_idx - kv_idx)"}),  # the square of a distance
        ("causal", {"expr": "30.0 * tanh((s - 0.5 * (q_idx - kv_idx)) / 30.0)"}),  # not a term of the score
        ("causal", {"expr": "s + 0.5 * kv_idx"}),  # no distance: positions may be large
        (
            "causal",
            {"expr": "s - 0.5 * abs(q_idx - kv_idx)"},
        ),  # aligned differently from the mask, so it has both signs
    ],
)
def test_other_biases_are_not_split(mask: str, score: object) -> None:
    module = lowered_with(mask, [score])
    assert not any(only(module.warp_specialized[0].ops(), pipe.ScaledIota))


@pytest.mark.share(16)
@pytest.mark.parametrize("mask", ["kv_idx <= q_idx", "kv_idx >= q_idx", "kv_idx < q_idx and kv_idx > 3"])
@pytest.mark.parametrize("distance", ["q_idx - kv_idx", "kv_idx - q_idx"])
def test_a_mask_fixes_the_sign_of_a_distance(mask: str, distance: str) -> None:
    warp_specialized = lowered_with({"expr": mask}, [{"expr": f"s - 0.5 * abs({distance})"}]).warp_specialized[0]
    assert (
        sum(isinstance(op, pipe.ScaledIota) for op in warp_specialized.ops()) == 2
    )  # one for the first tile, and one for later tiles
    assert "abs(" not in print_kernel(warp_specialized)


def test_the_bias_of_a_score_with_another_reader_is_not_split() -> None:
    module = BIASED.module("warp-specialize")
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


@pytest.mark.share(4)
def test_registers_keep_the_column_bias_where_they_suffice() -> None:
    def kept(module: Module) -> bool:
        return keeps_column_bias(module, module.warp_specialized[0])

    window = {"sliding_window": {"left": 1023, "right": 0}}
    assert (
        kept(BIASED.module("warp-specialize"))
        and not kept(lowered_with(window, ["alibi"]))
        and not kept(lowered_with(score=["alibi"], dim=256))
    )


REFUSED_SHIFTS = {
    "a scale": (
        "shift(%score_row)",
        "scale(%score_scale) shift(%score_row)",
        "`types`: .* shifts scores by an f32 of each row",
    ),
    "a shift of keys": ("shift(%score_row)", "shift(%score_column)", "`types`: .* shifts scores by an f32 of each row"),
    "a scaled iota of rows": (
        "scaled_iota %score_step",
        "scaled_iota %score_row",
        "`types`: .* multiplies positions in a tile of keys by one number",
    ),
}


@pytest.mark.parametrize("mistake", REFUSED_SHIFTS)
def test_wrong_shifts_are_refused(mistake: str) -> None:
    old, new, reason = REFUSED_SHIFTS[mistake]
    with pytest.raises(VerifyError, match=f"rule {reason}"):
        verify(edited_module(BIASED.module("hoist-bias"), (old, new)))


# ---------------------------------------------------------------------------------------------- smallest number of rows


def test_the_smallest_number_of_rows_is_larger_with_three_consumers() -> None:
    for name, least in (("causal_gqa", 64), ("full_mha", SHORT_ROWS), ("causal_mqa", 64)):
        module = target(name)
        row = module.configs("fwd", "hopper")[0]
        assert row.min_rows == least == least_rows(module, row), name
