"""Says when kernels are compiled, which takes a first start on a card half a minute, and counts them.

Triton compiles a kernel for each kind of launch and keeps it in its cache; later starts find it there. Knows
Triton's listener. Does not know the kernels.
"""

import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from vlfit.units import format_seconds

logger = logging.getLogger(__name__)


@dataclass
class Compiled:
    """``kernels`` that were in no cache, and the ``seconds`` that the compiler took."""

    kernels: int = 0
    seconds: float = 0.0

    def note(self, *, times: Any, cache_hit: bool, **_: Any) -> None:
        """What Triton tells of each kernel that it was asked for the first time."""
        if cache_hit:
            return
        if not self.kernels:
            logger.info("compiling kernels for this card, once; they are kept in Triton's cache")
        self.kernels += 1
        self.seconds += times.total / 1e6  # microseconds

    def tell(self) -> None:
        """Say in the log what there was to compile, if anything."""
        if self.kernels:
            logger.info("%d kernels compiled in %s", self.kernels, format_seconds(self.seconds))


def listen(device: str) -> Compiled:
    """Count what this process compiles from now on; nothing where ``device`` (as in ``EngineOptions``) turns
    out to be a CPU, for which Triton is not imported.
    """
    compiled = Compiled()
    if device == "cpu" or not torch.cuda.is_available():
        return compiled
    with suppress(ImportError, AttributeError):  # a Triton without a listener, or none
        from triton import knobs

        knobs.compilation.listener = compiled.note
    return compiled
