"""Context parallelism: one sequence on several GPUs, for any mask."""
