"""Other programs read what ``vlfit convert`` writes: compressed-tensors itself, and transformers through it.

Runs where the package compressed-tensors is installed (``pip install compressed-tensors accelerate``); vlfit
does not need it.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.test_parity import CONVERSATIONS, GREEDY, TOLERANCE, reference_inputs, relative, run
from tests.quantize.reference import dequantized, stored
from vlfit.api.engine_options import EngineOptions
from vlfit.checkpoint.source import open_checkpoint
from vlfit.engine.engine import NativeEngine
from vlfit.quantize.conversion import convert

pytest.importorskip("compressed_tensors", reason="needs the package compressed-tensors")
pytest.importorskip("accelerate", reason="needs the package accelerate")

Tiny = Callable[[str], Path]


def test_compressed_tensors_packing(tiny: Tiny, tmp_path: Path) -> None:
    compressor = import_module("compressed_tensors.compressors").PackedQuantizationCompressor
    forms = import_module("compressed_tensors.quantization")
    convert(open_checkpoint(tiny("tied")), "int4", tmp_path / "new")
    tensors, wide = stored(tmp_path / "new"), dequantized(tmp_path / "new")
    weights = forms.QuantizationArgs(num_bits=4, group_size=32, strategy="group", symmetric=True)
    scheme = forms.QuantizationScheme(targets=["Linear"], weights=weights)
    modules = [name.removesuffix(".weight_packed") for name in tensors if name.endswith(".weight_packed")]
    assert len(modules) == 3 * 7
    for module in modules:
        parts = {
            name: tensors[f"{module}.{name}"] for name in ("weight_packed", "weight_scale", "weight_shape")
        }
        parts["weight_scale"] = parts["weight_scale"].float()
        back = compressor.decompress(parts, scheme)
        assert torch.equal(back["weight"], wide[f"{module}.weight"])
        again = compressor.compress({"weight": back["weight"], "weight_scale": parts["weight_scale"]}, scheme)
        assert torch.equal(again["weight_packed"], tensors[f"{module}.weight_packed"])
        assert torch.equal(again["weight_shape"], tensors[f"{module}.weight_shape"])


@pytest.mark.filterwarnings("default")  # what other packages warn about is theirs
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("tied", {}),
        ("odd_vocab_one_kv_head", {}),
        ("untied_sharded", {"head": "int4", "shard_bytes": 200_000}),
    ],
)
def test_transformers_reads_int4(tiny: Tiny, tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    from transformers import GenerationConfig, Qwen3VLForConditionalGeneration

    folder = tmp_path / "new"
    convert(open_checkpoint(tiny(name)), "int4", folder, **options)
    loaded: Any = Qwen3VLForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    reference, report = loaded
    assert {kind: names for kind, names in report.items() if names} == {}
    reference.generation_config = GenerationConfig()
    engine = NativeEngine(
        open_checkpoint(folder), EngineOptions(device="cpu", max_model_len=1024, max_num_batched_tokens=128)
    )
    prompt = engine.prompts.build(CONVERSATIONS["picture"], max_image_tokens=None, context=engine.context)
    with torch.inference_mode():
        output = reference.generate(**reference_inputs(engine, prompt), generation_config=GREEDY)
    expected = output.sequences[0, len(prompt.token_ids) :].tolist()
    assert run(engine, CONVERSATIONS["picture"]) == [expected]
    layer = reference.model.language_model.layers[0].mlp.up_proj.weight
    assert (
        relative(layer, dequantized(folder)["model.language_model.layers.0.mlp.up_proj.weight"]) < TOLERANCE
    )


@pytest.mark.filterwarnings("default")
def test_transformers_dequantizes_fp8(tiny: Tiny, tmp_path: Path) -> None:
    """Without a GPU transformers dequantizes FP8 to bfloat16, and only whole blocks."""
    from transformers import Qwen3VLForConditionalGeneration

    folder = tmp_path / "new"
    convert(open_checkpoint(tiny("tied")), "fp8", folder)  # all sizes are below a block: one block each
    reference: Any = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.bfloat16)
    theirs = dict(reference.named_parameters())
    layers = {name: value for name, value in dequantized(folder).items() if name.endswith("proj.weight")}
    layers = {name: value for name, value in layers.items() if "language_model.layers" in name}
    assert len(layers) == 3 * 7
    for name, value in layers.items():
        assert torch.equal(theirs[name], value.to(torch.bfloat16)), name
