"""Parse the text that ir/printer.py prints: modules, programs and ops."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from attngen.errors import IRError
from attngen.ir.expr_text import parse, to_text
from attngen.ir.fields import parse_access, parse_type, parse_word, split
from attngen.ir.gl import GL
from attngen.ir.grid import GridAxis, KVSplit
from attngen.ir.kernel import Kernel
from attngen.ir.launch import HOST, Host
from attngen.ir.module import Blocks, Cache, Config, Derived, DoesNotFit, Input, InputGradient, Meaning, Module, Read
from attngen.ir.op import Block, Dialect, Op, WarpGroup
from attngen.ir.syntax import HEADER_KEYS, IR_VERSION, MASKS, MEANING, SCORES, WARP_GROUP_WORDS

_N = "([0-9]{1,9})"
_GRID_AXIS = re.compile(
    r"\s*(\w+) in (.+?)( reversed)?(?: swizzle\(([0-9]{1,3})\))?"
    rf"(?: swizzle_rows\({_N}\))?( reversed_group)?\s*"
)
_CONFIG = re.compile(
    rf"(\w+) bytes={_N} (?=rows)(?:rows>{_N} )?(?:rows<=([0-9]{{1,9}}|inf) )?: "
    rf"BLOCK_Q={_N} BLOCK_KV={_N}(?: BLOCK_D={_N})? num_warps={_N} num_stages={_N}"
    r"( TMA=1)?( measured)?(?: backend=(\w+))?"
)
_DOES_NOT_FIT = re.compile(rf"(\w+) bytes={_N} none : (\S.*)")
_WARP_SPECIALIZED = (
    r"(?: variant_of\(@(?P<of>\w+)\))? backend\((?P<backend>\w+)\)"
    r"(?: ctas_per_sm\((?P<ctas_per_sm>[1-9][0-9]{0,2})\))?"
)
_KERNEL = re.compile(
    rf"@(?P<name>\w+)(?:{_WARP_SPECIALIZED})?(?: program_axis\((?P<axis>q|kv)\))?(?P<pack_gqa> pack_gqa)?"
    r"(?P<launches_dependents> launch_dependents)?"
    r" grid\((?P<grid>.*?)\)(?: split_kv\((?P<kv_split>.*?)\)(?: of\((?P<reads>.*?)\))?"
    r"(?: ctas_per_sm\((?P<split_ctas>[1-9]\d{0,2})\) waves\((?P<waves>[1-9]\d{0,2})\))?"
    r"(?: ctas_per_sm_packed\((?P<packed>[1-9]\d{0,2})\))?)?"
)
# The characters that a line of the IR may have. Texts such as `about` and `mask` are printed into comments, docstrings
# and strings of generated modules, and none of these characters ends one of those. Names have the same meaning in
# Python.
_PLAIN = re.compile(r"[\t !#-\[\]-~]")


def _tokens(text: str) -> list[str]:
    """Words outside brackets; a word may contain brackets."""
    return [t.strip() for t in split(text, " ")]


def parse_op(line: str, where: str, position: int, dialect: Dialect) -> Op:
    """Parse one line of text as an op of a dialect; `position` names an op without a result."""
    head, _, rest = line.partition(" = ") if line.startswith("%") else ("", "", line)
    typed = _split_type(rest)
    words = _tokens(typed[0])
    kind = words[0] if words else ""
    cls = dialect.ops.get(kind)
    if cls is None:
        raise IRError(f"{where}: `{kind}` is not an op; known: {', '.join(dialect.ops)}")
    kinds, positional = cls.declared.kinds, cls.declared.positional
    if bool(head) != cls.declared.has_result or (head and not head[1:].isidentifier()):
        form = "`%name = ...`" if cls.declared.has_result else "no name, because it has no result"
        raise IRError(f"{where}: `{head}` does not name {kind}; expected {form}")
    values: dict[str, Any] = {"name": head[1:] if head else f"_{kind}_{position}", **cls.declared.omitted}
    if len(words) <= len(positional):
        raise IRError(f"{where}: `{kind}` needs {' and '.join(positional)} after its name")
    for name, word in zip(positional, words[1:]):
        values[name] = kinds[name].parse(word, where)
    known = kinds.keys() - {"type", *positional}
    for word in words[1 + len(positional) :]:
        match = re.fullmatch(r"(\w+)\((.*)\)", word)
        if not match or match[1] not in known:
            raise IRError(f"{where}: `{word}` is not a field of {kind}; known: {', '.join(sorted(known))}")
        values[match[1]] = kinds[match[1]].parse(match[2], where)
    if typed[1]:
        if "type" not in kinds:
            raise IRError(f"{where}: {kind} has no type; expected nothing from `:` on")
        values["type"] = parse_type(typed[1], where)
    try:
        return cls(**values)
    except TypeError as error:
        missing = re.findall(r"'(\w+)'", str(error))
        raise IRError(f"{where}: {kind} lacks {', '.join(missing) or 'a field'}") from None


def _split_type(text: str) -> tuple[str, str]:
    parts = split(text, ":")
    return (parts[0], parts[1]) if len(parts) == 2 else (text, "")


def _parse_grid(text: str, where: str) -> tuple[GridAxis, ...]:
    axes = []
    for part in split(text, ","):
        match = _GRID_AXIS.fullmatch(part)
        if not match:
            raise IRError(f"{where}: `{part.strip()}` is not a grid axis; expected `q in cdiv(Nq, BLOCK_Q)`")
        heads = int(match[4] or 1), int(match[5] or 0), bool(match[6])
        axes.append(GridAxis(match[1], parse(match[2], where), bool(match[3]), *heads))
    return tuple(axes)


def _parse_config(line: str, backend: str, where: str) -> Config | DoesNotFit:
    if not_fitting := _DOES_NOT_FIT.fullmatch(line):
        return DoesNotFit(not_fitting[1], int(not_fitting[2]), not_fitting[3])
    match = _CONFIG.fullmatch(line)
    if not match:
        raise IRError(f"{where}: not a config; expected `sm90 bytes=2 rows<=inf : BLOCK_Q=128 ...`")
    min_rows, max_rows = int(match[3] or 0), None if match[4] in ("inf", None) else int(match[4])
    block_q, block_kv, columns, num_warps, num_stages = (int(match[i] or 0) for i in range(5, 10))
    tma, measured = bool(match[10]), bool(match[11])
    given = match[1], int(match[2]), max_rows, block_q, block_kv, num_warps, num_stages, tma, measured
    return Config(*given, match[12] or backend, min_rows, columns)


@dataclass
class _Lines:
    """A block that is being parsed."""

    name: str
    about: str = ""
    ops: list[Op] = field(default_factory=list)
    warp_group: WarpGroup | None = None


def _parse_name(text: str, where: str) -> str:
    """The name of a module, by which a folder and a package are named, too."""
    name = parse_word(text, where)
    if not re.fullmatch("[a-z][a-z0-9_]{0,63}", name) or keyword.iskeyword(name):
        expected = "a small letter, and then small letters, digits and `_`, 64 at most, and no keyword of Python"
        raise IRError(f"{where}: `module @{name[:80]}`; expected {expected}")
    return name


class _Sections:
    """The parts of a text: its header and the blocks of its programs."""

    def __init__(self) -> None:
        self.header: dict[str, str] = {}
        self.inputs: list[Input] = []
        self.derived: list[Derived] = []
        self.input_gradients: list[InputGradient] = []
        self.reads: list[Read] = []
        self.meaning: dict[str, Any] = {}
        self.kernels: list[tuple[dict[str, Any], list[_Lines]]] = []  # fields of the header, blocks
        self.hosts: list[tuple[str, list[_Lines]]] = []
        self.schedules: list[tuple[str, list[Config | DoesNotFit]]] = []

    def made_hosts(self) -> tuple[Host, ...]:
        return tuple(Host(name, _blocks(blocks)) for name, blocks in self.hosts)

    def made_kernels(self) -> tuple[Kernel, ...]:
        """All kernels, including warp-specialized ones."""
        return tuple(Kernel(**fields, blocks=_blocks(blocks)) for fields, blocks in self.kernels)


def parse_module(text: str, source: str = "IR") -> Module:
    """Parse a module's text.

    Raises IRError with `source`, the line and what was expected there. Nothing is verified: see `attngen.verify`.
    """
    _check_version(text, source)
    return _module(_sections(text, source), source)


def _check_version(text: str, source: str) -> None:
    """Raise IRError if a module's text has another version of the IR."""
    found = re.search(r"(?m)^ +ir (\d+) *$", text)
    version = int(found[1]) if found else 1
    if re.search(r"(?m)^module @\w", text) and version != IR_VERSION:
        hint = "`attngen build SPEC` writes the module again from its spec"
        raise IRError(f"{source}: the text is of version {version} of the IR; expected version {IR_VERSION}; {hint}")


def parse_programs(text: str, source: str = "IR") -> tuple[tuple[Host, ...], tuple[Kernel, ...]]:
    """Parse a text of host programs and kernels without a header. Raises IRError as `parse_module` does."""
    found = _sections(text, source)
    return found.made_hosts(), found.made_kernels()


def _sections(text: str, source: str) -> _Sections:
    """Read a text line by line; each line belongs to the header, kernel, host program or schedule that it is in."""
    s = _Sections()
    section = "module"
    for number, raw in enumerate(text.splitlines(), 1):
        where, line = f"{source}, line {number}", raw.strip()
        if not line or line.startswith("//"):
            continue
        if strange := next((c for c in line if not _PLAIN.fullmatch(c)), ""):
            raise IRError(
                f"{where}: it has the character {ascii(strange)}; expected printable ASCII without double quotes and "
                "backslashes"
            )
        word, _, rest = line.partition(" ")
        if word == "module":
            s.header["name"] = _parse_name(rest, where)
        elif word == "kernel":
            s.kernels.append((_parse_kernel(rest, where), []))
            section = "kernel"
        elif word == "host":
            s.hosts.append((parse_word(rest, where), []))
            section = "host"
        elif section == "kernel" and word == "about" and not s.kernels[-1][1]:
            s.kernels[-1][0]["about"] = rest
        elif word == "schedule":
            s.schedules.append((parse_word(rest, where), []))
            section = "schedule"
        elif section == "schedule":
            s.schedules[-1][1].append(_parse_config(line, s.header.get("backend", ""), where))
        elif section in ("kernel", "host"):
            blocks, dialect = (s.kernels[-1][1], GL) if section == "kernel" else (s.hosts[-1][1], HOST)
            _parse_in_blocks(line, blocks, dialect, where)
        else:
            _parse_header_line(s, word, rest, where)
    return s


def _parse_header_line(s: _Sections, word: str, rest: str, where: str) -> None:
    """A line of the module's header."""
    if word == "input":
        s.inputs.append(_parse_input(rest, where))
    elif word == "derive":
        s.derived.append(_parse_derived(rest, where))
    elif word == "read":
        s.reads.append(_parse_read(rest, where))
    elif word == "gradient":
        s.input_gradients.append(_parse_input_gradient(rest, where))
    elif word in ("mask", "score"):
        s.header[word], meaning = _parse_meaning(rest, MASKS if word == "mask" else SCORES, where)
        s.meaning |= meaning
    elif word in (*HEADER_KEYS, "order", "cache", "latent", "outputs", "chunk"):
        s.header[word] = rest
    else:
        known = ", ".join((*HEADER_KEYS, "score", "order", "outputs", "chunk", "input", "derive", "read", "gradient"))
        raise IRError(f"{where}: `{word}` is not a key of the header; known: {known}")


def _parse_in_blocks(line: str, blocks: list[_Lines], dialect: Dialect, where: str) -> None:
    """A line of a kernel or a host program: the start of a block, its `about` sentence, or an op of the last block."""
    word, _, rest = line.partition(" ")
    if word == "block":
        blocks.append(_Lines(parse_word(rest, where)))
    elif word == "warp_group":
        blocks.append(_parse_warp_group(rest, where))
    elif not blocks:
        raise IRError(f"{where}: an op outside a block; expected `block @entry` first")
    elif word == "about" and not blocks[-1].ops:
        blocks[-1].about = rest
    else:
        blocks[-1].ops.append(parse_op(line, where, sum(len(block.ops) for block in blocks), dialect))


def _parse_warp_group(text: str, where: str) -> _Lines:
    name, *words = text.split()
    given = {match[1]: match[2] for word in words if (match := re.fullmatch(rf"(\w+)\({_N}\)", word))}
    if len(given) < len(words) or not {"instances", "warps", "registers"} <= given.keys() <= set(WARP_GROUP_WORDS):
        raise IRError(
            f"{where}: not a warp group; expected `warp_group @consumer instances(2) rows(64) warps(4) registers(240)`"
        )
    return _Lines(parse_word(name, where), warp_group=WarpGroup(**{word: int(n) for word, n in given.items()}))


def _parse_kernel(text: str, where: str) -> dict[str, Any]:
    match = _KERNEL.fullmatch(text)
    if not match:
        raise IRError(f"{where}: not a kernel header; expected `kernel @fwd program_axis(q) grid(...)`")
    texts = {name: text or "" for name, text in match.groupdict().items()}
    split = [texts.pop(name) for name in ("kv_split", "reads", "split_ctas", "waves", "packed")]
    kv_split = _parse_kv_split(*split, where=where)
    fields = {"grid": _parse_grid(texts["grid"], where), "kv_split": kv_split}
    flags = {name: bool(texts[name]) for name in ("pack_gqa", "launches_dependents")}
    return {**texts, **fields, **flags, "ctas_per_sm": int(texts["ctas_per_sm"] or 1)}


def _parse_kv_split(text: str, reads: str, ctas_per_sm: str, waves: str, packed: str, *, where: str) -> KVSplit | None:
    if not text:
        return None
    work, *each = split(text, ",")
    if len(each) > 1 or not all(re.fullmatch(_N, part.strip()) for part in each):
        raise IRError(
            f"{where}: `split_kv({text})`; expected units of work, as in `split_kv(cdiv(Nk, 64))`, and of a split, "
            f"as in `split_kv(..., 16)`"
        )
    how: dict[str, Any] = {"ctas_per_sm": int(ctas_per_sm), "waves": int(waves)} if ctas_per_sm else {}
    how |= {"ctas_per_sm_packed": int(packed)} if packed else {}
    pairs = (part.strip().partition("=") for part in split(reads, ","))
    how["reads"] = tuple((parse_word(name, where), parse_access(at, where)) for name, _, at in pairs)
    return KVSplit(parse(work, where), int(each[0]) if each else 0, **how)


def _parse_input(text: str, where: str) -> Input:
    option = r"\w+(?:=-?\w{1,10})?"
    match = re.fullmatch(rf"(\w+) : (\w+)\[([\w/, *]*)\] (?:({option}(?: {option})*) \| )?(.*)", text)
    if not match:
        raise IRError(f"{where}: not an input; expected `input kv_lengths : i32[B] what it is`")
    return Input(match[1], match[2], _words(match[3]), match[5], tuple((match[4] or "").split()))


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _parse_derived(text: str, where: str) -> Derived:
    match = re.fullmatch(r"(\w+) ((?:\w+\[[\w/, ]*\](?: rising)? ?)+) = (@?\w+)\(([\w/, ]+)\)", text)
    if not match:
        raise IRError(f"{where}: not a derived input; expected `derive i32 first[B] end[B] = key_span(key_padding)`")
    made = re.findall(r"(\w+)\[([\w/, ]*)\]( rising)?", match[2])
    names, shapes = tuple(name for name, _, _ in made), tuple(_words(shape) for _, shape, _ in made)
    return Derived(
        names, shapes, match[3], _words(match[4]), match[1], tuple(name for name, _, rising in made if rising)
    )


def _parse_meaning(text: str, known: dict[str, str], where: str) -> tuple[str, dict[str, Any]]:
    """The text of a mask or of modifiers, and its meaning: the fields at its end, each at most once."""
    words, found = _tokens(text), dict[str, Any]()
    while (
        words and (match := re.fullmatch(rf"({'|'.join(known)})\((.*)\)", words[-1])) and known[match[1]] not in found
    ):
        found[known[match[1]]] = MEANING[match[1]].parse(match[2], where)
        words.pop()
    return " ".join(words), found


def _parse_read(text: str, where: str) -> Read:
    match = re.fullmatch(r"(\w+) from (\w+)\[(.*)\]", text)
    if not match:
        raise IRError(f"{where}: not a read; expected `read distance_bias from bias[h, q_idx - kv_idx]`")
    return Read(match[1], match[2], tuple(parse(e, where) for e in split(match[3], ",")))


def _parse_input_gradient(text: str, where: str) -> InputGradient:
    match = re.fullmatch(r"(\w+)(?:\[(.*)\])? from (\w+)", text)
    if not match:
        raise IRError(f"{where}: not a gradient of an input; expected `gradient slope[h] from dSLOPE`")
    return InputGradient(match[1], tuple(to_text(parse(e, where)) for e in split(match[2] or "", ",")), match[3])


def _module(s: _Sections, source: str) -> Module:
    header, kernels = s.header, s.made_kernels()
    for key in ("name", *HEADER_KEYS):
        if key not in header:
            raise IRError(f"{source}: the module header lacks `{key}`")
    if header["dropout"] not in ("yes", "no"):
        raise IRError(f"{source}: `dropout {header['dropout']}`; expected yes or no")
    dims = re.fullmatch(r"qk=([0-9]{1,9}) v=([0-9]{1,9})", header["head_dim"])
    if not dims:
        raise IRError(f"{source}: `head_dim {header['head_dim']}`; expected `head_dim qk=64 v=64`")
    return Module(
        name=header["name"],
        version=header["version"],
        spec_hash=header["spec"],
        phase=header["phase"],
        backend=header["backend"],
        sharing=header["heads"],
        head_dim_qk=int(dims[1]),
        head_dim_v=int(dims[2]),
        dtypes=tuple(header["dtype"].split()),
        precision=header["precision"],
        mask=header["mask"],
        score=header.get("score", "none"),
        order=header.get("order", "q_outer"),
        blocks=_parse_blocks(header["blocks"], source),
        dropout=header["dropout"] == "yes",
        inputs=tuple(s.inputs),
        derived=tuple(s.derived),
        input_gradients=tuple(s.input_gradients),
        hosts=s.made_hosts(),
        kernels=tuple(kernel for kernel in kernels if not kernel.backend),
        warp_specialized=tuple(kernel for kernel in kernels if kernel.backend),
        schedules=tuple((name, tuple(rows)) for name, rows in s.schedules),
        meaning=Meaning(**s.meaning, reads=tuple(s.reads)),
        cache=_parse_cache(header["cache"], source) if "cache" in header else None,
        rope=_parse_rope(header["latent"], source) if "latent" in header else 0,
        outputs=tuple(header.get("outputs", "lse").split()),
        chunk=_parse_chunk(header["chunk"], source) if "chunk" in header else 0,
    )


def _parse_chunk(text: str, source: str) -> int:
    if not re.fullmatch("[1-9][0-9]{0,5}", text):
        raise IRError(f"{source}: `chunk {text}`; expected a number of rows, as in `chunk 384`")
    return int(text)


def _parse_cache(text: str, source: str) -> Cache:
    match = re.fullmatch(r"(?:contiguous|paged (any|[1-9][0-9]{0,8}))(?: (\w+) scale (head|page|columns))?", text)
    if not match:
        known = "contiguous, `paged any` or `paged 64`, and for other numbers than q's `fp8_e4m3 scale head` after it"
        raise IRError(f"{source}: `cache {text}`; expected {known}")
    return Cache("page_rows" if match[1] == "any" else match[1] or "", match[2] or "", match[3] or "")


def _parse_rope(text: str, source: str) -> int:
    match = re.fullmatch("rope=([1-9][0-9]{0,8})", text)
    if not match:
        raise IRError(f"{source}: `latent {text}`; expected `latent rope=64`")
    return int(match[1])


def _parse_blocks(text: str, source: str) -> Blocks | None:
    if text == "no":
        return None
    if data := re.fullmatch(r"([0-9]{1,9}) data", text):
        return Blocks(int(data[1]), data=True)
    match = re.fullmatch(r"([0-9]{1,9})(?: (\w+)\(((?:\w+=[0-9]{1,9})(?:, \w+=[0-9]{1,9})*)?\))?", text)
    if not match:
        known = "`blocks no`, `blocks 64`, `blocks 128 data` or `blocks 64 local_global(local=2, globals=1)`"
        raise IRError(f"{source}: `blocks {text}`; expected {known}")
    pairs = (part.split("=") for part in (match[3] or "").split(", ") if part)
    return Blocks(int(match[1]), match[2] or "", tuple((name, int(value)) for name, value in pairs))


def _blocks(blocks: Iterable[_Lines]) -> tuple[Block, ...]:
    return tuple(Block(block.name, tuple(block.ops), block.about, block.warp_group) for block in blocks)
