"""View models: what a page shows of a run, from the contract's shapes alone."""

from __future__ import annotations

from typing import Any

from approvals import present


def effect(key: str, state: str, **more: Any) -> dict[str, Any]:
    return {"key": key, "state": state, "system": "erp", "action": "erp.act", "compensation": None, **more}


def contract_run(**more: Any) -> dict[str, Any]:
    return {
        "id": "r1",
        "stage": "drafted",
        "status": "waiting",
        "effects": [
            effect("reserve", "executed", compensation={"system": "erp", "action": "erp.release"}),
            effect("mail", "executed"),
            effect("sign", "planned", arguments={"amount": "12000.00"}, impact="irreversible"),
        ],
        "checkpoint": {"seq": 4, "next": ["Send the signed copy"]},
        "metadata": {"stage": "drafted", "checkpoint": {"seq": 4, "ref": None, "digest": None}},
        "verdict": {"outcome": "wait", "reasons": [], "missing": ["input_ref"], "next": {"undo": ["reserve"]}},
        **more,
    }


def legal_wait(**more: Any) -> dict[str, Any]:
    return {
        "id": "w1",
        "kind": "approval",
        "status": "open",
        "version": 3,
        "name": "legal-approval",
        "on_reject": "compensate",
        "votes": [],
        "ask": {"summary": "Sign C-1043", "effect": {"key": "sign"}},
        **more,
    }


def test_the_consequences_of_each_button_are_told_in_order() -> None:
    run, wait = contract_run(), legal_wait()
    follows = present.follows(run, wait)
    assert [(s["act"], s.get("effect", {}).get("key") or s.get("stage")) for s in follows["approve"]] == [
        ("do", "sign"),
        ("resume", "drafted"),
    ]
    assert [(s["act"], s.get("effect", {}).get("key")) for s in follows["reject"]] == [
        ("withdrawn", "sign"),
        ("undo", "reserve"),
        ("stays", "mail"),
        ("ends", None),
    ]


def test_below_a_quorum_the_first_consequence_is_a_vote() -> None:
    first = present.follows(contract_run(), legal_wait(quorum=2))["approve"][0]
    assert first == {"act": "votes", "quorum": 2}
    last_vote = present.follows(contract_run(), legal_wait(quorum=2, votes=[{"choice": "approve"}]))["approve"][0]
    assert last_vote["act"] == "do"


def test_an_ask_that_only_names_a_planned_effect_shows_all_of_it() -> None:
    seen = present.ask_view(legal_wait(), contract_run())
    assert seen["effect"]["arguments"] == {"amount": "12000.00"}
    assert seen["risk"] == "medium"  # above low impact, and the ask says nothing: never shown as low


def test_what_changed_since_the_first_plan_is_shown_before_and_after() -> None:
    planned = {"type": "effect.planned", "payload": {"key": "sign", "arguments": {"amount": "10500.00"}}}
    rows = present.ask_view(legal_wait(), contract_run(), [planned])["rows"]
    assert [(r["pointer"], r["before"], r["value"]) for r in rows] == [("/amount", "10500.00", "12000.00")]


def test_the_bar_never_has_more_than_four_buttons() -> None:
    everything = ["approve", "approve_with_conditions", "edit", "reject", "respond"]
    bar = present.bar_of({"choices": everything})
    assert bar["buttons"] == ["approve", "approve_with_conditions", "reject"]  # and the menu is the fourth
    assert sorted(bar["buttons"] + bar["menu"]) == sorted(everything)


def test_editing_is_offered_only_where_there_is_something_to_edit() -> None:
    wait = legal_wait(choices=["approve", "edit", "reject"])
    assert "edit" not in present.choices_of(wait)
    wait["ask"]["effect"]["arguments"] = {"amount": "1"}
    assert "edit" in present.choices_of(wait)


def test_the_ten_fields_say_what_is_there_and_what_the_flow_misses() -> None:
    ten = {row["name"]: row for row in present.ten_view(contract_run())}
    assert len(ten) == 10
    assert ten["checkpoint"]["present"]
    assert ten["input_ref"]["missing"]
    assert not ten["decisions"]["present"]
    assert not ten["decisions"]["missing"]


def test_pointers_are_escaped_and_lead_back_to_their_value() -> None:
    document = {"a/b": {"c~d": 1}}
    (row,) = present.leaf_fields(document)
    assert row["pointer"] == "/a~1b/c~0d"
    assert present.value_at(document, row["pointer"]) == 1
    assert present.value_at(document, "/nowhere/9") is None


def test_only_open_low_risk_yes_or_no_asks_may_be_picked_together() -> None:
    ask = {"summary": "Publish", "risk": "low", "effect": {"key": "p"}}
    row = present.row({"wait": legal_wait(ask=ask), "run": contract_run()})
    assert row["bulk"]
    assert not present.row({"wait": legal_wait(ask={**ask, "risk": "high"}), "run": contract_run()})["bulk"]
    assert not present.row({"wait": legal_wait(ask=ask, status="satisfied"), "run": contract_run()})["bulk"]
