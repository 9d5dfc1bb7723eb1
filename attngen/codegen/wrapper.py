"""The template's view of the part of a wrapper that each module has of its own: signature, inputs and their checks,
plans."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import sympy

from attngen.codegen.host import sizes_of
from attngen.codegen.layout import tuple_text
from attngen.errors import AttngenError, suggest
from attngen.heuristics import STRIP
from attngen.ir.dtypes import ELEMENTS, QUANTISED_TORCH, TORCH, by_precision, latent_bytes, result_type
from attngen.ir.expr import floordiv, symbol
from attngen.ir.graph import Blocks, Derived, Input, Module, input_tensors
from attngen.ir.heads import SHARINGS
from attngen.ir.host import Host
from attngen.ir.names import BLOCKS, FLAT, SCALES, block_lists
from attngen.ir.ops import Arg, Map
from attngen.lang.part import NATURAL
from attngen.scores import derive_functions

_NUMBERS = {"i32": "int", "f32": "float"}
_SHARDS = ['"B"', '"Hq"']
_SCHEMA = {"i32": "SymInt", "f32": "float", "dropout_threshold": "int"}


@dataclass(frozen=True)
class Wrapper:
    """The strings of a wrapper. A call gives `module.inputs`; a plan may stand in for those in `planned`."""

    module: Module

    @property
    def data(self) -> bool:
        """Whether the data of a call decides which blocks count."""
        return self.module.blocks is not None and self.module.blocks.data

    @property
    def heads(self) -> tuple[str, str]:
        """How heads are shared, in words, and the number of K/V heads."""
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
        """The dtype of the output, where it is not that of q."""
        return f" of {TORCH[self.results]}" if self.results != "T" else ""

    @property
    def rows(self) -> list[str]:
        """The row vectors that the forward returns with the output, by their variables."""
        return [name.lower() for name in self.module.row_tensors]

    @property
    def sums(self) -> list[str]:
        """Those of which weights are made again."""
        return [name.lower() for name in self.module.sums]

    @property
    def asked(self) -> list[tuple[str, str]]:
        """Each output of the forward that a call may ask for, with its value as the call gives it."""
        values = {"max_score": "runtime.largest(max_score, return_max_score)"}
        return [(name, values.get(name, name)) for name in self.module.by_query]

    @property
    def asks(self) -> str:
        """The condition under which a call asks for some of them."""
        return " or ".join(f"return_{name}" for name in self.module.outputs)

    @property
    def learned(self) -> list[str]:
        return [i.name for i in self.module.inputs if i.grad]

    @property
    def differentiable(self) -> str:
        """By what a call can be differentiated, in words."""
        *most, last = ["q", "k", "v", *self.learned]
        return f"differentiable in {', '.join(most)} and {last}" if self.module.trains else "without a backward"

    @property
    def sink(self) -> bool:
        """Whether every row's softmax has one more logit, so that no row is empty."""
        return self.module.meaning.sink is not None

    @property
    def unordered(self) -> list[str]:
        """Inputs whose gradients are added atomically."""
        return [
            i.name
            for i in self.module.inputs
            if any(x.input == i.name and x.by == "element" for x in self.module.learned)
        ]

    # ------------------------------------------------------------------ inputs

    @property
    def lengths(self) -> set[str]:
        """Inputs that are lengths of others, which a call gives with these."""
        return {i.name for i in self.module.inputs if i.is_size}

    @property
    def planned(self) -> list[str]:
        """Inputs from which the wrapper derives what kernels read. This takes some time, so calls may share the
        result as a plan."""
        if self.module.blocks and not self.data:
            return []
        return [i.name for i in self.module.inputs if i.shape and any(i.name in d.sources for d in self.module.derived)]

    def help(self, i: Input) -> str:
        if not i.shape:
            return f"{_NUMBERS[i.dtype]}, {i.help}"
        shape = [
            f"{d} or 1" if i.broadcast and at < 2 else "any" if d in self.lengths else d for at, d in enumerate(i.shape)
        ]
        also = {"i32": "torch.int32 or torch.int64", "f32": "torch.float32 or a 16-bit type"}  # that `take` converts
        dtype = {"T": "of the dtype of q,", **also}.get(i.dtype, TORCH[i.dtype])
        learned = (
            f", differentiable{', in no fixed order' * (i.name in self.unordered)}"
            if i.grad and self.module.trains
            else ""
        )
        return f"{dtype} [{', '.join(shape)}], {i.help}{learned}"

    def given_type(self, i: Input) -> str:
        return (
            "torch.Tensor | None = None" if i.name in self.planned else "torch.Tensor" if i.shape else _NUMBERS[i.dtype]
        )

    @property
    def keywords(self) -> list[str]:
        """The keyword arguments of a call, without scale and those that ask for outputs."""
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
        """The statement that checks an input; it also converts a tensor to what kernels read. A size is that of a
        tensor taken before."""
        if i.is_size:
            tensor = next(tensor for tensor in self.module.inputs if i.name in tensor.shape)
            length = f"{i.name} := {tensor.name}.shape[{tensor.shape.index(i.name)}]"
            return f'runtime.check_number("{i.name}", {length}, int, 0, "{i.help}")'
        if not i.shape:
            least = -(2**30) if i.least is None else i.least
            return f'runtime.check_number("{i.name}", {i.name}, {_NUMBERS[i.dtype]}, {least}, "{i.help}")'
        shape = ["None" if d == "*" or d in self.lengths else _size(d) for d in i.shape]
        if i.broadcast:
            shape[:2] = [f"(1, {size})" for size in shape[:2]]
        return f'{i.name} = runtime.take_input(q, "{i.name}", {i.name}, {TORCH[i.dtype]}, [{", ".join(shape)}], "{i.help}")'

    @property
    def taken(self) -> list[str]:
        """Statements that check and convert the inputs which every call gives: those that are not planned."""
        return [self.take(i) for i in self.module.inputs if i.name not in self.planned]

    # ------------------------------------------------------------------ what data promises

    @property
    def promising(self) -> bool:
        """Whether the data of a call without a cache promises something: numbers of inputs, or lists of blocks that
        a plan has."""
        return self.module.blocks is not None or any(i.promises for i in self.module.inputs) or bool(self.of_plan)

    @property
    def promises(self) -> list[str]:
        """The promises of inputs that calls check: of those that are not planned."""
        return [_promise(i, {}) for i in self.module.inputs if i.promises and i.name not in self.planned]

    @property
    def plan_promises(self) -> list[str]:
        """The promises of inputs that the function which makes a plan checks."""
        given = self.data_inputs if self.data else [i for i in self.module.inputs if i.name in self.planned]
        return [_promise(i, {"Nq": "n_q", "Nk": "n_kv"} if not self.data else {}) for i in given if i.promises]

    @property
    def of_plan(self) -> list[str]:
        """The promises of a plan that a call gives: of its tensors whose numbers never fall, and of its lists of
        blocks."""
        names = [f'"{name}"' for d in self.module.derived for name in d.rising if name in self.fields]
        rising = [f"runtime.promised_of_plan({', '.join(['plan', *names])})"] if names else []
        return rising + ["runtime.listed(plan)"] * self.data

    @property
    def first_read(self) -> str:
        """The source of the first key of each sequence that a call over a cache reads; empty where the mask hides no
        key from all queries.

        Where that is data, it is taken to be the first query's own position.
        """
        starts = [op for op in self.module.kernel("decode").ops() if isinstance(op, Map) and op.name == "kv_first"]
        if not starts:
            return ""
        keys = next((e.args[0] for e in starts[0].expr.atoms(floordiv) if e.args[1] == symbol("BLOCK_KV")), sympy.Max())
        back = next(
            (
                symbol("Nk") - symbol("queries") - e
                for e in keys.args
                if (symbol("Nk") - symbol("queries") - e).is_Integer
            ),
            0,
        )
        return f"(keys - q.shape[2] - {back}).clamp(min=0)" if back else "(keys - q.shape[2]).clamp(min=0)"

    @property
    def promises_in_cache(self) -> list[str]:
        """The promises of a call over a cache: of the cache, and of inputs. Of one with a number for each key, those
        past the last key promise nothing."""
        table = ["page_table", *([self.first_read] if self.first_read else [])] if self.page is not None else ["None"]
        args = ["caches", "cache_seqlens", table[0], "new", *(f"first={first}" for first in table[1:])]
        of_cache = f"runtime.promised_of_cache({', '.join([*args, *(f'{name}={name}' for name in self.scales)])})"
        rows = {i.name: "keys" for i in self.module.inputs if i.shape[-1:] == ("Nk",)}
        return [of_cache, *(_promise(i, {"Nk": "Nc"}, rows.get(i.name, "")) for i in self.module.inputs if i.promises)]

    @property
    def counts_keys(self) -> bool:
        """Whether these name `keys`, the number of keys of each sequence."""
        return bool(re.search(r"\bkeys\b", re.sub(r'"[^"]*"', "", " ".join(self.promises_in_cache))))

    # ------------------------------------------------------------------ caches

    @property
    def page(self) -> int | None:
        """Keys of a page of the cache: 0 where a call says it, None where there are no pages."""
        cache = self.module.cache
        return None if cache is None or not cache.page else int(cache.page) if cache.page.isdigit() else 0

    def _in_cache(self, i: Input) -> Input:
        """An input of a call over a cache, where one of each key has room for all that a sequence may have."""
        return replace(i, shape=tuple("Nc" if d == "Nk" else d for d in i.shape))

    def help_in_cache(self, i: Input) -> str:
        text = self.help(replace(self._in_cache(i), options=tuple(o for o in i.options if o != "grad"))).replace(
            "Nc", "S"
        )
        return text + "; what is past a sequence's last key does not matter" * ("Nk" in i.shape)

    @property
    def taken_in_cache(self) -> list[str]:
        """Statements that check and convert the inputs of a call over a cache."""
        return [self.take(self._in_cache(i)) for i in self.module.inputs]

    @property
    def keywords_in_cache(self) -> list[str]:
        """The keyword arguments of a call over a cache for what mask and modifiers read."""
        return [f"{i.name}: {'torch.Tensor' if i.shape else _NUMBERS[i.dtype]}" for i in self.module.inputs]

    @property
    def tensors_in_cache(self) -> list[str]:
        """The inputs of which somebody may want a gradient."""
        return [i.name for i in self.module.inputs if i.shape and i.dtype in ("f32", "T")]

    @property
    def cached(self) -> list[str]:
        """What a call gives of keys and values: of a latent, keys alone."""
        return ["k"] if self.module.rope else ["k", "v"]

    @property
    def scales(self) -> list[str]:
        """The factors of a cache of 8 bits that a call gives: those of latents are in the cache."""
        cache = self.module.cache
        return [name.lower() for name in SCALES.values()] if cache and cache.dtype and not self.row_bytes else []

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of a cache of 8-bit latents; 0 for other caches."""
        cache = self.module.cache
        return latent_bytes(self.module.head_dim_v, self.module.rope) if cache and cache.scale == "columns" else 0

    @property
    def scales_and_inputs(self) -> list[str]:
        """The last arguments of the check of a call over a cache."""
        inputs = tuple_text(self.tensors_in_cache)
        return ([tuple_text(self.scales)] if self.scales else []) + (
            [inputs if self.scales else f"inputs={inputs}"] if inputs else []
        )

    @property
    def of_cache(self) -> str:
        """What host programs get beside the caches: lengths, the table of pages, factors."""
        return tuple_text(["cache_seqlens", *(["page_table"] if self.page is not None else []), *self.scales])

    @property
    def served_tensors(self) -> list[str]:
        """The tensors of a call over a cache beside q, keys and values."""
        table = ["page_table"] if self.page is not None else []
        return ["cache_seqlens", *table, *self.scales, *(i.name for i in self.module.inputs if i.shape)]

    @property
    def served_numbers(self) -> list[str]:
        """The numbers of a call over a cache, as operators declare them."""
        return [f"{_SCHEMA[i.dtype]} {i.name}" for i in self.module.inputs if not i.shape] + ["float scale"]

    @property
    def served_values(self) -> list[str]:
        """The value that a call gives for each of these numbers."""
        return [number.split()[-1] for number in self.served_numbers[:-1]] + ["SCALE if scale is None else scale"]

    @property
    def of_cached(self) -> str:
        """The dtype and device of a cache, in words."""
        return f"{self.cached_dtype} on the device of q" if self.cached_dtype else "same dtype and device"

    @property
    def cached_dtype(self) -> str:
        """The dtype of a cache; empty where it is that of q. Rows of 8-bit latents have several, and are bytes."""
        cache = self.module.cache
        if self.row_bytes:
            return "torch.uint8"
        return f"torch.{QUANTISED_TORCH[cache.dtype]}" if cache and cache.dtype else ""

    def tuple_of(self, suffix: str) -> str:
        """The source of a tuple of these, with the suffix after each."""
        return tuple_text([f"{name}{suffix}" for name in self.cached])

    @property
    def derived_in_cache(self) -> list[tuple[list[str], str]]:
        """(names, call) of functions that derive what kernels read of these. Programs are part of the host program
        `decode`."""
        return [(list(d.names), _call(d, {"device": "q.device"})) for d in self.module.derived if not d.program]

    @property
    def sizes_in_cache(self) -> list[str]:
        """Statements that define the sizes which these use."""
        text = " ".join([*self.taken_in_cache, *self.promises_in_cache, *(call for _, call in self.derived_in_cache)])
        used = set(re.findall(r"\w+", re.sub(r'"[^"]*"', "", text)))  # but for what help says
        rows = "caches[0].shape[2]"
        room = rows if self.page is None else f"page_table.shape[1] * {self.page or rows}"
        sources = {"B": "q.shape[0]", "Hq": "q.shape[1]", "Hkv": "caches[0].shape[1]", "Nq": "q.shape[2]", "Nc": room}
        return [f"{name} = {source}" for name, source in sources.items() if name in used]

    @property
    def passed_in_cache(self) -> list[str]:
        """What a call over a cache gives for each argument of the host program `decode` after those of the cache."""
        cached = ("Q", "K_CACHE", "K_ROPE_CACHE", "V_CACHE", "CACHE_SEQLENS", "PAGE_TABLE", "Nn", *SCALES.values())
        return [a.name.lower() for a in self.module.host("decode").args if a.name not in cached]

    def derive(self, wanted: Any = None) -> list[tuple[list[str], str]]:
        """(names, call) of functions that derive what kernels read: those that give `wanted` names, else those
        without planned inputs."""
        found = [
            d
            for d in self.module.derived
            if (set(d.names) & wanted if wanted is not None else not set(d.sources) & set(self.planned))
        ]
        return [(list(d.names), _call(d, {"device": "q.device"})) for d in found]

    @property
    def sizes(self) -> list[str]:
        """Statements that define the sizes which the other statements use."""
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
        """The names of the lists of blocks in a plan, and what their last two dimensions count."""
        if not self.module.blocks:
            return {}
        return {
            name.lower(): dims[2:]
            for own in ("q", "kv")
            for name, dims in block_lists(own, self.module.blocks.data).items()
        }

    @property
    def fields(self) -> list[str]:
        """The tensors of a plan that stand for the planned inputs: inputs that kernels read themselves, and tensors
        derived from inputs."""
        read = {a.name.lower() for kernel in self.module.kernels if not kernel.prepares for a in kernel.args}
        derived = [n for d in self.module.derived for n in d.names if set(d.sources) & set(self.planned)]
        return [n for n in self.planned if n in read] + derived

    @property
    def plan_sizes(self) -> list[str]:
        """The sizes of a call that the functions which make a plan need."""
        sources = {s for d in self.module.derived if set(d.sources) & set(self.planned) for s in d.sources}
        return [size for size in ("Nq", "Nk") if size in sources]

    @property
    def plan_params(self) -> list[str]:
        """The parameters of the function that makes a plan of the planned inputs."""
        names = {"Nq": "n_q", "Nk": "n_kv"}
        return [f"{name}: torch.Tensor" for name in self.planned] + [f"{names[size]}: int" for size in self.plan_sizes]

    @property
    def plan_values(self) -> list[str]:
        """The source of a plan's values, in terms of the arguments of the function that makes it."""
        names = {"Nq": "n_q", "Nk": "n_kv"}
        derived = [d for d in self.module.derived if set(d.sources) & set(self.planned)]
        calls = [f"*{_call(d, names)}" for d in derived]
        return [f"{n}.contiguous()" for n in self.fields if n in self.planned] + calls

    @property
    def plan_types(self) -> list[str]:
        """The arguments that give the dtype and the shape of each tensor of a plan."""
        types = {i.name: (i.dtype, i.shape) for i in self.module.inputs}
        types |= {name: (d.dtype, shape) for d in self.module.derived for name, shape in zip(d.names, d.shapes)}
        return [f"{n}=({TORCH[types[n][0]]}, [{', '.join(map(_size, types[n][1]))}])" for n in self.fields]

    @property
    def plan_taken(self) -> list[str]:
        """Statements that check and convert what programs read, in the function that makes a plan from it."""
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
    def operands(self) -> list[Arg]:
        """The operators' arguments after q, k and v."""
        return [a for a in self.module.host("forward").args if a.name not in ("Q", "K", "V")]

    @property
    def schema(self) -> str:
        """The declaration of the operands to torch."""
        return _declared(self.operands)

    @property
    def passed(self) -> list[str]:
        """The value that a call gives for each operand."""
        return self._passed(self.operands)

    @property
    def key_mass_schema(self) -> str:
        """The declaration of the operator that sums weights over queries."""
        sums = ", ".join(f"Tensor {name}" for name in self.sums)
        return f"(Tensor q, Tensor k, {sums}, {_declared(self._of_key_mass)}) -> Tensor"

    @property
    def passed_for_key_mass(self) -> list[str]:
        """The value that a call gives for each of its arguments after q and k."""
        return [*self.sums, *self._passed(self._of_key_mass)]

    @property
    def _of_key_mass(self) -> list[Arg]:
        return [a for a in self.module.host("key_mass").args if a.name not in ("Q", "K", *self.module.sums)]

    def _passed(self, operands: list[Arg]) -> list[str]:
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
            args += ["summed=True"] if any(x.by != "row" for x in self.module.learned) else []
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
            args += [f"rows={_names(module.row_tensors)}", f"flat={len(module.row_tensors) - smooth}"]
        return args + ([f"kept={_names(module.kept)}"] if module.kept != module.row_tensors[:smooth] else [])

    @property
    def shards(self) -> list[str]:
        """The source of the names of q's dimensions along which ranks may share a call: the mask and the scores do not
        count along these.

        A tensor that is read at a position along such a dimension, and nowhere else, is sharded with q.
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

    # ------------------------------------------------------------------ masks of blocks and of data

    @property
    def count(self) -> Host:
        """The host program that evaluates a mask of data."""
        return self.module.host("count")

    @property
    def data_inputs(self) -> list[Input]:
        """The inputs that decide which blocks count, by themselves or by what is derived from them."""
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
        given = [f"{'Tensor' if a.role == 'in' else _SCHEMA[a.type.dtype]} {a.name.lower()}" for a in args]
        return ", ".join(["Tensor q", "Tensor k", *given])

    @property
    def by_sizes(self) -> list[str]:
        """The sizes that a plan follows from, where the mask reads no data; else none."""
        return (
            ["Nq", "Nk", *(d for d in self.count_shape[:2] if d != "1")] if self.data and not self.data_inputs else []
        )

    @property
    def count_shape(self) -> list[str]:
        """The shape of COUNT, which has a number for each strip of a block."""
        dims = {"Tq": "-(-Nq // BLOCK)", "Ts": f"-(-Nk // BLOCK) * {(self.module.blocks or Blocks(1)).size // STRIP}"}
        return [dims.get(d, d) for d in self.count.type_of("COUNT").dims]

    @property
    def pattern_call(self) -> str:
        """The call of the pattern's function, which makes the mask of blocks."""
        blocks = self.module.blocks
        assert blocks is not None
        sizes = [f"-(-{n} // BLOCK)" for n in ("n_q", "n_kv")]
        return (
            f"{blocks.pattern}({', '.join([*sizes, 'device', *(f'{name}={value}' for name, value in blocks.params)])})"
        )

    @property
    def functions(self) -> list[str]:
        """The source of the functions that masks and modifiers declare, as plain torch."""
        names = [d.function for d in self.module.derived if not d.program]
        names += [self.module.blocks.pattern] if self.module.blocks and self.module.blocks.pattern else []
        return [_source(name) for name in dict.fromkeys(names)]

    @property
    def programs(self) -> list[Program]:
        """The host programs that compute what kernels read of inputs."""
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
            f"{'Tensor' if a.role == 'in' else _SCHEMA[a.type.dtype]} {name}"
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
        """The source of the shape of each result."""
        return [tuple_text(list(dims)) for dims in self.derived.shapes]


def _promise(i: Input, names: dict[str, str], rows: str = "") -> str:
    """The source of the promises of an input; `names` are those of sizes that have others there, `rows` the numbers
    of it that count."""
    given = {name: names.get(value, value) for name, value in i.promises.items()} | ({"rows": rows} if rows else {})
    return f'runtime.promised("{i.name}", {i.name}, "{i.help}", {", ".join(f"{name}={value}" for name, value in given.items())})'


def _declared(operands: list[Arg]) -> str:
    """The declaration of arguments of an operator to torch."""
    kinds = {"SEED": "Tensor?"}
    return ", ".join(
        f"{kinds.get(a.name, 'Tensor') if a.role == 'in' else _SCHEMA.get(a.name, _SCHEMA[a.type.dtype])} {a.name.lower()}"
        for a in operands
    )


def _call(d: Derived, names: dict[str, str]) -> str:
    """The Python source of a call that computes what is derived; `names` are those of its sources that have others
    there."""
    function = d.program.upper() if d.program else d.function
    return f"{function}({', '.join(names.get(s, _size(s)) for s in d.sources)})"


def _size(dim: str) -> str:
    """The Python source of a dimension of an input."""
    blocks = re.fullmatch(BLOCKS, dim)
    return f"-(-{blocks[1]} // {blocks[2]})" if blocks else dim


def sizes_in(text: str) -> list[str]:
    """Statements that define the sizes which occur in a piece of source."""
    return sizes_of(re.findall(r"\w+", text))


def _source(function: str) -> str:
    """The source of a function that a mask or modifier declares; AttngenError if none does."""
    known = derive_functions()
    if function not in known:
        raise AttngenError(
            f"`derive` names the function `{function}`, which no mask or modifier declares; {suggest(function, known)}"
        )
    return inspect.getsource(known[function])


def _names(tensors: Iterable[str]) -> str:
    """The source of a tuple of the variables of these tensors."""
    return tuple_text([f'"{name.lower()}"' for name in tensors])
