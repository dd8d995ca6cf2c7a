"""Tests of what HTTP adds: parsing, authentication, problems, idempotency, lists, and the schema."""
