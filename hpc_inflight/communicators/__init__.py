"""The backends: one contract in `base`, and modules that never import each other."""
