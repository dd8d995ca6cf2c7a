"""How the demo's agents reach the outside world: one function that does what an effect says, one that looks it up."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import quote

import httpx

from rehydrate.client import EffectCall, Refused

Json = dict[str, Any]

DEFAULT_URL = "http://127.0.0.1:8790"


class AnswerLost(Exception):
    """The outside did not answer, so nobody knows whether it did what it was asked."""


class Outside:
    """The world at `url`, or at REHYDRATE_DEMO_WORLD."""

    def __init__(self, url: str | None = None, *, timeout: float = 30.0) -> None:
        self.url = (url or os.environ.get("REHYDRATE_DEMO_WORLD") or DEFAULT_URL).rstrip("/")
        # A connection of its own for each request: one that went stale would make an answer look lost that never was.
        self._http = httpx.Client(
            base_url=self.url,
            timeout=httpx.Timeout(timeout, connect=3.0),
            limits=httpx.Limits(max_keepalive_connections=0),
            trust_env=False,
        )

    def do(self, effect: EffectCall, *, callback_url: str | None = None, answers_after: int | None = None) -> Json:
        """Do it, under the effect's key. Raises `Refused` when it was not done, `AnswerLost` when that is not known.

        `callback_url` is where the other side answers to; `answers_after` so many seconds by itself, if at all.
        """
        system, _, action = effect.action.partition(".")
        headers = {"Idempotency-Key": effect.key}
        if callback_url:
            headers["X-Callback-Url"] = callback_url
        if answers_after is not None:
            headers["X-Answers-After"] = str(answers_after)
        try:
            answer = self._http.post(f"/{system}/{action}", json=effect.arguments, headers=headers)
        except (httpx.ConnectError, httpx.ConnectTimeout):
            raise  # nothing has left: the client counts it as failed
        except httpx.TransportError as error:
            raise AnswerLost(
                f"The system “{system}” did not answer, so it is not known whether it took the request. "
                f"What really arrived there: {self.page_of_key(effect.key)}"
            ) from error
        if answer.status_code in (200, 201):
            return dict(answer.json())
        if answer.status_code < 500 or answer.status_code == 503:
            raise Refused(f"The system “{system}” answered {answer.status_code}: {_detail(answer)}")
        raise AnswerLost(f"The system “{system}” answered {answer.status_code}; it may or may not have been done.")

    def find(self, effect: EffectCall) -> Json | None:
        """What was done under the effect's key; None when nothing was."""
        answer = self._http.get("/lookup", params={"key": effect.key})
        if answer.status_code == 404:
            return None
        answer.raise_for_status()
        return dict(answer.json())

    def page(self, *parts: str) -> str:
        """The address of one of the world's pages, for people."""
        return "/".join([self.url, *(quote(part, safe="") for part in parts)])

    def page_of_key(self, key: str) -> str:
        flow, external_id, *_ = key.split("/")
        return self.page("runs", flow, external_id)


def _detail(answer: httpx.Response) -> str:
    try:
        return str(answer.json().get("detail", ""))
    except ValueError:
        return ""
