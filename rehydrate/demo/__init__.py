"""A small outside world and four agents that work in it: what a newcomer sees. It talks to the ledger by HTTP only."""
