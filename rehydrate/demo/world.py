"""The outside world as an HTTP service: systems that do what is asked, count it, and can be slow, fail, or not answer.

    POST /{system}/{action}     do something; Idempotency-Key, X-Callback-Url, X-Answers-After
                                (X-World-Mode: slow:20 and the like, for this request only)
    GET  /lookup?key=           what was done under a key, or 404
    GET  /journal, /counts      everything that arrived; how often each key was really done
    POST /modes                 {system, action, mode, seconds, times}
    GET  /, /runs/..., /records/..., /documents/..., /play/...    pages for people

It knows nothing of the ledger: it calls back to whatever URL it was given.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

import httpx

from rehydrate.demo import pages, scenarios
from rehydrate.demo.journal import Journal

log = logging.getLogger("rehydrate.demo.world")

Json = dict[str, Any]

# Systems that do a request with a known key once only. The others do it again when they are asked again, as many do.
HONOURS_KEYS = frozenset({"mail", "erp", "cms"})
MODES = frozenset({"normal", "slow", "slow_before", "fail", "refuse", "lose_answer"})
# What numbers look like, by system: the receipt's id.
NUMBERS = {"crm": "CRM", "esign": "ENV", "mail": "MSG", "erp": "ERP", "supplier": "SO", "payments": "PAY", "cms": "WEB"}
MAX_BODY = 256 * 1024


class World:
    """The service; `port` 0 takes a free one. `latency` is how long doing something takes at least."""

    def __init__(
        self,
        folder: Path,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        latency: float = 0.0,
        public_url: str | None = None,
        lose_first: tuple[str, ...] = (),
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.journal = Journal(folder / "world.sqlite3")
        self.latency = latency
        if self.journal.new:
            for action in lose_first:
                system, name = action.split(".", 1)
                self.journal.set_mode(system, name, "lose_answer", 0, 1)
        self._server = _Server((host, port), self)
        self.port: int = self._server.server_address[1]
        self.url = (public_url or f"http://{host}:{self.port}").rstrip("/")
        self.stopping = threading.Event()
        self._wake = threading.Condition()
        self._threads = [
            threading.Thread(target=self._server.serve_forever, args=(0.1,), name="world", daemon=True),
            threading.Thread(target=self._call_back, name="callbacks", daemon=True),
        ]

    def start(self) -> World:
        for thread in self._threads:
            thread.start()
        return self

    def stop(self) -> None:
        self.stopping.set()
        self.wake()
        self._server.shutdown()
        self._server.server_close()
        for thread in self._threads:
            thread.join(timeout=5)
        self.journal.close()

    def wake(self) -> None:
        with self._wake:
            self._wake.notify_all()

    # --- doing things ------------------------------------------------

    def do(
        self, system: str, action: str, key: str, arguments: Json, *, callback_url: str | None, after: float | None
    ) -> Json:
        def make(n: int) -> Json:
            return {
                "id": f"{NUMBERS.get(system, system.upper()[:4])}-{1000 + n}",
                "status": "done",
                "url": f"{self.url}/records/{n}",
            }

        result = self.journal.take(system, action, key, arguments, honours_key=system in HONOURS_KEYS, make=make)
        if callback_url:
            self._expect(system, arguments, callback_url, after)
        return result

    def _expect(self, system: str, arguments: Json, url: str, after: float | None) -> None:
        """Somebody was given an address to answer to: the customer, or a supplier."""
        if system == "mail":
            body = {"documents": ", ".join(arguments.get("documents", [])), "note": "Here is what you asked for."}
            self.journal.add_callback(
                "customer", str(arguments.get("case")), url, details=arguments, body=body, after=after
            )
        else:
            order = str(arguments.get("order"))
            self.journal.add_callback(
                "supplier", order, url, details=arguments, body=_confirmation("yes", order), after=after
            )
        self.wake()

    def _call_back(self) -> None:
        with httpx.Client(timeout=10, trust_env=False) as http:
            while not self.stopping.is_set():
                callback, pause = self.journal.due_callback()
                if callback is None:
                    with self._wake:
                        if not self.stopping.is_set():
                            self._wake.wait(min(pause, 5.0))
                    continue
                self.send_callback(http, callback)

    def send_callback(self, http: httpx.Client, callback: Json) -> None:
        """One try; what does not arrive is tried again later under the same id."""
        try:
            answer = http.post(callback["url"], json=callback["body"], headers={"webhook-id": callback["webhook_id"]})
        except httpx.HTTPError as error:
            log.info("callback about %s not delivered: %s", callback["subject"], error)
            return
        if answer.status_code < 300:
            self.journal.answered_callback(callback["n"], "It was taken.")
        elif answer.status_code < 500 and answer.status_code not in (408, 425, 429):
            self.journal.answered_callback(callback["n"], f"It was not taken any more ({answer.status_code}).")


def _confirmation(confirmed: str, order: str) -> Json:
    if confirmed == "yes":
        delivery = datetime.now(UTC).date() + timedelta(days=14)
        return {"order": order, "confirmed": True, "delivery_date": delivery.isoformat()}
    return {"order": order, "confirmed": False, "reason": "We cannot deliver this."}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], world: World) -> None:
        self.world = world
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "world"
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)

    # --- reading -----------------------------------------------------

    def do_GET(self) -> None:
        world, journal = self.server.world, self.server.world.journal
        address = urlsplit(self.path)
        parts = [unquote(part) for part in address.path.strip("/").split("/") if part]
        query = {name: values[-1] for name, values in parse_qs(address.query).items()}
        match parts:
            case []:
                self._html(pages.overview(journal.requests(), journal.callbacks(), journal.modes(), journal.counts()))
            case ["healthz"]:
                self._json({"ok": True})
            case ["journal"]:
                self._json({"requests": journal.requests(key=query.get("key"), run=query.get("run"), limit=10_000)})
            case ["counts"]:
                self._json(journal.counts())
            case ["lookup"]:
                found = journal.look_up(query.get("key", ""))
                self._json(found or {"detail": "Nothing was done under this key."}, status=200 if found else 404)
            case ["records", number] if number.isdigit() and (request := journal.request(int(number))):
                self._html(pages.record(request))
            case ["runs", flow, run]:
                self._html(pages.of_run(f"{flow}/{run}", journal.requests(run=f"{flow}/{run}")))
            case ["documents", flow, run] if flow in scenarios.FLOWS:
                self._html(pages.document(scenarios.title(flow, run), scenarios.document(flow, run)))
            case ["play", "customer", subject]:
                self._html(pages.customer(subject, journal.callbacks(kind="customer", subject=subject)))
            case ["play", "supplier", subject]:
                self._html(self._supplier_page(subject))
            case _:
                self._html(pages.page("Not here", "The outside world", f"<p>{world.url}</p>"), status=404)

    def _supplier_page(self, subject: str, *, said: str = "") -> str:
        journal = self.server.world.journal
        orders = [r for r in journal.requests() if r["system"] == "supplier" and r["arguments"].get("order") == subject]
        return pages.supplier(subject, orders, journal.callbacks(kind="supplier", subject=subject), said=said)

    # --- doing -------------------------------------------------------

    def do_POST(self) -> None:
        world = self.server.world
        body = self._body()
        if body is None:
            return
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/") if part]
        match parts:
            case ["modes"]:
                self._set_mode(body)
            case ["play", "customer" | "supplier" as kind, subject]:
                self._play(kind, subject, body)
            case [system, action]:
                self._do(world, system, action, body)
            case _:
                self._json({"detail": "Not here."}, status=404)

    def _do(self, world: World, system: str, action: str, arguments: Json) -> None:
        key = self.headers.get("Idempotency-Key", "")
        mode, _, seconds = self.headers.get("X-World-Mode", "").partition(":")
        wait = float(seconds or 20)
        if not mode:
            mode, wait = world.journal.use_mode(system, action)
        world.stopping.wait(world.latency)
        if mode == "fail":
            self._json({"detail": "Not available; nothing was done."}, status=503)
            return
        if mode == "refuse":
            world.journal.refuse(system, action, key, arguments, "It was told to refuse.")
            self._json({"detail": "Refused; nothing was done."}, status=422)
            return
        if mode == "slow_before":
            world.stopping.wait(wait)
        after = self.headers.get("X-Answers-After", "")
        result = world.do(
            system,
            action,
            key,
            arguments,
            callback_url=self.headers.get("X-Callback-Url"),
            after=float(after) if after.replace(".", "", 1).isdigit() else None,
        )
        if mode == "slow":
            world.stopping.wait(wait)
        if mode == "lose_answer":
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self._json(result, status=200 if result.get("repeated") else 201)

    def _set_mode(self, body: Json) -> None:
        mode = str(body.get("mode", "normal"))
        if mode not in MODES:
            self._json({"detail": f"A mode is one of {', '.join(sorted(MODES))}."}, status=422)
            return
        try:
            times = int(body["times"]) if body.get("times") not in (None, "") else None
            seconds = float(body.get("seconds") or 20)
        except ValueError:
            self._json({"detail": "`seconds` and `times` are numbers."}, status=422)
            return
        self.server.world.journal.set_mode(
            str(body.get("system", "*")), str(body.get("action", "*")), mode, seconds, times
        )
        self._see_other("/")

    def _play(self, kind: str, subject: str, body: Json) -> None:
        world = self.server.world
        number = str(body.get("callback", ""))
        mine = {str(c["n"]): c for c in world.journal.callbacks(kind=kind, subject=subject)}
        if number not in mine:
            self._html(pages.page("Not here", "The outside world", "<p>There is nothing to answer.</p>"), status=404)
            return
        if kind == "customer":
            said = {"documents": str(body.get("documents", "")), "note": str(body.get("note", ""))[:1000]}
        else:
            said = _confirmation(str(body.get("confirmed", "yes")), subject)
        if mine[number]["answer"] is None:
            world.journal.send_callback(int(number), said)
            world.wake()
        text = "Sent. The run goes on within a few seconds."
        if kind == "customer":
            self._html(pages.customer(subject, [], said=text))
        else:
            self._html(self._supplier_page(subject, said=text))

    # --- plumbing ----------------------------------------------------

    def _body(self) -> Json | None:
        """A JSON object or a form; answers itself, and gives None, when it is neither."""
        try:
            length = int(self.headers.get("Content-Length") or 0)
        except ValueError:
            length = -1
        if not 0 <= length <= MAX_BODY:
            self.close_connection = True
            self._json({"detail": "A body has a length, of at most 256 KiB."}, status=413)
            return None
        raw = self.rfile.read(length)
        if "form-urlencoded" in self.headers.get("Content-Type", ""):
            return {name: values[-1] for name, values in parse_qs(raw.decode("utf-8", "replace")).items()}
        try:
            body = json.loads(raw or b"{}")
        except ValueError:
            body = None
        if not isinstance(body, dict):
            self._json({"detail": "The body is no JSON object."}, status=400)
            return None
        return body

    def _json(self, body: Json, *, status: int = 200) -> None:
        self._send(status, "application/json", json.dumps(body).encode())

    def _html(self, text: str, *, status: int = 200) -> None:
        self._send(status, "text/html; charset=utf-8", text.encode())

    def _see_other(self, where: str) -> None:
        self.send_response(HTTPStatus.SEE_OTHER)
        self.send_header("Location", quote(where))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send(self, status: int, kind: str, body: bytes) -> None:
        try:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # whoever asked has gone, such as an agent that was killed
