"""Masks of packed sequences: documents, prompts shared by several answers, images in a text."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attngen.bench.mods.mod import Made, case, mask
from attngen.bench.mods.windows import causal
from attngen.ir.sizes import Sizes

Tensor = torch.Tensor


def _packed(lengths: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (the starts of documents, int64 [documents + 1]; the document of each position, int32 [positions])."""
    counts = torch.tensor(lengths, device=device)
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return starts, torch.arange(len(lengths), dtype=torch.int32, device=device).repeat_interleave(counts)


def _documents(sizes: Sizes, device: torch.device, generator: torch.Generator, lengths: Sequence[int]) -> Made:
    """Consecutive documents, each with a causal mask over its positions."""
    starts, document = _packed(lengths, device)

    def in_document(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        together = document[q_idx] == document[kv_idx]
        return together & causal(b, h, q_idx - starts[document[q_idx]], kv_idx - starts[document[kv_idx]])

    return Made(None, in_document, device, data={"lengths": tuple(lengths)})


def _packed_documents(sizes: Sizes, device: torch.device, generator: torch.Generator, lengths: Sequence[int]) -> Made:
    """The same mask, written as one interval of keys: from the start of the query's document up to the query."""
    starts, document = _packed(lengths, device)

    def since_start(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx >= starts[document[q_idx]]) & causal(b, h, q_idx, kv_idx)

    return Made(None, since_start, device, data={"lengths": tuple(lengths)})


def _documents_reference(made: Made, sizes: Sizes) -> Tensor:
    squares = [torch.ones(n, n, dtype=torch.bool, device=made.device).tril() for n in made.data["lengths"]]
    return torch.block_diag(*squares).bool()


def _shared_prefix(
    sizes: Sizes, device: torch.device, generator: torch.Generator, lengths: Sequence[int], prompts: Sequence[int]
) -> Made:
    """Consecutive documents, each with the number of its prompt, which is a document whose prompt is itself.

    A prompt is causal. An answer is causal too, and sees all of its prompt.
    """
    starts, document = _packed(lengths, device)
    prompt_of = torch.tensor(prompts, device=device)

    def after_prompt(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        own = document[q_idx]
        prompt = prompt_of[own]
        in_own = (kv_idx >= starts[own]) & causal(b, h, q_idx, kv_idx)
        in_prompt = (kv_idx >= starts[prompt]) & (kv_idx < starts[prompt + 1])
        return in_own | (in_prompt & (own != prompt))

    return Made(None, after_prompt, device, data={"lengths": tuple(lengths), "prompts": tuple(prompts)})


def _shared_prefix_reference(made: Made, sizes: Sizes) -> Tensor:
    lengths, prompts = made.data["lengths"], made.data["prompts"]
    visible = torch.zeros(sizes.n_q, sizes.n_kv, dtype=torch.bool, device=made.device)
    # Views of `visible`, by the documents of query and key.
    blocks = [rows.split(lengths, dim=1) for rows in visible.split(lengths, dim=0)]
    for own, prompt in enumerate(prompts):
        blocks[own][prompt].fill_(True)
        blocks[own][own].copy_(torch.ones_like(blocks[own][own]).tril())
    return visible


def _images(
    sizes: Sizes, device: torch.device, generator: torch.Generator, tokens: int, spans: Sequence[tuple[int, int]]
) -> Made:
    """Text attends to images: each image has `tokens` keys, and a span of queries that see it (Alayrac et al. 2022,
    Flamingo)."""
    seen_by = torch.tensor(spans, device=device)
    image_of = torch.arange(len(spans), device=device).repeat_interleave(tokens)

    def of_image(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        span = seen_by[image_of[kv_idx]]
        return (q_idx >= span[0]) & (q_idx < span[1])

    return Made(None, of_image, device, data={"tokens": tokens, "spans": tuple(spans)})


def _images_reference(made: Made, sizes: Sizes) -> Tensor:
    tokens = made.data["tokens"]
    visible = torch.zeros(sizes.n_q, sizes.n_kv, dtype=torch.bool, device=made.device)
    for number, (start, end) in enumerate(made.data["spans"]):
        visible[start:end, number * tokens : (number + 1) * tokens] = True
    return visible


_LONG = (1024, 700, 1500, 300, 1100, 968, 1348, 1252)  # 8192 positions
_TESTS = (
    case(1, lengths=(1,)),
    case(50, batch=2, lengths=(20, 1, 29)),
    case(129, q_heads=4, kv_heads=2, lengths=(64, 63, 2)),
)
_BENCH = case(8192, q_heads=16, lengths=_LONG)

MODS = (
    mask("document", _documents, _documents_reference, _TESTS, _BENCH),
    mask("packed_document", _packed_documents, _documents_reference, _TESTS, _BENCH),
    mask(
        "shared_prefix",
        _shared_prefix,
        _shared_prefix_reference,
        (
            case(17, lengths=(10, 7), prompts=(0, 0)),
            case(131, batch=2, lengths=(30, 11, 1, 40, 20, 29), prompts=(0, 0, 0, 3, 3, 5)),
            case(40, lengths=(5, 15, 13, 7), prompts=(1, 1, 1, 1)),  # one answer comes before its prompt
        ),
        case(
            8192,
            q_heads=16,
            lengths=(1024, 256, 256, 512, 1500, 300, 248, 2048, 512, 512, 1024),
            prompts=(0, 0, 0, 0, 4, 4, 4, 7, 7, 7, 7),
        ),
    ),
    mask(
        "flamingo",
        _images,
        _images_reference,
        (
            case(30, 17, tokens=17, spans=((5, 21),)),
            case(100, 45, batch=2, tokens=9, spans=((0, 20), (20, 60), (60, 61), (61, 61), (30, 100))),
        ),
        # Images of 1601 tokens, as from a vision transformer at 560 x 560 with patches of 14. Text sees only the last
        # image before it.
        case(
            8192,
            8005,
            q_heads=16,
            tokens=1601,
            spans=((0, 1400), (1400, 3000), (3000, 5100), (5100, 6000), (6000, 8192)),
        ),
    ),
)
