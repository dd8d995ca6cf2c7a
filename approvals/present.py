"""View models: the plain dicts of contract.md section 6 arranged as the pages show them. Pure; codes only, no wording.

Words come from `audit.narrative` through template tags. Nothing here decides: a button that the services would refuse
may still be shown, and the refusal is then told next to the form.
"""

from __future__ import annotations

from typing import Any

TEN_FIELDS = (
    "run_id", "stage", "checkpoint", "input_ref", "waiting_for",
    "timer_due_at", "external_refs", "effect_keys", "decisions", "failures",
)  # fmt: skip
DONE_STATES = {"executed", "compensated", "compensating", "compensation_unknown"}
UNKNOWN_STATES = {"unknown", "compensation_unknown"}
DEFAULT_CHOICES = ("approve", "approve_with_conditions", "edit", "reject")
#: How much of the decision bar is buttons; the rest goes into its menu (console.md).
MAX_BUTTONS = 4

Shape = dict[str, Any]


def find_effect(run: Shape, key: Any) -> Shape | None:
    """The run's effect under that key."""
    return next((effect for effect in run.get("effects") or [] if effect.get("key") == key), None)


def ask_effect(wait: Shape, run: Shape) -> Shape:
    """The effect an ask proposes: what the ask says of it laid over the planned one of the same key."""
    asked = (wait.get("ask") or {}).get("effect") or {}
    planned = find_effect(run, asked.get("key")) or {}
    return {**planned, **{name: value for name, value in asked.items() if value is not None}}


def risk_of(wait: Shape, run: Shape) -> str:
    """The ask's own risk; without one, an effect above `low` impact is medium and nothing is hidden as low."""
    ask = wait.get("ask") or {}
    if ask.get("risk"):
        return str(ask["risk"])
    impact = ask_effect(wait, run).get("impact")
    return "low" if impact in {None, "low"} else "medium"


def choices_of(wait: Shape) -> list[str]:
    """The choices a reviewer has: those the ledger allows, but editing only where there is something to edit."""
    ask = wait.get("ask") or {}
    given = list(wait.get("choices") or ask.get("choices") or [])
    if not given:
        given = list(DEFAULT_CHOICES) if ask.get("effect") else ["approve", "reject"]
        given.append("respond")
    if not (ask.get("schema") or (ask.get("effect") or {}).get("arguments")):
        given = [c for c in given if c != "edit"]
    if not ask.get("effect"):
        given = [c for c in given if c != "approve_with_conditions"]
    return given


def schema_of(ask: Shape, arguments: Any) -> Shape:
    """What may be edited: the ask's schema; without one, every argument in the type that it has."""
    schema = ask.get("schema")
    return schema if isinstance(schema, dict) else guessed_schema(arguments)


def guessed_schema(value: Any) -> Shape:
    """A schema of the value's own types (JSON Schema has no other word for "as it was")."""
    if isinstance(value, bool):
        return {"type": "boolean"}
    if isinstance(value, int):
        return {"type": "integer"}
    if isinstance(value, float):
        return {"type": "number"}
    if isinstance(value, str):
        return {"type": "string"}
    if isinstance(value, dict):
        return {"type": "object", "properties": {str(name): guessed_schema(part) for name, part in value.items()}}
    return {}


def leaf_fields(arguments: Any, prefix: str = "", schema: Shape | None = None) -> list[Shape]:
    """Arguments as rows `{pointer, name, title, value, editable}`; small nested objects opened, lists kept whole."""
    rows: list[Shape] = []
    if not isinstance(arguments, dict):
        return rows
    properties = (schema or {}).get("properties") or {}
    for name, value in arguments.items():
        pointer = f"{prefix}/{escape_pointer(str(name))}"
        part = properties.get(name) if isinstance(properties, dict) else None
        part = part if isinstance(part, dict) else {}
        if isinstance(value, dict) and value and set(value) != {"value", "currency"}:
            rows += leaf_fields(value, pointer, part)
            continue
        title = part.get("title")
        rows.append(
            {
                "pointer": pointer,
                "name": str(name),
                "title": str(title) if title else "",
                "value": value,
                "editable": bool(part) and not part.get("readOnly"),
            }
        )
    return rows


def escape_pointer(name: str) -> str:
    """One JSON Pointer token (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")


def unescape_pointer(token: str) -> str:
    return token.replace("~1", "/").replace("~0", "~")


def value_at(document: Any, pointer: str) -> Any:
    """The value that a JSON Pointer leads to, None where it leads nowhere."""
    for token in pointer.split("/")[1:]:
        name = unescape_pointer(token)
        if isinstance(document, dict) and name in document:
            document = document[name]
        elif isinstance(document, list) and name.isdigit() and int(name) < len(document):
            document = document[int(name)]
        else:
            return None
    return document


def before_values(wait: Shape, run: Shape, events: list[Shape]) -> Shape:
    """`{pointer: value}` of the same effect as it was first planned, where it differs now (before and after)."""
    effect = ask_effect(wait, run)
    key = effect.get("key")
    first: Any = None
    for event in events:
        payload = event.get("payload") or {}
        if event.get("type") == "effect.planned" and payload.get("key") == key:
            first = payload.get("arguments")
            break
    if not isinstance(first, dict):
        return {}
    now = {row["pointer"]: row["value"] for row in leaf_fields(effect.get("arguments"))}
    return {
        row["pointer"]: row["value"]
        for row in leaf_fields(first)
        if row["pointer"] in now and now[row["pointer"]] != row["value"]
    }


def ask_view(wait: Shape, run: Shape, events: list[Shape] | None = None) -> Shape:
    """All a page says about one open approval."""
    ask = wait.get("ask") or {}
    effect = ask_effect(wait, run)
    before = before_values(wait, run, events or [])
    rows = leaf_fields(effect.get("arguments"), schema=ask.get("schema"))
    for row in rows:
        row["changed"] = row["pointer"] in before
        row["before"] = before.get(row["pointer"])
    votes = wait.get("votes") or []
    schema = schema_of(ask, effect.get("arguments")) if effect else ask.get("schema")
    return {
        "wait": wait,
        "id": wait.get("id"),
        "version": wait.get("version"),
        "summary": ask.get("summary") or run.get("title") or wait.get("name"),
        "risk": risk_of(wait, run),
        "effect": effect if effect else None,
        # shown on its own only where no argument says the same
        "amount": effect.get("amount"),
        "amount_shown": bool(effect.get("amount")) and not any(says_amount(r["value"], effect["amount"]) for r in rows),
        "rows": rows,
        "details": ask.get("details") or [],
        "rationale": ask.get("rationale"),
        "evidence": ask.get("evidence") or [],
        "rollback": ask.get("rollback"),
        "compensation": effect.get("compensation"),
        "choices": choices_of(wait),
        "reasons": ask.get("reasons") or [],
        "schema": schema,
        "response_schema": ask.get("response_schema"),
        "votes": votes,
        "quorum": quorum_of(wait),
        "discussion": [e for e in events or [] if is_discussion(e, wait)],
    }


def says_amount(value: Any, amount: Shape) -> bool:
    """Whether an argument is that very amount, as money or as a bare number."""
    if isinstance(value, dict):
        return value == amount
    return isinstance(value, str | int) and not isinstance(value, bool) and str(value) == str(amount.get("value"))


def quorum_of(wait: Shape) -> int:
    """How many yeses it takes; one where the wait does not say."""
    value = wait.get("quorum") or (wait.get("policy") or {}).get("quorum") or (wait.get("ask") or {}).get("quorum") or 1
    return int(value)


def is_discussion(event: Shape, wait: Shape) -> bool:
    """A comment or a request for information about this wait."""
    payload = event.get("payload") or {}
    return event.get("type") in {"wait.commented", "wait.info_requested"} and payload.get("wait") == wait.get("id")


def bar_of(ask: Shape) -> Shape:
    """The decision bar: at most four buttons, the rest in its menu; on narrow screens `phone` goes there, too."""
    order = ["approve", "approve_with_conditions", "edit", "respond", "reject"]
    choices = [c for c in order if c in ask["choices"]]
    if len(choices) > MAX_BUTTONS - 1:  # keep approve, one more, and reject in sight; the menu takes one place
        kept = choices[: MAX_BUTTONS - 2] + (["reject"] if "reject" in choices else [])
        return {"buttons": kept, "menu": [c for c in choices if c not in kept], "phone": kept[1:-1]}
    return {"buttons": choices, "menu": [], "phone": choices[1:-1]}


def effects_view(run: Shape) -> Shape:
    """Effects by what a reviewer asks of them: what is done outside, what is unknown, planned, failed."""
    effects = run.get("effects") or []
    done = [e for e in effects if e.get("state") in DONE_STATES]
    unknown = [e for e in effects if e.get("state") == "unknown"]
    return {
        "outside": [e for e in effects if e.get("state") in DONE_STATES | {"unknown", "started"}],
        "done": done,
        "unknown": [e for e in effects if e.get("state") in UNKNOWN_STATES],
        "planned": [e for e in effects if e.get("state") == "planned"],
        "failed": [e for e in effects if e.get("state") == "failed"],
        "withdrawn": [e for e in effects if e.get("state") == "withdrawn"],
        "unsettled": unknown,
    }


def follows(run: Shape, wait: Shape | None) -> Shape:
    """What happens on a yes and on a no, in order: `{approve: [..], reject: [..]}` of `{act, effect?, text?, stage?}`.

    The order of undoing is the ledger's own (`next.undo`); the rest is read off the ask, the plan and the checkpoint.
    """
    if wait is None:
        return {"approve": [], "reject": []}
    effects = effects_view(run)
    asked = ask_effect(wait, run)
    approve: list[Shape] = []
    if quorum_of(wait) > len(wait.get("votes") or []) + 1:
        approve.append({"act": "votes", "quorum": quorum_of(wait)})
    if asked:
        approve.append({"act": "do", "effect": asked})
    approve += [{"act": "do", "effect": e} for e in effects["planned"] if e.get("key") != asked.get("key")]
    approve.append({"act": "resume", "stage": run.get("stage")})
    reject: list[Shape] = []
    way = str(wait.get("on_reject") or "compensate")
    if asked:
        reject.append({"act": "withdrawn", "effect": asked})
    if way == "compensate":
        undo = ((run.get("verdict") or {}).get("next") or {}).get("undo")
        executed = [e for e in effects["done"] if e.get("state") == "executed"]
        if undo is None:
            undo = [e.get("key") for e in reversed(executed) if e.get("compensation")]
        reject += [{"act": "undo", "effect": e} for key in undo if (e := find_effect(run, key))]
        reject += [{"act": "stays", "effect": e} for e in executed if not e.get("compensation")]
    reject.append({"act": {"continue": "told_no", "review": "review"}.get(way, "ends")})
    return {"approve": approve, "reject": reject}


def ten_view(run: Shape) -> list[Shape]:
    """The ten fields: `{name, value, present, missing}`; missing means that the flow requires it."""
    metadata = run.get("metadata") or {}
    required = set((run.get("verdict") or {}).get("missing") or [])
    rows = []
    for name in TEN_FIELDS:
        value = metadata.get(name)
        present = value not in (None, "", [], {})
        if name == "checkpoint":
            present = bool(value) and any((value or {}).get(part) is not None for part in ("seq", "ref"))
        rows.append({"name": name, "value": value, "present": present, "missing": name in required})
    return rows


def wrong_view(run: Shape) -> Shape:
    """What went wrong: tries used, last error, escalation, failed effects; `any` says whether there is anything."""
    failures = (run.get("metadata") or {}).get("failures") or {}
    effects = effects_view(run)
    count = failures.get("count") or run.get("failure_count") or 0
    last = run.get("last_error") or failures.get("last_error")
    return {
        "count": count,
        "limit": failures.get("limit"),
        "last_error": last,
        "escalation": failures.get("escalation") or run.get("escalation"),
        "failed": effects["failed"],
        "agent": run.get("agent"),
        "any": bool(count or last or effects["failed"]),
    }


def bar_wait(run: Shape, wanted: str = "") -> Shape | None:
    """The open approval that the bar acts on: the one asked for, else the first."""
    waits = open_approvals(run)
    return next((w for w in waits if w.get("id") == wanted), waits[0] if waits else None)


def open_approvals(run: Shape) -> list[Shape]:
    """Approvals that wait for a person."""
    return [w for w in run.get("waits") or [] if w.get("status") == "open" and w.get("kind") == "approval"]


def other_waits(run: Shape) -> list[Shape]:
    """Open timers, callbacks and signals."""
    return [w for w in run.get("waits") or [] if w.get("status") == "open" and w.get("kind") != "approval"]


def seen_by_reviewer(run: Shape, wait: Shape) -> Shape:
    """What is kept with a decision: the versions and states that the page had shown (small, references only)."""
    effect = ask_effect(wait, run)
    return {
        "run_version": run.get("version"),
        "wait_version": wait.get("version"),
        "stage": run.get("stage"),
        "fingerprint": effect.get("fingerprint"),
        "effects": {str(e.get("key")): e.get("state") for e in (run.get("effects") or [])[:50]},
    }


def row(item: Shape, ticks: dict[str, list[Shape]] | None = None) -> Shape:
    """One inbox row, whatever it stands for: an open or decided wait, or a run that needs a person.

    `ticks` are the runs' effects (`approvals.reads.effects_of`).
    `item` is a wait with its run inside (`run` a dict), `{"wait":…, "run":…}`, or a run.
    """
    wait, run = item.get("wait"), item.get("run")
    if not isinstance(wait, dict):
        if isinstance(run, dict) and item.get("kind") in {"approval", "timer", "callback", "signal"}:
            wait = item
        elif "kind" in item and "ask" in item:
            wait, run = item, item.get("run_summary") or {"id": item.get("run"), "title": ""}
        else:
            wait, run = None, run if isinstance(run, dict) else item
    run = run if isinstance(run, dict) else {}
    if ticks is not None:
        run = {**run, "effects": ticks.get(str(run.get("id")), [])}
    ask = (wait or {}).get("ask") or {}
    decision = (wait or {}).get("decision")
    effects = effects_view(run)
    effect = ask_effect(wait, run) if wait else {}
    return {
        "wait": wait,
        "run": run,
        "track_run": {**run, "due_at": (wait or {}).get("due_at") if (wait or {}).get("status") == "open" else None},
        "key": f"w-{wait['id']}" if wait else f"r-{run.get('id')}",
        "run_id": run.get("id"),
        "wait_id": (wait or {}).get("id"),
        "summary": ask.get("summary") or run.get("title") or run.get("external_id") or "",
        "risk": risk_of(wait, run) if wait else None,
        "status": run.get("status"),
        "reasons": [] if wait else row_reasons(run),
        "amount": effect.get("amount"),
        "impact": effect.get("impact"),
        "flow": run.get("flow"),
        "flow_title": run.get("flow_title") or run.get("flow"),
        "external_id": run.get("external_id"),
        "asked_by": run.get("requested_by") or (run.get("agent") or {}).get("name"),
        "asked_at": (wait or {}).get("opened_at") or run.get("updated_at"),
        "due_at": (wait or {}).get("due_at") if (wait or {}).get("status") == "open" else None,
        "claimed_by": claimed_by(wait),
        "votes": len([v for v in (wait or {}).get("votes") or [] if v.get("choice") != "reject"]),
        "quorum": quorum_of(wait) if wait else 1,
        "decision": decision,
        "wait_status": (wait or {}).get("status"),
        "unknown": effects["unknown"],
        "bulk": bool(wait)
        and (wait or {}).get("status") == "open"
        and risk_of(wait or {}, run) == "low"
        and "approve" in choices_of(wait or {}),
        "version": (wait or {}).get("version"),
    }


def row_reasons(run: Shape) -> list[Shape]:
    """Why a run needs a person; one that nobody came for is ready and has no reason of its own."""
    if run.get("status") == "ready" and run.get("unclaimed_at"):
        return [{"code": "unclaimed", "subject": None}]
    return (run.get("verdict") or {}).get("reasons") or run.get("reasons") or []


def claimed_by(wait: Shape | None) -> str:
    """Who has taken the question on, by name; empty when nobody has."""
    value = (wait or {}).get("claimed_by")
    if isinstance(value, dict):
        return str(value.get("name") or value.get("id") or "")
    return str(value or "")


def timeline(events: list[Shape]) -> list[Shape]:
    """The events to show: a status said again (its reasons having changed) is left to the raw ledger."""
    shown: list[Shape] = []
    status = None
    for event in events:
        if event.get("type") == "verdict":
            new = (event.get("payload") or {}).get("status")
            if new == status:
                continue
            status = new
        shown.append(event)
    return shown
