"""The proof of protocols by persistent sets finds what following every order finds."""

from __future__ import annotations

import pytest

from attngen.ir.graph import Kernel
from attngen.verify.machine import broken
from attngen.verify.protocol import protocol_of
from tests.hopper.common import edited, kernel
from tests.hopper.test_protocol import TEXT


def both(of: Kernel) -> tuple[str, str]:
    """What the proof finds, and what every order shows."""
    protocol = protocol_of(of, {"num_stages": 2})
    return broken(protocol), broken(protocol, all_orders=True)


def test_what_is_right_is_right_in_every_order() -> None:
    assert both(kernel("causal_d256")) == ("", "")


@pytest.mark.parametrize(
    "mistake", [name for name, (_, _, reason) in TEXT.items() if "between its loops" not in reason]
)
def test_what_is_wrong_is_wrong_in_some_order(mistake: str) -> None:
    """Which copy of a role is named, and who waits beside the first, depends on the order."""
    old, new, _ = TEXT[mistake]
    found, shown = both(edited("causal_gqa", (old, new)).warp_specialized[0])
    assert found and found.endswith("wait for ever") == shown.endswith("wait for ever")
    assert found.partition(" gives ")[2] == shown.partition(" gives ")[2]
