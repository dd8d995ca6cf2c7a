"""A ledger for paused runs. This package's top imports nothing: an agent pays only for the client."""

__version__ = "0.1.0"
