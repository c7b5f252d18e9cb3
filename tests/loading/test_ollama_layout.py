"""Ollama's own layout of Qwen3-VL, the tower inside the model's file, gives the words of the same weights."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from tests.checkpoint.test_gguf_models import edited, no_tensor, reshaped, without
from tests.damaged_gguf import rewritten
from tests.engine.test_parity import CONVERSATIONS
from tests.gguf_files import as_gguf
from tests.loading.test_gguf_blocks import assert_same, told_by
from vlfit.checkpoint.gguf.gguf_checkpoint import gguf_notes
from vlfit.checkpoint.gguf.gguf_config import read_gguf_config
from vlfit.checkpoint.gguf.gguf_header import GGUFHeader, read_gguf_header
from vlfit.checkpoint.gguf.gguf_vocabulary import read_vocabulary
from vlfit.checkpoint.gguf.unopened import read_unopened
from vlfit.checkpoint.source import mini_folder, open_checkpoint
from vlfit.errors import CheckpointError, UnknownArchitecture
from vlfit.models.qwen3_vl.config import read_image_processor_config

# Pairs of Ollama's converter that concern a tower: the first that fits at a place is taken.
REPLACEMENTS = (
    ("model.visual", "v"),
    ("patch_embed.proj", "patch_embed"),
    ("blocks", "blk"),
    ("attn.qkv", "attn_qkv"),
    ("attn.proj", "attn_out"),
    ("deepstack_merger_list", "deepstack_merger"),
)


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def as_ollama(folder: Path, target: Path, sections: str = "mrope_sections") -> Path:
    """The checkpoint in ``folder`` as Ollama's converter writes it; ``sections``: the key that has them."""
    text, _ = as_gguf(folder, target, "f32")
    checkpoint = open_checkpoint(folder)
    vision, pictures = checkpoint.config.required_vision, read_image_processor_config(folder)
    reader = gguf.GGUFReader(text)
    writer = gguf.GGUFWriter(target / "ollama.gguf", "qwen3vl")
    left_out = ("general.architecture", "qwen3vl.rope.dimension_sections", "qwen3vl.n_deepstack_layers")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in left_out:
            kind = field.types[0]
            sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, sub)
    place = "qwen3vl.vision"
    for key, number in (
        ("block_count", vision.depth),
        ("embedding_length", vision.hidden_size),
        ("attention.head_count", vision.num_heads),
        ("num_channels", 3),
        ("patch_size", vision.patch_size),
        ("spatial_merge_size", vision.spatial_merge_size),
        ("temporal_patch_size", 2),
        ("shortest_edge", pictures.min_pixels),
        ("longest_edge", pictures.max_pixels),
    ):
        writer.add_uint32(f"{place}.{key}", number)
    writer.add_float32(f"{place}.attention.layer_norm_epsilon", 1e-6)
    writer.add_float32(f"{place}.rope.freq_base", 1e4)
    writer.add_array(f"{place}.deepstack_visual_indexes", list(vision.deepstack_visual_indexes))
    for key in ("image_mean", "image_std"):
        writer.add_array(f"{place}.{key}", list(pictures.mean if key == "image_mean" else pictures.std))
    if sections:
        writer.add_array(f"qwen3vl.{sections}", list(checkpoint.config.text.mrope_section))
    tensors = {tensor.name: np.asarray(tensor.data) for tensor in reader.tensors}
    for name, values in load_source(folder).items():
        if not name.startswith("model.visual."):
            continue
        numbers = values.float().numpy()
        dtype = np.dtype(np.float16 if numbers.ndim > 1 else np.float32)
        for old, new in REPLACEMENTS:
            name = name.replace(old, new)
        if "attn_qkv" in name:
            for letter, rows in zip("qkv", np.split(numbers, 3), strict=True):
                tensors[name.replace("attn_qkv", f"attn_{letter}")] = rows.astype(dtype)
        elif name == "v.patch_embed.weight":
            tensors[name] = numbers.reshape(-1, *numbers.shape[2:]).astype(dtype)
        else:
            tensors[name] = numbers.astype(dtype)
    for name in sorted(tensors):  # as Ollama sorts what is in no block
        writer.add_tensor(name, tensors[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for path in target.glob("*.gguf"):
        if path.name != "ollama.gguf":
            path.unlink()
    return target / "ollama.gguf"


def load_source(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


@pytest.fixture(scope="module")
def mini_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Mini as Ollama's converter writes it. Not to be changed."""
    return as_ollama(mini_folder(), tmp_path_factory.mktemp("mini") / "ollama")


@pytest.fixture
def mini_inside(mini_file: Path) -> GGUFHeader:
    return read_gguf_header(mini_file)


@pytest.mark.parametrize("name", ["mini", "half_with_biases", "wide_heads_one_level"])
def test_words_of_the_same_weights(
    name: str, tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = mini_folder() if name == "mini" else tiny(name)
    model = as_ollama(source, tmp_path / "ollama")
    wide = shutil.copytree(source, tmp_path / "wide")
    for path in wide.glob("*.safetensors*"):
        path.unlink()
    rounded = {
        each: values.half().float() if "visual" in each and values.ndim > 1 else values.float()
        for each, values in load_source(source).items()
    }
    save_file(rounded, wide / "model.safetensors", metadata={"format": "pt"})
    found = told_by(model, CONVERSATIONS["picture"], monkeypatch)
    assert_same(found, told_by(wide, CONVERSATIONS["picture"], monkeypatch))
    opened, expected = open_checkpoint(model), open_checkpoint(source)
    assert replace(opened.config, quantization=None) == expected.config
    assert read_image_processor_config(opened.folder) == read_image_processor_config(source)
    assert sum(info.bytes for info in opened.tensors.values()) == sum(
        tensor.nbytes for tensor in read_gguf_header(model).tensors.values()
    )
    unopened = read_unopened("x", model, None)
    assert unopened.config.vision == opened.config.vision
    assert {name: info.shape for name, info in unopened.tensors.items()} == {
        name: info.shape for name, info in opened.tensors.items()
    }


@pytest.mark.parametrize("key", ["rope.mrope_section", "rope.dimension_sections", ""])
def test_sections_under_any_key_or_from_nobody(key: str, tmp_path: Path) -> None:
    model = as_ollama(mini_folder(), tmp_path / "ollama", key)
    if not key:  # no known model has mini's shapes
        with pytest.raises(CheckpointError, match="dimension_sections"):
            open_checkpoint(model)
        return
    opened = open_checkpoint(model)
    assert opened.config.text.mrope_section == open_checkpoint("mini").config.text.mrope_section
    assert gguf_notes(opened.folder) == ()


def renamed(header: GGUFHeader, old: str, new: str) -> GGUFHeader:
    tensors = {name.replace(old, new): tensor for name, tensor in header.tensors.items()}
    return replace(header, tensors=tensors)


WRONG: dict[str, tuple[Callable[[GGUFHeader], GGUFHeader], type[CheckpointError]]] = {
    "names of another layout": (
        lambda model: renamed(model, "patch_embed.", "patch_embd."),
        UnknownArchitecture,
    ),
    "another architecture": (
        lambda model: edited(model, general__architecture="qwen2"),
        UnknownArchitecture,
    ),
    "no keys": (lambda model: without(model, "v.blk.1.attn_k.weight"), CheckpointError),
    "values of another size": (lambda model: reshaped(model, "v.blk.1.attn_v.bias", 7), CheckpointError),
    "no blocks": (lambda model: without(model, "v.blk.0.mlp.linear_fc1.weight"), CheckpointError),
    "levels in no order": (
        lambda model: edited(model, qwen3vl__vision__deepstack_visual_indexes=np.array([2, 1], np.int32)),
        CheckpointError,
    ),
    "a level beyond the tower": (
        lambda model: edited(model, qwen3vl__vision__deepstack_visual_indexes=np.array([99], np.int32)),
        CheckpointError,
    ),
    "a billion blocks": (lambda model: edited(model, qwen3vl__vision__block_count=10**9), CheckpointError),
    "other frequencies": (
        lambda model: edited(model, qwen3vl__vision__rope__freq_base=1e5),
        UnknownArchitecture,
    ),
    "no size": (lambda model: edited(model, qwen3vl__vision__patch_size=None), CheckpointError),
}


@pytest.mark.parametrize("name", WRONG)
def test_other_files_are_refused(name: str, mini_inside: GGUFHeader) -> None:
    change, error = WRONG[name]
    with pytest.raises(error) as caught:
        read_gguf_config(change(mini_inside), None, no_tensor)
    assert mini_inside.name in caught.value.message


@pytest.mark.parametrize(
    ("metadata", "left_out", "says"),
    [
        ({"qwen3vl.vision.image_mean": [0.5, 0.5]}, "", "qwen3vl.vision.image_mean"),
        ({"qwen3vl.vision.attention.head_count": 5}, "", "qwen3vl.vision.attention.head_count"),
        ({"qwen3vl.vision.shortest_edge": 99_999_999}, "", "qwen3vl.vision.longest_edge"),
        ({}, "v.blk.0.norm1.weight", "v.blk.0.norm1.weight"),
        ({}, "v.pos_embed.weight", "v.pos_embed.weight"),
        ({}, "v.merger.linear_fc2.bias", "v.merger.linear_fc2.bias"),
    ],
)
def test_errors_have_ollamas_names(
    metadata: dict[str, Any], left_out: str, says: str, mini_file: Path, tmp_path: Path
) -> None:
    model = rewritten(
        mini_file, tmp_path / "m.gguf", metadata, lambda name: None if name == left_out else name
    )
    reads: tuple[Callable[[], object], ...] = (
        lambda: open_checkpoint(model),
        lambda: read_unopened("m", model, None),
    )
    for read in reads:
        with pytest.raises(CheckpointError) as caught:
            read()
        assert says in caught.value.message
        assert caught.value.message.startswith("m.gguf")
        assert "clip." not in caught.value.message


def test_a_second_tower(mini_file: Path, mini_inside: GGUFHeader, tmp_path: Path) -> None:
    """One beside the file is not looked at; one that is named is an error."""
    _, tower = as_gguf(mini_folder(), tmp_path / "gguf", "f32")
    assert tower is not None
    model = shutil.copy(mini_file, tmp_path)
    shutil.copy(tower, tmp_path / "mmproj-x.gguf")
    assert open_checkpoint(model).config.vision is not None
    with pytest.raises(CheckpointError):
        read_gguf_config(mini_inside, read_gguf_header(tower), no_tensor)


def test_padding_that_is_called_user_defined_is_no_text(mini_inside: GGUFHeader) -> None:
    tokens = mini_inside.metadata["tokenizer.ggml.tokens"]
    types = mini_inside.metadata["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list)
    assert isinstance(types, np.ndarray)
    padded = edited(
        mini_inside,
        tokenizer__ggml__tokens=[*tokens, "[PAD0]", "[PAD1]"],
        tokenizer__ggml__token_type=np.append(types, [4, 4]).astype(np.int32),
    )
    plain, found = read_vocabulary(mini_inside).tokenizer, read_vocabulary(padded).tokenizer
    assert found["added_tokens"] == plain["added_tokens"]
    assert found["model"]["vocab"] == plain["model"]["vocab"]
