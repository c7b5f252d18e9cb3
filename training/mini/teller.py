"""Random choices that all questions about a scene share: which thing, which wording, which typos."""

import re
from dataclasses import dataclass

import numpy as np

from training.mini.scenes import Scene, Thing, count_of
from training.mini.things import THINGS
from training.mini.vocabulary import SHAPES, UNCOUNTED
from training.mini.ways import way
from training.mini.wordings import slip

Answered = tuple[str, str] | None
PLEASE = (" pls", " please", ", please", " plz", " thanks", ", thx")
CONTRACTED = (
    ("What is ", "What's "), ("Where is ", "Where's "), ("What is ", "Whats "), ("Who is ", "Who's "),
    ("Where is ", "Wheres "), ("do not", "don't"),
)  # fmt: skip
POLITE = ("Please tell me: ", "Can you tell me: ", "Look at the picture. ", "Hi! ", "Question: ", "Please: ")


@dataclass(frozen=True)
class Exchange:
    """One question and its true answer. ``topic`` groups them for scores ("colour", "count", ...)."""

    topic: str
    question: str
    answer: str


class Teller:
    """One scene and the lots that are drawn about it."""

    def __init__(self, scene: Scene, random: np.random.Generator) -> None:
        self.scene = scene
        self.random = random
        self.unique = [t for t in scene.things if count_of(scene, t.name) == 1]

    def chance(self, share: float) -> bool:
        """True so often."""
        return bool(self.random.random() < share)

    def pick(self, *choices: str) -> str:
        """One of the choices."""
        return choices[int(self.random.random() * len(choices))]

    def way(self, question: str, **parts: str) -> str:
        """One of the wordings that ``ways.txt`` has of a question."""
        return way(question, self.random, **parts)

    def pick_thing(self, things: list[Thing]) -> Thing | None:
        """One of the things, or None when there is none."""
        return things[int(self.random.random() * len(things))] if things else None

    def pair(self) -> tuple[Thing, Thing] | None:
        """Two different things, each the only one of its name."""
        if len(self.unique) < 2:
            return None
        first, second = self.random.permutation(len(self.unique))[:2]
        return self.unique[int(first)], self.unique[int(second)]

    def reference(self, thing: Thing) -> str:
        """How a question refers to a thing that is the only one of its name."""
        if thing.written:
            return f"the {thing.kind}"
        coloured = thing.kind == "shape" and self.chance(0.5)
        return f"the {thing.label if coloured or thing.kind == 'bar' else thing.name}"

    def absent(self, countable: bool = False, like: Thing | None = None) -> str:
        """The name of something that is not in the scene; of the group of ``like`` where it has one."""
        names = list(_names_of(like.group)) if like is not None and like.group else [*SHAPES, *THINGS]
        for _ in range(20):
            name = names[int(self.random.random() * len(names))]
            if count_of(self.scene, name) == 0 and not (countable and name in UNCOUNTED):
                return name
        return self.absent(countable)


def _names_of(group: str) -> tuple[str, ...]:
    return _GROUPS[group]


_GROUPS = {
    group: tuple(name for name, thing in THINGS.items() if thing.group == group)
    for group in {thing.group for thing in THINGS.values()}
}


def as_typed(question: str, random: np.random.Generator) -> str:
    """The question as people type it: in lower case, unpunctuated, shortened, with a word before it, a slip.

    What quotes names or shows a form of JSON was copied from somewhere, and stays as it is.
    """
    if '"' in question or "{" in question:
        return question
    draw = random.random()
    if draw < 0.06:
        question = POLITE[int(random.random() * len(POLITE))] + question
    elif draw < 0.3:
        question = question.replace("picture", "image" if draw < 0.24 else "photo")
    question = _with_typos(question, random)
    draw = random.random()
    if draw < 0.1:
        question = question.lower()
    elif draw > 0.975:
        question = question.upper()
    if 0.06 < draw < 0.15:
        question = question.rstrip("?.")
    return question


def _with_typos(question: str, random: np.random.Generator) -> str:
    """Now and then contracted, with "pls", without articles, with a slip or without a space."""
    draw = random.random()
    if draw < 0.14:
        short, long = CONTRACTED[int(random.random() * len(CONTRACTED))][::-1]
        return question.replace(long, short)
    if draw < 0.17:
        bare = question.rstrip("?.")
        return bare + PLEASE[int(random.random() * len(PLEASE))] + question[len(bare) :]
    if draw < 0.20:
        return _ARTICLE.sub("", question)
    if draw < 0.22:
        return _slipped(question, random)
    if draw < 0.24:
        return f" {question}" if draw < 0.23 else question + question[-1]
    return question


def _slipped(question: str, random: np.random.Generator) -> str:
    """A slip in a long word, where it turns no thing into another, or a space that is missing."""
    spaces = [match.start() for match in re.finditer(" ", question)]
    long = list(_LONG.finditer(question))
    if spaces and (not long or random.random() < 0.4):
        at = spaces[int(random.random() * len(spaces))]
        return question[:at] + question[at + 1 :]
    if not long:
        return question
    match = long[int(random.random() * len(long))]
    return question[: match.start()] + slip(match[0], random) + question[match.end() :]


_ARTICLE = re.compile(r"\b(?:the|an?) ")
# Words of questions, not names: a slip in "cat" would ask for a bat.
_LONG = re.compile(
    r"\b(?:[Ww]here|[Ww]hich|[Cc]olou?r|[Pp]icture|image|photo|many|there|[Dd]escribe|background|[Ll]ocate)\b"
)
