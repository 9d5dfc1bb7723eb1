"""What the schedules of this backend rest on: rows of the matrix instruction, registers of roles.

Sources: the PTX ISA, wgmma (M = 64) and setmaxnreg (a multiple of 8 from 24 to 256, whose sum over the warps of a
program is at most what the program was launched with: 65,536 registers for each multiprocessor, in groups of 4 warps).
"""

from __future__ import annotations

NAME = "hopper"
FORWARD = "fwd"  # the kernel of the forward
FUSED = "bwd"  # that of dQ, dK and dV
APART = ("dq", "dk", "dv")  # those of each of them
OF_WEIGHTS = "dv"  # of these, the one whose sums add up weights times a tile, as the forward's do
TANGENTS = "jvp"  # that of forward mode
DECODE = "decode"  # the kernel of few queries over a cache
DEVICE = "sm90"  # the device class of attngen/devices.py
ROWS = 64  # of the program's tile that each consumer has
REGISTERS = {
    1: (240, 64),
    2: (240, 24),
    3: (160, 32),
}  # copies of the consumer -> registers per thread, of it and of the producer
LATENT_REGISTERS = (
    224,
    56,
)  # of the two roles that share a latent's columns, and of the producer, which finds out what parts there are
SHARING = 2  # programs that share a multiprocessor, where any do
SHARED_REGISTERS = (104, 24)  # of a program's two consumers and its producer, where two programs share
MOST_REGISTERS = 256  # that setmaxnreg can give
LANES = 4  # threads that share a row of a product: each computes a row's own numbers, and a fourth of its columns
COUNTER = "COUNTER"  # the parameter of kernels whose programs draw their tiles: a pointer to two numbers
# of the named barriers of a program: Triton uses two, and one for each group of warps but the first, three at most
FIRST_BARRIER = 5
NAMED_BARRIERS = 16
WRITER_REGISTERS = 24  # of the warp that adds what consumers share to device memory
TURNED = 32  # columns of a tile of sums from which on a row of it has all banks of shared memory (128 bytes)
THREADS = 128  # of a consumer's four warps
