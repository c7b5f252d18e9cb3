"""GGUF files that vlfit writes, in llama.cpp itself; and Qwen3's real vocabulary (``make test-gguf``)."""

import json
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tokenizers import Tokenizer

from tests.checkpoint.test_gguf_hybrid import SPECS
from tests.checkpoint.test_gguf_models import PIECES, mixed_strings, through_gguf
from tests.gguf_files import as_blocks, as_gguf
from tests.loading.test_gguf_blocks import engine, told_by
from tests.tiny_qwen3_5 import QWEN3_5, build_qwen3_5
from vlfit.api.conversation import single_turn
from vlfit.checkpoint.source import mini_folder

PLACE = Path(__file__).parents[2] / ".venv" / "gguf"
NMSE = 1e-3  # of quantized weights
CACHE = 1e-4  # of exact weights: llama.cpp's KV cache is in float16
QUESTIONS = ("how many cats are there?", "Describe this picture.", "What is 2 + 2, and why?", "hello world")
pytestmark = pytest.mark.gguf


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def llama_cpp(
    model: Path, target: Path, sequences: list[list[int]], texts: list[str]
) -> tuple[list[npt.NDArray[np.float32]], list[list[int]]]:
    """Logits of every token of ``sequences``, and tokens of ``texts``."""
    script = Path(__file__).with_name("with_llama_cpp.py")
    done = subprocess.run(
        [PLACE / "bin" / "python", script, model, target],
        input=json.dumps({"sequences": sequences, "texts": texts}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with np.load(target) as found:
        return [found[f"arr_{number}"] for number in range(len(sequences))], json.loads(done.stdout)


def normalized_error(found: Any, expected: Any) -> float:
    """Mean square of the differences over that of the expected values."""
    return float(((found - expected) ** 2).mean() / (expected**2).mean())


@pytest.mark.parametrize("weights", ["f32", "bf16", "q8_0", "q5_0", "q4_0", "Q4_K"])
def test_minis_logits(weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp rounds activations to 8 bits where weights are quantized, and vlfit does not."""
    write = as_blocks if weights.isupper() else as_gguf
    model, _ = write(mini_folder(), tmp_path / "gguf", weights)
    exact = weights in ("f32", "bf16")
    assert_alike(model, CACHE if exact else NMSE, tmp_path, monkeypatch)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama2", "phi3"])
def test_logits_of_decoders(
    name: str, tiny_decoder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Another name: in a model called phi3 llama.cpp wants tokens that this one does not have.
    source = shutil.copytree(tiny_decoder(name), tmp_path / "model")
    model, _ = as_gguf(source, tmp_path / "gguf", "f32")
    assert_alike(model, CACHE, tmp_path, monkeypatch)


@pytest.mark.parametrize("weights", ["f32", "q8_0"])
@pytest.mark.parametrize("name", ["pictures", "alone", "wide"])
def test_logits_of_hybrids(name: str, weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3.5: two, one and three value heads for each key head; the first with layers that draft.

    Random weights make more of llama.cpp's 8-bit activations than trained ones: 0.0026 was measured.
    """
    monkeypatch.setitem(QWEN3_5, name, SPECS[name])
    model, _ = as_gguf(build_qwen3_5(name, tmp_path / "model"), tmp_path / "gguf", weights)
    assert_alike(model, CACHE if weights == "f32" else 5 * NMSE, tmp_path, monkeypatch)


def assert_alike(model: Path, most: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits after each of several prompts."""
    conversations = [single_turn(question) for question in QUESTIONS]
    builder = engine(model).prompts
    prompts = [list(builder.build(conversation).token_ids) for conversation in conversations]
    found, _ = llama_cpp(model, tmp_path / "logits.npz", prompts, [])
    for conversation, logits in zip(conversations, found, strict=True):
        _, ours = told_by(model, conversation, monkeypatch, tokens=1)
        assert normalized_error(ours[-1].float().numpy(), logits[-1]) < most


def test_minis_tokens(tmp_path: Path) -> None:
    model, _ = as_gguf(mini_folder(), tmp_path / "gguf", "q8_0")
    tokenizer = engine(model).prompts.tokenizer
    # llama.cpp does not bring text into the form NFC, as the tokenizer of the checkpoint does.
    texts = [text for text in mixed_strings(300) if "\u0301" not in text]
    _, tokens = llama_cpp(model, tmp_path / "logits.npz", [], texts)
    expected = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    assert tokens == expected


@pytest.mark.skipif(not (PLACE / "qwen3").is_dir(), reason="no npm")
def test_qwen3s_vocabulary(tmp_path: Path) -> None:
    """151,669 tokens through a GGUF and back: 10,000 mixed strings become the same tokens."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(PLACE / "qwen3" / name, source)
    expected = Tokenizer.from_file(str(source / "tokenizer.json"))
    found = through_gguf(source, tmp_path / "x.gguf", vocabulary=151936)
    assert found.get_vocab() == expected.get_vocab()
    seeded = random.Random(6)
    blocks = (
        (32, 127),
        (0xA0, 0x800),
        (0x900, 0x1000),
        (0x3000, 0xA000),
        (0xAC00, 0xD7A0),
        (0x1F300, 0x1F700),
    )
    for _ in range(10000):
        text = "".join(
            seeded.choice(PIECES)
            if seeded.random() < 0.7
            else "".join(chr(seeded.randrange(*seeded.choice(blocks))) for _ in range(seeded.randrange(1, 9)))
            for _ in range(seeded.randrange(1, 12))
        )
        ids = expected.encode(text).ids
        assert found.encode(text).ids == ids, text
        assert found.decode(ids, skip_special_tokens=False) == expected.decode(ids, skip_special_tokens=False)
