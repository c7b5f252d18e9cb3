"""Quotas of the held-out questions by topic of `make eval-mini`, and by finer slots that keep them balanced.

Counts from 0 to 9 alike, words of every length, as many true noes as yeses, every name once.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from training.mini.judge import is_yes, unfence
from training.mini.teller import Exchange
from training.mini.things import THINGS
from training.mini.vocabulary import with_article

# By slot: how many questions about drawn scenes.
DRAWN: dict[str, int] = {
    "colour": 200, "shape": 60, "place": 200, "relation": 160, "bigger": 80, "group": 80, "background": 60,
    "caption": 120, "detail": 80, "scene, one": 10, "scene, more": 50, "locate all, one": 20,
    "locate all, more": 90, "locate one": 110, "locate one, none": 10, "unanswerable": 80, "chart": 110,
    "count all, one": 6, "count all, more": 34, "kind, drawing": 14, "kind, chart": 14, "kind, picture": 6,
    "is there, yes": 100, "is there, no": 100,
    **{f"count {number}": 24 for number in range(7)},
    **{f"count {number}": 34 for number in (7, 8, 9)},
    **{f"written {letters}": 20 for letters in range(3, 9)},
    **{f"number {digits}": 20 for digits in range(1, 4)},
    "written 2": 4,
}  # fmt: skip
# And about photos, about several pictures, clips, and with turns that follow.
PHOTOS: dict[str, int] = {"photo": 70, "photo limits": 40, "kind, photo": 14}
SEVERAL, CLIPS, FOLLOW_UPS = 110, 110, 150
SAID = re.compile(r'It says "(.+)"\.')
NUMBER = re.compile(r"The number is (\d+)\.")
COUNTED = re.compile(r"There (?:is|are) (\d|no) ")
ONE_THING = "There is 1 thing."
# What is gated as counting; more is told apart.
COUNT_LIMIT = 6


def quotas(names: Iterable[str]) -> Counter[str]:
    """What is wanted of drawn scenes; ``names``: of the things that are to be named, each once."""
    return Counter(DRAWN) + Counter(slot_of_name(name) for name in names)


def slot_of_name(name: str) -> str:
    """The slot of "What is this?" for one thing."""
    return f"name It is {with_article(name)}."


def slot_of(exchange: Exchange) -> str:
    """The slot of a question about a drawn scene."""
    answer = exchange.answer
    match exchange.topic:
        case "name":
            return f"name {answer}"
        case "is there":
            return f"is there, {'yes' if is_yes(answer) else 'no'}"
        case "grounding":
            return "locate one" if unfence(answer) else "locate one, none"
        case "locate all":
            return f"locate all, {'one' if answer.count('label') == 1 else 'more'}"
        case "analysis":
            return f"scene, {'one' if answer.count('label') == 1 else 'more'}"
        case "count all":
            return f"count all, {'one' if answer == ONE_THING else 'more'}"
        case "kind":
            return f"kind, {answer.rstrip('.').split()[-1]}"
        case "count" if found := COUNTED.match(answer):
            return f"count {found[1].replace('no', '0')}"
        case "written" if found := SAID.fullmatch(answer):
            return f"written {len(found[1])}"
        case "written" if found := NUMBER.fullmatch(answer):
            return f"number {len(found[1])}"
    return exchange.topic


def topic_of(exchange: Exchange) -> str:
    """The topic of the table that a question about a drawn scene counts for."""
    if exchange.topic in ("name", "count all"):
        return exchange.topic
    topic, _, rest = slot_of(exchange).partition(" ")
    if topic == "count":
        return "count" if int(rest) <= COUNT_LIMIT else "count 7-9"
    return topic if rest.isdigit() else slot_of(exchange).partition(",")[0]


class RemainingQuota:
    """The questions still missing, by slot."""

    def __init__(self, left: Counter[str]) -> None:
        self.left = +left

    @property
    def total(self) -> int:
        """Number of questions still missing."""
        return self.left.total()

    def select(self, exchanges: Iterable[Exchange], most: int) -> list[Exchange]:
        """At most ``most`` of ``exchanges`` whose slots are not full; nothing is recorded yet."""
        left = Counter(self.left)
        found: list[Exchange] = []
        for exchange in exchanges:
            slot = slot_of(exchange)
            if left[slot] > 0 and len(found) < most:
                left[slot] -= 1
                found.append(exchange)
        return found

    def record(self, exchanges: Iterable[Exchange]) -> list[Exchange]:
        """Record ``exchanges`` as asked; they are returned with the topics of the table."""
        kept = list(exchanges)
        self.left = +(self.left - Counter(slot_of(exchange) for exchange in kept))
        return [replace(exchange, topic=topic_of(exchange)) for exchange in kept]


def all_names(names: Iterable[str]) -> list[str]:
    """The names of things among ``names``, in the order of the vocabulary."""
    given = set(names)
    return [name for name in THINGS if name in given]
