"""Errors of a case against fp64, and the bars that they must meet."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

import torch

from attngen.conformance.cases import Case
from attngen.conformance.oracle import (
    relative_error,
)
from attngen.ir.names import OUTPUTS

GRADIENTS = ("dq", "dk", "dv")


KEYS = ("out", "lse", *GRADIENTS)  # results of every module, and gradients of every module with a backward


BAR = 2.0  # largest allowed ratio of our error to naive's


# The same for the worst row, whose rounding errors no mean over other rows evens out.
ROW_BAR = 4.0


def shown(name: str, names: Container[str]) -> str:
    """Return the name of a result as tables have it: tangents, whose names have a `t` in front, as `jvp(out)`.

    names: the names of all results of the case.
    """
    return f"jvp({name[1:]})" if name[0] == "t" and name[1:] in names else name


@dataclass(frozen=True)
class Result:
    """Errors of one case, ours and naive's in the same dtype, both against fp64.

    A key such as `out`, `lse`, `dq` or the name of another output stands for the relative error of the whole tensor.
    `out row` is the error of the worst row, relative to the norm of that row or, if larger, of a typical row; it
    exposes mistakes in few rows. For tensors with one number per query, such as the LSE, it is absolute. `rounding` has
    the errors that the exact results get when they are stored in the dtype, or in fp32 for the statistics.
    """

    case: Case
    dtype: str
    ours: dict[str, float]
    naive: dict[str, float]
    rounding: dict[str, float]

    def ratio(self, key: str) -> float:
        """Return our error over naive's, which counts as at least the rounding error of the dtype."""
        return self.ours[key] / max(self.naive[key], self.rounding[key])

    @property
    def worst(self) -> str:
        """Key of a whole tensor with the largest ratio; NaN counts as the largest."""
        return self._largest(tuple(k for k in self.ours if not k.endswith(" row")))

    @property
    def worst_row(self) -> str:
        """The same for the worst rows."""
        return self._largest(tuple(k for k in self.ours if k.endswith(" row")))

    def _largest(self, keys: tuple[str, ...]) -> str:
        return max(keys, key=lambda k: (self.ratio(k) != self.ratio(k), self.ratio(k)))

    @property
    def ok(self) -> bool:
        """True if nothing is NaN, no error exceeds BAR times naive's, and no row's error exceeds ROW_BAR times."""
        return self.ratio(self.worst) <= BAR and self.ratio(self.worst_row) <= ROW_BAR

    def __str__(self) -> str:
        errors = ", ".join(f"{k} {self.ours[k]:.1e} (naive {self.naive[k]:.1e})" for k in self.ours)
        worst = ", ".join(f"{k} {self.ratio(k):.2f}x naive's" for k in (self.worst, self.worst_row))
        return f"{self.case} {self.dtype}: worst {worst}; {errors}"


def rounding_of(
    truth: dict[str, torch.Tensor],
    stored: dict[str, torch.Tensor],
    changes: list[dict[str, torch.Tensor]],
    operand: float,
) -> dict[str, float]:
    """Return the errors that rounding causes: in the exact results as they are `stored`, in gradients by the `changes`
    of a fused backward, and in operands of products."""
    single = torch.finfo(torch.float32).eps
    rounding = {
        key: max(e, single, 0.0 if key.removesuffix(" row") in OUTPUTS else operand)
        for key, e in errors(stored, truth).items()
    }
    for change in changes:
        for key, e in errors({key: x + change.get(key, 0.0) for key, x in truth.items()}, truth).items():
            rounding[key] = max(rounding[key], e)
    return rounding


def errors(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the errors under the keys of Result."""
    errors = {}
    for key in truth:
        x, ref = found[key].double(), truth[key].detach()
        if key.removeprefix("t") in OUTPUTS:  # an expected -inf is no error; any other -inf remains, and fails
            both = (x == -torch.inf) & (ref == -torch.inf)
            x, ref = x.masked_fill(both, 0.0), ref.masked_fill(both, 0.0)
            rows = (x - ref).abs()
        else:
            size = ref.norm(dim=-1)
            typical = size.square().mean().sqrt() if size.numel() else size.sum()
            rows = (x - ref).norm(dim=-1) / size.clamp(min=typical if typical > 0 else 1.0)
        errors[key] = relative_error(x, ref)
        errors[f"{key} row"] = float(rows.max()) if rows.numel() else 0.0
    return errors
