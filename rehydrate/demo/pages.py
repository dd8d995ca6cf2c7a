"""The outside world's pages, for a person who plays the customer or the supplier, or looks what arrived: only HTML."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

Json = dict[str, Any]

STYLE = """
:root { color-scheme: light dark; --ink: light-dark(#22262b, #e6e4df); --paper: light-dark(#faf8f4, #17191c);
  --line: light-dark(#d9d4c9, #3a3e44); --accent: light-dark(#1d5f7a, #7fc0db); --soft: light-dark(#fff, #1f2226); }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 60rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; margin: 0 0 .25rem; } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
a { color: var(--accent); } p { max-width: 42rem; }
.who { font-size: .85rem; opacity: .8; margin: 0 0 1.5rem; }
.card { background: var(--soft); border: 1px solid var(--line); border-radius: .5rem; padding: 1rem; margin: 0 0 1rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .35rem .6rem .35rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1rem; margin: 0; } dd { margin: 0; }
label { display: block; margin: .75rem 0 .25rem; }
textarea, input, select { font: inherit; color: inherit; background: var(--paper); border: 1px solid var(--line);
  border-radius: .375rem; padding: .5rem; max-width: 100%; } textarea { width: 100%; min-height: 5rem; }
button { font: inherit; padding: .55rem 1rem; border-radius: .375rem; border: 1px solid var(--accent); cursor: pointer;
  background: var(--accent); color: var(--paper); margin: .75rem .5rem 0 0; }
button.quiet { background: none; color: var(--accent); }
.card > p:first-child { margin-top: 0; }
code { font-size: .85em; overflow-wrap: anywhere; }
@media (max-width: 40rem) { dl { grid-template-columns: 1fr; } dd { margin-bottom: .5rem; } }
"""


def page(title: str, who: str, body: str) -> str:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>"
        f'<h1>{escape(title)}</h1><p class="who">{escape(who)}</p>{body}</main></body></html>'
    )


def lines(pairs: Iterable[tuple[str, Any]]) -> str:
    return "<dl>" + "".join(f"<dt>{escape(str(k))}</dt><dd>{escape(_text(v))}</dd>" for k, v in pairs) + "</dl>"


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_text(item) for item in value)
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else str(value)


def _when(stamp: float) -> str:
    return f"{datetime.fromtimestamp(stamp, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _what(request: Json) -> str:
    return f"{request['system']}: {str(request['action']).replace('_', ' ')}"


OUTCOMES = {"done": "done", "repeat": "asked again, not done again", "refused": "refused, not done"}


def requests_table(requests: Sequence[Json]) -> str:
    if not requests:
        return "<p>Nothing has arrived here.</p>"
    rows = "".join(
        f"<tr><td>{_when(r['at'])}</td><td>{escape(_what(r))}</td>"
        f'<td><a href="/records/{r["n"]}">{escape(str(r["result"].get("id", "")))}</a></td>'
        f"<td>{OUTCOMES[r['outcome']]}</td></tr>"
        for r in requests
    )
    head = "<tr><th>When</th><th>What</th><th>Number</th><th></th></tr>"
    return f'<div class="scroll"><table>{head}{rows}</table></div>'


def overview(requests: Sequence[Json], callbacks: Sequence[Json], modes: Sequence[Json], counts: dict[str, int]) -> str:
    doubled = sorted(key for key, n in counts.items() if n > 1)
    verdict = (
        f"<p><strong>Done more than once: {escape(', '.join(doubled))}</strong></p>"
        if doubled
        else f"<p>{len(counts)} things were done here, each of them exactly once.</p>"
    )
    links = "".join(
        f'<li><a href="/play/{c["kind"]}/{escape(c["subject"])}">{escape(c["kind"].capitalize())}: '
        f"{escape(c['subject'])}</a> ({'has answered' if c['answer'] else 'has not answered yet'})</li>"
        for c in callbacks
    )
    mode_rows = "".join(
        f"<li>{escape(m['system'])}.{escape(m['action'])}: {escape(m['mode'])}, "
        f"{'all requests' if m['times'] is None else 'next requests: ' + str(m['times'])}</li>"
        for m in modes
    )
    form = (
        '<form method="post" action="/modes" class="card"><label for="system">System (* for all)</label>'
        '<input id="system" name="system" value="*"><label for="action">Action (* for all)</label>'
        '<input id="action" name="action" value="*"><label for="mode">How it behaves</label>'
        '<select id="mode" name="mode">'
        '<option value="normal">normally</option><option value="slow">does it, and answers late</option>'
        '<option value="slow_before">waits, then does it</option><option value="fail">fails, and does nothing</option>'
        '<option value="lose_answer">does it, and its answer is lost</option></select>'
        '<label for="seconds">Seconds, when slow</label>'
        '<input id="seconds" name="seconds" value="20" inputmode="numeric">'
        '<label for="times">For how many requests (empty: all)</label><input id="times" name="times" value="1" '
        'inputmode="numeric"><br><button>Set</button></form>'
    )
    return page(
        "The outside world",
        "A stand-in for the systems that the demo's agents work with. What is listed here really happened.",
        f"{verdict}<h2>Play somebody outside</h2><ul>{links or '<li>Nobody has been asked for anything yet.</li>'}</ul>"
        f"<h2>What arrived</h2>{requests_table(requests)}"
        f"<h2>Make it misbehave</h2><ul>{mode_rows}</ul>{form}",
    )


def record(request: Json) -> str:
    pairs = [("Done", OUTCOMES[request["outcome"]]), ("When", _when(request["at"])), *request["arguments"].items()]
    return page(
        f"{_what(request)} {request['result'].get('id', '')}",
        "The outside world's own record",
        f'<div class="card">{lines(pairs)}</div><p><code>{escape(request["key"])}</code></p>',
    )


def of_run(run: str, requests: Sequence[Json]) -> str:
    return page(
        f"What arrived for {run.split('/')[-1]}",
        "The outside world's own list: what stands here as “done” has happened, whatever the agent knows.",
        requests_table(requests),
    )


def document(title: str, pairs: Iterable[tuple[str, str]]) -> str:
    return page(title, "The paper that this run is about", f'<div class="card">{lines(pairs)}</div>')


def customer(subject: str, callbacks: Sequence[Json], *, said: str = "") -> str:
    """Where a person plays the customer."""
    cards = []
    for callback in callbacks:
        wanted = " and ".join(callback["details"].get("documents", []))
        if callback["answer"]:
            thanks = f"<p>The documents have been sent. Thank you!</p><p>{escape(callback['answer'])}</p>"
            cards.append(f'<div class="card">{thanks}</div>')
            continue
        cards.append(
            f'<form class="card" method="post" action="/play/customer/{escape(subject)}">'
            f"<p>Dear {escape(str(callback['details'].get('customer', 'customer')))}, we are sorry about your "
            f"{escape(str(callback['details'].get('product', 'order')))}. Please send us {escape(wanted)}.</p>"
            f'<input type="hidden" name="callback" value="{callback["n"]}">'
            f'<label for="note-{callback["n"]}">What you would like to say</label>'
            f'<textarea id="note-{callback["n"]}" name="note" maxlength="1000">Here is what you asked for.</textarea>'
            f'<input type="hidden" name="documents" value="{escape(wanted)}">'
            "<button>Send the documents</button></form>"
        )
    nobody = '<p class="card">Nobody has asked this customer for anything (yet): reload in a moment.</p>'
    return page(
        f"Your case: {subject}",
        "The shop's page for its customer. In this demo you play the customer here.",
        f'<p class="card">{escape(said)}</p>' if said else "".join(cards) or nobody,
    )


def supplier(subject: str, requests: Sequence[Json], callbacks: Sequence[Json], *, said: str = "") -> str:
    """Where a person looks into the supplier's order book, or plays the supplier."""
    orders = [r for r in requests if r["outcome"] == "done"]
    book = "".join(
        f'<div class="card"><p><strong>{escape(str(r["result"].get("id")))}</strong>: '
        f"{escape(str(r['action']).replace('_', ' '))}, received {_when(r['at'])}</p>"
        f"{lines(r['arguments'].items())}</div>"
        for r in orders
    )
    forms = ""
    for callback in callbacks:
        name = escape(str(callback["details"].get("supplier", "The supplier")))
        if callback["answer"]:
            said_so = escape(_text(callback["body"]))
            forms += f'<p class="card">{name} has answered: {said_so}. {escape(callback["answer"])}</p>'
            continue
        forms += (
            f'<form class="card" method="post" action="/play/supplier/{escape(subject)}">'
            f"<p>{name} has not answered this order yet.</p>"
            f'<input type="hidden" name="callback" value="{callback["n"]}">'
            '<button name="confirmed" value="yes">Confirm the order</button>'
            '<button name="confirmed" value="no" class="quiet">Decline the order</button></form>'
        )
    return page(
        f"Order book: {subject}",
        "The supplier's side. What stands here as received has reached the supplier, whatever the agent knows.",
        (f'<p class="card">{escape(said)}</p>' if said else "")
        + (book or '<p class="card">No order of this number has been received.</p>')
        + (f"<h2>Play the supplier</h2>{forms}" if forms else ""),
    )
