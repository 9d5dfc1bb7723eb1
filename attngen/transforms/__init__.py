"""Passes from logical to target IR, one file each; `pipeline.run` verifies after every one."""
