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
    command = [*VLFIT, "caption", "-", "--model", str(tiny("tied")), "--max-tokens", "4", "--json"]
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
