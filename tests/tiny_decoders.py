"""Tiny random text-only checkpoints, one for each way in which decoders differ, and transformers' same model.

``DECODERS`` names them; ``build_decoder`` writes one; ``decoder_reference`` loads it with transformers in
float32. The words are those of ``tiny_text`` (byte-level, as Qwen and Llama 3) or, with ``sentencepiece``, of
a vocabulary as Llama 2 and Phi-3 have it.
"""

import json
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors, trainers

from tests import tiny_text
from tests.tiny import dequantize_fp8, random_tensors
from vlfit.models.registry import read_config, spec_of

QWEN_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n<think>\\n' }}
{%- endif %}
"""
LLAMA_TEMPLATE = """\
{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}\
{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}\
{% set system_message = false %}{% endif %}{% for message in loop_messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if loop.index0 == 0 and system_message != false %}\
{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}\
{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}\
{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}\
{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""
PHI_TEMPLATE = (
    "{% for message in messages %}"
    "{{'<|' + message['role'] + '|>' + '\\n' + message['content'] + '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"
)
PHI_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")


@dataclass(frozen=True)
class DecoderSpec:
    """How one tiny decoder differs. ``more`` are fields of its config.json."""

    model_type: str
    heads: int = 4
    kv_heads: int = 2
    head_dim: int | None = None
    tied: bool = False
    dtype: str = "float32"
    hidden: int = 64
    intermediate: int = 96
    sentencepiece: bool = False
    template: str = QWEN_TEMPLATE
    tokenizer_class: str = "PreTrainedTokenizerFast"
    tokenizer_settings: dict[str, Any] = field(default_factory=dict)
    fp8: bool = False
    seed: int = 0
    more: dict[str, Any] = field(default_factory=dict)


DECODERS: dict[str, DecoderSpec] = {
    "qwen2": DecoderSpec("qwen2", tied=True, more={"sliding_window": 8, "use_sliding_window": False}),
    "qwen2_half": DecoderSpec("qwen2", heads=6, kv_heads=3, hidden=96, dtype="float16", seed=1),
    "qwen3": DecoderSpec(
        "qwen3", head_dim=32, tied=True, seed=2, more={"rope_parameters": {"rope_theta": 1000000.0}}
    ),
    "qwen3_biased": DecoderSpec("qwen3", kv_heads=1, head_dim=24, seed=3, more={"attention_bias": True}),
    "qwen3_fp8": DecoderSpec(
        "qwen3", head_dim=64, hidden=192, intermediate=320, dtype="bfloat16", fp8=True, seed=4
    ),
    "llama2": DecoderSpec(
        "llama",
        kv_heads=4,
        sentencepiece=True,
        template=LLAMA_TEMPLATE,
        tokenizer_class="LlamaTokenizer",
        tokenizer_settings={"legacy": False, "add_bos_token": True, "add_eos_token": False},
        dtype="float16",
        seed=5,
        more={"rms_norm_eps": 1e-5, "pretraining_tp": 1},
    ),
    "llama3": DecoderSpec(
        "llama",
        tied=True,
        dtype="bfloat16",
        seed=6,
        more={
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "llama_biased_stretched": DecoderSpec(
        "llama",
        head_dim=20,
        seed=17,
        more={"attention_bias": True, "rope_scaling": {"type": "linear", "factor": 4.0}},
    ),
    "phi3": DecoderSpec(
        "phi3",
        kv_heads=4,
        sentencepiece=True,
        template=PHI_TEMPLATE,
        tokenizer_class="LlamaTokenizer",
        tokenizer_settings={"legacy": False},
        seed=8,
        more={"sliding_window": 2000, "original_max_position_embeddings": 4096, "rope_scaling": None},
    ),
    "phi3_long": DecoderSpec(
        "phi3",
        sentencepiece=True,
        template=PHI_TEMPLATE,
        tokenizer_class="LlamaTokenizer",
        tied=True,
        dtype="bfloat16",
        seed=9,
        more={
            "sliding_window": 262144,
            "original_max_position_embeddings": 64,
            "partial_rotary_factor": 0.75,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0, 1.05, 1.1, 1.2, 1.3, 1.4],
                "long_factor": [1.0, 1.5, 2.0, 4.0, 9.0, 20.0],
            },
        },
    ),
}


@cache
def sentencepiece_tokenizer(more: tuple[str, ...] = ()) -> Tokenizer:
    """A BPE as Llama 2's file has it: spaces as U+2581, one put before every text, bytes for the rest."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    words = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    spaces = normalizers.Replace(" ", "\u2581")
    words.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), spaces])
    trainer = trainers.BpeTrainer(
        vocab_size=470, special_tokens=["<unk>", "<s>", "</s>", *bytes_], show_progress=False
    )
    words.train_from_iterator([text for text in tiny_text.CORPUS if text.isascii()], trainer)
    plain = json.loads(words.to_str())
    plain["added_tokens"] = plain["added_tokens"][:3]  # bytes are tokens like others
    words = Tokenizer.from_str(json.dumps(plain))
    words.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in more])
    words.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    words.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return words


def build_decoder(name: str, folder: Path) -> Path:
    """Write the checkpoint ``name`` into ``folder`` (made if need be) and return it."""
    spec = DECODERS[name]
    folder.mkdir(parents=True, exist_ok=True)
    words = _tokenizer(spec)
    words.save(str(folder / "tokenizer.json"))
    _write_json(folder / "config.json", config_json(spec))
    _write_json(folder / "tokenizer_config.json", tokenizer_settings(spec))
    ends = [words.token_to_id(name) for name in _ends(spec)]
    _write_json(folder / "generation_config.json", {"eos_token_id": ends, "do_sample": False})
    tensors = random_tensors(read_config(folder), getattr(torch, spec.dtype), spec.seed)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _tokenizer(spec: DecoderSpec) -> Tokenizer:
    if not spec.sentencepiece:
        return tiny_text.tokenizer()
    return sentencepiece_tokenizer(PHI_TOKENS if spec.model_type == "phi3" else ())


def _ends(spec: DecoderSpec) -> tuple[str, ...]:
    if not spec.sentencepiece:
        return "<|im_end|>", "<|endoftext|>"
    return ("</s>", "<|end|>") if spec.model_type == "phi3" else ("</s>",)


def config_json(spec: DecoderSpec) -> dict[str, Any]:
    """``config.json`` with the fields that files on the hub have."""
    words = _tokenizer(spec)
    config: dict[str, Any] = {
        "architectures": [spec_of(spec.model_type).architecture],
        "model_type": spec.model_type,
        "bos_token_id": 1,
        "eos_token_id": words.token_to_id(_ends(spec)[0]),
        "pad_token_id": words.token_to_id(_ends(spec)[0]),
        "hidden_act": "silu",
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "max_position_embeddings": 4096,
        "num_attention_heads": spec.heads,
        "num_hidden_layers": 3,
        "num_key_value_heads": spec.kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": spec.tied,
        "torch_dtype": spec.dtype,
        "vocab_size": 512,
    }
    if spec.head_dim is not None:
        config["head_dim"] = spec.head_dim
    if spec.fp8:
        config["quantization_config"] = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        }
    return config | deepcopy(spec.more)


def tokenizer_settings(spec: DecoderSpec) -> dict[str, Any]:
    """``tokenizer_config.json``."""
    begin = {"bos_token": "<s>", "unk_token": "<unk>"} if spec.sentencepiece else {"bos_token": None}
    return {
        "tokenizer_class": spec.tokenizer_class,
        "chat_template": spec.template,
        "eos_token": _ends(spec)[0],
        "clean_up_tokenization_spaces": False,
        **begin,
        **spec.tokenizer_settings,
    }


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def decoder_reference(folder: Path, scratch: Path) -> Any:
    """The checkpoint in ``folder`` as transformers' model: float32, on the CPU, ready to run.

    Raises when a tensor is missing or unknown to transformers: the names are held to the reference's.
    ``scratch``: a folder of its own for a widened copy of FP8.
    """
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        _widened(folder, scratch), dtype=torch.float32, output_loading_info=True
    )
    model, report = loaded
    wrong = {kind: names for kind, names in report.items() if names}
    if wrong:
        raise ValueError(f"transformers does not agree with the tensors in {folder}: {wrong}")
    return model.eval()


def _widened(folder: Path, scratch: Path) -> Path:
    """transformers refuses FP8 whose sizes are no multiple of the block: a plain copy of it."""
    from safetensors.torch import load_file

    if not read_config(folder).fp8:
        return folder
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    del config["quantization_config"]
    stored = load_file(folder / "model.safetensors")
    plain = {
        name: dequantize_fp8(tensor, stored[f"{name}_scale_inv"], (128, 128))
        if f"{name}_scale_inv" in stored
        else tensor.float()
        for name, tensor in stored.items()
        if not name.endswith("_scale_inv")
    }
    scratch.mkdir(parents=True, exist_ok=True)
    _write_json(scratch / "config.json", config)
    save_file(plain, scratch / "model.safetensors", metadata={"format": "pt"})
    return scratch
