"""attngen: a compiler from declarative attention specs to Triton forward and backward kernels."""

__version__ = "0.1.0"
