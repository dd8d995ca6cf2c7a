"""Does a flow need a ledger, and which of the ten fields would it have missed? Pure: words in, a report out.

The API speaks English; the console translates what is marked here.
"""

import re
from collections.abc import Iterable
from typing import Any, Final

from django.utils.translation import gettext_noop

#: The ten fields (contract.md section 2): the words by which teams name them, and how an agent sends each.
_FIELDS: Final[dict[str, tuple[str, str, Any]]] = {
    "run_id": (
        r"(run|instance|execution|workflow|thread).?id|correlation|which run|运行.?id|实例|流程编号",
        gettext_noop("POST /runs with your own `external_id`: the run keeps its id from open to end."),
        {"flow": "contract-approval", "external_id": "contract-17"},
    ),
    "stage": (
        r"stage|step|phase|where it (was|stopped|stood)|progress|阶段|步骤|进度",
        gettext_noop("A `checkpoint` event at each stage."),
        {"type": "checkpoint", "stage": "drafted"},
    ),
    "checkpoint": (
        r"checkpoint|snapshot of state|saved state|last state|检查点|断点|状态快照",
        gettext_noop("A `checkpoint` event with a reference and a digest of the state kept elsewhere."),
        {"type": "checkpoint", "stage": "drafted", "ref": "s3://contracts/17/draft-3.json", "digest": "sha256:…"},
    ),
    "input_ref": (
        r"input|prompt|request body|original (request|order|mail|message)|payload|输入|提示词|原始请求|请求内容",
        gettext_noop("`input` when the run is opened: a reference and a digest, not the contents."),
        {"input": {"ref": "s3://inbox/17.eml", "digest": "sha256:…"}},
    ),
    "waiting_for": (
        r"wait|pending|blocked|callback|webhook|event type|approval pending|等待|挂起|回调|待审批",
        gettext_noop(
            "A `paused` event that names each wait: for whom, until when, on which signal, and what comes at the "
            "deadline."
        ),
        {"type": "paused", "waits": [{"name": "legal-approval", "kind": "approval", "due_in": 259200}]},
    ),
    "timer_due_at": (
        r"timer|due|deadline|schedul|time.?out|expir|定时|到期|截止|超时",
        gettext_noop(
            "A wait of kind `timer`, or a deadline on another wait: a row of the ledger, not a sleeping process."
        ),
        {"type": "paused", "waits": [{"name": "reminder", "kind": "timer", "due_at": "2030-01-31T09:00:00Z"}]},
    ),
    "external_refs": (
        r"external|resource|(order|contract|document|customer|remote).?(number|no|id)|ticket|外部|资源|单号|工单",
        gettext_noop("An `external_ref` event for each resource in another system that the run is about."),
        {"type": "external_ref", "system": "erp", "ref_type": "order", "id": "PO-77"},
    ),
    "effect_keys": (
        r"idempoten|effect|receipt|pa(id|yment)|sent|submitted|created|e-?mail|duplicate"
        r"|幂等|副作用|凭据|已(发送|提交|执行)|是否(发送|执行|提交)|付款",
        gettext_noop("`effect.planned` with `start` before acting, and `effect.executed` with the receipt after it."),
        {"type": "effect.planned", "key": "pay-17", "system": "erp", "action": "pay", "start": True},
    ),
    "decisions": (
        r"decision|approv|reject|who said|sign.?off|consent|chat|slack|审批|批准|驳回|决策|决定|口头|聊天",
        gettext_noop(
            "A wait of kind `approval`: the answer is a structured event with who, when, why and its conditions."
        ),
        {
            "type": "paused",
            "waits": [{"name": "legal-approval", "kind": "approval", "due_in": 259200, "ask": {"summary": "Sign?"}}],
        },
    ),
    "failures": (
        r"fail|error|exception|retr(y|ies)|attempt|stack ?trace|escalat|失败|错误|异常|重试|升级",
        gettext_noop("A `failed` event with its code: the ledger counts, backs off, and escalates at the limit."),
        {"type": "failed", "error": {"code": "erp_timeout", "message": "No answer in 30 s"}, "retryable": True},
    ),
}


#: The ten, in the contract's order.
FIELDS: Final = tuple(_FIELDS)


def fields_of(text: str) -> list[str]:
    """Which of the ten fields somebody looked for, by what they call it. The field's own name counts alone."""
    plain = text.strip().lower()
    if plain in _FIELDS:
        return [plain]
    return [field for field, (words, _, _) in _FIELDS.items() if re.search(words, plain)]


def report(
    *, happened_outside: bool, spans_days: bool, looked_up: Iterable[str], recorded: Iterable[str] = ()
) -> dict[str, Any]:
    """What one real incident says about a flow.

    `looked_up` is what people had to look up; `recorded` are the fields that the flow's runs carry already. A flow in
    which nothing happens outside and nothing spans days can simply run again: it needs no ledger.
    """
    found = {field for text in looked_up for field in fields_of(text)}
    missing = [field for field in _FIELDS if field in found and field not in set(recorded)]
    needs_ledger = happened_outside or spans_days
    return {
        "needs_ledger": needs_ledger,
        "present": [field for field in _FIELDS if field not in missing],
        "missing": missing,
        "advice": [
            {"field": field, "send": _FIELDS[field][1], "example": _FIELDS[field][2]}
            for field in missing
            if needs_ledger
        ],
    }
