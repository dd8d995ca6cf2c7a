# ruff: noqa: F811 - fixtures are imported by name
"""Deliveries as `manage.py up` sends them: its own clusters, its own schedule, a real receiver."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.conftest import eventually
from tests.test_up import PATIENCE, Up, start  # noqa: F401 - the fixture

from .receiver import Receiver

pytestmark = pytest.mark.processes
ALLOWED = {"REHYDRATE_ALLOW_PRIVATE_TARGETS": "1"}


def test_what_happens_to_a_run_is_told_within_moments(
    start: Callable[..., Up], receiver: Receiver, tmp_path: Path
) -> None:
    up = start(**ALLOWED)
    url = up.ready()
    file = tmp_path / "flows.toml"
    file.write_text(f'[flow.told]\nrequired = []\ndeliver_to = "{receiver.url}"\n')
    secret = re.search(r"whsec_\S+", up.manage("apply", str(file)))
    assert secret
    key = up.manage("issue_key", "agent", "--name", "bot")
    headers = {"Authorization": f"Bearer {key}"}

    def asked(n: int) -> httpx.Response | None:
        try:
            body = {"flow": "told", "external_id": f"x-{n}"}
            return httpx.post(f"{url}/api/v1/runs", json=body, headers=headers, timeout=30)
        except httpx.TransportError:  # a machine that has much to do may have its web server started again
            return None

    def opened(n: int) -> str:
        answer = eventually(partial(asked, n), within=PATIENCE, what="the web server")
        assert answer.status_code in (200, 201), answer.text
        return str(answer.json()["run"]["id"])

    def told(run: str) -> bool:
        return any(post.json["data"]["run_id"] == run for post in receiver.posts)

    for n in range(3):  # the first may come before the first sender has started
        run = opened(n)
        began = time.monotonic()
        eventually(partial(told, run), within=PATIENCE, what=f"delivery {n}")
        print(f"told after {(time.monotonic() - began) * 1000:.0f} ms")
    for post in receiver.posts:
        post.verify(secret[0])
    assert len({post.id for post in receiver.posts}) == len(receiver.posts) == 3
    assert up.end() == 0
