"""One training sequence: pictures once, then several conversations about them that do not see each other.

Each segment attends to the pictures and itself, with the positions it would have if it alone followed them:
what the model meets when it is asked a single question. Text has the chat template's exact form.
"""

import re
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer

from training.mini.teller import Exchange
from training.mini.tokenizer import added_id

UNIT = 32
# Gated delta nets compute so many tokens at once: lengths and the starts of their segments are multiples.
PIECE = 32
# Segment numbers: 0 is the common beginning with the pictures; from BLIND on, a segment sees only itself.
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


# A word that was read off a picture, after what stands before it in every sentence that quotes one.
READ = re.compile(r'(?:(?:says|word) \\?"|"text": \[")([A-Za-z]{2,})')


class Words:
    """Tokenizes the pieces that come again and again, remembering them."""

    def __init__(self, path: str, hybrid: bool = False) -> None:
        """``hybrid``: for Qwen3.5, whose segments begin with a piece and whose answers follow thoughts."""
        tokenizer = Tokenizer.from_file(path)
        # One worker is one core; the tokenizer's own threads would fight over it.
        self.pieces = lru_cache(maxsize=100_000)(lambda text: tuple(tokenizer.encode(text).ids))
        self.start, self.end = added_id("<|im_start|>"), added_id("<|im_end|>")
        self.newline = self.pieces("\n")
        self.hybrid = hybrid

    def answer(self, text: str) -> tuple[int, ...]:
        """An answer, with the word that was read in it spelled one letter a token.

        The tokenizer would cut "through" into pieces that no letter on the picture tells apart; spelled, it
        is the same text, and what was learnt of one word helps with all.
        """
        found = READ.search(text)
        if found is None:
            return self.pieces(text)
        letters = tuple(token for letter in found[1] for token in self.pieces(letter))
        return (*self.pieces(text[: found.start(1)]), *letters, *self.answer(text[found.end(1) :]))

    def turn(self, role: str, body: tuple[int, ...]) -> tuple[int, ...]:
        """A whole turn of the chat template, the newline after it included."""
        return (*self.opening(role), *body, self.end, *self.newline)

    def opening(self, role: str) -> tuple[int, ...]:
        """The beginning of a turn."""
        return (self.start, *self.pieces(role), *self.newline)

    def answering(self, thinking: bool = False) -> tuple[int, ...]:
        """The beginning of the answer that is asked for: Qwen3.5's template writes a block of no thoughts, or
        with ``thinking`` opens one."""
        if not self.hybrid:
            return self.opening("assistant")
        return (
            *self.opening("assistant"),
            *self.pieces("<think>\n" if thinking else "<think>\n\n</think>\n\n"),
        )


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
        self.next_slot = 0
        self.next_blind = BLIND

    @property
    def room(self) -> int:
        """Tokens still free for a further segment."""
        return self.length - self.segment_start

    @property
    def segment_start(self) -> int:
        """Where the next segment begins."""
        return -(-self.used // PIECE) * PIECE if self.words.hybrid else self.used

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

    def picture(self, columns: int, rows: int, token: str = "<|image_pad|>") -> None:
        """Append the image tokens of the next picture; time stands still, height and width count."""
        start, count, position = self.used, columns * rows, self.next_position
        self.tokens[start : start + count] = added_id(token)
        self.slots[start : start + count] = np.arange(self.next_slot, self.next_slot + count)
        self.next_slot += count
        self.segments[start : start + count] = 0
        self.positions[0, start : start + count] = position
        self.positions[1, start : start + count] = position + np.arange(count) // columns
        self.positions[2, start : start + count] = position + np.arange(count) % columns
        self.used += count
        self.next_position += max(columns, rows)

    def begin(self, ids: tuple[int, ...]) -> None:
        """Append tokens to the common beginning."""
        self.next_position = self.text(ids, 0, self.next_position)

    def exchange(self, exchanges: list[Exchange], thoughts: str = "") -> bool:
        """Append one segment: a question and its answer, or several turns. False if there is no room.

        ``thoughts``: written before the last answer, by a model that thinks.
        """
        words = self.words
        turns = []
        thought = words.pieces(f"{thoughts}\n</think>\n\n") if thoughts else ()
        for number, exchange in enumerate(exchanges):
            asked = words.pieces(exchange.question)
            opening = words.opening("user") if number else ()
            before = (*words.newline, *opening) if number else ()
            # Of the turns before the last the template keeps no thoughts.
            is_last = number == len(exchanges) - 1
            answering = words.answering(bool(thoughts)) if is_last else words.opening("assistant")
            question = (*before, *asked, words.end, *words.newline, *answering)
            turns.append(
                (question, (*(thought if is_last else ()), *words.answer(exchange.answer), words.end))
            )
        if sum(len(question) + len(answer) for question, answer in turns) > self.room:
            return False
        self.used = self.segment_start
        position = self.next_position
        for question, answer in turns:
            position = self.text((*question, *answer), self.next_segment, position, len(question))
        self.next_segment += 1
        return True

    def talk(self, exchanges: list[Exchange], system: str) -> None:
        """Append a conversation without a picture, if there is room."""
        words = self.words
        turns = [
            (
                (
                    *words.turn("user", words.pieces(exchange.question)),
                    *(words.answering() if number == len(exchanges) - 1 else words.opening("assistant")),
                ),
                (*words.pieces(exchange.answer), words.end),
            )
            for number, exchange in enumerate(exchanges)
        ]
        before = words.turn("system", words.pieces(system)) if system else ()
        if len(before) + sum(len(asked) + len(answer) + 1 for asked, answer in turns) > self.room:
            return
        self.used = self.segment_start
        position = self.text(before, self.next_blind, 0) if before else 0
        for number, (asked, answer) in enumerate(turns):
            opening = (*words.newline, *asked) if number else asked
            position = self.text((*opening, *answer), self.next_blind, position, len(opening))
        self.next_blind += 1


def begin_with_pictures(
    sequence: Sequence, size: tuple[int, int], system: str = "", question: str = "", count: int = 1
) -> None:
    """The common beginning: an optional system turn, then the user's turn up to the end of the pictures."""
    words = sequence.words
    if system:
        sequence.begin(words.turn("system", words.pieces(system)))
    sequence.begin((*words.opening("user"), *(words.pieces(question) if question else ())))
    for _ in range(count):
        sequence.begin((added_id("<|vision_start|>"),))
        sequence.picture(size[0] // UNIT, size[1] // UNIT)
        sequence.begin((added_id("<|vision_end|>"),))


def begin_with_clip(
    sequence: Sequence, size: tuple[int, int], pairs: int, frame_rate: float, system: str = ""
) -> None:
    """The same for a clip: each pair of frames after its time, all of it inside one more pair of markers."""
    words = sequence.words
    start, end = (added_id("<|vision_start|>"),), (added_id("<|vision_end|>"),)
    if system:
        sequence.begin(words.turn("system", words.pieces(system)))
    sequence.begin((*words.opening("user"), *start))
    for pair in range(pairs):
        seconds = (2 * pair / frame_rate + (2 * pair + 1) / frame_rate) / 2
        sequence.begin((*words.pieces(f"<{seconds:.1f} seconds>"), *start))
        sequence.picture(size[0] // UNIT, size[1] // UNIT, "<|video_pad|>")
        sequence.begin(end)
    sequence.begin(end)


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


def visible_mask(segments: torch.Tensor) -> torch.Tensor:
    """Who sees whom, [batch, 1, length, length]: earlier tokens of one's own segment and of the beginning."""
    looking, seen = segments[:, :, None], segments[:, None, :]
    length = segments.shape[1]
    earlier = torch.ones((length, length), dtype=torch.bool, device=segments.device).tril()
    allowed = (looking == seen) | ((seen == 0) & (looking > 0) & (looking < BLIND))
    return (allowed & earlier).unsqueeze(1)
