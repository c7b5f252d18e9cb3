"""A benchmark on a share of the multiprocessors: arguments, MPS's daemon, and a machine without it."""

import json
import os
import re
import signal
import subprocess
import sys
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from benchmarks import small_card
from benchmarks.harness import ROOT

# Stands in for NVIDIA's program: records what it is told, and of the environment where it would listen.
CONTROL = """#!/bin/sh
echo "$@ $(if [ $# = 0 ]; then cat; fi) $CUDA_MPS_PIPE_DIRECTORY" >> {log}
exit {code}
"""
PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"


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


def told(log: Path) -> list[str]:
    """The first words of what the stand-in was told."""
    return [line.split()[0] for line in log.read_text().splitlines()]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nope"],
        ["small_card"],
        ["harness"],  # not a benchmark
        ["engine_workers"],  # benchmarks start these
        ["ledger_workers"],
        ["gpu_memory"],
        ["../sizes"],
        ["--probe-only", "sizes"],
        ["--multiprocessors", "0", "sizes"],
        ["--multiprocessors", "30,", "sizes"],
        ["--multiprocessors", "30,20,30", "sizes"],
        ["--multiprocessors", "1,2,3,4,5,6,7,8,9", "sizes"],
        ["--llama-bench", sys.executable, "sizes"],
        ["--llama-bench", sys.executable, "--gguf", "nowhere.gguf", "sizes"],
        ["--json", "/dev/null/found.json", "sizes"],
        ["--json", "/", "--probe-only"],
        ["--json", f"/tmp/{300 * 'x'}", "--probe-only"],
        ["sizes", "--json", "/dev/null/found.json"],
        ["sizes", "--json=/tmp"],
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


def test_the_benchmarks_of_the_list_can_be_run() -> None:
    lines = (ROOT / "CONTRIBUTING.md").read_text("utf-8").splitlines()
    start = lines.index("| name | what it measures |") + 2
    rows = takewhile(lambda line: line.startswith("|"), lines[start:])
    names = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert len(names) > 30
    assert {name for name in names if not small_card.is_benchmark(name)} == {"small_card"}


@pytest.mark.parametrize(
    ("given", "made"),
    [
        (["2B", "--json", "a/F.json", "--rounds", "1"], ["2B", "--json", "a/F-30.json", "--rounds", "1"]),
        (["--json=F.json"], ["--json=F-30.json"]),
        (["--js", "F"], ["--js", "F-30"]),
        (["--json", "a.json", "--json=b.c.json"], ["--json", "a-30.json", "--json=b.c-30.json"]),
        (["--json"], ["--json"]),  # the benchmark says what is wrong with these
        (["--json="], ["--json="]),
        (["--", "--jsons", "F", "-j", "F"], ["--", "--jsons", "F", "-j", "F"]),
    ],
)
def test_each_run_has_a_file_of_its_own(given: list[str], made: list[str]) -> None:
    assert small_card.with_number(given, 30) == made


def test_a_file_that_can_be_written_is_as_before(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "found.json"
    small_card.read_options(["--json", str(file), "--probe-only"])
    assert file.parent.is_dir()
    assert not file.exists()
    file.write_text("of an earlier run")
    small_card.read_options(["--json", str(file), "--probe-only"])
    assert file.read_text() == "of an earlier run"


@pytest.mark.parametrize(("number", "total"), [(30, 132), (1, 132), (28, 28), (35, 114), (131, 132)])
def test_the_percentage_gives_enough_and_no_more(number: int, total: int) -> None:
    percent = small_card.percentage(number, total)
    assert percent * total // 100 >= number > (percent - 1) * total // 100


def test_a_card_that_is_not_limited_is_refused() -> None:
    found = {"multiprocessors": 30}
    assert small_card.check_limited(found, 30, 132) is found
    with pytest.raises(small_card.CannotLimit, match=r"132 of 132.* 30"):
        small_card.check_limited({"multiprocessors": 132}, 30, 132)
    with pytest.raises(small_card.CannotLimit):  # close to what was wanted
        small_card.check_limited({"multiprocessors": 132}, 130, 132)


@pytest.mark.parametrize(("most", "total"), [(130, 132), (27, 28), (99, 100), (198, 200)])
def test_numbers_that_take_all_of_the_card_are_refused(most: int, total: int) -> None:
    small_card.check_numbers((1, most), total)
    assert small_card.percentage(most, total) < 100
    for number in (most + 1, total, total + 1):
        with pytest.raises(small_card.CannotLimit, match=str(most)):
            small_card.check_numbers((1, number), total)


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
    assert told(log) == ["-d", "quit"]
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


class Runs:
    """What ran, with the percentage of its environment; stands in for a card of 132 multiprocessors.

    ``limits``: MPS limits, as it should. ``codes``: exit codes of benchmarks. ``saved``: at the start of each
    run of the benchmark or llama-bench, the rows of ``file`` and those of them with llama.cpp.
    """

    def __init__(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file, self.limits = file, True
        self.order: list[tuple[str, str | None]] = []
        self.codes: list[int] = []
        self.saved: list[tuple[int, int]] = []
        monkeypatch.setattr(small_card, "check_host", lambda: None)
        for name in ("run_probe", "run_benchmark", "run_llama"):
            monkeypatch.setattr(small_card, name, getattr(self, name))

    def run_probe(self, limit: dict[str, str]) -> dict[str, Any]:
        percent = limit.get(PERCENTAGE)
        self.order.append(("probe", percent))
        number = 132 if percent is None or not self.limits else int(percent) * 132 // 100
        return {
            "multiprocessors": number,
            "read_bytes_per_second": 1e12,
            "product_flops_per_second": 1e14,
        }

    def run_benchmark(self, name: str, arguments: list[str], limit: dict[str, str]) -> int:
        self._note(" ".join([name, *arguments]), limit)
        return self.codes.pop(0) if self.codes else 0

    def run_llama(self, program: Path, model: Path, limit: dict[str, str]) -> dict[str, float]:
        self._note("llama", limit)
        return {"p808 n0": 1.0}

    def _note(self, what: str, limit: dict[str, str]) -> None:
        self.order.append((what, limit.get(PERCENTAGE)))
        rows = json.loads(self.file.read_text())["runs"] if self.file.exists() else []
        self.saved.append((len(rows), sum("llama.cpp" in row for row in rows)))


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(tmp_path / "found.json", monkeypatch)


@pytest.mark.parametrize("codes", [[1, 0], [0, 1]])
def test_what_is_limited_first_then_the_whole_card(
    log: Path, runs: Runs, codes: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    """The order of runs, and the environment of each."""
    runs.codes = codes
    with pytest.raises(SystemExit) as caught:
        small_card.main(["--json", str(runs.file), "sizes", "2B-bf16"])
    assert caught.value.code == 1
    assert runs.order == [("probe", None), ("probe", "23"), ("sizes 2B-bf16", "23"), ("sizes 2B-bf16", None)]
    assert told(log) == ["-d", "quit"]
    assert "1,000" in capfd.readouterr().out
    with pytest.raises(SystemExit, match="132 multiprocessors"):
        small_card.main(["--multiprocessors", "131", "sizes"])


def test_all_numbers_are_proven_before_a_benchmark(log: Path, runs: Runs, tmp_path: Path) -> None:
    given, each = str(tmp_path / "F.json"), str(tmp_path / "F-{}.json")
    with pytest.raises(SystemExit) as caught:
        small_card.main(["--multiprocessors", "30,20", "--limited-only", "sizes", f"--json={given}"])
    assert caught.value.code == 0
    assert runs.order[:3] == [("probe", None), ("probe", "23"), ("probe", "16")]
    limited = [
        (f"sizes --json={each.format(number)}", percent) for number, percent in ((30, "23"), (20, "16"))
    ]
    assert runs.order[3:] == limited
    with pytest.raises(SystemExit):
        small_card.main(["sizes", "--json", given])
    assert runs.order[-1] == (f"sizes --json {each.format(132)}", None)


@pytest.mark.parametrize("why", ["the daemon", "the limit"])
def test_no_benchmark_runs_without_a_limit(
    tmp_path: Path, runs: Runs, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = install(tmp_path, monkeypatch, code=3 if why == "the daemon" else 0)
    runs.limits = False
    with pytest.raises(SystemExit) as caught:
        small_card.main(["--json", str(runs.file), "sizes", "2B-bf16"])
    assert isinstance(caught.value.code, str)  # printed; the exit code is 1
    assert {what for what, _ in runs.order} == {"probe"}
    assert told(log) == (["-d"] if why == "the daemon" else ["-d", "quit"])
    assert len(json.loads(runs.file.read_text())["runs"]) == 1


def test_the_file_has_what_was_found_so_far(log: Path, runs: Runs) -> None:
    """An interrupted run leaves that."""
    llama = ["--llama-bench", sys.executable, "--gguf", sys.executable]
    with pytest.raises(SystemExit):
        small_card.main(["--multiprocessors", "30,20", "--json", str(runs.file), *llama, "sizes"])
    # llama-bench and the benchmark, three times.
    assert runs.saved == [(3, 0), (3, 1), (3, 1), (3, 2), (3, 2), (3, 3)]
    assert [row["wanted"] for row in json.loads(runs.file.read_text())["runs"]] == [None, 30, 20]


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
