"""Printing and parsing the textual IR are inverse, and text that does not parse is refused with its line."""

from __future__ import annotations

import ast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attngen.codegen.render import render
from attngen.errors import AttngenError, IRError, VerifyError
from attngen.ir import parse, to_text
from attngen.ir.parser import parse_module
from attngen.ir.printer import print_module
from attngen.verify import verify
from tests.helpers import ROOT, edit, portable, target

# ---------------------------------------------------------------------------------------------- modules


@pytest.mark.share(16)
@pytest.mark.parametrize("path", sorted((ROOT / "generated").glob("*/schedule.ir")), ids=lambda p: p.parent.name)
def test_committed_text_is_a_fixed_point(path):
    text = path.read_text()
    assert print_module(parse_module(text)) == text


def test_comments_and_blank_lines_do_not_count():
    text = print_module(target("full_mha"))
    assert print_module(parse_module("// a comment\n\n" + text.replace("\nkernel", "\n\n  // another\nkernel"))) == text


BAD_LINES = {  # mistake: (text of the forward kernel, its replacement, a piece of the error)
    "unknown key": (
        "  mask none",
        "  colour red",
        "`colour` is not a key of the header; known: ir, version, spec, phase",
    ),
    "op outside a kernel": ("  mask none", "  %x = init 0 : f32[] @reg", "`%x` is not a key of the header"),
    "no name": ("%m_init = init", "init", "`` does not name init; expected `%name = ...`"),
    "name that is not a word": (
        "%m_init = init",
        "%m init = init",
        "`%m init` does not name init; expected `%name = ...`",
    ),
    "name without a result": (
        "    yield ",
        "    %y = yield ",
        "`%y` does not name yield; expected no name, because it has no result",
    ),
    "type without a result": (
        "acc=%acc_next)\n",
        "acc=%acc_next) : f32[] @reg\n",
        "yield has no type; expected nothing from `:` on",
    ),
    "unknown op": ("= init -inf", "= filled -inf", "`filled` is not an op; known: arg, base, load"),
    "missing positional": ("= dot %q %k over(D_QK)", "= dot %q", "`dot` needs a and b after its name"),
    "missing field": ("over(D_QK) ", "", "dot lacks over"),
    "missing type": (" : f32[BLOCK_Q, BLOCK_KV] @reg", "", "dot lacks type"),
    "unknown field": (
        "over(D_QK)",
        "over(D_QK) colour(red)",
        "`colour(red)` is not a field of dot; known: acc, over, precision",
    ),
    "bad type": ("f32[BLOCK_Q] @reg", "f32(BLOCK_Q) @reg", "is not a type; expected `f32[BLOCK_Q, D_V] @reg`"),
    "bad space": ("f32[BLOCK_Q] @reg", "f32[BLOCK_Q] @disk", "is not a type"),
    "bad range": ("ranges(0 .. ", "ranges(0 to ", "is not a range; expected `0 .. cdiv(Nk, BLOCK_KV)`"),
    "bad access": (
        "load %Q_head[q, d_qk]",
        "load Q_head[q]",
        "`Q_head[q]` is not an access; expected `%K[b, h, kv, d_qk]`",
    ),
    "bad reference": ("= dot %q %k", "= dot q %k", "`q` is not a value; expected `%name` or `%name.field`"),
    "bad word": ("over(D_QK)", "over(D QK)", "`D QK` is not a word"),
    "bad expression": ("expr(LOG2E*scale)", "expr(LOG2E scale)", "`LOG2E scale` is not an expression"),
    "call": ("expr(LOG2E*scale)", "expr(print(scale))", "calls `print`; known: abs, bitand"),
    "bad grid": (
        "q in cdiv(Nq, BLOCK_Q)",
        "q to cdiv(Nq, BLOCK_Q)",
        "is not a grid axis; expected `q in cdiv(Nq, BLOCK_Q)`",
    ),
    "bad kernel": (
        "kernel @fwd program_axis(q) grid(",
        "kernel fwd grid(",
        "not a kernel header; expected `kernel @fwd program_axis(q) grid(...)`",
    ),
    "op outside a block": ("  block @entry\n", "", "an op outside a block; expected `block @entry` first"),
    "bad config": (
        "rows<=inf : BLOCK_Q=",
        "rows=inf : BLOCK_Q=",
        "not a config; expected `sm90 bytes=2 rows<=inf",
    ),
    "bad line of a tile that does not fit": (
        "sm80 bytes=2 rows<=inf : ",
        "sm80 bytes=2 none: ",
        "not a config; expected `sm90 bytes=2 rows<=inf",
    ),
    "bad module name": ("module @full_mha", "module @full mha", "`@full mha` is not a word"),
    "bad input": (
        "where(true)\n",
        "where(true)\n  input key : b1\n",
        "not an input; expected `input kv_lengths : i32[B] what it is`",
    ),
}


def test_a_config_names_its_backend_where_it_is_not_the_modules():
    text = print_module(portable("causal_mha"))
    assert "backend=" not in text and {config.backend for config in parse_module(text).configs("fwd")} == {"triton"}
    other = text.replace("num_stages=3 TMA=1\n", "num_stages=3 TMA=1 backend=other\n", 1)
    assert other != text and print_module(parse_module(other)) == other
    with pytest.raises(VerifyError, match="`backend other`; expected one of triton"):
        verify(parse_module(other))


def test_a_device_without_a_tile_prints_and_parses_back():
    """A line with the reason replaces the device's configs, and the module passes the verifier."""
    text = print_module(target("full_mha"))
    rows = [line for line in text.splitlines() if line.startswith("  gfx942 bytes=2 ")]
    none = "  gfx942 bytes=2 none : on gfx942 the kernel @fwd needs 70,000 bytes; a smaller head_dim needs less"
    edited = text.replace(rows[0], none, 1)
    for row in rows[1:]:
        if edited.index(row) < edited.index("schedule @dq"):
            edited = edited.replace(row + "\n", "", 1)
    module = verify(parse_module(edited))
    assert print_module(module) == edited
    assert [(u.device, u.elem_bytes, u.reason) for u in module.not_fitting("fwd")] == [
        ("gfx942", 2, none.split(" : ")[1])
    ]
    assert not any(r.device == "gfx942" for r in module.configs("fwd"))


@pytest.mark.parametrize("old, new, reason", BAD_LINES.values(), ids=BAD_LINES)
def test_an_error_names_the_source_the_line_and_what_is_expected(old, new, reason):
    text = print_module(target("full_mha"))
    wrong = edit(text, (old, new))
    line = next(n for n, (a, b) in enumerate(zip(wrong.splitlines(), text.splitlines()), 1) if a != b)
    with pytest.raises(IRError) as error:
        parse_module(wrong, "edited.ir")
    assert str(error.value).startswith(f"edited.ir, line {line}: ")
    assert reason in str(error.value)


@pytest.mark.parametrize(
    "key", ["version", "spec", "phase", "backend", "heads", "head_dim", "dtype", "precision", "mask"]
)
def test_every_key_of_the_header_is_needed(key):
    text = print_module(target("full_mha"))
    line = next(line for line in text.splitlines() if line.startswith(f"  {key} "))
    with pytest.raises(IRError, match=f"^edited.ir: the module header lacks `{key}`$"):
        parse_module(edit(text, (line + "\n", "")), "edited.ir")


def test_a_head_dim_in_another_form_is_refused():
    with pytest.raises(IRError, match="edited.ir.*`head_dim 64`; expected `head_dim qk=64 v=64`"):
        parse_module(edit(print_module(target("full_mha")), ("head_dim qk=64 v=64", "head_dim 64")), "edited.ir")


# ---------------------------------------------------------------------------------------------- expressions

NUMBERS = st.sampled_from(["0", "1", "2", "7", "0.5", "inf", "Nq", "Nk", "BLOCK_KV", "q_idx", "kv_idx", "s", "LOG2E"])
CONDITIONS = st.sampled_from(
    ["true", "key_padding", "q_idx <= kv_idx", "s > 0 and Nq < Nk", "not (s < 1 or Nq >= 2)", "kv_idx < 4 or false"]
)


def _compound(inner):
    operators = st.sampled_from(
        ["({}) + ({})", "({}) - ({})", "({}) * ({})", "({}) / l", "({}) / ({})", "({}) // ({})"]
    )
    calls = st.sampled_from(
        ["min({}, {})", "max({}, {})", "cdiv({}, {})", "floordiv({}, {})", "exp2({})", "log2({})", "-({})"]
    )
    selects = CONDITIONS.map(lambda c: f"select({c}, {{}}, {{}})")
    return st.builds(str.format, operators | calls | selects, inner, inner)


TEXTS = st.recursive(NUMBERS, _compound, max_leaves=6)
CONDITION_TEXTS = st.builds(
    "{} {} {} {} {}".format,
    TEXTS,
    st.sampled_from(["<", "<=", ">", ">="]),
    TEXTS,
    st.sampled_from(["and", "or"]),
    CONDITIONS,
)


@pytest.mark.share(4)
@settings(max_examples=300, deadline=None)
@given(TEXTS | CONDITION_TEXTS)
def test_the_text_of_an_expression_parses_to_itself(text):
    try:
        e = parse(text)
    except IRError as error:
        assert "has no value" in str(error)  # 1/0, inf - inf, log2(-1)
        return
    assert parse(to_text(e)) == e


@pytest.mark.parametrize(
    "text, printed",
    [
        ("Nq*Nq/Nk", "Nq**2/Nk"),
        ("(Nq + 1) // BLOCK_Q", "(Nq + 1) // BLOCK_Q"),
        ("Nq // (Nk // 2)", "Nq // (Nk // 2)"),
        ("Nq // (Nk / 2)", "Nq // (Nk/2)"),
        ("(s < 1 or s > 2) and s <= 5", "s <= 5 and (s > 2 or s < 1)"),
        ("not (s < 1)", "s >= 1"),
        ("select(l > 0, 1/l, 0)", "select(l > 0, 1/l, 0)"),
        ("-inf", "-inf"),
        ("cdiv(7, 2) + 7 // 2 + floordiv(-1, 2)", "6"),
        ("max(Nq, 0) + min(Nk, 0)", "Nq"),
    ],
)
def test_how_expressions_print(text, printed):
    assert to_text(parse(text)) == printed


OUTSIDE = """
print(1) | __import__('os') | eval(s) | s.real | s[0] | lambda: s | 's' | b's' | f'{s}' | [s for s in s] | {s} | {s: s}
(s, s) | s if s else s | s := 1 | (s := 1) | await s | *s | s @ s | s << 2 | s & s | ~s | +s | s < s < s | s is s
s in s | None | True | ... | 1j | exp2(x=s) | exp2(*s) | exp2(s)(s) | (exp2)(s, s) | select(s, s) | s; s | import os
s = 1 | s s | 2**3 | 9**9**9 | s**s | (9*s)**99 | 1/0 | 5 // 0 | cdiv(5, 0) | inf - inf | true + 1 | s and 3
log2(log2(0.5)) | (s < 1) < s | min(s < 1, 2)
"""


@pytest.mark.parametrize(
    "text", ["", " ", *(t.strip() for line in OUTSIDE.split("\n") for t in line.split(" | ") if t.strip())]
)
def test_text_outside_the_grammar_is_refused(text):
    with pytest.raises(IRError, match="^mask: "):
        parse(text, "mask")


@pytest.mark.parametrize("text", ["+".join(["s"] * 5000), "(" * 500 + "s" + ")" * 500, "-" * 5000 + "s", "9" * 5000])
def test_absurd_expressions_are_refused_with_a_short_error(text):
    with pytest.raises(IRError) as error:
        parse(text, "mask")
    assert len(str(error.value)) < 250


@settings(max_examples=200, deadline=None)
@given(st.text("sN q(),.*/+-<>=and'0123_[]:", max_size=12))
def test_any_text_parses_or_is_refused(text):
    try:
        e = parse(text)
    except IRError:
        return
    assert parse(to_text(e)) == e


def test_nothing_is_evaluated(monkeypatch):
    """Names are symbols, even if Python has builtins with these names."""
    for name in ("eval", "exec"):
        monkeypatch.setattr(f"builtins.{name}", lambda *a, **k: pytest.fail("an expression was evaluated"))
    assert parse("__import__ + print").free_symbols == {parse("__import__"), parse("print")}


# ---------------------------------------------------------------------------------------------- untrusted text

LINES = (  # starts of lines that hold free text or a name
    *(
        f"  {key} "
        for key in (
            "version",
            "spec",
            "phase",
            "backend",
            "heads",
            "dtype",
            "precision",
            "mask",
            "score",
            "blocks",
            "dropout",
        )
    ),
    *(
        "module @",
        "  input temperature : f32[Hq] grad | ",
        "    about ",
        "  about ",
        "kernel @",
        "host @",
        "    %",
        "  block @",
        "  gradient ",
    ),
)
ESCAPES = ('"', '"""\nimport os\n"""', "\\", "\x00", "\x0c", "\x85", "\u2028", "\u202e", "\uff41", "\u00e9")
PLAIN = "''' + x # x, __import__('os').system('true') ; ]), x: bool=__import__('os')," + "; import os" * 200


def code_without_strings(files: dict[str, str]) -> dict[str, str]:
    """Return the syntax trees of a module's files, without the contents of strings."""
    found = {}
    for name in ("__init__.py", "kernels.py"):
        tree = ast.parse(files[name])
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                node.value = ""
        found[name] = ast.dump(tree)
    return found


@pytest.mark.parametrize("start", LINES)
def test_text_in_the_ir_never_becomes_code(start: str) -> None:
    """Text that could end a string or a comment is refused in every line. Other text is refused or leaves the code
    unchanged."""
    text = (ROOT / "generated" / "temperature_mha" / "schedule.ir").read_text()
    line = next(line for line in text.splitlines() if line.startswith(start))
    before = text.partition(line)[0]
    for escape in ESCAPES:
        with pytest.raises(IRError):
            parse_module(f"{before}{start}{escape}{line.removeprefix(start)}")
    committed = code_without_strings(
        {p.name: p.read_text() for p in (ROOT / "generated" / "temperature_mha").glob("*.py")}
    )
    try:
        made = render(verify(parse_module(text.replace(line, f"{line} {PLAIN}", 1))))
    except AttngenError:
        return
    assert code_without_strings(made) == committed


@pytest.mark.parametrize(
    "name",
    ["../x", "/tmp/x", "..", ".", "a/b", "import", "class", "X", "_x", "__init__", "1x", "x" * 65, "x y", "", "\u00e9"],
)
def test_a_module_name_that_is_no_plain_folder_name_is_refused(name: str) -> None:
    text = (ROOT / "generated" / "temperature_mha" / "schedule.ir").read_text()
    with pytest.raises(IRError, match="line 2: "):
        parse_module(text.replace("module @temperature_mha", f"module @{name}"))


@pytest.mark.parametrize(("line", "version"), [("", 1), ("  ir 1\n", 1), ("  ir 3\n", 3)])
def test_a_text_of_another_ir_version_is_refused_with_one_sentence(line: str, version: int) -> None:
    text = print_module(target("causal_mqa"))
    with pytest.raises(IRError) as caught:
        parse_module(edit(text, ("  ir 2\n", line)), "old.ir")
    expected = f"old.ir: the text is of version {version} of the IR; expected version 2; "
    assert str(caught.value) == expected + "`attngen build SPEC` writes the module again from its spec"
