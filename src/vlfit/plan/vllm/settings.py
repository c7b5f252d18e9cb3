"""What only vLLM is told: over how many cards a model goes, and what a failed start taught.

Knows fields and their meaning. Does not know what any of them costs (``costs.py``) or how it is spelt
(``command.py``).
"""

from dataclasses import dataclass

OLDER_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"  # 0 turns it off: the newer runner needs pinned memory, up to 0.29
# Variables by which workers find another way to each other, where the usual one is barred: NCCL's user guide,
# its issue 1838, and vLLM's environment variables.
OLDER_SHARING = "NCCL_CUMEM_HOST_ENABLE=0"
SOCKETS = "NCCL_SHM_DISABLE=1"
LOOPBACK = "VLLM_HOST_IP=127.0.0.1"
NO_PEERS = "NCCL_P2P_DISABLE=1"
FLOAT32 = "float32"


@dataclass(frozen=True, slots=True)
class OfVllm:
    """``tensor``: cards that share each layer; ``data``: copies of the model, each on ``tensor`` cards.

    ``split_tower``: the vision tower is shared out too; else each card has all of it and takes pictures of
    its own. ``kv_tokens``: of the pool; None: as many as requests need. ``pictures``: most of them in one
    prompt; None: as many as the context holds. ``in_ram``: vLLM's build for processors, which keeps all of
    this in RAM. ``share``: what the check at the start asks for at most, where a plan's own share is not
    free. ``dtype``: of the computation, and with it of weights in 16 bits and of the KV cache; "" leaves it
    to the checkpoint and the card. ``left_out``: flags that this vLLM does not know. ``variables``: of the
    environment, beside those that every plan has, as ``NAME=VALUE``. ``apart``: cards that share layers talk
    through RAM, and do not read each other's memory. ``one_front``: one process takes the requests of all
    copies. ``again``: how often the same was started before. ``version``: of the vLLM that is planned for, as
    its package says it: what its starts here have held is known by it.
    """

    tensor: int = 1
    data: int = 1
    split_tower: bool = False
    kv_tokens: int | None = None
    pictures: int | None = None
    in_ram: bool = False
    share: float | None = None
    dtype: str = ""
    left_out: frozenset[str] = frozenset()
    variables: frozenset[str] = frozenset()
    apart: bool = False
    one_front: bool = False
    again: int = 0
    version: str = ""

    @property
    def cards(self) -> int:
        """How many cards the plan takes."""
        return self.tensor * self.data

    @property
    def value_bytes(self) -> int:
        """Bytes of a number that is computed with."""
        return 4 if self.dtype == FLOAT32 else 2


ALONE = OfVllm()
