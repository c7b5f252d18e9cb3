"""Qwen2 and Qwen2.5, text only. Queries, keys and values have biases, though no field says so."""

from functools import partial

from vlfit.checkpoint.config import read_text_only
from vlfit.checkpoint.tensors import decoder_tensor_shapes
from vlfit.checkpoint.text_config import DecoderRules, read_windows_by_layer
from vlfit.models.registry import ModelSpec

RULES = DecoderRules(max_positions=32768, qkv_bias=True, windows=read_windows_by_layer)

SPEC = ModelSpec(
    architecture="Qwen2ForCausalLM",
    read_config=partial(read_text_only, rules=RULES),
    tensors=decoder_tensor_shapes,
)
