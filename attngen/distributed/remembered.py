"""Tensors that calls need and that follow from few facts: they are made once and kept for later calls."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch


class Remembered:
    """Values by key, the `most` that were used last.

    A value may be made from tensors. It is used only while these are the same objects and no operation of torch has
    changed them in place; the values do not keep them alive. On CUDA a value is made for each stream. While a CUDA
    graph is captured, values of other streams are complete and are used, and new ones belong to the graph.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.made = 0  # number of values that were made
        self._values: OrderedDict[Hashable, tuple[Sequence[Any], int, Any]] = OrderedDict()

    def get(self, key: Hashable, sources: Sequence[torch.Tensor], device: torch.device, make: Callable[[], Any]) -> Any:
        """Return the value of a key, by `make` if it is not known.

        sources: the tensors from which it is made. device: where its tensors are.
        """
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        key = (key, device, tuple(map(id, sources)))
        versions = [_version(x) for x in sources]
        references, of_stream, value = self._values.get(key, ((), -1, None))
        same = all(ref() is x and at == version for (ref, at), x, version in zip(references, sources, versions))
        if key in self._values and same and None not in versions and (capturing or of_stream == stream):
            self._values.move_to_end(key)
            return value
        self.made += 1
        value = make()
        if not capturing:
            references = [(weakref.ref(x), version) for x, version in zip(sources, versions)]
            self._values[key] = (references, stream, value)
            if len(self._values) > self.most:
                self._values.popitem(last=False)
        return value


def _version(x: torch.Tensor) -> int | None:
    """Return the number of changes of a tensor in place; None if it is not counted."""
    return None if x.is_inference() else x._version
