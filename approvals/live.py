"""Live pages: a request that is answered when something changed, with only the regions that did. No forms in regions.

A page has regions (elements with an id) and one `#live` element that asks, sending back the state it holds:
`key|region:digest,…`. The answer waits until the key is another one, at most `PATIENCE`, and is 204 then; the page asks
again (static/console.js). Without `wait=yes` it is answered at once.

Long polls, and no stream of events: each answer is a request of its own, whose session and roles are those of that
moment; it passes any proxy that lets a slow page through; and of a browser's six connections to a host it takes one in
each window that is seen, as a stream would, but hands it round when more windows ask. Measured with 200 pages at rest,
asking anew costs two to three per cent of a core.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

from django.http import HttpRequest, HttpResponse
from django.template.loader import render_to_string

from approvals import web
from rehydrate import wakeups

T = TypeVar("T")

#: The region of the counts that stand on every page.
COUNTS: Final = "rail-scopes"
#: Seconds that an answer waits for news; each takes its own in this range. Proxies have patience for sixty.
PATIENCE: Final = (52.0, 58.0)
#: For so many seconds a request's session and roles are taken to be those of this moment.
FRESH: Final = 0.2

_TIMES = re.compile(r"(<time\b[^>]*>)[^<]*(</time>)")
_TRACK = re.compile(r"<figure class=\"track-figure.*?</figure>", re.DOTALL)
Shape = dict[str, Any]


def key_of(*parts: Any) -> str:
    """A short digest of each part of what decides whether a page must be drawn again: the page, and its counts."""
    return ".".join(_short(part) for part in parts)


def _short(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()[:16]


def digest(html: str) -> str:
    """Of a region's HTML without what only the passing of time changes (words of times, the track's "now")."""
    return hashlib.sha256(_TRACK.sub("", _TIMES.sub(r"\1\2", html)).encode()).hexdigest()[:10]


def state_of(key: str, regions: dict[str, str]) -> str:
    """The state that the page's `#live` element sends back."""
    return _state(key, {name: digest(html) for name, html in regions.items()})


def _state(key: str, digests: dict[str, str]) -> str:
    return key + "|" + ",".join(f"{name}:{of}" for name, of in digests.items())


def render_regions(request: HttpRequest, templates: dict[str, str], context: Shape) -> dict[str, str]:
    """Each region's HTML by its id."""
    return {name: render_to_string(template, context, request=request) for name, template in templates.items()}


def render_counts(request: HttpRequest, place: str = "") -> dict[str, str]:
    """The counts alone, as the page of this place has them."""
    return render_regions(request, {COUNTS: "_scopes.html"}, {**web.frame(request), "place": place})


def topics_of(request: HttpRequest) -> list[wakeups.Topic]:
    """What changes the counts that stand on every page: any run that the person may see."""
    return [wakeups.workspace(workspace) for workspace in web.caller_of(request).workspaces]


#: What was found to be no news, by who asked for what, with the listener's stamp of that time: asked again while that
#: is the same, it is still none. Most pages ask again without anything having changed.
_seen: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
SEEN_AT_MOST: Final = 2000


def until(request: HttpRequest, topics: Iterable[wakeups.Topic], look: Callable[[], T | None]) -> T | None:
    """What `look` finds, at once or later; None when there was nothing. Who asks is asked again before each look."""
    if request.GET.get("wait") != "yes":
        return look()
    with wakeups.listen(*topics, room=wakeups.PAGES) as ear:
        began = time.monotonic()
        end = began + random.uniform(*PATIENCE)  # noqa: S311 (no secret)
        caller = web.caller_of(request)
        asked = (caller.id, str(sorted(caller.workspaces.items())), request.get_full_path())
        stamp = wakeups.listener().stamp(ear)
        if stamp is None or _seen.get(asked) != stamp:
            ear.take_turn()
        while wakeups.rest(ear, end - time.monotonic()):
            if time.monotonic() - began > FRESH:
                web.renew(request)
            stamp = wakeups.listener().stamp(ear)
            if (found := look()) is not None:
                return found
            _seen[asked] = stamp
            _seen.move_to_end(asked)
            if len(_seen) > SEEN_AT_MOST:
                with contextlib.suppress(KeyError):  # another thread took it
                    _seen.popitem(last=False)
    return None


def answer(
    request: HttpRequest,
    *,
    key: Callable[[], str],
    make: Callable[[], dict[str, str]],
    topics: Iterable[wakeups.Topic] = (),
    counts: Callable[[], dict[str, str]] | None = None,
    said: str = "",
) -> HttpResponse:
    """The changed regions as out-of-band swaps, once `key` is not that of the page that asks; else 204.

    `make` renders the regions and is only called then; when nothing but the second part of a key "page.counts" differs,
    `counts` renders what shows those. `topics` besides `topics_of` are what `key` depends on. `said` is announced to
    screen readers.
    """
    held_key, _, rest = request.GET.get("state", "").partition("|")
    held = dict(part.split(":", 1) for part in rest.split(",") if ":" in part)

    def look() -> HttpResponse | None:
        found = key()
        if found == held_key:
            return None
        only_counts = counts is not None and "." in found and found.split(".")[0] == held_key.split(".")[0]
        return _news(request, found, held, counts() if only_counts and counts is not None else make(), said)

    return until(request, [*topics, *topics_of(request)], look) or HttpResponse(status=204)


def _news(request: HttpRequest, key: str, held: dict[str, str], regions: dict[str, str], said: str) -> HttpResponse:
    """What the page does not show yet, and the state that it is in then."""
    digests = {name: digest(html) for name, html in regions.items()}
    changed = {name: html for name, html in regions.items() if held.get(name) != digests[name]}
    out = [f'<div id="{name}" hx-swap-oob="innerHTML">{html}</div>' for name, html in changed.items()]
    out.append(
        render_to_string(
            "_live.html",
            {
                "live_url": request.path,
                "live_query": _query(request),
                "live_state": _state(key, {**held, **digests}),
                "oob": True,
            },
        )
    )
    response = HttpResponse("".join(out))
    if said and changed.keys() - {COUNTS}:
        response["HX-Trigger"] = json.dumps({"announce": said})
    return response


def _query(request: HttpRequest) -> str:
    query = request.GET.copy()
    for name in ("state", "wait"):
        query.pop(name, None)
    return query.urlencode()
