"""`rehydrate doctor URL`: does an agent on this machine reach its ledger, with a right key, clock and receiver?

Each finding says what was seen and, where something is wrong, what to do. Nothing is changed on the server.
"""

from __future__ import annotations

import argparse
import base64
import binascii
import hashlib
import hmac
import ipaddress
import os
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import httpx

from rehydrate import __version__
from rehydrate.client.transport import API, is_loopback

Json = dict[str, Any]

# A receiver refuses what was signed more than five minutes off (Standard Webhooks); long before that, a deadline that
# an agent gives as a point in time means another one to the server.
CLOCKS_APART = 5.0
PRIVATE = "REHYDRATE_ALLOW_PRIVATE_TARGETS=1"
TIMEOUT = httpx.Timeout(10.0, connect=5.0)


@dataclass(frozen=True)
class Finding:
    """What one check saw: `ok`, or what to `do`. Neither: worth knowing, and nothing wrong."""

    check: str
    saw: str
    ok: bool = True
    do: str = ""

    def __str__(self) -> str:
        mark = ("ok  " if not self.do else "note") if self.ok else "FAIL"
        return f"{mark}  {self.check:<8}  {self.saw}" + (f"\n                -> {self.do}" if self.do else "")


def wrong(check: str, saw: str, do: str) -> Finding:
    return Finding(check, saw, ok=False, do=do)


def main(words: Sequence[str] | None = None) -> int:
    """Prints the findings; 0 when nothing is wrong, else 1."""
    parser = argparse.ArgumentParser(
        prog="rehydrate doctor", description="Is everything in place for an agent on this machine? Says what to do."
    )
    parser.add_argument("url", nargs="?", default=os.environ.get("REHYDRATE_URL"), help="default: REHYDRATE_URL")
    parser.add_argument("--key", default=os.environ.get("REHYDRATE_KEY"), help="default: REHYDRATE_KEY")
    parser.add_argument("--flow", action="append", default=[], help="a flow that this agent serves; may be repeated")
    parser.add_argument("--webhook", metavar="URL", help="a receiver (deliver_to) to try from this machine")
    parser.add_argument(
        "--secret",
        default=os.environ.get("WEBHOOK_SECRET"),
        help="whsec_..., to sign the trial; default: WEBHOOK_SECRET",
    )
    options = parser.parse_args(words)
    if not options.url:
        parser.error("name the server's address, or set REHYDRATE_URL")
    healthy = True
    for finding in examine(options.url, options.key, options.flow, options.webhook, options.secret):
        print(finding, flush=True)
        healthy = healthy and finding.ok
    print("All is well." if healthy else "Something is to be done: see the lines with FAIL.")
    return 0 if healthy else 1


def examine(
    url: str, key: str | None, flows: Sequence[str] = (), webhook: str | None = None, secret: str | None = None
) -> Iterator[Finding]:
    """The findings one by one, the ones that others depend on first."""
    url = url.rstrip("/").removesuffix(API)
    with httpx.Client(base_url=url, timeout=TIMEOUT, trust_env=not is_loopback(url)) as http:
        yield from _server(http, url, key, flows)
    if webhook:
        yield from _receiver(webhook, secret)


# --- the server ----------------------------------------------------


def _server(http: httpx.Client, url: str, key: str | None, flows: Sequence[str]) -> Iterator[Finding]:
    asked = time.time()
    answer = _reached(lambda: http.get("/healthz"), "server", url)
    if isinstance(answer, Finding):
        yield answer
        return
    answered = time.time()
    version = _json(answer).get("version")
    if not version:
        saw = f"{url} answers {answer.status_code}, but it is not Rehydrate: {answer.text[:80]!r}"
        yield wrong("server", saw, "Give the address that `make run` prints, without a path; ask who runs the proxy.")
        return
    yield Finding("server", f"{url} answers")
    yield _version(str(version))
    yield _readiness(http)
    yield _clocks(answer.headers.get("date"), asked, answered)
    yield from _key(http, key, flows)


def _version(server: str) -> Finding:
    saw = f"server {server}, client {__version__}"
    if server.split(".")[0] != __version__.split(".")[0]:
        return wrong("version", saw, f"Their majors differ: pip install 'rehydrate=={server}'.")
    if server != __version__:
        return Finding("version", saw, do=f"They fit; to have the same: pip install 'rehydrate=={server}'.")
    return Finding("version", saw)


def _readiness(http: httpx.Client) -> Finding:
    answer = _reached(lambda: http.get("/readyz"), "ready", str(http.base_url))
    if isinstance(answer, Finding):
        return answer
    if answer.status_code == 200:
        return Finding("ready", "its database answers, and its timers go on")
    problems = [problem.get("message", "") for problem in _json(answer).get("problems") or []]
    return wrong(
        "ready",
        " ".join(problems) or f"/readyz answers {answer.status_code}",
        "It mends itself when it can; if this lasts, whoever runs the server looks at its log.",
    )


def _clocks(date: str | None, asked: float, answered: float) -> Finding:
    """By the answer's Date header, which has whole seconds (RFC 9110)."""
    if date is None:
        return Finding(
            "clock", "the server's answer has no date", do="A proxy takes it away: compare the clocks yourself."
        )
    theirs = parsedate_to_datetime(date).timestamp()
    apart = max(theirs - answered, asked - (theirs + 1), 0.0)
    if apart <= CLOCKS_APART:
        return Finding("clock", "this machine and the server agree on the time")
    which = "behind" if theirs > answered else "ahead of"
    return wrong(
        "clock",
        f"this machine is {apart:.0f} s {which} the server",
        "Set both by NTP (timedatectl set-ntp true): deadlines and webhook signatures depend on the time of day.",
    )


def _key(http: httpx.Client, key: str | None, flows: Sequence[str]) -> Iterator[Finding]:
    issue = (
        "On the server: manage.py issue_key agent --workspace default --name NAME; set REHYDRATE_KEY to what it prints."
    )
    if not key:
        yield wrong("key", "there is none", issue)
        return
    headers = {"Authorization": f"Bearer {key}"}
    answer = _reached(lambda: http.get(f"{API}/me", headers=headers), "key", str(http.base_url))
    if isinstance(answer, Finding):
        yield answer
        return
    me = _json(answer)
    if answer.status_code != 200 or "kind" not in me:
        yield wrong("key", str(me.get("detail") or f"{API}/me answers {answer.status_code}"), issue)
        return
    if me["kind"] != "agent":
        yield wrong("key", f"this is the key of a person, {me['name']}; only agents move runs on", issue)
        return
    allowed = me["flows"]
    workspace = me["workspaces"][0]["name"]
    may = "every flow" if "*" in allowed else ", ".join(allowed)
    yield Finding("key", f"agent {me['name']} of the workspace {workspace} may use {may}")
    for flow in flows:
        if "*" not in allowed and flow not in allowed:
            do = f"On the server: manage.py issue_key agent --workspace {workspace} --name {me['name']} --flow {flow}."
            yield wrong("flow", f"this key may not use {flow}", do)
    yield from _deliveries(http, headers, flows)


def _deliveries(http: httpx.Client, headers: dict[str, str], flows: Sequence[str]) -> Iterator[Finding]:
    """How the server's own deliveries to the receivers of this key's flows went, by the newest to each."""
    answer = _reached(
        lambda: http.get(f"{API}/deliveries", headers=headers, params={"limit": 200}), "webhook", str(http.base_url)
    )
    if isinstance(answer, Finding):
        yield answer
        return
    newest: dict[str, Json] = {}
    for delivery in _json(answer).get("results") or []:
        if not flows or delivery["flow"] in flows:
            newest.setdefault(delivery["receiver"]["id"], delivery)
    if not newest:
        do = "Polling needs none. To be woken, give the flow a deliver_to; --webhook URL tries a receiver from here."
        yield Finding("webhook", "nothing has been delivered to a receiver of this key's flows", do=do)
    for delivery in newest.values():
        receiver, flow = delivery["receiver"], delivery["flow"]
        where = f"{flow}: {receiver['url'] or 'its receiver'}"
        if receiver["switched_off_at"]:
            why = receiver["switched_off_why"] or "by hand"
            yield wrong(
                "webhook", f"{where} is switched off ({why})", "Switch it on again on the console's page Deliveries."
            )
        elif receiver["failures"]:
            saw = f"{where} did not take the last {receiver['failures']}: {delivery['last_error'] or 'no answer'}"
            yield wrong("webhook", saw, _ADVICE.get(str(delivery["last_error"]), _ADVICE[""]))
        else:
            yield Finding("webhook", f"{where} takes what is delivered")


# What is to be done about a delivery that failed, by its stable code.
_ADVICE = {
    "": "Look at its attempts on the console's page Deliveries, mend the receiver, and send it again there.",
    "connect_failed": "Nothing listens there, or a firewall is between: start the receiver, and open the way.",
    "timeout": "It has ten seconds: answer 204 at once, and do the work afterwards.",
    "tls_failed": "Its certificate does not hold: renew it, or give the whole chain.",
    "unresolvable": "Its name has no address for the server: mend the DNS entry or the flow's deliver_to.",
    "target_refused": "The server delivers to the open net only, unless its operator sets " + PRIVATE + ".",
    "http_401": "It does not take the signature: give it the secret that `apply` printed, or rotate it.",
}


# --- a receiver, from here ----------------------------------------------------


def _receiver(url: str, secret: str | None) -> Iterator[Finding]:
    """What it makes of a trial that a stranger has signed, and of one with its secret: only that may be taken."""
    with httpx.Client(timeout=TIMEOUT, trust_env=not is_loopback(url)) as http:
        answer = _reached(lambda: _trial(http, url, None), "webhook", url)
        if isinstance(answer, Finding):
            yield answer
            return
        if answer.status_code in (404, 405) or answer.status_code >= 500:
            saw = f"{url} answers {answer.status_code} to a POST"
            yield wrong("webhook", saw, "Give the path that takes POSTs; docs/receiver_snippet.py is a whole receiver.")
            return
        if answer.is_success:
            saw = f"{url} takes what a stranger has signed"
            yield wrong(
                "webhook", saw, "Verify each delivery, or anybody can wake the agent: docs/receiver_snippet.py."
            )
        else:
            yield Finding("webhook", f"{url} is reached, and refuses what a stranger has signed ({answer.status_code})")
        if secret:
            yield _signed(http, url, secret)
    if _inside(url):
        do = f"The server delivers there only if its operator sets {PRIVATE}."
        yield Finding("webhook", f"{urlsplit(url).hostname} is an address on an inside network", do=do)


def _signed(http: httpx.Client, url: str, secret: str) -> Finding:
    try:
        key = base64.b64decode(secret.removeprefix("whsec_"), validate=True)
    except binascii.Error:
        return wrong(
            "webhook", "the secret is not whsec_ and base64", "Give the one that `apply` printed, or rotate it."
        )
    answer = _reached(lambda: _trial(http, url, key), "webhook", url)
    if isinstance(answer, Finding):
        return answer
    if answer.is_success:
        return Finding("webhook", f"{url} takes what is signed with this secret")
    saw = f"{url} answers {answer.status_code} to what is signed with this secret"
    return wrong("webhook", saw, "Give the receiver the same secret, and let it pass over types that it does not know.")


def _trial(http: httpx.Client, url: str, key: bytes | None) -> httpx.Response:
    """A message of a type that wakes nobody, signed as Standard Webhooks says; by a stranger when no key is given."""
    at = datetime.now(UTC)
    body = f'{{"type":"doctor.trial","timestamp":"{at.isoformat()}","data":{{}}}}'
    message, seconds = f"msg_{uuid.uuid4().hex}", str(int(at.timestamp()))
    digest = hmac.digest(key or os.urandom(24), f"{message}.{seconds}.{body}".encode(), hashlib.sha256)
    headers = {
        "Content-Type": "application/json",
        "webhook-id": message,
        "webhook-timestamp": seconds,
        "webhook-signature": f"v1,{base64.b64encode(digest).decode()}",
    }
    return http.post(url, content=body, headers=headers)


def _inside(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return any(not ipaddress.ip_address(str(address).partition("%")[0]).is_global for address in found)


# --- over the wire ----------------------------------------------------


def _reached(ask: Callable[[], httpx.Response], check: str, url: str) -> httpx.Response | Finding:
    """The answer; or what kept it away, and what to do about that."""
    try:
        return ask()
    except (httpx.UnsupportedProtocol, httpx.InvalidURL):
        return wrong(check, f"{url} is no http address", "Write it as https://ledger.example or http://127.0.0.1:8000.")
    except httpx.ConnectTimeout:
        return wrong(
            check, f"{url} cannot be connected to", "A firewall drops it, or the address is wrong: ask who runs it."
        )
    except httpx.ConnectError as error:
        return wrong(check, f"{url}: {error}", _way(error))
    except httpx.TimeoutException:
        return wrong(check, f"{url} does not answer", "It is overloaded or hangs: look at its log, start it again.")
    except httpx.TransportError as error:
        return wrong(
            check, f"{url}: {error or type(error).__name__}", "What listens there does not speak HTTP like this."
        )


def _way(error: httpx.ConnectError) -> str:
    said = str(error)
    if "CERTIFICATE" in said or "SSL" in said:
        return "Its certificate does not hold here: renew it, or let this machine trust its signer (SSL_CERT_FILE)."
    if "Name or service" in said or "name resolution" in said or "nodename" in said:
        return "The name has no address here: check how it is written, and this machine's DNS."
    return "Nothing listens there: start the server (make run), or give the address that it printed."


def _json(answer: httpx.Response) -> Json:
    try:
        found = answer.json()
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


if __name__ == "__main__":
    sys.exit(main())
