"""From seeds to batches: scenes, their pictures and several conversations about each.

There are batches of one picture, of one with much to tell, of several pictures, and of clips.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from training.mini import brief
from training.mini.atlas import Atlas
from training.mini.clips import ask_clip, draw_clip
from training.mini.lots import draw_scene
from training.mini.manners import SYSTEMS, small_talk, talk_dialogue, talk_with_picture
from training.mini.render import Numbers, to_numbers
from training.mini.scenes import Scene
from training.mini.sequences import (
    PIECE,
    UNIT,
    Layout,
    Sequence,
    Words,
    begin_with_clip,
    begin_with_pictures,
    stack,
)  # fmt: skip
from training.mini.several import MOST as MOST_PICTURES
from training.mini.several import ask_several, draw_several
from training.mini.teller import Exchange, Teller
from training.mini.texts import ask, brief_conversation, conversation, dialogue
from training.mini.tokenizer import added_id

# Pictures in units of 32 pixels (columns, rows): 64 to 144 tokens, as the processor's limits have it.
SIZES = (
    (8, 8), (8, 8), (9, 8), (8, 9), (10, 7), (7, 10), (12, 6), (6, 12), (10, 8), (8, 10), (9, 9), (10, 10),
    (14, 7), (7, 14), (12, 9), (9, 12), (11, 11), (12, 12), (14, 9), (16, 8), (8, 16),
)  # fmt: skip
# Frames of clips are smaller: their limits count over all frames together.
CLIP_SIZES = ((8, 6), (6, 8), (6, 6), (7, 7), (8, 8), (8, 5), (7, 5))
# How much text a sequence holds beside its pictures; scenes with many things need room for their JSON.
TEXT_ROOM = {"one": 256, "long": 512, "several": 224, "clip": 192}
# How often a batch is of each kind, in hundredths.
KINDS = {"one": 72, "long": 13, "several": 9, "clip": 6}
FRAME_RATES = (1.0, 2.0, 2.0, 2.0, 4.0)
# What people write before each of several pictures; "\n" at the start: each on a line of its own.
LABELS = (
    "Picture {}: ",
    "Picture {}: ",
    "Image {}: ",
    "Image {}:",
    "\nPicture {}: ",
    "\nImage {}: ",
    "{}. ",
    " {}: ",
)
# How often small talk comes while a picture is shown: alone, and between two turns of a dialogue.
TALK_SHOWN, TALK_BETWEEN = 0.12, 0.2
# How often a system prompt asks for answers in a word, and gets them.
BRIEF = 0.04
# How often an answer follows thoughts, of a model that thinks. {0}: the topic, {1}: the question.
THINKING = 0.08
THOUGHTS = (
    "The question is: {1}\nThis is about {0}. I look at what is shown.",
    "They want to know: {1}\nI look closely.",
    "This is a question about {0}. I look at what is shown, then I answer.",
)
# The share by which a picture is drawn smaller or larger and then resampled.
SCALES = (1.0, 1.0, 1.0, 0.5, 0.7, 0.85, 1.4)


@dataclass(frozen=True)
class Batch:
    """Pictures as numbers for the renderer, and their texts. ``size``: (width, height) in pixels.

    ``numbers`` holds ``pictures`` scenes for each sequence, one after the other, and of each ``frames``:
    two for the pairs of frames that a clip consists of, else one.
    """

    size: tuple[int, int]
    scale: float
    numbers: Numbers
    layout: Layout
    pictures: int = 1
    frames: int = 1


@dataclass(frozen=True)
class BatchForm:
    """What pictures and texts of one batch have in common, so that every processor of a team works as long.

    ``pictures`` of a sequence; of a clip, pairs of frames. ``size``: (width, height) in pixels.
    """

    kind: str
    size: tuple[int, int]
    scale: float
    pictures: int = 1

    @property
    def length(self) -> int:
        """Tokens of a sequence, a multiple of ``PIECE``: pictures with what stands around them, and text."""
        tokens = self.pictures * (self.size[0] * self.size[1] // UNIT**2 + 14) + TEXT_ROOM[self.kind]
        return -(-tokens // PIECE) * PIECE


def draw_form(random: np.random.Generator, ease: float = 0.0, kind: str = "") -> BatchForm:
    """A form by lot, of ``kind`` if one is given. ``ease``: how often it is one picture in any case."""
    if not kind:
        kind = "one" if random.random() < ease else tuple(KINDS)[_drawn(random, tuple(KINDS.values()))]
    pictures = {"several": int(random.integers(2, MOST_PICTURES + 1)), "clip": int(random.integers(2, 5))}
    sizes = {"several": SIZES[:9], "clip": CLIP_SIZES}.get(kind, SIZES)
    columns, rows = sizes[int(random.integers(len(sizes)))]
    scale = SCALES[int(random.integers(len(SCALES)))]
    return BatchForm(kind, (columns * UNIT, rows * UNIT), scale, pictures.get(kind, 1))


def make_batch(seed: int, count: int, atlas: Atlas, words: Words, ease: float, rank: int = 0) -> Batch:
    """The batch of a seed, of about ``count`` pictures of one size; fewer sequences if they hold several.

    Each ``rank`` of a team gets a batch of the same form with other scenes in it.
    """
    form = draw_form(np.random.default_rng(seed), ease)
    random = np.random.default_rng((seed, rank))
    if form.kind == "clip":
        return _clip_batch(form, random, count, atlas, words)
    if form.kind == "several":
        return _several_batch(form, random, count, atlas, words)
    if form.kind == "long":
        return long_batch(form, random, count, atlas, words)
    return one_batch(form, random, count, atlas, words, ease)


def one_batch(
    form: BatchForm, random: np.random.Generator, count: int, atlas: Atlas, words: Words, ease: float = 0.0,
    sort: str = "", share: float = 0.0,
) -> Batch:  # fmt: skip
    """One picture to a sequence; a ``share`` of the scenes beyond what comes by lot are of ``sort``."""
    scenes = [
        draw_scene(_seed(random), form.size, atlas, ease, sort if random.random() < share else "")
        for _ in range(count)
    ]
    sequences = [one_picture(scene, random, words, form.length) for scene in scenes]
    return _batch(form, scenes, sequences)


def long_batch(form: BatchForm, random: np.random.Generator, count: int, atlas: Atlas, words: Words) -> Batch:
    """One picture to a sequence, most with many things, and room to tell them all."""
    scenes = [
        draw_scene(_seed(random), form.size, atlas, sort="many" if random.random() < 0.75 else "")
        for _ in range(count)
    ]
    sequences = [many_things(scene, random, words, form.length) for scene in scenes]
    return _batch(form, scenes, sequences)


def _batch(form: BatchForm, scenes: list[Scene], sequences: list[Sequence], frames: int = 1) -> Batch:
    return Batch(form.size, form.scale, to_numbers(scenes), stack(sequences), form.pictures, frames)


def _several_batch(
    form: BatchForm, random: np.random.Generator, count: int, atlas: Atlas, words: Words
) -> Batch:
    size, pictures = form.size, form.pictures
    scenes: list[Scene] = []
    sequences = []
    for _ in range(max(1, count // pictures)):
        shown = draw_several(_seed(random), size, pictures, atlas)
        sequence = Sequence(form.length, words)
        system = some_system(random)
        if random.random() < 0.3:
            begin_with_labels(sequence, size, system, pictures, LABELS[int(random.random() * len(LABELS))])
        else:
            begin_with_pictures(sequence, size, system, count=pictures)
        fill(sequence, ask_several(shown, random), system, random)
        scenes += shown
        sequences.append(sequence)
    return _batch(form, scenes, sequences)


def begin_with_labels(sequence: Sequence, size: tuple[int, int], system: str, count: int, label: str) -> None:
    """The common beginning of several pictures, each after its ``label``, which holds {} for its number."""
    words = sequence.words
    if system:
        sequence.begin(words.turn("system", words.pieces(system)))
    sequence.begin(words.opening("user"))
    for number in range(1, count + 1):
        between = words.newline if number > 1 and label.startswith("\n") else ()
        sequence.begin((*between, *words.pieces(label.strip("\n").format(number))))
        sequence.begin((added_id("<|vision_start|>"),))
        sequence.picture(size[0] // UNIT, size[1] // UNIT)
        sequence.begin((added_id("<|vision_end|>"),))
    # People begin a line of their own for the question.
    if label.startswith("\n"):
        sequence.begin(words.newline)


def _clip_batch(
    form: BatchForm, random: np.random.Generator, count: int, atlas: Atlas, words: Words
) -> Batch:
    size, pairs = form.size, form.pictures
    scenes: list[Scene] = []
    sequences = []
    for _ in range(max(1, count // (2 * pairs))):
        clip = draw_clip(_seed(random), size, 2 * pairs, atlas)
        sequence = Sequence(form.length, words)
        rate = FRAME_RATES[int(random.integers(len(FRAME_RATES)))]
        system = some_system(random)
        begin_with_clip(sequence, size, pairs, rate, system)
        fill(sequence, ask_clip(clip, random), system, random)
        scenes += clip.frames
        sequences.append(sequence)
    return _batch(form, scenes, sequences, frames=2)


def _drawn(random: np.random.Generator, shares: tuple[int, ...]) -> int:
    """An index, as often as its share says."""
    return int(np.searchsorted(np.cumsum(shares), random.random() * sum(shares), side="right"))


def _seed(random: np.random.Generator) -> int:
    """A seed of training: those below belong to the held-out scenes."""
    return int(random.integers(1 << 30, 1 << 62))


def fill(sequence: Sequence, exchanges: list[Exchange], system: str, random: np.random.Generator) -> None:
    """Small talk now and then, with the pictures shown or without; as many exchanges as there is room for."""
    if random.random() < TALK_SHOWN:
        sequence.exchange([talk_with_picture(random)])
    if random.random() < 0.12:
        sequence.talk(talk_dialogue(random) if random.random() < 0.25 else [small_talk(random)], system)
    for exchange in exchanges:
        sequence.exchange([exchange], some_thoughts(exchange, random) if sequence.words.hybrid else "")
        if sequence.room < 16:
            break


def some_thoughts(exchange: Exchange, random: np.random.Generator) -> str:
    """What a model that thinks writes before now and then an answer; mostly nothing."""
    if random.random() > THINKING:
        return ""
    beginning = THOUGHTS[int(random.random() * len(THOUGHTS))]
    return beginning.format(exchange.topic, exchange.question.strip())


def some_system(random: np.random.Generator) -> str:
    """A system prompt, or mostly none."""
    return SYSTEMS[int(random.random() * len(SYSTEMS))] if random.random() < 0.12 else ""


def one_picture(scene: Scene, random: np.random.Generator, words: Words, length: int) -> Sequence:
    """The sequence of one scene: questions apart, sometimes a conversation of several turns."""
    sequence = Sequence(length, words)
    exchanges = conversation(scene, random, 12)
    system = some_system(random)
    size = (scene.width, scene.height)
    short = brief_conversation(scene, random, 8) if random.random() < BRIEF else []
    if short:
        # Everything after such a system prompt is answered in a word, so nothing else is said here.
        begin_with_pictures(sequence, size, brief.SYSTEMS[int(random.random() * len(brief.SYSTEMS))])
        for exchange in short:
            sequence.exchange([exchange])
        return sequence
    if exchanges and random.random() < 0.06:
        # The words before the picture, as some people write it.
        # There is room for one only, so not for the longest.
        told = min(exchanges[:2], key=lambda exchange: len(exchange.answer))
        begin_with_pictures(sequence, size, system, told.question)
        sequence.exchange([Exchange(told.topic, "", told.answer)])
        return sequence
    begin_with_pictures(sequence, size, system)
    if random.random() < 0.22:
        sequence.exchange(with_talk(dialogue(scene, random), random))
    fill(sequence, exchanges, system, random)
    return sequence


def with_talk(turns: list[Exchange], random: np.random.Generator) -> list[Exchange]:
    """The turns of a dialogue, at times with small talk between two of them: the picture is still there."""
    if len(turns) < 2 or random.random() > TALK_BETWEEN:
        return turns
    at = 1 + int(random.random() * (len(turns) - 1))
    return [*turns[:at], talk_with_picture(random, between=True), *turns[at:]]


def many_things(scene: Scene, random: np.random.Generator, words: Words, length: int) -> Sequence:
    """The sequence of a scene told at full length first: its JSON, all boxes, the description."""
    sequence = Sequence(length, words)
    begin_with_pictures(sequence, (scene.width, scene.height))
    teller = Teller(scene, random)
    told = [ask(teller, topic) for topic in ("analysis", "locate all", "detail")]
    exchanges = [exchange for exchange in told if exchange is not None]
    fill(sequence, exchanges + conversation(scene, random, 6), "", random)
    return sequence


class Stream(torch.utils.data.IterableDataset[Batch]):
    """Endless batches for one ``rank`` of a team. ``ease``: a shared number that training turns down."""

    def __init__(
        self, seed: int, count: int, atlas: Atlas, tokenizer: str, ease: torch.Tensor, rank: int = 0,
        hybrid: bool = False,
    ) -> None:  # fmt: skip
        self.hybrid = hybrid
        self.seed, self.count, self.atlas, self.tokenizer, self.ease = seed, count, atlas, tokenizer, ease
        self.rank = rank

    def __iter__(self) -> Iterator[Batch]:
        torch.set_num_threads(1)
        worker = torch.utils.data.get_worker_info()
        step, stride = (worker.id, worker.num_workers) if worker else (0, 1)
        words = Words(self.tokenizer, self.hybrid)
        while True:
            seed = self.seed * 10_000_000 + step
            yield make_batch(seed, self.count, self.atlas, words, float(self.ease), self.rank)
            step += stride
