"""The held-out questions on disk (``held_out.zip``): pictures, dialogues about them, and the true answers.

The file is in the repository, so that anyone can score mini without fetching anything.
"""

import json
import zipfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from training.mini.teller import Exchange

SHIPPED = Path(__file__).with_name("held_out.zip")
QUESTIONS, LICENCES = "questions.json", "LICENCES.txt"
# The same questions give the same bytes whenever they are written.
WRITTEN = (2000, 1, 1, 0, 0, 0)

Dialogue = tuple[Exchange, ...]


@dataclass(frozen=True)
class HeldOut:
    """Pictures (encoded files) that are shown together, and what is asked about them.

    ``pictures`` may be empty for talk; with ``is_clip`` they are frames, two to a second. ``system``: the
    system prompt, or empty. Each of ``dialogues`` is asked turn by turn, its own answers in the history.
    """

    name: str
    pictures: tuple[bytes, ...]
    is_clip: bool
    system: str
    dialogues: tuple[Dialogue, ...]

    @property
    def questions(self) -> int:
        """How many answers it takes."""
        return sum(map(len, self.dialogues))


def write(path: Path, items: Iterable[HeldOut], licences: str) -> int:
    """Write the questions and what ``licences`` says of the pictures; returns the number of questions."""
    entries, count = [], 0
    unfinished = path.with_name(path.name + ".unfinished")
    with zipfile.ZipFile(unfinished, "w") as packed:
        for item in items:
            names = [f"{item.name}-{number}.jpg" for number in range(len(item.pictures))]
            for name, picture in zip(names, item.pictures, strict=True):
                packed.writestr(zipfile.ZipInfo(name, WRITTEN), picture)
            entries.append(
                {
                    "name": item.name,
                    "pictures": names,
                    "is_clip": item.is_clip,
                    "system": item.system,
                    "dialogues": [[asdict(exchange) for exchange in turns] for turns in item.dialogues],
                }
            )
            count += item.questions
        for name, text in ((QUESTIONS, json.dumps(entries, indent=1)), (LICENCES, licences)):
            packed.writestr(zipfile.ZipInfo(name, WRITTEN), text, zipfile.ZIP_DEFLATED)
    unfinished.replace(path)
    return count


def read(path: Path) -> list[HeldOut]:
    """What ``write`` wrote.

    Raises ``FileNotFoundError`` if there is no such file, ``ValueError`` if it holds no questions.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; python -m training.mini.draw_held_out draws it")
    try:
        with zipfile.ZipFile(path) as packed:
            return [_read_item(entry, packed) for entry in json.loads(packed.read(QUESTIONS))]
    except (zipfile.BadZipFile, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path} holds no held-out questions ({error}); python -m training.mini.draw_held_out draws some"
        ) from error


def _read_item(entry: dict[str, object], packed: zipfile.ZipFile) -> HeldOut:
    names, dialogues = entry["pictures"], entry["dialogues"]
    if not isinstance(names, list) or not isinstance(dialogues, list):
        raise TypeError("pictures and dialogues must be lists")
    return HeldOut(
        str(entry["name"]),
        tuple(packed.read(name) for name in names),
        bool(entry["is_clip"]),
        str(entry["system"]),
        tuple(tuple(Exchange(**exchange) for exchange in turns) for turns in dialogues),
    )


def topics_of(items: Iterable[HeldOut]) -> list[str]:
    """Every topic that is asked, each once, in order."""
    return list(dict.fromkeys(e.topic for item in items for turns in item.dialogues for e in turns))


def only(items: Iterable[HeldOut], topics: Collection[str]) -> list[HeldOut]:
    """The dialogues that hold a question of one of ``topics``."""
    return _kept(items, lambda turns: any(exchange.topic in topics for exchange in turns))


def sample(items: list[HeldOut], count: int) -> list[HeldOut]:
    """About ``count`` questions: of every topic its share, the first always, evenly over the pictures."""
    total = sum(item.questions for item in items)
    seen: Counter[str] = Counter()

    def is_due(turns: Dialogue) -> bool:
        """Each time that so many shares make another whole."""
        position = seen[turns[0].topic]
        seen[turns[0].topic] += 1
        return position * count // total != (position - 1) * count // total

    return items if count >= total else _kept(items, is_due)


def _kept(items: Iterable[HeldOut], wanted: Callable[[Dialogue], bool]) -> list[HeldOut]:
    """The items with those dialogues only that are wanted; without any, an item is left out."""
    shorter = (replace(item, dialogues=tuple(filter(wanted, item.dialogues))) for item in items)
    return [item for item in shorter if item.dialogues]
