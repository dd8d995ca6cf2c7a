"""The three drills before going live (contract.md section 8): real processes, really killed, an outside that counts.

    restart-while-waiting         agent and server are killed while a run waits for a callback and an approval
    late-resume-after-approval    approved while no agent lives; one comes long after, past the deadline
    effect-done-record-lost       the agent is killed between the effect outside and its receipt

`agent` is the agent that is drilled, `processes` starts and kills, `servers` is what it is drilled against, `stage` is
what a drill does and sees, `procedures` are the three drills. Words for what they found are in `audit.drills`.
"""

from __future__ import annotations

DRILLS = ("restart-while-waiting", "late-resume-after-approval", "effect-done-record-lost")
#: What each drill finds out, in the order in which it is told.
CHECKS = ("same_run", "checkpoint", "effects", "verdict", "once")
FLOW = "drill"
WORKSPACE = "drills"
REVIEWER = "drill-reviewer"
APPROVAL = "go-ahead"
CALLBACK = "supplier-confirmation"
