"""Passes from logical to target IR, one file each. `lowering.pipeline` verifies the module after every pass."""
