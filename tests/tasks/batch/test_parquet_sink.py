"""Parquet output: what is in it after an end, after a kill at every step, and with rows that fit badly."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from vlfit.api.conversation import ImagePart
from vlfit.api.outputs import Answer, ImageSeen, Usage
from vlfit.api.sampling_params import SamplingParams
from vlfit.errors import CannotWrite, UsageError
from vlfit.tasks.batch import parquet_sink
from vlfit.tasks.batch.items import Item, Unreadable
from vlfit.tasks.batch.job import PictureTask, Wish
from vlfit.tasks.batch.jsonl import JsonlFile
from vlfit.tasks.batch.parquet_sink import ParquetSink

SEEN = ImageSeen(640, 480, 320, 256, 80, notes=("rotated by EXIF",))


def record(key: str, text: str = "a cat", wish: Wish | None = None, **extra: object) -> dict[str, Any]:
    """What a batch gives its sink."""
    answer = Answer(text, "stop", Usage(90, 80, 3), "mini", (SEEN,))
    item = Item(key, Unreadable(key, "").read, Path(key), extra)
    return PictureTask(wish or Wish.caption(), SamplingParams()).record(item, ImagePart(b""), answer)


def read(output: Path) -> list[dict[str, Any]]:
    """As any program that knows nothing of vlfit."""
    return pa.dataset.dataset(output, format="parquet").to_table().to_pylist() if output.exists() else []


def names(output: Path) -> list[str]:
    return sorted(os.listdir(output))


def test_all_tasks_keep_their_fields(tmp_path: Path) -> None:
    box = {"label": "cup", "bbox_2d": [100, 100, 500, 500]}
    scene = json.dumps({"summary": "a desk", "objects": [box], "text": ["EXIT"]})
    cases = [
        (Wish.caption(), "a cat"),
        (Wish.ask("why?", schema='{"type": "object"}'), '{"a": [1, null]}'),
        (Wish.scene(), scene),
        (Wish.detect("cups"), json.dumps([box])),
    ]
    for wish, text in cases:
        output = tmp_path / f"{wish.kind}.parquet"
        sink = ParquetSink(output, kind=wish.kind)
        wanted = record("a.jpg", text, wish, label=7)
        sink.write(wanted)
        sink.close()
        sink.close()
        [row] = read(output)
        assert json.loads(row.pop("extra")) == wanted.pop("extra") == {"label": 7}
        if "value" in wanted:
            assert json.loads(row.pop("value")) == wanted.pop("value")
        assert row.pop("other") is row.pop("sidecar_error") is row.pop("same_as") is None
        assert row == json.loads(json.dumps(wanted))
        assert names(output) == ["part-00000.parquet"]


def test_parts_have_one_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_sink, "PART_ROWS", 3)
    output = tmp_path / "out.parquet"
    sink = ParquetSink(output, kind="ask")
    rows = [record(f"{number}.jpg", wish=Wish.ask("why?")) for number in range(7)]
    for row in rows:
        sink.write({**row, "images": []} if row["key"] < "3" else {**row, "extra": {"a": None}})
    sink.close()
    assert names(output) == [f"part-0000{number}.parquet" for number in range(3)]
    assert len({str(pq.read_schema(output / name)) for name in names(output)}) == 1
    assert [row["key"] for row in read(output)] == [f"{number}.jpg" for number in range(7)]
    assert list(ParquetSink(output, kind="ask").done_keys()) == [f"{number}.jpg" for number in range(7)]


class Killed(BaseException):
    """The process ends here: nothing after it is done, nothing is closed."""


@pytest.mark.parametrize("step", ["fsync", "replace", "sync_folder", "unlink", "append"])
def test_killed_at_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Eleven rows in parts of four; each try is killed at its first such step, then is let one further."""
    monkeypatch.setattr(parquet_sink, "PART_ROWS", 4)
    output = tmp_path / "out.parquet"
    wanted = [f"{number}.jpg" for number in range(11)]
    steps = {
        "fsync": (os, "fsync"),
        "replace": (Path, "replace"),
        "sync_folder": (parquet_sink, "sync_folder"),
        "unlink": (Path, "unlink"),
        "append": (JsonlFile, "append"),
    }
    place, name = steps[step]
    real = getattr(place, name)
    for allowed in range(40):
        left = [allowed]

        def perhaps(*arguments: Any, left: list[int] = left, **options: Any) -> Any:
            if not left[0]:
                raise Killed
            left[0] -= 1
            return real(*arguments, **options)

        with monkeypatch.context() as patched:
            patched.setattr(place, name, perhaps)
            try:
                sink = ParquetSink(output, kind="caption")
                done = list(sink.done_keys())
                assert len(done) == len(set(done))
                assert set(done) >= {row["key"] for row in read(output)}
                for key in wanted:
                    if key not in done:
                        sink.write(record(key))
                sink.close()
                break
            except Killed:
                continue
    rows = [row["key"] for row in read(output)]
    assert sorted(rows) == sorted(wanted)
    assert all(name.startswith("part-") for name in names(output))


def test_what_waits_is_not_done_again(tmp_path: Path) -> None:
    output = tmp_path / "out.parquet"
    first = ParquetSink(output, kind="caption")
    first.write(record("a.jpg"))
    first.flush()
    with (output / "_waiting-00000.jsonl").open("ab") as file:
        file.write(b'{"key": "torn')
    (output / "_part-00000.parquet.new").write_bytes(b"PAR1")
    second = ParquetSink(output, kind="caption")
    assert list(second.done_keys()) == ["a.jpg"]
    assert read(output) == []  # what waits is not seen by others
    second.close()  # nothing to do, and what waited becomes a part
    assert [row["key"] for row in read(output)] == ["a.jpg"]
    assert names(output) == ["part-00000.parquet"]


def test_a_part_that_is_taken_out_takes_nothing_along(tmp_path: Path) -> None:
    output = tmp_path / "out.parquet"
    for key in ("a.jpg", "b.jpg"):
        sink = ParquetSink(output, kind="caption")
        sink.write(record(key))
        sink.close()
    ParquetSink(output, kind="caption").write(record("c.jpg"))  # and killed
    (output / "part-00001.parquet").unlink()
    sink = ParquetSink(output, kind="caption")
    assert list(sink.done_keys()) == ["a.jpg", "c.jpg"]
    sink.close()
    assert names(output) == ["part-00000.parquet", "part-00002.parquet"]


def test_rows_that_fit_no_column_are_kept(tmp_path: Path) -> None:
    sink = ParquetSink(tmp_path / "out.parquet", kind="caption")
    sink.write({**record("a.jpg"), "new": [1]})
    sink.write({**record("b.jpg"), "usage": "none", "images": 3})
    sink.write({**record("c.jpg", "half \ud83d"), "extra": {"x": "\udcff"}})
    sink.write({**record("d.jpg"), "same_as": "a.jpg"})
    sink.close()
    rows = {row["key"]: row for row in read(tmp_path / "out.parquet")}
    assert json.loads(rows["a.jpg"]["other"]) == {"new": [1]}
    assert json.loads(rows["b.jpg"]["other"]) == {"usage": "none", "images": 3}
    assert rows["b.jpg"]["text"] == "a cat"
    assert rows["c.jpg"]["text"] == r"half \ud83d"
    assert json.loads(rows["c.jpg"]["extra"]) == {"x": "\udcff"}
    assert rows["d.jpg"]["usage"]["image_tokens"] == asdict(Usage(90, 80, 3))["image_tokens"]
    assert rows["d.jpg"]["other"] is None
    assert rows["d.jpg"]["same_as"] == "a.jpg"


def test_outputs_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file.parquet").write_bytes(b"PAR1")
    with pytest.raises(UsageError, match=r"file\.parquet.*\n.*out\.parquet"):
        ParquetSink(tmp_path / "file.parquet", kind="caption")
    folder = tmp_path / "out.parquet"
    folder.mkdir()
    (folder / "part-00000.parquet").write_bytes(b"PAR1")
    with pytest.raises(UsageError, match=r"part-00000\.parquet"):
        list(ParquetSink(folder, kind="caption").done_keys())
    pq.write_table(pa.table({"x": [1]}), folder / "part-00000.parquet")
    with pytest.raises(UsageError, match=r"part-00000\.parquet"):
        list(ParquetSink(folder, kind="caption").done_keys())

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    sink = ParquetSink(tmp_path / "full.parquet", kind="caption")
    sink.write(record("a.jpg"))
    monkeypatch.setattr(pq.ParquetWriter, "write_batch", full)
    with pytest.raises(CannotWrite, match=r"part-00000\.parquet.*No space left on device"):
        sink.close()
    monkeypatch.undo()
    assert list(ParquetSink(tmp_path / "full.parquet", kind="caption").done_keys()) == ["a.jpg"]
