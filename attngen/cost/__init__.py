"""What a schedule needs and costs, in closed form: SRAM, registers, HBM bytes, FLOPs, roofline time."""
