"""The tile-schedule IR: ops, typed graph, text."""
