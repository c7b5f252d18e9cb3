"""Kernels of the gated delta rule against a loop in float64, and that against transformers'."""

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.conftest import DTYPES, ON_GPU, TOLERANCES, relative_error
from vlfit.kernels.gemm.epilogue import PreNormRows
from vlfit.kernels.launch import tile_counters
from vlfit.kernels.recurrent.delta_rule import (
    DecayProjection,
    DeltaRows,
    DeltaState,
    DeltaWeights,
    OutputGate,
    StateTiles,
    chunk_scratch_bytes,
    gated_delta_chunks,
    gated_delta_steps,
    gated_rms_norm,
)
from vlfit.layers import gated_delta as plain

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")

ROOM, EPS = 4, 1e-6


@dataclass(frozen=True)
class Shape:
    key_heads: int = 1
    value_heads: int = 2
    key_dim: int = 16
    value_dim: int = 16
    kernel: int = 4

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


SHAPES = {
    "tiny": Shape(),
    "a key head for each value head": Shape(2, 2, 16, 32),
    "dimensions of no power of two": Shape(1, 2, 24, 40, 3),
    "heads of 128": Shape(1, 2, 128, 128),
    "0.8B and 2B": Shape(16, 16, 128, 128),
    "4B and 9B": Shape(16, 32, 128, 128),
}
SMALL = [name for name, shape in SHAPES.items() if shape.value_heads == 2]
# Chunks round queries, keys, values, the state, the solved system and what tokens write, once each. In
# float32 a decay is exp(G_i - G_j) of sums over the chunk, here to some hundreds, whose last bits are lost.
CHUNK_TOLERANCES = {
    torch.float32: 1e-5,
    torch.float16: TOLERANCES[torch.float16] * 4,
    torch.bfloat16: TOLERANCES[torch.bfloat16] * 4,
}


@dataclass(frozen=True)
class Layer:
    """Weights, state and rows of a layer; ``exact``: what ``reference`` changes, in float64."""

    shape: Shape
    rows: DeltaRows
    weights: DeltaWeights
    state: DeltaState

    def copy(self, dtype: torch.dtype) -> "Layer":
        weights = DeltaWeights(*(_to(tensor, dtype) for tensor in _fields(self.weights)))
        rows = DeltaRows(*(_to(tensor, dtype) for tensor in _fields(self.rows)))
        return Layer(self.shape, rows, weights, DeltaState(*(_to(t, dtype) for t in _fields(self.state))))


def _fields(value: object) -> list[Tensor]:
    return [getattr(value, name) for name in value.__slots__]  # type: ignore[attr-defined]


def _to(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype, copy=True)


def layer(
    shape: Shape, rows: int, slots: int, dtype: torch.dtype, device: torch.device, *, repeat: bool = False
) -> Layer:
    """Random inputs, part of wider rows, with log decays from about -0.001 to -5. ``repeat``: equal keys."""
    torch.manual_seed(0)
    wide = torch.randn(rows, shape.channels + 7)
    if repeat:
        wide[:] = wide[0]
    a, b = torch.randn(2, rows, shape.value_heads + 3) * 2
    if repeat:
        a, b = a - 9, b + 6
    conv = torch.randn(shape.channels, shape.kernel) * 0.5
    decay_log = torch.rand(shape.value_heads)
    weights = DeltaWeights(conv, decay_log, torch.rand(shape.value_heads) - 2)
    state = DeltaState(
        torch.randn(slots, shape.channels, shape.kernel - 1).to(dtype).float(),
        torch.randn(slots, shape.value_heads, shape.key_dim, shape.value_dim) * 0.3,
        torch.randn(slots, ROOM, shape.channels).to(dtype).float(),
        -torch.rand(slots, ROOM, shape.value_heads),
        torch.rand(slots, ROOM, shape.value_heads),
    )
    wide, a, b = (each.to(device, dtype) for each in (wide, a, b))
    inputs = DeltaRows(wide[:, 3 : 3 + shape.channels], a[:, : shape.value_heads], b[:, : shape.value_heads])
    weights = DeltaWeights(*(each.to(device) for each in _fields(weights)))
    return Layer(shape, inputs, weights, DeltaState(*(each.to(device) for each in _fields(state))))


def reference(exact: Layer, spans: list[list[int]], *, commit: bool = True) -> Tensor:
    """The rule token by token in float64, from the equations; changes the state of ``exact``."""
    shape, state = exact.shape, exact.state
    out = exact.rows.qkv.new_zeros((len(exact.rows.qkv), shape.value_heads, shape.value_dim))
    for start, length, slot, is_new, pending in spans:
        if slot < 0:
            continue
        if is_new:
            pending = 0
            state.conv[slot] = 0
            state.recurrent[slot] = 0
        part = slice(start, start + length)
        g = -exact.weights.decay_log.exp() * F.softplus(exact.rows.a[part] + exact.weights.decay_bias)
        beta = exact.rows.b[part].sigmoid()
        old = [state.pending_rows[slot, :pending], state.pending_decay[slot, :pending]]
        inputs = torch.cat((old[0], exact.rows.qkv[part]))
        decays = torch.cat((old[1], g))
        betas = torch.cat((state.pending_beta[slot, :pending], beta))
        window, matrix = state.conv[slot].clone(), state.recurrent[slot].clone()
        for index, x in enumerate(inputs):
            if index == pending and not commit:
                state.conv[slot], state.recurrent[slot] = window, matrix
            joined = torch.cat((window, x[:, None]), 1)
            mixed = F.silu((joined * exact.weights.conv).sum(1))
            window = joined[:, 1:]
            keys = shape.key_heads * shape.key_dim
            q, k = (
                each.view(shape.key_heads, shape.key_dim).repeat_interleave(
                    shape.value_heads // shape.key_heads, 0
                )
                for each in (mixed[:keys], mixed[keys : 2 * keys])
            )
            q, k = (each / (each.square().sum(1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
            v = mixed[2 * keys :].view(shape.value_heads, shape.value_dim)
            matrix = matrix * decays[index].exp()[:, None, None]
            delta = (v - torch.einsum("hkv,hk->hv", matrix, k)) * betas[index][:, None]
            matrix = matrix + torch.einsum("hk,hv->hkv", k, delta)
            if index >= pending:
                out[start + index - pending] = torch.einsum("hkv,hk->hv", matrix, q) * shape.key_dim**-0.5
        if commit:
            state.conv[slot], state.recurrent[slot] = window, matrix
        else:
            state.pending_rows[slot, :length] = exact.rows.qkv[part]
            state.pending_decay[slot, :length] = g
            state.pending_beta[slot, :length] = beta
    return out


def gate_of(layer: Layer, dtype: torch.dtype) -> OutputGate:
    shape = layer.shape
    z = torch.randn(len(layer.rows.qkv), shape.value_heads * shape.value_dim + 5)
    weight = torch.rand(shape.value_dim) + 0.5
    device = layer.rows.qkv.device
    return OutputGate(z.to(device, dtype)[:, :-5], weight.to(device), EPS)


def gated(out: Tensor, gate: OutputGate) -> Tensor:
    z = gate.z.double().view(out.shape)
    return out / (out.square().mean(-1, keepdim=True) + EPS).sqrt() * gate.weight.double() * F.silu(z)


def check_state(state: DeltaState, exact: DeltaState, tolerance: float) -> None:
    """Every slot by itself: an error in one is no smaller for the others' sake."""
    for ours, wanted in zip(_fields(state), _fields(exact), strict=True):
        for slot in range(len(ours)):
            difference = (ours[slot].double() - wanted[slot]).norm()
            assert difference <= tolerance * wanted[slot].norm()


def as_spans(spans: list[list[int]], device: torch.device) -> Tensor:
    return torch.tensor(spans, dtype=torch.int32, device=device)


# First row, rows, slot, new, pending.
STEPS = {
    "one token": [[0, 1, 2, 0, 0]],
    "one token after accepted drafts": [[0, 1, 1, 0, 3]],
    "a new sequence": [[0, 1, 0, 1, 2]],
    "padding between": [[0, 1, 2, 0, 0], [1, 1, -1, 0, 0], [2, 1, 0, 0, 4]],
    "verification": [[0, 4, 1, 0, 2], [4, 2, 2, 0, 0], [6, 1, 0, 1, 0], [7, 3, -1, 0, 0]],
}


def each_shape(work: dict[str, list[list[int]]], slow: tuple[str, ...]) -> pytest.MarkDecorator:
    """Every shape with all of ``work``; in the interpreter what is in ``slow`` with the tiny shape alone."""
    return pytest.mark.parametrize(
        ("shape", "work"),
        [
            pytest.param(
                shape, name, marks=pytest.mark.slow if not ON_GPU and shape != "tiny" and name in slow else ()
            )
            for shape in (SHAPES if ON_GPU else SMALL)
            for name in work
        ],
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("has_gate", [True, False])
@each_shape(STEPS, slow=("one token", "a new sequence", "padding between"))  # the others have such sequences
def test_steps(
    shape: str, work: str, has_gate: bool, commit: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """Twice, because the second call starts with the counters that the first leaves."""
    if not ON_GPU and shape != "tiny" and has_gate == commit:
        pytest.skip("one gate and one kind of commit each: the tiny shape takes all")
    if not ON_GPU and shape == "heads of 128" and work != "one token after accepted drafts":
        pytest.skip("the interpreter takes long for wide heads; narrow ones go the same way")
    spans = STEPS[work]
    rows = sum(span[1] for span in spans)
    longest = max(span[1] for span in spans)
    ours = layer(SHAPES[shape], rows, 3, dtype, device)
    exact = ours.copy(torch.float64)
    for _ in range(2 if ON_GPU else 1):
        gate = gate_of(ours, dtype) if has_gate else None
        expected = reference(exact, spans, commit=commit)
        expected = gated(expected, gate) if gate else expected
        out = gated_delta_steps(
            ours.rows,
            ours.weights,
            ours.state,
            as_spans(spans, device),
            max_length=longest,
            commit=commit,
            gate=gate,
            tiles=None if ON_GPU else StateTiles(16, 1),
        )
        assert out.dtype == dtype
        assert relative_error(out, expected) < TOLERANCES[dtype] * (2 if has_gate else 1)
        check_state(ours.state, exact.state, 2e-6)
    assert not tile_counters(device).any()


@pytest.mark.parametrize("commit", [True, False])
def test_decays_that_the_kernel_projects(commit: bool, device: torch.device) -> None:
    """The same as of products before it, which are written, too."""
    heads, hidden = SHAPES["tiny"].value_heads, 40
    x, weight = torch.randn(1, hidden).to(device), torch.randn(2 * heads, hidden).to(device)
    sums = torch.rand(1, 5).to(device)
    factor = torch.rsqrt(sums.sum() / hidden + EPS)
    b, a = ((x @ weight.T) * factor).chunk(2, dim=1)
    before = layer(SHAPES["tiny"], 1, 3, torch.float32, device)
    rows = replace(before.rows, a=torch.empty_like(a), b=torch.empty_like(b))
    ours = replace(before.copy(torch.float32), rows=rows)
    projection = DecayProjection(PreNormRows(x, sums, EPS), weight)
    spans = as_spans([[0, 1, 1, 0, 1]], device)
    gate = gate_of(before, torch.float32)
    outputs = [
        gated_delta_steps(
            rows, each.weights, each.state, spans, max_length=1, commit=commit, gate=gate, projection=given
        )
        for each, rows, given in (
            (before, replace(before.rows, a=a, b=b), None),
            (ours, ours.rows, projection),
        )
    ]
    assert relative_error(outputs[1], outputs[0].double()) < TOLERANCES[torch.float32]
    assert relative_error(ours.rows.a, a.double()) < TOLERANCES[torch.float32]
    assert relative_error(ours.rows.b, b.double()) < TOLERANCES[torch.float32]
    for field in ("recurrent", "conv", "pending_rows", "pending_decay", "pending_beta"):
        torch.testing.assert_close(getattr(ours.state, field), getattr(before.state, field))


def test_rejected_drafts_leave_no_trace(device: torch.device) -> None:
    """Drafts verified, two of four accepted, then a token: as the three tokens one by one."""
    ours = layer(Shape(), 8, 1, torch.float32, device)
    exact = ours.copy(torch.float64)
    one_by_one = torch.cat([reference(exact, [[row, 1, 0, 0, 0]])[row : row + 1] for row in (0, 1, 5)])
    verify = as_spans([[0, 4, 0, 0, 0]], device)
    first = gated_delta_steps(ours.rows, ours.weights, ours.state, verify, max_length=4, commit=False)
    then = as_spans([[5, 1, 0, 0, 2]], device)
    second = gated_delta_steps(ours.rows, ours.weights, ours.state, then, max_length=4)
    assert relative_error(torch.cat((first[:2], second[5:6])), one_by_one) < TOLERANCES[torch.float32]
    assert relative_error(ours.state.recurrent, exact.state.recurrent) < 2e-6


def test_kernels_are_the_plain_form(device: torch.device) -> None:
    """Drafts, a step after them and a prompt: outputs and all of the state, as ``layers/`` has them."""
    ours = layer(Shape(), 8, 3, torch.float32, device)
    plain_state = ours.copy(torch.float32).state
    drafts = as_spans([[0, 4, 0, 0, 1], [4, 3, 2, 0, 0]], device)
    step = as_spans([[0, 1, 0, 0, 3], [1, 1, 2, 0, 1]], device)
    chunk = as_spans([[0, 8, 1, 1, 0]], device)
    for spans, most, commit in ((drafts, 4, False), (step, 1, True)):
        out = gated_delta_steps(ours.rows, ours.weights, ours.state, spans, max_length=most, commit=commit)
        wanted = plain.gated_delta_steps(ours.rows, ours.weights, plain_state, spans, commit=commit)
        count = int(spans[:, 1].sum())
        assert relative_error(out[:count], wanted[:count].double()) < 2e-6
    out = gated_delta_chunks(ours.rows, ours.weights, ours.state, chunk, max_length=8)
    wanted = plain.gated_delta_chunks(ours.rows, ours.weights, plain_state, chunk)
    assert relative_error(out, wanted.double()) < 2e-6
    check_state(ours.state, DeltaState(*(_to(t, torch.float64) for t in _fields(plain_state))), 2e-6)


def test_more_rows_than_can_wait(device: torch.device) -> None:
    ours = layer(Shape(), ROOM + 1, 1, torch.float32, device)
    spans = as_spans([[0, ROOM + 1, 0, 0, 0]], device)
    with pytest.raises(ValueError, match="5 tokens"):
        gated_delta_steps(ours.rows, ours.weights, ours.state, spans, max_length=ROOM + 1, commit=False)
    narrow = replace(ours.rows, qkv=ours.rows.qkv[:, :-16])
    with pytest.raises(ValueError, match=str(narrow.qkv.shape[-1])):
        gated_delta_chunks(narrow, ours.weights, ours.state, spans, max_length=ROOM + 1)


CHUNKS = {
    "less than a chunk": [[0, 9, 1, 1, 0]],
    "shorter than the convolution": [[0, 2, 1, 0, 0]],
    "half a chunk, with a past": [[0, 29, 2, 0, 0]],
    "two chunks": [[0, 128, 0, 1, 0]],
    "with a past": [[0, 70, 2, 0, 0]],
    "several, one with pending tokens": [
        [0, 65, 1, 1, 3],
        [65, 1, 0, 0, 3],
        [66, 40, -1, 1, 0],
        [106, 33, 2, 0, 0],
    ],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each_shape(CHUNKS, slow=("less than a chunk", "two chunks"))
def test_chunks(shape: str, work: str, dtype: torch.dtype, device: torch.device) -> None:
    spans = CHUNKS[work]
    rows = sum(span[1] for span in spans)
    ours = layer(SHAPES[shape], rows, 3, dtype, device)
    exact = ours.copy(torch.float64)
    gate = gate_of(ours, dtype) if work == "with a past" else None
    expected = reference(exact, spans)
    expected = gated(expected, gate) if gate else expected
    longest = max(span[1] for span in spans)
    out = gated_delta_chunks(
        ours.rows, ours.weights, ours.state, as_spans(spans, device), max_length=longest, gate=gate
    )
    assert out.dtype == dtype
    assert relative_error(out, expected) < CHUNK_TOLERANCES[dtype]
    check_state(ours.state, exact.state, CHUNK_TOLERANCES[dtype])


def test_equal_keys_in_a_chunk(device: torch.device) -> None:
    """Little decay, and every token with the same key: the system's powers would grow beyond float32."""
    ours = layer(Shape(), 70, 1, torch.float32, device, repeat=True)
    exact = ours.copy(torch.float64)
    expected = reference(exact, [[0, 70, 0, 0, 0]])
    spans = as_spans([[0, 70, 0, 0, 0]], device)
    out = gated_delta_chunks(ours.rows, ours.weights, ours.state, spans, max_length=70)
    assert relative_error(out, expected) < 2e-5
    assert relative_error(ours.state.recurrent, exact.state.recurrent) < 2e-5


def test_any_cut_of_a_prompt_is_the_same(device: torch.device) -> None:
    whole = layer(Shape(), 100, 1, torch.float32, device)
    cut = whole.copy(torch.float32)
    spans = as_spans([[0, 100, 0, 1, 0]], device)
    out = gated_delta_chunks(whole.rows, whole.weights, whole.state, spans, max_length=100)
    parts = []
    for begin, end in ((0, 1), (1, 66), (66, 100)):
        spans = as_spans([[begin, end - begin, 0, int(begin == 0), 0]], device)
        now = gated_delta_chunks(cut.rows, cut.weights, cut.state, spans, max_length=end - begin)
        parts.append(now[begin:end])
    tolerance = CHUNK_TOLERANCES[torch.float32]
    assert relative_error(torch.cat(parts), out.double()) < tolerance
    assert relative_error(cut.state.recurrent, whole.state.recurrent.double()) < tolerance
    assert torch.equal(cut.state.conv, whole.state.conv)


def test_reference_is_transformers() -> None:
    """The loop above, and so the kernels, equal transformers' two forms of the rule."""
    modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    shape = SHAPES["4B and 9B"]
    shape = replace(shape, key_heads=2, value_heads=4, key_dim=16, value_dim=16)
    exact = layer(shape, 70, 1, torch.float32, torch.device("cpu")).copy(torch.float64)
    initial = exact.state.recurrent.clone()
    joined = torch.cat((exact.state.conv[0], exact.rows.qkv.T), 1)[None]
    mixed = (
        modeling.causal_conv1d_fn.__wrapped__ if hasattr(modeling.causal_conv1d_fn, "__wrapped__") else None
    )
    mixed = F.silu(F.conv1d(joined, exact.weights.conv[:, None], groups=shape.channels))[0].T
    keys = shape.key_heads * shape.key_dim
    q, k, v = mixed.split((keys, keys, shape.value_heads * shape.value_dim), 1)
    arguments = (
        q.reshape(1, 70, shape.key_heads, -1),
        k.reshape(1, 70, shape.key_heads, -1),
        v.reshape(1, 70, shape.value_heads, -1),
    )
    g = -exact.weights.decay_log.exp() * F.softplus(exact.rows.a + exact.weights.decay_bias)
    options = {
        "g": g[None],
        "beta": exact.rows.b.sigmoid()[None],
        "initial_state": initial,
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }
    expected = reference(exact, [[0, 70, 0, 0, 0]])
    for rule in (modeling.torch_recurrent_gated_delta_rule, modeling.torch_chunk_gated_delta_rule):
        out, state = rule(*arguments, **options)  # in float32 inside
        assert relative_error(out[0], expected) < 2e-6
        assert relative_error(state, exact.state.recurrent) < 2e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "heads", "dim"), [(1, 3, 16), (5, 4, 24)])
def test_gated_rms_norm(rows: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    x = torch.randn(rows, heads, dim).to(device, dtype)
    z = torch.randn(rows, heads * dim + 8).to(device, dtype)[:, :-8]
    weight = torch.rand(dim).to(device)
    out = gated_rms_norm(x, z, weight, EPS)
    expected = gated(x.double(), OutputGate(z, weight, EPS))
    assert out.dtype == dtype
    assert relative_error(out, expected) < TOLERANCES[dtype]
    gated_rms_norm(x, z, weight, EPS, out=x)
    assert torch.equal(x, out)


def test_scratch_is_what_is_said() -> None:
    """On the meta device, by torch's own count of bytes; nothing is launched there."""
    shape, rows = SHAPES["4B and 9B"], 1024
    on_meta = layer(Shape(), 1, 1, torch.bfloat16, torch.device("meta"))
    assert gated_delta_chunks(
        on_meta.rows, on_meta.weights, on_meta.state, torch.empty(1, 5, device="meta"), max_length=1
    ).shape == (1, 2, 16)
    mixed, systems, scales = rows * shape.channels * 2, rows * 32 * 128 * 2, rows * 32 * 5 * 4
    assert chunk_scratch_bytes(rows, shape.channels, 32, 2) == mixed + systems + scales
