"""The demo's outside world: it counts what it does, honours keys where it says so, misbehaves when told to."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from rehydrate.client import EffectCall, Refused
from rehydrate.demo import scenarios
from rehydrate.demo.outside import AnswerLost, Outside
from rehydrate.demo.world import World
from tests.conftest import eventually


def effect(action: str, key: str = "flow/run-1/x/1", **arguments: object) -> EffectCall:
    return EffectCall(key=key, action=action, arguments=dict(arguments))


@pytest.fixture
def hook():
    """Somebody who can be called back: `.calls` is what came, `.status` how it answers."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            server.calls.append((self.headers["webhook-id"], body))
            self.send_response(server.statuses.pop(0) if server.statuses else 202)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    class Hook(ThreadingHTTPServer):
        calls: list[tuple[str, bytes]] = []
        statuses: list[int] = []
        url: str = ""

    server = Hook(("127.0.0.1", 0), Handler)
    server.calls, server.statuses = [], []
    server.url = f"http://127.0.0.1:{server.server_address[1]}/hooks/secret"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_system_that_honours_keys_does_a_thing_once(world, outside):
    first = outside.do(effect("mail.send", to="bob"))
    again = outside.do(effect("mail.send", to="bob"))
    assert again["id"] == first["id"]
    assert world.journal.counts() == {"flow/run-1/x/1": 1}


def test_system_that_does_not_honour_keys_does_it_twice_and_the_count_shows_it(world, outside):
    outside.do(effect("esign.send"))
    outside.do(effect("esign.send"))
    assert world.journal.counts() == {"flow/run-1/x/1": 2}
    assert "Done more than once" in httpx.get(world.url).text


def test_answer_that_is_lost_leaves_the_deed_done(world, outside):
    world.journal.set_mode("crm", "create_draft", "lose_answer", 0, 1)
    with pytest.raises(AnswerLost, match="/runs/flow/run-1"):
        outside.do(effect("crm.create_draft"))
    assert outside.find(effect("crm.create_draft"))["id"].startswith("CRM-")
    assert world.journal.modes() == []


@pytest.mark.parametrize("mode", ["fail", "refuse"])
def test_system_that_says_no_did_nothing(world, outside, mode):
    world.journal.set_mode("*", "*", mode, 0, None)
    with pytest.raises(Refused):
        outside.do(effect("crm.create_draft"))
    assert world.journal.counts() == {}
    assert outside.find(effect("crm.create_draft")) is None


def test_mode_for_one_request_only(world):
    answer = httpx.post(f"{world.url}/crm/x", json={}, headers={"X-World-Mode": "fail"})
    assert answer.status_code == 503
    assert httpx.post(f"{world.url}/crm/x", json={}).status_code == 201


def test_restart_forgets_nothing(tmp_path):
    first = World(tmp_path, lose_first=("supplier.place_order",)).start()
    outside = Outside(first.url)
    with pytest.raises(AnswerLost):
        outside.do(effect("supplier.place_order", order="po-1"), callback_url="http://127.0.0.1:9/x")
    first.stop()

    second = World(tmp_path, lose_first=("supplier.place_order",)).start()
    try:
        assert second.journal.counts() == {"flow/run-1/x/1": 1}
        assert second.journal.modes() == []  # it was for the first request of all, not for the first after each start
        assert "po-1" in httpx.get(f"{second.url}/play/supplier/po-1").text
    finally:
        second.stop()


def test_callback_is_sent_until_it_is_taken_and_under_one_id(world, outside, hook):
    hook.statuses = [503, 202]
    outside.do(effect("supplier.place_order", order="po-1"), callback_url=hook.url, answers_after=0)
    eventually(lambda: world.journal.callbacks()[0]["answer"], what="the answer")
    assert len(hook.calls) == 2
    assert hook.calls[0] == hook.calls[1]


def test_customer_answers_only_when_somebody_plays_them(world, outside, hook):
    outside.do(effect("mail.ask_for_documents", case="case-31", documents=["a photo"]), callback_url=hook.url)
    page = httpx.get(f"{world.url}/play/customer/case-31").text
    assert "a photo" in page
    assert hook.calls == []

    form = {"callback": "1", "documents": "a photo", "note": "<b>Here</b> it is"}
    assert "Sent" in httpx.post(f"{world.url}/play/customer/case-31", data=form).text
    eventually(lambda: hook.calls, what="the callback")
    assert b"<b>Here</b> it is" in hook.calls[0][1]
    eventually(lambda: world.journal.callbacks()[0]["answer"], what="the answer")
    assert "have been sent" in httpx.get(f"{world.url}/play/customer/case-31").text


def test_pages_show_what_came_without_running_it(world, outside):
    outside.do(effect("mail.send", text="<script>alert(1)</script>"))
    for path in ("/", "/records/1", "/runs/flow/run-1"):
        page = httpx.get(world.url + path)
        assert page.status_code == 200
        assert "<script" not in page.text
    assert "&lt;script&gt;" in httpx.get(f"{world.url}/records/1").text


def test_every_paper_of_the_scenarios_has_a_page(world):
    for flow in scenarios.FLOWS:
        for index in range(7):
            external_id = scenarios.external_id(flow, index)
            page = httpx.get(f"{world.url}/documents/{flow}/{external_id}")
            assert page.status_code == 200
            assert external_id in page.text


@pytest.mark.parametrize("body", [b"[1]", b"{", b"\xff", b"x" * 300_000])
def test_nonsense_is_answered_and_does_nothing(world, body):
    answer = httpx.post(f"{world.url}/crm/x", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 413)
    assert world.journal.counts() == {}
