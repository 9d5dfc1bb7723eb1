"""Calls with a KV cache: their checks, and how they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from attngen.runtime.checks import MAX_ROWS, Rules, is_watched, kind
from attngen.runtime.memory import MAX_ROW_STRIDE, Layout, on_its_device
from attngen.runtime.private import guard_of, has_tangents, in_forward_ad
from attngen.runtime.shards import is_dtensor

OF_NUMPY = (torch.float16, torch.float32)  # dtypes that Triton's interpreter can multiply
Tensors = tuple[torch.Tensor, ...]


def _error(error: type[Exception], name: str, given: str, expected: str) -> Exception:
    return error(f"attention.with_kvcache: {name} {given}; expected {expected}")


GROUP = 128  # number of columns of a latent that share a factor
_NEAR = f"contiguous rows, at most {MAX_ROW_STRIDE} elements apart"


def _kind_of(x: torch.Tensor) -> tuple[Any, ...]:
    """Return everything about a tensor of factors that is checked."""
    return type(x), x.dtype, x.device, x.shape, x.stride(), x.is_neg()


def _is_dense(x: object) -> bool:
    return isinstance(x, torch.Tensor) and not x.is_nested and x.layout is torch.strided and not is_dtensor(x)


def _is_near(x: torch.Tensor, rows: int) -> bool:
    """True if kernels can read the rows of a tensor, which lie along its dimension `rows`."""
    return x.stride(3) == 1 and (x.stride(rows) <= MAX_ROW_STRIDE or x.shape[rows] <= 1) and not x.is_neg()


def _repeats_elements(x: torch.Tensor) -> bool:
    """True if elements of a tensor share memory, such as those of an expanded one; or its dimensions are not nested in
    memory."""
    end = 0
    for step, n in sorted((step, n) for n, step in zip(x.shape, x.stride()) if n > 1):
        if step <= end:
            return True
        end += step * (n - 1)
    return False


def _share_memory(x: torch.Tensor, y: torch.Tensor) -> bool:
    """True if two tensors share an element. No tensor has two elements in the same place of memory. Tensors with
    different strides count as sharing only if their first elements are the same.

    Elements i of x and j of y are the same if the sum of (i - j) * strides is the distance of y from x. Because
    dimensions are nested in memory, the difference along the widest dimension has two possible values, and so on.
    """
    dims = [(a, b, n, m) for a, b, n, m in zip(x.stride(), y.stride(), x.shape, y.shape) if n > 1 or m > 1]
    distance = y.data_ptr() - x.data_ptr()
    if any(a != b for a, b, _, _ in dims) or distance % x.element_size():
        return distance == 0
    left = {distance // x.element_size()}
    for step, _, n, m in sorted(dims, reverse=True):
        left = {rest - d * step for rest in left for d in (rest // step, rest // step + 1) if -m < d < n}
    return 0 in left


def _distance(caches: Tensors) -> tuple[int, int]:
    """Return by how many bytes the last cache starts after the first, and how many bytes suffice so that two caches of
    their sizes do not overlap."""
    ends = (sum(step * (n - 1) for n, step in zip(x.shape, x.stride())) + 1 for x in caches)
    return caches[-1].data_ptr() - caches[0].data_ptr(), max(ends) * caches[0].element_size() if len(caches) > 1 else 0


def without_backward(*tensors: Any) -> None:
    """Raise NotImplementedError, in one sentence, if a call with a KV cache needs gradients or tangents of some of
    these."""
    if torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in tensors):
        raise NotImplementedError("attention.with_kvcache has no backward; expected a call under torch.no_grad()")
    if in_forward_ad(*tensors) and has_tangents(*tensors):
        raise NotImplementedError("attention.with_kvcache has no forward mode; expected tensors without tangents")


class CacheRules:
    """Checks of caches, and of new keys and values.

    page: keys of a page; 0 if a call's tensors decide it, and None if a cache has no pages.
    latent: values are columns of the keys, so that there is one cache for both.
    dtype: dtype of the caches, if it is not that of q. These have factors then, as `scale` says: one for each "head",
    or for each "page" and head. For latents it is "columns": one for GROUP columns of a key, stored in the cache, whose
    rows of bytes have numbers, factors and rotated columns.
    """

    def __init__(
        self, rules: Rules, page: int | None, latent: bool = False, dtype: torch.dtype | None = None, scale: str = ""
    ) -> None:
        self.rules, self.page, self.dtype, self.scale = rules, page, dtype, scale
        self.widths = {"k": rules.width_qk} | ({} if latent else {"v": rules.width_v})
        self.new = dict(self.widths)  # head dimensions of new keys and values
        self.whole = 2 if dtype else 1  # row strides must be multiples of this, because kernels read as many as one
        if scale == "columns":
            # The ends of numbers and of factors in a row, in bytes.
            self.ends = (rules.width_v, rules.width_v + 4 * (rules.width_v // GROUP))
            self.widths, self.whole = {"k": self.ends[1] + 2 * (rules.width_qk - rules.width_v)}, 4
        rows = "B, S" if page is None else f"pages, {page or 'page_size'}"
        self.shapes = {f"{name}_cache": f"[{rows}, Hkv, {width}]" for name, width in self.widths.items()}
        # The last valid call: a guard and the layouts of its tensors; its factors; and, if it stored keys, the bytes
        # between its caches and how many bytes suffice so that they do not overlap.
        self.last: tuple[Callable[..., bool], list[Layout]] = (lambda *tensors: False), []
        self.last_scales: list[Any] = []
        self.distance = (0, 0)

    def admit(
        self,
        q: torch.Tensor,
        caches: Tensors,
        cache_seqlens: torch.Tensor,
        page_table: torch.Tensor | None,
        new: tuple[torch.Tensor | None, ...],
        scales: Tensors = (),
        inputs: tuple[Any, ...] = (),
    ) -> tuple[torch.Tensor, Tensors, Tensors]:
        """Return q as kernels read it; the caches with heads before rows; and new keys and values, () if there are
        none.

        caches: of keys, and of values unless these are columns of the keys; new: new keys, and values, in the same
        order; scales: the factors of 8-bit caches; inputs: tensors that mask and scores read, which may require a
        gradient. Kernels read two numbers of an 8-bit cache as one of 16 bits.

        Raises:
            ValueError, TypeError or NotImplementedError: one sentence that names the argument, what it is and what was
            expected.
        """
        without_backward(q, *caches, *new, *scales, *inputs)
        given_new = tuple(x for x in new if x is not None)
        table = () if page_table is None else (page_table,)
        rest = (cache_seqlens, *table, *given_new)
        if (page_table is None) != (self.page is None) or not (
            self._knows(q, *caches, *rest) and self._knows_scales(scales)
        ):
            self._check(q, caches, cache_seqlens, page_table, new)
            self._check_scales(q, caches[0], scales)
            if q.stride(3) != 1 or (q.stride(2) > MAX_ROW_STRIDE and q.shape[2] > 1) or q.is_neg():
                q = q.resolve_neg().contiguous()
            self._remember(q, *caches, *rest)
            self.distance = _distance(caches) if given_new else (0, 0)
            self.last_scales = [_kind_of(x) for x in scales]
        if self.scale == "columns":
            return q, self._parts_of_rows(caches[0].transpose(1, 2), q.dtype), given_new
        if self.dtype is not None:
            return q, tuple(cache.view(torch.int16).transpose(1, 2) for cache in caches), given_new
        return q, tuple(cache.transpose(1, 2) for cache in caches), given_new

    def _parts_of_rows(self, rows: torch.Tensor, dtype: torch.dtype) -> Tensors:
        """Split rows of bytes into pairs of numbers as 16-bit integers, the rotated columns, and the factors."""
        numbers, factors = self.ends
        return (
            rows[..., :numbers].view(torch.int16),
            rows[..., factors:].view(dtype),
            rows[..., numbers:factors].view(torch.float32),
        )

    def _knows(self, *tensors: Any) -> bool:
        """True if the tensors of a call are like those of the last valid call: in kind, sizes and strides, and with
        caches at multiples of 16 bytes that do not overlap if keys are stored. This is the fast form of `_check`."""
        like, layouts = self.last
        try:
            alike = [(x.shape, x.stride()) for x in tensors] == layouts
        except (AttributeError, TypeError, RuntimeError):  # not tensors, or sparse or nested ones
            return False
        caches = tensors[1 : 1 + len(self.widths)]
        odd = any(x.storage_offset() % self.whole for x in caches)
        if not alike or odd or is_watched() or not like(*tensors):
            return False
        starts, (known, enough) = [x.data_ptr() for x in caches], self.distance
        between = starts[-1] - starts[0]
        return not any(start % 16 for start in starts) and (between == known or abs(between) >= enough)

    def _knows_scales(self, scales: Tensors) -> bool:
        """True if factors are like those of the last valid call. One tensor may be passed for both."""
        try:
            return [_kind_of(x) for x in scales] == self.last_scales
        except (AttributeError, TypeError, RuntimeError):
            return False

    def _remember(self, *tensors: torch.Tensor) -> None:
        """Store a guard of the tensors of a valid call. Guards do not support a tensor that is passed twice."""
        if guard_of is not None and len(set(map(id, tensors))) == len(tensors) and not is_watched():
            self.last = guard_of(*tensors), [(x.shape, x.stride()) for x in tensors]

    def _check(
        self,
        q: torch.Tensor,
        caches: Tensors,
        cache_seqlens: torch.Tensor,
        page_table: torch.Tensor | None,
        new: tuple[torch.Tensor | None, ...],
    ) -> None:
        """Raise ValueError or TypeError, in one sentence, for the first invalid argument."""
        self._check_queries(q)
        self._check_cache(q, caches)
        self._check_numbers("cache_seqlens", cache_seqlens, q, [q.shape[0]], "[B]")
        if self.page is not None:
            self._check_numbers("page_table", page_table, q, [q.shape[0], None], "[B, max_pages]")
            assert page_table is not None
            if page_table.shape[1] * caches[0].shape[1] > MAX_ROWS:
                given = f"has room for {page_table.shape[1]} pages of {caches[0].shape[1]} keys"
                raise _error(ValueError, "page_table", given, "at most 2**29 - 1 keys of a sequence")
        rows: int | None = None
        for name, x, cache in zip(self.widths, new if any(x is not None for x in new) else (), caches):
            self._check_new(name, x, q, cache, [rows])
            assert x is not None
            rows = x.shape[2]
        if rows is not None:
            self._check_stored(caches, page_table)

    def _check_scales(self, q: torch.Tensor, k_cache: torch.Tensor, scales: Tensors) -> None:
        shape = [k_cache.shape[0], k_cache.shape[2]] if self.scale == "page" else [k_cache.shape[2]]
        text = "[pages, Hkv]" if self.scale == "page" else "[Hkv]"
        for name, x in zip(("k_scale", "v_scale"), scales):
            if not _is_dense(x) or x.dtype is not torch.float32 or x.device != q.device:
                given = f"is {x.dtype} on {x.device}" if _is_dense(x) else f"is a {kind(x)}"
                raise _error(TypeError, name, given, f"torch.float32 {text} on {q.device}, as q is")
            if list(x.shape) != shape:
                raise _error(ValueError, name, f"has shape {list(x.shape)}", f"{text}, and the cache has {shape}")
            if x.shape[-1] > 1 and x.stride(-1) != 1:
                raise _error(
                    ValueError, name, f"has strides {list(x.stride())}", "1 for the last dimension: call .contiguous()"
                )
            if x.is_neg():
                raise _error(
                    ValueError, name, "is a negated view", "numbers as they lie in memory: call .resolve_neg()"
                )

    def _check_queries(self, q: torch.Tensor) -> None:
        expected = f"[B, Hq, Nq, {self.rules.width_qk}]"
        if not _is_dense(q):
            raise _error(TypeError, "q", f"is a {kind(q)}", f"a dense tensor {expected}")
        if q.dim() != 4 or q.shape[3] != self.rules.width_qk:
            raise _error(ValueError, "q", f"has shape {list(q.shape)}", expected)
        if q.dtype not in self.rules.dtypes:
            known = " or ".join(map(str, self.rules.dtypes))
            raise _error(TypeError, "q", f"is {q.dtype}", f"{known}, which this module was built for")
        self.rules.check_device("q", q)

    def _check_cache(self, q: torch.Tensor, caches: Tensors) -> None:
        rules, k_cache = self.rules, caches[0]
        for (name, width), x in zip(self.widths.items(), caches):
            self._check_rows(q, f"{name}_cache", x, width)
        if any(x.shape[:3] != k_cache.shape[:3] for x in caches):
            given = f"have shapes {' and '.join(str(list(x.shape)) for x in caches)}"
            raise _error(ValueError, "k_cache and v_cache", given, "one number of rows and heads in both")
        if self.page is None and k_cache.shape[0] != q.shape[0]:
            raise _error(ValueError, "k_cache", f"has {k_cache.shape[0]} sequences", f"{q.shape[0]}, as many as q has")
        if self.page and k_cache.shape[1] != self.page:
            raise _error(
                ValueError, "k_cache", f"has pages of {k_cache.shape[1]} keys", f"{self.page}, as the spec says"
            )
        hq, hk = q.shape[1], k_cache.shape[2]
        if (hq != hk) if rules.sharing == "mha" else hk != 1 if rules.sharing == "mqa" else (hq % hk if hk else hq):
            raise _error(
                ValueError,
                "q",
                f"has {hq} heads and k_cache {hk}",
                f"heads that are shared as the spec says, {rules.sharing}",
            )

    def _check_rows(self, q: torch.Tensor, name: str, x: torch.Tensor, width: int) -> None:
        if not _is_dense(x):
            raise _error(TypeError, name, f"is a {kind(x)}", f"a dense tensor {self.shapes[name]}")
        if x.dim() != 4 or x.shape[3] != width:
            raise _error(ValueError, name, f"has shape {list(x.shape)}", self.shapes[name])
        if x.dtype != (self.dtype or q.dtype) or x.device != q.device:
            expected = (
                f"{self.dtype} on {q.device}, the device of q" if self.dtype else f"{q.dtype} on {q.device}, as q is"
            )
            raise _error(TypeError, name, f"is {x.dtype} on {x.device}", expected)
        if not _is_near(x, 1):
            raise _error(ValueError, name, f"has strides {list(x.stride())}", _NEAR)
        if self.dtype and (x.storage_offset() % self.whole or any(step % self.whole for step in x.stride()[:3])):
            given = f"starts at element {x.storage_offset()} of its storage and has strides {list(x.stride())}"
            numbers = f"multiples of {self.whole}" if self.whole > 2 else "even numbers"
            raise _error(
                ValueError, name, given, f"{numbers}, as kernels read {self.whole} elements as one: call .clone()"
            )
        unit = 16 // x.element_size()  # TMA needs rows at multiples of 16 bytes
        if x.data_ptr() % 16 or any(step % unit for n, step in zip(x.shape[:3], x.stride()) if n > 1):
            raise _error(
                ValueError,
                name,
                f"starts at {x.data_ptr()} and has strides {list(x.stride())}",
                "rows at multiples of 16 bytes",
            )
        if x.shape[1] > MAX_ROWS or (self.page is not None and x.shape[1] < 1):
            raise _error(
                ValueError,
                name,
                f"has {x.shape[1]} rows",
                "1 to 2**29 - 1" if self.page is not None else "at most 2**29 - 1",
            )

    def _check_stored(self, caches: Tensors, page_table: torch.Tensor | None) -> None:
        """Raise ValueError, in one sentence, if stored keys would overwrite others."""
        for name, x in zip(self.shapes, caches):
            if x.numel() and _repeats_elements(x):
                given = f"has strides {list(x.stride())}, by which elements share memory"
                raise _error(
                    ValueError, name, given, "a place for each element, as new keys are stored: call .contiguous()"
                )
        if any(map(torch.Tensor.numel, caches)) and _share_memory(caches[0], caches[-1]) and len(caches) > 1:
            raise _error(
                ValueError, "k_cache and v_cache", "share memory", "two caches that share none, as new keys are stored"
            )
        if page_table is not None and page_table.shape[0] > 1 and not page_table.stride(0):
            given = f"has strides {list(page_table.stride())}, by which all sequences have the same pages"
            raise _error(ValueError, "page_table", given, "pages of its own for each, as new keys are stored")

    def _check_numbers(
        self, name: str, x: torch.Tensor | None, q: torch.Tensor, shape: list[int | None], text: str
    ) -> None:
        if not isinstance(x, torch.Tensor) or x.dtype is not torch.int32:
            given = f"is {x.dtype}" if isinstance(x, torch.Tensor) else f"is a {kind(x)}"
            raise _error(TypeError, name, given, f"torch.int32 {text}, on the device")
        if x.dim() != len(shape) or any(n is not None and n != m for m, n in zip(x.shape, shape)):
            raise _error(ValueError, name, f"has shape {list(x.shape)}", f"{text}, and q has B = {q.shape[0]}")
        if x.device != q.device:
            raise _error(ValueError, name, f"is on {x.device} and q on {q.device}", "one device")
        if x.shape[-1] > 1 and x.stride(-1) != 1:
            raise _error(
                ValueError, name, f"has strides {list(x.stride())}", "1 for the last dimension: call .contiguous()"
            )

    def _check_new(
        self, name: str, x: torch.Tensor | None, q: torch.Tensor, cache: torch.Tensor, rows: list[int | None]
    ) -> None:
        text = f"[{q.shape[0]}, {cache.shape[2]}, new, {self.new[name]}]"
        if x is None or not _is_dense(x):
            expected = f"both k and v, {text}, or neither" if "v" in self.widths else f"a dense tensor {text}"
            raise _error(TypeError, name, f"is a {kind(x)}", expected)
        shape = [q.shape[0], cache.shape[2], *rows, self.new[name]]
        if x.dim() != 4 or any(n is not None and n != m for m, n in zip(x.shape, shape)):
            alike = ", with as many new ones in k and v" if "v" in self.widths else ""
            raise _error(ValueError, name, f"has shape {list(x.shape)}", text + alike)
        if x.dtype != q.dtype or x.device != cache.device:
            expected = f"{q.dtype} on {cache.device}, as {'q' if self.dtype else 'the cache'} is"
            raise _error(TypeError, name, f"is {x.dtype} on {x.device}", expected)
        if not _is_near(x, 2):
            raise _error(ValueError, name, f"has strides {list(x.stride())}", f"{_NEAR}: call .contiguous()")


@on_its_device
def call_with_cache(
    q: torch.Tensor,
    caches: Tensors,
    new: Tensors,
    of_cache: Tensors,
    operands: tuple[Any, ...],
    append: Any,
    decode: Any,
    interpreted: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a call with a KV cache, and return (out, lse): the host program `append`, if there are new keys, and then
    `decode`.

    caches: of keys, and of values; new: new keys and values. of_cache: the lengths, and the page table and the factors
    if there are any. operands: the other arguments of `decode`.
    """
    appended, dtype = 0, q.dtype
    if new:
        append(*new, *caches, *of_cache)
        appended = new[0].shape[2]
    if interpreted and dtype not in OF_NUMPY:
        q, caches = q.float(), tuple(cache.float() if cache.is_floating_point() else cache for cache in caches)
    out, lse = decode(q, *caches, *of_cache, *operands, appended)
    return out.to(dtype), lse
