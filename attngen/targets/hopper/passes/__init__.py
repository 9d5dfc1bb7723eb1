"""Passes that make a warp-specialized kernel of a portable one."""
