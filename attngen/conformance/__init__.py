"""Generated modules against eager PyTorch: the oracle, cases, sweeps over a device."""
