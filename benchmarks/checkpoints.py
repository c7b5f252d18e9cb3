"""Checkpoints to measure with: small ones, and Qwen3-VL's true sizes without a download.

- ``random-100m``, ``random-2b``: written once into benchmarks/cache, in bf16, with transformers.
- ``4B-fp8`` and the like, *sparse*: true headers over a sparse file, whose weights read as zeros. What a
  process holds, and but for a few per cent how long it takes, does not depend on the weights' values.
- ``4B-Q4_K_M`` and the like: the same as GGUF, always sparse.
- the same as safetensors with *random* bytes, where weights have to be read from files.

Tokenizer, chat template and control tokens are mini's, so what such a model says means nothing. Where the
size of the vocabulary counts, ``use_vocabulary`` puts a true one in its place.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from benchmarks.harness import ROOT
from vlfit.checkpoint import catalog
from vlfit.checkpoint.config import ModelConfig
from vlfit.checkpoint.headers import SINGLE_FILE, TensorInfo, read_headers
from vlfit.checkpoint.quantization import INT8
from vlfit.checkpoint.source import Checkpoint, locate_or_download, mini_folder, open_checkpoint
from vlfit.quantize.conversion import DEFAULT_GROUP_SIZE
from vlfit.quantize.gguf_output import write_text_model, write_vision_tower
from vlfit.quantize.output_files import OutputTensor, TensorConversion, plan_shards, plan_tensors
from vlfit.quantize.recipe import UNCHANGED, ConversionOptions, new_recipe, quantization_config

CACHE = ROOT / "benchmarks" / "cache"
BORROWED = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json",
    "preprocessor_config.json", "generation_config.json",
)  # fmt: skip


SECOND_SERIES = "Qwen3.5"  # sizes without a series are Qwen3-VL's
INT8_PARTS = {"E8": "embedding", "H8": "head", "V8": "vision"}


def find_checkpoint(name: str) -> Path:
    """The folder of ``random-100m``, ``random-2b``, mini, or a checkpoint by its name or folder."""
    if name in SHAPES:
        return write_cached_checkpoint(name, mini_folder())
    return open_checkpoint(name).folder


def checkpoint_of(name: str, folder: Path, *, random: bool = False, vocabulary: Path | None = None) -> Path:
    """``SIZE-FORMAT`` (``4B-fp8``) written into ``folder``, sparse or random; else a name or folder.

    Parts of ``INT8_PARTS`` in int8 are added as the plan names them: ``8B-int4-E8-H8``. Formats of ``MIXES``
    (``4B-Q4_K_M``) are written as GGUF, always sparse: then the model's file is returned. A checkpoint that
    is already in ``folder`` is taken as it is. ``vocabulary``: see ``use_vocabulary``, for what is written.
    """
    size, weights = _split_name(name)
    if weights in MIXES and not Path(name).exists():
        found = sorted((folder / name).glob("model-*.gguf"))
        return found[0] if found else write_sparse_gguf(folder / name, size, weights, vocabulary=vocabulary)
    weights, *parts = weights.split("-")
    if weights not in catalog.FORMATS or not set(parts) <= set(INT8_PARTS) or Path(name).exists():
        return locate_or_download(name)[1]
    if not (folder / name).is_dir():
        write = write_random_checkpoint if random else write_sparse_checkpoint
        write(folder / name, size, weights, [INT8_PARTS[part] for part in parts])
        if vocabulary is not None:
            use_vocabulary(folder / name, vocabulary)
    return folder / name


def _split_name(name: str) -> tuple[str, str]:
    """Size and format: ``4B`` and ``int4-E8``, ``Qwen3.5-4B`` and ``fp8``."""
    series = f"{SECOND_SERIES}-" if name.startswith(f"{SECOND_SERIES}-") else ""
    size, _, weights = name.removeprefix(series).partition("-")
    return series + size, weights


def ram_folder(least: int = 10**10) -> str | None:
    """A folder in RAM with ``least`` bytes free, for files that must not be read from a disk; None without.

    Files written elsewhere are in the page cache, too, as long as there is room for them.
    """
    folder = Path("/dev/shm")
    return str(folder) if folder.is_dir() and shutil.disk_usage(folder).free > least else None


def write_picture(size: str) -> Path:
    """A JPEG of ``size`` (WxH) in benchmarks/cache, the same at every call."""
    from vlfit.bench.workload import synthetic_picture

    width, height = (int(side) for side in size.split("x"))
    path = CACHE / f"picture-{width}x{height}.jpg"
    CACHE.mkdir(parents=True, exist_ok=True)
    path.write_bytes(synthetic_picture(width, height))
    return path


# --- small checkpoints in the cache ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a small checkpoint. ``vocabulary`` None: mini's."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vision_hidden: int
    vision_depth: int
    vision_heads: int
    vision_ffn: int
    deepstack: tuple[int, ...]
    vocabulary: int | None = None


SHAPES = {
    "random-100m": Shape(768, 12, 12, 4, 64, 2048, 384, 8, 6, 1536, (2, 4, 6)),
    # The shape of Qwen3-VL-2B, for a GPU.
    "random-2b": Shape(2048, 28, 16, 8, 128, 6144, 1024, 24, 16, 4096, (5, 11, 17), 151936),
}


def write_cached_checkpoint(name: str, mini: Path) -> Path:
    """The folder of a checkpoint of ``SHAPES``, in bf16; written at the first call, always the same bytes."""
    folder = CACHE / name
    borrowed = [mini / file for file in BORROWED if (mini / file).exists()]
    # A new mini may bring a new tokenizer: then the folder is stale.
    state = hashlib.sha256(b"".join(file.read_bytes() for file in borrowed)).hexdigest()
    done = folder / "done"
    if done.exists() and done.read_text("ascii") == state:
        return folder
    import torch
    from transformers import Qwen3VLForConditionalGeneration

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        model: Any = Qwen3VLForConditionalGeneration(reference_config(SHAPES[name], mini))
    finally:
        torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    for file in borrowed:
        shutil.copy(file, folder / file.name)
    done.write_text(state, "ascii")
    return folder


def reference_config(shape: Shape, mini: Path) -> Any:
    """transformers' config of ``shape``: mini's with other sizes."""
    from transformers import Qwen3VLConfig

    base = json.loads((mini / "config.json").read_text("utf-8"))
    half = shape.head_dim // 2
    height = width = half * 5 // 16
    text = {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn,
        "vocab_size": shape.vocabulary or base["text_config"]["vocab_size"],
        "max_position_embeddings": 262144,
        # Three times the usual spread: with less, a tied head makes the model repeat one token forever.
        "initializer_range": 0.06,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5000000.0,
            "mrope_interleaved": True,
            "mrope_section": [half - height - width, height, width],
        },
    }
    vision = {
        "hidden_size": shape.vision_hidden,
        "depth": shape.vision_depth,
        "num_heads": shape.vision_heads,
        "intermediate_size": shape.vision_ffn,
        "out_hidden_size": shape.hidden,
        "deepstack_visual_indexes": list(shape.deepstack),
        "num_position_embeddings": 2304,
    }
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    tokens = {token: base[token] for token in names}
    return Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **tokens)


def count_parameters(folder: Path) -> tuple[int, int]:
    """Parameters of a checkpoint, and how many of them are read to decode one token.

    A token reads all text layers, the last norm and the head (the embedding, if they are tied). One row of an
    untied embedding is not counted.
    """
    total = read = 0
    tied = True
    embedding = 0
    for file in sorted(folder.glob("*.safetensors")):
        for name, entry in read_header(file).items():
            if name == "__metadata__":
                continue
            count = 1
            for size in entry["shape"]:
                count *= size
            total += count
            if name.startswith(("model.language_model.layers.", "model.language_model.norm.", "lm_head.")):
                read += count
            if name.startswith("lm_head."):
                tied = False
            if name.startswith("model.language_model.embed_tokens."):
                embedding = count
    return total, read + (embedding if tied else 0)


def read_header(file: Path) -> dict[str, Any]:
    """The JSON header of a safetensors file: 8 bytes of length, then the text."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header: dict[str, Any] = json.loads(opened.read(length))
    return header


# --- true sizes, sparse ------------------------------------------------------------------------------------

_SINGLE_SHARD = 2**60
_PIXELS = {"shortest_edge": 65536, "longest_edge": 16777216}  # areas, as in the official files


def write_sparse_checkpoint(
    folder: Path,
    size: str,
    weights: str,
    int8: Collection[str] = (),
    group_size: int = DEFAULT_GROUP_SIZE,
) -> Path:
    """Write a model of ``size`` (2B, Qwen3.5-4B) in ``weights`` (bf16, fp8, int4) into the new ``folder``.

    Names, types and shapes are those of the published files, or what ``vlfit convert`` writes. ``int8``:
    which of ``head``, ``embedding`` and ``vision`` are in int8; ``group_size``: of int4.
    """
    entry = next(entry for entry in catalog.family_entries(size) if entry.weights == catalog.BF16)
    plain = Checkpoint(entry.name, folder, entry.config, entry.tensors)
    config = _config(entry.config)
    if weights == catalog.BF16:
        tensors = [TensorConversion(info, (_unchanged(info),)) for info in plain.tensors.values()]
    else:
        parts = {part: INT8 if part in int8 else UNCHANGED for part in ("head", "embedding", "vision")}
        recipe = new_recipe(plain, ConversionOptions(weights, group_size, **parts))
        tensors = plan_tensors(plain, recipe)
        config["quantization_config"] = quantization_config(plain, recipe)
    [shard] = plan_shards(tensors, _SINGLE_SHARD)
    folder.mkdir(parents=True)
    with (folder / SINGLE_FILE).open("wb") as file:
        file.write(shard.header)
        file.truncate(max(end for _, end in shard.offsets.values()))
    (folder / "config.json").write_text(json.dumps(config, indent=1), "utf-8")
    _copy_tokenizer(folder, _small_model(entry.config))
    return folder


def _small_model(model: ModelConfig) -> Path:
    """The small model of the same family, whose tokenizer, template and further settings are borrowed."""
    return ROOT / "tests" / "mini35" if model.model_type == "qwen3_5" else mini_folder()


def _unchanged(info: TensorInfo) -> OutputTensor:
    return OutputTensor(info.name, info.dtype, info.shape, info.bytes)


def _config(model: ModelConfig) -> dict[str, Any]:
    """config.json in the official form: the small model's with the sizes of ``model``."""
    config: dict[str, Any] = json.loads((_small_model(model) / "config.json").read_text("utf-8"))
    config["tie_word_embeddings"] = model.tie_word_embeddings
    for section, sizes in (("text_config", model.text), ("vision_config", model.vision)):
        names = [name for name in config[section] if hasattr(sizes, name) and name != "rope_scaling"]
        config[section] |= {name: getattr(sizes, name) for name in names}
    text = config["text_config"]
    text["tie_word_embeddings"] = model.tie_word_embeddings
    rope = text["rope_scaling" if "rope_scaling" in text else "rope_parameters"]
    rope["mrope_section"] = list(model.text.mrope_section)
    if "partial_rotary_factor" in rope:
        rope["partial_rotary_factor"] = model.text.partial_rotary_factor
        rope["rope_theta"] = model.text.rope_theta
    return config


def _copy_tokenizer(folder: Path, small_model: Path) -> None:
    for name in BORROWED:
        source = small_model / name
        if not source.exists():
            continue
        shutil.copy(source, folder / name)
        if name == "preprocessor_config.json":
            settings = json.loads(source.read_text("utf-8"))
            (folder / name).write_text(json.dumps(settings | {"size": _PIXELS}), "utf-8")


def use_vocabulary(folder: Path, tokenizer: Path) -> None:
    """Replace the vocabulary of the checkpoint in ``folder`` by the file ``tokenizer`` (a tokenizer.json).

    Tokens that the settings name by number (end of a turn, an image) keep their names. Raises ``KeyError`` if
    the new vocabulary lacks one of them.
    """
    old = Tokenizer.from_file(str(folder / "tokenizer.json"))
    shutil.copyfile(tokenizer, folder / "tokenizer.json")
    numbers = Tokenizer.from_file(str(tokenizer)).get_vocab()

    def renumbered(value: Any, name: str = "") -> Any:
        if isinstance(value, dict):
            return {key: renumbered(each, key) for key, each in value.items()}
        if isinstance(value, list):
            return [renumbered(each, name) for each in value]
        if not name.endswith("token_id") or not isinstance(value, int):
            return value
        return numbers[old.id_to_token(value) or ""]

    for file in ("config.json", "generation_config.json"):
        settings = json.loads((folder / file).read_text("utf-8"))
        (folder / file).write_text(json.dumps(renumbered(settings), indent=1), "utf-8")
    settings = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    settings.pop("added_tokens_decoder", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), "utf-8")


# Types of a GGUF's matrices: most of them, the more exact ones, and embedding and head.
MIXES = {
    "Q4_K_M": ("Q4_K", "Q6_K", "Q6_K"),
    "BF16": ("BF16", "BF16", "BF16"),
    "Q8_0": ("Q8_0", "Q8_0", "Q8_0"),
    "Q6_K": ("Q6_K", "Q6_K", "Q6_K"),
    "Q5_K_M": ("Q5_K", "Q6_K", "Q6_K"),
    "Q4_0": ("Q4_0", "Q4_0", "Q6_K"),
    "IQ4_XS": ("IQ4_XS", "IQ4_XS", "Q6_K"),
}


def write_sparse_gguf(
    folder: Path, size: str, mix: str, tower: str = "F16", vocabulary: Path | None = None
) -> Path:
    """Write Qwen3-VL of ``size`` as GGUF files into ``folder``; return the model's file.

    ``mix``: one of ``MIXES``, with llama.cpp's rule: values and the feed-forward's output are more exact in
    the first and last eighth of the layers and in every third between. ``tower``: type of the mmproj.
    """
    most, exact, ends = MIXES[mix]
    written = write_sparse_checkpoint(folder / "source", size, catalog.BF16)
    if vocabulary is not None:
        use_vocabulary(written, vocabulary)
    source = open_checkpoint(written)
    layers = source.config.text.num_hidden_layers

    def type_of(name: str) -> str:
        if ".layers." not in name:
            return ends
        layer = int(name.partition(".layers.")[2].partition(".")[0])
        eighth = layers // 8
        chosen = layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2
        return exact if chosen and (".v_proj." in name or ".down_proj." in name) else most

    model = folder / f"model-{size}-{mix}.gguf"
    write_text_model(model, source, type_of, mix, None)
    write_vision_tower(folder / f"mmproj-{size}-{tower}.gguf", source, tower, None)
    shutil.rmtree(source.folder)
    return model


# --- true sizes, random bytes ------------------------------------------------------------------------------

_BLOCK = 16 * 2**20  # bytes made once for each kind of tensor, and written over and over
_WEIGHT = 0.02  # standard deviation
_SCALE = 0.002  # of quantized weights: about _WEIGHT over the size of their codes
_ONE = np.array([0x3F80], dtype=np.uint16)  # in bfloat16


def write_random_checkpoint(
    folder: Path, size: str, weights: str, int8: Collection[str] = (), group_size: int = DEFAULT_GROUP_SIZE
) -> Path:
    """Write a checkpoint as ``write_sparse_checkpoint`` does, with random weights.

    They are finite and of the size that trained ones have, so nothing overflows.
    """
    write_sparse_checkpoint(folder, size, weights, int8, group_size)
    fill_with_random(folder)
    return folder


def fill_with_random(folder: Path) -> None:
    """Write random bytes into all tensors that the headers in ``folder`` name."""
    blocks: dict[str, bytes] = {}
    for info in read_headers(folder).values():
        kind = _random_kind(info)
        if kind is None:
            continue
        if kind not in blocks:
            blocks[kind] = _RANDOM[kind](np.random.default_rng(7)).tobytes()
        with info.file.open("r+b", buffering=0) as file:
            file.seek(info.start)
            remaining = info.bytes
            while remaining:
                remaining -= file.write(blocks[kind][: min(remaining, _BLOCK)])


def _random_kind(info: TensorInfo) -> str | None:
    """Key of ``_RANDOM`` for a tensor; None for a stored shape, which is not read."""
    if info.name.endswith(".weight_shape"):
        return None
    if "_scale" in info.name:
        return f"scale {info.dtype}"
    if len(info.shape) == 1 and info.name.endswith("norm.weight"):
        return f"norm {info.dtype}"
    return info.dtype


def _bfloat16(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def _bytes(random: np.random.Generator) -> np.ndarray[Any, Any]:
    return random.integers(0, 256, _BLOCK, dtype=np.uint8)


_RANDOM: dict[str, Callable[[np.random.Generator], np.ndarray[Any, Any]]] = {
    "BF16": lambda random: _bfloat16(random.normal(0, _WEIGHT, _BLOCK // 2)),
    "F32": lambda random: random.normal(0, _WEIGHT, _BLOCK // 4).astype(np.float32),
    "norm BF16": lambda random: np.repeat(_ONE, _BLOCK // 2),
    "norm F32": lambda random: np.ones(_BLOCK // 4, dtype=np.float32),
    # Without the exponent's first bit no value is above 2, and none is NaN.
    "F8_E4M3": lambda random: _bytes(random) & np.uint8(0xBF),
    "I32": _bytes,
    "I8": _bytes,
    "scale F32": lambda random: random.uniform(_SCALE / 2, _SCALE, _BLOCK // 4).astype(np.float32),
    "scale BF16": lambda random: _bfloat16(random.uniform(_SCALE / 2, _SCALE, _BLOCK // 2)),
}
