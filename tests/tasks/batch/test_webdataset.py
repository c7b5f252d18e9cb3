"""Pictures in tar shards: intact, truncated, broken and malicious ones."""

import io
import json
import pickle
import re
import tarfile
from pathlib import Path

import pytest

from tests.tasks.website import PNG
from tests.wording import figures_in
from vlfit.errors import NotAPicture, PictureNotFound, PictureTooLarge
from vlfit.tasks.batch import items as readers
from vlfit.tasks.batch import webdataset as tar_index
from vlfit.tasks.batch.items import Item
from vlfit.tasks.batch.sources import open_sources
from vlfit.tasks.batch.webdataset import WebDatasetSource

BLOCK = tarfile.BLOCKSIZE


def tar_bytes(*members: tuple[str, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def shard(tmp_path: Path, data: bytes, name: str = "s.tar") -> dict[str, Item]:
    (tmp_path / name).write_bytes(data)
    items = list(WebDatasetSource([tmp_path / name]))
    assert len({item.key for item in items}) == len(items)
    return {item.key: item for item in items}


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_groups_of_files(tmp_path: Path, form: int) -> None:
    long = "folder/" * 12 + "x" * 90
    data = tar_bytes(
        ("./0001.jpg", PNG),
        ("./0001.json", b'{"caption": "a cat", "score": NaN}'),
        ("./0001.cls", b"7\n"),
        ("./0001.note.txt", "schön".encode()),
        ("0002.left.png", PNG + b"left"),
        ("0002.right.png", PNG + b"right"),
        ("0002.json", b"{broken"),
        ("0003.txt", b"of no picture"),
        (f"{long}.webp", PNG),
        ("._0001.jpg", b"of macOS"),
        ("0004.npy", b"numbers"),
        form=form,
    )
    items = shard(tmp_path, data)
    assert list(items) == [
        "s.tar#0001.jpg",
        "s.tar#0002.left.png",
        "s.tar#0002.right.png",
        f"s.tar#{long}.webp",
    ]
    assert items["s.tar#0001.jpg"].extra == {
        "json": {"caption": "a cat", "score": "NaN"},
        "cls": 7,
        "note.txt": "schön",
    }
    assert items["s.tar#0002.right.png"].extra == {"json": "{broken"}
    for end in ("left", "right"):
        item = pickle.loads(pickle.dumps(items[f"s.tar#0002.{end}.png"]))
        assert item.read() == PNG + end.encode()
        assert item.path is None
    assert items[f"s.tar#{long}.webp"].read() == PNG
    source = WebDatasetSource([tmp_path / "s.tar"])
    assert source.count() == len(list(source)) == 4
    [note] = source.notes()
    assert note.endswith("(.npy 1)")


def test_shards_by_pattern_folder_and_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        for split in ("train", "val"):
            (tmp_path / split).mkdir(exist_ok=True)
            (tmp_path / split / f"s-{number:02}.tar").write_bytes(tar_bytes(("a.jpg", PNG)))
    monkeypatch.chdir(tmp_path)
    expected = [f"s-{number:02}.tar#a.jpg" for number in range(3)]
    for typed in (
        ["train"],
        ["train/*.tar"],
        ["train/s-{00..02}.tar"],
        [f"train/s-{n:02}.tar" for n in range(3)],
    ):
        assert [item.key for item in open_sources(typed)] == expected
    both = [item.key for item in open_sources(["train/s-01.tar", "val/s-01.tar"])]
    assert both == ["train/s-01.tar#a.jpg", "val/s-01.tar#a.jpg"]
    assert [item.key for item in open_sources(["*/s-01.tar"])] == both
    with pytest.raises(PictureNotFound, match=r"^train/s-03\.tar: "):
        open_sources(["train/s-{00..09}.tar"])


def test_pictures_that_share_a_name_or_a_beginning(tmp_path: Path) -> None:
    many = [(f"holiday.{number:03}.jpg", PNG) for number in range(150)]
    items = shard(tmp_path, tar_bytes(("a.jpg", PNG), ("a.jpg", PNG + b"2"), *many))
    assert list(items)[:3] == ["s.tar#a.jpg", "s.tar#a.jpg#2", "s.tar#holiday.000.jpg"]
    assert len(items) == 152
    assert items["s.tar#a.jpg#2"].read() == PNG + b"2"


def failing(items: dict[str, Item], key: str = "s.tar") -> str:
    with pytest.raises(PictureNotFound) as caught:
        items[key].read()
    return caught.value.message


WHOLE = tar_bytes(("1.jpg", PNG), ("2.jpg", PNG * 9), ("3.jpg", PNG), form=tarfile.USTAR_FORMAT)
SECOND = BLOCK + -(-len(PNG) // BLOCK) * BLOCK  # where the header of 2.jpg is


@pytest.mark.parametrize("left", [0, 1, BLOCK - 1, SECOND + 1, SECOND + BLOCK, SECOND + BLOCK + 7])
def test_shards_that_are_cut_off(tmp_path: Path, left: int) -> None:
    items = shard(tmp_path, WHOLE[:left])
    message = failing(items)
    assert ("is empty" if left == 0 else f" {left:,} bytes") in message
    good = {key for key in items if key != "s.tar"}
    if left > SECOND:
        assert items["s.tar#1.jpg"].read() == PNG
        assert len(good) in figures_in(message)  # files that were read
    if left >= SECOND + BLOCK:
        assert good == {"s.tar#1.jpg", "s.tar#2.jpg"}
        with pytest.raises(NotAPicture, match=f"{9 * len(PNG)} bytes"):
            items["s.tar#2.jpg"].read()
    assert WebDatasetSource([tmp_path / "s.tar"]).count() == len(items)


def test_a_shard_without_its_end(tmp_path: Path) -> None:
    (tmp_path / "s.tar").write_bytes(WHOLE[:SECOND])
    source = WebDatasetSource([tmp_path / "s.tar"])
    assert [item.key for item in source] == ["s.tar#1.jpg"]
    [note] = source.notes()
    assert f"{tmp_path}/s.tar" in note


def test_shards_that_are_broken_or_none(tmp_path: Path) -> None:
    broken = WHOLE[:SECOND] + b"\x07" * BLOCK + WHOLE[SECOND + BLOCK :]
    items = shard(tmp_path, broken)
    assert list(items) == ["s.tar#1.jpg", "s.tar"]
    assert f"byte {SECOND:,}" in failing(items)
    assert "tar" in failing(shard(tmp_path, b"words " * 1000))
    assert "gzip" in failing(shard(tmp_path, b"\x1f\x8b" + WHOLE))
    missing = WebDatasetSource([tmp_path / "gone.tar"])
    assert "No such file" in failing({i.key: i for i in missing}, "gone.tar")


def header(name: str, size: int, kind: bytes, **fields: object) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = max(size, 0), kind
    for field, value in fields.items():
        setattr(info, field, value)
    made = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    if size < 0:  # in base 256, as GNU writes numbers that are too large
        made[124:136] = (2**96 + size).to_bytes(12, "big")
        made[148:156] = b" " * 8
        made[148:156] = b"%06o\0 " % sum(made)
    return bytes(made)


@pytest.mark.parametrize(
    ("what", "data"),
    [
        ("headers of more than 4 MiB", header("n", 3 * 2**30, tarfile.GNUTYPE_LONGNAME)),
        ("headers of more than 4 MiB", header("n", 3 * 2**30, tarfile.XHDTYPE)),
        ("points backwards", header("1.jpg", -1024, tarfile.REGTYPE)),
        ("nested headers", header("n", 0, tarfile.GNUTYPE_LONGNAME) * 3000),
        ("nested headers", header("n", 0, tarfile.XHDTYPE) * 3000),
        (
            "not enough values",
            header("n", BLOCK, tarfile.XHDTYPE)
            + b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n".ljust(BLOCK, b"\0")
            + header("s.jpg", BLOCK, tarfile.REGTYPE)
            + b"1000000\n".ljust(BLOCK, b"1"),
        ),
    ],
)
def test_headers_that_are_made_to_do_harm(tmp_path: Path, what: str, data: bytes) -> None:
    items = shard(tmp_path, WHOLE[:SECOND] + data + WHOLE)
    assert items["s.tar#1.jpg"].read() == PNG
    assert figures_in(failing(items))  # at which byte
    assert what in failing(items)


def test_members_that_are_no_plain_files(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, kind in (("d.jpg", tarfile.DIRTYPE), ("f.jpg", tarfile.FIFOTYPE)):
            info = tarfile.TarInfo(name)
            info.type = kind
            tar.addfile(info)
        for name, kind in (("link.jpg", tarfile.SYMTYPE), ("hard.jpg", tarfile.LNKTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
        for name in ("../../up.jpg", "/root.jpg", "caf\udce9.jpg", "with\nbreak.jpg"):
            info = tarfile.TarInfo(name)
            info.size = len(PNG)
            tar.addfile(info, io.BytesIO(PNG))
    (tmp_path / "s.tar").write_bytes(buffer.getvalue())
    source = WebDatasetSource([tmp_path / "s.tar"])
    items = {item.key: item for item in source}
    assert list(items) == [
        "s.tar#../../up.jpg",
        "s.tar#/root.jpg",
        r"s.tar#caf\xe9.jpg",
        "s.tar#with\nbreak.jpg",
    ]
    assert all(item.read() == PNG and item.path is None for item in items.values())
    [note] = source.notes()
    assert re.findall(r"\d+", note)[-3:] == ["3", "2", "1"]
    json.dumps(list(items), ensure_ascii=False).encode()


def test_sparse_members_are_left_out(tmp_path: Path) -> None:
    sparse = header("s.jpg", BLOCK, tarfile.GNUTYPE_SPARSE)
    items = shard(tmp_path, sparse + bytes(BLOCK) + WHOLE)
    assert list(items) == ["s.tar#1.jpg", "s.tar#2.jpg", "s.tar#3.jpg"]


def test_members_that_are_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "MAX_FILE_BYTES", len(PNG))
    items = shard(tmp_path, WHOLE)
    assert items["s.tar#1.jpg"].read() == PNG
    with pytest.raises(PictureTooLarge, match=r"s\.tar#2\.jpg "):
        items["s.tar#2.jpg"].read()


def test_headers_are_read_and_pictures_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = tar_bytes(*((f"{number}.jpg", bytes(100_000)) for number in range(20)))
    (tmp_path / "s.tar").write_bytes(large)
    read = tar_index._HeaderReader.read
    sizes: list[int] = []

    def counted(self: tar_index._HeaderReader, size: int = -1) -> bytes:
        sizes.append(size)
        return read(self, size)

    monkeypatch.setattr(tar_index._HeaderReader, "read", counted)
    assert len(list(WebDatasetSource([tmp_path / "s.tar"]))) == 20
    assert sum(sizes) < 21 * 2 * BLOCK
