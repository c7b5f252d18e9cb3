"""Single steps down from a plan for vLLM: each lowers one setting and frees memory, and each has its price.

Knows: the next smaller value of each setting, and in words what it costs the person. Every step lowers one of
finitely many values, so that stepping ends. Does not know which step answers which failure
(``step_down.py``).
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from vlfit.plan.candidates import AMPLE_CONTEXT, AMPLE_IMAGE_TOKENS, CONTEXTS, IMAGE_TOKENS
from vlfit.plan.ledger import Settings
from vlfit.plan.shapes import Model
from vlfit.plan.vllm.cost import LARGEST_BLOCK, LEAST_PIXELS, pixels_of_token, pool_tokens

_ROUND = 16  # tokens of a KV block on most cards: contexts are cut to whole ones
LEAST_CONTEXT = 256  # with less there is no room for a picture, a question and an answer
_SMALLER_CONTEXTS = (*CONTEXTS, 1024, 512, LEAST_CONTEXT)
_SMALLER_IMAGES = (*IMAGE_TOKENS, 128, 64)
_CHUNKS = (2048, 1024, 512, 256)

Mover = Callable[[Model, Settings], Settings | None]


def smaller_passes(model: Model, settings: Settings) -> Settings | None:
    """Fewer tokens in a pass, at least as many as requests."""
    steps = (step for step in _CHUNKS if settings.sequences <= step < settings.chunk)
    step = next(steps, None)
    return None if step is None else replace(settings, chunk=step)


def no_graphs(model: Model, settings: Settings) -> Settings | None:
    """Neither CUDA graphs nor compiling."""
    return replace(settings, graphs=False) if settings.graphs else None


def fewer_requests(model: Model, settings: Settings) -> Settings | None:
    """Half of the requests at once."""
    return requests_to(settings, settings.sequences // 2)


def requests_to(settings: Settings, most: int) -> Settings | None:
    """At most so many requests at once, at least one."""
    few = max(most, 1)
    return replace(settings, sequences=few) if few < settings.sequences else None


def smaller_pictures(model: Model, settings: Settings) -> Settings | None:
    """Pictures of the next smaller size, down to what vLLM's processor makes of any."""
    return _pictures_to(model, settings, settings.image_tokens - 1)


def ample_pictures(model: Model, settings: Settings) -> Settings | None:
    """Smaller pictures, but none below the floor."""
    smaller = smaller_pictures(model, settings)
    return smaller if smaller is not None and smaller.image_tokens >= AMPLE_IMAGE_TOKENS else None


def shorter_context(model: Model, settings: Settings) -> Settings | None:
    """The next shorter context."""
    steps = (step for step in _SMALLER_CONTEXTS if step < settings.context)
    return context_to(model, settings, next(steps, 0))


def ample_context(model: Model, settings: Settings) -> Settings | None:
    """A shorter context, but none below the floor."""
    shorter = shorter_context(model, settings)
    return shorter if shorter is not None and shorter.context >= AMPLE_CONTEXT else None


def context_to(model: Model, settings: Settings, most: int) -> Settings | None:
    """A context of at most ``most`` tokens, and pictures that leave half of it to words; None below the
    least.
    """
    context = most // _ROUND * _ROUND
    if context >= settings.context or context < LEAST_CONTEXT:
        return None
    shorter = replace(settings, context=context)
    half = context // 2
    return shorter if settings.image_tokens <= half else _pictures_to(model, shorter, half)


def smaller_pool(model: Model, settings: Settings) -> Settings | None:
    """Half of the pool, at least one context and the block that vLLM keeps for nobody."""
    now = pool_tokens(settings)
    least = -(-settings.context // LARGEST_BLOCK) * LARGEST_BLOCK + LARGEST_BLOCK
    half = max(now // 2 // LARGEST_BLOCK * LARGEST_BLOCK, least)
    return replace(settings, vllm=replace(settings.vllm, kv_tokens=half)) if half < now else None


def one_front(model: Model, settings: Settings) -> Settings | None:
    """One process that takes requests instead of one for each copy of the model."""
    told = settings.vllm
    if told.data == 1 or told.one_front:
        return None
    return replace(settings, vllm=replace(told, one_front=True))


def fewer_copies(model: Model, settings: Settings) -> Settings | None:
    """Half as many copies of the model."""
    told = settings.vllm
    return replace(settings, vllm=replace(told, data=told.data // 2)) if told.data > 1 else None


# From what costs a person least to what costs most: time to the first word, waiting, time for each word (ten
# times as long without graphs), smaller pictures, less context.
GENERAL: tuple[Mover, ...] = (
    smaller_passes,
    fewer_requests,
    no_graphs,
    ample_pictures,
    ample_context,
    smaller_pictures,
    shorter_context,
)
# The other way round, in which what need not have been lowered is put back.
_DEAREST = ("context", "image_tokens", "graphs", "sequences", "chunk", "vllm")


def downwards(
    model: Model, settings: Settings, first: tuple[Mover, ...], fixed: frozenset[str]
) -> Iterator[Settings]:
    """Settings one step after another, each from the one before: those in ``first``, then the general ones.

    What a person fixed moves only when nothing else does.
    """
    order = tuple(dict.fromkeys((*first, *GENERAL)))
    while True:
        lower = [moved for mover in order if (moved := mover(model, settings)) is not None]
        free = [moved for moved in lower if not broken(settings, moved, fixed)]
        following = next(iter(free or lower), None)
        if following is None:
            return
        yield following
        settings = following


def without_needless(
    before: Settings, way: list[Settings], fixed: frozenset[str], enough: Callable[[Settings], bool]
) -> Settings:
    """The last of ``way`` with what need not have been lowered put back, as far as it stays ``enough``.

    What is dearest to a person is put back first: wishes, then context, pictures, requests.
    """
    last = way[-1]
    for name in sorted(_DEAREST, key=lambda each: each not in fixed):
        values = dict.fromkeys(getattr(settings, name) for settings in (before, *way))
        for value in values:
            tried = replace(last, **{name: value})
            if tried.image_tokens < tried.context and tried != before and enough(tried):
                last = tried
                break
    return last


def broken(before: Settings, after: Settings, fixed: frozenset[str]) -> tuple[str, ...]:
    """Which of the ``fixed`` wishes are lowered, as options with their values before and after."""
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


def _pools(before: Settings, after: Settings) -> tuple[int | None, int | None]:
    """Tokens of the pool where one was asked for; what follows from a shorter context is no change of it."""
    if before.vllm.kv_tokens == after.vllm.kv_tokens:
        return None, None
    return pool_tokens(before), pool_tokens(after)


# What a lower value is called, and what it costs.
_PRICES = {
    "context": ("context {}", "prompt and answer together have no more tokens than that"),
    "image_tokens": ("{} image tokens", "larger pictures are scaled down further"),
    "sequences": ("{} at once", "further requests wait"),
    "chunk": ("{} tokens a pass", "long prompts begin to answer later"),
}


def in_words(before: Settings, after: Settings) -> str:
    """What is lowered, each with its price."""
    said = []
    for name, (what, price) in _PRICES.items():
        old, new = getattr(before, name), getattr(after, name)
        if old != new:
            said.append(f"{what.format(f'{old} -> {new}')}: {price}")
    if before.graphs and not after.graphs:
        said.append("no CUDA graphs (--enforce-eager): each word takes longer")
    old_told, new_told = before.vllm, after.vllm
    old_pool, new_pool = _pools(before, after)
    if old_pool is not None and new_pool is not None and old_pool != new_pool:
        price = "fewer long requests run at once" if new_pool < old_pool else "it takes more memory"
        said.append(f"KV cache {old_pool} -> {new_pool} tokens: {price}")
    if old_told.data != new_told.data:
        said.append(f"{old_told.data} -> {new_told.data} copies of the model: fewer requests at once in all")
    if new_told.one_front and not old_told.one_front:
        said.append("one process takes the requests of all copies: less RAM, a busier front")
    return "; ".join(said)


def _pictures_to(model: Model, settings: Settings, most: int) -> Settings | None:
    """Pictures of at most ``most`` tokens, by steps; None where the processor enlarges smaller ones."""
    if model.vision is None or not settings.image_tokens:
        return None
    least = LEAST_PIXELS // pixels_of_token(model.vision)
    step = next((step for step in _SMALLER_IMAGES if least <= step <= most), None)
    return None if step is None else replace(settings, image_tokens=step)
