"""Configs of the catalog's models: the numbers of their config.json, known without a network."""

from vlfit.checkpoint.config import NO_TOKEN, ModelConfig, VisionConfig
from vlfit.checkpoint.fields import Fields
from vlfit.checkpoint.text_config import TextConfig
from vlfit.models.registry import parse_config


def _qwen3_vl(
    *, hidden: int, intermediate: int, layers: int, heads: int, tied: bool, vision: VisionConfig
) -> ModelConfig:
    """A Qwen3-VL config from what differs between 2B, 4B and 8B."""
    text = TextConfig(
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=262144,
        rms_norm_eps=1e-6,
        rope_theta=5e6,
        mrope_section=(24, 20, 20),
        attention_bias=False,
        hidden_act="silu",
    )
    return ModelConfig(text, vision, 151655, 151656, 151652, 151653, tied, None, "qwen3_vl")


def _vision(
    *, depth: int, hidden: int, intermediate: int, deepstack: tuple[int, ...], out: int
) -> VisionConfig:
    return VisionConfig(
        depth=depth,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_heads=16,
        in_channels=3,
        patch_size=16,
        spatial_merge_size=2,
        temporal_patch_size=2,
        out_hidden_size=out,
        num_position_embeddings=2304,
        deepstack_visual_indexes=deepstack,
        hidden_act="gelu_pytorch_tanh",
        model_type="qwen3_vl",
    )


_SMALL_TOWER = {"depth": 24, "hidden": 1024, "intermediate": 4096}
# The numbers of config.json of Qwen/Qwen3-VL-{2B,4B,8B}-Instruct; the Thinking editions have the same. The
# Embedding and Reranker models were trained from these. Of theirs, 2B's config.json is known from public logs
# and is the same; 8B's is taken to be, and no file of theirs was at hand: not verified. That 8B lacks its
# output head is in QwenLM/Qwen3-VL-Embedding#89.
QWEN3_VL = {
    "2B": _qwen3_vl(
        hidden=2048,
        intermediate=6144,
        layers=28,
        heads=16,
        tied=True,
        vision=_vision(**_SMALL_TOWER, deepstack=(5, 11, 17), out=2048),
    ),
    "4B": _qwen3_vl(
        hidden=2560,
        intermediate=9728,
        layers=36,
        heads=32,
        tied=True,
        vision=_vision(**_SMALL_TOWER, deepstack=(5, 11, 17), out=2560),
    ),
    "8B": _qwen3_vl(
        hidden=4096,
        intermediate=12288,
        layers=36,
        heads=32,
        tied=False,
        vision=_vision(depth=27, hidden=1152, intermediate=4304, deepstack=(8, 16, 24), out=4096),
    ),
}


def _qwen3_5(
    *,
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    value_heads: int,
    tower: dict[str, int],
    tied: bool,
) -> ModelConfig:
    """A Qwen3.5 config from what differs between its sizes, read as the family reads config.json."""
    text = {
        "vocab_size": 248320,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 4,
        "head_dim": 256,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 262144,
        "mtp_num_hidden_layers": 1,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
    }
    vision = {**tower, "out_hidden_size": hidden, "deepstack_visual_indexes": []}
    parts = {"text_config": text, "vision_config": vision, "tie_word_embeddings": tied}
    return parse_config(Fields({"model_type": "qwen3_5", **parts}, "catalog"))


_TINY_TOWER = {"depth": 12, "hidden_size": 768, "intermediate_size": 3072, "num_heads": 12}
_MIDDLE_TOWER = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16}
_LARGE_TOWER = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16}


def qwen3_5() -> dict[str, ModelConfig]:
    """The configs of Qwen/Qwen3.5-{9B,4B,2B,0.8B}, by size.

    Text sizes and heads are those of the model cards. No config.json was at hand: the towers of 0.8B and 4B
    are known from public code that checks them, those of 2B (as 4B's) and 9B (as Qwen3-VL-8B's) are taken to
    be so: not verified.
    """
    return {
        "9B": _qwen3_5(
            hidden=4096,
            intermediate=12288,
            layers=32,
            heads=16,
            value_heads=32,
            tower=_LARGE_TOWER,
            tied=False,
        ),
        "4B": _qwen3_5(
            hidden=2560,
            intermediate=9216,
            layers=32,
            heads=16,
            value_heads=32,
            tower=_MIDDLE_TOWER,
            tied=True,
        ),
        "2B": _qwen3_5(
            hidden=2048,
            intermediate=6144,
            layers=24,
            heads=8,
            value_heads=16,
            tower=_MIDDLE_TOWER,
            tied=True,
        ),
        "0.8B": _qwen3_5(
            hidden=1024,
            intermediate=3584,
            layers=24,
            heads=8,
            value_heads=16,
            tower=_TINY_TOWER,
            tied=True,
        ),
    }


def _text_only(
    model_type: str,
    *,
    vocabulary: int,
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    context: int,
    eps: float = 1e-5,
    theta: float = 1e4,
    tied: bool = False,
    attention_bias: bool = False,
    fused_projections: bool = False,
    window: int | None = None,
) -> ModelConfig:
    """A text-only config from what differs between the ones below."""
    text = TextConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        max_position_embeddings=context,
        rms_norm_eps=eps,
        rope_theta=theta,
        mrope_section=(),
        attention_bias=attention_bias,
        hidden_act="silu",
        prefix="model",
        query_key_norm=False,
        fused_projections=fused_projections,
        sliding_windows=(window,) * layers if window is not None else (),
    )
    return ModelConfig(text, None, NO_TOKEN, NO_TOKEN, NO_TOKEN, NO_TOKEN, tied, None, model_type)


# The numbers of their config.json.
TEXT_ONLY = {
    "meta-llama/Llama-2-7b-hf": _text_only(
        "llama",
        vocabulary=32000,
        hidden=4096,
        intermediate=11008,
        layers=32,
        heads=32,
        kv_heads=32,
        context=4096,
    ),
    "microsoft/Phi-3-mini-4k-instruct": _text_only(
        "phi3",
        vocabulary=32064,
        hidden=3072,
        intermediate=8192,
        layers=32,
        heads=32,
        kv_heads=32,
        context=4096,
        fused_projections=True,
        window=2047,
    ),
    "Qwen/Qwen2.5-3B-Instruct": _text_only(
        "qwen2",
        vocabulary=151936,
        hidden=2048,
        intermediate=11008,
        layers=36,
        heads=16,
        kv_heads=2,
        context=32768,
        eps=1e-6,
        theta=1e6,
        tied=True,
        attention_bias=True,
    ),
}
