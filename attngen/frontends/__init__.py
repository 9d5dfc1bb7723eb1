"""Front ends: other ways than YAML to say what a variant is."""
