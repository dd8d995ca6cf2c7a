"""What a drill found, in the reader's language: as text, and as Markdown for a release checklist. Pure but for that."""

from __future__ import annotations

from typing import Any, Final

from django.utils.translation import gettext, gettext_lazy

from audit import formats

Json = dict[str, Any]

_TITLES: Final = {
    "restart-while-waiting": gettext_lazy("Restart while waiting for a callback"),
    "late-resume-after-approval": gettext_lazy("Late resume after an approval"),
    "effect-done-record-lost": gettext_lazy("Effect done outside, record lost"),
}
_ABOUT: Final = {
    "restart-while-waiting": gettext_lazy(
        "A run waits for a supplier's callback and a person's approval. Agent and server are killed and started again; "
        "both answers come; a new agent process goes on."
    ),
    "late-resume-after-approval": gettext_lazy(
        "A person approves while no agent is alive. An agent comes back when the deadline has long passed, goes on "
        "once, and a second one is turned away."
    ),
    "effect-done-record-lost": gettext_lazy(
        "The agent is killed after the payment has gone out and before its receipt is recorded. Nobody may pay again; "
        "a person looks it up and records it; the run goes on."
    ),
}
_CHECKS: Final = {
    "same_run": gettext_lazy("Same run found"),
    "checkpoint": gettext_lazy("Right checkpoint hit"),
    "effects": gettext_lazy("Done effects recognised"),
    "verdict": gettext_lazy("Verdict as it should be"),
    "once": gettext_lazy("Outside world touched exactly once"),
}
_MOMENTS: Final = {
    "while_waiting": gettext_lazy("while it waited"),
    "after_restart": gettext_lazy("after the restart"),
    "when_approved": gettext_lazy("when it was approved"),
    "after_deadline": gettext_lazy("after the deadline"),
    "back": gettext_lazy("when an agent came back"),
    "second_resume": gettext_lazy("a second resume meanwhile"),
    "old_lease": gettext_lazy("a call under the old lease"),
    "after_end": gettext_lazy("a resume after the end"),
    "unknown": gettext_lazy("when an agent came back after the loss"),
    "tried_again": gettext_lazy("when another one tried"),
    "reconciled": gettext_lazy("after it was settled"),
}
_STEPS: Final = {
    "agent_started": gettext_lazy("An agent was started (process %(process)s)."),
    "agent_killed": gettext_lazy("The agent was killed (SIGKILL, process %(process)s)."),
    "paused": gettext_lazy("The run paused for: %(waits)s."),
    "server_killed": gettext_lazy("The whole server was killed (SIGKILL, %(processes)s processes, database included)."),
    "server_restarted": gettext_lazy("The server was restarted by the command that was given."),
    "server_started": gettext_lazy("The server answers again, on the same data."),
    "server_left_alone": gettext_lazy(
        "The server was left running: it is not the drill's own, and no --restart was given."
    ),
    "callback_taken": gettext_lazy("The supplier's callback was taken at its attempt no. %(attempts)s."),
    "approved": gettext_lazy("%(by)s approved."),
    "waited": gettext_lazy("%(seconds)s s went by; the approval's deadline was %(due)s s."),
    "looked_up": gettext_lazy("%(key)s was looked up outside: it was done, as %(receipt)s."),
    "reconciled": gettext_lazy("A person recorded that %(key)s was done, as %(receipt)s."),
    "finished": gettext_lazy("The agent was through; the run is %(status)s."),
}


#: In the order in which they are told.
NAMES: Final = tuple(_TITLES)


def title(drill: str) -> str:
    return str(_TITLES.get(drill, drill))


def about(drill: str) -> str:
    """What the drill does, in two sentences."""
    return str(_ABOUT.get(drill, ""))


def checks(result: Json) -> list[Json]:
    """`[{name, title, passed, evidence}]`, the evidence as one line."""
    return [
        {
            "name": check["name"],
            "title": str(_CHECKS.get(check["name"], check["name"])),
            "passed": check["passed"],
            "evidence": _EVIDENCE[check["name"]](check["evidence"]) if check["name"] in _EVIDENCE else "",
        }
        for check in result["checks"]
    ]


def steps(result: Json) -> list[str]:
    """What was really done, with the seconds since the drill began."""
    return [f"{step['at']:.1f} s: {_step(step)}" for step in result["steps"]]


def circumstances(result: Json) -> str:
    """Version, when, how long, against what."""
    started = formats.parse_time(result["started_at"])
    when = f"{started:%Y-%m-%d %H:%M} UTC" if started else "–"
    return f"Rehydrate {result['version']} · {when} · {result['seconds']:.1f} s · {server(result)}"


def server(result: Json) -> str:
    """What was drilled."""
    own = result["server"]["kind"] == "own"
    return gettext("a server of the drill's own") if own else str(result["server"]["url"])


def passed(result: Json) -> str:
    return gettext("passed") if result["passed"] else gettext("FAILED")


def summary(results: list[Json]) -> str:
    failed = [title(result["drill"]) for result in results if not result["passed"]]
    if failed:
        return gettext("Failed: %(drills)s.") % {"drills": gettext(", ").join(failed)}
    return gettext("All drills passed.") if len(results) > 1 else gettext("The drill passed.")


def text(results: list[Json]) -> str:
    """For a terminal."""
    parts = []
    for result in results:
        lines = [f"{title(result['drill'])} ({result['drill']}): {passed(result)}", f"  {circumstances(result)}"]
        lines += [f"  {about(result['drill'])}", ""]
        for check in checks(result):
            lines.append(f"  {'✓' if check['passed'] else '✗'} {check['title']}: {check['evidence']}")
        lines += _trouble(result, "  ")
        lines += ["", f"  {gettext('What was done:')}", *(f"    {step}" for step in steps(result))]
        parts.append("\n".join(lines))
    return "\n\n".join([*parts, summary(results)])


def markdown(results: list[Json]) -> str:
    """A checklist to paste: a ticked box for each point that holds, an open one for each that does not."""
    parts = []
    for result in results:
        lines = [f"### {title(result['drill'])} (`{result['drill']}`): {passed(result)}", ""]
        lines += [_escape(circumstances(result)), "", about(result["drill"]), ""]
        for check in checks(result):
            box = "[x]" if check["passed"] else "[ ]"
            lines.append(f"- {box} **{check['title']}**: {_escape(check['evidence'])}")
        lines += _trouble(result, "\n")
        lines += ["", gettext("What was done:"), ""]
        lines += [f"{number}. {_escape(step)}" for number, step in enumerate(steps(result), 1)]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _trouble(result: Json, indent: str) -> list[str]:
    return [f"{indent}{gettext('It broke off: %(why)s') % {'why': result['error']}}"] if result["error"] else []


def _escape(line: str) -> str:
    """Names and references as they are, whatever Markdown would make of them."""
    for character in "\\`*_[]<>":
        line = line.replace(character, f"\\{character}")
    return line


def _step(step: Json) -> str:
    code = step["code"]
    if code == "server_killed" and step["kind"] == "given":
        code = "server_restarted"
    details = {**step, "waits": gettext(", ").join(step.get("waits") or []), "by": step.get("by") or "–"}
    return str(_STEPS.get(code, code)) % details


# -- evidence


def _same_run(e: Json) -> str:
    if e["before"] != e["after"]:
        return gettext("opened as %(before)s, come back to as %(after)s; runs with this number: %(runs)s") % _dashes(e)
    return gettext(
        "run %(after)s, found by its own number (runs with this number: %(runs)s); "
        "lease epoch %(epoch_before)s before, %(epoch_after)s after; in the end: %(status)s"
    ) % _dashes(e)


def _checkpoint(e: Json) -> str:
    if e["before"] != e["after"]:
        said = {"before": _place(e["before"]), "after": _place(e["after"])}
        return gettext("it was %(before)s, and came back as %(after)s") % said
    return gettext("%(place)s, as before the break") % {"place": _place(e["after"])}


def _place(checkpoint: Json) -> str:
    return gettext("stage “%(stage)s” (event %(seq)s, %(ref)s)") % _dashes(checkpoint)


def _effects(e: Json) -> str:
    if not e["effects"]:
        return gettext("nothing was seen")
    return gettext("; ").join(_effect(effect) for effect in e["effects"])


def _effect(effect: Json) -> str:
    if effect["state"] == "executed" and effect["receipt"] == effect["outside"]:
        said = gettext("%(key)s executed with receipt %(receipt)s, attempts: %(attempts)s")
    else:
        said = gettext("%(key)s was done outside as %(outside)s, and the ledger had: %(state)s, receipt %(receipt)s")
    return said % _dashes(effect)


def _verdict(e: Json) -> str:
    told = [_moment(verdict) for verdict in e["verdicts"]]
    if len(told) < e["of"]:
        told.append(gettext("%(seen)s of %(of)s moments were reached") % {"seen": len(told), "of": e["of"]})
    return gettext("; ").join(told)


def _moment(verdict: Json) -> str:
    said = {
        "moment": _MOMENTS.get(verdict["moment"], verdict["moment"]),
        "found": _outcome(verdict["found"]),
        "expected": _outcome(verdict["expected"]),
    }
    if verdict["found"] == verdict["expected"]:
        return gettext("%(moment)s: %(found)s") % said
    return gettext("%(moment)s: %(found)s instead of %(expected)s") % said


def _outcome(pair: list[Any]) -> str:
    outcome, codes = pair
    return f"{outcome} ({', '.join(codes)})" if codes else str(outcome)


def _once(e: Json) -> str:
    told = [f"{touched['action']} {touched['times']}×" for touched in e["touched"]]
    if e["others"]:
        told.append(gettext("and what nobody asked for: %(others)s") % {"others": ", ".join(e["others"])})
    return gettext(", ").join(told)


def _dashes(e: Json) -> Json:
    return {name: "–" if value is None else value for name, value in e.items()}


_EVIDENCE: Final = {
    "same_run": _same_run,
    "checkpoint": _checkpoint,
    "effects": _effects,
    "verdict": _verdict,
    "once": _once,
}
