"""The pass pipeline, from a spec to target IR. The verifier runs after each pass."""
