"""The gated delta rule: against transformers, in chunks as token by token, and with tokens that wait."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from vlfit.kernels.recurrent.delta_rule import DeltaRows, DeltaState, DeltaWeights
from vlfit.layers.gated_delta import gated_delta_chunks, gated_delta_steps, gated_rms_norm

KEY_DIM, VALUE_DIM, SLOTS, ROOM = 8, 12, 3, 5


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-6)


class Case:
    """Random weights, rows and states; ``shared`` value heads for each of two key heads."""

    def __init__(self, rows: int, shared: int = 2) -> None:
        torch.manual_seed(rows)
        heads = 2 * shared
        self.heads, self.channels = heads, 4 * KEY_DIM + heads * VALUE_DIM
        self.weights = DeltaWeights(
            torch.randn(self.channels, 4) / 2, torch.randn(heads) / 2, torch.randn(heads) - 1
        )
        self.rows = DeltaRows(
            torch.randn(rows, self.channels), torch.randn(rows, heads), torch.randn(rows, heads)
        )

    def state(self) -> DeltaState:
        """States of other sequences, which nobody may read."""
        return DeltaState(
            torch.full((SLOTS, self.channels, 3), 7.0),
            torch.full((SLOTS, self.heads, KEY_DIM, VALUE_DIM), 7.0),
            torch.full((SLOTS, ROOM, self.channels), 7.0),
            torch.full((SLOTS, ROOM, self.heads), 7.0),
            torch.full((SLOTS, ROOM, self.heads), 7.0),
        )

    def part(self, begin: int, end: int) -> DeltaRows:
        return DeltaRows(*(each[begin:end] for each in (self.rows.qkv, self.rows.a, self.rows.b)))

    def steps(
        self,
        state: DeltaState,
        begin: int,
        end: int,
        *,
        slot: int = 1,
        pending: int = 0,
        commit: bool = True,
        new: bool | None = None,
    ) -> Tensor:
        is_new = begin == 0 if new is None else new
        table = spans((0, end - begin, slot, int(is_new), pending))
        return gated_delta_steps(self.part(begin, end), self.weights, state, table, commit=commit)


def spans(*rows: tuple[int, int, int, int, int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def one_by_one(case: Case, state: DeltaState, count: int) -> Tensor:
    return torch.cat([case.steps(state, row, row + 1) for row in range(count)])


def reference(case: Case) -> tuple[Tensor, Tensor]:
    """Outputs and last state by transformers' functions."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import (
        causal_conv1d_fn,
        torch_recurrent_gated_delta_rule,
    )

    mixed = causal_conv1d_fn(case.rows.qkv.T[None], case.weights.conv, activation="silu")[0].T
    width = 2 * KEY_DIM
    query, key, value = mixed.split((width, width, case.heads * VALUE_DIM), dim=-1)
    decay = -case.weights.decay_log.exp() * torch.nn.functional.softplus(
        case.rows.a + case.weights.decay_bias
    )
    output, state = torch_recurrent_gated_delta_rule(
        query.view(1, -1, 2, KEY_DIM),
        key.view(1, -1, 2, KEY_DIM),
        value.view(1, -1, case.heads, VALUE_DIM),
        g=decay[None],
        beta=case.rows.b.sigmoid()[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return output[0], state[0]


@pytest.mark.parametrize("shared", [1, 2])
@pytest.mark.parametrize("rows", [1, 3, 63, 64, 65, 150])
def test_steps_and_chunks_equal_the_reference(rows: int, shared: int) -> None:
    case = Case(rows, shared)
    expected, final = reference(case)
    slow, fast, single = case.state(), case.state(), case.state()
    close(case.steps(slow, 0, rows), expected)
    chunked = gated_delta_chunks(case.rows, case.weights, fast, spans((0, rows, 1, 1, 0)))
    close(chunked, expected)
    close(one_by_one(case, single, rows), expected)
    for state in (slow, fast, single):
        close(state.recurrent[1], final)
        before = torch.cat((torch.zeros(3, case.channels), case.rows.qkv))[-3:].T
        assert torch.equal(state.conv[1], before)
        for other in (0, 2):
            assert (state.recurrent[other] == 7).all()
            assert (state.conv[other] == 7).all()


@pytest.mark.parametrize("cut", [1, 2, 63, 64, 65, 129])
def test_a_chunk_continues_where_the_last_one_ended(cut: int) -> None:
    case = Case(150)
    whole = gated_delta_chunks(case.rows, case.weights, case.state(), spans((0, 150, 1, 1, 0)))
    state = case.state()
    first = gated_delta_chunks(case.part(0, cut), case.weights, state, spans((0, cut, 1, 1, 0)))
    second = gated_delta_chunks(case.part(cut, 150), case.weights, state, spans((0, 150 - cut, 1, 0, 0)))
    close(torch.cat((first, second)), whole)


def test_sequences_of_a_batch_are_independent() -> None:
    case = Case(100)
    state = case.state()
    table = spans((70, 30, 0, 1, 0), (0, 70, 2, 1, 0), (0, 9, -1, 0, 0))
    both = gated_delta_chunks(case.rows, case.weights, state, table)
    alone = case.state()
    first = gated_delta_chunks(case.part(0, 70), case.weights, alone, spans((0, 70, 2, 1, 0)))
    second = gated_delta_chunks(case.part(70, 100), case.weights, alone, spans((0, 30, 0, 1, 0)))
    close(both, torch.cat((first, second)))
    close(state.recurrent, alone.recurrent)
    # And one token of each at once, in any order of slots, as one after the other.
    case.rows = case.part(0, 2)
    together = gated_delta_steps(case.rows, case.weights, state, spans((0, 1, 2, 0, 0), (1, 1, 0, 0, 0)))
    one = case.steps(alone, 0, 1, slot=2, new=False)
    other = case.steps(alone, 1, 2, slot=0, new=False)
    close(together, torch.cat((one, other)))
    close(state.recurrent, alone.recurrent)


@pytest.mark.parametrize("accepted", range(1, ROOM + 1))
@pytest.mark.parametrize("in_chunks", [False, True])
def test_accepted_tokens_are_committed_by_the_next_step(accepted: int, in_chunks: bool) -> None:
    """As if the rejected ones had never been."""
    case = Case(40)
    state, plain = case.state(), case.state()
    expected = [case.steps(plain, 0, 20), one_by_one_from(case, plain, 20, 20 + accepted)]
    first = case.steps(state, 0, 20)
    before = state.recurrent[1].clone(), state.conv[1].clone()
    draft = case.steps(state, 20, 20 + ROOM, commit=False, new=False)
    assert torch.equal(state.recurrent[1], before[0])
    assert torch.equal(state.conv[1], before[1])
    close(torch.cat((first, draft[:accepted])), torch.cat(expected))
    begin = 20 + accepted
    table = spans((0, 40 - begin, 1, 0, accepted))
    if in_chunks:
        rest = gated_delta_chunks(case.part(begin, 40), case.weights, state, table)
    else:
        rest = gated_delta_steps(case.part(begin, 40), case.weights, state, table)
    wanted = case.steps(plain, begin, 40, new=False)
    close(rest, wanted)
    close(state.recurrent[1], plain.recurrent[1])
    assert torch.equal(state.conv[1], plain.conv[1])


def one_by_one_from(case: Case, state: DeltaState, begin: int, end: int) -> Tensor:
    return torch.cat([case.steps(state, row, row + 1, new=False) for row in range(begin, end)])


def test_steps_of_drafts_follow_each_other() -> None:
    """Verify step after verify step, each with another number of accepted tokens; nothing else is written."""
    case = Case(30)
    state, plain = case.state(), case.state()
    expected = case.steps(plain, 0, 30)
    outputs, at, pending = [case.steps(state, 0, 4)], 4, 0
    for accepted in (1, 5, 3, 2, 4, 5, 5):
        draft = case.steps(state, at, min(at + ROOM, 30), commit=False, pending=pending, new=False)
        pending = min(accepted, len(draft))
        outputs.append(draft[:pending])
        at += pending
    outputs.append(case.steps(state, at, 30, pending=pending, new=False))
    close(torch.cat(outputs), expected)
    close(state.recurrent[1], plain.recurrent[1])


def test_no_more_tokens_wait_than_there_is_room_for() -> None:
    case = Case(ROOM + 1)
    with pytest.raises(ValueError, match=str(ROOM)):
        case.steps(case.state(), 0, ROOM + 1, commit=False)


def test_gated_norm_multiplies_by_the_weight_as_it_is() -> None:
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

    torch.manual_seed(0)
    x, z, weight = torch.randn(5, 3, 12), torch.randn(5, 3, 12), torch.randn(12)
    norm = Qwen3_5RMSNormGated(12, eps=1e-5)
    norm.weight.data = weight
    close(gated_rms_norm(x, z, weight, 1e-5), norm(x, z).detach())
    narrow = gated_rms_norm(x.bfloat16(), z.bfloat16(), weight, 1e-5)
    assert narrow.dtype == torch.bfloat16


def test_16_bit_rows_are_computed_in_float32() -> None:
    case = Case(20)
    narrow = replace(
        case.rows,
        qkv=case.rows.qkv.bfloat16(),
        a=case.rows.a.bfloat16(),
        b=case.rows.b.bfloat16(),
    )
    wide = DeltaRows(*(each.float() for each in (narrow.qkv, narrow.a, narrow.b)))
    first, second = case.state(), case.state()
    found = gated_delta_chunks(narrow, case.weights, first, spans((0, 20, 1, 1, 0)))
    expected = gated_delta_chunks(wide, case.weights, second, spans((0, 20, 1, 1, 0)))
    assert torch.equal(found, expected.bfloat16())
    assert torch.equal(first.recurrent, second.recurrent)
