"""Random masks, as specs write them, and random arguments of calls.

Expressions come from the grammar of tests/lang_strategies.py, some with reads of tensors in them, and are combined with
named masks by any_of, all_of and not.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from attngen.ir.sizes import Sizes
from attngen.masks.document import SORTED_SPANS
from attngen.spec import Spec
from tests import lang_strategies
from tests.spec_strategies import drawn

Mask = Any  # as a spec writes it

# Integers and conditions that read tensors, with the tensors that they declare. `@` stands for a number, so that no two
# masks share a tensor.
INTEGER_READS = {
    "limit@[b, q_idx]": ("limit@", ["B", "Nq"], "int32"),
    "until@[b, kv_idx]": ("until@", ["B", "Nk"], "int32"),
    "pair@[q_idx, kv_idx]": ("pair@", ["Nq", "Nk"], "int32"),
    "length@[b]": ("length@", ["B"], "int32"),
    "cut@[h]": ("cut@", ["H"], "int32"),
    "per@[hkv, q_idx]": ("per@", ["Hkv", "Nq"], "int32"),
    "own@[h, kv_idx]": ("own@", ["H", "Nk"], "int32"),
    "coarse@[q_idx // 3]": ("coarse@", ["Nq"], "int32"),
    "far@[q_idx - kv_idx]": ("far@", [9], "int32"),
    "back@[kv_idx - 5]": ("back@", ["Nk"], "int32"),
    "hop@[b, hop@[b, q_idx]]": ("hop@", ["B", "Nk"], "int32"),
    "jump@[max(q_idx, 3)]": ("jump@", ["Nq"], "int32"),
}


CONDITION_READS = {
    "seen@[b, kv_idx]": ("seen@", ["B", "Nk"], "bool"),
    "open@[b, q_idx]": ("open@", ["B", "Nq"], "bool"),
    "doc@[b, q_idx] == doc@[b, kv_idx]": ("doc@", ["B", "Nk"], "int32"),
    "low@[q_idx] <= kv_idx and kv_idx < low@[q_idx] + 20": ("low@", ["Nq"], "int32"),
    "kv_idx <= limit@[b, q_idx]": ("limit@", ["B", "Nq"], "int32"),
    "abs(q_idx - kv_idx) <= near@[b, kv_idx]": ("near@", ["B", "Nk"], "int32"),
    "(q_idx - kv_idx) // 4 < reach@[h]": ("reach@", ["H"], "int32"),
    "weight@[h] * (q_idx - kv_idx) < 2.5": ("weight@", ["H"], "fp32"),
    "kv_idx <= 0.75 * q_idx": None,
    "q_idx * kv_idx < 400": None,
}


def written_mask(chance: random.Random, sample: lang_strategies.Sample, number: int) -> Mask:
    """Return a random expression as a spec writes it. Some have reads in place of scalars and lengths, or are combined
    with a condition that reads."""
    text, params = sample.text, {name: param.model_dump(mode="json") for name, param in sample.params.items()}
    taken = []

    def read(name: re.Match[str]) -> str:
        if chance.random() < 0.5 or len(taken) == 2:
            return name[0]
        taken.append(chance.choice(list(INTEGER_READS)))
        return f"({taken[-1]})"

    if chance.random() < 0.4:
        text = re.sub(r"\b(window|q_len|kv_len|h|b)\b", read, text)
    tables = {**INTEGER_READS, **CONDITION_READS}
    if chance.random() < 0.3:
        taken.append(chance.choice(list(CONDITION_READS)))
        text = f"({text}) {chance.choice(['and', 'or'])} ({'not ' * (chance.random() < 0.2)}({taken[-1]}))"
    for key in taken:
        if tables[key]:
            name, dims, dtype = tables[key]
            params[name.replace("@", str(number))] = {"tensor": dims, "dtype": dtype}
    used = {name: param for name, param in params.items() if re.search(rf"\b{name}\b", text.replace("@", str(number)))}
    return {"expr": text.replace("@", str(number)), **({"params": used} if used else {})}


def named_mask(chance: random.Random) -> Mask:
    """Return a named mask whose parameters are small, so that its edges cross small tiles."""
    align = chance.choice(["bottom_right", "bottom_right", "top_left"])
    left, right = chance.choice([(19, 0), (5, 3), (0, 0), (33, None), (None, 4), (7, 40)])
    window = {key: x for key, x in (("left", left), ("right", right)) if x is not None}
    prefix: list[dict[str, Any]] = [{"length": chance.randint(0, 40)}, {}, {"per": "batch"}]
    return chance.choice([
        {"causal": {"align": align}},
        {"sliding_window": {**window, "align": align}},
        {"sink_tokens": {"count": chance.choice([1, 4, 9])}},
        {"prefix_lm": {**chance.choice(prefix), "align": align}},
        {"chunked": {"size": chance.choice([1, 5, 16, 40]), "align": align}},
        {"dilated": {"step": chance.choice([2, 3, 8]), **chance.choice([{}, {"reach": 25}]), "align": align}},
        {"key_padding": {"lengths": chance.random() < 0.5}},
        {"document": chance.choice([{}, {}, {"packed": True}, {"packed": True, "causal": True}])},
    ])  # fmt: skip


def random_mask(chance: random.Random, samples: Iterator[lang_strategies.Sample], depth: int = 2) -> Mask:
    """Return an expression, a named mask, or a combination of several masks."""
    kind = chance.choice(["expr", "named", "expr", "any_of", "all_of", "not"][: 6 if depth else 3])
    if kind == "expr":
        return written_mask(chance, next(samples), chance.randrange(10**6))
    if kind == "named":
        return named_mask(chance)
    if kind == "not":
        return {"not": random_mask(chance, samples, depth - 1)}
    return {kind: [random_mask(chance, samples, depth - 1) for _ in range(chance.randint(1, 3))]}


def arguments(chance: random.Random, spec: Spec, sizes: Sizes) -> dict[str, Any]:
    """Return random arguments of a call: ids that are sorted, unsorted, all equal or all different; padding on any
    side; numbers near positions."""
    found: dict[str, Any] = {}
    for i in spec.inputs():
        if i.name.startswith("cu_seqlens"):
            cuts = sorted(
                chance.randint(0, sizes.n_q if i.name.endswith("_q") else sizes.n_kv)
                for _ in range(chance.choice([0, 1, 3]))
            )
            ends = sizes.n_q if i.name.endswith("_q") else sizes.n_kv
            known = next((len(x) for name, x in found.items() if name.startswith("cu_seqlens")), None)
            cuts = cuts if known is None else sorted(chance.randint(0, ends) for _ in range(known - 2))
            found[i.name] = torch.tensor([0, *cuts, ends], dtype=torch.int32)
            continue
        shape = [sizes.of(d) for d in i.shape]
        count = int(np.prod(shape))
        if not i.shape:
            least = -3 if i.least is None else i.least
            found[i.name] = chance.randint(least, max(least, chance.choice([12, 12, sizes.n_kv + 5])))
            continue
        if i.dtype == "b1":
            place = np.arange(count) % (shape[-1] or 1)
            first, last = sorted((chance.randint(0, shape[-1]), chance.randint(0, shape[-1])))
            bits = chance.choice(
                [
                    place >= 0,
                    place < 0,
                    (place >= first) & (place < last),
                    (place < first) | (place >= last),
                    place % 7 > 0,
                ]
            )
            values = torch.tensor(
                bits ^ (np.array([chance.random() for _ in range(count)]) < chance.choice([0, 0, 0.05])),
                dtype=torch.bool,
            )
        elif i.dtype == "i32":
            low, high = chance.choice(
                [(-3, 9), (0, 3), (0, max(sizes.n_q, sizes.n_kv) + 3), (5, 5), (-9, 2 * sizes.n_kv + 3)]
            )
            low = 0 if i.name == "prefix_length" else low  # its oracle would count a negative length from the end
            values = torch.tensor([chance.randint(low, max(low, high)) for _ in range(count)], dtype=torch.int32)
        else:
            values = torch.tensor([chance.randint(-16, 16) / 8 for _ in range(count)], dtype=torch.float32)
        values = values.reshape(shape)
        rises = i.dtype == "i32" and chance.random() < 0.4
        rises |= any(d.function == SORTED_SPANS and i.name in d.sources for d in spec.derived())  # as the spec promises
        found[i.name] = values.sort(-1).values if rises else values
    return found


def random_masks(number: int, batch: int = 150) -> Iterator[Mask]:
    """Yield random masks without end."""
    chance = random.Random(number)

    def samples() -> Iterator[lang_strategies.Sample]:
        for more in range(10**6):
            yield from drawn(lang_strategies.masks(2 + more % 2), batch, number * 1000 + more)

    source = samples()
    while True:
        yield random_mask(chance, source)
