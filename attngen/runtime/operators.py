"""A module's operators of torch.library: torch traces calls of them, and autograd records them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from attngen.runtime.checks import Shapes, is_plain
from attngen.runtime.memory import addressable, no_rows, on_its_device, rows_layout
from attngen.runtime.private import apply_of, below_autograd, in_forward_ad

Results = tuple[torch.Tensor, ...]
_OF_NUMPY = (torch.float16, torch.float32)


class Signature(NamedTuple):
    """The arguments of a module's operators after q, k and v.

    schema: their declarations, as in "Tensor slope, float scale". The first `tensors` of them are tensors.
    learned: the positions of those that get gradients.
    summed: the dQ kernel writes parts of such a gradient, so it has to run for it, too.
    unordered: the names of those whose gradients are added up atomically, in no fixed order.
    results: the dtype of outputs, if it is not that of q.
    """

    schema: str
    tensors: int
    widths: tuple[int, int]  # head dimensions of q and k, and of v
    learned: tuple[int, ...] = ()
    summed: bool = False
    unordered: tuple[str, ...] = ()
    results: torch.dtype | None = None


def _second_derivatives(*args: Any) -> Any:
    raise RuntimeError(
        "attention: its gradients cannot be differentiated again; expected first derivatives alone, "
        "or naive attention where second ones are needed"
    )


def _refuse_vmap(info: Any, in_dims: Any, *args: Any) -> Any:
    raise NotImplementedError(
        "attention: torch.func.vmap cannot map it; expected the mapped dimension as part of B, the first of all tensors"
    )


def refuse_gradients(*tensors: Any) -> None:
    """Raise NotImplementedError, in one sentence, if a call of a module without a backward wants gradients of some of these."""
    if torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in tensors):
        _without_backward()


def _without_backward(*args: Any, **more: Any) -> None:
    raise NotImplementedError("attention: this module has no backward (its spec says `backward: false`); call it under torch.no_grad()")


def _wants_order() -> bool:
    """Whether torch is told to raise where an algorithm is not deterministic."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def _rows(x: torch.Tensor, width: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A stand-in for `empty_rows` under tracers: the same shape and strides, made by a public operator."""
    shape, strides = rows_layout(addressable(x), width)
    return torch.empty_strided(shape, strides, dtype=dtype or x.dtype, device=x.device)


class Operators:
    """The operators `attngen::NAME_forward` and `attngen::NAME_backward` of a module, which run its host programs.

    The host programs are `forward(q, k, v, *operands, shapes=None) -> (out, lse)` and `backward(grad_out, grad_lse, q, k, v, out, lse,
    *operands, need_q, need_kv[, need_inputs]) -> (dq, dk, dv, *gradients)`. They get tensors that kernels can read in place. A module whose
    `backward` is None has no such operator. If another copy of the module has registered NAME, a `_` is added to it.
    """

    def __init__(
        self, name: str, signature: Signature, forward: Callable[..., Results], backward: Callable[..., Results] | None, interpreted: bool
    ) -> None:
        self.library = torch.library.Library("attngen", "FRAGMENT")
        while hasattr(torch.ops.attngen, f"{name}_forward"):
            name += "_"
        self.name, self.signature, self.interpreted = name, signature, interpreted
        self.learned = tuple(3 + i for i in signature.learned)  # among all arguments
        self.numbers_at = 3 + signature.tensors  # where those arguments begin that are no tensors
        self.host_forward: Any = forward
        self.host_backward: Any = backward
        self.run_backward = on_its_device(self._backward)
        operands, learned = signature.schema, signature.learned
        results = "".join(f", Tensor d_{i}" for i in range(len(learned)))
        needs = "bool need_q, bool need_kv" + (", bool need_inputs" if learned else "")
        saved = f"Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {operands}"
        self.forward = self.define(
            "forward", f"(Tensor q, Tensor k, Tensor v, {operands}) -> (Tensor out, Tensor lse)", self._forward, self.fake_forward
        )
        self.backward: Any = backward and self.define(
            "backward",
            f"(Tensor grad_out, Tensor? grad_lse, {saved}, {needs}) -> (Tensor dq, Tensor dk, Tensor dv{results})",
            self._backward,
            self._fake_backward,
        )
        # Calls that autograd records: of the operator; of the host program, for the output alone and for both results.
        self.recorded = _recorded_calls(self, self._run_operator, with_lse=True)
        self.apply = apply_of(_recorded_calls(self, forward, with_lse=False))
        self.apply_with_lse = apply_of(_recorded_calls(self, forward, with_lse=True))
        self._register_autograd()

    def define(self, what: str, schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
        """Define an operator: `kernel` runs it, `fake` gives results of the right shapes under tracers."""
        self.library.define(f"{self.name}_{what}{schema}")
        op = getattr(getattr(torch.ops.attngen, f"{self.name}_{what}"), "default")  # noqa: B009 - typed as a module
        self.library.impl(op, on_its_device(kernel), "CompositeExplicitAutograd")
        torch.library.register_fake(op.name(), fake, lib=self.library)
        torch.library.register_vmap(op.name(), _refuse_vmap, lib=self.library)
        return op

    def __call__(
        self, shapes: Shapes | None, return_lse: bool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *operands: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(out, lse). With `shapes`, q, k and v are plain and readable in place, on the current device: no dispatcher is needed."""
        if shapes is None or (self.interpreted and q.dtype not in _OF_NUMPY):
            return self._through_dispatcher(q, k, v, *operands)
        learned = self.signature.learned
        wanted = q.requires_grad or k.requires_grad or v.requires_grad or (learned and any(operands[i].requires_grad for i in learned))
        if (wanted and torch.is_grad_enabled()) or in_forward_ad(q, k, v):
            if return_lse:
                return self.apply_with_lse(q, k, v, *operands, shapes)
            return self.apply(q, k, v, *operands, shapes), None
        return self.host_forward(q, k, v, *operands, shapes)

    def _through_dispatcher(self, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Call the operator. Triton's interpreter cannot multiply what NumPy has not, such as bf16, so there it gets fp32."""
        dtype = args[0].dtype
        if self.interpreted and dtype not in _OF_NUMPY:
            args = tuple(x.float() if isinstance(x, torch.Tensor) and x.dtype == dtype else x for x in args)
        out, lse = self.forward(*args)
        return out.to(self.signature.results or dtype), lse

    # ------------------------------------------------------------------ what the dispatcher calls

    def _forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *operands: Any) -> Results:
        return self.host_forward(addressable(q), addressable(k), addressable(v), *operands)

    def _backward(
        self,
        grad_out: torch.Tensor,
        grad_lse: torch.Tensor | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        *operands: Any,
    ) -> Results:
        signature = self.signature
        if signature.unordered and operands[-1] and _wants_order():
            raise RuntimeError(
                f"attention: the gradient of {', '.join(signature.unordered)} is added atomically, in no fixed order; expected "
                "torch.use_deterministic_algorithms(False), or a spec without `deterministic: false`"
            )
        grad_lse = no_rows(lse.device) if grad_lse is None else grad_lse.resolve_neg().contiguous()
        q, k, v = addressable(q), addressable(k), addressable(v)
        saved: Sequence[Any] = (out, lse, *operands)
        if any(isinstance(x, torch.Tensor) and x.is_neg() for x in saved):  # hooks of saved tensors may give such back
            saved = [x.resolve_neg() if isinstance(x, torch.Tensor) else x for x in saved]
        return self.host_backward(addressable(grad_out), grad_lse, q, k, v, *saved)

    def fake_forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *operands: Any) -> Results:
        return _rows(q, self.signature.widths[1], self.signature.results), q.new_empty(q.shape[:3], dtype=torch.float32)

    def _fake_backward(self, grad_out: torch.Tensor, grad_lse: torch.Tensor | None, *args: Any) -> Results:
        (q, k, v, _, _, *operands), learned = args, self.signature.learned
        need_inputs = bool(learned) and operands[-1]
        need_q, need_kv = operands[-3:-1] if learned else operands[-2:]
        width_qk, width_v = self.signature.widths
        dq = _rows(q, width_qk) if need_q or (need_inputs and self.signature.summed) else q.new_empty(0)
        dk, dv = (_rows(k, width_qk), _rows(v, width_v)) if need_kv else (k.new_empty(0), v.new_empty(0))
        inputs = [operands[i] for i in learned]
        return dq, dk, dv, *(torch.empty_like(x) if need_inputs else x.new_empty((0,) * x.dim()) for x in inputs)

    # ------------------------------------------------------------------ autograd

    def _record(self, *args: Any) -> Any:
        """A call of the forward operator that autograd sees."""
        if self.backward is None:
            refuse_gradients(*args[:3], *(args[i] for i in self.learned))
        return self.recorded.apply(*args, None)

    def _run_operator(self, *args: Any) -> Results:
        """The results of the forward operator, below autograd. The last argument stands for shapes, which it is not given."""
        with below_autograd():
            return self.forward(*args[:-1])

    def _register_autograd(self) -> None:
        if below_autograd is None:
            if self.backward:
                torch.library.register_autograd(
                    self.forward.name(), _public_backward(self), setup_context=_public_setup(self), lib=self.library
                )
                torch.library.register_autograd(self.backward.name(), _second_derivatives, lib=self.library)
            else:
                name = self.forward.name()
                torch.library.register_autograd(name, _without_backward, setup_context=_without_backward, lib=self.library)
            return

        class Gradients(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *args: Any) -> Any:
                with below_autograd():
                    return self.backward(*args)

            @staticmethod
            def backward(ctx: Any, *grads: Any) -> Any:
                _second_derivatives()

        for op, record in ((self.forward, self._record), (self.backward, Gradients.apply)):
            if op:
                self.library.impl(op, _where_recorded(op, record), "Autograd")

    def save(self, ctx: Any, args: Sequence[Any], out: torch.Tensor, lse: torch.Tensor) -> None:
        """Save what the backward needs: q, k, v, the operands and the results."""
        ctx.save_for_backward(out, lse, *args[: self.numbers_at])
        ctx.numbers = args[self.numbers_at :]

    def gradients(self, ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None) -> tuple[Any, ...]:
        """The gradients of q, k, v and of each argument after them in a call; None for those that are not needed."""
        need_q, need_k, need_v, *need = ctx.needs_input_grad
        rest: list[Any] = [None] * len(need)
        if grad_out is None and grad_lse is None:
            return None, None, None, *rest
        out, lse, q, k, v, *tensors = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        learned = self.signature.learned
        needs = (need_q, need_k or need_v, any(need)) if learned else (need_q, need_k or need_v)
        direct = is_plain(q, k, v) and not torch.is_grad_enabled()  # then the operator would do nothing else
        call = self.run_backward if direct else self.backward
        dq, dk, dv, *inputs = call(grad_out, grad_lse, q, k, v, out, lse, *tensors, *ctx.numbers, *needs)
        for at, gradient in zip(learned, inputs):
            rest[at] = gradient if need[at] else None
        return dq if need_q else None, dk if need_k else None, dv if need_v else None, *rest


def _where_recorded(op: Any, record: Callable[..., Any]) -> Callable[..., Any]:
    """The autograd kernel of an operator: it calls `record` if gradients are recorded, and the operator itself otherwise."""

    def call(*args: Any) -> Any:
        if torch.is_grad_enabled() or in_forward_ad(*args):
            return record(*args)
        with below_autograd():
            return op(*args)

    return call


def _recorded_calls(operators: Operators, run: Callable[..., Results], with_lse: bool) -> type[torch.autograd.Function]:
    """The autograd function of calls that `run` computes: (q, k, v, *operands, shapes) -> out, or (out, lse)."""
    numbers_at = operators.numbers_at

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            results = run(*args)
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(*results + args[:numbers_at])  # as `save` does
            ctx.numbers = args[numbers_at:-1]
            return results if with_lse else results[0]  # one output less for autograd to track

        @staticmethod
        def backward(ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None = None) -> Any:
            return operators.gradients(ctx, grad_out, grad_lse)

    return Attention


def _public_setup(operators: Operators) -> Callable[..., None]:
    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)
        operators.save(ctx, inputs, *output)

    return setup


def _public_backward(operators: Operators) -> Callable[..., Any]:
    def backward(ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None) -> Any:
        return operators.gradients(ctx, grad_out, grad_lse)

    return backward
