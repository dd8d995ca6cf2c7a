"""`apply`, `issue_key`, `invite`: what a file makes of an installation, and what their output says."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command

from rehydrate import keys
from rehydrate.flowfile import FileError, parse
from rehydrate.models import AdminEvent, ApiKey, Flow, Group, PolicyVersion, Workspace

FILE = """
[workspace.default]
title = "Operations"

[group.legal]
members = ["alice", "bob"]
roles = ["reviewer", "operator"]

[flow.contract-approval]
title = "Contract approval"
required = ["checkpoint", "input_ref"]
on_reject = "compensate"
gated_stages = ["sign"]

[flow.contract-approval.wait.legal-approval]
groups = ["legal"]
quorum = 1
remind_before = "2h"

[flow.contract-approval.effect."erp.create_order"]
title = "Order {n} from {supplier}"
impact = "money"
needs_approval = "legal-approval"
compensation = "erp.cancel_order"
"""


@pytest.fixture
def apply(tmp_path: Path):
    """Runs the command on a text; what it printed."""

    def run(text: str) -> list[str]:
        path = tmp_path / "flows.toml"
        path.write_text(text, encoding="utf-8")
        out = io.StringIO()
        call_command("apply", str(path), stdout=out, stderr=out)
        return out.getvalue().splitlines()

    return run


def issue(*words: str) -> str:
    out = io.StringIO()
    call_command("issue_key", *words, stdout=out)
    return out.getvalue()


@pytest.mark.django_db
class TestApply:
    def test_makes_what_the_file_says_and_tells(self, apply) -> None:
        lines = apply(FILE)

        assert lines == [
            "workspace default: made",
            "person alice: made",
            "person bob: made",
            "group legal: made; roles reviewer, operator; members +alice +bob",
            "flow contract-approval: made",
        ]
        legal = Group.objects.get(name="legal")
        assert set(legal.members.values_list("username", flat=True)) == {"alice", "bob"}
        assert legal.roles == ["reviewer", "operator"]
        assert not User.objects.get(username="alice").has_usable_password()
        body = PolicyVersion.objects.get(flow__name="contract-approval").body
        assert body["effect"]["erp.create_order"]["needs_approval"] == "legal-approval"

    def test_the_same_file_twice_changes_nothing(self, apply) -> None:
        apply(FILE)
        before = AdminEvent.objects.count()

        assert apply(FILE) == ["nothing changed"]
        assert AdminEvent.objects.count() == before
        assert Flow.objects.get().current == 1

    def test_members_come_and_go_and_stay_people(self, apply) -> None:
        apply(FILE)

        lines = apply(FILE.replace('["alice", "bob"]', '["bob", "carol"]'))
        assert lines[:2] == ["person carol: made", "group legal: members +carol -alice"]
        assert User.objects.filter(username="alice").exists()

    def test_roles_change(self, apply) -> None:
        apply(FILE)

        lines = apply(FILE.replace('["reviewer", "operator"]', '["reviewer"]'))
        assert lines[0] == "group legal: roles reviewer, operator → reviewer"

    def test_a_changed_policy_is_a_new_version_beside_the_old(self, apply) -> None:
        apply(FILE)

        lines = apply(FILE.replace("quorum = 1", "quorum = 2").replace('"compensate"', '"review"'))
        assert lines[0] == "flow contract-approval: policy version 2 (on_reject, wait.legal-approval)"
        versions = PolicyVersion.objects.order_by("number")
        assert [version.body["wait"]["legal-approval"].get("quorum", 1) for version in versions] == [1, 2]
        assert Flow.objects.get().current == 2

    def test_what_the_file_does_not_name_stays(self, apply) -> None:
        apply(FILE)

        assert apply('[group.buyers]\nmembers = ["dave"]\n') == [
            "person dave: made",
            "group buyers: made; roles reviewer; members +dave",
        ]
        assert Group.objects.count() == 2

    def test_every_change_is_an_administrators_event(self, apply) -> None:
        apply(FILE)

        acts = list(AdminEvent.objects.values_list("act", "subject"))
        assert ("group.made", "group legal") in acts
        assert ("flow.made", "flow contract-approval") in acts
        assert all(event.actor_id == "command" for event in AdminEvent.objects.all())

    def test_an_error_leaves_everything_as_it_was(self, apply) -> None:
        with pytest.raises(CommandError, match=r"\[flow.x\] workspace: there is no workspace 'nowhere'"):
            apply(FILE + '\n[flow.x]\nworkspace = "nowhere"\n')
        assert not Workspace.objects.exists()
        assert not User.objects.exists()

    def test_a_group_that_there_is_not_yet_is_a_note(self, apply) -> None:
        lines = apply(FILE.replace('groups = ["legal"]', 'groups = ["legal"]\nescalate_to = ["leads"]'))
        assert (
            lines[-1]
            == "note: flow contract-approval: wait legal-approval names the group leads, which there is not yet"
        )

    def test_two_workspaces_have_groups_of_the_same_name(self, apply) -> None:
        apply(FILE)
        apply('[workspace.other]\n\n[group.legal]\nworkspace = "other"\nmembers = ["mallory"]\n')

        other = Group.objects.get(workspace__slug="other", name="legal")
        assert list(other.members.values_list("username", flat=True)) == ["mallory"]
        assert Group.objects.get(workspace__slug="default", name="legal").members.count() == 2

    def test_a_file_that_is_not_there(self) -> None:
        with pytest.raises(CommandError, match=r"nothing\.toml cannot be read: No such file"):
            call_command("apply", "nothing.toml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[flow", "this is no TOML"),
        ("x = 1", r"\[x\]: unknown"),
        ("flow = 3", "flow: write a table"),
        ("[flow.a]\nfoo = 1", r"\[flow.a\]: object contains unknown field `foo`"),
        ("[flow.a]\ndeclared = true", r"\[flow.a\]: unknown field `declared`"),
        ("[flow.a]\nworkspace = 3", r"\[flow.a\] workspace"),
        ("[flow.a]\nlease_seconds = '60'", r"\[flow.a\] lease_seconds: expected `int`"),
        ("[flow.a]\nlease_seconds = 0", r"\[flow.a\] lease_seconds"),
        ("[flow.a]\non_reject = 'shrug'", r"\[flow.a\] on_reject"),
        ("[flow.a]\nrequired = ['colour']", r"\[flow.a\] required: 'colour' is none of"),
        ("[flow.a]\nsecret = ['iban']", r"\[flow.a\] secret: 'iban' is no JSON Pointer"),
        ("[flow.a]\ndeliver_to = 'ftp://x'", r"\[flow.a\] deliver_to"),
        ("[flow.a.wait.b]\nquorum = 0", r"\[flow.a.wait.b\] quorum"),
        ("[flow.a.wait.b]\nremind_every = '2 fortnights'", r"\[flow.a.wait.b\] remind_every"),
        ("[flow.a.wait.b]\ngroups = ['x', 'x']", r"\[flow.a.wait.b\] groups: 'x' stands there twice"),
        ("[flow.a.wait.b]\nescalate_after = '1d'", r"\[flow.a.wait.b\] escalate_after: say to whom"),
        ("[flow.a.effect.'e.c']\nimpact = 'huge'", r"\[flow.a.effect.e.c\] impact"),
        ("[flow.a.effect.'e.c']\nneeds_approval = 'q'", r"\[flow.a.effect.e.c\] needs_approval: the flow has no wait"),
        ("[group.g]\nroles = ['king']", r"\[group.g\] roles: 'king' is none of"),
        ("[group.g]\nroles = []", r"\[group.g\] roles: name at least one"),
        ("[group.g]\nmembers = ['a', 'a']", r"\[group.g\] members: 'a' stands there twice"),
        ("[group.g]\nmembers = ['a b']", r"\[group.g\] members: 'a b' cannot be a user name"),
        ("[group.'g h']\n", r"\[group.g h\]: a name has"),
    ],
)
def test_what_a_file_may_not_say_is_named_with_its_place(text: str, message: str) -> None:
    with pytest.raises(FileError, match=message):
        parse(text)


@pytest.mark.django_db
class TestKeys:
    def test_an_agents_key_is_printed_alone_and_opens_what_it_names(self, apply) -> None:
        apply(FILE)

        printed = issue(
            "agent", "--workspace", "default", "--name", "bot", "--flow", "contract-approval", "--owner", "alice"
        )
        text = printed.strip()
        assert printed == f"{text}\n"
        key = keys.find(text)
        assert key is not None
        assert (key.name, key.flows, key.user and key.user.username) == ("bot", ["contract-approval"], "alice")

    def test_without_a_flow_it_allows_every_one(self, apply) -> None:
        apply(FILE)
        key = keys.find(issue("agent", "--name", "bot").strip())
        assert key is not None
        assert key.flows == ["*"]

    def test_a_persons_key(self, apply) -> None:
        apply(FILE)
        key = keys.find(issue("person", "--user", "alice").strip())
        assert key is not None
        assert key.user == User.objects.get(username="alice")

    def test_only_a_digest_is_kept(self, apply) -> None:
        apply(FILE)
        text = issue("agent", "--name", "bot").strip()
        row = ApiKey.objects.values().get()
        assert text.rpartition("_")[2] not in str(row)
        assert text not in str(list(AdminEvent.objects.values()))

    def test_a_wrong_or_revoked_key_opens_nothing(self, apply) -> None:
        apply(FILE)
        text = issue("agent", "--name", "bot").strip()
        key = keys.find(text)
        assert key is not None
        for wrong in ("", "rhk", "rhk__", text[:-1], f"{text}x", text.replace("rhk_", "xxx_"), "\0", "é" * 50):
            assert keys.find(wrong) is None
        keys.revoke(key, by="admin")
        assert keys.find(text) is None
        assert AdminEvent.objects.filter(act="key.revoked").count() == 1

    def test_unknown_names_are_told(self, apply) -> None:
        with pytest.raises(CommandError, match="There is no workspace default"):
            issue("agent", "--name", "bot")
        apply(FILE)
        with pytest.raises(CommandError, match="Nobody is called zoe"):
            issue("person", "--user", "zoe")
        with pytest.raises(CommandError, match="Nobody is called zoe"):
            issue("agent", "--name", "bot", "--owner", "zoe")


@pytest.mark.django_db
class TestInvite:
    def test_prints_a_link(self, apply) -> None:
        apply(FILE)
        out = io.StringIO()
        call_command("invite", "alice", stdout=out)
        assert out.getvalue().startswith("http://testserver/sign-in/")
        assert len(out.getvalue().splitlines()) == 1

    def test_refuses_a_stranger_and_one_who_was_switched_off(self, apply) -> None:
        with pytest.raises(CommandError, match="Nobody is called alice"):
            call_command("invite", "alice")
        apply(FILE)
        User.objects.filter(username="alice").update(is_active=False)
        with pytest.raises(CommandError, match="switched off"):
            call_command("invite", "alice")
