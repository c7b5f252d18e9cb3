"""Logs of any size and encoding: read in chunks, cleaned of prefixes, and the facts of the run in them.

Removes escape codes, carriage returns, and the line prefixes of vLLM, Docker, journald and the kernel. Words
that a terminal broke stay broken.
"""

import ast
import codecs
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

BLOCK_BYTES = 1 << 20
CONTEXT_BEFORE = 1 << 15  # characters; a traceback above an error is shorter
CONTEXT_AFTER = 1 << 13  # a message over several lines is shorter

_BYTE_ORDER_MARKS = {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]{0,400}(?:\x07|\x1b\\)|[@-Z\\-_])")
# Without tab, line feed and carriage return. Searched one by one first, as most logs have none: 30x faster.
_CONTROLS = (*map(chr, {*range(32), 127} - {9, 10, 13}), "\ufeff", "\ufffd")
_CONTROL = re.compile(f"[{re.escape(''.join(_CONTROLS))}]+")
_TIME = r"\d\d:\d\d:\d\d(?:[.,]\d+)?"
_PREFIXES = (
    r"\(\w[\w ]{0,40}(?:[ ,]+\w+=[^\s)]+){1,6}\)",  # (EngineCore_DP0 pid=123), (VllmWorker rank=1 pid=2)
    r"\(\w{2,40}(?:_\w+)*\)(?= (?:INFO|WARNING|ERROR|DEBUG)\b)",
    r"\[(?:rank\d+|Stage-\d+|\d{1,7}|llamacpp-router std\w+)\]:?",
    rf"(?:INFO|WARNING|ERROR|DEBUG|CRITICAL):? \d\d-\d\d {_TIME} (?:\[[\w./]+:\d+\]|[\w./]+:\d+\])",
    rf"\d{{4}}-\d\d-\d\d[T ]{_TIME}(?:Z|[+-]\d\d:?\d\d)?(?: std(?:out|err) [FP])?",
    rf"\[\d{{4}}-\d\d-\d\dT{_TIME}Z\]",
    rf"\[(?:\w{{3}} )?\w{{3}} +\d+ {_TIME}(?: \d{{4}})?\]",  # dmesg -T
    r"\[ *\d+\.\d{6}\]",  # dmesg
    rf"\w{{3,5}}\.? +\d+ {_TIME} \S+ [\w.@/-]+(?:\[\d+\])?:",  # journalctl
    r"[A-Za-z0-9][\w.-]{0,60} +\|(?= )",  # docker compose
    r"\d+\.\d\d\.\d{3}\.\d{3} [A-Z]\b",  # llama.cpp
)
# Starts with the newline before the line, as a search for a plain character takes a third of the time of ^.
_PREFIX = re.compile(rf"\n[ \t>]*+(?:(?:{'|'.join(_PREFIXES)})[ \t>]*+)*+")


@dataclass(frozen=True, slots=True)
class LogChunk:
    """Part of a cleaned log. ``flat``: ``text`` with a space for each newline, so of the same length.

    ``start``: where ``text`` begins, in characters from the start of the cleaned log. Only matches that begin
    in ``text[first:last]`` count: the rest is also in the chunk before or after.
    """

    text: str
    flat: str
    start: int
    first: int
    last: int


def clean_lines(text: str) -> str:
    """The lines of ``text`` without escape codes, control characters, log prefixes and outer blanks."""
    if "\x1b" in text:
        text = _ESCAPES.sub("", text)
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if any(control in text for control in _CONTROLS):
        text = _CONTROL.sub("", text)
    lines = [line.strip() for line in text.split("\n")]
    return _PREFIX.sub("\n", "\n" + "\n".join(lines))[1:]


def read_chunks(stream: BinaryIO) -> Iterator[LogChunk]:
    """Read and clean a log, and yield it in overlapping chunks of about ``BLOCK_BYTES``.

    UTF-8, or UTF-16 with a byte order mark; other bytes are dropped.
    """
    overlap, start, first = "", 0, 0
    for text, is_last in _mark_last(_clean_blocks(stream)):
        window = overlap + text
        last = len(window) if is_last else max(len(window) - CONTEXT_AFTER, first)
        yield LogChunk(window, window.replace("\n", " "), start, first, last)
        cut = max(last - CONTEXT_BEFORE, 0)
        overlap, start, first = window[cut:], start + cut, last - cut


def _clean_blocks(stream: BinaryIO) -> Iterator[str]:
    for text in _whole_lines(stream):
        if cleaned := clean_lines(text):
            yield cleaned


def _whole_lines(stream: BinaryIO) -> Iterator[str]:
    """Decode, and cut at line ends; a file without any (a binary) is cut after two blocks."""
    block = stream.read(BLOCK_BYTES)
    encoding = next((name for mark, name in _BYTE_ORDER_MARKS.items() if block.startswith(mark)), "utf-8")
    decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
    rest = ""
    while block:
        rest += decoder.decode(block)
        cut = rest.rfind("\n") + 1 or (len(rest) if len(rest) > 2 * BLOCK_BYTES else 0)
        if cut:
            yield rest[:cut]
            rest = rest[cut:]
        block = stream.read(BLOCK_BYTES)
    yield rest + decoder.decode(b"", final=True)


def _mark_last(blocks: Iterator[str]) -> Iterator[tuple[str, bool]]:
    """Pair each block with whether it is the last."""
    previous: str | None = None
    for block in blocks:
        if previous is not None:
            yield previous, False
        previous = block
    if previous is not None:
        yield previous, True


_LLAMA_SHELL = re.compile(
    r"(?:^|[\s`(|])((?:\S{0,200}[/\\])?llama-(?:server|cli|mtmd-cli|run)(?:\.exe)?) "
    r"(?=-)((?:[^\n\\`|;&]|\\\n|\\(?!\n))+)"
)
_FILE = re.compile(
    r"(?:load(?:ing)? model,? |error loading model |\) from |--model |-m )'?([^\s']{1,300}\.gguf)"
)
_CELLS = re.compile(r"\( *(\d{1,9}) cells|\bn_ctx +?= (\d{1,9})")
_WEIGHTS = re.compile(r"(?:CUDA|ROCm)\d+ model buffer size = +(\d+(?:\.\d+)?) MiB")
_REDIRECTION = re.compile(r"\s\d?>")
# The first of each group is the one to add to a command.
_SYNONYMS = (
    ("-m", "--model"),
    ("--mmproj", "-mm"),
    ("--ctx-size", "-c"),
    ("--gpu-layers", "-ngl", "--n-gpu-layers"),
    ("--fit", "-fit"),
    ("--fit-target", "-fitt"),
    ("--ubatch-size", "-ub"),
)
GGUF_PLACEHOLDER, MMPROJ_PLACEHOLDER = "MODEL.gguf", "MMPROJ.gguf"
LlamaFlagChanges = Mapping[str, str | None]


def split_command(line: str) -> list[str]:
    """Split a shell command from a log into words.

    Lines that a backslash continues are joined; a redirection and all after it are cut off.
    """
    line = _REDIRECTION.split(line.replace("\\\n", " ").replace("\\ ", " "))[0]
    try:
        return line.split() if "\\" in line else shlex.split(line)
    except ValueError:
        return line.split()


@dataclass
class LlamaCppRun:
    """Facts of the last run of llama.cpp in a log. None and (): unknown.

    ``command``: program and arguments. ``model_file``: path of the GGUF file, as the log prints it.
    ``n_ctx``: tokens of context by its output. ``weights_mib``: weights on the GPU, without the picture
    encoder.
    """

    command: tuple[str, ...] = ()
    model_file: str | None = None
    n_ctx: int | None = None
    weights_mib: float | None = None  # on the GPU, without the picture encoder

    def update(self, text: str) -> None:
        """Update from the log's next part; facts of later lines replace those of earlier ones."""
        for match in _LLAMA_SHELL.finditer(text):
            self.command = (match.group(1), *split_command(match.group(2)))
        for match in _FILE.finditer(text):
            self.model_file = match.group(1)
        for match in _CELLS.finditer(text):
            self.n_ctx = int(match.group(1) or match.group(2)) or None
        for match in _WEIGHTS.finditer(text):
            self.weights_mib = float(match.group(1))

    @property
    def context(self) -> int | None:
        """Tokens of context: ``n_ctx``, else by the command; None: unknown."""
        value = self.flag_value("--ctx-size")
        return self.n_ctx or (int(value) if value and value.isdecimal() and int(value) else None)

    def flag_value(self, flag: str) -> str | None:
        """The value of ``flag``, or of a synonym, in the command; None if absent or without a value."""
        names = _synonyms(flag)
        for word, value in _flags_with_values(self.command[1:]):
            if word in names:
                return value
        return None

    def command_with(self, changes: LlamaFlagChanges) -> str:
        """The log's command with ``changes``, as a line for a shell.

        ``changes``: for each flag its new value, "" for a switch, None to remove it; synonyms are replaced,
        too. If the log has no command: ``llama-server`` with the log's model file or a placeholder.
        """
        command = self.command or ("llama-server", "-m", self.model_file or GGUF_PLACEHOLDER)
        remaining = dict(changes)
        words = [command[0]]
        for word, value in _flags_with_values(command[1:]):
            flag = next((name for name in changes if word in _synonyms(name)), None)
            if flag is None:
                words += [word] if value is None else [word, value]
            elif (new := remaining.pop(flag, None)) is not None:
                words += [word, new] if new else [word]
        for flag, new in remaining.items():
            if new is not None:
                words += [flag, new] if new else [flag]
        return shlex.join(words)


def _synonyms(flag: str) -> tuple[str, ...]:
    return next((group for group in _SYNONYMS if flag in group), (flag,))


def _flags_with_values(words: tuple[str, ...]) -> Iterator[tuple[str, str | None]]:
    """Pair each flag with its value, or None if another flag follows. -1 is a value."""
    index = 0
    while index < len(words):
        word, value = words[index], ""
        if word.startswith("--"):
            word, _, value = word.partition("=")
        following = words[index + 1] if index + 1 < len(words) else None
        index += 1
        if value:
            yield word, value
        elif word.startswith("-") and following is not None and not re.match(r"-(?!\d)", following):
            yield word, following
            index += 1
        else:
            yield word, None


NUMBER = r"-?\d+(?:\.\d+)?"
_VERSIONS = re.compile(
    r"(?:vLLM API server version |LLM engine \(v|vLLM Version *: *|\bvllm==)v?(\d+\.\d+(?:\.\d+)?)", re.I
)
_CONFIG = re.compile(r"config: ?model='([^']{1,300})'")
_MAX_SEQ_LEN = re.compile(r"max_seq_len=(\d+)")
_ARGUMENTS = re.compile(r"non-default args: (\{.{0,8000}\})")
# A command may continue after a backslash; prose such as "after `vllm serve ...`" ends at the backtick.
_SHELL = re.compile(r"(?:^|[\s`(|])vllm serve (?=\S)((?:[^\n\\`|;&]|\\\n|\\(?!\n))+)")
# Field -> keywords, one of which is in every match (a plain search is much faster), and pattern.
_GIB_FIELDS = {
    "weights_gib": (
        ("oading took", "weights took"),
        re.compile(rf"(?:Model loading took|Loading model weights took) ({NUMBER}) Gi?B"),
    ),
    "kv_gib": (
        ("Available KV cache memory: ",),
        re.compile(rf"Available KV cache memory: ({NUMBER}) GiB"),
    ),
    "total_gib": (
        ("total_gpu_memory (", "total capacity of ", "Free memory on device"),
        re.compile(
            rf"(?:total_gpu_memory \(|total capacity of |Free memory on device ?(?:cuda:\d+)? "
            rf"?\({NUMBER}/)({NUMBER}) ?GiB"
        ),
    ),
    "free_gib": (
        ("Free memory on device",),
        re.compile(rf"Free memory on device ?(?:cuda:\d+)? ?\(({NUMBER})/"),
    ),
    "utilization": (
        ("gpu_memory_utilization ",),
        re.compile(rf"gpu_memory_utilization (?:\(|is \()({NUMBER})"),
    ),
}
_DRIVER = re.compile(r"CUDA Version: (\d{1,2})\.(\d{1,2})\b")  # in the header of nvidia-smi
_VLLM_KEYWORDS = ("vLLM", "vllm", "config: model=", "non-default args")
# As in vLLM: lower case is decimal, upper case binary.
_SUFFIXES = {"": 1, "k": 1000, "K": 1024, "m": 10**6, "M": 2**20}
_WSL = ("WSL is detected", "microsoft-standard-WSL", "/usr/lib/wsl/", "wsl2", "WSL2")
_START_LINES = re.compile(r"vLLM API server version|Initializing a V\d LLM engine|INFO server config env=")


@dataclass
class LogFacts:
    """Facts of the last run in a log, most of them about vLLM. None: unknown.

    - ``version``: vLLM's, ``(0, 11, 2)``. ``model``: as vLLM was told.
    - ``arguments``: the flags of ``vllm serve`` that the log shows, as ``{"max_model_len": 4096}``.
    - ``max_model_len``: vLLM's context in tokens.
    - ``llama``: facts of llama.cpp. ``driver_cuda``: the newest CUDA version that the driver supports.
    - ``weights_gib``, ``kv_gib`` (the KV cache), ``total_gib`` (the card), ``free_gib`` (of the card when
      vLLM started, after its own CUDA context): GiB.
    - ``utilization``: ``--gpu-memory-utilization``.
    - ``last_start``: where the last run begins, in characters from the start of the cleaned log; -1: there
      is no start in it.
    """

    version: tuple[int, ...] | None = None
    model: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    max_model_len: int | None = None
    llama: LlamaCppRun = field(default_factory=LlamaCppRun)
    driver_cuda: tuple[int, int] | None = None  # the newest CUDA that the driver supports
    weights_gib: float | None = None
    kv_gib: float | None = None
    total_gib: float | None = None
    free_gib: float | None = None  # when vLLM started, after its own CUDA context
    utilization: float | None = None
    wsl2: bool = False
    last_start: int = -1  # offset of the last run in the log

    def update(self, chunk: LogChunk) -> None:
        """Update from the log's next chunk; facts of later lines replace those of earlier ones."""
        text = chunk.text
        if any(word in text for word in _VLLM_KEYWORDS):
            self._read_settings(chunk)
        if "llama" in text or ".gguf" in text:
            self.llama.update(text)
        for name, (words, pattern) in _GIB_FIELDS.items():
            if any(word in chunk.flat for word in words):
                for match in pattern.finditer(chunk.flat):
                    setattr(self, name, float(match.group(1)))
        if "CUDA Version: " in text:
            for match in _DRIVER.finditer(text):
                self.driver_cuda = int(match.group(1)), int(match.group(2))
        self.wsl2 = self.wsl2 or any(word in text for word in _WSL)

    def _read_settings(self, chunk: LogChunk) -> None:
        text = chunk.text
        for match in _VERSIONS.finditer(text):
            self.version = tuple(int(part) for part in match.group(1).split("."))
        for match in _CONFIG.finditer(text):
            self.model = match.group(1)
        for match in _MAX_SEQ_LEN.finditer(text):
            self.max_model_len = int(match.group(1))
        for match in _ARGUMENTS.finditer(text):
            self._set_arguments(_parse_dict(match.group(1)))
        for match in _SHELL.finditer(text):
            flags = _parse_flags(match.group(1))
            # "I ran vllm serve and it died" is prose: a command has a path, a hub name or a flag.
            if len(flags) > 1 or "/" in str(flags.get("model", "")):
                self._set_arguments(flags)
        for match in _START_LINES.finditer(text):
            self.last_start = max(self.last_start, chunk.start + match.start())

    def _set_arguments(self, arguments: dict[str, Any]) -> None:
        if not arguments:
            return
        model = arguments.pop("model", None) or arguments.pop("model_tag", None)
        arguments.pop("model_tag", None)
        self.arguments = arguments
        if isinstance(model, str) and model:
            self.model = model

    def int_argument(self, name: str, default: int) -> int:
        """``arguments[name]`` as an integer above 0 (``8k`` is 8000); ``default`` if it is none or absent."""
        match = re.fullmatch(r"(\d{1,12})([kKmM]?)", str(self.arguments.get(name)))
        number = int(match.group(1)) * _SUFFIXES[match.group(2)] if match else 0
        return number or default

    def version_at_least(self, *version: int) -> bool:
        """Whether vLLM's version is at least ``version``; True if it is unknown."""
        return self.version is None or self.version >= version


def _parse_dict(text: str) -> dict[str, Any]:
    """Parse a printed dict; empty if it is cut off or holds other than plain values."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return {}
    return {str(key): item for key, item in value.items()} if isinstance(value, dict) else {}


def _parse_flags(line: str) -> dict[str, Any]:
    """Parse the words after ``vllm serve``: ``--max-model-len 4096`` is ``{"max_model_len": 4096}``."""
    arguments: dict[str, Any] = {}
    flag: str | None = None  # that takes the next word
    for word in split_command(line):
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            flag = name.replace("-", "_")
            arguments[flag] = _parse_value(value) if equals else True
            flag = None if equals else flag
        elif flag is not None:
            known = arguments[flag]
            arguments[flag] = _parse_value(word) if known is True else f"{known} {word}"
        else:
            arguments.setdefault("model", word)
    return arguments


def _parse_value(word: str) -> Any:
    try:
        return json.loads(word)
    except ValueError:
        return word
