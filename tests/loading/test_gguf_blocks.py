"""GGUF models in the engine equal, to the bit, what the gguf package reads from the same files."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests import tiny_text
from tests.engine.test_parity import CONVERSATIONS, run
from tests.gguf_files import BLOCK_TYPES, as_blocks, as_gguf, plausible_blocks, wide_copy
from tests.tiny import random_tensors
from tests.tiny_decoders import DECODERS, config_json, tokenizer_settings
from vlfit.api.conversation import single_turn
from vlfit.api.engine_options import EngineOptions
from vlfit.backends.native import NativeBackend
from vlfit.checkpoint.gguf.stored_blocks import (
    DEQUANTIZED,
    EXACT_FORMS,
    PLAIN_TYPES,
    BlockPart,
    HeadOrder,
    StoredBlocks,
    exact_form,
)
from vlfit.checkpoint.headers import StoredLayout, TensorInfo
from vlfit.checkpoint.quantization import packed_words
from vlfit.checkpoint.source import mini_folder, open_checkpoint
from vlfit.client import VLM
from vlfit.engine.engine import NativeEngine
from vlfit.engine.memory.usage import cpu_matrices_in, tensor_bytes
from vlfit.engine.sampling.sampler import StepOutput
from vlfit.engine.scheduling.sequence import ScheduledChunk
from vlfit.kernels.cpu import products
from vlfit.kernels.gemm.weights import QuantizedWeight
from vlfit.layers.cpu_linear import HalfEmbedding, uses_half_weights
from vlfit.layers.embedding import PackedEmbedding
from vlfit.layers.linear import DenseLinear, Int8Linear, PackedLinear, dequantize_int8, dequantize_packed
from vlfit.loading import readers
from vlfit.loading.block_tensors import dequantize_blocks, fill_from_blocks
from vlfit.loading.loader import Loader
from vlfit.loading.readers import TORCH_DTYPES, BlockReader, ThreadedReader
from vlfit.models.decoder import TextModel
from vlfit.models.qwen3_vl.vision import VisionTower
from vlfit.models.registry import read_config
from vlfit.plan.native import ram
from vlfit.plan.native.expectation import expect_in_ram
from vlfit.plan.shapes import model_of

Tiny = Callable[[str], Path]
Written = Callable[[str], Path]  # a file or folder by the type of its blocks


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


# --- blocks ------------------------------------------------------------------------------------------------


def test_every_type_that_the_gguf_package_dequantizes_is_read() -> None:
    from gguf.quants import _type_traits

    known = {kind.name for kind in _type_traits} | {"F32", "F16"}
    assert {*PLAIN_TYPES, *DEQUANTIZED} == known
    assert set(BLOCK_TYPES) == set(DEQUANTIZED)


@pytest.mark.parametrize("kind", [*BLOCK_TYPES, "BF16", "F16", "F32"])
def test_weights_are_those_of_the_gguf_package_bit_for_bit(kind: str) -> None:
    """Of blocks of any bytes: scales that are infinite, tiny or no numbers too."""
    found = gguf.GGMLQuantizationType[kind]
    size, nbytes = gguf.GGML_QUANT_SIZES[found]
    count = 2048 // size
    raw = np.random.default_rng(1).integers(0, 256, (9, count * nbytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = np.asarray(gguf.dequantize(raw, found), np.float32).reshape(9, -1)
    weights = dequantize_blocks(torch.from_numpy(raw), kind).numpy()
    assert same_bits(weights, expected)
    target = torch.empty(9, 2048)
    blocks = StoredBlocks(kind, BlockPart.WEIGHTS, (9, 2048))
    fill_from_blocks(torch.from_numpy(raw).flatten(), blocks, target)
    assert same_bits(target.numpy(), expected)


@pytest.mark.parametrize("kind", EXACT_FORMS)
def test_codes_and_scales_lose_nothing(kind: str) -> None:
    """As layers dequantize them, bit for bit, of blocks of any bytes."""
    form, found = EXACT_FORMS[kind], gguf.GGMLQuantizationType[kind]
    size, nbytes = gguf.GGML_QUANT_SIZES[found]
    raw = np.random.default_rng(2).integers(0, 256, (5, 1024 // size * nbytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = np.asarray(gguf.dequantize(raw, found), np.float32).reshape(5, -1)

    def part(which: BlockPart, width: int, dtype: torch.dtype) -> Tensor:
        target = torch.empty(5, width, dtype=dtype)
        fill_from_blocks(torch.from_numpy(raw).flatten(), StoredBlocks(kind, which, (5, 1024)), target)
        return target

    scales = part(BlockPart.SCALES, 1024 // form.group, TORCH_DTYPES[form.scale_dtype])
    supers = None
    if form.super_group is not None:
        dtype = TORCH_DTYPES[form.super_scale_dtype]
        supers = part(BlockPart.SUPER_SCALES, 1024 // form.super_group, dtype)
    codes = part(BlockPart.CODES, 1024, torch.int8)
    assert same_bits(dequantize_int8(codes, scales, torch.float32, supers).numpy(), expected)
    if form.bits < 8:
        packed = part(BlockPart.CODES, packed_words(1024, form.bits), torch.int32)
        weights = QuantizedWeight(packed, scales, None, (1, form.group), supers, form.bits, form.codebook)
        assert same_bits(dequantize_packed(weights, torch.float32).numpy(), expected)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("rope_heads", "order"),
    [(0, None), (4, None), (0, HeadOrder(0, 8, 2, 2, 14)), (0, HeadOrder(1, 0, 2, 2, 256))],
)
@pytest.mark.parametrize("kind", [*EXACT_FORMS, "IQ2_S", "BF16"])
def test_blocks_read_by_threads_become_the_same(
    kind: str,
    rope_heads: int,
    order: HeadOrder | None,
    device: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two tensors one above the other, in slices of few rows: all parts that are asked for, and not all."""
    size, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    one = 64 * 1024 // size * nbytes
    monkeypatch.setattr(readers, "PIECE_BYTES", one // 64 * 5)
    random = np.random.default_rng(3)
    if kind == "BF16":
        data = torch.randn(128, 1024).bfloat16().view(torch.uint8).numpy()
    else:
        data = plausible_blocks(kind, 2 * 64 * 1024 // size, random)
    raw = np.concatenate((np.zeros(7, np.uint8), data.flatten()))
    file = tmp_path / "file"
    raw.tofile(file)
    blocks = StoredBlocks(kind, BlockPart.WEIGHTS, (64, 1024), rope_heads, order)
    forms = {BlockPart.WEIGHTS: (1024, torch.float32)}
    if (form := exact_form(kind, order)) is not None:
        packed = (1024, torch.int8) if form.bits == 8 else (packed_words(1024, form.bits), torch.int32)
        forms[BlockPart.CODES] = packed
        forms[BlockPart.SCALES] = 1024 // form.group, TORCH_DTYPES[form.scale_dtype]
        if form.super_group is not None:
            forms[BlockPart.SUPER_SCALES] = 1024 // form.super_group, TORCH_DTYPES[form.super_scale_dtype]
    reader = ThreadedReader(torch.device(device))
    counted: list[int] = []
    threaded = BlockReader(reader, torch.device(device))
    found = {}
    for part, (width, dtype) in forms.items():
        stored = replace(blocks, part=part, rows_after=(7 + one,))
        info = TensorInfo("x", "F32", (128, width), file, 7, 7 + one, StoredLayout.GGUF_BLOCKS, stored)
        found[part] = torch.zeros(128, width, dtype=dtype, device=device)
        assert threaded.can_read(stored, one)
        threaded.read(info, stored, found[part])
    part = BlockPart.CODES if form is not None else BlockPart.WEIGHTS
    alone = torch.zeros_like(found[part][:64])
    info = replace(info, start=7 + one, end=7 + 2 * one)
    threaded.read(info, replace(blocks, part=part), alone)
    threaded.flush()
    reader.synchronize(counted.append)
    reader.close()
    assert sum(counted) == one * (5 if form is not None else 3)
    for part, target in found.items():
        expected = torch.zeros_like(target, device="cpu")
        for number, rows in enumerate(expected.chunk(2)):
            piece = torch.from_numpy(raw[7 + number * one :][:one])
            fill_from_blocks(piece, replace(blocks, part=part), rows)
        assert torch.equal(target.cpu().view(torch.uint8), expected.view(torch.uint8)), part
    lower = found[BlockPart.CODES if form is not None else BlockPart.WEIGHTS][64:]
    assert torch.equal(alone.cpu().view(torch.uint8), lower.cpu().view(torch.uint8))


def same_bits(found: Any, expected: Any) -> bool:
    """Whether two float32 arrays are equal, where any NaN equals any other."""
    equal = found.view(np.uint32) == expected.view(np.uint32)
    return found.shape == expected.shape and bool((equal | np.isnan(found) & np.isnan(expected)).all())


# --- models ------------------------------------------------------------------------------------------------


def engine(model: Path, device: str = "cpu") -> NativeEngine:
    options = EngineOptions(
        device=device, dtype="float32", max_model_len=1024, max_num_batched_tokens=128, max_num_seqs=5
    )
    return NativeEngine(open_checkpoint(model), options)


def told_by(
    model: Path, conversation: Any, monkeypatch: pytest.MonkeyPatch, tokens: int = 8
) -> tuple[list[list[int]], Tensor]:
    """Greedy tokens and all logits on the way."""
    loaded = engine(model)
    seen: list[Tensor] = []
    forward = loaded.runner.run

    def watching(batch: list[ScheduledChunk]) -> StepOutput:
        scores: StepOutput = forward(batch)
        seen.append(scores.logits.clone())
        return scores

    monkeypatch.setattr(loaded.runner, "run", watching)
    return run(loaded, conversation, tokens=tokens), torch.cat(seen)


def assert_same(first: tuple[Any, Tensor], second: tuple[Any, Tensor]) -> None:
    assert first[0] == second[0]
    assert torch.equal(first[1], second[1])
    assert first[1].std() > 0.1


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("tied", "f32"),
        ("tied", "q8_0"),
        ("untied_sharded", "q4_0"),
        ("vision_head_72", "bf16"),
        ("half_with_biases", "f16"),
        ("wide_heads_one_level", "q4_1"),
        ("odd_vocab_one_kv_head", "q5_0"),
    ],
)
def test_pictures_and_text(
    name: str, weights: str, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, mmproj = as_gguf(tiny(name), tmp_path / "gguf", weights)
    wide = wide_copy(tiny(name), tmp_path / "wide", model, mmproj)
    found = told_by(model, CONVERSATIONS["picture"], monkeypatch)
    assert_same(found, told_by(wide, CONVERSATIONS["picture"], monkeypatch))


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("qwen2", "q8_0"),
        ("qwen2_half", "f16"),
        ("qwen3", "f32"),
        ("qwen3_biased", "q5_1"),
        ("llama_biased_stretched", "f32"),
        ("llama2", "q8_0"),
        ("phi3", "q4_0"),
        ("phi3_long", "bf16"),
    ],
)
def test_text_only_decoders(
    name: str, weights: str, tiny_decoder: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_decoder(name)
    if name.startswith("phi3"):
        source = with_stripped_spaces(source, tmp_path / "source")
    model, mmproj = as_gguf(source, tmp_path / "gguf", weights)
    assert mmproj is None
    wide = wide_copy(source, tmp_path / "wide", model)
    question = single_turn("how many cats are there?")
    assert_same(told_by(model, question, monkeypatch), told_by(wide, question, monkeypatch))


def with_stripped_spaces(folder: Path, target: Path) -> Path:
    """A copy whose control tokens take the spaces after them, as those of the real Phi-3 do."""
    shutil.copytree(folder, target)
    tokenizer = json.loads((target / "tokenizer.json").read_text("utf-8"))
    for token in tokenizer["added_tokens"]:
        token["rstrip"] = token["content"] not in ("<s>", "<unk>")
    (target / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    return target


def wide_enough(folder: Path) -> Path:
    """A Qwen3 whose rows are whole blocks of 256."""
    spec = replace(DECODERS["qwen3"], hidden=256, intermediate=512, head_dim=64)
    folder.mkdir()
    words = tiny_text.tokenizer()
    words.save(str(folder / "tokenizer.json"))
    ends = [words.token_to_id("<|im_end|>")]
    contents = {
        "config.json": config_json(spec) | {"num_hidden_layers": 2},
        "tokenizer_config.json": tokenizer_settings(spec),
        "generation_config.json": {"eos_token_id": ends},
    }
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    tensors = random_tensors(read_config(folder), torch.float32, 11)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wide_enough(tmp_path_factory.mktemp("wide-enough") / "source")


@pytest.fixture(scope="module")
def in_blocks(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """``source`` in blocks of a type, written once. Not to be changed."""
    return cache(lambda kind: as_blocks(source, tmp_path_factory.mktemp("blocks") / kind, kind)[0])


@pytest.fixture(scope="module")
def widened(source: Path, in_blocks: Written, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """The same weights in float32, likewise."""
    return cache(lambda kind: wide_copy(source, tmp_path_factory.mktemp("wide") / kind, in_blocks(kind)))


@pytest.mark.parametrize("kind", sorted(set(BLOCK_TYPES) - {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"}))
def test_every_block_type_runs(
    kind: str, in_blocks: Written, widened: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, wide = in_blocks(kind), widened(kind)
    question = single_turn("how many cats are there?")
    assert_same(
        told_by(model, question, monkeypatch, tokens=3), told_by(wide, question, monkeypatch, tokens=3)
    )


# --- memory ------------------------------------------------------------------------------------------------


def narrow_loader(folder: Path, dtype: torch.dtype = torch.float32) -> Loader:
    """A loader that leaves codes as they are, as on a GPU."""
    loader = Loader(open_checkpoint(folder), torch.device("cpu"), dtype)
    loader._keeps_quantized = True
    return loader


@pytest.mark.parametrize(
    "kind", ["Q8_0", "Q4_0", "Q5_1", "Q5_K", "Q6_K", "Q3_K", "IQ4_XS", "IQ3_S", "NVFP4", "Q4_K", "IQ2_S"]
)
def test_layers_that_stay_narrow(kind: str, in_blocks: Written, widened: Written) -> None:
    """As on a GPU, but multiplied by their reference."""
    model, wide = in_blocks(kind), widened(kind)
    names = [f"model.layers.1.self_attn.{part}_proj" for part in "qkv"]
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0))
    with narrow_loader(model) as loader, narrow_loader(wide) as reference:
        layer, expected = loader.linear(*names), reference.linear(*names)
    form = EXACT_FORMS.get(kind)
    assert isinstance(layer, DenseLinear if form is None else Int8Linear if form.bits == 8 else PackedLinear)
    assert torch.equal(layer(x), expected(x))


@pytest.mark.parametrize("kind", sorted(EXACT_FORMS.keys() - {"Q8_0"}))
def test_embeddings_that_stay_narrow(kind: str, in_blocks: Written) -> None:
    """Rows and logits of packed codes are those of the same codes in 8 bits."""
    model = in_blocks(kind)
    with narrow_loader(model) as loader:
        table = loader.embedding("model.embed_tokens")
    assert isinstance(table, PackedEmbedding)
    assert (table.weights.bits, table.weights.codebook) == (
        EXACT_FORMS[kind].bits,
        EXACT_FORMS[kind].codebook,
    )
    info = loader.checkpoint.tensors["model.embed_tokens.weight_packed"]
    assert info.blocks is not None
    assert info.blocks.type == kind
    codes = torch.empty(info.blocks.shape, dtype=torch.int8)
    raw = np.fromfile(info.file, np.uint8, info.end - info.start, offset=info.start)
    fill_from_blocks(torch.from_numpy(raw), info.blocks, codes)
    in_bytes = dequantize_int8(codes, table.weights.scale, torch.float32, table.weights.super_scale)
    ids = torch.tensor([3, len(codes) - 1, 0])
    assert torch.equal(table(ids), in_bytes[ids])
    x = torch.randn(2, 256, generator=torch.Generator().manual_seed(0))
    assert torch.equal(table.head()(x), x @ in_bytes.T)


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0"])
def test_the_plan_knows_every_byte_of_a_qwen3_vl(kind: str, tiny: Tiny, tmp_path: Path) -> None:
    model, _ = as_gguf(tiny("untied_sharded"), tmp_path / "gguf", kind.lower())
    checkpoint = open_checkpoint(model)
    planned = model_of("x", checkpoint.config, checkpoint.tensors, "the test")
    with narrow_loader(model, torch.bfloat16) as loader:
        text = TextModel(checkpoint.config, loader)
        tower = VisionTower(checkpoint.config.required_vision, loader)
    assert tensor_bytes([text.layers, text.norm]) == planned.text_bytes
    assert tensor_bytes([text.embedding, text.head]) == planned.embedding_bytes
    assert tensor_bytes(tower) == planned.vision_bytes


@pytest.mark.parametrize(
    "kind",
    ["Q2_K", "Q3_K", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4", "IQ3_S"],
)
def test_the_plan_knows_every_byte_of_each_type(kind: str, in_blocks: Written) -> None:
    model = in_blocks(kind)
    checkpoint = open_checkpoint(model)
    planned = model_of("x", checkpoint.config, checkpoint.tensors, "the test")
    with narrow_loader(model, torch.bfloat16) as loader:
        text = TextModel(checkpoint.config, loader)
    assert tensor_bytes([text.layers, text.norm]) == planned.text_bytes
    assert tensor_bytes([text.embedding, text.head]) == planned.embedding_bytes
    weights = [info for info in checkpoint.tensors.values() if info.blocks is not None]
    assert sum(info.bytes for info in weights) == sum(
        tensor.n_bytes
        for tensor in gguf.GGUFReader(model).tensors
        if tensor.tensor_type.name not in PLAIN_TYPES
    )


@pytest.mark.skipif(
    not uses_half_weights(torch.device("cpu"), torch.float32), reason="this torch has no float16 GEMM"
)
@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "Q6_K", "IQ2_S"])
def test_the_plan_knows_every_byte_in_ram(
    kind: str, stored: bool, in_blocks: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where large matrices and tables are not in float32: all of them here."""
    if not stored:
        monkeypatch.setattr(products, "available", lambda: False)
    monkeypatch.setattr(ram, "LEAST_WEIGHTS", 1)
    monkeypatch.setattr(ram, "LEAST_INPUTS", 1)
    model = in_blocks(kind)
    with NativeBackend.load(model, EngineOptions(device="cpu", max_model_len=256)) as backend:
        account = backend.account()
        assert cpu_matrices_in(backend.engine.runner.text)
        assert stored or isinstance(backend.engine.runner.text.embedding, HalfEmbedding)
    assert account.settings.cpu_16_bit
    expected = expect_in_ram(
        open_checkpoint(model),
        account.settings.kv_tokens,
        4,
        cpu_16_bit=True,
        cpu_stored=account.settings.cpu_stored,
        sequences=1,
    )
    actual = {**account.memory.weights, "kv_cache": account.memory.kv_cache}
    for line in expected.lines:
        assert 0 <= actual.get(line.line, 0) - line.bytes < 512, line.line


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [*EXACT_FORMS, "IQ2_S"])
def test_the_kernels_say_what_the_cpu_says(kind: str, in_blocks: Written) -> None:
    model = in_blocks(kind)
    conversations = [CONVERSATIONS["text"], single_turn("how many cats are there?")]
    assert run(engine(model, "cuda"), *conversations) == run(engine(model), *conversations)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", EXACT_FORMS)
def test_blocks_are_taken_apart_alike_on_a_gpu(kind: str) -> None:
    form = EXACT_FORMS[kind]
    raw = torch.from_numpy(plausible_blocks(kind, 64 * 1024 // 32, np.random.default_rng(1)))[
        :64
    ].contiguous()
    weights = len(raw) * gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]
    for part, width, dtype in (
        (BlockPart.CODES, weights // 64, torch.int8),
        (BlockPart.SCALES, weights // 64 // form.group, TORCH_DTYPES[form.scale_dtype]),
        (BlockPart.WEIGHTS, weights // 64, torch.float32),
    ):
        targets = [torch.empty(64, width, dtype=dtype, device=device) for device in ("cpu", "cuda")]
        for target in targets:
            fill_from_blocks(raw.flatten(), StoredBlocks(kind, part, (64, weights // 64)), target)
        assert torch.equal(targets[0], targets[1].cpu())


def test_rows_of_large_tables_are_read_in_slices(in_blocks: Written) -> None:
    model = in_blocks("IQ2_S")
    name = "model.layers.0.mlp.down_proj.weight"
    with narrow_loader(model) as loader:
        whole = loader.tensor(name)
        slices = list(loader.rows(name, 100))
    assert [len(each) for each in slices] == [100, 100, 56]
    assert torch.equal(torch.cat(slices), whole)


def test_plausible_blocks_are_plausible() -> None:
    random = np.random.default_rng(3)
    for kind in BLOCK_TYPES:
        weights = gguf.dequantize(plausible_blocks(kind, 64, random), gguf.GGMLQuantizationType[kind])
        assert 0.005 < weights.std() < 1, kind


# --- answers -----------------------------------------------------------------------------------------------


def test_mini_finds_the_same_objects_and_boxes(tmp_path: Path) -> None:
    """Through a GGUF and its mmproj in float32 as through safetensors."""
    model, tower = as_gguf(mini_folder(), tmp_path / "gguf")
    assert tower is not None
    tower = tower.rename(tmp_path / "tower.gguf")  # elsewhere, so that it is named
    photo = Path(__file__).parents[2] / "examples" / "pictures" / "tractor-and-cat.png"
    found = []
    for source, mmproj in ((mini_folder(), None), (model, tower)):
        with VLM(source, mmproj=mmproj, device="cpu") as vlm:
            found.append([(thing.label, thing.box) for thing in vlm.scene(photo).objects])
    assert found[0] == found[1]
    assert len(found[0]) > 1


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q5_K", "IQ4_XS"])
def test_one_row_with_columns_in_another_order_is_packed(kind: str) -> None:
    """As the last slice of a matrix may be."""
    form = EXACT_FORMS[kind]
    size, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = np.random.default_rng(4).integers(0, 256, (3, 1024 // size * nbytes), dtype=np.uint8)
    order = HeadOrder(1, 0, 2, 2, 256)

    def packed(rows: int) -> Tensor:
        target = torch.empty(rows, packed_words(1024, form.bits), dtype=torch.int32)
        blocks = StoredBlocks(kind, BlockPart.CODES, (rows, 1024), order=order)
        fill_from_blocks(torch.from_numpy(raw[:rows]).flatten(), blocks, target)
        return target

    assert torch.equal(packed(1), packed(3)[:1])
