"""Sidecars ``.txt`` and XMP: other programs' content stays, and some files are left alone."""

import errno
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.tasks.website import PNG
from vlfit.errors import CannotWrite, UsageError
from vlfit.tasks.batch.items import FileBytes, Item, Sidecar
from vlfit.tasks.batch.sidecars import make_sidecar
from vlfit.tasks.batch.sidecars.writer import _part_path as part_path
from vlfit.tasks.batch.sidecars.writer import read_original, replace_file, sidecar_text

RDF = "{http://www.w3.org/1999/02/22-rdf-syntax-ns#}"
DC = "{http://purl.org/dc/elements/1.1/}"
ALL_LETTERS = "A <b>girl</b> & \"cat\" '1' ]]> 🐈 図書館\nsecond line"


def item(folder: Path, name: str = "photo.jpg") -> Item:
    path = folder / name
    if not path.exists():
        path.write_bytes(PNG)
    return Item(name, FileBytes(str(path)).read, path)


def said(text: str) -> dict[str, Any]:
    return {"key": "photo.jpg", "text": text}


def description(data: bytes) -> str | None:
    """As any reader of XMP that knows XML."""
    tree = ElementTree.fromstring(data.decode("utf-8-sig").strip())
    found = tree.findall(f".//{RDF}Description/{DC}description/{RDF}Alt/{RDF}li")
    default = [li for li in found if li.get("{http://www.w3.org/XML/1998/namespace}lang") == "x-default"]
    assert len(default) <= 1
    return default[0].text if default else None


def test_which_words() -> None:
    assert sidecar_text({"text": "{...}", "summary": " a desk "}) == "a desk"
    cups = [{"label": "cup"}, {"label": "pen"}, {"label": "cup"}]
    assert sidecar_text({"text": "[...]", "objects": cups}) == "cup, pen"
    assert sidecar_text({"text": "a\x00b\x1b[0m\ud800c\ufffe\r\nd"}) == "ab[0mc\nd"


def test_a_line_of_text(tmp_path: Path) -> None:
    writer, photo = make_sidecar("txt"), item(tmp_path)
    for _ in range(2):
        writer.write(photo, said(" two\nlines "))
    assert (tmp_path / "photo.txt").read_bytes() == b"two lines\n"
    writer.write(photo, said("other words"))
    writer.write(item(tmp_path, "empty.jpg"), said(" "))
    assert (tmp_path / "photo.txt").read_bytes() == b"two lines\n"
    kept, empty = writer.notes()
    assert kept.startswith("1 ")
    assert "--overwrite" in kept
    assert str(photo.path) in kept
    assert f"{tmp_path}/empty.jpg" in empty
    make_sidecar("txt", overwrite=True).write(photo, said("other words"))
    assert (tmp_path / "photo.txt").read_bytes() == b"other words\n"
    assert sorted(os.listdir(tmp_path)) == ["empty.jpg", "photo.jpg", "photo.txt"]


def test_parts_of_a_killed_run_are_removed(tmp_path: Path) -> None:
    """Those of this computer's dead processes only, in every folder with pictures of the run."""
    (tmp_path / "inner").mkdir()
    killed = """
import os, signal, sys
from pathlib import Path
from vlfit.tasks.batch.sidecars import writer
writer.os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
writer.write_new(Path(sys.argv[1]), b"half")
"""
    for folder in (tmp_path, tmp_path / "inner"):
        subprocess.run([sys.executable, "-c", killed, str(folder / "photo.txt")], check=False)
        [left] = folder.glob(".*.part")
    dead = left.name.split("-")[-1]
    mark = left.name.removeprefix(".photo.txt.").removesuffix(dead)
    kept = [f".x.txt.{mark}{os.getpid()}.part", f".x.txt.vlfit-other-{dead}", f"x.{mark}{dead}", ".x.part"]
    kept += [f".x.{mark}{10**30}.part", f".x.{mark}0.part", f".x.{dead}", ".notes.part", "photo.part"]
    for name in kept:
        (tmp_path / name).write_bytes(b"somebody's")
    (tmp_path / f".folder.{mark}{dead}").mkdir()
    (tmp_path / f".link.{mark}{dead}").symlink_to("x")
    kept += [f".folder.{mark}{dead}", f".link.{mark}{dead}"]
    writer = make_sidecar("txt")
    writer.write(item(tmp_path), said("words"))
    writer.write(item(tmp_path / "inner"), said("words"))
    assert sorted(os.listdir(tmp_path)) == sorted([*kept, "inner", "photo.jpg", "photo.txt"])
    assert sorted(os.listdir(tmp_path / "inner")) == ["photo.jpg", "photo.txt"]


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_parts_of_a_zombie_are_removed(tmp_path: Path) -> None:
    """A killed run stays a process until its parent asks, which the init of many containers never does."""
    with subprocess.Popen([sys.executable, "-c", "pass"]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        name = part_path(tmp_path / "photo.txt").name.replace(f"-{os.getpid()}.part", f"-{ended.pid}.part")
        (tmp_path / name).write_bytes(b"half")
        make_sidecar("txt").write(item(tmp_path), said("words"))
        assert sorted(os.listdir(tmp_path)) == ["photo.jpg", "photo.txt"]


def test_a_long_name_has_a_part_too(tmp_path: Path) -> None:
    name = "図" * 83
    make_sidecar("txt").write(item(tmp_path, f"{name}.jpg"), said("words"))
    assert (tmp_path / f"{name}.txt").read_text() == "words\n"


def test_two_pictures_with_one_text(tmp_path: Path) -> None:
    """They must not replace each other's words in turn, run after run."""
    writer = make_sidecar("txt", overwrite=True)
    writer.write(item(tmp_path, "photo.jpg"), said("first"))
    item(tmp_path, "photo.PNG")
    writer.write(item(tmp_path, "photo.PNG"), said("second"))
    assert (tmp_path / "photo.txt").read_text() == "first\n"
    [note] = writer.notes()
    assert "photo.PNG" in note


def test_pictures_that_are_no_files_and_kinds_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"s\.tar#1\.jpg"):
        make_sidecar("txt").write(Item("s.tar#1.jpg", FileBytes(str(tmp_path)).read), said("words"))
    with pytest.raises(UsageError, match=r"'iptc'\n.*: txt, xmp, xmp-stem, exif"):
        make_sidecar("iptc")


@pytest.mark.parametrize("kind", ["txt", "xmp"])
def test_files_that_are_not_ours_to_write(tmp_path: Path, kind: str) -> None:
    """Root may write them all, and must not."""
    names = {"txt": "photo.txt", "xmp": "photo.jpg.xmp"}
    photo = item(tmp_path)
    place = tmp_path / names[kind]
    make_sidecar(kind).write(photo, said("old"))
    before = place.read_bytes()
    place.chmod(0o444)
    with pytest.raises(CannotWrite, match=re.escape(place.name)):
        make_sidecar(kind, overwrite=True).write(photo, said("new"))
    assert place.read_bytes() == before
    place.unlink()
    place.mkdir()
    with pytest.raises(CannotWrite, match=place.name) as caught:
        make_sidecar(kind, overwrite=True).write(photo, said("new"))
    assert caught.value.__context__ is None  # refused, not tried
    assert all(not name.endswith(".part") for name in os.listdir(tmp_path))


def test_links_modes_and_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    real = item(tmp_path / "real")
    assert real.path is not None
    (tmp_path / "photo.jpg").symlink_to(real.path)
    target = tmp_path / "real" / "words.txt"
    target.write_text("old")
    target.chmod(0o640)
    (tmp_path / "photo.txt").symlink_to(target)
    make_sidecar("txt", overwrite=True).write(item(tmp_path), said("new"))
    assert (tmp_path / "photo.txt").is_symlink()
    assert target.read_text() == "new\n"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CannotWrite, match=r"words\.txt") as caught:
        make_sidecar("txt", overwrite=True).write(item(tmp_path), said("newer"))
    assert isinstance(caught.value.__context__, OSError)
    assert caught.value.__context__.errno == errno.ENOSPC
    assert target.read_text() == "new\n"
    assert sorted(os.listdir(tmp_path / "real")) == ["photo.jpg", "words.txt"]


def test_a_file_that_another_program_changes_meanwhile(tmp_path: Path) -> None:
    place = tmp_path / "photo.txt"
    place.write_text("old")
    original = read_original(place)
    assert original is not None
    place.write_text("of another program")
    with pytest.raises(CannotWrite, match=r"photo\.txt"):
        replace_file(original, b"new")
    assert place.read_text() == "of another program"
    assert os.listdir(tmp_path) == ["photo.txt"]


# --- XMP ---------------------------------------------------------------------------------------------------


def test_a_new_xmp_sidecar(tmp_path: Path) -> None:
    for kind, name in (("xmp", "photo.jpg.xmp"), ("xmp-stem", "photo.xmp")):
        for _ in range(2):
            make_sidecar(kind).write(item(tmp_path), said(ALL_LETTERS))
        assert description((tmp_path / name).read_bytes()) == ALL_LETTERS
    long = "word " * 50_000
    make_sidecar("xmp", overwrite=True).write(item(tmp_path), said(long))
    assert description((tmp_path / "photo.jpg.xmp").read_bytes()) == long.strip()


# As darktable 4 and digiKam 8 write them, shortened.
DARKTABLE = """<?xml version="1.0" encoding="UTF-8"?>
<x:xmpmeta xmlns:x="adobe:ns:meta/" x:xmptk="XMP Core 4.4.0-Exiv2">
 <!-- a remark > here -->
 <r:RDF xmlns:r="http://www.w3.org/1999/02/22-rdf-syntax-ns#">
  <r:Description r:about="" xmlns:darktable='http://darktable.sf.net/' darktable:note="a > b&#10;c"
    xmlns:dc="http://purl.org/dc/elements/1.1/" darktable:params="gz03eJy">{inner}
  </r:Description>
 </r:RDF>
</x:xmpmeta>
"""
HISTORY = '\n   <darktable:history><r:Seq><r:li darktable:num="0"/></r:Seq></darktable:history>'
TITLE = '\n   <dc:title><r:Alt><r:li xml:lang="x-default">Title</r:li></r:Alt></dc:title>'
DEFAULT = '<r:li xml:lang="x-default">old</r:li>'
GERMAN = '<r:li xml:lang="de-DE">Katze</r:li>'


@pytest.mark.parametrize(
    ("inner", "kept"),
    [
        (HISTORY + TITLE, [HISTORY, TITLE]),
        (TITLE + f"<dc:description><r:Alt>{DEFAULT}{GERMAN}</r:Alt></dc:description>", [TITLE, GERMAN]),
        (f"{HISTORY}<dc:description><r:Alt>{GERMAN}</r:Alt></dc:description>", [HISTORY, GERMAN]),
        ('<dc:description><r:Alt><r:li xml:lang="x-default"/></r:Alt></dc:description>', []),
        ("<dc:description><r:Alt/></dc:description>" + HISTORY, [HISTORY]),
        ("<dc:description>old</dc:description>" + HISTORY, [HISTORY]),
        ("<dc:description/>", []),
    ],
    ids=["none", "two languages", "another language", "empty", "empty choice", "no choice", "empty element"],
)
def test_what_other_programs_wrote_stays(tmp_path: Path, inner: str, kept: list[str]) -> None:
    place = tmp_path / "photo.jpg.xmp"
    before = DARKTABLE.replace("{inner}", inner)
    place.write_text(before)
    writer = make_sidecar("xmp", overwrite=True)
    for words in (ALL_LETTERS, "shorter"):
        writer.write(item(tmp_path), said(words))
        after = place.read_text()
        assert description(after.encode()) == words
    assert writer.notes() == []
    own = "<dc:description.*?</dc:description>|<dc:description/>"
    assert re.sub(own, "", after) == re.sub(own, "", before)  # all else, byte for byte
    assert all(part in after for part in kept)
    assert after.count("<dc:description") == 1


def test_descriptions_that_are_there_stay(tmp_path: Path) -> None:
    place = tmp_path / "photo.jpg.xmp"
    place.write_text(
        DARKTABLE.replace("{inner}", f"<dc:description><r:Alt>{GERMAN}</r:Alt></dc:description>")
    )
    before = place.read_bytes()
    writer = make_sidecar("xmp")
    writer.write(item(tmp_path), said("a cat"))
    assert place.read_bytes() == before
    [note] = writer.notes()
    assert "--overwrite" in note


@pytest.mark.parametrize("empty", ["<rdf:Description rdf:about='x/>y'/>", "", None])
def test_packets_that_say_nothing(tmp_path: Path, empty: str | None) -> None:
    rdf = "<rdf:RDF xmlns:rdf='http://www.w3.org/1999/02/22-rdf-syntax-ns#'"
    packet = f"{rdf}/>" if empty is None else f"{rdf}>{empty}</rdf:RDF>"
    (tmp_path / "photo.jpg.xmp").write_text(f"\ufeff{packet}", "utf-8")
    make_sidecar("xmp").write(item(tmp_path), said("a cat"))
    assert b"a cat</rdf:li>" in (tmp_path / "photo.jpg.xmp").read_bytes()
    make_sidecar("xmp").write(item(tmp_path), said("a cat"))  # read back, and the same


BOMB = (
    '<!DOCTYPE x [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">]>'
    "<rdf:RDF xmlns:rdf='http://www.w3.org/1999/02/22-rdf-syntax-ns#'>&b;</rdf:RDF>"
)


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (BOMB.encode(), "DOCTYPE"),
        (b"<!DOCTYPE x SYSTEM 'http://example.org/x.dtd'><x/>", "DOCTYPE"),
        (b"<html/>", "not XMP"),
        (b"<rdf:RDF", "XML"),
        (b"", "XML"),
        (DARKTABLE.replace("{inner}", "").replace("UTF-8", "ISO-8859-1").encode(), "ISO-8859-1"),
        (DARKTABLE.replace("{inner}", "<a>" * 300 + "</a>" * 300).encode(), "nesting"),
        (
            DARKTABLE.replace("{inner}", "").replace("darktable:note", "dc:description").encode(),
            "attribute",
        ),
        (DARKTABLE.replace("{inner}", "<dc:description/><dc:description/>").encode(), "two descriptions"),
        (
            DARKTABLE.replace("{inner}", "").replace(' encoding="UTF-8"', "").encode("utf-16"),
            "UTF-16",
        ),
    ],
)
def test_sidecars_that_are_left_as_they_are(tmp_path: Path, data: bytes, named: str) -> None:
    place = tmp_path / "photo.jpg.xmp"
    place.write_bytes(data)
    writer: Sidecar = make_sidecar("xmp", overwrite=True)
    with pytest.raises(CannotWrite, match=named):
        writer.write(item(tmp_path), said("a cat"))
    assert place.read_bytes() == data
