"""The order of all passes, from a spec to target IR; the verifier runs after each."""
