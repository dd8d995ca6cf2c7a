"""LangGraph with a saver of its own for each client."""

from tests.bench.peers import langgraph_peer
from tests.bench.peers.harness import Options


def run(given: Options) -> None:
    langgraph_peer.run(given, one_each=True)
