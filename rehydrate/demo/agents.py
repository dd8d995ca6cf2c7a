"""The four flows of the demo as agents: what they do, ask and wait for. Each is served by a process of its own."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from functools import partial
from typing import Any

from rehydrate.client import Answer, Callback, Effect, EffectCall, Ledger, LedgerError, Run, Timer, Unreachable
from rehydrate.demo import scenarios
from rehydrate.demo.outside import Outside

log = logging.getLogger("rehydrate.demo")

Json = dict[str, Any]

# How long a supplier may keep silent before a buyer is asked. Days in earnest; a demo's visitor does not wait for days.
SUPPLIER_PATIENCE = 45
# A new run is opened when all of a flow have ended, looked at this often.
NEW_RUN_EVERY = 30.0
REQUESTER = "carol"


class Agent:
    """One flow's agent: its function, its undo functions, and the runs that it opens."""

    def __init__(
        self, flow: str, ledger: Ledger, outside: Outside, *, supplier_patience: int = SUPPLIER_PATIENCE
    ) -> None:
        self.flow = flow
        self.ledger = ledger
        self.outside = outside
        self.supplier_patience = supplier_patience
        functions: dict[str, Callable[[Run], Any]] = {
            "contract-approval": self.contract_approval,
            "after-sales": self.after_sales,
            "purchasing": self.purchasing,
            "operations": self.operations,
        }
        ledger.flow(flow, version="1")(functions[flow])
        undo_functions = {
            "crm.delete_draft": self.take_back,
            "erp.cancel_order": self.take_back,
            "supplier.cancel_order": self.take_back,
            "cms.delete_preview": self.take_back,
            "cms.restore_prices": self.take_back,
        }
        for action, function in undo_functions.items():
            ledger.undo(action)(function)

    def take_back(self, effect: EffectCall) -> Json:
        """Undo something: the outside is told the number that it gave for it."""
        undone = (effect.receipt or {}).get("id")
        arguments = {**effect.arguments, "undoes": undone} if undone else effect.arguments
        return self.outside.do(
            EffectCall(key=effect.key, action=effect.action, arguments=arguments, run_id=effect.run_id)
        )

    # --- contract approval: legal decides, with conditions if need be -----------------------------------------

    def contract_approval(self, run: Run) -> Json:
        deal = scenarios.contract(run.external_id)
        paper = self._begin(run, "draft", "Put the draft into the customer file", "Ask legal", "Send it for signature")
        basics = {"contract": run.external_id, "customer": deal.customer}
        run.effect(
            "crm.create_draft",
            {**basics, "subject": deal.subject},
            resource=run.external_id,
            undo=("crm.delete_draft", basics),
            do=self.outside.do,
        )
        send = Effect(
            "esign.send",
            {
                **basics,
                "email": deal.email,
                "amount": deal.amount,
                "currency": deal.currency,
                "payment_days": deal.payment_days,
                "message": f"Please sign the contract “{deal.subject}”.",
            },
            resource=run.external_id,
        )
        answer = run.ask(
            "legal-approval",
            f"Send the contract “{deal.subject}” over {_money(deal.amount, deal.currency)} to {deal.customer} "
            "for signature?",
            effect=send,
            due="2d",
            on_timeout="escalate",
            risk="medium",
            details={
                "Customer": deal.customer,
                "Price": _money(deal.amount, deal.currency),
                "To be paid within": f"{deal.payment_days} days",
                "Different from our standard": deal.unusual,
            },
            schema={
                "type": "object",
                "properties": {
                    "amount": {"type": "string", "title": "Price", "pattern": r"^[0-9]{1,9}\.[0-9]{2}$"},
                    "payment_days": {"type": "integer", "title": "Days to pay", "minimum": 7, "maximum": 90},
                    "message": {"type": "string", "title": "Message to the customer", "maxLength": 500},
                },
            },
            choices=["approve", "approve_with_conditions", "edit", "reject"],
            reasons=["The price is too high", "The terms are not ours", "The wrong customer"],
            rationale=(
                "Sales and the customer agree on these terms; once it is sent, the customer can sign and we are bound. "
                "You may change the price, the days and the message, or approve on a condition that has to hold when "
                "it is sent, such as an amount of at most 50000.00."
            ),
            evidence=[("The contract in brief", paper)],
            rollback="Nothing has gone to the customer yet. If you say no, the draft leaves the customer file.",
        )
        if not answer.authorised:
            return {"outcome": "not sent", "why": answer.reason or answer.status}
        send = within(send, answer.conditions)
        run.checkpoint("sign", ref=paper, next=["Send it for signature", "Note that it went out"])
        sent = run.effect(send, do=self.outside.do)
        run.effect("crm.mark_sent", {**basics, "envelope": sent["id"]}, resource=run.external_id, do=self.outside.do)
        return {"outcome": "sent for signature", "envelope": sent["id"]}

    # --- after-sales: the customer's documents come by callback URL ---------------------------------------------

    def after_sales(self, run: Run) -> Json:
        case = scenarios.case(run.external_id)
        paper = self._begin(run, "case", "Ask the customer for documents", "Ask support about the refund", "Refund")
        basics = {"case": run.external_id, "customer": case.customer, "product": case.product}
        run.effect(
            "crm.open_case",
            {**basics, "complaint": case.complaint},
            resource=run.external_id,
            do=self.outside.do,
        )
        page = self.outside.page("play", "customer", run.external_id)
        documents = run.open(
            Callback(
                "customer-documents",
                "3d",
                on_timeout="resume",
                who=f"{case.customer}, the customer: {' and '.join(case.wanted)}. You can play the customer: {page}",
            )
        )
        run.effect(
            "mail.ask_for_documents",
            {**basics, "email": case.email, "documents": list(case.wanted)},
            resource=run.external_id,
            do=partial(self.outside.do, callback_url=documents.url, answers_after=case.answers_after),
        )
        run.external_ref("shop", "customer's page", run.external_id, url=page)
        run.checkpoint("documents", ref=paper, next=["Wait for the documents", "Ask support about the refund"])
        sent = run.wait_for(documents)
        if not sent.satisfied:
            self._close(run, basics, case, "We have not heard from you, so we have closed your case.")
            return {"outcome": "closed, the customer did not answer"}

        run.checkpoint("refund", ref=paper, next=["Ask support about the refund", "Refund", "Tell the customer"])
        refund = Effect(
            "payments.refund",
            {**basics, "order": case.order, "amount": case.refund, "currency": case.currency},
            resource=case.order,
            amount=(case.refund, case.currency),
        )
        payload = sent.payload if isinstance(sent.payload, dict) else {}
        answer = run.ask(
            "refund-approval",
            f"Refund {_money(case.refund, case.currency)} to {case.customer} for the {case.product}?",
            effect=refund,
            due="2d",
            on_timeout="escalate",
            on_reject="continue",
            risk="medium",
            details={
                "Complaint": case.complaint,
                "The customer sent": str(payload.get("documents") or "documents"),
                "And wrote": str(payload.get("note") or "nothing"),
                "Bought as": case.order,
            },
            choices=["approve", "reject"],
            reasons=["The damage is not covered", "The documents do not fit the order", "Repair it instead"],
            rationale="The product is within its warranty, and the documents that we asked for are here.",
            evidence=[("The case in brief", paper), ("The customer's page", page)],
            rollback="A refund cannot be called back. If you say no, no money moves; the customer is told your reason.",
        )
        if answer.authorised:
            paid = run.effect(refund, do=self.outside.do, lookup=self.outside.find)
            self._close(run, basics, case, f"We have refunded {_money(case.refund, case.currency)}.")
            return {"outcome": "refunded", "payment": paid["id"]}
        self._close(run, basics, case, f"We cannot refund this. {answer.reason or ''}".strip())
        return {"outcome": "not refunded", "why": answer.reason or answer.status}

    def _close(self, run: Run, basics: Json, case: scenarios.Case, text: str) -> None:
        run.checkpoint("close", next=["Tell the customer", "Close the case"])
        run.effect("mail.tell_customer", {**basics, "email": case.email, "text": text}, do=self.outside.do)
        run.effect("crm.close_case", basics, resource=run.external_id, do=self.outside.do)

    # --- purchasing: the supplier's callback, with a timer against it ---------------------------------------------

    def purchasing(self, run: Run) -> Json:
        order = scenarios.order(run.external_id)
        paper = self._begin(run, "order", "Place the order", "Wait for the supplier to confirm it", "Enter the date")
        page = self.outside.page("play", "supplier", run.external_id)
        run.external_ref("supplier", "order book", run.external_id, url=page)
        basics = {"order": run.external_id, "item": order.item, "quantity": order.quantity}
        run.effect(
            "erp.create_order",
            {**basics, "supplier": order.supplier},
            resource=run.external_id,
            undo=("erp.cancel_order", {"order": run.external_id}),
            do=self.outside.do,
        )
        confirmation = run.open(self._confirmation(order.supplier, page, due="7d"))
        self._place(run, basics, order.supplier, order.total, order, confirmation.url, order.confirms_after)
        run.checkpoint("ordered", ref=paper, next=["Wait for the supplier to confirm", "Ask a buyer when it is late"])
        said, _late = run.pause(
            confirmation,
            Timer("supplier-late", self.supplier_patience),
            resume_when="any",
        )
        if not said.satisfied:
            said = self._supplier_is_late(run, order, basics, paper, page)

        confirmed = said.payload if isinstance(said.payload, dict) else {}
        if not confirmed.get("confirmed"):
            run.cancel(str(confirmed.get("reason") or "The supplier declined the order."))
        run.checkpoint("confirmed", ref=paper, next=["Enter the delivery date in the books"])
        date = str(confirmed.get("delivery_date") or "not said")
        run.effect(
            "erp.confirm_order",
            {"order": run.external_id, "delivery_date": date},
            resource=run.external_id,
            do=self.outside.do,
        )
        return {"outcome": "confirmed", "delivery_date": date}

    def _supplier_is_late(self, run: Run, order: scenarios.Order, basics: Json, paper: str, page: str) -> Answer:
        """A buyer says whether to go to the second supplier or to write to the first; then that one's confirmation."""
        run.checkpoint("late", ref=paper, next=["Ask a buyer", "Cancel and order elsewhere, or remind the supplier"])
        cancel = Effect(
            "supplier.cancel_order",
            {"order": run.external_id, "supplier": order.supplier},
            resource=run.external_id,
        )
        answer = run.ask(
            "late-supplier",
            f"{order.supplier} has not confirmed order {run.external_id}. Cancel it there and order from "
            f"{order.second_supplier} instead?",
            effect=cancel,
            due="1d",
            on_timeout="escalate",
            risk="medium",
            details={
                "Ordered": f"{order.quantity} × {order.item}",
                f"Price at {order.supplier}": _money(order.total, order.currency),
                f"Price at {order.second_supplier}": _money(order.second_total, order.currency),
                "If you approve": f"It is cancelled at {order.supplier} and ordered from {order.second_supplier}.",
                "If you answer": f"Your words go to {order.supplier} as a reminder, and we wait one more day.",
                "If you reject": "The order is cancelled everywhere, and that is the end of it.",
            },
            response_schema={
                "type": "object",
                "properties": {
                    "reminder": {
                        "type": "string",
                        "title": f"Reminder to {order.supplier}",
                        "description": "They get it word for word.",
                        "minLength": 1,
                        "maxLength": 500,
                    },
                },
                "required": ["reminder"],
            },
            choices=["approve", "respond", "reject"],
            reasons=["We do not need it any more", "Both are too expensive"],
            rationale=f"The supplier had {self.supplier_patience} seconds to confirm; in earnest it would be days.",
            evidence=[("The order in brief", paper), ("The supplier's order book", page)],
            rollback="A cancelled order has to be placed again. The second supplier can deliver at once.",
        )
        next_supplier = order.second_supplier if answer.authorised else order.supplier
        again = run.open(self._confirmation(next_supplier, page, due="1d"))
        if answer.authorised:
            run.effect(cancel, do=self.outside.do)
            self._place(run, basics, order.second_supplier, order.second_total, order, again.url, 10)
        else:
            response = answer.response if isinstance(answer.response, dict) else {}
            text = str(response.get("reminder") or answer.comment or "Please confirm our order.")
            run.effect(
                "supplier.remind",
                {"order": run.external_id, "supplier": order.supplier, "text": text},
                resource=run.external_id,
                do=partial(self.outside.do, callback_url=again.url, answers_after=10),
            )
        run.checkpoint("reordered", ref=paper, next=["Wait for the supplier to confirm"])
        return run.wait_for(again)

    def _place(
        self,
        run: Run,
        basics: Json,
        supplier: str,
        total: str,
        order: scenarios.Order,
        callback_url: str | None,
        answers_after: int | None,
    ) -> None:
        run.effect(
            "supplier.place_order",
            {**basics, "supplier": supplier},
            resource=run.external_id,
            amount=(total, order.currency),
            undo=("supplier.cancel_order", {"order": run.external_id, "supplier": supplier}),
            do=partial(self.outside.do, callback_url=callback_url, answers_after=answers_after),
        )

    def _confirmation(self, supplier: str, page: str, *, due: str) -> Callback:
        return Callback(
            "supplier-confirmation", due, who=f"{supplier}, to confirm the order. You can play the supplier: {page}"
        )

    # --- operations: a reviewer edits what is published ---

    def operations(self, run: Run) -> Json:
        sale = scenarios.campaign(run.external_id)
        paper = self._begin(run, "proposal", "Show a preview", "Ask marketing", "Publish it", "Announce it")
        basics = {"campaign": sale.title, "products": list(sale.products)}
        run.effect(
            "cms.create_preview",
            {**basics, "discount_percent": sale.discount_percent},
            resource=run.external_id,
            undo=("cms.delete_preview", {"campaign": sale.title}),
            do=self.outside.do,
        )
        publish = Effect(
            "cms.publish_prices",
            {
                **basics,
                "discount_percent": sale.discount_percent,
                "starts_on": sale.starts_on,
                "banner": sale.banner,
            },
            resource=run.external_id,
            undo=("cms.restore_prices", {"campaign": sale.title}),
        )
        answer = run.ask(
            "operations-review",
            f"Publish {sale.title} in the web shop: {sale.discount_percent} % off {', '.join(sale.products)} "
            f"from {sale.starts_on}?",
            effect=publish,
            due="2d",
            on_timeout="escalate",
            risk="low",
            details={"Products": ", ".join(sale.products), "Expected": sale.expected},
            schema={
                "type": "object",
                "properties": {
                    "discount_percent": {
                        "type": "integer",
                        "title": "Discount in %",
                        "description": "Above 30 % we sell below cost.",
                        "minimum": 0,
                        "maximum": 30,
                    },
                    "starts_on": {"type": "string", "title": "From", "format": "date"},
                    "banner": {"type": "string", "title": "Text of the banner", "minLength": 1, "maxLength": 80},
                },
                "required": ["discount_percent", "starts_on", "banner"],
            },
            choices=["approve", "edit", "reject"],
            reasons=["The discount is too high", "The text is not ours", "Not now"],
            rationale="The figures come from last year's sales. You may change the discount, the day and the text.",
            evidence=[("The campaign in brief", paper)],
            rollback="Only a preview exists so far. If you say no, it is deleted; published prices can be set back.",
        )
        if not answer.authorised:
            return {"outcome": "not published", "why": answer.reason or answer.status}
        run.checkpoint("publish", ref=paper, next=["Publish it", "Announce it"])
        live = run.effect(publish, do=self.outside.do)
        text = (answer.arguments or {}).get("banner") or sale.banner
        run.effect("mail.announce", {"campaign": sale.title, "text": text}, do=self.outside.do)
        return {"outcome": "published", "record": live["id"]}

    # --- what they share ---------------------------------------------------------------------------------------

    def _begin(self, run: Run, stage: str, *plan: str) -> str:
        """The first checkpoint, and where people can see what really reached the outside; the address of the paper."""
        paper = self.outside.page("documents", run.flow, run.external_id)
        run.external_ref(
            "outside world", "what arrived", run.external_id, url=self.outside.page("runs", run.flow, run.external_id)
        )
        run.checkpoint(stage, ref=paper, next=list(plan))
        return paper

    def open(self, index: int) -> None:
        """Open the run with this number, or find it open."""
        external_id = scenarios.external_id(self.flow, index)
        text = json.dumps(scenarios.document(self.flow, external_id), ensure_ascii=False).encode()
        self.ledger.open(
            self.flow,
            external_id,
            title=scenarios.title(self.flow, external_id),
            input_ref=self.outside.page("documents", self.flow, external_id),
            input_digest=f"sha256:{hashlib.sha256(text).hexdigest()}",
            requested_by=REQUESTER,
        )

    def keep_busy(self, stop: threading.Event, *, every: float = NEW_RUN_EVERY) -> None:
        """Open a few runs, and another one whenever all have ended. A restart opens none anew."""
        index = 0
        while not stop.is_set():
            try:
                if index < scenarios.AT_START:
                    self.open(index)
                    index += 1
                    continue
                total = self.ledger.runs(flow=self.flow, limit=1)["total"]
                ended = sum(
                    self.ledger.runs(flow=self.flow, status=status, limit=1)["total"]
                    for status in ("completed", "terminated")
                )
                if ended >= total:
                    self.open(total)
            except (LedgerError, Unreachable) as error:
                log.warning("%s: no new run for now: %s", self.flow, error)
            stop.wait(every)


def within(effect: Effect, conditions: list[Json]) -> Effect:
    """The effect with its top-level arguments brought within the conditions of an approval, where a limit allows that.

    What is not met all the same is found by the ledger when the effect starts, and a person looks at it.
    """
    changes: Json = {}
    for condition in conditions:
        name = str(condition.get("pointer", "")).removeprefix("/")
        if name not in effect.arguments:
            continue
        now, limit = changes.get(name, effect.arguments[name]), condition.get("value")
        try:
            value, bound = Decimal(str(now)), Decimal(str(limit))
        except InvalidOperation:
            if condition.get("op") == "==":
                changes[name] = limit
            continue
        step = Decimal("0.01") if isinstance(now, str) else Decimal(1)
        best = {
            "<=": min(value, bound),
            "<": min(value, bound - step),
            ">=": max(value, bound),
            ">": max(value, bound + step),
            "==": bound,
        }.get(str(condition.get("op")), value)
        if best != value:
            changes[name] = f"{best:.2f}" if isinstance(now, str) else int(best)
    return effect.with_arguments(**changes) if changes else effect


def _money(amount: str, currency: str) -> str:
    return f"{Decimal(amount):,.2f} {currency}"
