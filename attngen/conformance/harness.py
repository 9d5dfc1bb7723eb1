"""Running a generated module beside naive attention: what `attngen test`, the test suite and the GPU report share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from attngen.cache.loader import import_folder
from attngen.conformance.oracle import (
    dropout_weight,
    naive_attention,
    naive_entropy,
    naive_key_mass,
    naive_max_score,
    reference_mask,
    reference_scores,
    relative_error,
    rows_matmul,
    truncated_matmul,
)
from attngen.ir.dtypes import ELEMENTS, by_precision, result_of
from attngen.ir.heads import SHARINGS
from attngen.ir.names import FLAT, OF_KEYS, OUTPUTS
from attngen.ir.sizes import Sizes
from attngen.lang.part import Part
from attngen.spec import Spec

GRADIENTS = ("dq", "dk", "dv")
KEYS = ("out", "lse", *GRADIENTS)  # results of every module, and gradients of every one that has a backward
LAYOUTS = ("bhnd", "bnhd", "packed", "expanded", "island")
TRUTH_ELEMENTS = 2**27  # scores of the fp64 reference that are in memory at once
BAR = 2.0  # our error over naive's, at most
DROPOUT_P, SEED = 0.2, 0x5EED_0000_0001  # of cases of specs with dropout that name no other
ROW_BAR = 4.0  # the same of the worst row, which is one draw of rounding's luck: no mean over the others evens it out


def torch_dtype(dtype: str) -> torch.dtype:
    """torch's element type of a row of ELEMENTS."""
    found: torch.dtype = getattr(torch, ELEMENTS[dtype].torch)
    return found


@dataclass(frozen=True)
class Case:
    """One problem: sizes of the tensors, and how q, k, v and the gradients of the results lie in memory.

    Layouts: `bhnd` contiguous; `bnhd` with the heads inside the rows; `packed` slices of one tensor (needs n_q ==
    n_kv), dO with a strided last dimension; `expanded` one K/V head shared by stride 0, gradients as from `out.sum()`;
    `island` slices of buffers that hold NaN everywhere else.
    """

    batch: int
    q_heads: int
    kv_heads: int
    n_q: int
    n_kv: int
    layout: str = "bhnd"

    def __str__(self) -> str:
        heads = f"{self.q_heads}" if self.q_heads == self.kv_heads else f"{self.q_heads}/{self.kv_heads}"
        return f"B{self.batch} H{heads} Nq{self.n_q} Nk{self.n_kv}{'' if self.layout == 'bhnd' else ' ' + self.layout}"


@dataclass(frozen=True)
class Result:
    """Errors of one case, ours and naive's in the same dtype, both against fp64.

    Keys: `out lse dq dk dv`, and what else a spec asks for, are relative errors of whole tensors; the same with ` row`
    are those of the worst row, over the row's size or the typical one if that is larger (absolute for numbers of each
    query, as the LSE), which a mistake in few rows cannot hide from. `rounding` is what rounding alone gives: storing
    the exact results in the dtype, and fp32's own for the statistics.
    """

    case: Case
    dtype: str
    ours: dict[str, float]
    naive: dict[str, float]
    rounding: dict[str, float]

    def ratio(self, key: str) -> float:
        """Our error over naive's, which counts as at least the dtype's own rounding."""
        return self.ours[key] / max(self.naive[key], self.rounding[key])

    @property
    def worst(self) -> str:
        """The key of a whole tensor with the largest ratio; a NaN is the largest of all."""
        return self._largest(tuple(k for k in self.ours if not k.endswith(" row")))

    @property
    def worst_row(self) -> str:
        """The same among the worst rows."""
        return self._largest(tuple(k for k in self.ours if k.endswith(" row")))

    def _largest(self, keys: tuple[str, ...]) -> str:
        return max(keys, key=lambda k: (self.ratio(k) != self.ratio(k), self.ratio(k)))

    @property
    def ok(self) -> bool:
        """Nothing NaN, no error above BAR times naive's, none of a row above ROW_BAR times."""
        return self.ratio(self.worst) <= BAR and self.ratio(self.worst_row) <= ROW_BAR

    def __str__(self) -> str:
        errors = ", ".join(f"{k} {self.ours[k]:.1e} (naive {self.naive[k]:.1e})" for k in self.ours)
        worst = ", ".join(f"{k} {self.ratio(k):.2f}x naive's" for k in (self.worst, self.worst_row))
        return f"{self.case} {self.dtype}: worst {worst}; {errors}"


def load_module(folder: Path) -> ModuleType:
    """Import a generated module from its folder, under a name of its own."""
    name = f"attngen_generated_{folder.resolve().as_posix().replace('/', '_').replace('.', '_')}"
    return import_folder(folder, name)


def result_names(spec: Spec) -> tuple[str, ...]:
    """The results and gradients of a spec's module: the output, what else it gives, and the gradients, also of
    learned inputs."""
    return ("out", *spec.outputs, *(GRADIENTS if spec.trains else ()), *(f"d{i.name}" for i in spec.learned()))


def tangent_names(spec: Spec) -> tuple[str, ...]:
    """The tangents that a spec's module gives in forward mode: `t` and the names of the results that have gradients."""
    return tuple(f"t{name}" for name in ("out", *spec.outputs) if name not in (*FLAT, *OF_KEYS)) if spec.trains else ()


def asked(spec: Spec) -> dict[str, Any]:
    """The arguments by which a call asks for all that a spec's module gives: it comes in the order of
    `result_names`."""
    return {f"return_{name}": True for name in spec.outputs}


def heads_for(spec: Spec, q_heads: int = 4) -> tuple[int, int]:
    """(query heads, K/V heads) that fit the spec's sharing."""
    return q_heads, SHARINGS[spec.heads.sharing].kv_heads(q_heads, 2)


def make_inputs(spec: Spec, case: Case, dtype: torch.dtype, device: str, seed: int = 0) -> tuple[Any, ...]:
    """(q, k, v, mask inputs) of a case: normal values, random masks."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)

    def tensor(heads: int, rows: int, width: int) -> torch.Tensor:
        if case.layout == "bnhd":
            return normal(case.batch, rows, heads, width).transpose(1, 2)
        if case.layout == "expanded" and heads == case.kv_heads:
            return normal(1, 1, rows, width).expand(case.batch, heads, rows, width)
        x = normal(case.batch, heads, rows, width)
        return _island(x) if case.layout == "island" else x

    widths = (spec.head_dim.qk, spec.head_dim.qk, spec.head_dim.v)
    heads = (case.q_heads, case.kv_heads, case.kv_heads)
    if case.layout == "packed":
        sizes = [h * w for h, w in zip(heads, widths)]
        parts = torch.split(normal(case.batch, case.n_q, sum(sizes)), sizes, -1)
        q, k, v = (p.view(*p.shape[:2], h, w).transpose(1, 2) for p, h, w in zip(parts, heads, widths))
    else:
        q, k, v = (tensor(h, n, w) for h, n, w in zip(heads, (case.n_q, case.n_kv, case.n_kv), widths))
    counts = Sizes(case.batch, case.q_heads, case.kv_heads, case.n_q, case.n_kv)
    return q, k, v, make_mask_inputs(spec, counts, dtype, device, generator)


def make_mask_inputs(
    spec: Spec, sizes: Sizes, dtype: torch.dtype, device: str, generator: torch.Generator
) -> dict[str, Any]:
    """What masks and modifiers read in a call of these sizes, and a random mask of blocks: keyword arguments."""
    inputs = _placed(spec, dtype, device, lambda part: part.sample(sizes, generator))
    blocks = spec.mask.blocks()
    if blocks and not blocks.pattern:
        shape = [sizes.batch, sizes.q_heads, -(-sizes.n_q // blocks.size), -(-sizes.n_kv // blocks.size)]
        inputs["block_mask"] = (torch.rand(shape, generator=generator) < 0.6).to(device)
    return inputs


def make_workload(spec: Spec, sizes: Sizes, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """The same as a common user's are, for measuring, always alike: half of the blocks count, those on the diagonal
    among them."""
    generator = torch.Generator().manual_seed(0)
    inputs = _placed(spec, dtype, device, lambda part: part.workload(sizes, generator))
    blocks = spec.mask.blocks()
    if blocks and not blocks.pattern:
        rows, columns = (-(-n // blocks.size) for n in (sizes.n_q, sizes.n_kv))
        table = torch.rand(1, 1, rows, columns, generator=generator) < 0.5
        inputs["block_mask"] = (table | torch.eye(rows, columns, dtype=torch.bool)).to(device)
    return inputs


def _placed(
    spec: Spec, dtype: torch.dtype, device: str, draw: Callable[[Part], Mapping[str, torch.Tensor | float]]
) -> dict[str, Any]:
    """What is drawn for the mask and each modifier, on a device; what has the elements' type, in `dtype`."""
    own = {i.name for i in spec.inputs() if i.dtype == "T"}
    drawn = {name: value for part in (spec.mask, *spec.score) for name, value in draw(part).items()}
    return {
        name: value.to(device, dtype if name in own else value.dtype) if isinstance(value, torch.Tensor) else value
        for name, value in drawn.items()
    }


def make_gradients(
    spec: Spec, case: Case, dtype: torch.dtype, device: str, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dO, gradient of the LSE) of a case, in the memory layout that it names."""
    generator = torch.Generator().manual_seed(seed + 1)
    shape = (case.batch, case.q_heads, case.n_q)
    width = spec.head_dim.v
    grad_lse = torch.randn(shape, generator=generator).to(device)
    grad_out = torch.randn((*shape, width), generator=generator).to(device=device, dtype=dtype)
    if case.layout == "bnhd":
        grad_out = grad_out.transpose(1, 2).contiguous().transpose(1, 2)
        grad_lse = grad_lse.transpose(1, 2).contiguous().transpose(1, 2)
    elif case.layout == "packed":
        grad_out = grad_out.transpose(2, 3).contiguous().transpose(2, 3)
    elif case.layout == "expanded":
        grad_out = torch.full((), 0.75, device=device, dtype=dtype).expand(*shape, width)
        grad_lse = torch.full((), -1.5, device=device).expand(shape)
    elif case.layout == "island":
        grad_out = _island(grad_out)
    return grad_out, grad_lse


def make_all_gradients(
    spec: Spec, case: Case, dtype: torch.dtype, device: str, seed: int = 0
) -> tuple[torch.Tensor, ...]:
    """The gradients of all results of a spec's module that have one: those of make_gradients, and that of the
    entropy."""
    grads = make_gradients(spec, case, dtype, device, seed)
    if "entropy" not in spec.outputs:
        return grads
    shape = (case.batch, case.n_q, case.q_heads)  # with heads inside rows, as calls may give it
    return *grads, torch.randn(shape, generator=torch.Generator().manual_seed(seed + 2)).to(device).transpose(1, 2)


def _island(x: torch.Tensor) -> torch.Tensor:
    """The same values in the midst of a larger buffer that holds NaN elsewhere: a read past an end shows."""
    b, h, n, d = x.shape
    sea = torch.full((b + 2, h + 2, n + 6, d + 16), torch.nan, device=x.device, dtype=x.dtype)
    view = sea[1 : b + 1, 1 : h + 1, 3 : n + 3, 8 : d + 8]
    view.copy_(x)
    return view


def run_case(
    module: ModuleType,
    spec: Spec,
    case: Case,
    dtype: str,
    device: str,
    seed: int = 0,
    *,
    scale: float | None = None,
    inputs: dict[str, torch.Tensor] | None = None,
    dropout_p: float = DROPOUT_P,
    tangents: bool = False,
    of_lse: float = torch.finfo(torch.float32).eps,
) -> Result:
    """Forward and all gradients, ours and naive's in the same dtype, against naive in fp64. Without a backward, the
    results alone.

    With `tangents` forward mode is held too, along random tangents of q, k, v and learned inputs: `tout`, `tlse` and
    the like.

    Where outputs have a dtype of their own, naive attention computes in that, and rounds its weights to the dtype of q,
    k and v. Where products are in TF32, so are naive attention's; the interpreter multiplies in fp32 there.

    Gradients flow into the output, the LSE, and what else has one. `inputs` replaces mask inputs, which are random
    otherwise. Modules with dropout drop by SEED, and naive attention what the oracle says that this drops.

    of_lse: the error, as a part of the LSE, that weights made anew may have: of its rounding to fp32. Modules for fp32
    have none, where the products of all kernels are the same bits: NumPy's differ in the last one between tiles of
    other sizes.
    """
    in_dtype, out_dtype = torch_dtype(dtype), torch_dtype(result_of(dtype))
    q, k, v, drawn = make_inputs(spec, case, in_dtype, device, seed)
    drawn.update(inputs or {})
    grads = make_all_gradients(spec, case, in_dtype, device, seed)
    mask = reference_mask(spec.mask, q, k, drawn)
    learned = {i.name: drawn[i.name] for i in spec.inputs() if i.grad}
    dropout: dict[str, Any] = {"dropout_p": dropout_p, "seed": SEED} if spec.dropout else {}
    weight = dropout_weight((*q.shape[:3], k.shape[2]), dropout_p, SEED, device) if spec.dropout else None
    factor = scale if scale is not None else spec.head_dim.qk**-0.5
    fp32_product, operand = fp32_products(spec, dtype, device, case.n_q)

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = {**drawn, **dict(zip(learned, x))}
        results: tuple[torch.Tensor, ...] = module.attention(q, k, v, **given, **dropout, scale=scale, **asked(spec))
        return results

    def attend(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor,
        weight: torch.Tensor | None,
        *x: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        modify, sink = reference_scores(spec.score, q, k, {**drawn, **dict(zip(learned, x))})
        rounded = in_dtype if q.dtype == out_dtype else None
        multiply = fp32_product if q.dtype == torch.float32 else torch.matmul
        more = {
            "entropy": lambda: naive_entropy(q, k, mask, factor, modify, sink, multiply),
            "max_score": lambda: naive_max_score(q, k, mask, factor, modify, multiply),
            "key_mass": lambda: naive_key_mass(q, k, mask, factor, modify, sink, multiply),
        }
        results = naive_attention(q, k, v, mask, factor, weight, modify, sink, rounded, multiply)
        return *results, *(more[name]() for name in spec.outputs if name in more)

    leaves = (q, k, v, *learned.values())
    names = result_names(spec)
    truth, *rounded = _exact(attend, leaves, mask, grads, weight, names, operand, of_lse, whole=bool(spec.score))

    wide = (*(x.to(out_dtype) for x in (q, k, v)), *learned.values())
    with whole_products():
        naive = errors(_gradients(lambda q, k, v, *x: attend(q, k, v, mask, weight, *x), wide, grads, names), truth)
    found = errors(_gradients(ours, leaves, grads, names), truth)
    if tangents:
        along = (*make_inputs(spec, case, in_dtype, device, seed + 3)[:3], *map(torch.randn_like, learned.values()))
        exact, *changes = _exact_tangents(attend, leaves, along, mask, weight, names[: len(grads)], operand, of_lse)
        wide_along = (*(x.to(out_dtype) for x in along[:3]), *along[3:])
        with whole_products():
            naive |= errors(
                _tangents(lambda q, k, v, *x: attend(q, k, v, mask, weight, *x), wide, wide_along, names[: len(grads)]),
                exact,
            )
        found |= errors(_tangents(ours, leaves, along, names[: len(grads)]), exact)
        truth, rounded = truth | exact, [*rounded, *changes]
    fp32 = {
        *OUTPUTS,
        *(f"t{name}" for name in OUTPUTS),
        *(f"d{name}" for name, x in learned.items() if x.dtype == torch.float32),
    }
    stored = {
        key: x.to(torch.float32 if key in fp32 else out_dtype if key in ("out", "tout") else in_dtype)
        for key, x in truth.items()
    }
    return Result(case, dtype, found, naive, rounding_of(truth, stored, rounded, operand))


def fp32_products(spec: Spec, dtype: str, device: str, queries: int) -> tuple[Callable[..., torch.Tensor], float]:
    """Naive attention's product of fp32 tensors as the spec asks for it, and the error of its operands: TF32's bits are
    fp16's, truncated.

    The interpreter multiplies in fp32 whatever the spec says, and tiles of 16 rows at least. dtype: that of a call.
    queries: how many it has.
    """
    on_cpu = device.startswith("cpu")
    if by_precision([dtype]) and spec.fp32_precision == "tf32" and not on_cpu:
        return truncated_matmul, torch.finfo(torch.float16).eps / 2
    rows = 16 if on_cpu else 2
    return (partial(rows_matmul, rows=rows) if queries < rows else torch.matmul), 0.0


def rounding_of(
    truth: dict[str, torch.Tensor],
    stored: dict[str, torch.Tensor],
    changes: list[dict[str, torch.Tensor]],
    operand: float,
) -> dict[str, float]:
    """What rounding alone gives: of the exact results as they are `stored`, by changes that a fused backward makes,
    and of operands."""
    single = torch.finfo(torch.float32).eps
    rounding = {
        key: max(e, single, 0.0 if key.removesuffix(" row") in OUTPUTS else operand)
        for key, e in errors(stored, truth).items()
    }
    for change in changes:
        for key, e in errors({key: x + change.get(key, 0.0) for key, x in truth.items()}, truth).items():
            rounding[key] = max(rounding[key], e)
    return rounding


Attend = Callable[..., tuple[torch.Tensor, ...]]


def _gradients(
    attend: Attend, inputs: tuple[torch.Tensor, ...], grads: tuple[torch.Tensor, ...], names: tuple[str, ...]
) -> dict[str, torch.Tensor]:
    """The results of `attend` and the gradients of q, k, v and learned inputs, under their names; those that have
    one."""
    leaves = [x.detach().requires_grad_(set(GRADIENTS) <= set(names)) for x in inputs]
    results = attend(*leaves)
    smooth = results[: len(grads)]  # those without a gradient come last
    found: Any = [torch.zeros_like(x) for x in leaves]
    if results[0].requires_grad:  # naive attention over no key at all has no graph
        found = torch.autograd.grad(smooth, leaves, [g.to(r.dtype) for g, r in zip(grads, smooth)])
    return dict(zip(names, (*(r.detach() for r in results), *found)))


def _tangents(
    attend: Attend, inputs: tuple[torch.Tensor, ...], along: tuple[torch.Tensor, ...], names: tuple[str, ...]
) -> dict[str, torch.Tensor]:
    """The tangents of the first results of `attend`, by their names with a `t` before them, along tangents of its
    inputs."""
    found = torch.func.jvp(lambda *x: attend(*x)[: len(names)], inputs, along)[1]
    return {f"t{name}": x for name, x in zip(names, found)}


def _exact_tangents(
    attend: Attend,
    inputs: tuple[torch.Tensor, ...],
    along: tuple[torch.Tensor, ...],
    mask: torch.Tensor,
    weight: torch.Tensor | None,
    names: tuple[str, ...],
    operand: float,
    of_lse: float,
) -> tuple[dict[str, torch.Tensor], ...]:
    """Tangents of naive attention in fp64, and what roundings of a fused forward mode alone add to them.

    tO = P tV + tP V - tLSE * O: where a query sees few keys the last two cancel, and what stays is the rounding of the
    stored output, and of tP, to the dtype of V. P is made anew from the stored LSE: `of_lse` of that, half a unit in
    its last place in fp32, is a factor. `operand` is the relative error of products' operands.
    """
    q, k, v, *rest = (x.double() for x in inputs)
    whole = tuple(x.double() for x in along)
    exact = _tangents(lambda *x: attend(*x[:3], mask, weight, *x[3:]), (q, k, v, *rest), whole, names)
    out, lse, *_ = attend(q, k, v, mask, weight, *rest)
    half = of_lse * lse.abs().nan_to_num(posinf=0.0) + operand
    of_rows = {key: half * x.abs() for key, x in exact.items() if key != "tout"}
    less = (exact["tlse"][..., None] * out).abs()
    rounded = torch.finfo(inputs[0].dtype).eps / 2 * less
    return exact, {"tout": rounded}, {"tout": half[..., None] * (exact["tout"].abs() + less), **of_rows}


def _exact(
    attend: Attend,
    inputs: tuple[torch.Tensor, ...],
    mask: torch.Tensor,
    grads: tuple[torch.Tensor, ...],
    weight: torch.Tensor | None,
    names: tuple[str, ...],
    operand: float,
    of_lse: float,
    whole: bool,
) -> tuple[dict[str, torch.Tensor], ...]:
    """Naive attention and its gradients in fp64, and what two roundings of a fused backward alone add to the gradients.

    dS = P (dP - delta) with delta = rowsum(O dO), which a fused backward computes from the stored O, apart from dP:
    where a query sees few keys the two cancel, and the rounding of delta stays, and that of dP, by `operand`, the
    relative error of products' operands. And it makes P anew, from the stored LSE and from a product of its own: half a
    unit in the last place of each, in fp32, is a factor, which is `of_lse` times the LSE. Some query rows at a time, so
    that large cases fit; all at once if `whole`.
    """
    single = torch.finfo(torch.float32).eps
    q, *others = inputs
    rest = [x.double().requires_grad_() for x in others]
    rows = max(1, q.shape[2] if whole else TRUTH_ELEMENTS // max(1, q.shape[0] * q.shape[1] * rest[0].shape[2]))
    results = [name for name in names if name in ("out", *OUTPUTS)]
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in results}
    gradients: list[list[Any]] = [
        [[], *([0.0] * len(rest))] for _ in range(3)
    ]  # dq by rows, the others: exact, by delta, by the LSE
    for start in range(0, max(1, q.shape[2]), rows):
        at = slice(start, start + rows)
        grad_out, *grad_rows = whole_grads = [g[:, :, at].double() for g in grads]
        part = q[:, :, at].double().requires_grad_()
        part_mask, part_weight = (
            (mask[:, :, at] if mask.shape[2] > 1 else mask),
            (None if weight is None else weight[:, :, at]),
        )
        made = attend(part, rest[0], rest[1], part_mask, part_weight, *rest[2:])
        out, lse, *_ = smooth = made[: len(grads)]
        terms = out.detach() * grad_out
        delta = (
            (out.detach().to(q.dtype).double() * grad_out - terms).sum(-1)
            + single * terms.abs().sum(-1)
            + operand * terms.norm(dim=-1)
        )
        half = of_lse * lse.detach().abs().nan_to_num(posinf=0.0)
        for entropy, grad_entropy in zip(
            smooth[2:], grad_rows[1:]
        ):  # dS = -P (ln P + H): ln P is off by `half`, H is stored
            delta += (half + single * entropy.detach()) * grad_entropy.abs()
        upstream = (
            whole_grads,
            (torch.zeros_like(grad_out), delta, *map(torch.zeros_like, grad_rows[1:])),
            (grad_out * half[..., None], *(grad * half for grad in grad_rows)),
        )
        for sums, flowing in zip(gradients, upstream):
            found = [torch.zeros_like(x) for x in (part, *rest)]
            if out.requires_grad:  # attention over no key at all has no graph
                given = torch.autograd.grad(smooth, (part, *rest), flowing, retain_graph=True, allow_unused=True)
                found = [zero if x is None else x for zero, x in zip(found, given)]
            sums[0].append(found[0])
            sums[1:] = [total + x for total, x in zip(sums[1:], found[1:])]
        for name, x in zip(results, made):
            parts[name].append(x.detach())
    whole_results = {key: sum(x) if key in OF_KEYS else torch.cat(x, 2) for key, x in parts.items()}
    exact, *rounded = (dict(zip(names[len(results) :], (torch.cat(dq, 2), *more))) for dq, *more in gradients)
    return {**whole_results, **exact}, *rounded


def errors(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> dict[str, float]:
    """Errors under the keys of Result."""
    errors = {}
    for key in truth:
        x, ref = found[key].double(), truth[key].detach()
        if key.removeprefix("t") in OUTPUTS:  # -inf where it should be is no error; anywhere else it stays, and fails
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


@contextmanager
def whole_products() -> Iterator[None]:
    """torch multiplies fp32 matrices in fp32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def cli_cases(spec: Spec, cuda: bool) -> list[tuple[Case, str]]:
    """What `attngen test` runs: ragged, unequal and strided cases, small ones in the interpreter.

    Triton's interpreter cannot multiply bf16, so there a module without fp16 is run in what the wrapper falls back to.
    """
    heads = heads_for(spec)
    sizes = [(1, 1), (129, 129), (100, 300), (300, 100)] + ([(1000, 1000), (4096, 4096)] if cuda else [])
    dtypes = [d for d in spec.dtype if cuda or ELEMENTS[d].is_interpreted] or list(spec.dtype)
    cases = [Case(2, *heads, n_q, n_kv) for n_q, n_kv in sizes] + [Case(1, *heads, 127, 127, "bnhd")]
    return [(case, dtype) for dtype in dtypes for case in cases]
