"""Faults of what serves: KV cache, scheduler, prefix cache, drafts, sleep, sampling, stopping."""

import dataclasses
from typing import Any

import torch

from tests.parity.fault_table import C, Patch, alter_linear, fault, layer_of
from vlfit.engine.engine import NativeEngine

# KV cache, scheduler, prefix cache, drafts ----------------------------------------------------------------


@fault("first token of each block in a wrong slot", C.KV_CACHE, how="change")
def fault_40(engine: NativeEngine) -> None:
    inner = engine.runner.cache.write
    for index in range(len(engine.runner.text.layers)):  # fresh pages, not what the process left in them
        for part in engine.runner.cache.layer(index):
            part.zero_()

    def write(layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        wrong = torch.where(slots % engine.options.block_size == 0, slots + 1, slots)
        inner(layer, wrong, keys, values)

    engine.runner.cache.write = write  # type: ignore[method-assign]


@fault("decoding does not see the first token", C.KV_CACHE, how="patch")
def fault_41(patch: Patch) -> None:
    import vlfit.layers.attention as attention

    inner = attention._decode

    def decode(query: Any, layer: int, cache: Any, group: Any) -> Any:
        if group.mask is None and group.slots.shape[1] > 1:
            group = attention.DecodeGroup(group.slots[:, 1:], None, None)
        return inner(query, layer, cache, group)

    patch.setattr(attention, "_decode", decode)


@fault("scales of the FP8 KV cache doubled", C.KV_CACHE, how="patch")
def fault_42(patch: Patch) -> None:
    import vlfit.layers.kv_cache as kv_cache

    inner = kv_cache.dequantize_kv_rows
    patch.setattr(kv_cache, "dequantize_kv_rows", lambda *args: inner(*args) * 2)


@fault("a stale prefix block: pictures not in the key", C.PREFIX_CACHE, how="patch")
def fault_43(patch: Patch) -> None:
    import vlfit.engine.scheduling.prefix_cache as prefix_cache

    inner = prefix_cache.block_key
    patch.setattr(prefix_cache, "block_key", lambda key, ids, images: inner(key, ids, ()))


@fault("a shared block is overwritten", C.PREFIX_CACHE, how="change")
def fault_44(engine: NativeEngine) -> None:
    cache, inner = engine.runner.cache, engine.scheduler.admit

    def admit() -> list[Any]:
        admitted = inner()
        for sequence in admitted:
            if sequence.num_cached_tokens >= engine.options.block_size:
                first = sequence.block_table[0] * engine.options.block_size
                cache.layer(0)[1][first + 2] *= -1
        return admitted

    engine.scheduler.admit = admit  # type: ignore[method-assign]


@fault("wrong slots after preemption", C.SCHEDULER, how="patch")
def fault_45(patch: Patch) -> None:
    from vlfit.engine.scheduling.sequence import Sequence

    inner = Sequence.reset_for_preemption

    def reset(self: Any) -> None:
        inner(self)
        self.prompt = dataclasses.replace(self.prompt, next_position=self.prompt.next_position + 1)

    patch.setattr(Sequence, "reset_for_preemption", reset)


@fault("a chunk sees one token too few", C.SCHEDULER, how="patch")
def fault_46(patch: Patch) -> None:
    from vlfit.engine.execution.model_runner import AttentionMetadataBuilder

    def mask(self: Any, past: int, length: int) -> torch.Tensor:
        columns = torch.arange(past + length)
        inside: torch.Tensor = columns <= torch.arange(past, past + length)[:, None]
        inside[:, past - 1] = False
        return inside

    patch.setattr(AttentionMetadataBuilder, "_causal_mask", mask)


@fault("company: the last slot of shorter sequences is seen twice", C.SCHEDULER, how="patch")
def fault_47(patch: Patch) -> None:
    import vlfit.layers.attention as attention

    inner = attention._decode

    def decode(query: Any, layer: int, cache: Any, group: Any) -> Any:
        if group.mask is not None:
            group = attention.DecodeGroup(group.slots, torch.ones_like(group.mask), None)
        return inner(query, layer, cache, group)

    patch.setattr(attention, "_decode", decode)


@fault("every draft is accepted", C.SPECULATION, how="patch")
def fault_48(patch: Patch) -> None:
    from vlfit.engine.sampling.sampler import SampledToken
    from vlfit.engine.sampling.verification import verify_draft as inner

    def accept(
        logits: Any, tokens: Any, is_finite: Any, on_device: Any, row: Any, draft: Any, text: Any
    ) -> Any:
        last = inner(logits[-1:], tokens[-1:], is_finite[-1:], None, row, type(draft)(), text)
        return [*(SampledToken(token) for token in draft.token_ids), *last] if draft.token_ids else last

    patch.setattr("vlfit.engine.execution.step_executor.verify_draft", accept)


@fault("a weight is lost in sleep", C.SLEEP, how="change")
def fault_49(engine: NativeEngine) -> None:
    inner = engine.sleeper.wake

    def wake() -> None:
        inner()
        engine.runner.text.norm = engine.runner.text.norm * 1.1
        alter_linear(layer_of(engine, 0), "down", torch.zeros_like)

    engine.sleeper.wake = wake  # type: ignore[method-assign]


# Sampling and stopping ------------------------------------------------------------------------------------


@fault("the second likeliest token", C.SAMPLER, how="patch")
def fault_50(patch: Patch) -> None:
    from vlfit.engine.sampling.sampler import select_tokens as inner

    def second(logits: torch.Tensor, *args: Any, **options: Any) -> Any:
        output = inner(logits, *args, **options)
        if len(logits):
            output.summary[0] = logits.topk(2).indices[:, 1]
        return output

    patch.setattr("vlfit.engine.execution.model_runner.select_tokens", second)


@fault("seeds are ignored", C.SAMPLER, how="patch")
def fault_51(patch: Patch) -> None:
    import random

    chance = random.Random(1)
    patch.setattr("vlfit.engine.sampling.sampler.philox_uniform", lambda *args: chance.random())


@fault("top_k is ignored", C.SAMPLER, how="patch")
def fault_52(patch: Patch) -> None:
    import vlfit.engine.sampling.sampler as sampler

    inner = sampler._draw_sorted

    def draw(scores: Any, params: Any, uniform: float) -> int:
        return inner(scores, dataclasses.replace(params, top_k=0), uniform)

    patch.setattr(sampler, "_draw_sorted", draw)


@fault("stop tokens are ignored", C.STOP, how="patch")
def fault_53(patch: Patch) -> None:
    from vlfit.engine.sampling.output_processor import Completion

    inner = Completion.__init__

    def start(self: Any, detokenizer: Any, sampling: Any, eos: Any, most: int) -> None:
        inner(self, detokenizer, dataclasses.replace(sampling, stop_token_ids=()), eos, most)

    patch.setattr(Completion, "__init__", start)


@fault("keys and values of two requests swapped in company", C.SCHEDULER, how="patch")
def fault_company(patch: Patch) -> None:
    import vlfit.layers.attention as attention

    inner = attention._decode

    def decode(query: Any, layer: int, cache: Any, group: Any) -> Any:
        if len(group.slots) > 2:
            slots = group.slots.clone()
            slots[[0, 1]] = slots[[1, 0]]
            group = attention.DecodeGroup(slots, group.mask, None)
        return inner(query, layer, cache, group)

    patch.setattr(attention, "_decode", decode)


@fault("an answer ends one token early", C.STOP, C.SCHEDULER, C.SAMPLER, how="patch")
def fault_early(patch: Patch) -> None:
    from vlfit.engine.sampling.output_processor import Completion

    inner = Completion.__init__

    def start(self: Any, detokenizer: Any, sampling: Any, eos: Any, most: int) -> None:
        inner(self, detokenizer, sampling, eos, max(most - 1, 1))

    patch.setattr(Completion, "__init__", start)


# More of what serves ---------------------------------------------------------------------------------------


@fault("two layers change places in sleep", C.SLEEP, how="change")
def swapped_layers(engine: NativeEngine) -> None:
    inner = engine.sleeper.wake

    def wake() -> None:
        inner()
        layers: Any = engine.runner.text.layers
        layers[0].down, layers[1].down = layers[1].down, layers[0].down

    engine.sleeper.wake = wake  # type: ignore[method-assign]


@fault("the engine knows other ends of a turn", C.STOP, how="change")
def other_ends(engine: NativeEngine) -> None:
    engine.generation = dataclasses.replace(
        engine.generation, eos_token_ids=engine.generation.eos_token_ids[:1]
    )


@fault("a picture begins anew in each chunk", C.SCHEDULER, how="change")
def picture_chunks(engine: NativeEngine) -> None:
    inner = engine.runner._visual_rows
    if engine.options.max_num_batched_tokens > 64:
        return

    def changed(batch: Any) -> Any:
        visual = inner(batch)
        return None if visual is None else dataclasses.replace(visual, rows=visual.rows.roll(3, 0))

    engine.runner._visual_rows = changed  # type: ignore[method-assign]


@fault("FP8 KV: a bit of mantissa less", C.KV_CACHE, how="patch")
def fp8_bits(patch: Patch) -> None:
    import vlfit.layers.kv_cache as kv_cache

    inner = kv_cache.dequantize_kv_rows

    def narrow(*args: Any) -> torch.Tensor:
        out: torch.Tensor = inner(*args)
        mantissa, exponent = torch.frexp(out.float())
        return torch.ldexp((mantissa * 4).round() / 4, exponent).to(out.dtype)

    patch.setattr(kv_cache, "dequantize_kv_rows", narrow)


@fault("keys of one head are never written", C.KV_CACHE, C.ATTENTION, how="change", spec="qwen3")
def unwritten_head(engine: NativeEngine) -> None:
    inner = engine.runner.cache.write

    def write(layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        changed = keys.clone()
        changed[:, -1] = 0
        inner(layer, slots, changed, values)

    engine.runner.cache.write = write  # type: ignore[method-assign]


@fault("the position of decoding stands still", C.KV_CACHE, C.POSITIONS, C.ROPE, how="patch", spec="qwen2")
def still(patch: Patch) -> None:
    from vlfit.layers.rope import RotaryEmbedding

    inner = RotaryEmbedding.tables

    def tables(self: Any, positions: torch.Tensor, dtype: torch.dtype) -> Any:
        one = positions.shape[1] == 1
        return inner(self, positions - 1 if one else positions, dtype)

    patch.setattr(RotaryEmbedding, "tables", tables)
