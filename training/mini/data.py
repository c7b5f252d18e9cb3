"""From seeds to batches: scenes, their texts as tokens, packed so that one look at a picture teaches much.

Knows: how a batch is laid out. One sequence holds the picture once, then several exchanges ("segments").
Each segment sees the picture and itself, not the others, and is numbered as if it alone followed the
picture: exactly what the model meets when it is asked a single question.
Does not know: the model, or what a processor does with a batch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer

from training.mini.atlas import Atlas
from training.mini.lots import draw_scene
from training.mini.manners import MANNERS, SYSTEMS
from training.mini.render import Numbers, to_numbers
from training.mini.scenes import Scene
from training.mini.texts import Exchange, conversation
from training.mini.tokenizer import added_id

# Pictures in units of 32 pixels (columns, rows): all lie within the processor's limits (64 to 100 tokens).
SIZES = (
    (8, 8), (8, 8), (9, 8), (8, 9), (12, 6), (6, 12), (11, 8), (8, 11), (12, 8), (8, 12), (10, 10), (14, 7),
    (7, 14),
)  # fmt: skip
UNIT = 32
TEXT_ROOM = 256
# Segment numbers: 0 is the common beginning with the picture; from BLIND on, a segment sees only itself.
BLIND = 100
PADDING = -1
Ints = npt.NDArray[np.int16]


@dataclass(frozen=True)
class Layout:
    """Tokens of a batch, all [batch, length]; ``positions``: [3, batch, length].

    ``targets``: the token that should come next, or -1; ``weights``: how much that counts.
    """

    tokens: Ints
    positions: Ints
    segments: Ints
    slots: Ints
    targets: Ints
    weights: npt.NDArray[np.float32]


@dataclass(frozen=True)
class Batch:
    """Pictures as numbers for the renderer, and their texts. ``size``: (width, height) in pixels."""

    size: tuple[int, int]
    scale: float
    numbers: Numbers
    layout: Layout


class Words:
    """Tokenizes the pieces that come again and again, remembering them."""

    def __init__(self, path: str) -> None:
        tokenizer = Tokenizer.from_file(path)
        # One worker is one core; the tokenizer's own threads would fight over it.
        self.pieces = lru_cache(maxsize=100_000)(lambda text: tuple(tokenizer.encode(text).ids))
        self.start, self.end = added_id("<|im_start|>"), added_id("<|im_end|>")
        self.newline = self.pieces("\n")

    def turn(self, role: str, body: tuple[int, ...]) -> tuple[int, ...]:
        """A whole turn of the chat template, the newline after it included."""
        return (*self.opening(role), *body, self.end, *self.newline)

    def opening(self, role: str) -> tuple[int, ...]:
        """The beginning of a turn."""
        return (self.start, *self.pieces(role), *self.newline)


class Sequence:
    """One row of a batch while it is filled."""

    def __init__(self, length: int, words: Words) -> None:
        self.tokens = np.full(length, added_id("<|endoftext|>"), np.int16)
        self.positions = np.zeros((3, length), np.int16)
        self.segments = np.full(length, PADDING, np.int16)
        self.slots = np.full(length, -1, np.int16)
        self.targets = np.full(length, -1, np.int16)
        self.weights = np.zeros(length, np.float32)
        self.length, self.words = length, words
        self.used = 0
        self.next_position = 0
        self.next_segment = 1

    @property
    def room(self) -> int:
        """Tokens still free."""
        return self.length - self.used

    def text(self, ids: tuple[int, ...], segment: int, position: int, learn_from: int | None = None) -> int:
        """Append tokens; those from ``learn_from`` on are to be predicted. Returns the next position."""
        start, count = self.used, len(ids)
        self.tokens[start : start + count] = ids
        self.positions[:, start : start + count] = np.arange(position, position + count)
        self.segments[start : start + count] = segment
        if learn_from is not None:
            answer = count - learn_from
            self.targets[start + learn_from - 1 : start + count - 1] = ids[learn_from:]
            # A long answer counts more than a short one, but not in proportion to its length.
            self.weights[start + learn_from - 1 : start + count - 1] = (12 / answer) ** 0.5
        self.used += count
        return position + count

    def picture(self, columns: int, rows: int) -> None:
        """Append the image tokens; time stands still, height and width count."""
        start, count, position = self.used, columns * rows, self.next_position
        self.tokens[start : start + count] = added_id("<|image_pad|>")
        self.slots[start : start + count] = np.arange(count)
        self.segments[start : start + count] = 0
        self.positions[0, start : start + count] = position
        self.positions[1, start : start + count] = position + np.arange(count) // columns
        self.positions[2, start : start + count] = position + np.arange(count) % columns
        self.used += count
        self.next_position += max(columns, rows)

    def begin(self, ids: tuple[int, ...]) -> None:
        """Append tokens to the common beginning."""
        self.next_position = self.text(ids, 0, self.next_position)

    def exchange(self, exchanges: list[Exchange]) -> bool:
        """Append one segment: a question and its answer, or several turns. False if there is no room."""
        words = self.words
        turns = []
        for number, exchange in enumerate(exchanges):
            asked = words.pieces(exchange.question)
            opening = words.opening("user") if number else ()
            before = (*words.newline, *opening) if number else ()
            question = (*before, *asked, words.end, *words.newline, *words.opening("assistant"))
            turns.append((question, (*words.pieces(exchange.answer), words.end)))
        if sum(len(question) + len(answer) for question, answer in turns) > self.room:
            return False
        position = self.next_position
        for question, answer in turns:
            position = self.text((*question, *answer), self.next_segment, position, len(question))
        self.next_segment += 1
        return True

    def manners(self, question: str, answer: str, system: str) -> None:
        """Append a conversation without a picture, if there is room."""
        words = self.words
        before = words.turn("system", words.pieces(system)) if system else ()
        asked = (*before, *words.turn("user", words.pieces(question)), *words.opening("assistant"))
        ids = (*asked, *words.pieces(answer), words.end)
        if len(ids) <= self.room:
            self.text(ids, BLIND, 0, len(asked))


def begin_with_picture(sequence: Sequence, size: tuple[int, int], system: str, question: str = "") -> None:
    """The common beginning: an optional system turn, then the user's turn up to the end of the picture."""
    words = sequence.words
    if system:
        sequence.begin(words.turn("system", words.pieces(system)))
    before = words.pieces(question) if question else ()
    sequence.begin((*words.opening("user"), *before, added_id("<|vision_start|>")))
    sequence.picture(size[0] // UNIT, size[1] // UNIT)
    sequence.begin((added_id("<|vision_end|>"),))


def fill(scene: Scene, random: np.random.Generator, words: Words, length: int) -> Sequence:
    """The sequence of one scene: as many exchanges as fit."""
    sequence = Sequence(length, words)
    exchanges = conversation(scene, random, 12)
    system = SYSTEMS[int(random.integers(len(SYSTEMS)))] if random.random() < 0.12 else ""
    if random.random() < 0.06:
        # The words before the picture, as some people write it.
        begin_with_picture(sequence, (scene.width, scene.height), system, exchanges[0].question)
        sequence.exchange([Exchange(exchanges[0].topic, "", exchanges[0].answer)])
        return sequence
    begin_with_picture(sequence, (scene.width, scene.height), system)
    if random.random() < 0.1:
        question, answer = MANNERS[int(random.integers(len(MANNERS)))]
        sequence.manners(question, answer, system)
    if random.random() < 0.15:
        sequence.exchange(exchanges[:3])
        exchanges = exchanges[3:]
    for exchange in exchanges:
        sequence.exchange([exchange])
        if sequence.room < 16:
            break
    return sequence


def stack(sequences: list[Sequence]) -> Layout:
    """Rows to a layout."""
    return Layout(
        np.stack([s.tokens for s in sequences]),
        np.stack([s.positions for s in sequences], 1),
        np.stack([s.segments for s in sequences]),
        np.stack([s.slots for s in sequences]),
        np.stack([s.targets for s in sequences]),
        np.stack([s.weights for s in sequences]),
    )


def make_batch(seed: int, count: int, atlas: Atlas, words: Words, ease: float) -> Batch:
    """The batch of a seed: ``count`` scenes of one size."""
    random = np.random.default_rng(seed)
    columns, rows = SIZES[int(random.integers(len(SIZES)))]
    size = (columns * UNIT, rows * UNIT)
    scale = float(random.choice([1.0, 1.0, 0.6, 0.8, 1.4]))
    length = -(-(columns * rows + 8 + TEXT_ROOM) // 8) * 8
    scenes, sequences = [], []
    for _ in range(count):
        scene = draw_scene(int(random.integers(1 << 30, 1 << 62)), size, atlas, ease)
        scenes.append(scene)
        sequences.append(fill(scene, random, words, length))
    return Batch(size, scale, to_numbers(scenes), stack(sequences))


class Stream(torch.utils.data.IterableDataset[Batch]):
    """Endless batches. ``ease``: a shared number that training turns down as it goes on."""

    def __init__(self, seed: int, count: int, atlas: Atlas, tokenizer: str, ease: torch.Tensor) -> None:
        self.seed, self.count, self.atlas, self.tokenizer, self.ease = seed, count, atlas, tokenizer, ease

    def __iter__(self) -> Iterator[Batch]:
        torch.set_num_threads(1)
        worker = torch.utils.data.get_worker_info()
        step, stride = (worker.id, worker.num_workers) if worker else (0, 1)
        words = Words(self.tokenizer)
        while True:
            seed = self.seed * 10_000_000 + step
            yield make_batch(seed, self.count, self.atlas, words, float(self.ease))
            step += stride


def visible_mask(segments: torch.Tensor) -> torch.Tensor:
    """Who sees whom, [batch, 1, length, length]: earlier tokens of one's own segment and of the beginning."""
    looking, seen = segments[:, :, None], segments[:, None, :]
    length = segments.shape[1]
    earlier = torch.ones((length, length), dtype=torch.bool, device=segments.device).tril()
    allowed = (looking == seen) | ((seen == 0) & (looking > 0) & (looking < BLIND))
    return (allowed & earlier).unsqueeze(1)
