"""Answers in a word: a full answer cut short, where a system prompt or the question asks for brevity.

None if it cannot be cut without losing what was asked.
"""

import re

from training.mini.teller import Exchange

SYSTEMS = (
    "Answer in one word.", "Answer briefly.", "Answer with a single word or phrase.",
    "One-word answers only.",
    "Answer with one word or a number, nothing else.", "Reply with as few words as possible.",
    "Give only the answer, no sentence.", "Keep every answer to one or two words.",
    "You are a helpful assistant. Answer in one word.",
)  # fmt: skip
# What people write after a question to the same end.
AFTER = (
    " Answer in one word.", " Answer briefly.", " One word only.", " Answer with a single word or phrase.",
    "\nAnswer the question using a single word or phrase.", " Just the answer.", " (one word)",
    " Reply with one word.", " In one word.", " Short answer.",
)  # fmt: skip
YES_OR_NO = ("is there", "is coloured", "is at", "person", "so many", "is written")
# By topic: what of the full answer is kept.
KEPT: dict[str, re.Pattern[str]] = {
    "colour": re.compile(r"The .+ (?:is|are) (\w+)\."),
    "letters": re.compile(r"The .+ (?:is|are) (\w+)\."),
    "background": re.compile(r"The background is (?!.* )(\w+)\."),
    "count": re.compile(r"There (?:is|are) (\d|no) .+\."),
    "count all": re.compile(r"There (?:is|are) (\d) .+\."),
    "kindred": re.compile(r"There (?:is|are) (\d|no) .+\."),
    "name": re.compile(r"It is (?:an? )?(.+)\."),
    "place": re.compile(r"The .+ (?:is|are) (?:in|on|at) the (.+)\."),
    "garment": re.compile(r"It is (?:an? )?(.+)\."),
}


def briefly(exchange: Exchange) -> Exchange | None:
    """The exchange with the shortest answer that still answers it: "Red.", "3.", "Top left.", "Yes."."""
    answer = exchange.answer
    if exchange.topic in YES_OR_NO:
        found = re.match(r"(Yes|No),", answer)
    else:
        pattern = KEPT.get(exchange.topic)
        found = pattern.fullmatch(answer) if pattern else None
    if found is None:
        return None
    kept = "0" if found[1] == "no" else found[1]
    return Exchange(exchange.topic, exchange.question, f"{kept[0].upper()}{kept[1:]}.")
