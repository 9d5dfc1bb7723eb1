"""Random small specs, with masks of tests/transforms/random_masks.py and random score modifiers."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from itertools import count
from typing import Any

from attngen.ir.names import OUTPUTS
from tests import lang_strategies
from tests.spec_strategies import drawn
from tests.test_random_scores import NAMED, READS, modifier
from tests.transforms.random_masks import named_mask, random_mask

HEAD_DIMS: list[Any] = [16] * 8 + [24, 40, {"qk": 24, "v": 16}, {"qk": 16, "v": 40}, {"qk": 200, "v": 72}]
BLOCK_SPARSE = [
    {"block": 16},
    {"block": 16, "pattern": "butterfly"},
    {"block": 16, "pattern": "local_global", "local": 0, "globals": 1},
]


def examples(number: int, strategy: Any, batch: int = 150) -> Iterator[lang_strategies.Sample]:
    """Yield examples of a strategy without end."""
    for more in count():
        yield from drawn(strategy, batch, number * 1000 + more)


def gradient_read(chance: random.Random) -> dict[str, Any]:
    """Return a modifier that adds elements of a tensor with a gradient, read at one kind of index."""
    read, dims = chance.choice(list(READS.items()))
    name = read.partition("[")[0]
    return {"expr": read.replace(name, f"s + 0.5 * {name}2"), "params": {f"{name}2": {"tensor": dims, "grad": True}}}


def random_specs(number: int) -> Iterator[dict[str, Any]]:
    """Yield specs without end, as users write them; some combine features that exclude each other."""
    chance, outputs_chance = random.Random(number), random.Random(f"{number} outputs")
    of_masks = examples(number, lang_strategies.masks(2))
    of_scores = examples(number, lang_strategies.scores(2).filter(lambda x: re.search(r"\bs\b", x.text)))
    for _ in count():
        kv_outer = chance.random() < 0.1
        plain = chance.random() < 0.4
        mask = (
            chance.choice(["none", "causal", "causal", named_mask(chance)])
            if plain
            else random_mask(chance, of_masks, depth=1)
        )
        if not kv_outer and chance.random() < 0.12:
            blocks = {"block_sparse": chance.choice(BLOCK_SPARSE)}
            mask = blocks if chance.random() < 0.4 else {"all_of": [mask, blocks]}
        score = [] if chance.random() < 0.5 else [modifier(chance, next(of_scores), 1)]
        if chance.random() < 0.3:
            score.insert(
                chance.randrange(len(score) + 1), chance.choice([*NAMED, "sink", *([] if kv_outer else ["alibi"])])
            )
        if not kv_outer and chance.random() < 0.2:
            score.append(gradient_read(chance))
        more = (
            {} if kv_outer else {"outputs": outputs_chance.sample([*OUTPUTS], outputs_chance.randint(1, len(OUTPUTS)))}
        )
        yield {
            **more,
            "name": "random_spec",
            "heads": {"sharing": "mha" if kv_outer else chance.choice(["mha", "mqa", "gqa"])},
            "head_dim": chance.choice(HEAD_DIMS),
            "dtype": chance.choice(["fp16", "fp16", "fp32"]),
            "mask": mask,
            "score": score,
            "dropout": not kv_outer and chance.random() < 0.25,
            "backward": {"deterministic": chance.random() < 0.5},
            "schedule": {
                "order": "kv_outer" if kv_outer else "q_outer",
                "block_q": 16,
                "block_kv": 16,
                "warps": 4,
                "stages": 1,
            },
        }
