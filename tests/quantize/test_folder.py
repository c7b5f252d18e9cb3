"""The folder of a converted checkpoint appears complete or not at all."""

import hashlib
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.checkpoint.edit import copy_of
from tests.tiny_pooled import NO, YES, make_reranker
from vlfit.checkpoint.pooling_files import read_pooling
from vlfit.checkpoint.source import Checkpoint, open_checkpoint
from vlfit.errors import UsageError, VlfitError
from vlfit.quantize.conversion import convert
from vlfit.units import format_bytes

Tiny = Callable[[str], Path]


def fingerprint(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


# Where it goes


def test_existing_checkpoint_needs_force(plain: Checkpoint, out: Path) -> None:
    convert(plain, "fp8", out)
    before = fingerprint(out)
    with pytest.raises(UsageError, match=re.escape(str(out))) as caught:
        convert(plain, "int4", out)
    assert "--force" in caught.value.hint
    assert fingerprint(out) == before
    convert(plain, "int4", out, replace=True)
    assert open_checkpoint(out).weights_format == "int4"
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_force_deletes_checkpoints_only(plain: Checkpoint, out: Path) -> None:
    out.mkdir()
    (out / "letters.txt").write_text("dear")
    with pytest.raises(UsageError, match=r"config\.json"):
        convert(plain, "fp8", out, replace=True)
    assert (out / "letters.txt").read_text() == "dear"


def test_empty_folder(plain: Checkpoint, out: Path) -> None:
    out.mkdir()
    convert(plain, "fp8", out)
    assert open_checkpoint(out).weights_format == "fp8"


@pytest.mark.parametrize("place", [".", "..", "inside"])
def test_target_inside_source(tiny: Tiny, tmp_path: Path, place: str) -> None:
    source = copy_of(tiny("tied"), tmp_path / "models" / "source")
    before = fingerprint(source)
    with pytest.raises(UsageError, match=re.escape(str(source))):
        convert(open_checkpoint(source), "fp8", source / place, replace=True)
    assert fingerprint(source) == before


# What goes wrong on the way


def failing(error: BaseException) -> Callable[[int, int], None]:
    def progress(done: int, total: int) -> None:
        if done > total / 2:
            raise error

    return progress


def test_torch_threads_are_restored(plain: Checkpoint, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(KeyboardInterrupt):
            convert(plain, "int4", out, progress=failing(KeyboardInterrupt()))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("replace", [False, True])
def test_interrupted_conversion_leaves_nothing(plain: Checkpoint, out: Path, replace: bool) -> None:
    before = {}
    if replace:
        convert(plain, "fp8", out)
        before = fingerprint(out)
    with pytest.raises(KeyboardInterrupt):
        convert(plain, "int4", out, replace=replace, progress=failing(KeyboardInterrupt()))
    assert [path.name for path in out.parent.iterdir()] == (["out"] if replace else [])
    assert not replace or fingerprint(out) == before


KILLED = """
import os, signal, sys
from pathlib import Path
from vlfit.checkpoint.source import open_checkpoint
from vlfit.quantize.conversion import convert
def progress(done, total):
    if done == total:
        os.kill(os.getpid(), signal.SIGKILL)
convert(open_checkpoint(sys.argv[1]), "int4", Path(sys.argv[2]), progress=progress)
"""


def test_killed_conversion_leaves_no_checkpoint(plain: Checkpoint, out: Path) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(plain.folder), str(out)], check=False, timeout=100
    )
    assert killed.returncode == -signal.SIGKILL
    (left,) = out.parent.iterdir()
    assert left.name.endswith(".incomplete")
    assert not (left / "config.json").exists()
    # In a container the next one may have the same number; elsewhere it has not.
    (out.parent / f".out.{os.getpid()}.incomplete").mkdir()
    convert(plain, "int4", out)
    assert [path.name for path in out.parent.iterdir()] == ["out"]  # and the next one cleans up


def test_failed_replacement_restores_the_old_checkpoint(
    plain: Checkpoint, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(plain, "fp8", out)
    before = fingerprint(out)
    rename = Path.rename

    def refusing(path: Path, target: Path) -> Path:
        if path.name.endswith(".incomplete"):
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refusing)
    with pytest.raises(KeyboardInterrupt):
        convert(plain, "int4", out, replace=True)
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert fingerprint(out) == before


def test_old_checkpoint_is_kept_while_it_is_the_only_one(plain: Checkpoint, out: Path) -> None:
    """As after a power cut between two renames; process 2**22 + 1 cannot be running."""
    old = out.parent / f".out.{2**22 + 1}.old"
    old.mkdir()
    convert(plain, "int4", out)
    assert old.is_dir()
    convert(plain, "fp8", out, replace=True)
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_other_conversions_are_left_alone(plain: Checkpoint, out: Path) -> None:
    others = [
        out.parent / f".out.{os.getppid()}.incomplete",  # a process that runs
        out.parent / f".elsewhere.{2**22 + 1}.incomplete",  # another target
        out.parent / ".out.notes",
    ]
    for other in others:
        other.mkdir()
    convert(plain, "int4", out)
    assert all(other.is_dir() for other in others)


def test_full_disk_is_refused_before_writing(
    plain: Checkpoint, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = type(shutil.disk_usage(out.parent))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: disk(10**9, 10**9, 5000))
    with pytest.raises(VlfitError, match=r"4\.9 KiB") as caught:
        convert(plain, "int4", out)
    assert "--out" in caught.value.hint
    assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize("shard_bytes", [2**32, 300_000])
def test_disk_space_is_computed_exactly(
    plain: Checkpoint, out: Path, monkeypatch: pytest.MonkeyPatch, shard_bytes: int
) -> None:
    asked = []
    monkeypatch.setattr("vlfit.quantize.conversion.check_disk_space", lambda _, needed: asked.append(needed))
    convert(plain, "int4", out, shard_bytes=shard_bytes)
    card = (out / "README.md").stat().st_size
    assert asked == [sum(path.stat().st_size for path in out.iterdir()) - card]
    disk = type(shutil.disk_usage(out.parent))
    monkeypatch.undo()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: disk(10**9, 10**9, asked[0] + 2**18))
    convert(plain, "int4", out.parent / "fits", shard_bytes=shard_bytes)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: disk(10**9, 10**9, asked[0] + 2**18 - 1))
    with pytest.raises(VlfitError, match=rf"{re.escape(format_bytes(asked[0]))}.* 256\.0 KiB"):
        convert(plain, "int4", out.parent / "does-not", shard_bytes=shard_bytes)


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Writing past ``size`` bytes of a file fails within the block. No bytecode is written, and cut off."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    wrote, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        sys.dont_write_bytecode = wrote


def test_failed_write_leaves_nothing(plain: Checkpoint, out: Path) -> None:
    with (
        file_size_limit(300_000),
        pytest.raises(VlfitError, match=r"out: File too large") as caught,
    ):
        convert(plain, "int4", out)
    assert "--shard-mib" in caught.value.hint
    assert "ulimit" in caught.value.hint
    assert list(out.parent.iterdir()) == []


def test_folder_that_cannot_be_created(plain: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(VlfitError, match=r"/file/out") as caught:
        convert(plain, "int4", tmp_path / "file" / "out")
    assert "--out" in caught.value.hint


def test_what_a_model_is_made_for_is_copied(tiny: Tiny, tmp_path: Path) -> None:
    source = open_checkpoint(make_reranker(tiny("tied"), tmp_path / "source"))
    convert(source, "fp8", tmp_path / "copy")
    copy = open_checkpoint(tmp_path / "copy")
    pooling = read_pooling(copy.folder, copy.name, copy.config)
    assert (pooling.kind, pooling.score_tokens) == ("reranker", (YES, NO))
