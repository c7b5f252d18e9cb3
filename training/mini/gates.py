"""The gates that mini must reach, and the table of scores that says whether it does."""

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Final

from training.mini.judge import balanced, box_overlap, boxes_in, is_json, is_yes, parses
from training.mini.teller import Exchange

# The share of right answers below which mini is not shipped.
GATES: Final[dict[str, float]] = {
    "colour": 0.97, "place": 0.97, "count": 0.97, "name": 0.90, "name, unseen style": 0.50, "relation": 0.95,
    "is there": 0.95, "written": 0.92, "locate one": 0.90, "locate all": 0.90, "clothes": 0.80, "JSON": 0.995,
}  # fmt: skip
# Asked only where someone has the photos.
OPTIONAL: Final = frozenset({"clothes"})
# Points of the overall score that a copy may lose.
MAX_COPY_LOSS: Final[dict[str, float]] = {"fp8": 0.5, "int4": 2.0}
# In a sample, a gate tells nothing on fewer questions than these: one wrong answer more or less decides.
MIN_SAMPLE: Final = 50
OVERALL: Final = "all"
NOTES: Final[dict[str, str]] = {
    "count": "0 to 6",
    "name, unseen style": "Twemoji, top 1",
    "relation": "left, right, above, below",
    "is there": "balanced accuracy",
    "written": "every letter right, words of 2 to 8 letters",
    "locate one": "all found, nothing else, mean overlap >= 0.7",
    "locate all": "all found, nothing else, mean overlap >= 0.7",
    "overlap": "mean overlap (IoU) of the boxes of both",
    "scene": "JSON with labels and text right, all found",
    "detail": "share of sentences right",
    "photo": "true colours and light, nothing invented",
    "talk": "key words",
    "JSON": "parses, in the form that was asked for",
}
OF_LETTERS: Final = re.compile(r'It says "(.+)"\.')


@dataclass(frozen=True)
class ScoredAnswer:
    """A question, the answer ``said`` and its ``score`` (0 to 1). ``picture``: the name of the item."""

    picture: str
    exchange: Exchange
    said: str
    score: float


@dataclass(frozen=True)
class Row:
    """A row of the table: number of questions, share answered right, and the gate if there is one.

    ``sampled``: the questions are a sample of those the gate is meant for.
    """

    asked: int
    right: float
    gate: float | None = None
    sampled: bool = False

    @property
    def passes(self) -> bool:
        """Whether the gate is reached; True without a gate."""
        return self.gate is None or self.right >= self.gate

    @property
    def missed(self) -> bool:
        """Whether the gate is not reached, on enough questions to say so."""
        return not self.passes and not (self.sampled and self.asked < MIN_SAMPLE)


def summarize(judged: list[ScoredAnswer], sampled: bool = False) -> dict[str, Row]:
    """The table by topic; then the overlap of boxes, JSON, and all questions together.

    "is there" is balanced where both kinds were asked; reading is also told apart by length.
    ``sampled``: these are not all questions that there are, so that a gate missed on a few says nothing.
    """
    by_topic: dict[str, list[ScoredAnswer]] = defaultdict(list)
    for one in judged:
        by_topic[one.exchange.topic].append(one)
    table: dict[str, Row] = {}
    for topic, ones in by_topic.items():
        table[topic] = Row(len(ones), _right(topic, ones), GATES.get(topic), sampled)
        if topic == "written":
            table |= _by_length(ones)
    boxes = [*by_topic.get("locate one", []), *by_topic.get("locate all", [])]
    if boxes:
        overlaps = [box_overlap(boxes_in(one.exchange.answer), boxes_in(one.said)) for one in boxes]
        table["overlap"] = Row(len(boxes), sum(overlaps) / len(boxes))
    as_json = [one for one in judged if is_json(one.exchange.answer)]
    if as_json:
        good = sum(parses(one.exchange.answer, one.said) for one in as_json)
        table["JSON"] = Row(len(as_json), good / len(as_json), GATES["JSON"], sampled)
    if judged:
        table[OVERALL] = Row(len(judged), _mean(judged))
    return table


def _right(topic: str, ones: list[ScoredAnswer]) -> float:
    answers = [(is_yes(one.exchange.answer), one.score) for one in ones]
    # A small sample may hold yeses only; then there is nothing to balance.
    both = len({present for present, _ in answers}) == 2
    return balanced(answers) if topic == "is there" and both else _mean(ones)


def _mean(ones: list[ScoredAnswer]) -> float:
    return sum(one.score for one in ones) / len(ones)


def _by_length(ones: list[ScoredAnswer]) -> dict[str, Row]:
    """How well words of each length are read."""
    by_length: dict[int, list[ScoredAnswer]] = defaultdict(list)
    for one in ones:
        if found := OF_LETTERS.fullmatch(one.exchange.answer):
            by_length[len(found[1])].append(one)
    return {
        f"  {length} letters": Row(len(by_length[length]), _mean(by_length[length]))
        for length in sorted(by_length)
    }


def table_lines(table: dict[str, Row]) -> list[str]:
    """The table, as people read it."""
    lines = [f"{'topic':<20}{'asked':>6}{'right':>8}{'gate':>8}"]
    for topic, row in table.items():
        gate = "" if row.gate is None else f"{row.gate:.1%}"
        verdict = "" if row.passes else "MISSED  " if row.missed else "too few to tell  "
        note = verdict + NOTES.get(topic, "")
        lines.append(f"{topic:<20}{row.asked:>6}{row.right:>8.1%}{gate:>8}  {note}".rstrip())
    return lines


def gates_pass(table: dict[str, Row], partial: bool) -> bool:
    """Whether no gate is missed. One that was not asked is, unless only a part was to be asked."""
    asked = partial or set(GATES) - OPTIONAL <= set(table)
    return asked and not any(row.missed for row in table.values())


def drop(original: list[ScoredAnswer], copy: list[ScoredAnswer]) -> dict[str, float]:
    """Points (hundredths) that a copy loses on the questions it was asked: by topic, and overall.

    Raises ``ValueError`` for a question that the original was not asked.
    """
    scores: dict[tuple[str, Exchange], list[float]] = defaultdict(list)
    for one in original:
        scores[one.picture, one.exchange].append(one.score)
    losses: dict[str, list[float]] = defaultdict(list)
    for one in copy:
        before = scores.get((one.picture, one.exchange))
        if before is None:
            raise ValueError(f"only the copy was asked {one.exchange.question!r} about {one.picture}")
        loss = sum(before) / len(before) - one.score
        for topic in (one.exchange.topic, OVERALL):
            losses[topic].append(loss)
    return {topic: 100 * sum(values) / len(values) for topic, values in losses.items()}


def drop_lines(weights: str, lost: dict[str, float], asked: int, sampled: bool = False) -> list[str]:
    """What a copy loses, as people read it: overall, then every topic in which something changed."""
    missed = "  too few to tell" if sampled and asked < MIN_SAMPLE else "  MISSED"
    verdict = "" if lost[OVERALL] <= MAX_COPY_LOSS[weights] else missed
    lines = [
        f"{weights}: {lost[OVERALL]:+.2f} points lost of the overall score on {asked} questions, "
        f"at most {MAX_COPY_LOSS[weights]:.1f} allowed{verdict}"
    ]
    changed = {topic: value for topic, value in lost.items() if topic != OVERALL and round(value, 2)}
    return lines + [f"  {topic:<20}{value:>+8.2f}" for topic, value in changed.items()]


def copies_pass(drops: dict[str, dict[str, float]]) -> bool:
    """Whether no copy loses more than it may."""
    return all(lost[OVERALL] <= MAX_COPY_LOSS[weights] for weights, lost in drops.items())
