"""The file that `apply` reads (contract.md section 7): TOML in, checked structs out. What follows is in `apply`."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from rehydrate import targets
from rehydrate.core.policy import FIELDS, EffectPolicy, FlowPolicy, WaitPolicy

DEFAULT_WORKSPACE = "default"
ROLES = ("viewer", "reviewer", "operator", "auditor", "admin")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@+-]{0,99}")
Name = Annotated[str, Meta(min_length=1, max_length=100)]


class FileError(ValueError):
    """The file says something it may not; the message is one sentence that names the place."""


class WorkspaceEntry(Struct, frozen=True, forbid_unknown_fields=True):
    title: str = ""


class GroupEntry(Struct, frozen=True, forbid_unknown_fields=True):
    workspace: Name = DEFAULT_WORKSPACE
    members: list[Name] = []
    roles: list[str] = msgspec.field(default_factory=lambda: ["reviewer"])


class FlowEntry(Struct, frozen=True):
    """A flow's place and its policy, which is kept as one versioned document."""

    workspace: str
    policy: FlowPolicy


class Document(Struct, frozen=True):
    workspaces: dict[str, WorkspaceEntry]
    groups: dict[str, GroupEntry]
    flows: dict[str, FlowEntry]


def parse(text: str) -> Document:
    """The whole file, or a `FileError` about the first thing that is wrong with it."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise FileError(f"this is no TOML: {error}") from None
    for key in raw:
        if key not in {"workspace", "group", "flow"}:
            raise FileError(f"[{key}]: unknown; a file has [workspace.NAME], [group.NAME] and [flow.NAME] tables")
    document = Document(
        workspaces={
            name: _convert(body, WorkspaceEntry, "workspace", name) for name, body in _tables(raw, "workspace")
        },
        groups={name: _convert(body, GroupEntry, "group", name) for name, body in _tables(raw, "group")},
        flows={name: _flow(name, body) for name, body in _tables(raw, "flow")},
    )
    _check(document)
    return document


def _tables(raw: dict[str, Any], kind: str) -> Iterator[tuple[str, Any]]:
    tables = raw.get(kind, {})
    if not isinstance(tables, dict):
        raise FileError(f"{kind}: write a table for each, [{kind}.NAME]")
    for name, body in tables.items():
        if not _NAME.fullmatch(name):
            raise FileError(
                f"[{kind}.{name}]: a name has letters, digits and - _ . @ +, and begins with a letter or digit"
            )
        yield name, body


def _flow(name: str, body: Any) -> FlowEntry:
    if not isinstance(body, dict):
        raise FileError(f"[flow.{name}]: write a table")
    rest = dict(body)
    workspace = rest.pop("workspace", DEFAULT_WORKSPACE)
    if not isinstance(workspace, str):
        raise FileError(f"[flow.{name}] workspace: expected a name")
    if "declared" in rest:
        raise FileError(f"[flow.{name}]: unknown field `declared`")
    # One by one first, so that an error names the wait or the effect that it is in.
    for kind, into in (("wait", WaitPolicy), ("effect", EffectPolicy)):
        parts = rest.get(kind, {})
        for part, content in parts.items() if isinstance(parts, dict) else ():
            _convert(content, into, f"flow.{name}.{kind}", part)
    return FlowEntry(workspace=workspace, policy=_convert(rest, FlowPolicy, "flow", name))


def _convert(body: Any, into: type[Any], kind: str, name: str) -> Any:
    try:
        return msgspec.convert(body, into, strict=True)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `$")
        place = place.rstrip("`").lstrip(".")
        shown = f"[{kind}.{name}]" + (f" {place}" if place else "")
        raise FileError(f"{shown}: {message[:1].lower()}{message[1:]}") from None


def _check(document: Document) -> None:
    for name, group in document.groups.items():
        for role in group.roles:
            if role not in ROLES:
                raise FileError(f"[group.{name}] roles: {role!r} is none of {', '.join(ROLES)}")
        if not group.roles:
            raise FileError(f"[group.{name}] roles: name at least one")
        for member in group.members:
            if not _NAME.fullmatch(member):
                raise FileError(f"[group.{name}] members: {member!r} cannot be a user name")
        _once(group.members, f"[group.{name}] members")
    for name, flow in document.flows.items():
        _check_flow(f"[flow.{name}", flow.policy)


def _check_flow(place: str, policy: FlowPolicy) -> None:
    for required in policy.required:
        if required not in FIELDS:
            raise FileError(f"{place}] required: {required!r} is none of {', '.join(FIELDS)}")
    for pointer in policy.secret:
        if not pointer.startswith("/"):
            raise FileError(f"{place}] secret: {pointer!r} is no JSON Pointer: it begins with /")
    if policy.deliver_to is not None:
        try:  # whether it may lead inside is for the operator's settings to say, when the file is put in force
            targets.parse(policy.deliver_to, allow_private=True)
        except targets.TargetError as error:
            raise FileError(f"{place}] deliver_to: {error}") from None
    for name, wait in policy.wait.items():
        _once(wait.groups, f"{place}.wait.{name}] groups")
        if wait.escalate_after and not wait.escalate_to:
            raise FileError(f"{place}.wait.{name}] escalate_after: say to whom with escalate_to")
    for name, effect in policy.effect.items():
        if effect.needs_approval is not None and effect.needs_approval not in policy.wait:
            raise FileError(
                f"{place}.effect.{name}] needs_approval: the flow has no wait named {effect.needs_approval!r}"
            )


def _once(names: list[str], place: str) -> None:
    for name in names:
        if names.count(name) > 1:
            raise FileError(f"{place}: {name!r} stands there twice")
