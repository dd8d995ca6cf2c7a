"""Several at once: real threads, each with its own connection, and real commits."""
