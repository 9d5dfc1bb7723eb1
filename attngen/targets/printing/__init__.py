"""Kernels as Python source: what backends share that print Triton, or Gluon, which has the same expressions."""
