"""What the native engine holds while it works, counted from its code: bytes as functions of shapes.

Knows: which tensors of ``engine/`` live at the same time, phase by phase. Does not know: machines, or what
torch's allocator makes of it (``ledger.py`` adds that). A test runs the engine's own modules on torch's meta
device at the true shapes of 2B, 4B and 8B and compares what lives there with these functions.
"""

from vlfit.checkpoint.catalog import BF16
from vlfit.checkpoint.config import VisionConfig
from vlfit.checkpoint.quantization import INT4
from vlfit.plan.model import HALF, SINGLE, Matrix, Model

BLOCK_SIZE = 16  # tokens of a KV block (``engine/options.py``)
TYPICAL_REQUEST = 2048  # tokens of pool for each sequence (``engine/engine.py``)
INDEX = 8  # bytes of an int64
NARROW_INDEX = 4  # bytes of an int32, of which block tables are
# Sampling one row that is not plain greedy: scores, order, sorted copies, probabilities
# (``engine/sampler.py``).
_SAMPLER_BYTES = 64
# Products with narrow weights (``engine/kernels/linear.py``): those of few rows are shared out by their tiles
# among programs; for those of many rows slices of weights are widened into a buffer.
SPLIT_ROWS, _FEW_ROWS = 64, 8
_BUSY, _MOST_SPLITS, _TILE_OUTPUTS, _TILE_INPUTS, _LONG_TILE_INPUTS = 256, 16, 64, 128, 256
WIDEN_ROWS, SCRATCH_BYTES = 256, 16 * 1024**2


def kv_tokens(context: int, sequences: int) -> int:
    """Tokens of the KV pool, in whole blocks, as the engine sizes it (``Engine._kv_tokens``)."""
    tokens = max(sequences * min(context, TYPICAL_REQUEST), context)
    return -(-tokens // BLOCK_SIZE) * BLOCK_SIZE


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

    The largest phase counts, on top of what lives all along (``engine/decoder/text.py``). ``native`` False:
    no kernels of ours and no chunks: transformers with sdpa.
    """
    text = model.text
    rows = max(chunk, sequences)
    phases = [_layer_phases(model, rows), _head_phase(model, sequences)]
    always = rows * (HALF * text.hidden_size + 2 * HALF * text.head_dim + 5 * INDEX)
    always += (sequences + 1) * INDEX  # whose logits are wanted
    if model.vision is not None:
        always += feature_bytes(model.vision, rows) + rows * INDEX
    if native:
        # Products of few rows are shared out, which may take more than those of many.
        phases += [_product_phases(model, rows), _product_phases(model, min(rows, SPLIT_ROWS))]
        phases += [_attention(model, rows, sequences)]
        always += (sequences + 1) * (-(-context // BLOCK_SIZE) + 3) * NARROW_INDEX  # block tables and spans
    return always + max(phases)


def _widths(model: Model) -> tuple[int, int, int]:
    """Values of a row in q, in k (or v), and in q, k and v together."""
    text = model.text
    queries, keys = text.num_attention_heads * text.head_dim, text.num_key_value_heads * text.head_dim
    return queries, keys, queries + 2 * keys


def _layer_phases(model: Model, rows: int) -> int:
    """Peak of a layer's products and norms in bf16; ``_product_phases`` has what narrow weights add."""
    hidden, inner = model.text.hidden_size, model.text.intermediate_size
    queries, keys, joined = _widths(model)
    text = model.text
    norm = rows * ((2 * SINGLE + HALF) * hidden + SINGLE)  # the last: each row's mean square
    x = rows * HALF * hidden
    head_norm = x + rows * (HALF * joined + (2 * SINGLE + HALF) * (queries + keys))
    head_norm += rows * SINGLE * (text.num_attention_heads + text.num_key_value_heads)
    output = x + rows * HALF * (joined + 2 * (queries + keys) + queries) + x
    gate_up = x + rows * 2 * HALF * inner
    return max(norm, head_norm, output, gate_up)


def splits(outputs: int, inputs: int, rows: int, form: str) -> int:
    """Among how many programs a product with narrow weights is shared out (``kernels/linear.py``)."""
    count = 1
    if rows <= SPLIT_ROWS:
        tile_inputs = _LONG_TILE_INPUTS if rows <= _FEW_ROWS and form == INT4 else _TILE_INPUTS
        programs = -(-outputs // _TILE_OUTPUTS)
        while count < _MOST_SPLITS and programs * count < _BUSY and inputs >= 4 * count * tile_inputs:
            count *= 2
    return count


def _product_phases(model: Model, rows: int) -> int:
    """Peak of a layer's products: what each takes beside its output, and what lives around it."""
    queries, keys, joined = _widths(model)
    layer = model.layer
    x = rows * HALF * model.text.hidden_size
    before_output = x + rows * HALF * (joined + 2 * (queries + keys) + queries)
    inner = rows * 2 * HALF * model.text.intermediate_size
    return max(
        x + _product([layer["q_proj"], layer["k_proj"], layer["v_proj"]], rows),
        before_output + _product([layer["o_proj"]], rows),
        x + _product([layer["gate_proj"], layer["up_proj"]], rows),
        inner + _product([layer["down_proj"]], rows),
    )


def _product(parts: list[Matrix], rows: int) -> int:
    """Output of matrices that share their input; each program's sums, or the buffer to widen in."""
    outputs, form = sum(part.rows for part in parts), parts[0].form
    output = rows * outputs * HALF
    if form == BF16:
        return output
    if rows > WIDEN_ROWS:
        return output + SCRATCH_BYTES
    count = splits(outputs, parts[0].columns, rows, form)
    return output + (rows * outputs * count * SINGLE if count > 1 else 0)


def decode_splits(sequences: int) -> int:
    """Among how many programs a sequence's context is shared out (``engine/kernels/attention.py``)."""
    return 16 if sequences <= 4 else 8 if sequences <= 16 else 4


def _attention(model: Model, rows: int, sequences: int) -> int:
    """Queries and their answers, and what the programs that share a context leave for ``merge``.

    Keys and values are read where they lie, and scores exist a tile at a time: neither costs memory.
    """
    queries, keys, joined = _widths(model)
    text = model.text
    parts = sequences * text.num_attention_heads * decode_splits(sequences) * (text.head_dim + 2) * SINGLE
    held = rows * HALF * (text.hidden_size + joined + 2 * (queries + keys) + queries)
    return held + parts


def _head_phase(model: Model, sequences: int) -> int:
    """Logits of each sequence in bfloat16 and float32, and one row being sampled."""
    vocabulary = model.text.vocab_size
    return sequences * vocabulary * (HALF + SINGLE) + vocabulary * _SAMPLER_BYTES
