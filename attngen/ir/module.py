"""A module: its kernels and host programs, and everything else from which its code is generated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import sympy

from attngen.ir.core import Fact, Type
from attngen.ir.dtypes import LATENT_GROUP
from attngen.ir.expr import Bool, Expr, symbol
from attngen.ir.kernel import Kernel
from attngen.ir.launch import Host
from attngen.ir.names import DIRECTIONS, FLAT, LSE, OF_KEYS, OUTPUTS, ROW_STATS, of_sequence

PHASES = ("logical", "scheduled", "target")


DEFAULT_BACKEND = "triton"  # of attngen/targets
LARGEST_UNIT = 64  # rows of a unit of a chunk: no tile of the Hopper kernels is shorter


PROMISES = ("least", "most", "first", "rising", "multiple")  # options of an input that are promises about its data


def unit_of(chunk: int) -> int:
    """Return the rows of a unit of chunks: the largest power of two that divides a chunk, at most LARGEST_UNIT.

    Kernels look up one position for each unit. A lookup for a tile whose rows are a multiple of a unit has no
    remainder. The tables stay in the L1: for a sequence of a million rows they have 64 kB.
    """
    return min(chunk & -chunk, LARGEST_UNIT)


@dataclass(frozen=True)
class Input:
    """A run-time input of the generated function: its keyword, element type, shape (empty for a number) and a line of
    help.

    options: `grad`, it gets a gradient; `broadcast`, its first dimensions may have length 1; `least=n`, numbers below n
    are refused; `size`, it is the length of the dimension with its name, and a call passes it along with the tensor.
    For a tensor of integers, options are promises about its data, which a call checks on request: `least=n` and
    `most=SIZE`, of each number; `first=n`, the first number of each row; `rising`, numbers never decrease along the
    last dimension; `multiple=n`, each number is a multiple of n."""

    name: str
    dtype: str
    shape: tuple[str, ...]
    help: str
    options: tuple[str, ...] = ()

    @property
    def grad(self) -> bool:
        return "grad" in self.options

    @property
    def broadcast(self) -> bool:
        return "broadcast" in self.options

    @property
    def is_size(self) -> bool:
        return "size" in self.options

    @property
    def least(self) -> int | None:
        return next((int(o.partition("=")[2]) for o in self.options if o.startswith("least=")), None)

    @property
    def promises(self) -> dict[str, str]:
        """The promises about a tensor's data, as arguments of `runtime.promised`: names, and the source of their
        values."""
        given = (option.partition("=") for option in self.options if self.shape)
        return {name: value or "True" for name, _, value in given if name in PROMISES}


@dataclass(frozen=True)
class Derived:
    """Tensors that the generated module computes before its kernels run.

    function: a Python function that a mask or modifier declares, or the name of a host program that returns the
    tensors, such as `@documents`.
    sources: the function's arguments: inputs, sizes, numbers, the device.
    rising: names of the tensors whose numbers never decrease along their last dimension.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[str, ...], ...]
    function: str
    sources: tuple[str, ...]
    dtype: str = "i32"
    rising: tuple[str, ...] = ()

    @property
    def program(self) -> str:
        """The name of the host program that computes them; empty if a Python function does."""
        return self.function[1:] if self.function.startswith("@") else ""


def input_tensors(inputs: tuple[Input, ...], derived: tuple[Derived, ...]) -> dict[str, Type]:
    """The types of the tensors that masks and modifiers read: inputs, and tensors derived from them."""
    given = {i.name: Type(i.dtype, i.shape) for i in inputs if i.shape}
    return given | {name: Type(d.dtype, shape) for d in derived for name, shape in zip(d.names, d.shapes)}


@dataclass(frozen=True)
class InputGradient:
    """How an input gets its gradient: a kernel writes partial gradients to the tensor `partials`, and the host sums
    them at `index`. Without an index, `partials` is the gradient itself, to which a kernel adds each element
    (`Scatter`)."""

    input: str
    index: tuple[str, ...]
    partials: str

    @property
    def by_row(self) -> bool:
        """True if there is one partial gradient for each query, which are summed over queries."""
        return self.reduction in ("query", "entry") and "q" not in self.index

    @property
    def reduction(self) -> str:
        """The kind of reduction. A partial gradient belongs to a `query`, `score`, `distance`, `element` or `entry`,
        which is a query and an index of a small dimension. `delta`: the gradient is computed from DELTA."""
        if self.partials == "DELTA":
            return "delta"
        if not self.index:
            return "element"
        if "entry" in self.index:
            return "entry"
        return "score" if "kv" in self.index else "distance" if any("distance" in e for e in self.index) else "query"

    def __str__(self) -> str:
        return f"{self.input}[{', '.join(self.index)}]" if self.index else self.input


@dataclass(frozen=True)
class Read:
    """One distinct read of a tensor parameter. In expressions, the symbol `name` stands for the element that is read.

    index: an integer expression for each dimension, over q_idx, kv_idx, b, h, hkv, Nq, Nk, scalars and names of earlier
    reads. A negative index counts from the end. A read that is still out of bounds gives 0 (false).
    """

    name: str
    tensor: str
    index: tuple[Expr, ...]


@dataclass(frozen=True)
class Meaning:
    """The mask and the score of a module, as expressions over b, h, hkv, q_idx, kv_idx, the sizes of a call and
    elements of tensors.

    where: the mask; a pair of a query and a key is visible where it holds.
    by_key: the same mask in terms of tensors over keys, for kernels whose program axis is kv; None if it is `where`.
    known: bounds on the parts of the mask that are data (see Mask).
    score: the score that the softmax sees, in terms of the scaled product `s`.
    sink: an additional logit in each row's softmax, or None.
    reads: elements that are not at (b, h, q_idx, kv_idx). The name of a tensor stands for its element there.
    """

    where: Bool = sympy.true
    by_key: Bool | None = None
    known: tuple[Fact, ...] = ()
    score: Expr = symbol("s")
    sink: Expr | None = None
    reads: tuple[Read, ...] = ()


@dataclass(frozen=True)
class Blocks:
    """The module visits only listed blocks of `size` x `size` scores. A call passes the block mask, or `pattern` names
    the function that computes it.

    data: the mask's inputs decide. The kernel `blocks` evaluates the mask, and full blocks, in which nothing is hidden,
    are listed separately from partial ones.
    """

    size: int
    pattern: str = ""
    params: tuple[tuple[str, int], ...] = ()
    data: bool = False

    def describe(self) -> str:
        """`64`, `64 local_global(local=2, globals=1)`, or `128 data`."""
        if self.data:
            return f"{self.size} data"
        given = ", ".join(f"{name}={value}" for name, value in self.params)
        return f"{self.size} {self.pattern}({given})" if self.pattern else str(self.size)


@dataclass(frozen=True)
class Cache:
    """The module also reads keys and values from a cache: one row of keys for each sequence, or pages.

    page: the keys of a page: a number, or `page_rows` if a call passes it; empty without pages.
    dtype: the element type of the cache, by its key in QUANTISED, if it is not that of q.
    scale: the 8-bit numbers that have one scale, by which they are multiplied: those of a `head`, those of a head in a
    `page`, or, in a latent, those of a group of LATENT_GROUP `columns` of a key. Rotated columns keep the element type
    of q.
    """

    page: str = ""
    dtype: str = ""
    scale: str = ""

    @property
    def rows(self) -> tuple[str, str, str]:
        """The dimensions of a tensor of the cache, without the last one."""
        return ("pages", "Hkv", self.page) if self.page else ("B", "Hkv", "Nc")

    @property
    def scales(self) -> tuple[str, ...]:
        """The dimensions of a tensor of scales; empty without scales."""
        return {"head": ("Hkv",), "page": ("pages", "Hkv"), "columns": (*self.rows, "GROUPS_V")}.get(self.scale, ())

    def describe(self) -> str:
        """`contiguous`, `paged 64` or `paged any`, followed by, for example, `fp8_e4m3 scale head`."""
        pages = f"paged {'any' if self.page == 'page_rows' else self.page}" if self.page else "contiguous"
        return f"{pages} {self.dtype} scale {self.scale}" if self.dtype else pages


@dataclass(frozen=True)
class Config:
    """One config of a kernel's schedule: tiles and launch options for a device class and an element size. It was chosen
    by the cost model, or `measured` as the fastest.

    max_rows, min_rows: it is for at most `max_rows` rows (None: any number) and more than `min_rows` rows of the axis
    that the kernel tiles, or, in a kernel that combines splits, of all heads and sequences. Only configs of
    warp-specialized kernels have `min_rows`; they go before the others.
    block_q, block_kv: rows of a tile; in a kernel that combines splits, `block_kv` is a number of splits.
    tma: TMA does the loads marked `via(descriptor)`; threads do the others.
    backend: the backend that compiles the kernel, of attngen/targets.
    columns: the columns of an accumulator that a program has, if several programs may split the head_dim; else 0.
    """

    device: str
    elem_bytes: int
    max_rows: int | None
    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int
    tma: bool = False
    measured: bool = False
    backend: str = DEFAULT_BACKEND
    min_rows: int = 0
    columns: int = 0

    @property
    def tile(self) -> str:
        """Its tile as tables show it: `64x32`, or `64x32/256` where programs split the head_dim and each has 256
        columns."""
        return f"{self.block_q}x{self.block_kv}{f'/{self.columns}' * bool(self.columns)}"

    def rows_of(self, axis: str) -> int:
        """The rows of a tile of an axis, `q` or `kv`."""
        return self.block_q if axis == "q" else self.block_kv


@dataclass(frozen=True)
class DoesNotFit:
    """Takes the place of a kernel's configs for a device class and element size for which no tile fits. `reason` is the
    sentence for the user."""

    device: str
    elem_bytes: int
    reason: str


@dataclass(frozen=True, eq=False)
class Module:
    """Everything from which a generated module is made. Templates see nothing else.

    rope: the number of rotated columns of a key, where the values of a cache are the first columns of its keys; else 0.
    outputs: outputs that calls can request besides `out`, a part of OUTPUTS in that order.
    chunk: rows of a chunk, if calls have chunks of a sequence and say where these start in the whole; else 0.
    warp_specialized: warp-specialized kernels (ir/pipe.py), which stand in for some of `kernels` under configs that
    name their backend. One may have the name of the kernel that it stands in for; others have names and schedules of
    their own.
    """

    name: str
    version: str
    spec_hash: str
    phase: str
    backend: str
    sharing: str
    head_dim_qk: int
    head_dim_v: int
    dtypes: tuple[str, ...]
    precision: str
    mask: str
    score: str
    order: str
    blocks: Blocks | None
    dropout: bool
    inputs: tuple[Input, ...]
    derived: tuple[Derived, ...]
    input_gradients: tuple[InputGradient, ...]
    kernels: tuple[Kernel, ...]
    warp_specialized: tuple[Kernel, ...] = ()
    hosts: tuple[Host, ...] = ()
    schedules: tuple[tuple[str, tuple[Config | DoesNotFit, ...]], ...] = ()
    meaning: Meaning = Meaning()
    cache: Cache | None = None
    rope: int = 0
    outputs: tuple[str, ...] = ("lse",)
    chunk: int = 0

    @property
    def widths(self) -> dict[str, int]:
        """The length of each head dimension, by its name, in tensors of a call."""
        found = {"D_QK": self.head_dim_qk, "D_V": self.head_dim_v} | ({"D_ROPE": self.rope} if self.rope else {})
        if self.cache and self.cache.dtype:
            found |= {} if self.rope else {"PAIRS_QK": self.head_dim_qk // 2}
            found |= {"PAIRS_V": self.head_dim_v // 2} | (
                {"GROUPS_V": self.head_dim_v // LATENT_GROUP} if self.rope else {}
            )
        return found

    @property
    def unit(self) -> int:
        """Rows for which kernels look up one position, if calls have chunks of a sequence."""
        return unit_of(self.chunk)

    @property
    def tensors_of_kernels(self) -> dict[str, Type]:
        """The types of inputs and of tensors derived from them, as kernels know them: Nq and Nk are the lengths of the
        whole sequence, also where calls have chunks of it."""
        found = input_tensors(self.inputs, self.derived)
        return {name: replace(t, dims=of_sequence(t.dims)) for name, t in found.items()}

    @property
    def splitting_kernel(self) -> Kernel | None:
        """The kernel among whose programs the keys of a cache are split (split-KV), or None."""
        return next((kernel for kernel in self.kernels if kernel.kv_split and kernel.traits.dots), None)

    @property
    def head_dims(self) -> tuple[tuple[str, int], ...]:
        """The head_dim of q and k, and that of v, by their names in the header."""
        return ("qk", self.head_dim_qk), ("v", self.head_dim_v)

    def kernel(self, name: str) -> Kernel:
        return next(k for k in self.kernels if k.name == name)

    def host(self, name: str) -> Host:
        return next(h for h in self.hosts if h.name == name)

    @property
    def by_query(self) -> tuple[str, ...]:
        """Its outputs that the forward computes, one number per query."""
        return tuple(name for name in self.outputs if name not in OF_KEYS)

    @property
    def row_stats(self) -> tuple[str, ...]:
        """The tensors from which, with scores, kernels recompute weights: LSE, or ROW_STATS if kernels have these."""
        return ROW_STATS if {arg.name for kernel in self.kernels for arg in kernel.args}.issuperset(ROW_STATS) else LSE

    @property
    def row_tensors(self) -> tuple[str, ...]:
        """The row vectors that the forward returns after the output. Those without a gradient come last."""
        smooth, flat = (
            [OUTPUTS[name] for name in self.by_query if (name in FLAT) == wanted] for wanted in (False, True)
        )
        return (*smooth, *(name for name in self.row_stats if name not in smooth), *flat)

    @property
    def kept(self) -> tuple[str, ...]:
        """The row vectors that the backward and forward mode read."""
        return (
            *self.row_stats,
            *(OUTPUTS[name] for name in self.by_query if name not in FLAT and OUTPUTS[name] not in LSE),
        )

    @property
    def directions(self) -> tuple[str, ...]:
        """Its host programs `forward` and, if it has one, `backward`."""
        return tuple(d for d in DIRECTIONS if any(host.name == d for host in self.hosts))

    @property
    def trains(self) -> bool:
        return "backward" in self.directions

    @property
    def has_jvp(self) -> bool:
        """True if it has forward mode."""
        return any(host.name == "jvp" for host in self.hosts)

    def kernels_of(self, direction: str) -> tuple[Kernel, ...]:
        """The kernels that most calls of a direction, `forward` or `backward`, launch."""
        names = [name for host in self.hosts if host.name == direction for name in host.common_launches()]
        return tuple(k for k in self.kernels if k.name in names)

    def configs(self, kernel: str, backend: str = "") -> tuple[Config, ...]:
        """The configs of a kernel for the module's own backend, or for another one."""
        rows = dict(self.schedules).get(kernel, ())
        return tuple(r for r in rows if isinstance(r, Config) and r.backend == (backend or self.backend))

    def stand_ins(self, kernel: str) -> list[tuple[Kernel, Config]]:
        """The warp-specialized kernels that stand in for a kernel, each with one of its configs; those for fewer rows
        come first."""
        pairs = [
            (k, row) for k in self.warp_specialized if k.stands_for == kernel for row in self.configs(k.name, k.backend)
        ]
        return sorted(pairs, key=lambda pair: pair[1].min_rows)

    def warp_specialized_named(self, name: str) -> bool:
        """True if a warp-specialized kernel has this name and the portable kernel that it replaces has another one."""
        return any(kernel.name == name and kernel.of for kernel in self.warp_specialized)

    def not_fitting(self, kernel: str) -> tuple[DoesNotFit, ...]:
        return tuple(r for r in dict(self.schedules).get(kernel, ()) if isinstance(r, DoesNotFit))

    def covers(self, x: InputGradient) -> bool:
        """True if kernels write every element of a tensor of partial gradients: one per query, with or without an index
        of a small dimension; or one per score, if no mask and no block list leaves any out. Calls that have chunks of a
        sequence write the elements of these chunks."""
        if self.chunk:
            return x.by_row
        return x.reduction in ("query", "entry") or (
            x.reduction == "score" and self.meaning.where == sympy.true and self.blocks is None
        )

    def map_kernels(self, change: Callable[[Kernel], Kernel]) -> Module:
        return replace(self, kernels=tuple(change(k) for k in self.kernels))
