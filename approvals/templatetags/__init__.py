"""Template tags of the console's own parts."""
