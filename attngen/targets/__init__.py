"""What a GPU does with a kernel: one folder for each target, what they share in `common`, and the registry that
finds them."""
