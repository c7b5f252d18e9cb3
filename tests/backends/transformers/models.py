"""Tiny random checkpoints of architectures that the native engine does not run, written as their makers do.

``FAMILIES`` names them; ``build`` writes one in well under a second: weights, tokenizer, template, processor.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.tiny_text import chat_template, tokenizer

TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Of LLaVA's shape: text and pictures where they stand, no tools.
PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def build(family: str, folder: Path, dtype: str = "float32") -> Path:
    """Write a checkpoint of ``family`` into ``folder`` and return it."""
    folder.mkdir(parents=True)
    torch.manual_seed(1)
    model = FAMILIES[family](folder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:  # large enough that greedy text is not one token over and over
                parameter.normal_(0, 0.25 if "visual" in name or "vision" in name else 0.35)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    generation = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0}
    sampled = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
    _write(folder / "generation_config.json", generation | sampled)
    return folder


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), "utf-8")


def _words(folder: Path, more: tuple[str, ...] = (), **named: str) -> Any:
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer.from_str(tokenizer().to_str())
    words.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in more])
    fast: Any = PreTrainedTokenizerFast(
        tokenizer_object=words,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        extra_special_tokens=named,
    )
    fast.save_pretrained(folder)
    return fast


def _qwen(folder: Path, patch: int, processor: str) -> dict[str, Any]:
    """The files around a Qwen; the ids of its control tokens."""
    words = _words(folder)
    (folder / "chat_template.jinja").write_text(chat_template(), "utf-8")
    side = 2 * patch  # of what becomes one token
    _write(
        folder / "preprocessor_config.json",
        {
            "patch_size": patch,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "size": {"shortest_edge": 4 * side**2, "longest_edge": 256 * side**2},
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
            "processor_class": processor,
            "image_processor_type": "Qwen2VLImageProcessor",
        },
    )
    names = {"image": "image_pad", "video": "video_pad"}
    names |= {"vision_start": "vision_start", "vision_end": "vision_end"}
    return {f"{key}_token_id": words.convert_tokens_to_ids(f"<|{name}|>") for key, name in names.items()}


def _qwen2_5_vl(folder: Path) -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    ids = _qwen(folder, 14, "Qwen2_5_VLProcessor")
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config={
                **TEXT,
                "vocab_size": 512,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]},
                "tie_word_embeddings": True,
            },
            vision_config={
                "depth": 2,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_heads": 2,
                "out_hidden_size": 32,
                "fullatt_block_indexes": [1],
                "window_size": 56,
            },
            tie_word_embeddings=True,
            **ids,
        )
    )


def _qwen3_5(folder: Path) -> Any:
    """Half of its layers keep a recurrent state instead of keys and values."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    ids = _qwen(folder, 16, "Qwen3VLProcessor")
    linear = {"key_head_dim": 8, "value_head_dim": 8, "num_key_heads": 2, "num_value_heads": 4}
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]}
    return Qwen3_5ForConditionalGeneration(
        Qwen3_5Config(
            text_config={
                **TEXT,
                **{f"linear_{name}": value for name, value in linear.items()},
                "vocab_size": 512,
                "head_dim": 16,
                "layer_types": ["linear_attention", "full_attention"],
                "rope_parameters": {**rope, "partial_rotary_factor": 0.5, "mrope_interleaved": True},
            },
            vision_config={
                "depth": 2,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_heads": 2,
                "out_hidden_size": 32,
                "num_position_embeddings": 64,
            },
            **ids,
        )
    )


def _idefics3(folder: Path) -> Any:
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    grid = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))
    more = ("<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>", *grid)
    words = _words(folder, more)
    _write(
        folder / "preprocessor_config.json",
        {
            "image_processor_type": "Idefics3ImageProcessor",
            "processor_class": "Idefics3Processor",
            "size": {"longest_edge": 128},
            "max_image_size": {"longest_edge": 64},
            "do_image_splitting": True,
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
        },
    )
    _write(folder / "processor_config.json", {"processor_class": "Idefics3Processor", "image_seq_len": 16})
    (folder / "chat_template.jinja").write_text(PLAIN_TEMPLATE, "utf-8")
    return Idefics3ForConditionalGeneration(
        Idefics3Config(
            text_config={**TEXT, "model_type": "llama", "vocab_size": 576},
            vision_config={
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 64,
                "patch_size": 8,
            },
            scale_factor=2,
            image_token_id=words.convert_tokens_to_ids("<image>"),
            tie_word_embeddings=False,
        )
    )


def _internvl(folder: Path) -> Any:
    from transformers import InternVLConfig, InternVLForConditionalGeneration

    more = ("<img>", "</img>", "<IMG_CONTEXT>", "<video>")
    words = _words(
        folder,
        more,
        start_image_token="<img>",
        end_image_token="</img>",
        context_image_token="<IMG_CONTEXT>",
        video_token="<video>",
    )
    _write(
        folder / "preprocessor_config.json",
        {
            "image_processor_type": "GotOcr2ImageProcessor",
            "processor_class": "InternVLProcessor",
            "size": {"height": 32, "width": 32},
            "crop_to_patches": True,
            "min_patches": 1,
            "max_patches": 4,
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
        },
    )
    _write(folder / "processor_config.json", {"processor_class": "InternVLProcessor", "image_seq_length": 4})
    (folder / "chat_template.jinja").write_text(PLAIN_TEMPLATE.replace("<image>", "<IMG_CONTEXT>"), "utf-8")
    return InternVLForConditionalGeneration(
        InternVLConfig(
            text_config={**TEXT, "model_type": "qwen2", "vocab_size": 512, "tie_word_embeddings": True},
            vision_config={
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": [32, 32],
                "patch_size": [8, 8],
            },
            image_token_id=words.convert_tokens_to_ids("<IMG_CONTEXT>"),
            image_seq_length=4,
            tie_word_embeddings=True,
        )
    )


def _llava(folder: Path) -> Any:
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    words = _words(folder, ("<image>",))
    _write(
        folder / "preprocessor_config.json",
        {
            "image_processor_type": "CLIPImageProcessor",
            "processor_class": "LlavaProcessor",
            "size": {"shortest_edge": 32},
            "crop_size": {"height": 32, "width": 32},
        },
    )
    named = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    _write(folder / "processor_config.json", {"processor_class": "LlavaProcessor", **named})
    (folder / "chat_template.jinja").write_text(PLAIN_TEMPLATE, "utf-8")
    return LlavaForConditionalGeneration(
        LlavaConfig(
            text_config={**TEXT, "model_type": "llama", "vocab_size": 512},
            vision_config={
                "model_type": "clip_vision_model",
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 32,
                "patch_size": 8,
            },
            image_token_index=words.convert_tokens_to_ids("<image>"),
            tie_word_embeddings=False,
        )
    )


FAMILIES: dict[str, Callable[[Path], Any]] = {
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_5": _qwen3_5,
    "idefics3": _idefics3,
    "internvl": _internvl,
    "llava": _llava,
}
