"""Target modules to files: Jinja prints the views, nothing else. The same module gives the same bytes."""

from __future__ import annotations

import inspect
import json
import re
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from attngen.devices import CLASSES, FALLBACK_CUDA, FALLBACK_HIP
from attngen.emit.context import KernelContext, KernelView, stride_names
from attngen.errors import AttngenError, suggest
from attngen.ir.graph import Blocks, Kernel, Module, Unfit
from attngen.ir.interface import BLOCK_LISTS, DROPOUT_SCALARS, verify_interface
from attngen.ir.text import print_module
from attngen.masks import derive_functions

WIDTH = 100
LONGEST = 120  # of an assignment, without its indentation
_TORCH = {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp32": "torch.float32", "b1": "torch.bool", "i32": "torch.int32"}


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
_SIZES["group"] = "q.shape[1] // k.shape[1]"
_TENSORS = {"O": "out", "dO": "grad_out"}


def templates_dir() -> Path:
    """The templates: in the wheel inside the package, in a checkout beside it."""
    packaged = Path(str(resources.files("attngen"))) / "templates"
    return packaged if packaged.is_dir() else packaged.parent.parent / "templates"


def render(module: Module) -> dict[str, str]:
    """The generated files of a target module by name: `__init__.py`, `kernels.py`, `schedule.ir`, `report.json`."""
    from attngen.analysis.report import report

    verify_interface(module)
    views = {kernel.name: KernelContext(module, kernel).view() for kernel in module.kernels}
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
    env.globals["launch"] = lambda name: _launch(module.kernel(name), views[name])
    env.globals["key_kernels"] = [kernel.name for kernel in module.kernels if kernel.own_axis == "kv"]
    env.filters["fill"] = _fill
    return {
        "__init__.py": env.get_template("triton/module.py.jinja").render(_module_context(module)),
        "kernels.py": env.get_template("triton/kernels.py.jinja").render(_kernels_context(module, views)),
        "schedule.ir": print_module(module),
        "report.json": json.dumps(report(module), indent=2) + "\n",
    }


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
        "fallback_cuda": FALLBACK_CUDA,
        "fallback_hip": FALLBACK_HIP,
    }


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
            entry = classes.setdefault(f'("{row.device}", {row.elem_bytes})', [])
            entry.append((row.max_rows, json.dumps(config)))
        out.append((kernel, list(classes.items())))
    return out


def _module_context(module: Module) -> dict[str, Any]:
    given = [i.name for i in module.inputs]
    lists = [name.lower() for own in BLOCK_LISTS.values() for name in own] if module.blocks else []
    tensors = given + [name for d in module.derived for name in d.names] + lists + ["seed"] * module.dropout
    scalars = list(DROPOUT_SCALARS) if module.dropout else []
    keywords = [f"{name}: torch.Tensor" for name in given]
    if module.blocks:
        keywords.append("block_mask: torch.Tensor | BlockPlan" + (" | None = None" if module.blocks.pattern else ""))
    if module.dropout:
        keywords += ["dropout_p: float = 0.0", "seed: int | torch.Tensor | None = None"]
    dropping = ["dropout_p=self.dropout_p if self.training else 0.0"] if module.dropout else []
    passed = [k.partition(":")[0] for k in keywords if not k.startswith("dropout_p")]
    kinds = {"seed": "Tensor?", "dropout_threshold": "int", "keep_scale": "float", "scale": "float"}
    qk, v = module.head_dim_qk, module.head_dim_v
    return {
        "module": module,
        "sharing": _SHARING[module.sharing],
        "head_dim_help": f"{qk}" if qk == v else f"{qk} for q and k, {v} for v",
        "dtype_help": ", ".join(module.dtypes) + (f" (fp32 products in {module.precision})" if "fp32" in module.dtypes else ""),
        "interpreted_in_fp32": _TORCH["bf16"] if "bf16" in module.dtypes else "",
        "torch_dtypes": _tuple([_TORCH[d] for d in module.dtypes]),
        "input_types": {i.name: _TORCH[i.dtype] for i in module.inputs},
        "input_shapes": {i.name: ", ".join(_SIZES[d] for d in i.shape) for i in module.inputs},
        "input_args": "".join(f", {n}" for n in given),
        "keywords": keywords,
        "keyword_args": [f"{n}={n}" for n in passed] + dropping + ["scale=self.scale", "return_lse=return_lse"],
        "tensors": tensors,
        "scalars": scalars,
        "operands": tensors + scalars,
        "operands_in": [f"blocks.{n}" if n in lists else n for n in tensors + scalars],
        "operand_schema": [f"{kinds.get(n, 'Tensor')} {n}" for n in (*tensors, *scalars, "scale")],
        "pattern_call": _pattern_call(module.blocks) if module.blocks else "",
        "pattern_source": _source(module.blocks.pattern) if module.blocks and module.blocks.pattern else "",
        "derive_functions": [_source(name) for name in dict.fromkeys(d.function for d in module.derived)],
        "input_params": "".join(f", {n}: torch.Tensor" for n in given),
    }


def _pattern_call(blocks: Blocks) -> str:
    """The call that makes the mask of a pattern's blocks."""
    sizes = [f"-(-{n} // BLOCK)" for n in ("n_q", "n_kv")]
    return f"{blocks.pattern}({', '.join([*sizes, 'device', *(f'{name}={value}' for name, value in blocks.params)])})"


def _source(function: str) -> str:
    """The source of a function that a mask declares; AttngenError if none does."""
    known = derive_functions()
    if function not in known:
        raise AttngenError(f"`derive` names the function `{function}`, which no mask in attngen/masks declares; {suggest(function, known)}")
    return inspect.getsource(known[function])


def _launch(kernel: Kernel, view: KernelView) -> str:
    """Statements that launch a kernel on the tensors of the wrapper."""
    own = kernel.own_axis
    rows = _SIZES[{"q": "Nq", "kv": "Nk"}[own]]
    block = {"q": "BLOCK_Q", "kv": "BLOCK_KV"}[own]
    heads = [_SIZES[str(axis.extent)] for axis in kernel.grid[1:]]
    args = [_TENSORS.get(a.name, a.name.lower()) for a in kernel.args if a.role != "scalar"]
    args += [_SIZES.get(a.name, a.name) for a in kernel.args if a.role == "scalar"]
    for a in (a for a in kernel.args if a.role != "scalar"):
        tensor, strides = _TENSORS.get(a.name, a.name.lower()), stride_names(a)
        taken = [i for i, s in enumerate(strides) if s in view.params]
        if len(taken) > 1 and len(taken) == len(strides):
            args.append(f"*{tensor}.stride()[:{len(strides)}]")
        else:
            args += [f"{tensor}.stride({i})" for i in taken]
    grid = " * ".join([f'triton.cdiv({rows}, config["{block}"])', *heads])
    tensor = "q" if any(a.name == "Q" for a in kernel.args) else "out"
    return "\n".join(
        [
            f'config = kernels.schedule("{kernel.name}", {tensor}, {rows})',
            f"grid = ({grid},)",
            f"kernels.{kernel.name}[grid](",
            *(f"    {line}" for line in _fill(args, WIDTH - 16)),
            *(["    DROPOUT=seed is not None,"] if view.dropout else []),
            "    **config,",
            ")",
        ]
    )


def _call(name: str, args: list[str]) -> str:
    """A call on one line where it fits, else one argument a line."""
    line = f"{name}({', '.join(args)})"
    if len(line) <= WIDTH - 12:
        return line
    return _one_a_line(name, args)


def _tuple(items: list[str]) -> str:
    """A tuple as Python writes it; empty text if there is nothing in it."""
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})" if items else ""


def _assign(var: str, expr: str) -> str:
    """An assignment, on one line where it fits; a call that does not has one argument a line."""
    line = f"{var} = {expr}"
    if len(line) > LONGEST and re.fullmatch(r"\w+( \+ [\w.]+\([^()]*\) \* \w+)+", expr):  # a pointer: one stride a line
        first, *rest = re.split(r" \+ (?=tl)", expr)
        return "\n".join([f"{var} = (", f"    {first}", *(f"    + {term}" for term in rest), ")"])
    return _broken(line, LONGEST)


def _broken(text: str, most: int) -> str:
    """Text with the widest of its outermost brackets on lines of its own, one item a line; and so on inside what is still too long."""
    groups, depth, start = [], 0, 0
    for i, c in enumerate(text):
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
    for c in text[start + 1 : end]:
        depth += (c in "([") - (c in ")]")
        if c == "," and depth == 0:
            items.append("")
        elif not (c == " " and not items[-1]):
            items[-1] += c
    comma = "," if len(items) > 1 or re.match(r"\w", text[start - 1 : start]) else ""
    lines = (
        "    " + _broken(item, most - 4).replace("\n", "\n    ") + (comma or "," * (k < len(items) - 1)) for k, item in enumerate(items)
    )
    return "\n".join([text[: start + 1], *lines, text[end:]])


def _one_a_line(name: str, args: list[str]) -> str:
    return "\n".join([f"{name}(", *(f"    {a}," for a in args), ")"])


def _fill(items: list[str], width: int) -> list[str]:
    """Items, comma after each, on as few lines as fit."""
    lines = [""]
    for item in items:
        text = f"{item},"
        if lines[-1] and len(lines[-1]) + 1 + len(text) > width:
            lines.append("")
        lines[-1] += f" {text}" if lines[-1] else text
    return lines
