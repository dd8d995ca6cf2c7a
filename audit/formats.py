"""Times, durations, numbers and money as a person reads them. Pure but for the active language and zone."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal, InvalidOperation
from typing import Any

from django.utils import dateformat, timezone
from django.utils.formats import date_format
from django.utils.translation import get_language, gettext, pgettext

MINUTE, HOUR, DAY = 60, 3600, 86400

# Symbols by language: where a bare sign would be ambiguous the country is named (CLDR does the same).
_SIGNS = {
    "en": {"EUR": "€", "USD": "$", "GBP": "£", "JPY": "¥", "CNY": "CN¥", "INR": "₹", "KRW": "₩"},
    "zh": {"EUR": "€", "USD": "US$", "GBP": "£", "JPY": "JP¥", "CNY": "¥", "INR": "₹", "KRW": "₩"},
}
#: What stands for a secret field that the ledger only has the digest of.
HIDDEN = "••••••"
_NO_CENTS = {"JPY", "KRW", "VND", "CLP", "ISK"}


def parse_time(value: Any) -> dt.datetime | None:
    """An aware datetime of an RFC 3339 string or a datetime; None for anything else."""
    if isinstance(value, dt.datetime):
        return value if timezone.is_aware(value) else None
    if not isinstance(value, str) or not value:
        return None
    try:
        parsed = dt.datetime.fromisoformat(value)
    except ValueError:
        return None
    return parsed if parsed.tzinfo else None


def exact(moment: dt.datetime) -> str:
    """Date, time to the second and zone, in the reader's zone: what hovering over a relative time shows."""
    local = timezone.localtime(moment)
    return f"{date_format(local, 'DATE_FORMAT')} {dateformat.format(local, 'H:i:s')} {local.tzname()}"


def clock(moment: dt.datetime, now: dt.datetime) -> str:
    """ "16:02" today, "28 Nov 16:02" on another day of this year, with the year otherwise."""
    local, today = timezone.localtime(moment), timezone.localtime(now)
    hour = dateformat.format(local, "H:i")
    if local.date() == today.date():
        return hour
    pattern = "MONTH_DAY_FORMAT" if local.year == today.year else "DATE_FORMAT"
    return f"{date_format(local, pattern)} {hour}"


def duration(seconds: float) -> str:
    """Two units at most: "45 s", "46 min", "1 h 12 min", "3 d 4 h", "40 d"."""
    total = max(0, int(seconds))
    if total < MINUTE:
        return pgettext("duration", "%(s)d s") % {"s": total}
    if total < HOUR:
        return pgettext("duration", "%(m)d min") % {"m": total // MINUTE}
    if total < DAY:
        hours, minutes = total // HOUR, total % HOUR // MINUTE
        if not minutes:
            return pgettext("duration", "%(h)d h") % {"h": hours}
        return pgettext("duration", "%(h)d h %(m)d min") % {"h": hours, "m": minutes}
    days, hours = total // DAY, total % DAY // HOUR
    if days >= 10 or not hours:
        return pgettext("duration", "%(d)d d") % {"d": days}
    return pgettext("duration", "%(d)d d %(h)d h") % {"d": days, "h": hours}


def relative(moment: dt.datetime, now: dt.datetime, form: str = "auto") -> str:
    """ "46 min ago", "in 2 h"; form `left` says "2 h left" or "3 min over", `for` the bare duration."""
    seconds = (moment - now).total_seconds()
    length = duration(abs(seconds))
    if form == "for":
        return length
    if form == "left":
        pattern = pgettext("deadline", "%(time)s left") if seconds > 0 else pgettext("deadline", "%(time)s over")
        return pattern % {"time": length}
    if abs(seconds) < 5:
        return gettext("just now")
    return (gettext("in %(time)s") if seconds > 0 else gettext("%(time)s ago")) % {"time": length}


def patterns() -> dict[str, str]:
    """The same patterns for the browser, which keeps the words on the page true between two answers."""
    return {
        "s": pgettext("duration", "%(s)d s"),
        "m": pgettext("duration", "%(m)d min"),
        "h": pgettext("duration", "%(h)d h"),
        "hm": pgettext("duration", "%(h)d h %(m)d min"),
        "d": pgettext("duration", "%(d)d d"),
        "dh": pgettext("duration", "%(d)d d %(h)d h"),
        "left": pgettext("deadline", "%(time)s left"),
        "over": pgettext("deadline", "%(time)s over"),
        "now": gettext("just now"),
        "in": gettext("in %(time)s"),
        "ago": gettext("%(time)s ago"),
    }


def money(value: Any, currency: Any) -> str:
    """ "€12,000.00": amount grouped, the currency by its sign where it has one. Falls back to what was given."""
    code = str(currency or "").upper()
    try:
        amount = Decimal(str(value))
    except InvalidOperation:
        return f"{value} {code}".strip()
    if not amount.is_finite():
        return f"{value} {code}".strip()
    exponent = amount.as_tuple().exponent
    digits = max(0 if code in _NO_CENTS else 2, -exponent if isinstance(exponent, int) else 0)
    text = f"{abs(amount):,.{digits}f}"
    sign = "−" if amount < 0 else ""
    mark = _SIGNS["zh" if (get_language() or "").startswith("zh") else "en"].get(code)
    return f"{sign}{mark}{text}" if mark else f"{sign}{text} {code}".strip()


def is_money(value: Any) -> bool:
    """Whether it is the contract's money: a string amount and a currency."""
    return isinstance(value, dict) and set(value) >= {"value", "currency"} and isinstance(value["value"], str)


def plain(value: Any) -> str:
    """A JSON value as words: money, yes/no, lists by comma; long structures are cut by the template, not here."""
    if is_money(value):
        return money(value["value"], value["currency"])
    if value is None:
        return "–"
    if isinstance(value, dict) and set(value) == {"$digest"}:
        return HIDDEN
    if isinstance(value, bool):
        return gettext("yes") if value else gettext("no")
    if isinstance(value, list):
        return gettext(", ").join(plain(item) for item in value)
    if isinstance(value, dict):
        return gettext("; ").join(f"{humanise(key)}: {plain(item)}" for key, item in value.items())
    return str(value)


def humanise(name: Any) -> str:
    """ "valid_until" → "Valid until"; "erp.create_order" stays, being a name and not a word."""
    text = str(name)
    if "." in text or "/" in text or ":" in text:
        return text
    text = text.replace("_", " ").replace("-", " ").strip()
    return text[:1].upper() + text[1:]
