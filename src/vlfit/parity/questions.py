"""What copies of one model are asked: boxes of drawn scenes, drawn words, counts, and plain text.

Truth is known, as everything is drawn here; what the model in its widest copy says is known only when it has
been asked. Figures of a copy beside the widest one (``CopyFigures``) are plain numbers, without torch.
"""

import io
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from vlfit.api.conversation import Conversation, ImagePart, single_turn
from vlfit.parity.scenes import DrawnScene, draw_scenes, mean_overlap, overlap, read_boxes, shape_corners

Kind = Literal["boxes", "words", "count", "caption", "text"]
_WORDS = ("TRAIN", "coffee", "Open", "482", "garden", "EXIT")
_COUNTS = (("circles", 2), ("squares", 3), ("stars", 4), ("circles", 5), ("triangles", 6), ("squares", 7))
_READ = "What is written in the picture? Answer with the text only."
_COUNT = "How many {} are there?"
CAPTION = "Describe this picture in one sentence."
_TEXTS = (
    "Tell me in two sentences why the sky is blue.",
    "Write the numbers from one to twenty as words.",
    "What can you do?",
)
_MOST_TOKENS = {"boxes": 320, "words": 24, "count": 24, "caption": 48, "text": 64}
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_SIDE = 256


@dataclass(frozen=True)
class Question:
    """One question; ``scene`` of ``boxes``, ``truth`` of ``words`` and ``count``, else None and "".

    ``tokens``: the longest answer.
    """

    name: str
    kind: Kind
    conversation: Conversation
    scene: DrawnScene | None = None
    truth: str = ""

    @property
    def tokens(self) -> int:
        return _MOST_TOKENS[self.kind]


@dataclass(frozen=True)
class CopyFigures:
    """One copy beside the widest one.

    ``kld_mean``, ``kld_most``: divergence of the next token's distribution from the widest copy's, in nats,
    along the widest copy's own answers, over ``positions`` tokens. ``top1``: share of all those answers'
    tokens that this copy would have chosen, too, over ``tokens`` of them. ``boxes_iou``: mean overlap of the
    widest copy's boxes with this one's best. ``boxes_true``: of the true boxes. ``words_changed``: texts read
    otherwise than by the widest copy, of ``words``; ``words_right``: read as drawn. ``counts_changed`` and
    ``counts_right`` of ``counts`` likewise. What there are no questions of is None. ``same_prompt``: both
    make the same tokens of every question.
    """

    kld_mean: float
    kld_most: float
    positions: int
    top1: float
    tokens: int
    same_prompt: bool
    boxes_iou: float | None = None
    boxes_true: float | None = None
    words: int | None = None
    words_changed: int | None = None
    words_right: int | None = None
    counts: int | None = None
    counts_changed: int | None = None
    counts_right: int | None = None

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def make_questions(*, sees: bool) -> tuple[Question, ...]:
    """All questions, always the same. ``sees``: the model takes pictures; without, those about text alone."""
    questions = [
        Question(f"text {number + 1}", "text", single_turn(text)) for number, text in enumerate(_TEXTS)
    ]
    if not sees:
        return tuple(questions)
    scenes = {name: scene for name, scene in draw_scenes().items() if name != "wide_turned"}
    for name, scene in scenes.items():
        questions.append(Question(f"boxes {name}", "boxes", scene.conversation(tuple(scene.boxes)), scene))
    caption = single_turn(CAPTION, ImagePart(scenes["square"].data))
    questions.append(Question("caption", "caption", caption))
    for word in _WORDS:
        picture = ImagePart(draw_words(word))
        questions.append(Question(f"words {word}", "words", single_turn(_READ, picture), truth=word))
    for things, count in _COUNTS:
        asked = single_turn(_COUNT.format(things), ImagePart(draw_count(things, count)))
        questions.append(Question(f"count {count} {things}", "count", asked, truth=str(count)))
    return tuple(questions)


def draw_words(text: str) -> bytes:
    """``text`` in dark letters on white, as a PNG; the typeface is Pillow's own, so alike everywhere."""
    from PIL import Image, ImageDraw, ImageFont

    picture = Image.new("RGB", (_SIDE, _SIDE), "white")
    pen = ImageDraw.Draw(picture)
    size = min(96, round(1.5 * _SIDE / max(len(text), 1)))
    pen.text((_SIDE / 2, _SIDE / 2), text, fill=(20, 20, 60), font=ImageFont.load_default(size), anchor="mm")
    return _png(picture)


def draw_count(things: str, count: int) -> bytes:
    """``count`` (9 at most) equal ``things`` (circles, squares, triangles, stars) in a 3 x 3 grid, as a
    PNG.
    """
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (_SIDE, _SIDE), "white")
    pen = ImageDraw.Draw(picture)
    cell, half = _SIDE // 3, _SIDE // 10
    for place in [4, 0, 8, 2, 6, 1, 7, 3, 5][:count]:
        x, y = (place % 3) * cell + cell // 2, (place // 3) * cell + cell // 2
        if things == "circles":
            pen.ellipse((x - half, y - half, x + half, y + half), fill="red")
        elif things == "squares":
            pen.rectangle((x - half, y - half, x + half, y + half), fill="blue")
        else:
            colour = "green" if things == "triangles" else "purple"
            pen.polygon(shape_corners(things.removesuffix("s"), x, y, half), fill=colour)
    return _png(picture)


def _png(picture: "object") -> bytes:
    stream = io.BytesIO()
    picture.save(stream, "PNG")  # type: ignore[attr-defined]
    return stream.getvalue()


def boxes_overlap(answer: str, widest: str) -> float | None:
    """Mean over the boxes of ``widest`` of the best overlap that a box of ``answer`` has with each.

    None if ``widest`` has no box. Boxes that only ``answer`` has lower it: the mean counts them as 0.
    """
    ours, theirs = read_boxes(answer), read_boxes(widest)
    if not theirs:
        return None
    best = [max((overlap(box, each) for box in ours), default=0.0) for each in theirs]
    return sum(best) / max(len(theirs), len(ours))


def says_words(answer: str, truth: str) -> bool:
    """Whether ``truth`` stands in ``answer``, word for word, in the same case."""
    return re.search(rf"(?<!\w){re.escape(truth)}(?!\w)", answer) is not None


def first_number(answer: str) -> int | None:
    """The first number of ``answer`` in digits or as an English word up to nine; None without."""
    for word in re.findall(r"\d{1,9}|[a-z]+", answer.lower()):
        if word.isdigit():
            return int(word)
        if word in _NUMBERS:
            return _NUMBERS.index(word)
    return None


def figures_of(
    questions: Sequence[Question],
    ours: Sequence[str],
    widest: Sequence[str],
    divergences: Sequence[float],
    agreed: int,
    tokens: int,
    *,
    same_prompt: bool,
) -> CopyFigures:
    """Figures from the answers of a copy and of the widest one, in the order of ``questions``.

    ``divergences``: nats by position; ``agreed`` of ``tokens`` were chosen by both.
    """
    answered = list(zip(questions, ours, widest, strict=True))
    moved = [
        found for each, mine, right in answered if each.kind == "boxes"
        if (found := boxes_overlap(mine, right)) is not None
    ]  # fmt: skip
    true = [mean_overlap(mine, each.scene) for each, mine, _ in answered if each.scene is not None]
    words = [(each, mine, right) for each, mine, right in answered if each.kind == "words"]
    counts = [
        (each, first_number(mine), first_number(right))
        for each, mine, right in answered
        if each.kind == "count"
    ]
    return CopyFigures(
        kld_mean=sum(divergences) / max(len(divergences), 1),
        kld_most=max(divergences, default=0.0),
        positions=len(divergences),
        top1=agreed / max(tokens, 1),
        tokens=tokens,
        same_prompt=same_prompt,
        boxes_iou=_mean(moved),
        boxes_true=_mean(true),
        words=len(words) or None,
        words_changed=sum(mine.strip() != right.strip() for _, mine, right in words) if words else None,
        words_right=sum(says_words(mine, each.truth) for each, mine, _ in words) if words else None,
        counts=len(counts) or None,
        counts_changed=sum(mine != right for _, mine, right in counts) if counts else None,
        counts_right=sum(mine == int(each.truth) for each, mine, _ in counts) if counts else None,
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
