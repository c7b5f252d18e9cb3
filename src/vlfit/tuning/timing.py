"""What whoever measures has to know of an engine: bytes that a step reads, what comes before a token.

Knows the engine's parts. An engine that nobody measures pays nothing: there are no clocks in it; the calls
that are timed from inside are wrapped for as long as is asked. Does not know statistics (``bench/``).
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from vlfit.engine.engine import Engine
from vlfit.engine.memory.usage import bytes_of
from vlfit.models.qwen3_vl import image_processor as images
from vlfit.models.qwen3_vl import prompt as picture_places


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Bytes that a decode step must read: ``weights`` once, however many speak, and ``per_cached_token`` of
    the KV cache for each token that it holds of them.
    """

    weights: int
    per_cached_token: int

    def of(self, cached: float) -> float:
        """With ``cached`` tokens in the cache, of all requests together."""
        return self.weights + self.per_cached_token * cached


def step_bytes(engine: Engine) -> StepBytes | None:
    """Counted from the tensors that are loaded: layers, last norm, and the head, which may be the embedding.

    None where layers wait in RAM: then the link to the GPU is the limit, not its memory.
    """
    runner, pool = engine.runner, engine.pool
    if engine.account().settings.offload:
        return None
    weights = bytes_of([runner.text.layers, runner.text.norm, runner.text.head])
    return StepBytes(weights, runner.cache.nbytes // (pool.blocks * pool.block_size))


@dataclass(frozen=True, slots=True)
class Parts:
    """Seconds of each call: ``decode`` the file of a picture; ``prepare`` it, which decodes and resizes it;
    the tower's ``look`` at it.
    """

    decode: list[float]
    prepare: list[float]
    look: list[float]


@contextmanager
def parts_of_requests(engine: Engine) -> Iterator[Parts]:
    """Within the block what is done for pictures is timed; only one request at a time may run then.

    The device is waited for before and after the tower, so such a request takes a little longer than others.
    """
    parts = Parts([], [], [])
    with (
        _timed(images, "decode", parts.decode),
        _timed(picture_places, "prepare_image", parts.prepare),
        _timed(engine.runner, "encode", parts.look, engine.device),
    ):
        yield parts


@contextmanager
def _timed(
    owner: object, name: str, seconds: list[float], device: torch.device | None = None
) -> Iterator[None]:
    """What ``owner`` calls ``name`` adds its times to ``seconds``, with those of ``device`` if given."""
    call = getattr(owner, name)

    def timed(*arguments: Any, **named: Any) -> Any:
        _wait(device)
        start = time.perf_counter()
        found = call(*arguments, **named)
        _wait(device)
        seconds.append(time.perf_counter() - start)
        return found

    setattr(owner, name, timed)
    try:
        yield
    finally:
        setattr(owner, name, call)


def _wait(device: torch.device | None) -> None:
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
