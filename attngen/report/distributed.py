"""`attngen explain --gpus`: the methods of context parallelism on a cluster, as rich renderables."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from attngen.devices import LINKS
from attngen.distributed.balance import balance
from attngen.distributed.bounds import bound
from attngen.distributed.choose import choose, predictions, simulate
from attngen.distributed.formulas import FORMULAS
from attngen.distributed.model import Cluster, Heads, Prediction
from attngen.distributed.visible import Visible
from attngen.ir import to_text
from attngen.report.explain import Line, heading, remark
from attngen.report.tables import Rows

NUMBERS = {"NVLink GB", "network GB", "HBM GB", "TFLOP", "memory GB", "forward ms", "+ backward ms"}
NUMBERS |= {"efficiency", "GPUs", "speed-up"}
LEGEND = """Of the GPU with the most: bytes that it receives or sends (whichever is more) by NVLink and by the network,
bytes of device memory, and FLOPs, all of the forward; memory with the backward. Times are predictions for the slowest
GPU, not measured; efficiency: the time of one GPU that computes all of it over the sum of all GPUs' times, forward and
backward together. It exceeds 100% where a GPU's part of the queries fits in its L2, and all of them do not."""
BOUND = """least, any method: what a GPU has to send and receive at least, whichever way queries, keys and heads are
moved, and the time at peak rates; least, queries stay: what it has to receive if it computes the scores of its own
queries (all_gather and ring)."""
GROUPS = "ulysses+ring G x U: a mesh of G groups of U GPUs, each with a part of the heads."
SCALING = "The chosen method for other numbers of GPUs"


def explain_cluster(
    name: str, visible: Visible, cluster: Cluster, heads: Heads, formulas: bool = False, undivided: str = ""
) -> Iterator[RenderableType]:
    """Yield the predictions of all methods, lower bounds, the choice, and what it becomes on more or fewer GPUs.

    formulas: also closed forms. undivided: why ranks cannot compute a part of the heads, as a clause; then methods that
    divide heads are left out.
    """
    where = f"{cluster.ranks} {cluster.device} in {cluster.nodes} node{'s' * (cluster.nodes > 1)} of {cluster.gpus}"
    yield Text(f"{name}: context parallelism on {where}", style="bold")
    share = visible.total / visible.seq_len**2
    yield Line(
        f"B={heads.batch} Hq={heads.q_heads} Hkv={heads.kv_heads} N={visible.seq_len}, chunks of {visible.chunk} rows; "
        f"{'' if visible.exact else 'at most '}{share:.2%} of the scores visible",
        indent=0,
    )
    yield Text()
    chosen = choose(visible, cluster, heads, divides=not undivided)
    yield _methods(visible, cluster, heads, not undivided)
    yield remark(f"{LEGEND} {BOUND} {GROUPS}" if not undivided else f"{LEGEND} {BOUND}")
    yield Text()
    if undivided:
        yield Line(f"without Ulysses, which divides heads: {undivided}", indent=0)
    yield Line(f"chosen: {_name(chosen)}, {_balance(visible, chosen)}", indent=0)
    limit = LINKS[cluster.device].memory_bytes
    if chosen.memory > limit:
        yield Line(f"No method fits: {chosen.memory / 1e9:.0f} of {limit / 1e9:.0f} GB, without model and activations.")
    yield heading(SCALING)
    yield _scaling(visible, cluster, heads, not undivided)
    if formulas:
        yield heading(
            "Formulas, of a rank (U: ranks among which heads are divided; own, held: rows of it, of its group)"
        )
        yield from (Line(f"{what} = {to_text(formula)}") for what, formula in FORMULAS.items())


def _name(found: Prediction) -> str:
    ring = found.layout.ranks
    return f"ulysses+ring {ring} x {found.ulysses}" if found.method == "ulysses_ring" else found.method


def _balance(visible: Visible, chosen: Prediction) -> str:
    """Return how evenly the chosen layout divides the scores, and what neighbouring chunks would cost."""
    ranks = chosen.layout.ranks
    if ranks == 1:
        return "all GPUs compute the same scores of different heads"
    work = [int(visible.work[list(own)].sum()) for own in chosen.layout.owned]
    excess = max(work) * ranks / max(1, sum(work)) - 1
    contiguous = balance(visible, ranks, "contiguous").excess
    return (
        f"whose busiest GPU computes {excess:.1%} more scores than the mean ({contiguous:.1%} with neighbouring chunks)"
    )


def _methods(visible: Visible, cluster: Cluster, heads: Heads, divides: bool) -> Rows:
    """Return a table with one line for each method, and the lower bounds."""
    table = _table(
        "method", "NVLink GB", "network GB", "HBM GB", "TFLOP", "memory GB", "forward ms", "+ backward ms", "efficiency"
    )
    for p in predictions(visible, cluster, heads, divides):
        f = p.forward
        table.add_row(
            _name(p),
            *(_digits(x / 1e9) for x in (f.nvlink_bytes, f.network_bytes, f.hbm_bytes)),
            _digits(f.flops / 1e12),
            _digits(p.memory / 1e9),
            _digits(f.seconds * 1e3),
            _digits(p.seconds * 1e3),
            f"{p.efficiency:.0%}",
        )
    least = bound(visible, cluster, heads, balance(visible, cluster.ranks).layout)
    both = f"{_digits(least.received_bytes / 1e9)} on both links"
    table.add_row(
        "least, any method",
        both if cluster.nodes > 1 else _digits(least.received_bytes / 1e9),
        _digits(least.network_bytes / 1e9),
        _digits(least.hbm_bytes / 1e9),
        _digits(least.flops / 1e12),
        "",
        _digits(least.seconds * 1e3),
    )
    stay = _digits(least.queries_stay_bytes / 1e9)
    table.add_row("least, queries stay", f"{stay} on both links" if cluster.nodes > 1 else stay)
    return table


def _scaling(visible: Visible, cluster: Cluster, heads: Heads, divides: bool) -> Rows:
    """Return a table with one line for each number of GPUs."""
    table = _table("GPUs", "method", "forward ms", "+ backward ms", "speed-up", "efficiency")
    found = simulate(visible, cluster, heads, divides=divides)
    one = found[min(found)].seconds
    for count, p in found.items():
        times = (_digits(s * 1e3) for s in (p.forward.seconds, p.seconds))
        table.add_row(f"{count}", _name(p), *times, _digits(one / p.seconds), f"{p.efficiency:.0%}")
    return table


def _digits(number: float) -> str:
    """Return a number with three digits, or as an integer."""
    return f"{number:,.0f}" if number >= 100 or not number else f"{number:#.3g}"


def _table(*headings: str) -> Rows:
    return Rows(*headings, numbers=NUMBERS)
