"""Target modules to files: Jinja prints the views, nothing else. The same module gives the same bytes."""

from __future__ import annotations

import inspect
import json
import re
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from attngen.devices import CLASSES, FALLBACK_CUDA, FALLBACK_HIP
from attngen.emit.context import SIZES, KernelContext, KernelView, stride_names
from attngen.emit.layout import statement
from attngen.emit.torch_text import to_torch
from attngen.errors import AttngenError, suggest
from attngen.ir.expr import parse, symbol
from attngen.ir.graph import Blocks, Input, Kernel, Module, Unfit
from attngen.ir.interface import DROPOUT_SCALARS, FEW_QUERIES, SPLIT_KEYS, STRIP, block_lists, verify_interface
from attngen.ir.ops import AXIS_DIM, AXIS_EXTENT, BLOCKS, Base, Gather, Load, Map, Mask
from attngen.ir.text import print_module
from attngen.scores import derive_functions

WIDTH = 100
LONGEST = 120  # of an assignment, without its indentation
MOST = 124  # of each of its lines, where it is broken at its brackets alone
_NUMBERS = {"i32": "int", "f32": "float"}
_TORCH = {
    "f32": "torch.float32",
    "bf16": "torch.bfloat16",
    "fp16": "torch.float16",
    "fp32": "torch.float32",
    "b1": "torch.bool",
    "i32": "torch.int32",
}


class _Sharing(NamedTuple):
    """What a wrapper says of its heads, and the condition under which a call breaks it."""

    help: str
    kv_heads: str
    wrong: str
    expected: str


_SHARING = {
    "mha": _Sharing("one K/V head per query head (mha)", "Hq", "q.shape[1] != k.shape[1]", "as many"),
    "mqa": _Sharing("one K/V head for all query heads (mqa)", "1", "k.shape[1] != 1", "one K/V head"),
    "gqa": _Sharing(
        "one K/V head per group of query heads (gqa)",
        "Hkv",
        "q.shape[1] % k.shape[1] if k.shape[1] else q.shape[1]",
        "a multiple of the K/V heads",
    ),
}
_SIZES = {"B": "q.shape[0]", "Hq": "q.shape[1]", "Hkv": "k.shape[1]", "Nq": "q.shape[2]", "Nk": "k.shape[2]"}
_SIZES |= {"group": "q.shape[1] // k.shape[1]", "splits": "splits", "Nlse": "grad_lse.shape[2]"}
_TENSORS = {"O": "out", "dO": "grad_out", "dLSE": "grad_lse"}


def templates_dir() -> Path:
    """The templates: in the wheel inside the package, in a checkout beside it."""
    packaged = Path(str(resources.files("attngen"))) / "templates"
    return packaged if packaged.is_dir() else packaged.parent.parent / "templates"


def render(module: Module) -> dict[str, str]:
    """The generated files of a target module by name: `__init__.py`, `kernels.py`, `schedule.ir`, `report.json`."""
    from attngen.analysis.report import report

    verify_interface(module)
    views = {kernel.name: KernelContext(module, kernel).view() for kernel in module.kernels}
    env, launches = _environment(), {kernel.name: _launch(kernel, views[kernel.name]) for kernel in module.kernels}
    return {
        "__init__.py": env.get_template("triton/module.py.jinja").render(_module_context(module), launches=launches),
        "kernels.py": env.get_template("triton/kernels.py.jinja").render(_kernels_context(module, views)),
        "schedule.ir": print_module(module),
        "report.json": json.dumps(report(module), indent=2) + "\n",
    }


@cache
def _environment() -> jinja2.Environment:
    """The templates, compiled once."""
    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates_dir()),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    env.globals["call"] = _call
    env.globals["assign"] = _assign
    env.globals["fold"] = lambda text: _short(_broken(text, LONGEST), text)
    env.globals["unpack"] = _unpack
    env.filters["fill"] = _fill
    return env


def _kernels_context(module: Module, views: dict[str, KernelView]) -> dict[str, Any]:
    constants = []
    for name, size in (("D_QK", module.head_dim_qk), ("D_V", module.head_dim_v)):
        constants.append((name, size))
        if size & (size - 1):
            constants.append((f"{name}_PAD", 1 << size.bit_length()))
    if module.blocks:
        constants.append(("BLOCK", module.blocks.size))
    sizes = sorted({row.elem_bytes for _, rows in module.schedules for row in rows})
    names = dict.fromkeys(row.device for _, rows in module.schedules for row in rows if row.device in CLASSES)
    device_classes = [(repr(c), name) for name in names for c in CLASSES[name].capabilities]
    device_classes += [(f'"{name}"', name) for name in names if not CLASSES[name].capabilities and name != "any"]
    return {
        "module": module,
        "constants": constants,
        "schedules": _schedules(module, views),
        "elem_sizes": sizes,
        "unfit": any(module.unfit(kernel.name) for kernel in module.kernels),
        "interpreted": _interpreted(module, sizes[0]),
        "device_classes": device_classes,
        "kernels": list(views.values()),
        "splits": _is_split(module),
        "tma": any(view.tma for view in views.values()),
        "distances": any(x.by == "distance" for x in module.learned),
        "floors": any(view.words & {"floor_div", "floor_mod"} for view in views.values()),
        "casts": any(view.words & {"to_floor", "to_int", "to_round"} for view in views.values()),
        "fallback_cuda": FALLBACK_CUDA,
        "fallback_hip": FALLBACK_HIP,
    }


def _is_split(module: Module) -> bool:
    return any(kernel.is_split for kernel in module.kernels)


def _interpreted(module: Module, elem_bytes: int) -> str:
    """The device class whose schedules the interpreter takes: what other NVIDIA GPUs take, or else one that every kernel has."""
    has = [{(r.device, r.elem_bytes) for r in rows if not isinstance(r, Unfit)} for _, rows in module.schedules]
    return next((c for c in (FALLBACK_CUDA, *CLASSES) if all((c, elem_bytes) in rows for rows in has)), FALLBACK_CUDA)


def _schedules(module: Module, views: dict[str, KernelView]) -> list[Any]:
    out = []
    for kernel, rows in module.schedules:
        classes: dict[str, Any] = {}  # rows, or the sentence on why there are none
        for row in rows:
            if isinstance(row, Unfit):
                classes[f'("{row.device}", {row.elem_bytes})'] = json.dumps(row.reason)
                continue
            blocks = {"BLOCK_Q": row.block_q, "BLOCK_KV": row.block_kv}
            config = {t: blocks[t] for t in views[kernel].tiles} | {"num_warps": row.num_warps, "num_stages": row.num_stages}
            config |= {"TMA": row.tma} if views[kernel].tma else {}
            entry = classes.setdefault(f'("{row.device}", {row.elem_bytes})', [])
            entry.append((row.max_rows, "{" + ", ".join(f'"{key}": {value}' for key, value in config.items()) + "}"))
        out.append((kernel, list(classes.items())))
    return out


def _module_context(module: Module) -> dict[str, Any]:
    read = {a.name.lower() for kernel in module.kernels for a in kernel.args}
    given = [i.name for i in module.inputs if i.shape and i.name in read]
    planned = _planned(module)
    fields = [n for n in planned if n in given] + [n for d in module.derived for n in d.names if set(d.sources) & set(planned)]
    numbers = [i for i in module.inputs if not i.shape]
    data = module.blocks is not None and module.blocks.data
    listed = {own: [name.lower() for name in block_lists(module.blocks, own)] if module.blocks else [] for own in ("q", "kv")}
    lists = listed["q"] + listed["kv"]
    tensors = given + [name for d in module.derived for name in d.names] + lists + ["seed"] * module.dropout
    scalars = [i.name for i in numbers] + (list(DROPOUT_SCALARS) if module.dropout else [])
    keywords = [f"{i.name}: {_given_type(i, planned)}" for i in module.inputs]
    keywords += ["plan: Plan | None = None"] if planned or data else []
    if module.blocks and not data:
        keywords.append("block_mask: torch.Tensor | BlockPlan" + (" | None = None" if module.blocks.pattern else ""))
    if module.dropout:
        keywords += ["dropout_p: float = 0.0", "seed: int | torch.Tensor | None = None"]
    dropping = ["dropout_p=self.dropout_p if self.training else 0.0"] if module.dropout else []
    passed = [k.partition(":")[0] for k in keywords if not k.startswith("dropout_p")]
    kinds = {"seed": "Tensor?", "dropout_threshold": "int", "keep_scale": "float", "scale": "float"}
    kinds |= {i.name: {"i32": "SymInt", "f32": "float"}[i.dtype] for i in numbers}
    by_data = _data(module, module.blocks, planned, fields, kinds) if module.blocks and data else None
    of_data = by_data.inputs if by_data else []
    qk, v = module.head_dim_qk, module.head_dim_v
    own_dtype = ["q", "k", "v", *(i.name for i in module.inputs if i.dtype == "T")]
    learned = [i.name for i in module.inputs if i.grad]
    unordered = [i.name for i in module.inputs if any(x.input == i.name and x.by == "element" for x in module.learned)]
    sink = any(x.by == "row" for x in module.learned) or any(op.name == "m_all" for op in module.kernel("fwd").ops())
    return {
        "module": module,
        "key_kernels": [kernel.name for kernel in module.kernels if kernel.own_axis == "kv"],
        "sharing": _SHARING[module.sharing],
        "head_dim_help": f"{qk}" if qk == v else f"{qk} for q and k, {v} for v",
        "dtype_help": ", ".join(module.dtypes) + (f" (fp32 products in {module.precision})" if "fp32" in module.dtypes else ""),
        "interpreted_in_fp32": _TORCH["bf16"] if "bf16" in module.dtypes else "",
        "torch_dtypes": _tuple([_TORCH[d] for d in module.dtypes]),
        "differentiable": " and ".join(filter(None, [", ".join(["q", "k", "v", *learned][:-1]), ["q", "k", "v", *learned][-1]])),
        "sink_help": " and its sink" if sink else "",
        "empty_lse": "its sink" if sink else "-inf",
        "own_dtype": own_dtype,
        "input_help": {i.name: _input_help(i) + ", in no fixed order" * (i.name in unordered) for i in module.inputs},
        "input_shapes": {i.name: ", ".join(_size(d) for d in i.shape) for i in module.inputs},
        "input_checks": [_input_check(i) for i in module.inputs if i.name not in planned],
        "planned": planned,
        "plan_fields": fields,
        "plan_checks": [_input_check(i) for i in module.inputs if i.name in planned],
        "plan_sizes": [size for n, size in (("Nq", "n_q"), ("Nk", "n_kv")) if _plan_takes(module, n)],
        "plan_field_checks": _plan_field_checks(module, fields),
        "plan_values": _plan_values(module, planned, fields),
        "plan_call": f"make_plan({', '.join([*planned, *(_SIZES[n] for n in ('Nq', 'Nk') if _plan_takes(module, n))])})",
        "data": by_data,
        "data_args": "".join(f", {i.name}={i.name}" for i in of_data),
        "data_params": "".join(f", {i.name}: {'torch.Tensor' if i.shape else _NUMBERS[i.dtype]}" for i in of_data),
        "strip": STRIP,
        "splits": _is_split(module),
        "split_keys": SPLIT_KEYS,
        "few_queries": FEW_QUERIES if any(kernel.packs for kernel in module.kernels) else 0,
        "packs_group": any(a.name == "group" for kernel in module.kernels if kernel.packs for a in kernel.args),
        "listed": listed,
        "lists": lists,
        "loose": any(i.broadcast or "*" in i.shape for i in module.inputs),
        "input_tensors": [i.name for i in module.inputs if i.shape],
        "numbers": numbers,
        "derive_calls": [
            (list(d.names), f"{d.function}({', '.join(map(_source_size, d.sources))})")
            for d in module.derived
            if not set(d.sources) & set(planned)
        ],
        "gradients": {name: tensors.index(name) for name in learned},
        "parts": _parts(module),
        "sums": [_summed(module, name) for name in learned],
        "distances": any(x.by == "distance" for x in module.learned),
        "unordered": unordered,
        "places": any(part.isdigit() for x in module.learned for part in x.index),
        "input_args": "".join(f", {i.name}" for i in module.inputs) + ", plan" * bool(planned or data),
        "keywords": keywords,
        "keyword_args": [f"{n}={n}" for n in passed] + dropping + ["scale=self.scale", "return_lse=return_lse"],
        "tensors": tensors,
        "scalars": scalars,
        "integers": _integers(numbers),
        "needing": [f"{name}.requires_grad" for name in ("q", "k", "v", *learned)],
        "operands": tensors + scalars,
        "operands_in": [
            f"plan.{n}" if n in fields or (data and n in lists) else f"blocks.{n}" if n in lists else n for n in tensors + scalars
        ],
        "operand_schema": [f"{kinds.get(n, 'Tensor')} {n}" for n in (*tensors, *scalars, "scale")],
        "pattern_call": _pattern_call(module.blocks) if module.blocks else "",
        "pattern_source": _source(module.blocks.pattern) if module.blocks and module.blocks.pattern else "",
        "derive_functions": [_source(name) for name in dict.fromkeys(d.function for d in module.derived)],
        "input_params": "".join(f", {i.name}: {_given_type(i, planned).removesuffix(' = None')}" for i in module.inputs)
        + ", plan: Plan | None" * bool(planned or data),
    }


def _planned(module: Module) -> list[str]:
    """Inputs from which the wrapper derives what the kernels read, by functions that take some time: calls may share a plan of it."""
    if module.blocks and not module.blocks.data:
        return []
    return [i.name for i in module.inputs if i.shape and any(i.name in d.sources for d in module.derived)]


class _Data(NamedTuple):
    """What a wrapper says of blocks that data lists."""

    inputs: list[Input]  # that say it, or from which it is derived
    checks: list[str]
    derive_calls: list[tuple[list[str], str]]
    tensors: list[str]
    operands: list[str]
    integers: str  # those of the operands, as a tuple that is added to another
    schema: list[str]
    sizes: str  # of sequences and heads: 1 where the mask is the same for all
    shape: str  # of what there is an element of for each strip of a block


def _data(module: Module, blocks: Blocks, planned: list[str], fields: list[str], kinds: dict[str, str]) -> _Data:
    kernel = module.kernel("blocks")
    tensors = [a.name.lower() for a in kernel.args if a.role == "in"]
    numbers = [i.name for i in module.inputs if not i.shape and any(a.name == i.name for a in kernel.args)]
    inputs = [i for i in module.inputs if i.name in (*tensors, *numbers, *planned)]
    derived = [d for d in module.derived if set(d.names) & {*tensors, *fields}]
    sizes = [f"q.shape[{at}]" if _depends(kernel, letter) else "1" for at, letter in enumerate("bh")]
    return _Data(
        inputs,
        [_input_check(i) for i in inputs],
        [(list(d.names), f"{d.function}({', '.join(map(_source_size, d.sources))})") for d in derived],
        tensors,
        tensors + numbers,
        _integers([i for i in module.inputs if i.name in numbers]),
        [f"{kinds.get(n, 'Tensor')} {n}" for n in tensors + numbers],
        ", ".join(sizes),
        ", ".join([*sizes, "-(-q.shape[2] // BLOCK)", f"-(-k.shape[2] // BLOCK) * {blocks.size // STRIP}"]),
    )


def _integers(numbers: list[Input]) -> str:
    """Source that adds integers of a call to a tuple: Triton compiles a kernel of its own for some values of these."""
    names = [i.name for i in numbers if i.dtype == "i32"]
    return f" + ({', '.join(names)},)" if names else ""


def _depends(kernel: Kernel, letter: str) -> bool:
    """Whether a mask that a kernel evaluates differs from sequence to sequence (`b`) or from head to head (`h`)."""
    written = {a.name for a in kernel.args if a.role == "out"}
    for op in kernel.ops():
        if isinstance(op, (Base, Load)) and op.src.tensor not in written:
            places: tuple[Any, ...] = op.src.index
        elif isinstance(op, Gather):
            places = (*op.src.index, op.where)
        elif isinstance(op, Mask):
            places = (op.where,)
        else:
            places = (op.expr,) if isinstance(op, Map) else ()
        if any(symbol(letter) in e.free_symbols for e in places):
            return True
    return False


def _given_type(i: Input, planned: list[str]) -> str:
    return "torch.Tensor | None = None" if i.name in planned else "torch.Tensor" if i.shape else _NUMBERS[i.dtype]


def _plan_takes(module: Module, size: str) -> bool:
    return any(size in d.sources for d in module.derived if set(d.sources) & set(_planned(module)))


def _plan_values(module: Module, planned: list[str], fields: list[str]) -> list[str]:
    """What a plan is made of: inputs that kernels read too, and what functions derive."""
    sizes = {"Nq": "n_q", "Nk": "n_kv"}
    calls = [f"*{d.function}({', '.join(sizes.get(s, s) for s in d.sources)})" for d in module.derived if set(d.sources) & set(planned)]
    return [f"{n}.contiguous()" for n in fields if n in planned] + calls


def _plan_field_checks(module: Module, fields: list[str]) -> list[str]:
    """The statements that check a plan against a call."""
    types = {i.name: (i.dtype, i.shape) for i in module.inputs}
    types |= {name: (d.dtype, shape) for d in module.derived for name, shape in zip(d.names, d.shapes)}
    return [
        f'_check_input(q, "plan.{n}", plan.{n}, {_TORCH[types[n][0]]}, [{", ".join(map(_size, types[n][1]))}], "what attention.plan makes")'
        for n in fields
    ]


def _size(dim: str) -> str:
    """A dimension of an input in the wrapper."""
    if blocks := re.fullmatch(BLOCKS, dim):
        return f"-(-{_SIZES[blocks[1]]} // {blocks[2]})"
    return _SIZES.get(dim, dim)


def _source_size(source: str) -> str:
    """What a function that derives tensors is given: an input, a size, a number or the device."""
    return {"device": "q.device"}.get(source, _size(source))


def _input_help(i: Input) -> str:
    if not i.shape:
        return f"{_NUMBERS[i.dtype]}, {i.help}"
    shape = [f"{d} or 1" if i.broadcast and at < 2 else d for at, d in enumerate(i.shape)]
    return f"{_TORCH.get(i.dtype, 'of the dtype of q,')} [{', '.join(shape)}], {i.help}{', differentiable' if i.grad else ''}"


def _input_check(i: Input) -> str:
    """The statement that checks an input."""
    if not i.shape:
        kind = _NUMBERS[i.dtype]
        return f'_check_number("{i.name}", {i.name}, {kind}, {-(2**30) if i.least is None else i.least}, "{i.help}")'
    shape = [_size(d) if d != "*" else "None" for d in i.shape]
    if i.broadcast:
        shape[:2] = [f"(1, {size})" for size in shape[:2]]
    return f'_check_input(q, "{i.name}", {i.name}, {_TORCH.get(i.dtype, "q.dtype")}, [{", ".join(shape)}], "{i.help}")'


def _parts(module: Module) -> list[str]:
    """Statements that make room for parts of inputs' gradients; what no program writes is zero."""
    lines = []
    for x in module.learned:
        if x.by == "row":
            continue
        if x.by == "distance":
            lines.append(f"{x.parts.lower()} = _distance_parts(q, k, need_inputs)")
            continue
        if x.by == "element":
            shape = f"{x.input}.shape if need_inputs else (0,) * {x.input}.dim()"
            lines.append(f"{x.parts.lower()} = torch.zeros({shape}, device=q.device, dtype=torch.float32)")
            continue
        dense = x.by == "score"
        shape, none = ("(*q.shape[:3], k.shape[2])", "(0, 0, 0, 0)") if dense else ("q.shape[:3]", "(0, 0, 0)")
        dtype = f"{x.input}.dtype" if dense else "torch.float32"
        make = "zeros" if dense else "empty"  # of rows each is written
        lines.append(f"{x.parts.lower()} = torch.{make}({shape} if need_inputs else {none}, device=q.device, dtype={dtype})")
    return lines


def _summed(module: Module, name: str) -> str:
    """The gradient of an input, from the parts that the kernels have written: torch's sums run in a fixed order."""
    terms = []
    for x in (x for x in module.learned if x.input == name):
        if x.by == "distance":
            at = next(i for i, e in enumerate(x.index) if "distance" in e)
            kept = [{"b": 0, "h": 1}[c] for c in x.index if c in ("b", "h")]
            scaled = " * keep_scale" if module.dropout else ""
            terms.append(f"_of_distances({x.parts.lower()}, {name}, {at}, {tuple(kept)}, {to_torch(parse(x.index[at]), _SIZES)}){scaled}")
            continue
        if x.by == "element":
            terms.append(x.parts.lower())
            continue
        if x.by == "row":  # the sink's probability times what its value, zero, lacks
            scaled = " * keep_scale" if module.dropout else ""
            terms.append(f"-(torch.exp({name}[:, None] - lse) * delta{scaled}).sum((0, 2))")
            continue
        text, letters = x.parts.lower(), ["b", "h", "q", *(["kv"] if "kv" in x.index else [])]
        if "hkv" in x.index:
            text += f".unflatten(1, (k.shape[1], {_SIZES['group']})).sum(2)"
            letters[1] = "hkv"
        gone = [str(i) for i, letter in enumerate(letters) if letter not in x.index]
        text += f".sum(({', '.join(gone)}{',' if len(gone) == 1 else ''}))" if gone else ""
        left, wanted = [c for c in letters if c in x.index], [c for c in x.index if not c.isdigit()]
        if left != wanted:
            text += f".permute({', '.join(str(left.index(c)) for c in wanted)})"
        if len(wanted) < len(x.index):
            index = (c if c.isdigit() else "slice(None)" for c in x.index)
            text = f"_placed({text}, {name}, {', '.join(index)})"
        terms.append(text)
    return " + ".join(terms)


def _pattern_call(blocks: Blocks) -> str:
    """The call that makes the mask of a pattern's blocks."""
    sizes = [f"-(-{n} // BLOCK)" for n in ("n_q", "n_kv")]
    return f"{blocks.pattern}({', '.join([*sizes, 'device', *(f'{name}={value}' for name, value in blocks.params)])})"


def _source(function: str) -> str:
    """The source of a function that a mask declares; AttngenError if none does."""
    known = derive_functions()
    if function not in known:
        raise AttngenError(f"`derive` names the function `{function}`, which no mask or modifier declares; {suggest(function, known)}")
    return inspect.getsource(known[function])


class _Launch(NamedTuple):
    """Statements that launch a kernel on the tensors of the wrapper: those of the first time, and the call."""

    kernel: str
    first: str
    call: str

    @property
    def whole(self) -> str:
        first = "".join(f"\n    {line}" for line in self.first.splitlines())
        return f'launch = launches.get("{self.kernel}")\nif launch is None:{first}\n{self.call}'


def _launch(kernel: Kernel, view: KernelView) -> _Launch:
    """How the wrapper launches a kernel."""
    own = kernel.own_axis
    rows = _SIZES[{"q": "Nq", "kv": "Nk"}[own]]
    block = {"q": "BLOCK_Q", "kv": "BLOCK_KV"}[own]
    own_sizes = {
        "blocks": {"B": "count.shape[0]", "Hq": "count.shape[1]"},
        "packed": {"group": "group", "queries": "queries"},
    }
    sizes = _SIZES | own_sizes.get(kernel.name, {})
    heads = [sizes[str(axis.extent)] for axis in kernel.grid if axis.var not in AXIS_EXTENT]
    scalars = [a.name for a in kernel.args if a.role == "scalar"]
    args = [_argument(kernel, a.name) for a in kernel.args if a.role != "scalar"] + [s for s in scalars if s not in SIZES]
    given = [sizes[s] for s in scalars if s in SIZES]
    for a in (a for a in kernel.args if a.role != "scalar"):
        tensor, strides = _tensor(kernel, a.name), stride_names(a)
        taken = [i for i, s in enumerate(strides) if s in view.params]
        if len(taken) > 1 and len(taken) == len(strides):
            given.append(f"*{tensor}.stride()[:{len(strides)}]")
        else:
            given += [f"{tensor}.stride({i})" for i in taken]
    programs = " * ".join([*([] if kernel.walks else [f'triton.cdiv({rows}, config["{block}"])']), *heads])
    tensor = "out" if kernel.name == "delta" else "q"
    flags = {"DROPOUT": "seed is not None"} if view.dropout else {}
    flags |= {"LEARN": "need_inputs"} if view.learns else {}
    more = "".join(f', "{name}": {value}' for name, value in flags.items())
    config = f'kernels.schedule("{kernel.name}", {tensor}, {rows})'
    first = [
        f"config = {f'{{**{config}{more}}}' if more else config}",
        f"programs = {programs}",
        "numbers = (",
        *(f"    {line}" for line in _fill(given, WIDTH - 20)),
        ")",
        f'launch = launches["{kernel.name}"] = kernels.Launch(kernels.{kernel.name}, config, programs, numbers)',
    ]
    lines = (f"    {line}" for line in _fill(args, WIDTH - 16))
    call = [f"launch({', '.join(args)})"] if len(", ".join(args)) < WIDTH - 20 else ["launch(", *lines, ")"]
    return _Launch(kernel.name, "\n".join(first), "\n".join(call))


def _tensor(kernel: Kernel, name: str) -> str:
    """The wrapper's variable of a kernel's tensor."""
    split = any(a.name == name and "splits" in a.type.dims for a in kernel.args)
    return f"{name.lower()}_splits" if split else _TENSORS.get(name, name.lower())


def _argument(kernel: Kernel, name: str) -> str:
    """What the wrapper gives a kernel for one of its tensors: the tensor, or what tiles of its rows are read from."""
    tensor = _tensor(kernel, name)
    for op in kernel.ops():
        if isinstance(op, Load) and op.via:
            base = kernel.op(op.src.tensor)
            if isinstance(base, Base) and base.src.tensor == name:
                return f'kernels.tiles(launch.config, {tensor}, "{AXIS_DIM[op.src.axes()[0]]}")'
    return tensor


def _call(name: str, args: list[str]) -> str:
    """A call on one line where it fits, else one argument a line."""
    line = f"{name}({', '.join(args)})"
    if len(line) <= WIDTH - 12:
        return line
    return _short(_one_a_line(name, args), line)


def _tuple(items: list[str]) -> str:
    """A tuple as Python writes it; empty text if there is nothing in it."""
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})" if items else ""


def _assign(var: str, expr: str) -> str:
    """An assignment, on one line where it fits; a call that does not has one argument a line."""
    line = f"{var} = {expr}"
    if len(line) > LONGEST and re.fullmatch(r"\w+( \+ [\w.]+\([^()]*\) \* \w+)+", expr):  # a pointer: one stride a line
        first, *rest = re.split(r" \+ (?=tl)", expr)
        return "\n".join([f"{var} = (", f"    {first}", *(f"    + {term}" for term in rest), ")"])
    return _short(_broken(line, LONGEST), line)


def _short(broken: str, line: str) -> str:
    """A statement as it was broken at its brackets; where that leaves a line too long, broken at its operators too."""
    return statement(line, LONGEST) if any(len(part) > MOST for part in broken.splitlines()) else broken


def _unpack(names: list[str], value: str) -> str:
    """Names for the parts of a value, in brackets where they do not fit on a line."""
    line = f"{', '.join(names)} = {value}"
    return line if len(line) <= LONGEST else _broken(f"({', '.join(names)}) = {value}", LONGEST)


def _broken(text: str, most: int) -> str:
    """Text with the widest of its outermost brackets on lines of its own, one item a line; and so on inside what is still too long."""
    groups, depth, start = [], 0, 0
    plain = re.sub(r'"[^"]*"', lambda s: "_" * len(s[0]), text)  # what is in quotes is no bracket and no comma
    for i, c in enumerate(plain):
        if c in "([":
            depth += 1
            start = i if depth == 1 else start
        elif c in ")]":
            depth -= 1
            if depth == 0:
                groups.append((start, i))
    if len(text) <= most or not groups:
        return text
    start, end = max(groups, key=lambda g: g[1] - g[0])
    items, depth = [""], 0
    for c, p in zip(text[start + 1 : end], plain[start + 1 : end]):
        depth += (p in "([") - (p in ")]")
        if p == "," and depth == 0:
            items.append("")
        elif not (c == " " and not items[-1]):
            items[-1] += c
    comma = "," if len(items) > 1 or re.match(r"\w", text[start - 1 : start]) else ""
    lines = (
        "    " + _broken(item, most - 4).replace("\n", "\n    ") + (comma or "," * (k < len(items) - 1)) for k, item in enumerate(items)
    )
    return "\n".join([text[: start + 1], *lines, text[end:]])


def _one_a_line(name: str, args: list[str]) -> str:
    lines = (_broken(a, LONGEST).replace("\n", "\n    ") for a in args)
    return "\n".join([f"{name}(", *(f"    {line}," for line in lines), ")"])


def _fill(items: list[str], width: int) -> list[str]:
    """Items, comma after each, on as few lines as fit."""
    lines = [""]
    for item in items:
        text = f"{item},"
        if lines[-1] and len(lines[-1]) + 1 + len(text) > width:
            lines.append("")
        lines[-1] += f" {text}" if lines[-1] else text
    return lines
