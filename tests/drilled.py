"""What a drill that went well has seen, and how its result is kept; for tests that need one without carrying it out."""

from __future__ import annotations

from typing import Any

from rehydrate.demo.drills.findings import Facts, checks

RUN = "0196a000-0000-7000-8000-00000000000a"


def good_facts() -> Facts:
    shape = {"seq": 7, "stage": "asked", "ref": "drill://x/asked", "digest": None}
    effect = {"key": "k", "state": "executed", "receipt": {"id": "CRM-1"}, "attempt": 1}
    return Facts(
        stage="asked",
        ref="drill://x/asked",
        actions=("crm.create_draft", "payments.pay"),
        moments=1,
        run={"id": RUN, "flow": "drill", "external_id": "x"},
        before={"checkpoint": shape},
        epoch_before=1,
        outside_before={"k": "CRM-1"},
        back={"run": RUN, "found": RUN, "lease": {"epoch": 2}, "checkpoint": dict(shape), "effects": [dict(effect)]},
        after={"status": "completed", "effects": [dict(effect)]},
        runs=1,
        touched={"crm.create_draft": 1, "payments.pay": 1},
        verdicts=[{"moment": "back", "expected": ["continue", ["clear"]], "found": ["continue", ["clear"]]}],
    )


def kept(drill: str, facts: Facts | None = None, **changes: Any) -> Any:
    """A row of DrillResult, with a result as `procedures.perform` gives it."""
    from rehydrate.models import DrillResult

    facts = facts or good_facts()
    found = checks(facts)
    body = {
        "drill": drill, "passed": all(check["passed"] for check in found), "started_at": "2026-11-29T12:00:00+00:00",
        "seconds": 9.4, "version": "0.1.0", "server": {"kind": "own", "url": "http://127.0.0.1:1"}, "run": facts.run,
        "checks": found, "steps": [{"code": "agent_started", "at": 0.1, "process": 7}], "error": None, **changes,
    }  # fmt: skip
    columns = {name: body[name] for name in ("drill", "passed", "started_at", "version")}
    return DrillResult.objects.create(**columns, body=body)
