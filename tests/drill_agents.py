"""Agents that do what the drills are there to find: `python -m tests.drill_agents NAME DRILL EXTERNAL_ID ...`."""

from __future__ import annotations

import sys
import uuid
from typing import Any

from rehydrate.client import EffectCall
from rehydrate.demo.drills.agent import DrilledAgent, main


class LookAlike(DrilledAgent):
    """Wakes the model up again under a number of its own, instead of finding the run."""

    def find(self) -> str:
        self.external_id = f"{self.external_id}-{uuid.uuid4().hex[:6]}"
        return super().find()


class Forgetful(DrilledAgent):
    """Plays the conversation again from the top whenever it is started, the draft included."""

    def go_on(self, envelope: dict[str, Any]) -> None:
        self.outside.do(EffectCall("from memory", "crm.create_draft", {"order": self.external_id}))
        super().go_on(envelope)


class Headstrong(DrilledAgent):
    """Does not take no for an answer: without a lease it pays all the same."""

    def go_on(self, envelope: dict[str, Any]) -> None:
        if envelope["lease"] is None:
            self.outside.do(EffectCall("never mind", "payments.pay", {"order": self.external_id}))
        super().go_on(envelope)


class Careless(DrilledAgent):
    """Writes down where it is under another name than the plan says."""

    def ref(self, stage: str) -> str:
        return f"drill://somewhere/{stage}"


class Dying(DrilledAgent):
    """Does not get as far as its first word."""

    def find(self) -> str:
        raise SystemExit("no memory left")


if __name__ == "__main__":
    sys.exit(main(globals()[sys.argv.pop(1)]))
