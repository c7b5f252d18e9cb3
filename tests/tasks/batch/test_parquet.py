"""Pictures in Parquet files: every column type, several threads, and broken tables."""

import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.tasks.website import PNG
from vlfit.errors import NotAPicture, PictureNotFound, PictureTooLarge, UsageError
from vlfit.tasks.batch import parquet as table_rows
from vlfit.tasks.batch.items import Item
from vlfit.tasks.batch.parquet import open_table
from vlfit.tasks.batch.sources import SourceOptions, open_sources

RECORD = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def picture(number: int, size: int = 200) -> bytes:
    return PNG + number.to_bytes(4, "big") * (size // 4)


def table(path: Path, columns: dict[str, Any], rows: int = 1000) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=rows)
    return path


def found(path: Path, **options: Any) -> dict[str, Item]:
    source = open_sources([str(path)], SourceOptions(**options))
    items = list(source)
    assert source.count() == len(items)
    return {item.key: item for item in items}


@pytest.mark.parametrize("kind", ["record", "binary", "large binary", "dictionary"])
def test_bytes_in_every_form(tmp_path: Path, kind: str) -> None:
    data = [picture(number) for number in range(25)]
    if kind == "record":
        column = pa.array([{"bytes": one, "path": f"{n}.png"} for n, one in enumerate(data)], RECORD)
    elif kind == "dictionary":
        column = pa.array(data, pa.binary()).dictionary_encode()
    else:
        column = pa.array(data, pa.binary() if kind == "binary" else pa.large_binary())
    path = table(tmp_path / "t.parquet", {"label": list(range(25)), "image": column}, rows=10)
    items = found(path)
    assert list(items) == [f"t.parquet#{number}" for number in range(25)]
    for key in ("t.parquet#3", "t.parquet#24", "t.parquet#0", "t.parquet#11"):  # in no order
        assert pickle.loads(pickle.dumps(items[key])).read() == data[int(key.split("#")[1])]
    assert items["t.parquet#3"].extra == {}


def test_paths_urls_and_records_that_only_name(tmp_path: Path, site: str) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    names = ["a.png", "gone.png", None, f"{site}/picture.png", "a.png"]
    path = table(tmp_path / "t.parquet", {"file_name": names, "text": ["x"] * 5})
    items = found(path, allow_private=True)
    assert [items[f"t.parquet#{row}"].read() for row in (0, 3, 4)] == [PNG] * 3
    assert items["t.parquet#0"].path == tmp_path / "a.png"
    for row, named in ((1, r"gone\.png"), (2, r"t\.parquet#2: .*empty")):
        with pytest.raises(PictureNotFound, match=named):
            items[f"t.parquet#{row}"].read()
    records = [
        {"bytes": None, "path": "a.png"},
        {"bytes": None, "path": None},
        None,
        {"bytes": PNG, "path": ""},
    ]
    items = found(table(tmp_path / "r.parquet", {"image": pa.array(records, RECORD)}))
    assert items["r.parquet#0"].read() == items["r.parquet#3"].read() == PNG
    for row in (1, 2):
        with pytest.raises(PictureNotFound, match=f"r.parquet#{row}: .*empty"):
            items[f"r.parquet#{row}"].read()


def test_columns_that_go_along(tmp_path: Path) -> None:
    columns = {
        "image": [PNG, PNG],
        "words": ["a", None],
        "score": [0.5, float("nan")],
        "day": [date(2026, 1, 2), None],
        "tags": [["x"], []],
    }
    items = found(table(tmp_path / "t.parquet", columns), keep=("words", "score", "day", "tags"))
    assert items["t.parquet#0"].extra == {"words": "a", "score": 0.5, "day": "2026-01-02", "tags": ["x"]}
    assert items["t.parquet#1"].extra == {"words": None, "score": "nan", "day": None, "tags": []}
    assert items["t.parquet#1"].read() == PNG


@pytest.mark.parametrize(
    ("columns", "options", "named"),
    [
        ({"label": [1]}, {}, r"\n.*--column.* label \(int64\)"),
        ({"left": [PNG], "right": [PNG]}, {}, r"\n.*--column left or --column right"),
        ({"image": [PNG]}, {"column": "picture"}, r"'picture'\n.* image \(binary\)"),
        ({"image": [PNG], "n": [1]}, {"column": "n"}, r"column 'n'.* int64"),
        ({"image": [PNG]}, {"keep": ("label",)}, "column 'label'"),
        ({"image": [PNG], "other": [PNG]}, {"keep": ("other",)}, "column 'other'.*bytes"),
        ({"image": [[PNG]]}, {}, "--column"),
    ],
)
def test_columns_that_are_not_there(
    tmp_path: Path, columns: dict[str, Any], options: dict[str, Any], named: str
) -> None:
    path = table(tmp_path / "t.parquet", columns)
    with pytest.raises(UsageError, match=named):
        open_sources([str(path)], SourceOptions(**options))


def test_which_column_is_meant(tmp_path: Path) -> None:
    path = table(tmp_path / "t.parquet", {"mask": [b"no"], "image": [PNG], "url": ["http://example.org/x"]})
    assert found(path)["t.parquet#0"].read() == PNG
    assert found(path, column="mask")["t.parquet#0"].read() == b"no"


def test_a_folder_of_tables_one_of_them_broken(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(3):
        table(folder / f"part-{number}.parquet", {"image": [PNG]})
    whole = (folder / "part-1.parquet").read_bytes()
    (folder / "part-1.parquet").write_bytes(whole[: len(whole) // 2])
    (folder / "_SUCCESS").write_bytes(b"")
    items = found(folder)
    assert list(items) == ["part-0.parquet#0", "part-1.parquet", "part-2.parquet#0"]
    with pytest.raises(PictureNotFound, match=r"part-1\.parquet .*Parquet"):
        items["part-1.parquet"].read()
    for data in (b"", b"PAR1", b"words", whole[:-8] + b"\xff" * 4 + b"PAR1"):
        (tmp_path / "t.parquet").write_bytes(data)
        with pytest.raises(UsageError, match=r"t\.parquet .*Parquet"):
            open_sources([str(tmp_path / "t.parquet")])


def test_a_row_group_that_is_broken_is_looked_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.parquet"
    column = pa.array([picture(number, 4000) for number in range(90)], pa.binary())
    pq.write_table(
        pa.table({"image": column}), path, row_group_size=30, compression="snappy", use_dictionary=False
    )
    chunk = pq.ParquetFile(path).metadata.row_group(1).column(0)
    data = bytearray(path.read_bytes())
    start = chunk.data_page_offset
    data[start : start + 400] = b"\xff" * 400
    path.write_bytes(data)
    items = found(path)
    opened = count_openings(monkeypatch)
    assert items["t.parquet#29"].read() == picture(29, 4000)
    for row in range(30, 60):
        with pytest.raises(NotAPicture, match=f"t.parquet#{row} "):
            items[f"t.parquet#{row}"].read()
    assert items["t.parquet#60"].read() == picture(60, 4000)
    assert len(opened) == 3


def count_openings(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    opened: list[Path] = []

    def counted(path: Path) -> Any:
        opened.append(path)
        return open_table(path)

    monkeypatch.setattr(table_rows, "open_table", counted)
    return opened


def test_rows_near_one_another_are_read_from_one_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 600
    monkeypatch.setattr(table_rows, "_MAX_BATCH_ROWS", 16)
    path = table(
        tmp_path / "t.parquet", {"image": [picture(number, 400) for number in range(count)]}, rows=200
    )
    items = list(found(path).values())
    opened = count_openings(monkeypatch)
    order = [row ^ 5 for row in range(count)]  # neighbours out of order
    assert [items[row].read() for row in order] == [picture(row, 400) for row in order]
    assert len(opened) == 3  # once for each row group
    assert items[0].read() == picture(0, 400)  # far too late: opened again, from the start
    assert len(opened) == 4
    with ThreadPoolExecutor(8) as pool:  # as a batch reads ahead
        read = list(pool.map(lambda row: items[row].read(), order))
    assert read == [picture(row, 400) for row in order]
    kept = [len(values) for reader in table_rows._readers._readers for _, values in reader.recent]
    assert sum(kept) <= 3 * 2 * 16


def test_a_table_that_is_written_anew_is_read_anew(tmp_path: Path) -> None:
    path = table(tmp_path / "t.parquet", {"image": [picture(1)]})
    assert found(path)["t.parquet#0"].read() == picture(1)
    table(path, {"image": [picture(22, 400)]})
    assert found(path)["t.parquet#0"].read() == picture(22, 400)


def test_cells_that_are_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_rows, "MAX_FILE_BYTES", 100)
    with pytest.raises(PictureTooLarge, match=r"t\.parquet#0 "):
        found(table(tmp_path / "t.parquet", {"image": [picture(1)]}))["t.parquet#0"].read()


def test_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = table(tmp_path / "t.parquet", {"image": [PNG]})
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UsageError, match=r"pyarrow(?s:.*)pip install 'vlfit\[parquet\]'"):
        open_sources([str(path)])
