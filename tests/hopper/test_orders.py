"""The proof of protocols by persistent sets finds the same faults as a search of every order."""

from __future__ import annotations

import pytest

from attngen.ir import Kernel
from attngen.verify.machine import violation
from attngen.verify.protocol import protocol_of
from tests.hopper.common import edited, forward_kernel
from tests.hopper.test_protocol import IR_MISTAKES


def verdicts(of: Kernel) -> tuple[str, str]:
    """The verdict of the proof, and the verdict of a search of every order."""
    protocol = protocol_of(of, {"num_stages": 2})
    return violation(protocol), violation(protocol, all_orders=True)


def test_a_correct_protocol_is_correct_in_every_order() -> None:
    assert verdicts(forward_kernel("causal_d256")) == ("", "")


@pytest.mark.parametrize(
    "mistake", [name for name, (_, _, reason) in IR_MISTAKES.items() if "between its loops" not in reason]
)
def test_a_wrong_protocol_fails_in_some_order(mistake: str) -> None:
    """Which instance of a warp group is named, and which others also wait, depends on the order."""
    old, new, _ = IR_MISTAKES[mistake]
    found, shown = verdicts(edited("causal_gqa", (old, new)).warp_specialized[0])
    assert found and found.endswith("wait for ever") == shown.endswith("wait for ever")
    assert found.partition(" gives ")[2] == shown.partition(" gives ")[2]
