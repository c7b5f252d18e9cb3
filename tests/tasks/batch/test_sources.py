"""Command-line sources: lists of every kind, single pictures, and several sources at once."""

import io
import json
import sys
from pathlib import Path

import pytest

from tests.tasks.batch.test_folders import fill
from tests.tasks.website import PNG
from vlfit.errors import PictureError, PictureNotFound, PrivateAddress, UsageError
from vlfit.tasks.batch.items import Item
from vlfit.tasks.batch.sources import SourceOptions, open_sources


def found(*typed: str) -> dict[str, Item]:
    items = list(open_sources(typed))
    assert len({item.key for item in items}) == len(items)
    return {item.key: item for item in items}


def listed(tmp_path: Path, data: bytes, name: str = "list.txt") -> dict[str, Item]:
    (tmp_path / name).write_bytes(data)
    return found(str(tmp_path / name))


def test_a_list_with_all_that_lists_have(tmp_path: Path) -> None:
    fill(tmp_path, "a.jpg", "sub/b.jpg", "#1.jpg")
    lines = b"\xef\xbb\xbfa.jpg\r\n\n# a remark\n  sub/..//sub/./b.jpg \n./#1.jpg\na.jpg\nmissing.jpg\n"
    lines += b"https://me:secret@example.org/x.jpg?size=2#top\ncaf\xe9.jpg\nftp://example.org/x.jpg\n"
    items = listed(tmp_path, lines)
    assert list(items) == [
        *("a.jpg", "sub/../sub/b.jpg", "#1.jpg", "missing.jpg", "https://example.org/x.jpg?size=2"),
        *(r"caf\xe9.jpg", "ftp://example.org/x.jpg"),
    ]
    assert items["sub/../sub/b.jpg"].read() == PNG
    assert items["a.jpg"].path == tmp_path / "a.jpg"
    assert items["https://example.org/x.jpg?size=2"].path is None
    with pytest.raises(PictureNotFound, match=r"missing\.jpg"):
        items["missing.jpg"].read()
    with pytest.raises(PictureNotFound, match=r"ftp://.*http:.*https:.*data:"):
        items["ftp://example.org/x.jpg"].read()
    source = open_sources([str(tmp_path / "list.txt")])
    assert source.count() == 7
    [note] = source.notes()
    assert note.startswith(f"{tmp_path}/list.txt: 1 line ")


def test_lists_of_windows_and_of_find(tmp_path: Path) -> None:
    assert list(listed(tmp_path, "a.jpg\r\nü.jpg\r\n".encode("utf-16"))) == ["a.jpg", "ü.jpg"]
    assert list(listed(tmp_path, b"a.jpg\0with\nbreak.jpg\0caf\xe9.jpg\0")) == [
        "a.jpg",
        "with\nbreak.jpg",
        r"caf\xe9.jpg",
    ]
    assert listed(tmp_path, b"") == {}


def test_json_lines(tmp_path: Path) -> None:
    fill(tmp_path, "a.jpg")
    rows = [
        {"picture": "a.jpg", "question": "why?", "score": float("nan")},
        {"image": "a.jpg", "question": "who?"},
        {"id": 7, "url": "https://example.org/7?signature=secret"},
        {"key": "own", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}},
        {"file_name": 3},
        [],
    ]
    text = "\n".join([*map(json.dumps, rows[:-1]), "{broken", '{"image": "a.jpg"}'])
    items = listed(tmp_path, text.encode(), "rows.jsonl")
    assert list(items) == ["a.jpg", "a.jpg#line 2", "7", "own", "line 5", "line 6"]
    assert items["a.jpg"].extra == {"question": "why?", "score": "NaN"}
    assert items["a.jpg#line 2"].extra == {"question": "who?"}
    assert items["7"].extra == {}
    own = items["own"].read()
    assert isinstance(own, bytes)
    assert own.startswith(b"\x89PNG")
    for key, named in (("line 5", "line 5.*file_name"), ("line 6", "line 6.*JSON")):
        with pytest.raises(PictureError, match=named):
            items[key].read()


def test_one_key_for_two_pictures_loses_neither(tmp_path: Path) -> None:
    rows = [
        *({"id": 1, "image": name} for name in ("a.jpg", "b.jpg", "a.jpg")),
        {"id": "c.jpg", "image": "d.jpg"},
        {"image": "c.jpg"},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join([*map(json.dumps, rows), "c.jpg", "e.jpg"]))
    source = open_sources([str(tmp_path / "rows.jsonl")])
    assert [(item.key, item.path and item.path.name) for item in source] == [
        *(("1", "a.jpg"), ("1#line 2", "b.jpg"), ("c.jpg", "d.jpg"), ("c.jpg#line 5", "c.jpg")),
        ("e.jpg", "e.jpg"),
    ]
    assert source.count() == 5
    repeated, same_key = source.notes()
    assert "2 lines" in repeated
    assert "2 lines" in same_key
    assert "#line" in same_key


def test_lists_on_standard_input(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fill(tmp_path, "a.jpg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(b"a.jpg\n"))))
    source = open_sources(["-"])
    assert source.count() is None
    assert [(item.key, item.read()) for item in source] == [("a.jpg", PNG)]
    with pytest.raises(UsageError, match="standard input"):
        list(source)


def test_a_line_without_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlfit.tasks.batch.list_files._MAX_LINE_BYTES", 1000)
    items = listed(tmp_path, b"a.jpg\n" + b"x" * 3000 + b"\nb.jpg\n")
    assert list(items) == ["a.jpg", "line 2"]
    with pytest.raises(PictureError, match=r"\bline 2\b.*\b0 MiB\b"):
        items["line 2"].read()


def test_a_list_does_not_lead_into_private_networks(site: str, tmp_path: Path) -> None:
    url = f"{site}/picture.png"
    (tmp_path / "list.txt").write_text(url)
    [item] = open_sources([str(tmp_path / "list.txt")])
    with pytest.raises(PrivateAddress) as caught:
        item.read()
    assert "--allow-private-urls" in caught.value.hint
    [item] = open_sources([str(tmp_path / "list.txt")], SourceOptions(allow_private=True))
    assert item.read() == PNG
    [item] = open_sources([url])  # typed by whoever runs it
    assert item.read() == PNG


def test_pictures_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, "a.jpg", "b[1].png", "sub/a.jpg")
    monkeypatch.chdir(tmp_path)
    items = found("a.jpg", "./a.jpg", "b[1].png", "sub//a.jpg", str(tmp_path / "a.jpg"))
    assert list(items) == ["a.jpg", "b[1].png", "sub/a.jpg", str(tmp_path / "a.jpg")]
    assert items["b[1].png"].read() == PNG


def test_several_sources_keep_their_keys_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, "x/2020/a.jpg", "y/2020/a.jpg", "z/2020/a.jpg", "2020/a.jpg")
    (tmp_path / "wanted.txt").write_text("x/2020/a.jpg\n")
    monkeypatch.chdir(tmp_path)
    items = found("x/2020", "y/2020/*.jpg", "wanted.txt", "2020/a.jpg", "x/2020")
    assert {key: str(item.path) for key, item in items.items()} == {
        "2020/a.jpg": "2020/a.jpg",
        "2020-2/a.jpg": "x/2020/a.jpg",
        "2020-3/a.jpg": "y/2020/a.jpg",
        "wanted/x/2020/a.jpg": "x/2020/a.jpg",
    }
    assert open_sources(["x/2020", "y/2020"]).count() == 2
    assert list(found(f"{tmp_path}/x/2020/")) == ["a.jpg"]


def test_patterns_mean_what_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, "p/a.jpg", "p/b.dat", "p/c.txt")
    (tmp_path / "p" / "c.txt").write_text("a.jpg\n")
    monkeypatch.chdir(tmp_path)
    assert list(found("p/*")) == ["a.jpg"]
    assert list(found("p/*.dat")) == ["b.dat"]  # an extension that was typed is meant
    assert list(found("p/*.txt")) == ["a.jpg"]  # a list
    with pytest.raises(PictureNotFound, match=r"p/\*\.png"):
        found("p/*.png")


@pytest.mark.parametrize(
    ("typed", "error", "named"),
    [
        ("nothing", PictureNotFound, "^nothing: "),
        (None, UsageError, r"\.tar|\.txt"),
        ("", PictureNotFound, "empty"),
        ("x.csv", UsageError, r"x\.csv"),
        ("x.tar.gz", UsageError, r"x\.tar\.gz .*\n.*gunzip"),
        ("packed.tar", UsageError, r"packed\.tar .*\n.*gunzip"),
        ("song.mp3", UsageError, r"song\.mp3"),
        ("https://example.org/x.tar", UsageError, r"https://example\.org/x\.tar"),
        ("{a,b}.tar", PictureNotFound, r"^a\.tar: .*\{a,b\}\.tar"),
        ("s-{0..99999999}.tar", UsageError, "100,000"),
        ("mixed", UsageError, r"mixed/\*\.tar.*mixed/\*\.parquet"),
    ],
)
def test_words_that_mean_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: str | None, error: type[Exception], named: str
) -> None:
    for name in ("x.csv", "x.tar.gz", "song.mp3", "mixed/a.tar", "mixed/b.parquet"):
        fill(tmp_path, name)
    (tmp_path / "packed.tar").write_bytes(b"\x1f\x8b\x08\x00 and so on")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=named):
        open_sources([] if typed is None else [typed])
