"""Orchestrations of durabletask on its in-memory backend, against a real ledger. What each trap of it comes to here:

1.  an event of a wrong name is buffered unseen         test_only_the_ledger_counts_whatever_events_come
2.  an event's word is taken for a decision             test_only_the_ledger_counts_whatever_events_come
3.  an event may come before the wait                   test_event_that_comes_early_is_only_a_look
4.  names of events are case-insensitive                test_waking_is_quick_and_its_name_has_no_case
5.  an abandoned waiter eats the next event             test_waiter_that_lost_to_the_clock_takes_no_later_event
6.  an activity is delivered again                      test_activity_that_is_delivered_again_does_nothing_again
                                                        test_activity_that_is_delivered_twice_at_once_does_it_once
7.  a restart repeats what had succeeded                test_restarted_instance_repeats_nothing
8.  a rewind repeats what had failed                    test_rewound_instance_repeats_nothing
9.  changed code fails in mid-flight                    test_changed_code_goes_to_a_person
10. the in-memory backend redelivers nothing            test_lost_task_hub_repeats_nothing
11. an instance is over, or never was                   test_runs_whose_instance_is_gone_go_to_a_person
                                                        tests/adapters/test_durabletask_wakeups.py
12. event against timer, then escalation                test_human_interaction_comes_out_as_in_the_native_pattern
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
from durabletask import task
from durabletask.client import TaskHubGrpcClient
from durabletask.testing import InMemoryOrchestrationBackend, create_test_backend
from durabletask.worker import TaskHubGrpcWorker

from rehydrate.adapters.durabletask import EVENT, DurableRun, Flow, TaskHub
from rehydrate.client import Effect, EffectCall, Ledger, Refused, Timer
from tests.client.conftest import reaches
from tests.conftest import eventually, free_port

Json = dict[str, Any]


@dataclass
class World:
    """The outside: what reached it, by key."""

    done: list[tuple[str, str, Json]] = field(default_factory=list)
    trouble: list[Exception] = field(default_factory=list)

    def do(self, e: EffectCall) -> Json:
        if self.trouble:
            raise self.trouble.pop(0)
        self.done.append((e.action, e.key, e.arguments))
        return {"id": f"{e.action} {len(self.done)}"}

    def names(self) -> list[str]:
        return [action for action, _, _ in self.done]


@pytest.fixture
def world() -> World:
    return World()


@dataclass
class Hub:
    """A task hub with a client; a worker at a time."""

    backend: InMemoryOrchestrationBackend
    address: str
    client: TaskHubGrpcClient
    ending: list[threading.Thread]
    worker: TaskHubGrpcWorker | None = None

    def serve(self, *flows: Flow, native: tuple[Any, ...] = (), activities: tuple[Any, ...] = ()) -> None:
        """A worker of these flows, in the place of the one before it."""
        self.leave()
        self.worker = TaskHubGrpcWorker(host_address=self.address)
        for flow in flows:
            flow.add_to(self.worker)
        for orchestrator in native:
            self.worker.add_orchestrator(orchestrator)
        for activity in activities:
            self.worker.add_activity(activity)
        self.worker.start()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        """The worker takes nothing more; that it takes a second to end holds up nobody."""
        if self.worker is not None:
            self.ending.append(threading.Thread(target=self.worker.stop))
            self.ending[-1].start()
            self.worker = None

    def wake(self, instance: str = "c-1") -> None:
        """What the ledger's delivery does."""
        assert TaskHub(self.client).raise_event(instance, EVENT)

    def start(self, orchestrator: Any, instance: str = "c-1", given: Any = None) -> str:
        return str(self.client.schedule_new_orchestration(orchestrator, input=given, instance_id=instance))

    def output(self, instance: str = "c-1") -> Any:
        state = self.client.wait_for_orchestration_completion(instance, timeout=60)
        assert state is not None
        state.raise_if_failed()  # type: ignore[no-untyped-call]
        return state.get_output()

    def fails(self, instance: str = "c-1") -> str:
        state = self.client.wait_for_orchestration_completion(instance, timeout=60)
        assert state is not None
        assert state.failure_details is not None
        return state.failure_details.message


@pytest.fixture(scope="module")
def ending() -> Iterator[list[threading.Thread]]:
    """Workers on their way out."""
    threads: list[threading.Thread] = []
    yield threads
    for thread in threads:
        thread.join()


@pytest.fixture
def hub(ending: list[threading.Thread]) -> Iterator[Hub]:
    """A task hub of the test's own: the timers of an in-memory one outlive its instances."""
    port = free_port()
    backend = create_test_backend(port=port)
    with TaskHubGrpcClient(host_address=f"localhost:{port}") as client:
        made = Hub(backend, f"localhost:{port}", client, ending)
        yield made
        made.leave()
    backend.stop()


def contracts(ledger: Ledger, world: World, **options: Any) -> Flow:
    """A contract is drafted, and sent when somebody approves."""
    flow = Flow(ledger, "contract", opening=lambda given: {"title": "Contract 1"}, **{"poll": 1, **options})
    flow.effect("crm.draft")(world.do)
    flow.effect("esign.send")(world.do)
    flow.effect("mail.send")(world.do)
    return flow


def approval(run: DurableRun, given: Any) -> Any:
    draft = yield from run.effect("crm.draft", {"customer": "c-7"})
    send = Effect("esign.send", {"draft": draft["id"], "days": 30}, impact="customer_promise")
    answer = yield from run.ask("legal", "Send contract 1?", effect=send, due="3d", on_reject="continue")
    if not answer.approved:
        return f"not sent: {answer.reason}"
    return (yield from run.effect(send))["id"]


@pytest.fixture
def asked(hub: Hub, ledger: Ledger, world: World) -> Callable[..., str]:
    """Starts the approval and gives the run's id, once somebody is asked."""

    def make(**options: Any) -> str:
        flow = contracts(ledger, world, **options)
        orchestrator = flow.orchestrator(approval)
        hub.serve(flow)
        hub.start(orchestrator)
        run_id = waiting(ledger)
        eventually(lambda: timers(hub), what="the orchestrator's rest")
        return run_id

    return make


def waiting(ledger: Ledger, flow: str = "contract") -> str:
    runs = eventually(lambda: ledger.runs(flow=flow, status="waiting")["results"], what="the question")
    return str(runs[0]["id"])


# --- the way through ----------------------------------------------------


def test_what_was_approved_is_done_once(hub, ledger, world, alice, asked):
    run_id = asked()
    run = ledger.get(run_id)
    assert run["agent"]["framework"] == "durabletask"
    assert (run["external_id"], run["title"]) == ("c-1", "Contract 1")
    assert world.names() == ["crm.draft"]

    alice.decide(run_id, "legal", "approve")

    assert hub.output() == "esign.send 2"
    run = ledger.get(run_id)
    assert run["status"] == "completed"
    assert run["failure_count"] == 0
    assert [key for _, key, _ in world.done] == ["contract/c-1/crm.draft/1", "contract/c-1/esign.send/1"]


def test_edited_arguments_are_what_is_done(hub, world, alice, asked):
    run_id = asked()
    alice.decide(run_id, "legal", "edit", arguments={"draft": "crm.draft 1", "days": 14})
    hub.wake()
    hub.output()
    assert world.done[-1] == ("esign.send", "contract/c-1/esign.send/1", {"draft": "crm.draft 1", "days": 14})


def test_orchestrator_is_told_the_no_and_its_reason(hub, world, alice, asked):
    run_id = asked()
    alice.decide(run_id, "legal", "reject", reason="Too dear")
    hub.wake()
    assert hub.output() == "not sent: Too dear"
    assert world.names() == ["crm.draft"]


def test_run_that_a_person_ends_ends_its_orchestration(hub, ledger, world, alice, asked):
    run_id = asked()
    alice.act(run_id, "terminate")
    hub.wake()
    assert "The run has ended" in hub.fails()
    assert ledger.get(run_id)["status"] == "terminated"
    assert world.names() == ["crm.draft"]


def test_orchestrator_waits_while_a_person_has_the_run(hub, ledger, world, alice, asked):
    run_id = asked()
    alice.act(run_id, "takeover")
    alice.act(run_id, "handback", effects=[{"key": "contract/c-1/esign.send/1", "receipt": {"id": "by hand"}}])
    hub.wake()
    alice.decide(waiting(ledger), "legal", "approve")  # the takeover withdrew the question, so it is asked again
    hub.wake()
    assert hub.output() == "by hand"
    assert world.names() == ["crm.draft"]


def test_rejected_run_undoes_what_was_done(hub, ledger, world, alice):
    flow = contracts(ledger, world)
    flow.undo("crm.delete")(world.do)

    @flow.orchestrator
    def undone(run: DurableRun, given: Any) -> Any:
        yield from run.effect("crm.draft", {"customer": "c-7"}, undo="crm.delete")
        yield from run.ask("legal", "Go on?", on_reject="compensate")

    hub.serve(flow)
    hub.start(undone)
    run_id = waiting(ledger)
    alice.decide(run_id, "legal", "reject", reason="No")
    hub.wake()

    assert "rejected" in hub.fails()
    assert world.names() == ["crm.draft", "crm.delete"]
    assert ledger.get(run_id)["status"] == "terminated"


def test_effects_side_by_side_share_the_lease(hub, ledger, world: World):
    flow = contracts(ledger, world)
    together = threading.Barrier(3, timeout=30)

    def do(e: EffectCall) -> Json:
        together.wait()
        return world.do(e)

    for name in "abc":
        flow.effect(f"erp.{name}")(do)

    @flow.orchestrator
    def fan_out(run: DurableRun, given: Any) -> Any:
        receipts = yield from run.effects(*(Effect(f"erp.{name}") for name in "abc"))
        return [receipt["id"].split()[0] for receipt in receipts]

    hub.serve(flow)
    hub.start(fan_out)
    assert hub.output() == ["erp.a", "erp.b", "erp.c"]
    run = ledger.runs(flow="contract")["results"][0]
    assert run["failure_count"] == 0


def test_effect_that_failed_is_tried_again_and_the_run_counts_it(hub, ledger, world, alice, asked):
    run_id = asked()
    world.trouble = [Refused("the service is closed")]
    alice.decide(run_id, "legal", "approve")
    hub.wake()
    assert hub.output() == "esign.send 2"
    assert ledger.get(run_id)["failure_count"] == 1


def test_effect_whose_outcome_is_unknown_waits_for_a_person(hub, ledger, world, alice, asked):
    run_id = asked()
    world.trouble = [TimeoutError("no answer")]
    alice.decide(run_id, "legal", "approve")
    hub.wake()
    reaches(ledger, run_id, "review")

    alice.reconcile(run_id, "contract/c-1/esign.send/1", "executed", receipt={"id": "found in the archive"})
    hub.wake()

    assert hub.output() == "found in the archive"
    assert world.names() == ["crm.draft"]


# --- the traps ----------------------------------------------------


def test_only_the_ledger_counts_whatever_events_come(hub, ledger, world, asked):
    run_id = asked()
    for name, word in (("approve", {"choice": "approve"}), ("legal", True), (EVENT, {"choice": "approve"})):
        hub.client.raise_orchestration_event("c-1", name, data=word)
    looks = eventually(lambda: activities(hub) >= 5 and activities(hub), what="some looks")
    assert looks
    assert ledger.get(run_id)["status"] == "waiting"
    assert world.names() == ["crm.draft"]


def activities(hub: Hub, instance: str = "c-1") -> int:
    """How often the instance has called an activity."""
    history = hub.client.get_orchestration_history(instance)
    return sum(type(event).__name__ == "TaskScheduledEvent" for event in history)


def test_event_that_comes_early_is_only_a_look(hub, ledger, world, alice):
    flow = contracts(ledger, world, poll="1h")
    orchestrator = flow.orchestrator(approval)
    hub.start(orchestrator)
    hub.client.raise_orchestration_event("c-1", EVENT)  # nobody serves the instance yet
    hub.serve(flow)
    run_id = waiting(ledger)
    assert world.names() == ["crm.draft"]

    alice.decide(run_id, "legal", "approve")
    hub.wake()
    assert hub.output() == "esign.send 2"


def test_waking_is_quick_and_its_name_has_no_case(hub, alice, asked):
    run_id = asked(poll="1h")
    alice.decide(run_id, "legal", "approve")
    hub.client.raise_orchestration_event("c-1", EVENT.upper())
    assert hub.output() == "esign.send 2"


def test_waiter_that_lost_to_the_clock_takes_no_later_event(hub, ledger, world, alice):
    """The orchestrator has looked by itself once, at the deadline, and sleeps for an hour: one event wakes it."""
    flow = contracts(ledger, world, poll="1h")

    @flow.orchestrator
    def contract(run: DurableRun, given: Any) -> Any:
        answer = yield from run.ask("legal", "Send it?", due=1)
        return answer.status

    hub.serve(flow)
    hub.start(contract)
    run_id = waiting(ledger)
    reaches(ledger, run_id, "review")
    eventually(lambda: timers(hub) == 2, what="the second sleep")

    alice.act(run_id, "clear", codes=["timeout_undetermined"])
    hub.wake()
    assert hub.output() == "timed_out"


def timers(hub: Hub, instance: str = "c-1") -> int:
    """How often the instance has gone to sleep."""
    history = hub.client.get_orchestration_history(instance)
    return sum(type(event).__name__ == "TimerCreatedEvent" for event in history)


def test_activity_that_is_delivered_again_does_nothing_again(ledger, world):
    flow = contracts(ledger, world)
    begun = flow.activity({"step": "open", "instance": "c-1", "opening": {}, "epoch": None, "run": None})
    effect = {"action": "crm.draft", "arguments": {"n": 1}, "key": "contract/c-1/crm.draft/1"}
    given = {"step": "effect", "instance": "c-1", "opening": {}, "run": begun["value"], "effect": effect, **begun}

    first = flow.activity(given)
    again = flow.activity(given)
    late = flow.activity({**given, "epoch": None})  # by a worker that the task hub took for dead

    assert first["value"] == again["value"] == late["value"]
    assert world.names() == ["crm.draft"]


def test_activity_that_is_delivered_twice_at_once_does_it_once(ledger, world: World):
    flow = contracts(ledger, world)
    inside, go_on = threading.Event(), threading.Event()

    @flow.effect("bank.pay")
    def pay(e: EffectCall) -> Json:
        inside.set()
        assert go_on.wait(30)
        return world.do(e)

    begun = flow.activity({"step": "open", "instance": "c-1", "opening": {}, "epoch": None, "run": None})
    effect = {"action": "bank.pay", "arguments": {}, "key": "contract/c-1/bank.pay/1"}
    given = {"step": "effect", "instance": "c-1", "opening": {}, "run": begun["value"], "effect": effect, **begun}
    answers: list[Json] = []
    first = threading.Thread(target=lambda: answers.append(flow.activity(given)))
    first.start()
    assert inside.wait(30)

    assert "value" not in flow.activity(given)  # under way: not done again, and not waited for
    go_on.set()
    first.join(30)

    assert world.names() == ["bank.pay"]
    receipt = flow.activity({**given, "epoch": None})["value"]
    assert receipt["id"] == "bank.pay 1"


def test_restarted_instance_repeats_nothing(hub, ledger, world, alice):
    flow = contracts(ledger, world)
    broken = threading.Event()
    broken.set()

    @flow.orchestrator
    def contract(run: DurableRun, given: Any) -> Any:
        draft = yield from run.effect("crm.draft", {"customer": "c-7"})
        answer = yield from run.ask("legal", "Go on?")
        if broken.is_set():
            raise ValueError("the code is wrong")
        return f"{draft['id']}, {answer.choice}"

    hub.serve(flow)
    hub.start(contract)
    run_id = waiting(ledger)
    alice.decide(run_id, "legal", "approve")
    hub.wake()
    assert "the code is wrong" in hub.fails()
    assert flow.tend(TaskHub(hub.client)) == [run_id]
    assert ledger.get(run_id)["status"] == "review"

    broken.clear()
    alice.act(run_id, "clear", codes=["not_retryable"])
    hub.client.restart_orchestration("c-1")
    assert hub.output() == "crm.draft 1, approve"
    assert world.names() == ["crm.draft"]
    assert ledger.get(run_id)["status"] == "completed"


def test_rewound_instance_repeats_nothing(hub, ledger, world, alice):
    flow = contracts(ledger, world)
    breaks = [ValueError("the archive is full")]

    def archive(_: task.ActivityContext, given: Any) -> str:
        if breaks:
            raise breaks.pop()
        return f"archived {given}"

    @flow.orchestrator
    def contract(run: DurableRun, given: Any) -> Any:
        draft = yield from run.effect("crm.draft", {"customer": "c-7"})
        return (yield run.ctx.call_activity(archive, input=draft["id"]))

    hub.serve(flow, activities=(archive,))
    hub.start(contract)
    assert "the archive is full" in hub.fails()
    (run_id,) = flow.tend(TaskHub(hub.client))
    assert ledger.get(run_id)["status"] == "review"

    alice.act(run_id, "clear", codes=["not_retryable"])
    hub.client.rewind_orchestration("c-1")
    assert hub.output() == "archived crm.draft 1"
    assert world.names() == ["crm.draft"]
    assert ledger.get(run_id)["status"] == "completed"


def test_changed_code_goes_to_a_person(hub, ledger, world, alice, asked):
    run_id = asked(poll="1h")
    hub.leave()
    changed = contracts(ledger, world)
    assert changed.tend(TaskHub(hub.client)) == []

    def other(run: DurableRun, given: Any) -> Any:
        yield run.ctx.create_timer(timedelta(seconds=1))
        yield from run.effect("mail.send", {"to": "all"})

    other.__name__ = approval.__name__
    changed.orchestrator(other)
    hub.serve(changed)
    alice.decide(run_id, "legal", "approve")
    hub.wake()
    assert "on-determin" in hub.fails()

    assert changed.tend(TaskHub(hub.client)) == [run_id]

    run = ledger.get(run_id)
    assert run["status"] == "review"
    assert "on-determin" in run["last_error"]["message"]
    assert changed.tend(TaskHub(hub.client)) == []
    assert world.names() == ["crm.draft"]


def test_lost_task_hub_repeats_nothing(hub, ledger, world, alice, asked):
    """The history is gone: the instance that is started under the same id finds in the ledger what was done."""
    run_id = asked()
    hub.leave()
    hub.backend.reset()
    alice.decide(run_id, "legal", "approve")

    flow = contracts(ledger, world)
    orchestrator = flow.orchestrator(approval)
    hub.serve(flow)
    hub.start(orchestrator)

    assert hub.output() == "esign.send 2"
    assert world.names() == ["crm.draft", "esign.send"]
    assert ledger.get(run_id)["status"] == "completed"


def test_runs_whose_instance_is_gone_go_to_a_person(hub, ledger, world, alice, asked):
    run_id = asked(poll="1h")
    host = TaskHub(hub.client)
    assert host.terminate("c-1", "by an operator of the task hub")
    eventually(lambda: (found := host.status("c-1")) and found.over, what="the end")
    assert not host.raise_event("c-1", EVENT)
    assert not host.terminate("c-2", "never was")

    assert contracts(ledger, world).tend(host) == [run_id]

    run = ledger.get(run_id)
    assert run["status"] == "review"
    assert "terminated" in run["last_error"]["message"]
    assert run["waits"][0]["status"] == "superseded"  # nobody is asked on behalf of an orchestration that is no more


@pytest.mark.parametrize("answered", [True, False], ids=["answered", "too late"])
def test_human_interaction_comes_out_as_in_the_native_pattern(hub, ledger, world, alice, answered):
    def done(_: task.ActivityContext, name: str) -> str:
        return f"{name} 1"

    def native(ctx: task.OrchestrationContext, _: Any) -> Any:
        yield ctx.call_activity(done, input="mail.send")
        approved = ctx.wait_for_external_event("ApprovalEvent")
        late = ctx.create_timer(timedelta(seconds=30 if answered else 1))
        if (yield task.when_any([approved, late])) is approved:
            late.cancel()
            return (yield ctx.call_activity(done, input="esign.send"))
        return (yield ctx.call_activity(done, input="mail.escalate"))

    flow = contracts(ledger, world)
    flow.effect("mail.escalate")(world.do)

    @flow.orchestrator
    def adapted(run: DurableRun, given: Any) -> Any:
        yield from run.effect("mail.send", {"to": "legal"})
        answer = yield from run.ask("legal", "Send it?", due=30 if answered else 1, on_timeout="resume")
        if answer.approved:
            return (yield from run.effect("esign.send"))["id"]
        return (yield from run.effect("mail.escalate"))["id"]

    hub.serve(flow, native=(native,), activities=(done,))
    hub.start(native, "native")
    hub.start(adapted, "adapted")
    run_id = waiting(ledger)
    if answered:
        hub.client.raise_orchestration_event("native", "ApprovalEvent")
        alice.decide(run_id, "legal", "approve")
        hub.wake("adapted")

    expected = hub.output("native").split()[0]
    assert hub.output("adapted").split()[0] == expected
    assert world.names() == ["mail.send", expected]


def test_ledger_escalates_by_itself_and_the_orchestrator_need_not_know(hub, ledger, world, alice):
    flow = contracts(ledger, world)

    @flow.orchestrator
    def contract(run: DurableRun, given: Any) -> Any:
        answer = yield from run.ask("legal", "Send it?", due=2, on_timeout="escalate")
        return answer.choice

    hub.serve(flow)
    hub.start(contract)
    run_id = waiting(ledger)
    tried = eventually(lambda: next((w for w in ledger.get(run_id)["waits"] if w["version"] == 2), None), what="it")
    decision = {"choice": "approve", "wait_version": 2}
    assert alice.http.post(f"/waits/{tried['id']}/decisions", json=decision).status_code == 201
    assert hub.output() == "approve"


def test_timer_of_the_ledger(hub, ledger, world):
    flow = contracts(ledger, world)

    @flow.orchestrator
    def contract(run: DurableRun, given: Any) -> Any:
        answer = yield from run.wait_for(Timer("rest", 1))
        return answer.status

    hub.serve(flow)
    hub.start(contract)
    assert hub.output() == "satisfied"
