"""Parts of a cluster batch that need no cluster: addresses, chunks, node checks, result writing."""

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

from tests.ray.parts import MemoryOutput, RecordedProgress
from tests.scripted_backend import png
from tests.tasks.batch.beside import ConcurrentBackend, item
from vlfit._version import __version__
from vlfit.api.engine_options import EngineOptions
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.opening import BackendSpec
from vlfit.backends.vllm.serve_command import VllmOptions
from vlfit.cli.batch import read_ray_options
from vlfit.errors import (
    CheckpointError,
    ClusterError,
    EngineLost,
    PictureNotFound,
    UnreadableAnswer,
    UsageError,
)
from vlfit.tasks.batch import runner as opening
from vlfit.tasks.batch.executor import ExecutorOptions, Outcome
from vlfit.tasks.batch.items import Item, KeySet
from vlfit.tasks.batch.job import Job, PictureTask, Wish
from vlfit.tasks.batch.ray import RayOptions
from vlfit.tasks.batch.ray import chunks as chunks_module
from vlfit.tasks.batch.ray.chunks import (
    ItemChunk,
    ItemChunkResult,
    ListingEnd,
    SentPicture,
    UnsettledItems,
    WorkerConfig,
    from_bytes,
    split_into_chunks,
    to_bytes,
)
from vlfit.tasks.batch.ray.cluster import find_model_error, inspect_node, portable_spec, read_samples
from vlfit.tasks.batch.ray.coordinator import (
    CHUNK_ITEMS,
    FixedSource,
    _chunk_items,
    _ResultWriter,
    _with_gpus_per_worker,
    check_ray,
    run_on_ray,
)
from vlfit.tasks.batch.ray.pipeline import RayWorker
from vlfit.tasks.batch.sources import open_sources


def test_addresses() -> None:
    assert RayOptions("10.0.0.7:6379").endpoint() == ("10.0.0.7", 6379)
    assert RayOptions("[fd00::7]:6379").endpoint() == ("fd00::7", 6379)
    assert RayOptions("auto").endpoint() is None
    for wrong in ("ray://head:10001", "head", ""):
        with pytest.raises(UsageError):
            RayOptions(wrong)
    with pytest.raises(UsageError, match=r"--workers.* 0"):
        RayOptions(workers=0)


def test_what_a_cluster_cannot_do_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def job(source: str) -> Job:
        return Job(Wish.caption(), SamplingParams(), (source,), Path("out.jsonl"))

    mini = BackendSpec(model="mini")
    with pytest.raises(UsageError, match="standard input"):
        check_ray(job("-"), mini)
    with pytest.raises(UsageError, match="--device cuda:1"):
        check_ray(job("photos"), BackendSpec(model="mini", options=EngineOptions(device="cuda:1")))
    with pytest.raises(UsageError, match=r"concurrency.* 0"):
        run_on_ray(
            job("photos"), mini, RayOptions(), source=FixedSource([]), output=MemoryOutput(), concurrency=0
        )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="--ray") as raised:
        check_ray(job("photos"), mini)
    assert "vlfit[ray]" in raised.value.hint


def test_chunks_hold_all_items_and_the_last_marks_the_end() -> None:
    items = [item(str(number)) for number in range(7)]
    whole = list(split_into_chunks(items, 3, send=False))
    assert [len(one.items) for one in whole] == [3, 3, 1]
    assert [one.end.count if one.end else None for one in whole] == [None, None, 7]
    assert [one.key for some in whole for one in from_bytes(to_bytes(some)).readable_items()] == list(
        "0123456"
    )
    # If the items fill their chunks exactly, an empty one marks the end.
    assert [len(one.items) for one in split_into_chunks(items[:6], 3, send=False)] == [3, 3, 0]
    (last,) = split_into_chunks([], 3, send=False)
    assert last.end is not None
    assert last.end.count == 0


def test_chunks_are_small_for_few_items_and_a_long_source_is_not_counted() -> None:
    def endless() -> Iterator[Item]:
        while True:
            yield item("one of many")

    few = [item(str(number)) for number in range(40)]
    assert _chunk_items(few, 2, None, None) == 5  # four times as many as the two workers hold
    assert _chunk_items(few, 2, None, 16) == 2
    assert _chunk_items(few[:3], 2, None, None) == 1
    assert _chunk_items(endless(), 2, None, None) == CHUNK_ITEMS
    assert _chunk_items(endless(), 2, 128, None) == 128


def test_pictures_that_are_sent_come_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [item("a"), item("gone", missing=True), item("b"), item("c")]
    (some,) = split_into_chunks(items, 8, send=True)
    first, gone, *_ = from_bytes(to_bytes(some)).readable_items()
    assert first.read() == items[0].read()
    with pytest.raises(PictureNotFound, match="gone"):
        gone.read()
    # Few large ones travel alone.
    content = items[0].read()
    assert isinstance(content, bytes)
    monkeypatch.setattr(chunks_module, "MAX_CHUNK_BYTES", len(content))
    assert [len(one.items) for one in split_into_chunks(items, 8, send=True)] == [1, 2, 1, 0]


def test_an_error_travels_whole() -> None:
    error = UnreadableAnswer("no JSON", "more room", answer="{")
    (back,) = [
        sent.content for sent in from_bytes(to_bytes(ItemChunk((item("a"),), (SentPicture(error),)))).sent
    ]
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
    samples = read_samples(listed)
    assert samples is not None
    assert [sample.item.key for sample in samples] == ["photo.jpg"]  # what is bad here says nothing of others
    assert inspect_node(BackendSpec(model="mini"), samples, ".").missing_picture is None
    photo.write_bytes(b"another of the same name")
    assert inspect_node(BackendSpec(model="mini"), samples, ".").missing_picture == "photo.jpg"
    assert read_samples([]) is None


def test_models_that_a_machine_lacks(tmp_path: Path) -> None:
    assert find_model_error(BackendSpec(model="mini")) is None
    assert find_model_error(BackendSpec(kind="remote", server="http://nowhere")) is None
    for name in ("nobody/has-this", str(tmp_path / "nowhere")):
        assert isinstance(find_model_error(BackendSpec(model=name)), ClusterError)
    assert isinstance(find_model_error(BackendSpec(model=str(tmp_path))), CheckpointError)


def test_a_folder_is_the_same_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    assert portable_spec(BackendSpec(model="model")).model == str(tmp_path / "model")
    assert portable_spec(BackendSpec(model="mini")).model == "mini"
    assert portable_spec(BackendSpec(model="Qwen/Qwen3-VL-2B-Instruct")).model == "Qwen/Qwen3-VL-2B-Instruct"


def test_vllm_is_wanted_elsewhere_with_as_many_cards_as_it_takes() -> None:
    def tell(text: str) -> None:
        raise AssertionError(text)  # a function of a function does not pickle

    wanted = BackendSpec(kind="vllm", model="mini", vllm=VllmOptions(tensor_parallel=2, on_status=tell))
    there = pickle.loads(pickle.dumps(portable_spec(wanted)))
    assert there.vllm.tensor_parallel == 2
    assert _with_gpus_per_worker(RayOptions(), there).gpus_per_worker == 2
    assert _with_gpus_per_worker(RayOptions(), BackendSpec(model="mini")).gpus_per_worker == 1


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
        items = list(from_bytes(pickle.dumps(source)))
        assert [(item.key, item.read()) for item in from_bytes(pickle.dumps(items))] == here


def test_what_was_settled_before_is_counted_where_the_pictures_are_listed() -> None:
    items = [item(str(number)) for number in range(7)]
    fresh = UnsettledItems(items, KeySet(["1", "4", "of another source"]).hashes())
    assert [one.key for one in fresh] == ["0", "2", "3", "5", "6"]
    assert fresh.skipped == 2


def _done(key: str, worker: str, end: ListingEnd | None = None) -> ItemChunkResult:
    record = {"key": key, "usage": {"prompt_tokens": 1, "completion_tokens": 1}}
    return ItemChunkResult(worker, "mini", (Outcome(item(key), record),), end)


def test_a_resumed_run_knows_that_its_source_is_the_same() -> None:
    book = MemoryOutput({"0": {"key": "0"}})
    writer = _ResultWriter(book, RecordedProgress())
    writer.write_results([_done("1", "a:1", ListingEnd(1, skipped=1))], size=1)
    assert writer.progress.tally.skipped == 1
    # If the last chunk is lost with its worker, the search for missing items counts the skipped ones.
    writer = _ResultWriter(book, RecordedProgress())
    writer.write_results([_done("2", "a:1")], size=1)
    left = writer.missing_items(FixedSource([item(key) for key in "0123"]))
    assert [one.key for one in left] == ["3"]
    assert writer.progress.tally.skipped == 2


def test_a_worker_that_died_is_told_of_when_another_takes_its_place() -> None:
    writer = _ResultWriter(MemoryOutput(), heard := RecordedProgress())
    writer.write_results([_done("0", "a:1"), _done("1", "b:2"), _done("2", "a:1")], size=2)
    assert len(heard.said) == 2
    writer.write_results([_done("3", "a:3"), _done("4", "a:4"), _done("5", "a:5")], size=2)
    assert len([text for text in heard.said[2:] if "died" in text]) == 1


def test_what_the_start_of_a_model_said_is_told_once() -> None:
    writer = _ResultWriter(MemoryOutput(), heard := RecordedProgress())
    said = [replace(_done(str(n), f"a:{n}"), messages=("planned for 1 at once",)) for n in range(2)]
    writer.write_results([*said, replace(_done("2", "a:1"), messages=("NOT AS YOU ASKED",))], size=2)
    assert [text for text in heard.said if "begun" not in text] == [
        "a:0: planned for 1 at once",
        "a:1: NOT AS YOU ASKED",
    ]
    # The words before a failure are what explains it.
    with pytest.raises(ClusterError):
        writer.write_results(
            [ItemChunkResult("b:1", error=ClusterError("no", ""), messages=("tried with less",))], size=1
        )
    assert heard.said[-1] == "b:1: tried with less"


def test_the_first_speed_is_that_since_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    writer = _ResultWriter(MemoryOutput(), RecordedProgress())
    now[0] = 180.0  # workers started, and the first chunk took more than a minute
    writer.write_results(
        [ItemChunkResult("a:1", "mini", tuple(_done(str(n), "").outcomes[0] for n in range(40)))], size=1
    )
    assert writer.progress.tally.speeds()[0] == 0.5


def test_options_that_do_not_go_with_a_cluster_are_refused() -> None:
    assert read_ray_options(None, None, ordered=True, dry_run=True) is None
    assert read_ray_options("local", 2, ordered=False, dry_run=False) == RayOptions("local", 2)
    for ray, workers, ordered, dry_run, named in (
        (None, 2, False, False, "--workers"),
        ("local", None, True, False, "--ordered"),
        ("local", None, False, True, "--dry-run"),
    ):
        with pytest.raises(UsageError, match=named):
            read_ray_options(ray, workers, ordered=ordered, dry_run=dry_run)


def test_ray_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ray", "ray.data"):
        monkeypatch.setitem(sys.modules, name, None)  # an import would raise
    with pytest.raises(UsageError) as failure:
        read_ray_options("local", None, ordered=False, dry_run=False)
    assert "vlfit[ray]" in failure.value.hint


def test_a_worker_whose_model_is_gone_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Others go on: the batch would end with an error that was handed back."""
    backend = ConcurrentBackend(say=lambda *_: EngineLost("vLLM ended while it served: killed", "look at it"))
    monkeypatch.setattr(opening, "open_for_batch", lambda *_, **__: (backend, ExecutorOptions(2)))
    monkeypatch.setattr(os, "_exit", sys.exit)
    work = PictureTask(Wish.caption(), SamplingParams())
    worker = RayWorker(WorkerConfig(work, BackendSpec(model="mini"), None, None, 1, os.getcwd(), __version__))
    with pytest.raises(SystemExit) as ended:
        worker.process(ItemChunk((item("a"),)))
    assert ended.value.code
    assert "vLLM ended while it served: killed" in capsys.readouterr().err


def test_a_run_with_nothing_left_to_do_removes_what_is_unfinished() -> None:
    """It looks beside every picture, and connects to no cluster."""
    output = MemoryOutput({"a": {"key": "a"}, "b": {"key": "b"}})
    tally = run_on_ray(
        Job(Wish.caption(), SamplingParams(), ("photos",), Path("out.jsonl")),
        BackendSpec(model="mini"),
        RayOptions("127.0.0.1:1"),
        source=FixedSource([Item("a", lambda: b""), Item("b", lambda: b"")]),
        output=output,
    )
    assert tally.done == 0
    assert output.cleaned == ["a", "b"]
