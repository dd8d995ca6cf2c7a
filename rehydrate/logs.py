"""What must not stand in a log. Everything else about logging is in the settings."""

from __future__ import annotations

import logging
import re

_SECRETS = [
    (re.compile(r"(?i)\b(bearer|basic)\s+[^\s\"']+"), r"\1 ***"),
    (re.compile(r"(/hooks/|/sign-in/)[^/\s?\"']+"), r"\1***"),
    (re.compile(r"\b(rhk|rha|rhp)_[A-Za-z0-9_-]{8,}"), r"\1_***"),
    (re.compile(r"\b(whsec)_[A-Za-z0-9+/=_-]{8,}"), r"\1_***"),
    (re.compile(r"(postgres(?:ql)?://[^:/@\s]*):[^@\s]*@"), r"\1:***@"),
    (re.compile(r"(?i)\b(password|secret|token|api_key|authorization)([\"']?\s*[=:]\s*[\"']?)[^\s\"',;]+"), r"\1\2***"),
]


def without_secrets(text: str) -> str:
    """`text` with keys, tokens of links and passwords blotted out."""
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text


class WithoutSecrets(logging.Filter):
    """Blots secrets out of each record, whoever wrote it."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        cleaned = without_secrets(message)
        if cleaned != message:
            record.msg, record.args = cleaned, None
        return True
