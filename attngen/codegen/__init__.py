"""Target IR to source: expressions, per-node views, Jinja."""
