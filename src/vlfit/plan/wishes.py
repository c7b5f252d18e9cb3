"""What a person fixed of a plan, and what of that makes no sense, with no machine or model in sight.

Knows: the wishes there are and their limits. Does not know how the rest is chosen (``search.py``).
"""

from dataclasses import dataclass

from vlfit.checkpoint.catalog import BF16, FORMATS
from vlfit.checkpoint.quantization import FP8
from vlfit.errors import UsageError
from vlfit.plan.ledger import BACKENDS, NATIVE, TRANSFORMERS, VLLM
from vlfit.plan.native.ram import Wish
from vlfit.plan.vllm.flags import ALONE, OfVllm, parse_version

_LEAST_CONTEXT = 16  # of ``EngineOptions``
_LEAST_IMAGE_TOKENS = 4
# Wishes that only vLLM has, with the names of their options.
_OF_VLLM = {
    "kv_tokens": "kv",
    "kv_bytes": "kv-cache-memory-bytes",
    "tensor_parallel": "tensor-parallel",
    "data_parallel": "data-parallel",
    "chunk": "chunk",
    "pictures": "limit-mm-per-prompt",
}


def check_one_at_once(sequences: int) -> None:
    """Raises ``UsageError`` for more requests at once than transformers runs."""
    if sequences > 1:
        raise UsageError(
            f"--sequences {sequences} is more than transformers runs: its requests go one after the other",
            "Leave it out: others wait in the queue. The native engine and vLLM run several at once.",
            param="sequences",
        )


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a person fixed; None leaves it to the plan. Raises ``UsageError`` for what makes no sense.

    ``offload``: bytes of weights that leave the card, ``auto``: as few as make it fit; None: none ever.
    ``kv_dtype``: of the KV cache; None: 16 bits. For vLLM only: ``kv_tokens`` of its pool (or ``kv_bytes`` on
    each card), which is taken as it is; ``tensor_parallel`` and ``data_parallel``, over how many cards each
    layer goes and how many copies there are; ``eager``: no CUDA graphs; ``chunk``: tokens of a pass;
    ``pictures``: most in one prompt; and ``vllm``, what a plan begins with.
    """

    context: int | None = None
    image_tokens: int | None = None
    sequences: int | None = None
    weights: str | None = None
    backend: str | None = None
    vllm_version: str | None = None
    offload: Wish | None = None
    kv_dtype: str | None = None
    kv_tokens: int | None = None
    kv_bytes: int | None = None
    tensor_parallel: int | None = None
    data_parallel: int | None = None
    eager: bool = False
    chunk: int | None = None
    pictures: int | None = None
    vllm: OfVllm = ALONE

    def __post_init__(self) -> None:
        least = {"context": _LEAST_CONTEXT, "image_tokens": _LEAST_IMAGE_TOKENS, "sequences": 1}
        least |= dict.fromkeys(_OF_VLLM, 1)
        for name, lowest in least.items():
            value = getattr(self, name)
            if value is not None and value < lowest:
                option = _OF_VLLM.get(name) or name.replace("_", "-")
                raise UsageError(f"--{option} is {value}", f"it must be at least {lowest}", param=name)
        self._check_names()
        if self.backend == TRANSFORMERS and self.sequences is not None:
            check_one_at_once(self.sequences)
        self._check_vllm()
        if self.offload is not None and self.backend not in (None, NATIVE):
            raise UsageError(
                f"--offload lets layers of the native engine wait in RAM, and the backend is {self.backend}",
                "leave out --backend, or --offload",
                param="offload",
            )
        if self.context and self.image_tokens and self.image_tokens >= self.context:
            raise UsageError(
                f"a picture of {self.image_tokens} tokens fills a context of {self.context}",
                "ask for a larger --context or fewer --image-tokens",
            )

    def _check_names(self) -> None:
        for name, known in (("weights", FORMATS), ("backend", BACKENDS), ("kv_dtype", (BF16, FP8))):
            value = getattr(self, name)
            if value is not None and value not in known:
                option = name.replace("_", "-")
                raise UsageError(
                    f"--{option} is {value!r}", f"plans are made for {', '.join(known)}", param=name
                )
        if self.kv_dtype == FP8 and self.backend == TRANSFORMERS:
            raise UsageError(
                "transformers keeps its KV cache in the dtype of the computation",
                "leave out --kv-dtype, or --backend",
                param="kv_dtype",
            )

    def _check_vllm(self) -> None:
        """What only vLLM has."""
        if self.vllm_version is not None:
            if self.backend != VLLM:
                raise UsageError(
                    "--vllm-version says which vLLM a plan is for",
                    f"add --backend {VLLM}",
                    param="vllm_version",
                )
            parse_version(self.vllm_version)
        for name in (*_OF_VLLM, "eager"):
            if getattr(self, name) and self.backend != VLLM:
                option = "--" + _OF_VLLM.get(name, "enforce-eager")
                raise UsageError(f"{option} is a setting of vLLM", f"add --backend {VLLM}", param=name)
