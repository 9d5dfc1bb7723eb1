"""Drawing of the timeline of a warp-specialized kernel: lanes for its warp groups, the stages of its pipelines, and
wgmmas in flight."""

from __future__ import annotations

from html import escape
from pathlib import Path

from attngen.errors import AttngenError
from attngen.ir import Kernel, Module, only, pipe, tile
from attngen.report.charts import Drawing, Shape, path, rect, text
from attngen.report.environment import SCHEMES, colours
from attngen.report.launches import GROUPS
from attngen.report.timeline import ENDING, RESULTS, SCORES, SOFTMAX, STARTED, STORED, TURN, Span, Timeline

LEFT, STEP, LANE, BAR, TOP = 184, 12, 22, 16, 30  # sizes of the drawing
WIDEST = 900  # width from which on legends are wrapped
# Classes of the page's style sheet, and their meaning; those of products get the names of the products.
MEANING = {
    STARTED: "issues TMA load",
    "track": "TMA load in flight",
    "unlisted": "stage full",
    "full": "stage in use",
    SCORES: "",
    "partial": "softmax",
    RESULTS: "",
    "hollow": "other arithmetic",
    ENDING: "epilogue",
    STORED: "TMA store or add in flight",
    TURN: "ping-pong barrier",
}
STYLE = """
  svg {{ background: {page}; font: 12px system-ui, sans-serif; }}
  text {{ fill: {text}; stroke: {page}; stroke-width: 3px; stroke-linejoin: round; paint-order: stroke; }}
  .faint {{ fill: {faint}; }} .strong {{ font-weight: 600; }}
  .axis {{ fill: none; stroke: {line}; }} .leader {{ fill: none; stroke: {faint}; stroke-width: .8; }}
  .turn {{ fill: none; stroke: {tight}; stroke-width: 2.5; }}
  .track {{ fill: {track}; }} .unlisted {{ fill: {unlisted}; }} .full {{ fill: {full}; }}
  .partial {{ fill: {partial}; }} .hollow {{ fill: {page}; stroke: {partial}; stroke-width: 1; }}
  .bar {{ fill: {bar}; }} .bar.deep {{ fill: {deep}; }} .bar.tight {{ fill: {tight}; }} .bar.other {{ fill: {other}; }}
  .bar.ending {{ fill: {ending}; }}
"""


def style(scheme: str) -> str:
    """Return the style sheet of an SVG file in a scheme, without variables, which few programs other than browsers
    know."""
    return STYLE.format(**colours(scheme))


def lanes(module: Module, kernel: Kernel) -> Drawing:
    """Draw the timeline of a warp-specialized kernel, at the number of stages of its first config."""
    config = module.configs(kernel.name, kernel.backend)[0]
    line = Timeline(kernel, config.num_stages)
    names = _order(kernel, line)
    called = {name: _called(kernel, line, name) for name in names}
    width, bottom = LEFT + STEP * line.end + 12, TOP + LANE * len(names)
    shapes = [text(0, 12, f"@{kernel.name}, in steps", "strong")]
    for step in range(0, line.end + 1, 2 * SOFTMAX):
        shapes.append(path([(LEFT + STEP * step, TOP - 6), (LEFT + STEP * step, bottom)], "axis"))
        if LEFT + STEP * step + 12 <= width:
            shapes.append(text(LEFT + STEP * step, TOP - 10, str(step), "faint", "middle"))
    for i, name in enumerate(names):
        y = TOP + LANE * i
        shapes.append(text(LEFT - 8, y + BAR - 4, called[name], anchor="end"))
        spans = (s for s in line.spans if s.lane == name and s.end > s.start)
        for span in sorted(spans, key=lambda s: (s.cls != "leader", s.cls == TURN)):
            shapes += _bar(span, y)
    legend, bottom = _legend(_meanings(line), bottom + 14, min(width, WIDEST))
    says = f"{', '.join(called.values())}, over {line.end} steps"
    stuck = [_called(kernel, line, name) for name in line.stuck]
    says += f"; {' and '.join(stuck)} wait for ever" if stuck else ""
    return Drawing(width, bottom, f"Warp groups of @{kernel.name} over time", says, shapes + legend)


def _meanings(line: Timeline) -> dict[str, str]:
    """Return the meaning of each class that a timeline has."""
    seen = {span.cls for span in line.spans if span.end > span.start}
    named: dict[str, list[str]] = {SCORES: [], RESULTS: []}
    for op in line.kernel.ops():
        if isinstance(op, (pipe.Wgmma, tile.Dot)):
            product = line.products.of(op)
            named[SCORES if product.gives_scores else RESULTS].append(product.name)
    products = {cls: ", ".join(dict.fromkeys(names)) for cls, names in named.items()}
    return {cls: products.get(cls) or words for cls, words in MEANING.items() if cls in seen}


def _order(kernel: Kernel, line: Timeline) -> list[str]:
    """Return the names of lanes from the top: producers, pipelines, and the other warp groups, each with its
    wgmmas."""
    producers = {b.name for b in kernel.warp_groups if any(only(kernel.within(b.name), pipe.ProducerLoad))}
    found = [agent.name for agent in line.agents if agent.name.split()[0] in producers]
    found += [f"{pipeline} {stage}" for pipeline, stages in line.stages.items() for stage in range(stages)]
    for agent in line.agents:
        found += [] if agent.name in found else [agent.name, f"products of {agent.name}"]
    drawn = {span.lane for span in line.spans}
    return [name for name in found if name in drawn or name in {agent.name for agent in line.agents}]


def _called(kernel: Kernel, line: Timeline, lane: str) -> str:
    """Return a lane's name for readers: `K_pipeline 0` is stage 0 of K, `consumer 0` is consumer warp group 1."""
    pipeline, is_stage, stage = lane.partition("_pipeline ")
    if is_stage:
        what = "tile scheduler" if pipeline == "Work" else pipeline.replace("_", " ")
        stored = {op.staging for op in only(kernel.ops(), pipe.TmaStore)}
        if f"{pipeline}_pipeline" in stored and not line.uses[f"{pipeline}_pipeline"]:
            return f"{what}, TMA store"
        return f"{what}, stage {stage}"
    name = lane.removeprefix("products of ")
    agent = next(agent for agent in line.agents if agent.name == name)
    group = line.group_of(agent)
    number = f" {int(name.split()[-1]) + 1}" if group.instances > 1 else ""
    warps = "warp group" if group.warps > 1 else "warp"
    word = GROUPS.get(agent.home, agent.home)
    return f"wgmma of {word}{number}" if lane != name else f"{word} {warps}{number}"


def _bar(span: Span, y: float) -> list[Shape]:
    x, right = LEFT + STEP * span.start, LEFT + STEP * span.end
    if span.cls == "leader":
        return [path([(x, y + BAR / 2), (right, y + BAR / 2)], "leader")]
    if span.cls == TURN:
        return [path([(x, y - 2), (x, y + BAR + 2)], TURN)]
    shapes = [rect(x, y, right - x, BAR, span.cls, f"{span.hint}, steps {span.start} .. {span.end}")]
    label = text((x + right) / 2, y + BAR - 4, span.label, anchor="middle")
    return [*shapes, label._replace(attributes={**label.attributes, "font-size": "10"})] if span.label else shapes


def _legend(meanings: dict[str, str], y: float, width: float) -> tuple[list[Shape], int]:
    """Return the legend of the colours, wrapped into lines, and the y at which it ends."""
    shapes: list[Shape] = []
    x = 0.0
    for cls, words in {**meanings, "leader": "waits, or is in flight"}.items():
        size = 24 + 7.2 * len(words)
        x, y = (x, y) if x + size <= width or not x else (0.0, y + LANE)
        lines = {"leader": [(x, y + 6), (x + 12, y + 6)], TURN: [(x + 6, y - 1), (x + 6, y + 13)]}
        shapes.append(path(lines[cls], cls) if cls in lines else rect(x, y, 12, 12, cls))
        shapes.append(text(x + 17, y + 10, words))
        x += size + 10
    return shapes, int(y) + LANE


def svg(drawing: Drawing, scheme: str = "light") -> str:
    """Return a drawing as the text of an SVG file in a colour scheme."""
    size = f'viewBox="0 0 {drawing.width} {drawing.height}" width="{drawing.width}" height="{drawing.height}"'
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">']
    lines += [
        f"<title>{escape(drawing.title)}</title>",
        f"<desc>{escape(drawing.says)}</desc>",
        f"<style>{style(scheme)}</style>",
    ]
    for shape in drawing.shapes:
        attributes = "".join(f' {key}="{escape(value)}"' for key, value in shape.attributes.items())
        hint = f"<title>{escape(shape.hint)}</title>" if shape.hint else ""
        lines.append(f"<{shape.tag}{attributes}>{hint}{escape(shape.text)}</{shape.tag}>")
    return "\n".join([*lines, "</svg>", ""])


def write_lanes(module: Module, file: Path) -> list[Path]:
    """Write the timeline of a module's warp-specialized kernel in light colours, and in dark ones to a second file next
    to it: `x.svg` and `x-dark.svg`. AttngenError for another suffix, or without such a kernel."""
    if file.suffix != ".svg":
        raise AttngenError(f"--lanes {file}: expected a name that ends in .svg")
    if not module.warp_specialized:
        raise AttngenError(
            f"--lanes {file}: no kernel of {module.name} is warp-specialized here; `attngen dump` shows its kernels"
        )
    drawing = lanes(module, module.warp_specialized[0])
    files = [file, file.with_stem(f"{file.stem}-dark")]
    for path_of_scheme, scheme in zip(files, SCHEMES):
        path_of_scheme.write_text(svg(drawing, scheme), encoding="utf-8")
    return files
