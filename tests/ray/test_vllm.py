"""A worker of a cluster with a vLLM inside: it ends with its worker, and another comes in its place.

Needs a Python that has vLLM, which VLFIT_VLLM_PYTHON names (make test-vllm). Two starts of vLLM: a minute.
"""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.backends.vllm.processes import all_command_lines, processes_with
from tests.ray.parts import MemoryOutput, RecordedProgress, gallery, job
from tests.vllm_parser import PYTHON
from vlfit.api.engine_options import EngineOptions
from vlfit.backends.opening import BackendSpec
from vlfit.backends.vllm.serve_command import VllmOptions
from vlfit.tasks.batch.executor import Outcome
from vlfit.tasks.batch.ray import RayOptions
from vlfit.tasks.batch.ray.coordinator import run_on_ray

pytestmark = [
    pytest.mark.ray,
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON, reason="needs vLLM, here or at VLFIT_VLLM_PYTHON"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
]


class Killer(RecordedProgress):
    """Ends the worker in the midst, and then writes the file ``killed``.

    ``first``: the worker's vLLM, with all that it had started by then.
    """

    def __init__(self, killed: Path) -> None:
        super().__init__()
        self.killed = killed
        self.first: list[int] = []

    def settled(self, outcome: Outcome) -> None:
        super().settled(outcome)
        if self.tally.settled == 8:
            self.first = vllm_of(self.workers[0])
            os.kill(self.workers[0], signal.SIGKILL)
            self.killed.touch()


def vllm_of(worker: int) -> list[int]:
    """The guard that ``worker`` has started, and all in the session that it leads."""
    (guard,) = [pid for pid, _ in processes_with("guard.py") if parent(pid) == worker]
    return [pid for pid, _ in all_command_lines() if session(pid) == guard]


def parent(pid: int) -> int:
    return _field(pid, 1)


def session(pid: int) -> int:
    return _field(pid, 3)


def _field(pid: int, number: int) -> int:
    """Of /proc/PID/stat, counted from the state; 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[number])
    except OSError:
        return 0


def test_a_vllm_ends_with_its_worker_and_another_does_the_rest(cluster: str, tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    # Chunks have 5 pictures. Two of the four wait, so that the worker has some when it is killed.
    pictures, book, killer = gallery(20, 10, killed), MemoryOutput(), Killer(killed)
    wanted = BackendSpec(
        kind="vllm",
        model="mini",
        options=EngineOptions(max_model_len=1024),
        vllm=VllmOptions(python=PYTHON),
    )
    run_on_ray(
        job(),
        wanted,
        RayOptions(cluster, 1),
        source=pictures,
        output=book,
        progress=killer,
        concurrency=4,
    )
    assert sorted(book.records) == [item.key for item in pictures]  # each key once
    assert not book.failures
    assert book.model == "mini"
    assert len(killer.workers) == 2
    assert len(killer.first) >= 3  # the guard, vLLM's server, its engine
    deadline = time.monotonic() + 60
    while any(map(session, killer.first)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
