"""The text model in float32, one layer at a time: plain PyTorch, no cache, no fused step.

``TextReference.layer`` computes one layer for a whole sequence and gives every sub-stage. Sources:
transformers' ``modeling_qwen3_vl``, ``modeling_qwen3_5``, ``modeling_qwen3``, ``modeling_qwen2``,
``modeling_llama``, ``modeling_phi3`` and ``modeling_rope_utils``.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vlfit.parity.reference.stored_tensors import Weights

_ROWS = 512  # queries whose scores are in memory at a time


class TextReference:
    """The decoder that ``config`` (config.json) describes, with ``weights``."""

    def __init__(self, config: Mapping[str, Any], weights: Weights) -> None:
        self.weights = weights
        self.config = config = dict(config.get("text_config") or config) | {
            "tie_word_embeddings": _tied(config),
            "model_type": (config.get("text_config") or config).get("model_type", config["model_type"]),
        }
        nested = weights.has("model.language_model.norm.weight")
        self.prefix = "model.language_model" if nested else "model"
        self.hidden = int(config["hidden_size"])
        self.layers = int(config["num_hidden_layers"])
        self.vocabulary = int(config["vocab_size"])
        self.heads = int(config["num_attention_heads"])
        self.kv_heads = int(config.get("num_key_value_heads") or self.heads)
        self.head_dim = int(config.get("head_dim") or self.hidden // self.heads)
        self.eps = float(config.get("rms_norm_eps", 1e-6))
        self.is_qwen3_5 = str(config["model_type"]).startswith("qwen3_5")
        self.rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        self.theta = float(self.rope.get("rope_theta") or config.get("rope_theta") or 10000.0)

    # --- parts ------------------------------------------------------------------------------------------

    def embed(self, ids: Tensor) -> Tensor:
        """Rows [n, hidden] of the table of tokens."""
        return self.weights.lookup(f"{self.prefix}.embed_tokens", ids, (self.vocabulary, self.hidden))

    def norm(self, hidden: Tensor, name: str = "norm") -> Tensor:
        """RMSNorm by ``name``, a module below the decoder; Qwen3.5 stores its weight less one."""
        return self._rms_norm(hidden, f"{self.prefix}.{name}.weight")

    def _rms_norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights.vector(name)
        if self.is_qwen3_5:
            weight = weight + 1.0
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.eps) * weight

    def logits(self, normed: Tensor) -> Tensor:
        """Scores [n, vocabulary] of rows after the final norm."""
        tied = self.config["tie_word_embeddings"] or not self.weights.has("lm_head")
        module = f"{self.prefix}.embed_tokens" if tied else "lm_head"
        return self.weights.linear(module, normed, self.vocabulary)

    def layer(self, index: int, hidden: Tensor, positions: Tensor) -> dict[str, Tensor]:
        """Layer ``index`` for a whole sequence: ``hidden`` [T, hidden], ``positions`` [3, T] (or [T]).

        Returns ``input_norm``, ``attention`` (the token mixer's output), ``post_norm``, ``mlp``, ``out``; of
        layers with attention also ``key`` (normed and rotated) and ``value``, [T, kv_heads, head_dim].
        """
        name = f"{self.prefix}.layers.{index}"
        parts = {"input_norm": self.norm(hidden, f"layers.{index}.input_layernorm")}
        if self._is_linear(index):
            parts["attention"] = self._delta_net(f"{name}.linear_attn", parts["input_norm"])
        else:
            parts |= self._attention(f"{name}.self_attn", parts["input_norm"], positions, self._window(index))
        middle = hidden + parts["attention"]
        parts["post_norm"] = self.norm(middle, f"layers.{index}.post_attention_layernorm")
        parts["mlp"] = self._mlp(f"{name}.mlp", parts["post_norm"])
        parts["out"] = middle + parts["mlp"]
        return parts

    def _is_linear(self, index: int) -> bool:
        kinds = self.config.get("layer_types")
        if self.is_qwen3_5 and not kinds:
            return bool((index + 1) % int(self.config.get("full_attention_interval", 4)))
        return kinds is not None and kinds[index] == "linear_attention"

    def _window(self, index: int) -> int | None:
        """How many tokens the layer attends to; None: all."""
        config = self.config
        window, kind = config.get("sliding_window"), str(config["model_type"])
        if window is None:
            return None
        if kind in ("phi3", "mistral"):
            return int(window)
        if not config.get("use_sliding_window"):
            return None
        kinds = config.get("layer_types")
        slides = (
            kinds[index] == "sliding_attention"
            if kinds
            else index >= int(config.get("max_window_layers", 28))
        )
        return int(window) if slides else None

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        inner = int(self.config["intermediate_size"])
        if self.weights.has(f"{name}.gate_up_proj"):
            both = self.weights.linear(f"{name}.gate_up_proj", x, 2 * inner)
            gate, up = both[:, :inner], both[:, inner:]
        else:
            gate = self.weights.linear(f"{name}.gate_proj", x, inner)
            up = self.weights.linear(f"{name}.up_proj", x, inner)
        return self.weights.linear(f"{name}.down_proj", F.silu(gate) * up, self.hidden)

    # --- attention --------------------------------------------------------------------------------------

    def _attention(self, name: str, x: Tensor, positions: Tensor, window: int | None) -> dict[str, Tensor]:
        rows, width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        gate = None
        if self.weights.has(f"{name}.qkv_proj"):
            joined = self.weights.linear(f"{name}.qkv_proj", x, rows + 2 * width)
            query, key, value = joined.split((rows, width, width), dim=-1)
        else:
            query = self.weights.linear(f"{name}.q_proj", x, rows * (2 if self.is_qwen3_5 else 1))
            key = self.weights.linear(f"{name}.k_proj", x, width)
            value = self.weights.linear(f"{name}.v_proj", x, width)
        if self.is_qwen3_5:  # a head's query, then its output gate
            query, gate = query.reshape(len(x), self.heads, 2 * self.head_dim).chunk(2, dim=-1)
        query = query.reshape(len(x), self.heads, self.head_dim)
        key = key.reshape(len(x), self.kv_heads, self.head_dim)
        value = value.reshape(len(x), self.kv_heads, self.head_dim)
        if self.weights.has(f"{name}.q_norm.weight"):
            query = self._rms_norm(query, f"{name}.q_norm.weight")
            key = self._rms_norm(key, f"{name}.k_norm.weight")
        cos, sin = self.rotation(positions)
        query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
        mixed = _attend(query, key, value, window)
        if gate is not None:
            mixed = mixed * gate.sigmoid()
        out = self.weights.linear(f"{name}.o_proj", mixed.flatten(1), self.hidden)
        return {"key": key, "value": value, "attention": out}

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, rotary_dim / 2] of ``positions`` [3, T] or [T]."""
        axes = positions.float() if positions.ndim == 2 else positions.float().expand(3, -1)
        if len(axes) == 1:
            axes = axes.expand(3, -1)
        frequencies, scale = self._frequencies(int(axes.max()) + 1)
        angles = axes[:, :, None] * frequencies  # [3, T, rotary_dim / 2]
        chosen = angles[0].clone()
        sections = self.rope.get("mrope_section")
        if sections:  # interleaved: T H W T H W ... as long as a section lasts, T after that
            for axis in (1, 2):
                chosen[:, axis : 3 * int(sections[axis]) : 3] = angles[axis][
                    :, axis : 3 * int(sections[axis]) : 3
                ]
        return chosen.cos() * scale, chosen.sin() * scale

    def _frequencies(self, length: int) -> tuple[Tensor, float]:
        """Rotary frequencies [rotary_dim / 2] for ``length`` tokens, and the factor of cosines and sines."""
        share = float(
            self.rope.get("partial_rotary_factor") or self.config.get("partial_rotary_factor") or 1.0
        )
        width = int(self.head_dim * share)
        frequencies = 1.0 / self.theta ** (torch.arange(0, width, 2).float() / width)
        kind = self.rope.get("rope_type") or self.rope.get("type") or "default"
        if kind == "linear":
            return frequencies / float(self.rope["factor"]), 1.0
        if kind == "llama3":
            return _llama3(frequencies, self.rope), 1.0
        if kind in ("longrope", "su"):
            return self._longrope(frequencies, length)
        if kind not in ("default", "mrope"):
            raise NotImplementedError(f"rope type {kind}")
        return frequencies, 1.0

    def _longrope(self, frequencies: Tensor, length: int) -> tuple[Tensor, float]:
        positions = int(self.config["max_position_embeddings"])
        original = int(
            self.rope.get("original_max_position_embeddings")
            or self.config.get("original_max_position_embeddings")
            or positions
        )
        divisors = self.rope["long_factor" if length > original else "short_factor"]
        scale = self.rope.get("attention_factor")
        if scale is None:
            grown = self.rope.get("factor") or positions / original
            scale = 1.0 if grown <= 1.0 else math.sqrt(1 + math.log(grown) / math.log(original))
        return frequencies / torch.tensor(divisors), float(scale)

    # --- the gated delta net of Qwen3.5 -----------------------------------------------------------------

    def _delta_net(self, name: str, x: Tensor) -> Tensor:
        """Token by token, as it is defined: no chunks."""
        config, weights = self.config, self.weights
        key_heads, value_heads = int(config["linear_num_key_heads"]), int(config["linear_num_value_heads"])
        key_dim, value_dim = int(config["linear_key_head_dim"]), int(config["linear_value_head_dim"])
        keys, values = key_heads * key_dim, value_heads * value_dim
        mixed = weights.linear(f"{name}.in_proj_qkv", x, 2 * keys + values)
        kernel = weights.vector(f"{name}.conv1d.weight").reshape(len(mixed.T), 1, -1)
        padded = F.pad(mixed.T[None], (kernel.shape[-1] - 1, 0))
        mixed = F.silu(F.conv1d(padded, kernel, groups=len(kernel)))[0].T
        query, key, value = mixed.split((keys, keys, values), dim=-1)
        query = _unit(query.reshape(-1, key_heads, key_dim)) * key_dim**-0.5
        key = _unit(key.reshape(-1, key_heads, key_dim))
        value = value.reshape(-1, value_heads, value_dim)
        shared = value_heads // key_heads
        query, key = query.repeat_interleave(shared, 1), key.repeat_interleave(shared, 1)
        beta = weights.linear(f"{name}.in_proj_b", x, value_heads).sigmoid()
        steps = weights.linear(f"{name}.in_proj_a", x, value_heads) + weights.vector(f"{name}.dt_bias")
        kept = (-weights.vector(f"{name}.A_log").exp() * F.softplus(steps)).exp()
        state = torch.zeros(value_heads, key_dim, value_dim)
        out = torch.empty_like(value)
        for at in range(len(x)):
            state = state * kept[at][:, None, None]
            known = torch.einsum("hk,hkv->hv", key[at], state)
            state = state + torch.einsum("hk,hv->hkv", key[at], beta[at][:, None] * (value[at] - known))
            out[at] = torch.einsum("hk,hkv->hv", query[at], state)
        gate = weights.linear(f"{name}.in_proj_z", x, values).reshape(out.shape)
        out = out * torch.rsqrt((out * out).mean(-1, keepdim=True) + self.eps)
        out = out * weights.vector(f"{name}.norm.weight") * F.silu(gate)
        return weights.linear(f"{name}.out_proj", out.flatten(1), self.hidden)


def _tied(config: Mapping[str, Any]) -> bool:
    """Whether the output head is the table of tokens: the top level of config.json decides, if it says."""
    if "tie_word_embeddings" in config:
        return bool(config["tie_word_embeddings"])
    return bool((config.get("text_config") or {}).get("tie_word_embeddings", False))


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _llama3(frequencies: Tensor, rope: Mapping[str, Any]) -> Tensor:
    original, factor = float(rope["original_max_position_embeddings"]), float(rope["factor"])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    turns = original * frequencies / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies / factor * (1 - smooth) + frequencies * smooth


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first ``2 * cos.shape[1]`` elements of each head of ``x`` [T, heads, head_dim]."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def _attend(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """Causal attention [T, heads, head_dim], ``_ROWS`` queries at a time."""
    count, heads, width = query.shape
    shared = heads // key.shape[1]
    keys = key.repeat_interleave(shared, 1).permute(1, 2, 0)  # [heads, head_dim, T]
    values = value.repeat_interleave(shared, 1).transpose(0, 1)
    out = torch.empty_like(query)
    places = torch.arange(count)
    for start in range(0, count, _ROWS):
        row = places[start : start + _ROWS]
        scores = query[row].transpose(0, 1) @ keys * width**-0.5
        hidden = places[None] > row[:, None]
        if window is not None:
            hidden |= places[None] <= row[:, None] - window
        scores = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[row] = (scores @ values).transpose(0, 1)
    return out
