"""Makes workspaces, groups, people and flows what a file says, in one transaction, and tells what it changed.

What the file does not name stays as it is. The same file a second time changes nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from django.conf import settings
from django.contrib.auth.models import User
from django.db import connection, transaction

from rehydrate import deliveries, ledger, targets
from rehydrate.core.policy import FlowPolicy
from rehydrate.flowfile import Document, FileError, FlowEntry, GroupEntry
from rehydrate.models import AdminEvent, Endpoint, Flow, Group, Membership, PolicyVersion, Workspace

_LOCK = 0x6170706C  # one `apply` at a time in this database


@dataclass
class Report:
    """`changes`: one line each, none when the file was in force. `notes`: what may surprise, and is no error.

    `secrets`: one line for each receiver that is new, with what its deliveries are signed with; kept nowhere in clear.
    """

    changes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    secrets: list[str] = field(default_factory=list)


@dataclass
class _Touched:
    """What open waits of a workspace may depend on: rule 16 raises their version."""

    groups: set[str] = field(default_factory=set)
    waits: set[tuple[str, str]] = field(default_factory=set)


class _Applying:
    def __init__(self, by: str) -> None:
        self.by = by
        self.kind = "system" if by in {"command", "demo"} else "person"
        self.actor = "command" if self.kind == "system" else by
        self.report = Report()
        self.workspaces: dict[str, Workspace] = {row.slug: row for row in Workspace.objects.all()}
        self.people: dict[str, User] = {}
        self.touched: defaultdict[str, _Touched] = defaultdict(_Touched)

    def changed(self, workspace: Workspace | None, act: str, subject: str, line: str, **detail: Any) -> None:
        self.report.changes.append(f"{subject}: {line}")
        AdminEvent.objects.create(
            workspace=workspace,
            actor_kind=self.kind,
            actor_id=self.by,
            act=act,
            subject=subject,
            detail={"change": line, **detail},
        )


def apply(document: Document, *, by: str = "command", resolve: targets.Resolve = targets.look_up) -> Report:
    """Puts the file in force. Raises `FileError` where it names an unknown workspace or a receiver that may not be
    delivered to; then nothing has changed.
    """
    notes = _check_receivers(document, resolve)  # before anything is locked: a name server may be slow
    report = _apply(document, by)
    report.notes += notes
    return report


def _check_receivers(document: Document, resolve: targets.Resolve) -> list[str]:
    """A name that leads inside is refused here already; one that leads nowhere may yet be set up."""
    known = set(Endpoint.objects.values_list("workspace__slug", "flow", "url"))
    notes = []
    for name, flow in document.flows.items():
        url = flow.policy.deliver_to
        if url is None or (flow.workspace, name, url) in known:
            continue
        allowed = settings.ALLOW_PRIVATE_TARGETS
        try:
            parsed = targets.parse(url, allow_private=allowed)
            targets.addresses(parsed.host, parsed.port or 443, allow_private=allowed, resolve=resolve)
        except targets.TargetError as error:
            if error.code != "unresolvable":
                raise FileError(f"[flow.{name}] deliver_to: {error}") from None
            notes.append(f"flow {name}: deliver_to names a host that has no address yet")
    return notes


@transaction.atomic
def _apply(document: Document, by: str) -> Report:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
    work = _Applying(by)
    _workspaces(work, document)
    _people(work, document)
    for name, group in document.groups.items():
        _group(work, name, group)
    for name, flow in document.flows.items():
        _flow(work, name, flow)
    for slug, touched in work.touched.items():
        raised = ledger.policy_changed(
            workspace=work.workspaces[slug], groups=touched.groups, flow_waits=touched.waits, by=work.actor
        )
        if raised:
            work.report.changes.append(
                f"workspace {slug}: {raised} open wait{'s' if raised > 1 else ''} got a new version"
            )
    _note_missing_groups(work, document)
    return work.report


def _workspaces(work: _Applying, document: Document) -> None:
    for slug, entry in document.workspaces.items():
        row = work.workspaces.get(slug)
        if row is None:
            row = work.workspaces[slug] = Workspace.objects.create(slug=slug, title=entry.title)
            work.changed(row, "workspace.made", f"workspace {slug}", "made")
        elif entry.title and row.title != entry.title:
            before, row.title = row.title, entry.title
            row.save(update_fields=["title"])
            work.changed(row, "workspace.changed", f"workspace {slug}", f"title “{entry.title}”", before=before)
    used = [(f"[group.{name}]", group.workspace) for name, group in document.groups.items()]
    used += [(f"[flow.{name}]", flow.workspace) for name, flow in document.flows.items()]
    for place, slug in used:
        if slug in work.workspaces:
            continue
        if slug != "default":
            raise FileError(f"{place} workspace: there is no workspace {slug!r}; add [workspace.{slug}]")
        work.workspaces[slug] = Workspace.objects.create(slug=slug, title="Default")
        work.changed(work.workspaces[slug], "workspace.made", f"workspace {slug}", "made")


def _people(work: _Applying, document: Document) -> None:
    names = sorted({member for group in document.groups.values() for member in group.members})
    work.people = {user.get_username(): user for user in User.objects.filter(username__in=names)}
    for name in names:
        if name not in work.people:
            work.people[name] = User.objects.create_user(name)  # no password: `invite` lets the person in
            work.changed(None, "person.made", f"person {name}", "made")


def _group(work: _Applying, name: str, entry: GroupEntry) -> None:
    workspace = work.workspaces[entry.workspace]
    group, made = Group.objects.get_or_create(workspace=workspace, name=name, defaults={"roles": entry.roles})
    before = set() if made else set(group.memberships.values_list("user__username", flat=True))
    wanted = set(entry.members)
    lines = []
    if made:
        lines.append(f"made; roles {', '.join(entry.roles)}")
    elif sorted(group.roles) != sorted(entry.roles):
        lines.append(f"roles {', '.join(group.roles)} → {', '.join(entry.roles)}")
        group.roles = entry.roles
        group.save(update_fields=["roles"])
    if wanted != before:
        Membership.objects.bulk_create(
            [Membership(group=group, user=work.people[member]) for member in entry.members if member not in before]
        )
        Membership.objects.filter(group=group, user__username__in=before - wanted).delete()
        signs = [f"+{member}" for member in sorted(wanted - before)] + [
            f"-{member}" for member in sorted(before - wanted)
        ]
        lines.append(f"members {' '.join(signs)}")
    if lines:
        work.touched[entry.workspace].groups.add(name)
        act = "group.made" if made else "group.changed"
        work.changed(workspace, act, f"group {name}", "; ".join(lines), members=sorted(wanted), roles=entry.roles)


def _flow(work: _Applying, name: str, entry: FlowEntry) -> None:
    _policy(work, name, entry)
    workspace = work.workspaces[entry.workspace]
    line, secret = deliveries.aim(workspace, name, entry.policy.deliver_to)
    if line is not None:
        act = "endpoint.made" if secret else "endpoint.changed"
        work.changed(workspace, act, f"flow {name}", line)
    if secret is not None:
        work.report.secrets.append(f"flow {name}: the secret of its deliveries, shown this once: {secret}")


def _policy(work: _Applying, name: str, entry: FlowEntry) -> None:
    workspace = work.workspaces[entry.workspace]
    body = msgspec.to_builtins(entry.policy)
    flow = Flow.objects.select_for_update().filter(workspace=workspace, name=name).first()
    if flow is None:
        flow = Flow.objects.create(workspace=workspace, name=name, title=entry.policy.title, current=1)
        PolicyVersion.objects.create(flow=flow, number=1, body=body, changed_by=work.by)
        work.touched[entry.workspace].waits |= {(name, wait) for wait in entry.policy.wait}
        work.changed(workspace, "flow.made", f"flow {name}", "made", version=1)
        return
    before = PolicyVersion.objects.get(flow=flow, number=flow.current).body
    if before == body:
        return
    flow.current += 1
    flow.title = entry.policy.title
    flow.save(update_fields=["current", "title"])
    PolicyVersion.objects.create(flow=flow, number=flow.current, body=body, changed_by=work.by)
    waits = _differing(before.get("wait", {}), body.get("wait", {}))
    work.touched[entry.workspace].waits |= {(name, wait) for wait in waits}
    parts = [*_differing(_without_tables(before), _without_tables(body))]
    for table in ("wait", "effect"):
        parts += [f"{table}.{key}" for key in _differing(before.get(table, {}), body.get(table, {}))]
    line = f"policy version {flow.current} ({', '.join(parts)})"
    work.changed(workspace, "flow.changed", f"flow {name}", line, version=flow.current)


def _without_tables(body: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key not in {"wait", "effect"}}


def _differing(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))


def _note_missing_groups(work: _Applying, document: Document) -> None:
    """A gate that nobody can satisfy is refused when a run pauses at it; better to hear of it now."""
    known: set[tuple[str, str]] = set(Group.objects.values_list("workspace__slug", "name"))
    for name, flow in document.flows.items():
        for wait, group in _groups_named(flow.policy):
            if (flow.workspace, group) not in known:
                work.report.notes.append(f"flow {name}: wait {wait} names the group {group}, which there is not yet")


def _groups_named(policy: FlowPolicy) -> Iterable[tuple[str, str]]:
    for name, wait in policy.wait.items():
        for group in dict.fromkeys([*wait.groups, *wait.escalate_to]):
            yield name, group
