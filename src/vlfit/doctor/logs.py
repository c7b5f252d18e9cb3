"""A pasted log as plain lines: any size, any encoding, whatever terminals and managers put around them.

Knows: escape codes, carriage returns, and the prefixes that vLLM, Docker, journald and the kernel put before
each line. Does not know what the lines mean (``rules/``). A log is read once, in pieces, so that its size
does not matter. What a terminal broke inside a word stays broken.
"""

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

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
