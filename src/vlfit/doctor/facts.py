"""What a log says about the run that failed: which model, which version, which flags, how much memory.

Knows: the lines in which vLLM writes its own settings, and the shell line that started it; those of llama.cpp
are in ``llama.py``. Does not know what went wrong (``rules/``).
"""

import ast
import json
import re
from dataclasses import dataclass, field
from typing import Any

from vlfit.doctor.llama import Llama, shell_words
from vlfit.doctor.logs import Piece

_NUMBER = r"-?\d+(?:\.\d+)?"
_VERSIONS = re.compile(
    r"(?:vLLM API server version |LLM engine \(v|vLLM Version *: *|\bvllm==)v?(\d+\.\d+(?:\.\d+)?)", re.I
)
_CONFIG = re.compile(r"config: ?model='([^']{1,300})'")
_MAX_SEQ_LEN = re.compile(r"max_seq_len=(\d+)")
_ARGUMENTS = re.compile(r"non-default args: (\{.{0,8000}\})")
# Backslashes are line ends of a shell command; prose such as "after `vllm serve ...`" ends at the backtick.
_SHELL = re.compile(r"(?:^|[\s`(|])vllm serve (?=\S)((?:[^\n\\`|;&]|\\\n|\\(?!\n))+)")
# Each with words, one of which stands wherever it matches: a plain search is many times faster.
_FLOATS = {
    "weights_gib": (
        ("oading took", "weights took"),
        re.compile(rf"(?:Model loading took|Loading model weights took) ({_NUMBER}) Gi?B"),
    ),
    "kv_gib": (
        ("Available KV cache memory: ",),
        re.compile(rf"Available KV cache memory: ({_NUMBER}) GiB"),
    ),
    "total_gib": (
        ("total_gpu_memory (", "total capacity of ", "Free memory on device"),
        re.compile(
            rf"(?:total_gpu_memory \(|total capacity of |Free memory on device ?(?:cuda:\d+)? "
            rf"?\({_NUMBER}/)({_NUMBER}) ?GiB"
        ),
    ),
    "free_gib": (
        ("Free memory on device",),
        re.compile(rf"Free memory on device ?(?:cuda:\d+)? ?\(({_NUMBER})/"),
    ),
    "utilization": (
        ("gpu_memory_utilization ",),
        re.compile(rf"gpu_memory_utilization (?:\(|is \()({_NUMBER})"),
    ),
}
_DRIVER = re.compile(r"CUDA Version: (\d{1,2})\.(\d{1,2})\b")  # as nvidia-smi heads its table
_OF_VLLM = ("vLLM", "vllm", "config: model=", "non-default args")
# As vLLM reads them: lower case counts in thousands.
_SUFFIXES = {"": 1, "k": 1000, "K": 1024, "m": 10**6, "M": 2**20}
_WSL = ("WSL is detected", "microsoft-standard-WSL", "/usr/lib/wsl/", "wsl2", "WSL2")
STARTS = re.compile(r"vLLM API server version|Initializing a V\d LLM engine|INFO server config env=")


@dataclass
class Facts:
    """What was read so far. None: the log does not say. Memory in GiB, as the log prints it."""

    version: tuple[int, ...] | None = None
    model: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    max_model_len: int | None = None
    llama: Llama = field(default_factory=Llama)
    driver_cuda: tuple[int, int] | None = None  # the newest CUDA that the driver runs
    weights_gib: float | None = None
    kv_gib: float | None = None
    total_gib: float | None = None
    free_gib: float | None = None  # when vLLM started, its own CUDA context taken off
    utilization: float | None = None
    wsl2: bool = False
    last_start: int = -1  # where in the log the last run begins

    def read(self, piece: Piece) -> None:
        """Take in what ``piece`` says; the later word counts."""
        text = piece.text
        if any(word in text for word in _OF_VLLM):
            self._read_settings(piece)
        if "llama" in text or ".gguf" in text:
            self.llama.read(text)
        for name, (words, pattern) in _FLOATS.items():
            if any(word in piece.flat for word in words):
                for match in pattern.finditer(piece.flat):
                    setattr(self, name, float(match.group(1)))
        if "CUDA Version: " in text:
            for match in _DRIVER.finditer(text):
                self.driver_cuda = int(match.group(1)), int(match.group(2))
        self.wsl2 = self.wsl2 or any(word in text for word in _WSL)

    def _read_settings(self, piece: Piece) -> None:
        text = piece.text
        for match in _VERSIONS.finditer(text):
            self.version = tuple(int(part) for part in match.group(1).split("."))
        for match in _CONFIG.finditer(text):
            self.model = match.group(1)
        for match in _MAX_SEQ_LEN.finditer(text):
            self.max_model_len = int(match.group(1))
        for match in _ARGUMENTS.finditer(text):
            self._take(_literal(match.group(1)))
        for match in _SHELL.finditer(text):
            flags = _flags(match.group(1))
            # "I ran vllm serve and it died" is prose: a command has a path, a name on the hub, or a flag.
            if len(flags) > 1 or "/" in str(flags.get("model", "")):
                self._take(flags)
        for match in STARTS.finditer(text):
            self.last_start = max(self.last_start, piece.start + match.start())

    def _take(self, arguments: dict[str, Any]) -> None:
        if not arguments:
            return
        model = arguments.pop("model", None) or arguments.pop("model_tag", None)
        arguments.pop("model_tag", None)
        self.arguments = arguments
        if isinstance(model, str) and model:
            self.model = model

    def whole(self, name: str, otherwise: int) -> int:
        """The argument ``name`` as a whole number above 0; ``otherwise`` where it is none ("auto", -1)."""
        found = re.fullmatch(r"(\d{1,12})([kKmM]?)", str(self.arguments.get(name)))
        number = int(found.group(1)) * _SUFFIXES[found.group(2)] if found else 0
        return number or otherwise

    def at_least(self, *version: int) -> bool:
        """Whether the run was of this version of vLLM or later; an unknown one counts as recent."""
        return self.version is None or self.version >= version


def _literal(text: str) -> dict[str, Any]:
    """A dict as Python prints it, empty if it is cut off or holds other things than plain values."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return {}
    return {str(key): item for key, item in value.items()} if isinstance(value, dict) else {}


def _flags(line: str) -> dict[str, Any]:
    """The words after ``vllm serve`` as vLLM's own names: ``--max-model-len 4096`` is ``max_model_len``."""
    found: dict[str, Any] = {}
    waiting: str | None = None
    for word in shell_words(line):
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            waiting = name.replace("-", "_")
            found[waiting] = _value(value) if equals else True
            waiting = None if equals else waiting
        elif waiting is not None:
            found[waiting] = _value(word) if found[waiting] is True else f"{found[waiting]} {word}"
        else:
            found.setdefault("model", word)
    return found


def _value(word: str) -> Any:
    try:
        return json.loads(word)
    except ValueError:
        return word
