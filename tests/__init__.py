"""The tests. They run on a real PostgreSQL, and those of processes on real ones."""
