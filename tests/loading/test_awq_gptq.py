"""AWQ and GPTQ checkpoints in the engine equal, to the bit, the weights they encode."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.awq_gptq import as_awq, as_gptq, gptq_section, gptq_tensors, rounded, write
from tests.engine.test_parity import CONVERSATIONS, run
from vlfit.api.conversation import single_turn
from vlfit.api.engine_options import EngineOptions
from vlfit.checkpoint.source import open_checkpoint
from vlfit.engine.engine import NativeEngine
from vlfit.engine.memory.usage import tensor_bytes
from vlfit.engine.sampling.sampler import StepOutput
from vlfit.engine.scheduling.sequence import ScheduledChunk
from vlfit.layers.linear import Int8Linear, PackedLinear, ReorderedLinear, StackedLinear
from vlfit.loading.loader import Loader
from vlfit.models.decoder import TextModel
from vlfit.models.qwen3_vl.vision import VisionTower
from vlfit.plan.shapes import model_of

Tiny = Callable[[str], Path]
Written = tuple[Path, Path]

# How each is written, and from which of tests/tiny.py.
FORMS: dict[str, tuple[str, Callable[..., Written], dict[str, Any]]] = {
    "awq": ("tied", as_awq, {}),
    "awq, groups of 16, one key head": ("odd_vocab_one_kv_head", as_awq, {"group": 16}),
    "awq of fp16 with biases, a scale a row": ("half_with_biases", as_awq, {"group": -1}),
    "gptq": ("tied", as_gptq, {}),
    "gptq of bf16, a scale a row": ("vision_head_72", as_gptq, {"group": -1}),
    "gptq, zero points": ("tied", as_gptq, {"symmetric": False}),
    "gptq_v2, zero points": ("tied", as_gptq, {"symmetric": False, "version": 2}),
    "gptq in order": ("untied_sharded", as_gptq, {"ordered": True}),
    "gptq in order, zero points": ("tied", as_gptq, {"ordered": True, "symmetric": False, "group": 16}),
    "gptq, 8 bits": ("tied", as_gptq, {"bits": 8}),
    "gptq, 8 bits, a scale a row": ("half_with_biases", as_gptq, {"bits": 8, "group": -1}),
    "gptq, 8 bits in order": ("tied", as_gptq, {"bits": 8, "ordered": True}),
}
WITH_KERNELS = ["awq", "gptq, zero points", "gptq in order, zero points", "gptq, 8 bits in order"]


@pytest.fixture(params=FORMS)
def written(request: pytest.FixtureRequest, tiny: Tiny, tmp_path: Path) -> Written:
    name, form, options = FORMS[request.param]
    return form(tiny(name), tmp_path, **options)


def engine(folder: Path, device: str = "cpu") -> NativeEngine:
    options = EngineOptions(
        device=device, dtype="float32", max_model_len=1024, max_num_batched_tokens=128, max_num_seqs=5
    )
    return NativeEngine(open_checkpoint(folder), options)


def test_logits_are_those_of_the_weights_that_it_stands_for(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []
    for folder in written:
        loaded = engine(folder)
        seen: list[Tensor] = []
        forward = loaded.runner.run

        def watching(
            batch: list[ScheduledChunk], forward: Any = forward, seen: list[Tensor] = seen
        ) -> StepOutput:
            scores: StepOutput = forward(batch)
            seen.append(scores.logits.clone())
            return scores

        monkeypatch.setattr(loaded.runner, "run", watching)
        tokens = run(loaded, CONVERSATIONS["picture"], tokens=8)
        told.append((tokens, torch.cat(seen)))
    assert told[0][0] == told[1][0]
    assert torch.equal(told[0][1], told[1][1])
    assert told[0][1].std() > 0.1


# Their names begin otherwise, Qwen2 has biases, Phi-3 has q, k and v in one matrix.
DECODERS: dict[str, tuple[str, Callable[..., Written], dict[str, Any]]] = {
    "qwen2 in awq": ("qwen2", as_awq, {"group": 16}),
    "llama in gptq, in order": ("llama2", as_gptq, {"ordered": True, "group": 16}),
    "phi3 in gptq, in order": ("phi3", as_gptq, {"ordered": True, "group": 16, "symmetric": False}),
}


@pytest.mark.parametrize("form", DECODERS)
def test_text_only_decoders(form: str, tiny_decoder: Tiny, tmp_path: Path) -> None:
    name, write_it, options = DECODERS[form]
    stored, wide = write_it(tiny_decoder(name), tmp_path, **options)
    assert open_checkpoint(stored).weights_format == "int4"
    question = single_turn("how many cats are there?")
    tokens = run(engine(stored), question, tokens=16)
    assert tokens == run(engine(wide), question, tokens=16)
    assert len(set(tokens[0])) > 3


def test_what_is_converted_is_what_has_codes(tiny: Tiny, tmp_path: Path) -> None:
    """Whatever config.json says of modules, and by ``dynamic`` in other sizes of groups and other bits."""

    def store(module: str, weight: Tensor) -> Any:
        if "down_proj" in module:
            return None
        bits, group = (8, 16) if "o_proj" in module else (4, 32)
        codes = rounded(weight, bits, group, symmetric="o_proj" in module)
        return codes, gptq_tensors(codes)

    dynamic = {r"-:.*\.down_proj$": {}, r"+:.*o_proj": {"bits": 8, "group_size": 16, "sym": True}}
    folders = write(tiny("tied"), tmp_path, gptq_section(sym=False, dynamic=dynamic), store)
    checkpoint = open_checkpoint(folders[0])
    assert checkpoint.weights_format == "int4"
    assert checkpoint.parameter_count == open_checkpoint(folders[1]).parameter_count
    conversation = CONVERSATIONS["text"]
    assert run(engine(folders[0]), conversation, tokens=8) == run(engine(folders[1]), conversation, tokens=8)


def test_inputs_that_are_shared_but_not_in_one_order(tiny: Tiny, tmp_path: Path) -> None:
    """Where q, k and v would be one matrix on a GPU; widened on a CPU, each goes back to its own order."""
    random = np.random.default_rng(3)

    def store(module: str, weight: Tensor) -> Any:
        codes = rounded(weight, 4, 32, symmetric=True, order=random.permutation(weight.shape[1]))
        return codes, gptq_tensors(codes)

    folders = write(tiny("tied"), tmp_path, gptq_section(desc_act=True), store)
    conversation = CONVERSATIONS["text"]
    assert run(engine(folders[0]), conversation, tokens=8) == run(engine(folders[1]), conversation, tokens=8)
    names = [f"model.language_model.layers.0.self_attn.{part}_proj" for part in "qkv"]
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    with narrow_loader(folders[0]) as loader, narrow_loader(folders[1]) as wide:
        layer, expected = loader.linear(*names), wide.linear(*names)
    assert isinstance(layer, StackedLinear)
    assert all(isinstance(part, ReorderedLinear) for part in layer.parts)
    torch.testing.assert_close(layer(x), expected(x), rtol=1e-5, atol=1e-5)


def narrow_loader(folder: Path, dtype: torch.dtype = torch.float32) -> Loader:
    """A loader that leaves codes as they are, as on a GPU."""
    loader = Loader(open_checkpoint(folder), torch.device("cpu"), dtype)
    loader._keeps_quantized = True
    return loader


@pytest.mark.parametrize("form", FORMS)
def test_layers_that_stay_narrow(form: str, tiny: Tiny, tmp_path: Path) -> None:
    """As on a GPU, but multiplied by their reference: stacked, in their order, no wider than they were."""
    name, write_it, options = FORMS[form]
    folders = write_it(tiny(name), tmp_path, **options)
    parent = "model.language_model.layers.1.self_attn"
    names = [f"{parent}.{part}_proj" for part in "qkv"]
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    with narrow_loader(folders[0]) as loader, narrow_loader(folders[1]) as wide:
        layer, expected = loader.linear(*names), wide.linear(*names)
        inner = layer.inner if isinstance(layer, ReorderedLinear) else layer
        assert isinstance(inner, Int8Linear if options.get("bits") == 8 else PackedLinear)
        assert isinstance(layer, ReorderedLinear) == options.get("ordered", False)
        torch.testing.assert_close(layer(x), expected(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_the_plan_knows_every_byte(form: str, tiny: Tiny, tmp_path: Path) -> None:
    name, write_it, options = FORMS[form]
    checkpoint = open_checkpoint(write_it(tiny(name), tmp_path, **options)[0])
    model = model_of("x", checkpoint.config, checkpoint.tensors, "the test")
    assert model.weights == ("int8" if options.get("bits") == 8 else "int4")
    with narrow_loader(checkpoint.folder, torch.bfloat16) as loader:
        text = TextModel(checkpoint.config, loader)
        tower = VisionTower(checkpoint.config.required_vision, loader)
    assert tensor_bytes([text.layers, text.norm]) == model.text_bytes
    assert tensor_bytes([text.embedding, text.head]) == model.embedding_bytes
    assert tensor_bytes(tower) == model.vision_bytes


@pytest.mark.gpu
@pytest.mark.parametrize("form", WITH_KERNELS)
def test_the_kernels_say_what_the_cpu_says(form: str, tiny: Tiny, tmp_path: Path) -> None:
    name, write_it, options = FORMS[form]
    stored, _ = write_it(tiny(name), tmp_path, **options)
    on_gpu = engine(stored, "cuda")
    down = on_gpu.runner.text.layers[0].down
    assert isinstance(down, ReorderedLinear) == options.get("ordered", False)
    conversations = list(CONVERSATIONS.values())
    assert run(on_gpu, *conversations) == run(engine(stored), *conversations)
