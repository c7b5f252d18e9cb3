"""Record docs/terminal.svg: what `vlfit plan` and mini print on a terminal (`make docs`)."""

import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import tempfile
from fcntl import ioctl
from io import StringIO
from pathlib import Path
from termios import TIOCSWINSZ

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
FILE = ROOT / "docs" / "terminal.svg"
COLUMNS = 104
COMMANDS = (
    'plan --gpu "RTX 5060" --desktop 951MiB --wsl2',
    "caption tractor-and-cat.png -m mini",
    'ask tractor-and-cat.png "How many animals are there?" -m mini',
    'detect tractor-and-cat.png "tractor, cat" -m mini',
)


def output_of(command: str, home: str) -> str:
    """What ``vlfit`` with ``command`` prints on stdout, a terminal. Raises if it fails."""
    ours, theirs = pty.openpty()
    ioctl(theirs, TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    own = {"HOME": home, "TERM": "xterm-256color", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT / "src")}
    others = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("VLFIT_", "HF_", "XDG_", "COLUMNS"))
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "vlfit", *shlex.split(command)],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=subprocess.DEVNULL,  # progress bars
        env={**others, **own},
        cwd=ROOT / "examples" / "pictures",
    )
    os.close(theirs)
    data = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the program has ended
            break
        if not piece:
            break
        data += piece
    os.close(ours)
    if process.wait():
        raise SystemExit(f"vlfit {command} failed with exit code {process.returncode}")
    return data.decode().replace("\r\n", "\n")


def recording() -> str:
    """The recording as SVG, without fonts of other servers."""
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True)
    with tempfile.TemporaryDirectory() as home:
        for index, command in enumerate(COMMANDS):
            if index:
                console.print()
            console.print(Text.assemble(("$ ", "bold green"), (f"vlfit {command}", "bold")))
            console.print(Text.from_ansi(output_of(command, home).rstrip()))
    svg = console.export_svg(title="vlfit", unique_id="vlfit")
    return re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)


if __name__ == "__main__":
    FILE.write_text(recording(), "utf-8")
