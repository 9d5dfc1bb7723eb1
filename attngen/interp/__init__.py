"""The IR executed on NumPy: kernels, host programs, and warp groups that run concurrently."""
