"""Options of the engine, without torch, so that the command line can build them cheaply."""

from dataclasses import dataclass
from typing import Literal, get_args

from vlfit.checkpoint.catalog import BF16
from vlfit.checkpoint.quantization import FP8
from vlfit.errors import UsageError
from vlfit.models.cache_spec import SNAPSHOT_RAM_BYTES

SleepLevel = Literal["auto", "ram", "files"]  # where weights wait while an engine sleeps
DTYPES = ("float32", "bfloat16", "float16")  # what may be asked for by name
KV_DTYPES = ("auto", BF16, FP8)
KernelGroup = Literal["attention", "delta_net", "linear", "rows", "sampler", "tower"]
KERNEL_GROUPS: tuple[KernelGroup, ...] = get_args(KernelGroup)
_PLAIN = "plain"


def plain_groups(kernels: str) -> frozenset[KernelGroup]:
    """The groups of kernels that ``EngineOptions.kernels`` replaces by PyTorch: "plain:rows,tower" two.

    ``auto``: none; ``plain``: all. Raises ``UsageError`` for anything else.
    """
    name, separator, listed = kernels.partition(":")
    if kernels in ("auto", _PLAIN):
        return frozenset(KERNEL_GROUPS if kernels == _PLAIN else ())
    named = {each.strip() for each in listed.split(",")}
    if name != _PLAIN or not separator or not named <= set(KERNEL_GROUPS):
        hint = f"Use auto, plain, or plain: and some of {', '.join(KERNEL_GROUPS)}, with commas between them."
        raise UsageError(f"--kernels is {kernels[:80]!r}", hint, param="kernels")
    return frozenset(group for group in KERNEL_GROUPS if group in named)


def uses_kernels(kernels: str) -> bool:
    """Whether ``EngineOptions.kernels`` leaves any group to vlfit's own kernels. Raises ``UsageError``."""
    return len(plain_groups(kernels)) < len(KERNEL_GROUPS)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of an engine, fixed for its life. Raises ``UsageError`` for a value out of range.

    ``device``: ``auto`` (the first CUDA device, else the CPU), ``cpu``, ``cuda`` or ``cuda:1``.
    ``dtype``: ``auto`` (float32 on a CPU, where products of prompts and pictures round their inputs if that
    is faster; the checkpoint's own on a GPU), or a name such as ``bfloat16``.
    ``max_model_len``: context length of one sequence, prompt and completion; None: the checkpoint's, at most
    8192.
    ``max_num_seqs``: sequences running at once.
    ``kv_tokens``: tokens in the KV cache, shared by all sequences, at least one context. None: 2048 per
    sequence; ``auto``: as many as free memory allows, up to ``max_model_len`` per sequence.
    ``kv_dtype``: of the KV cache. ``auto``: the computation's dtype. ``bf16``: the same, refused unless that
    is bfloat16. ``fp8``: one byte per number and two per head row; values have three mantissa bits.
    ``max_num_batched_tokens``: of one forward pass; longer prompts are prefilled in chunks.
    ``even_chunks``: while other sequences decode, limit prefill chunks so that a mixed step takes at most
    about twice a decode step, as measured on earlier steps.
    ``block_size``: tokens in one KV block.
    ``image_tokens``: limit for one picture; larger ones are scaled down, which the answer reports. None: the
    checkpoint's limit or, on a GPU, what fits.
    ``max_tokens``: completion length if a request gives none.
    ``image_cache_bytes``: limit of the encoder cache.
    ``state_snapshot_bytes``: limit of the RAM for copies of recurrent states, with which the prefix cache of
    a model with such states works (19 MiB each for Qwen3.5-0.8B, 50 MiB for 9B); 0: none.
    ``device_snapshots``: how many more of these copies are on the GPU, on the ledger line
    ``state_snapshots``, and used first. On a CPU: none.
    ``enforce_plan``: on a GPU, cap torch's memory pool at the plan, and run the plan's worst case once before
    the first request. For a process that does nothing else.
    ``offload``: bytes of weights to offload: text layers are kept in RAM and copied to the GPU in each pass.
    ``auto``: as few as make the model fit; None: no offload, and refuse what does not fit.
    ``cuda_graphs``: on a GPU, capture decode steps as CUDA graphs when the engine is built.
    ``prefix_cache``: reuse KV blocks of earlier requests with the same prefix.
    ``speculate``: speculative decoding; answers stay the same (docs/speculation.md). True: by prompt lookup
    and by layers of the checkpoint for it (multi-token prediction); refused if these do not fit. None: these
    layers are left out if they do not fit, with a margin, beside all else. False: none.
    ``idle_sleep``: seconds without a request before the engine sleeps until the next one; None: never.
    ``kernels``: ``auto``, or ``plain``: PyTorch alone, without Triton's kernels and CUDA graphs on a GPU and
    without compiled products on a CPU; ``plain:attention,rows``: for these of ``KERNEL_GROUPS`` alone. Slow;
    a way around a kernel that is wrong on a device. Engines on one device have one setting, that of the last
    one built.
    """

    device: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 4
    kv_tokens: int | Literal["auto"] | None = None
    max_num_batched_tokens: int = 1024
    even_chunks: bool = False
    block_size: int = 16
    image_tokens: int | None = None
    max_tokens: int = 1024
    image_cache_bytes: int = 64 * 1024**2
    state_snapshot_bytes: int = SNAPSHOT_RAM_BYTES
    device_snapshots: int = 0
    enforce_plan: bool = False
    prefix_cache: bool = True
    speculate: bool | None = None
    idle_sleep: float | None = None
    cuda_graphs: bool = True
    offload: int | Literal["auto"] | None = None
    kv_dtype: str = "auto"
    kernels: str = "auto"

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", *DTYPES):
            raise UsageError(f"unknown dtype {self.dtype!r}", f"Use auto, {', '.join(DTYPES)}.")
        if self.kv_dtype not in KV_DTYPES:
            raise UsageError(
                f"--kv-dtype is {self.kv_dtype!r}", f"Use {', '.join(KV_DTYPES)}.", param="kv_dtype"
            )
        plain_groups(self.kernels)
        for name, public_name in (
            ("max_num_seqs", "sequences"),
            ("max_num_batched_tokens", "chunk"),
            ("block_size", "block_size"),
            ("max_tokens", "max_tokens"),
        ):
            if getattr(self, name) < 1:
                raise UsageError(f"{public_name} is {getattr(self, name)}", "Use at least 1.")
        if self.max_model_len is not None and self.max_model_len < 16:
            raise UsageError(f"context is {self.max_model_len} tokens", "Use at least 16.")
        if isinstance(self.kv_tokens, int) and self.kv_tokens < 1:
            raise UsageError(f"kv_tokens is {self.kv_tokens}", "Use at least 1.")
        if self.image_tokens is not None and self.image_tokens < 4:
            raise UsageError(f"image_tokens is {self.image_tokens}", "Use at least 4.")
        if self.idle_sleep is not None and self.idle_sleep <= 0:
            raise UsageError(f"idle_sleep is {self.idle_sleep}", "Use seconds above 0, or None for never.")
        if isinstance(self.offload, int) and self.offload < 1:
            raise UsageError(
                f"offload is {self.offload} bytes", "Leave it out to keep all weights on the GPU."
            )
        if self.image_cache_bytes < 0:
            raise UsageError("image_cache_bytes is negative", "Use 0 to turn the cache off.")
        for name in ("state_snapshot_bytes", "device_snapshots"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} is negative", "Use 0 to take no snapshots of states.")

    @property
    def rounds_inputs(self) -> bool:
        """Whether products of many rows on a CPU may round their inputs: only if no dtype was named."""
        return self.dtype == "auto"

    def adjustment_notes(self, context: int, max_image_tokens: int) -> list[str]:
        """Sentences for the user on options whose effective value will differ from the given one.

        ``context``: the effective context length. ``max_image_tokens``: image tokens of the largest picture
        that the checkpoint and that context allow. Changes no option.
        """
        notes = []
        if isinstance(self.kv_tokens, int) and self.kv_tokens < context:
            notes.append(
                f"the KV cache has {context} tokens, not {self.kv_tokens}: it must hold at least one full "
                "context"
            )
        if self.image_tokens is not None and self.image_tokens > max_image_tokens:
            notes.append(
                f"pictures have at most {max_image_tokens} tokens, not {self.image_tokens}, limited by the "
                "checkpoint or the context"
            )
        return notes
