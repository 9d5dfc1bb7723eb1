"""The template's view of a module's wrapper: signature, inputs and their checks, plans, operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attngen.codegen.wrapper_text import (
    PYTHON_TYPES,
    SCHEMA_TYPES,
    call_text,
    declarations,
    names_text,
    promise_text,
    size_text,
    sizes_in,
    source_of,
)
from attngen.heuristics import STRIP
from attngen.ir import Blocks, Derived, Host, Input, Module, input_tensors, tile
from attngen.ir.dtypes import ELEMENTS, TORCH, by_precision, result_type
from attngen.ir.heads import SHARINGS
from attngen.ir.names import FLAT, WHOLE_LENGTHS, block_lists, of_sequence
from attngen.lang.part import NATURAL
from attngen.targets.printing.layout import tuple_text

_SHARDS = ['"B"', '"Hq"']


@dataclass(frozen=True)
class Wrapper:
    """The strings of a wrapper. A call passes `module.inputs`; a plan may replace those in `planned`."""

    module: Module

    @property
    def data(self) -> bool:
        """True if the data of a call decides which blocks are visible."""
        return self.module.blocks is not None and self.module.blocks.data

    @property
    def heads(self) -> tuple[str, str]:
        """The head sharing in words, and source text for the number of K/V heads."""
        sharing = SHARINGS[self.module.sharing]
        return sharing.about, sharing.heads

    @property
    def widths(self) -> str:
        qk, v = self.module.head_dim_qk, self.module.head_dim_v
        return f"{qk}" if qk == v else f"{qk} for q and k, {v} for v"

    @property
    def dtypes(self) -> str:
        precise = f" (fp32 products in {self.module.precision})" if by_precision(self.module.dtypes) else ""
        return ", ".join(self.module.dtypes) + precise

    @property
    def torch_dtypes(self) -> str:
        return tuple_text([f"torch.{ELEMENTS[d].torch}" for d in self.module.dtypes])

    @property
    def results(self) -> str:
        """The IR's type of the output."""
        return result_type(self.module.dtypes)

    @property
    def of_results(self) -> str:
        """The dtype of the output for docstrings, if it is not that of q."""
        return f" of {TORCH[self.results]}" if self.results != "T" else ""

    @property
    def rows(self) -> list[str]:
        """Variables of the row vectors that the forward returns with the output."""
        return [name.lower() for name in self.module.row_tensors]

    @property
    def sums(self) -> list[str]:
        """Variables of the row vectors from which softmax weights are recomputed."""
        return [name.lower() for name in self.module.row_stats]

    @property
    def asked(self) -> list[tuple[str, str]]:
        """Each output of the forward that a call may request, and the source of the value that the call returns."""
        values = {"max_score": "runtime.largest(max_score, return_max_score)"}
        return [(name, values.get(name, name)) for name in self.module.by_query]

    @property
    def asks(self) -> str:
        """The condition under which a call requests an additional output."""
        return " or ".join(f"return_{name}" for name in self.module.outputs)

    @property
    def learned(self) -> list[str]:
        return [i.name for i in self.module.inputs if i.grad]

    @property
    def differentiable(self) -> str:
        """The tensors in which a call is differentiable, in words."""
        *most, last = ["q", "k", "v", *self.learned]
        return f"differentiable in {', '.join(most)} and {last}" if self.module.trains else "without a backward"

    @property
    def sink(self) -> bool:
        return self.module.meaning.sink is not None

    @property
    def unordered(self) -> list[str]:
        """Inputs whose gradients are added atomically."""
        return [
            i.name
            for i in self.module.inputs
            if any(x.input == i.name and x.reduction == "element" for x in self.module.input_gradients)
        ]

    # ------------------------------------------------------------------ inputs

    @property
    def lengths(self) -> set[str]:
        """Inputs that are lengths of other inputs, from which a call takes them."""
        return {i.name for i in self.module.inputs if i.is_size}

    @property
    def planned(self) -> list[str]:
        """Inputs from which the wrapper derives tensors for kernels. This takes time, so calls may share the result as
        a plan."""
        if self.module.blocks and not self.data:
            return []
        return [i.name for i in self.module.inputs if i.shape and any(i.name in d.sources for d in self.module.derived)]

    def help(self, i: Input) -> str:
        if not i.shape:
            return f"{PYTHON_TYPES[i.dtype]}, {i.help}"
        shape = [
            f"{d} or 1" if i.broadcast and at < 2 else "any" if d in self.lengths else d for at, d in enumerate(i.shape)
        ]
        also = {"i32": "torch.int32 or torch.int64", "f32": "torch.float32 or a 16-bit type"}  # `take` converts these
        dtype = {"T": "of the dtype of q,", **also}.get(i.dtype, TORCH[i.dtype])
        learned = (
            f", differentiable{', in no fixed order' * (i.name in self.unordered)}"
            if i.grad and self.module.trains
            else ""
        )
        return f"{dtype} [{', '.join(shape)}], {i.help}{learned}"

    def given_type(self, i: Input) -> str:
        return (
            "torch.Tensor | None = None"
            if i.name in self.planned
            else "torch.Tensor"
            if i.shape
            else PYTHON_TYPES[i.dtype]
        )

    @property
    def keywords(self) -> list[str]:
        """The keyword arguments of a call, except scale and those that request outputs."""
        found = [f"{i.name}: {self.given_type(i)}" for i in self.module.inputs if not i.is_size]
        found += ["plan: Plan | None = None"] if self.planned or self.data else []
        if self.module.blocks and not self.data:
            found.append(
                "block_mask: torch.Tensor | BlockPlan" + (" | None = None" if self.module.blocks.pattern else "")
            )
        return found + (
            ["dropout_p: float = 0.0", "seed: int | torch.Tensor | None = None"] if self.module.dropout else []
        )

    def take(self, i: Input) -> str:
        """Return the statement that checks an input, and converts a tensor to the form that kernels read. A size is
        read from a tensor of an earlier statement."""
        if i.is_size:
            tensor = next(tensor for tensor in self.module.inputs if i.name in tensor.shape)
            length = f"{i.name} := {tensor.name}.shape[{tensor.shape.index(i.name)}]"
            return f'runtime.check_number("{i.name}", {length}, int, 0, "{i.help}")'
        if not i.shape:
            least = -(2**30) if i.least is None else i.least
            return f'runtime.check_number("{i.name}", {i.name}, {PYTHON_TYPES[i.dtype]}, {least}, "{i.help}")'
        shape = ["None" if d == "*" or d in self.lengths else size_text(d) for d in i.shape]
        if i.broadcast:
            shape[:2] = [f"(1, {size})" for size in shape[:2]]
        args = ["q", f'"{i.name}"', i.name, TORCH[i.dtype], f"[{', '.join(shape)}]", f'"{i.help}"']
        return f"{i.name} = runtime.take_input({', '.join(args)})"

    @property
    def taken(self) -> list[str]:
        """Statements that check and convert the inputs that every call passes: those that are not planned."""
        return [self.take(i) for i in self.module.inputs if i.name not in self.planned]

    # ------------------------------------------------------------------ checks of data

    @property
    def promising(self) -> bool:
        """True if a call without a KV cache makes promises about its data: the numbers in its inputs, or the block
        lists of its plan."""
        return self.module.blocks is not None or any(i.promises for i in self.module.inputs) or bool(self.of_plan)

    @property
    def promises(self) -> list[str]:
        """The promises of inputs that calls check: those of inputs that are not planned."""
        return [promise_text(i, {}) for i in self.module.inputs if i.promises and i.name not in self.planned]

    @property
    def plan_promises(self) -> list[str]:
        """The promises of inputs that are checked in the function that makes a plan."""
        given = self.data_inputs if self.data else [i for i in self.module.inputs if i.name in self.planned]
        return [promise_text(i, {"Nq": "n_q", "Nk": "n_kv"} if not self.data else {}) for i in given if i.promises]

    @property
    def of_plan(self) -> list[str]:
        """The promises of a plan that is passed to a call: of its tensors whose numbers never fall, and of its block
        lists."""
        names = [f'"{name}"' for d in self.module.derived for name in d.rising if name in self.fields]
        rising = [f"runtime.promised_of_plan({', '.join(['plan', *names])})"] if names else []
        return rising + ["runtime.listed(plan)"] * self.data

    def derive(self, names: Any = None) -> list[tuple[list[str], str]]:
        """Return (names, call) of functions that derive tensors for kernels: those that compute `names`, by default
        those without planned inputs."""
        found = [
            d
            for d in self.module.derived
            if (set(d.names) & names if names is not None else not set(d.sources) & set(self.planned))
        ]
        return [(list(d.names), call_text(d, {"device": "q.device"})) for d in found]

    @property
    def sizes(self) -> list[str]:
        """Statements that define the sizes that the other statements use."""
        used = [
            *self.taken,
            *self.plan_types,
            *(self.take(i) for i in self.module.inputs),
            *(call for _, call in self.derive()),
        ]
        used += [size for i in self.module.inputs for size in i.promises.values() if i.name not in self.planned]
        return sizes_in(
            " ".join([*used, *self.plan_sizes, *(self.count_shape[:2] if self.data else []), *self.by_sizes])
        )

    @property
    def plan_inputs(self) -> list[str]:
        """Statements that define the sizes used by the function that makes a plan from data."""
        return sizes_in(
            " ".join(["Nq Nk", *(self.take(i) for i in self.data_inputs), *(call for _, call in self.data_derived)])
        )

    # ------------------------------------------------------------------ plans

    @property
    def lists(self) -> dict[str, tuple[str, ...]]:
        """The names of a plan's block lists, and the names of their last two dimensions."""
        if not self.module.blocks:
            return {}
        return {
            name.lower(): dims[2:]
            for own in ("q", "kv")
            for name, dims in block_lists(own, self.module.blocks.data).items()
        }

    @property
    def fields(self) -> list[str]:
        """The tensors of a plan that replace the planned inputs: inputs that kernels read, and tensors derived from
        inputs."""
        read = {a.name.lower() for kernel in self.module.kernels if not kernel.traits.prepares for a in kernel.args}
        derived = [n for d in self.module.derived for n in d.names if set(d.sources) & set(self.planned)]
        return [n for n in self.planned if n in read] + derived

    @property
    def plan_sizes(self) -> list[str]:
        """The sizes of a call that are needed to make a plan."""
        sources = {s for d in self.module.derived if set(d.sources) & set(self.planned) for s in d.sources}
        return [size for size in ("Nq", "Nk", *WHOLE_LENGTHS.values()) if size in sources]

    @property
    def plan_params(self) -> list[str]:
        """The parameters of the function that makes a plan of the planned inputs."""
        names = {"Nq": "n_q", "Nk": "n_kv"}
        sizes = [f"{names.get(size, size)}: int" for size in self.plan_sizes]
        return [f"{name}: torch.Tensor" for name in self.planned] + sizes

    @property
    def plan_values(self) -> list[str]:
        """Source text that computes a plan's values from the arguments of the function that makes the plan."""
        names = {"Nq": "n_q", "Nk": "n_kv"}
        derived = [d for d in self.module.derived if set(d.sources) & set(self.planned)]
        calls = [f"*{call_text(d, names)}" for d in derived]
        return [f"{n}.contiguous()" for n in self.fields if n in self.planned] + calls

    @property
    def plan_types(self) -> list[str]:
        """Arguments with the dtype and the shape of each tensor of a plan."""
        types = {i.name: (i.dtype, i.shape) for i in self.module.inputs}
        types |= {name: (d.dtype, shape) for d in self.module.derived for name, shape in zip(d.names, d.shapes)}
        return [f"{n}=({TORCH[types[n][0]]}, [{', '.join(map(size_text, types[n][1]))}])" for n in self.fields]

    @property
    def plan_taken(self) -> list[str]:
        """Statements that check and convert the inputs of host programs, in the function that makes a plan from
        them."""
        read = {a.name.lower() for p in self.programs for a in p.host.args}
        given = [i for i in self.module.inputs if i.name in read]
        shapes = [", ".join(["None"] * len(i.shape)) for i in given]
        taken = [
            f'{i.name} = runtime.take_input({i.name}, "{i.name}", {i.name}, {TORCH[i.dtype]}, [{shape}], "{i.help}")'
            for i, shape in zip(given, shapes)
        ]
        return taken + [f'RULES.check_device("{i.name}", {i.name})' for i in given]

    # ------------------------------------------------------------------ operators

    @property
    def operands(self) -> list[tile.Arg]:
        """The operators' arguments after q, k and v."""
        return [a for a in self.module.host("forward").args if a.name not in ("Q", "K", "V")]

    @property
    def schema(self) -> str:
        """The declaration of the operands to torch."""
        return declarations(self.operands)

    @property
    def passed(self) -> list[str]:
        """The value that a call passes for each operand."""
        return self._passed(self.operands)

    @property
    def key_mass_schema(self) -> str:
        """The declaration of the operator that sums weights over queries."""
        sums = ", ".join(f"Tensor {name}" for name in self.sums)
        return f"(Tensor q, Tensor k, {sums}, {declarations(self._of_key_mass)}) -> Tensor"

    @property
    def passed_for_key_mass(self) -> list[str]:
        """The value that a call passes for each of its arguments after q and k."""
        return [*self.sums, *self._passed(self._of_key_mass)]

    @property
    def _of_key_mass(self) -> list[tile.Arg]:
        return [a for a in self.module.host("key_mass").args if a.name not in ("Q", "K", *self.module.row_stats)]

    def _passed(self, operands: list[tile.Arg]) -> list[str]:
        found = []
        for name in (a.name.lower() for a in operands):
            of_plan = name in self.fields or (self.data and name in self.lists)
            found.append(f"plan.{name}" if of_plan else f"blocks.{name}" if name in self.lists else name)
        return found

    @property
    def signature(self) -> list[str]:
        """The arguments of the runtime's description of the operators."""
        names = [a.name.lower() for a in self.operands]
        tensors = sum(a.role == "in" for a in self.operands)
        args = ["OPERANDS", str(tensors), "(HEAD_DIM_QK, HEAD_DIM_V)"]
        if self.learned:
            args.append(f"learned={tuple_text([str(names.index(name)) for name in self.learned])}")
            args += ["summed=True"] if any(x.reduction != "delta" for x in self.module.input_gradients) else []
        args += (
            [f"unordered={tuple_text([repr(n).replace(chr(39), chr(34)) for n in self.unordered])}"]
            if self.unordered
            else []
        )
        args += [f"results={TORCH[self.results]}"] if self.results != "T" else []
        dims = [
            f'"{" ".join(("B", "Hq", *a.type.dims[2:]) if a.name.lower() in self.lists else a.type.dims)}"'
            for a in self.operands
            if a.role == "in"
        ]
        args += [f"dims={tuple_text(dims)}"] if dims else []
        args += [f"shards={tuple_text(self.shards) or '()'}"] if self.shards != _SHARDS else []
        module, smooth = self.module, sum(name not in FLAT for name in self.module.by_query)
        if len(module.row_tensors) > 1:
            args += [f"rows={names_text(module.row_tensors)}", f"flat={len(module.row_tensors) - smooth}"]
        return args + ([f"kept={names_text(module.kept)}"] if module.kept != module.row_tensors[:smooth] else [])

    @property
    def shards(self) -> list[str]:
        """Source of the names of q's dimensions that may be sharded, because the mask and the scores do not depend on
        positions along them.

        A tensor that is read only at the own position along such a dimension is sharded with q.
        """
        meaning = self.module.meaning
        tensors = input_tensors(self.module.inputs, self.module.derived)
        read = [zip(read.index, tensors[read.tensor].dims) for read in meaning.reads]
        facts = [e for fact in meaning.known for e in (fact.literal, fact.needs, fact.enough)]
        whole = [meaning.where, meaning.by_key, meaning.score, meaning.sink, *facts]
        whole += [index for pairs in read for index, dim in pairs if index != NATURAL.get(dim)]
        used = {str(s) for e in whole if e is not None for s in e.free_symbols}
        counted = {"B": {"b", "B"}, "Hq": {"h", "hkv", "Hq", "Hkv"}, "Nq": {"q_idx", "Nq"}}
        return [
            f'"{dim}"'
            for dim, names in counted.items()
            if not names & used and not (dim == "Nq" and self.module.blocks)
        ]

    # ------------------------------------------------------------------ block masks and masks of data

    @property
    def count(self) -> Host:
        """The host program that evaluates a mask of data."""
        return self.module.host("count")

    @property
    def data_inputs(self) -> list[Input]:
        """The inputs that decide which blocks are visible, directly or by tensors derived from them."""
        read = {a.name.lower() for a in self.count.args}
        return [i for i in self.module.inputs if i.name in read or i.name in self.planned]

    @property
    def data_operands(self) -> list[str]:
        return [a.name.lower() for a in self.count.args if a.name not in ("Q", "K")]

    @property
    def data_derived(self) -> list[tuple[list[str], str]]:
        return self.derive({*self.data_operands, *self.fields})

    @property
    def data_schema(self) -> str:
        args = [a for a in self.count.args if a.name not in ("Q", "K")]
        given = [f"{'Tensor' if a.role == 'in' else SCHEMA_TYPES[a.type.dtype]} {a.name.lower()}" for a in args]
        return ", ".join(["Tensor q", "Tensor k", *given])

    @property
    def by_sizes(self) -> list[str]:
        """The sizes on which a plan depends, if the mask reads no data; otherwise empty."""
        return (
            ["Nq", "Nk", *(d for d in self.count_shape[:2] if d != "1")] if self.data and not self.data_inputs else []
        )

    @property
    def count_shape(self) -> list[str]:
        """Source text for the shape of COUNT, the tensor with a number for each strip of a block."""
        dims = {"Tq": "-(-Nq // BLOCK)", "Ts": f"-(-Nk // BLOCK) * {(self.module.blocks or Blocks(1)).size // STRIP}"}
        return [dims.get(d, d) for d in self.count.type_of("COUNT").dims]

    @property
    def pattern_call(self) -> str:
        """Source of the call that makes the block mask, by the pattern's function."""
        blocks = self.module.blocks
        assert blocks is not None
        sizes = [f"-(-{n} // BLOCK)" for n in ("n_q", "n_kv")]
        return (
            f"{blocks.pattern}({', '.join([*sizes, 'device', *(f'{name}={value}' for name, value in blocks.params)])})"
        )

    @property
    def functions(self) -> list[str]:
        """Source of the functions that masks and modifiers declare, as plain torch."""
        names = [d.function for d in self.module.derived if not d.program]
        names += [self.module.blocks.pattern] if self.module.blocks and self.module.blocks.pattern else []
        return [source_of(name) for name in dict.fromkeys(names)]

    @property
    def programs(self) -> list[Program]:
        """The host programs that compute tensors for kernels from inputs."""
        return [Program(self.module.host(d.program), d) for d in self.module.derived if d.program]


@dataclass(frozen=True)
class Program:
    """The strings of an operator that runs a host program."""

    host: Host
    derived: Derived

    @property
    def params(self) -> list[str]:
        """The arguments of the program."""
        return [a.name if a.role == "scalar" else a.name.lower() for a in self.host.args]

    @property
    def schema(self) -> str:
        """The declaration of the operator to torch."""
        given = (
            f"{'Tensor' if a.role == 'in' else SCHEMA_TYPES[a.type.dtype]} {name}"
            for a, name in zip(self.host.args, self.params)
        )
        return f"({', '.join(given)}) -> ({', '.join(['Tensor'] * len(self.derived.names))})"

    @property
    def sizes(self) -> list[str]:
        """Statements that read sizes from the shapes of the arguments."""
        given = ((a.name.lower(), a.type.dims) for a in self.host.args if a.role == "in")
        return [f"{', '.join(dims)} = {name}.shape" for name, dims in given]

    @property
    def shapes(self) -> list[str]:
        """Source of the shape of each result."""
        return [tuple_text(list(of_sequence(dims))) for dims in self.derived.shapes]
