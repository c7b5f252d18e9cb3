"""What the native engine holds while it works, counted from its code: bytes as functions of shapes.

Knows: which tensors of ``engine/`` live at the same time, phase by phase. Does not know: machines, or what
torch's allocator makes of it (``ledger.py`` adds that). A test runs the engine's own modules on torch's meta
device at the true shapes of 2B, 4B and 8B and compares what lives there with these functions.
"""

from vlfit.checkpoint.catalog import BF16
from vlfit.checkpoint.config import VisionConfig
from vlfit.plan import allocator
from vlfit.plan.native.tiles import (
    BUILT_IN,
    EIGHT_BIT_ROWS,
    GROUP,
    LEAST,
    SPLIT_ROWS,
    WIDEN_ROWS,
    Means,
    Table,
    splits_for,
    tiles_for,
)
from vlfit.plan.shapes import HALF, SINGLE, Matrix, Model

BLOCK_SIZE = 16  # tokens of a KV block (``api/engine_options.py``)
VISION_WHOLE = 3072  # patches; of more the feed-forward goes in two halves (``models/qwen3_vl/vision.py``)
TYPICAL_REQUEST = 2048  # tokens of pool for each sequence (``engine/engine.py``)
# Where those do not fit: a picture of 1024 tokens, and half as much for a question and its answer.
TIGHT_REQUEST = 1536
INDEX = 8  # bytes of an int64
NARROW_INDEX = 4  # bytes of an int32, of which block tables are
# Sampling one row that is not plain greedy: in float32, scores, order, sorted copies, probabilities
# (``engine/sampling/sampler.py``).
_SAMPLER_BYTES = 68
_PART, _LISTED = 4096, 64  # logits, and tokens that are listed of so many (``kernels/sampling/draw.py``)


def kv_tokens(context: int, sequences: int, each: int = TYPICAL_REQUEST) -> int:
    """Tokens of the KV pool, in whole blocks, as the engine sizes it (``Engine._kv_tokens``)."""
    tokens = max(sequences * min(context, each), context)
    return -(-tokens // BLOCK_SIZE) * BLOCK_SIZE


def feature_bytes(vision: VisionConfig, image_tokens: int) -> int:
    """What is kept of one encoded picture: its rows, and one more set for each deepstack level."""
    return (1 + len(vision.deepstack_visual_indexes)) * image_tokens * vision.out_hidden_size * HALF


def rows_reached(chunk: int, image_tokens: int) -> int:
    """Most rows of features of all pictures that a pass of ``chunk`` tokens reaches: the last token of a
    largest one, smaller ones, and the first token of another largest one. Around each stand two tokens, and a
    word behind it (``engine/execution/warmup.py``).
    """
    whole, rest = divmod(max(chunk - 5, 0), image_tokens + 3)
    return (2 + whole) * image_tokens + max(rest - 3, 0)


def vision_peak(
    vision: VisionConfig, image_tokens: int, *, narrow: bool = False, means: Means = LEAST
) -> int:
    """Peak of the vision tower on one picture of up to ``image_tokens`` (``models/qwen3_vl/vision.py``).

    A somewhat smaller one may take more: the largest whose feed-forward goes whole.
    """
    whole = min(image_tokens, VISION_WHOLE // vision.spatial_merge_size**2)
    scratch = means.scratch if narrow else 0
    return max(_peak_of_looking(vision, tokens, scratch) for tokens in (image_tokens, whole))


def _peak_of_looking(vision: VisionConfig, image_tokens: int, scratch: int) -> int:
    """Peak on a picture of just so many tokens.

    All along live the rows of deepstack, and for each patch the residual in bfloat16 and the angles that rows
    and columns stand for; in a block q, k and v beside a norm's output or what the patches find, then the
    norm's output and the feed-forward of half of them. Products with narrow weights have the ``scratch``
    bytes that slices of them are widened into.
    """
    hidden, merge = vision.hidden_size, vision.spatial_merge_size**2
    patches = image_tokens * merge
    places = patches // vision.spatial_merge_size  # of the longest picture: two rows
    output = image_tokens * vision.out_hidden_size * HALF
    always = len(vision.deepstack_visual_indexes) * output
    always += patches * HALF * hidden + places * 2 * SINGLE * (vision.head_dim // 4)
    pixels = vision.in_channels * vision.patch_size**2 * vision.temporal_patch_size
    entering = patches * (pixels + HALF * pixels)  # bytes, and the numbers that they become
    inner = vision_half(patches, merge) * HALF * (vision.intermediate_size + hidden)
    in_blocks = max(patches * 4 * HALF * hidden, patches * HALF * hidden + inner)
    merging = output + patches * HALF * (hidden + max(hidden, vision.out_hidden_size // merge))
    return always + max(entering, scratch + max(in_blocks, merging))


def vision_half(patches: int, merge: int) -> int:
    """How many of ``patches`` the tower's feed-forward computes at once: the larger of its ``halves``."""
    return patches if patches <= VISION_WHOLE else -(-patches // (2 * merge)) * merge


def text_peak(
    model: Model,
    chunk: int,
    context: int,
    sequences: int,
    *,
    native: bool = True,
    means: Means = LEAST,
    table: Table = BUILT_IN,
    guess_rows: int = 0,
) -> int:
    """Peak of one forward pass of the text model: the last ``chunk`` of a context, or ``sequences`` rows.

    The largest phase counts, on top of what lives all along (``models/decoder.py``). ``native`` False:
    no kernels of ours and no chunks: transformers with sdpa. ``table``: the card's tiles. ``guess_rows``: of
    a pass with guesses, each of which has logits (``engine/scheduling/speculative.py``).
    """
    rows = max(chunk, sequences)
    if not native:
        return _pass_peak(model, rows, context, sequences, sequences, None, table)
    # Products of few rows are shared out, which may take more than those of many.
    some = {(rows, sequences), (min(rows, SPLIT_ROWS), sequences)}
    if guess_rows > sequences:
        some.add((guess_rows, guess_rows))
    return max(_pass_peak(model, each, context, sequences, said, means, table) for each, said in some)


def _pass_peak(
    model: Model,
    rows: int,
    context: int,
    sequences: int,
    speaking: int,
    means: Means | None,
    table: Table,
) -> int:
    """Peak of a pass of ``rows`` rows, so many ``speaking``; without ``means``: transformers'."""
    text = model.text
    phases = [_head_phase(model, speaking)]
    always = rows * (HALF * text.hidden_size + 2 * HALF * text.head_dim + 5 * INDEX)
    always += (speaking + 1) * INDEX  # whose logits are wanted
    if model.vision is not None:
        always += feature_bytes(model.vision, rows) + rows * INDEX
    if means is not None:
        phases += [_product_phases(model, rows, means, table), _attention(model, rows, sequences)]
        always += (sequences + 1) * (-(-context // BLOCK_SIZE) + 3) * NARROW_INDEX  # block tables and spans
    else:
        phases += [_layer_phases(model, rows)]
    return always + max(phases)


def _widths(model: Model) -> tuple[int, int, int]:
    """Values of a row in q, in k (or v), and in q, k and v together."""
    text = model.text
    queries, keys = text.num_attention_heads * text.head_dim, text.num_key_value_heads * text.head_dim
    return queries, keys, queries + 2 * keys


def _layer_phases(model: Model, rows: int) -> int:
    """Peak of a layer in bf16 in plain PyTorch, step by step in float32 (transformers)."""
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


def splits(outputs: int, inputs: int, rows: int, form: str, table: Table = BUILT_IN) -> int:
    """Among how many programs a product with narrow weights is shared out (``kernels/gemm/quantized.py``)."""
    return splits_for(rows, outputs, inputs, tiles_for(rows, form, table))


def _product_phases(model: Model, rows: int, means: Means, table: Table) -> int:
    """Peak of a layer's products (``models/decoder.py``): what each takes, and what lives around it.

    All along lives what the last half of a layer found and is not added yet, as large as a norm's output.
    """
    queries, _, joined = _widths(model)
    layer = model.layer
    if means.eight_bits and rows > WIDEN_ROWS and all(matrix.eight_bits for matrix in layer.values()):
        return _eight_bit_phases(model, rows)
    found = rows * HALF * model.text.hidden_size
    inner = rows * HALF * model.text.intermediate_size
    return found + max(
        found + _product([layer["q_proj"], layer["k_proj"], layer["v_proj"]], rows, means, table),
        rows * HALF * (joined + 2 * queries) + _product([layer["o_proj"]], rows, means, table),
        found + _product([layer["gate_proj"], layer["up_proj"]], rows, means, table),
        2 * inner + _product([layer["down_proj"]], rows, means, table),
    )


def _eight_bit_phases(model: Model, rows: int) -> int:
    """As ``_product_phases``, where rows are rounded to FP8 (``kernels/gemm/fp8.py``)."""
    queries, _, joined = _widths(model)
    hidden, inner = model.text.hidden_size, model.text.intermediate_size
    rows += -rows % EIGHT_BIT_ROWS
    found = rows * HALF * hidden
    return found + max(
        _in_eight_bits(rows, hidden) + rows * HALF * joined,
        rows * HALF * (joined + queries) + _in_eight_bits(rows, queries) + found,
        _in_eight_bits(rows, hidden) + rows * HALF * 2 * inner,
        rows * HALF * 2 * inner + _in_eight_bits(rows, inner),
        _in_eight_bits(rows, inner) + found,
    )


def _in_eight_bits(rows: int, width: int) -> int:
    """Codes, and a scale for every ``GROUP`` of them."""
    return rows * (width + width // GROUP * SINGLE)


def _product(parts: list[Matrix], rows: int, means: Means, table: Table) -> int:
    """Output of matrices that share their input; each program's sums, or the buffer to widen in.

    If need be, also the input in another order (``Reordered`` of ``layers/linear.py``).
    """
    outputs, form = sum(part.rows for part in parts), parts[0].form
    output = rows * outputs * HALF + (rows * parts[0].columns * HALF if parts[0].ordered else 0)
    if form == BF16:
        return output
    if rows > WIDEN_ROWS:
        return output + means.scratch
    count = splits(outputs, parts[0].columns, rows, form, table)
    return output + (rows * outputs * count * SINGLE if count > 1 else 0)


def decode_splits(sequences: int) -> int:
    """Among how many programs a sequence's context is shared out (``kernels/attention/paged.py``)."""
    if sequences <= 2:
        return 17
    return 16 if sequences <= 4 else 8 if sequences <= 16 else 4 if sequences <= 256 else 1


def _attention(model: Model, rows: int, sequences: int) -> int:
    """Queries and their answers, and what the programs that share a context leave for ``merge``.

    Keys and values are read where they lie, and scores exist a tile at a time: neither costs memory.
    """
    queries, _, joined = _widths(model)
    text = model.text
    parts = sequences * text.num_attention_heads * decode_splits(sequences) * (text.head_dim + 2) * SINGLE
    held = rows * HALF * (text.hidden_size + joined + 2 * queries)
    return held + parts


def _head_phase(model: Model, speaking: int) -> int:
    """Logits of ``speaking`` rows in bfloat16; lists that all are drawn from, or one row being sampled."""
    vocabulary = model.text.vocab_size
    drawn = max(speaking * drawing(vocabulary), vocabulary * _SAMPLER_BYTES)
    return speaking * vocabulary * HALF + drawn


def drawing(vocabulary: int) -> int:
    """What choosing a row's next token takes: for each part its likeliest, their weight and a list, and one
    list more; and what is told of the row (``kernels/sampling/draw.py``).
    """
    parts = -(-vocabulary // _PART)
    lists = (parts + 1) * _LISTED * (SINGLE + NARROW_INDEX)
    return parts * (2 * SINGLE + NARROW_INDEX) + lists + 3 * INDEX


# What the native engine's CUDA graphs hold on a GPU: of decode steps (``engine/execution/cuda_graphs.py``)
# and of the tower (``engine/execution/encoder_graph.py``).
#
# Knows: which tensors of a step live in the pool that its recordings share. What the driver takes for a
# recording is less than can be told: five of 36 layers each were within 4 MiB on an H200 (docs/log.md).


# Rows of a pass with guesses, at most (``speculative.py``): products read weights once for so many.
GUESS_ROWS = 8
_SMALL_SEGMENTS = 2  # of torch's pool, for all that is smaller than 1 MiB


def pool_bytes(model: Model, sequences: int, guess_rows: int = 0) -> int:
    """What torch takes for recordings of up to ``sequences``: logits in bfloat16, and the rest.

    They share one pool, and the largest is recorded first: that of ``guess_rows`` where fewer requests run.
    """
    logits = max(sequences, guess_rows) * model.text.vocab_size
    return allocator.held_for((logits * HALF,)) + _SMALL_SEGMENTS * allocator.SMALL_SEGMENT


def tower_bytes(vision: VisionConfig, image_tokens: int, workspace: int, scratch: int) -> int:
    """What torch takes for one recording of the tower's blocks, for pictures of up to ``image_tokens``.

    It shares nothing with what is not recorded: the residual and what is found stay, beside it come and go a
    norm's output, q, k and v, or what is inside of the feed-forward, and what they are added to. Recordings
    have a ``workspace`` for matrix products of their own, and narrow weights the ``scratch`` bytes that
    slices of them are widened into.
    """
    merge = vision.spatial_merge_size**2
    patches = min(image_tokens * merge, VISION_WHOLE)
    row = patches * HALF * vision.hidden_size
    output = patches // merge * HALF * vision.out_hidden_size
    found = [output] * (1 + len(vision.deepstack_visual_indexes))
    inner = patches * HALF * vision.intermediate_size
    sizes = [row, *found, row, row, row, 3 * row, inner, workspace, scratch]
    return allocator.held_for(size for size in sizes if size) + allocator.SMALL_SEGMENT
