"""vLLM's log during a start, by version: phases and memory.

``0.32-cpu.log`` was recorded with mini. The others are lines of the sources of 0.12 and 0.28 in the order of
a start on a GPU; their numbers are made up.
"""

from pathlib import Path

import pytest

from vlfit.backends.vllm import starting as phases
from vlfit.backends.vllm.starting import ReportedMemory, StartupProgress
from vlfit.units import GIB

LOGS = Path(__file__).parent / "logs"
LOADED = [phases.READING, phases.ENGINE, phases.WEIGHTS, phases.PROFILING]
COMPILED = [*LOADED, phases.COMPILING, phases.PROFILING, phases.GRAPHS, phases.SERVER]


def lines(name: str) -> list[str]:
    return (LOGS / name).read_text("utf-8").splitlines()


@pytest.mark.parametrize(
    ("log", "expected"),
    [("0.32-cpu.log", [*LOADED, phases.SERVER]), ("0.12.log", COMPILED), ("0.28.log", COMPILED)],
)
def test_phases_in_order(log: str, expected: list[str]) -> None:
    start, seen, shares = StartupProgress(), [phases.IMPORTING], [0.0]
    for line in lines(log):
        if start.update(line):
            assert (start.phase, start.share) != (seen[-1], shares[-1])
            shares.append(start.share)
            if start.phase != seen[-1]:
                seen.append(start.phase)
    assert seen[1:] == expected
    assert shares == sorted(shares)
    assert shares[-1] >= 0.95


def test_shards_advance_the_share() -> None:
    start = StartupProgress()
    start.update("(Worker pid=1) INFO 11-22 04:54:43 [cpu_model_runner.py:68] Starting to load model a/b...")
    begun = start.share
    assert start.update(
        "Loading safetensors checkpoint shards:  50% Completed | 1/2 [00:01<00:01,  1.01s/it]"
    )
    assert begun < start.share < 0.6
    assert not start.update("Loading safetensors checkpoint shards:  50% Completed | 1/2 [00:01<00:01]")


def reported_memory(log: str) -> ReportedMemory:
    found = ReportedMemory()
    for line in lines(log):
        found.update(line)
    return found


def test_memory_with_a_cache_that_takes_the_rest() -> None:
    found = reported_memory("0.12.log")
    assert found.weights == round(3.96 * GIB)
    assert found.peak == round(1.32 * GIB)
    assert found.non_torch_bytes == round(0.24 * GIB)
    assert found.graph_pool == round(0.07 * GIB)
    assert (found.free, found.total) == (round(7.44 * GIB), 8 * GIB)
    assert found.kv_cache == round(1.52 * GIB)
    assert found.kv_tokens == 13888


def test_memory_with_a_given_cache() -> None:
    found = reported_memory("0.28.log")
    assert found.weights == round(4.88 * GIB)
    assert found.kv_cache == round(0.59 * GIB)
    assert found.graph_pool == round(0.05 * GIB)
    assert found.free == round(7.2 * GIB)
    assert (found.peak, found.non_torch_bytes, found.total) == (None, None, None)
    assert found.kv_tokens == 4320


def test_memory_on_a_cpu() -> None:
    found = reported_memory("0.32-cpu.log")
    assert found.kv_cache == round(0.06 * GIB)
    assert found.kv_tokens == 10368
    assert found.weights is None


def test_non_torch_memory_reported_with_the_weights() -> None:
    found = ReportedMemory()
    found.update("INFO [gpu_model_runner.py:5515] Model loading took 4.88 GiB memory and 4.104811 seconds")
    found.update(
        "INFO [x.py:1] Free memory on device (7.44/8 GiB) on startup. Desired GPU memory utilization "
        "is (0.88, 7.04 GiB). Actual usage is 5.1 GiB for consumed memory (weights + non-torch), 0.4 GiB for "
        "peak activation, and 0.05 GiB for CUDAGraph memory. Replace gpu_memory_utilization config with ..."
    )
    assert found.non_torch_bytes == round(5.1 * GIB) - round(4.88 * GIB)
    assert found.peak == round(0.4 * GIB)


def test_refusals_report_no_memory() -> None:
    found = ReportedMemory()
    found.update(
        "ValueError: Free memory on device cuda:0 (1.5/8.0 GiB) on startup is less than desired GPU memory "
        "utilization (0.9, 7.2 GiB). Decrease GPU memory utilization or reduce GPU memory used by others."
    )
    assert found == ReportedMemory()


def test_largest_worker_counts() -> None:
    found = ReportedMemory()
    for worker, size in (("TP0", 4.1), ("TP1", 4.3), ("TP2", 4.2)):
        found.update(f"(Worker_{worker} pid=1) INFO x Model loading took {size} GiB memory and 3.1 seconds")
    assert found.weights == round(4.3 * GIB)
