"""A benchmark on a share of the multiprocessors: arguments, MPS's daemon, and a machine without it."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import small_card

# Stands in for NVIDIA's program: records what it is told, and of the environment where it would listen.
CONTROL = """#!/bin/sh
echo "$@ $(if [ $# = 0 ]; then cat; fi) $CUDA_MPS_PIPE_DIRECTORY" >> {log}
exit {code}
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the stand-in was told, one line a call."""
    return install(tmp_path, monkeypatch)


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, code: int = 0) -> Path:
    program, log = folder / small_card.CONTROL, folder / "log"
    program.write_text(CONTROL.format(log=log, code=code))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return log


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nope"],
        ["small_card"],
        ["harness"],  # not a benchmark
        ["../sizes"],
        ["--probe-only", "sizes"],
        ["--multiprocessors", "0", "sizes"],
        ["--multiprocessors", "30,", "sizes"],
        ["--multiprocessors", "1,2,3,4,5,6,7,8,9", "sizes"],
        ["--llama-bench", sys.executable, "sizes"],
        ["--llama-bench", sys.executable, "--gguf", "nowhere.gguf", "sizes"],
    ],
)
def test_arguments_that_make_no_sense(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        small_card.read_options(arguments)
    assert caught.value.code == 2


def test_what_follows_the_name_is_the_benchmarks() -> None:
    options = small_card.read_options(["--multiprocessors", "20,30", "sizes", "2B-bf16", "--rounds", "1"])
    assert options.multiprocessors == (20, 30)
    assert (options.benchmark, options.arguments) == ("sizes", ["2B-bf16", "--rounds", "1"])


@pytest.mark.parametrize(("number", "total"), [(30, 132), (1, 132), (28, 28), (35, 114), (131, 132)])
def test_the_percentage_gives_enough_and_no_more(number: int, total: int) -> None:
    percent = small_card.percentage(number, total)
    assert percent * total // 100 >= number > (percent - 1) * total // 100


def test_a_card_that_is_not_limited_is_refused() -> None:
    found = {"multiprocessors": 30}
    assert small_card.check_limited(found, 30, 132) is found
    with pytest.raises(small_card.CannotLimit, match=r"132 of 132.* 30"):
        small_card.check_limited({"multiprocessors": 132}, 30, 132)


def test_the_daemon_is_ended_also_after_an_error(log: Path) -> None:
    folders: list[Path] = []

    def use() -> None:
        with small_card.mps_daemon() as settings:
            folders.extend(Path(each) for each in settings.values())
            assert all(each.is_dir() for each in folders)
            raise KeyError

    with pytest.raises(KeyError):
        use()
    pipe = str(folders[0])
    assert [line.split() for line in log.read_text().splitlines()] == [["-d", pipe], ["quit", pipe]]
    assert not any(each.exists() for each in folders)


def test_sigterm_ends_the_daemon(log: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit), small_card.mps_daemon():
        signal.raise_signal(signal.SIGTERM)
    assert [line.split()[0] for line in log.read_text().splitlines()] == ["-d", "quit"]
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_daemon_that_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, code=3)
    with pytest.raises(small_card.CannotLimit, match="exit code 3"), small_card.mps_daemon():
        pytest.fail("there is no daemon")


def test_processes_of_another_mps(tmp_path: Path) -> None:
    for pid, command in (("12", small_card.SERVER), ("7", f"/usr/bin/{small_card.CONTROL}"), ("3", "sh")):
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "cmdline").write_bytes(command.encode() + b"\0-d\0")
    (tmp_path / "self").mkdir()
    assert small_card.mps_processes(tmp_path) == [7, 12]


def test_whole_card_first_then_limited(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The order of runs, and the environment of each."""
    runs: list[tuple[str, str | None]] = []

    def run_probe(limit: dict[str, str]) -> dict[str, Any]:
        percent = limit.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
        runs.append(("probe", percent))
        number = 132 if percent is None else int(percent) * 132 // 100
        return {
            "multiprocessors": number,
            "read_bytes_per_second": 1e12,
            "product_flops_per_second": 1e14,
        }

    def run_benchmark(name: str, arguments: list[str], limit: dict[str, str]) -> int:
        runs.append((f"{name} {' '.join(arguments)}", limit.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")))
        return len(runs) == 4

    monkeypatch.setattr(small_card, "check_host", lambda: None)
    monkeypatch.setattr(small_card, "run_probe", run_probe)
    monkeypatch.setattr(small_card, "run_benchmark", run_benchmark)
    file = tmp_path / "found.json"
    with pytest.raises(SystemExit) as caught:
        small_card.main(["--json", str(file), "sizes", "2B-bf16"])
    assert caught.value.code == 1
    assert runs == [("probe", None), ("sizes 2B-bf16", None), ("probe", "23"), ("sizes 2B-bf16", "23")]
    assert [line.split()[0] for line in log.read_text().splitlines()] == ["-d", "quit"]
    assert file.exists()
    assert "1,000" in capfd.readouterr().out
    with pytest.raises(SystemExit, match="132 multiprocessors"):
        small_card.main(["--multiprocessors", "132", "sizes"])


def test_without_mps(tmp_path: Path) -> None:
    """A sentence and no traceback on a machine that has no such program, or no GPU."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.small_card", "--probe-only"],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": str(tmp_path)},
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert (small_card.CONTROL in done.stderr) is Path("/dev/nvidiactl").exists()
    assert len(done.stderr.splitlines()) == 1
