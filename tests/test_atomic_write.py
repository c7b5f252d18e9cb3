"""Files that are written whole or not at all."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from vlfit.atomic_write import write_whole
from vlfit.errors import CannotWrite


def test_a_file_is_replaced_and_stays_what_it_was(tmp_path: Path) -> None:
    path, link = tmp_path / "a.txt", tmp_path / "link.txt"
    path.write_bytes(b"before")
    path.chmod(0o640)
    link.symlink_to(path)
    write_whole(link, b"after")
    assert path.read_bytes() == b"after"
    assert path.stat().st_mode & 0o777 == 0o640
    assert link.is_symlink()
    write_whole(tmp_path / "new.txt", b"new")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.txt", "link.txt", "new.txt"]


def test_a_full_disk_leaves_what_was_there(
    full_disk: Callable[[], AbstractContextManager[None]], tmp_path: Path
) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"before")
    with full_disk(), pytest.raises(CannotWrite):
        write_whole(path, b"x" * 1000)
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_other_errors_are_the_callers(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "a.txt"):
        with pytest.raises(OSError, match=r"directory"):
            write_whole(path, b"after")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with a name")
def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(path, b"words")
        assert os.read(reader, 100) == b"words"
    finally:
        os.close(reader)
    assert path.is_fifo()
