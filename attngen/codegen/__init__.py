"""The files of a generated module, from its target IR."""
