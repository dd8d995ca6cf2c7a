"""HTTP for agents and people: authentication, parsing, idempotency, problems, schema. It decides nothing."""
