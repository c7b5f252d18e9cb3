"""What all sidecars have in common: which words, whether they are written, and what is said at the end.

Knows that a file with other words is somebody's work. Does not know what files look like.
"""

from abc import ABC, abstractmethod
from collections import Counter
from pathlib import Path

from vlfit.errors import UsageError
from vlfit.tasks.batch.item import Item, Record
from vlfit.tasks.batch.names import shown_name


class Left(Exception):
    """Nothing is written, with good reason: words that can stand behind "3 pictures were left alone: "."""


class Writer(ABC):
    """A ``Sidecar``: ``write`` asks ``_write`` to do it."""

    def __init__(self, overwrite: bool) -> None:
        self.overwrite = overwrite
        self._left: Counter[str] = Counter()
        self._first: dict[str, str] = {}

    def write(self, item: Item, record: Record) -> None:
        """Raises ``UsageError`` for a picture that is no file of its own, ``CannotWrite`` for what cannot be
        written. A second time with the same record changes nothing.
        """
        if item.path is None:
            raise UsageError(
                f"{item.key} is no file of its own: there is no place beside it",
                "Write no sidecars for shards, tables and URLs: what was said is in the output.",
            )
        words = words_of(record)
        try:
            if not words:
                raise Left("nothing was said")
            self._write(item.path, words)
        except Left as left:
            reason = str(left)
            self._left[reason] += 1
            self._first.setdefault(reason, shown_name(item.path))

    def notes(self) -> list[str]:
        """For each reason how many pictures were left alone, and the first of them."""
        return [
            f"{count:,} {'picture was' if count == 1 else 'pictures were'} left alone: {reason} "
            f"({self._first[reason]}{', ...' if count > 1 else ''})"
            for reason, count in self._left.most_common()
        ]

    def _may_replace(self, old: str, new: str, what: str) -> bool:
        """Whether to write; False if the same is there. Raises ``Left`` for other words that are to stay."""
        if old.strip() and old.strip() != new.strip() and not self.overwrite:
            raise Left(f"{what} says something else, which --overwrite replaces")
        return old.strip() != new.strip()

    @abstractmethod
    def _write(self, path: Path, words: str) -> None:
        """Write ``words``, which are not empty. Raises ``Left`` and ``CannotWrite``."""


def words_of(record: Record) -> str:
    """What a record says in words: a scene's summary, the names of what was detected, else the text."""
    if isinstance(record.get("summary"), str):
        words = record["summary"]
    elif isinstance(record.get("objects"), list):
        words = ", ".join(dict.fromkeys(str(thing.get("label", "")) for thing in record["objects"]))
    else:
        words = str(record.get("text") or "")
    # Neither XML nor EXIF can hold these, and nobody means them.
    kept = (letter for letter in words if letter in "\t\n" or _is_word(letter))
    return "".join(kept).strip()


def _is_word(letter: str) -> bool:
    code = ord(letter)
    return code >= 0x20 and code != 0x7F and not 0xD800 <= code <= 0xDFFF and code & 0xFFFE != 0xFFFE
