"""Where the start of a vLLM stands, read off what it says.

Knows: which line begins which phase, in vLLM 0.11 to 0.33. Does not know how it is shown.
"""

import re
from dataclasses import dataclass

# In the order in which they come, each with the share of the start that is done when it begins. The shares
# are those of a first start on a GPU as its users report it; a start without graphs skips two of them.
IMPORTING = "importing vLLM"
READING = "reading the model's settings"
ENGINE = "starting the engine"
WEIGHTS = "loading weights"
PROFILING = "profiling memory"
COMPILING = "compiling"
GRAPHS = "capturing graphs"
SERVER = "starting the server"
_SHARES = {
    IMPORTING: 0.0,
    READING: 0.15,
    ENGINE: 0.2,
    WEIGHTS: 0.3,
    PROFILING: 0.6,
    COMPILING: 0.65,
    GRAPHS: 0.85,
    SERVER: 0.95,
}
_ORDER = list(_SHARES)
_BEGINS = (
    # 0.32 on writes its version as a banner, of which the arguments are the first line to be had.
    (READING, re.compile(r"vLLM API server version|non-default args: ")),
    (ENGINE, re.compile(r"Initializing a V\d LLM engine|Multi-modal warmup completed")),
    # The second is the newer runner's word.
    (
        WEIGHTS,
        re.compile(
            r"Starting to load model|Loading model from scratch|Loading (?:safetensors|pt) checkpoint shards:"
        ),
    ),
    (PROFILING, re.compile(r"Model loading took|Loading weights took|Encoder cache will be initialized")),
    (
        COMPILING,
        re.compile(
            r"Using cache directory: .*torch.compile|Dynamo bytecode transform time|Compiling a graph for|"
            r"Directly load the compiled graph"
        ),
    ),
    (PROFILING, re.compile(r"torch\.compile (?:takes|took) [\d.]+ s in total|Profiling CUDA graph memory")),
    (GRAPHS, re.compile(r"Capturing CUDA graphs|Available KV cache memory|GPU KV cache size")),
    (
        SERVER,
        re.compile(r"init engine \(profile|Graph capturing finished|Starting vLLM|Started server process"),
    ),
)
_WORDS = (
    *("version", "args", "engine", "warmup", "load", "shards", "took", "takes", "Encoder", "cache", "Dynamo"),
    *("Compiling", "CUDA", "KV", "Starting", "Started", "capturing", "scratch"),
)
_PERCENT = re.compile(r"(?:checkpoint shards|Capturing CUDA graphs)[^%]{0,60}?(\d{1,3})%")


@dataclass(slots=True)
class Start:
    """The phase that was reached, and the share of the whole that is done. ``read`` each line in turn."""

    phase: str = IMPORTING
    share: float = 0.0

    def read(self, line: str) -> bool:
        """Take in what ``line`` says; whether anything is new. A phase never comes again."""
        if not any(word in line for word in _WORDS):
            return False
        before = self.phase, self.share
        for phase, pattern in _BEGINS:
            later = _ORDER.index(phase) > _ORDER.index(self.phase)
            # While profiling, a model is compiled and then profiled on: that is one step back.
            again = phase == PROFILING and self.phase == COMPILING
            if (later or again) and pattern.search(line):
                self.phase = phase
                self.share = max(self.share, _SHARES[phase])
        percent = _PERCENT.search(line)
        if percent is not None and self.phase in (WEIGHTS, GRAPHS):
            begins, ends = _SHARES[self.phase], _end_of(self.phase)
            self.share = max(self.share, begins + (ends - begins) * min(int(percent[1]), 100) / 100)
        return (self.phase, self.share) != before


def _end_of(phase: str) -> float:
    following = _ORDER.index(phase) + 1
    return _SHARES[_ORDER[following]] if following < len(_ORDER) else 1.0
