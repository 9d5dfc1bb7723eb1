"""Specs: each mistake gets one sentence, and valid specs have canonical forms, hashes and notes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from attngen.errors import SpecError, suggest
from attngen.lowering.pipeline import lower
from attngen.masks import registry
from attngen.spec import MAX_BYTES, load_spec, make_spec, parse_spec, starter
from tests.helpers import ROOT, SPECS
from tests.spec_mistakes import BASE, HEAD_DIM, MISTAKES


def message(text: str) -> str:
    """Return the error for YAML text, without the file's name."""
    with pytest.raises(SpecError) as caught:
        parse_spec(text, "x.yaml")
    lines = str(caught.value).splitlines()
    assert all(line.startswith("x.yaml") for line in lines)
    return "\n".join(line.removeprefix("x.yaml").removeprefix(", ").removeprefix(": ") for line in lines)


# ---------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_is_one_sentence(text: str) -> None:
    assert message(text) == MISTAKES[text]


@pytest.mark.parametrize("text", [BASE + "mask: {", BASE + 'mask: "causal', "name: x\n head_dim: 64", "a: b: c"])
def test_invalid_yaml_is_one_sentence_with_its_line(text: str) -> None:
    assert re.fullmatch(r"line [1-4]: not valid YAML: .*; check quotes, brackets and indentation", message(text))


@pytest.mark.parametrize(
    "more, key, problem",
    [
        ("dropout: true", "dropout", "cannot drop weights"),
        ("mask: key_padding", "mask", "reads no `key_padding`"),
        ("score: alibi", "score", "reads no `alibi_slopes`"),
        ("mask: {block_sparse: {block: 64}}", "mask", "has no block lists"),
        ("score: dense_bias", "score", "reads no `bias`"),
        ("head_dim: {qk: 192, v: 128}", "head_dim", "holds dK and dV whose head_dims are at most 256 together"),
    ],
)
def test_features_that_the_loop_order_kv_outer_lacks_are_refused(more: str, key: str, problem: str) -> None:
    text = f"name: x\n{'' if key == 'head_dim' else 'head_dim: 64'}\nschedule: {{order: kv_outer}}\n{more}"
    reason = f"`{key}` asks for what `schedule: {{order: kv_outer}}` does not do: it {problem}; expected `q_outer`"
    assert message(text) == f"line 4: {reason}"


@pytest.mark.parametrize(
    "number, value", [("1:04", 64), ("0100", 64), ("0x40", 64), ("0b1000000", 64), ("6_4", 64), ("1:04.5", 64.5)]
)
def test_numbers_that_yaml_reads_as_others_are_refused(number: str, value: float) -> None:
    sentence = (
        f"line 3: `head_dim` is `{number}`, which YAML reads as {value}; expected a decimal number, or quotes around "
        f"text"
    )
    assert message(f"name: x\nmask: causal\nhead_dim: {number}") == sentence
    assert message(f'name: x\nhead_dim: "{number}"') == f"line 2: `head_dim` is the text `{number}`; {HEAD_DIM}"


@pytest.mark.parametrize("number", ["5e1", "5E+1", "50", "50.", "+50.0", ".5e2", "5.0e+1"])
def test_numbers_with_exponents_are_numbers(number: str) -> None:
    assert parse_spec(BASE + f"score: {{softcap: {number}}}") == parse_spec(BASE + "score: {softcap: 50.0}")


@pytest.mark.parametrize("name", ["torch", "triton", "attngen", "json", "typing", "numpy"])
def test_names_of_packages_are_refused(name: str) -> None:
    sentence = f"is `{name}`, a package that its module would shadow; expected another name"
    assert message(f"name: {name}\nhead_dim: 64") == f"line 1: `name` {sentence}"


@pytest.mark.parametrize(
    "mask, name",
    [
        ("{any_of: [key_padding, none]}", "key_padding"),
        ('{any_of: [{expr: "kv_idx < sinks", params: {sinks: {scalar: int}}}, none]}', "sinks"),
        ('{any_of: [{expr: "low[q_idx] < 3 or true", params: {low: {tensor: [Nq], dtype: int32}}}, causal]}', "low"),
    ],
)
def test_inputs_that_a_mask_does_not_depend_on_are_refused(mask: str, name: str) -> None:
    assert message(BASE + f"mask: {mask}").startswith(
        f"line 3: `mask` does not depend on `{name}`, once simplified; expected it to, or"
    )


def test_two_reads_with_one_name_are_refused() -> None:
    two = (
        "score:\n- expr: s + t[q_idx]\n  params: {t: {tensor: [9]}}\n- expr: s * t[kv_idx]\n"
        "  params: {t: {tensor: [9]}}"
    )
    assert message(BASE + two) == (
        "line 6: `score[1]` reads `t` as `t`, which is also read in another way; expected another name in one of them"
    )


def test_the_default_loop_order_does_not_change_the_hash() -> None:
    """Specs without `order` keep the hash from before there was this key."""
    plain, explicit = (parse_spec(BASE + f"schedule: {{{order}}}") for order in ("", "order: q_outer"))
    assert plain.hash() == explicit.hash() and "order" not in explicit.canonical()["schedule"]
    assert parse_spec(BASE + "schedule: {order: kv_outer}").hash() != explicit.hash()


def test_every_mistake_is_reported() -> None:
    text = (
        "name: X\nhead_dim: {qk: 63, v: 65}\ndtype: [bf17, fp61]\n"
        "mask: {all_of: [causl, {key_padding: {length: true}}]}\nhed: 1"
    )
    keys = re.findall(r"line \d+: `(.*?)` is", message(text))
    assert sorted(keys) == [
        "dtype[0]", "dtype[1]", "head_dim.qk", "head_dim.v", "hed", "mask.all_of[0]",
        "mask.all_of[1].key_padding.length", "name",
    ]  # fmt: skip


def test_too_long_numbers_are_shortened_in_errors() -> None:
    for digits in ("9" * 5000, "0x" + "f" * 5000, "1:" * 3000 + "0"):
        assert len(message(f"name: x\nhead_dim: {digits}")) < 250


def test_suggestions_name_the_nearest_word() -> None:
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


def test_files_that_are_not_specs_are_refused(tmp_path: Path) -> None:
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


def test_windows_line_ends_and_a_byte_order_mark_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + BASE.replace("\n", "\r\n").encode())
    assert load_spec(path) == parse_spec(BASE)


# ---------------------------------------------------------------------------------------------- good specs


def test_shorthands_equal_their_long_forms() -> None:
    short = parse_spec("name: x\nhead_dim: 64\ndtype: fp16\nmask: causal")
    long = parse_spec(
        "name: x\nhead_dim: {qk: 64, v: 64}\ndtype: [fp16]\nmask: {causal: {align: bottom_right}}\n"
        "heads: {sharing: mha}"
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


def test_a_spec_without_a_backward_has_another_hash() -> None:
    """Specs from before there was `backward: false` keep their hash."""
    plain, explicit, none = (parse_spec(BASE + more) for more in ("", "backward: {}", "backward: false"))
    assert plain.hash() == explicit.hash() != none.hash() and "backward" not in plain.canonical()
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


def test_different_masks_of_one_kind_are_not_a_repeat() -> None:
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


def test_named_parts_are_read_in_order() -> None:
    """Named parts are read in order, are in the canonical form, and their mistakes name them."""
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


@pytest.mark.share(4)
@pytest.mark.parametrize(
    ("expr", "verb"),
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
def test_positions_that_count_from_zero_get_a_note(expr: str, verb: str | None) -> None:
    params = ", params: {t: {tensor: [99]}}" if "t[" in expr else ""
    for key in (f'mask: {{not: {{expr: "{expr}"{params}}}}}', f'score: [{{expr: "where({expr}, s, 2 * s)"{params}}}]'):
        notes = parse_spec(BASE + key).notes()
        assert [(at[0], note.split(" ")[0]) for at, note in notes] == ([(key.split(":")[0], verb)] if verb else [])


def test_a_parameter_that_the_simplified_expression_does_not_need_is_refused() -> None:
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


# ---------------------------------------------------------------------------------------------- fuzz


WINDOW, SINKS = "{sliding_window: {left: 255, right: 0}}", "{sink_tokens: {count: 4}}"


@pytest.mark.share(4)
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
    """In a union of a window and the first keys, earlier queries see these keys, too, unless the whole union is
    causal."""
    notes = [note for _, note in parse_spec(BASE + f"mask: {mask}").notes()]
    assert len(notes) == bool(shown)
    for note in notes:
        assert (
            note.startswith("is a union in which some parts hide keys after the query")
            and "{all_of: [causal, {any_of: " in note
        )
        assert all(text in note for text in shown)


def test_docs_combine_sink_tokens_with_causal() -> None:
    """This holds for pages with the mask, and for its docstring, which `attngen list` and the reference print."""
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
def test_the_kv_head_is_known_from_the_sharing_of_heads(sharing: str, mask: str, sentence: str) -> None:
    params = {"params": {"limit": {"scalar": "int"}}} if "limit" in mask else {}
    data = {"name": "x", "head_dim": 16, "heads": {"sharing": sharing}, "mask": {"expr": mask, **params}}
    with pytest.raises(SpecError, match=sentence):
        make_spec(data)
    assert make_spec(data | {"heads": {"sharing": "gqa"}})


def test_a_mask_that_hides_nothing_for_the_sharing_of_heads_builds() -> None:
    """Functions of the K/V head that are constant for this sharing build, too."""
    for mask in (
        "hkv != 1",
        "max(1, 1 << hkv) <= kv_idx + 1",
        "max(0.25, sigmoid(hkv), round(hkv + 0.3)) <= kv_idx + 1",
    ):
        lower(
            make_spec({"name": "x", "head_dim": 16, "heads": {"sharing": "mqa"}, "mask": {"expr": mask}}),
            "assign-memory-space",
        )
