"""A cache of layers that are unlike each other: what is allocated, and what the ledger says of it."""

from dataclasses import replace

import pytest
import torch

from vlfit.checkpoint.catalog import find_entry
from vlfit.layers.kv_cache import KVCache
from vlfit.machine.cards import machine_with_card
from vlfit.models.cache_spec import (
    CacheSpec,
    LayerCache,
    Paged,
    State,
    StateTensor,
    allows_prefix_cache,
    kv_bytes_per_token,
    state_bytes_per_sequence,
)
from vlfit.plan.backends import NATIVE
from vlfit.plan.ledger import PlanSettings
from vlfit.plan.shapes import Model, model_of

CPU = torch.device("cpu")
# As of a hybrid model: three layers with a state and a convolution's rest, then one with keys and values;
# and one more with heads of another size.
_RECURRENT = State((StateTensor("recurrent", (4, 16, 16)),))
_BOTH = State((StateTensor("conv", (3, 64), "bfloat16"), *_RECURRENT.tensors))
_STATES: list[LayerCache] = [_RECURRENT, _BOTH, _RECURRENT]
HYBRID: CacheSpec = (*_STATES, Paged(2, 32), *_STATES, Paged(2, 32), Paged(1, 64, window=128))
STATES = 2 * (3 * 4 * 16 * 16 * 4 + 3 * 64 * 2)
PER_TOKEN = 2 * (2 * 2 * 32 + 1 * 64)  # values


@pytest.mark.parametrize("fp8", [False, True])
def test_allocation_follows_the_spec(fp8: bool) -> None:
    cache = KVCache(HYBRID, 6, 16, torch.bfloat16, CPU, fp8=fp8, sequences=3)
    per_token = PER_TOKEN + 2 * (2 * 2 + 1) * 2 if fp8 else 2 * PER_TOKEN
    assert kv_bytes_per_token(HYBRID, 2, fp8=fp8) == per_token
    assert state_bytes_per_sequence(HYBRID) == STATES
    assert cache.block_bytes == 16 * per_token
    assert cache.nbytes == 6 * 16 * per_token + 3 * STATES
    assert sorted(cache.states) == [0, 1, 2, 4, 5, 6]
    assert sorted(cache.states[1]) == ["conv", "recurrent"]
    assert cache.states[1]["conv"].shape == (3, 3, 64)
    assert cache.states[1]["conv"].dtype == torch.bfloat16
    assert cache.states[0]["recurrent"].shape == (3, 4, 16, 16)
    assert [cache.layer(index)[0].shape[1:] for index in (3, 7, 8)] == [(2, 32), (2, 32), (1, 64)]
    assert cache.window(8) == 128


def test_each_layer_reads_what_it_wrote() -> None:
    torch.manual_seed(0)
    cache = KVCache(HYBRID, 4, 4, torch.float32, CPU, sequences=1)
    slots = torch.arange(4, 12)
    written = {}
    for layer in (3, 7, 8):
        shape = (8, *cache.layer(layer)[0].shape[1:])
        written[layer] = torch.randn(shape), torch.randn(shape)
        cache.write(layer, slots, *written[layer])
    cache.copy_block(1, 0, 3)
    cache.resize(3, {0: 0, 1: 1, 2: 2}, lambda: None)
    assert cache.nbytes == 3 * cache.block_bytes + STATES
    for layer, (keys, values) in written.items():
        assert torch.equal(cache.read(layer, slots)[0], keys)
        assert torch.equal(cache.read(layer, slots, 4)[1], values)
        assert torch.equal(cache.read(layer, torch.arange(3))[0], keys[:3])


def test_no_prefix_cache_with_states() -> None:
    assert not allows_prefix_cache(HYBRID)
    assert allows_prefix_cache([layer for layer in HYBRID if isinstance(layer, Paged)])


def planned(model: Model, sequences: int) -> dict[str, int]:
    [gpu] = machine_with_card("RTX 5060").gpus
    settings = PlanSettings(model.weights, 4096, 0, sequences, 512)
    return {line.line: line.bytes for line in NATIVE.lines(model, gpu, settings)}


@pytest.mark.parametrize("sequences", [1, 5])
def test_the_ledger_equals_the_allocation(sequences: int) -> None:
    entry = find_entry("Qwen/Qwen2.5-3B-Instruct")
    assert entry is not None
    model = model_of(entry.name, entry.config, entry.tensors, "the catalog")
    hybrid = replace(model, cache_spec=HYBRID)
    lines = planned(hybrid, sequences)
    tokens = max(sequences * 2048, 4096)
    cache = KVCache(HYBRID, tokens // 16, 16, torch.bfloat16, torch.device("meta"), sequences=sequences)
    assert lines["kv_cache"] + lines["state_cache"] == cache.nbytes
    others = planned(model, sequences)
    assert lines["weights.text"] == others["weights.text"]
