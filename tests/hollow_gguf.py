"""GGUF files of Qwen3-VL's kind with any shapes and block types, as llama.cpp names things; data are holes.

Only the header is written; the file is then made as long as its tensors call for, which takes no disk.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter

WANTED_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|im_end|>")
TypeOf = Callable[[str], str]


@dataclass(frozen=True)
class Shapes:
    """Sizes of a model; those of ``QWEN3_VL_4B`` are the real ones."""

    hidden: int = 256
    inner: int = 512
    layers: int = 2
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 128
    vocabulary: int = 640
    tied: bool = True
    v_depth: int = 3
    v_hidden: int = 64
    v_inner: int = 128
    v_heads: int = 2
    deepstack: tuple[int, ...] = (1, 2)

    @property
    def text(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the text model's tensors, outputs first."""
        width, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = {
            "attn_norm": (self.hidden,),
            "attn_q": (width, self.hidden),
            "attn_k": (keys, self.hidden),
            "attn_v": (keys, self.hidden),
            "attn_q_norm": (self.head_dim,),
            "attn_k_norm": (self.head_dim,),
            "attn_output": (self.hidden, width),
            "ffn_norm": (self.hidden,),
            "ffn_gate": (self.inner, self.hidden),
            "ffn_up": (self.inner, self.hidden),
            "ffn_down": (self.hidden, self.inner),
        }
        found = {"token_embd.weight": (self.vocabulary, self.hidden), "output_norm.weight": (self.hidden,)}
        if not self.tied:
            found["output.weight"] = (self.vocabulary, self.hidden)
        for number in range(self.layers):
            found |= {f"blk.{number}.{name}.weight": shape for name, shape in layer.items()}
        return found

    @property
    def tower(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the vision tower's tensors."""
        merged = 4 * self.v_hidden
        linear = {
            "attn_qkv": (3 * self.v_hidden, self.v_hidden),
            "attn_out": (self.v_hidden, self.v_hidden),
            "ffn_up": (self.v_inner, self.v_hidden),
            "ffn_down": (self.v_hidden, self.v_inner),
        }
        found: dict[str, tuple[int, ...]] = {
            "v.patch_embd.weight": (self.v_hidden, 3, 16, 16),
            "v.patch_embd.weight.1": (self.v_hidden, 3, 16, 16),
            "v.patch_embd.bias": (self.v_hidden,),
            "v.position_embd.weight": (2304, self.v_hidden),
        }
        modules = {"v.post_ln": (self.v_hidden,), "mm.0": (merged, merged), "mm.2": (self.hidden, merged)}
        for number in range(self.v_depth):
            modules |= {f"v.blk.{number}.{name}": (self.v_hidden,) for name in ("ln1", "ln2")}
            modules |= {f"v.blk.{number}.{name}": shape for name, shape in linear.items()}
        for number in self.deepstack:
            place = f"v.deepstack.{number}"
            modules |= {f"{place}.norm": (merged,), f"{place}.fc1": (merged, merged)}
            modules |= {f"{place}.fc2": (self.hidden, merged)}
        for name, shape in modules.items():
            found |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
        return found


TINY = Shapes()
QWEN3_VL_4B = Shapes(
    hidden=2560,
    inner=9728,
    layers=36,
    heads=32,
    kv_heads=8,
    vocabulary=151936,
    v_depth=24,
    v_hidden=1024,
    v_inner=4096,
    v_heads=16,
    deepstack=(5, 11, 17),
)


def q4_k_m(name: str) -> str:
    """The type of a matrix in about llama.cpp's Q4_K_M: some parts in Q6_K."""
    return (
        "Q6_K" if "attn_v" in name or "ffn_down" in name or name.startswith(("token", "output")) else "Q4_K"
    )


@cache
def only(kind: str) -> TypeOf:
    """Every matrix in ``kind``."""
    return lambda name: kind


def with_vocabulary(shapes: Shapes, count: int) -> Shapes:
    """``shapes`` with a vocabulary of ``count`` tokens."""
    return replace(shapes, vocabulary=count)


def write_model(
    path: Path,
    kind: TypeOf = q4_k_m,
    shapes: Shapes = TINY,
    *,
    tokens: Iterable[str] = (),
    without: tuple[str, ...] = (),
    architecture: str = "qwen3vl",
) -> Path:
    """Write a text model's file. ``without``: metadata keys to leave out, by the part after the architecture.

    ``tokens``: some of the vocabulary: the bytes and control tokens come first, and it is filled up to
    ``shapes.vocabulary``.
    """
    return _write(path, *_model(kind, shapes, tuple(tokens), without, architecture))


@cache  # the writer takes a tenth of a second for a long vocabulary
def _model(
    kind: TypeOf, shapes: Shapes, tokens: tuple[str, ...], without: tuple[str, ...], architecture: str
) -> tuple[bytes, int]:
    writer = GGUFWriter(None, architecture)
    writer.add_name("Qwen3-VL")
    numbers = {
        "block_count": shapes.layers,
        "context_length": 262144,
        "embedding_length": shapes.hidden,
        "feed_forward_length": shapes.inner,
        "attention.head_count": shapes.heads,
        "attention.head_count_kv": shapes.kv_heads,
        "attention.key_length": shapes.head_dim,
        "attention.value_length": shapes.head_dim,
        "n_deepstack_layers": len(shapes.deepstack),
    }
    for key, value in numbers.items():
        if key not in without:
            writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.rope.freq_base", 5e6)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-6)
    if "rope.dimension_sections" not in without:
        writer.add_array(f"{architecture}.rope.dimension_sections", [24, 20, 20, 0])
    given = list(dict.fromkeys([*_byte_letters(), "to", *WANTED_TOKENS, *tokens]))
    given += [f"token{number}" for number in range(shapes.vocabulary - len(given))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(given)
    writer.add_token_types([3 if token in WANTED_TOKENS else 1 for token in given])
    writer.add_token_merges([f"{token[:1]} {token[1:]}" for token in given if len(token) == 2] or ["t o"])
    writer.add_eos_token_id(given.index("<|im_end|>"))
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    return _header(writer, shapes.text, kind)


def write_mmproj(path: Path, kind: TypeOf | None = None, shapes: Shapes = TINY) -> Path:
    """Write the file of a vision tower, in F16 if no ``kind`` is given."""
    return _write(path, *_tower(kind or only("F16"), shapes))


@cache
def _tower(kind: TypeOf, shapes: Shapes) -> tuple[bytes, int]:
    writer = GGUFWriter(None, "clip")
    writer.add_string("clip.projector_type", "qwen3vl_merger")
    writer.add_bool("clip.has_vision_encoder", True)
    numbers = {
        "image_size": 768,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "embedding_length": shapes.v_hidden,
        "feed_forward_length": shapes.v_inner,
        "block_count": shapes.v_depth,
        "attention.head_count": shapes.v_heads,
        "projection_dim": shapes.hidden,
    }
    for key, value in numbers.items():
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    writer.add_array("clip.vision.image_mean", [0.5] * 3)
    writer.add_array("clip.vision.image_std", [0.5] * 3)
    marks = [number in shapes.deepstack for number in range(shapes.v_depth)]
    writer.add_array("clip.vision.is_deepstack_layers", marks)
    return _header(writer, shapes.tower, kind)


def _header(writer: GGUFWriter, tensors: dict[str, tuple[int, ...]], kind: TypeOf) -> tuple[bytes, int]:
    """The file up to its data, and the size of the whole."""
    total = 0
    for name, shape in tensors.items():
        is_matrix = len(shape) == 2 and "position" not in name
        stored = GGMLQuantizationType[kind(name) if is_matrix else "F32"]
        block, block_bytes = GGML_QUANT_SIZES[stored]
        nbytes = prod(shape) // block * block_bytes
        in_bytes = (*shape[:-1], shape[-1] // block * block_bytes)
        writer.add_tensor_info(name, in_bytes, np.dtype(np.uint8), nbytes, raw_dtype=stored)
        total += nbytes + -nbytes % 32
    with TemporaryDirectory() as folder:
        path = Path(folder) / "header.gguf"
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        header = path.read_bytes()
    return header, len(header) + -len(header) % 32 + total


def _write(path: Path, header: bytes, size: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(header)
        file.truncate(size)
    return path


def _byte_letters() -> list[str]:
    """The letters that stand for the 256 bytes in a byte-level vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return [*map(chr, plain), *(chr(256 + number) for number in range(len(others)))]
