"""The backend for Hopper: kernels whose warps have roles, printed in Gluon. It divides forwards and backwards."""

from __future__ import annotations

from attngen.backends.ahead import triton_version
from attngen.backends.base import Compiler, Divider, Footprint
from attngen.backends.hopper import certificate, compiler, kernels, rules, sram
from attngen.backends.hopper.assign_roles import AssignRoles
from attngen.backends.hopper.chain_sums import ChainSums
from attngen.backends.hopper.deal_sums import DealSums
from attngen.backends.hopper.divisions import DIVISIONS
from attngen.backends.hopper.facts import DEVICE, NAME
from attngen.backends.hopper.halve_softmax import HalveSoftmax
from attngen.backends.hopper.hide_queries import HideQueries
from attngen.backends.hopper.hide_tiles import HideTiles
from attngen.backends.hopper.issue_products import IssueProducts
from attngen.backends.hopper.legalize import LegalizeGluon
from attngen.backends.hopper.make_rings import MakeRings
from attngen.backends.hopper.overlap_gradients import OverlapGradients
from attngen.backends.hopper.overlap_softmax import OverlapSoftmax
from attngen.backends.hopper.overlap_tangents import OverlapTangents
from attngen.backends.hopper.overlap_weights import OverlapWeights
from attngen.backends.hopper.ring_scores import RingScores
from attngen.backends.hopper.schedule_work import ScheduleWork
from attngen.backends.hopper.share_gradients import ShareGradients
from attngen.backends.hopper.share_weights import ShareWeights
from attngen.backends.hopper.shift_rows import ShiftRows
from attngen.backends.hopper.split_columns import SplitColumns
from attngen.backends.hopper.split_masks import SplitMasks
from attngen.backends.hopper.take_turns import TakeTurns

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
    footprint=Footprint(sram.row_formula, sram.sram_bytes, sram.registers, sram.misfit, lambda module, kernel, row: None),
    compiler=Compiler(triton_version, compiler.job, compiler.compile_all, compiler.source_digest),
    faults=certificate.faults,
)
