"""Headers read by pieces are the headers that are read whole, and far fewer bytes of the file."""

import random
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from gguf import GGUFWriter

from tests.hollow_gguf import QWEN3_VL_4B, TINY, only, with_vocabulary, write_mmproj, write_model
from vlfit.checkpoint.gguf.gguf_header import read_gguf_header
from vlfit.checkpoint.gguf.skim import Skimmed, skim_file, skim_header
from vlfit.errors import CheckpointError, VlfitError

LARGE = with_vocabulary(TINY, 60_000)


class Pieces:
    """A file that is read by pieces, and what was asked for."""

    def __init__(self, path: Path) -> None:
        self.data = path.read_bytes()
        self.rounds: list[Sequence[tuple[int, int]]] = []

    def __call__(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        self.rounds.append(ranges)
        return [self.data[at : at + count] for at, count in ranges]

    def skim(self, lengths: dict[tuple[str, int], int] | None = None) -> Skimmed:
        return skim_header(self, len(self.data), "model.gguf", lengths)


def assert_same(skimmed: Skimmed, path: Path) -> None:
    whole = read_gguf_header(path)
    assert skimmed.header.tensors == whole.tensors
    assert (skimmed.header.data_start, skimmed.header.size) == (whole.data_start, whole.size)
    for key, value in whole.metadata.items():
        if key not in skimmed.left_out:
            assert str(skimmed.header.metadata[key]) == str(value)
        else:
            assert skimmed.left_out[key] == len(value)  # type: ignore[arg-type]
            assert len(skimmed.header.metadata[key]) == 0  # type: ignore[arg-type]


def test_a_vocabulary_is_jumped_over(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", shapes=LARGE)
    pieces = Pieces(path)
    skimmed = pieces.skim()
    assert_same(skimmed, path)
    assert set(skimmed.left_out) >= {"tokenizer.ggml.tokens", "tokenizer.ggml.token_type"}
    assert skimmed.bytes_read < read_gguf_header(path).data_start / 3
    assert len(pieces.rounds) <= 15


def test_another_quantization_takes_a_third_of_that(tmp_path: Path) -> None:
    first = Pieces(write_model(tmp_path / "q4.gguf", shapes=LARGE)).skim()
    path = write_model(tmp_path / "q8.gguf", only("Q8_0"), LARGE)
    pieces = Pieces(path)
    second = pieces.skim(first.lengths)
    assert_same(second, path)
    assert second.bytes_read < 150_000 < first.bytes_read
    assert len(pieces.rounds) <= 6


def test_wrong_lengths_are_noticed(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", shapes=LARGE)
    right = Pieces(path).skim().lengths
    for shift in (-8, 8, 300_000):
        assert_same(Pieces(path).skim({key: size + shift for key, size in right.items()}), path)


def test_small_files_and_vision_towers(tmp_path: Path) -> None:
    for path in (write_model(tmp_path / "model.gguf"), write_mmproj(tmp_path / "mmproj.gguf")):
        skimmed = skim_file(path)
        assert_same(skimmed, path)
        assert skimmed.left_out == {}


@pytest.mark.parametrize("seed", range(4))
def test_tokens_of_any_kind(tmp_path: Path, seed: int) -> None:
    """Long ones, empty ones, some that read like keys, and no merges or scores between them."""
    chance = random.Random(seed)
    letters = "abcdefghij\x00\u00e9\u6f22"
    tokens = ["tokenizer.ggml.merges", "general.name", "", "a" * 3000]
    tokens += ["".join(chance.choices(letters, k=chance.randrange(1, 40))) for _ in range(20_000)]
    chance.shuffle(tokens)
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_token_list(tokens)
    if seed % 2:
        writer.add_token_scores([chance.random() for _ in tokens])
    writer.add_chat_template("{{ messages }}" * 3000)
    writer.add_uint32("llama.block_count", seed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    assert_same(skim_file(tmp_path / "model.gguf"), tmp_path / "model.gguf")


def test_the_real_shapes_in_a_twentieth_of_a_second(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", shapes=QWEN3_VL_4B)
    skimmed = skim_file(path)
    assert len(skimmed.header.tensors) == 36 * 11 + 2
    assert skimmed.header.size == path.stat().st_size
    assert skimmed.bytes_read < 500_000


@pytest.mark.parametrize("cut", [0, 3, 23, 5_000, 200_000, -64])
def test_truncated_files_are_refused(tmp_path: Path, cut: int) -> None:
    path = write_model(tmp_path / "model.gguf", shapes=LARGE)
    data = path.read_bytes()
    path.write_bytes(data[:cut])
    with pytest.raises(CheckpointError, match=re.escape(path.name)):
        skim_file(path)


def test_damaged_files_raise_nothing_else(tmp_path: Path) -> None:
    data = bytearray(write_model(tmp_path / "model.gguf", shapes=with_vocabulary(TINY, 9000)).read_bytes())
    end = read_gguf_header(tmp_path / "model.gguf").data_start
    chance = random.Random(5)
    refused = 0
    for _ in range(60):
        damaged = bytearray(data)
        for _ in range(3):
            damaged[chance.randrange(end)] = chance.randrange(256)
        (tmp_path / "bad.gguf").write_bytes(damaged)
        try:
            skim_file(tmp_path / "bad.gguf")
        except VlfitError:
            refused += 1
    assert refused >= 1


def test_a_server_that_sends_too_little_is_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", shapes=LARGE)
    with pytest.raises(VlfitError, match="truncated"):
        skim_header(lambda ranges: [b"GGUF" for _ in ranges], path.stat().st_size, "model.gguf")
