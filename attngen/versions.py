"""The pairs of torch and Triton that attngen supports: each torch with the Triton that it ships with. `make
versions` tests them all."""

from __future__ import annotations

PAIRS = {"2.11.0": "3.6.0", "2.12.0": "3.7.0", "2.13.0": "3.7.1", "2.14.0": "3.8.0", "2.15.0": "3.9.0"}


def is_supported(torch: str, triton: str) -> bool:
    """True if these versions, such as 2.13.0+cpu and 3.7.1, are a pair of PAIRS; the patch number is ignored."""
    return (_minor(torch), _minor(triton)) in {(_minor(a), _minor(b)) for a, b in PAIRS.items()}


def _minor(version: str) -> str:
    """Return the major and minor version: 2.13 of 2.13.0+cpu."""
    return ".".join(version.split(".")[:2])
