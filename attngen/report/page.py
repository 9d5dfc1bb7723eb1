"""`attngen explain --html`: everything that the compiler knows about a spec, as one HTML page that loads no other
files."""

from __future__ import annotations

import json
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import sympy
import yaml
from markupsafe import Markup

from attngen.codegen.signature import Signature, signatures
from attngen.cost.flops import executed_flops, useful_flops
from attngen.cost.io import compulsory_bytes, hbm_bytes, standard_bytes
from attngen.cost.roofline import Problem
from attngen.devices import CLASSES, DEVICES
from attngen.errors import AttngenError
from attngen.ir import INEQUALITIES, Bool, Expr, Kernel, Module, launch, only, symbol, tile, to_text
from attngen.ir.split_axes import whole_range
from attngen.lowering.pipeline import unspecialized
from attngen.report.charts import UNLISTED
from attngen.report.elements import Sample
from attngen.report.environment import environment as environment
from attngen.report.explain import bounds
from attngen.report.lanes import lanes
from attngen.report.listing import changes, highlight
from attngen.report.mathml import SYMBOLS, MathML
from attngen.report.panels import TIGHT, device_panel, fit, what_runs
from attngen.report.tilemap import TileMap, portable_config, tile_maps
from attngen.spec import Spec
from attngen.targets.registry import SPECIALIZERS, backend_of
from attngen.tiles.tiles import extent, heads, tile_loops

KV = symbol("kv_idx")
SEES = "query q sees key k"  # the label of a mask's formula
CODE = (
    "__init__.py",
    "kernels.py",
    *(specializer.file for specializer in SPECIALIZERS.values()),
)  # of a module's files


def check_path(path: Path) -> None:
    """Raise AttngenError, in one sentence, if no page can be written to the path."""
    if path.suffix not in (".html", ".htm"):
        raise AttngenError(f"--html {path}: expected a name that ends in .html")
    if path.is_dir():
        raise AttngenError(f"--html {path}: is a folder; expected the name of a file")
    if not path.parent.is_dir():
        raise AttngenError(f"--html {path}: there is no folder {path.parent}; make it, or give another name")


def page(spec: Spec, text: str, steps: list[tuple[str, Module]], files: dict[str, str], problem: Problem) -> str:
    """Return the page of a spec, which loads no other file, from its file's text, the module after each pass (`steps`),
    the generated files, and a problem size."""
    return printed(explained(spec, text, steps, files, problem))


def printed(found: dict[str, Any], style_sheet: str = "", code_page: str = "") -> str:
    """Return the page with what `explained` returns.

    style_sheet: a style sheet to link to, instead of one inside the page.
    code_page: a page to link to that has the generated code, instead of the code.
    """
    template = environment().get_template("page.html.jinja")
    return template.render(found, style_sheet=style_sheet, code_page=code_page)


def style_sheet() -> str:
    """Return the style sheet of the page as a file."""
    return environment().get_template("style.css.jinja").render()


def explained(
    spec: Spec, text: str, steps: list[tuple[str, Module]], files: dict[str, str], problem: Problem
) -> dict[str, Any]:
    """Return everything that the page shows, by the names of its template."""
    logical, module = steps[0][1], steps[-1][1]
    typeset = MathML()
    report, sample = json.loads(files["report.json"]), Sample(spec)
    called = list(signatures(files["__init__.py"]))
    heads = f"Hq = {problem.q_heads}, Hkv = {problem.kv_heads}"
    context = {
        "module": module,
        "about": description(text),
        "size": f"B = {problem.batch}, {heads}, Nq = {problem.n_q}, Nk = {problem.n_kv}",
        "spec_text": text,
        "canonical": yaml.safe_dump(spec.canonical(), sort_keys=False, allow_unicode=True),
        "general": meaning(logical, module, typeset),
        "kernels": [_kernel(module, kernel, problem, typeset) for kernel in module.kernels],
        "signatures": called,
        "example": example(module, called),
        "pictures": sample.pictures,
        "maps": (maps := tile_maps(sample, module, problem)),
        "unlisted": any(isinstance(m, TileMap) and m.count(UNLISTED) for _, m in maps),
        "lanes": [(kernel.name, lanes(module, kernel)) for kernel in module.warp_specialized],
        "other_kernels": [sentence for kernel in module.kernels if (sentence := _other_kernel(module, kernel))],
        "tight": f"{TIGHT:.0%}",
        "unspecialized": list(unspecialized(spec, dict(steps)["dce"])),
        "runs": [(cls, what_runs(module, cls)) for cls in CLASSES],
        "fits": [fit(module, cls, problem, report) for cls in CLASSES],
        "devices": [device_panel(module, device, problem) for device in DEVICES.values()],
        "passes": list(changes(spec, steps)),
        "code_files": [(name, highlight(files[name])) for name in CODE if name in files],
    }
    return context | {"symbols": _legend(logical, module, typeset)}


def description(text: str) -> str:
    """Return the leading comment of a spec's file as one line."""
    lines = takewhile(lambda line: line.startswith("#"), text.splitlines())
    return " ".join(line.lstrip("# ") for line in lines)


def example(module: Module, called: list[Signature]) -> str:
    """Return a call of a module, with the arguments that it requires and those of the mask and modifiers."""
    s = next((s for s in called if module.cache and s.name.endswith("with_kvcache")), called[0])
    own = {i.name for i in module.inputs if not i.is_size}
    given = [name for name, _, default, _ in s.args if not default or name in own]
    words = [name if name in ("q", "k", "v") else f"{name}={name}" for name in given]
    lines = [
        "import attngen",
        f'attention = attngen.load("generated/{module.name}").attention  # the folder that `attngen build` wrote',
        f"out = {s.name}({', '.join(words)})",
    ]
    if "backward" in module.directions:
        lines.append("out.sum().backward()")
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------- formulas


class Formula(NamedTuple):
    """A label, a formula, and the relation between them."""

    label: str
    math: str  # MathML as Markup, or words
    relation: str = "="


class Group(NamedTuple):
    """Formulas under a heading."""

    title: str
    formulas: list[Formula]


def meaning(logical: Module, module: Module, typeset: MathML) -> list[Group]:
    """Return formulas for the mask and scores, before any choice of tiles, and for their FLOPs and bytes."""
    kernel = logical.kernels[0]
    masks = [op.where for op in only(kernel.ops(), tile.Mask)]
    visible = [Formula(SEES, typeset.math(where.replace(_is_inequality, _solved)), "where") for where in masks]
    if not masks:
        visible = [Formula(SEES, "always", "")]
    if module.blocks and not module.blocks.data:
        given = f"`{module.blocks.pattern}` makes" if module.blocks.pattern else "`block_mask=` of a call gives"
        visible.append(
            Formula(
                "",
                f"and where their block of {module.blocks.size} × {module.blocks.size} scores counts, as {given} them",
                "",
            )
        )
    visible += [Formula(name, typeset.math(expr)) for name, expr in _scores(kernel).items()]
    if module.dropout:
        visible.append(
            Formula("dropout", "of probabilities, by random numbers that depend only on (seed, b, h, q, kv)", "")
        )
    work = []
    for direction in module.directions:
        work.append(Formula(f"{direction}, FLOPs", typeset.math(useful_flops(module, direction))))
        work.append(
            Formula(f"{direction}, bytes of standard attention, a head", typeset.math(standard_bytes(direction)))
        )
    return [Group("What a query sees", visible), Group("Work", work)]


def _is_inequality(e: Any) -> bool:
    return isinstance(e, INEQUALITIES)


def _solved(inequality: Bool) -> Bool:
    """Return an inequality solved for the key's index; unchanged if it cannot be solved."""
    excess = sympy.expand(inequality.lts - inequality.gts)  # at most 0
    slope = excess.coeff(KV)
    if slope not in (1, -1) or KV in (excess - slope * KV).free_symbols:
        return inequality
    strict = isinstance(inequality, (sympy.Lt, sympy.Gt))
    relation = ((sympy.Lt if strict else sympy.Le), (sympy.Gt if strict else sympy.Ge))[slope == -1]
    return relation(KV, -slope * (excess - slope * KV))


def _scores(kernel: Kernel) -> dict[str, Expr]:
    """Return the steps from a product of a query and a key to its score, by name, with the kernel's scalars
    inlined."""
    maps = {op.name: op for op in only(kernel.ops(), tile.Map)}
    scalars = {symbol(name): op.expr for name, op in maps.items() if not op.type.dims}
    found: dict[str, Expr] = {}

    def add(op: tile.Map) -> None:
        for _, ref in op.uses:
            if ref in maps and symbol(ref) not in scalars:
                add(maps[ref])
        found[op.name] = op.expr.xreplace({symbol(name): symbol(ref) for name, ref in op.uses}).xreplace(scalars)

    for op in maps.values():
        if op.score:
            add(op)
    return found


def _kernel(module: Module, kernel: Kernel, problem: Problem, typeset: MathML) -> Group:
    found = [Formula("mask, where tiles need one", typeset.math(op.where), "") for op in only(kernel.ops(), tile.Mask)]
    iterations: Expr = sympy.Integer(0)
    for loop in tile_loops(kernel):
        parts = []
        for lo, hi in loop.ranges:
            _, (first, end) = whole_range(kernel.grid, lo, hi)
            iterations += end - first
            parts.append(typeset.between(lo, "j", hi))
        found.append(Formula(f"{loop.cls} tiles", Markup(" and ").join(parts), ""))
    positions = {op.name for op in only(kernel.ops(), tile.ListPosition)}
    of = "of the call" if kernel.traits.places else "listed"
    for name, value in bounds(kernel):
        if str(name) in positions:
            found.append(
                Formula(
                    str(name), Markup(f"how many of the tiles {of} come before tile {{}}").format(typeset.math(value))
                )
            )
        else:
            found.append(Formula(str(name), typeset.math(value)))
    if tile_loops(kernel):
        factors = symbol("B"), heads(kernel) / symbol("B")
        found.append(
            Formula(
                "tiles",
                typeset.sum_over_programs(
                    factors, iterations, kernel.program_axis, extent(kernel, kernel.program_axis)
                ),
            )
        )
        found.append(Formula("FLOPs", typeset.math(executed_flops(kernel))))
    found.append(Formula("bytes loaded and stored", typeset.math(hbm_bytes(kernel))))
    found.append(Formula("bytes, each tensor once", typeset.math(compulsory_bytes(kernel))))
    fits: dict[Expr, list[str]] = {}
    for cls in CLASSES:
        if config := portable_config(module, kernel, cls, problem):
            fits.setdefault(backend_of(config).resources.formula(module, kernel, config), []).append(cls)
    found += [Formula(f"SRAM bytes, {', '.join(names)}", typeset.math(formula)) for formula, names in fits.items()]
    return Group(f"@{kernel.name}", found)


def _legend(logical: Module, module: Module, typeset: MathML) -> list[tuple[Markup, str, str]]:
    """Return the symbols that the formulas use: their notation, their names in the IR, and their meaning."""
    meanings = {name: meaning for name, (_, _, meaning) in SYMBOLS.items()}
    meanings |= {i.name: i.help for i in module.inputs}
    meanings |= {name: f"computed by {d.function} before the kernels run" for d in module.derived for name in d.names}
    ops = (op for m in (logical, module) for kernel in m.kernels for op in kernel.ops())
    defined = {op.name for op in only(ops, tile.Map, tile.ListPosition)}
    order = [*meanings, *sorted(typeset.used - set(meanings))]
    used = [name for name in order if name in typeset.used and name not in defined]
    return [
        (typeset.math(symbol(name)), name, meanings.get(name, "a number that the kernel reads or computes"))
        for name in used
    ]


def _other_kernel(module: Module, kernel: Kernel) -> str:
    """Return a description of a kernel that most calls of a direction do not launch, so that the page shows no bytes
    and time for it; empty for other kernels."""
    if any(kernel in module.kernels_of(direction) for direction in module.directions):
        return ""
    forward = module.host("forward")
    launching = {
        block.name for block in forward.blocks if any(op.kernel == kernel.name for op in only(block.ops, launch.Launch))
    }
    where = next((to_text(op.where) for op in only(forward.ops(), launch.If) if op.then in launching), "")
    return f"@{kernel.name}{f', in place of @fwd where {where}' if where else ''}. {kernel.about}"
