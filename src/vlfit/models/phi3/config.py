"""Phi-3, text only: LongRoPE, partial rotary embeddings, fused projections."""

from functools import partial

from vlfit.checkpoint.config import read_text_only
from vlfit.checkpoint.tensors import decoder_tensor_shapes
from vlfit.checkpoint.text_config import DecoderRules, read_same_window
from vlfit.models.registry import ModelSpec

RULES = DecoderRules(
    max_positions=4096,
    rms_norm_eps=1e-5,
    fused_projections=True,
    rope_types=("linear", "longrope"),
    rope_aliases={"su": "longrope", "yarn": "longrope"},  # what older files call it
    partial_rotary=True,
    windows=read_same_window,
)

SPEC = ModelSpec(
    architecture="Phi3ForCausalLM",
    read_config=partial(read_text_only, rules=RULES),
    tensors=decoder_tensor_shapes,
)
