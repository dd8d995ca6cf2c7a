"""`rehydrate doctor`: what it says of a server, a key, a clock and a receiver, and what to do about each."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest
from django.core.management import call_command
from standardwebhooks import WebhookVerificationError

from rehydrate import __version__, pulse, sender, webhooks
from rehydrate.client import doctor
from tests.conftest import ROOT, free_port
from tests.deliveries.receiver import Handler, Receiver

from .conftest import issue_key


@pytest.fixture
def told(capsys, monkeypatch):
    """What the doctor says, and its exit code; the environment says nothing."""
    for name in ("REHYDRATE_URL", "REHYDRATE_KEY", "WEBHOOK_SECRET"):
        monkeypatch.delenv(name, raising=False)

    def ask(*words: str) -> tuple[int, str]:
        code = doctor.main(words)
        return code, capsys.readouterr().out

    return ask


@pytest.fixture
def running(cast):
    """The cast's server with somebody who looks at its timers, as `up` starts it."""
    with pulse.Tick() as tick:
        tick.show()
        yield cast


@pytest.fixture
def answers():
    """A server that is not ours: answers each GET with these headers and body."""

    class Answering(BaseHTTPRequestHandler):
        body, date = b"{}", formatdate(usegmt=True)

        def do_GET(self) -> None:
            self.send_response_only(200)
            self.send_header("Date", self.date)
            self.send_header("Content-Length", str(len(self.body)))
            self.end_headers()
            self.wfile.write(self.body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}).start()

    def at(body: str, *, apart: float = 0.0) -> str:
        Answering.body = body.encode()
        Answering.date = formatdate(time.time() + apart, usegmt=True)
        return f"http://127.0.0.1:{server.server_port}"

    yield at
    server.shutdown()
    server.server_close()


def ours(version: str = __version__) -> str:
    return f'{{"version": "{version}"}}'


def test_all_is_well(running, told):
    key = issue_key("agent", "--name", "bot", "--flow", "contract-approval")
    code, said = told(f"{running.url}/", "--key", key, "--flow", "contract-approval")
    assert code == 0, said
    assert f"ok    server    {running.url} answers" in said
    assert f"server {__version__}, client {__version__}" in said
    assert "agree on the time" in said
    assert "agent bot of the workspace default may use contract-approval" in said
    assert "FAIL" not in said


def test_nothing_listens(told):
    code, said = told(f"http://127.0.0.1:{free_port()}", "--key", "k")
    assert code == 1
    assert "FAIL  server" in said
    assert "-> Nothing listens there: start the server (make run)" in said


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("ledger.example", "Write it as https://"),
        ("http://nobody.invalid", "The name has no address here"),
    ],
)
def test_address_is_wrong(told, url, advice):
    code, said = told(url, "--key", "k")
    assert code == 1
    assert advice in said


def test_something_else_answers(told, answers):
    code, said = told(answers("<html>Sign in</html>"), "--key", "k")
    assert code == 1
    assert "it is not Rehydrate: '<html>Sign in</html>'" in said


def test_address_of_the_api_is_as_good(running, told, key):
    assert told(f"{running.url}/api/v1", "--key", key)[0] == 0


def test_key_is_missing_or_wrong_or_a_persons(cast, told):
    for words, saw in (
        ((), "there is none"),
        (("--key", f"{issue_key('agent', '--name', 'bot')}x"), "not known"),
        (("--key", issue_key("person", "--user", "alice")), "the key of a person, alice"),
    ):
        code, said = told(cast.url, *words)
        assert code == 1
        assert saw in said
        assert "issue_key agent --workspace default" in said


def test_flow_that_the_key_may_not_use(cast, told):
    key = issue_key("agent", "--name", "bot", "--flow", "purchasing")
    code, said = told(cast.url, "--key", key, "--flow", "contract-approval")
    assert code == 1
    assert "this key may not use contract-approval" in said
    assert "issue_key agent --workspace default --name bot --flow contract-approval" in said


@pytest.mark.parametrize(("apart", "saw"), [(3600, "s behind the server"), (-3600, "s ahead of the server")])
def test_clock_is_an_hour_off(told, answers, apart, saw):
    code, said = told(answers(ours(), apart=apart), "--key", "k")
    assert code == 1
    assert saw in said
    assert "Set both by NTP" in said


@pytest.mark.parametrize(("version", "mark"), [("7.1.0", "FAIL"), ("0.99.0", "note")])
def test_another_version(told, answers, version, mark):
    said = told(answers(ours(version)), "--key", "k")[1]
    assert f"{mark}  version" in said
    assert f"pip install 'rehydrate=={version}'" in said


# --- receivers ---


def aimed(url: str, folder: Path) -> None:
    file = folder / "told.toml"
    file.write_text(f'[flow.told]\nrequired = []\ndeliver_to = "{url}"\n')
    call_command("apply", str(file), stdout=io.StringIO())


@pytest.fixture
def private(settings) -> None:
    """Receivers on this machine are delivered to, as an operator may allow."""
    settings.ALLOW_PRIVATE_TARGETS = True


def test_deliveries_are_taken_or_not(running, told, private, ledger, key, tmp_path):
    with Receiver() as receiver:
        aimed(receiver.url, tmp_path)
        code, said = told(running.url, "--key", key)
        assert code == 0, said
        assert "nothing has been delivered" in said
        ledger.open("told", "told-1")
        assert sender.send_due() == 1
        code, said = told(running.url, "--key", key)
        assert code == 0, said
        assert f"ok    webhook   told: {receiver.url} takes what is delivered" in said

    ledger.open("told", "told-2")
    assert sender.send_due() == 1
    code, said = told(running.url, "--key", key)
    assert code == 1
    assert "did not take the last 1: connect_failed" in said
    assert "-> Nothing listens there" in said


def verifying(secret: str) -> Any:
    def answer(handler: Handler) -> None:
        try:
            handler.receiver.posts[-1].verify(secret)
        except WebhookVerificationError:
            handler.say(401)
        else:
            handler.say(204)

    return answer


def test_receiver_that_verifies(running, told, key):
    secret = webhooks.new_secret()
    with Receiver(answer=verifying(secret)) as receiver:
        code, said = told(running.url, "--key", key, "--webhook", receiver.url, "--secret", secret)
        assert code == 0, said
        assert "refuses what a stranger has signed (401)" in said
        assert "takes what is signed with this secret" in said
        assert "REHYDRATE_ALLOW_PRIVATE_TARGETS=1" in said  # it is on this machine

        code, said = told(running.url, "--key", key, "--webhook", receiver.url, "--secret", webhooks.new_secret())
        assert code == 1
        assert "answers 401 to what is signed with this secret" in said


def test_receiver_that_believes_anybody(running, told, key):
    with Receiver() as receiver:
        code, said = told(running.url, "--key", key, "--webhook", receiver.url)
    assert code == 1
    assert "takes what a stranger has signed" in said
    assert {post.json["type"] for post in receiver.posts} == {"doctor.trial"}  # wakes nobody


def test_receiver_that_is_not_there(running, told, key):
    code, said = told(running.url, "--key", key, "--webhook", f"http://127.0.0.1:{free_port()}/hooks")
    assert code == 1
    assert "FAIL  webhook" in said


# --- as it is started ---


@pytest.mark.processes
def test_command_needs_no_django(running, key):
    code = "import sys; sys.modules['django'] = None; from rehydrate.__main__ import main; main()"
    environment = {**os.environ, "REHYDRATE_URL": running.url, "REHYDRATE_KEY": key}
    done = subprocess.run(
        [sys.executable, "-c", code, "doctor"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("All is well.\n")


def test_me_says_who_asks_and_what_they_may_use(cast):
    def me(key: str) -> Any:
        return httpx.get(f"{cast.url}/api/v1/me", headers={"Authorization": f"Bearer {key}"}).json()

    bot = me(issue_key("agent", "--name", "bot", "--owner", "carol", "--flow", "purchasing"))
    assert bot == {
        "kind": "agent", "name": "bot", "owner": "carol",
        "workspaces": [{"name": "default", "roles": []}], "flows": ["purchasing"],
    }  # fmt: skip
    alice = me(issue_key("person", "--user", "alice"))
    assert (alice["kind"], alice["name"], alice["flows"]) == ("person", "alice", [])
    assert "reviewer" in alice["workspaces"][0]["roles"]
