"""A guarded process ends with all its children: on stop, on a crash, and if its parent dies."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.backends.vllm.fake_vllm import environment
from tests.backends.vllm.processes import processes_with, wait_until_gone
from vlfit.backends.vllm import process as logs
from vlfit.backends.vllm.process import GuardedProcess, ProcessLog
from vlfit.errors import UsageError

LOG = Path(__file__).parent / "logs" / "0.32-cpu.log"


class Started:
    """The fake vLLM under its guard, with its output; ``mark`` is in the command line of each process."""

    def __init__(
        self, folder: Path, how: dict[str, object], *, gentle: float = 2.0, firm: float = 0.3
    ) -> None:
        self.mark = str(folder / "env")
        environment(Path(self.mark))
        self.lines: list[str] = []
        self.log = ProcessLog("a command", folder / "logs")
        words = [f"{self.mark}/bin/vllm", "serve", "model", "--port", "0"]
        variables = {**os.environ, "FAKE_VLLM": json.dumps({"log": str(LOG), **how})}
        self.guarded = GuardedProcess(
            words, variables, self.log, self.lines.append, sigint_seconds=gentle, sigterm_seconds=firm
        )

    def wait_for(self, words: str) -> None:
        end = time.monotonic() + 60
        while not any(words in line for line in self.lines):
            assert time.monotonic() < end, self.lines
            assert not self.guarded.ended, self.lines
            time.sleep(0.01)

    def children(self) -> list[int]:
        """The fake's child, which has its own session."""
        program = next(pid for pid, words in processes_with(self.mark) if "guard.py" not in words)
        return [pid for pid, words in processes_with(f"EngineCore of {program}")]


def is_alive(pid: int) -> bool:
    return any(pid == each for each, _ in processes_with("EngineCore of"))


@pytest.mark.parametrize("stubborn", [False, True])
def test_stop_leaves_no_process(tmp_path: Path, stubborn: bool) -> None:
    started = Started(tmp_path, {"stubborn": stubborn})
    started.wait_for("Application startup complete")
    (child,) = started.children()
    assert is_alive(child)
    started.guarded.stop()
    assert started.guarded.ended
    assert wait_until_gone(started.mark)
    assert not is_alive(child)
    started.guarded.stop()  # once more changes nothing
    assert b"Application startup complete" in started.log.path.read_bytes()
    assert "INFO:     Shutting down" in started.lines


def test_stop_without_sigint_does_not_wait(tmp_path: Path) -> None:
    started = Started(tmp_path, {"stubborn": True}, gentle=600.0)
    started.wait_for("Application startup complete")
    started.guarded.stop(gently=False)
    assert started.guarded.ended
    assert wait_until_gone(started.mark)


def test_deaf_processes_are_killed(tmp_path: Path) -> None:
    deaf = "import signal, time; [signal.signal(n, 1) for n in (2, 15)]; print('deaf', flush=True); "
    deaf += "time.sleep(99)"
    log = ProcessLog("a command", tmp_path)
    lines: list[str] = []
    command = [sys.executable, "-ISc", deaf, str(tmp_path)]
    guarded = GuardedProcess(command, os.environ, log, lines.append, sigint_seconds=0.1, sigterm_seconds=0.1)
    while "deaf" not in lines:
        time.sleep(0.01)
    guarded.stop()
    assert guarded.ended
    assert guarded.exit_code == 128 + signal.SIGKILL
    assert wait_until_gone(str(tmp_path))


def test_crash_ends_the_children(tmp_path: Path) -> None:
    started = Started(tmp_path, {"fails": "RuntimeError: it is broken"})
    assert started.guarded.wait(60)
    assert started.guarded.exit_code == 1
    assert "RuntimeError: it is broken" in started.lines
    assert wait_until_gone(started.mark)
    assert wait_until_gone("EngineCore of")


KILLED = """
import os, sys, time, threading
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.backends.vllm.test_process import Started
started = []
# From a thread that ends: what is bound to threads (PR_SET_PDEATHSIG) must not mistake it for the end of all.
thread = threading.Thread(target=lambda: started.append(Started(Path({folder!r}), {{"stubborn": True}})))
thread.start(); thread.join()
started[0].wait_for("Application startup complete")
time.sleep(0.3)
print(started[0].children()[0], flush=True)
time.sleep(60)
"""


def test_killed_parent_leaves_no_process(tmp_path: Path) -> None:
    program = KILLED.format(root=str(Path(__file__).parents[3]), folder=str(tmp_path))
    us = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert us.stdout is not None
    with us, us.stdout:
        child = int(us.stdout.readline())
        assert is_alive(child)
        us.kill()
    assert wait_until_gone(str(tmp_path / "env"))
    assert not is_alive(child)


def test_killed_guard_leaves_no_process(tmp_path: Path) -> None:
    started = Started(tmp_path, {})
    started.wait_for("Application startup complete")
    (child,) = started.children()
    os.kill(started.guarded.pid, signal.SIGKILL)
    assert wait_until_gone(started.mark)
    assert started.guarded.wait(60)  # though somebody still holds its output
    os.kill(child, signal.SIGKILL)  # it went into a session of its own, which only the guard finds


def test_missing_program(tmp_path: Path) -> None:
    lines: list[str] = []
    guarded = GuardedProcess([str(tmp_path / "none")], os.environ, ProcessLog("none", tmp_path), lines.append)
    assert guarded.wait(60)
    assert guarded.exit_code == 127
    assert lines == [f"cannot start {tmp_path / 'none'}: No such file or directory"]


def test_old_logs_are_deleted_and_logs_are_private(tmp_path: Path) -> None:
    for number in range(logs.KEPT_FILES + 5):
        (tmp_path / f"20200101-0000{number:02d}-1.log").touch()
    log = ProcessLog("vllm serve a/b", tmp_path)
    log.write(b"said\n")
    log.close()
    kept = sorted(tmp_path.glob("*.log"))
    assert len(kept) == logs.KEPT_FILES
    assert kept[-1] == log.path
    assert log.path.stat().st_mode & 0o777 == 0o600
    assert log.path.read_text() == "# vllm serve a/b\nsaid\n"


def test_long_logs_continue_in_a_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, most in (("MAX_FILE_BYTES", 100), ("FIRST_BYTES", 20), ("LAST_BYTES", 40)):
        monkeypatch.setattr(logs, name, most)
    log = ProcessLog("x", tmp_path)
    for number in range(40):
        log.write(f"line {number:04d}\n".encode())
    log.close()
    assert log.path.read_bytes().endswith(b"line 0039\n")
    assert log.path.with_suffix(".1.log").stat().st_size < 130
    assert log.kept_output.startswith(b"line 0000\nline 0001\n")
    assert log.kept_output.endswith(b"line 0038\nline 0039\n")
    assert len(log.kept_output) <= 60


def test_full_disk_keeps_the_log_in_memory(tmp_path: Path) -> None:
    log = ProcessLog("x", tmp_path)
    log._file.close()
    log._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    log.write(b"the cause\n")
    log.write(b"and more\n")
    assert log.write_error == "No space left on device"
    assert log.kept_output == b"the cause\nand more\n"
    log._file.close()


def test_unwritable_log_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file") as raised:
        ProcessLog("x", tmp_path / "file")
    assert "XDG_STATE_HOME" in raised.value.hint
