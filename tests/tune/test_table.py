"""Tables of measured schedules: keys that share an entry, precedence over the model, and files that are read back
unchanged."""

from __future__ import annotations

import re
from functools import cache

import pytest

from attngen.certify.certificate import chosen
from attngen.cost.report import report
from attngen.devices import CLASSES, DEVICES
from attngen.errors import AttngenError
from attngen.heuristics import MODELLED, RANGES, SHORT_ROWS
from attngen.ir import Config, Module
from attngen.ir.parser import parse_module
from attngen.ir.printer import print_module
from attngen.lowering.pipeline import lower
from attngen.schedule.pipeline_loads import PipelineLoads
from attngen.schedule.select_tiles import SelectTiles
from attngen.schedule.table import Entry, Schedule, Table, committed, read_table, schedule_of, shown, usable
from attngen.spec import parse_spec
from attngen.targets.triton import cost as model
from attngen.targets.triton.cost import schedule_key
from attngen.tiles.classes import Key, key, mask_class, ranges
from attngen.verify import verify
from tests.helpers import ROOT, SPECS, lowered, target

SMALL_TILE = {"block_q": 64, "block_kv": 32, "num_warps": 4, "num_stages": 2, "tma": False}
# One spec of each kind.
MIXED = (
    "block_sparse_mha",
    "causal_fp32",
    "causal_gqa",
    "decode_gqa",
    "document_gqa",
    "mla_dims",
    "relative_bias_mha",
)
FWD = Key("fwd", "128/128", "16-bit", "mha", "causal", 2048)


def table(*keys: Key, schedule: Schedule = SMALL_TILE) -> dict[str, Table]:
    """Return tables, by device class, with one schedule for these keys."""
    entry = Entry(schedule, 0.5, SMALL_TILE, 0.6, "3.6.0")
    return {"sm90": Table("H200", "NVIDIA H200", "2.11.0", "3.6.0", dict.fromkeys(keys, entry))}


def scheduled(name: str, tables: dict[str, Table], **overrides: int) -> Module:
    """Return the module of a spec with its schedules."""
    return verify(PipelineLoads().run(SelectTiles(**overrides, tables=tables).run(lowered(name)["use-tma"])))


@cache
def modelled(name: str) -> Module:
    """Return the module of a spec with an empty table of measurements."""
    return scheduled(name, {})


def configs(module, kernel="fwd", device="sm90"):
    return [(r.max_rows, shown(schedule_of(r)), r.measured) for r in module.configs(kernel) if r.device == device]


# ---------------------------------------------------------------------------------------------- classes of masks


# By spec: the class for each range of rows. The other specs have causal in all ranges.
CLASSES_OF = {
    "alibi_mha": "causal+score causal+score causal+score causal+score",
    "block_sparse_mha": "full+blocks full+blocks full+blocks full+blocks",
    "butterfly_gqa": "causal+blocks causal+blocks causal+blocks causal+blocks",
    "causal_dropout_mqa": "causal+dropout causal+dropout causal+dropout causal+dropout",
    "causal_fa1": "rewritten rewritten rewritten rewritten",
    "causal_padding_dropout_mha": "causal+rows+dropout causal+rows+dropout causal+rows+dropout causal+rows+dropout",
    "chunked_gqa": "causal causal causal causal",
    "cross_mha": "full full full full",
    "dense_bias_dropout_mha": " ".join(["full+pairs+score+dropout"] * 4),
    "dilated_mha": "masked masked masked masked",
    "decode_document_gqa": "causal+rows causal+rows short+rows short+rows",
    "document_gqa": "causal+rows causal+rows short+rows short+rows",
    "full_mha": "full full full full",
    "local_global_dropout_mha": "full+blocks+dropout full+blocks+dropout full+blocks+dropout full+blocks+dropout",
    "packed_document_gqa": "full+rows full+rows short+rows short+rows",
    "padding_mha": "full+rows full+rows full+rows full+rows",
    "prefix_lm_gqa": "full full full full",  # as if the prefix were the whole sequence
    "relative_bias_mha": "full+lookups+score full+lookups+score full+lookups+score full+lookups+score",
    "sinks_window_gqa": "masked+score masked+score masked+score masked+score",
    "softcap_window_gqa": "causal+score causal+score causal+score causal+score",
    "streaming_gqa": "causal causal short short",
    "temperature_mha": "causal+score causal+score causal+score causal+score",
    "window_gqa": "causal causal short short",
    "decode_sinks_paged_gqa": "masked+score masked+score masked+score masked+score",
    "decode_window_paged_gqa": "causal causal short short",
}
# The same for @packed, pack-GQA of few queries. The other specs have full, as no diagonal crosses their tiles.
PACKED_OF = {
    "chunked_gqa": "full full full causal",
    "softcap_window_gqa": "full+score full+score full+score causal+score",
    "streaming_gqa": "full full short short",
    "window_gqa": "full full short short",
    "decode_window_paged_gqa": "full full short short",
}


# Kernels whose loops differ from those of the spec's other kernels, most of them with a KV cache. With pages, a kernel
# reads a page number per row, and also a position in the page where tiles do not lie within pages.
OTHERS = {
    ("causal_fa1", "jvp"): "causal causal causal causal",  # its program axis is q in either loop order
    ("decode_gqa", "decode"): "full full full full",
    ("decode_mla", "decode"): "full+rows full+rows full+rows full+rows",
    ("decode_mla", "prefill"): "causal+rows causal+rows causal+rows causal+rows",
    ("decode_fp8_mla", "decode"): " ".join(["full+rows+quantised"] * 4),
    ("decode_fp8_mla", "prefill"): " ".join(["causal+rows+quantised"] * 4),
    ("decode_gqa", "prefill"): "causal causal causal causal",
    ("decode_paged_gqa", "decode"): "full+rows full+rows full+rows full+rows",
    ("decode_paged_gqa", "prefill"): "causal+rows causal+rows causal+rows causal+rows",
    ("decode_document_gqa", "decode"): "full+rows full+rows short+rows short+rows",
    ("decode_document_gqa", "prefill"): "causal+rows causal+rows short+rows short+rows",
    ("decode_paged_fp8_gqa", "decode"): " ".join(["full+rows+quantised"] * 4),
    ("decode_paged_fp8_gqa", "prefill"): " ".join(["causal+rows+quantised"] * 4),
    ("decode_window_paged_gqa", "decode"): "full+pages+rows full+pages+rows short+pages+rows short+pages+rows",
    ("decode_window_paged_gqa", "prefill"): "causal+pages+rows causal+pages+rows short+pages+rows short+pages+rows",
    ("decode_sinks_paged_gqa", "decode"): " ".join(["short+pages+rows+score"] * 4),
    ("decode_sinks_paged_gqa", "prefill"): " ".join(["masked+pages+rows+score"] * 4),
}


@pytest.mark.share(16)
@pytest.mark.parametrize("name", SPECS)
def test_mask_classes_by_range(name):
    module = parse_module((ROOT / "generated" / name / "schedule.ir").read_text())
    for kernel in (k for k in module.kernels if k.traits.dots):
        classes, other = (PACKED_OF, "full") if kernel.name == "packed" else (CLASSES_OF, "causal")
        expected = OTHERS.get((name, kernel.name)) or classes.get(name, " ".join([other] * 4))
        assert [mask_class(module, kernel, n) for _, n in RANGES] == expected.split(), kernel.name
    assert {mask_class(module, k, n) for k in module.kernels if not k.loops for _, n in RANGES} <= {"none"}


def test_a_mask_with_block_lists_has_the_class_listed():
    made = lower(
        parse_spec(
            'name: pairs\nhead_dim: 64\nmask: {expr: "ids[b, q_idx, kv_idx]", params: {ids: {tensor: [B, Nq, '
            "Nk], dtype: bool}}}\n"
        )
    )
    assert {mask_class(made, made.kernel(name), 4096) for name in ("fwd", "dkdv", "dq")} == {"listed+blocks+pairs"}
    assert mask_class(made, made.kernel("delta"), 4096) == "none"


@pytest.mark.parametrize("name", MIXED)
def test_select_tiles_and_tuning_see_the_same_keys(name):
    """select-tiles computes keys before legalize-triton, and tuning after it."""
    early, late = lowered(name)["use-tma"], target(name)
    # Kernels that do not drop out with unspecialized ones
    stay = {kernel.name for kernel in late.kernels if not kernel.traits.adds_in_order}
    for kernel in (kernel for kernel in early.kernels if kernel.name in stay):
        for limit, _ in ranges(kernel):
            found = key(early, kernel, 2, limit)
            assert found == key(late, late.kernel(kernel.name), 2, limit)
            assert found.max_rows == limit and found.kernel == ("fwd" if kernel.name == "packed" else kernel.name)


def test_variants_that_share_a_key():
    """bf16 and fp16 share a key, and so do gqa and mqa, and head_dims that are padded to the same width. mha and gqa,
    other widths and other masks do not."""
    text = "name: x\nhead_dim: 128\nheads: {sharing: gqa}\nmask: causal\n"
    base, variants = (
        lower(parse_spec(text), "use-tma"),
        ["gqa|mqa", "128|96", "gqa}|gqa}\ndtype: fp16", "gqa|mha", "128|64", "causal|none"],
    )
    same = []
    for variant in variants:
        made = lower(parse_spec(text.replace(*variant.split("|"))), "use-tma")
        same.append(key(made, made.kernel("fwd"), 2, None) == key(base, base.kernel("fwd"), 2, None))
    assert same == [True, True, True, False, False, False]


# ---------------------------------------------------------------------------------------------- precedence


def test_measured_configs_precede_the_models_in_their_range():
    before, made = modelled("causal_mha"), scheduled("causal_mha", table(FWD))
    *short, any_ = configs(before)
    assert [limit for limit, _, _ in short] == list(MODELLED) and any_[1].endswith(" TMA")
    assert configs(made) == [*short, (2048, "64x32x4x2", True), any_]
    assert configs(made, "dq") == configs(before, "dq") and configs(made, device="sm80") == configs(
        before, device="sm80"
    )


def test_an_entry_for_few_rows_replaces_the_models_config():
    """pack-GQA of few queries runs with it, too, for any number of rows."""
    packed = FWD._replace(heads="grouped", mask="full", max_rows=SHORT_ROWS)
    before, made = modelled("causal_gqa"), scheduled("causal_gqa", table(packed, packed._replace(mask="causal")))
    least, (limit, _, _), any_ = configs(before)
    assert configs(made) == [least, (limit, "64x32x4x2", True), any_] and limit == SHORT_ROWS
    assert configs(made, "packed") == [configs(before, "packed")[0], (None, "64x32x4x2", True)]


@pytest.mark.share(8)
def test_split_kv_kernels_have_entries_for_few_queries_and_for_more():
    """An entry with TMA is used only where its tiles lie within pages."""
    few = Key("decode", "128/128", "16-bit", "grouped", "full", 16)
    before, made = modelled("decode_gqa"), scheduled("decode_gqa", table(few))
    least, any_ = configs(before, "decode")
    assert configs(made, "decode") == [(16, "64x32x4x2", True), any_] and least[0] == 16
    made = scheduled("decode_gqa", table(few, few._replace(max_rows=None)))
    assert configs(made, "decode") == [(None, "64x32x4x2", True)]
    paged, tile = few._replace(mask="full+rows"), {"block_q": 16, "num_warps": 4, "num_stages": 2, "tma": True}
    for block_kv, measured in ((64, True), (128, False)):
        made = scheduled("decode_paged_gqa", table(paged, schedule={**tile, "block_kv": block_kv}))
        assert configs(made, "decode")[0][2] == measured


def test_an_entry_for_any_number_of_rows_removes_superfluous_configs():
    made = scheduled("causal_mha", table(FWD, FWD._replace(max_rows=8192), FWD._replace(max_rows=None)))
    before = modelled("causal_mha")
    few, some, any_ = configs(before)
    assert configs(made) == [few, some, (None, "64x32x4x2", True)]
    (same,) = (schedule_of(r) for r in before.configs("fwd") if (r.device, r.max_rows) == ("sm90", some[0]))
    made = scheduled("causal_mha", table(FWD, schedule=same))  # the model's choice for fewer rows
    assert configs(made) == [few, (2048, some[1], True), any_]


def test_the_schedule_of_the_spec_precedes_measured_ones():
    made = scheduled("causal_mha", table(FWD._replace(max_rows=None)), block_q=128)
    assert not any(r.measured for r in made.configs("fwd")) and {r.block_q for r in made.configs("fwd")} == {128}


@pytest.mark.parametrize(
    "schedule",
    [
        # too much shared memory for D = 128
        {"block_q": 128, "block_kv": 128, "num_warps": 8, "num_stages": 4},
        # too many registers
        {"block_q": 128, "block_kv": 128, "num_warps": 4, "num_stages": 2},
    ],
)
def test_an_entry_that_does_not_fit_or_spills_is_left_out(schedule):
    made = scheduled("causal_mha", table(FWD, schedule=schedule | {"tma": False}))
    assert configs(made) == configs(modelled("causal_mha"))


def test_an_entry_with_tma_is_left_out_of_kernels_without_descriptors():
    tables = table(FWD, FWD._replace(kernel="delta", mask="none"), schedule=SMALL_TILE | {"tma": True})
    made = scheduled("causal_mha", tables)
    assert (2048, "64x32x4x2 TMA", True) in configs(made)
    assert not any(measured for _, _, measured in configs(made, "delta"))


def test_an_entry_in_the_list_of_spills_is_left_out(monkeypatch):
    """`attngen verify` lists a schedule that spills with another Triton than the one that it was measured with."""
    module = target("causal_mha")
    config = Config("sm90", 2, 2048, **SMALL_TILE)
    assert usable(module, module.kernel("fwd"), config)
    monkeypatch.setattr(model, "_listed", lambda: frozenset([schedule_key(module, module.kernel("fwd"), config)]))
    assert not usable(module, module.kernel("fwd"), config)
    assert not any(measured for _, _, measured in configs(scheduled("causal_mha", table(FWD))))


def test_tiles_larger_than_blocks_are_left_out():
    keys = [Key("fwd", "64/64", "16-bit", "grouped", "causal+blocks", limit) for limit, _ in RANGES]
    for block, used in ((64, True), (128, False)):
        made = scheduled("butterfly_gqa", table(*keys, schedule=SMALL_TILE | {"block_kv": block}))
        assert any(r.measured for r in made.configs("fwd")) == used


@pytest.mark.share(16)
@pytest.mark.parametrize("name", MIXED)
def test_modules_of_all_kinds_use_entries(name):
    """Each module uses entries for its own keys, and the verifier accepts them."""
    before = target(name)
    keys = [
        key(before, k, elem, limit)
        for k in before.kernels
        if k.name != "blocks"
        for limit, _ in RANGES
        for elem in (2, 4)
    ]
    made = scheduled(name, table(*keys, schedule=SMALL_TILE | {"num_stages": 1}))
    assert any(r.measured for k in made.kernels for r in made.configs(k.name))


# ---------------------------------------------------------------------------------------------- text, reports, files


@pytest.mark.share(4)
@pytest.mark.parametrize(("tma", "printed"), [(False, ""), (True, " TMA=1")])
def test_measured_configs_are_printed_parsed_and_reported(tma, printed):
    made = scheduled("causal_mha", table(FWD, schedule=SMALL_TILE | {"tma": tma}))
    text = print_module(made)
    (line,) = re.findall(".*measured", text)
    assert line == f"  sm90 bytes=2 rows<=2048 : BLOCK_Q=64 BLOCK_KV=32 num_warps=4 num_stages=2{printed} measured"
    assert print_module(parse_module(text)) == text
    reported = [
        (config["max_rows"], config.get("measured"))
        for config in report(made)["kernels"]["fwd"]["schedules"]
        if config["device"] == "sm90"
    ]
    assert reported == [(64, None), (512, None), (2048, True), (None, None)]


def test_measured_configs_are_certified_in_every_range():
    made = scheduled("causal_mha", table(FWD))
    assert [config.max_rows for kernel, config in chosen(made, ["sm90"], False) if kernel.name == "fwd"] == [2048, None]


def test_a_table_is_read_back_from_its_file_with_one_line_per_entry(tmp_path):
    (made,) = table(FWD._replace(max_rows=None), FWD, FWD._replace(kernel="dq")).values()
    (tmp_path / "t.json").write_text(made.text())
    assert read_table(tmp_path / "t.json") == made
    lines = made.text().splitlines()
    assert [line.partition('"kernel": ')[2][:5] for line in lines[1:-1]] == ['"dq",', '"fwd"', '"fwd"']
    assert '"max_rows": 2048' in lines[2] and '"max_rows": null' in lines[3]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"device": "H200", "entries": [{}]}',
        '{"device": "H900", "entries": []}',
        '{"device": "H200", "entries": [], "x": 1}',
    ],
)
def test_a_file_that_is_not_a_table_is_refused(tmp_path, text):
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(AttngenError, match="t.json: "):
        read_table(tmp_path / "t.json")


def test_the_committed_tables_have_their_device_class_and_canonical_text():
    from attngen.schedule.table import path_of

    assert set(committed()) == {"sm90"}
    for name, known in committed().items():
        assert DEVICES[known.device].cls == name and CLASSES[name].tuned_on == known.device
        assert path_of(known.device).read_text(encoding="utf-8") == known.text()
        assert all(entry.triton for entry in known.entries.values())
