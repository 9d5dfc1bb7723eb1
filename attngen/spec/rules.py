"""Rules that tie the keys of a spec to one another. Each raises Mistakes with the path of a key and a sentence."""

from __future__ import annotations

from collections.abc import Callable

import sympy

from attngen.ir import Derived, Expr, Input, Read, symbol
from attngen.ir.dtypes import ELEMENTS, LATENT_GROUP, by_precision
from attngen.ir.heads import SHARINGS
from attngen.ir.names import OF_CHUNKS, OF_OUTPUTS
from attngen.lang.limits import WIDEST_HEAD, WIDEST_LATENT
from attngen.masks import Mask
from attngen.scores import Score
from attngen.spec import document
from attngen.spec.fields import SpecFields
from attngen.spec.sentences import Mistakes
from attngen.tiles.ranges import shows_nothing


def _needed(part: Mask | Score, heads: dict[Expr, Expr]) -> set[str]:
    """The names on which a mask or modifier depends: those in its expressions, in the indices of its reads, and the
    sources of derived tensors."""
    expressions = [part.expression()]
    expressions += [part.by_key()] if isinstance(part, Mask) else [part.sink() or sympy.true]
    names = {str(s) for e in expressions for s in e.xreplace(heads).free_symbols}
    for read in reversed(part.reads()):  # nested ones come first
        if read.name in names:
            names |= {read.tensor, *(str(s) for e in read.index for s in e.free_symbols)}
    return names | {source for d in part.derived() if names & set(d.names) for source in d.sources}


def _dtypes_have_backward(spec: SpecFields) -> None:
    if spec.trains and (fixed := next((d for d in spec.dtype if not ELEMENTS[d].trains), None)):
        raise Mistakes((("dtype",), f"names `{fixed}`, which has no backward; expected `backward: false` as well"))


def _tf32_needs_fp32(spec: SpecFields) -> None:
    if spec.fp32_precision == "tf32" and not by_precision(spec.dtype):
        raise Mistakes(
            (("fp32_precision",), "is `tf32`, but `dtype` has no `fp32`; add it there, or leave this key out")
        )


def _names_are_unambiguous(spec: SpecFields) -> None:
    """A name has one meaning: one declaration of an input, one way to compute a tensor, one way to read it."""
    known: dict[str, Input] = {}
    made: dict[str, Derived] = {}
    reads: dict[str, Read] = {}
    for path, part in spec.parts():
        for i in part.inputs():
            if known.setdefault(i.name, i) != i:
                raise Mistakes(
                    (path, f"declares `{i.name}` again, in another way; expected one declaration, or another name")
                )
        for d in part.derived():
            for name in d.names:
                if made.setdefault(name, d) != d:
                    raise Mistakes((path, f"computes `{name}` in two ways; expected one of the masks that need it"))
        for read in part.reads():
            if reads.setdefault(read.name, read) != read:
                two = f"reads `{read.tensor}` as `{read.name}`, which is also read in another way"
                raise Mistakes((path, f"{two}; expected another name in one of them"))
    if taken := next((name for name in made if name in known), None):
        raise Mistakes(
            (
                ("mask",),
                f"computes `{taken}`, which is also a parameter; expected another name for the parameter",
            )
        )
    for path, part in spec.parts():
        if taken := next((r.name for r in part.reads() if r.name in known and not known[r.name].shape), None):
            raise Mistakes(
                (
                    path,
                    f"reads a tensor as `{taken}`, which is also a parameter; expected another name for the parameter",
                )
            )


def _expressions_are_meaningful(spec: SpecFields) -> None:
    """The mask shows some pairs, scores depend on `s`, and written expressions depend on every parameter, once
    simplified."""
    heads = SHARINGS[spec.heads.sharing].known
    if shows_nothing(spec.visible()):
        raise Mistakes((("mask",), "hides every key from every query; expected a condition that some pairs meet"))
    for path, part in spec.parts():
        needed = _needed(part, heads)
        if gone := next((i.name for i in part.inputs() if i.name not in needed and not i.is_size), None):
            raise Mistakes(
                (path, f"does not depend on `{gone}`, once simplified; expected it to, or the parameter left out")
            )
        if (
            isinstance(part, Score)
            and part.sink() is None
            and symbol("s") not in part.expression().xreplace(heads).free_symbols
        ):
            raise Mistakes((path, "forgets the score `s`; expected an expression in it"))
    if gone := _unused_input(spec):
        sentence = (
            f"does not depend on `{gone}`, once simplified; expected it to, or the part that declares it left out"
        )
        raise Mistakes((spec.key_of(gone), sentence))


def _unused_input(spec: SpecFields) -> str | None:
    """An input on which neither the mask nor the scores depend as a whole, or None."""
    sinks = [sink for part in spec.score if (sink := part.sink()) is not None]
    masks = (spec.visible(), spec.visible_by_key())
    facts = [e for fact in spec.mask.facts() if any(mask.has(fact.literal) for mask in masks) for e in fact]
    seen = {str(s) for e in (*masks, *facts, spec.modified(), *sinks) for s in e.free_symbols}
    for read in reversed(spec.reads()):
        if read.name in seen:
            seen |= {read.tensor, *(str(s) for e in read.index for s in e.free_symbols)}
    for made in spec.derived():
        if not seen.isdisjoint(made.names):
            seen |= set(made.sources)
    return next((i.name for i in spec.inputs() if i.name not in seen and not i.is_size), None)


def _split_needs_cache(spec: SpecFields) -> None:
    if spec.cache is None and spec.schedule.keys_per_split:
        raise Mistakes(
            (("schedule", "split"), "splits the keys of a cache, but there is none; expected `cache` as well")
        )


def _head_dims_are_supported(spec: SpecFields) -> None:
    """Large head_dims need values that are part of a latent, which is only for serving."""
    dim, rope = spec.head_dim, spec.rope
    if not rope:
        if wide := next((n for n in (dim.qk, dim.v) if n > WIDEST_HEAD), 0):
            expected = f"expected at most {WIDEST_HEAD}, or `kv: {{latent: ...}}` as well"
            raise Mistakes((("head_dim",), f"is {wide}; {expected}"))
        return
    missing: tuple[tuple[bool, document.Path, str], ...] = (
        (spec.cache is None, ("kv",), "is for keys in a cache, but there is none; expected `cache` as well"),
        (spec.trains, ("kv",), "is for serving, but the spec has a backward; expected `backward: false` as well"),
        (
            spec.heads.sharing != "mqa",
            ("heads",),
            f"has `{spec.heads.sharing}`, but all heads share one latent; expected `mqa`",
        ),
        (
            dim.v > WIDEST_LATENT,
            ("head_dim",),
            f"is {dim.v} for v; expected at most {WIDEST_LATENT}, the widest latent",
        ),
        (
            dim.qk != dim.v + rope,
            ("head_dim",),
            f"is {dim.qk} for q and k; expected {dim.v + rope}: {dim.v} of the latent and {rope} of the rotated part",
        ),
    )
    if found := next(((path, text) for wrong, path, text in missing if wrong), None):
        raise Mistakes(found)


def _8_bit_cache_is_supported(spec: SpecFields) -> None:
    """Refuse an 8-bit cache in a spec whose other keys do not allow one."""
    cache = spec.cache
    if cache is None or not (cache.dtype or cache.scale):
        return
    wide = next((d for d in spec.dtype if ELEMENTS[d].bytes != 2), "")
    odd = next((n for n in (spec.head_dim.qk, spec.head_dim.v) if n % 16 or n < 32), 0)
    cannot: tuple[tuple[bool, document.Path, str], ...] = (
        (
            not cache.dtype,
            ("cache", "scale"),
            "is for an 8-bit cache; expected `dtype: fp8_e4m3` as well",
        ),
        (
            cache.scale == "page" and not cache.paged,
            ("cache", "scale"),
            "is `page`, but there are no pages; expected `head`, or `paged`",
        ),
        (
            bool(spec.rope and cache.scale),
            ("cache", "scale"),
            f"is `{cache.scale}`, but a latent has one scale per key and {LATENT_GROUP} numbers; "
            "expected the key left out",
        ),
        (
            bool(spec.rope) and spec.head_dim.v != WIDEST_LATENT,
            ("head_dim",),
            f"is {spec.head_dim.v} for v; expected {WIDEST_LATENT}, the head_dim of an 8-bit latent",
        ),
        (bool(wide), ("dtype",), f"names `{wide}`, but the cache has 8 bits; expected `bf16`, `fp16` or both"),
        (
            bool(odd and not spec.rope),
            ("head_dim",),
            f"is {odd}, but the cache has 8 bits; expected a multiple of 16, 32 at least",
        ),
    )
    if found := next(((path, text) for wrong, path, text in cannot if wrong), None):
        raise Mistakes(found)


def _cache_has_no_any_length(spec: SpecFields) -> None:
    if spec.cache is not None and (size := next((i for i in spec.inputs() if i.is_size), None)):
        tensor = next(i.name for i in spec.inputs() if size.name in i.shape)
        sentence = (
            f"declares `{tensor}` with `any` length, which calls with a cache do not take; expected a number, or a name"
        )
        raise Mistakes((spec.key_of(tensor), sentence))


def _order_is_supported(spec: SpecFields) -> None:
    """Refuse `kv_outer` in a spec that needs features which that loop order lacks."""
    if spec.schedule.order == "q_outer":
        return
    read = {read.tensor: path for path, part in spec.parts() for read in part.reads()}
    read |= {i.name: path for path, part in spec.parts() for i in part.inputs() if i.shape}
    tensor, home = next(iter(read.items()), ("", ("mask",)))
    cannot: tuple[tuple[bool, document.Path, str], ...] = (
        (spec.dropout, ("dropout",), "cannot drop weights"),
        (spec.mask.blocks() is not None, ("mask",), "has no block lists"),
        (bool(tensor), home, f"reads no `{tensor}`"),
        (
            spec.head_dim.qk + spec.head_dim.v > 256,
            ("head_dim",),
            "holds dK and dV whose head_dims are at most 256 together",
        ),
    )
    if found := next(((path, text) for wrong, path, text in cannot if wrong), None):
        path, text = found
        raise Mistakes(
            (path, f"asks for what `schedule: {{order: kv_outer}}` does not do: it {text}; expected `q_outer`")
        )


def _outputs_are_supported(spec: SpecFields) -> None:
    """Further outputs need programs that own tiles and calls without a cache; inputs cannot have their names."""
    more = ", ".join(f"`{name}`" for name in spec.outputs[1:])
    if not more:
        return
    if spec.cache is not None:
        raise Mistakes(
            (
                ("outputs",),
                f"asks for {more}, which calls with a cache do not return; expected only `lse` with `cache`",
            )
        )
    if spec.schedule.order != "q_outer":
        raise Mistakes(
            (
                ("outputs",),
                f"asks for {more}, which `order: {spec.schedule.order}` does not return; expected `q_outer`",
            )
        )
    if taken := next((i.name for i in spec.inputs() if i.name in OF_OUTPUTS), None):
        has = f"declares `{taken}`, which is a name of modules with `outputs`"
        raise Mistakes((spec.key_of(taken), f"{has}; expected another one"))


def _positions_are_supported(spec: SpecFields) -> None:
    """Calls with chunks of a sequence have no cache, and FlashAttention-2's loop order; their blocks lie in chunks."""
    if not spec.chunk:
        return
    blocks = spec.mask.blocks()
    cannot: tuple[tuple[bool, document.Path, str], ...] = (
        (spec.cache is not None, ("cache",), "calls with a cache have all keys; expected no `cache`"),
        (spec.schedule.order != "q_outer", ("schedule", "order"), "its order visits all rows; expected `q_outer`"),
        ("key_mass" in spec.outputs, ("outputs",), "`key_mass` is a sum over all queries; expected it left out"),
        (
            blocks is not None and spec.chunk % blocks.size != 0,
            ("positions", "chunk"),
            f"is {spec.chunk}; expected a multiple of {blocks.size if blocks else 1}, the blocks of the mask",
        ),
    )
    if found := next(((path, text) for wrong, path, text in cannot if wrong), None):
        path, text = found
        said = text if path[0] == "positions" else f"does not go with `positions`: {text}"
        raise Mistakes((path, said))
    if taken := next((i.name for i in spec.inputs() if i.name in OF_CHUNKS), None):
        has = f"declares `{taken}`, which is a name of modules with `positions`"
        raise Mistakes((spec.key_of(taken), f"{has}; expected another one"))


def _derivative_names_are_free(spec: SpecFields) -> None:
    """Generated code names the gradient and the tangent of an input after it."""
    learned = {i.name for i in spec.learned()}
    for name in (i.name for i in spec.inputs() if i.name[1:] in learned):
        derivative = {"d": "gradient", "t": "tangent"}.get(name[0])
        if derivative:
            has = f"declares `{name}`, the name of the {derivative} of `{name[1:]}` in generated code"
            raise Mistakes((spec.key_of(name), f"{has}; expected another one"))


# in the order in which they are checked
RULES: tuple[Callable[[SpecFields], None], ...] = (
    _dtypes_have_backward,
    _tf32_needs_fp32,
    _names_are_unambiguous,
    _expressions_are_meaningful,
    _split_needs_cache,
    _head_dims_are_supported,
    _8_bit_cache_is_supported,
    _cache_has_no_any_length,
    _order_is_supported,
    _outputs_are_supported,
    _positions_are_supported,
    _derivative_names_are_free,
)
