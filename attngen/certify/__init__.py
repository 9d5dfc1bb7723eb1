"""Fit certificates: the compiler's report on each kernel, compared with the predictions of the closed forms."""
