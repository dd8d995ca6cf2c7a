"""An agent that is woken over the net: its flow's `deliver_to` leads here, and `apply` printed WEBHOOK_SECRET once."""

import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from agent_snippet import ledger  # the agent of the other page
from standardwebhooks import Webhook, WebhookVerificationError

webhook = Webhook(os.environ["WEBHOOK_SECRET"])  # whsec_...


class Receiver(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        try:
            told = webhook.verify(body, dict(self.headers))  # also refuses what was signed long ago
        except WebhookVerificationError:
            return self.answer(401)
        self.answer(204)  # at once: a delivery only wakes, and may come twice
        if told["type"] in ("run.ready", "run.compensating"):
            Thread(target=ledger.work_once).start()  # claims what is ready; the ledger decides

    def answer(self, status):
        self.send_response(status)
        self.end_headers()


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Receiver).serve_forever()
