"""Ask a checkpoint the held-out questions through vlfit's own engine, on all cores.

Two processes with one thread each answer faster than one with two: mini's matrices are too small to share.
"""

import math
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache

from training.mini.gates import ScoredAnswer
from training.mini.held_out import Dialogue, HeldOut
from training.mini.judge import score
from vlfit.api.conversation import ImagePart, VideoPart
from vlfit.client import VLM

# So many dialogues at once fill the engine's batches.
AT_ONCE = 16
# The longest true answer, a scene of nine things, takes about 400 tokens.
MOST_TOKENS = 600
FRAMES_PER_SECOND = 2.0
# Items given to a process at a time, and questions for which another process is worth starting.
PORTION, WORTH_A_PROCESS = 24, 150

QuestionProgress = Callable[[int], None]


def ask_all(
    model: str, items: list[HeldOut], progress: QuestionProgress, processes: int = 0
) -> list[ScoredAnswer]:
    """Every answer, judged, in the order of the questions. ``progress`` is told how many there are so far.

    ``processes``: 0 for as many as there are cores, fewer where there is little to ask. Raises ``VlfitError``
    for a checkpoint that cannot be loaded.
    """
    worth = math.ceil(sum(item.questions for item in items) / WORTH_A_PROCESS)
    processes = max(1, min(processes or os.cpu_count() or 1, worth))
    portions = [items[start : start + PORTION] for start in range(0, len(items), PORTION)]
    judged: list[ScoredAnswer] = []
    for part in _answers(model, portions, processes):
        judged += part
        progress(len(judged))
    return judged


def _answers(model: str, portions: list[list[HeldOut]], processes: int) -> Iterator[list[ScoredAnswer]]:
    if processes == 1:
        with VLM(model, sequences=AT_ONCE) as vlm:
            for portion in portions:
                yield ask_portion(vlm, portion)
        return
    # Spawned, not forked: a fork of a process that has used threads may hang.
    context = multiprocessing.get_context("spawn")
    with _one_thread_each(), ProcessPoolExecutor(processes, mp_context=context) as pool:
        yield from pool.map(_ask_in_process, [model] * len(portions), portions)


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Processes started within the block compute on one thread, unless someone has said otherwise."""
    given = os.environ.get("OMP_NUM_THREADS")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        yield
    finally:
        if given is None:
            del os.environ["OMP_NUM_THREADS"]


def _ask_in_process(model: str, portion: list[HeldOut]) -> list[ScoredAnswer]:
    return ask_portion(_loaded(model), portion)


@cache
def _loaded(model: str) -> VLM:
    """The model of a process, loaded once; it ends with the process."""
    return VLM(model, sequences=AT_ONCE)


def ask_portion(vlm: VLM, items: list[HeldOut]) -> list[ScoredAnswer]:
    """Ask everything about some items, many dialogues at once."""
    pairs = [(vlm, item, turns) for item in items for turns in item.dialogues]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return [one for judged in pool.map(lambda pair: ask_dialogue(*pair), pairs) for one in judged]


def ask_dialogue(vlm: VLM, item: HeldOut, turns: Dialogue) -> list[ScoredAnswer]:
    """Ask turn by turn: the pictures come with the first, the model's own answers stay in the history."""
    chat = vlm.chat(system=item.system, temperature=0.0, max_tokens=MOST_TOKENS)
    judged = []
    for number, exchange in enumerate(turns):
        said = chat.ask(exchange.question, *(parts_of(item) if number == 0 else ())).text
        judged.append(ScoredAnswer(item.name, exchange, said, score(exchange.topic, exchange.answer, said)))
    return judged


def parts_of(item: HeldOut) -> tuple[ImagePart | VideoPart, ...]:
    """What is shown."""
    if item.is_clip:
        return (VideoPart(item.pictures, FRAMES_PER_SECOND, item.name),)
    return tuple(ImagePart(picture, item.name) for picture in item.pictures)
