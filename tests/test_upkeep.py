"""What operators do by command: renew and revoke keys, and delete an ended run's opaque state."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command
from django.test import Client

from rehydrate.models import AdminEvent, CheckpointState
from tests.contract import driver as d
from tests.contract.driver import done, effect


@pytest.fixture
def world(db: Any, tmp_path: Any, client: Any) -> d.World:
    made = d.World(d.DjangoTransport(), tmp_path)
    made.apply(d.CAST)
    return made


def command(*words: str) -> str:
    out = StringIO()
    call_command(*words, stdout=out)
    return out.getvalue().strip()


def prefix(key: str) -> str:
    return key.split("_")[1]


def test_a_renewed_key_has_the_same_rights_and_the_old_one_none(world: d.World) -> None:
    bot = world.agent("bot")
    run = bot.open()
    old = str(bot.key)
    bot.key = command("rotate_key", prefix(old))
    assert run.look(bot)["id"] == run.id
    bot.key = old
    bot.get(f"/runs/{run.id}").refused(401, "unauthenticated")
    acts = AdminEvent.objects.filter(subject__contains="bot").values_list("act", flat=True)
    assert {"key.renewed", "key.revoked"} <= set(acts)


def test_keys_may_overlap_until_the_old_one_is_revoked(world: d.World) -> None:
    bot = world.agent("bot")
    run = bot.open()
    old = str(bot.key)
    new = command("rotate_key", old, "--keep")
    for bot.key in (old, new):
        assert run.look(bot)["id"] == run.id
    assert command("revoke_key", old).startswith("revoked: ")
    bot.key = old
    bot.get(f"/runs/{run.id}").refused(401, "unauthenticated")
    with pytest.raises(CommandError, match="revoked"):
        command("rotate_key", old)
    with pytest.raises(CommandError, match="no such key"):
        command("revoke_key", "0000000000")


def test_opaque_state_is_deleted_after_the_end_only(world: d.World) -> None:
    bot = world.agent("bot")
    run = bot.open({"type": "checkpoint", "stage": "s", "state": {"thoughts": "many"}})
    assert CheckpointState.objects.filter(run_id=run.id).count() == 1
    with pytest.raises(CommandError, match="not ended"):
        command("forget_state", "--run", run.id)
    run.do({"type": "completed"})
    assert command("forget_state", "--run", run.id) == "deleted: 1"
    assert CheckpointState.objects.filter(run_id=run.id).count() == 0
    call_command("verify_ledger", "--run", run.id, stdout=StringIO())


def test_an_act_that_happened_twice_is_an_alarm_until_it_is_cleared(world: d.World) -> None:
    bot, dave = world.agent("bot"), world.person("dave")
    run = bot.open(*done(effect("k", "mail.send")))
    run.do({"type": "effect.executed", "key": "k", "receipt": {"id": "another", "status": "done"}})
    assert run.look(dave)["alarms"] == [{"code": "effect_repeated", "subject": "k"}]
    dave.clear(run, "effect_repeated").fine()
    assert run.look(dave)["alarms"] == []


def test_people_who_are_switched_off_leave_no_gate_that_nobody_can_satisfy(world: d.World, client: Client) -> None:
    """Rule 11: if people leave later, the wait goes to review under `unsatisfiable_gate`."""
    bot = world.agent("bot")
    run = bot.open()
    wait = run.pause(d.approval())
    root = User.objects.create_superuser("root", password="for this test alone")
    client.force_login(root)
    legal = User.objects.filter(rehydrate_groups__name__in=wait["assignees"], is_active=True).distinct()
    assert legal.count() > 1
    for person in legal:
        form = {
            "username": person.get_username(),
            "date_joined_0": "2026-01-01",
            "date_joined_1": "00:00:00",
        }
        answer = client.post(f"/admin/auth/user/{person.pk}/change/", form)
        assert answer.status_code == 302, answer.content.decode()[:2000]
    assert not User.objects.filter(pk__in=[person.pk for person in legal], is_active=True).exists()
    assert run.wait(wait["key"])["version"] > wait["version"]
    assert (run.status, "unsatisfiable_gate" in run.codes) == ("review", True)
    assert client.post(f"/admin/auth/user/{root.pk}/delete/", {"post": "yes"}).status_code == 403
