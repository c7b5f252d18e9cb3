"""Text-only models at the shapes of the published ones: loading takes what the plan says, to the byte, and
a pass no more than it.
"""

import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.plan.on_meta import Live, loader
from tests.plan.test_costs import run_text
from vlfit.checkpoint import catalog
from vlfit.checkpoint.catalog import CatalogEntry
from vlfit.checkpoint.config import ModelConfig
from vlfit.checkpoint.quantization import Fp8Format
from vlfit.models.decoder import TextModel
from vlfit.models.registry import read_config
from vlfit.plan.native import cost as costs
from vlfit.plan.shapes import model_of

# The numbers of their config.json.
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-3B-Instruct": {
        "model_type": "qwen2",
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "vocab_size": 151936,
        "use_sliding_window": False,
        "sliding_window": 32768,
        "max_window_layers": 70,
        "rope_theta": 1000000.0,
    },
    "meta-llama/Llama-2-7b-hf": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
    },
    "microsoft/Phi-3-mini-4k-instruct": {
        "model_type": "phi3",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "vocab_size": 32064,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "sliding_window": 2047,
    },
}


def published(name: str, folder: Path) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(PUBLISHED[name]))
    return read_config(folder)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_weights_are_what_loading_allocates_to_the_byte(tmp_path: Path, name: str, fp8: bool) -> None:
    config = published(name, tmp_path)
    if fp8:
        config = replace(config, quantization=Fp8Format(128, 128, ()))
    entry = CatalogEntry(name, name, "", "fp8" if fp8 else "bf16", config)
    tensors = catalog.tensors_of(config)
    planned = model_of(name, config, tensors, "")
    gc.collect()
    with torch.no_grad(), Live() as counter:
        text = TextModel(config, loader(entry))
        taken = counter.now - text.rope.inverse_frequencies.nbytes
    assert taken == planned.text_bytes + planned.embedding_bytes
    assert text.rope.axis is None
    assert planned.vision_bytes == 0


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_catalog_has_the_same_sizes(tmp_path: Path, name: str) -> None:
    entry = catalog.find_entry(name)
    assert entry is not None
    config = published(name, tmp_path)
    ours = model_of(name, config, catalog.tensors_of(config), "")
    known = model_of(name, entry.config, entry.tensors, "")
    assert ours.weight_bytes == known.weight_bytes
    assert ours.layer == known.layer
    assert ours.head == known.head
    assert ours.kv_bytes_per_token == known.kv_bytes_per_token
    assert ours.text.max_position_embeddings == known.text.max_position_embeddings


@pytest.mark.parametrize(("chunk", "context"), [(1024, 1024), (256, 2047)])
@pytest.mark.parametrize("name", PUBLISHED)
def test_peak_of_a_pass_is_within_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, chunk: int, context: int
) -> None:
    monkeypatch.setattr(costs, "HOST_SAMPLER_BYTES", 0)  # it is not run here
    config = published(name, tmp_path)
    entry = CatalogEntry(name, name, "", "bf16", config)
    planned = costs.text_peak_bytes(model_of(name, config, entry.tensors, ""), chunk, context, 1)
    counted = run_text(entry, chunk, context - chunk, 0, 0, 0)
    assert counted <= planned <= 1.15 * counted, f"{planned:,} planned, {counted:,} counted"
