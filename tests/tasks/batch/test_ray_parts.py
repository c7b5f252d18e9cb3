"""What a batch over a cluster knows without a cluster: addresses, handfuls, what a machine lacks."""

import importlib.util
import os
import pickle
import sys
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from tests.ray.parts import Book, Heard
from tests.scripted_backend import png
from tests.tasks.batch.beside import BesideBackend, item
from vlfit._version import __version__
from vlfit.api.engine_options import EngineOptions
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.opening import Wanted
from vlfit.backends.vllm.serve_command import VllmOptions
from vlfit.cli.batch import read_cluster
from vlfit.errors import (
    CheckpointError,
    ClusterError,
    EngineLost,
    PictureNotFound,
    UnreadableAnswer,
    UsageError,
)
from vlfit.tasks.batch import runner as opening
from vlfit.tasks.batch.executor import Outcome, Pace
from vlfit.tasks.batch.items import Item, KeySet
from vlfit.tasks.batch.job import Job, Wish, Work
from vlfit.tasks.batch.ray import RayOptions
from vlfit.tasks.batch.ray import chunks as handful_module
from vlfit.tasks.batch.ray.chunks import (
    Done,
    Duty,
    Handful,
    Listed,
    Sent,
    Unsettled,
    handfuls,
    packed,
    unpacked,
)
from vlfit.tasks.batch.ray.cluster import for_elsewhere, look, missing_model, samples_of
from vlfit.tasks.batch.ray.coordinator import (
    HANDFUL,
    Few,
    _handful_size,
    _Ledger,
    _with_cards,
    check_ray,
    run_on_ray,
)
from vlfit.tasks.batch.ray.pipeline import Worker
from vlfit.tasks.batch.sources import open_sources


def test_addresses() -> None:
    assert RayOptions("10.0.0.7:6379").endpoint() == ("10.0.0.7", 6379)
    assert RayOptions("[fd00::7]:6379").endpoint() == ("fd00::7", 6379)
    assert RayOptions("auto").endpoint() is None
    for wrong, words in (
        ("ray://head:10001", "machine of the cluster"),
        ("head", "no address"),
        ("", "no add"),
    ):
        with pytest.raises(UsageError, match=words):
            RayOptions(wrong)
    with pytest.raises(UsageError, match="--workers is 0"):
        RayOptions(workers=0)


def test_what_a_cluster_cannot_do_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def job(source: str) -> Job:
        return Job(Wish.caption(), SamplingParams(), (source,), Path("out.jsonl"))

    mini = Wanted(model="mini")
    with pytest.raises(UsageError, match="standard input"):
        check_ray(job("-"), mini)
    with pytest.raises(UsageError, match="cuda:1: Ray says"):
        check_ray(job("photos"), Wanted(model="mini", options=EngineOptions(device="cuda:1")))
    with pytest.raises(UsageError, match="concurrency is 0"):
        run_on_ray(job("photos"), mini, RayOptions(), source=Few([]), output=Book(), at_once=0)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="not installed") as raised:
        check_ray(job("photos"), mini)
    assert "vlfit[ray]" in raised.value.hint


def test_handfuls_are_all_and_the_last_tells() -> None:
    items = [item(str(number)) for number in range(7)]
    whole = list(handfuls(items, 3, send=False))
    assert [len(one.items) for one in whole] == [3, 3, 1]
    assert [one.end.count if one.end else None for one in whole] == [None, None, 7]
    assert [one.key for some in whole for one in unpacked(packed(some)).to_read()] == list("0123456")
    # As many as fill their handfuls leave an empty one, which says that there are no more; so does none.
    assert [len(one.items) for one in handfuls(items[:6], 3, send=False)] == [3, 3, 0]
    (last,) = handfuls([], 3, send=False)
    assert last.end is not None
    assert last.end.count == 0


def test_handfuls_are_small_where_there_is_little_and_nobody_counts_what_is_much() -> None:
    def endless() -> Iterator[Item]:
        while True:
            yield item("one of many")

    few = [item(str(number)) for number in range(40)]
    assert _handful_size(few, 2, None, None) == 5  # four times as many as the two workers hold
    assert _handful_size(few, 2, None, 16) == 2
    assert _handful_size(few[:3], 2, None, None) == 1
    assert _handful_size(endless(), 2, None, None) == HANDFUL
    assert _handful_size(endless(), 2, 128, None) == 128


def test_pictures_that_are_sent_come_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [item("a"), item("gone", missing=True), item("b"), item("c")]
    (some,) = handfuls(items, 8, send=True)
    first, gone, *_ = unpacked(packed(some)).to_read()
    assert first.read() == items[0].read()
    with pytest.raises(PictureNotFound, match="gone"):
        gone.read()
    # Few large ones travel alone.
    monkeypatch.setattr(handful_module, "MOST_BYTES", len(items[0].read()))
    assert [len(one.items) for one in handfuls(items, 8, send=True)] == [1, 2, 1, 0]


def test_an_error_travels_whole() -> None:
    error = UnreadableAnswer("no JSON", "more room", answer="{")
    (back,) = [sent.found for sent in unpacked(packed(Handful((item("a"),), (Sent(error),)))).sent]
    assert isinstance(back, UnreadableAnswer)
    assert (back.message, back.hint, back.answer) == ("no JSON", "more room", "{")


@dataclass(frozen=True)
class File:
    path: Path

    def read(self) -> bytes:
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise PictureNotFound(f"{self.path}: no such file", "") from error


def test_a_machine_tells_what_it_lacks(tmp_path: Path) -> None:
    photo = tmp_path / "photo.jpg"
    photo.write_bytes(b"one")
    listed = [Item("gone.jpg", File(tmp_path / "gone.jpg").read), Item("photo.jpg", File(photo).read, photo)]
    samples = samples_of(listed)
    assert samples is not None
    assert [sample.item.key for sample in samples] == ["photo.jpg"]  # what is bad here says nothing of others
    assert look(Wanted(model="mini"), samples, ".").unread is None
    photo.write_bytes(b"another of the same name")
    assert look(Wanted(model="mini"), samples, ".").unread == "photo.jpg"
    assert samples_of([]) is None


def test_models_that_a_machine_lacks(tmp_path: Path) -> None:
    assert missing_model(Wanted(model="mini")) is None
    assert missing_model(Wanted(kind="remote", server="http://nowhere")) is None
    for name in ("nobody/has-this", str(tmp_path / "nowhere")):
        assert isinstance(missing_model(Wanted(model=name)), ClusterError)
    assert isinstance(missing_model(Wanted(model=str(tmp_path))), CheckpointError)


def test_a_folder_is_the_same_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    assert for_elsewhere(Wanted(model="model")).model == str(tmp_path / "model")
    assert for_elsewhere(Wanted(model="mini")).model == "mini"
    assert for_elsewhere(Wanted(model="Qwen/Qwen3-VL-2B-Instruct")).model == "Qwen/Qwen3-VL-2B-Instruct"


def test_vllm_is_wanted_elsewhere_with_as_many_cards_as_it_takes() -> None:
    def tell(text: str) -> None:
        raise AssertionError(text)  # a function of a function does not pickle

    wanted = Wanted(kind="vllm", model="mini", vllm=VllmOptions(tensor_parallel=2, tell=tell))
    there = pickle.loads(pickle.dumps(for_elsewhere(wanted)))
    assert there.vllm.tensor_parallel == 2
    assert _with_cards(RayOptions(), there).gpus_per_worker == 2
    assert _with_cards(RayOptions(), Wanted(model="mini")).gpus_per_worker == 1


def test_every_kind_of_source_goes_to_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()
    for number in range(2):
        Path(f"photos/{number}.png").write_bytes(png(8 + number))
    with tarfile.open("shard.tar", "w") as shard:
        shard.add("photos/0.png", "0.png")
    parquet.write_table(pyarrow.table({"image": [png(5)]}), "table.parquet")
    Path("list.txt").write_text("photos/0.png\nphotos/1.png\n")
    typed = ["photos", "photos/1.png", "shard.tar", "table.parquet", "list.txt"]
    for names in (*([name] for name in typed), typed):
        source = open_sources(names)
        here = [(item.key, item.read()) for item in source]
        items = list(unpacked(pickle.dumps(source)))
        assert [(item.key, item.read()) for item in unpacked(pickle.dumps(items))] == here


def test_what_was_settled_before_is_counted_where_the_pictures_are_listed() -> None:
    items = [item(str(number)) for number in range(7)]
    fresh = Unsettled(items, KeySet(["1", "4", "of another source"]).hashes())
    assert [one.key for one in fresh] == ["0", "2", "3", "5", "6"]
    assert fresh.skipped == 2


def _done(key: str, worker: str, end: Listed | None = None) -> Done:
    record = {"key": key, "usage": {"prompt_tokens": 1, "completion_tokens": 1}}
    return Done(worker, "mini", (Outcome(item(key), record),), end)


def test_a_resumed_run_knows_that_its_source_is_the_same() -> None:
    book = Book({"0": {"key": "0"}})
    ledger = _Ledger(book, Heard())
    ledger.settle_all([_done("1", "a:1", Listed(1, skipped=1))], size=1)
    assert ledger.progress.tally.skipped == 1
    # The handful that ends the listing is lost with its worker: whoever looks for what is left counts.
    ledger = _Ledger(book, Heard())
    ledger.settle_all([_done("2", "a:1")], size=1)
    left = ledger.left_of(Few([item(key) for key in "0123"]))
    assert [one.key for one in left] == ["3"]
    assert ledger.progress.tally.skipped == 2


def test_a_worker_that_died_is_told_of_when_another_takes_its_place() -> None:
    ledger = _Ledger(Book(), heard := Heard())
    ledger.settle_all([_done("0", "a:1"), _done("1", "b:2"), _done("2", "a:1")], size=2)
    assert not any("died" in text for text in heard.said)
    ledger.settle_all([_done("3", "a:3"), _done("4", "a:4"), _done("5", "a:5")], size=2)
    assert [text for text in heard.said if "died" in text] == ["a worker has died; what it had is done again"]


def test_what_the_start_of_a_model_said_is_told_once() -> None:
    ledger = _Ledger(Book(), heard := Heard())
    said = [replace(_done(str(n), f"a:{n}"), told=("planned for 1 at once",)) for n in range(2)]
    ledger.settle_all([*said, replace(_done("2", "a:1"), told=("NOT AS YOU ASKED",))], size=2)
    assert [text for text in heard.said if "begun" not in text] == [
        "a:0: planned for 1 at once",
        "a:1: NOT AS YOU ASKED",
    ]
    # The words before a failure are what explains it.
    with pytest.raises(ClusterError):
        ledger.settle_all([Done("b:1", problem=ClusterError("no", ""), told=("tried with less",))], size=1)
    assert heard.said[-1] == "b:1: tried with less"


def test_the_first_speed_is_that_since_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    ledger = _Ledger(Book(), Heard())
    now[0] = 180.0  # workers started, and the first handful came after more than a minute
    ledger.settle_all([Done("a:1", "mini", tuple(_done(str(n), "").outcomes[0] for n in range(40)))], size=1)
    assert ledger.progress.tally.speeds()[0] == 0.5


def test_options_that_do_not_go_with_a_cluster_are_refused() -> None:
    assert read_cluster(None, None, ordered=True, dry_run=True) is None
    assert read_cluster("local", 2, ordered=False, dry_run=False) == RayOptions("local", 2)
    for ray, workers, ordered, dry_run, words in (
        (None, 2, False, False, "--workers goes with --ray"),
        ("local", None, True, False, "keeps no order"),
        ("local", None, False, True, "this machine alone"),
    ):
        with pytest.raises(UsageError, match=words):
            read_cluster(ray, workers, ordered=ordered, dry_run=dry_run)


def test_a_worker_whose_model_is_gone_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Others go on: the batch would end with an error that was handed back."""
    backend = BesideBackend(say=lambda *_: EngineLost("vLLM ended while it served: killed", "look at it"))
    monkeypatch.setattr(opening, "open_for_batch", lambda *_, **__: (backend, Pace(2)))
    monkeypatch.setattr(os, "_exit", sys.exit)
    work = Work(Wish.caption(), SamplingParams())
    worker = Worker(Duty(work, Wanted(model="mini"), None, None, 1, os.getcwd(), __version__))
    with pytest.raises(SystemExit) as ended:
        worker.do(Handful((item("a"),)))
    assert ended.value.code
    assert "vLLM ended while it served: killed" in capsys.readouterr().err
