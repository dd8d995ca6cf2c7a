"""What a drill found: facts in, the five checks out, each with its evidence. Pure; the words are in `audit.drills`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rehydrate.demo.drills import CHECKS

Json = dict[str, Any]


@dataclass
class Facts:
    """What a drill saw.

    What is due: `stage` and `ref` of the checkpoint to come back to, the `actions` that reach the outside, and how
    many `moments` have a verdict. `before`, `epoch_before` and `outside_before` (receipt ids by key) are from the
    break; `back` is the envelope of the agent that came back, with the run that it `found`; `after`, `runs` (how many
    have this number) and `touched` (how often each action reached the outside) are from the end.
    `verdicts` are `{moment, expected, found}`, the latter two `[outcome, [codes]]`.
    """

    stage: str = ""
    ref: str = ""
    actions: tuple[str, ...] = ()
    moments: int = 0
    run: Json | None = None
    before: Json | None = None
    epoch_before: int | None = None
    outside_before: dict[str, str] = field(default_factory=dict)
    back: Json | None = None
    after: Json | None = None
    runs: int | None = None
    touched: dict[str, int] = field(default_factory=dict)
    verdicts: list[Json] = field(default_factory=list)


def checks(facts: Facts) -> list[Json]:
    """`[{name, passed, evidence}]`, in the order of `CHECKS`. What was not seen has not passed."""
    judges = (same_run, checkpoint, effects, verdict, once)
    return [
        {"name": name, "passed": passed, "evidence": evidence}
        for name, judge in zip(CHECKS, judges, strict=True)
        for passed, evidence in [judge(facts)]
    ]


def same_run(facts: Facts) -> tuple[bool, Json]:
    """The agent that came back had the very run that was opened, under a newer lease, and there is no other."""
    back = facts.back or {}
    before, epoch = (facts.run or {}).get("id"), (back.get("lease") or {}).get("epoch")
    evidence = {
        "before": before,
        "after": back.get("run"),
        "runs": facts.runs,
        "epoch_before": facts.epoch_before,
        "epoch_after": epoch,
        "status": (facts.after or {}).get("status"),
    }
    good = before is not None and before == back.get("run") == back.get("found") and facts.runs == 1
    newer = epoch is not None and facts.epoch_before is not None and epoch > facts.epoch_before
    return good and newer and evidence["status"] == "completed", evidence


def checkpoint(facts: Facts) -> tuple[bool, Json]:
    """It came back to the last checkpoint before the break, and that was the one that the drill had in mind."""
    saved = [(shape or {}).get("checkpoint") or {} for shape in (facts.before, facts.back)]
    before, after = ({name: one.get(name) for name in ("seq", "stage", "ref")} for one in saved)
    due = before["stage"] == facts.stage and before["ref"] == facts.ref
    return facts.back is not None and due and before == after, {"before": before, "after": after}


def effects(facts: Facts) -> tuple[bool, Json]:
    """All that had reached the outside before the break was known when the agent came back, with the outside's own
    receipt, and had one attempt to the end.
    """
    known = {e["key"]: e for e in (facts.back or {}).get("effects") or []}
    later = {e["key"]: e for e in (facts.after or {}).get("effects") or []}
    found = [
        {
            "key": key,
            "outside": receipt,
            "state": known.get(key, {}).get("state"),
            "receipt": ((known.get(key) or {}).get("receipt") or {}).get("id"),
            "attempts": later.get(key, {}).get("attempt"),
        }
        for key, receipt in facts.outside_before.items()
    ]
    good = all(e["state"] == "executed" and e["receipt"] == e["outside"] and e["attempts"] == 1 for e in found)
    return bool(found) and good, {"effects": found}


def verdict(facts: Facts) -> tuple[bool, Json]:
    """At each moment the ledger said what it had to."""
    good = len(facts.verdicts) == facts.moments and all(v["expected"] == v["found"] for v in facts.verdicts)
    return good, {"verdicts": facts.verdicts, "of": facts.moments}


def once(facts: Facts) -> tuple[bool, Json]:
    """Each action reached the outside once, whatever key it came under, and nothing else did."""
    return bool(facts.actions) and facts.touched == dict.fromkeys(facts.actions, 1), {
        "touched": [{"action": action, "times": facts.touched.get(action, 0)} for action in facts.actions],
        "others": sorted(set(facts.touched) - set(facts.actions)),
    }
