"""Score modifiers: biases by distance, caps, other functions than the exponential, a second product of queries and
keys."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from attngen.bench.mods.mod import Made, Mod, case, normal, score
from attngen.ir.sizes import Sizes

Tensor = torch.Tensor
Scores = Callable[[Tensor], Tensor]


def _alibi(sizes: Sizes, device: torch.device, generator: torch.Generator) -> Made:
    """A slope per head times the distance (Press et al. 2022, ALiBi); the slopes are computed from the head's index."""
    heads = sizes.q_heads

    def sloped(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        slope = torch.exp2(-((h + 1) * 8.0 / heads))
        return score + (kv_idx - q_idx) * slope

    return Made(sloped, None, device, data={"slopes": [2.0 ** (-8 * (i + 1) / heads) for i in range(heads)]})


def _alibi_reference(made: Made, sizes: Sizes) -> Scores:
    ahead = torch.stack([torch.arange(-row, sizes.n_kv - row, device=made.device) for row in range(sizes.n_q)])
    bias = torch.tensor(made.data["slopes"], device=made.device).view(-1, 1, 1) * ahead
    return lambda scores: scores + bias


def _softcap(sizes: Sizes, device: torch.device, generator: torch.Generator, cap: int) -> Made:
    """Scores are capped smoothly on both sides (Gemma Team 2024, Gemma 2, section 2)."""

    def capped(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return Made(capped, None, device, data={"cap": cap})


def _softcap_reference(made: Made, sizes: Sizes) -> Scores:
    cap = made.data["cap"]

    def capped(scores: Tensor) -> Tensor:
        growth = torch.exp(scores.double() * (2 / cap))
        return (cap - 2 * cap / (growth + 1)).to(scores.dtype)

    return capped


@torch.library.custom_op("attngen_mods::tanh_approx", mutates_args=())
def tanh_approx(x: Tensor) -> Tensor:
    """Return tanh of every element; on a GPU, torch.compile emits the approximating instruction."""
    return torch.tanh(x)


@tanh_approx.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@tanh_approx.register_vmap
def _(info: Any, in_dims: tuple[int | None], x: Tensor) -> tuple[Tensor, int | None]:
    return tanh_approx(x), in_dims[0]


class _ApproximateTanh(torch.autograd.Function):
    """The op `tanh_approx` with its derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return tanh_approx(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad * (1 - y * y)


@functools.cache
def _lower_tanh_approx() -> None:
    """Make torch.compile emit PTX for the op; call it only with a GPU, because importing the compiler takes seconds."""
    from torch._inductor.lowering import make_pointwise, register_lowering
    from torch._inductor.virtualized import ops

    def instruction(x: Any) -> Any:
        return make_pointwise(lambda value: ops.inline_asm_elementwise(value, asm="tanh.approx.f32 $0, $1;"))(x)

    register_lowering(torch.ops.attngen_mods.tanh_approx)(instruction)


def _softcap_approx(sizes: Sizes, device: torch.device, generator: torch.Generator, cap: int) -> Made:
    """The same with the custom op `attngen_mods::tanh_approx` for tanh."""
    if device.type == "cuda":
        _lower_tanh_approx()

    def capped(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return cap * _ApproximateTanh.apply(score / cap)  # type: ignore[no-untyped-call]

    return Made(capped, None, device, data={"cap": cap})


def _sandwich(sizes: Sizes, device: torch.device, generator: torch.Generator, width: int) -> Made:
    """A sum of cosines of the distance, weaker for later heads: a table by distance, and one by head (Chi et al. 2023,
    Sandwich).

    width: width of the sinusoidal embedding whose product with itself is this sum.
    """
    longest, heads = max(sizes.n_q, sizes.n_kv), sizes.q_heads
    frequencies = 10000.0 ** (-torch.arange(0, width, 2, device=device) / width)
    distances = torch.arange(-(longest - 1), longest, device=device)
    by_distance = torch.cos(distances[:, None] * frequencies).sum(1)
    by_head = heads / (8.0 * torch.arange(1, heads + 1, device=device))
    zero = longest - 1

    def wavy(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + by_distance[q_idx - kv_idx + zero] * by_head[h]

    return Made(wavy, None, device, data={"width": width})


def _sandwich_reference(made: Made, sizes: Sizes) -> Scores:
    width = made.data["width"]
    q, kv = (torch.arange(n, device=made.device, dtype=torch.float64) for n in (sizes.n_q, sizes.n_kv))
    total = torch.zeros(sizes.n_q, sizes.n_kv, device=made.device, dtype=torch.float64)
    for pair in range(width // 2):  # each adds cos(q - kv) = cos(q) cos(kv) + sin(q) sin(kv)
        speed = math.exp(-math.log(10000.0) * 2 * pair / width)
        total += torch.outer(torch.cos(q * speed), torch.cos(kv * speed)) + torch.outer(
            torch.sin(q * speed), torch.sin(kv * speed)
        )
    bias = torch.stack([total / (8 * (head + 1) / sizes.q_heads) for head in range(sizes.q_heads)])
    return lambda scores: (scores + bias).to(scores.dtype)


def _rotary_part(sizes: Sizes, device: torch.device, generator: torch.Generator, width: int, scale: float) -> Made:
    """The scores of the rotated parts of queries and keys, which are separate tensors (DeepSeek-AI 2024, DeepSeek-V2,
    2.1.3)."""
    group = sizes.q_heads // sizes.kv_heads
    of_queries = normal(generator, device, sizes.batch, sizes.q_heads, sizes.n_q, width)
    of_keys = normal(generator, device, sizes.batch, sizes.kv_heads, sizes.n_kv, width)

    def both(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + scale * torch.dot(of_queries[b, h, q_idx], of_keys[b, h // group, kv_idx])

    return Made(both, None, device, data={"queries": of_queries, "keys": of_keys, "scale": scale})


def _rotary_part_reference(made: Made, sizes: Sizes) -> Scores:
    queries, keys = made.data["queries"].double(), made.data["keys"].double()
    keys = keys.repeat_interleave(sizes.q_heads // sizes.kv_heads, dim=1)
    bias = made.data["scale"] * (queries @ keys.mT)
    return lambda scores: (scores + bias).to(scores.dtype)


def _activation(sizes: Sizes, device: torch.device, generator: torch.Generator, function: str, offset: float) -> Made:
    """The logarithm of a function plus an offset, so that the function replaces softmax's exponential."""
    functions: dict[str, Scores] = {"gelu": torch.nn.functional.gelu, "relu": torch.nn.functional.relu}
    activation = functions[function]

    def replaced(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return torch.log(activation(score) + offset)

    return Made(replaced, None, device, data={"function": function, "offset": offset})


def _activation_reference(made: Made, sizes: Sizes) -> Scores:
    offset = made.data["offset"]

    def gelu(x: Tensor) -> Tensor:
        return x * (1 + torch.special.erf(x * math.sqrt(0.5))) / 2

    def relu(x: Tensor) -> Tensor:
        return torch.where(x > 0, x, 0)

    chosen = {"gelu": gelu, "relu": relu}[made.data["function"]]
    return lambda scores: torch.log(chosen(scores.double()) + offset).to(scores.dtype)


def _replaced(function: str) -> Mod:
    tests = (
        case(17, function=function, offset=1.0),
        case(60, 45, batch=2, q_heads=4, kv_heads=2, function=function, offset=0.5),
    )
    bench = case(8192, q_heads=16, function=function, offset=1.0)
    return score(f"activation_{function}", _activation, _activation_reference, tests, bench)


_CAPS = (case(1, cap=20), case(40, 65, batch=2, q_heads=4, kv_heads=2, cap=2))
_CAP_BENCH = case(8192, q_heads=16, cap=20)

MODS = (
    score(
        "alibi",
        _alibi,
        _alibi_reference,
        (case(17), case(40, 65, batch=2, q_heads=4, kv_heads=2)),
        case(8192, q_heads=16),
    ),
    score("softcap", _softcap, _softcap_reference, _CAPS, _CAP_BENCH),
    score("softcap_approx", _softcap_approx, _softcap_reference, _CAPS, _CAP_BENCH),
    score(
        "sandwich",
        _sandwich,
        _sandwich_reference,
        (case(17, width=4), case(40, 65, batch=2, q_heads=4, kv_heads=2, width=128)),
        case(8192, q_heads=16, width=128),
    ),
    score(
        "mla_rope",
        _rotary_part,
        _rotary_part_reference,
        (case(17, width=4, scale=1.0), case(40, 65, batch=2, q_heads=4, kv_heads=2, width=16, scale=0.25)),
        case(8192, q_heads=16, kv_heads=1, width=64, scale=192**-0.5),
    ),
    _replaced("gelu"),
    _replaced("relu"),
)
