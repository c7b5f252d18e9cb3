"""A family that does not exist, as a new one would be added: this folder, and one call of ``register``.

Its decoder has RMSNorm weights stored as differences from 1, a sliding window in every second layer and
positions on one axis; its vision tower has Qwen3-VL's form in other sizes, and no deepstack.
"""

from vlfit.checkpoint.config import ModelConfig, VisionConfig
from vlfit.checkpoint.fields import Fields
from vlfit.checkpoint.tensors import decoder_tensor_shapes
from vlfit.checkpoint.text_config import TextConfig
from vlfit.models.qwen3_vl.config import VISION_MODULES, read_image_processor_config, vision_tensors
from vlfit.models.registry import ModelSpec, ToolCallSyntax


def read_config(fields: Fields) -> ModelConfig:
    text, vision = fields.section("text_config"), fields.section("vision_config")
    layers = text.integer("num_hidden_layers")
    window = text.integer("sliding_window")
    return ModelConfig(
        text=TextConfig(
            vocab_size=text.integer("vocab_size"),
            hidden_size=text.integer("hidden_size"),
            intermediate_size=text.integer("intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=text.integer("num_attention_heads"),
            num_key_value_heads=text.integer("num_key_value_heads"),
            head_dim=text.integer("head_dim"),
            max_position_embeddings=text.integer("max_position_embeddings"),
            rms_norm_eps=text.number("rms_norm_eps"),
            rope_theta=text.number("rope_theta"),
            mrope_section=(),
            attention_bias=False,
            hidden_act="silu",
            prefix="model.decoder",
            query_key_norm=True,
            sliding_windows=tuple(window if index % 2 else None for index in range(layers)),
        ),
        vision=VisionConfig(
            depth=vision.integer("depth"),
            hidden_size=vision.integer("hidden_size"),
            intermediate_size=vision.integer("intermediate_size"),
            num_heads=vision.integer("num_heads"),
            in_channels=3,
            patch_size=16,
            spatial_merge_size=2,
            temporal_patch_size=2,
            out_hidden_size=text.integer("hidden_size"),
            num_position_embeddings=vision.integer("num_position_embeddings"),
            deepstack_visual_indexes=(),
            hidden_act="gelu_pytorch_tanh",
            model_type="made_up",
        ),
        image_token_id=fields.integer("image_token_id"),
        video_token_id=fields.integer("video_token_id"),
        vision_start_token_id=fields.integer("vision_start_token_id"),
        vision_end_token_id=fields.integer("vision_end_token_id"),
        tie_word_embeddings=False,
        quantization=None,
        model_type="made_up",
    )


def tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {**dict(vision_tensors(config.required_vision)), **decoder_tensor_shapes(config)}


SPEC = ModelSpec(
    architecture="MadeUpForConditionalGeneration",
    read_config=read_config,
    tensors=tensors,
    tool_calls=ToolCallSyntax("[CALL]", "[/CALL]"),
    read_image_processor=read_image_processor_config,
    vision_modules=VISION_MODULES,
    cost="vlfit.models.qwen3_vl.cost",
    builders="tests.made_up.builders",
)
