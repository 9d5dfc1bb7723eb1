"""Facts about sm90 from which configs follow (rows of a wgmma, registers of warp groups, named barriers), and the names
of kernels that have a warp-specialized form.

Sources: the PTX ISA, wgmma (M = 64) and setmaxnreg (a multiple of 8 from 24 to 256, whose sum over a program's warps is
at most the number with which it was launched: 65,536 registers per SM, in groups of 4 warps).
"""

from __future__ import annotations

NAME = "hopper"
DEVICE = "sm90"  # the device class of attngen/devices.py

FORWARD = "fwd"
FUSED = "bwd"  # the fused backward: dQ, dK and dV in one kernel
SEPARATE_BACKWARD = ("dq", "dk", "dv")  # one kernel per gradient
DV_KERNEL = "dv"  # of these, the one that accumulates weights times a tile, as the forward does
JVP = "jvp"  # forward-mode differentiation
DECODE = "decode"  # few queries with a KV cache

ROWS = 64  # rows of the program tile that each consumer warp group has
# Number of consumer warp groups -> registers per thread of a consumer, and of the producer.
REGISTERS = {1: (240, 64), 2: (240, 24), 3: (160, 32)}
# MLA decode: registers per thread of the two warp groups that split a latent's head_dim, and of the producer, which
# computes the KV splits.
LATENT_REGISTERS = (224, 56)
CTAS_PER_SM = 2  # programs that share an SM, where any do
SHARED_REGISTERS = (104, 24)  # per thread of a consumer and of the producer, where two programs share an SM
DQ_REDUCER_REGISTERS = 24  # per thread of the warp that adds tiles of dQ to device memory
MOST_REGISTERS = 256  # the most that setmaxnreg can give

# Threads that share a row of a wgmma's result: each computes the row's statistics, and holds a fourth of its columns.
LANES = 4
THREADS = 128  # of a consumer warp group: four warps
COUNTER = "COUNTER"  # parameter of persistent kernels: a pointer to two numbers from which programs fetch their tiles
NAMED_BARRIERS = 16  # per program
# The first that a kernel may use: Triton uses two, and one for each warp group except the first, three at most.
FIRST_BARRIER = 5
# Least number of columns with which a row of an accumulator tile covers all banks of shared memory (128 bytes). Layouts
# of such tiles are swizzled.
SWIZZLED_COLUMNS = 32
