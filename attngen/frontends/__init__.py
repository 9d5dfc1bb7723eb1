"""Front ends: ways other than YAML to define a variant."""
