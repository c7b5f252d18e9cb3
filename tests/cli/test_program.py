"""The program as a process of its own: pipes, signals, what is left behind."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.scripted_backend import png

VLFIT = [sys.executable, "-m", "vlfit"]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """No settings, no cache of models, one thread."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VLFIT_")}
    return {**kept, "HF_HOME": str(tmp_path / "hub"), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}


def test_words_on_stdout_and_all_else_on_stderr(
    tiny: Callable[[str], Path], environment: dict[str, str]
) -> None:
    command = [*VLFIT, "caption", "-", "--model", str(tiny("tied")), "--max-tokens", "4", "--json", "-v"]
    ended = subprocess.run(command, input=png(), capture_output=True, env=environment, timeout=60)
    assert ended.returncode == 0, ended.stderr.decode()
    facts = json.loads(ended.stdout)
    assert facts["usage"]["completion_tokens"] <= 4
    assert facts["images"][0]["width"] == 64
    assert b"loading" in ended.stderr
    assert b"tokens/s" in ended.stderr


def test_a_reader_that_has_enough_is_no_error_worth_words(environment: dict[str, str]) -> None:
    process = subprocess.Popen(
        [*VLFIT, "caption", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    said = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) in (0, 1)
    assert said == b""


def test_interrupted_it_ends_with_130_and_no_traceback(
    tiny: Callable[[str], Path], environment: dict[str, str]
) -> None:
    process = subprocess.Popen(
        [*VLFIT, "chat", "--model", str(tiny("tied")), "--max-tokens", "2"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )
    assert process.stdin is not None
    assert process.stderr is not None
    process.stdin.write(b"Hi\n")
    process.stdin.flush()
    # Its cost is told once the answer is out; from then on it waits for the next line.
    while b"tokens" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 130
    assert b"Traceback" not in said
    assert b"Error" not in said


def test_interrupts_reach_programs_even_if_the_tests_run_in_the_background() -> None:
    """A script's background job ignores SIGINT, and what it starts would do so too."""
    told = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    code = f"import sys, subprocess, tests.conftest; subprocess.run([sys.executable, '-c', {told!r}])"
    ended = subprocess.run(
        ["/bin/sh", "-c", 'trap "" INT; exec "$0" -c "$1"', sys.executable, code],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
    )
    assert ended.stdout == "True\n", ended.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a disk that is always full")
@pytest.mark.parametrize(
    "options",
    [("--json",), ("--stream",), pytest.param(("--no-stream",), marks=pytest.mark.slow)],
    ids="".join,
)
def test_words_that_find_no_room_are_told(
    options: tuple[str, ...], tiny: Callable[[str], Path], environment: dict[str, str]
) -> None:
    command = [*VLFIT, "caption", "-", "--model", str(tiny("tied")), "--max-tokens", "4", *options]
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(
            command, input=png(), stdout=full, stderr=subprocess.PIPE, env=environment, timeout=60
        )
    assert ended.returncode == 1
    assert b"error: cannot write the answer: No space left on device\n" in ended.stderr
    assert b"Traceback" not in ended.stderr
    assert b"Exception ignored" not in ended.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a disk that is always full")
@pytest.mark.parametrize("words", ["--help", "--version", "models", "models --json", "completion bash"])
def test_no_room_for_the_words_of_any_command_is_no_bug(words: str, environment: dict[str, str]) -> None:
    """In containers Python often writes without a buffer: each write fails by itself."""
    for buffering in ({}, {"PYTHONUNBUFFERED": "1"}):
        with open("/dev/full", "wb") as full:
            ended = subprocess.run(
                [*VLFIT, *words.split()],
                stdout=full,
                stderr=subprocess.PIPE,
                env=environment | buffering,
                timeout=60,
            )
        assert ended.returncode == 1
        assert b"No space left on device" in ended.stderr
        assert b"vlfit --debug" not in ended.stderr


@pytest.mark.skipif(os.name != "posix", reason="needs a shell that closes streams")
@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("--version >&-", 1),
        ("models >&-", 1),
        ("--version 2>&-", 0),
        ("no-such-command 2>&-", 2),
        ("chat -m no/model.gguf <&- >/dev/null", 1),
        ("--version <&- >&- 2>&-", 1),
    ],
)
def test_a_closed_stream_is_no_bug(command: str, code: int, environment: dict[str, str]) -> None:
    shell = ["/bin/sh", "-c", f'exec "$0" -m vlfit {command}', sys.executable]
    ended = subprocess.run(shell, capture_output=True, env=environment, timeout=60, stdin=subprocess.DEVNULL)
    assert ended.returncode == code
    assert b"vlfit --debug" not in ended.stderr
    assert b"Traceback" not in ended.stderr
    assert bool(ended.stderr) is ("2>" not in command)
