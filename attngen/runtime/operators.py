"""A module's operators of torch.library, which torch can trace and autograd can record."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch

from attngen.runtime.checks import Shapes, is_plain
from attngen.runtime.memory import addressable, no_rows, on_its_device, rows_layout
from attngen.runtime.private import apply_of, below_autograd, in_forward_ad, transforms_are_active
from attngen.runtime.refusals import (
    refuse_backward,
    refuse_derivatives_of_tangents,
    refuse_forward_mode,
    refuse_gradients,
    refuse_second_derivatives,
    refuse_vmap,
)
from attngen.runtime.shards import is_dtensor, on_shards
from attngen.runtime.signature import Signature, schemas_of

Results = tuple[torch.Tensor, ...]
_OF_NUMPY = (torch.float16, torch.float32)  # dtypes that Triton's interpreter can multiply


def _wants_order() -> bool:
    """True if torch is set to raise for algorithms that are not deterministic."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def _rows(x: torch.Tensor, width: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a tensor like that of `empty_rows`, made by a public operator, for tracers."""
    shape, strides = rows_layout(addressable(x), width)
    return torch.empty_strided(shape, strides, dtype=dtype or x.dtype, device=x.device)


class Operators:
    """The operators `attngen::NAME_forward`, `attngen::NAME_backward` and `attngen::NAME_jvp` of a module, which run
    its host programs.

    The host programs are

        forward(q, k, v, *operands, shapes=None) -> (out, *rows)
        backward(grad_out, *grad_rows, q, k, v, out, *kept, *operands, need_q, need_kv[, need_inputs])
            -> (dq, dk, dv, *gradients)
        jvp(q, k, v, out, *kept, tq, tk, tv, *operands, *tangents) -> (tangent_out, *tangent_rows)

    where grad_rows and tangent_rows are of the rows that have a gradient, and gradients and tangents are of the learned
    operands. They get tensors that kernels can read in place. A module whose `backward` or `jvp` is None has no such
    operators. If another copy of the module has registered NAME, a `_` is appended to it.

    Operators exist until the process ends, because graphs of torch hold them but not the module; see `release` for the
    exception.
    """

    def __init__(
        self,
        name: str,
        signature: Signature,
        forward: Callable[..., Results],
        backward: Callable[..., Results] | None,
        jvp: Callable[..., Results] | None,
        interpreted: bool,
    ) -> None:
        self.library = torch.library.Library("attngen", "FRAGMENT")
        self._registered: list[Callable[..., Any]] = []
        self._root = [self]  # the dispatcher holds this list, and through it this object
        self._traced = False
        while hasattr(torch.ops.attngen, f"{name}_forward"):
            name += "_"
        self.name, self.signature, self.interpreted = name, signature, interpreted
        self.learned = tuple(3 + i for i in signature.learned)  # positions among all arguments
        self.numbers_at = 3 + signature.tensors  # position of the first argument that is not a tensor
        self.host_forward: Any = forward
        self.host_backward: Any = backward
        self.host_jvp: Any = jvp
        self.run_backward = on_its_device(self._backward)
        read = signature.kept or signature.smooth
        self.smooth, self.kept = len(signature.smooth), len(read)
        # Takes the output and the kept rows out of the results.
        self.keep = itemgetter(0, *(1 + signature.rows.index(name) for name in read))
        of_forward, of_backward, of_jvp = schemas_of(signature)
        self.forward = self.define("forward", of_forward, self._forward, self.fake_forward)
        self.backward: Any = backward and self.define("backward", of_backward, self._backward, self._fake_backward)
        self.jvp: Any = jvp and self.define("jvp", of_jvp, self._jvp, self._fake_jvp)
        # Calls that autograd records: of the operator; of the host program, for only the output and for all results.
        self.recorded = _recorded_operator(self)
        self.recorded_backward: Any = backward and _recorded_once(self.backward, refuse_second_derivatives)
        self.recorded_jvp: Any = jvp and _recorded_once(self.jvp, refuse_derivatives_of_tangents)
        self.apply = apply_of(_recorded_calls(self, forward, with_rows=False))
        self.apply_with_rows = apply_of(_recorded_calls(self, forward, with_rows=True))
        self.no_rows = (None,) * len(signature.rows)
        self._register_autograd()

    def define(self, suffix: str, schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
        """Define the operator NAME_suffix: `kernel` runs it, `fake` returns results of the right shapes to tracers."""
        self.library.define(f"{self.name}_{suffix}{schema}")
        op = getattr(getattr(torch.ops.attngen, f"{self.name}_{suffix}"), "default")  # noqa: B009 - typed as a module
        self.library.impl(op, self._weak(on_its_device(kernel)), "CompositeExplicitAutograd")
        torch.library.register_fake(op.name(), self._weak(self._noting(fake)), lib=self.library)
        torch.library.register_vmap(
            op.name(), functools.partial(weakref.proxy(refuse_vmap), self._root), lib=self.library
        )
        return op

    def _weak(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a weak proxy of a function for the dispatcher, so that the dispatcher does not keep alive what the
        function holds. The function lives as long as this object."""
        self._registered.append(function)
        made: Callable[..., Any] = weakref.proxy(function)
        return made

    def _noting(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with a note that a tracer has called it: from then on the operators are kept."""

        def traced(*args: Any) -> Any:
            self._traced, self._root[:] = True, [self]
            return fake(*args)

        return traced

    def release(self) -> None:
        """Allow the operators and the module to be freed once nothing in Python holds the module. Calls that autograd
        recorded hold it.

        Operators that a tracer has seen are kept, because its graph holds only the operators, and would call freed
        ones. The caller has to know that none was traced with real tensors, which is not seen here, and that no CUDA
        graph has captured a call.
        """
        if not self._traced:
            self._root.clear()

    def __call__(
        self,
        shapes: Shapes | None,
        return_rows: bool,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *operands: Any,
    ) -> tuple[torch.Tensor | None, ...]:
        """Return (out, *rows); without `return_rows` the rows may be None.

        With `shapes`, q, k and v are plain and readable in place, on the current device, so no dispatcher is needed.
        """
        if shapes is None or in_forward_ad(q, k, v) or (self.interpreted and q.dtype not in _OF_NUMPY):
            return self._through_dispatcher(q, k, v, *operands)
        learned = self.signature.learned
        needed = (
            q.requires_grad
            or k.requires_grad
            or v.requires_grad
            or (learned and any(operands[i].requires_grad for i in learned))
        )
        if needed and torch.is_grad_enabled():
            if return_rows:
                return self.apply_with_rows(q, k, v, *operands, shapes)
            return self.apply(q, k, v, *operands, shapes), *self.no_rows
        return self.host_forward(q, k, v, *operands, shapes)

    def define_key_mass(self, schema: str, kernel: Callable[..., Any]) -> Any:
        """Define `attngen::NAME_key_mass`, (q, k, lse, *operands) -> [B, Hq, Nk] fp32, which the host program
        `kernel` computes."""

        def run(*args: Any) -> Any:
            q, k, *rest = self._multiplied(*args)
            return kernel(addressable(q), addressable(k), *rest)

        def fake(q: torch.Tensor, k: torch.Tensor, *rest: Any) -> torch.Tensor:
            return q.new_empty((*q.shape[:2], k.shape[2]), dtype=torch.float32)

        return self.define("key_mass", schema, run, fake)

    def _multiplied(self, *args: Any) -> tuple[Any, ...]:
        """Return the arguments in dtypes that can be multiplied. Triton's interpreter cannot multiply dtypes that NumPy
        lacks, such as bf16: it gets fp32 instead."""
        dtype = args[0].dtype
        if self.interpreted and dtype not in _OF_NUMPY:
            return tuple(x.float() if isinstance(x, torch.Tensor) and x.dtype == dtype else x for x in args)
        return args

    def _through_dispatcher(self, *args: Any) -> Results:
        """Call the operator; in the interpreter, with dtypes that it can multiply. A transform of torch.func sees the
        recorded call instead."""
        if any(map(is_dtensor, args[:3])):
            return self._on_shards(*args)
        dtype, args = args[0].dtype, self._multiplied(*args)
        out, *rows = self.recorded.apply(*args) if _is_transformed() else self.forward(*args)
        return out.to(self.signature.results or dtype), *rows

    def _on_shards(self, *args: Any) -> Results:
        """Run a call with DTensors: the operator on each rank's shards."""
        tensors, numbers = args[: self.numbers_at], args[self.numbers_at :]
        if any(
            x is not None and "? seed" in declared
            for x, declared in zip(tensors[3:], self.signature.schema.split(", "))
        ):
            raise NotImplementedError(
                "attention: dropout counts sequences and heads from 0 on each rank, so that all would drop the same "
                "weights; expected dropout_p=0 of DTensors, or a call of local tensors with a seed for each rank"
            )
        dims = [dims.split() for dims in self.signature.dims]
        return tuple(on_shards(self._through_dispatcher, self.signature.shards, tensors, dims, numbers))

    # ------------------------------------------------------------------ what the dispatcher calls

    def _forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *operands: Any) -> Results:
        return self.host_forward(addressable(q), addressable(k), addressable(v), *operands)

    def _backward(self, grad_out: torch.Tensor, *args: Any) -> Results:
        """Run the host program. `args`: the gradients of rows, None for zero; q, k and v; the output, the rows, the
        operands; which gradients are needed."""
        signature = self.signature
        grad_rows, (q, k, v, *saved) = args[: self.smooth], args[self.smooth :]
        if signature.unordered and saved[-1] and _wants_order():
            raise RuntimeError(
                f"attention: the gradient of {', '.join(signature.unordered)} is added atomically, in no fixed order; "
                "expected torch.use_deterministic_algorithms(False), or a spec without `deterministic: false`"
            )
        grad_rows = tuple(no_rows(q.device) if x is None else x.resolve_neg().contiguous() for x in grad_rows)
        q, k, v = addressable(q), addressable(k), addressable(v)
        if any(isinstance(x, torch.Tensor) and x.is_neg() for x in saved):  # hooks of saved tensors may return these
            saved = [x.resolve_neg() if isinstance(x, torch.Tensor) else x for x in saved]
        return self.host_backward(addressable(grad_out), *grad_rows, q, k, v, *saved)

    def _jvp(self, q: torch.Tensor, *args: Any) -> Results:
        """Run the host program. `args`: k, v, the output, the rows; tangents of q, k and v; the operands; tangents of
        learned operands."""
        rows, numbers = 3 + self.kept, len(self.signature.learned)
        k, v, out = map(addressable, args[:3])
        tangents = map(addressable, args[rows : rows + 3])
        operands, learned = args[rows + 3 : len(args) - numbers], map(_by_elements, args[len(args) - numbers :])
        return self.host_jvp(
            addressable(q), k, v, out, *map(_by_elements, args[3:rows]), *tangents, *operands, *learned
        )

    def _fake_jvp(self, q: torch.Tensor, *args: Any) -> Results:
        out, *rows = self.fake_forward(q, q, q)
        return out, *rows[: self.smooth]

    def fake_forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *operands: Any) -> Results:
        rows = (q.new_empty(q.shape[:3], dtype=torch.float32) for _ in self.signature.rows)
        return _rows(q, self.signature.widths[1], self.signature.results), *rows

    def _fake_backward(self, grad_out: torch.Tensor, *args: Any) -> Results:
        (q, k, v), learned = args[self.smooth : self.smooth + 3], self.signature.learned
        operands = args[self.smooth + 4 + self.kept :]  # after the output and the rows
        need_inputs = bool(learned) and operands[-1]
        need_q, need_kv = operands[-3:-1] if learned else operands[-2:]
        width_qk, width_v = self.signature.widths
        dq = _rows(q, width_qk) if need_q or (need_inputs and self.signature.summed) else q.new_empty(0)
        dk, dv = (_rows(k, width_qk), _rows(v, width_v)) if need_kv else (k.new_empty(0), v.new_empty(0))
        inputs = [operands[i] for i in learned]
        return dq, dk, dv, *(torch.empty_like(x) if need_inputs else x.new_empty((0,) * x.dim()) for x in inputs)

    # ------------------------------------------------------------------ autograd

    def _record(self, *args: Any) -> Any:
        """Call the forward operator so that autograd records it."""
        if self.backward is None:
            refuse_gradients(*args[:3], *(args[i] for i in self.learned))
        return self.recorded.apply(*args)

    def _register_autograd(self) -> None:
        if below_autograd is None:
            if self.backward:
                torch.library.register_autograd(
                    self.forward.name(), _public_backward(self), setup_context=_public_setup(self), lib=self.library
                )
                torch.library.register_autograd(self.backward.name(), refuse_second_derivatives, lib=self.library)
                if self.jvp:
                    torch.library.register_autograd(self.jvp.name(), refuse_derivatives_of_tangents, lib=self.library)
            else:
                name = self.forward.name()
                torch.library.register_autograd(name, refuse_backward, setup_context=refuse_backward, lib=self.library)
            return
        self.library.impl(self.forward, self._weak(_where_recorded(self.forward, self._record)), "Autograd")
        if self.backward:
            self.library.impl(
                self.backward, self._weak(_where_recorded(self.backward, self.recorded_backward.apply)), "Autograd"
            )
        if self.jvp:
            self.library.impl(self.jvp, self._weak(_where_recorded(self.jvp, self.recorded_jvp.apply)), "Autograd")

    def save(self, ctx: Any, args: Sequence[Any], results: Results) -> None:
        """Save what the backward and forward mode need: q, k, v, the operands, the output and the rows that they
        read."""
        saved = (*self.keep(results), *args[: self.numbers_at])
        ctx.save_for_backward(*saved)
        if in_forward_ad(*saved):
            ctx.save_for_forward(*saved)
        ctx.numbers = args[self.numbers_at :]
        if self.signature.flat:
            ctx.mark_non_differentiable(*results[1 + self.smooth :])

    def tangents(self, ctx: Any, *tangents: torch.Tensor | None) -> tuple[Any, ...]:
        """Return the tangents of the output and of the rows, from those of the arguments; None for rows without one.

        Raise NotImplementedError, in one sentence, for a tangent of an input that has no gradient either.
        """
        if self.jvp is None:
            refuse_forward_mode()
        saved, at = ctx.saved_tensors, 1 + self.kept
        q, k, v, *tensors = saved[at:]
        for i, tangent in enumerate(tangents[3 : self.numbers_at]):
            if tangent is not None and i not in self.signature.learned:
                name = self.signature.schema.split(", ")[i].split()[-1]
                raise NotImplementedError(
                    f"attention: {name} has a tangent; expected one only of q, k, v and inputs with `grad: true` in "
                    "the spec"
                )
        given = [_tangent(x, t) for x, t in zip((q, k, v), tangents)]
        learned = [_tangent(tensors[i], tangents[3 + i]) for i in self.signature.learned]
        call = self.recorded_jvp.apply if _is_transformed() else self.jvp
        # Results are detached, because otherwise autograd would record a path from tangents to results.
        results = (x.detach() for x in saved[:at])
        found = call(q, k, v, *results, *given, *tensors, *ctx.numbers, *learned)
        return *found, *[None] * self.signature.flat

    def gradients(self, ctx: Any, grad_out: torch.Tensor | None, *grad_rows: torch.Tensor | None) -> tuple[Any, ...]:
        """Return the gradients of q, k, v and of each argument after them; None for those that are not needed."""
        need_q, need_k, need_v, *need = ctx.needs_input_grad
        rest: list[Any] = [None] * len(need)
        grad_rows = (*grad_rows, *self.no_rows)[: self.smooth]  # a call for only the output has none
        if grad_out is None and all(x is None for x in grad_rows):
            return None, None, None, *rest
        saved = ctx.saved_tensors
        (out, *rows), (q, k, v, *tensors) = saved[: 1 + self.kept], saved[1 + self.kept :]
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        learned = self.signature.learned
        needs = (need_q, need_k or need_v, any(need)) if learned else (need_q, need_k or need_v)
        if is_plain(q, k, v):
            call = self.backward if torch.is_grad_enabled() else self.run_backward  # without gradients both are equal
        else:
            call = self.recorded_backward.apply if _is_transformed() else self.backward
        dq, dk, dv, *inputs = call(grad_out, *grad_rows, q, k, v, out, *rows, *tensors, *ctx.numbers, *needs)
        for at, gradient in zip(learned, inputs):
            rest[at] = gradient if need[at] else None
        return dq if need_q else None, dk if need_k else None, dv if need_v else None, *rest


def _is_transformed() -> bool:
    """True if a transform of torch.func is active. It sees autograd functions, but not what is below an operator."""
    return not torch.compiler.is_compiling() and below_autograd is not None and transforms_are_active()


def _tangent(x: torch.Tensor, tangent: torch.Tensor | None) -> torch.Tensor:
    """Return the tangent of x, or zeros if it has none."""
    return torch.zeros_like(x) if tangent is None else tangent


def _by_elements(x: torch.Tensor) -> torch.Tensor:
    """Return x, or a copy if kernels cannot read it in place: its last dimension is strided, or its sign is lazy."""
    x = x.resolve_neg()
    return x if not x.dim() or x.stride(-1) == 1 else x.contiguous()


def _where_recorded(op: Any, record: Callable[..., Any]) -> Callable[..., Any]:
    """Return the autograd kernel of an operator: it calls `record` if gradients are recorded, otherwise the operator
    itself."""

    def call(*args: Any) -> Any:
        if torch.is_grad_enabled() or in_forward_ad(*args):
            return record(*args)
        with below_autograd():
            return op(*args)

    return call


def _recorded_calls(
    operators: Operators, run: Callable[..., Results], with_rows: bool
) -> type[torch.autograd.Function]:
    """Make the autograd function of calls that `run` computes: (q, k, v, *operands, shapes) -> out, or (out, *rows)."""
    keep, numbers_at, flat, smooth = (
        operators.keep,
        operators.numbers_at,
        operators.signature.flat,
        1 + operators.smooth,
    )

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            results = run(*args)
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(*keep(results) + args[:numbers_at])  # as `save` does
            ctx.numbers = args[numbers_at:-1]
            if flat:
                ctx.mark_non_differentiable(*results[smooth:])
            return results if with_rows else results[0]  # autograd tracks fewer outputs

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
            return operators.gradients(ctx, *grads)

    return Attention


def _recorded_operator(operators: Operators) -> type[torch.autograd.Function]:
    """Make the autograd function of calls of the forward operator, (q, k, v, *operands) -> (out, *rows), for all modes
    and transforms."""

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(*args: Any) -> Any:
            with below_autograd():
                return operators.forward(*args)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.set_materialize_grads(False)
            operators.save(ctx, inputs, output)

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
            return operators.gradients(ctx, *grads)

        @staticmethod
        def jvp(ctx: Any, *tangents: torch.Tensor | None) -> Any:
            return operators.tangents(ctx, *tangents)

        vmap = staticmethod(refuse_vmap)

    return Attention


def _recorded_once(op: Any, refuse: Callable[..., Any]) -> type[torch.autograd.Function]:
    """Make the autograd function of an operator whose results cannot be differentiated again."""

    class Derivative(torch.autograd.Function):
        @staticmethod
        def forward(*args: Any) -> Any:
            with below_autograd():
                return op(*args)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        backward = staticmethod(refuse)
        jvp = staticmethod(refuse)
        vmap = staticmethod(refuse_vmap)

    return Derivative


def _public_setup(operators: Operators) -> Callable[..., None]:
    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)
        operators.save(ctx, inputs, output)

    return setup


def _public_backward(operators: Operators) -> Callable[..., Any]:
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        return operators.gradients(ctx, *grads)

    return backward
