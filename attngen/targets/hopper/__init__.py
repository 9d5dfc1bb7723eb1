"""The backend for Hopper: kernels whose warps have roles, printed in Gluon. It divides forwards and backwards."""

from __future__ import annotations

from attngen.targets.common.ahead import triton_version
from attngen.targets.common.base import Compiler, Divider, Footprint
from attngen.targets.hopper.configs.registry import DIVISIONS
from attngen.targets.hopper.configs.sm90 import DEVICE, NAME
from attngen.targets.hopper.passes.async_mma import IssueProducts
from attngen.targets.hopper.passes.defer_row_reduction import ChainSums
from attngen.targets.hopper.passes.exchange_p import ShareWeights
from attngen.targets.hopper.passes.hoist_bias import ShiftRows
from attngen.targets.hopper.passes.insert_pipelines import MakeRings
from attngen.targets.hopper.passes.legalize import LegalizeGluon
from attngen.targets.hopper.passes.mask_out_of_bounds_queries import HideQueries
from attngen.targets.hopper.passes.persistent_scheduler import ScheduleWork
from attngen.targets.hopper.passes.ping_pong import TakeTurns
from attngen.targets.hopper.passes.reduce_dq import ShareGradients
from attngen.targets.hopper.passes.skip_masked_tiles import HideTiles
from attngen.targets.hopper.passes.software_pipeline_gradients import OverlapGradients
from attngen.targets.hopper.passes.software_pipeline_softmax import OverlapSoftmax
from attngen.targets.hopper.passes.software_pipeline_tangents import OverlapTangents
from attngen.targets.hopper.passes.software_pipeline_weights import OverlapWeights
from attngen.targets.hopper.passes.split_boundary_masks import SplitMasks
from attngen.targets.hopper.passes.split_d_warp_groups import SplitColumns
from attngen.targets.hopper.passes.split_dq_reduction import DealSums
from attngen.targets.hopper.passes.split_softmax import HalveSoftmax
from attngen.targets.hopper.passes.stage_score_bias import RingScores
from attngen.targets.hopper.passes.warp_specialize import AssignRoles
from attngen.targets.hopper.printing import kernels
from attngen.targets.hopper.toolchain import certificate, compiler, resources, rules

HOPPER = Divider(
    name=NAME,
    device=DEVICE,
    divisions=DIVISIONS,
    passes=lambda choose: (
        AssignRoles(choose),
        SplitColumns(),
        ShareWeights(),
        HideQueries(),
        ShiftRows(),
        SplitMasks(),
        MakeRings(),
        ShareGradients(),
        IssueProducts(),
        OverlapWeights(),
        OverlapGradients(),
        OverlapTangents(),
        RingScores(),
        OverlapSoftmax(),
        HalveSoftmax(),
        ChainSums(),
        HideTiles(),
        ScheduleWork(),
        TakeTurns(),
        DealSums(),
        LegalizeGluon(),
    ),
    rules={"fits": rules.fits},
    file="hopper.py",
    template=kernels.TEMPLATE,
    context=kernels.context,
    footprint=Footprint(
        resources.row_formula, resources.sram_bytes, resources.registers, resources.misfit, lambda module, kernel, row: None
    ),
    compiler=Compiler(triton_version, compiler.job, compiler.compile_all, compiler.source_digest),
    faults=certificate.faults,
)
