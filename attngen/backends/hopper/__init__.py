"""The backend for Hopper: kernels whose warps have roles, printed in Gluon. It divides the forward; the rest is portable."""

from __future__ import annotations

from attngen.backends.base import Divider
from attngen.backends.hopper import kernels, rules
from attngen.backends.hopper.assign_roles import AssignRoles
from attngen.backends.hopper.facts import DEVICE, NAME
from attngen.backends.hopper.issue_products import IssueProducts
from attngen.backends.hopper.legalize import LegalizeGluon
from attngen.backends.hopper.make_rings import MakeRings
from attngen.backends.hopper.overlap_softmax import OverlapSoftmax
from attngen.backends.hopper.schedule_work import ScheduleWork

HOPPER = Divider(
    name=NAME,
    device=DEVICE,
    passes=lambda block_q, block_kv, slots: (
        AssignRoles(block_q=block_q, block_kv=block_kv, slots=slots),
        MakeRings(),
        IssueProducts(),
        OverlapSoftmax(),
        ScheduleWork(),
        LegalizeGluon(),
    ),
    rules={"fits": rules.fits},
    file="hopper.py",
    template=kernels.TEMPLATE,
    context=kernels.context,
)
