"""What llama.cpp stores otherwise than safetensors: names, the order of heads, numbers, by architecture.

``layout_of`` says it for one tensor; reading undoes it (``loading/block_tensors.py``), writing does it
(``quantize/gguf_output.py``). Source: llama.cpp's ``conversion/`` (``qwen.py`` for Qwen3.5).
"""

from dataclasses import dataclass

from vlfit.checkpoint.config import ModelConfig
from vlfit.checkpoint.gguf.stored_blocks import HeadOrder, NumberChange
from vlfit.models.qwen3_5.config import MTP, Qwen35TextConfig

# ``model_type`` of config.json to ``general.architecture``.
ARCHITECTURES = {
    "qwen3_vl": "qwen3vl",
    "qwen3_5": "qwen35",
    "qwen3_5_text": "qwen35",
    "qwen3": "qwen3",
    "qwen2": "qwen2",
    "llama": "llama",
    "phi3": "phi3",
}
# ``general.architecture`` to the ``model_type`` without and with a vision tower; None: it has none.
MODEL_TYPES: dict[str, tuple[str, str | None]] = {
    "qwen3vl": ("qwen3", "qwen3_vl"),  # without its tower it computes what a Qwen3 does
    "qwen35": ("qwen3_5_text", "qwen3_5"),
    "qwen3": ("qwen3", None),
    "qwen2": ("qwen2", None),
    "llama": ("llama", None),
    "phi3": ("phi3", None),
}


@dataclass(frozen=True, slots=True)
class FileLayout:
    """How one tensor lies in a file.

    ``rope_heads``: as in ``StoredBlocks``. ``order``: heads in another order; None: as they are. ``change``:
    what is done to its numbers. ``shape``: in the file; None: that of the checkpoint.
    """

    rope_heads: int = 0
    order: HeadOrder | None = None
    change: NumberChange | None = None
    shape: tuple[int, ...] | None = None


_AS_IT_IS = FileLayout()


def layout_of(config: ModelConfig, architecture: str, name: str, shape: tuple[int, ...]) -> FileLayout:
    """How files of ``architecture`` have the tensor ``name``, which has ``shape`` in the checkpoint."""
    text = config.text
    if architecture == "llama":
        heads = {".q_proj.": text.num_attention_heads, ".k_proj.": text.num_key_value_heads}
        return FileLayout(next((count for part, count in heads.items() if part in name), 0))
    if isinstance(text, Qwen35TextConfig) and (name.startswith((text.prefix, MTP)) or "lm_head" in name):
        return _qwen35_layout(text, name, shape)
    return _AS_IT_IS


def _qwen35_layout(text: Qwen35TextConfig, name: str, shape: tuple[int, ...]) -> FileLayout:
    """Norms as weights to multiply by; of the gated delta net value heads tiled over key heads, and -exp(A).

    Value heads of a key head are neighbours in the checkpoint; in the file all first ones come first.
    """
    if ".linear_attn." not in name:
        return FileLayout(change=NumberChange.PLUS_ONE) if "norm" in name else _AS_IT_IS
    part = name.partition(".linear_attn.")[2]
    if part == "norm.weight":
        return _AS_IT_IS
    widths = {  # of a head, along the axis that has the heads; where value heads begin
        "in_proj_qkv.weight": (0, text.linear_value_head_dim, 2 * text.key_dim),
        "conv1d.weight": (0, text.linear_value_head_dim, 2 * text.key_dim),
        "in_proj_z.weight": (0, text.linear_value_head_dim, 0),
        "in_proj_a.weight": (0, 1, 0),
        "in_proj_b.weight": (0, 1, 0),
        "A_log": (0, 1, 0),
        "dt_bias": (0, 1, 0),
        "out_proj.weight": (1, text.linear_value_head_dim, 0),
    }
    keys, repeats = text.linear_num_key_heads, text.linear_num_value_heads // text.linear_num_key_heads
    order = None
    if repeats > 1 and part in widths:
        axis, width, start = widths[part]
        order = HeadOrder(axis, start, keys, repeats, width)
    change = NumberChange.MINUS_EXP if part == "A_log" else None
    return FileLayout(
        order=order, change=change, shape=(shape[0], shape[2]) if part == "conv1d.weight" else None
    )


def special_name(config: ModelConfig, name: str) -> str | None:
    """The name in a file of a text tensor that the ``gguf`` package's tables lack; None for all others.

    Multi-token prediction is one more layer after all others.
    """
    text = config.text
    if not isinstance(text, Qwen35TextConfig):
        return None
    if name.endswith(".linear_attn.dt_bias"):
        return f"blk.{name.split('.')[-3]}.ssm_dt.bias"
    if name.endswith(".linear_attn.A_log"):
        return f"blk.{name.split('.')[-3]}.ssm_a"
    place = f"blk.{text.num_hidden_layers}.nextn"
    return {
        f"{MTP}.fc.weight": f"{place}.eh_proj.weight",
        f"{MTP}.pre_fc_norm_embedding.weight": f"{place}.enorm.weight",
        f"{MTP}.pre_fc_norm_hidden.weight": f"{place}.hnorm.weight",
        f"{MTP}.norm.weight": f"{place}.shared_head_norm.weight",
    }.get(name)


def key_in_tables(config: ModelConfig, name: str) -> str:
    """``name`` as the ``gguf`` package's tables have it."""
    if name.startswith(f"{MTP}.layers.") and isinstance(config.text, Qwen35TextConfig):
        _, _, number, rest = name.split(".", 3)
        return f"model.layers.{config.text.num_hidden_layers + int(number)}.{rest}"
    return name.replace(f"{config.text.prefix}.", "model.", 1)


def text_layers(config: ModelConfig) -> int:
    """Layers in the file: those of the decoder, and of multi-token prediction."""
    text = config.text
    more = text.mtp_num_hidden_layers if isinstance(text, Qwen35TextConfig) else 0
    return text.num_hidden_layers + more
