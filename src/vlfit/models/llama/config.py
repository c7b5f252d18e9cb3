"""Llama 2 and 3, text only."""

from functools import partial

from vlfit.checkpoint.config import read_text_only
from vlfit.checkpoint.tensors import decoder_tensor_shapes
from vlfit.checkpoint.text_config import DecoderRules
from vlfit.models.registry import ModelSpec

RULES = DecoderRules(max_positions=2048, output_bias=True)

SPEC = ModelSpec(
    architecture="LlamaForCausalLM",
    read_config=partial(read_text_only, rules=RULES),
    tensors=decoder_tensor_shapes,
    tokenizer="vlfit.models.llama.tokenizer",
)
