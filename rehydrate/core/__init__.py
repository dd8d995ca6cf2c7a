"""The pure core: what may happen to a run and what must happen next. No Django, no database, no clock, no I/O."""
