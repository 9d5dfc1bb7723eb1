"""Hopper kernels as Gluon source."""
