"""Tests of generated modules against eager PyTorch: the oracle, cases, sweeps on a device."""
