"""``vlfit`` in processes of their own that start at once: forks of one that has imported what they need.

To import torch takes two seconds of a program that runs for a tenth. A program here has its environment,
folder, streams, signals and exit code for itself, as one that a shell starts; only the imports were made
before. Where the start is what a test is about, or what a program leaves unimported, use
``python -m vlfit``. What reads the environment when it is imported, as huggingface_hub, each imports itself.
"""

import atexit
import gc
import importlib
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import IO, NoReturn, TextIO

IMPORTED_BEFORE = (
    *("vlfit.engine.engine", "vlfit.engine.engine_thread", "vlfit.engine.execution.warmup"),
    *("vlfit.backends.native", "vlfit.models.qwen3_vl.builders", "vlfit.models.qwen3_vl.vision"),
    *("vlfit.models.llama.config", "vlfit.models.phi3.config", "vlfit.models.qwen2.config", "vlfit.client"),
    *("vlfit.cli.session", "vlfit.cli.main", "vlfit.settings", "vlfit.plan.model_choice", "vlfit.plan.svg"),
    *("vlfit.tasks.batch.runner", "vlfit.doctor.diagnose", "vlfit.quantize.conversion"),
    *("vlfit.parity.run_checks", "vlfit.verify.verify_run", "vlfit.server.app"),
    *("vlfit.checkpoint.gguf.unopened", "vlfit.quantize.gguf_output", "vlfit.plan.gguf_shelf"),
    *("vlfit.plan.quantizations", "vlfit.plan.report", "vlfit.cli.pages.plan_page", "gguf"),
    *("rich.live", "rich.markdown", "rich.progress", "rich.table", "encodings.idna", "stringprep"),
    *("typer._adapters", "PIL.Image", "httpx2", "httpcore2", "anyio", "filelock", "tqdm", "uvicorn", "yaml"),
)
NOT_IMPORTED_BEFORE = ("huggingface_hub", "transformers", "triton")  # their settings are a program's own


Stream = int | IO[str] | IO[bytes]


class Program:
    """A running ``vlfit``, with what a test needs of ``subprocess.Popen``."""

    stdout: TextIO
    stderr: TextIO

    def __init__(
        self,
        *words: object,
        stdin: Stream = DEVNULL,
        stdout: Stream = DEVNULL,
        stderr: Stream = DEVNULL,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        before: str = "",
    ) -> None:
        """``words``: its arguments; streams as for ``Popen``. ``before``: Python that it runs first."""
        told = {
            "words": list(map(str, words)),
            "env": dict(os.environ if env is None else env),
            "cwd": str(cwd or Path.cwd()),
            "before": before,
        }
        self._told, theirs = socket.socketpair()
        self.stdout, self.stderr = io.StringIO(), io.StringIO()
        with ExitStack() as sent:
            streams = [sent.enter_context(open(os.devnull, "r+b")).fileno()] * 3
            for number, each in enumerate((stdin, stdout, stderr)):
                if each == PIPE:
                    read, streams[number] = os.pipe()
                    sent.callback(os.close, streams[number])
                    setattr(self, ("", "stdout", "stderr")[number], os.fdopen(read, encoding="utf-8"))
                elif each != DEVNULL:
                    streams[number] = each if isinstance(each, int) else each.fileno()
            file = sent.enter_context(tempfile.TemporaryFile())
            file.write(json.dumps(told).encode())
            file.flush()
            sent.enter_context(theirs)
            socket.send_fds(_forker(), [b"+"], [*streams, theirs.fileno(), file.fileno()])
        self.returncode: int | None = None
        self.pid = int(self._line())

    def _line(self) -> bytes:
        line = b""
        while not line.endswith(b"\n"):
            line += (piece := self._told.recv(1))
            if not piece:
                raise RuntimeError("the process of which programs are forks has ended")
        return line

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        try:
            return self.wait(0.001)
        except TimeoutError:
            return None

    def wait(self, timeout: float) -> int:
        """The exit code, once it ended. Raises ``TimeoutError``."""
        if self.returncode is None:
            self._told.settimeout(timeout)
            self.returncode = int(self._line())
            self._told.close()
        return self.returncode

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *error: object) -> None:
        self.communicate()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it ended, and its code is on its way
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float = 100) -> tuple[str, str]:
        """What it still writes to its pipes, once it ended. Raises ``TimeoutError``."""
        with ThreadPoolExecutor(2) as threads:
            try:
                written = [
                    threads.submit(lambda pipe: "" if pipe.closed else pipe.read(), pipe)
                    for pipe in (self.stdout, self.stderr)
                ]
                self.wait(timeout)
                out, err = (each.result(timeout) for each in written)
            finally:
                self.kill()
        self.stdout.close()
        self.stderr.close()
        return out, err


def run_program(
    *words: object,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float = 100,
) -> subprocess.CompletedProcess[str]:
    """What ``vlfit`` with ``words`` returned and wrote, without anything on stdin."""
    program = Program(*words, stdout=PIPE, stderr=PIPE, env=env, cwd=cwd)
    out, err = program.communicate(timeout)
    assert program.returncode is not None
    return subprocess.CompletedProcess([str(word) for word in words], program.returncode, out, err)


@cache
def _forker() -> socket.socket:
    """Leads to the process of which programs are forks; it ends with this one."""
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", "tests.programs", str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=Path(__file__).parent.parent)

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


# --- in that process ---------------------------------------------------------------------------------------


def _serve(orders: socket.socket) -> None:
    """Fork for each order until nobody gives any."""
    for name in IMPORTED_BEFORE:
        importlib.import_module(name)
    assert not set(NOT_IMPORTED_BEFORE) & set(sys.modules)
    import typer.main

    from vlfit.cli.main import app

    # Nor does each make the same commands again.
    typer.main.get_command = cache(typer.main.get_command)
    typer.main.get_command(app)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's reaches the tests, too, which end this
    ended, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[int, int] = {}  # where each program's exit code is told
    while True:
        readable = select.select([orders, ended], [], [])[0]
        if ended in readable:
            ended.recv(4096)
            _tell_ends(running)
        if orders in readable:
            data, received, _, _ = socket.recv_fds(orders, 1, 5)
            if not data:
                return
            *streams, reply, order = received
            if (program := os.fork()) == 0:
                signal.set_wakeup_fd(-1)
                for each in (orders.detach(), ended.detach(), wake.detach(), reply, *running.values()):
                    os.close(each)
                _run(streams, order)
            for each in (*streams, order):
                os.close(each)
            running[program] = reply
            os.write(reply, b"%d\n" % program)


def _tell_ends(running: dict[int, int]) -> None:
    for program in list(running):
        found, status = os.waitpid(program, os.WNOHANG)
        if found:
            reply = running.pop(program)
            with suppress(BrokenPipeError):  # a test that failed waits for nothing
                os.write(reply, b"%d\n" % os.waitstatus_to_exitcode(status))
            os.close(reply)


def _run(streams: list[int], order: int) -> NoReturn:
    """The program that was ordered, in this process."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with open(order, "rb") as file:
        file.seek(0)
        told = json.load(file)
    for number, each in enumerate(streams):
        os.dup2(each, number)
        os.close(each)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(told["env"])
    time.tzset()
    os.chdir(told["cwd"])
    from vlfit import __main__

    sys.argv = [str(__main__.__file__), *told["words"]]
    try:
        exec(told["before"], {})
        __main__.main()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    # All that Python does as it ends, but to take apart what was imported before, which takes longer.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
