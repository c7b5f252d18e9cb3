"""vLLM's own arguments, and the settings and wishes that include them."""

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
    """Arguments of a vLLM start beyond ``PlanSettings``.

    - ``tensor``: cards that share each layer; ``data``: copies of the model, each on ``tensor`` cards.
    - ``split_tower``: cards share the vision tower; else each has all of it and encodes pictures of its own.
    - ``kv_tokens``: size of the KV cache in tokens; None: the default (``cost.pool_tokens``).
    - ``pictures``: most pictures in one prompt; None: as many as the context holds.
    - ``on_cpu``: vLLM's build for CPUs, which keeps weights and KV cache in RAM.
    - ``max_utilization``: upper limit of --gpu-memory-utilization, lower than the plan's own share, as that
      is not free; None: no limit.
    - ``dtype``: of the computation, 16-bit weights and KV cache; "": the checkpoint's own.
    - ``omitted_flags``: flags to leave out of the command, as this vLLM does not accept them.
    - ``environment``: additional environment variables, as ``NAME=VALUE``.
    - ``no_peer_access``: cards that share layers communicate through RAM.
    - ``single_api_server``: one process takes the requests of all copies, not one for each copy.
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
        """Number of cards: ``tensor`` times ``data``."""
        return self.tensor * self.data

    @property
    def value_bytes(self) -> int:
        """Bytes of a value in ``dtype``: 4 in float32, else 2."""
        return 4 if self.dtype == FLOAT32 else 2


DEFAULT_ARGS = VllmArgs()  # one card


@dataclass(frozen=True, slots=True)
class VllmSettings(PlanSettings):
    """Plan settings with vLLM's own arguments."""

    vllm: VllmArgs = DEFAULT_ARGS


@dataclass(frozen=True, slots=True)
class VllmWishes(Wishes):
    """Wishes with the vLLM arguments that the plan starts from."""

    vllm: VllmArgs = DEFAULT_ARGS


def as_vllm_settings(settings: PlanSettings) -> VllmSettings:
    """``settings`` themselves if they are ``VllmSettings``, else a copy with ``DEFAULT_ARGS``."""
    if isinstance(settings, VllmSettings):
        return settings
    return VllmSettings(**{field.name: getattr(settings, field.name) for field in fields(settings)})


def as_vllm_wishes(wishes: Wishes) -> VllmWishes:
    """``wishes`` themselves if they are ``VllmWishes``, else a copy with ``DEFAULT_ARGS``."""
    if isinstance(wishes, VllmWishes):
        return wishes
    return VllmWishes(**{field.name: getattr(wishes, field.name) for field in fields(wishes)})


def vllm_args_of(settings: PlanSettings) -> VllmArgs:
    """``settings.vllm``; ``DEFAULT_ARGS`` for another backend's settings."""
    return settings.vllm if isinstance(settings, VllmSettings) else DEFAULT_ARGS
