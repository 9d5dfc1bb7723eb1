"""The backend for Triton: NVIDIA's sm80, sm90 and sm100, AMD's gfx942."""

from __future__ import annotations

from attngen.targets.common.base import Backend, Choices, Compiler, Cost, ResourceModel
from attngen.targets.triton import compiler, cost, fit, kernels, registers, rules, sram
from attngen.targets.triton.legalize import LegalizeTriton
from attngen.targets.triton.use_tma import UseTMA

TRITON = Backend(
    name="triton",
    prepare=(UseTMA(),),
    legalize=(LegalizeTriton(),),
    rules={
        "scheduled": {"described": rules.described, "fits": rules.fits},
        "target": {
            "powers-of-two": rules.powers_of_two,
            "dot-operands": rules.dot_operands,
            "padding-checked": rules.padding_checked,
        },
    },
    choices=Choices(blocks=(16, 32, 64, 128), warps=(4, 8), stages=(3, 2, 1)),
    resources=ResourceModel(
        sram.row_formula, sram.sram_bytes, registers.registers_per_thread, fit.why_not_fit, fit.slack
    ),
    cost=Cost(cost.cost, cost.occupancy, cost.register_limit, cost.spills, cost.SPILLS, cost.schedule_key),
    printed=kernels.printed,
    compiler=Compiler(
        compiler.triton_version, compiler.job, compiler.compile_all, compiler.source, compiler.source_digest
    ),
)
