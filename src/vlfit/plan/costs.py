"""What the native engine holds while it works, counted from its code: bytes as functions of shapes.

Knows: which tensors of ``engine/`` live at the same time, phase by phase. Does not know: machines, or what
torch's allocator makes of it (``ledger.py`` adds that). A test runs the engine's own modules on torch's meta
device at the true shapes of 2B, 4B and 8B and compares what lives there with these functions.
"""

from vlfit.checkpoint.config import VisionConfig
from vlfit.checkpoint.quantization import FP8, INT4
from vlfit.plan.model import HALF, SINGLE, Matrix, Model

BLOCK_SIZE = 16  # tokens of a KV block (``engine/options.py``)
TYPICAL_REQUEST = 2048  # tokens of pool for each sequence (``engine/engine.py``)
INDEX = 8  # bytes of an int64
# Bytes that live for each weight while a matrix is widened (``engine/layers/linear.py``). FP8: the weight,
# its scale and their product in float32. int4: codes and product in float32, and the result.
_WIDENED = {FP8: 3 * SINGLE, INT4: 2 * SINGLE + HALF}
# Sampling one row that is not plain greedy: scores, order, sorted copies, probabilities
# (``engine/sampler.py``).
_SAMPLER_BYTES = 64


def kv_tokens(context: int, sequences: int) -> int:
    """Tokens of the KV pool, in whole blocks, as the engine sizes it (``Engine._kv_tokens``)."""
    tokens = max(sequences * min(context, TYPICAL_REQUEST), context)
    return -(-tokens // BLOCK_SIZE) * BLOCK_SIZE


def widening(matrix: Matrix) -> int:
    """What lives for a moment while ``matrix`` is widened to bfloat16; 0 if it is stored so."""
    return _WIDENED.get(matrix.form, 0) * matrix.weights


def feature_bytes(vision: VisionConfig, image_tokens: int) -> int:
    """What is kept of one encoded picture: its rows, and one more set for each deepstack level."""
    return (1 + len(vision.deepstack_visual_indexes)) * image_tokens * vision.out_hidden_size * HALF


def vision_peak(vision: VisionConfig, image_tokens: int) -> int:
    """Peak of the vision tower on one picture of ``image_tokens`` (``engine/qwen3_vl/vision.py``).

    For each patch live: its pixels (uint8), the patch in float32 and the tables of positions all along; the
    residual, the norm's output and q, k, v in bfloat16; and, while q and k are rotated, they, their product
    with the cosines and their rolled copy in float32. The MLP (two rows of its inner width) takes less in all
    sizes, but is counted. Deepstack outputs of earlier blocks stay.
    """
    hidden, inner = vision.hidden_size, vision.intermediate_size
    patches = image_tokens * vision.spatial_merge_size**2
    values = vision.in_channels * vision.patch_size**2
    always = (
        values + values * vision.temporal_patch_size * SINGLE + 2 * vision.head_dim * SINGLE + HALF * hidden
    )
    attention = HALF * hidden + HALF * 3 * hidden + 3 * SINGLE * 2 * hidden
    mlp = 2 * HALF * inner
    kept = len(vision.deepstack_visual_indexes) * image_tokens * vision.out_hidden_size * HALF
    return patches * (always + max(attention, mlp)) + kept


def text_peak(model: Model, chunk: int, context: int, sequences: int, *, native: bool = True) -> int:
    """Peak of one forward pass of the text model: the last ``chunk`` of a context, or ``sequences`` rows.

    The largest phase counts, on top of what lives all along (``engine/qwen3_vl/text.py``, ``attention.py``).
    ``native`` False: no chunks, no widening, no copy of the cache: transformers with sdpa.
    """
    text = model.text
    rows = max(chunk, sequences)
    phases = [
        _layer_phases(model, rows),
        _head_phase(model, sequences),
    ]
    if native:
        phases.append(_prefill_attention(model, min(chunk, context), context))
        phases.append(decode_attention(model, sequences, context))
    always = rows * (HALF * text.hidden_size + 2 * HALF * text.head_dim + 5 * INDEX)
    always += (sequences + 1) * INDEX  # whose logits are wanted
    if model.vision is not None:
        always += feature_bytes(model.vision, rows) + rows * INDEX
    if native:
        always += min(chunk, context) * context  # the mask, a byte each
    return always + max(phases)


def _widths(model: Model) -> tuple[int, int, int]:
    """Values of a row in q, in k (or v), and in q, k and v together."""
    text = model.text
    queries, keys = text.num_attention_heads * text.head_dim, text.num_key_value_heads * text.head_dim
    return queries, keys, queries + 2 * keys


def _joined(parts: list[Matrix], rows: int, held: int) -> int:
    """Peak of matrices that share their input: in bf16 they are one; others run one by one and are joined."""
    outputs = HALF * rows * sum(part.rows for part in parts)
    if any(part.form not in _WIDENED for part in parts):
        return held + outputs
    done, peak = 0, 2 * outputs
    for part in parts:
        peak = max(peak, done + widening(part))
        done += HALF * rows * part.rows
    return held + peak


def _layer_phases(model: Model, rows: int) -> int:
    hidden, inner = model.text.hidden_size, model.text.intermediate_size
    queries, keys, joined = _widths(model)
    layer = model.layer
    norm = rows * (2 * SINGLE + HALF) * hidden
    x = rows * HALF * hidden
    qkv = _joined([layer["q_proj"], layer["k_proj"], layer["v_proj"]], rows, x)
    turned = queries + keys
    head_norm = x + rows * (HALF * joined + (2 * SINGLE + HALF) * turned)
    after = x + rows * HALF * (joined + 2 * turned + queries)
    output = after + widening(layer["o_proj"]) + x
    gate_up = _joined([layer["gate_proj"], layer["up_proj"]], rows, x)
    down = rows * 2 * HALF * inner + x + widening(layer["down_proj"])
    return max(norm, qkv, head_norm, output, gate_up, down)


def _prefill_attention(model: Model, chunk: int, context: int) -> int:
    """A chunk that looks at a past: keys and values copied out of the cache, and torch's plain path.

    Its fused kernels take no mask (flash) or no shared key heads (memory-efficient), so scores [heads, chunk,
    context] exist in float32, twice during the softmax, beside keys and values
    in float32, and once more repeated for every head.
    """
    queries, keys, joined = _widths(model)
    before = chunk * HALF * (model.text.hidden_size + joined + 2 * (queries + keys))
    copies = context * (2 * HALF * keys + INDEX)
    if chunk == context:  # no past: plain causal, which the flash kernel takes
        return before + copies + 2 * chunk * HALF * queries
    scores = SINGLE * model.text.num_attention_heads * chunk * context
    widened = 2 * SINGLE * context * (keys + queries)
    return before + copies + 2 * scores + widened + 2 * chunk * SINGLE * queries


def decode_attention(model: Model, sequences: int, context: int) -> int:
    """All sequences at once, padded to the longest: keys and values copied, one of them twice, and scores."""
    queries, keys, joined = _widths(model)
    cells = sequences * context
    before = sequences * HALF * (model.text.hidden_size + joined + 2 * (queries + keys))
    scores = cells * model.text.num_attention_heads * (3 * HALF + SINGLE)
    return before + cells * (3 * HALF * keys + INDEX + 1) + scores


def _head_phase(model: Model, sequences: int) -> int:
    """Logits of each sequence in bfloat16 and float32, the head widened, and one row being sampled."""
    vocabulary = model.text.vocab_size
    return sequences * vocabulary * (HALF + SINGLE) + max(widening(model.head), vocabulary * _SAMPLER_BYTES)
