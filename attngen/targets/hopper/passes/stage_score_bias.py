"""stage-score-bias: pass a bias per score, and its gradient, through shared memory by TMA in the fused backward.

Scores are transposed in the backward, so neighbours in registers are distant in the tensor, and their addresses would
take as many registers as the scores.

before:  block @step                         after:  block @entry
           %bias = load %BIAS[b, h, q, kv]             %BIAS_pipeline = pipeline stages(num_stages)
             : T[BLOCK_KV, BLOCK_Q]                      per_instance(consumer) mbarrier_release(yes)
           ...                                           : T[BLOCK_Q, BLOCK_KV]
           store %dBIAS[b, h, q, kv] %dbias          block @copy
           ...                                         producer_load %BIAS_pipeline %BIAS[b, h, q, kv]
                                                     block @step
                                                       %bias_tile = consumer_wait %BIAS_pipeline
                                                       %bias = local_load %bias_tile : T[BLOCK_KV, BLOCK_Q]
                                                       ...
                                                       tma_store %dBIAS[b, h, q, kv] %dbias staging(%BIAS_pipeline)
                                                       ...
                                                       tma_store_wait %BIAS_pipeline
                                                       consumer_release %bias_tile

A gradient is stored through the stage of its tile of the bias, after that tile has been read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from attngen.ir import AXIS_DIM, Block, Kernel, Module, Op, only, pipe, symbol, tile
from attngen.targets.hopper.configs.families import with_fused_backward
from attngen.transforms.base import Pass


@dataclass(frozen=True)
class StageScoreBias(Pass):
    name: ClassVar[str] = "stage-score-bias"
    phase: ClassVar[str] = "scheduled"

    def run(self, module: Module) -> Module:
        inputs = {x.partials: x.input.upper() for x in module.input_gradients if x.reduction == "score"}
        return with_fused_backward(module, lambda kernel: _through_pipelines(kernel, inputs))


def _through_pipelines(kernel: Kernel, inputs: dict[str, str]) -> Kernel:
    """inputs: tensor of gradients per score -> the tensor whose gradients they are."""
    loads = list(only(kernel.traits.of_pairs, tile.Load))
    if not loads:
        return kernel
    pipelines = {op.src.tensor: _pipeline(op) for op in loads}

    def change(_: str, op: Op) -> Iterator[Op]:
        if op in loads and isinstance(op, tile.Load):
            yield pipe.ConsumerWait(f"{op.name}_tile", pipelines[op.src.tensor].name, pipelines[op.src.tensor].type)
            yield pipe.LocalLoad(op.name, f"{op.name}_tile", op.type)
        elif isinstance(op, tile.Store) and op.dst.tensor in inputs:
            yield pipe.TmaStore(f"_tma_store_{op.value}", op.dst, op.value, pipelines[inputs[op.dst.tensor]].name)
        else:
            yield op

    changed = kernel.rewrite(change)
    return replace(changed, blocks=tuple(_with_ends(kernel, block, loads, pipelines) for block in changed.blocks))


def _pipeline(op: tile.Load) -> pipe.Pipeline:
    """The pipeline of a loaded tensor. Its tiles have the tensor's order of dimensions."""
    buffer = replace(op.type, dims=tuple(AXIS_DIM[axis] for axis in op.src.axes()), space="sram")
    return pipe.Pipeline(f"{op.src.tensor}_pipeline", buffer, symbol("num_stages"), "consumer", mbarrier_release=True)


def _with_ends(kernel: Kernel, block: Block, loads: list[tile.Load], pipelines: dict[str, pipe.Pipeline]) -> Block:
    """Add the ops that a block of its kind needs: the pipelines, their loads, their tails, or the releases at the end
    of an iteration."""
    if block.name == "entry":
        return replace(block, ops=(*block.ops, *pipelines.values()))
    if block.name == "producer":
        return replace(
            block,
            ops=(*block.ops, *(pipe.ProducerTail(f"_tail_{op.name}", pipelines[op.src.tensor].name) for op in loads)),
        )
    if block.name == "copy":
        loads_of_tiles = [pipe.ProducerLoad(f"_load_{op.name}", pipelines[op.src.tensor].name, op.src) for op in loads]
        at = next(
            at
            for at, op in enumerate(block.ops, 1)
            if isinstance(op, pipe.ProducerLoad) and op.pipeline == "Q_pipeline"
        )
        return replace(block, ops=(*block.ops[:at], *loads_of_tiles, *block.ops[at:]))
    waited = [op for op in loads if any(o.name == op.name for o in only(block.ops, pipe.LocalLoad))]
    if not waited:
        return block
    staged = {op.staging for op in only(block.ops, pipe.TmaStore)}
    ends: list[Op] = []
    for op in waited:
        pipeline = pipelines[op.src.tensor].name
        ends += [pipe.TmaStoreWait(f"_tma_store_wait_{pipeline}", pipeline)] if pipeline in staged else []
        ends.append(pipe.ConsumerRelease(f"_release_{op.name}_tile", f"{op.name}_tile"))
    return replace(
        block,
        ops=(
            *(op for op in block.ops if not isinstance(op, tile.Yield)),
            *ends,
            *only(block.ops, tile.Yield),
        ),
    )
