"""Fit certificates: what Triton's compiler reports for each kernel, beside what the closed forms predict."""
