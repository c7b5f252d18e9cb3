"""Single steps down from a plan for vLLM: each lowers one setting, frees memory, and has a price in words.

A step returns the new settings, or None if it is at its end or does not apply. Each lowers one of finitely
many values, so stepping ends.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from vlfit.plan.preference import AMPLE_CONTEXT, AMPLE_IMAGE_TOKENS, CONTEXTS, IMAGE_TOKENS
from vlfit.plan.shapes import Model
from vlfit.plan.vllm.args import VllmSettings
from vlfit.plan.vllm.cost import LARGEST_BLOCK, min_image_tokens, pool_tokens

_ROUND = 16  # tokens of a KV block on most cards: contexts are cut to whole ones
LEAST_CONTEXT = 256  # the least for a picture, a question and an answer
_SMALLER_CONTEXTS = (*CONTEXTS, 1024, 512, LEAST_CONTEXT)
_SMALLER_IMAGES = (*IMAGE_TOKENS, 128, 64)
_CHUNKS = (2048, 1024, 512, 256)

StepDown = Callable[[Model, VllmSettings], VllmSettings | None]


def smaller_passes(model: Model, settings: VllmSettings) -> VllmSettings | None:
    """``settings`` with the prefill chunk lowered to its next step; None if there is none.

    No step is below 256 or ``settings.sequences``.
    """
    steps = (step for step in _CHUNKS if settings.sequences <= step < settings.chunk)
    step = next(steps, None)
    return None if step is None else replace(settings, chunk=step)


def no_graphs(model: Model, settings: VllmSettings) -> VllmSettings | None:
    """``settings`` without CUDA graphs and compiling; None if they are off already."""
    return replace(settings, graphs=False) if settings.graphs else None


def fewer_requests(model: Model, settings: VllmSettings) -> VllmSettings | None:
    """``settings`` with half the number of concurrent requests; None if it is 1."""
    return requests_to(settings, settings.sequences // 2)


def requests_to(settings: VllmSettings, most: int) -> VllmSettings | None:
    """``settings`` with at most ``most`` concurrent requests, but at least 1.

    None if ``settings`` have no more than that already.
    """
    few = max(most, 1)
    return replace(settings, sequences=few) if few < settings.sequences else None


def smaller_pictures(model: Model, settings: VllmSettings) -> VllmSettings | None:
    """``settings`` with the image tokens of a picture lowered to the next step.

    None without pictures, or if there is no lower step. The last step is 64, or the smallest size below
    which vLLM enlarges pictures, if that is larger.
    """
    return _pictures_to(model, settings, settings.image_tokens - 1)


def ample_pictures(model: Model, settings: VllmSettings) -> VllmSettings | None:
    """``smaller_pictures``, but None if the step would be below the floor (``AMPLE_IMAGE_TOKENS``)."""
    smaller = smaller_pictures(model, settings)
    return smaller if smaller is not None and smaller.image_tokens >= AMPLE_IMAGE_TOKENS else None


def shorter_context(model: Model, settings: VllmSettings) -> VllmSettings | None:
    """``settings`` with the context lowered to its next step, as ``context_to`` does.

    None if it is ``LEAST_CONTEXT`` already.
    """
    steps = (step for step in _SMALLER_CONTEXTS if step < settings.context)
    return context_to(model, settings, next(steps, 0))


def ample_context(model: Model, settings: VllmSettings) -> VllmSettings | None:
    """``shorter_context``, but None if the step would be below the floor (``AMPLE_CONTEXT``)."""
    shorter = shorter_context(model, settings)
    return shorter if shorter is not None and shorter.context >= AMPLE_CONTEXT else None


def context_to(model: Model, settings: VllmSettings, most: int) -> VllmSettings | None:
    """``settings`` with the context lowered to ``most`` tokens, rounded down to a multiple of 16.

    Pictures are lowered to at most half the context. None if the context is no longer than that, would be
    below ``LEAST_CONTEXT``, or if vLLM enlarges pictures of that size.
    """
    context = most // _ROUND * _ROUND
    if context >= settings.context or context < LEAST_CONTEXT:
        return None
    shorter = replace(settings, context=context)
    half = context // 2
    return shorter if settings.image_tokens <= half else _pictures_to(model, shorter, half)


def smaller_pool(model: Model, settings: VllmSettings) -> VllmSettings | None:
    """``settings`` with half the KV cache, but at least one context and vLLM's null block.

    None if the KV cache has no more tokens than that.
    """
    now = pool_tokens(settings)
    least = -(-settings.context // LARGEST_BLOCK) * LARGEST_BLOCK + LARGEST_BLOCK
    half = max(now // 2 // LARGEST_BLOCK * LARGEST_BLOCK, least)
    return replace(settings, vllm=replace(settings.vllm, kv_tokens=half)) if half < now else None


def single_api_server(model: Model, settings: VllmSettings) -> VllmSettings | None:
    """``settings`` with one API server instead of one for each copy of the model.

    None if there is one already.
    """
    args = settings.vllm
    if args.data == 1 or args.single_api_server:
        return None
    return replace(settings, vllm=replace(args, single_api_server=True))


def fewer_copies(model: Model, settings: VllmSettings) -> VllmSettings | None:
    """``settings`` with half the number of copies of the model; None if it is 1."""
    args = settings.vllm
    return replace(settings, vllm=replace(args, data=args.data // 2)) if args.data > 1 else None


# From the lowest price to the highest: time to the first token, waiting, time per token (ten times as long
# without graphs), smaller pictures, less context.
GENERAL_STEPS: tuple[StepDown, ...] = (
    smaller_passes,
    fewer_requests,
    no_graphs,
    ample_pictures,
    ample_context,
    smaller_pictures,
    shorter_context,
)
# The reverse, in which settings that need not have been lowered are restored.
_RESTORE_ORDER = ("context", "image_tokens", "graphs", "sequences", "chunk", "vllm")


def step_down(
    model: Model, settings: VllmSettings, first: tuple[StepDown, ...], fixed: frozenset[str]
) -> Iterator[VllmSettings]:
    """Apply steps one after another, cheapest first, and yield the settings after each, until none applies.

    ``first``: steps that come before ``GENERAL_STEPS``. ``fixed``: names of the settings that a person fixed:
    they are lowered only when no other step is left.
    """
    order = tuple(dict.fromkeys((*first, *GENERAL_STEPS)))
    while True:
        lower = [moved for mover in order if (moved := mover(model, settings)) is not None]
        free = [moved for moved in lower if not broken_wishes(settings, moved, fixed)]
        following = next(iter(free or lower), None)
        if following is None:
            return
        yield following
        settings = following


def restore_settings(
    before: VllmSettings,
    way: list[VllmSettings],
    fixed: frozenset[str],
    enough: Callable[[VllmSettings], bool],
) -> VllmSettings:
    """The last settings of ``way``, with each value raised again as far as ``enough`` returns True.

    ``way``: what ``step_down`` yielded, starting from ``before``. Values that a person ``fixed`` are raised
    first, then context, pictures, graphs, requests, prefill chunk. Never returns ``before``.
    """
    last = way[-1]
    for name in sorted(_RESTORE_ORDER, key=lambda each: each not in fixed):
        values = dict.fromkeys(getattr(settings, name) for settings in (before, *way))
        for value in values:
            tried = replace(last, **{name: value})
            if tried.image_tokens < tried.context and tried != before and enough(tried):
                last = tried
                break
    return last


def broken_wishes(before: VllmSettings, after: VllmSettings, fixed: frozenset[str]) -> tuple[str, ...]:
    """For each setting named in ``fixed`` that differs, a text such as ``--context 8192 -> 4096``."""
    pairs = [(name, getattr(before, name), getattr(after, name)) for name in _PRICES]
    pairs += [
        ("kv_tokens", *_pools(before, after)),
        ("data_parallel", before.vllm.data, after.vllm.data),
    ]
    options = {"kv_tokens": "--kv", "data_parallel": "--data-parallel"}
    return tuple(
        f"{options.get(name, '--' + name.replace('_', '-'))} {old} -> {new}"
        for name, old, new in pairs
        if old != new and name in fixed
    )


def _pools(before: VllmSettings, after: VllmSettings) -> tuple[int | None, int | None]:
    """Sizes of the KV cache if they differ by request; (None, None) if only a shorter context changed it."""
    if before.vllm.kv_tokens == after.vllm.kv_tokens:
        return None, None
    return pool_tokens(before), pool_tokens(after)


# A lower value in words, and its price.
_PRICES = {
    "context": ("context {}", "prompt and answer together have no more tokens than that"),
    "image_tokens": ("{} image tokens", "larger pictures are scaled down further"),
    "sequences": ("{} at once", "further requests wait"),
    "chunk": ("{} tokens a pass", "long prompts begin to answer later"),
}


def describe_change(before: VllmSettings, after: VllmSettings) -> str:
    """The differences between two settings in words, each with what it costs the person; "" if none."""
    changes = []
    for name, (what, price) in _PRICES.items():
        old, new = getattr(before, name), getattr(after, name)
        if old != new:
            changes.append(f"{what.format(f'{old} -> {new}')}: {price}")
    if before.graphs and not after.graphs:
        changes.append("no CUDA graphs (--enforce-eager): each word takes longer")
    old_args, new_args = before.vllm, after.vllm
    old_pool, new_pool = _pools(before, after)
    if old_pool is not None and new_pool is not None and old_pool != new_pool:
        price = "fewer long requests run at once" if new_pool < old_pool else "it takes more memory"
        changes.append(f"KV cache {old_pool} -> {new_pool} tokens: {price}")
    if old_args.data != new_args.data:
        changes.append(
            f"{old_args.data} -> {new_args.data} copies of the model: fewer requests at once in all"
        )
    if new_args.single_api_server and not old_args.single_api_server:
        changes.append("one process takes the requests of all copies: less RAM, a busier front")
    return "; ".join(changes)


def _pictures_to(model: Model, settings: VllmSettings, most: int) -> VllmSettings | None:
    """Pictures of at most ``most`` tokens, by steps; None where the processor enlarges smaller ones."""
    if model.vision is None or not settings.image_tokens:
        return None
    least = min_image_tokens(model.vision)
    step = next((step for step in _SMALLER_IMAGES if least <= step <= most), None)
    return None if step is None else replace(settings, image_tokens=step)
