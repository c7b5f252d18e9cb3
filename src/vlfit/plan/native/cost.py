"""Memory of the native engine, counted from its code: bytes as functions of shapes.

Counts tensors that live at the same time, phase by phase; ``lines.py`` adds the allocator's overhead. A test
runs the engine's own modules on torch's meta device at the true shapes of 2B, 4B and 8B and compares live
bytes.
"""

from collections.abc import Collection

from vlfit.api.engine_options import EngineOptions
from vlfit.checkpoint.catalog import BF16
from vlfit.checkpoint.config import VisionConfig
from vlfit.plan import allocator
from vlfit.plan.ledger import TYPICAL_REQUEST, PlanSettings, shared_pool_tokens
from vlfit.plan.native.tiles import (
    BUILT_IN,
    DEFAULT_DEQUANT_CONFIG,
    FP8_ROW_MULTIPLE,
    MAX_FUSED_ROWS,
    DequantConfig,
    Table,
    splits_for,
    tiles_for,
)
from vlfit.plan.shapes import (
    DELTA_PARTS,
    GROUP,
    HALF,
    HOST_SAMPLER_BYTES,
    INDEX,
    SINGLE,
    Matrix,
    Model,
    pass_input_bytes,
    tower_cost,
)

BLOCK_SIZE = EngineOptions().block_size  # tokens of a KV block
# Tokens of the KV cache for each request where ``TYPICAL_REQUEST`` does not fit: a picture of 1024 tokens,
# and half as much for a question and its answer.
TIGHT_REQUEST = 1536
INT32 = 4  # bytes of an int32, of which block tables are
# Tokens of a prompt that a gated delta net computes at once, and its float32 numbers for each row and head.
DELTA_CHUNK, DELTA_SCALES = 64, 5
# Sampling on the GPU: each program of 4096 logits lists its 64 likeliest tokens, a power of two.
LOGITS_PER_PROGRAM, MAX_CANDIDATES = 4096, 64


def kv_tokens(context: int, sequences: int, tokens_per_request: int = TYPICAL_REQUEST) -> int:
    """How many tokens the engine's KV cache has by default: ``shared_pool_tokens``, in whole blocks."""
    return -(-shared_pool_tokens(context, sequences, tokens_per_request) // BLOCK_SIZE) * BLOCK_SIZE


def pool_tokens(settings: PlanSettings) -> int:
    """How many tokens the engine's KV cache has with ``settings``, in whole blocks."""
    each = TIGHT_REQUEST if settings.tight_kv_cache else TYPICAL_REQUEST
    return kv_tokens(settings.context, settings.sequences, each)


def feature_rows(chunk: int, image_tokens: int) -> int:
    """The most rows of image features (one per image token) that a prefill pass of ``chunk`` tokens needs.

    All features of a picture are needed for any of its tokens, so the worst chunk begins with the last token
    of a picture of ``image_tokens``, ends with the first token of another, and has whole pictures between
    (``engine/execution/warmup.py``). Three more tokens are counted per picture: start, end, and a word.
    """
    whole, rest = divmod(max(chunk - 5, 0), image_tokens + 3)
    return (2 + whole) * image_tokens + max(rest - 3, 0)


def vision_peak_bytes(
    vision: VisionConfig,
    image_tokens: int,
    *,
    quantized_tower: bool = False,
    dequant: DequantConfig = DEFAULT_DEQUANT_CONFIG,
) -> int:
    """Peak bytes of the vision tower, without weights, on one picture of up to ``image_tokens``.

    ``quantized_tower``: the tower's weights are dequantized into a buffer of ``dequant.scratch_bytes``, which
    is counted; else ``dequant`` is not used.
    """
    return tower_cost(vision).peak_bytes(
        vision, image_tokens, dequant.scratch_bytes if quantized_tower else 0
    )


def text_peak_bytes(
    model: Model,
    chunk: int,
    context: int,
    sequences: int,
    *,
    dequant: DequantConfig = DEFAULT_DEQUANT_CONFIG,
    table: Table = BUILT_IN,
    draft_rows: int = 0,
    drafts: bool = False,
) -> int:
    """Peak bytes of the text model's largest pass: a prefill chunk, a decode batch, or one with draft tokens.

    Without weights and KV cache, with the pass's inputs. ``chunk``, ``context``, ``sequences``: as in
    ``PlanSettings``. ``table``: the card's GEMM tiles. ``draft_rows``: rows of a pass with draft tokens, all
    of which have logits; 0: there are no such passes. ``drafts``: a draft model stores the rows of each pass.
    """
    rows = max(chunk, sequences)
    # Products of few rows are split, which may take more than those of many.
    passes = {(rows, sequences), (min(rows, MAX_FUSED_ROWS), sequences)}
    if draft_rows > sequences:
        passes.add((draft_rows, draft_rows))
    peak = max(_pass_peak(model, *each, context, sequences, dequant, table) for each in passes)
    return peak + (_draft_model_bytes(model, rows, sequences) if drafts else 0)


def _draft_model_bytes(model: Model, rows: int, sequences: int) -> int:
    """What a draft model takes beside a pass (``engine/execution/drafter.py``).

    The hidden states of all rows, their embeddings, both joined, and the hidden states of each sequence
    that are not stored yet: twice, as they are copied when a step adds to them. Its layer is like a layer of
    the text model, whose memory it takes over.
    """
    kept = 2 * sequences * (MAX_ROWS_BEHIND + MAX_DRAFT_ROWS)
    return (6 * rows + kept) * model.text.hidden_size * HALF


def _pass_peak(
    model: Model,
    rows: int,
    logit_rows: int,
    context: int,
    sequences: int,
    dequant: DequantConfig,
    table: Table,
) -> int:
    """Peak of a pass of ``rows`` rows, of which ``logit_rows`` get logits."""
    block_tables = (sequences + 1) * (-(-context // BLOCK_SIZE) + 3) * INT32  # and query spans
    phases = (
        _head_bytes(model, logit_rows),
        _gemm_phases(model, rows, dequant, table),
        _attention_bytes(model, rows, sequences),
        _delta_phases(model, rows, dequant, table),
    )
    return pass_input_bytes(model, rows, logit_rows) + block_tables + max(phases)


def _row_widths(model: Model) -> tuple[int, int]:
    """Row widths of q, and of packed qkv.

    With an output gate the latter has the product of q, k and v beside it, which holds the gates, too.
    """
    text = model.text
    queries, keys = text.num_attention_heads * text.head_dim, text.num_key_value_heads * text.head_dim
    gates = model.layer["q_proj"].rows - queries
    return queries, (queries + 2 * keys) * (2 if gates else 1) + gates


def num_splits(outputs: int, inputs: int, rows: int, form: str, table: Table = BUILT_IN) -> int:
    """How many parts split-K cuts a quantized GEMM's inputs into; 1: no split-K.

    ``outputs``, ``inputs``: of the linear layer, whose weights are in ``form`` (fp8, int8 or int4). ``rows``:
    of activations. ``kernels/gemm/quantized.py`` decides by the same functions; one row is not split there.
    """
    return splits_for(rows, outputs, inputs, tiles_for(rows, form, table))


def _gemm_phases(model: Model, rows: int, dequant: DequantConfig, table: Table) -> int:
    """Peak of a layer's GEMMs (``models/decoder.py``): what each takes, and what lives around it.

    The output of the last half-layer, which is not added to the residual yet, lives all along.
    """
    queries, joined = _row_widths(model)
    layer = model.layer
    if _multiplies_fp8(layer.values(), rows, dequant):
        return _fp8_gemm_phases(model, rows)
    output = rows * HALF * model.text.hidden_size
    inner = rows * HALF * model.text.intermediate_size
    return output + max(
        output + _gemm_bytes([layer["q_proj"], layer["k_proj"], layer["v_proj"]], rows, dequant, table),
        rows * HALF * (joined + 2 * queries) + _gemm_bytes([layer["o_proj"]], rows, dequant, table),
        output + _gemm_bytes([layer["gate_proj"], layer["up_proj"]], rows, dequant, table),
        2 * inner + _gemm_bytes([layer["down_proj"]], rows, dequant, table),
    )


def _multiplies_fp8(matrices: Collection[Matrix], rows: int, dequant: DequantConfig) -> bool:
    """Whether a pass of ``rows`` quantizes the activations of all ``matrices`` to FP8."""
    wide = dequant.fp8_activations and rows > MAX_FUSED_ROWS
    return wide and all(matrix.fp8_gemm for matrix in matrices)


def _delta_phases(model: Model, rows: int, dequant: DequantConfig, table: Table) -> int:
    """Peak of a gated delta net (``kernels/recurrent/delta_rule.py``); 0 for models without.

    Its input and its projections live until its output is there. Between them are the convolved rows, the
    systems of equations of the chunks, and the output.
    """
    if not model.delta:
        return 0
    hidden = model.text.hidden_size
    qkv, z, b, a, out = (model.delta[part] for part in DELTA_PARTS)

    def product(parts: list[Matrix]) -> int:
        if _multiplies_fp8(parts, rows, dequant):
            wide = rows + -rows % FP8_ROW_MULTIPLE
            return wide * HALF * sum(part.rows for part in parts) + _fp8_bytes(wide, parts[0].columns)
        return _gemm_bytes(parts, rows, dequant, table)

    held = 2 * rows * HALF * hidden  # the last half-layer's output, which is not added yet, and the input
    projected = rows * HALF * (qkv.rows + z.rows)
    gates = rows * HALF * (b.rows + a.rows)
    mixed = rows * HALF * z.rows
    scratch = rows * HALF * (qkv.rows + b.rows * 2 * DELTA_CHUNK) + rows * b.rows * DELTA_SCALES * SINGLE
    return held + max(
        product([qkv, z]),
        projected + product([b, a]),
        projected + gates + mixed + max(scratch, product([out])),
    )


def _fp8_gemm_phases(model: Model, rows: int) -> int:
    """``_gemm_phases`` with activations quantized to FP8 (``kernels/gemm/fp8.py``)."""
    queries, joined = _row_widths(model)
    hidden, inner = model.text.hidden_size, model.text.intermediate_size
    rows += -rows % FP8_ROW_MULTIPLE
    output = rows * HALF * hidden
    return output + max(
        _fp8_bytes(rows, hidden) + rows * HALF * joined,
        rows * HALF * (joined + queries) + _fp8_bytes(rows, queries) + output,
        _fp8_bytes(rows, hidden) + rows * HALF * 2 * inner,
        rows * HALF * 2 * inner + _fp8_bytes(rows, inner),
        _fp8_bytes(rows, inner) + output,
    )


def _fp8_bytes(rows: int, width: int) -> int:
    """FP8 codes, and a float32 scale for every ``GROUP`` of them."""
    return rows * (width + width // GROUP * SINGLE)


def _gemm_bytes(parts: list[Matrix], rows: int, dequant: DequantConfig, table: Table) -> int:
    """Output of matrices that share their input, with partial sums of split-K or the dequantization buffer.

    Also the reordered input, where the matrices need one (``layers/linear.py``).
    """
    outputs, form = sum(part.rows for part in parts), parts[0].form
    output = rows * outputs * HALF + (rows * parts[0].columns * HALF if parts[0].act_order else 0)
    if form == BF16:
        return output
    if rows > MAX_FUSED_ROWS:
        return output + dequant.scratch_bytes
    count = num_splits(outputs, parts[0].columns, rows, form, table)
    return output + (rows * outputs * count * SINGLE if count > 1 else 0)


_FEW_KV_HEADS = 4  # with so few, more programs share a context
MOST_IN_SMALL_TILES = 8  # sequences; with more, programs wait for others in any case
_MOST_ROUNDS, _LEAST_FILLED = 5, 0.75  # rounds of programs, and their share of those that run at once


def num_decode_splits(sequences: int, kv_heads: int, resident: int | None = None) -> int:
    """How many programs per KV head share one sequence's context in decode attention (split-KV); 1: no split.

    Fewer for more ``sequences``, which keep a card busy unsplit and would need more counters than there are
    (``launch.MAX_TILE_COUNTERS``). ``resident``: programs that a card of few multiprocessors runs at once;
    None for one of many. A plan counts the memory of many, as few never take more.

    With ``resident``, up to ``MOST_IN_SMALL_TILES`` sequences have programs for one round, or for the fewest
    rounds that are three quarters full. Their number is rounded up to a power of two first, as each number of
    splits is a kernel to compile. Swept on an H200 and on 30 of its multiprocessors with 300 to 3,000 tokens
    (docs/log.md).
    """
    few_heads = kv_heads <= _FEW_KV_HEADS
    if sequences > 256:
        return 1
    splits = 16 if sequences <= 2 else 8 if sequences <= 4 else 4
    most = 2 * splits if few_heads and sequences <= 16 else splits
    if resident is None:
        return most
    if sequences > MOST_IN_SMALL_TILES:
        return 4
    if sequences == 1:
        most = 12 if few_heads else 11
    contexts = (1 << (sequences - 1).bit_length()) * kv_heads
    for rounds in range(1, _MOST_ROUNDS + 1):
        splits = rounds * resident // contexts
        if splits * contexts >= _LEAST_FILLED * rounds * resident:
            return max(1, min(most, splits))
    return 1


def _attention_bytes(model: Model, rows: int, sequences: int) -> int:
    """Queries, outputs, and the partial results of split contexts.

    Keys and values are read in place, and scores exist a tile at a time: neither costs memory.
    """
    queries, joined = _row_widths(model)
    text = model.text
    splits = num_decode_splits(sequences, text.num_key_value_heads)
    parts = sequences * text.num_attention_heads * splits * (text.head_dim + 2) * SINGLE
    held = rows * HALF * (text.hidden_size + joined + 2 * queries)
    return held + parts


def _head_bytes(model: Model, logit_rows: int) -> int:
    """Logits in bfloat16, with the candidates for sampling on the GPU or one row sampled on the host."""
    vocabulary = model.text.vocab_size
    drawn = max(logit_rows * sampling_bytes(vocabulary), vocabulary * HOST_SAMPLER_BYTES)
    return logit_rows * vocabulary * HALF + drawn


def sampling_bytes(vocabulary: int) -> int:
    """Bytes beside the logits to sample one token of a ``vocabulary`` on the GPU.

    For each part of 4096 logits its maximum, weight and candidates; one merged list of candidates; and the
    sampling parameters (``kernels/sampling/draw.py``).
    """
    parts = -(-vocabulary // LOGITS_PER_PROGRAM)
    lists = (parts + 1) * MAX_CANDIDATES * (SINGLE + INT32)
    return parts * (2 * SINGLE + INT32) + lists + 3 * INDEX


# --- CUDA graphs (``engine/execution/``: ``cuda_graphs.py``, ``prompt_graphs.py``, ``draft_graph.py``, and
# ``encoder_graph.py`` of the tower) ---
#
# Only tensors in the graphs' pool are counted. What the driver takes for a graph is too little to measure:
# five of 36 layers each were within 4 MiB on an H200 (docs/log.md).


# Most rows of a pass with draft tokens (``speculative.py``): up to here GEMMs read the weights once.
MAX_DRAFT_ROWS = 8
# Tokens that a draft model's short head can draft: the first of a vocabulary, which byte-pair encoding orders
# by how often they occur. Of Qwen3.5's 248,044 these are 97 to 99 % of English, code and JSON, a tenth to
# three quarters of other languages (docs/log.md). Only of vocabularies that are at least twice as large.
SHORT_VOCABULARY = 65_536
MAX_ROWS_BEHIND = 80  # tokens of a sequence whose hidden states are kept until a draft model stores them
PROMPT_GRAPH_ROWS = (16, 32, 64)  # of passes of short prompts (``engine/execution/prompt_graphs.py``)
LONG_PROMPT_ROWS = 2048  # captured at most: above, even a large card takes longer than the host
_SMALL_SEGMENTS = 3  # of torch's pool, for all that is smaller than 1 MiB: as measured (docs/log.md)


def text_graph_bytes(
    model: Model,
    sequences: int,
    draft_rows: int = 0,
    *,
    drafts: bool = False,
    longest_prompt: int,
    dequant: DequantConfig = DEFAULT_DEQUANT_CONFIG,
    table: Table = BUILT_IN,
) -> int:
    """Bytes that torch reserves for CUDA graphs of decode steps, of short prompts and of a draft model.

    ``sequences``: most requests of a decode step. ``draft_rows``: rows of the largest step with draft tokens;
    0: there is none. ``drafts``: there is a draft model. ``longest_prompt``: most tokens of a prompt's pass.
    The graphs share one pool: the logits of all of them stay, and beside these one pass at a time has its
    tensors. What a prompt computes is copied out of the pool, and features of pictures into tensors beside
    it. With ``dequant.captures_prompts`` long prompts are captured, too.
    """
    long = longest_captured_prompt(longest_prompt) if dequant.captures_prompts else 0
    rows = max(prompt_graph_rows(longest_prompt)[-1], long)
    vocabulary = model.text.vocab_size
    logits = [*capture_sizes(sequences), draft_rows, MAX_DRAFT_ROWS * drafts]
    most = max(rows, *logits)
    phases = (
        _gemm_phases(model, most, dequant, table),
        _attention_bytes(model, most, sequences),
        _delta_phases(model, most, dequant, table),
    )
    short = MAX_DRAFT_ROWS * SHORT_VOCABULARY if drafts and vocabulary >= 2 * SHORT_VOCABULARY else 0
    large = (sum(logits) * vocabulary + short) * HALF + max(phases)
    segments = -(-large // allocator.LARGE_SEGMENT) * allocator.LARGE_SEGMENT
    kept_rows = rows if drafts or not long else 1
    if model.vision is not None:
        kept_rows += long * (1 + len(model.vision.deepstack_visual_indexes))
    kept = (kept_rows * model.text.hidden_size + vocabulary) * HALF
    kept += 2 * allocator.LARGE_SEGMENT if long else 0  # begun, as processes held (benchmarks/ledger.py)
    return segments + _SMALL_SEGMENTS * allocator.SMALL_SEGMENT + kept


def capture_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes of captured decode steps: powers of two below ``max_num_seqs``, and ``max_num_seqs``."""
    powers = [1 << power for power in range(max_num_seqs.bit_length()) if 1 << power < max_num_seqs]
    return (*powers, max_num_seqs)


def prompt_graph_rows(longest: int) -> tuple[int, ...]:
    """Rows of the graphs of short prompts, if a pass has at most ``longest`` tokens."""
    largest = next((rows for rows in PROMPT_GRAPH_ROWS if rows >= longest), PROMPT_GRAPH_ROWS[-1])
    return tuple(rows for rows in PROMPT_GRAPH_ROWS if rows <= largest)


def longest_captured_prompt(longest: int) -> int:
    """Rows of the largest graph of a long prompt, if passes have up to ``longest`` tokens; 0: none is."""
    return min(longest, LONG_PROMPT_ROWS) if longest > PROMPT_GRAPH_ROWS[-1] else 0


def captures_cublas(model: Model, sequences: int) -> bool:
    """Whether cuBLAS multiplies in captured passes of the text model, and so has a workspace there, too."""
    matrices = (*model.layer.values(), *model.delta.values())
    return sequences > MAX_FUSED_ROWS or any(matrix.form == BF16 for matrix in matrices)


def encoder_graph_bytes(vision: VisionConfig, image_tokens: int, workspace: int, scratch: int) -> int:
    """Bytes that torch reserves for CUDA graphs of the vision tower's blocks.

    ``image_tokens``: of the largest picture. ``workspace``: bytes of cuBLAS's workspace. ``scratch``: bytes
    of the dequantization buffer, 0 if the tower is not quantized.
    """
    return tower_cost(vision).graph_bytes(vision, image_tokens, workspace, scratch)
