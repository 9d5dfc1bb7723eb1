"""Specs: what is read, and the one sentence for each mistake."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from attngen.errors import SpecError, suggest
from attngen.lang.names import TAKEN, name_problem, names_schema
from attngen.lowering.pipeline import lower
from attngen.masks import registry
from attngen.spec import MAX_BYTES, Spec, json_schema, load_spec, make_spec, parse_spec, starter
from tests.helpers import ROOT, SPECS

BASE = "name: x\nhead_dim: 64\n"  # two good lines; what a case adds starts on line 3
WIDTH = "expected a whole number from 16 to 512 that is a multiple of 8"
HEAD_DIM = f"{WIDTH}, or {{qk: ..., v: ...}}"
WIDTH_V = WIDTH.replace("from 16 to 512", "of 16 or more")  # a latent may be wider
MASKS = "expected a list of at least one mask, as in [causal, key_padding]"
ONCE = "expected each mask once: a repeat hides nothing more"
DTYPE = "expected `bf16`, `fp16` or `fp32`"
MASK = (
    "expected a mask: its name as in `causal`, {name: {parameter: value}}, {expr: text}, {all_of: [masks]}, {any_of: [masks]} "
    "or {not: mask}"
)
NAME = "expected an identifier of lower-case letters, digits and _, 64 at most, as in causal_mqa"
CAP = "expected a number from 0.001 to 1000000"
CACHES = "expected `contiguous`, {paged: {page_size: 64}}, {dtype: fp8_e4m3}, or both of these keys"
KEYS = (
    "known: backward, cache, dropout, dtype, fp32_precision, head_dim, heads, kv, mask, name, outputs, schedule, score"
)


def message(text: str) -> str:
    """The error that YAML text gives, without the file's name."""
    with pytest.raises(SpecError) as caught:
        parse_spec(text, "x.yaml")
    lines = str(caught.value).splitlines()
    assert all(line.startswith("x.yaml") for line in lines)
    return "\n".join(line.removeprefix("x.yaml").removeprefix(", ").removeprefix(": ") for line in lines)


# ---------------------------------------------------------------------------------------------- mistakes

MISTAKES = {
    # values
    "name: x\nhead_dim: 63": f"line 2: `head_dim` is the number 63; {HEAD_DIM}",
    "name: x\nhead_dim: 520": "line 2: `head_dim` has 520 columns; expected at most 512, or `kv: {latent: ...}` beside it",
    "name: x\nhead_dim: 64.0": f"line 2: `head_dim` is the number 64.0; {HEAD_DIM}",
    "name: x\nhead_dim: true": f"line 2: `head_dim` is the boolean `true`; {HEAD_DIM}",
    'name: x\nhead_dim: "64"': f"line 2: `head_dim` is the text `64`; {HEAD_DIM}",
    "name: x\nhead_dim: abc": f"line 2: `head_dim` is the text `abc`; {HEAD_DIM}",
    "name: x\nhead_dim: [64]": f"line 2: `head_dim` is a list; {HEAD_DIM}",
    "name: x\nhead_dim:": f"line 2: `head_dim` is empty; {HEAD_DIM}",
    "name: x\nhead_dim: {qk: 64}": f"line 2: `head_dim.v` is missing; {WIDTH_V}",
    "name: x\nhead_dim:\n  qk: 64\n  v: 8": f"line 4: `head_dim.v` is the number 8; {WIDTH_V}",
    "head_dim: 64": f"`name` is missing; {NAME}",
    "name: x": f"`head_dim` is missing; {HEAD_DIM}",
    "name: yes\nhead_dim: 64": f"line 1: `name` is the boolean `true`; {NAME}",
    "name: 123\nhead_dim: 64": f"line 1: `name` is the number 123; {NAME}",
    "name: ../x\nhead_dim: 64": f"line 1: `name` is the text `../x`; {NAME}",
    "name: class\nhead_dim: 64": "line 1: `name` is `class`, a word of Python's grammar, so nothing could import it; expected another name",
    'name: "a\\n\\e[31m"\nhead_dim: 64': f"line 1: `name` is the text `a\\n\\x1b[31m`; {NAME}",
    BASE + "heads: mqa": "line 3: `heads` is the text `mqa`; expected {sharing: mha|mqa|gqa}",
    BASE + "heads:": "line 3: `heads` is empty; expected {sharing: mha|mqa|gqa}",
    BASE + "heads: {sharing: mqq}": "line 3: `heads.sharing` is the text `mqq`; expected `mha`, `mqa` or `gqa`; did you mean `mqa`?",
    BASE + "dtype: [bf17]": f"line 3: `dtype[0]` is the text `bf17`; {DTYPE}; did you mean `bf16`?",
    BASE + "dtype:\n- fp16\n- true": f"line 5: `dtype[1]` is the boolean `true`; {DTYPE}",
    BASE + "dtype: bf17": f"line 3: `dtype` is the text `bf17`; {DTYPE}, or a list of these; did you mean `bf16`?",
    BASE + "dtype: 16": f"line 3: `dtype` is the number 16; {DTYPE}, or a list of these",
    BASE + "dtype: []": "line 3: `dtype` is an empty list; expected at least one of `bf16`, `fp16`, `fp32`",
    BASE + "dtype: [bf16, bf16]": "line 3: `dtype` names an element type twice; expected each once",
    BASE + "fp32_precision: tf33": "line 3: `fp32_precision` is the text `tf33`; expected `ieee` or `tf32`; did you mean `tf32`?",
    BASE + "fp32_precision: tf32": "line 3: `fp32_precision` is `tf32`, but `dtype` has no `fp32`; add it there, or leave this key out",
    BASE + "schedule: 3": "line 3: `schedule` is the number 3; "
    "expected {order: q_outer|kv_outer, block_q: ..., block_kv: ..., stages: ..., warps: ..., split: ..., backend: auto|triton|hopper}",
    BASE + "schedule: {block_q: 48}": "line 3: `schedule.block_q` is the number 48; expected `16`, `32`, `64`, `128` or `256`",
    BASE + "schedule: {warps: true}": "line 3: `schedule.warps` is the boolean `true`; expected `1`, `2`, `4`, `8` or `16`",
    BASE + "schedule: {warps: 4.0}": "line 3: `schedule.warps` is the number 4.0; expected `1`, `2`, `4`, `8` or `16`",
    BASE + "backward: true": "line 3: `backward` is the boolean `true`; expected `false`, for a module without gradients, "
    "or {deterministic: ...}",
    BASE + "backward:": "line 3: `backward` is empty; expected `false`, for a module without gradients, or {deterministic: ...}",
    BASE + "backward: none": "line 3: `backward` is the text `none`; expected `false`, or {deterministic: ...}",
    BASE + "backward: {deterministic: 0}": "line 3: `backward.deterministic` is the number 0; expected `true` or `false`",
    BASE + "backward: {determinstic: true}": "line 3: `backward.determinstic` is no known key; did you mean `deterministic`?",
    BASE + "cache: 3": f"line 3: `cache` is `3`; {CACHES}",
    BASE + "cache:": f"line 3: `cache` is empty; {CACHES}",
    BASE + "cache: {dtype: fp8}": "line 3: `cache.dtype` is the text `fp8`; expected `fp8_e4m3`",
    BASE + "cache: {dtype: fp8_e4m3, scale: token}": "line 3: `cache.scale` is the text `token`; expected `head` or `page`",
    BASE + "cache: {scale: head}": "line 3: `cache.scale` is of numbers of 8 bits, and the cache has none; "
    "expected `dtype: fp8_e4m3` beside it",
    BASE + "cache: {dtype: fp8_e4m3, scale: page}": "line 3: `cache.scale` is `page`, and there are no pages; expected `head`, or `paged`",
    BASE + "dtype: fp32\ncache: {dtype: fp8_e4m3}": "line 3: `dtype` names `fp32`, beside a cache of 8 bits; "
    "expected `bf16`, `fp16` or both",
    "name: x\nhead_dim: 72\ncache: {dtype: fp8_e4m3}": "line 2: `head_dim` has 72 columns, beside a cache of 8 bits; "
    "expected a multiple of 16, 32 at least",
    BASE + "cache: {paged: {page_size: 0}}": "line 3: `cache.paged.page_size` is the number 0; "
    "expected `any`, or a whole number from 2 to 65536",
    BASE + "cache: {pagd: 1}": "line 3: `cache.pagd` is no known key; did you mean `paged`?",
    BASE + "cache: paged\nschedule: {split: even}": "line 4: `schedule.split` is the text `even`; expected `balanced`, or {keys: ...}",
    BASE + "schedule: {split: {keys: 1024}}": "line 3: `schedule.split` deals the keys of a cache, and there is none; "
    "expected `cache` beside it",
    # keys
    BASE + "hed_dim: 64": "line 3: `hed_dim` is no known key; did you mean `head_dim`?",
    BASE + "zzz: 64": f"line 3: `zzz` is no known key; {KEYS}",
    BASE + "yes: 64": f"line 3: `yes` is no known key; {KEYS}",
    BASE + "<<: {name: y}": f"line 3: `<<` is no known key; {KEYS}",
    BASE + "heads: {shring: mqa}": "line 3: `heads.shring` is no known key; did you mean `sharing`?",
    BASE + "schedule: {order: k_outer}": "line 3: `schedule.order` is the text `k_outer`; expected `q_outer` or `kv_outer`; "
    "did you mean `kv_outer`?",
    BASE + "schedule:\n  stage: 2": "line 4: `schedule.stage` is no known key; did you mean `stages`?",
    BASE + "schedule: {num_stages: 2}": "line 3: `schedule.num_stages` is no known key; did you mean `stages`?",
    BASE + "schedule: {num_warps: 4}": "line 3: `schedule.num_warps` is no known key; did you mean `warps`?",
    # masks
    BASE + "mask:": f"line 3: `mask` is empty; {MASK}; for no mask write `none`",
    BASE + "mask: no": f"line 3: `mask` is the boolean `false`; {MASK}; for no mask write `none`",
    BASE + "mask: []": f"line 3: `mask` is an empty list; {MASK}",
    BASE + "mask: {}": f"line 3: `mask` is an empty mapping; {MASK}",
    BASE + "mask: 3": f"line 3: `mask` is the number 3; {MASK}",
    BASE + "mask: Causal": "line 3: `mask` is `Causal`, which is not a mask; did you mean `causal`?",
    BASE + "mask: windw": "line 3: `mask` is `windw`, which is not a mask; did you mean `sliding_window`?",
    BASE + "mask: [causal, none]": "line 3: `mask` is a list of 2; expected one mask; for several at once write {all_of: [masks]}",
    BASE + "mask: {causal: , none: }": "line 3: `mask` is a mapping of 2; expected one mask; for several at once write {all_of: [masks]}",
    BASE + "mask: {causal: 3}": "line 3: `mask.causal` is the number 3; expected its parameters, {align: bottom_right|top_left}",
    BASE + "mask: {none: {left: 1}}": "line 3: `mask.none.left` is no known key; there are none",
    BASE + "mask: sliding_window": "line 3: `mask.sliding_window` needs `left`, `right` or both; for no bound at all use the mask `none`",
    BASE + "mask:\n  sliding_window:\n    lft: 1": "line 5: `mask.sliding_window.lft` is no known key; did you mean `left`?",
    BASE + "mask: {sliding_window: {left: -1}}": (
        "line 3: `mask.sliding_window.left` is the number -1; expected a whole number from 0 to 1073741823"
    ),
    BASE + "mask: {sliding_window: {left: 1073741824}}": (
        "line 3: `mask.sliding_window.left` is the number 1073741824; expected a whole number from 0 to 1073741823"
    ),
    BASE + "mask: {sliding_window: {right: on}}": (
        "line 3: `mask.sliding_window.right` is the boolean `true`; expected a whole number from 0 to 1073741823"
    ),
    BASE + "mask: {key_padding: {lengths: 1}}": "line 3: `mask.key_padding.lengths` is the number 1; expected `true` or `false`",
    BASE + "mask: {all_of: causal}": f"line 3: `mask.all_of` is the text `causal`; {MASKS}",
    BASE + "mask: {all_of: []}": f"line 3: `mask.all_of` is an empty list; {MASKS}",
    BASE + "mask:\n  all_of:\n  - none\n  - causl": "line 6: `mask.all_of[1]` is `causl`, which is not a mask; did you mean `causal`?",
    BASE + "mask: {all_of: [causal, causal]}": f"line 3: `mask.all_of[1]` is `causal` again; {ONCE}",
    BASE + "mask: {all_of: [none, none]}": f"line 3: `mask.all_of[1]` is `none` again; {ONCE}",
    BASE + "mask: {all_of: [causal, {causal: {align: bottom_right}}]}": f"line 3: `mask.all_of[1]` is `causal` again; {ONCE}",
    # scores
    BASE + "score: {softcap: 0}": f"line 3: `score.softcap.cap` is the number 0; {CAP}",
    BASE + "score: {softcap: .nan}": f"line 3: `score.softcap.cap` is the number nan; {CAP}",
    BASE + "score:\n- softcap: {cap: -3.0}": f"line 4: `score[0].softcap.cap` is the number -3.0; {CAP}",
    BASE + "score: softcap": f"line 3: `score.softcap.cap` is missing; {CAP}",
    BASE + "score: {softcap: thirty}": f"line 3: `score.softcap` is the text `thirty`; {CAP}, or its parameters, {{cap: ...}}",
    # YAML
    "": "the file is empty; expected keys and values, as in `name: causal_mqa`: `attngen new NAME` writes a start",
    "# nothing": "the file is empty; expected keys and values, as in `name: causal_mqa`: `attngen new NAME` writes a start",
    "- name: x": "the file holds a list; expected keys and values, as in `name: causal_mqa`: `attngen new NAME` writes a start",
    "name": "the file holds the text `name`; expected keys and values, as in `name: causal_mqa`: `attngen new NAME` writes a start",
    BASE + "name: y": "line 3: key `name` is given twice, first on line 1; expected each key once",
    BASE + "---\nname: y": "line 3: a second document starts here; expected one spec per file",
    BASE + "mask: &m causal": "line 3: anchors and aliases (& and *) are not part of a spec; expected the value itself",
    BASE + "mask: *m": "line 3: anchors and aliases (& and *) are not part of a spec; expected the value itself",
    BASE + "mask: !!python/name:os.system": "line 3: tags (!) are not part of a spec; expected a plain value",
    BASE + "? [a]\n: 3": "line 3: a list or a mapping is used as a key; expected a word, as in `mask: causal`",
    BASE + "heads:\n\tsharing: mqa": "line 4: not valid YAML: a tab; expected spaces for indentation",
    BASE + "mask: \x00": "line 3: not valid YAML: the character 0x0 is not text",
    BASE + "mask: " + "[" * 21: "line 3: nested more than 20 deep; expected a spec, which is flat",
    "[" * 5000: "line 1: nested more than 20 deep; expected a spec, which is flat",
}  # fmt: skip


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_is_one_sentence(text: str) -> None:
    assert message(text) == MISTAKES[text]


@pytest.mark.parametrize("text", [BASE + "mask: {", BASE + 'mask: "causal', "name: x\n head_dim: 64", "a: b: c"])
def test_text_that_is_no_yaml_is_one_sentence_with_its_line(text: str) -> None:
    assert re.fullmatch(r"line [1-4]: not valid YAML: .*; check quotes, brackets and indentation", message(text))


@pytest.mark.parametrize(
    "more, key, what",
    [
        ("dropout: true", "dropout", "cannot drop weights"),
        ("mask: key_padding", "mask", "reads no `key_padding`"),
        ("score: alibi", "score", "reads no `alibi_slopes`"),
        ("mask: {block_sparse: {block: 64}}", "mask", "visits no lists of blocks"),
        ("score: dense_bias", "score", "reads no `bias`"),
        ("head_dim: {qk: 192, v: 128}", "head_dim", "holds dK and dV of at most 256 columns together"),
    ],
)
def test_what_programs_that_walk_over_keys_cannot_do(more: str, key: str, what: str) -> None:
    text = f"name: x\n{'' if key == 'head_dim' else 'head_dim: 64'}\nschedule: {{order: kv_outer}}\n{more}"
    assert (
        message(text)
        == f"line 4: `{key}` asks for what `schedule: {{order: kv_outer}}` does not do: it {what}; expected `q_outer`"
    )


@pytest.mark.parametrize(
    "number, value", [("1:04", 64), ("0100", 64), ("0x40", 64), ("0b1000000", 64), ("6_4", 64), ("1:04.5", 64.5)]
)
def test_numbers_that_mean_others_to_yaml_are_refused(number: str, value: float) -> None:
    sentence = f"line 3: `head_dim` is `{number}`, which YAML reads as {value}; expected a decimal number, or quotes around text"
    assert message(f"name: x\nmask: causal\nhead_dim: {number}") == sentence
    assert message(f'name: x\nhead_dim: "{number}"') == f"line 2: `head_dim` is the text `{number}`; {HEAD_DIM}"


@pytest.mark.parametrize("number", ["5e1", "5E+1", "50", "50.", "+50.0", ".5e2", "5.0e+1"])
def test_numbers_with_exponents_are_numbers(number: str) -> None:
    assert parse_spec(BASE + f"score: {{softcap: {number}}}") == parse_spec(BASE + "score: {softcap: 50.0}")


@pytest.mark.parametrize("name", ["torch", "triton", "attngen", "json", "typing", "numpy"])
def test_a_module_has_no_name_of_a_package(name: str) -> None:
    sentence = f"is `{name}`, a package that its module would hide where both can be imported; expected another name"
    assert message(f"name: {name}\nhead_dim: 64") == f"line 1: `name` {sentence}"


@pytest.mark.parametrize(
    "mask, gone",
    [
        ("{any_of: [key_padding, none]}", "key_padding"),
        ('{any_of: [{expr: "kv_idx < sinks", params: {sinks: {scalar: int}}}, none]}', "sinks"),
        ('{any_of: [{expr: "low[q_idx] < 3 or true", params: {low: {tensor: [Nq], dtype: int32}}}, causal]}', "low"),
    ],
)
def test_inputs_that_a_mask_does_not_depend_on(mask: str, gone: str) -> None:
    assert message(BASE + f"mask: {mask}").startswith(
        f"line 3: `mask` does not depend on `{gone}`, once simplified; expected it to, or"
    )


def test_reads_of_two_kinds_under_one_name() -> None:
    two = "score:\n- expr: s + t[q_idx]\n  params: {t: {tensor: [9]}}\n- expr: s * t[kv_idx]\n  params: {t: {tensor: [9]}}"
    assert (
        message(BASE + two)
        == "line 6: `score[1]` reads `t` as `t`, which is read in another way too; expected another name in one of them"
    )


def test_the_usual_order_says_nothing() -> None:
    """Specs without an order have the hash that they had before there was one."""
    plain, said = (parse_spec(BASE + f"schedule: {{{order}}}") for order in ("", "order: q_outer"))
    assert plain.hash() == said.hash() and "order" not in said.canonical()["schedule"]
    assert parse_spec(BASE + "schedule: {order: kv_outer}").hash() != said.hash()


def test_every_mistake_is_reported() -> None:
    text = "name: X\nhead_dim: {qk: 63, v: 65}\ndtype: [bf17, fp61]\nmask: {all_of: [causl, {key_padding: {length: true}}]}\nhed: 1"
    keys = re.findall(r"line \d+: `(.*?)` is", message(text))
    assert sorted(keys) == [
        "dtype[0]", "dtype[1]", "head_dim.qk", "head_dim.v", "hed", "mask.all_of[0]", "mask.all_of[1].key_padding.length", "name",
    ]  # fmt: skip


def test_numbers_too_long_to_be_numbers_are_shown_short() -> None:
    for digits in ("9" * 5000, "0x" + "f" * 5000, "1:" * 3000 + "0"):
        assert len(message(f"name: x\nhead_dim: {digits}")) < 250


def test_suggestions() -> None:
    masks = list(registry())
    assert suggest("padding", masks) == "did you mean `key_padding`?"
    assert suggest("Causal", masks) == "did you mean `causal`?"
    assert suggest("zzz", ["b", "a"]) == "known: a, b"
    assert suggest("zzz", []) == "there are none"


# ---------------------------------------------------------------------------------------------- files


def file_message(path: Path) -> str:
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    return str(caught.value)


def test_files_that_are_no_specs(tmp_path: Path) -> None:
    path = tmp_path / "causal.yaml"
    assert file_message(path) == f"{path}: there is no such file; `attngen new NAME` writes a spec to start from"
    path.write_bytes(b"name: \xff")
    assert file_message(path) == f"{path}: byte 6 is not UTF-8 text; expected a YAML spec"
    path.write_text("#" * (MAX_BYTES + 1))
    assert file_message(path) == f"{path}: larger than 64 KiB; expected a short YAML spec"
    assert file_message(tmp_path) == f"{tmp_path}: cannot be read (Is a directory); expected a YAML spec"
    near = tmp_path / "causl.yaml"
    assert file_message(near) == f"{near}: there is no such file; did you mean {path}?"
    assert "larger" in file_message(Path("/dev/zero"))
    link = tmp_path / "link.yaml"
    link.symlink_to("gone.yaml")
    assert file_message(link) == f"{link}: is a link to gone.yaml, which does not exist; expected a YAML spec"
    assert file_message(tmp_path / "lnk.yaml").endswith("`attngen new NAME` writes a spec to start from")


def test_windows_line_ends_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + BASE.replace("\n", "\r\n").encode())
    assert load_spec(path) == parse_spec(BASE)


# ---------------------------------------------------------------------------------------------- good specs


def test_shorthands_mean_their_long_forms() -> None:
    short = parse_spec("name: x\nhead_dim: 64\ndtype: fp16\nmask: causal")
    long = parse_spec(
        "name: x\nhead_dim: {qk: 64, v: 64}\ndtype: [fp16]\nmask: {causal: {align: bottom_right}}\nheads: {sharing: mha}"
    )
    assert short == long
    assert short.hash() == long.hash()
    assert parse_spec(BASE + "dtype: [fp16, bf16]") == parse_spec(BASE)


def test_a_changed_spec_has_another_hash() -> None:
    texts = [
        BASE,
        BASE + "mask: causal",
        BASE + "mask: {causal: {align: top_left}}",
        BASE + "dtype: bf16",
        BASE + "schedule: {block_q: 64}",
    ]
    assert len({parse_spec(t).hash() for t in texts}) == len(texts)


def test_no_backward_has_a_hash_of_its_own() -> None:
    """What specs said before there was `backward: false` keeps its hash."""
    plain, said, none = (parse_spec(BASE + more) for more in ("", "backward: {}", "backward: false"))
    assert plain.hash() == said.hash() != none.hash() and "backward" not in plain.canonical()
    assert make_spec(none.canonical()) == none and not none.trains and plain.trains


@pytest.mark.parametrize("name", SPECS)
def test_the_canonical_form_is_a_spec_with_the_same_hash(name: str) -> None:
    spec = load_spec(ROOT / "specs" / f"{name}.yaml")
    assert make_spec(spec.canonical()) == spec


def test_the_starter_is_a_spec() -> None:
    assert parse_spec(starter("my_attention")).name == "my_attention"


def test_the_starter_names_every_mask_and_a_schedule_that_parses() -> None:
    text = starter("my_attention")
    assert re.search(r"Masks: (.*?)\.", text)[1].split(", ") == list(registry())
    schedule = re.search(r"schedule: \{.*\}", text)[0]
    assert None not in parse_spec(BASE + schedule).schedule.model_dump().values()


def test_masks_of_one_kind_that_differ_are_no_repeat() -> None:
    windows = "[{sliding_window: {left: 9}}, {sliding_window: {right: 9}}, causal, {causal: {align: top_left}}]"
    assert parse_spec(BASE + f"mask: {{all_of: {windows}}}").mask.describe().count(" and ") == 3


OR = '{expr: "kv_idx < 4 or kv_idx > 90"}'


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (f"{{all_of: [causal, {OR}]}}", "causal and (kv_idx < 4 or kv_idx > 90)"),
        (f"{{not: {OR}}}", "not (kv_idx < 4 or kv_idx > 90)"),
        ('{any_of: [{expr: "kv_idx < 4 and h == 0"}, causal]}', "(kv_idx < 4 and h == 0) or causal"),
        (
            '{all_of: [{expr: "kv_idx < 4"}, {not: {any_of: [causal, document]}}]}',
            "kv_idx < 4 and not (causal or document)",
        ),
        ('{all_of: [{expr: "kv_idx < 4"}, {not: {expr: "h == 0"}}]}', "kv_idx < 4 and not h == 0"),
        ('{not: {expr: "where(h == 0 or b == 0, kv_idx < 4, true)"}}', "not where(h == 0 or b == 0, kv_idx < 4, true)"),
        ('{not: {expr: "r < 3", let: {r: "q_idx // 4"}}}', "not (r < 3 where r = q_idx // 4)"),
    ],
)
def test_the_text_of_a_mask_keeps_its_brackets(mask: str, text: str) -> None:
    assert parse_spec(BASE + f"mask: {mask}").mask.describe() == text


def test_named_parts() -> None:
    """They are read in order, are in the canonical form where there are some, and their mistakes name them."""
    spec = parse_spec(
        BASE + 'mask: {expr: "r == c", let: {r: "q_idx // w", c: "kv_idx // w"}, params: {w: {scalar: int, min: 1}}}'
    )
    plain = parse_spec(BASE + 'mask: {expr: "q_idx // w == kv_idx // w", params: {w: {scalar: int, min: 1}}}')
    assert spec.mask.expression() == plain.mask.expression()
    assert (
        spec.canonical()["mask"]["let"] == {"r": "q_idx // w", "c": "kv_idx // w"}
        and "let" not in plain.canonical()["mask"]
    )
    assert make_spec({"name": "x", "head_dim": 64, "mask": spec.canonical()["mask"]}).hash() == spec.hash()
    for wrong, text in (
        ('{r: "q_idx +"}', "line 3: `mask.let.r` at column 7 ends in `+`; expected a name or a number after it"),
        ("[q_idx]", 'line 3: `mask.let` is a list; expected expressions in quotes by name, as in {row: "q_idx // 64"}'),
        (
            "{r: 3}",
            'line 3: `mask.let` is a mapping; expected expressions in quotes by name, as in {row: "q_idx // 64"}',
        ),
    ):
        with pytest.raises(SpecError) as error:
            parse_spec(BASE + f'mask: {{expr: "r < 3", let: {wrong}}}', "x.yaml")
        assert str(error.value) == f"x.yaml, {text}"


@pytest.mark.parametrize(
    ("expr", "what"),
    [
        ("kv_idx <= q_idx", "compares"),
        ("not (h == 0 and q_idx >= kv_idx)", "compares"),
        ("abs(q_idx - kv_idx) < 8", "subtracts"),
        ("q_idx // 32 == kv_idx // 32", "compares"),
        ("t[q_idx - kv_idx + 9] > 0", "subtracts"),
        ("kv_idx <= q_pos", None),
        ("kv_idx <= q_idx + kv_len - q_len", None),
        ("abs(q_pos - kv_idx) < 8 and q_idx < 4 or kv_idx < 4", None),
        ("t[q_idx] == t[kv_idx]", None),
        ("q_idx + kv_idx < 9", None),
    ],
)
def test_positions_that_count_from_zero_get_a_note(expr: str, what: str | None) -> None:
    params = ", params: {t: {tensor: [99]}}" if "t[" in expr else ""
    for key in (f'mask: {{not: {{expr: "{expr}"{params}}}}}', f'score: [{{expr: "where({expr}, s, 2 * s)"{params}}}]'):
        notes = parse_spec(BASE + key).notes()
        assert [(at[0], note.split(" ")[0]) for at, note in notes] == ([(key.split(":")[0], what)] if what else [])


def test_a_parameter_that_the_whole_does_not_need_is_refused() -> None:
    for text, key, name in (
        ('mask: {any_of: [{expr: "kv_idx < sinks", params: {sinks: {scalar: int}}}, none]}', "mask", "sinks"),
        ("mask: {any_of: [key_padding, none]}", "mask", "key_padding"),
        ("mask: {any_of: [document, {not: document}]}", "mask", "document_ids"),
        (
            'score: [{expr: "s + x", params: {x: {scalar: float}}}, {expr: "s - x", params: {x: {scalar: float}}}]',
            "score[0]",
            "x",
        ),
    ):
        with pytest.raises(SpecError, match=f"`{re.escape(key)}` does not depend on `{name}`, once simplified"):
            parse_spec(BASE + text)


# ---------------------------------------------------------------------------------------------- JSON schema


def conforms(value: Any, node: dict[str, Any], root: dict[str, Any]) -> bool:
    """Whether a value conforms to the JSON schema, for the keywords that ours uses."""
    if "$ref" in node:
        found = root
        for key in node["$ref"].removeprefix("#/").split("/"):
            found = found[key]
        return conforms(value, found, root)
    if "anyOf" in node and not any(conforms(value, n, root) for n in node["anyOf"]):
        return False
    if "not" in node and conforms(value, node["not"], root):
        return False
    if "const" in node and value != node["const"]:
        return False
    if "enum" in node and not any(type(value) is type(e) and value == e for e in node["enum"]):
        return False
    types = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool, "null": type(None)}
    if "type" in node and not (
        type(value) is types.get(node["type"]) or node["type"] == "number" and type(value) in (int, float)
    ):
        return False
    if isinstance(value, str) and not re.search(node.get("pattern", ""), value):
        return False
    if isinstance(value, (int, float)):
        inside = node.get("minimum", value) <= value <= node.get("maximum", value) and value < node.get(
            "exclusiveMaximum", value + 1
        )
        return inside and value % node.get("multipleOf", 1) == 0
    if isinstance(value, list):
        distinct = not node.get("uniqueItems") or len({str(v) for v in value}) == len(value)
        return (
            distinct
            and len(value) >= node.get("minItems", 0)
            and all(conforms(v, node.get("items", {}), root) for v in value)
        )
    if isinstance(value, dict):
        known = node.get("properties", {})
        named = all(conforms(key, node.get("propertyNames", {}), root) for key in value)
        complete = (
            named
            and all(key in value for key in node.get("required", ()))
            and (known.keys() >= value.keys() or "properties" not in node)
        )
        return complete and all(conforms(v, known[k], root) for k, v in value.items() if k in known)
    return True


NAMES_OF_PARAMETERS = [
    "window",
    "slope_2",
    "my_q",
    "doc",
    "g",
    "p",
    "q",
    "k",
    "t1",
    "splits",
    "q_pos",
    "floor",
    "len",
    "lambda",
    "acc_2",
    "Q",
]


def test_the_check_knows_every_keyword_of_the_schema() -> None:
    notes = {"$schema", "$defs", "title", "description", "default", "additionalProperties"}
    checked = {
        "$ref",
        "anyOf",
        "const",
        "enum",
        "type",
        "pattern",
        "minimum",
        "maximum",
        "exclusiveMaximum",
        "multipleOf",
    }
    checked |= {"uniqueItems", "minItems", "items", "required", "properties", "propertyNames", "not"}

    def keywords(node: Any) -> set[str]:
        if not isinstance(node, dict):
            return {k for n in node for k in keywords(n)} if isinstance(node, list) else set()
        below = [
            *node.get("properties", {}).values(),
            *node.get("$defs", {}).values(),
            *node.get("anyOf", ()),
            node.get("items"),
        ]
        below += [node.get("propertyNames"), node.get("not")]
        return set(node).union(*(keywords(n) for n in below))

    assert keywords(json_schema()) <= notes | checked


@pytest.mark.parametrize("name", SPECS)
def test_specs_conform_to_the_json_schema(name: str) -> None:
    schema = json_schema()
    assert conforms(yaml.safe_load((ROOT / "specs" / f"{name}.yaml").read_text()), schema, schema)


@pytest.mark.parametrize("name", [*NAMES_OF_PARAMETERS, *sorted(TAKEN)])
def test_the_json_schema_has_the_names_that_are_reserved(name: str) -> None:
    """Those that `attngen build` refuses, each with its reason, are those that an editor refuses."""
    problem = name_problem(name)
    assert problem is None or problem.startswith(("is reserved: ", "is a word of ", "is not a name; "))
    assert conforms(name, names_schema(), {}) == (problem is None)


# What a JSON schema leaves to attngen: no file at all, and rules that tie one key to another or to Python.
BEYOND = (
    "fp32_precision: tf32",
    "name: class",
    "mask: sliding_window",
    "score: softcap",
    "schedule: {warps: 4.0}",
    "schedule: {split: {keys: 1024}}",
    "{align: bottom_right}}]}",
    "cache: {scale: head}",
    "cache: {dtype: fp8_e4m3}",
    "scale: page}",
)


@pytest.mark.parametrize(
    "text", [t for t in MISTAKES if t.startswith("name: ") and not t.endswith(BEYOND) and "class" not in t]
)
def test_mistakes_do_not_conform_to_the_json_schema(text: str) -> None:
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError:
        return
    if MISTAKES[text].startswith("line 3: key") or "&" in text or "<<" in text:
        return  # what YAML allows and attngen does not
    assert not conforms(data, json_schema(), json_schema())


# ---------------------------------------------------------------------------------------------- fuzz

# fmt: off
WORDS = [
    "name", "heads", "sharing", "mha", "mqa", "gqa", "head_dim", "qk", "v", "dtype", "bf16", "fp16", "fp32", "fp32_precision", "ieee",
    "tf32", "mask", "none", "causal", "align", "top_left", "sliding_window", "left", "right", "key_padding", "lengths", "all_of",
    "schedule", "block_q", "stages", "warps", "x", "../x", "<<", "=",
]
# fmt: on
SCALARS = st.one_of(
    st.sampled_from(WORDS),
    st.none(),
    st.booleans(),
    st.integers(-2, 300),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
)
NESTED = st.recursive(
    SCALARS, lambda s: st.lists(s, max_size=3) | st.dictionaries(st.sampled_from(WORDS), s, max_size=4), max_leaves=12
)
LIKELY = st.fixed_dictionaries(
    {"name": st.just("x"), "head_dim": st.sampled_from([64, 128, {"qk": 192, "v": 128}]) | NESTED},
    optional={"heads": NESTED, "dtype": NESTED, "mask": NESTED, "schedule": NESTED, "fp32_precision": SCALARS},
)


def only_a_spec_or_a_sentence(text: str) -> None:
    try:
        spec = parse_spec(text, "x.yaml")
    except SpecError as error:
        for line in str(error).splitlines():
            assert line.startswith("x.yaml") and line.isprintable()
            assert "Input should" not in line and "validat" not in line
    else:
        assert isinstance(spec, Spec)
        assert re.fullmatch("[a-z][a-z0-9_]*", spec.name)
        assert make_spec(spec.canonical()) == spec


@settings(max_examples=150, deadline=None)
@given(
    st.text(max_size=60)
    | st.lists(
        st.sampled_from([*WORDS, ": ", "\n", "  ", "- ", "[", "]", "{", "}", ", ", "64", "&", "*", "!", "|"])
    ).map("".join)
)
@example("a: !!int ''")
@example("a: 0x_")
@example("a: 1:99999999999999999999")
@example("\ufeff")
@example("a: 2024-99-99")
@example("? a")
def test_any_text_is_a_spec_or_a_sentence(text: str) -> None:
    only_a_spec_or_a_sentence(text)
    only_a_spec_or_a_sentence(BASE + text)


@settings(max_examples=150, deadline=None)
@given(LIKELY | NESTED)
def test_any_data_is_a_spec_or_a_sentence(data: Any) -> None:
    only_a_spec_or_a_sentence(yaml.safe_dump(data, allow_unicode=True))


@settings(max_examples=50, deadline=None)
@given(
    st.text(min_size=1, max_size=20)
    | st.sampled_from(["../x", "/abs", "a/b", "..", ".", "~", "con", "NUL", "a\\b", "import", "naïve", "a\n"])
)
def test_a_name_is_an_identifier_or_refused(name: str) -> None:
    try:
        spec = make_spec({"name": name, "head_dim": 64})
    except SpecError:
        return
    assert re.fullmatch("[a-z][a-z0-9_]{0,63}", spec.name)


WINDOW, SINKS = "{sliding_window: {left: 255, right: 0}}", "{sink_tokens: {count: 4}}"


@pytest.mark.parametrize(
    ("mask", "shown"),
    [
        (f"{{any_of: [{WINDOW}, {SINKS}]}}", ["`sink_tokens(count=4)`"]),
        (f"{{any_of: [causal, {SINKS}, {{expr: 'kv_idx == 9'}}]}}", ["`sink_tokens(count=4)`", "`kv_idx == 9`"]),
        (f"{{any_of: [{{block_causal: {{size: 16}}}}, {SINKS}]}}", ["`sink_tokens(count=4)`"]),
        (f"{{all_of: [key_padding, {{any_of: [{WINDOW}, {SINKS}]}}]}}", ["`sink_tokens(count=4)`"]),
        (f"{{any_of: [{{all_of: [document, causal]}}, {SINKS}]}}", ["`sink_tokens(count=4)`"]),
        (
            "{any_of: [{sliding_window: {left: 9, right: 9}}, {any_of: [causal, key_padding]}]}",
            ["`causal or key_padding`"],
        ),
        (f"{{all_of: [causal, {{any_of: [{WINDOW}, {SINKS}]}}]}}", []),
        (f"{{any_of: [{WINDOW}, {{all_of: [causal, {SINKS}]}}]}}", []),
        (f"{{any_of: [{WINDOW}, {{expr: 'kv_idx < 4 and kv_idx <= q_pos'}}]}}", []),
        (f"{{any_of: [{{block_causal: {{size: 16}}}}, {WINDOW}]}}", []),
        (f"{{any_of: [{{sliding_window: {{left: 255}}}}, {SINKS}]}}", []),
        (f"{{any_of: [document, {SINKS}]}}", []),
        ("prefix_lm", []),
        ("causal", []),
    ],
)
def test_a_union_of_causal_and_other_parts_gets_a_note(mask: str, shown: list[str]) -> None:
    """A window beside the first keys shows these to earlier queries, too, unless the union is causal as a whole."""
    notes = [note for _, note in parse_spec(BASE + f"mask: {mask}").notes()]
    assert len(notes) == bool(shown)
    for note in notes:
        assert (
            note.startswith("is a union in which some parts hide keys behind the query")
            and "{all_of: [causal, {any_of: " in note
        )
        assert all(text in note for text in shown)


def test_what_recommends_the_first_keys_gives_the_causal_form() -> None:
    """The docstring, which `attngen list` and the reference print, and pages that show the mask."""
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("**/*.md"), ROOT / "attngen" / "masks" / "sink_tokens.py"):
        for line in path.read_text(encoding="utf-8").splitlines():
            assert not re.search(r"any_of.*sink_tokens", line) or "causal" in line, (path, line)
    assert "causal" in (registry()["sink_tokens"].__doc__ or "").splitlines()[0]


@pytest.mark.parametrize(
    ("sharing", "mask", "sentence"),
    [
        ("mqa", "hkv == 1", "`mask` hides every key from every query"),
        ("mqa", "hkv * limit >= 1 or kv_idx <= q_pos", "`mask` does not depend on `limit`, once simplified"),
        ("mha", "h > hkv and kv_idx <= limit", "`mask` hides every key from every query"),
    ],
)
def test_the_sharing_of_heads_says_what_the_kv_head_is(sharing: str, mask: str, sentence: str) -> None:
    params = {"params": {"limit": {"scalar": "int"}}} if "limit" in mask else {}
    data = {"name": "x", "head_dim": 16, "heads": {"sharing": sharing}, "mask": {"expr": mask, **params}}
    with pytest.raises(SpecError, match=sentence):
        make_spec(data)
    assert make_spec(data | {"heads": {"sharing": "gqa"}})


def test_a_mask_that_the_sharing_of_heads_makes_no_mask_builds() -> None:
    """So do functions of the K/V head that are numbers there."""
    for mask in (
        "hkv != 1",
        "max(1, 1 << hkv) <= kv_idx + 1",
        "max(0.25, sigmoid(hkv), round(hkv + 0.3)) <= kv_idx + 1",
    ):
        lower(
            make_spec({"name": "x", "head_dim": 16, "heads": {"sharing": "mqa"}, "mask": {"expr": mask}}),
            "assign-memory-space",
        )
