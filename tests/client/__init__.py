"""Tests of the agents' side: the client, the demo's agents and its outside world."""
