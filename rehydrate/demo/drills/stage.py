"""What a drill does and sees: its agents, its person, the ledger as it stands, the outside world, and what it noted.

Nothing is judged while it happens: a drill notes facts, and `findings` makes the five checks of them at the end, also
when it broke off in the middle.
"""

from __future__ import annotations

import json
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from rehydrate.client import Ledger, LedgerError
from rehydrate.demo.drills import APPROVAL, FLOW
from rehydrate.demo.drills.findings import Facts
from rehydrate.demo.drills.processes import DrillError, Household, Spoken, eventually
from rehydrate.demo.drills.servers import Server, clean_environment
from rehydrate.demo.world import World

Json = dict[str, Any]

DAY = 24 * 60 * 60


@dataclass(frozen=True)
class Options:
    """`agent` is the command of the agent that is drilled; `late`, how many seconds after the approval's deadline an
    agent comes back.
    """

    agent: Sequence[str]
    late: float = 3.0


class Stage:
    """One drill's: a fresh order number, a fresh outside world, and the keys of the server that is drilled."""

    def __init__(self, drill: str, server: Server, folder: Path, household: Household, options: Options) -> None:
        self.drill = drill
        self.server = server
        self.options = options
        self.approval_due = DAY
        self.external_id = f"{drill}-{uuid.uuid4().hex[:8]}"
        self.world = World(folder / self.external_id).start()
        self.facts = Facts()
        self.run_id = ""
        self.steps: list[Json] = []
        self.error: str | None = None
        self.started_at = datetime.now(UTC)
        self._began = time.monotonic()
        self._household = household
        self._ledger: Ledger | None = None
        self._person = httpx.Client(
            base_url=f"{server.url}/api/v1",
            headers={"Authorization": f"Bearer {server.keys.person}"},
            timeout=30,
            limits=httpx.Limits(max_keepalive_connections=0),  # none outlives a server that is killed
            trust_env=False,
        )

    def close(self) -> None:
        self.world.stop()
        self._person.close()
        if self._ledger is not None:
            self._ledger.close()

    @property
    def ledger(self) -> Ledger:
        """The ledger by the agent's key, for what the drill itself asks and tries."""
        if self._ledger is None:
            self._ledger = Ledger(self.server.url, self.server.keys.agent, name="drill")
        return self._ledger

    @property
    def seconds(self) -> float:
        return round(time.monotonic() - self._began, 1)

    # --- noting

    def due(self, stage: str, *actions: str, moments: int) -> None:
        """What is to come out: the checkpoint to come back to, what reaches the outside, how many verdicts."""
        self.facts.stage, self.facts.ref = stage, f"drill://{self.external_id}/{stage}"
        self.facts.actions, self.facts.moments = actions, moments

    def broke_off(self, why: str) -> None:
        self.error = why
        self.take_stock()

    def step(self, code: str, **details: Any) -> None:
        """Something that was really done, for the record."""
        self.steps.append({"code": code, "at": round(time.monotonic() - self._began, 2), **details})

    def expect(self, moment: str, outcome: str, code: str, *, found: tuple[str, list[str]]) -> None:
        """What the verdict (or a refusal) had to be at that moment, and what it was."""
        self.facts.verdicts.append({"moment": moment, "expected": [outcome, [code]], "found": [found[0], found[1]]})

    # --- agents

    def start_agent(self) -> Spoken:
        """A fresh process, which knows the order's number."""
        environment = clean_environment(
            REHYDRATE_URL=self.server.url,
            REHYDRATE_KEY=self.server.keys.agent,
            REHYDRATE_DEMO_WORLD=self.world.url,
        )
        words = [self.drill, self.external_id, "--due", str(self.approval_due), "--flow", FLOW]
        process = self._household.start([*self.options.agent, *words], environment, level=2)
        self.step("agent_started", process=process.pid)
        return process

    def kill_agent(self, agent: Spoken) -> None:
        agent.kill()
        self.step("agent_killed", process=agent.pid)

    def come_back(self, agent: Spoken) -> tuple[str, list[str]]:
        """An agent that comes back to the run: the verdict it is told."""
        self.facts.back = {**hear(agent, "envelope"), "found": hear(agent, "found")["run"]}
        return verdict_of(self.facts.back)

    # --- the ledger

    def look(self) -> Json:
        """The run as it stands: the one that the first agent opened."""
        return self.ledger.get(self.run_id)

    def reaches(self, *statuses: str) -> Json:
        def there() -> Json | None:
            run = self.look()
            return run if run["status"] in statuses else None

        return eventually(there, what=f"status {' or '.join(statuses)}")

    def begin(self) -> Spoken:
        """The first agent, with the run that it opened, up to its pause."""
        agent = self.start_agent()
        self.run_id = hear(agent, "found")["run"]
        self.facts.run = {"id": self.run_id, "flow": FLOW, "external_id": self.external_id}
        hear(agent, "left")
        run = self.look()
        if run["status"] != "waiting":
            raise DrillError(f"the run is {run['status']} where it should wait")
        self.step("paused", waits=sorted(wait["name"] for wait in run["waits"]))
        self.keep(agent)
        return agent

    def keep(self, agent: Spoken) -> None:
        """The break: the run, and what reached the outside, as they are now, and the lease that this agent had."""
        self.facts.before = self.look()
        self.facts.epoch_before = hear(agent, "envelope")["lease"]["epoch"]
        self.facts.outside_before = {r["key"]: str(r["result"]["id"]) for r in self.world.journal.requests()}

    def finish(self, agent: Spoken) -> None:
        """Waits for the agent to be through, and takes stock."""
        status = hear(agent, "left")["status"]
        self.facts.after = self.look()
        self.facts.runs = int(self.ledger.runs(flow=FLOW, external_id=self.external_id)["total"])
        self.take_stock()
        self.step("finished", status=status)

    def take_stock(self) -> None:
        """What has reached the outside."""
        self.facts.touched = dict(Counter(map(name_of, self.world.journal.requests())))

    def attempt(self, what: Callable[[], Json]) -> tuple[str, list[str]]:
        """How something ended that must not succeed: `("refused", [code])`, or what was told or granted instead."""
        try:
            answer = what()
        except LedgerError as error:
            return "refused", [error.code]
        return ("granted", []) if answer.get("lease") else verdict_of(answer)

    # --- the person

    def approve(self) -> None:
        wait = next(wait for wait in self.look()["waits"] if wait["name"] == APPROVAL)
        body = {"choice": "approve", "wait_version": wait["version"], "reason": "Drill"}
        answer = self._act(f"/waits/{wait['id']}/decisions", body)
        self.step("approved", by=answer.get("decided_by"))

    def reconcile(self, key: str, receipt: Json) -> None:
        """A person writes down what they found outside."""
        body = {"outcome": "executed", "receipt": receipt, "reason": f"Drill: looked up outside, it is {receipt['id']}"}
        self._act(f"/runs/{self.run_id}/effects/{quote(key)}/reconcile", body)
        self.step("reconciled", key=key, receipt=receipt["id"])

    def _act(self, path: str, body: Json) -> Json:
        answer = self._person.post(path, json=body)
        if not answer.is_success:
            problem = answer.json() if "json" in answer.headers.get("content-type", "") else {}
            raise DrillError(
                f"the person's key may not do what it has to ({answer.status_code} {problem.get('code', '')}): "
                f"{problem.get('detail', '')}"
            )
        return dict(answer.json())

    # --- the outside

    def slow(self, action: str, *, seconds: float) -> None:
        """The next one of this kind is done at once, and answered so much later."""
        system, _, name = action.partition(".")
        self.world.journal.set_mode(system, name, "slow", seconds, 1)

    def arrived(self, action: str) -> Json:
        """The first request of this kind that reached the outside, once it has."""

        def there() -> Json | None:
            return next((r for r in reversed(self.world.journal.requests()) if name_of(r) == action), None)

        return eventually(there, what=f"{action} outside", pause=0.01)

    def look_up(self, key: str) -> Json:
        """The receipt of what was done under a key: what a person finds who asks the other side."""
        answer = httpx.get(f"{self.world.url}/lookup", params={"key": key}, timeout=10, trust_env=False)
        if answer.status_code != 200:
            raise DrillError(f"nothing was done outside under {key}")
        found = answer.json()
        self.step("looked_up", key=key, receipt=found["id"])
        return {"id": found["id"], "status": found["status"], "url": found["url"]}

    def supplier_answers(self) -> None:
        """The supplier calls back, now; what is not taken is sent again later under the same id."""
        self.world.journal.send_callback(self.callback()["n"], {"order": self.external_id, "confirmed": True})
        self.world.wake()

    def callback(self) -> Json:
        """The supplier's, as the outside world keeps it: `attempts`, and `answer` once it was taken."""
        return self.world.journal.callbacks()[0]


def hear(agent: Spoken, event: str) -> Json:
    """The first thing of this kind that an agent says."""

    def listen(line: str) -> Json | None:
        try:
            said = json.loads(line)
        except ValueError:
            return None
        return said if isinstance(said, dict) and said.get("event") == event else None

    return agent.hear(listen, what=f"the agent's “{event}”")


def verdict_of(shape: Json) -> tuple[str, list[str]]:
    """`(outcome, codes)` of a run or an envelope."""
    verdict = shape["verdict"]
    return str(verdict["outcome"]), sorted({str(reason["code"]) for reason in verdict["reasons"]})


def name_of(request: Json) -> str:
    return f"{request['system']}.{request['action']}"
