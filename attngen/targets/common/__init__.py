"""Code that targets share: the protocol of a backend, and ahead-of-time compilation."""
