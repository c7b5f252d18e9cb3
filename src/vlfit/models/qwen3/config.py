"""Qwen3, text only: queries and keys are normalized."""

from functools import partial

from vlfit.checkpoint.config import read_text_only
from vlfit.checkpoint.tensors import decoder_tensor_shapes
from vlfit.checkpoint.text_config import DecoderRules, read_windows_by_layer
from vlfit.models.registry import QWEN_THINKING, ModelSpec

RULES = DecoderRules(
    max_positions=32768, head_dim=128, output_bias=True, query_key_norm=True, windows=read_windows_by_layer
)

SPEC = ModelSpec(
    architecture="Qwen3ForCausalLM",
    read_config=partial(read_text_only, rules=RULES),
    tensors=decoder_tensor_shapes,
    thinking=QWEN_THINKING,
)
