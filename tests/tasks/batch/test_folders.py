"""Pictures in folders: order, hidden files, circular links, globs, and names that are not UTF-8."""

import errno
import json
import os
import pickle
import sys
from pathlib import Path

import pytest

from tests.tasks.website import PNG
from vlfit.errors import PictureNotFound
from vlfit.tasks.batch.folders import FolderSource, split_glob
from vlfit.tasks.batch.items import file_name_of_key, key_of


def fill(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(PNG)
    return folder


def keys(source: FolderSource) -> list[str]:
    return [item.key for item in source]


def test_pictures_in_order_with_what_is_left_out(tmp_path: Path) -> None:
    fill(tmp_path, "b.JPG", "a/z.png", "a.jpg", "a/b/c.webp", "notes.txt", "x.cr2", "README")
    fill(tmp_path, ".hidden.jpg", ".cache/a.jpg", "@eaDir/thumb.jpg", "a/._z.png")
    source = FolderSource(str(tmp_path))
    assert keys(source) == ["a.jpg", "a/b/c.webp", "a/z.png", "b.JPG"]
    assert source.count() == 4
    [note] = source.notes()
    summary, _, kinds = note.partition(" (")
    assert summary.startswith(f"{tmp_path}: ")
    assert " 3 " in summary
    counts = dict(kind.rsplit(" ", 1) for kind in kinds.partition(")")[0].split(", "))
    assert (len(counts), counts[".cr2"], counts[".txt"], set(counts.values())) == (3, "1", "1", {"1"})
    assert "--include raw" in kinds
    assert ".hidden.jpg" in keys(FolderSource(str(tmp_path), hidden=True))


def test_items_are_read_in_other_processes_and_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "photos", "~cat.png")
    monkeypatch.chdir(tmp_path)
    [item] = FolderSource("photos")
    assert item.path == Path("photos/~cat.png")
    monkeypatch.chdir("/")
    assert pickle.loads(pickle.dumps(item)).read() == PNG


def test_links(tmp_path: Path) -> None:
    outside = fill(tmp_path / "outside", "far.jpg", "deep/far.jpg")
    root = fill(tmp_path / "root", "a/near.jpg")
    (root / "a" / "up").symlink_to(root)  # a circle
    (root / "a" / "top").symlink_to(tmp_path)  # holds the root itself
    (root / "near").symlink_to(root / "a")  # found by its own name
    (root / "one").symlink_to(outside)
    (root / "two").symlink_to(outside)  # the same again
    (outside / "deep" / "back").symlink_to(outside)
    (root / "gone.jpg").symlink_to(root / "nowhere")
    (root / "self.jpg").symlink_to(root / "self.jpg")
    (root / "file.jpg").symlink_to(outside / "far.jpg")
    os.mkfifo(root / "pipe.jpg")
    source = FolderSource(str(root))
    found = {item.key: item for item in source}
    assert list(found) == [
        "a/near.jpg",
        "file.jpg",
        "gone.jpg",
        "one/deep/far.jpg",
        "one/far.jpg",
        "self.jpg",
    ]
    with pytest.raises(PictureNotFound, match=r"gone\.jpg"):
        found["gone.jpg"].read()
    with pytest.raises(PictureNotFound, match=os.strerror(errno.ELOOP)):
        found["self.jpg"].read()
    parent_links, files = source.notes()
    assert "1 link" in parent_links
    assert files.endswith("file 1)")  # the pipe


def test_a_folder_that_cannot_be_read_is_an_item_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, "a/1.jpg", "b/2.jpg", "c/3.jpg")
    scandir = os.scandir

    def refuses(path: str) -> object:
        if path.rstrip("/").endswith("b"):
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuses)
    found = {item.key: item for item in FolderSource(str(tmp_path))}
    assert list(found) == ["a/1.jpg", "b/", "c/3.jpg"]
    with pytest.raises(PictureNotFound, match=r"b/: .*Permission denied"):
        found["b/"].read()


def test_folders_deeper_than_python_calls(tmp_path: Path) -> None:
    depth = 320
    for level in range(1, depth + 1):
        os.mkdir(tmp_path / ("d/" * level))
    deepest = tmp_path / ("d/" * depth) / "deep.jpg"
    deepest.write_bytes(PNG)
    usual = sys.getrecursionlimit()
    sys.setrecursionlimit(300)
    try:
        found = keys(FolderSource(str(tmp_path)))
    finally:
        sys.setrecursionlimit(usual)
    deepest.unlink()
    for level in range(depth, 0, -1):  # pytest's own way to remove a folder calls itself
        os.rmdir(tmp_path / ("d/" * level))
    assert found == ["d/" * depth + "deep.jpg"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.jpg", ["a.jpg"]),
        ("**", ["a.jpg", "b/c/d.jpg", "b/cat-1.png", "b/cat-2.jpg"]),
        ("**/*.jpg", ["a.jpg", "b/c/d.jpg", "b/cat-2.jpg"]),
        ("b/cat-?.*", ["cat-1.png", "cat-2.jpg"]),
        ("*/cat-[2-9].*", ["b/cat-2.jpg"]),
        ("b/**/d.jpg", ["c/d.jpg"]),
        ("**/c/**/d.jpg", ["b/c/d.jpg"]),
        ("*/.h/*.jpg", ["b/.h/e.jpg"]),
        ("*/*", ["b/cat-1.png", "b/cat-2.jpg"]),
    ],
)
def test_patterns(tmp_path: Path, pattern: str, expected: list[str]) -> None:
    fill(tmp_path, "a.jpg", "b/cat-1.png", "b/cat-2.jpg", "b/c/d.jpg", "b/.h/e.jpg", "b/x.txt")
    root, parts = split_glob(f"{tmp_path}/{pattern}")
    assert keys(FolderSource(root, parts)) == expected


def test_where_patterns_begin() -> None:
    assert split_glob("*.jpg") == (".", ("*.jpg",))
    assert split_glob("/*.jpg") == ("/", ("*.jpg",))
    assert split_glob("a/b/**/x[1]/*") == ("a/b", ("**", "x[1]", "*"))


def test_names_that_are_no_text_go_into_json_and_back(tmp_path: Path) -> None:
    latin = os.fsdecode(b"caf\xe9.jpg")
    names = [latin, "line\nbreak.jpg", r"caf\xe9.jpg", r"back\slash.jpg", r"two\\.jpg", "naïve 🐈.jpg"]
    for name in names:
        (tmp_path / name).write_bytes(PNG)
    items = list(FolderSource(str(tmp_path)))
    found = [item.key for item in items]
    assert len(set(found)) == len(names)
    assert r"caf\xe9.jpg" in found
    kept = json.loads(json.dumps(found, ensure_ascii=False).encode())  # valid UTF-8, or this raises
    assert {file_name_of_key(key) for key in kept} == set(names)
    assert all(item.read() == PNG for item in items)


def test_no_two_names_have_one_key() -> None:
    names = [os.fsdecode(b"\xff"), r"\xff", r"\\xff", "\\" + os.fsdecode(b"\xff"), "\ud800", r"\ud800", "\\"]
    assert len({key_of(name) for name in names}) == len(names)
    assert [file_name_of_key(key_of(name)) for name in names] == names
    for name in names:
        key_of(name).encode("utf-8")
