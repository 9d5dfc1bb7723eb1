"""What is measured: cells, grids of cells, and their data."""
