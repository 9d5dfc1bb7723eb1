"""Prints kernels as Python source, for backends that print Triton, or Gluon, which has the same expressions."""
