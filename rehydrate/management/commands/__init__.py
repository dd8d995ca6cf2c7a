"""One module a command; the rules are elsewhere."""
