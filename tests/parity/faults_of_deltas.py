"""Faults of Qwen3.5: gated delta nets, their states and snapshots, gated attention, partial RoPE."""

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F

import vlfit.layers.gated_delta as gated_delta
from tests.parity.fault_table import C, Patch, alter_linear, fault, layer_of
from vlfit.engine.engine import NativeEngine
from vlfit.layers.state_snapshots import StateSnapshots

Tensor = torch.Tensor


def _delta_layer(engine: NativeEngine) -> Any:
    return next(layer for layer in engine.runner.text.layers if hasattr(layer, "weights"))


def _attention_layer(engine: NativeEngine) -> Any:
    return next(layer for layer in engine.runner.text.layers if hasattr(layer, "qkv"))


@fault("decay without its bias", C.DELTA_NET, how="change", spec="small")
def decay_bias(engine: NativeEngine) -> None:
    layer = _delta_layer(engine)
    layer.weights = dataclasses.replace(layer.weights, decay_bias=torch.zeros_like(layer.weights.decay_bias))


@fault("decay of one head 1 % off", C.DELTA_NET, how="change", spec="large")
def decay_scale(engine: NativeEngine) -> None:
    layer = _delta_layer(engine)
    decay = layer.weights.decay_log.clone()
    decay[-1] += 0.01
    layer.weights = dataclasses.replace(layer.weights, decay_log=decay)


@fault("write strength without sigmoid", C.DELTA_NET, how="patch", spec="small")
def beta(patch: Patch) -> None:
    inner = gated_delta._gates
    patch.setattr(gated_delta, "_gates", lambda rows, weights: (inner(rows, weights)[0], rows.b.float()))


@fault("a and b swapped", C.DELTA_NET, how="patch", spec="text")
def swapped_gates(patch: Patch) -> None:
    inner = gated_delta._gates
    patch.setattr(
        gated_delta,
        "_gates",
        lambda rows, weights: inner(dataclasses.replace(rows, a=rows.b, b=rows.a), weights),
    )


@fault("taps of the convolution reversed", C.DELTA_NET, how="change", spec="small")
def conv_taps(engine: NativeEngine) -> None:
    layer = _delta_layer(engine)
    layer.weights = dataclasses.replace(layer.weights, conv=layer.weights.conv.flip(1).contiguous())


@fault("convolution of prompts without SiLU", C.DELTA_NET, how="patch", spec="small")
def conv_activation(patch: Patch) -> None:
    def convolve(qkv: Tensor, before: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        inputs = torch.cat((before, qkv.T), dim=1)
        return F.conv1d(inputs[None], weight[:, None], groups=len(weight))[0].T, inputs[:, len(qkv) :]

    patch.setattr(gated_delta, "_convolve", convolve)


def _split_with(patch: Patch, alter: Any) -> None:
    inner = gated_delta._split
    patch.setattr(gated_delta, "_split", lambda mixed, recurrent: alter(*inner(mixed, recurrent)))


@fault("queries of the delta rule not scaled", C.DELTA_NET, how="patch", spec="small")
def query_scale(patch: Patch) -> None:
    _split_with(patch, lambda query, key, value: (query * query.shape[-1] ** 0.5, key, value))


@fault("value heads share the wrong keys", C.DELTA_NET, how="patch", spec="large")
def shared_keys(patch: Patch) -> None:
    def tile(each: Tensor) -> Tensor:  # a b a b in place of a a b b
        return torch.cat((each[..., 0::2, :], each[..., 1::2, :]), dim=-2)

    _split_with(patch, lambda query, key, value: (tile(query), tile(key), value))


@fault("keys of the delta rule not normalized", C.DELTA_NET, how="patch", spec="small")
def key_norm(patch: Patch) -> None:
    _split_with(patch, lambda query, key, value: (query, key * 1.05, value))


@fault("no decay within a chunk", C.DELTA_NET, how="patch", spec="text")
def chunk_decay(patch: Patch) -> None:
    inner = gated_delta._chunk

    def chunk(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> Any:
        return inner(query, key, value, torch.zeros_like(decay), beta, state)

    patch.setattr(gated_delta, "_chunk", chunk)


@fault("the state is lost between chunks of 64", C.DELTA_NET, how="patch", spec="small")
def chunk_state(patch: Patch) -> None:
    inner = gated_delta._chunk

    def chunk(*args: Any) -> Any:
        return inner(*args[:-1], torch.zeros_like(args[-1]))  # type: ignore[call-arg]

    patch.setattr(gated_delta, "_chunk", chunk)


@fault("gated norm with a sigmoid", C.DELTA_NET, how="patch", spec="small")
def gated_norm(patch: Patch) -> None:
    def norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)
        return (wide * scale * weight * z.float().sigmoid()).to(x.dtype)

    patch.setattr(gated_delta, "gated_rms_norm", norm)


@fault("attention's output gate left out", C.ATTENTION, how="patch", spec="small")
def output_gate(patch: Patch) -> None:
    patch.setattr("vlfit.models.qwen3_5.decoder.gate_output", lambda attended, gate: attended)


@fault("query and gate swapped", C.ATTENTION, how="change", spec="text")
def query_and_gate(engine: NativeEngine) -> None:
    layer = _attention_layer(engine)
    width = 2 * layer.heads * layer.head_dim

    def alter(out: Tensor) -> Tensor:
        pairs = out[:, :width].unflatten(1, (layer.heads, 2, -1)).flip(2).flatten(1)
        return torch.cat((pairs, out[:, width:]), dim=1)

    alter_linear(layer, "qkv", alter)


@fault("norm's weight without the 1", C.NORM, how="change", spec="small")
def norm_one(engine: NativeEngine) -> None:
    layer_of(engine).input_norm = layer_of(engine).input_norm - 1


@fault("RoPE turns the wrong part of a head", C.ROPE, how="patch", spec="small")
def partial_rope(patch: Patch) -> None:
    import vlfit.layers.attention as attention

    inner: Any = vars(attention)["apply_rope"]

    def apply(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        turned: Tensor = inner(x.flip(-1), cosines, sines).flip(-1)
        return turned

    patch.setattr(attention, "apply_rope", apply)


@fault("the convolution's window stays while decoding", C.KV_CACHE, C.DELTA_NET, how="patch", spec="small")
def conv_window(patch: Patch) -> None:
    inner = gated_delta._step

    def step(qkv: Tensor, decay: Tensor, beta: Tensor, weights: Any, state: Any, slots: Tensor) -> Tensor:
        before = state.conv[slots].clone()
        out = inner(qkv, decay, beta, weights, state, slots)
        state.conv[slots] = before
        return out

    patch.setattr(gated_delta, "_step", step)


@fault("the state does not decay while decoding", C.KV_CACHE, C.DELTA_NET, how="patch", spec="large")
def step_decay(patch: Patch) -> None:
    inner = gated_delta._update

    def update(query: Tensor, key: Tensor, value: Tensor, kept: Tensor, *rest: Any) -> Tensor:
        return inner(query, key, value, torch.ones_like(kept), *rest)

    patch.setattr(gated_delta, "_update", update)


@fault("states of two requests swapped in company", C.SCHEDULER, how="patch", spec="small")
def swapped_slots(patch: Patch) -> None:
    inner = gated_delta.gated_delta_steps

    def steps(rows: Any, weights: Any, state: Any, spans: Tensor, **options: Any) -> Tensor:
        if len(spans) > 2:
            spans = spans.clone()
            spans[[0, 1], gated_delta.SLOT] = spans[[1, 0], gated_delta.SLOT]
        return inner(rows, weights, state, spans, **options)

    patch.setattr(gated_delta, "gated_delta_steps", steps)


@fault(
    "a new request takes over a stale state",
    C.KV_CACHE,
    C.DELTA_NET,
    how="patch",
    spec="small",
)
def stale_state(patch: Patch) -> None:
    inner = gated_delta._state_before

    def before(span: list[int], weights: Any, state: Any) -> Any:
        changed = list(span)
        changed[gated_delta.IS_NEW] = 0
        return inner(changed, weights, state)

    patch.setattr(gated_delta, "_state_before", before)


@fault("a snapshot without the convolution's inputs", C.PREFIX_CACHE, how="patch", spec="small")
def snapshot_conv(patch: Patch) -> None:
    inner = StateSnapshots.restore

    def restore(self: Any, states: Any, state_slot: int, slot: int) -> None:
        inner(self, states, state_slot, slot)
        for tensors in states.values():
            tensors["conv"][state_slot] = 0

    patch.setattr(StateSnapshots, "restore", restore)


@fault("a snapshot is taken one step late", C.PREFIX_CACHE, how="patch", spec="large")
def snapshot_late(patch: Patch) -> None:
    inner = StateSnapshots.restore

    def restore(self: Any, states: Any, state_slot: int, slot: int) -> None:
        inner(self, states, state_slot, slot)
        for tensors in states.values():
            tensors["recurrent"][state_slot] *= 0.9

    patch.setattr(StateSnapshots, "restore", restore)


@fault("rejected drafts stay in the state", C.SPECULATION, how="patch", spec="small")
def pending(patch: Patch) -> None:
    inner = gated_delta.gated_delta_steps

    def steps(rows: Any, weights: Any, state: Any, spans: Tensor, *, commit: bool = True) -> Tensor:
        return inner(rows, weights, state, spans, commit=True)

    patch.setattr(gated_delta, "gated_delta_steps", steps)
