"""The resources and costs of a schedule, in closed form: SRAM, registers, HBM bytes, FLOPs, roofline time."""
