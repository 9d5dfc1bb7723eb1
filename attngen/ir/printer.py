"""Print modules, kernels, host programs and ops as text, which ir/parser.py reads back.

One line per op: `%name = kind positional... key(value)... : type`. Fields with their default value are left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, fields

from attngen.ir.expr_text import to_text
from attngen.ir.fields import print_access, print_type
from attngen.ir.grid import GridAxis, KVSplit
from attngen.ir.kernel import Kernel
from attngen.ir.launch import Host
from attngen.ir.module import Config, DoesNotFit, Meaning, Module
from attngen.ir.op import Block, Op
from attngen.ir.syntax import HEADER, IR_VERSION, MASKS, MEANING, SCORES, WARP_GROUP_WORDS


def print_op(op: Op) -> str:
    """One op as one line of text."""
    kinds, positional = op.declared.kinds, op.declared.positional
    words = [op.kind, *(kinds[name].print(getattr(op, name)) for name in positional)]
    for f in fields(op):
        value = getattr(op, f.name)
        if (
            f.name in ("name", "type", *positional)
            or value in (None, ())
            or (f.default is not MISSING and value == f.default)
        ):
            continue
        words.append(f"{f.name}({kinds[f.name].print(value)})")
    line = " ".join(words)
    if op.declared.has_result:
        line = f"%{op.name} = {line}"
    return f"{line} : {print_type(op.type)}" if hasattr(op, "type") else line


def print_host(host: Host) -> str:
    """A host program: its header and blocks."""
    return "\n".join([f"host @{host.name}", *_print_blocks(host.blocks)])


def _print_blocks(blocks: Iterable[Block]) -> list[str]:
    found = []
    for block in blocks:
        about = [f"    about {block.about}"] if block.about else []
        found += [
            f"  {_print_warp_group(block)}" if block.warp_group else f"  block @{block.name}",
            *about,
            *(f"    {print_op(op)}" for op in block.ops),
        ]
    return found


def _print_warp_group(block: Block) -> str:
    """The first line of a warp group: `warp_group @consumer instances(2) rows(64) warps(4) registers(240)`."""
    given = [(word, getattr(block.warp_group, word)) for word in WARP_GROUP_WORDS]
    return " ".join([f"warp_group @{block.name}", *(f"{word}({n})" for word, n in given if n)])


def print_kernel(kernel: Kernel) -> str:
    """A kernel's header and blocks."""
    axes = (
        f"{a.var} in {to_text(a.extent)}{' reversed' if a.reversed else ''}{_print_swizzle(a)}" for a in kernel.grid
    )
    axis = f" program_axis({kernel.axis})" if kernel.axis else ""
    backend = f" backend({kernel.backend})" if kernel.backend else ""
    ctas_per_sm = f" ctas_per_sm({kernel.ctas_per_sm})" if kernel.ctas_per_sm > 1 else ""
    of = f" variant_of(@{kernel.of})" if kernel.of else ""
    words = " pack_gqa" * kernel.pack_gqa + " launch_dependents" * kernel.launches_dependents
    grid = f" grid({', '.join(axes)}){_print_kv_split(kernel.kv_split)}"
    header = f"kernel @{kernel.name}{of}{backend}{ctas_per_sm}{axis}{words}{grid}"
    return "\n".join([header, *([f"  about {kernel.about}"] if kernel.about else []), *_print_blocks(kernel.blocks)])


def _print_kv_split(kv_split: KVSplit | None) -> str:
    if kv_split is None:
        return ""
    how = (
        f" ctas_per_sm({kv_split.ctas_per_sm}) waves({kv_split.waves})"
        if (kv_split.ctas_per_sm, kv_split.waves) != (KVSplit.ctas_per_sm, KVSplit.waves)
        else ""
    )
    how += f" ctas_per_sm_packed({kv_split.ctas_per_sm_packed})" if kv_split.ctas_per_sm_packed else ""
    reads = f" of({', '.join(f'{name}={print_access(at)}' for name, at in kv_split.reads)})" if kv_split.reads else ""
    return f" split_kv({to_text(kv_split.work)}{f', {kv_split.each}' if kv_split.each else ''}){reads}{how}"


def _print_swizzle(axis: GridAxis) -> str:
    words = f" swizzle({axis.swizzle})" if axis.swizzle > 1 else ""
    words += f" swizzle_rows({axis.swizzle_rows})" if axis.swizzle_rows else ""
    return words + " reversed_group" * axis.reversed_group


def _print_config(config: Config | DoesNotFit, backend: str) -> str:
    if isinstance(config, DoesNotFit):
        return f"  {config.device} bytes={config.elem_bytes} none : {config.reason}"
    rows = [f"rows>{config.min_rows}"] if config.min_rows else []
    if config.max_rows is not None or not rows:
        rows.append(f"rows<={'inf' if config.max_rows is None else config.max_rows}")
    return (
        f"  {config.device} bytes={config.elem_bytes} {' '.join(rows)} :"
        f" BLOCK_Q={config.block_q} BLOCK_KV={config.block_kv}{f' BLOCK_D={config.columns}' * bool(config.columns)}"
        f" num_warps={config.num_warps} num_stages={config.num_stages}"
        f"{' TMA=1' * config.tma}{' measured' * config.measured}"
        f"{f' backend={config.backend}' if config.backend != backend else ''}"
    )


def _print_meaning(meaning: Meaning, words: dict[str, str]) -> str:
    """The meaning of a mask or of modifiers, after their text: `where(...) known(...)`."""
    given = ((word, getattr(meaning, name)) for word, name in words.items())
    return " ".join(f"{word}({MEANING[word].print(value)})" for word, value in given if value not in (None, ()))


def print_module(module: Module) -> str:
    """The whole module as text; `parse_module` reads it back."""
    scored = module.score != "none" or (module.meaning.score, module.meaning.sink) != (Meaning.score, None)
    lines = [
        HEADER,
        f"module @{module.name}",
        f"  ir {IR_VERSION}",
        f"  version {module.version}",
        f"  spec {module.spec_hash}",
        f"  phase {module.phase}",
        f"  backend {module.backend}",
        f"  heads {module.sharing}",
        f"  head_dim qk={module.head_dim_qk} v={module.head_dim_v}",
        f"  dtype {' '.join(module.dtypes)}",
        f"  precision {module.precision}",
        f"  mask {module.mask} {_print_meaning(module.meaning, MASKS)}",
        *([f"  score {module.score} {_print_meaning(module.meaning, SCORES)}"] if scored else []),
        *([f"  order {module.order}"] if module.order != "q_outer" else []),
        f"  blocks {module.blocks.describe() if module.blocks else 'no'}",
        f"  dropout {'yes' if module.dropout else 'no'}",
        *([f"  cache {module.cache.describe()}"] if module.cache else []),
        *([f"  latent rope={module.rope}"] if module.rope else []),
        *([f"  outputs {' '.join(module.outputs)}"] if module.outputs != ("lse",) else []),
        *([f"  chunk {module.chunk}"] if module.chunk else []),
    ]
    for i in module.inputs:
        options = f"{' '.join(i.options)} | " if i.options else ""
        lines.append(f"  input {i.name} : {i.dtype}[{', '.join(i.shape)}] {options}{i.help}")
    for d in module.derived:
        names = (
            f"{name}[{', '.join(shape)}]{' rising' * (name in d.rising)}" for name, shape in zip(d.names, d.shapes)
        )
        lines.append(f"  derive {d.dtype} {' '.join(names)} = {d.function}({', '.join(d.sources)})")
    for r in module.meaning.reads:
        lines.append(f"  read {r.name} from {r.tensor}[{', '.join(map(to_text, r.index))}]")
    for x in module.input_gradients:
        lines.append(f"  gradient {x} from {x.partials}")
    for host in module.hosts:
        lines += ["", print_host(host)]
    for kernel in (*module.kernels, *module.warp_specialized):
        lines += ["", print_kernel(kernel)]
    for name, configs in module.schedules:
        lines += ["", f"schedule @{name}", *(_print_config(config, module.backend) for config in configs)]
    return "\n".join(lines) + "\n"
