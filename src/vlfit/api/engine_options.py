"""What the engine is told when it is built. No torch: the floors above fill this in cheaply."""

from dataclasses import dataclass
from typing import Literal

from vlfit.checkpoint.catalog import BF16
from vlfit.checkpoint.quantization import FP8
from vlfit.errors import UsageError

Park = Literal["auto", "ram", "files"]  # where weights wait while an engine sleeps
DTYPES = ("float32", "bfloat16", "float16")  # what may be asked for by name
KV_DTYPES = ("auto", BF16, FP8)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Fixed for the life of an engine.

    ``device``: ``auto`` (the first CUDA device, else the CPU), ``cpu``, ``cuda`` or ``cuda:1``.
    ``dtype``: ``auto`` (float32 on a CPU, the checkpoint's own on a GPU), or a name such as ``bfloat16``.
    ``context``: most tokens of one sequence, prompt and completion; None: the checkpoint's, at most 8192.
    ``sequences``: how many run at once, at most.
    ``kv_tokens``: tokens in the KV pool that they share; None: 2048 for each sequence; ``auto``: what the
    memory that is free leaves, up to ``context`` for each sequence. At least one context.
    ``kv_dtype``: of the KV pool: ``auto``, the dtype of the computation; ``bf16``, the same where that is
    bfloat16, and refused elsewhere; ``fp8``: a byte for each number and two for each row of a head, half
    of 16 bits; what is in it is rounded to three bits of fraction.
    ``chunk``: most tokens of one forward pass; longer prompts are prefilled in chunks of it.
    ``even``: while others decode, prompts are read in chunks that hold those up for no longer than a step of
    theirs takes, where there are such chunks; what that is, is learnt from the passes.
    ``block_size``: tokens in one KV block.
    ``image_tokens``: most tokens of one picture; larger ones are scaled down and the answer says so. None: as
    many as the checkpoint takes or, on a GPU, as there is room for.
    ``max_tokens``: completion length when a request names none.
    ``image_cache_bytes``: how much the cache of encoded pictures may hold.
    ``keep_to_plan``: on a GPU, torch's pool may not come to more than the plan says, and the worst case that
    the plan admits is run once before the first request. For a process that does nothing else.
    ``offload``: bytes of weights that leave a GPU: text layers wait in RAM and are copied to it in each pass;
    ``auto``: as few as make it fit; None: none, and what does not fit is refused.
    ``graphs``: on a GPU, decoding is recorded as CUDA graphs when the engine is built.
    ``prefix_cache``: a request that begins as an earlier one did takes over what is still in the KV pool.
    ``speculate``: where what was said before tells what may come next, a pass checks several tokens at once;
    the words of an answer that is not sampled stay the same (docs/speculation.md).
    ``idle_sleep``: seconds without a request after which it sleeps, until the next one; None: never.
    """

    device: str = "auto"
    dtype: str = "auto"
    context: int | None = None
    sequences: int = 4
    kv_tokens: int | Literal["auto"] | None = None
    chunk: int = 1024
    even: bool = False
    block_size: int = 16
    image_tokens: int | None = None
    max_tokens: int = 1024
    image_cache_bytes: int = 64 * 1024**2
    keep_to_plan: bool = False
    prefix_cache: bool = True
    speculate: bool = True
    idle_sleep: float | None = None
    graphs: bool = True
    offload: int | Literal["auto"] | None = None
    kv_dtype: str = "auto"

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", *DTYPES):
            raise UsageError(f"unknown dtype {self.dtype!r}", f"use auto, {', '.join(DTYPES)}")
        if self.kv_dtype not in KV_DTYPES:
            raise UsageError(
                f"--kv-dtype is {self.kv_dtype!r}", f"use {', '.join(KV_DTYPES)}", param="kv_dtype"
            )
        for name in ("sequences", "chunk", "block_size", "max_tokens"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}", f"{name} must be at least 1")
        if self.context is not None and self.context < 16:
            raise UsageError(f"context is {self.context} tokens", "context must be at least 16")
        if isinstance(self.kv_tokens, int) and self.kv_tokens < 1:
            raise UsageError(f"kv_tokens is {self.kv_tokens}", "kv_tokens must be at least 1")
        if self.image_tokens is not None and self.image_tokens < 4:
            raise UsageError(f"image_tokens is {self.image_tokens}", "image_tokens must be at least 4")
        if self.idle_sleep is not None and self.idle_sleep <= 0:
            raise UsageError(f"idle_sleep is {self.idle_sleep}", "use seconds above 0, or None for never")
        if isinstance(self.offload, int) and self.offload < 1:
            raise UsageError(f"offload is {self.offload} bytes", "leave it out: all stays on the GPU then")
        if self.image_cache_bytes < 0:
            raise UsageError("image_cache_bytes is negative", "use 0 to turn the cache off")

    def changed(self, context: int, most_image_tokens: int) -> list[str]:
        """What was asked for and is not had so, in words. ``context``: most tokens of a sequence;
        ``most_image_tokens``: of a picture, by the checkpoint and that context.
        """
        words = []
        if isinstance(self.kv_tokens, int) and self.kv_tokens < context:
            words.append(
                f"the KV cache has {context} tokens, not {self.kv_tokens}: it holds at least one request of "
                "the whole context"
            )
        if self.image_tokens is not None and self.image_tokens > most_image_tokens:
            words.append(
                f"pictures have at most {most_image_tokens} tokens, not {self.image_tokens}: the checkpoint "
                "or the context takes no larger ones"
            )
        return words
