"""The tile-schedule IR: ops, typed graph, verifier, text."""
