"""``vlfit serve --daemon``: a server that goes on when the terminal is closed.

Knows: how to start the same command apart from this one, and to wait until it is ready. Does not know what it
serves.
"""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlfit.cli.printing import Printer
from vlfit.cli.serve_options import with_more
from vlfit.errors import CannotListen

if TYPE_CHECKING:
    from vlfit.settings import Settings

LAST_LINES = 12  # of the log of a server that did not start


def log_file() -> Path:
    base = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    return base / "vlfit" / f"serve-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"


def start_in_background(settings: "Settings", arguments: list[str], *, as_json: bool) -> None:
    """Start ``vlfit`` with ``arguments``, less ``--daemon``, and wait for it to be ready.

    Raises ``CannotListen``, with the end of its log, if it ends instead. ``settings`` were read from the same
    arguments, so that mistakes in them are told here.
    """
    from vlfit.cli.serving import keys_of

    keys_of(settings)
    log = log_file()
    log.parent.mkdir(parents=True, exist_ok=True)
    kept = [each for each in arguments if each not in ("--daemon", "--restart")]
    command = [sys.executable, "-m", "vlfit", *with_more(kept, "--restart", "--json")]
    with log.open("ab") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,  # what ends this terminal does not end it
        )
    assert process.stdout is not None
    try:
        ready = process.stdout.readline()
    except BaseException:  # Ctrl-C while it loads: nobody would know that it goes on
        process.terminate()
        raise
    facts: dict[str, Any] = {}
    with suppress(ValueError):
        facts = json.loads(ready)
    if "url" not in facts:
        process.wait()
        end = "\n".join(log.read_text("utf-8", "replace").splitlines()[-LAST_LINES:])
        raise CannotListen(f"the server did not start:\n{end}", f"all that it said is in {log}")
    printer = Printer(json=as_json)
    if as_json:
        printer.data({**facts, "pid": process.pid, "log": str(log)})
        return
    printer.line(f"ready: {facts['model']} on {facts['device']} at {facts['url']}/v1, process {process.pid}")
    port = str(facts["url"]).rpartition(":")[2]
    printer.note(f"log:   {log}\nstop:  vlfit stop --port {port}")
