"""FlexAttention's `mask_mod` and `score_mod` of a spec, printed from the spec's expressions.

Sizes and numbers of the call are printed as constants, so that torch compiles the code that a person would write for
that call. Reads of tensors follow the spec's language: a negative index counts from the end, and elements out of bounds
are 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sympy

from attngen.conformance.derive import derive, function
from attngen.errors import AttngenError
from attngen.ir.expr import (
    BITS,
    TO_INTEGER,
    clamp,
    cos,
    erf,
    exp2,
    floor,
    floordiv,
    log,
    log2,
    mod,
    nearest,
    select,
    sigmoid,
    sin,
    span,
    sqrt,
    symbol,
    trunc,
)
from attngen.ir.expr_text import to_text
from attngen.ir.sizes import Sizes
from attngen.lang.part import KV, NATURAL, NK, Part
from attngen.spec import Spec

if TYPE_CHECKING:
    import torch

Mod = Callable[..., Any]

_HEADER = '''\
"""What FlexAttention takes for {name}: written by attngen from the spec's expressions."""

import torch


'''
_READ = '''\
def _read(tensor, *index):
    """The element there; a negative index counts from the end, and what is outside even so is 0."""
    at = [i if isinstance(i, int) else torch.where(i < 0, i + n, i) for i, n in zip(index, tensor.shape)]
    element = tensor[tuple(i if isinstance(i, int) else i.clamp(0, n - 1) for i, n in zip(at, tensor.shape))]
    for i, n in zip(at, tensor.shape):
        if not isinstance(i, int):
            inside = (i >= 0) & (i < n)
            element = element & inside if element.dtype == torch.bool else torch.where(inside, element, 0)
    return element


'''
_CALLS: dict[Any, str] = {
    sympy.Abs: "torch.abs",
    sympy.exp: "torch.exp",
    sympy.tanh: "torch.tanh",
    exp2: "torch.exp2",
    log: "torch.log",
    log2: "torch.log2",
    sigmoid: "torch.sigmoid",
    sqrt: "torch.sqrt",
    erf: "torch.erf",
    sin: "torch.sin",
    cos: "torch.cos",
    select: "torch.where",
    floor: "torch.floor",
    nearest: "torch.round",
    trunc: "torch.trunc",
}


@dataclass(frozen=True)
class Written:
    """The source of `_mods(tensors...)`, which returns (mask_mod or None, score_mod or None), and the names of its
    tensors.

    by_batch, by_head: whether the mask differs between sequences, and between query heads.
    """

    source: str
    tensors: tuple[str, ...]
    by_batch: bool
    by_head: bool


@dataclass(frozen=True)
class Mods:
    """Functions of tensors of positions: mask_mod(b, h, q_idx, kv_idx) and score_mod(score, b, h, q_idx, kv_idx), or
    None."""

    mask: Mod | None
    score: Mod | None
    by_batch: bool
    by_head: bool

    def visible_pairs(self, sizes: Sizes, device: torch.device | str, rows: int = 1024) -> int:
        """Count the visible pairs of query and key, of all sequences and query heads, `rows` queries at a time."""
        import torch

        if self.mask is None:
            return sizes.batch * sizes.q_heads * sizes.n_q * sizes.n_kv
        kv = torch.arange(sizes.n_kv, device=device)[None]
        batches, heads = sizes.batch if self.by_batch else 1, sizes.q_heads if self.by_head else 1
        count = torch.zeros((), dtype=torch.int64, device=device)
        for b in torch.arange(batches, device=device):
            for h in torch.arange(heads, device=device):
                for start in range(0, sizes.n_q, rows):
                    q = torch.arange(start, min(start + rows, sizes.n_q), device=device)[:, None]
                    count += self.mask(b, h, q, kv).expand(len(q), sizes.n_kv).sum()
        return int(count) * (sizes.batch // batches) * (sizes.q_heads // heads)

    def visible_keys(self, sizes: Sizes, device: torch.device | str) -> int:
        """Count the keys that some query sees, of all sequences and K/V heads, one sequence and K/V head at a time."""
        import torch

        if self.mask is None:
            return sizes.batch * sizes.kv_heads * sizes.n_kv
        q, kv = torch.arange(sizes.n_q, device=device)[:, None], torch.arange(sizes.n_kv, device=device)
        batches, heads = sizes.batch if self.by_batch else 1, sizes.kv_heads if self.by_head else 1
        groups = torch.arange(sizes.q_heads, device=device).view(sizes.kv_heads, -1, 1, 1)
        count = torch.zeros((), dtype=torch.int64, device=device)
        for b in torch.arange(batches, device=device):
            for group in groups[:heads]:
                count += self.mask(b, group, q, kv).expand(len(group), sizes.n_q, sizes.n_kv).any(0).any(0).sum()
        return int(count) * (sizes.batch // batches) * (sizes.kv_heads // heads)


def cannot(spec: Spec) -> str:
    """Return why a spec cannot be expressed in FlexAttention's two functions, in a few words; empty if it can."""
    return "no sink in a score_mod" if any(part.sink() is not None for part in spec.score) else ""


def mods(spec: Spec, sizes: Sizes, given: Mapping[str, Any], device: torch.device | str) -> Mods:
    """Return the functions for a call with these sizes and inputs, whose tensors are on the device.

    With `cache_seqlens` among the inputs, int32 [B], these are the numbers of keys of each sequence, of at most `n_kv`.
    """
    tensors = _tensors(spec, sizes, given, device)
    written = write(spec, sizes, given, {name: tuple(x.shape) for name, x in tensors.items()})
    space: dict[str, Any] = {}
    # The source is printed by `write` and has no text of a user.
    exec(compile(written.source, f"<flex functions of {spec.name}>", "exec"), space)
    mask, score = space["_mods"](*(tensors[name] for name in written.tensors))
    return Mods(mask, score, written.by_batch, written.by_head)


def _tensors(spec: Spec, sizes: Sizes, given: Mapping[str, Any], device: torch.device | str) -> dict[str, torch.Tensor]:
    """Return the tensors that the expressions read: inputs, derived tensors, and the block mask."""
    import torch

    found: dict[str, torch.Tensor] = {name: x for name, x in given.items() if isinstance(x, torch.Tensor)}
    found |= derive(spec, sizes, given, device)
    blocks = spec.mask.blocks()
    if blocks and blocks.pattern and "block_mask" not in given:
        rows, columns = (-(-n // blocks.size) for n in (sizes.n_q, sizes.n_kv))
        found["block_mask"] = function(blocks.pattern)(rows, columns, torch.device(device), **dict(blocks.params))
    return found


def write(spec: Spec, sizes: Sizes, given: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Written:
    """Return the functions' source for a call; `shapes` has the shape of every tensor that they may read."""
    group = sizes.q_heads // sizes.kv_heads
    ragged = "cache_seqlens" in shapes
    known: dict[Any, Any] = {symbol("Nq"): sympy.Integer(sizes.n_q)} | (
        {} if ragged else {NK: sympy.Integer(sizes.n_kv)}
    )
    known[symbol("hkv")] = floordiv(symbol("h"), sympy.Integer(group))
    known |= {symbol(name): sympy.sympify(x) for name, x in given.items() if isinstance(x, (int, float))}
    mask_printer, score_printer = _Printer(spec.mask, known, shapes), None
    lines: list[str] = []
    names = ["cache_seqlens"] if ragged else []
    length = [f"        {NK} = cache_seqlens[b]"] if ragged else []
    condition = sympy.And(spec.mask.expression(), KV < NK if ragged else sympy.true).xreplace(known)
    texts = [] if condition == sympy.true else [mask_printer.text(condition)]
    if blocks := spec.mask.blocks():
        shape = shapes["block_mask"]
        places = ["b", "h", f"q_idx // {blocks.size}", f"kv_idx // {blocks.size}"][4 - len(shape) :]
        places = ["0" if n == 1 else place for n, place in zip(shape, places)]
        texts.append(f"block_mask[{', '.join(places)}]")
        mask_printer.tensors["block_mask"] = None
        mask_printer.letters |= {place for place in places if place in ("b", "h")}
    if texts:
        body = texts[0] if len(texts) == 1 else f"({texts[0]}) & {texts[1]}"
        lines += ["    def _mask_mod(b, h, q_idx, kv_idx):", *length, f"        return {body}", ""]
        names += list(mask_printer.tensors)
    guarded = mask_printer.guarded
    scored = [part for part in spec.score if part.sink() is None]
    if scored:
        lines += ["    def _score_mod(score, b, h, q_idx, kv_idx):", *length]
        for part in scored:
            score_printer = _Printer(part, known, shapes)
            lines.append(f"        score = {score_printer.text(part.expression().xreplace(known))}")
            names += list(score_printer.tensors)
            guarded = guarded or score_printer.guarded
        lines += ["        return score", ""]
    names = list(dict.fromkeys(names))
    lines.append(f"    return {'_mask_mod' if texts else 'None'}, {'_score_mod' if scored else 'None'}")
    head = _HEADER.format(name=spec.name) + (_READ if guarded else "") + f"def _mods({', '.join(names)}):\n"
    letters = mask_printer.letters
    return Written(head + "\n".join(lines) + "\n", tuple(names), ragged or "b" in letters, "h" in letters)


class _Printer:
    """A printer of one mask's or modifier's expressions as torch source. Expressions with free symbols are tensors, all
    others numbers."""

    def __init__(self, part: Part, known: dict[Any, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.reads = {read.name: read for read in part.reads()}
        self.declared = {i.name: i.shape for i in part.inputs()} | {
            n: s for d in part.derived() for n, s in zip(d.names, d.shapes)
        }
        self.known, self.shapes = known, shapes
        self.tensors: dict[str, None] = {}  # tensors that were read, in order
        self.letters: set[str] = set()  # those of b and h on which a value depends
        self.guarded = False

    def text(self, e: Any) -> str:
        return self._print(e)[0]

    def _print(self, e: Any) -> tuple[str, int]:
        """Return the text and its precedence: 3 for an atom, 2 for a product, 1 for a sum, 0 for comparisons and
        below."""
        if e.is_Symbol:
            return self._symbol(str(e)), 3
        if e in (sympy.true, sympy.false):
            return str(e == sympy.true), 3
        if e.is_number:
            number = repr(int(e)) if e.is_Integer else repr(float(e))
            return number, 1 if number.startswith("-") else 3
        if e.is_Add:
            return self._sum(e), 1
        if e.is_Mul:
            return self._product(e)
        if e.is_Pow:
            return self._power(e)
        if e.is_Relational:
            e = e.reversed if e.lhs.is_number and not isinstance(e, (sympy.Eq, sympy.Ne)) else e
            return f"{self._at(e.lhs, 1)} {e.rel_op} {self._at(e.rhs, 1)}", 0
        if isinstance(e, (sympy.And, sympy.Or)):
            sign = " & " if isinstance(e, sympy.And) else " | "
            return sign.join(self._at(a, 2) for a in sorted(e.args, key=sympy.default_sort_key)), 0
        if isinstance(e, sympy.Not):
            return f"~{self._at(e.args[0], 3)}", 2
        if isinstance(e, (floordiv, mod)):
            return f"{self._at(e.args[0], 3)} {'//' if isinstance(e, floordiv) else '%'} {self._at(e.args[1], 3)}", 2
        if isinstance(e, BITS):
            return f" {e.sign} ".join(self._at(a, 1) for a in e.args), 0
        if isinstance(e, (sympy.Min, sympy.Max)):
            return self._extreme(e.args, isinstance(e, sympy.Min)), 3
        if isinstance(e, clamp):
            x, low, high = e.args
            if low.is_number and high.is_number:
                return f"torch.clamp({self.text(x)}, {self.text(low)}, {self.text(high)})", 3
            return self._extreme((sympy.Max(x, low, evaluate=False), high), True), 3
        for kind, name in _CALLS.items():
            if isinstance(e, kind):
                text = f"{name}({', '.join(self.text(a) for a in e.args)})"
                return f"{text}.to(torch.int32)" if isinstance(e, TO_INTEGER) else text, 3
        raise AttngenError(f"`{to_text(e)}` has no form in torch")

    def _at(self, e: Any, least: int) -> str:
        text, strength = self._print(e)
        return text if strength >= least else f"({text})"

    def _sum(self, e: Any) -> str:
        terms = sorted(e.args, key=lambda t: (t.could_extract_minus_sign(), t.is_number, sympy.default_sort_key(t)))
        text = self._at(terms[0], 1)
        for term in terms[1:]:
            minus = term.could_extract_minus_sign()
            text += f" - {self._at(-term, 2)}" if minus else f" + {self._at(term, 1)}"
        return text

    def _product(self, e: Any) -> tuple[str, int]:
        if e.args[0] == -1:
            return f"-{self._at(-e, 2)}", 1
        over = [sympy.Pow(f.base, -f.exp) for f in e.args if f.is_Pow and f.exp.is_number and f.exp < 0]
        above = [f for f in e.args if not (f.is_Pow and f.exp.is_number and f.exp < 0)]
        rounded = (floordiv, mod)  # same precedence as a product, but not associative
        text = " * ".join(self._at(f, 3 if isinstance(f, rounded) else 2) for f in above) or "1"
        return text + "".join(f" / {self._at(x, 3)}" for x in over), 2

    def _power(self, e: Any) -> tuple[str, int]:
        if e.exp.is_number and e.exp < 0:
            return f"1 / {self._at(sympy.Pow(e.base, -e.exp), 3)}", 2
        if e.exp == sympy.Rational(1, 2):
            return f"torch.sqrt({self.text(e.base)})", 3
        return f"{self._at(e.base, 3)} ** {self._at(e.exp, 3)}", 2

    def _extreme(self, args: Any, least: bool) -> str:
        """Return a minimum or maximum: of tensors pairwise, of a tensor and a number by a clamp."""
        numbers, rest = (
            [a for a in args if a.is_number],
            [self.text(a) for a in sorted(args, key=sympy.default_sort_key) if not a.is_number],
        )
        text = rest[0]
        for other in rest[1:]:
            text = f"torch.{'minimum' if least else 'maximum'}({text}, {other})"
        for number in numbers:
            text = f"torch.clamp({text}, {'max' if least else 'min'}={self.text(number)})"
        return text

    def _symbol(self, name: str) -> str:
        if name == "s":
            return "score"
        if name not in self.reads:
            self.letters |= {name} & {"b", "h"}
            return name
        read = self.reads[name]
        self.tensors[read.tensor] = None
        places, safe = [], True
        for index, dim, n in zip(read.index, self.declared[read.tensor], self.shapes[read.tensor]):
            natural = index == NATURAL.get(dim)
            if n == 1 and natural:  # broadcast
                places.append("0")
                continue
            index = index.xreplace(self.known)
            if index.is_Integer and -n <= index < 0:
                index += n
            low, high = span(index)
            safe = safe and (natural or bool(low >= 0 and high < n))
            places.append(self.text(index))
        if safe:
            return f"{read.tensor}[{', '.join(places)}]"
        self.guarded = True
        return f"_read({read.tensor}, {', '.join(places)})"
