"""Instrumentation of an engine for ``bench/``: bytes that a decode step reads, and times of a request's image
phases.

The engine has no clocks of its own; the timed calls are wrapped while they are measured.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from vlfit.engine.engine import NativeEngine
from vlfit.engine.memory.usage import tensor_bytes


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Bytes that a decode step reads: ``weights`` once, ``per_cached_token`` per token in the KV cache."""

    weights: int
    per_cached_token: int

    def total(self, cached_tokens: float) -> float:
        """Bytes that a step reads with ``cached_tokens`` in the KV cache, summed over its sequences."""
        return self.weights + self.per_cached_token * cached_tokens


def step_bytes(engine: NativeEngine) -> StepBytes | None:
    """What a decode step of ``engine`` reads: layers, final norm, head, and the KV cache per token.

    None with offloaded layers, whose speed depends on the link to the GPU and not on its memory.
    """
    runner, pool = engine.runner, engine.block_manager
    if engine.account().settings.offload:
        return None
    weights = tensor_bytes([runner.text.layers, runner.text.norm, runner.text.head])
    return StepBytes(weights, runner.cache.nbytes // (pool.num_blocks * pool.block_size))


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """Seconds of each call: ``decode`` an image file, ``prepare`` it, ``encode`` it in the vision tower.

    ``prepare`` includes ``decode`` and resizing.
    """

    decode: list[float]
    prepare: list[float]
    encode: list[float]


@contextmanager
def time_requests(engine: NativeEngine) -> Iterator[RequestTimings]:
    """Within the block, time the image phases of requests; the lists that it yields grow with each call.

    Replaces the timed functions in their modules, for the whole process, until the block ends; only one
    request at a time may run. The GPU is synchronized before and after the vision tower, so a request takes
    slightly longer than usual. ``decode`` and ``prepare`` stay empty for models without ``timed_calls``.
    """
    timings = RequestTimings([], [], [])
    calls = engine.builders.timed_calls
    with ExitStack() as stack:
        if calls is not None:
            for (module, name), seconds in ((calls.decode, timings.decode), (calls.prepare, timings.prepare)):
                stack.enter_context(_record_calls(import_module(module), name, seconds))
        stack.enter_context(_record_calls(engine.runner, "encode_image", timings.encode, engine.device))
        yield timings


@contextmanager
def _record_calls(
    owner: object, name: str, seconds: list[float], device: torch.device | None = None
) -> Iterator[None]:
    """Append the duration of each call of ``owner.name`` to ``seconds``, with ``device`` synchronized."""
    call = getattr(owner, name)

    def timed(*arguments: Any, **keywords: Any) -> Any:
        _synchronize(device)
        start = time.perf_counter()
        result = call(*arguments, **keywords)
        _synchronize(device)
        seconds.append(time.perf_counter() - start)
        return result

    setattr(owner, name, timed)
    try:
        yield
    finally:
        setattr(owner, name, call)


def _synchronize(device: torch.device | None) -> None:
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
