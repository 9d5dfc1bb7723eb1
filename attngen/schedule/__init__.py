"""Measured schedules: which kernels share one, and a table of them for each GPU. `attngen tune` writes it,
select-tiles reads it."""
