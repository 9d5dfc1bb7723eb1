"""The ranks over which a sequence is divided: a process group, or a DeviceMesh of one or two dimensions."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def groups_of(mesh: Any) -> list[Any]:
    """Return the process groups of a mesh's dimensions of which this rank is a member."""
    return mesh.get_all_groups() if isinstance(mesh, DeviceMesh) else [mesh]


def sizes_of(mesh: Any) -> tuple[int, ...]:
    """Return the number of ranks of each dimension of a mesh."""
    return tuple(map(dist.get_world_size, groups_of(mesh)))


def rank_in(mesh: Any) -> int:
    """Return this rank's number in a mesh, in row-major order."""
    found = 0
    for group in groups_of(mesh):
        found = found * dist.get_world_size(group) + dist.get_rank(group)
    return found
