"""Template tags that put facts into words."""
