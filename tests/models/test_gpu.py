"""Text-only decoders on a CUDA device: the same words as on the CPU in float32, close to it in 16 bits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.on_gpu import requested_bytes, reset_memory_statistics
from tests.engine.test_parity import relative, run
from tests.models.test_parity import CONVERSATIONS
from tests.tiny_decoders import DECODERS
from vlfit.api.engine_options import EngineOptions
from vlfit.checkpoint.source import open_checkpoint
from vlfit.checkpoint.tensors import is_embedding
from vlfit.engine.engine import NativeEngine
from vlfit.engine.execution.warmup import profile_peak_memory as at_start
from vlfit.layers.linear import Fp8Linear
from vlfit.models.decoder import TextModel

pytestmark = pytest.mark.gpu


def engine(folder: Path, device: str, dtype: str = "float32", *, cuda_graphs: bool = True) -> NativeEngine:
    options = EngineOptions(
        device=device,
        dtype=dtype,
        max_model_len=1024,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        cuda_graphs=cuda_graphs,
    )
    return NativeEngine(open_checkpoint(folder), options)


@pytest.mark.parametrize("name", DECODERS)
def test_greedy_tokens_equal_the_cpu(tiny_decoder: Callable[[str], Path], name: str) -> None:
    conversations = list(CONVERSATIONS.values())
    expected = run(engine(tiny_decoder(name), "cpu"), *conversations)
    assert run(engine(tiny_decoder(name), "cuda"), *conversations) == expected


def test_fp8_weights_stay_fp8(tiny_decoder: Callable[[str], Path]) -> None:
    layer = engine(tiny_decoder("qwen3_fp8"), "cuda", "auto").runner.text.layers[0]
    assert isinstance(layer.down, Fp8Linear)
    assert layer.down.weights.codes.dtype == torch.float8_e4m3fn


def last_logits(folder: Path, device: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Logits after the last token of the prompt, in float32."""
    built = engine(folder, device, dtype, cuda_graphs=False)  # a replayed prompt calls no model
    outputs: list[torch.Tensor] = []
    forward = TextModel.__call__

    def recorded(*arguments: Any) -> torch.Tensor:
        outputs.append(forward(*arguments))
        return outputs[-1]

    with monkeypatch.context() as patched:
        patched.setattr(TextModel, "__call__", recorded)
        run(built, CONVERSATIONS["question"], tokens=1)
    return outputs[-1][-1].float().cpu()


@pytest.mark.parametrize("name", ["qwen2", "llama3", "phi3_long"])
def test_half_precision_stays_close(
    tiny_decoder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Within twice the error that bfloat16 has on a CPU, against float32."""
    folder = tiny_decoder(name)
    exact = last_logits(folder, "cpu", "float32", monkeypatch)
    off = {
        device: relative(last_logits(folder, device, "bfloat16", monkeypatch), exact)
        for device in ("cpu", "cuda")
    }
    assert off["cuda"] < 2 * off["cpu"]


@pytest.mark.parametrize("name", ["qwen3", "llama2", "phi3"])
def test_weights_take_what_the_files_hold(tiny_decoder: Callable[[str], Path], name: str) -> None:
    reset_memory_statistics()
    before = requested_bytes()
    loaded = engine(tiny_decoder(name), "cuda", "bfloat16")
    actual = loaded.account().memory.weights
    tied = loaded.checkpoint.config.tie_word_embeddings
    on_card = [
        info for name, info in loaded.checkpoint.tensors.items() if tied or not is_embedding(name)
    ]  # an untied token embedding stays in RAM
    values = sum(info.count for info in on_card) * 2
    heads = (loaded.checkpoint.config.text.num_attention_heads, loaded.checkpoint.config.text.head_dim)
    norms = 2 * 3 * 2 * heads[0] * heads[1]  # of queries and keys, a row for each head in three layers
    assert values <= sum(actual.values()) <= values + norms
    assert actual["weights.vision"] == 0
    assert requested_bytes() - before >= sum(actual.values())


def test_the_worst_case_is_run_at_start(tiny_decoder: Callable[[str], Path]) -> None:
    built = engine(tiny_decoder("phi3"), "cuda", "bfloat16")
    assert at_start(built).max_decoding == 4
    assert not built.busy
