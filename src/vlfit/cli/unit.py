"""``vlfit serve --systemd``: a unit by which systemd starts the server, and starts it again if it falls.

Knows: what a unit says, and how systemd quotes. Does not know what is served.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from vlfit.cli.printing import Printer
from vlfit.cli.serve_options import with_more
from vlfit.errors import UsageError

if TYPE_CHECKING:
    from vlfit.settings import Settings

_OURS = ("--systemd", "--restart")
_PATHS = ("--api-keys", "--allow-files", "--vllm-python")
ENVIRONMENT = "~/.config/vlfit/environment"
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
    """With the options of this command, and the paths in them whole: systemd starts programs elsewhere.

    Raises ``UsageError`` for a key among them: units can be read by everybody.
    """
    from vlfit.cli.serving import keys_of

    for option, way in (("--api-key", ", or use --api-keys FILE"), ("--server-key", "")):
        if any(each.partition("=")[0] == option for each in arguments):
            variable = f"VLFIT_{option[2:].replace('-', '_').upper()}"
            raise UsageError(
                f"a unit can be read by everybody, and {option} would stand in it",
                f"write {variable}=... into {ENVIRONMENT}{way}",
            )
    keys_of(settings)
    printer = Printer()
    printer.line(unit(with_whole_paths(arguments, settings.model), settings.drain).rstrip("\n"))
    if settings.api_key:
        printer.note(f"note: VLFIT_API_KEY is not in the unit: write it into {ENVIRONMENT}")


def with_whole_paths(arguments: list[str], model: str) -> list[str]:
    """``arguments``, of which files, folders, and a ``model`` that is one, mean the same everywhere."""
    from vlfit.checkpoint.source import MINI

    folder = model if model != MINI and Path(model).expanduser().is_dir() else None
    whole: list[str] = []
    for each in arguments:
        name, sign, value = each.partition("=")
        if each == folder or (whole and whole[-1] in _PATHS):
            whole.append(_whole(each))
        elif sign and (name in _PATHS or (name == "--model" and value == folder)):
            whole.append(f"{name}={_whole(value)}")
        else:
            whole.append(each)
    return whole


def _whole(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def unit(arguments: list[str], drain: float) -> str:
    """The unit for ``vlfit`` with ``arguments``, less ``--systemd``; ``drain`` in seconds."""
    kept = [each for each in arguments if each not in _OURS]
    start = " ".join(map(quoted, [sys.executable, "-m", "vlfit", *with_more(kept, "--restart")]))
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


def quoted(argument: str) -> str:
    """As systemd reads a word of a command line: quotes, and no meaning for % and $."""
    plain = argument.replace("%", "%%").replace("$", "$$")
    if plain and all(letter.isalnum() or letter in "-_=/.,:+@%$" for letter in plain):
        return plain
    escaped = plain.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
