"""Views of host programs for the templates: the Python statement of each op, as strings.

Python variables are named after the IR's values, in small letters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy

from attngen.codegen.torch_text import to_torch
from attngen.ir import AXIS_DIM, AXIS_EXTENT, SPLIT_DIM, WHOLE, Host, Kernel, Module, Type, launch, only, tile
from attngen.ir.behaviour import Handlers, handles
from attngen.ir.dtypes import TORCH
from attngen.ir.expr import exp2, log2, select, symbol
from attngen.ir.expr_text import parse, to_text
from attngen.ir.names import BLOCKS, FOUND, INTEGERS, SIZES, VARIABLES, WHOLE_LENGTHS, stride_names
from attngen.targets.common.base import PrintedKernel
from attngen.targets.printing.layout import LONGEST, fitted, tuple_text

_WIDTHS = {"D_QK": "HEAD_DIM_QK", "D_V": "HEAD_DIM_V"}
_SHAPES = {name: source for name, source in FOUND.items() if source.startswith(("q.shape", "k.shape"))}
_COMPUTED = {name: source for name, source in FOUND.items() if name not in _SHAPES}  # each may need earlier ones


def sizes_of(used: Iterable[str]) -> list[str]:
    """Return statements that read the `used` sizes from the shapes of q and k; other names are ignored."""
    lines = []
    for first, tensor, names in ((0, "q", ("B", "Hq", "Nq")), (1, "k", ("Hkv", "Nk"))):
        found = [name for name in names if name in used]
        if found == list(names):
            lines.append(f"{', '.join(names)} = {tensor}.shape[{first or ''}:3]")
        else:
            lines += [f"{name} = {tensor}.shape[{first + names.index(name)}]" for name in found]
    return lines


@dataclass
class HostNode:
    """A view of one op: `kind` names the macro that prints it, `text` has the macro's strings, and `branches` the nodes
    of an `if`."""

    kind: str
    text: dict[str, Any]
    branches: list[list[HostNode]] = field(default_factory=list)


@dataclass
class HostView:
    """A host program as the template prints it."""

    params: list[str]
    sizes: list[str]  # statements that define sizes and strides
    nodes: list[HostNode]
    returned: str  # the statement that returns the results
    remembered: int  # number of its tensors if the runtime may record and replay it, else 0


@dataclass
class KernelHandle:
    """The runtime's object with which host programs launch a kernel."""

    variable: str
    args: list[str]  # arguments of runtime.Kernel


def variable(name: str) -> str:
    """The Python variable that holds a value of the IR."""
    name, _, member = name.partition(".")
    return VARIABLES.get(name, f"{name}_{member}".rstrip("_").lower())


def handle(kernel: Kernel, view: PrintedKernel) -> KernelHandle:
    """Return the handle of a kernel, with everything that the runtime needs to launch it."""
    args = ["kernels", f'"{kernel.name}"']
    if not kernel.traits.visits_all_tiles:
        args.append(f'"{AXIS_DIM[kernel.program_axis]}"')
    tensors = [a.name for a in kernel.args if a.role != "scalar"]
    described = [
        f'({at}, "{tile}")' for at, tile in ((at, _described(kernel, name)) for at, name in enumerate(tensors)) if tile
    ]
    numbers = _numbers(kernel)
    integers = {
        at: a.name for at, a in enumerate(numbers) if a.type.dtype == "i32" and a.name not in view.not_specialized
    }
    few = {name for name, n in INTEGERS.items() if n.is_("few")}
    heads = [str(at) for at, name in integers.items() if name in few]
    specialised = [str(at) for at, name in integers.items() if name not in few]
    flags = _flags(view)
    for name, items in (
        ("described", described),
        ("heads", heads),
        ("specialised", specialised),
        ("flags", [f'"{flag}"' for flag in flags]),
    ):
        args += [f"{name}={tuple_text(items)}"] if items else []
    return KernelHandle(kernel.name.upper(), args)


def _flags(view: PrintedKernel) -> dict[str, str]:
    """Return the flags for whose values a kernel is compiled, each with the Python expression of its value in a
    call."""
    return {
        **({"DROPOUT": "seed is not None"} if view.dropout else {}),
        **({"_INPUT_GRADIENTS": "need_inputs"} if view.sums_input_gradients else {}),
    }


def _numbers(kernel: Kernel) -> list[tile.Arg]:
    """Return a kernel's scalars in the order of its parameters: first those that a call passes, then sizes."""
    scalars = [a for a in kernel.args if a.role == "scalar"]
    return [a for a in scalars if a.name not in SIZES] + [a for a in scalars if a.name in SIZES]


def _described(kernel: Kernel, tensor: str) -> str:
    """Return the name of the tile size, such as `BLOCK_Q`, with which a kernel reads a tensor by descriptor; empty text
    if it reads it by pointers."""
    for op in kernel.ops():
        if isinstance(op, tile.Load) and op.via and kernel.accessed(op)[0].name == tensor:
            return AXIS_DIM[op.src.axes()[0]]
    return ""


class HostContext(Handlers, complete=launch.HOST, control=(tile.Arg,)):
    """Builds the view of one host program."""

    def __init__(self, module: Module, host: Host, views: Mapping[str, PrintedKernel]) -> None:
        self.module, self.host, self.views = module, host, views
        self.sizes: set[str] = set()  # sizes that the program's statements use
        self.strides: dict[str, int] = {}  # number of strides that launches take of each argument
        self.given_shapes = host.name == "forward"  # its callers may pass known sizes and strides
        tensors = [variable(a.name) for a in host.args if a.role == "in"]
        self.first = "q" if "q" in tensors else tensors[0]  # the program allocates and launches on its device

    def view(self) -> HostView:
        """Return the view of the whole program."""
        nodes = self._block("entry")
        params = [a.name if a.name in SIZES else variable(a.name) for a in self.host.args] + [
            "shapes=None"
        ] * self.given_shapes
        results = [variable(ref) for ref in self.host.results.values()]
        returned = f"return {', '.join(results)}" if results else ""
        returned = returned if len(returned) < LONGEST else fitted("return ", results, "")
        return HostView(params, self._definitions(), nodes, returned, self._remembered())

    def _remembered(self) -> int:
        """Return the number of the program's tensors if it is the backward, and only makes tensors by the runtime and
        launches kernels; else 0."""
        plain = all(
            isinstance(op, (tile.Arg, launch.If, launch.Launch, tile.Yield))
            or (isinstance(op, tile.Map) and not op.type.dims)
            or (
                isinstance(op, launch.Alloc)
                and not set(op.type.dims) & {"*", "Td"}
                and (op.fill is None or (op.fill == 0 and not op.like))
            )
            for op in self.host.ops()
        )
        return sum(a.role == "in" for a in self.host.args) if plain and self.host.name == "backward" else 0

    def _definitions(self) -> list[str]:
        """Return statements that define the sizes and strides that the other statements use."""
        used = set(self.sizes)
        for name in reversed(_COMPUTED):
            of_others = name in used and "." not in _COMPUTED[name]
            used |= {str(s) for s in parse(_COMPUTED[name]).free_symbols} if of_others else set()
            used |= {"Hq", "Hkv"} if name == "group" and name in used else set()
        strides = {name: name for name in self.strides}
        if self.given_shapes:
            names: list[str] = [name if name in used else "_" for name in ("B", "Hq", "Hkv", "Nq", "Nk")]
            names += [f"{strides.pop(name)}_strides" if name in strides else "_" for name in ("q", "k", "v")]
            lines = [f"{', '.join(names)} = shapes or runtime.shapes_of(q, k, v)"]
        elif {"Q", "K"} <= {a.name for a in self.host.args}:
            lines = sizes_of(used)
        else:
            lines = self.sizes_of_args(used)
        lines += [f"{name} = {text}" for name, text in _COMPUTED.items() if name in used]
        if strides:
            variables = ", ".join(f"{name}_strides" for name in strides)
            lines.append(fitted(f"{variables}{',' * (len(strides) == 1)} = runtime.strides", list(strides), ""))
        return lines

    def sizes_of_args(self, used: Iterable[str]) -> list[str]:
        """Return statements that read the `used` sizes from the shapes of the arguments."""
        known = {*self.host.by_name}
        lines = []
        for arg in self.host.args:
            new = set(arg.type.dims) & set(used) - known
            names = [dim if dim in new else "_" for dim in arg.type.dims]
            lines += [f"{', '.join(names)} = {variable(arg.name)}.shape"] if new else []
            known |= new
        return lines

    # ------------------------------------------------------------------ expressions

    def _python(self, e: Any) -> str:
        """Return the Python source of an expression of sizes and flags, and add the sizes to `self.sizes`."""
        self.sizes |= {str(s) for s in e.free_symbols} & (FOUND.keys() | self.host.sizes)
        if isinstance(e, select):
            where, then, orelse = map(self._python, e.args)
            return f"{then} if {where} else {orelse}"
        chosen = {choice: symbol(f"choice{i}") for i, choice in enumerate(sorted(e.atoms(select), key=str))}
        if chosen:
            texts = {str(name): f"({self._python(choice)})" for choice, name in chosen.items()}
            return re.sub(r"choice\d+", lambda name: texts[name[0]], self._python(e.xreplace(chosen)))
        return re.sub(r"(?<=\w)\*(?=[\w(])", " * ", to_text(e)).replace("divisor(", "runtime.divisor(")

    def _dim(self, dim: str) -> str:
        if dim in _WIDTHS:
            return _WIDTHS[dim]
        if blocks := re.fullmatch(BLOCKS, dim):
            return f"-(-{self._python(symbol(blocks[1]))} // {blocks[2]})"
        return self._python(sympy.Integer(int(dim)) if dim.isdigit() else symbol(dim))

    def _dense(self, dims: Iterable[str]) -> tuple[str, str]:
        """Return Python source for a contiguous tensor's shape and for its strides."""
        names = [self._dim(d) for d in dims]
        strides = [" * ".join(names[i + 1 :]) or "1" for i in range(len(names))]
        return tuple_text(names), tuple_text(strides)

    # ------------------------------------------------------------------ ops

    def _block(self, name: str) -> list[HostNode]:
        nodes = []
        for op in self.host.block(name).ops:
            if isinstance(op, tile.Arg) or (isinstance(op, tile.Yield) and name == "entry"):
                continue
            text = self.handler(op)(op)
            blocks = [block for block in (op.then, op.orelse) if block] if isinstance(op, launch.If) else []
            branches = [self._block(block) + self._fields(op, block) for block in blocks if isinstance(op, launch.If)]
            nodes.append(HostNode(op.kind, text, branches))
        return nodes

    def _fields(self, op: launch.If, block: str) -> list[HostNode]:
        """Return nodes that assign a branch's results to the variables of its `if`."""
        last = self.host.block(block).ops[-1]
        pairs = (
            [(variable(f"{op.name}.{f}"), variable(ref)) for f, ref in last.values]
            if isinstance(last, tile.Yield)
            else []
        )
        return (
            [HostNode("fields", {"names": [name for name, _ in pairs], "values": [value for _, value in pairs]})]
            if pairs
            else []
        )

    @handles(tile.Yield)
    def _yield(self, op: tile.Yield) -> dict[str, Any]:
        return {}

    @handles(launch.Alloc)
    def _alloc(self, op: launch.Alloc) -> dict[str, Any]:
        var, dims = variable(op.name), op.type.dims
        if op.otherwise:
            self._python(symbol("Hkv"))
            parts = self._python(symbol(dims[2]))
            return {
                "var": f"{var}, {var}_strides",
                "expr": f"runtime.room_for_splits({variable(op.otherwise)}, {parts})",
            }
        dtype = TORCH[op.type.dtype]
        like = variable(op.like) if op.like else self.first
        nothing = f"runtime.nothing({like})" if op.like else f"runtime.nothing({like}, {len(dims)}, {dtype})"
        if op.where == sympy.false:
            return {"var": var, "expr": nothing}
        if "Td" in dims:  # the number of rows depends on the kernel's schedule
            kernel = next(k.name for k in self.module.kernels if any(a.name == op.name for a in k.args))
            more = f", {' + '.join(WHOLE_LENGTHS.values())}" if self.module.chunk else ""
            args = f"{kernel.upper()}, q, k, {self._python(op.where)}{more}"
            return {"var": var, "expr": f"runtime.distance_parts({args})"}
        if op.like:
            made = f"runtime.empty_rows({like}, {_WIDTHS[dims[-1]]}{'' if op.type.dtype == 'T' else f', {dtype}'})"
        elif set(dims) & {"*"}:
            source = next(x.input for x in self.module.input_gradients if x.partials == op.name)
            made = f"torch.zeros_like({source}, dtype={dtype})"
            return {"var": var, "expr": f"{made} if {self._python(op.where)} else {nothing}"}
        else:
            make = f"runtime.{'zeros' if op.fill == 0 else 'empty'}"
            if op.fill_where != sympy.true:
                make = f"({make} if {self._python(op.fill_where)} else runtime.empty)"
            made = f"{make}({like}, {', '.join(self._dense(dims))}, {dtype})"
        if op.fill is not None and "runtime.zeros" not in made:
            made += ".zero_()" if op.fill == 0 else f".fill_({self._number(op.fill)})"
        if op.where != sympy.true:
            made += f" if {self._python(op.where)} else {nothing}"
        return {"var": var, "expr": made}

    def _number(self, e: Any) -> str:
        return "-math.inf" if e == -sympy.oo else to_text(e)

    @handles(launch.View)
    def _view(self, op: launch.View) -> dict[str, Any]:
        var, src = variable(op.name), variable(op.src)
        if op.by == "expand":
            return {"var": var, "expr": f"{src}.expand({self._dim('B')}, {self._dim('Hq')}, -1, -1)"}
        if op.by in launch.COLUMN_VIEWS:
            return {"var": var, "expr": f"{src}[..., {':HEAD_DIM_V' if op.by == 'first_columns' else 'HEAD_DIM_V:'}]"}
        if self._is_contiguous(op.name):
            return {"var": var, "expr": src}
        if op.by == "heads":
            return {"var": var, "expr": f"{src}.unflatten(1, ({self._dim('Hkv')}, {self._dim('group')}))"}
        options = ", fresh=True" * op.fresh + ", shaped=True" * self._is_described(op)
        return {"var": f"{var}, {var}_strides", "expr": f"runtime.by_group({src}, {self._dim('group')}{options})"}

    def _is_described(self, op: launch.View) -> bool:
        """True if a pack-GQA kernel gets columns of this view and has a warp-specialized form, which reads the view by
        TMA."""
        columns = {
            o.name for o in only(self.host.ops(), launch.View) if o.by in launch.COLUMN_VIEWS and o.src == op.name
        }
        launched = {o.kernel for o in only(self.host.ops(), launch.Launch) if columns & {ref for _, ref in o.args}}
        return any(kernel.name in launched for kernel in self.module.warp_specialized)

    @handles(launch.Copy)
    def _copy(self, op: launch.Copy) -> dict[str, Any]:
        return {"src": variable(op.src), "into": variable(op.into)}

    @handles(launch.If)
    def _if(self, op: launch.If) -> dict[str, Any]:
        some = [f"{variable(ref)}.numel()" for ref in op.of]
        either = " or ".join(some)
        condition = [f"({either})" if len(some) > 1 and op.where != sympy.true else either] if some else []
        return {"condition": " and ".join([*condition, *([self._python(op.where)] if op.where != sympy.true else [])])}

    @handles(launch.Sum)
    def _sum(self, op: launch.Sum) -> dict[str, Any]:
        dims = self.host.type_of(op.value).dims
        gone = [str(dims.index(d)) for d in op.over]
        value = variable(op.value)
        expr = f"{value}.sum({tuple_text(gone)})" if gone else value
        left = [d for d in dims if d not in op.over]
        if tuple(left) != op.type.dims:
            expr += f".permute({', '.join(str(left.index(d)) for d in op.type.dims)})"
        return {"var": variable(op.name), "expr": expr}

    @handles(launch.Place)
    def _place(self, op: launch.Place) -> dict[str, Any]:
        index = ", ".join("slice(None)" if at == ":" else at for at in op.at)
        return {"var": variable(op.name), "expr": f"runtime.placed({variable(op.value)}, {variable(op.like)}, {index})"}

    @handles(launch.SumDistances)
    def _sum_distances(self, op: launch.SumDistances) -> dict[str, Any]:
        at = next(i for i, e in enumerate(op.at) if "distance" in e)
        kept = tuple_text([{"b": "0", "h": "1"}[e] for e in op.at if e in ("b", "h")]) or "()"
        lengths = WHOLE_LENGTHS if self.module.chunk else {n: n for n in WHOLE_LENGTHS}
        n_q, n_kv = (self._dim(lengths[n]) for n in ("Nq", "Nk"))
        distance = f"torch.arange(-{n_q}, {n_kv}, device=q.device)"
        where = parse(op.at[at])
        self._python(where)
        index = to_torch(where, {"distance": distance})
        return {
            "var": variable(op.name),
            "expr": f"runtime.by_distance({variable(op.value)}, {variable(op.like)}, {at}, {kept}, {index})",
        }

    @handles(tile.Map)
    def _map(self, op: tile.Map) -> dict[str, Any]:
        if not op.type.dims:
            return {
                "var": op.name,
                "expr": self._python(op.expr),
                "comment": INTEGERS[op.name].about if op.name in INTEGERS else "",
            }
        return {"var": variable(op.name), "expr": self._elementwise(op.expr, dict(op.uses), op.type)}

    def _elementwise(self, e: Any, uses: dict[str, str], type_: Type) -> str:
        """Return the Python source of an expression of tensors; each tensor is broadcast to the named dimensions of the
        result."""
        if e.is_Symbol and str(e) in uses:
            dims = self.host.type_of(uses[str(e)]).dims
            index = [":" if d in dims else "None" for d in type_.dims]
            while index and index[0] == "None":
                del index[0]
            spread = f"[{', '.join(index)}]" if "None" in index and dims else ""
            return f"{variable(uses[str(e)])}{spread}"
        for function in (sympy.exp, exp2, log2):
            if isinstance(e, function):
                return f"torch.{function.__name__}({self._elementwise(e.args[0], uses, type_)})"
        if isinstance(e, (sympy.Max, sympy.Min)) and e.args[0].is_number:  # a tensor and a number
            bound, rest = "min" if isinstance(e, sympy.Max) else "max", self._elementwise(e.args[1], uses, type_)
            return f"{rest if rest.isidentifier() else f'({rest})'}.clamp({bound}={to_text(e.args[0])})"
        if e.is_Mul and e.args[0] == -1:
            return f"-{self._elementwise(-e, uses, type_)}"
        if e.is_Add or e.is_Mul:
            terms = sorted(e.args, key=lambda a: (a.could_extract_minus_sign(), not a.is_Function, str(a)))
            texts = [self._elementwise(a, uses, type_) for a in terms]
            text = (
                " + ".join(texts) if e.is_Add else " * ".join(f"({x})" if a.is_Add else x for a, x in zip(terms, texts))
            )
            return text.replace("+ -", "- ") if e.is_Add else text
        return to_text(e)

    @handles(launch.ClassifyBlocks)
    def _classify_blocks(self, op: launch.ClassifyBlocks) -> dict[str, Any]:
        names = [variable(f"{op.name}.{f}") for f in ("seen", "full")]
        sizes = f"{self._dim('Nq')}, {self._dim('Nk')}"
        return {"var": ", ".join(names), "expr": f"runtime.seen_and_full({variable(op.src)}, {sizes}, BLOCK)"}

    @handles(launch.ListBlocks)
    def _list_blocks(self, op: launch.ListBlocks) -> dict[str, Any]:
        masks = [variable(ref) for ref in (op.src, op.full) if ref]
        masks = [f"runtime.transposed({mask})" if op.own == "kv" else mask for mask in masks]
        fields = ("full_rank", "rank", "list") if op.full else ("rank", "list")
        function = "list_partial_blocks" if op.full else "list_blocks"
        return {
            "var": ", ".join(variable(f"{op.name}.{f}") for f in fields),
            "expr": f"runtime.{function}({', '.join(masks)})",
        }

    # ------------------------------------------------------------------ launches

    @handles(launch.Launch)
    def _launch(self, op: launch.Launch) -> dict[str, Any]:
        kernel, view = self.module.kernel(op.kernel), self.views[op.kernel]
        given, sizes = dict(op.args), dict(op.sizes)
        tensors = [a for a in kernel.args if a.role != "scalar"]
        cached = kernel.program_axis == "kv" and kernel.traits.reads_cache
        extent = "Nc" if cached else kernel.traits.extent(kernel.program_axis)
        axes = {a.var: sizes.get(str(a.extent), a.extent) for a in kernel.grid if a.var not in AXIS_EXTENT}
        if "KV_split" in axes:  # programs take one after another
            axes = {"KV_split": kernel.kv_split.programs * symbol("num_SMs")} if kernel.kv_split else axes
        heads, rows = sympy.Mul(*axes.values()), sizes.get(extent, symbol(extent))
        if kernel.traits.combines_splits:  # each program combines one row of one head
            heads, rows = sympy.Integer(1), heads * rows
        numbers = [
            self._python(sizes.get(a.name, symbol(a.name))) if a.name in SIZES else a.name for a in _numbers(kernel)
        ]
        strides: list[str] = []
        for a in tensors:
            names = stride_names(a.name, a.type.dims)
            strides += self._strides(
                given.get(a.name, a.name), [i for i, s in enumerate(names) if s in view.params], len(names)
            )
        flags = list(_flags(view).values())
        return {
            "handle": op.kernel.upper(),
            "x": variable(given.get(tensors[0].name, tensors[0].name)) if kernel.traits.prepares else self.first,
            "rows": self._python(rows),
            "heads": " * ".join([self._python(heads), *self._shares(kernel, rows)]),
            "tensors": [variable(given.get(a.name, a.name)) for a in tensors],
            "numbers": numbers,
            "strides": strides,
            "flags": flags,
        }

    def _shares(self, kernel: Kernel, rows: Any) -> list[str]:
        """Return Python source for the number of programs along a split head_dim, which the launch's schedule
        determines; an empty list if no head_dim is split."""
        if (axis := kernel.traits.split_d_axis) is None:
            return []
        block = SPLIT_DIM[axis.var]
        schedule = f'runtime.schedule(kernels, "{kernel.name}", {self.first}, {self._python(rows)})'
        return [f'-(-{_WIDTHS[WHOLE[block]]} // {schedule}["{block}"])']

    def _is_contiguous(self, ref: str) -> bool:
        """True if the tensor is allocated as contiguous, or is a view of such a tensor that only launches use. Its
        strides then follow from its dimensions."""
        op = self.host.by_name[ref]
        if isinstance(op, launch.View) and op.by in ("heads", "group"):
            users = (user for user in self.host.ops() if ref in user.operands())
            return self._is_contiguous(op.src) and all(isinstance(user, launch.Launch) for user in users)
        return isinstance(op, launch.Alloc) and not (op.like or op.otherwise) and op.where == sympy.true

    def _strides(self, ref: str, taken: list[int], count: int) -> list[str]:
        """Return the Python source of the strides that a kernel takes: `taken` are their dimensions, out of `count`
        dimensions without the last."""
        var, op = variable(ref), self.host.by_name[ref]
        if isinstance(op, launch.View) and op.by in launch.COLUMN_VIEWS:  # it has the strides of its source
            return self._strides(op.src, taken, count)
        if self._is_contiguous(ref):
            names = [self._dim(d) for d in self.host.type_of(ref).dims]
            return [" * ".join(names[i + 1 :]) for i in taken]
        if isinstance(op, launch.View) and op.by == "group":
            return [f"*{var}_strides[:{count}]"] if len(taken) == count else [f"{var}_strides[{i}]" for i in taken]
        if isinstance(op, launch.Alloc) and op.otherwise:
            return [f"*{var}_strides"] if len(taken) == count else [f"{var}_strides[{i}]" for i in taken]
        if len(taken) == count and count > 1:
            if isinstance(op, tile.Arg):
                self.strides[var] = count
                return [f"*{var}_strides"]
            return [f"*{var}.stride()[:{count}]"]
        if var in ("q", "k", "v"):
            self.strides[var] = count
            return [f"{var}_strides[{i}]" for i in taken]
        return [f"{var}.stride({i})" for i in taken]
