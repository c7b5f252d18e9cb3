"""Diagnose a text, logs of vLLM to diagnose, and commands parsed into flags."""

import re
import shlex
from io import BytesIO
from typing import Any

from vlfit.doctor.diagnose import diagnose_log
from vlfit.doctor.rule import Diagnosis
from vlfit.machine.cards import machine_with_card
from vlfit.machine.model import Machine
from vlfit.units import MIB

WORKED_EXAMPLE = machine_with_card("RTX 5060", desktop=951 * MIB, wsl2=True)

SERVER = """(APIServer pid=7) INFO 11-21 10:00:01 [api_server.py:1] vLLM API server version 0.22.0
(APIServer pid=7) INFO 11-21 10:00:01 [utils.py:299] non-default args: {arguments}
(EngineCore pid=9) INFO 11-21 10:00:30 [runner.py:1] Model loading took {weights} GiB memory and 4.1 seconds
(EngineCore pid=9) INFO 11-21 10:00:50 [gpu_worker.py:436] Available KV cache memory: {kv} GiB
(EngineCore pid=9) ERROR 11-21 10:00:50 [core.py:1] EngineCore failed to start.
(EngineCore pid=9) ERROR 11-21 10:00:50 [core.py:1] ValueError: No available memory for the cache blocks.
(APIServer pid=7) RuntimeError: Engine core initialization failed. See root cause above.
"""


def vllm_start_log(model: str, weights: float, kv: float, **arguments: Any) -> str:
    """The log of a start of vLLM 0.22 that has ``kv`` GiB left for the KV cache."""
    shown = {"model_tag": model, "model": model, **arguments}
    return SERVER.format(arguments=shown, weights=weights, kv=kv)


OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.25 GiB. GPU 0 has a total capacity of "
    "7.96 GiB of which 0.41 GiB is free. Including non-PyTorch memory, this process has 17179869184.00 GiB "
    "memory in use."
)


def traceback(path: str, *functions: str) -> str:
    """A traceback through ``functions`` that ends out of memory."""
    lines = [f'  File "/x/site-packages/{path}", line {n}, in {name}' for n, name in enumerate(functions)]
    return "Traceback (most recent call last):\n" + "\n".join(lines) + "\n" + OOM


def diagnoses(text: str, machine: Machine | None = None) -> list[Diagnosis]:
    return list(diagnose_log(BytesIO(text.encode()), machine).diagnoses)


def only_diagnosis(text: str, machine: Machine | None = None) -> Diagnosis:
    """The one diagnosis of ``text``."""
    every = diagnoses(text, machine)
    assert len(every) == 1, [diagnosis.id for diagnosis in every]
    return every[0]


def flags(command: str) -> dict[str, Any]:
    """The flags of a ``vllm serve`` command by name, and the model as "model"."""
    words = [word for word in shlex.split(command) if not re.match(r"[A-Z0-9_]+=", word)]
    assert words[:2] == ["vllm", "serve"], command
    values: dict[str, Any] = {"model": words[2]}
    for word in words[3:]:
        if word.startswith("--"):
            name = word[2:]
            values[name] = True
        else:
            values[name] = word if values[name] is True else f"{values[name]} {word}"
    return values
