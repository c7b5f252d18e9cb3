"""``vlfit serve --systemd``: a unit by which systemd starts the server, and starts it again if it falls.

Knows: what a unit says, and how systemd quotes. Does not know what is served.
"""

import sys
from typing import TYPE_CHECKING

from vlfit.cli.printing import Printer

if TYPE_CHECKING:
    from vlfit.settings import Settings

_OURS = ("--systemd", "--daemon", "--restart")
NOTES = """\
# vlfit: a server for Qwen3-VL. As a user's own service:
#   mkdir -p ~/.config/systemd/user
#   {command} > ~/.config/systemd/user/vlfit.service
#   systemctl --user daemon-reload
#   systemctl --user enable --now vlfit
#   journalctl --user -u vlfit -f
# To run without being logged in: loginctl enable-linger
"""


def print_unit(settings: "Settings", arguments: list[str]) -> None:
    """With the options of this command. A key is not among them: units can be read by everybody."""
    from vlfit.cli.serving import keys_of

    keys_of(settings)
    Printer().line(unit(arguments, settings.drain).rstrip("\n"))


def unit(arguments: list[str], drain: float) -> str:
    """The unit for ``vlfit`` with ``arguments``, less ``--systemd`` and a key; ``drain`` in seconds."""
    kept = without_key([each for each in arguments if each not in _OURS])
    start = " ".join(map(quoted, [sys.executable, "-m", "vlfit", *kept, "--restart"]))
    return f"""{NOTES.format(command="vlfit serve ... --systemd")}
[Unit]
Description=vlfit: pictures and words over an OpenAI-compatible API
After=network.target

[Service]
Type=exec
ExecStart={start}
# Keys and other settings, one VLFIT_NAME=value a line; chmod 600 it.
EnvironmentFile=-%h/.config/vlfit/environment
# SIGTERM lets running answers finish for {drain:g} s; the rest is for giving the GPU back.
KillSignal=SIGTERM
KillMode=mixed
TimeoutStopSec={int(drain) + 15}
Restart=on-failure
RestartSec=2
# 2: wrong usage, 3: does not fit. Starting again would change neither.
RestartPreventExitStatus=2 3
NoNewPrivileges=yes
ProtectSystem=full
PrivateTmp=yes

[Install]
WantedBy=default.target
"""


def without_key(arguments: list[str]) -> list[str]:
    """``arguments`` less ``--api-key KEY`` and ``--api-key=KEY``."""
    kept: list[str] = []
    skip = False
    for each in arguments:
        if skip or each.startswith("--api-key="):
            skip = False
        elif each == "--api-key":
            skip = True
        else:
            kept.append(each)
    return kept


def quoted(argument: str) -> str:
    """As systemd reads a word of a command line: quotes, and no meaning for % and $."""
    plain = argument.replace("%", "%%").replace("$", "$$")
    if plain and all(letter.isalnum() or letter in "-_=/.,:+@%$" for letter in plain):
        return plain
    escaped = plain.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
