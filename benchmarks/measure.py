"""What both engines are asked, and how the answer is written down. Knows clocks and /proc; no engine.

A worker (``native_worker``, ``transformers_worker``) is one process with one engine in it, so that import
time and memory are that engine's own. It reads a ``Job`` from its first argument and prints a ``Run``, both
as JSON.
"""

import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vlfit.bench.measure import RequestPhases as RequestPhases
from vlfit.bench.results import versions_of as versions_of

ROOT = Path(__file__).parent.parent
MIB = 1024**2


@dataclass(frozen=True, slots=True)
class Job:
    """One checkpoint, one picture and question; ``rounds`` times over, after one that warms up."""

    folder: str
    picture: str
    question: str
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 1
    tokens: int = 64
    rounds: int = 3


@dataclass(frozen=True, slots=True)
class Run:
    """What one worker saw. Bytes for memory; ``gpu_bytes`` is the process's peak in torch's allocator.

    ``read_bytes`` of weights for each token, where the engine tells; 0: one for each parameter, in the dtype.
    """

    engine: str
    import_s: float
    load_s: float
    rounds: list[RequestPhases]
    token_ids: list[int]
    prompt_tokens: int
    image_tokens: int
    rss_loaded: int
    rss_peak: int
    gpu_bytes: int = 0
    read_bytes: int = 0
    versions: dict[str, str] = field(default_factory=dict)

    def median_s(self, phase: str) -> float:
        """Median seconds of ``preprocess``, ``prefill`` or ``decode``."""
        return float(statistics.median(getattr(each, f"{phase}_s") for each in self.rounds))


def read_job() -> Job:
    """The job that the parent gave this worker."""
    return Job(**json.loads(sys.argv[1]))


def print_run(run: Run) -> None:
    print(json.dumps(asdict(run)))


def run_worker(module: str, job: Job) -> Run:
    """Run one worker to its end. Raises ``RuntimeError`` with what it wrote if it fails."""
    threads = str(job.threads)
    settings = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, "-m", module, json.dumps(asdict(job))],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(**settings),
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{module} failed with exit code {done.returncode}:\n{done.stderr}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    answer["rounds"] = [RequestPhases(**each) for each in answer["rounds"]]
    return Run(**answer)


def environment(**settings: str) -> dict[str, str]:
    """This process's own and ``settings``; the source tree is found first, and the model hub not asked."""
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(path for path in paths if path)
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **settings}


def memory_of_this_process(line: str) -> int:
    """``VmRSS`` (now) or ``VmHWM`` (the peak) in bytes, from /proc/self/status."""
    for entry in Path("/proc/self/status").read_text("ascii").splitlines():
        if entry.startswith(line + ":"):
            return int(entry.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {line}")
