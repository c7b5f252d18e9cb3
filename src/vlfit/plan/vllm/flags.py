"""Which flags of ``vllm serve`` came and went with which version: one table for the planner and the doctor.

Knows: versions as their sources have them (0.8.5 to 0.33.0; where some between were not read the first one
that was and had the flag counts, so that the true one may be a release or two earlier), and what became of
flags that guides still name. Does not know what a plan sets (``command.py``).
"""

from collections.abc import Mapping
from dataclasses import dataclass

Number = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Life:
    """From the first version that has a flag to the ``last``; None: it is there still."""

    first: Number
    last: Number | None = None

    def covers(self, version: Number) -> bool:
        """Whether ``version`` has the flag; later fixes of the last version that was read count as it."""
        return version >= self.first and (self.last is None or version[:2] <= self.last[:2])


_EVER = Life((0, 8, 5))
LIVES: Mapping[str, Life] = {
    "--max-model-len": _EVER,
    "--gpu-memory-utilization": _EVER,
    "--enforce-eager": _EVER,
    "--max-num-seqs": _EVER,
    "--max-num-batched-tokens": _EVER,
    "--limit-mm-per-prompt": _EVER,
    "--mm-processor-kwargs": _EVER,
    "--cpu-offload-gb": _EVER,
    "--kv-cache-dtype": _EVER,
    "--dtype": _EVER,
    "--tensor-parallel-size": _EVER,
    "--data-parallel-size": _EVER,
    "--num-gpu-blocks-override": _EVER,
    "--disable-custom-all-reduce": _EVER,
    "--compilation-config": _EVER,
    "--api-server-count": Life((0, 9, 2)),
    "--kv-cache-memory-bytes": Life((0, 11)),
    "--mm-processor-cache-gb": Life((0, 11)),
    "--mm-encoder-tp-mode": Life((0, 11)),
    "--structured-outputs-config": Life((0, 11)),
    "--cudagraph-capture-sizes": Life((0, 12)),
    "--max-cudagraph-capture-size": Life((0, 12)),
    "--kv-offloading-size": Life((0, 12)),
    "--language-model-only": Life((0, 19, 1)),
    "--device-memory-utilization": Life((0, 31)),
    "--trust-request-mm-kwargs": Life((0, 31)),
    "--max-seq-len-to-capture": Life((0, 8, 5), (0, 9, 2)),
    "--cuda-graph-sizes": Life((0, 8, 5), (0, 12, 0)),
    "--disable-mm-preprocessor-cache": Life((0, 8, 5), (0, 12, 0)),
    "--swap-space": Life((0, 8, 5), (0, 16, 0)),
    "--disable-log-requests": Life((0, 8, 5), (0, 16, 0)),
    "--calculate-kv-scales": Life((0, 8, 5), (0, 27, 1)),
}
# What became of flags that guides still name, in words; "it" is the flag.
GONE: Mapping[str, str] = {
    "--disable-v1-engine": "no version ever had it, and the old engine is gone since 0.11",
    "--swap-space": "it is gone since 0.19",
    "--disable-log-requests": "it is gone since 0.19, and is the default now",
    "--max-seq-len-to-capture": "it is gone since 0.11; --max-cudagraph-capture-size (0.12) is its heir",
    "--cuda-graph-sizes": "it is gone since 0.14; --cudagraph-capture-sizes is its heir",
    "--disable-mm-preprocessor-cache": "it is gone since 0.14; --mm-processor-cache-gb 0 is its heir",
    "--calculate-kv-scales": "it is gone since 0.28",
    "--kv-cache-memory-bytes": "it came with 0.11",
    "--mm-processor-cache-gb": "it came with 0.11",
    "--cudagraph-capture-sizes": "it came with 0.12",
    "--language-model-only": "it came with 0.19.1",
    "--trust-request-mm-kwargs": "it came with 0.31",
}


def has(version: Number, flag: str) -> bool:
    """Whether ``version`` has ``flag``; one that is not in the table is taken to be there."""
    life = LIVES.get(flag)
    return life is None or life.covers(version)
