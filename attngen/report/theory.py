"""`attngen explain --theory` as rich renderables: theorems with their closed forms, orders and limits, and a model's
numbers."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from attngen.cost.models import Model
from attngen.cost.numbers import SPARSE, done, moved
from attngen.cost.roofline import Problem
from attngen.cost.theory import EXACT, Theorem, theorems
from attngen.devices import CLASSES
from attngen.ir import Module, to_text
from attngen.report.explain import Line, remark
from attngen.report.tables import Rows
from attngen.tiles.sizes import elem_sizes

INTRO = """Counts are of elements moved, from the loops, loads and stores of the IR, ceilings relaxed to divisions.
Limits are of count / order as N, then d, grows; beta is any constant. Tiles are B_r queries by B_c keys; in limits, a
program's rows by those of one iteration of its loop. Emitted tiles are assumed to fill SRAM here; the tables have those
that were chosen. Sources: FlashAttention (Dao et al. 2022), FlashAttention-2 (Dao 2023)."""
MOVED = f"""All loads and stores, without caches. Standard attention: each of its operations moves its operands and its
result once. It and FlashAttention-1 visit all tiles; ours those that the mask leaves, and 1 in {SPARSE} of these for
s = 1/{SPARSE}. Tiles: queries x keys; ours forward, dQ, dK/dV, their head dims padded to powers of two. GB: of one
layer.
"""
DONE = """TFLOP and GB: of one layer. Ours: of the tiles visited on sm90; as run, products that two kernels compute
count twice. Saved: what the forward writes for the backward, in addition to o."""


def explain_theory(module: Module, problem: Problem, model: Model | None) -> Iterator[RenderableType]:
    """Yield every theorem, and its numbers for a problem size. With a model, the size is that of one of its layers."""
    yield Text(
        f"{module.name}: theorems, for one head with N queries and N keys of width d, and M elements on chip",
        style="bold",
    )
    yield remark(INTRO)
    for subject, found in theorems(module).items():
        yield Text(f"\n{subject}", style="bold")
        for theorem in found:
            yield from map(Line, _lines(theorem))
    yield Text(f"\n{_size(module, problem, model)}", style="bold")
    layers = model.layers if model else 1
    yield _moved(module, problem, layers)
    yield remark(MOVED)
    yield Text()
    yield _done(module, problem, layers)
    yield remark(DONE)


def _lines(theorem: Theorem) -> Iterator[str]:
    source = f"  [{theorem.source}]" if theorem.source else ""
    count, order = to_text(theorem.count), f"Theta({to_text(theorem.order)})"
    if theorem.regimes == (EXACT,) and theorem.holds:
        yield f"{theorem.claim}: {count}{source}"
        return
    yield f"{theorem.claim}: {'' if theorem.holds else 'not '}{theorem.says or order}{source}"
    yield f"  count = {count}" + (f", with {theorem.given}" if theorem.given else "")
    yield "  limit = " + "; ".join(f"{to_text(value)} ({name})" for name, value in theorem.limits.items())


def _size(module: Module, problem: Problem, model: Model | None) -> str:
    dim = (
        f"{module.head_dim_qk}"
        if module.head_dim_qk == module.head_dim_v
        else f"{module.head_dim_qk}/{module.head_dim_v}"
    )
    heads = f"{problem.q_heads} heads, {problem.kv_heads} K/V heads, head dim {dim}"
    if model is None:
        title = f"One layer: {heads}"
    else:
        title = f"{model.name}: {model.layers} layers, {heads}, hidden {model.hidden}\n[{model.source}]"
    return f"{title}\nbatch {problem.batch}, {problem.n_q} tokens, {elem_sizes(module)[0]} bytes an element"


def _moved(module: Module, problem: Problem, layers: int) -> Rows:
    table = _table("schedule", "device", "SRAM", "tiles", "GB forward", "GB backward", "TB, all layers", "/std")
    rows = list(moved(module, problem))
    for row in rows:
        table.add_row(
            row.schedule,
            row.cls,
            f"{CLASSES[row.cls].smem_per_block // 1024}K" if row.cls else "",
            " ".join(f"{q}x{kv}" for q, kv in row.tiles),
            f"{row.forward / 1e9:.2f}",
            f"{row.backward / 1e9:.2f}",
            f"{layers * row.total / 1e12:.3f}",
            f"{row.total / rows[0].total:.4f}",
        )
    return table


def _done(module: Module, problem: Problem, layers: int) -> Rows:
    table = _table(
        "schedule",
        "TFLOP forward",
        "TFLOP backward",
        "PFLOP, all layers",
        "saved",
        "GB saved",
        "GB, all layers",
        "/std",
    )
    rows = list(done(module, problem))
    for row in rows:
        table.add_row(
            row.schedule,
            f"{row.forward / 1e12:.2f}",
            f"{row.backward / 1e12:.2f}",
            f"{layers * (row.forward + row.backward) / 1e15:.3f}",
            " ".join(row.kept),
            f"{row.saved / 1e9:.4f}",
            f"{layers * row.saved / 1e9:.3f}",
            f"{row.saved / rows[0].saved:.1e}" if module.trains else "-",
        )
    return table


def _table(*headings: str) -> Rows:
    words = ("schedule", "device", "tiles", "saved")
    return Rows(*headings, numbers=[heading for heading in headings if heading not in words])
