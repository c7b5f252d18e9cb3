"""What vLLM says of its memory while it starts, as numbers.

Knows: the lines of vLLM 0.11 to 0.33 (``v1/worker/gpu_worker.py``, ``gpu_model_runner.py``,
``cpu_worker.py``, ``v1/core/kv_cache_utils.py``). Does not know what was planned (``actual.py``). Of several
workers that each say a number the largest counts.
"""

import re
from dataclasses import dataclass

from vlfit.units import GIB

_N = r"(-?\d+(?:\.\d+)?)"
_ACTUAL = re.compile(rf"{_N} GiB for ([A-Za-z][A-Za-z ()+-]*[A-Za-z)])")
# "Free memory on device" begins a failure, too: there it goes on with "is less than desired".
_FREE = re.compile(rf"Free memory on device ?(?:cuda:\d+ ?)?\({_N}/{_N} GiB\) on startup\. Desired")
_GIVEN = re.compile(rf"Initial free memory {_N} GiB, reserved {_N} GiB memory for KV Cache")
_BYTES = {
    "weights": re.compile(rf"(?:Model loading took|model weights took) {_N} Gi?B"),
    "kv_cache": re.compile(rf"Available KV cache memory: {_N} GiB"),
    "graph_pool": re.compile(rf"Graph capturing finished in {_N} secs?, took {_N} GiB"),
    "graph_estimate": re.compile(rf"Estimated CUDA graph memory: {_N} GiB"),
    "cpu_kv_cache": re.compile(rf"\({_N}/{_N}\) GiB for KV cache on node"),
}
_TOKENS = re.compile(r"KV cache size: ([\d,]+) tokens")
_WORDS = ("GiB", "tokens")
_PARTS = {
    "weight": "weights",
    "consumed memory (weights + non-torch)": "consumed",
    "peak activation": "peak",
    "non-torch memory": "beside",
    "CUDAGraph memory": "graph_pool",
}


@dataclass(slots=True)
class Told:
    """Bytes and tokens, each None where vLLM did not say. ``read`` each line in turn.

    ``weights``: of the model. ``kv_cache``: what is there for it. ``kv_tokens``: how many that holds.
    ``peak``: of activations in the trial run. ``beside``: of CUDA's libraries, within vLLM's budget.
    ``consumed``: weights and those together, where it says no more. ``graph_pool``: of CUDA graphs, and
    ``graph_estimate`` before they were captured. ``free``, ``total``: of the card, when vLLM took its first
    look, its own context taken off.
    """

    weights: int | None = None
    kv_cache: int | None = None
    kv_tokens: int | None = None
    peak: int | None = None
    beside: int | None = None
    consumed: int | None = None
    graph_pool: int | None = None
    graph_estimate: int | None = None
    free: int | None = None
    total: int | None = None

    def read(self, line: str) -> None:
        """Take in what ``line`` says."""
        if not any(word in line for word in _WORDS):
            return
        for name, pattern in _BYTES.items():
            if found := pattern.search(line):
                # The last group of a line about graphs is the size, of one about a CPU's cache the first.
                number = found[1] if name == "cpu_kv_cache" else found[found.re.groups]
                self._take("kv_cache" if name == "cpu_kv_cache" else name, number)
        if found := _GIVEN.search(line):
            self._take("free", found[1])
            self._take("kv_cache", found[2])
        if found := _FREE.search(line):
            self._take("free", found[1])
            self._take("total", found[2])
            for number, what in _ACTUAL.findall(line):
                if what in _PARTS:
                    self._take(_PARTS[what], number)
        if found := _TOKENS.search(line):
            self.kv_tokens = int(found[1].replace(",", ""))

    @property
    def apart(self) -> int | None:
        """CUDA's libraries, also where vLLM says them together with the weights."""
        if self.beside is None and self.consumed is not None and self.weights is not None:
            return max(self.consumed - self.weights, 0)
        return self.beside

    def _take(self, name: str, gibibytes: str) -> None:
        count = round(float(gibibytes) * GIB)
        setattr(self, name, max(getattr(self, name) or count, count))
