"""JSON lines after a kill or on a full disk: complete lines stay, an unfinished one is cut off."""

import errno
import os
from pathlib import Path

import pytest

from vlfit.errors import CannotWrite, UsageError
from vlfit.tasks.batch import items as keys
from vlfit.tasks.batch.items import KeySet, hash_of
from vlfit.tasks.batch.jsonl import JsonlFile, JsonlSink, read_keys, read_records


def test_a_file_cut_at_any_byte_goes_on_with_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    lines = JsonlFile(path)
    for number in range(3):
        lines.append({"key": f"ä{number}", "text": "zwei\nZeilen " + "x" * number})
    lines.close()
    whole = path.read_bytes()
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        sink = JsonlSink(path)
        before = list(sink.done_keys())
        # Whole is a line also where nothing but its newline is missing.
        assert before == [f"ä{number}" for number in range((whole[:size] + b"\n").count(b"}\n"))]
        sink.write({"key": "new"})
        sink.close()
        assert list(read_keys(path)) == [*before, "new"]


def test_a_last_line_longer_than_a_block_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(b'{"key": "a"}\n{"key": "' + b"b" * 200_000)
    sink = JsonlSink(path)
    assert list(sink.done_keys()) == ["a"]
    sink.open()
    assert path.read_bytes() == b'{"key": "a"}\n'


def test_a_disk_that_fills_up_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = JsonlFile(tmp_path / "out.jsonl")
    lines.append({"key": "a"})
    write = os.write

    def full(file: int, data: bytes) -> int:
        if len(data) < 100:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data[:50])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(CannotWrite, match=os.strerror(errno.ENOSPC)):
        lines.append({"key": "b", "text": "x" * 75})
    assert lines.path.read_bytes() == b'{"key": "a"}\n'
    monkeypatch.undo()
    lines.append({"key": "b"})
    lines.close()
    lines.close()
    assert list(read_keys(lines.path)) == ["a", "b"]


def test_lines_of_others_are_named(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text('{"key": "a"}\n{"text": 1, "key": "b"}\n{"key": 3}\n')
    with pytest.raises(UsageError, match="line 3 "):
        list(read_keys(path))
    path.write_text('{"key": "a"}\n["key"]\nnull\n{"key": "b"\n')
    assert [record["key"] for record in read_records(path)] == ["a"]


@pytest.mark.parametrize("last", ["my diary", '{"my": "unfin', '{"my": "second"}', "["])
def test_a_last_line_of_others_is_named_and_not_cut_off(last: str, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text('{"key": "a"}\n' + last)
    with pytest.raises(UsageError, match=r"line 2 .*out\.jsonl"):
        list(JsonlSink(path).done_keys())
    JsonlFile(path).close()
    assert path.read_text() == '{"key": "a"}\n' + last + "\n"


def test_names_that_are_no_text_are_written(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "out.jsonl")
    sink.write({"key": "a", "picture": os.fsdecode(b"\xff.jpg")})
    sink.close()
    assert next(read_records(tmp_path / "out.jsonl"))["picture"] == os.fsdecode(b"\xff.jpg")


def test_key_sets_find_what_they_have_through_merges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "_MIN_MERGED", 16)
    found = KeySet(f"{number}.jpg" for number in range(0, 2000, 2))
    assert [f"{number}.jpg" in found for number in range(2000)] == [True, False] * 1000
    found.add("0.jpg")
    assert len(found) == 1000
    assert list(found.hashes()) == sorted(hash_of(f"{number}.jpg") for number in range(0, 2000, 2))
