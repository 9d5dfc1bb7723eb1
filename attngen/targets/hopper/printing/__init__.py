"""Prints Hopper kernels as Gluon source."""
