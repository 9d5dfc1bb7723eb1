"""Backends: one package per target, the code that they share in `common` and `printing`, and their registry."""
