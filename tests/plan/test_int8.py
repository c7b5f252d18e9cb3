"""8-bit weights in the plan, against the engine's own code at the true shapes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.plan.on_meta import META, config_of, live, load, loader
from tests.plan.on_meta import model_of_entry as model
from vlfit.checkpoint import catalog
from vlfit.checkpoint.catalog import CatalogEntry
from vlfit.checkpoint.config import ModelConfig
from vlfit.checkpoint.quantization import FLOAT_FORMAT, INTEGER_FORMAT, CompressedFormat, WeightScheme
from vlfit.checkpoint.source import Checkpoint
from vlfit.engine.memory.fit import weight_bytes
from vlfit.engine.memory.usage import storages_in
from vlfit.kernels.gemm import quantized as kernels
from vlfit.kernels.gemm.quantized import quantized_linear
from vlfit.layers.embedding import Int8Embedding
from vlfit.layers.linear import Int8Linear
from vlfit.models.decoder import AttentionLayer, TextModel
from vlfit.models.qwen3_vl import cost as tower_costs
from vlfit.models.qwen3_vl.vision import VisionTower
from vlfit.plan.allocator import ARENA_MIN_BYTES, arena_allocation_sizes
from vlfit.plan.native import cost as costs
from vlfit.plan.native.tiles import SCRATCH_BYTES, splits_for
from vlfit.plan.shapes import HALF, model_of
from vlfit.plan.speed import weight_bytes_per_pass
from vlfit.units import MIB

pytestmark = pytest.mark.usefixtures("few_to_collect")
SIZES = ("2B", "4B", "8B")
EIGHT = ("model.language_model.embed_tokens", "lm_head", r"re:model\.visual\.(blocks|merger|deepstack)")
FORMS = {
    "int4": (WeightScheme(4, 128), WeightScheme(8, None, targets=EIGHT)),
    "int8": (WeightScheme(8, 128), WeightScheme(8, None, targets=EIGHT)),
    "fp8": (WeightScheme(8, None, kind=FLOAT_FORMAT), WeightScheme(8, None, targets=EIGHT)),
}


def entry_of(size: str, weights: str) -> CatalogEntry:
    """Text layers in ``weights``; the embedding, the head and the tower in 8 bits."""
    plain = next(entry for entry in catalog.family_entries(size) if entry.weights == "bf16")
    assert isinstance(plain.config, ModelConfig)
    config = replace(plain.config, quantization=CompressedFormat(FORMS[weights], ()))
    return replace(plain, config=config, weights=weights)


@pytest.mark.parametrize("weights", FORMS)
@pytest.mark.parametrize("size", SIZES)
def test_weight_bytes_match_loading(size: str, weights: str) -> None:
    entry = entry_of(size, weights)
    planned = model(entry)
    text, tower, text_bytes, vision_bytes = load(entry)
    assert text_bytes == planned.text_bytes + planned.embedding_bytes
    assert vision_bytes == planned.vision_bytes
    assert isinstance(text.embedding, Int8Embedding)
    assert isinstance(text.head, Int8Linear)
    assert isinstance(tower.blocks[0].fc2, Int8Linear)
    assert planned.weights == weights
    assert (planned.head.form, planned.tower_is_quantized) == ("int8", True)
    checkpoint = Checkpoint("a test", Path("nowhere"), config_of(entry), entry.tensors)
    heads = planned.text.num_attention_heads + planned.text.num_key_value_heads - 2
    repeated = heads * planned.text.num_hidden_layers * planned.text.head_dim * HALF  # norms of q and k
    on_gpu = weight_bytes(checkpoint, torch.bfloat16, torch.device("cuda"))
    assert on_gpu == planned.weight_bytes - repeated


def test_8_bits_are_half_of_16() -> None:
    """The embedding and the head of 8B take 1.19 GiB each in bf16; scales included."""
    plain = next(entry for entry in catalog.family_entries("8B") if entry.weights == "int4")
    saved = model(plain).embedding_bytes - model(entry_of("8B", "int4")).embedding_bytes
    rows, columns = 151936, 4096
    assert saved == 2 * rows * (columns - HALF)


@pytest.mark.parametrize("weights", [*catalog.FORMATS, *(f"all in 8 bits but {form}" for form in FORMS)])
@pytest.mark.parametrize("size", SIZES)
def test_arena_allocations_match_the_engine(size: str, weights: str) -> None:
    """Without small tensors, which torch packs itself."""
    entry = next((each for each in catalog.family_entries(size) if each.weights == weights), None)
    entry = entry or entry_of(size, weights.rpartition(" ")[2])
    asked = loader(entry)
    vision = config_of(entry).required_vision
    parts = TextModel(config_of(entry), asked), asked.in_arena(lambda: VisionTower(vision, asked))
    made = _allocations(parts)
    planned = arena_allocation_sizes(model(entry).sizes)
    assert sorted(size for size in made if size >= ARENA_MIN_BYTES) == sorted(
        size for size in planned if size >= ARENA_MIN_BYTES
    )
    assert len([size for size in planned if size > MIB]) <= 4


def _allocations(parts: object) -> list[int]:
    """Bytes of each storage in ``parts``; on the meta device they have no addresses."""
    every = {each._cdata: each.nbytes() for each in storages_in(parts)}
    return list(every.values())


@pytest.mark.parametrize("size", SIZES)
def test_plain_and_packed_int8_have_equal_sizes(size: str) -> None:
    packed = entry_of(size, "int8")
    plain = tuple(replace(scheme, kind=INTEGER_FORMAT) for scheme in FORMS["int8"])
    tensors = {
        name.replace("weight_packed", "weight"): replace(
            info,
            name=name.replace("weight_packed", "weight"),
            dtype="I8",
            shape=(info.shape[0], 4 * info.shape[1]),
        )
        if name.endswith("weight_packed")
        else info
        for name, info in packed.tensors.items()
    }
    config = replace(config_of(packed), quantization=CompressedFormat(plain, ()))
    theirs = model_of("a test", config, tensors, "a test")
    ours = model(packed)
    assert (theirs.text_bytes, theirs.vision_bytes, theirs.embedding_bytes, theirs.head, theirs.layer) == (
        ours.text_bytes,
        ours.vision_bytes,
        ours.embedding_bytes,
        ours.head,
        ours.layer,
    )
    assert theirs.parameters == ours.parameters


def test_pass_reads_one_byte_per_weight_of_the_head() -> None:
    plain = next(entry for entry in catalog.family_entries("4B") if entry.weights == "fp8")
    fewer = weight_bytes_per_pass(model(plain)) - weight_bytes_per_pass(model(entry_of("4B", "fp8")))
    assert fewer == 151936 * 2560


@pytest.mark.parametrize("size", SIZES)
def test_num_splits_match_the_kernels(size: str) -> None:
    layers = TextModel(config_of(entry := entry_of(size, "int8")), loader(entry)).layers
    first = layers[0]
    assert isinstance(first, AttentionLayer)
    for layer in (first.qkv, first.output, first.gate_up, first.down):
        assert isinstance(layer, Int8Linear)
        matrix = layer.weights
        for rows in (1, 8, 9, 16, 17, 32, 33, 64, 65, 256):
            taken = splits_for(
                rows, matrix.out_features, matrix.in_features, kernels.tiles_for(rows, matrix, torch.bfloat16)
            )
            assert taken == costs.num_splits(matrix.out_features, matrix.in_features, rows, "int8")


@pytest.mark.parametrize("size", SIZES)
def test_int8_tower_needs_one_buffer_more(size: str) -> None:
    """For many patches: the plan counts one buffer more for a tower in 8 bits."""
    entry = entry_of(size, "int4")
    vision = config_of(entry).required_vision
    block = VisionTower(vision, loader(entry)).blocks[0]
    x = torch.empty(tower_costs.MAX_UNSPLIT_PATCHES, vision.hidden_size, dtype=torch.bfloat16, device=META)
    with live() as counter:
        assert isinstance(block.fc1, Int8Linear)
        output = quantized_linear(x, block.fc1.weights, block.fc1.bias)
    assert counter.peak == output.nbytes + SCRATCH_BYTES
    more = costs.vision_peak_bytes(vision, 2560, quantized_tower=True) - costs.vision_peak_bytes(vision, 2560)
    assert 0 < more <= SCRATCH_BYTES
