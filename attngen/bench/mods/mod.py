"""The type of a function for FlexAttention: how it is built, its oracle, and its test and benchmark cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from attngen.errors import AttngenError
from attngen.ir.sizes import Sizes


@dataclass(frozen=True, eq=False)
class Made:
    """A function for one call; the other one is None.

    score_mod(score, b, h, q_idx, kv_idx), mask_mod(b, h, q_idx, kv_idx): with FlexAttention's signatures.
    learned: tensors that require gradients and that the function reads, directly or through views.
    data: parameters and tensors that define the function, by name; the oracle reads only these.
    """

    score_mod: Callable[..., torch.Tensor] | None
    mask_mod: Callable[..., torch.Tensor] | None
    device: torch.device
    learned: tuple[torch.Tensor, ...] = ()
    data: dict[str, Any] = field(default_factory=dict)


class Case(NamedTuple):
    """Sizes, and the parameters for their lengths; a function takes any number of sequences and heads."""

    sizes: Sizes
    parameters: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Mod:
    """A mask or score modifier.

    build(sizes, device, generator, **parameters): builds it for the parameters of a case.
    reference(made, sizes): written by hand, independently of the function. Returns for a mask a bool tensor
    broadcastable to [B, H, n_q, n_kv]; for a modifier a function from scores to scores [B, H, n_q, n_kv], with
    derivatives in the scores and in `learned`.
    tests: small cases of different lengths. bench: the case to measure, at a head dimension of 128.
    """

    name: str
    kind: Literal["mask", "score"]
    build: Callable[..., Made]
    reference: Callable[[Made, Sizes], Any]
    tests: tuple[Case, ...]
    bench: Case

    def make(self, sizes: Sizes, device: torch.device | str, generator: torch.Generator) -> Made:
        """Return the function for a call, with its tensors on the device; random numbers are generated on the
        generator's device.

        Raises AttngenError if no case has these lengths.
        """
        for case in (*self.tests, self.bench):
            if case.sizes[3:] == sizes[3:]:
                return self.build(sizes, torch.device(device), generator, **case.parameters)
        known = ", ".join(f"{c.sizes.n_q} x {c.sizes.n_kv}" for c in (*self.tests, self.bench))
        raise AttngenError(
            f"mod `{self.name}` has no parameters for {sizes.n_q} queries and {sizes.n_kv} keys; "
            f"it has some for {known}"
        )


def mask(
    name: str,
    build: Callable[..., Made],
    reference: Callable[[Made, Sizes], torch.Tensor],
    tests: tuple[Case, ...],
    bench: Case,
) -> Mod:
    """Return a mask."""
    return Mod(name, "mask", build, reference, tests, bench)


def score(
    name: str,
    build: Callable[..., Made],
    reference: Callable[[Made, Sizes], Callable[[torch.Tensor], torch.Tensor]],
    tests: tuple[Case, ...],
    bench: Case,
) -> Mod:
    """Return a score modifier."""
    return Mod(name, "score", build, reference, tests, bench)


def case(n_q: int, n_kv: int = 0, batch: int = 1, q_heads: int = 2, kv_heads: int = 0, **parameters: Any) -> Case:
    """Return a case; by default with as many keys as queries, and as many K/V heads as query heads."""
    return Case(Sizes(batch, q_heads, kv_heads or q_heads, n_q, n_kv or n_q), parameters)


def normal(generator: torch.Generator, device: torch.device, *shape: int) -> torch.Tensor:
    """Return normal numbers, fp32, generated on the generator's device."""
    return torch.randn(shape, generator=generator, device=generator.device).to(device)


def whole(generator: torch.Generator, device: torch.device, least: int, most: int, *shape: int) -> torch.Tensor:
    """Return integers from `least` to `most`, int32, generated on the generator's device."""
    numbers = torch.randint(least, most + 1, shape, generator=generator, device=generator.device, dtype=torch.int32)
    return numbers.to(device)
