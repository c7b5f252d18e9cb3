"""The program itself: ended by kill -9 and by Ctrl-C, and started again."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.ray.parts import png
from tests.server.harness import running
from tests.server.scripted import ScriptedBackend

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")]

MARK = "VLFIT_TEST_MARK"


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A folder of 120 pictures, one of which is none."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(119):
        (folder / f"{number:03}.png").write_bytes(png(number))
    (folder / "bad.png").write_bytes(b"no picture")
    return folder


@contextmanager
def program(*words: str, mark: str = "") -> Iterator[subprocess.Popen[str]]:
    """``vlfit batch`` with ``words``, killed at the end if it still runs."""
    command = [sys.executable, "-m", "vlfit", "batch", *words]
    environment = os.environ | {MARK: mark}
    environment.pop("RAY_ADDRESS", None)
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def wait_until(true: Callable[[], bool], process: subprocess.Popen[str] | None = None) -> None:
    deadline = time.monotonic() + 90
    while not true():
        assert time.monotonic() < deadline
        if process is not None and process.poll() is not None:
            raise AssertionError(process.communicate()[1])
        time.sleep(0.05)


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def marked(mark: str) -> list[int]:
    """Processes that were started by the one with ``mark``, and itself."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                found += [int(entry.name)] if state != "Z" else []
        except OSError:
            continue  # it has ended
    return found


def keys(path: Path) -> list[str]:
    return [json.loads(line)["key"] for line in path.read_text().splitlines()]


def test_a_killed_program_goes_on_where_it_was(cluster: str, pictures: Path, tmp_path: Path) -> None:
    output = tmp_path / "captions.jsonl"
    with running(ScriptedBackend(delay=0.05)) as server:
        words = [str(pictures), "-o", str(output), "--backend", "remote", server.url, "--ray", cluster]
        words += ["--workers", "2", "--concurrency", "4", "--json"]
        with program(*words) as first:
            wait_until(lambda: lines(output) >= 30, first)
            first.kill()
        done = lines(output)
        assert 30 <= done < 119
        with program(*words) as second:
            said, errors = second.communicate(timeout=90)
    assert second.returncode == 1, errors  # one picture is bad
    assert sorted(keys(output)) == [f"{number:03}.png" for number in range(119)]
    assert keys(tmp_path / "captions.jsonl.failed.jsonl") == ["bad.png"]
    summary = json.loads(said)  # and nothing but this stands on stdout, whatever Ray has said
    assert (summary["done"], summary["done_before"]) == (119 - done, done)


def test_ctrl_c_leaves_no_process(pictures: Path, tmp_path: Path) -> None:
    output, mark = tmp_path / "captions.jsonl", uuid.uuid4().hex
    with running(ScriptedBackend(delay=0.05)) as server:
        words = [str(pictures), "-o", str(output), "--backend", "remote", server.url, "--ray", "local"]
        with program(*words, "--workers", "2", "--concurrency", "2", mark=mark) as batch:
            wait_until(lambda: lines(output) >= 5, batch)
            assert len(marked(mark)) > 3  # a cluster, and two workers
            batch.send_signal(signal.SIGINT)
            _, errors = batch.communicate(timeout=60)
        assert batch.returncode == 130, errors
        wait_until(lambda: not marked(mark))
    assert 5 <= lines(output) < 119
