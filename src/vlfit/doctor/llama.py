"""A run of llama.cpp as its log shows it, and its command written again with some flags changed.

Knows: how llama.cpp's programs are spelt, which of their flags mean the same, and the lines in which they say
how large the model and its context are. Does not know what went wrong (``rules/llama.py``).
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_SHELL = re.compile(
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
        for match in _SHELL.finditer(text):
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
