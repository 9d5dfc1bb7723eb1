"""Passes that lower warp-specialized kernels from the dialect pipe to Gluon's statements (ir/gl.py)."""
