"""Base of masks and score modifiers: parameters, run-time inputs, and how an expression reads them."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict

from attngen.ir import Derived, Input, Read, symbol
from attngen.lang.expression import Expression
from attngen.lang.names import ANY
from attngen.lang.params import Param
from attngen.lang.positions import position_note

if TYPE_CHECKING:
    import torch

    from attngen.ir.sizes import Sizes

Q, KV, NQ, NK = symbol("q_idx"), symbol("kv_idx"), symbol("Nq"), symbol("Nk")
# how a dimension is indexed by default
NATURAL = {"B": symbol("b"), "Hq": symbol("h"), "Hkv": symbol("hkv"), "Nq": Q, "Nk": KV}

# The largest parameter that an expression may add to positions: kernels sum it, a position and a length in 32 bits, and
# calls keep positions and lengths below 2**29.
MAX_OFFSET = 2**30 - 1


class Part(BaseModel):
    """Base of masks and modifiers. Fields of the subclass are the parameters that a spec may set."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: ClassVar[str]
    # the functions that `derived` names, whose source is copied to generated modules
    functions: ClassVar[tuple[Callable[..., Any], ...]] = ()

    def inputs(self) -> tuple[Input, ...]:
        """Run-time inputs: tensors, and scalars (inputs without a shape)."""
        return ()

    def derived(self) -> tuple[Derived, ...]:
        """Tensors that one of `functions` computes from inputs before the kernels run."""
        return ()

    def reads(self) -> tuple[Read, ...]:
        """How the expression reads tensors: by default a tensor's name denotes its element at (b, h, q, kv)."""
        tensors = [(i.name, i.shape) for i in self.inputs() if i.shape and "*" not in i.shape]
        tensors += [(name, shape) for d in self.derived() for name, shape in zip(d.names, d.shapes)]
        return tuple(Read(name, name, tuple(NATURAL[d] for d in shape)) for name, shape in tensors)

    def sample(self, sizes: Sizes, generator: torch.Generator) -> dict[str, torch.Tensor | float]:
        """Values of the inputs for a test, on the CPU: by default normal numbers, mostly true bits, and positions."""
        import torch

        found: dict[str, torch.Tensor | float] = {}
        for i in (i for i in self.inputs() if not i.is_size):
            shape = [sizes.of(d) for d in i.shape]
            if i.dtype == "b1":
                found[i.name] = torch.rand(shape, generator=generator) < 0.7
            elif i.dtype == "i32":
                least = i.least or 0
                numbers = torch.randint(
                    least, max(least, sizes.n_kv) + 1, shape, generator=generator, dtype=torch.int32
                )
                found[i.name] = numbers if shape else int(numbers)
            else:
                numbers = torch.randn(shape, generator=generator)
                found[i.name] = numbers if shape else float(numbers)
        return found

    def workload(self, sizes: Sizes, generator: torch.Generator) -> dict[str, torch.Tensor | float]:
        """Typical values of the inputs for a benchmark, on the CPU: by default those of `sample`."""
        return self.sample(sizes, generator)

    def notes(self) -> tuple[str, ...]:
        """Warnings about parts that the author may not have meant; each sentence follows the key's name."""
        return ()

    def describe(self) -> str:
        """One line for docs: the name, and the parameters that differ from their defaults."""
        given = self.model_dump(exclude_defaults=True)
        return f"{self.name}({', '.join(f'{k}={v}' for k, v in given.items())})" if given else self.name

    def data(self) -> Any:
        """Its form in a spec, with every parameter."""
        return {self.name: self.model_dump(mode="json")}


_DTYPES = {"fp32": "f32", "int32": "i32", "bool": "b1", "int": "i32", "float": "f32"}


class WrittenPart(Part):
    """A part that a spec writes out: an expression, its named parts, and its parameters."""

    name: ClassVar[str] = "expr"
    expr: str
    let: dict[str, str] = {}
    params: dict[str, Param] = {}

    @property
    def parsed(self) -> Expression:
        raise NotImplementedError

    def inputs(self) -> tuple[Input, ...]:
        return _param_inputs(self.params)

    def reads(self) -> tuple[Read, ...]:
        return self.parsed.reads

    def expression(self) -> Any:
        return self.parsed.expr

    def notes(self) -> tuple[str, ...]:
        found = map(position_note, (*self.parsed.let.values(), self.parsed.tree))
        return unique(note for note in found if note)

    def describe(self) -> str:
        parts = ", ".join(f"{name} = {' '.join(text.split())}" for name, text in self.let.items())
        return " ".join(self.expr.split()) + (f" where {parts}" if parts else "")

    def data(self) -> Any:
        let = {"let": self.let} if self.let else {}
        return {
            "expr": self.expr,
            **let,
            "params": {name: param.model_dump(mode="json") for name, param in self.params.items()},
        }


def _param_inputs(params: Mapping[str, Param]) -> tuple[Input, ...]:
    """The declared parameters of an expression that are arguments of a call."""
    found = []
    for name, param in params.items():
        if param.value is not None:
            continue
        options = ("grad",) * param.grad + ((f"least={param.min}",) if param.min is not None else ())
        dims = tuple(f"{name}_len{at or ''}" if dim == ANY else dim for at, dim in enumerate(param.dims))
        found.append(Input(name, _DTYPES[param.scalar or param.dtype], dims, "a parameter of the spec", options))
        sizes = (size for size, dim in zip(dims, param.dims) if dim == ANY)
        found += [Input(size, "i32", (), f"a length of `{name}`", ("size",)) for size in sizes]
    return tuple(found)


def evaluated(
    written: Expression, sizes: Sizes, device: torch.device, inputs: Mapping[str, Any], s: torch.Tensor | None = None
) -> torch.Tensor:
    """The expression computed by the evaluator, which shares nothing with the symbolic path; in the dtype of s."""
    import torch

    from attngen.lang.evaluate import evaluate

    values = {name: inputs[name] for name, param in written.params if param.value is None}
    dtype = torch.float64 if s is None else s.dtype
    batch, q_heads, kv_heads, n_q, n_kv = sizes
    return evaluate(
        written,
        batch=batch,
        q_heads=q_heads,
        kv_heads=kv_heads,
        n_q=n_q,
        n_kv=n_kv,
        s=s,
        values=values,
        device=device,
        dtype=dtype,
    )


SomePart = TypeVar("SomePart", bound=Part)


def discover(package: str, path: Any, base: type[SomePart]) -> dict[str, type[SomePart]]:
    """Every subclass of `base` by name, from the files of a folder."""
    found: dict[str, type[SomePart]] = {}
    for info in pkgutil.iter_modules(path):
        module = importlib.import_module(f"{package}.{info.name}")
        for cls in vars(module).values():
            declared = isinstance(cls, type) and cls.__module__ == module.__name__ and not cls.__name__.startswith("_")
            if declared and issubclass(cls, base):
                found[cls.name] = cls
    return dict(sorted(found.items()))


def unique(parts: Iterator[Any]) -> tuple[Any, ...]:
    """Each element once, in order."""
    return tuple(dict.fromkeys(parts))
