"""The command `explain`: analysis of a spec's module, on the terminal or as a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attngen.cli.common import GENERATED, SpecPath, lower
from attngen.cli.console import head_dim, out
from attngen.cli.conventions import choice
from attngen.devices import LINKS
from attngen.errors import AttngenError

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

    from rich.console import RenderableType

    from attngen.cost.models import Model
    from attngen.cost.roofline import Problem
    from attngen.ir.module import Module
    from attngen.spec import Spec


Kernels = typer.Option("--kernels", help="also each kernel: bytes, shared memory, registers, compile reports")
Loops = typer.Option("--loops", help="also the ranges of each loop over tiles")
Formulas = typer.Option("--formulas", help="also closed forms of FLOPs, bytes, shared memory")
Json = typer.Option("--json", help="print the answers as JSON instead")
Theory = typer.Option("--theory", help="theorems instead: closed forms, orders, limits")
Gpus = typer.Option("--gpus", min=1, max=1024, help="predict context parallelism instead: GPUs of a node [default: 8]")
Nodes = typer.Option(
    "--nodes", min=1, max=1024, help="predict context parallelism instead: number of nodes [default: 1]"
)
Kind = choice(list(LINKS), help="with --gpus or --nodes: the kind of GPU")


DETAILS = """
The page of --html also has charts and maps of tiles, what each pass changes, and the generated code; it is one file
that loads no other. Keys of --json: module, mask, score, heads, head_dim, dtypes, size; devices, with their calls
(fits, seconds_at_least, bound, flops, hbm_bytes, loaded_bytes, extra_bytes, kernels); kernels, by device class and
rows of a call (more_than, at_most); does_not_fit; not_warp_specialized; inputs_that_hide_nothing (figures assume
that they do). The tables of --gpus and --nodes are explained below them, and in docs/distributed.md.
"""  # below the options in its help


def explain(
    spec: SpecPath,
    n: Annotated[int, typer.Option("--seq", min=1, max=2**24, help="queries and keys")] = 16384,
    batch: Annotated[int, typer.Option(min=1, max=2**16, help="sequences")] = 1,
    heads: Annotated[
        int | None, typer.Option(min=1, max=2**16, help="query heads [default: 16; 32 with --gpus or --nodes]")
    ] = None,
    kv_heads: Annotated[
        int | None, typer.Option(min=1, max=2**16, help="K/V heads of gqa [default: heads / 4]")
    ] = None,
    kernels: Annotated[bool, Kernels] = False,
    loops: Annotated[bool, Loops] = False,
    formulas: Annotated[bool, Formulas] = False,
    as_json: Annotated[bool, Json] = False,
    theory: Annotated[bool, Theory] = False,
    model: Annotated[
        str | None, typer.Option(help="with --theory, for a layer of this model, such as llama-70b")
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", help="write a page to this .html file instead")] = None,
    gpus: Annotated[int | None, Gpus] = None,
    nodes: Annotated[int | None, Nodes] = None,
    device: Annotated[str, Kind] = "H200",
) -> None:
    """Show if a spec fits, its least time, and which kernels run.

    For every device that attngen knows, at the problem size of the options: the least time by the roofline model,
    FLOPs, bytes of device memory, extra memory, and the kernels, portable or warp-specialized for Hopper, by the size
    of a call. No GPU is needed.

    With --gpus or --nodes, what the methods of context parallelism send, hold and take on a cluster.

    \b
    attngen explain causal_mqa
    attngen explain causal_gqa -n 4096 --heads 32 --kv-heads 8
    attngen explain causal_gqa --kernels --formulas
    attngen explain causal_gqa --json
    attngen explain causal_gqa --theory --model llama-70b -n 131072
    attngen explain causal_mqa --html causal_mqa.html
    attngen explain causal_gqa --gpus 8 --nodes 16 -n 1000000
    """
    from attngen.spec import load_spec

    loaded = load_spec(spec)
    cluster = (device, gpus or 8, nodes or 1) if gpus is not None or nodes is not None else None
    _check_options(theory, as_json, html, model, cluster)
    problem, sizes = _problem(spec, loaded, n, batch, heads or (32 if cluster else None), kv_heads, model)
    parts = [part for part, asked in (("kernels", kernels), ("loops", loops), ("formulas", formulas)) if asked]
    if cluster is not None:
        _print_cluster(spec, loaded, problem, cluster, formulas)
    elif html is not None:
        _write_page(spec, loaded, problem, html)
    elif as_json:
        _print_json(spec, loaded, problem)
    elif theory:
        _print_theory(spec, loaded, problem, sizes)
    else:
        for part in _explanation(spec, loaded, problem, parts):
            out.print(part)


def _check_options(theory: bool, as_json: bool, html: Path | None, model: str | None, cluster: Any) -> None:
    """Raise AttngenError for options that exclude each other."""
    if cluster is not None and (theory or as_json or html is not None or model is not None):
        raise AttngenError(
            "--gpus and --nodes print tables of their own; leave out --theory, --json, --html and --model"
        )
    if html is not None and theory:
        raise AttngenError("--html is a page of what `explain` shows without --theory; expected one of them")
    if as_json and (theory or html is not None):
        raise AttngenError("--json prints what `explain` shows without --theory and --html; expected one of them")
    if model is not None and not theory:
        raise AttngenError("--model is for the numbers of --theory; expected both or neither")


def _problem(
    path: Path, spec: Spec, n: int, batch: int, heads: int | None, kv_heads: int | None, model: str | None
) -> tuple[Problem, Model | None]:
    """Return the sizes of the options, and the model that they name."""
    from attngen.cost.models import find_model
    from attngen.cost.roofline import Problem

    sizes = find_model(model) if model is not None else None
    return Problem(batch, *_head_counts(path, spec, heads, kv_heads, sizes), n, n), sizes


def _print_theory(path: Path, spec: Spec, problem: Problem, model: Model | None) -> None:
    """Print the output of --theory."""
    from attngen.report.theory import explain_theory

    for part in explain_theory(lower(path, spec), problem, model):
        out.print(part)


def _head_counts(
    path: Path, spec: Spec, heads: int | None, kv_heads: int | None, model: Model | None
) -> tuple[int, int]:
    """Return the numbers of query heads and K/V heads, from the options or the model. Raise AttngenError if they do not
    match the spec."""
    from attngen.ir.heads import SHARINGS

    sharing, dim = spec.heads.sharing, spec.head_dim
    if kv_heads is not None and sharing != "gqa":
        raise AttngenError(f"--kv-heads is for gqa; {path} says {sharing}, whose number of K/V heads is fixed")
    if model is not None:
        if heads is not None or kv_heads is not None:
            raise AttngenError(f"--model {model.name} says how many heads there are; leave out --heads and --kv-heads")
        if sharing not in (model.sharing, "gqa") or (dim.qk, dim.v) != (model.head_dim_qk, model.head_dim_v):
            theirs = f"{model.sharing} with head dim {head_dim(model.head_dim_qk, model.head_dim_v)}"
            ours = f"{sharing} with head dim {head_dim(dim.qk, dim.v)}"
            raise AttngenError(f"--model {model.name} is {theirs}, and {path} is {ours}; expected a spec that agrees")
        heads, kv_heads = model.q_heads, model.kv_heads
    heads = heads or 16
    shared = kv_heads or SHARINGS[sharing].kv_heads(heads, 4)
    if heads % shared:
        raise AttngenError(f"--heads {heads} is not a multiple of --kv-heads {shared}")
    return heads, shared


def _print_cluster(path: Path, spec: Spec, problem: Problem, cluster: tuple[str, int, int], formulas: bool) -> None:
    """Print the output of --gpus and --nodes. Inputs of the mask are typical ones."""
    from attngen.codegen.wrapper import Wrapper
    from attngen.conformance.cases import make_mask_workload
    from attngen.distributed.model import Cluster, Heads
    from attngen.distributed.visible import count
    from attngen.heuristics import MOST_CHUNKS, PLANNED_TILE
    from attngen.ir.dtypes import ELEMENTS
    from attngen.ir.sizes import Sizes
    from attngen.report.distributed import explain_cluster

    if spec.cache:
        raise AttngenError(f"{path} has a KV cache, and --gpus is for training; expected a spec without `cache`")
    n, heads, kv_heads = problem.n_q, problem.q_heads, problem.kv_heads
    inputs = make_mask_workload(spec, Sizes(1, heads, kv_heads, n, n))
    least = spec.chunk or PLANNED_TILE
    chunk = least * -(-n // (least * MOST_CHUNKS))
    module = lower(path, spec)
    visible = count(module, n, chunk, inputs, q_heads=heads, kv_heads=kv_heads)
    undivided = "dropout depends on the number of a head" if spec.dropout else ""
    if not undivided and '"Hq"' not in Wrapper(module).shards:
        undivided = "the mask or the scores depend on the number of a head"
    elem = min(ELEMENTS[dtype].bytes for dtype in spec.dtype)
    sizes = Heads(problem.batch, heads, kv_heads, spec.head_dim.qk, spec.head_dim.v, elem)
    for part in explain_cluster(spec.name, visible, Cluster(*cluster), sizes, formulas, undivided):
        out.print(part)


def _lowered(path: Path, spec: Spec) -> tuple[Module, list[str]]:
    """Return the module of a spec, and sentences on why kernels are not warp-specialized."""
    from attngen.lowering.pipeline import stages, unspecialized
    from attngen.spec import naming

    with naming(path):
        steps = dict(stages(spec))
    *_, module = steps.values()
    return module, list(unspecialized(spec, steps["dce"]))


def _print_json(path: Path, spec: Spec, problem: Problem) -> None:
    """Print the output of --json."""
    from attngen.report.summary import summary

    module, reasons = _lowered(path, spec)
    print(json.dumps(summary(module, problem, reasons), indent=2))


def _explanation(path: Path, spec: Spec, problem: Problem, parts: Container[str]) -> Iterator[RenderableType]:
    """Return the output without --theory."""
    from attngen.certify.certificate import keep
    from attngen.codegen.render import render
    from attngen.report.explain import explain as explanation

    module, reasons = _lowered(path, spec)
    report: dict[str, Any] = {"kernels": {}}
    if "kernels" in parts:
        report = json.loads(keep(module, render(module), GENERATED / module.name)["report.json"])
    return explanation(module, problem, report, reasons, parts)


def _write_page(path: Path, spec: Spec, problem: Problem, html: Path) -> None:
    from attngen.certify.certificate import keep
    from attngen.codegen.files import write_file
    from attngen.codegen.render import render
    from attngen.lowering.pipeline import stages
    from attngen.report.page import check_path, page
    from attngen.spec import naming

    check_path(html)
    with naming(path):
        steps = list(stages(spec))
    files = keep(steps[-1][1], render(steps[-1][1]), GENERATED / spec.name)
    write_file(html, page(spec, path.read_text(encoding="utf-8-sig"), steps, files, problem))
    print(html)
