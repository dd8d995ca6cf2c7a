"""`apply` and `rotate_webhook_secret`: receivers as a file names them, and secrets that are shown once."""

from __future__ import annotations

import io
import re
import time
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection

from rehydrate import deliveries, seal, sender
from rehydrate.apply import apply
from rehydrate.flowfile import FileError, parse
from rehydrate.models import AdminEvent, Delivery, Endpoint, Flow

pytestmark = pytest.mark.django_db

URL = "https://agent.example/hooks"
SECRET = re.compile(r"whsec_[A-Za-z0-9+/]{43}=")


@pytest.fixture(autouse=True)
def _closed(settings: Any) -> None:
    """As a server is that nobody allowed to deliver inside."""
    settings.ALLOW_PRIVATE_TARGETS = False


@pytest.fixture
def put(tmp_path: Path) -> Any:
    def put(url: str | None, *, flow: str = "a") -> str:
        path = tmp_path / "flows.toml"
        path.write_text(f"[flow.{flow}]\n" + (f'deliver_to = "{url}"\n' if url is not None else ""))
        out = io.StringIO()
        call_command("apply", str(path), stdout=out, stderr=out)
        return out.getvalue()

    return put


def test_a_new_receiver_gets_a_secret_that_is_shown_once(put: Any) -> None:
    said = put(URL)
    found = SECRET.findall(said)
    assert len(found) == 1
    assert seal.decrypt(Endpoint.objects.get().secret) == found[0]
    again = put(URL)
    assert "nothing changed" in again
    assert "whsec_" not in again


def test_the_secret_is_kept_nowhere_in_clear(put: Any) -> None:
    bare = SECRET.findall(put(URL))[0].removeprefix("whsec_")
    with connection.cursor() as cursor:
        cursor.execute("SELECT table_name FROM information_schema.tables WHERE table_schema = 'public'")
        for (table,) in cursor.fetchall():
            cursor.execute(f'SELECT count(*) FROM "{table}" t WHERE position(%s in t::text) > 0', [bare])
            assert cursor.fetchone()[0] == 0, table


def test_another_address_keeps_the_secret(put: Any) -> None:
    put(URL)
    kept = Endpoint.objects.get().secret
    said = put("https://agent.example/elsewhere")
    assert "delivers to https://agent.example/elsewhere" in said
    assert "whsec_" not in said
    assert Endpoint.objects.get().secret == kept


def test_a_receiver_that_is_named_again_is_a_new_one(put: Any) -> None:
    first = SECRET.findall(put(URL))
    assert "delivers nowhere any more" in put(None)
    assert Endpoint.objects.get().url is None
    second = SECRET.findall(put(URL))
    assert first != second
    assert Endpoint.objects.count() == 1


def test_what_was_done_is_in_the_administrators_history(put: Any) -> None:
    put(URL)
    put("https://agent.example/elsewhere")
    call_command("rotate_webhook_secret", "--flow", "a", stdout=io.StringIO())
    put(None)
    acts = list(AdminEvent.objects.filter(act__startswith="endpoint.").order_by("id").values_list("act", flat=True))
    assert acts == ["endpoint.made", "endpoint.changed", "endpoint.secret_rotated", "endpoint.changed"]


@pytest.mark.parametrize(
    "url",
    ["http://agent.example/h", "https://127.0.0.1/h", "https://2130706433/h", "https://0x7f.1/h", "https://localhost/h",
     "https://[::1]/h", "https://169.254.169.254/h", "https://u:p@agent.example/h", "https://agent.example:22/h", ""],
)  # fmt: skip
def test_what_may_not_be_delivered_to_is_refused_and_nothing_changes(put: Any, url: str) -> None:
    with pytest.raises(CommandError, match=r"\[flow\.a\] deliver_to: "):
        put(url)
    assert not Flow.objects.exists()
    assert not Endpoint.objects.exists()


def test_an_operator_may_allow_inside_receivers(put: Any, settings: Any) -> None:
    settings.ALLOW_PRIVATE_TARGETS = True
    assert SECRET.search(put("http://127.0.0.1:9/h"))


def test_a_name_that_leads_inside_is_refused_already_here() -> None:
    document = parse(f'[flow.a]\ndeliver_to = "{URL}"')
    with pytest.raises(FileError, match="inside network"):
        apply(document, resolve=lambda host, port: ["8.8.8.8", "192.168.0.4"])
    assert not Endpoint.objects.exists()


def test_a_name_that_nobody_knows_yet_is_noted_and_no_error() -> None:
    report = apply(parse(f'[flow.a]\ndeliver_to = "{URL}"'), resolve=lambda host, port: [])
    assert any("no address yet" in note for note in report.notes)
    assert Endpoint.objects.get().url == URL


def test_a_policy_of_an_older_server_gets_its_receiver_when_the_file_is_applied_again(put: Any) -> None:
    put(URL)
    Endpoint.objects.all().delete()
    assert SECRET.search(put(URL))
    assert Flow.objects.get().current == 1


def test_two_workspaces_have_receivers_of_their_own(put: Any, tmp_path: Path) -> None:
    put(URL)
    path = tmp_path / "other.toml"
    path.write_text(f'[workspace.other]\n[flow.b]\nworkspace = "other"\ndeliver_to = "{URL}"\n')
    out = io.StringIO()
    call_command("apply", str(path), stdout=out)
    assert SECRET.search(out.getvalue())
    assert Endpoint.objects.count() == 2


def test_rotating_prints_the_new_secret_and_nothing_else(put: Any) -> None:
    first = SECRET.findall(put(URL))[0]
    out = io.StringIO()
    call_command("rotate_webhook_secret", "--workspace", "default", "--flow", "a", "--overlap", "2h", stdout=out)
    second = out.getvalue().strip()
    assert SECRET.fullmatch(second)
    assert second != first
    row = Endpoint.objects.get()
    assert (seal.decrypt(row.secret), seal.decrypt(row.previous_secret or "")) == (second, first)
    assert row.previous_until is not None
    assert 7100 < row.previous_until.timestamp() - time.time() < 7300
    assert second.removeprefix("whsec_") not in str(list(AdminEvent.objects.values_list("detail", flat=True)))


def test_rotating_without_an_overlap_puts_the_old_one_out_at_once(put: Any) -> None:
    put(URL)
    call_command("rotate_webhook_secret", "--flow", "a", "--overlap", "0s", stdout=io.StringIO())
    row = Endpoint.objects.get()
    assert (row.previous_secret, row.previous_until) == (None, None)


@pytest.mark.parametrize(
    "words", [["--flow", "b"], ["--flow", "a", "--workspace", "none"], ["--flow", "a", "--overlap", "soon"]]
)
def test_rotating_says_what_is_wrong(put: Any, words: list[str]) -> None:
    put(URL)
    with pytest.raises(CommandError):
        call_command("rotate_webhook_secret", *words, stdout=io.StringIO())


def test_the_whole_way_from_a_file_to_a_receiver(put: Any, settings: Any, receiver: Any) -> None:
    """As an operator sets it up: apply, keep the secret, verify what arrives."""
    from rehydrate.callers import Caller
    from rehydrate.core import commands as cmd
    from rehydrate.models import Workspace
    from rehydrate.services import open_run

    settings.ALLOW_PRIVATE_TARGETS = True
    secret = SECRET.findall(put(receiver.url))[0]
    place = {str(Workspace.objects.get(slug="default").pk): frozenset[str]()}
    bot = Caller(kind="agent", id="bot", name="bot", workspaces=place, flows=("*",))
    open_run(bot, cmd.OpenRun(flow="a", external_id="x-1"))
    assert sender.send_due() == 1
    assert receiver.posts[0].verify(secret)["data"]["external_id"] == "x-1"
    assert Delivery.objects.get().status == "delivered"
    assert deliveries.seconds_until_due() is None
