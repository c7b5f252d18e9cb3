"""Safetensors headers: where tensors lie, and every way in which a file can be broken."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.checkpoint.edit import change_header, change_json, copy_of
from vlfit.checkpoint.headers import INDEX_FILE, SINGLE_FILE, read_headers
from vlfit.errors import BrokenShard, CheckpointError, MissingFile

Tiny = Callable[[str], Path]


@pytest.mark.parametrize("name", ["tied", "untied_sharded", "fp8_untied_sharded", "half_with_biases"])
def test_agrees_with_the_safetensors_library(tiny: Tiny, name: str) -> None:
    tensors = read_headers(tiny(name))
    seen = set()
    for path in tiny(name).glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118 (it is no dict)
                part, info = file.get_slice(key), tensors[key]
                assert (info.dtype, list(info.shape), info.file) == (part.get_dtype(), part.get_shape(), path)
                raw = path.read_bytes()[info.start : info.end]
                assert raw == file.get_tensor(key).view(torch.uint8).numpy().tobytes()
                assert info.bytes == len(raw)
                seen.add(key)
    assert seen == set(tensors)


def test_no_weights(tiny: Tiny, tmp_path: Path) -> None:
    folder = copy_of(tiny("tied"), tmp_path / "copy")
    (folder / SINGLE_FILE).unlink()
    with pytest.raises(MissingFile, match=rf"{SINGLE_FILE}.*{INDEX_FILE}"):
        read_headers(folder)


def test_missing_shard(tiny: Tiny, tmp_path: Path) -> None:
    folder = copy_of(tiny("untied_sharded"), tmp_path / "copy")
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(MissingFile, match=r"\b1 .*\b3 .*model-00002-of-00003\.safetensors") as error:
        read_headers(folder)
    assert "vlfit pull" in error.value.hint


@pytest.mark.parametrize("names", [{}, {"a": "../../etc/passwd"}, {"a": "/etc/passwd"}, {"a": ".."}, [], 3])
def test_invalid_index(tiny: Tiny, tmp_path: Path, names: object) -> None:
    folder = copy_of(tiny("untied_sharded"), tmp_path / "copy")
    change_json(folder / INDEX_FILE, lambda index: index.update(weight_map=names))
    with pytest.raises(CheckpointError, match="weight_map"):
        read_headers(folder)


@pytest.mark.parametrize("keep", [0, 4, 8, 100])
def test_truncated_header(tiny: Tiny, tmp_path: Path, keep: int) -> None:
    folder = copy_of(tiny("tied"), tmp_path / "copy")
    path = folder / SINGLE_FILE
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(BrokenShard, match=rf"\b{keep} bytes"):
        read_headers(folder)


def test_truncated_data_gives_both_sizes(tiny: Tiny, tmp_path: Path) -> None:
    folder = copy_of(tiny("tied"), tmp_path / "copy")
    path = folder / SINGLE_FILE
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(BrokenShard, match=rf"\b{size:,} bytes .*\b{size - 1000:,} bytes") as error:
        read_headers(folder)
    assert "vlfit pull" in error.value.hint


def test_file_longer_than_its_header(tiny: Tiny, tmp_path: Path) -> None:
    folder = copy_of(tiny("tied"), tmp_path / "copy")
    path = folder / SINGLE_FILE
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(BrokenShard, match=rf"\b{size:,} bytes .*\b{size + 4:,} bytes"):
        read_headers(folder)


@pytest.mark.parametrize("length", [2**63, 2**40, 200_000_000])
def test_absurd_header_length(tmp_path: Path, length: int) -> None:
    """Nothing of that size is read or allocated."""
    (tmp_path / SINGLE_FILE).write_bytes(struct.pack("<Q", length) + b"{}" * 100)
    with pytest.raises(BrokenShard, match=rf"\b{length:,} bytes"):
        read_headers(tmp_path)


@pytest.mark.parametrize("header", [b"not json", b"[]", b"\xff\xff", b"3", b"[" * 50_000])
def test_header_that_is_not_a_json_object(tmp_path: Path, header: bytes) -> None:
    (tmp_path / SINGLE_FILE).write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(BrokenShard, match="JSON"):
        read_headers(tmp_path)


NORM = "model.language_model.norm.weight"
FIRST = "model.language_model.embed_tokens.weight"
BROKEN: dict[str, Callable[[dict[str, Any]], object]] = {
    "dtype": lambda header: header[NORM].update(dtype="Q4"),
    "no dtype": lambda header: header[NORM].pop("dtype"),
    "negative shape": lambda header: header[NORM].update(shape=[-64]),
    "shape of text": lambda header: header[NORM].update(shape=["64"]),
    "shape of true": lambda header: header[NORM].update(shape=[True]),
    "one offset": lambda header: header[NORM].update(data_offsets=[0]),
    "offsets backwards": lambda header: header[NORM]["data_offsets"].reverse(),
    "too few bytes": lambda header: header[NORM].update(shape=[63]),
    "overlap": lambda header: header[NORM].update(data_offsets=[0, 256]),
    "past the end": lambda header: header[NORM].update(data_offsets=[2**40, 2**40 + 256]),
    "gap": lambda header: header.pop(NORM),
    "entry is a list": lambda header: header.update({NORM: []}),
}


@pytest.mark.parametrize("name", BROKEN)
def test_invalid_headers(tiny: Tiny, tmp_path: Path, name: str) -> None:
    folder = copy_of(tiny("tied"), tmp_path / "copy")
    change_header(folder / SINGLE_FILE, BROKEN[name])
    with pytest.raises(BrokenShard, match=r"model\.safetensors") as error:
        read_headers(folder)
    assert error.value.hint


def test_unreadable_file(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copy_of(tiny("tied"), tmp_path / "copy")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(BrokenShard, match="Permission denied"):
        read_headers(folder)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123456789abcdef\nsize 4877660776\n"


@pytest.mark.parametrize(
    ("data", "what", "hint"),
    [
        (POINTER, f"git-lfs .*{len(POINTER)} bytes", "git lfs pull"),
        (b"\n<!DOCTYPE html><html><body>Sign in</body></html>", r"HTML\b.* 49 bytes", "vlfit pull"),
        (b"<HTML>" + b"x" * 5000, r"HTML\b.* 5,006 bytes", "vlfit pull"),
    ],
)
def test_other_files_in_place_of_a_shard(tmp_path: Path, data: bytes, what: str, hint: str) -> None:
    (tmp_path / SINGLE_FILE).write_bytes(data)
    with pytest.raises(BrokenShard, match=what) as error:
        read_headers(tmp_path)
    assert hint in error.value.hint
    assert f"{int.from_bytes(data[:8], 'little'):,}" not in error.value.message  # as if it had a header
