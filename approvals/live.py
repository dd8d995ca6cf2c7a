"""Live pages: a small poll that answers 204 while nothing changed, else only the regions that did. No forms in regions.

A page has regions (elements with an id) and one `#live` element that asks every two seconds, sending back the state it
holds: `key|region:digest,…`. Issue 3 replaces the clock that triggers it; the answer stays the same.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.template.loader import render_to_string

_TIMES = re.compile(r"(<time\b[^>]*>)[^<]*(</time>)")
_TRACK = re.compile(r"<figure class=\"track-figure.*?</figure>", re.DOTALL)
Shape = dict[str, Any]


def key_of(data: Any) -> str:
    """A short digest of whatever decides whether a page must be drawn again."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()[:16]


def digest(html: str) -> str:
    """Of a region's HTML without what only the passing of time changes (words of times, the track's "now")."""
    return hashlib.sha256(_TRACK.sub("", _TIMES.sub(r"\1\2", html)).encode()).hexdigest()[:10]


def state_of(key: str, regions: dict[str, str]) -> str:
    """The state that the page's `#live` element sends back."""
    return key + "|" + ",".join(f"{name}:{digest(html)}" for name, html in regions.items())


def render_regions(request: HttpRequest, templates: dict[str, str], context: Shape) -> dict[str, str]:
    """Each region's HTML by its id."""
    return {name: render_to_string(template, context, request=request) for name, template in templates.items()}


def answer(request: HttpRequest, *, key: str, make: Callable[[], dict[str, str]], said: str = "") -> HttpResponse:
    """204 when the page that asks shows this already; else the changed regions as out-of-band swaps.

    `make` renders the regions and is only called when `key` differs. `said` is announced to screen readers.
    """
    held_key, _, rest = request.GET.get("state", "").partition("|")
    if held_key == key:
        return HttpResponse(status=204)
    held = dict(part.split(":", 1) for part in rest.split(",") if ":" in part)
    regions = make()
    changed = {name: html for name, html in regions.items() if held.get(name) != digest(html)}
    out = [f'<div id="{name}" hx-swap-oob="innerHTML">{html}</div>' for name, html in changed.items()]
    out.append(
        render_to_string(
            "_live.html",
            {
                "live_url": request.path,
                "live_query": _query(request),
                "live_state": state_of(key, regions),
                "oob": True,
            },
        )
    )
    response = HttpResponse("".join(out))
    if changed and said:
        response["HX-Trigger"] = json.dumps({"announce": said})
    return response


def _query(request: HttpRequest) -> str:
    query = request.GET.copy()
    query.pop("state", None)
    return query.urlencode()
