"""Other systems doing the same unit of work: `python -m tests.bench.peers NAME --database URL`, one JSON line each.

They run under a Python of their own (see Makefile, bench-peers), which has the peer and psycopg but nothing of ours:
besides the peer's own packages, modules here import the standard library, psycopg and tests.bench.plain only.
"""
