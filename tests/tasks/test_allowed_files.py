"""Files that requests may read: those below --allow-files, and no others."""

import os
from pathlib import Path

import pytest

from tests.pictures import picture
from vlfit.errors import NotAPicture, PictureNotFound, PictureTooLarge, PrivateAddress
from vlfit.tasks import pictures
from vlfit.tasks.pictures import load_picture

PNG = picture(64, 48)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """``open`` with pictures in it, ``secret.png`` beside it."""
    (tmp_path / "secret.png").write_bytes(PNG)
    opened = tmp_path / "open"
    (opened / "deep").mkdir(parents=True)
    for name in ("a.png", "deep/b c.png"):
        (opened / name).write_bytes(PNG)
    (opened / "notes.txt").write_text("words")
    (opened / "inside.png").symlink_to("deep/b c.png")
    (opened / "outside.png").symlink_to("../secret.png")
    (opened / "up").symlink_to("..")
    (tmp_path / "open-too").mkdir()
    (tmp_path / "open-too" / "a.png").write_bytes(PNG)
    os.mkfifo(opened / "pipe.png")
    return opened


def load(url: str, folder: Path | None) -> bytes:
    return bytes(load_picture(url, allow_private=False, files=folder).data)


def test_what_is_in_the_folder(folder: Path) -> None:
    for name in ("a.png", "deep/b%20c.png", "inside.png", "deep/../a.png", "./deep//b c.png"):
        assert load(f"file://{folder}/{name}", folder) == PNG
    assert load(f"FILE://localhost{folder}/a.png", folder) == PNG


@pytest.mark.parametrize(
    "name",
    [
        *("../secret.png", "outside.png", "up/secret.png", "%2e%2e/secret.png", "deep/../../secret.png"),
        *("../open-too/a.png", "../no-such-file", "../../../../../../etc/passwd", "a.png%00"),
    ],
)
def test_what_is_not(name: str, folder: Path) -> None:
    with pytest.raises(PrivateAddress):
        load(f"file://{folder}/{name}", folder)


@pytest.mark.parametrize("url", ["file:a.png", "file://host/a.png", "file:///etc/passwd", "file:", "file://"])
def test_other_forms(url: str, folder: Path) -> None:
    with pytest.raises(PrivateAddress):
        load(url, folder)


def test_what_is_there_and_no_picture(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PictureNotFound, match=r"pipe\.png") as caught:
        load(f"file://{folder}/pipe.png", folder)
    assert caught.value.__context__ is None  # refused, not tried
    with pytest.raises(PictureNotFound):
        load(f"file://{folder}/deep", folder)
    with pytest.raises(PictureNotFound, match=r"none\.png") as caught:
        load(f"file://{folder}/none.png", folder)
    assert isinstance(caught.value.__context__, FileNotFoundError)
    with pytest.raises(NotAPicture):
        load(f"file://{folder}/notes.txt", folder)
    monkeypatch.setattr(pictures, "MAX_FILE_BYTES", 100)
    with pytest.raises(PictureTooLarge):
        load(f"file://{folder}/a.png", folder)


def test_without_a_folder_no_file_is_read(folder: Path) -> None:
    with pytest.raises(PrivateAddress):
        load(f"file://{folder}/a.png", None)
    with pytest.raises(PrivateAddress):
        load(f"{folder}/a.png", folder)  # only as a file: URL
