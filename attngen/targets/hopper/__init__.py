"""The backend for Hopper: warp-specialized forward, backward, forward-mode and MLA decode kernels, printed in Gluon."""

from __future__ import annotations

from attngen.targets.common.ahead import triton_version
from attngen.targets.common.base import Compiler, ResourceModel, Specializer
from attngen.targets.hopper.configs.registry import SPECIALIZATIONS
from attngen.targets.hopper.configs.sm90 import DEVICE, NAME
from attngen.targets.hopper.lowering.assign_barriers import AssignBarriers
from attngen.targets.hopper.lowering.lower_pipelines import LowerPipelines
from attngen.targets.hopper.passes.async_mma import AsyncMMA
from attngen.targets.hopper.passes.defer_row_reduction import DeferRowReduction
from attngen.targets.hopper.passes.exchange_p import ExchangeP
from attngen.targets.hopper.passes.hoist_bias import HoistBias
from attngen.targets.hopper.passes.insert_pipelines import InsertPipelines
from attngen.targets.hopper.passes.legalize import LegalizeGluon
from attngen.targets.hopper.passes.load_before_lookups import LoadBeforeLookups
from attngen.targets.hopper.passes.mask_out_of_bounds_queries import MaskOutOfBoundsQueries
from attngen.targets.hopper.passes.persistent_scheduler import PersistentScheduler
from attngen.targets.hopper.passes.ping_pong import PingPong
from attngen.targets.hopper.passes.prefetch_work_tiles import PrefetchWorkTiles
from attngen.targets.hopper.passes.reduce_dq import ReduceDQ
from attngen.targets.hopper.passes.skip_masked_tiles import SkipMaskedTiles
from attngen.targets.hopper.passes.software_pipeline_gradients import SoftwarePipelineGradients
from attngen.targets.hopper.passes.software_pipeline_softmax import SoftwarePipelineSoftmax
from attngen.targets.hopper.passes.software_pipeline_tangents import SoftwarePipelineTangents
from attngen.targets.hopper.passes.software_pipeline_weights import SoftwarePipelineWeights
from attngen.targets.hopper.passes.split_boundary_masks import SplitBoundaryMasks
from attngen.targets.hopper.passes.split_d_warp_groups import SplitDWarpGroups
from attngen.targets.hopper.passes.split_dq_reduction import SplitDQReduction
from attngen.targets.hopper.passes.split_softmax import SplitSoftmax
from attngen.targets.hopper.passes.stage_score_bias import StageScoreBias
from attngen.targets.hopper.passes.stage_tile_starts import StageTileStarts
from attngen.targets.hopper.passes.warp_specialize import WarpSpecialize
from attngen.targets.hopper.printing import kernels
from attngen.targets.hopper.toolchain import certificate, compiler, resources, rules

HOPPER = Specializer(
    name=NAME,
    device=DEVICE,
    specializations=SPECIALIZATIONS,
    passes=lambda choose: (
        WarpSpecialize(choose),
        SplitDWarpGroups(),
        ExchangeP(),
        MaskOutOfBoundsQueries(),
        HoistBias(),
        SplitBoundaryMasks(),
        InsertPipelines(),
        ReduceDQ(),
        AsyncMMA(),
        SoftwarePipelineWeights(),
        SoftwarePipelineGradients(),
        SoftwarePipelineTangents(),
        StageScoreBias(),
        SoftwarePipelineSoftmax(),
        SplitSoftmax(),
        DeferRowReduction(),
        SkipMaskedTiles(),
        PersistentScheduler(),
        PingPong(),
        SplitDQReduction(),
        StageTileStarts(),
        PrefetchWorkTiles(),
        LoadBeforeLookups(),
        LegalizeGluon(),
    ),
    lowering=(LowerPipelines(), AssignBarriers()),
    rules={"fits": rules.fits},
    file="hopper.py",
    template=kernels.TEMPLATE,
    context=kernels.context,
    resources=ResourceModel(
        resources.row_formula,
        resources.sram_bytes,
        resources.registers,
        resources.why_not_fit,
        lambda module, kernel, config: None,
    ),
    compiler=Compiler(triton_version, compiler.job, compiler.compile_all, compiler.source, compiler.source_digest),
    faults=certificate.faults,
)
