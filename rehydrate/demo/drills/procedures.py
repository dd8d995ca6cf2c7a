"""The three drills, step by step. Each plays its scene on a `Stage`; what it found is judged in `findings`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from rehydrate.client import RehydrateError
from rehydrate.demo.drills import DRILLS, findings
from rehydrate.demo.drills.processes import DrillError, Household, eventually
from rehydrate.demo.drills.servers import Server
from rehydrate.demo.drills.stage import Options, Stage, verdict_of

Json = dict[str, Any]

#: Seconds that the approval may take in the drill that lets its deadline pass.
DEADLINE = 8
DRAFT, QUOTE, PAY, NOTE = "crm.create_draft", "supplier.request_quote", "payments.pay", "crm.note_payment"


def restart_while_waiting(stage: Stage) -> None:
    """Agent and server are killed while the run waits for the supplier's callback and a person's approval."""
    stage.due("asked", DRAFT, QUOTE, PAY, NOTE, moments=3)
    agent = stage.begin()
    stage.expect("while_waiting", "wait", "waiting", found=verdict_of(stage.look()))
    stage.kill_agent(agent)

    if killed := stage.server.kill():
        stage.step("server_killed", processes=killed, kind=stage.server.kind)
        if stage.server.kind == "own":
            # Nobody is there to take it. A supplier sends it again; so does this one.
            stage.supplier_answers()
            eventually(lambda: stage.callback()["attempts"] >= 1, what="the supplier's first call")
        stage.server.start()
        stage.step("server_started")
    else:
        stage.step("server_left_alone")
    stage.expect("after_restart", "wait", "waiting", found=verdict_of(stage.look()))

    stage.supplier_answers()
    eventually(lambda: stage.callback()["answer"] is not None, what="the supplier's callback")
    stage.step("callback_taken", attempts=stage.callback()["attempts"])
    stage.approve()
    stage.reaches("ready")
    back = stage.start_agent()
    stage.expect("back", "continue", "clear", found=stage.come_back(back))
    stage.finish(back)


def late_resume_after_approval(stage: Stage) -> None:
    """Approved while no agent lives. One comes back long after, when the deadline has passed too."""
    stage.due("asked", DRAFT, PAY, NOTE, moments=6)
    stage.approval_due = DEADLINE
    agent = stage.begin()
    paused_at = time.monotonic()
    stage.kill_agent(agent)
    stage.approve()
    stage.expect("when_approved", "continue", "clear", found=verdict_of(stage.reaches("ready")))

    # From when the pause was seen, the deadline cannot be further off than its own length.
    time.sleep(max(0.0, paused_at + DEADLINE + stage.options.late - time.monotonic()))
    stage.step("waited", seconds=round(time.monotonic() - paused_at, 1), due=DEADLINE)
    stage.expect("after_deadline", "continue", "clear", found=verdict_of(stage.look()))

    # The payment takes its time, so that the lease is alive while another agent wants to resume as well.
    stage.slow(PAY, seconds=3)
    back = stage.start_agent()
    stage.expect("back", "continue", "clear", found=stage.come_back(back))
    stage.arrived(PAY)
    ledger, run = stage.ledger, stage.run_id
    stage.expect("second_resume", "refused", "lease_held", found=stage.attempt(lambda: ledger.rehydrate(run)))
    epoch = int(stage.facts.epoch_before or 0)
    stage.expect("old_lease", "refused", "lease_lost", found=stage.attempt(lambda: ledger.heartbeat(run, epoch)))
    stage.finish(back)
    stage.expect("after_end", "terminate", "run_ended", found=stage.attempt(lambda: ledger.rehydrate(run)))


def effect_done_record_lost(stage: Stage) -> None:
    """The agent is killed between the payment outside and its receipt. Nobody may pay again; a person finds out."""
    stage.due("paying", DRAFT, PAY, NOTE, moments=4)
    first = stage.begin()
    stage.kill_agent(first)
    stage.approve()
    stage.reaches("ready")

    stage.slow(PAY, seconds=120)
    agent = stage.start_agent()
    key = str(stage.arrived(PAY)["key"])
    stage.keep(agent)
    stage.kill_agent(agent)

    lost = stage.start_agent()
    stage.expect("unknown", "review", "effect_unknown", found=stage.come_back(lost))
    stage.kill_agent(lost)
    # Whoever starts it all the same is told so.
    again = stage.attempt(lambda: stage.ledger.rehydrate(stage.run_id))
    stage.expect("tried_again", "review", "effect_unknown", found=again)

    stage.reconcile(key, stage.look_up(key))
    stage.expect("reconciled", "continue", "clear", found=verdict_of(stage.reaches("ready")))
    back = stage.start_agent()
    stage.expect("back", "continue", "clear", found=stage.come_back(back))
    stage.finish(back)


PROCEDURES: dict[str, Callable[[Stage], None]] = dict(
    zip(DRILLS, (restart_while_waiting, late_resume_after_approval, effect_done_record_lost), strict=True)
)


def perform(drill: str, *, server: Server, folder: Path, household: Household, options: Options) -> Json:
    """Plays one drill and judges it.

    `{drill, passed, started_at, seconds, version, server, run, checks, steps, error}`: see `findings` for the checks;
    `error` says in one sentence why a drill broke off, and is null otherwise.
    """
    stage = Stage(drill, server, folder, household, options)
    try:
        PROCEDURES[drill](stage)
    except (DrillError, RehydrateError, httpx.HTTPError) as error:
        stage.broke_off(str(error))
    finally:
        stage.close()
    checks = findings.checks(stage.facts)
    return {
        "drill": drill,
        "passed": stage.error is None and all(check["passed"] for check in checks),
        "started_at": stage.started_at.isoformat(timespec="seconds"),
        "seconds": stage.seconds,
        "version": server.version,
        "server": {"kind": server.kind, "url": server.url},
        "run": stage.facts.run,
        "checks": checks,
        "steps": stage.steps,
        "error": stage.error,
    }
