"""Translations compiled from their .po files without gettext, so that a fresh machine speaks both languages."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import polib


def compile_stale(places: Iterable[Path | str]) -> int:
    """Writes each .mo that is missing or older than its .po, in one step; the number written."""
    written = 0
    for source in [path for place in places for path in sorted(Path(place).glob("*/LC_MESSAGES/*.po"))]:
        target = source.with_suffix(".mo")
        if target.exists() and target.stat().st_mtime_ns >= source.stat().st_mtime_ns:
            continue
        draft = target.with_name(f".{target.name}.{os.getpid()}")
        polib.pofile(str(source)).save_as_mofile(str(draft))
        draft.replace(target)
        written += 1
    return written
