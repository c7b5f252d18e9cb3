"""vLLM's own arguments, and settings and wishes that carry them."""

from dataclasses import dataclass, fields

from vlfit.plan.ledger import PlanSettings
from vlfit.plan.wishes import Wishes

OLDER_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"  # 0 turns it off: the newer runner needs pinned memory, up to 0.29
# Variables for workers that cannot reach each other in the usual way (NCCL's user guide, its issue 1838, and
# vLLM's environment variables).
OLDER_SHARING = "NCCL_CUMEM_HOST_ENABLE=0"
SOCKETS = "NCCL_SHM_DISABLE=1"
LOOPBACK = "VLLM_HOST_IP=127.0.0.1"
NO_PEERS = "NCCL_P2P_DISABLE=1"
FLOAT32 = "float32"


@dataclass(frozen=True, slots=True)
class VllmArgs:
    """Arguments of a vLLM start.

    - ``tensor``: cards that share each layer; ``data``: copies of the model, each on ``tensor`` cards.
    - ``split_tower``: cards share the vision tower too; else each has all of it and takes pictures of its
      own.
    - ``kv_tokens``: of the KV cache; None: as many as requests need.
    - ``pictures``: most of them in one prompt; None: as many as the context holds.
    - ``on_cpu``: vLLM's build for CPUs, which keeps weights and KV cache in RAM.
    - ``max_utilization``: upper limit of --gpu-memory-utilization, where the plan's own is not free.
    - ``dtype``: of the computation, and with it of 16-bit weights and of the KV cache; "": the checkpoint's
      own.
    - ``omitted_flags``: flags that this vLLM does not know.
    - ``environment``: variables beside those that every plan has, as ``NAME=VALUE``.
    - ``no_peer_access``: cards that share layers communicate through RAM.
    - ``single_api_server``: one process takes the requests of all copies.
    - ``retries``: how often the same plan was started before.
    - ``version``: of the planned vLLM, as its package gives it; records of earlier starts are kept by it.
    """

    tensor: int = 1
    data: int = 1
    split_tower: bool = False
    kv_tokens: int | None = None
    pictures: int | None = None
    on_cpu: bool = False
    max_utilization: float | None = None
    dtype: str = ""
    omitted_flags: frozenset[str] = frozenset()
    environment: frozenset[str] = frozenset()
    no_peer_access: bool = False
    single_api_server: bool = False
    retries: int = 0
    version: str = ""

    @property
    def cards(self) -> int:
        """How many cards the plan takes."""
        return self.tensor * self.data

    @property
    def value_bytes(self) -> int:
        """Bytes of a number that is computed with."""
        return 4 if self.dtype == FLOAT32 else 2


DEFAULT_ARGS = VllmArgs()  # one card


@dataclass(frozen=True, slots=True)
class VllmSettings(PlanSettings):
    """Settings of a plan for vLLM."""

    vllm: VllmArgs = DEFAULT_ARGS


@dataclass(frozen=True, slots=True)
class VllmWishes(Wishes):
    """Wishes for a plan for vLLM; ``vllm`` are the arguments that the plan starts from."""

    vllm: VllmArgs = DEFAULT_ARGS


def vllm_settings(settings: PlanSettings) -> VllmSettings:
    """``settings`` as ``VllmSettings``: with vLLM's default arguments unless they have their own."""
    if isinstance(settings, VllmSettings):
        return settings
    return VllmSettings(**{field.name: getattr(settings, field.name) for field in fields(settings)})


def vllm_wishes(wishes: Wishes) -> VllmWishes:
    """``wishes`` with vLLM's arguments; the default ones where they have none."""
    if isinstance(wishes, VllmWishes):
        return wishes
    return VllmWishes(**{field.name: getattr(wishes, field.name) for field in fields(wishes)})


def args_of(settings: PlanSettings) -> VllmArgs:
    """vLLM's own arguments of ``settings``."""
    return settings.vllm if isinstance(settings, VllmSettings) else DEFAULT_ARGS
