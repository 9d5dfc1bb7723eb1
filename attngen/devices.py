"""Facts about GPUs, each with its source. Nothing else in attngen knows a device's numbers.

A *device class* is what schedules are chosen for; a *device* is what `explain` prints rooflines for.
"""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024


@dataclass(frozen=True, eq=False)
class DeviceClass:
    """What the generated code tells apart at run time: limits of one program and of one SM (compute unit), and how
    Triton keeps tiles on chip there (read off compiled kernels: docs/perf-log.md)."""

    name: str
    smem_per_block: int  # bytes of shared memory one program may have, at most
    smem_per_sm: int  # bytes
    registers_per_sm: int  # of 32 bits
    threads_per_warp: int
    matrix_rows: int  # least rows of a matrix instruction's accumulator
    flops_per_cycle: dict[str, int]  # dense, of one SM, by how products are computed
    reads_shared: bool  # matrix instructions read operands from shared memory, so each stage of a ring has a buffer
    keeps_reused: bool  # a streamed tile that several products read has one buffer more
    shares_stationary: bool  # tiles loaded once go on to registers and leave their room to the ring
    source: str


@dataclass(frozen=True)
class Device:
    """One GPU's roofs: dense FLOP/s by element type, bytes/s of device memory, and the cache before it."""

    name: str
    cls: str
    sms: int
    hbm_bytes_per_s: float
    cache_bytes: float  # of the last level of cache, which all SMs share
    flops: dict[str, float]
    source: str


_NV = "CUDA C++ Programming Guide 13.0, technical specifications per compute capability"


def _nvidia(name: str, smem: int, smem_sm: int, rows: int, flops: tuple[int, int, int], source: str, **kept: bool) -> DeviceClass:
    rates = dict(zip(("16-bit", "tf32", "ieee"), flops))
    kept = {"reads_shared": False, "keeps_reused": False, **kept}
    return DeviceClass(name, smem * KIB, smem_sm * KIB, 65536, 32, rows, rates, shares_stationary=False, source=f"{_NV}; {source}", **kept)


CLASSES = {
    c.name: c
    for c in (
        _nvidia("sm80", 163, 164, 16, (2048, 1024, 128), "NVIDIA A100 whitepaper, 2020"),
        _nvidia("sm90", 227, 228, 64, (4096, 2048, 256), "NVIDIA H100 whitepaper, 2022", reads_shared=True),
        _nvidia("sm100", 227, 228, 64, (8192, 4096, 256), "NVIDIA Blackwell datasheet, 2024", reads_shared=True, keeps_reused=True),
        DeviceClass(
            name="gfx942",
            smem_per_block=64 * KIB,
            smem_per_sm=64 * KIB,
            registers_per_sm=131072,
            threads_per_warp=64,
            matrix_rows=16,
            flops_per_cycle={"16-bit": 2048, "tf32": 1024, "ieee": 256},
            reads_shared=False,
            keeps_reused=False,
            shares_stationary=True,
            source="AMD CDNA 3 whitepaper, 2023: LDS, VGPRs and matrix rates of a compute unit",
        ),
        # Any other GPU: what the least of those that Triton supports has.
        _nvidia("any", 64, 64, 16, (512, 128, 128), "column 7.5"),
    )
}

DEVICES = {
    d.name: d
    for d in (
        Device(
            "A100",
            "sm80",
            108,
            2.039e12,
            40e6,
            {"bf16": 312e12, "fp16": 312e12, "tf32": 156e12, "fp32": 19.5e12},
            "NVIDIA A100 80GB datasheet (SXM4), 2021: dense rates",
        ),
        Device(
            "H100",
            "sm90",
            132,
            3.35e12,
            50e6,
            {"bf16": 989.4e12, "fp16": 989.4e12, "tf32": 494.7e12, "fp32": 66.9e12},
            "NVIDIA H100 Tensor Core GPU architecture whitepaper (SXM5), table 2: dense rates",
        ),
        Device(
            "H200",
            "sm90",
            132,
            4.8e12,
            50e6,
            {"bf16": 989.4e12, "fp16": 989.4e12, "tf32": 494.7e12, "fp32": 66.9e12},
            "NVIDIA H200 datasheet (SXM), 2024; measured on one: bf16 matmul 790 TFLOP/s, copy 4.26 TB/s",
        ),
        Device(
            "B200",
            "sm100",
            148,
            8.0e12,
            126e6,
            {"bf16": 2250e12, "fp16": 2250e12, "tf32": 1125e12, "fp32": 80e12},
            "NVIDIA Blackwell datasheet, 2024 (per GPU of DGX B200): dense rates",
        ),
        Device(
            "MI300X",
            "gfx942",
            304,
            5.3e12,
            256e6,
            {"bf16": 1307.4e12, "fp16": 1307.4e12, "tf32": 653.7e12, "fp32": 163.4e12},
            "AMD Instinct MI300X datasheet, 2023: dense rates",
        ),
    )
}
