"""Hopper kernels after printing: shared memory, rules of the device, compilation, machine code, certificates."""
