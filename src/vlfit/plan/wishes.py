"""``Wishes``: what a person fixed of a plan. The rest is chosen."""

from dataclasses import dataclass
from typing import Literal

from vlfit.checkpoint.catalog import BF16, FORMATS
from vlfit.checkpoint.quantization import FP8
from vlfit.errors import UsageError
from vlfit.units import parse_gibibytes

AUTO: Literal["auto"] = "auto"
CPU = "cpu"  # of ``Wishes.device``
OffloadWish = int | Literal["auto"]  # bytes that leave the card, or as few as make it fit

_LEAST_CONTEXT = 16  # of ``EngineOptions``
_LEAST_IMAGE_TOKENS = 4
# The least value of each wish that is a number, and its option where that has another name.
_LEAST = {"context": _LEAST_CONTEXT, "image_tokens": _LEAST_IMAGE_TOKENS, "sequences": 1} | dict.fromkeys(
    ("kv_tokens", "kv_bytes", "tensor_parallel", "data_parallel", "chunk", "pictures"), 1
)
OPTIONS = {"kv_tokens": "kv", "kv_bytes": "kv-cache-memory-bytes", "pictures": "limit-mm-per-prompt"}


def option_name(wish: str) -> str:
    """The command-line option of a field of ``Wishes``, e.g. ``--kv`` for ``kv_tokens``. Not checked."""
    return f"--{OPTIONS.get(wish) or wish.replace('_', '-')}"


def parse_offload(text: str) -> OffloadWish:
    """Parse ``--offload``: "auto", or a size such as ``2GiB`` into bytes; a bare number is in GiB.

    Raises ``UsageError`` for anything else, 0 included.
    """
    if text.strip().lower() == AUTO:
        return AUTO
    size = parse_gibibytes(text, "--offload")
    if size <= 0:
        raise UsageError(
            f"--offload is {text}", "Ask for more than 0, or leave it out: all stays on the card then."
        )
    return size


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a person fixed; None leaves it to the plan. Raises ``UsageError`` for impossible values.

    Not every backend can meet all; ``backends.check_wishes`` refuses what the chosen one cannot.

    - ``context``, ``image_tokens``, ``sequences``: as in ``PlanSettings``. ``weights``: a weights format.
    - ``backend``: None for the native engine. ``vllm_version``: such as ``0.22``.
    - ``offload``: bytes of weights to keep in RAM; ``auto``: as few as make it fit; None: none.
    - ``kv_dtype``: of the KV cache; None: 16 bits.
    - ``kv_tokens``, ``kv_bytes``: exact size of the KV cache, in tokens, or in bytes on each card.
    - ``tensor_parallel``: cards that share each layer; ``data_parallel``: copies of the model.
    - ``device``: cpu: on the processor, whatever cards there are.
    - ``speculate``: True: with draft tokens, those of the checkpoint's own layers for it, too; False: none.
      None: these layers only where they take nothing from what counts more (docs/speculation.md).
    - ``eager``: no CUDA graphs. ``chunk``: prefill chunk in tokens. ``pictures``: most in one prompt.
    """

    context: int | None = None
    image_tokens: int | None = None
    sequences: int | None = None
    weights: str | None = None
    backend: str | None = None
    vllm_version: str | None = None
    offload: OffloadWish | None = None
    kv_dtype: str | None = None
    kv_tokens: int | None = None
    kv_bytes: int | None = None
    tensor_parallel: int | None = None
    data_parallel: int | None = None
    eager: bool = False
    chunk: int | None = None
    pictures: int | None = None
    device: str | None = None
    speculate: bool | None = None

    def __post_init__(self) -> None:
        for name, lowest in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise UsageError(
                    f"{option_name(name)} is {value}", f"It must be at least {lowest}.", param=name
                )
        for name, known in (("weights", FORMATS), ("kv_dtype", (BF16, FP8)), ("device", (CPU,))):
            value = getattr(self, name)
            if value is not None and value not in known:
                raise UsageError(
                    f"{option_name(name)} is {value!r}", f"Plans are made for {', '.join(known)}.", param=name
                )
        if self.context and self.image_tokens and self.image_tokens >= self.context:
            raise UsageError(
                f"a picture of {self.image_tokens} tokens fills a context of {self.context}",
                "Ask for a larger --context or fewer --image-tokens.",
                param="image_tokens",
            )
