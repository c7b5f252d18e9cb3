"""A pasted log as plain lines: any size, any encoding, whatever terminals and managers put around them.

Removes escape codes, carriage returns, and the prefixes that vLLM, Docker, journald and the kernel put before
each line; what lines mean is in ``rules/``. A log is read once, in pieces, so that its size
does not matter. What a terminal broke inside a word stays broken.
"""

import ast
import codecs
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

BLOCK = 1 << 20
# A traceback above an error is shorter than this, and so is a message over several lines below its start.
BEFORE = 1 << 15
AFTER = 1 << 13

_BYTE_ORDER_MARKS = {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]{0,400}(?:\x07|\x1b\\)|[@-Z\\-_])")
# Tab, line feed and carriage return stay. Asked for one by one, as most logs have none: thirty times as fast.
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
# With the line's end before it rather than ^: a search for a plain character is a third of the time.
_PREFIX = re.compile(rf"\n[ \t>]*+(?:(?:{'|'.join(_PREFIXES)})[ \t>]*+)*+")


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a log. ``text`` has clean lines; ``flat`` is the same on one line, character for character.

    ``start`` counts the characters of the log before ``text``. A reader looks at what begins in
    ``[first, last)`` of this piece: the rest stands in the piece before or after, too, as surroundings.
    """

    text: str
    flat: str
    start: int
    first: int
    last: int


def clean(text: str) -> str:
    """``text`` without colours, control characters, prefixes, indentation and trailing blanks."""
    if "\x1b" in text:
        text = _ESCAPES.sub("", text)
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if any(control in text for control in _CONTROLS):
        text = _CONTROL.sub("", text)
    lines = [line.strip() for line in text.split("\n")]
    return _PREFIX.sub("\n", "\n" + "\n".join(lines))[1:]


def pieces(stream: BinaryIO) -> Iterator[Piece]:
    """The log in ``stream``, cleaned, piece by piece."""
    kept, start, done = "", 0, 0
    for text, is_last in _with_end(_clean_blocks(stream)):
        window = kept + text
        last = len(window) if is_last else max(len(window) - AFTER, done)
        yield Piece(window, window.replace("\n", " "), start, done, last)
        cut = max(last - BEFORE, 0)
        kept, start, done = window[cut:], start + cut, last - cut


def _clean_blocks(stream: BinaryIO) -> Iterator[str]:
    for text in _whole_lines(stream):
        if cleaned := clean(text):
            yield cleaned


def _whole_lines(stream: BinaryIO) -> Iterator[str]:
    """Decoded text cut at line ends, or after two blocks where there is none (a binary file)."""
    block = stream.read(BLOCK)
    encoding = next((name for mark, name in _BYTE_ORDER_MARKS.items() if block.startswith(mark)), "utf-8")
    decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
    rest = ""
    while block:
        rest += decoder.decode(block)
        cut = rest.rfind("\n") + 1 or (len(rest) if len(rest) > 2 * BLOCK else 0)
        if cut:
            yield rest[:cut]
            rest = rest[cut:]
        block = stream.read(BLOCK)
    yield rest + decoder.decode(b"", final=True)


def _with_end(blocks: Iterator[str]) -> Iterator[tuple[str, bool]]:
    """Each block, and whether it is the last."""
    held: str | None = None
    for block in blocks:
        if held is not None:
            yield held, False
        held = block
    if held is not None:
        yield held, True


# A run of llama.cpp as its log shows it, and its command written again with some flags changed.
#
# Programs' names, flags that mean the same, and the lines that give the size of the model and its context.


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
# Of each group the first is written where the command has none of them.
_SYNONYMS = (
    ("-m", "--model"),
    ("--mmproj", "-mm"),
    ("--ctx-size", "-c"),
    ("--gpu-layers", "-ngl", "--n-gpu-layers"),
    ("--fit", "-fit"),
    ("--fit-target", "-fitt"),
    ("--ubatch-size", "-ub"),
)
MODEL, ENCODER = "MODEL.gguf", "MMPROJ.gguf"
Changes = Mapping[str, str | None]


def shell_words(line: str) -> list[str]:
    """The words of a command that a log shows: lines joined, redirections off."""
    line = _REDIRECTION.split(line.replace("\\\n", " ").replace("\\ ", " "))[0]
    try:
        return line.split() if "\\" in line else shlex.split(line)
    except ValueError:
        return line.split()


@dataclass
class Llama:
    """What was read so far of a run of llama.cpp. None and (): the log does not say."""

    command: tuple[str, ...] = ()
    file: str | None = None
    cells: int | None = None  # tokens of the context
    weights_mib: float | None = None  # of the model on the GPU, without the picture encoder

    def read(self, text: str) -> None:
        """Take in what ``text`` says; the later word counts."""
        for match in _LLAMA_SHELL.finditer(text):
            self.command = (match.group(1), *shell_words(match.group(2)))
        for match in _FILE.finditer(text):
            self.file = match.group(1)
        for match in _CELLS.finditer(text):
            self.cells = int(match.group(1) or match.group(2)) or None
        for match in _WEIGHTS.finditer(text):
            self.weights_mib = float(match.group(1))

    @property
    def context(self) -> int | None:
        """Tokens of the context: as its lines have it, else as the command asks for."""
        asked = self.value("--ctx-size")
        return self.cells or (int(asked) if asked and asked.isdecimal() and int(asked) else None)

    def value(self, flag: str) -> str | None:
        """What the command gives ``flag`` or one of its other names; None if it has none of them."""
        names = _names(flag)
        for word, value in _pairs(self.command[1:]):
            if word in names:
                return value
        return None

    def again(self, changes: Changes) -> str:
        """The command with ``changes``: a value for a flag, "" for a switch, None to leave a flag out.

        Where the log shows no command, ``llama-server`` for the file that it names.
        """
        command = self.command or ("llama-server", "-m", self.file or MODEL)
        left = dict(changes)
        words = [command[0]]
        for word, value in _pairs(command[1:]):
            flag = next((name for name in changes if word in _names(name)), None)
            if flag is None:
                words += [word] if value is None else [word, value]
            elif (new := left.pop(flag, None)) is not None:
                words += [word, new] if new else [word]
        for flag, new in left.items():
            if new is not None:
                words += [flag, new] if new else [flag]
        return shlex.join(words)


def _names(flag: str) -> tuple[str, ...]:
    return next((group for group in _SYNONYMS if flag in group), (flag,))


def _pairs(words: tuple[str, ...]) -> Iterator[tuple[str, str | None]]:
    """Each flag with its value; None where another flag follows. -1 is a value."""
    place = 0
    while place < len(words):
        word, _, value = (
            words[place].partition("=") if words[place].startswith("--") else (words[place], "", "")
        )
        follower = words[place + 1] if place + 1 < len(words) else None
        place += 1
        if value:
            yield word, value
        elif word.startswith("-") and follower is not None and not re.match(r"-(?!\d)", follower):
            yield word, follower
            place += 1
        else:
            yield word, None


# What a log says about the run that failed: which model, which version, which flags, how much memory.
# Read from the lines in which vLLM writes its own settings, and from the shell line that started it.


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
