"""Passes that turn a portable kernel into a warp-specialized one."""
