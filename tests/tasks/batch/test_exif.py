"""Words in pictures, by the real exiftool: no pixel changes, and what others wrote stays."""

import os
import shutil
import stat
import struct
import zlib
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

from tests.pictures import encoded, half_transparent, picture, rotated_by_exif, scene
from tests.tasks.batch.test_sidecars import item, said
from vlfit.errors import CannotWrite
from vlfit.tasks.batch.sidecars import make_sidecar

pytestmark = pytest.mark.skipif(shutil.which("exiftool") is None, reason="exiftool is not installed")

WORDS = 'A girl & a "cat" 🐈 for $5 @ C:\\new <b> &amp; in the 図書館\nsecond line'
COMMENT, EXIF_DIRECTORY, DESCRIPTION = 0x9286, 0x8769, 0x010E

KINDS = {
    "jfif.jpg": picture(file_format="JPEG"),
    "exif.jpg": rotated_by_exif(6),
    "progressive.jpg": picture(file_format="JPEG", progressive=True, icc_profile=b"profile" * 9000),
    "plain.png": picture(),
    "exif.png": encoded(scene(40, 30), exif=Image.open(BytesIO(rotated_by_exif(6))).getexif()),
    "lossy.webp": picture(file_format="WEBP"),
    "alpha.webp": encoded(half_transparent(), "WEBP", quality=80),
    "exif.webp": picture(
        file_format="WEBP", exif=Image.open(BytesIO(rotated_by_exif(6))).getexif(), xmp=b"<x/>"
    ),
    "plain.tif": picture(file_format="TIFF"),
    "packed.tif": encoded(scene(64, 48), "TIFF", compression="tiff_lzw", description=" ", software="ours"),
}
JPEG, PNG = KINDS["exif.jpg"], KINDS["plain.png"]


def write(folder: Path, data: bytes, words: str = WORDS, name: str = "photo.jpg", **options: bool) -> bytes:
    """Twice, as after a kill: the second time changes nothing."""
    (folder / name).write_bytes(data)
    writer = make_sidecar("exif", **options)
    for _ in range(2):
        writer.write(item(folder, name), said(words))
    assert writer.notes() == []
    assert os.listdir(folder) == [name]
    return (folder / name).read_bytes()


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
    assert new.getexif().get(0x0112, 1) == old.getexif().get(0x0112, 1)
    for field in ("icc_profile", "xmp"):
        assert old.info.get(field) == new.info.get(field)


@pytest.mark.parametrize("words", ["7", "007", "1e3", "True", "-x=1", "= two", "#[CSTR]a\\n", "x" * 20_000])
def test_words_that_look_like_something_else(tmp_path: Path, words: str) -> None:
    assert description(write(tmp_path, JPEG, words)) == words


def test_a_description_that_is_there_stays(tmp_path: Path) -> None:
    first = write(tmp_path, KINDS["jfif.jpg"], "first words")
    writer = make_sidecar("exif")
    writer.write(item(tmp_path), said("second words"))
    assert (tmp_path / "photo.jpg").read_bytes() == first
    [note] = writer.notes()
    assert "--overwrite" in note
    second = write(tmp_path, first, "second, längere words", overwrite=True)
    assert description(second) == comment(second) == "second, längere words"


def test_settings_of_others_in_the_comment_stay(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif.get_ifd(EXIF_DIRECTORY)[COMMENT] = b"ASCII\0\0\0Steps: 20, Sampler: Euler"
    after = write(tmp_path, picture(file_format="JPEG", exif=exif))
    assert (description(after), comment(after)) == (WORDS, "Steps: 20, Sampler: Euler")


def test_several_pictures_in_one_file(tmp_path: Path) -> None:
    """As phones write previews and gain maps: a table says where they are."""
    others = [scene(80, 60, seed) for seed in (1, 2)]
    before = encoded(scene(96, 64), "MPO", save_all=True, append_images=others)
    after = write(tmp_path, before)
    assert description(after) == WORDS
    old, new = Image.open(BytesIO(before)), Image.open(BytesIO(after))
    for frame in range(3):
        old.seek(frame)
        new.seek(frame)
        assert old.tobytes() == new.tobytes()


def test_times_modes_and_backups(tmp_path: Path) -> None:
    path = tmp_path / "photo.jpg"
    path.write_bytes(KINDS["jfif.jpg"])
    path.chmod(0o640)
    os.utime(path, (1_000_000_000, 1_000_000_000))
    make_sidecar("exif", keep_times=True).write(item(tmp_path), said("one"))
    assert path.stat().st_mtime == 1_000_000_000
    for words in ("two", "three"):
        make_sidecar("exif", backup=True, overwrite=True).write(item(tmp_path), said(words))
    assert path.stat().st_mtime > 1_000_000_000
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert description(path.read_bytes()) == "three"
    assert description((tmp_path / "photo.jpg_original").read_bytes()) == "one"  # the first stays


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real.jpg").write_bytes(JPEG)
    (tmp_path / "photo.jpg").symlink_to("real.jpg")
    make_sidecar("exif").write(item(tmp_path), said(WORDS))
    assert (tmp_path / "photo.jpg").is_symlink()
    assert description((tmp_path / "real.jpg").read_bytes()) == WORDS


@pytest.mark.parametrize(
    "name",
    [
        "-all=.jpg",
        "--.jpg",
        " a $x @b.jpg",
        "#x.jpg",
        "a\n-all=\n$b.jpg",
        "a\r.jpg",
        "%d%f.jpg",
        b"\xff\xe9.jpg",
    ],
)
def test_names_that_are_no_options(
    tmp_path: Path, name: str | bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = os.fsdecode(name)
    Path(name).write_bytes(JPEG)
    assert not Path(name).is_absolute()
    make_sidecar("exif").write(item(Path(), name), said(WORDS))
    assert os.listdir() == [name]
    assert description(Path(name).read_bytes()) == WORDS


C2PA = b"jumdc2pa\x00\x11\x00\x10\x80\x00\x00\xaa\x00\x38\x9b\x71\x03c2pa\0"


def png_with(name: bytes, body: bytes) -> bytes:
    chunk = struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
    return PNG[:33] + chunk + PNG[33:]


def jpeg_with(marker: int, body: bytes) -> bytes:
    return b"\xff\xd8\xff" + bytes([marker]) + struct.pack(">H", len(body) + 2) + body + KINDS["jfif.jpg"][2:]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (picture(file_format="GIF"), "--sidecar xmp"),
        (picture(file_format="AVIF"), "--sidecar xmp"),
        (jpeg_with(0xEB, b"JP\0\1\0\0\0\1\0\0\0\x40jumb\0\0\0\x1e" + C2PA), "Content Credentials"),
        (png_with(b"caBX", b"\0\0\0\x40jumb\0\0\0\x1e" + C2PA), "Content Credentials"),
        (encoded(scene(20, 20), "TIFF", description="ImageJ=1.53"), "microscope"),
        (encoded(scene(20, 20), "TIFF", tiffinfo={0xC612: b"\1\4\0\0"}), "DNG"),
    ],
)
def test_pictures_that_are_left_alone(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "photo.tif").write_bytes(data)
    writer = make_sidecar("exif", overwrite=True)
    writer.write(item(tmp_path, "photo.tif"), said(WORDS))
    assert (tmp_path / "photo.tif").read_bytes() == data
    assert words in writer.notes()[0]


BROKEN = {
    "cut in a segment.jpg": JPEG[:30],
    "cut before the pixels.jpg": JPEG[:200],
    "no segments.jpg": b"\xff\xd8\xff\xe0\0\0" + JPEG[4:],
    "a directory outside.jpg": JPEG.replace(b"MM\0*\0\0\0\x08", b"MM\0*\xff\xff\xff\xff"),
    "no end.png": PNG[:-12],
    "cut off.webp": KINDS["lossy.webp"][:-30],
    "cut off.tif": KINDS["plain.tif"][:6],
    "a PNG by another name.jpg": PNG,
}


@pytest.mark.parametrize("name", BROKEN)
def test_files_that_exiftool_refuses_stay_as_they_are(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(BROKEN[name])
    with pytest.raises(CannotWrite, match=r"exiftool says: [^/]+\n--sidecar xmp"):
        make_sidecar("exif", overwrite=True).write(item(tmp_path, name), said(WORDS))
    assert (tmp_path / name).read_bytes() == BROKEN[name]
    assert os.listdir(tmp_path) == [name]
