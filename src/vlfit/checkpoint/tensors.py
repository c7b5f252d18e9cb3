"""The tensors of Qwen3-VL: which names and shapes a config calls for, and whether the headers hold them.

Knows: tensor names, shapes, and which layers FP8 converts.
Does not know: files (``headers.py`` does) or values.
"""

from collections.abc import Iterator

from vlfit.checkpoint.config import ModelConfig
from vlfit.checkpoint.headers import TensorInfo
from vlfit.errors import MissingTensor, SurplusTensor, UnknownWeightsFormat, WrongShape

SCALE_SUFFIX = "_scale_inv"
READABLE_DTYPES = ("BF16", "F16", "F32", "F8_E4M3")
# Rotary frequencies that older writers stored; they follow from the config and are computed.
_COMPUTED = (".rotary_emb.inv_freq", ".rotary_pos_emb.inv_freq")
# Quantizers may leave it beside an FP8 weight; vlfit's activations are not quantized by it.
_ACTIVATION_SCALE = ".input_scale"


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint with this ``config`` holds.

    With FP8, each converted linear layer has ``weight_scale_inv`` (one scale per block) beside its weight.
    """
    tensors = dict(_vision_tensors(config))
    tensors.update(_text_tensors(config))
    if config.fp8 is not None:
        for name in [name for name in tensors if _is_linear(name, tensors[name])]:
            if config.fp8.converts(name.removesuffix(".weight")):
                rows, columns = tensors[name]
                tensors[name + SCALE_SUFFIX] = config.fp8.scale_shape(rows, columns)
    return tensors


def _is_linear(name: str, shape: tuple[int, ...]) -> bool:
    """Embedding tables have two dimensions too, but they are looked up, not multiplied."""
    return len(shape) == 2 and not name.endswith(("embed_tokens.weight", "pos_embed.weight", SCALE_SUFFIX))


def _vision_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    vision, root = config.vision, "model.visual"
    hidden, inner = vision.hidden_size, vision.intermediate_size
    patch = (vision.in_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    yield from _with_bias(f"{root}.patch_embed.proj", hidden, *patch)
    yield f"{root}.pos_embed.weight", (vision.num_position_embeddings, hidden)
    for index in range(vision.depth):
        block = f"{root}.blocks.{index}"
        yield from _with_bias(f"{block}.norm1", hidden)
        yield from _with_bias(f"{block}.attn.qkv", 3 * hidden, hidden)
        yield from _with_bias(f"{block}.attn.proj", hidden, hidden)
        yield from _with_bias(f"{block}.norm2", hidden)
        yield from _with_bias(f"{block}.mlp.linear_fc1", inner, hidden)
        yield from _with_bias(f"{block}.mlp.linear_fc2", hidden, inner)
    merged = hidden * vision.spatial_merge_size**2
    levels = len(vision.deepstack_visual_indexes)
    for merger in ("merger", *(f"deepstack_merger_list.{level}" for level in range(levels))):
        # The last merger normalises each patch before joining four of them, the deepstack ones after.
        yield from _with_bias(f"{root}.{merger}.norm", hidden if merger == "merger" else merged)
        yield from _with_bias(f"{root}.{merger}.linear_fc1", merged, merged)
        yield from _with_bias(f"{root}.{merger}.linear_fc2", vision.out_hidden_size, merged)


def _text_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    text, root = config.text, "model.language_model"
    hidden, inner, head = text.hidden_size, text.intermediate_size, text.head_dim
    queries, keys = text.num_attention_heads * head, text.num_key_value_heads * head
    attention = {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
    }
    yield f"{root}.embed_tokens.weight", (text.vocab_size, hidden)
    for index in range(text.num_hidden_layers):
        layer = f"{root}.layers.{index}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        for name, (rows, columns) in attention.items():
            yield f"{layer}.self_attn.{name}.weight", (rows, columns)
            if text.attention_bias:
                yield f"{layer}.self_attn.{name}.bias", (rows,)
        yield f"{layer}.self_attn.q_norm.weight", (head,)
        yield f"{layer}.self_attn.k_norm.weight", (head,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        yield f"{layer}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{layer}.mlp.up_proj.weight", (inner, hidden)
        yield f"{layer}.mlp.down_proj.weight", (hidden, inner)
    yield f"{root}.norm.weight", (hidden,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (text.vocab_size, hidden)


def _with_bias(module: str, *shape: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{module}.weight", shape
    yield f"{module}.bias", shape[:1]


def check_tensors(config: ModelConfig, tensors: dict[str, TensorInfo]) -> None:
    """Check what is there against what ``config`` calls for, in both directions.

    Raises ``MissingTensor`` and ``SurplusTensor`` (how many, and the first names), ``WrongShape``, and
    ``UnknownWeightsFormat`` for a dtype that vlfit does not read. Whether a linear layer needs a scale is
    decided by its own dtype: the header says what the bytes are, the list of exempt modules only what
    somebody meant.
    """
    expected = _needed(config, tensors)
    missing = [name for name in expected if name not in tensors]
    if missing:
        raise MissingTensor(
            f"{len(missing):,} of {len(expected):,} tensors are missing: {_first(missing)}",
            "The weights do not belong to this config.json, or a shard is missing. Fetch them again.",
        )
    for name, shape in expected.items():
        _check_tensor(tensors[name], shape)
    # Ignoring them would run another model than the one in the files: one with a layer less, say.
    surplus = [name for name in tensors if name not in expected and not _may_be_ignored(name, tensors)]
    if surplus:
        raise SurplusTensor(
            f"{len(surplus):,} of {len(tensors):,} tensors are not in the model that config.json describes: "
            f"{_first(surplus)}",
            "config.json belongs to other weights, or was changed. Fetch it again with its weights.",
        )


def _first(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _may_be_ignored(name: str, tensors: dict[str, TensorInfo]) -> bool:
    """Whether leaving out ``name``, which the config does not call for, leaves the model as it is."""
    if name == "lm_head.weight" or name.endswith(_COMPUTED):
        return True  # expected unless the head is tied: then it is a copy of the embedding
    weight = tensors.get(name.removesuffix(_ACTIVATION_SCALE) + ".weight")
    return name.endswith(_ACTIVATION_SCALE) and weight is not None and weight.dtype == "F8_E4M3"


def _needed(config: ModelConfig, tensors: dict[str, TensorInfo]) -> dict[str, tuple[int, ...]]:
    """What the config calls for, with a scale for exactly those layers that are stored in FP8."""
    needed: dict[str, tuple[int, ...]] = {}
    for name, shape in expected_tensors(config).items():
        if name.endswith(SCALE_SUFFIX):
            continue
        needed[name] = shape
        if name in tensors and tensors[name].dtype == "F8_E4M3" and _is_linear(name, shape):
            if config.fp8 is None:
                raise UnknownWeightsFormat(
                    f"{name} is stored as F8_E4M3, but config.json has no quantization_config",
                    "Fetch config.json again; it does not belong to these weights.",
                )
            rows, columns = shape
            needed[name + SCALE_SUFFIX] = config.fp8.scale_shape(rows, columns)
    return needed


def _check_tensor(info: TensorInfo, shape: tuple[int, ...]) -> None:
    if info.shape != shape:
        raise WrongShape(
            f"{info.name} has shape {list(info.shape)}; config.json calls for {list(shape)}",
            f"{info.file.name} and config.json are of different models. Fetch the checkpoint again.",
        )
    in_fp8 = info.dtype == "F8_E4M3"
    if info.dtype not in READABLE_DTYPES or (in_fp8 and not _is_linear(info.name, shape)):
        raise UnknownWeightsFormat(
            f"{info.name} is stored as {info.dtype}",
            f"vlfit reads {', '.join(READABLE_DTYPES)} (the last for linear layers only).",
        )
