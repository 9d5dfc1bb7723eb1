"""Fit certificates: what Triton's compiler says of each kernel, beside what the closed forms predict."""
