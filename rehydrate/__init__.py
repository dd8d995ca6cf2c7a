"""A ledger for paused runs. This package's top imports nothing: an agent that needs only the client pays for no more."""

__version__ = "0.1.0"
