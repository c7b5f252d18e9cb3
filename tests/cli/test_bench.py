"""``vlfit bench`` from the outside: what it prints where, and what it refuses."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Vlfit
from tests.scripted_backend import png
from tests.wording import figures_in
from vlfit.bench import measure
from vlfit.bench.workload import BenchOptions
from vlfit.checkpoint.source import Checkpoint
from vlfit.errors import DoesNotFit


def test_json_on_stdout_and_progress_on_stderr(vlfit: Vlfit, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    ended = vlfit(
        *("bench", "mini", "--device", "cpu", "--picture", tmp_path / "a.png", "--tokens", 3),
        *("--repeat", 1, "--batch", "1", "--json"),
    )
    assert ended.code == 0, ended.err
    facts = json.loads(ended.out)
    assert facts["request"]["picture"] == str(tmp_path / "a.png")
    assert facts["model"]["name"] == "mini"
    assert figures_in(ended.err)[:3] == [1, 1, 1]  # at once, and which of how many


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--batch", "1,x"), "--batch is '1,x'"),
        (("--batch", "0"), "--batch is '0'"),
        (("--size", "0x5"), "--size is '0x5'"),
        (("--size", "big"), "--size is 'big'"),
        (("--size", "99999x99999"), "99999x99999"),
        (("--size", "100000x99999"), "100000x99999"),
        (("--size", "99999x1"), "99999x1"),
        (("--size", "1700x99999"), "1700x99999"),
        (("--tokens", "1"), "--tokens is 1"),
        (("--chunk", "0"), "--chunk"),
    ],
)
def test_what_makes_no_sense_is_refused(vlfit: Vlfit, options: tuple[str, str], says: str) -> None:
    ended = vlfit("bench", "mini", *options)
    assert (ended.code, ended.out) == (2, "")
    assert says in ended.err


def test_a_picture_that_is_not_there(vlfit: Vlfit) -> None:
    ended = vlfit("bench", "mini", "--picture", "nowhere.jpg")
    assert ended.code == 1
    assert "nowhere.jpg" in ended.err


def test_fewer_at_once_where_nobody_asked_for_more(vlfit: Vlfit, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[int, ...]] = []

    def refuse(_: Checkpoint, wanted: BenchOptions, *__: object) -> None:
        tried.append(wanted.batches)
        raise DoesNotFit("too large by 5 MiB")

    monkeypatch.setattr(measure, "run_bench", refuse)
    ended = vlfit("bench", "mini", "--device", "cpu")
    assert (ended.code, tried) == (3, [(1, 4), (1,)])
    assert any(line.startswith("4 ") for line in ended.err.splitlines())
    tried.clear()
    assert vlfit("bench", "mini", "--device", "cpu", "--batch", "1,4").code == 3
    assert tried == [(1, 4)]
