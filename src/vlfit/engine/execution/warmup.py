"""Profiling run and kernel warm-up before the first request.

The profiling run executes the worst case that the plan allows, so that no request needs more memory later:
images of the largest size until the encoder cache is full; a prompt that fills the context and ends in such
images, in whole chunks, while all other sequences decode; all sequences decoding at the greatest length that
the KV cache holds. On a GPU length costs next to no memory (8 bytes a token), so prompts are only long enough
for image chunks to have a cached prefix, and the third case is skipped. Tokens are sampled, which takes more
memory than greedy. The warm-up then compiles and loads every kernel.
"""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import cycle, pairwise
from math import isqrt
from typing import Any

import numpy as np
import torch

from vlfit import kernels
from vlfit.api.outputs import ImageSeen
from vlfit.api.sampling_params import SamplingParams
from vlfit.api.stats import Counters
from vlfit.engine.engine import NativeEngine
from vlfit.engine.execution.encoder_cache import EncoderCache
from vlfit.engine.execution.encoder_graph import REPEATS_BEFORE_CAPTURE
from vlfit.engine.execution.product_sweep import ProductSweep
from vlfit.engine.memory.usage import tensors_in
from vlfit.engine.sampling.sampler import StepOutput
from vlfit.engine.scheduling.sequence import Draft, ScheduledChunk
from vlfit.errors import DoesNotFit, OutOfMemory
from vlfit.loading.offload import StreamedLayers
from vlfit.models.interface import PreparedImage, VisionFeatures
from vlfit.plan.native.cost import MAX_DRAFT_ROWS
from vlfit.plan.shapes import HALF, tower_cost
from vlfit.prompt.builder import Prompt

_FILLER = 100  # any ordinary token
_ANSWER = 3  # tokens: the first comes from the prefill step, so two steps decode
_MAX_IMAGES = 24
_SHADES = 256  # number of distinct images


@dataclass
class ProfilingRun:
    """Counts and maxima of a profiling run, for tests.

    ``max_rows``: most tokens in one step. ``max_length``: most tokens of one sequence. ``max_decoding``: most
    decoding sequences in one step. ``max_chunk_with_prefix``: most tokens of a prompt chunk that is not the
    first of its prompt. ``num_images``: images encoded to fill the encoder cache.
    """

    num_steps: int = 0
    max_rows: int = 0
    max_length: int = 0
    max_decoding: int = 0
    max_chunk_with_prefix: int = 0
    num_images: int = 0

    def record(self, batch: list[ScheduledChunk]) -> None:
        """Record a forward pass of ``batch``, before it runs."""
        self.num_steps += 1
        self.max_rows = max(self.max_rows, sum(chunk.num_tokens for chunk in batch))
        self.max_length = max(
            self.max_length, *(chunk.sequence.num_cached_tokens + chunk.num_tokens for chunk in batch)
        )
        self.max_decoding = max(self.max_decoding, sum(chunk.sequence.is_decoding for chunk in batch))
        for chunk in batch:
            if chunk.sequence.num_cached_tokens and not chunk.sequence.is_decoding:
                self.max_chunk_with_prefix = max(self.max_chunk_with_prefix, chunk.num_tokens)


def profile_peak_memory(engine: NativeEngine) -> ProfilingRun:
    """Run the worst case before the first request, so that torch's memory pool grows to its largest now.

    On a GPU the step with the most image features follows, in few layers, and then the pool is defragmented:
    its one free segment is as large as that step needs, too. Clears ``engine.counters`` and the encoder cache
    afterwards. Raises ``DoesNotFit`` if a step of the worst case needs more memory than is free or than the
    plan allows, even if it succeeds when retried.
    """
    try:
        run = run_worst_case(engine, engine.image_tokens)
        if kernels.enabled_on(engine.device):
            with engine.prefill_pacer.disabled(), few_layers(engine):
                _run_most_features(engine)
        num_retries = engine.counters.retried_steps
    except OutOfMemory as error:
        raise worst_case_error(engine, error.message) from None
    if num_retries:
        raise worst_case_error(engine, f"{num_retries} of its steps ran only request by request")
    engine.runner.encoder_cache.clear()
    engine.counters = Counters()
    engine.defragment()
    return run


def worst_case_error(engine: NativeEngine, reason: str) -> DoesNotFit:
    """The error to raise if the profiling run or the warm-up is out of memory; ``reason`` with numbers."""
    return DoesNotFit(
        f"{engine.checkpoint.name} was loaded, but the worst case of its plan does not fit: {reason}",
        "Start with a smaller --image-tokens, --chunk or --sequences; vlfit plan --calibrate measures what "
        "CUDA takes on this machine.",
    )


def run_worst_case(engine: NativeEngine, image_tokens: int) -> ProfilingRun:
    """Run the worst case (top of this module) with images of ``image_tokens`` tokens; 0: without images.

    Leaves ``engine.counters`` and the encoder cache filled. Raises the first error of a request.
    """
    profile = ProfilingRun()
    # An image has a token before and after it and one of text behind, and an answer follows.
    image_tokens = min(image_tokens, engine.context - 3 - _ANSWER)
    run = engine.runner.run

    def recorded_run(batch: list[ScheduledChunk]) -> StepOutput:
        profile.record(batch)
        return run(batch)

    engine.runner.run = recorded_run  # type: ignore[method-assign]
    try:
        with engine.prefill_pacer.disabled():
            if engine.runner.encoder_graph is not None and image_tokens:
                # Images of the largest grid with an encoder graph, all different, until it is captured.
                vision = engine.checkpoint.config.required_vision
                captured = tower_cost(vision).max_unsplit_patches // vision.spatial_merge_size**2
                tokens = min(image_tokens, captured)
                for number in range(REPEATS_BEFORE_CAPTURE + 1):
                    run_requests(engine, [(image_prompt(engine, tokens, _SHADES - 1 - number), 1)])
            # On a GPU one pass encodes the image and runs a chunk beside its features; the others are below.
            steps = 1 if kernels.enabled_on(engine.device) else None
            for number in range(num_profiling_images(engine, image_tokens)):
                run_requests(engine, [(image_prompt(engine, image_tokens, number), 1)], steps=steps)
                profile.num_images += 1
            requests = list(full_context_requests(engine, image_tokens))
            with _encoded_before(engine, requests[-1][0], image_tokens):
                run_requests(engine, requests)
            if not kernels.enabled_on(engine.device):
                run_requests(engine, list(full_pool_requests(engine)))
    finally:
        engine.runner.run = run  # type: ignore[method-assign]
    return profile


@contextmanager
def _encoded_before(engine: NativeEngine, prompt: Prompt, image_tokens: int) -> Iterator[None]:
    """Within the block features of the only image of ``prompt`` are zeros, as if they came from the cache.

    What encoding an image of ``image_tokens`` takes is known by then, and a small card takes seconds for it;
    as much memory is held as for its features. Several images are encoded, as each is beside the features
    of others. On a CPU all are.
    """
    runner, vision = engine.runner, engine.runner.vision
    if len(prompt.images) != 1 or vision is None or not kernels.enabled_on(engine.device):
        yield
        return
    shape = (image_tokens, engine.checkpoint.config.required_vision.out_hidden_size)
    cache = runner.encoder_cache
    runner.encoder_cache = _Zeros(prompt.images[0], shape, vision.deepstack_levels, engine.dtype)
    try:
        yield
    finally:
        runner.encoder_cache = cache


class _Zeros(EncoderCache):
    """An encoder cache that has zeros for ``image`` and nothing else, the first rows of ``shape``."""

    def __init__(self, image: PreparedImage, shape: tuple[int, int], levels: int, dtype: torch.dtype) -> None:
        super().__init__(limit_bytes=0)
        self._image, self._shape, self._levels, self._dtype = image, shape, levels, dtype

    def get(self, key: bytes, device: torch.device) -> VisionFeatures | None:
        if key != self._image.key:
            return None
        rows, *deepstack = (
            torch.zeros(self._shape, dtype=self._dtype, device=device)[: self._image.tokens]
            for _ in range(self._levels + 1)
        )
        return VisionFeatures(rows, tuple(deepstack))


def num_profiling_images(engine: NativeEngine, image_tokens: int) -> int:
    """How many different images the profiling run must encode to reach the encoder cache's peak memory.

    On a CPU: one more than the cache holds at ``image_tokens`` each, at most 24. On a GPU: 1 (the cache is in
    RAM). Without a vision tower or image tokens: 0.
    """
    vision = engine.checkpoint.config.vision
    if vision is None or image_tokens == 0:
        return 0
    if kernels.enabled_on(engine.device):
        return 1
    size = tower_cost(vision).feature_bytes(vision, image_tokens) // HALF * engine.dtype.itemsize
    return min(engine.options.image_cache_bytes // size + 1, _MAX_IMAGES)


def full_context_requests(engine: NativeEngine, image_tokens: int) -> Iterator[tuple[Prompt, int]]:
    """Requests (prompt, answer tokens) for a step with a full context beside decoding sequences.

    ``max_num_seqs - 1`` short prompts that decode all the time, then one prompt that fills the context and
    ends in images (text, if ``image_tokens`` is 0). On a GPU the long prompt is only as long as the worst
    case needs (top of this module).
    """
    others = engine.options.max_num_seqs - 1
    size = engine.block_manager.block_size
    prefill_budget = max(engine.options.max_num_batched_tokens - others, 1)
    longest = engine.context
    if kernels.enabled_on(engine.device):
        longest = min(
            longest, -(-(image_tokens + 3) // prefill_budget) * prefill_budget + 2 * prefill_budget + _ANSWER
        )
    num_steps = -(-longest // prefill_budget) + _ANSWER + 1
    short_answer = min(num_steps, engine.context - size)
    for _ in range(others):
        yield text_prompt(size), short_answer
    short_blocks = others * engine.block_manager.blocks_for(size + short_answer)
    max_tokens = min(longest, (engine.block_manager.num_blocks - short_blocks) * size) - _ANSWER
    # A whole chunk near the end of the context, or part of one at its very end: whichever attends to more.
    whole_chunks = max_tokens // prefill_budget * prefill_budget or max_tokens
    length = max((max_tokens, whole_chunks), key=lambda tokens: ((tokens - 1) % prefill_budget + 1) * tokens)
    if image_tokens > 0:
        yield prompt_ending_in_images(engine, min(image_tokens, length - 3), prefill_budget, length), _ANSWER
    else:
        yield text_prompt(length), _ANSWER


def full_pool_requests(engine: NativeEngine) -> Iterator[tuple[Prompt, int]]:
    """``max_num_seqs`` equal requests (prompt, answer tokens) that together fill the KV cache."""
    sequences = engine.options.max_num_seqs
    length = min(
        engine.context, engine.block_manager.num_blocks // sequences * engine.block_manager.block_size
    )
    for _ in range(sequences):
        yield text_prompt(length - _ANSWER), _ANSWER


def text_prompt(tokens: int) -> Prompt:
    """A prompt of ``tokens`` equal text tokens."""
    return Prompt((_FILLER,) * tokens, (), 0)


def image_prompt(engine: NativeEngine, image_tokens: int, shade: int, tokens: int = 0) -> Prompt:
    """A prompt of one gray image and text after it, ``tokens`` in all, with at least one token of text.

    The image is the most square one of exactly ``image_tokens`` tokens. ``shade``: gray level, 0 to 255;
    images of different shades have different content keys, so that none comes from a cache.
    """
    config = engine.checkpoint.config
    merge, patch = config.required_vision.spatial_merge_size, config.required_vision.patch_size
    rows = next(rows for rows in range(isqrt(image_tokens), 0, -1) if image_tokens % rows == 0)
    grid = (1, rows * merge, image_tokens // rows * merge)
    height, width = grid[1] * patch, grid[2] * patch
    image_seen = ImageSeen(width, height, width, height, image_tokens)
    pixels = np.full((1, height, width, 3), shade, dtype=np.uint8)
    image = PreparedImage(pixels, grid, image_tokens, repr((grid, shade)).encode(), image_seen)
    placeholders = (config.image_token_id,) * image_tokens
    ids = (config.vision_start_token_id, *placeholders, config.vision_end_token_id)
    return Prompt(ids + (_FILLER,) * max(tokens - len(ids), 1), (image,), image_tokens)


def prompt_ending_in_images(engine: NativeEngine, image_tokens: int, chunk: int, tokens: int) -> Prompt:
    """A prompt of ``tokens`` tokens: text, then images, enough to fill its last whole prefill chunk.

    ``chunk``: tokens of a prefill chunk. The images have ``image_tokens`` tokens each and different shades.
    """
    image_span = image_tokens + 3  # with its start and end tokens and one of text
    count = max(min(2 * chunk // image_span + 1, tokens // image_span, _SHADES - _MAX_IMAGES), 1)
    prompts = [image_prompt(engine, image_tokens, _MAX_IMAGES + number) for number in range(count)]
    ids = tuple(token for prompt in prompts for token in prompt.token_ids)
    images = tuple(image for prompt in prompts for image in prompt.images)
    return Prompt((_FILLER,) * (tokens - len(ids)) + ids, images, count * image_tokens)


def run_requests(
    engine: NativeEngine,
    requests: Sequence[tuple[Prompt, int]],
    late: Sequence[tuple[Prompt, int]] = (),
    params: Sequence[dict[str, Any]] = ({},),
    steps: int | None = None,
) -> None:
    """Submit ``requests`` (prompt, answer tokens) at once and step the engine until all have ended.

    ``late``: requests submitted one step later. ``params``: sampling parameters that differ from the
    defaults (top-p sampling with a seed), used by the requests in turn. ``steps``: after as many all are
    cancelled; None: never. The prefix cache is not used. Raises the first error of a request, after all have
    ended.
    """
    failures: list[Exception] = []
    sequences = []

    def listener(event: object) -> None:
        # The engine continues when a listener raises, so failures are raised at the end.
        if isinstance(event, Exception):
            failures.append(event)

    overrides = cycle(params)

    def add(prompt: Prompt, tokens: int) -> None:
        defaults = {"temperature": 1.0, "top_p": 0.9, "seed": 1, "ignore_eos": True}
        sampling = SamplingParams(max_tokens=tokens, **(defaults | next(overrides)))
        # Not through the prefix cache: cached tokens need no memory to compute.
        prepared = replace(engine.prepare_prompt(prompt), keys=None)
        sequences.append(engine.make_sequence(prepared, sampling, listener))
        engine.submit(sequences[-1])

    for each in requests:
        add(*each)
    if late:
        engine.step()
        for each in late:
            add(*each)
    done = 0
    while engine.busy:
        if done == steps:
            for sequence in sequences:
                engine.cancel(sequence)
        engine.step()
        done += 1
    if failures:
        raise failures[0]


_WARM_UP_TOKENS = 2  # the first comes from the prefill step, the second is decoded
_SHORT = 16  # tokens of a prompt
PREFILL_ROWS = (1, 8, 16, 32, 64, 128, 256, 512)  # of a prefill step, besides the largest
_QUICK_IMAGE = 2048  # tokens: a largest picture up to here is warmed up, too
BATCH_SIZES = (1, 2, 3, 5, 9, 17, 33, 65, 257)  # sequences sampled at once, then decoding beside a prompt
VERIFY_ROWS = (2, 3, 5, MAX_DRAFT_ROWS)  # rows of a verify step
SAMPLING_VARIANTS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"top_k": 20},
    {"top_k": 500},
    {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"temperature": 0.0, "top_logprobs": 5},
)


def warm_up_kernels(engine: NativeEngine) -> None:
    """Compile and load every kernel by running small requests. Call it after ``profile_peak_memory``.

    A kernel compiles at its first launch, which takes a second and some MiB of RAM, and loading it takes up
    to 2 MiB of the GPU. Which kernels a step launches depends on its rows, on how many are sampled, on
    decoding beside a prompt, on image size and on sampling parameters; kernel variants change at powers of
    two, and at ``BATCH_SIZES`` for decode splits. Layers of the same shapes launch the same kernels, so a
    few of each kind are run. Clears ``engine.counters`` and the encoder cache afterwards. Raises
    ``DoesNotFit`` if a step needs more memory than is free, or than the plan allows.
    """
    try:
        sweep = ProductSweep() if engine.device.type == "cuda" else nullcontext()
        with engine.prefill_pacer.disabled(), few_layers(engine), sweep:
            _run_all_kinds(engine)
    except OutOfMemory as error:
        raise worst_case_error(engine, error.message) from None
    engine.runner.encoder_cache.clear()
    engine.counters = Counters()


@contextmanager
def few_layers(engine: NativeEngine) -> Iterator[None]:
    """Shrink the text model, and the vision tower, to a few layers of each kind within the block.

    Of the text model these stay: the layers that deepstack is added to, the last one, and two neighbours for
    each pair of kinds that follow each other, as a layer's first kernel may finish the layer before.
    Offloaded layers all stay. The tower has no CUDA graph meanwhile: it would be one of few blocks.
    """
    runner, text = engine.runner, engine.runner.text
    tower, encoder_graph = runner.vision, runner.encoder_graph
    layers = text.layers
    graphs = engine.runner.decode_graphs
    num_captures = graphs.num_captures if graphs else 0
    vision = engine.checkpoint.config.vision
    if not isinstance(layers, StreamedLayers):
        kinds = [(runner.cache.window(layer.index), _stored_kind(layer)) for layer in layers]
        num_deepstack = len(vision.deepstack_visual_indexes) if vision else 0
        kept = {*range(min(num_deepstack, len(kinds))), len(kinds) - 1}
        pairs: set[Hashable] = set()
        for index, pair in enumerate(pairwise(kinds)):
            if pair not in pairs:
                pairs.add(pair)
                kept |= {index, index + 1}
        text.layers = [layers[index] for index in sorted(kept)]
    runner.encoder_graph = None
    try:
        with nullcontext() if tower is None else tower.shortened(_stored_kind):
            yield
    finally:
        text.layers = layers
        runner.encoder_graph = encoder_graph
        if graphs and graphs.num_captures > num_captures:
            graphs.release()  # a step was captured with few layers after memory ran short


def _stored_kind(layer: object) -> Hashable:
    """Dtypes and shapes of the tensors of ``layer``."""
    return tuple((each.dtype, each.shape) for each in tensors_in(layer))


def _run_all_kinds(engine: NativeEngine) -> None:
    sizes = image_token_sizes(engine)
    most_rows = min(engine.options.max_num_batched_tokens, engine.context - _WARM_UP_TOKENS)
    for rows in (*(each for each in PREFILL_ROWS if each < most_rows), most_rows):
        run_requests(engine, [(text_prompt(rows), 1)])
    short = (text_prompt(min(_SHORT, engine.context - _WARM_UP_TOKENS)), _WARM_UP_TOKENS)
    for count in BATCH_SIZES:
        if count <= engine.options.max_num_seqs:
            late = [short] if count < engine.options.max_num_seqs else []
            run_requests(engine, [(text_prompt(1), _WARM_UP_TOKENS)] * count, late)
    run_requests(engine, [(image_prompt(engine, size, number), 1) for number, size in enumerate(sizes)])
    run_requests(engine, [short] * len(SAMPLING_VARIANTS), params=SAMPLING_VARIANTS)
    if engine.speculates and engine.runner.decode_graphs is None:  # else verify steps are captured
        for rows in VERIFY_ROWS:
            _run_verify_step(engine, rows - 1, _FixedProposer)
    if engine.runner.drafter is not None:
        for rows in VERIFY_ROWS:
            _run_verify_step(engine, rows - 1, _FixedModelProposer)
    _run_most_features(engine)


def _run_most_features(engine: NativeEngine) -> None:
    """Run ``max_features_prompt`` if the model takes pictures and the context holds it."""
    if engine.image_tokens:
        prompt = max_features_prompt(engine)
        if len(prompt.token_ids) <= engine.context - _WARM_UP_TOKENS:
            run_requests(engine, [(prompt, 1)])


class _FixedProposer:
    """Proposes ``count`` draft tokens, at most ``max_tokens``."""

    cost = 0.0

    def __init__(self, count: int) -> None:
        self._count = count

    def propose(self, generated: list[int], max_tokens: int) -> Draft:
        return Draft((0,) * min(self._count, max_tokens))

    def record_acceptance(self, num_accepted: int, num_drafts: int) -> None:
        pass


class _FixedModelProposer(_FixedProposer):
    """Wants the draft model to draft them."""

    def propose(self, generated: list[int], max_tokens: int) -> Draft:
        return Draft(wanted=min(self._count, max_tokens))


def _run_verify_step(engine: NativeEngine, count: int, proposer: type[_FixedProposer]) -> None:
    """Run a request whose steps verify ``count`` draft tokens of ``proposer``."""
    failures: list[Exception] = []

    def listener(event: object) -> None:
        if isinstance(event, Exception):
            failures.append(event)

    prompt = engine.prepare_prompt(text_prompt(min(_SHORT, engine.context - count - _WARM_UP_TOKENS)))
    sampling = SamplingParams(max_tokens=count + _WARM_UP_TOKENS, ignore_eos=True)
    sequence = engine.make_sequence(replace(prompt, keys=None), sampling, listener)
    sequence.proposer = proposer(count)
    engine.submit(sequence)
    while engine.busy:
        engine.step()
    if failures:
        raise failures[0]


def max_features_prompt(engine: NativeEngine) -> Prompt:
    """A prompt with one step that needs the features of as many image tokens as possible on the device.

    Features are kept for whole images, so that step has the last token of a largest image, smaller images,
    and the first token of another largest image. The prompt may be longer than the context.
    """
    chunk, largest = (
        engine.options.max_num_batched_tokens,
        min(engine.image_tokens, engine.context - 3 - _WARM_UP_TOKENS),
    )
    begin = -(-(largest + 1) // chunk) * chunk  # of the step: its first row is the last one of an image
    tokens_left = chunk - 3 - 2  # after that image and before the first token of the last one
    sizes = [largest]
    while tokens_left > 3:
        sizes.append(min(largest, tokens_left - 3))
        tokens_left -= sizes[-1] + 3
    prompts = [image_prompt(engine, size, number) for number, size in enumerate([*sizes, largest])]
    filler = text_prompt(begin - largest).token_ids
    return Prompt(
        filler + tuple(token for prompt in prompts for token in prompt.token_ids),
        tuple(image for prompt in prompts for image in prompt.images),
        sum(prompt.image_tokens for prompt in prompts),
    )


def image_token_sizes(engine: NativeEngine) -> Iterator[int]:
    """Image sizes to warm up, in tokens: the smallest possible, doubled while below the largest, and that.

    Empty for a text-only engine. A largest one that takes long is left out: the profiling run has that size.
    """
    processing = engine.image_processor_config
    if processing is None or engine.image_tokens == 0:
        return
    tokens = max(processing.min_pixels // (processing.patch_size * processing.merge_size) ** 2, 1)
    max_tokens = min(engine.image_tokens, engine.context - 3 - _WARM_UP_TOKENS)
    while tokens < max_tokens:
        yield tokens
        tokens *= 2
    if max_tokens <= _QUICK_IMAGE:
        yield max_tokens
