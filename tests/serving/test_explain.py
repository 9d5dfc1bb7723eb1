"""`attngen explain` for calls with a KV cache."""

from __future__ import annotations

import pytest
from rich.console import Console

from attngen.cost.roofline import Problem
from attngen.cost.serving import decoding, read_bytes
from attngen.devices import DEVICES
from attngen.interp.numeric import compiled
from attngen.report.explain import decode_costs
from tests.helpers import SPECS, spec, target

CACHED = [name for name in SPECS if spec(name).cache]


@pytest.mark.parametrize("name", CACHED)
def test_every_device_has_a_line(name: str) -> None:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for part in decode_costs(target(name), Problem(2, 16, 1 if spec(name).rope else 4, 1, 4096)):
        console.print(part)
    lines = console.export_text().splitlines()
    assert all(any(line.startswith(device) and "none" not in line for line in lines) for device in DEVICES)


def test_a_long_sequence_fills_the_device() -> None:
    """64k keys of 8 heads in 16 bits are 268 MB. An H200 runs 264 programs at a time, which is 33 splits; 32 are
    even."""
    found = decoding(target("decode_gqa"), DEVICES["H200"], Problem(1, 32, 8, 1, 65536))
    assert found is not None
    assert (found.programs, found.splits_to_fill, found.splits, found.read) == (264, 33, 32, 2 * 65536 * 8 * 128 * 2)
    assert found.partials == 8 * 32 * 8 * 4 * 129 and found.binds == "memory"
    assert found.seconds == pytest.approx(found.moved / 4.8e12)


def test_many_sequences_have_few_splits() -> None:
    found = decoding(target("decode_paged_gqa"), DEVICES["H200"], Problem(64, 32, 8, 1, 8192))
    assert found is not None
    assert (found.splits_to_fill, found.splits) == (1, 2)  # splits of at most 64 units, so that ends are even


def test_a_window_reads_only_its_keys() -> None:
    """A window reads 1,024 keys, whichever tiles they begin and end in; of a shorter sequence it reads all."""
    of_keys = compiled(read_bytes(target("decode_window_paged_gqa")))
    known = {"elem": 2, "Hkv": 1, "D_QK": 128, "D_V": 128, "queries": 1}
    read = [of_keys({**known, "Nk": n}) // (2 * 256) for n in (0, 1, 1000, 1024, 131072, 131073)]
    assert read == [0, 64, 1024, 1024, 1024, 1088]


def test_a_sequence_is_one_document_unless_bounds_are_given() -> None:
    found, causal = (
        decoding(target(name), DEVICES["H200"], Problem(4, 32, 8, 1, 8192))
        for name in ("decode_document_gqa", "decode_paged_gqa")
    )
    assert found is not None and causal is not None and found.read == causal.read
    of_keys = compiled(read_bytes(target("decode_document_gqa")))
    known = {"elem": 2, "Hkv": 1, "D_QK": 128, "D_V": 128, "queries": 1, "Nk": 8192, "document_end_greatest": 8192}
    read = [of_keys({**known, "document_first_least": n}) // (2 * 256) for n in (0, 64, 8100)]
    assert read == [8192, 8128, 128]


def test_a_latent_is_read_once() -> None:
    """A key has 512 + 64 elements. Scores multiply 576 columns, and outputs 512."""
    found = decoding(target("decode_mla"), DEVICES["H200"], Problem(8, 128, 1, 1, 8192))
    assert found is not None
    assert found.read == 8 * 8192 * 576 * 2 and found.flops == 2 * 128 * 8 * 8192 * (576 + 512)


def test_8_bit_keys_are_half_the_bytes_of_16_bit_keys() -> None:
    problem = Problem(8, 32, 8, 1, 65536)
    eight, sixteen = (
        decoding(target(name), DEVICES["H200"], problem) for name in ("decode_paged_fp8_gqa", "decode_paged_gqa")
    )
    assert eight is not None and sixteen is not None
    assert 2 * eight.read == sixteen.read and eight.flops == sixteen.flops
    assert (eight.programs, sixteen.programs) == (3 * 132, 2 * 132)  # three CTAs per SM with tiles of 16 rows
