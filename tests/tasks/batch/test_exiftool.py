"""How exiftool is run, over a stand-in: what it is told; one that is not there, hangs or dies."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.pictures import picture
from tests.tasks.batch.test_sidecars import item, said
from vlfit.errors import CannotWrite, UsageError
from vlfit.tasks.batch.sidecars import exif as exiftool
from vlfit.tasks.batch.sidecars import make_sidecar
from vlfit.tasks.batch.sidecars.exif import ExifSidecar

JPEG = picture(file_format="JPEG")
# Answers each command with the next of ANSWERS; one that is a number is slept, "end" ends it.
PROGRAM = """\
#!{python} -ISu
import json, os, pathlib, sys, time
folder = pathlib.Path({folder!r})
log = (folder / "log").open("a")
def answer(words):
    print(json.dumps([os.getpid(), *words]), file=log, flush=True)
    answers = json.loads((folder / "answers").read_text())
    (folder / "answers").write_text(json.dumps(answers[1:]))
    if isinstance(answers[0], int):
        time.sleep(answers[0])
    elif answers[0] == "end":
        sys.exit("out of order")
    else:
        print(answers[0])
assert sys.argv[1] == "-config" and sys.argv[2].endswith("ends_with_vlfit.pl")
if "-stay_open" not in sys.argv:
    answer(sys.argv[3:])
    sys.exit()
words = []
for line in sys.stdin.buffer:
    words.append(os.fsdecode(line.rstrip(b"\\n")))
    if words[-1].startswith("-execute"):
        number = words.pop().removeprefix("-execute")
        answer(words)
        words = []
        print("{{ready" + number + "}}")
"""
UPDATED = "    1 image files updated"

Answers = Callable[..., None]


def found(**facts: str) -> str:
    return json.dumps([{"SourceFile": "photo.jpg", "FileType": "JPEG", **facts}])


@pytest.fixture
def stand_in(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a stand-in that is first in PATH."""
    folder = tmp_path_factory.mktemp("program")
    (folder / "exiftool").write_text(PROGRAM.format(python=sys.executable, folder=str(folder)))
    (folder / "exiftool").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    return folder


@pytest.fixture
def answers(stand_in: Path, tmp_path: Path) -> Answers:
    (tmp_path / "photo.jpg").write_bytes(JPEG)

    def put(*answers: str | int) -> None:
        (stand_in / "answers").write_text(json.dumps(answers))

    return put


def asked(stand_in: Path) -> list[Any]:
    return [json.loads(line) for line in (stand_in / "log").read_text().splitlines()]


def test_one_program_reads_and_writes(tmp_path: Path, stand_in: Path, answers: Answers) -> None:
    answers(found(), UPDATED, found(ImageDescription="old", UserComment="Steps: 20"), UPDATED)
    writer = make_sidecar("exif", overwrite=True)
    writer.write(item(tmp_path), said("a <b>\ncat"))
    writer.write(item(tmp_path), said("new"))
    path = str(tmp_path / "photo.jpg")
    (one, *first), (two, *second), (_, *third), (_, *fourth) = asked(stand_in)
    assert one == two
    assert first == third == ["-j", "-FileType", "-IFD0:ImageDescription", "-ExifIFD:UserComment", path]
    text = "a &lt;b&gt;&#10;cat"
    values = [f"-IFD0:ImageDescription={text}", f"-ExifIFD:UserComment={text}"]
    assert second == ["-E", "-overwrite_original", *values, path]
    assert fourth == ["-E", "-overwrite_original", "-IFD0:ImageDescription=new", path]


def test_backups_and_times_are_told(tmp_path: Path, stand_in: Path, answers: Answers) -> None:
    answers(found(), UPDATED)
    make_sidecar("exif", backup=True, keep_times=True).write(item(tmp_path), said("new"))
    assert asked(stand_in)[1][1:3] == ["-E", "-P"]


def test_a_name_of_two_lines_is_no_second_argument(tmp_path: Path, stand_in: Path, answers: Answers) -> None:
    answers(found(), UPDATED)
    name = "a\n-all=.jpg"
    (tmp_path / name).write_bytes(JPEG)
    make_sidecar("exif").write(item(tmp_path, name), said("new"))
    assert [words[-1] for words in asked(stand_in)] == [str(tmp_path / name)] * 2


def test_what_is_there_or_to_stay_is_not_written(tmp_path: Path, stand_in: Path, answers: Answers) -> None:
    answers(found(ImageDescription="same"), found(ImageDescription="others"))
    writer = make_sidecar("exif")
    for _ in range(2):
        writer.write(item(tmp_path), said("same"))
    assert len(asked(stand_in)) == 2
    [note] = writer.notes()
    assert "--overwrite" in note


def test_files_that_are_not_ours_to_write(tmp_path: Path, stand_in: Path, answers: Answers) -> None:
    """Root may write them all, and must not."""
    place = tmp_path / "photo.jpg"
    place.chmod(0o444)
    with pytest.raises(CannotWrite, match=r"photo\.jpg"):
        make_sidecar("exif").write(item(tmp_path), said("new"))
    place.unlink()
    place.mkdir()
    with pytest.raises(CannotWrite, match=r"photo\.jpg") as caught:
        make_sidecar("exif").write(item(tmp_path), said("new"))
    assert caught.value.__context__ is None  # refused, not tried
    assert not (stand_in / "log").exists()


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        (["Error: File format error - /a/photo.jpg"], "exiftool says: File format error"),
        (
            [found(), "Warning: x\nError: No space - /a/b\n    0 image files updated"],
            "exiftool says: No space",
        ),
        ([""], "exiftool says: nothing"),
        (["end"], "exiftool ended: out of order"),
        ([found(), "end"], "exiftool ended: out of order"),
    ],
)
def test_a_failure_is_one_pictures(tmp_path: Path, answers: Answers, told: list[str], reason: str) -> None:
    answers(*told, found(), UPDATED)
    writer = make_sidecar("exif")
    with pytest.raises(CannotWrite) as raised:
        writer.write(item(tmp_path), said("new"))
    assert raised.value.message.startswith(f"{tmp_path}/photo.jpg ")
    assert raised.value.message.endswith(reason)
    assert "--sidecar xmp" in raised.value.hint
    writer.write(item(tmp_path), said("new"))  # the next one is written


@pytest.mark.parametrize("name", ["photo.jpg", "pho\nto.jpg"])
def test_one_that_hangs_is_ended(
    tmp_path: Path, stand_in: Path, answers: Answers, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exiftool, "_STOP_TIMEOUT_S", 0.2)
    answers(found(), 60, found(), UPDATED)
    (tmp_path / name).write_bytes(JPEG)
    writer = ExifSidecar(False)
    writer._exiftool = exiftool.Exiftool(0.5)
    with pytest.raises(CannotWrite, match=r"\b0\.5 s\b"):
        writer.write(item(tmp_path, name), said("x" * 200_000 if name == "photo.jpg" else "x"))
    with pytest.raises(ProcessLookupError):
        os.kill(asked(stand_in)[1][0], 0)
    writer.write(item(tmp_path, name), said("new"))


def test_it_ends_with_its_writer(tmp_path: Path, stand_in: Path, answers: Answers) -> None:
    answers(found(ImageDescription="same"))
    writer = make_sidecar("exif")
    writer.write(item(tmp_path), said("same"))
    del writer
    with pytest.raises(ProcessLookupError):
        os.kill(asked(stand_in)[0][0], 0)


def test_without_it_the_command_ends_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"exiftool.*PATH") as raised:
        make_sidecar("exif")
    assert "apt install libimage-exiftool-perl" in raised.value.hint
    assert "--sidecar xmp and --sidecar txt" in raised.value.hint


@pytest.mark.skipif(shutil.which("exiftool") is None, reason="exiftool is not installed")
def test_the_real_one_ends_when_vlfit_is_killed(tmp_path: Path) -> None:
    """By itself it would wait for commands for ever."""
    code = (
        "import time; from vlfit.tasks.batch.sidecars.exif import Exiftool; e = Exiftool();"
        "e.run([b'-ver']); print(e._process.pid, flush=True); time.sleep(60)"
    )
    ours = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert ours.stdout is not None
    with ours, ours.stdout:
        other = int(ours.stdout.readline())
        ours.send_signal(signal.SIGKILL)
    end = time.monotonic() + 15
    while Path(f"/proc/{other}").exists() and "Z" not in Path(f"/proc/{other}/stat").read_text().split()[2]:
        assert time.monotonic() < end
        time.sleep(0.05)
