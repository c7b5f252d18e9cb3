"""What a check of this computer says. Does not know any check (``checks.py``, ``compiler.py``)."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at. ``level`` is green, yellow or red; ``fix`` is "" where none is needed."""

    id: str
    level: str
    says: str
    fix: str = ""
