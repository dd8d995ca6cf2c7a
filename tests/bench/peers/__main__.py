"""python -m tests.bench.peers NAME --database URL [--clients N] [--seconds S] [--warm S] [--n TIMERS]"""

import importlib
import json
import sys

from tests.bench.peers.harness import options

NAMES = ("raw", "restate", "langgraph", "langgraph_per_client", "openai_agents", "dbos", "dbos_timers", "sql_timers")


def main() -> None:
    name, *words = sys.argv[1:] or [""]
    if name not in NAMES:
        raise SystemExit(__doc__)
    given = options(words)
    try:
        peer = importlib.import_module(f"tests.bench.peers.{name}_peer")
    except ModuleNotFoundError as error:
        print(json.dumps({"missing": f"the package {(error.name or '').partition('.')[0]} is not installed"}))
    else:
        peer.run(given)


if __name__ == "__main__":
    main()
