"""Faults of text layers: RoPE, attention, norms, feed-forward layers, the output head."""

from collections.abc import Callable
from typing import Any

import torch

from tests.parity.fault_table import C, Patch, add_to, alter_linear, fault, layer_of, scale_columns
from vlfit.engine.engine import NativeEngine


# Text layers ----------------------------------------------------------------------------------------------
@fault("sections of M-RoPE in another order", C.ROPE, how="change")
def fault_15(engine: NativeEngine) -> None:
    axis = engine.runner.text.rope.axis
    assert axis is not None
    engine.runner.text.rope.axis = torch.tensor([0, 2, 1])[axis]


@fault("sections of M-RoPE side by side", C.ROPE, how="change")
def fault_16(engine: NativeEngine) -> None:
    rope: Any = engine.runner.text.rope
    rope.axis = rope.axis.sort().values


@fault("twice the theta of RoPE", C.ROPE, how="change")
def fault_17(engine: NativeEngine) -> None:
    rope: Any = engine.runner.text.rope
    count = len(rope.inverse_frequencies)
    rope.inverse_frequencies *= 2.0 ** (-torch.arange(count) / count)


@fault("RoPE of neighbours in place of halves", C.ROPE, how="patch")
def fault_18(patch: Patch) -> None:
    def apply(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        half = cosines.shape[-1] // 2
        cos, sin = (table[..., half:].repeat_interleave(2, -1) for table in (cosines, sines))
        pairs = x.unflatten(-1, (-1, 2))
        turned = torch.stack((-pairs[..., 1], pairs[..., 0]), -1).flatten(-2)
        return x * cos + turned * sin

    patch.setattr("vlfit.layers.attention.apply_rope", apply)


@fault("a kernel that gives NaN", C.MLP, how="change", level="quick")
def not_a_number(engine: NativeEngine) -> None:
    alter_linear(layer_of(engine), "down", lambda out: scale_columns(out, slice(5, 6), float("nan")))


@fault("a kernel that gives NaN while decoding", C.KV_CACHE, how="change", level="quick")
def not_a_number_later(engine: NativeEngine) -> None:
    def alter(out: torch.Tensor) -> torch.Tensor:
        return out * float("nan") if len(out) == 1 else out

    alter_linear(layer_of(engine), "down", alter)


@fault("heads in another order", C.ATTENTION, how="change")
def fault_19(engine: NativeEngine) -> None:
    alter_linear(layer_of(engine), "output", lambda out: out.roll(1, -1))


@fault("queries of two heads swapped", C.ATTENTION, how="change")
def fault_20(engine: NativeEngine) -> None:
    width = engine.checkpoint.config.text.head_dim

    def alter(out: torch.Tensor) -> torch.Tensor:
        first, second = out[:, :width].clone(), out[:, width : 2 * width].clone()
        out[:, :width], out[:, width : 2 * width] = second, first
        return out

    alter_linear(layer_of(engine), "qkv", alter)


@fault("values of one head scaled", C.ATTENTION, how="change")
def fault_21(engine: NativeEngine) -> None:
    alter_linear(layer_of(engine), "qkv", lambda out: scale_columns(out, slice(-8, None), 1.01))


@fault("no norm of queries and keys", C.NORM, C.ATTENTION, how="change")
def fault_22(engine: NativeEngine) -> None:
    layer_of(engine).query_key_norm = torch.ones_like(layer_of(engine).query_key_norm)


@fault("a larger epsilon in a norm", C.NORM, how="change")
def fault_23(engine: NativeEngine) -> None:
    layer_of(engine).eps = 1e-3


@fault("one weight of a norm", C.NORM, how="change")
def fault_24(engine: NativeEngine) -> None:
    weight = layer_of(engine).post_attention_norm = layer_of(engine).post_attention_norm.clone()
    weight[3] *= 1.001


@fault("gate and up swapped", C.MLP, how="patch")
def fault_25(patch: Patch) -> None:
    import torch.nn.functional as functional

    def swapped(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(up) * gate

    patch.setattr("vlfit.layers.fused.silu_mul", swapped)


@fault("edge of a tile of the MLP", C.MLP, how="change")
def fault_26(engine: NativeEngine) -> None:
    alter_linear(layer_of(engine, 0), "down", lambda out: add_to(out, (slice(None), slice(-1, None)), 0.001))


@fault("a split of a sum left out", C.MLP, how="change")
def fault_27(engine: NativeEngine) -> None:
    inner = layer_of(engine, 0).down
    width = 16

    def without(x: torch.Tensor) -> torch.Tensor:
        part = x.clone()
        part[:, -width:] = 0
        out: torch.Tensor = inner(part)
        return out

    layer_of(engine, 0).down = without


@fault("weight of the final norm", C.NORM, how="change")
def fault_28(engine: NativeEngine) -> None:
    engine.runner.text.norm = engine.runner.text.norm * 1.0001


@fault("two rows of the output head swapped", C.HEAD, how="change", spec="untied_sharded")
def fault_29(engine: NativeEngine) -> None:
    order = torch.arange(engine.runner.text.vocabulary)
    order[[20, 21]] = order[[21, 20]]
    alter_linear(engine.runner.text, "head", lambda out: out[:, order])


@fault("rows of the embedding one off", C.EMBEDDING, how="change", spec="untied_sharded")
def fault_30(engine: NativeEngine) -> None:
    inner: Any = engine.runner.text.embedding
    engine.runner.text.embedding = lambda ids: inner((ids + 1) % 400)  # type: ignore[assignment]


@fault("biases of the attention left out", C.ATTENTION, how="change", spec="half_with_biases")
def fault_attention_bias(engine: NativeEngine) -> None:
    layer_of(engine).qkv.bias = torch.zeros_like(layer_of(engine).qkv.bias)


@fault("attention is not causal", C.ATTENTION, how="patch")
def fault_causal(patch: Patch) -> None:
    import torch.nn.functional as functional

    inner = functional.scaled_dot_product_attention

    def attention(query: Any, key: Any, value: Any, **options: Any) -> Any:
        if options.get("is_causal"):
            options["is_causal"] = False
        return inner(query, key, value, **options)

    import types

    import vlfit.layers.attention as module

    wrapped = types.SimpleNamespace(scaled_dot_product_attention=attention)
    patch.setattr(module, "F", wrapped)


@fault("a whole layer left out", C.ATTENTION, C.KV_CACHE, how="change")
def fault_layer(engine: NativeEngine) -> None:
    def attend(hidden: torch.Tensor, delta: torch.Tensor | None, *rest: Any) -> torch.Tensor:
        if delta is not None:
            hidden.add_(delta)
        return torch.zeros_like(hidden)

    layer_of(engine).attend = attend
    layer_of(engine).feed_forward = lambda hidden, delta: torch.zeros_like(hidden)


@fault("logits in 16 bits", C.HEAD, how="change")
def fault_head(engine: NativeEngine) -> None:
    alter_linear(engine.runner.text, "head", lambda out: out.bfloat16().float())


@fault("weights of the MLP in 8 bits", C.MLP, how="change")
def fault_mlp(engine: NativeEngine) -> None:
    weight = layer_of(engine, 0).down.weight
    step = weight.abs().amax(1, keepdim=True) / 127
    layer_of(engine, 0).down.weight = (weight / step).round() * step


# Other families, and more places ---------------------------------------------------------------------------


def _frequencies(alter: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[NativeEngine], None]:
    def change(engine: NativeEngine) -> None:
        rope: Any = engine.runner.text.rope
        rope.inverse_frequencies = alter(rope.inverse_frequencies)

    return change


@fault("Llama 3: RoPE not scaled", C.ROPE, how="patch", spec="llama3")
def llama3_unscaled(patch: Patch) -> None:
    patch.setattr("vlfit.layers.rope._llama3_frequencies", lambda frequencies, scaling: frequencies)


@fault("Llama 3: nothing between high and low frequencies", C.ROPE, how="patch", spec="llama3")
def llama3_between(patch: Patch) -> None:
    import math

    def scale(frequencies: torch.Tensor, scaling: Any) -> torch.Tensor:
        rotations = scaling.original_max_positions * frequencies / (2 * math.pi)
        is_high = rotations > (scaling.low_freq_factor + scaling.high_freq_factor) / 2
        return torch.where(is_high, frequencies, frequencies / scaling.factor)

    patch.setattr("vlfit.layers.rope._llama3_frequencies", scale)


fault("linear RoPE scaling twice", C.ROPE, how="change", spec="llama_biased_stretched")(
    _frequencies(lambda frequencies: frequencies / 4)
)


@fault("LongRoPE: short factors for long", C.ROPE, how="change", spec="phi3_long")
def phi3_short(engine: NativeEngine) -> None:
    rope: Any = engine.runner.text.rope
    scaling: Any = engine.checkpoint.config.text.rope_scaling
    ratio = torch.tensor(scaling.long_factor) / torch.tensor(scaling.short_factor)
    rope.inverse_frequencies = rope.inverse_frequencies * ratio


@fault("LongRoPE: attention factor left out", C.ROPE, how="change", spec="phi3_long")
def phi3_factor(engine: NativeEngine) -> None:
    engine.runner.text.rope.scale = 1.0


@fault("Qwen2: biases of queries, keys and values left out", C.ATTENTION, how="change", spec="qwen2")
def qwen2_bias(engine: NativeEngine) -> None:
    layer_of(engine).qkv.bias = torch.zeros_like(layer_of(engine).qkv.bias)


@fault(
    "Llama: bias of the output projection left out", C.ATTENTION, how="change", spec="llama_biased_stretched"
)
def llama_bias(engine: NativeEngine) -> None:
    layer_of(engine).output.bias = torch.zeros_like(layer_of(engine).output.bias)


@fault("query heads share the wrong keys", C.ATTENTION, how="patch", spec="qwen3")
def shared_heads(patch: Patch) -> None:
    import vlfit.layers.attention as attention

    inner = attention.slot_attention

    def attend(query: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        order = torch.arange(query.shape[1]).view(2, -1).T.flatten()  # a b a b in place of a a b b
        out = inner(query[:, order], *rest, **options).unflatten(1, (query.shape[1], -1))
        mixed: torch.Tensor = out[:, order.argsort()].flatten(1)
        return mixed

    patch.setattr(attention, "slot_attention", attend)


@fault("scores of attention 0.2 % too large", C.ATTENTION, how="patch", spec="qwen3_biased")
def score_scale(patch: Patch) -> None:
    import vlfit.layers.attention as attention

    inner = attention.rotate_and_store
    patch.setattr(attention, "rotate_and_store", lambda *args: inner(*args) * 1.002)


@fault("a window one token too narrow", C.ATTENTION, C.KV_CACHE, how="change", spec="phi3")
def window(engine: NativeEngine) -> None:
    engine.runner.cache.window = lambda layer: 60  # type: ignore[method-assign]


@fault("GELU for SiLU in the MLP", C.MLP, how="patch", spec="llama2")
def gelu(patch: Patch) -> None:
    import torch.nn.functional as functional

    def wrong(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.gelu(gate) * up

    patch.setattr("vlfit.layers.fused.silu_mul", wrong)


@fault("an input norm of another layer", C.NORM, how="change", spec="qwen3")
def other_norm(engine: NativeEngine) -> None:
    layer_of(engine, 1).input_norm = layer_of(engine, 0).input_norm


@fault("a tile of the head is 0", C.HEAD, how="change", spec="odd_vocab_one_kv_head")
def head_tile(engine: NativeEngine) -> None:
    def alter(out: torch.Tensor) -> torch.Tensor:
        out[:, 288:304] = 0
        return out

    alter_linear(engine.runner.text, "head", alter)


@fault("embedding scaled by the root of its width", C.EMBEDDING, how="change", spec="llama2")
def embedding_scale(engine: NativeEngine) -> None:
    inner: Any = engine.runner.text.embedding
    engine.runner.text.embedding = lambda ids: inner(ids) * 8.0  # type: ignore[assignment]
