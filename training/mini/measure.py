"""Score a model under training on held-out questions by topic: greedy decoding, many questions at once.

(``evaluate`` asks a finished checkpoint through vlfit's engine.)
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from training.mini.atlas import Atlas
from training.mini.data import SIZES, draw_form, one_picture
from training.mini.judge import score
from training.mini.lots import draw_scene
from training.mini.model import Model
from training.mini.render import Renderer, to_numbers
from training.mini.scenes import Scene
from training.mini.sequences import PIECE, UNIT, Sequence, Words, begin_with_pictures, stack, visible_mask
from training.mini.teller import Exchange, Teller
from training.mini.texts import TOPICS, ask

# Scenes of training have seeds from 2**30 on; these are the held-out ones.
HELD_OUT = 1000
# Scenes that are looked at for each question, and once more, before a topic is given up.
TRIES = 60
# Topics that few scenes offer, and the sort of scene that does.
SORT_OF = {"chart": "chart", "garment": "photo", "garment choice": "photo", "photo facts": "photo",
           "photo limits": "photo", "written": "written", "screen": "screen"}  # fmt: skip
LONG_ANSWERS = {"grounding": 90, "detail": 120, "locate all": 300, "analysis": 400}


@dataclass(frozen=True)
class Question:
    """One held-out question: what to show, what to ask, what is true."""

    scene: Scene
    exchange: Exchange


def held_out_questions(
    atlas: Atlas, size: tuple[int, int], topics: tuple[str, ...], each: int, first_seed: int = HELD_OUT
) -> list[Question]:
    """``each`` questions of every topic, each about another scene of ``size`` pixels.

    Fewer, or none, of a topic that the atlas has nothing for: there are no animals without sprites.
    """
    found: list[Question] = []
    seed = first_seed
    for topic in topics:
        wanted = len(found) + each
        for _ in range(TRIES * each + TRIES):
            seed += 1
            scene = draw_scene(seed, size, atlas, sort=SORT_OF.get(topic, ""))
            exchange = ask(Teller(scene, np.random.default_rng(seed)), topic)
            if exchange is not None:
                found.append(Question(scene, exchange))
            if len(found) == wanted:
                break
    return found


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
        (*words.pieces(q.exchange.question), words.end, *words.newline, *words.answering()) for q in questions
    ]
    length = size[0] * size[1] // UNIT**2 + 8 + max(map(len, asked)) + most_tokens
    length = -(-length // PIECE) * PIECE
    rows = []
    for ids in asked:
        row = Sequence(length, words)
        begin_with_pictures(row, size)
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
    image, levels = model.encode_pictures(pictures, len(rows))
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


def question_plan(
    atlas: Atlas, each: int, most_tokens: int | None = None
) -> list[tuple[list[Question], int]]:
    """Held-out questions of one size of picture, and for how many tokens of answers to wait.

    ``each`` of most topics, fewer of those with long answers.
    """
    lacking = () if len(atlas.photos) else tuple(t for t, sort in SORT_OF.items() if sort == "photo")
    short = tuple(topic for topic in TOPICS if topic not in (*LONG_ANSWERS, *lacking))
    plan = [(short, 48, each)] + [((topic,), tokens, each // 4) for topic, tokens in LONG_ANSWERS.items()]
    questions = []
    for number, (topics, tokens, count) in enumerate(plan):
        columns, rows = SIZES[(number * 5) % len(SIZES)]
        asked = held_out_questions(atlas, (columns * UNIT, rows * UNIT), topics, max(1, count))
        questions.append((asked, min(most_tokens or tokens, tokens)))
    return questions


def answer_questions(
    model: Model,
    renderer: Renderer,
    words: Words,
    decode: Callable[[list[int]], str],
    plan: list[tuple[list[Question], int]],
) -> dict[str, float]:
    """Mean score by topic of the questions that ``question_plan`` drew."""
    scores: dict[str, list[float]] = defaultdict(list)
    for questions, tokens in plan:
        for start in range(0, len(questions), 256):
            part = questions[start : start + 256]
            answers = answer_all(model, renderer, words, part, tokens)
            for question, ids in zip(part, answers, strict=True):
                exchange = question.exchange
                scores[exchange.topic].append(score(exchange.topic, exchange.answer, decode(ids)))
    return {topic: sum(values) / len(values) for topic, values in scores.items()}


@torch.no_grad()
def draft_agreement(model: Model, renderer: Renderer, atlas: Atlas, words: Words, count: int = 64) -> float:
    """How often a draft for an answer's token is the model's own choice, over held-out scenes."""
    form = draw_form(np.random.default_rng(HELD_OUT), kind="one")
    random = np.random.default_rng(HELD_OUT)
    scenes = [draw_scene(HELD_OUT + number, form.size, atlas) for number in range(count)]
    layout = stack([one_picture(scene, random, words, form.length) for scene in scenes])
    processor = renderer.processor
    tokens, positions, segments, slots = (
        torch.from_numpy(each).to(processor).long()
        for each in (layout.tokens, layout.positions, layout.segments, layout.slots)
    )
    chosen = torch.from_numpy((layout.targets.ravel() >= 0).nonzero()[0]).to(processor)
    pictures = renderer.render(to_numbers(scenes), form.size) / 127.5 - 1
    image, levels = model.encode_pictures(pictures, count)
    visible = visible_mask(segments)
    states = model.read(image, levels, tokens, positions, visible, slots, segments)
    drafts = model.draft(states, image, tokens, positions, visible, slots)
    own = model.logits(states.flatten(0, 1)[chosen]).argmax(-1)
    drafted = model.logits(drafts.flatten(0, 1)[chosen - 1]).argmax(-1)
    return float((own == drafted).float().mean())
