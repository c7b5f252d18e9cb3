"""vlfit batch: what is asked, what is written, what is said, and how it ends."""

import io
import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Vlfit
from tests.scripted_backend import png
from tests.tasks.batch.beside import ConcurrentBackend
from vlfit.errors import CannotWrite, ClusterError, EngineStopped
from vlfit.tasks.batch.items import Source
from vlfit.tasks.batch.output import Output
from vlfit.tasks.batch.ray.chunks import ItemChunkResult, ListingEnd
from vlfit.tasks.batch.ray.coordinator import _ResultWriter
from vlfit.tasks.batch.runner import BatchProgress
from vlfit.tasks.batch.sidecars.writer import _part_path
from vlfit.tasks.describe import CAPTION_LONG, CAPTION_SHORT, SCENE

SCENE_ANSWER = (
    '{"summary": "A cup.", "objects": [{"label": "cup", "bbox_2d": [0, 0, 500, 500]}], "text": ["TEA"]}'
)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> ConcurrentBackend:
    """What ``vlfit batch`` opens instead of a model."""
    backend = ConcurrentBackend()
    monkeypatch.setattr("vlfit.tasks.batch.runner.open_backend", lambda wanted, progress: backend)
    monkeypatch.setattr("vlfit.server.http.malloc.freeze_gc", lambda: None)
    monkeypatch.setattr("vlfit.server.http.malloc.configure_malloc", lambda: None)
    monkeypatch.setattr("vlfit.server.http.malloc.keep_buffers", lambda device: None)
    return backend


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six pictures, two of the same bytes; and a file that is none."""
    folder = tmp_path / "pictures"
    (folder / "deep").mkdir(parents=True)
    for number in range(4):
        (folder / f"{number}.png").write_bytes(png(16 + number, 16))
    (folder / "deep" / "4.png").write_bytes(png(40, 16))
    (folder / "deep" / "same.png").write_bytes(png(16, 16))
    (folder / "bad.jpg").write_text("<html>no picture</html>")
    return folder


def records(path: Path) -> dict[str, dict[str, object]]:
    return {record["key"]: record for record in map(json.loads, path.read_text("utf-8").splitlines())}


def test_a_list_with_private_addresses_says_how_to_allow_them(vlfit: Vlfit, tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("https://127.0.0.1:9/a.png\nhttps://127.0.0.1:9/b.png\n")
    words = ("batch", tmp_path / "list.txt", "-o", tmp_path / "out.jsonl", "-m", "mini")
    refused = vlfit(*words)
    assert (refused.code, refused.err.count("--allow-private-urls")) == (1, 1)
    allowed = vlfit(*words, "--allow-private-urls", "--retry-failed")
    assert (allowed.code, "--allow-private-urls" in allowed.err) == (1, False)


def test_a_folder_is_captioned_into_a_file(vlfit: Vlfit, backend: ConcurrentBackend, folder: Path) -> None:
    output = folder.parent / "out" / "captions.jsonl"
    ended = vlfit("batch", folder, "-o", output, "-m", "mini")
    assert (ended.code, ended.out) == (1, "")
    found = records(output)
    assert sorted(found) == ["0.png", "1.png", "2.png", "3.png", "deep/4.png", "deep/same.png"]
    assert found["deep/4.png"]["picture"] == str(folder / "deep" / "4.png")
    assert {"0.png", "deep/same.png"} == {*filter(None, (r.get("same_as") for r in found.values()))} | {
        key for key, record in found.items() if "same_as" in record
    }
    assert len(backend.started) == 5
    assert backend.closed
    failed = records(output.with_name("captions.jsonl.failed.jsonl"))
    assert failed["bad.jpg"]["code"] == "invalid_image"
    (line,) = [line for line in ended.err.splitlines() if "bad.jpg" in line]
    assert str(failed["bad.jpg"]["reason"]) in line
    assert "6 pictures" in ended.err
    assert "1 failed" in ended.err
    again = vlfit("batch", folder, "-o", output, "-m", "mini", "--json")
    assert again.code == 1
    facts = json.loads(again.out)
    assert (facts["done"], facts["done_before"], facts["failed_in_all"], facts["stopped"]) == (0, 6, 1, False)
    assert len(backend.started) == 5
    (folder / "bad.jpg").write_bytes(png(50, 50))
    assert vlfit("batch", folder, "-o", output, "-m", "mini", "--retry-failed").code == 0
    assert not output.with_name("captions.jsonl.failed.jsonl").exists()
    assert len(records(output)) == 7


@pytest.mark.parametrize(
    ("options", "prompt", "answer", "fields"),
    [
        ([], CAPTION_SHORT, "red", {"text": "red "}),
        (["--long"], CAPTION_LONG, "red", {}),
        (["--ask", "What is this?"], "What is this?", "red", {}),
        (["--scene"], SCENE, SCENE_ANSWER, {"summary": "A cup.", "words": ["TEA"]}),
        (["--detect", "cups"], '"cups"', SCENE_ANSWER, {"width": 20, "height": 16, "warnings": []}),
        (["--schema", "SCHEMA"], '{"type": "object"}', '{"a": 1}', {"value": {"a": 1}}),
    ],
)
def test_what_is_asked_and_what_is_kept_of_it(
    options: list[str],
    prompt: str,
    answer: str,
    fields: dict[str, object],
    vlfit: Vlfit,
    backend: ConcurrentBackend,
    tmp_path: Path,
) -> None:
    asked: list[str] = []

    def say(data: bytes, prompt: str) -> str:
        asked.append(prompt)
        return answer

    backend.say = say
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    (tmp_path / "a.png").write_bytes(png(20, 16))
    options = [str(tmp_path / "schema.json") if option == "SCHEMA" else option for option in options]
    output = tmp_path / "out.jsonl"
    assert vlfit("batch", tmp_path / "a.png", "-o", output, "-m", "mini", *options).code == 0
    assert prompt in asked[0]
    (record,) = records(output).values()
    assert {name: record[name] for name in fields} == fields


def test_other_jobs_and_wrong_words_are_refused_before_a_model_is_loaded(
    vlfit: Vlfit, backend: ConcurrentBackend, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = folder.parent / "out.jsonl"
    vlfit("batch", folder, "-o", output, "-m", "mini")
    monkeypatch.setattr("vlfit.tasks.batch.runner.open_backend", lambda *_: pytest.fail("it was loaded"))

    def refused(*arguments: object) -> str:
        ended = vlfit("batch", *arguments, "-m", "mini")
        assert (ended.code, ended.out) == (2, "")
        return ended.err

    assert "'1/2'" in refused(folder, "-o", output, "--shard", "1/2")
    assert "'scene'" in refused(folder, "-o", output, "--scene")
    two = refused(folder, "-o", output, "--scene", "--detect", "cups")
    assert "--scene" in two
    assert "--detect" in two
    assert "out.csv" in refused(folder, "-o", "out.csv")
    assert refused(folder, "-o", "new.jsonl", "--detect", " ")
    assert "no.json" in refused(folder, "-o", "new.jsonl", "--schema", folder / "no.json")
    assert "--sidecar" in refused(folder, "-o", "new.jsonl", "--overwrite")
    assert "'doc'" in refused(folder, "-o", "new.jsonl", "--sidecar", "doc")
    monkeypatch.setenv("PATH", str(folder))
    assert "exiftool" in refused(folder, "-o", "new.jsonl", "--sidecar", "exif")
    assert re.search("--shard.*'9'", refused(folder, "-o", "new.jsonl", "--shard", "9"))
    assert "--keep" in refused(folder, "-o", "new.jsonl", "--keep", "author")
    assert "--column" in refused(folder, "-o", "new.jsonl", "--column", "image")
    assert re.search("--limit.* 0", refused(folder, "-o", "new.jsonl", "--limit", 0))
    for option, least in (("readers", 0), ("readers", 65), ("concurrency", 0), ("tries", 100_000)):
        said = refused(folder, "-o", "new.jsonl", f"--{option}", least)
        assert re.search(f"{option}.* {least}\\b", said)
    whole = output.read_bytes()
    assert str(output) in refused(output, "-o", output)
    assert str(output) in refused(f"{folder.parent}/*.jsonl", "-o", output)
    assert output.read_bytes() == whole
    empty = folder.parent / "empty"
    empty.mkdir()
    ended = vlfit("batch", empty, "-o", folder.parent / "new.jsonl", "-m", "mini")
    assert ended.code == 1
    assert str(empty) in ended.err
    nothing = io.TextIOWrapper(io.BufferedReader(io.BytesIO(b"# a remark\n\n")))
    ended = vlfit("batch", "-", "-o", folder.parent / "new.jsonl", "-m", "mini", stdin=nothing)
    assert ended.code == 1
    assert "stdin" in ended.err
    assert not list(folder.parent.glob("new.jsonl*"))


def test_a_failure_of_all_says_how_to_go_on(vlfit: Vlfit, backend: ConcurrentBackend, folder: Path) -> None:
    backend.say = lambda data, prompt: EngineStopped("the engine is gone", "start again")
    ended = vlfit("batch", folder, "-o", folder.parent / "out.jsonl", "-m", "mini")
    assert ended.code == 1
    assert "error: the engine is gone\nhint:  start again\n" in ended.err
    assert backend.closed
    told = vlfit("batch", folder, "-o", folder.parent / "out.jsonl", "-m", "mini", "--json")
    assert told.code == 1
    facts = json.loads(told.out)
    assert (facts["done"], facts["stopped"], facts["error"]["reason"]) == (0, True, "the engine is gone")


def test_json_tells_of_an_output_that_cannot_be_closed(
    vlfit: Vlfit, backend: ConcurrentBackend, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: object) -> None:
        raise CannotWrite("cannot write out.jsonl: No space left on device", "make room")

    monkeypatch.setattr("vlfit.tasks.batch.jsonl.JsonlSink.close", full)
    told = vlfit("batch", folder, "-o", folder.parent / "out.jsonl", "-m", "mini", "--json")
    assert told.code == 1
    facts = json.loads(told.out)
    assert (facts["done"], facts["stopped"], facts["error"]["hint"]) == (6, True, "make room")


def test_where_nothing_had_begun_there_is_nothing_to_go_on_from(
    vlfit: Vlfit, backend: ConcurrentBackend, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise ClusterError("there is no cluster", "start one")

    monkeypatch.setattr("vlfit.tasks.batch.runner.open_backend", fails)
    ended = vlfit("batch", folder, "-o", folder.parent / "out.jsonl", "-m", "mini")
    assert ended.err.endswith("error: there is no cluster\nhint:  start one\n")
    assert [path.name for path in folder.parent.iterdir()] == ["pictures"]
    # One folder is made for an output; more is a slip.
    ended = vlfit("batch", folder, "-o", folder.parent / "no" / "such" / "out.jsonl", "-m", "mini")
    assert ended.code == 1
    assert str(folder.parent / "no") in ended.err
    assert not (folder.parent / "no").exists()


def test_another_source_in_the_same_output_is_said(
    vlfit: Vlfit, backend: ConcurrentBackend, folder: Path
) -> None:
    output = folder.parent / "out.jsonl"
    words = f" with {folder}: "  # a note that the output began with another source
    assert words not in vlfit("batch", folder, "-o", output, "-m", "mini", "--limit", 1).err
    assert words not in vlfit("batch", folder, "-o", output, "-m", "mini").err
    assert words in vlfit("batch", folder / "deep", "-o", output, "-m", "mini").err


def test_ctrl_c_ends_it_in_order(vlfit: Vlfit, backend: ConcurrentBackend, folder: Path) -> None:
    backend.hold = True
    started: Callable[..., object] = backend.start
    output = folder.parent / "out.jsonl"

    def start(*arguments: object) -> object:
        ticket = started(*arguments)
        if len(backend.started) == 3:
            backend.release()
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return ticket

    backend.start = start  # type: ignore[method-assign, assignment]
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    ended = vlfit("batch", folder, "-o", output, "-m", "mini", "--json")
    assert ended.code == 130
    assert json.loads(ended.out)["stopped"]
    assert len(records(output)) in (1, 2)  # the same bytes may have been waiting for it
    assert backend.closed
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_a_second_ctrl_c_ends_it_at_once_also_while_it_closes(
    vlfit: Vlfit, backend: ConcurrentBackend, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    once = threading.Lock()
    monkeypatch.setattr("vlfit.cli.batch.end_at_once", ended.append)
    started: Callable[..., object] = backend.start
    backend.hold = True

    def start(*arguments: object) -> object:
        if once.acquire(blocking=False):
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        return started(*arguments)

    monkeypatch.setattr(backend, "start", start)
    monkeypatch.setattr(backend, "close", lambda: os.kill(os.getpid(), signal.SIGINT))
    assert vlfit("batch", folder, "-o", folder.parent / "out.jsonl", "-m", "mini").code == 130
    assert ended == [130]


def test_a_failure_is_one_line_whatever_its_name(
    vlfit: Vlfit, backend: ConcurrentBackend, folder: Path
) -> None:
    (folder / "two\nlines.png").write_text("text")
    ended = vlfit("batch", folder, "-o", folder.parent / "out.jsonl", "-m", "mini")
    (line,) = [line for line in ended.err.splitlines() if "lines.png" in line]
    assert "two\\nlines.png" in line


def test_sidecars_stand_beside_pictures(vlfit: Vlfit, backend: ConcurrentBackend, folder: Path) -> None:
    output = folder.parent / "out.jsonl"
    vlfit("batch", folder, "-o", output, "-m", "mini", "--sidecar", "txt", "--limit", 2)
    assert len(list(folder.rglob("*.txt"))) == len(records(output)) > 0


@pytest.mark.parametrize("new", [False, True], ids=["nothing to do", "one new picture"])
def test_parts_of_a_killed_run_are_removed_where_nothing_is_written(
    vlfit: Vlfit, backend: ConcurrentBackend, folder: Path, new: bool
) -> None:
    run = ("batch", folder, "-o", folder.parent / "out.jsonl", "-m", "mini", "--sidecar", "txt")
    (folder / "bad.jpg").unlink()
    vlfit(*run)
    with subprocess.Popen(["true"]) as process:  # a process id that is none any more
        process.wait()
    part = _part_path(folder / "deep" / "4.txt")
    part = part.with_name(part.name.replace(f"-{os.getpid()}.", f"-{process.pid}."))
    part.write_text("half")
    others = folder / "deep" / f".4.txt.{process.pid}.part"
    others.write_text("another program's")
    if new:
        (folder / "0-new.png").write_bytes((folder / "0.png").read_bytes() + b"1")
    assert vlfit(*run).code == 0
    assert not part.exists()
    assert others.exists()


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_sidecars_of_what_was_done_before_are_written_from_the_output(
    vlfit: Vlfit, backend: ConcurrentBackend, folder: Path, name: str
) -> None:
    def beside() -> dict[str, str]:
        return {path.stem: path.read_text() for path in folder.rglob("*.txt")}

    output, stands = folder.parent / name, folder / "deep" / "4.txt"
    (folder / "bad.jpg").unlink()
    vlfit("batch", folder, "-o", output, "-m", "mini")
    asked, again = len(backend.started), ("batch", folder, "-o", output, "-m", "mini", "--sidecar", "txt")
    stands.write_text("somebody's words\n")
    ended = vlfit(*again)
    assert (ended.code, len(backend.started)) == (0, asked)
    assert re.search(r"\b6 ", ended.err)
    assert "--overwrite" in ended.err
    words = beside()
    assert sorted(words) == ["0", "1", "2", "3", "4", "same"]
    assert words["4"] == "somebody's words\n"
    # All have been seen to: nothing is read again but with --overwrite, which the words above lead to.
    assert "--overwrite" not in vlfit(*again).err
    assert vlfit(*again, "--overwrite").code == 0
    assert beside() == {**words, "4": stands.read_text()}
    assert "somebody" not in stands.read_text()
    assert len(backend.started) == asked


def test_a_sidecar_that_could_not_be_written_is_tried_again(
    vlfit: Vlfit, backend: ConcurrentBackend, folder: Path
) -> None:
    again = ("batch", folder, "-o", folder.parent / "out.jsonl", "-m", "mini", "--sidecar", "xmp")
    (folder / "bad.jpg").unlink()
    broken = folder / "1.png.xmp"
    broken.write_text("no XML")
    for _ in range(2):
        ended = vlfit(*again)
        assert ended.code == 1
        assert "--sidecar" in ended.err
        assert "1.png.xmp" in ended.err
    broken.unlink()
    assert vlfit(*again).code == 0
    assert broken.exists()
    assert len(backend.started) == 5


def test_sidecars_of_a_list_that_is_read_once(vlfit: Vlfit, backend: ConcurrentBackend, folder: Path) -> None:
    def run(*options: str) -> int:
        names = io.BytesIO("".join(f"{folder / name}.png\n" for name in "012").encode())
        stdin = io.TextIOWrapper(io.BufferedReader(names))
        return vlfit("batch", "-", "-o", output, "-m", "mini", *options, stdin=stdin).code

    output = folder.parent / "out.jsonl"
    assert (run("--limit", "2"), run("--sidecar", "txt")) == (0, 0)
    assert sorted(path.name for path in folder.glob("*.txt")) == ["0.txt", "1.txt", "2.txt"]


def test_pictures_that_are_seen_in_less_detail_belong_into_another_output(
    vlfit: Vlfit, backend: ConcurrentBackend, folder: Path
) -> None:
    output = folder.parent / "out.jsonl"
    same = ("batch", folder, "-o", output, "-m", "mini", "--limit", 1)
    assert vlfit(*same, "--image-tokens", 64).code == 0
    ended = vlfit(*same, "--image-tokens", 128)
    assert ended.code == 2
    assert re.search(r"\bimage_tokens\b.*\b64\b.*\b128\b", ended.err)
    assert re.search(r"\bimage_tokens\b.*\b64\b.*\bNone\b", vlfit(*same).err)
    both = vlfit(*same, "--image-tokens", 64, "--context", 4096)
    assert both.code == 2
    assert re.search(r"\bcontext\b.*\bNone\b.*\b4096\b", both.err)
    # An older vlfit noted neither.
    header = output.with_name("out.jsonl.job.json")
    facts = json.loads(header.read_text())
    header.write_text(json.dumps({name: value for name, value in facts.items() if name != "engine"}))
    assert vlfit(*same, "--image-tokens", 128).code == 0
    assert json.loads(header.read_text())["engine"] == {"image_tokens": 128, "context": None}


def test_a_list_on_standard_input(vlfit: Vlfit, backend: ConcurrentBackend, folder: Path) -> None:
    output = folder.parent / "out.jsonl"
    names = io.BytesIO(f"{folder / '0.png'}\n{folder / '1.png'}\n".encode())
    stdin = io.TextIOWrapper(io.BufferedReader(names))
    assert vlfit("batch", "-", "-o", output, "-m", "mini", stdin=stdin).code == 0
    assert sorted(records(output)) == [str(folder / "0.png"), str(folder / "1.png")]


def test_a_dry_run_counts_and_writes_nothing(vlfit: Vlfit, backend: ConcurrentBackend, folder: Path) -> None:
    output = folder.parent / "out.jsonl"
    ended = vlfit("batch", folder, "-o", output, "-m", "mini", "--dry-run")
    assert ended.code == 0
    assert re.findall(r"\d+", ended.out.splitlines()[0]) == ["7", "0"]
    assert re.search(r"\b7\b.*\d", ended.out.splitlines()[1])
    assert re.search(r"\b1\b.*\bfailed\b", ended.out)
    assert {path.name for path in folder.parent.iterdir()} == {"pictures"}
    facts = json.loads(vlfit("batch", folder, "-o", output, "-m", "mini", "--dry-run", "--json").out)
    assert (facts["pictures"], facts["tried"], facts["seconds_for_all"] is None) == (7, 7, False)


def test_what_a_cluster_has_said_of_its_listing_is_not_said_again(
    vlfit: Vlfit, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(
        _job: object, *_: object, source: Source, output: Output, progress: BatchProgress, **__: object
    ) -> None:
        listed = len(list(source))
        done = ItemChunkResult("node:1", "mini", end=ListingEnd(listed, tuple(source.notes())))
        _ResultWriter(output, progress).write_results([done], size=1)

    monkeypatch.setattr("vlfit.tasks.batch.ray.coordinator.run_on_ray", run)
    (folder / "notes.md").write_text("words")
    ended = vlfit("batch", folder, "-o", folder.parent / "out.jsonl", "-m", "mini", "--ray", "local")
    assert ended.err.count("(.md 1)") == 1
