"""The GGUF header: what the gguf package writes is read, and what nobody should write is refused, bounded."""

import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tests.wording import figures_in
from vlfit.checkpoint.gguf import gguf_header
from vlfit.checkpoint.gguf.gguf_header import GGUFHeader, NeedMoreBytes, read_gguf_header
from vlfit.errors import BrokenShard, MissingFile, UnknownWeightsFormat, VlfitError

UINT8, UINT32, FLOAT32, BOOL, STRING, ARRAY = 0, 4, 6, 7, 8, 9


def text(value: str | bytes, length: int | None = None) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def array(kind: int, count: int, values: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + values


def tensor(name: str = "a", shape: tuple[int, ...] = (32, 2), kind: int = 0, offset: int = 0) -> bytes:
    return (
        text(name)
        + struct.pack("<I", len(shape))
        + struct.pack(f"<{len(shape)}Q", *shape)
        + struct.pack("<IQ", kind, offset)
    )


def file(
    entries: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, int] | None = None,
    data: int = 256,
    alignment: int = 32,
) -> bytes:
    num_tensors, num_entries = counts or (len(tensors), len(entries))
    header = magic + struct.pack("<IQQ", version, num_tensors, num_entries) + b"".join((*entries, *tensors))
    return header + bytes(-len(header) % alignment) + bytes(data)


@pytest.fixture
def written(tmp_path: Path) -> Callable[[bytes], Path]:
    def write(content: bytes) -> Path:
        path = tmp_path / "model.gguf"
        path.write_bytes(content)
        return path

    return write


def by_package(path: Path) -> Path:
    """A file with values of every kind and tensors of several types."""
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_uint32("small", 7)
    writer.add_int64("negative", -(2**40))
    writer.add_float32("epsilon", 1e-6)
    writer.add_float64("double", 0.1)
    writer.add_bool("yes", True)
    writer.add_array("words", ["a", "\u00e4 \U0001f642", ""])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_array("flags", [True, False])
    writer.add_tensor("plain", np.arange(96, dtype=np.float32).reshape(3, 32))
    writer.add_tensor("half", np.ones((2, 3, 4), dtype=np.float16))
    blocks = gguf.quantize(np.ones((4, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blocks", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_what_the_gguf_package_writes(tmp_path: Path) -> None:
    path = by_package(tmp_path / "x.gguf")
    header = read_gguf_header(path)
    assert header.version == 3
    assert header.architecture == "qwen3"
    fields = header.fields
    assert fields.integer("small") == 7
    assert fields.number("negative") == -(2**40)
    assert fields.number("epsilon") == 1e-6  # float32, as people write it
    assert fields.number("double") == 0.1
    assert fields.flag("yes")
    assert fields.texts("words") == ("a", "\u00e4 \U0001f642", "")
    assert fields.integers("numbers") == (1, 2, 3)
    assert fields.values["flags"] == [True, False]
    assert 0 <= path.stat().st_size - header.size < header.alignment  # a file may end without padding
    reader = gguf.GGUFReader(path)
    for expected in reader.tensors:
        found = header.tensors[expected.name]
        assert found.type == expected.tensor_type.name
        assert found.shape == tuple(int(size) for size in reversed(expected.shape))
        assert (found.offset, found.nbytes) == (expected.data_offset, expected.n_bytes)
    assert list(header.tensors) == [each.name for each in reader.tensors]


def test_the_first_bytes_of_a_file_say_how_many_more_it_takes(tmp_path: Path) -> None:
    content = by_package(tmp_path / "x.gguf").read_bytes()
    whole = read_gguf_header(tmp_path / "x.gguf")
    have, rounds = 0, 0
    header = None
    while header is None:
        try:
            header = read_gguf_header(content[:have], "x.gguf")
        except NeedMoreBytes as more:
            before, have, rounds = have, more.count, rounds + 1
        else:
            break
        assert before < have <= whole.data_start
    assert have <= whole.data_start
    assert rounds < 60
    assert header.tensors == whole.tensors


@pytest.mark.parametrize("version", [2, 3])
def test_both_versions(version: int, written: Any) -> None:
    assert read_gguf_header(written(file((), (tensor(),), version=version))).version == version


def test_alignment(written: Any) -> None:
    key = entry("general.alignment", UINT32, struct.pack("<I", 128))
    tensors = (tensor("a"), tensor("b", offset=256))
    header = read_gguf_header(written(file((key,), tensors, data=512, alignment=128)))
    assert header.alignment == 128
    assert header.data_start % 128 == 0
    assert header.tensors["b"].offset == header.data_start + 256


BROKEN: dict[str, bytes] = {
    "empty": b"",
    "short": b"GGUF\3\0\0\0",
    "other": b"PK\3\4" + bytes(100),
    "old format": b"tjgg" + bytes(100),
    "page": b"<!DOCTYPE html><html>" + bytes(100),
    "lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n" + bytes(100),
    "tensors": file(counts=(2**60, 0)),
    "entries": file(counts=(0, 2**63)),
    "few entries": file((entry("a", UINT32, bytes(4)),), counts=(0, 3)),
    "long key": file((text("a" * 2000),), counts=(0, 1)),
    "endless key": file((text("a", 2**63),), counts=(0, 1)),
    "endless text": file((entry("a", STRING, text("x", 2**64 - 1)),)),
    "endless array": file((entry("a", ARRAY, array(UINT8, 2**62, b"")),)),
    "endless words": file((entry("a", ARRAY, array(STRING, 2**40, b"")),)),
    "long word": file((entry("a", ARRAY, array(STRING, 1, text("x", 2**50))),)),
    "arrays in arrays": file((entry("a", ARRAY, array(ARRAY, 1, array(ARRAY, 1, array(UINT8, 1, b"\1")))),)),
    "kind": file((entry("a", 13, bytes(8)),)),
    "kind in array": file((entry("a", ARRAY, array(99, 1, bytes(8))),)),
    "truth": file((entry("a", BOOL, b"\2"),)),
    "no utf-8": file((entry("a", STRING, text(b"\xff\xfe")),)),
    "no utf-8 in array": file((entry("a", ARRAY, array(STRING, 1, text(b"\xc3"))),)),
    "twice": file((entry("a", UINT32, bytes(4)), entry("a", UINT32, bytes(4)))),
    "alignment": file((entry("general.alignment", UINT32, struct.pack("<I", 24)),)),
    "alignment below the format's": file((entry("general.alignment", UINT32, struct.pack("<I", 4)),)),
    "no alignment": file((entry("general.alignment", UINT32, bytes(4)),)),
    "alignment of text": file((entry("general.alignment", STRING, text("32")),)),
    "no dimensions": file((), (tensor(shape=()),)),
    "dimensions": file((), (tensor(shape=(1, 1, 1, 1, 1)),)),
    "no elements": file((), (tensor(shape=(0, 4)),)),
    "elements": file((), (tensor(shape=(2**40, 2**40)),)),
    "overflow": file((), (tensor(shape=(2**32, 2**32)),)),
    "part of a block": file((), (tensor(shape=(33, 2), kind=8),)),
    "offset": file((), (tensor(offset=4),)),
    "far": file((), (tensor(offset=2**62),)),
    "beyond": file((), (tensor(offset=320),), data=256),
    "overlap": file((), (tensor("a"), tensor("b", offset=32))),
    "same tensor": file((), (tensor("a"), tensor("a", offset=256)), data=512),
    "name": file((), (tensor("a" * 200),)),
    "truncated": file((), (tensor(),), data=10),
}
UNKNOWN: dict[str, bytes] = {
    "version 0": file(version=0),
    "version 1": file(version=1),
    "version 4": file(version=4),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(32),
    "withdrawn type": file((), (tensor(kind=4),)),
    "future type": file((), (tensor(kind=1000),)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_damaged_files_are_refused(name: str, written: Any) -> None:
    with pytest.raises(BrokenShard) as caught:
        read_gguf_header(written(BROKEN[name]))
    assert caught.value.code == "checkpoint_error"
    assert "model.gguf" in caught.value.message
    assert caught.value.hint


_ARCHITECTURE = entry("general.architecture", STRING, text("qwen3"))
_MORE = entry("qwen3.block_count", UINT32, struct.pack("<I", 2))
_TEMPLATE = entry("tokenizer.chat_template", STRING, text("{{ messages }}"))


@pytest.mark.parametrize(
    ("content", "says", "figures"),
    [
        (file((_ARCHITECTURE, _MORE), (tensor(),), counts=(1, 1)), "qwen3.block_count", []),
        (file((_ARCHITECTURE, _TEMPLATE), (tensor(),), counts=(1, 1)), "tokenizer.chat_template", []),
        (file((_ARCHITECTURE,), (tensor("a.weight"),), counts=(1, 2)), "a.weight", [2, 1]),
        (file((_ARCHITECTURE,), (tensor("a.weight", (32, 2, 1)),), counts=(2, 1)), "", [2, 1]),
    ],
    ids=["an entry too few", "a text too few", "an entry too many", "a tensor too many"],
)
def test_wrong_counts_are_called_so(content: bytes, says: str, figures: list[float], written: Any) -> None:
    with pytest.raises(BrokenShard) as caught:
        read_gguf_header(written(content))
    assert says in caught.value.message
    assert figures_in(caught.value.message) == figures


def test_metadata_and_tensors_may_have_each_others_names(written: Any) -> None:
    """Only what cannot be read as what it should be tells of a wrong count."""
    weight = entry("general.sampling.weight", FLOAT32, struct.pack("<f", 0.5))
    header = read_gguf_header(written(file((_ARCHITECTURE, weight), (tensor("qwen3.a.weight"),))))
    assert header.metadata["general.sampling.weight"] == 0.5
    assert list(header.tensors) == ["qwen3.a.weight"]


@pytest.mark.parametrize("name", UNKNOWN)
def test_other_versions_and_types_are_refused(name: str, written: Any) -> None:
    with pytest.raises(UnknownWeightsFormat) as caught:
        read_gguf_header(written(UNKNOWN[name]))
    assert "model.gguf" in caught.value.message
    assert ("endian" in caught.value.message) == (name == "big-endian")


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(MissingFile):
        read_gguf_header(tmp_path / "none.gguf")


def test_a_folder(tmp_path: Path) -> None:
    with pytest.raises(BrokenShard):
        read_gguf_header(tmp_path)


def test_all_strings_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_header, "MAX_ARRAY_ITEMS", 5)
    words = [entry(name, ARRAY, array(STRING, 3, text("") * 3)) for name in "ab"]
    assert read_gguf_header(file((words[0],))).metadata["a"] == ["", "", ""]
    with pytest.raises(BrokenShard):
        read_gguf_header(file(tuple(words)))


def test_the_header_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_header, "MAX_HEADER_BYTES", 100)
    with pytest.raises(BrokenShard):
        read_gguf_header(file((entry("a", STRING, text("x" * 90)),)))


def outcome(content: bytes, name: str) -> str:
    """What reading ``content`` comes to: nothing but a header, a wish for more bytes, or an error of ours."""
    try:
        header = read_gguf_header(content, name)
    except NeedMoreBytes as more:
        return "more" if len(content) < more.count <= gguf_header.MAX_HEADER_BYTES else "absurd"
    except VlfitError as error:
        return error.code
    return "header" if isinstance(header, GGUFHeader) else "nothing"


def test_damaged_bytes(tmp_path: Path) -> None:
    """Bytes changed, inserted, removed and cut off at random: never another error, never much memory."""
    content = by_package(tmp_path / "x.gguf").read_bytes()
    header = read_gguf_header(content).data_start
    seeded = random.Random(5)
    seen = set()
    for _ in range(3000):
        changed = bytearray(content)
        for _ in range(seeded.choice((1, 1, 2, 5))):
            at = seeded.randrange(header if seeded.random() < 0.9 else len(content))
            what = seeded.randrange(4)
            if what == 0:
                changed[at] ^= 1 << seeded.randrange(8)
            elif what == 1:
                changed[at] = seeded.choice((0, 0xFF, 0x7F, seeded.randrange(256)))
            elif what == 2:
                del changed[at : at + seeded.randrange(9)]
            else:
                changed[at:at] = seeded.randbytes(seeded.randrange(9))
        seen.add(outcome(bytes(changed), "x.gguf"))
    for cut in range(0, len(content), 7):
        seen.add(outcome(content[:cut], "x.gguf"))
    assert seen == {"header", "more", "checkpoint_error"}
