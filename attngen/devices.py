"""Facts about GPUs, each with its source. No other file of attngen has a device's numbers.

Schedules are chosen for a *device class*; `explain` prints rooflines for a *device*.
"""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024


@dataclass(frozen=True, eq=False, kw_only=True)
class DeviceClass:
    """A class of devices that generated code distinguishes at run time: limits of one program and of one SM (compute
    unit), and how Triton keeps tiles on chip there (read off compiled kernels: docs/perf-log.md)."""

    name: str  # for HIP devices, the architecture's name
    arch: int | str  # target to compile for without a GPU: a compute capability or a HIP architecture
    capabilities: tuple[tuple[int, int], ...] = ()  # of CUDA devices
    smem_per_block: int  # maximum bytes of shared memory of one program
    smem_per_sm: int  # bytes
    smem_reserved: int = KIB  # bytes of shared memory that the system reserves for each program
    registers_per_sm: int = 65536  # of 32 bits
    registers_per_thread: int = 255
    threads_per_warp: int = 32
    matrix_rows: int  # minimum rows of a matrix instruction's accumulator
    flops_per_cycle: dict[str, int]  # dense FLOPs of one SM, by the precision of products that it supports
    converts: bool = False  # has an instruction that converts a pair of 8-bit numbers (e4m3) to fp16
    tma: bool = False  # copies tiles by tensor descriptors, which the host makes
    overlaps: bool = False  # programmatic dependent launch: programs may start before the previous launch has ended
    reads_shared: bool = False  # matrix instructions read operands from shared memory: a buffer for each stage
    keeps_reused: bool = False  # a streamed tile that several products read has an additional buffer
    tensor_columns: int = 0  # columns of tensor memory for accumulators, each of 128 rows of 32 bits; 0: in registers
    moves_random: bool = True  # dropout's random words may change layout on their way to the scores
    shares_stationary: bool = False  # tiles loaded once move to registers, so that the pipeline reuses their memory
    tuned_on: str = ""  # the device whose measured schedules (attngen/schedule) the class uses, if there are any
    source: str

    @property
    def backend(self) -> str:
        """Triton's name of the vendor's toolchain."""
        return "hip" if isinstance(self.arch, str) else "cuda"


@dataclass(frozen=True)
class Device:
    """One GPU's peak rates: dense FLOP/s by element type, bytes/s of device memory; and its last-level cache."""

    name: str
    cls: str
    sms: int
    hbm_bytes_per_s: float
    cache_bytes: float  # size of the last-level cache, which all SMs share
    flops: dict[str, float]
    source: str


_CUDA = (
    "CUDA C++ Programming Guide 13.0, technical specifications per compute capability; "
    "Ampere, Hopper and Blackwell tuning guides: 1 KB of shared memory is reserved per block; "
    "Tensor Memory Accelerator from 9.0 on; PTX ISA 8.1: cvt.rn.f16x2.e4m3x2 from 8.9 on; "
    "PTX ISA 7.8: griddepcontrol from 9.0 on"
)

CLASSES = {
    c.name: c
    for c in (
        DeviceClass(
            name="sm80",
            arch=80,
            capabilities=((8, 0),),
            smem_per_block=163 * KIB,
            smem_per_sm=164 * KIB,
            matrix_rows=16,
            flops_per_cycle={"16-bit": 2048, "tf32": 1024, "ieee": 128},
            source=f"{_CUDA}; NVIDIA A100 whitepaper, 2020",
        ),
        DeviceClass(
            name="sm90",
            arch=90,
            capabilities=((9, 0),),
            smem_per_block=227 * KIB,
            smem_per_sm=228 * KIB,
            matrix_rows=64,
            flops_per_cycle={"16-bit": 4096, "tf32": 2048, "ieee": 256},
            converts=True,
            tma=True,
            overlaps=True,
            reads_shared=True,
            moves_random=False,
            tuned_on="H200",
            source=f"{_CUDA}; NVIDIA H100 whitepaper, 2022",
        ),
        DeviceClass(
            name="sm100",
            arch=100,
            capabilities=((10, 0), (10, 3)),
            smem_per_block=227 * KIB,
            smem_per_sm=228 * KIB,
            matrix_rows=64,
            flops_per_cycle={"16-bit": 8192, "tf32": 4096, "ieee": 256},
            converts=True,
            tma=True,
            overlaps=True,
            reads_shared=True,
            keeps_reused=True,
            tensor_columns=512,
            source=f"{_CUDA}; NVIDIA Blackwell datasheet, 2024; PTX ISA 8.6: tensor memory",
        ),
        DeviceClass(
            name="gfx942",
            arch="gfx942",
            smem_per_block=64 * KIB,
            smem_per_sm=64 * KIB,
            # Nothing is reserved. The default is kept until tiles are measured there: it never assumes a program that
            # might not fit.
            smem_reserved=KIB,
            registers_per_sm=131072,
            registers_per_thread=512,
            threads_per_warp=64,
            matrix_rows=16,
            flops_per_cycle={"16-bit": 2048, "tf32": 1024, "ieee": 256},
            shares_stationary=True,
            source="AMD CDNA 3 whitepaper, 2023: LDS, VGPRs and matrix rates of a compute unit; "
            "AMD Instinct MI300 ISA guide: 512 VGPRs of a lane, AccVGPRs counted",
        ),
        # The minimum of NVIDIA GPUs from compute capability 8.0 on. Before 8.0 Triton copies operands of products
        # through shared memory, so that tiles need more than is counted here.
        DeviceClass(
            name="any",
            arch=86,
            smem_per_block=99 * KIB,
            smem_per_sm=100 * KIB,
            matrix_rows=16,
            flops_per_cycle={"16-bit": 512, "tf32": 128, "ieee": 128},
            source=f"{_CUDA}: compute capability 8.6, as 8.9 and 12.0; "
            "NVIDIA GA102 whitepaper, 2020: 16-bit rate with fp32 sums",
        ),
    )
}
# The classes of unlisted GPUs: the minimum for NVIDIA's; for AMD's the class with the same size of LDS, 64 KB (AMD
# CDNA 2 and RDNA 3 ISA guides).
FALLBACK_CUDA, FALLBACK_HIP = "any", "gfx942"

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


@dataclass(frozen=True)
class Links:
    """How the GPUs of a kind are joined: the bytes/s of one GPU each way, inside a node and between nodes, the bytes of
    its memory, and the GPUs of a node."""

    nvlink_bytes_per_s: float
    network_bytes_per_s: float
    memory_bytes: float
    gpus: int
    source: str


LINKS = {
    "A100": Links(
        300e9,
        25e9,
        80e9,
        8,
        "NVIDIA A100 80GB datasheet (SXM4), 2021: NVLink 600 GB/s both ways together; "
        "DGX A100 datasheet: a 200 Gb/s HDR port for each GPU",
    ),
    "H100": Links(
        450e9,
        50e9,
        80e9,
        8,
        "NVIDIA H100 datasheet (SXM), 2022: NVLink 900 GB/s both ways together, 80 GB; "
        "DGX H100 datasheet: a 400 Gb/s NDR port (ConnectX-7) for each GPU",
    ),
    "H200": Links(
        450e9,
        50e9,
        141e9,
        8,
        "NVIDIA H200 datasheet (SXM), 2024: NVLink 900 GB/s both ways together, 141 GB; "
        "DGX H200 datasheet: a 400 Gb/s NDR port (ConnectX-7) for each GPU",
    ),
    "B200": Links(
        900e9,
        50e9,
        180e9,
        8,
        "NVIDIA DGX B200 datasheet, 2024: NVLink 14.4 TB/s of 8 GPUs both ways together, 1,440 GB, "
        "a 400 Gb/s NDR port (ConnectX-7) for each GPU",
    ),
}


def class_of(arch: tuple[int, int] | str) -> DeviceClass:
    """Return the class whose schedules a GPU uses: of a CUDA device by its compute capability, of a HIP device by its
    architecture, such as gfx942:sramecc+."""
    if isinstance(arch, str):
        return CLASSES.get(arch.partition(":")[0], CLASSES[FALLBACK_HIP])
    return next((c for c in CLASSES.values() if arch in c.capabilities), CLASSES[FALLBACK_CUDA])
