"""A rank's part of a sequence: its rows, the other ranks, and what is sent where at a call."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from attngen.distributed.agreement import agree, digest
from attngen.distributed.collectives import Route, Run, gather, route, runs
from attngen.distributed.layout import Chunks, Layout, without_heads
from attngen.distributed.mesh import groups_of, rank_in, sizes_of
from attngen.distributed.transfers import Steps

METHODS = ("all_gather", "ring", "ulysses", "ulysses+all_gather", "ulysses+ring")


class Shard:
    """This rank's part of a sequence, and the plan of transfers. All ranks make it with equal arguments.

    layout: the rows of each rank; rank r of the layout is rank r of the group, or number r of the mesh in row-major
        order.
    mesh: a process group or a mesh of one dimension; with a method "ulysses+..." a mesh of two dimensions, of which the
        second is exchanged for heads.
    method: how keys get to queries:
        "all_gather": each rank receives the chunks of K and V that its queries see, then computes in one launch;
        "ring": a rank computes with keys of one rank while it receives those of the next; each rank sends the rows that
            the receiver's queries see;
        "ulysses": rows are exchanged for heads, so that each rank computes some heads of the whole sequence;
        "ulysses+all_gather", "ulysses+ring": Ulysses within rows of the mesh, the other method between them.
    needs: except with "ulysses", for each rank the numbers of the chunks of keys that its queries see, in rising order.
    steps: with ring, for each step and rank the rank whose keys it computes with, and the chunks of its queries that
        see any of them, in rising order. In step 0 each rank has its own, with all of its queries. A step in which no
        rank sees anything may be left out.
        With a Ulysses method, needs and steps are those of `without_heads(layout, mesh.size(1))`.
    inputs: inputs of the kernel, by name, from which the plan is made and which `attngen.distributed.attention` passes
        to it.

    Raises:
        ValueError: one sentence: the mesh, the layout and the plan do not fit each other.
    """

    def __init__(
        self,
        layout: Layout,
        mesh: Any,
        method: str = "all_gather",
        needs: Any = (),
        steps: Steps = (),
        inputs: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        if method not in METHODS:
            raise ValueError(f"shard: method is {method!r}; expected one of {', '.join(METHODS)}")
        self.layout, self.mesh, self.method = layout, mesh, method
        self.groups = groups_of(mesh)
        dims = 2 if "+" in method else 1
        if len(self.groups) != dims:
            raise ValueError(
                f"shard: the mesh has {len(self.groups)} dimensions; expected {dims} with method {method!r}"
            )
        self.rank, sizes = rank_in(mesh), list(sizes_of(mesh))
        if layout.ranks != math.prod(sizes):
            raise ValueError(
                f"shard: the layout is for {layout.ranks} ranks and the mesh has {sizes}; expected as many"
            )
        of_backend = {"nccl": "cuda"}
        kind = mesh.device_type if isinstance(mesh, DeviceMesh) else of_backend.get(dist.get_backend(mesh), "cpu")
        self.device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
        # Ulysses exchanges rows for heads within `heads_group`; then ranks of `sequence_group` hold `sequence`.
        self.heads = sizes[-1] if method.startswith("ulysses") else 1
        self.heads_group = self.groups[-1] if method.startswith("ulysses") else None
        self.sequence_group = None if method == "ulysses" else self.groups[0]
        self.sequence = without_heads(layout, self.heads)
        self.at = self.rank // self.heads  # this rank's place in `sequence`
        self.rings = method.endswith("ring")
        everything = tuple(range(layout.chunks))
        self.needs: tuple[Chunks, ...] = (everything,) if method == "ulysses" else tuple(map(tuple, needs))
        self.steps = tuple(tuple((int(of), tuple(queries)) for of, queries in step) for step in steps)
        self.inputs = {name: x.to(self.device) for name, x in (inputs or {}).items()}
        self._check()
        self._agreed: set[bytes] = set()

    def _check(self) -> None:
        ranks = list(range(self.sequence.ranks))
        if self.rings:
            sources = [sorted(of for of, _ in step) for step in self.steps]
            if not self.steps or [of for of, _ in self.steps[0]] != ranks or any(found != ranks for found in sources):
                raise ValueError(
                    f"shard: steps are {self.steps}; expected with a ring one or more steps, each with every one of "
                    f"{len(ranks)} ranks as source of one rank, and in step 0 each rank as its own"
                )
        rising = all(list(chunks) == sorted(set(chunks) & set(range(self.layout.chunks))) for chunks in self.needs)
        if len(self.needs) != len(ranks) or not rising:
            raise ValueError(
                f"shard: needs are {self.needs}; expected for each of {len(ranks)} ranks the numbers of chunks, from 0 "
                f"to {self.layout.chunks - 1}, in rising order"
            )
        if self.rings:
            self._check_steps()

    def _check_steps(self) -> None:
        """Raise ValueError if a rank would compute with the keys of another twice, or never with some that it sees."""
        for rank in range(len(self.needs)):
            sources = [step[rank][0] for step in self.steps]
            seen = [source for source in range(len(self.needs)) if source != rank and self.seen(source, rank)]
            sees = [source for source, queries in (step[rank] for step in self.steps[1:]) if queries]
            if len(set(sources)) < len(sources) or sorted(sees) != seen:
                raise ValueError(
                    f"shard: after step 0 rank {rank} computes with keys of ranks {sees}, and needs keys of {seen}; "
                    "expected each of these once, and no rank twice as a source"
                )
            own = self.sequence.owned[rank]
            of_steps = [step[rank][1] for step in self.steps]
            if of_steps[0] != own or any(list(queries) != sorted({*queries} & {*own}) for queries in of_steps):
                raise ValueError(
                    f"shard: rank {rank} has queries {of_steps} in the steps; expected all of its chunks {own} in step "
                    "0, and some of them in rising order in later ones"
                )

    # ------------------------------------------------------------------ what the ranks share

    @cached_property
    def plan_digest(self) -> bytes:
        inputs = [(name, x.tolist()) for name, x in sorted(self.inputs.items())]
        return digest(self.layout.digest, self.method, self.needs, self.steps, self.heads, inputs)

    def check_equal(self, call: bytes = b"\0" * 8, problem: str = "") -> None:
        """Compare the plan with those of the other ranks; once, later calls return at once. All ranks have to call it.

        call: digest of the sizes of a call, each of which is compared once. problem: what is wrong on this rank.

        Raises:
            ValueError: one sentence, the same on every rank.
        """
        if call in self._agreed:
            if problem:
                raise ValueError(f"attention: on rank {self.rank} {problem}")
            return
        agree(self.groups, self.device, self.plan_digest, call, problem)
        self._agreed.add(call)

    # ------------------------------------------------------------------ rows of this rank

    @property
    def rows(self) -> int:
        """Number of rows that this rank holds."""
        return self.layout.rows(self.rank)

    @cached_property
    def position_ids(self) -> torch.Tensor:
        """Positions of this rank's rows in the whole sequence, int64 [rows], on the mesh's device."""
        chunks = (self.layout.rows_of(chunk) for chunk in self.layout.owned[self.rank])
        return torch.tensor([row for chunk in chunks for row in chunk], dtype=torch.int64, device=self.device)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def scatter(self, x: torch.Tensor, dim: int = 2) -> torch.Tensor:
        """Return this rank's rows of x, which every rank has whole; differentiable.

        x: any shape with `seq_len` rows in dimension `dim`. The gradient of x is whole on every rank: backwards gather.

        Raises:
            ValueError: one sentence: x has another number of rows.
        """
        if x.shape[dim] != self.layout.seq_len:
            raise ValueError(
                f"scatter: x has {x.shape[dim]} rows in dimension {dim}; expected the whole sequence's "
                f"{self.layout.seq_len}"
            )
        found: torch.Tensor = _Scatter.apply(x, self, dim)  # type: ignore[no-untyped-call]
        return found

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def gather(self, x: torch.Tensor, dim: int = 2) -> torch.Tensor:
        """Return the whole tensor on every rank, of which each rank has its rows; differentiable. All ranks call it.

        x: any shape with this rank's rows in dimension `dim`; the other dimensions are equal on all ranks. The gradient
        of the result has to be the same on every rank, as of a loss that every rank computes; each takes its rows.

        Raises:
            ValueError: one sentence, the same on every rank: on some rank x has another number of rows.
        """
        found: torch.Tensor = _Gather.apply(x, self, dim)  # type: ignore[no-untyped-call]
        return found

    # ------------------------------------------------------------------ routes of rows

    def seen(self, source: int, rank: int) -> Chunks:
        """Return the chunks of one rank of `sequence` that the queries of another see."""
        needs = set(self.needs[rank])
        return tuple(chunk for chunk in self.sequence.owned[source] if chunk in needs)

    @cached_property
    def to_needs(self) -> Route:
        """The route of K and V from the ranks that hold chunks to the ranks that need them."""
        return route(self.sequence, self.sequence.owned, self.needs, self.at)

    @cached_property
    def from_needs(self) -> Route:
        """The route of parts of dK and dV back to the ranks that hold the chunks."""
        return route(self.sequence, self.needs, self.sequence.owned, self.at)

    @cached_property
    def step_keys(self) -> tuple[Chunks, ...]:
        """The chunks of keys that this rank computes with in each step of a ring: first all of its own, then those of
        other ranks that its queries see."""
        return self.sequence.owned[self.at], *(targets[self.at] for targets in self._of_steps)

    @cached_property
    def step_queries(self) -> tuple[tuple[Chunks, tuple[Run, ...], tuple[Run, ...]], ...]:
        """For each step of a ring: the chunks of this rank's queries that see keys in it, and the runs of their rows
        among this rank's rows and among `merged_rows`."""
        own, merged, layout = self.sequence.owned[self.at], self._merged, self.sequence
        of_steps = (step[self.at][1] for step in self.steps)
        return tuple((queries, runs(layout, own, queries), runs(layout, merged, queries)) for queries in of_steps)

    @cached_property
    def merged_rows(self) -> tuple[Run, ...]:
        """The runs of this rank's rows to whose results a step of a ring after the first adds, in rising order."""
        return runs(self.sequence, self.sequence.owned[self.at], self._merged)

    @property
    def _merged(self) -> Chunks:
        return tuple(sorted({chunk for step in self.steps[1:] for chunk in step[self.at][1]}))

    @cached_property
    def to_steps(self) -> list[Route]:
        """The routes of K and V in the steps of a ring after the first."""
        return [route(self.sequence, self.sequence.owned, targets, self.at) for targets in self._of_steps]

    @cached_property
    def from_steps(self) -> list[Route]:
        """The routes of parts of dK and dV back from these steps."""
        return [route(self.sequence, targets, self.sequence.owned, self.at) for targets in self._of_steps]

    @cached_property
    def _of_steps(self) -> list[list[Chunks]]:
        return [[self.seen(of, rank) for rank, (of, _) in enumerate(step)] for step in self.steps[1:]]

    @cached_property
    def to_all(self) -> Route:
        """The route of rows to all ranks."""
        everything = tuple(range(self.layout.chunks))
        return route(self.sequence, self.sequence.owned, [everything] * self.sequence.ranks, self.at)

    @cached_property
    def to_heads(self) -> Route:
        """The route of rows within the group that exchanges rows for heads."""
        sources, targets = self._of_heads
        return route(self.layout, sources, targets, self.rank % self.heads)

    @cached_property
    def from_heads(self) -> Route:
        """The route of rows back to the ranks that hold them."""
        sources, targets = self._of_heads
        return route(self.layout, targets, sources, self.rank % self.heads)

    @property
    def _of_heads(self) -> tuple[list[Chunks], list[Chunks]]:
        first = self.at * self.heads
        return list(self.layout.owned[first : first + self.heads]), [self.sequence.owned[self.at]] * self.heads


def _local(x: torch.Tensor, shard: Shard, dim: int) -> torch.Tensor:
    return x.index_select(dim, shard.position_ids.to(x.device))


def _whole(x: torch.Tensor, shard: Shard, dim: int) -> torch.Tensor:
    rows = x.shape[dim]
    problem = "" if rows == shard.rows else f"gather's x has {rows} rows in dimension {dim}; expected {shard.rows}"
    others = [size for at, size in enumerate(x.shape) if at != dim % x.dim()]
    shard.check_equal(digest("gather", others, x.dtype), problem)
    found = x.movedim(dim, 0)
    if shard.heads_group is not None:
        (found,) = gather([found], shard.to_heads, shard.heads_group)
    if shard.sequence_group is not None:
        (found,) = gather([found], shard.to_all, shard.sequence_group)
    return found.movedim(0, dim)


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shard: Shard, dim: int) -> torch.Tensor:
        ctx.shard, ctx.dim = shard, dim
        return _local(x, shard, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _whole(grad, ctx.shard, ctx.dim), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shard: Shard, dim: int) -> torch.Tensor:
        ctx.shard, ctx.dim = shard, dim
        return _whole(x, shard, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _local(grad, ctx.shard, ctx.dim), None, None
