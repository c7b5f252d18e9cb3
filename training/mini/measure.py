"""Put held-out questions to a model under training and score the answers by topic.

Knows: greedy decoding with the dense model, many questions at once, and how an answer is judged.
Does not know: vlfit's engine (`evaluate.py` asks the shipped checkpoint through it).
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from training.mini.atlas import Atlas
from training.mini.data import SIZES, UNIT, Sequence, Words, begin_with_picture, stack
from training.mini.lots import draw_scene
from training.mini.model import Model
from training.mini.render import Renderer, to_numbers
from training.mini.scenes import Scene
from training.mini.texts import TOPICS, Exchange, Teller
from training.mini.vocabulary import COLOURS

# Scenes of training have seeds from 2**30 on; these are the held-out ones.
HELD_OUT = 1000


@dataclass(frozen=True)
class Question:
    """One held-out question: what to show, what to ask, what is true."""

    scene: Scene
    exchange: Exchange


def held_out_questions(
    atlas: Atlas, size: tuple[int, int], topics: tuple[str, ...], each: int, first_seed: int = HELD_OUT
) -> list[Question]:
    """``each`` questions of every topic, each about another scene of ``size`` pixels."""
    found: list[Question] = []
    seed = first_seed
    for topic in topics:
        wanted = len(found) + each
        while len(found) < wanted:
            seed += 1
            scene = draw_scene(seed, size, atlas)
            exchange = Teller(scene, np.random.default_rng(seed)).ask(topic)
            if exchange is not None:
                found.append(Question(scene, exchange))
    return found


def score(topic: str, truth: str, answer: str) -> float:
    """1 for right, 0 for wrong; for boxes the mean overlap (intersection over union), 0 for broken JSON."""
    if topic == "grounding":
        return box_overlap(boxes_in(truth), boxes_in(answer))
    if topic == "analysis":
        return analysis_score(truth, answer)
    if topic == "photo":
        return photo_score(truth, answer)
    return float(plain(answer) == plain(truth))


def photo_score(truth: str, answer: str) -> float:
    """1 if it is called a photo, its main colour is named, and the first colour named is a main one."""
    true, said = (
        [word for word in re.findall(r"[a-z]+", text.partition(" I can ")[0].lower()) if word in COLOURS]
        for text in (truth, answer)
    )
    right = "photo" in answer and said and said[0] in true and true[0] in said
    return float(bool(right))


def plain(text: str) -> str:
    """Lower case, spaces and full stops evened out."""
    return re.sub(r"\s+", " ", text).strip().rstrip(".").lower()


def unfence(text: str) -> object:
    """The JSON value of an answer, or None."""
    match = re.fullmatch(r"\s*```json\n(.*)\n```\s*", text, re.DOTALL)
    try:
        return json.loads(match.group(1) if match else text)
    except json.JSONDecodeError:
        return None


Boxes = list[tuple[str, tuple[float, ...]]]


def boxes_in(answer: str) -> Boxes:
    """Labels and boxes of a grounding answer; empty if it is not of that form."""
    return _boxes(unfence(answer))


def _boxes(value: object) -> Boxes:
    if not isinstance(value, list):
        return []
    found = []
    for item in value:
        if not isinstance(item, dict) or not isinstance(box := item.get("bbox_2d"), list) or len(box) != 4:
            return []
        found.append((str(item.get("label")), tuple(float(edge) for edge in box)))
    return found


def box_overlap(truth: Boxes, answer: Boxes) -> float:
    """Mean overlap of the true boxes with their best match of the same label; extra boxes count as misses."""
    if not truth or not answer:
        return float(len(truth) == len(answer))
    best = [
        max((overlap(box, other) for name, other in answer if name == label), default=0.0)
        for label, box in truth
    ]
    return sum(best) / max(len(truth), len(answer))


def overlap(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """Intersection over union of two boxes (left, top, right, bottom)."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    shared = max(0.0, width) * max(0.0, height)
    area = (one[2] - one[0]) * (one[3] - one[1]) + (other[2] - other[0]) * (other[3] - other[1]) - shared
    return shared / area if area > 0 else 0.0


def analysis_score(truth: str, answer: str) -> float:
    """1 if labels and text are those of the scene and the boxes overlap by half on average, else 0."""
    true, said = unfence(truth), unfence(answer)
    if not isinstance(true, dict) or not isinstance(said, dict):
        return 0.0
    true_boxes, said_boxes = _boxes(true["objects"]), _boxes(said.get("objects"))
    labels_right = sorted(label for label, _ in true_boxes) == sorted(label for label, _ in said_boxes)
    right = labels_right and said.get("text") == true["text"]
    return float(right and box_overlap(true_boxes, said_boxes) >= 0.5)


@torch.no_grad()
def answer_all(
    model: Model, renderer: Renderer, words: Words, questions: list[Question], most_tokens: int
) -> list[list[int]]:
    """Greedy answers as token ids; all scenes must have one size."""
    processor = renderer.processor
    first = questions[0].scene
    size = (first.width, first.height)
    pictures = renderer.render(to_numbers([q.scene for q in questions]), size) / 127.5 - 1
    asked = [
        (*words.pieces(q.exchange.question), words.end, *words.newline, *words.opening("assistant"))
        for q in questions
    ]
    length = size[0] * size[1] // UNIT**2 + 8 + max(map(len, asked)) + most_tokens
    rows = []
    for ids in asked:
        row = Sequence(length, words)
        begin_with_picture(row, size, "")
        row.next_position = row.text(ids, 0, row.next_position)
        rows.append(row)
    layout = stack(rows)
    tokens = torch.from_numpy(layout.tokens).to(processor).long()
    positions = torch.from_numpy(layout.positions).to(processor).long()
    slots = torch.from_numpy(layout.slots).to(processor).long()
    # Everything after the end is invisible to what comes before it, so a plain causal mask is enough.
    visible = torch.ones((1, 1, length, length), dtype=torch.bool, device=processor).tril()
    ends = torch.tensor([row.used for row in rows], device=processor)
    nexts = torch.tensor([row.next_position for row in rows], device=processor)
    image, levels = model.model.visual(pictures)
    index = torch.arange(len(rows), device=processor)
    done = torch.zeros(len(rows), dtype=torch.bool, device=processor)
    for step in range(most_tokens):
        states = model.read(image, levels, tokens, positions, visible, slots)
        chosen = model.logits(states[index, ends + step - 1]).argmax(-1)
        chosen = torch.where(done, words.end, chosen)
        tokens[index, ends + step] = chosen
        positions[:, index, ends + step] = nexts + step
        done |= chosen == words.end
        if bool(done.all()):
            break
    answers = []
    for row, start in zip(tokens.tolist(), ends.tolist(), strict=True):
        said = row[start : start + most_tokens]
        answers.append(said[: said.index(words.end)] if words.end in said else said)
    return answers


def measure(
    model: Model,
    renderer: Renderer,
    atlas: Atlas,
    words: Words,
    decode: Callable[[list[int]], str],
    each: int,
    most_tokens: int | None = None,
) -> dict[str, float]:
    """Mean score by topic on held-out scenes, ``each`` of most topics, fewer of those with long answers."""
    scores: dict[str, list[float]] = defaultdict(list)
    short = tuple(topic for topic in TOPICS if topic not in ("analysis", "detail", "grounding"))
    plan = ((short, 40, each), (("grounding",), 64, each // 2), (("analysis",), 230, each // 4))
    for number, (topics, tokens, count) in enumerate(plan):
        columns, rows = SIZES[(number * 5) % len(SIZES)]
        questions = held_out_questions(atlas, (columns * UNIT, rows * UNIT), topics, count)
        for start in range(0, len(questions), 256):
            part = questions[start : start + 256]
            answers = answer_all(model, renderer, words, part, most_tokens or tokens)
            for question, ids in zip(part, answers, strict=True):
                topic = question.exchange.topic
                scores[topic].append(score(topic, question.exchange.answer, decode(ids)))
    return {topic: sum(values) / len(values) for topic, values in scores.items()}
