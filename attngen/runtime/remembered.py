"""Host programs that are remembered: what one does is noted once for each form of its arguments, and done again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from math import gcd
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from attngen.runtime.launch import STEPS, Launch
from attngen.runtime.memory import NOTES, empty

_MOST = 1024  # forms of arguments that are remembered; with one more all are forgotten
_shape: Callable[[Any], torch.Size] = torch.Tensor.size
_strides: Callable[[Any], tuple[int, ...]] = torch.Tensor.stride


class Steps(NamedTuple):
    """What a host program does with arguments of one form. Its tensors are numbered: first those it is given, then
    those it makes."""

    made: list[
        tuple[tuple[int, ...], tuple[int, ...], torch.dtype, bool]
    ]  # shape, strides, dtype; whether it is filled with 0
    # Each launch; the number of its programs; the numbers and strides that it gets; the strides; what takes its tensors
    # from all of them.
    launches: list[tuple[Launch, int, tuple[Any, ...], tuple[int, ...], Callable[[list[Any]], tuple[Any, ...]]]]
    results: Callable[[list[Any]], tuple[Any, ...]]

    def repeat(self, given: Iterable[Any]) -> tuple[torch.Tensor, ...] | None:
        """The results for the tensors that the program is given; None if an address is no multiple of 16."""
        tensors = list(given)
        addresses = [t if t is None else t.data_ptr() for t in tensors]
        if gcd(16, *filter(None, addresses)) != 16:
            return None
        x = tensors[0]
        for shape, strides, dtype, zero in self.made:
            made = empty(x, shape, strides, dtype)
            tensors.append(made.zero_() if zero else made)
            addresses.append(made.data_ptr())
        device = x.get_device()
        for launch, programs, more, strides, taken in self.launches:
            launch.start(device, programs, taken(tensors), list(taken(addresses)), more, strides)
        return self.results(tensors)


def _taking(numbers: Iterable[int]) -> Callable[[list[Any]], tuple[Any, ...]]:
    """What takes the items of these numbers from a list."""
    at = tuple(numbers)
    return itemgetter(*at) if len(at) > 1 else lambda items: tuple(items[i] for i in at)


def _noted(
    given: Iterable[Any], results: tuple[torch.Tensor, ...], launched: list[Any], filled: list[torch.Tensor]
) -> Steps | None:
    """The steps of a program; None if they are not those of other arguments of this form.

    So it is if a tensor was given twice, if an address is no multiple of 16, and on AMD.
    """
    tensors = list(given)
    numbers = {id(x): at for at, x in enumerate(tensors)}
    if len(numbers) < len(tensors) or not all(launched):
        return None

    def number(x: torch.Tensor | None) -> int:
        if id(x) not in numbers:
            numbers[id(x)] = len(tensors)
            tensors.append(x)
        return numbers[id(x)]

    count = len(tensors)
    launches = [(*launch, _taking(map(number, taken))) for *launch, taken in launched]
    returned = _taking(map(number, results))
    zeros = set(map(id, filled))
    return Steps([(tuple(x.shape), x.stride(), x.dtype, id(x) in zeros) for x in tensors[count:]], launches, returned)


def remembered(count: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a host program one that is remembered. Its first `count` arguments are tensors, of which the last may be
    None.

    The program may do two things, by the runtime: make tensors, and launch kernels. What it does follows from the
    device, from the sizes, strides and dtypes of its tensors, from whether there is a last one, and from its numbers.
    """

    def of(program: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(program)
        def run(*args: Any) -> Any:
            dense = args[: count if args[count - 1] is not None else count - 1]
            rest = args[len(dense) :]
            form = (
                program,
                args[0].get_device(),
                *[t.dtype for t in dense],
                *map(_shape, dense),
                *map(_strides, dense),
                *rest,
            )
            steps = STEPS.get(form)
            if steps is not None:
                found = steps.repeat(args[:count])
                return program(*args) if found is None else found
            with NOTES.taken() as (launches, zeros):
                results = program(*args)
            if steps := _noted(args[:count], results, launches, zeros):
                if len(STEPS) >= _MOST:
                    STEPS.clear()
                STEPS[form] = steps
            return results

        return run

    return of
