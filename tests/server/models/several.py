"""A server of several tiny models, of which as many are in memory as a test gives them bytes for."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from tests.server.harness import Running, running
from vlfit.api.engine_options import EngineOptions
from vlfit.api.progress import LoadProgress
from vlfit.backends.base import Backend
from vlfit.backends.held_memory import expected_memory
from vlfit.backends.native import NativeBackend
from vlfit.checkpoint.source import Checkpoint, open_checkpoint
from vlfit.machine.host import read_host
from vlfit.plan.native.model_set import own_bytes, plan_in_ram
from vlfit.plan.native.ram import RAM_RESERVE
from vlfit.server.models.all_models import AllModels
from vlfit.server.models.on_demand import OnDemandBackend, OnDemandModel
from vlfit.server.models.served_models import ServedModel
from vlfit.server.models.switched_models import SwitchedModels
from vlfit.server.server_settings import ServerSettings

OPTIONS = EngineOptions(device="cpu", max_model_len=256, max_num_seqs=2, max_tokens=8)
QUESTION = "What do you see?"


@dataclass
class Several:
    """``limit``: bytes for models in memory, of which there may be ``at_once``."""

    models: SwitchedModels
    backend: AllModels
    limit: int
    at_once: int

    def held(self) -> tuple[int, int]:
        """Models in memory, and their bytes."""
        sizes = [row["held"] for row in self.models.rows() if row["held"]]
        return len(sizes), sum(sizes)

    def free(self) -> int:
        number, held = self.held()
        return self.limit - held + RAM_RESERVE if number < self.at_once else 0


def on_demand(checkpoint: Checkpoint) -> OnDemandModel:
    plan = plan_in_ram(checkpoint, OPTIONS, value_bytes=4, cpu_16_bit=True, host=read_host())
    return OnDemandModel(
        checkpoint,
        OPTIONS,
        own_bytes(plan.lines),
        partial(_open, checkpoint),
        partial(expected_memory, gpus=()),
    )


def _open(checkpoint: Checkpoint, progress: LoadProgress) -> Backend:
    return NativeBackend.load(checkpoint, OPTIONS, progress)


def several(names: Sequence[str | Path], *, at_once: int = 1, **line: Any) -> Several:
    """Models of checkpoints, none of them loaded. ``at_once``: how many may be in memory together."""
    planned = [on_demand(open_checkpoint(name)) for name in names]
    backends = [OnDemandBackend(model, "cpu") for model in planned]
    served = [ServedModel(each, (), each.context) for each in backends]
    found: list[Several] = []
    models = SwitchedModels(
        list(zip(served, backends, strict=True)), lambda: found[0].free(), **{"min_stay": 0.05, **line}
    )
    largest = sorted((model.planned_bytes for model in planned), reverse=True)[:at_once]
    limit = sum(largest) + 64 * 1024  # tables beside the weights
    found.append(Several(models, AllModels(models), limit, at_once))
    return found[0]


@contextmanager
def serving(made: Several, settings: ServerSettings | None = None) -> Iterator[Running]:
    try:
        with running(made.backend, settings) as server:
            yield server
    finally:
        made.backend.close()


def ask(server: Running, model: str, text: str = QUESTION, **more: Any) -> httpx.Response:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": 8,
        **more,
    }
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)


def answer_of(reply: httpx.Response) -> str:
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["message"]["content"]
    return text
