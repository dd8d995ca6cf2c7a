"""An agent in twenty lines: start it beside `make run` (REHYDRATE_URL, REHYDRATE_KEY) and look into the inbox."""

from rehydrate.client import Effect, Ledger

ledger = Ledger()  # REHYDRATE_URL, REHYDRATE_KEY


def send_mail(e):  # the outside: e.key is the idempotency key, e.arguments is what was approved
    print("sending", e.arguments, "under", e.key)
    return {"id": "msg-1"}


@ledger.flow("newsletter")  # called from the top whenever the run may go on
def newsletter(run):
    run.checkpoint("draft", ref=f"file:///tmp/{run.external_id}.txt")
    send = Effect("mail.send", {"to": "all", "text": "Good news!"}, impact="customer_promise")
    answer = run.ask("send-it", "Send the newsletter to all readers?", effect=send, due="1d", on_reject="continue")
    if not answer.approved:  # a no, or nobody answered
        return f"not sent: {answer.reason or answer.status}"
    return run.effect(send, do=send_mail)["id"]  # once, however often this process dies


if __name__ == "__main__":
    ledger.open("newsletter", "newsletter-1", title="The first newsletter")
    ledger.work()  # on any number of machines; Ctrl-C and SIGTERM are clean
