"""Which `up` this process belongs to, among those that share a database. The settings need it: it imports nothing."""

import os


def node() -> str:
    """Made by `up` from the machine's name and the data folder, which one `up` has to itself; or REHYDRATE_NODE."""
    return os.environ.get("REHYDRATE_NODE") or "alone"


def queue(cluster: str) -> str:
    """The name of this `up`'s own queue for one of its clusters: `ticks` or `work`."""
    return f"{cluster}@{node()}"
