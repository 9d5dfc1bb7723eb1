"""Builds logical IR from a spec, one file per direction. Nothing is decided about tiles or devices."""

from __future__ import annotations

from collections.abc import Callable

from attngen import __version__
from attngen.builders.backward import build_dkdv, build_dkdv_end, build_dq, build_dq_end, build_fused, unfused
from attngen.builders.blocks import build_blocks
from attngen.builders.forward import build_forward, build_forward_end, build_forward_kv_outer
from attngen.builders.gradient_inputs import input_gradients
from attngen.builders.host import build_hosts
from attngen.builders.jvp import build_jvp
from attngen.builders.key_mass import build_key_mass
from attngen.builders.pack_gqa import PACKED
from attngen.builders.positions import with_chunk_inputs, with_lengths
from attngen.builders.programs import add_programs
from attngen.builders.results import with_results
from attngen.builders.row_statistics import build_delta
from attngen.builders.semantics import listed_blocks, meaning
from attngen.builders.serving import add_cache
from attngen.errors import BuildError
from attngen.ir import DEFAULT_BACKEND, Blocks, Kernel, Module
from attngen.ir.heads import SHARINGS
from attngen.spec import Spec

Build = Callable[[Spec], Kernel]
FORWARD_VARIANTS = (PACKED,)  # a call takes the first one whose condition holds, else @fwd


def build_module(spec: Spec) -> Module:
    """The logical module of a spec: its kernels, and the host programs that launch them.

    In FlashAttention-2's loop order (`q_outer`), each program owns a tile. The kernels are the forward and three of the
    backward, plus two of a fused backward if possible; also those of the FORWARD_VARIANTS that apply, and `blocks` if
    data decides which blocks of scores a call visits. In FlashAttention-1's order (`kv_outer`), programs loop over the
    key tiles of a head, and further kernels finish the tensors that these have rewritten. Specs with `backward: false`
    have only the kernels of the forward. If calls have chunks of a sequence, there is no forward mode.

    Raises BuildError if the spec asks for something that has no kernels.
    """
    blocks = listed_blocks(spec)
    _check_tiles(spec, blocks)
    forward: tuple[Build, ...]
    backward: tuple[Build, ...]
    forward, backward = {
        "q_outer": ((build_forward,), (build_dq, build_delta, build_dkdv)),
        "kv_outer": ((build_forward_kv_outer, build_forward_end), (build_delta, build_dkdv, build_dq_end)),
    }[spec.schedule.order]
    if SHARINGS[spec.heads.sharing].is_shared and spec.schedule.order == "q_outer":
        backward += (build_dkdv_end,)
    if not unfused(spec):
        backward += (build_fused, build_dq_end)
    kernels = tuple(build(spec) for build in (*forward, *(backward if spec.trains else ())))
    kernels += (build_jvp(spec),) if spec.trains and not spec.chunk else ()
    kernels += (build_key_mass(spec),) if "key_mass" in spec.outputs else ()
    variants = [variant for variant in FORWARD_VARIANTS if variant.applies(spec)]
    kernels += tuple(kernel for variant in variants for kernel in variant.kernels(spec))
    module = Module(
        name=spec.name,
        version=__version__,
        spec_hash=spec.hash(),
        phase="logical",
        backend=DEFAULT_BACKEND,
        sharing=spec.heads.sharing,
        head_dim_qk=spec.head_dim.qk,
        head_dim_v=spec.head_dim.v,
        dtypes=spec.dtype,
        precision=spec.fp32_precision,
        mask=spec.mask.describe(),
        score=", ".join(s.describe() for s in spec.score) or "none",
        order=spec.schedule.order,
        blocks=blocks,
        dropout=spec.dropout,
        inputs=spec.inputs(),
        derived=spec.derived(),
        chunk=spec.chunk,
        input_gradients=input_gradients(spec) if spec.trains else (),
        kernels=(*kernels, build_blocks(spec)) if blocks and blocks.data else kernels,
        meaning=meaning(spec),
        rope=spec.rope,
        outputs=spec.outputs,
    )
    module = build_hosts(with_chunk_inputs(module), variants, spec.trains)
    return add_programs(with_results(add_cache(with_lengths(module), spec)))


def _check_tiles(spec: Spec, blocks: Blocks | None) -> None:
    """Raise BuildError if the spec asks for tiles that do not divide the blocks that its mask lists, or chunks of a
    sequence; or for chunks that such blocks do not divide."""
    why = "its data says which count" if blocks and blocks.data else "`block_sparse` says which count"
    listed = f"the mask lists blocks of {blocks.size} x {blocks.size} scores ({why})" if blocks else ""
    for key, rows in (("block_q", spec.schedule.block_q), ("block_kv", spec.schedule.block_kv)):
        if blocks and rows and rows > blocks.size:
            found = f"is {rows}, and {listed}, which tiles divide"
            raise BuildError(("schedule", key), f"{found}; expected {blocks.size} or less")
        if rows and spec.chunk % rows:
            found = f"is {rows}, and calls have chunks of {spec.chunk} rows, which tiles divide"
            raise BuildError(("schedule", key), f"{found}; expected {spec.chunk & -spec.chunk} or less")
    if blocks and spec.chunk % blocks.size:
        found = f"is {spec.chunk}, and {listed}, which lie in chunks"
        raise BuildError(("positions", "chunk"), f"{found}; expected a multiple of {blocks.size}")
