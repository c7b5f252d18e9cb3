"""Words in pictures: every pixel stays, every byte but EXIF's too, and Pillow reads what was written."""

import os
import struct
import zlib
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

from tests.pictures import encoded, half_transparent, picture, rotated_by_exif, scene
from tests.tasks.batch.test_sidecars import item, said
from vlfit.errors import CannotWrite
from vlfit.tasks.batch.sidecars import sidecar
from vlfit.tasks.batch.sidecars.exif_block import BadExif, Block

WORDS = 'A girl & a "cat" 🐈 in the 図書館\nsecond line'
COMMENT, EXIF_DIRECTORY, DESCRIPTION = 0x9286, 0x8769, 0x010E

KINDS = {
    "jfif.jpg": picture(file_format="JPEG"),
    "exif.jpg": rotated_by_exif(6),
    "progressive.jpg": picture(file_format="JPEG", progressive=True, icc_profile=b"profile" * 9000),
    "plain.png": picture(),
    "exif.png": encoded(scene(40, 30), exif=Image.open(BytesIO(rotated_by_exif(6))).getexif()),
    "lossy.webp": picture(file_format="WEBP"),
    "lossless.webp": encoded(half_transparent(width=33, height=17), "WEBP", lossless=True),
    "alpha.webp": encoded(half_transparent(), "WEBP", quality=80),
    "xmp.webp": picture(file_format="WEBP", xmp=b"<x/>"),
    "exif.webp": picture(
        file_format="WEBP", exif=Image.open(BytesIO(rotated_by_exif(6))).getexif(), xmp=b"<x/>"
    ),
    "plain.tif": picture(file_format="TIFF"),
    "packed.tif": encoded(scene(64, 48), "TIFF", compression="tiff_lzw", description=" ", software="ours"),
}


def write(folder: Path, data: bytes, words: str = WORDS, name: str = "photo.jpg", **options: bool) -> bytes:
    (folder / name).write_bytes(data)
    writer = sidecar("exif", **options)
    for _ in range(2):
        writer.write(item(folder, name), said(words))
        changed = (folder / name).read_bytes()
    assert sorted(os.listdir(folder)) == sorted(
        {name, *([f"{name}_original"] if options.get("backup") else [])}
    )
    assert writer.notes() == []
    return changed


def description(data: bytes) -> str:
    exif = Image.open(BytesIO(data)).getexif()
    # Pillow takes text for Latin-1, whatever it is.
    return str(exif.get(DESCRIPTION, "")).encode("latin-1").decode()


def comment(data: bytes) -> str:
    exif = Image.open(BytesIO(data)).getexif()
    wide = "utf-16-le" if exif.endian == "<" else "utf-16-be"
    value = exif.get_ifd(EXIF_DIRECTORY).get(COMMENT, b"")
    return str(value[8:], wide if value.startswith(b"UNICODE\0") else "ascii")


@pytest.mark.parametrize("name", KINDS)
def test_words_go_in_and_no_pixel_changes(tmp_path: Path, name: str) -> None:
    before = KINDS[name]
    after = write(tmp_path, before, name=name)
    assert description(after) == comment(after) == WORDS
    old, new = Image.open(BytesIO(before)), Image.open(BytesIO(after))
    assert (old.format, old.mode, old.size, old.tobytes()) == (new.format, new.mode, new.size, new.tobytes())
    kept = {tag: value for tag, value in old.getexif().items() if tag != DESCRIPTION}
    now = dict(new.getexif())
    assert {tag: now.get(tag) for tag in kept} == kept
    for field in ("icc_profile", "xmp", "exif" if not kept else "dpi"):
        if field != "exif":
            assert old.info.get(field) == new.info.get(field)
    if name.endswith((".jpg", ".png")):
        # What is behind the EXIF is there byte for byte: all pixels.
        assert after.endswith(before[-1000:])
        assert len(after) - len(before) < 600


def test_a_description_that_is_there_stays(tmp_path: Path) -> None:
    first = write(tmp_path, KINDS["jfif.jpg"], "first words")
    writer = sidecar("exif")
    writer.write(item(tmp_path), said("second words"))
    assert (tmp_path / "photo.jpg").read_bytes() == first
    assert "the EXIF says something else" in writer.notes()[0]
    second = write(tmp_path, first, "second, längere words", overwrite=True)
    assert description(second) == comment(second) == "second, längere words"


def test_words_that_are_replaced_often_take_no_more_room(tmp_path: Path) -> None:
    data = write(tmp_path, KINDS["exif.jpg"], "x" * 90)
    for length in (80, 90, 5, 70):
        shorter = write(tmp_path, data, "y" * length, overwrite=True)
        assert description(shorter) == comment(shorter).rstrip("\0") == "y" * length
        assert len(shorter) == len(data)


def camera_block(order: str) -> tuple[bytes, int]:
    """EXIF with a thumbnail's directory, notes of a camera that are at a place, and a comment of others."""
    notes, settings = b"CAMERA\0" + bytes(range(200)), b"ASCII\0\0\0Steps: 20, Sampler: Euler"
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}I", 8)
    first = struct.pack(
        f"{order}HHHI4sHHIII", 2, 0x0112, 3, 1, struct.pack(f"{order}HH", 6, 0), 0x8769, 4, 1, 38, 68
    )
    inner = struct.pack(
        f"{order}HHHIIHHIII", 2, 0x927C, 7, len(notes), 100, COMMENT, 7, len(settings), 400, 0
    )
    second = struct.pack(f"{order}HHHI4sI", 1, 0x0103, 3, 1, struct.pack(f"{order}HH", 6, 0), 0)
    block = head + first + inner
    assert len(block) == 68
    return ((block + second).ljust(100, b"\0") + notes).ljust(400, b"\0") + settings, 100


@pytest.mark.parametrize("order", ["<", ">"])
def test_what_cameras_and_others_keep_there_does_not_move(tmp_path: Path, order: str) -> None:
    block, notes = camera_block(order)
    before = picture(file_format="JPEG", exif=b"Exif\0\0" + block)
    after = write(tmp_path, before)
    exif = Image.open(BytesIO(after)).getexif()
    assert description(after) == WORDS
    assert exif[0x0112] == 6
    inner = exif.get_ifd(EXIF_DIRECTORY)
    assert inner[COMMENT].endswith(b"Sampler: Euler")  # another program's settings
    assert exif.get_ifd(-1) == {0x0103: 6}  # the thumbnail's
    start = after.index(b"Exif\0\0") + 6
    assert after[start + notes : start + notes + 207] == b"CAMERA\0" + bytes(range(200))
    assert after[start + 8 : start + len(block)] == block[8:]


def test_several_pictures_in_one_file(tmp_path: Path) -> None:
    """As phones write previews and gain maps: a table says where they are."""
    others = [scene(80, 60, seed) for seed in (1, 2)]
    for exif in (b"", b"Exif\0\0" + camera_block("<")[0]):
        before = encoded(scene(96, 64), "MPO", save_all=True, append_images=others, exif=exif)
        after = write(tmp_path, before)
        assert description(after) == WORDS
        old, new = Image.open(BytesIO(before)), Image.open(BytesIO(after))
        assert new.format == "MPO"
        for frame in range(3):
            old.seek(frame)
            new.seek(frame)
            assert old.tobytes() == new.tobytes()
        first, second = new.mpinfo[0xB002][:2]  # type: ignore[attr-defined]
        growth = len(after) - len(before)
        assert first["Size"] == old.mpinfo[0xB002][0]["Size"] + growth  # type: ignore[attr-defined]
        assert after[first["Size"] :].startswith(b"\xff\xd8")
        table = after.index(b"MPF\0") + 4
        assert after[second["DataOffset"] + table :].startswith(b"\xff\xd8")


def test_times_and_backups(tmp_path: Path) -> None:
    path, before = tmp_path / "photo.jpg", KINDS["jfif.jpg"]
    path.write_bytes(before)
    os.utime(path, (1_000_000_000, 1_000_000_000))
    sidecar("exif", keep_times=True).write(item(tmp_path), said("one"))
    assert path.stat().st_mtime == 1_000_000_000
    for words in ("two", "three"):
        sidecar("exif", backup=True, overwrite=True).write(item(tmp_path), said(words))
    assert path.stat().st_mtime > 1_000_000_000
    assert description(path.read_bytes()) == "three"
    assert description((tmp_path / "photo.jpg_original").read_bytes()) == "one"  # the first stays


def png_with(name: bytes, body: bytes) -> bytes:
    plain = picture()
    chunk = struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
    return plain[:33] + chunk + plain[33:]


def jpeg_with(marker: int, body: bytes) -> bytes:
    return b"\xff\xd8\xff" + bytes([marker]) + struct.pack(">H", len(body) + 2) + body + KINDS["jfif.jpg"][2:]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (picture(file_format="GIF"), "in files of this kind"),
        (picture(file_format="AVIF"), "in files of this kind"),
        (jpeg_with(0xEB, b"JP\0\1\0\0\0\1\0\0\0\x40jumb\0\0\0\x1ejumdc2pa"), "Content Credentials"),
        (png_with(b"caBX", b"signed"), "Content Credentials"),
        (png_with(b"zTXt", b"Raw profile type exif\0\0x"), "in a form of before 2017"),
        (encoded(scene(20, 20), "TIFF", description="ImageJ=1.53"), "a microscope's program"),
        (encoded(scene(20, 20), "TIFF", tiffinfo={0xC612: b"\1\4\0\0"}), "DNG"),
    ],
)
def test_pictures_that_are_left_alone(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "photo.jpg").write_bytes(data)
    writer = sidecar("exif", overwrite=True)
    writer.write(item(tmp_path), said(WORDS))
    assert (tmp_path / "photo.jpg").read_bytes() == data
    assert words in writer.notes()[0]


JPEG = KINDS["exif.jpg"]
TIFF = KINDS["plain.tif"]
BROKEN = {
    "cut in a segment": JPEG[:30],
    "cut before the pixels": JPEG[:200],
    "no segments": b"\xff\xd8\xff\xe0\0\0" + JPEG[4:],
    "a directory outside": JPEG.replace(b"MM\0*\0\0\0\x08", b"MM\0*\xff\xff\xff\xff"),
    "a directory of 65535": JPEG.replace(b"\0\0\0\x08\0\x01", b"\0\0\0\x08\xff\xff"),
    "no EXIF": JPEG.replace(b"MM\0*", b"XX\0*"),
    "a PNG without its end": KINDS["plain.png"][:-12],
    "a PNG of its signature": KINDS["plain.png"][:8],
    "a WebP cut off": KINDS["lossy.webp"][:-30],
    "a WebP of nothing": b"RIFF\4\0\0\0WEBP",
    "a WebP of something": b"RIFF\x10\0\0\0WEBPABCD\4\0\0\0abcd",
    "a WebP of no height": KINDS["lossy.webp"][:28] + b"\0\0" + KINDS["lossy.webp"][30:],
    "a TIFF cut off": TIFF[:6],
    "a TIFF whose directory is outside": TIFF[:4] + b"\xff\xff\xff\x7f" + TIFF[8:],
    "too long": picture(file_format="JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\0\0\0\0\0\0" + bytes(65_500)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_files_that_are_broken_stay_as_they_are(tmp_path: Path, name: str) -> None:
    (tmp_path / "photo.jpg").write_bytes(BROKEN[name])
    with pytest.raises(CannotWrite, match=r"photo\.jpg is left as it is: "):
        sidecar("exif", overwrite=True).write(item(tmp_path), said(WORDS))
    assert (tmp_path / "photo.jpg").read_bytes() == BROKEN[name]


def test_no_file_makes_it_fail_in_another_way(tmp_path: Path) -> None:
    """Every byte of the head of a file with EXIF, turned over: written, left alone, or refused in words."""
    head = JPEG.index(b"\xff\xdb")
    for place in range(2, head):
        data = bytearray(JPEG)
        data[place] ^= 0xFF
        (tmp_path / "photo.jpg").write_bytes(data)
        try:
            sidecar("exif").write(item(tmp_path), said(WORDS))
        except CannotWrite:
            assert (tmp_path / "photo.jpg").read_bytes() == bytes(data)


def test_a_file_that_another_program_changes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "photo.jpg"
    path.write_bytes(JPEG)
    real = Block.with_description

    def slow(self: Block, words: str) -> Block:
        path.write_bytes(KINDS["plain.png"])
        return real(self, words)

    monkeypatch.setattr(Block, "with_description", slow)
    with pytest.raises(CannotWrite, match="was changed by another program"):
        sidecar("exif").write(item(tmp_path), said(WORDS))
    assert path.read_bytes() == KINDS["plain.png"]


def test_big_tiff_is_named() -> None:
    with pytest.raises(BadExif, match="BigTIFF"):
        Block(b"II+\0\x08\0\0\0")
