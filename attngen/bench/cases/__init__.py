"""Benchmark problems: cells, grids of cells, and their data."""
