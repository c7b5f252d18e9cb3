"""Other ways over several cards after a failure: between them, each for itself, or more of them for a layer.

Knows: which ways there are, and their prices. Does not know what NCCL says when one fails
(``doctor/rules/peers.py``).
"""

from dataclasses import replace

from vlfit.plan.vllm.cases import Answer, Answers, Case, total, with_variable
from vlfit.plan.vllm.parallel import why_not
from vlfit.plan.vllm.settings import LOOPBACK, OLDER_SHARING, SOCKETS


def without_peers(case: Case) -> Answers:
    """Cards that cannot work together, or wait for each other: by way of RAM; then each for itself."""
    told = case.settings.vllm
    if told.cards == 1:
        return
    if "shm.cc" in case.failure.values.get("place", ""):
        words = f"{OLDER_SHARING}: NCCL shares RAM between cards as it did before 2.24"
        yield Answer(with_variable(case.settings, OLDER_SHARING), words)
    if not told.apart:
        words = "cards talk through RAM and do not read each other's memory: adding up takes longer"
        yield Answer(replace(case.settings, vllm=replace(told, apart=True)), words)
    yield from _each_for_itself(case)


def without_shared_ram(case: Case) -> Answers:
    """There is no room in /dev/shm, which only a person can change."""
    if case.settings.vllm.cards > 1:
        words = f"{SOCKETS}: cards talk over the network's sockets, slower, as /dev/shm is full"
        yield Answer(with_variable(case.settings, SOCKETS), words)
    yield from _each_for_itself(case)


def _each_for_itself(case: Case) -> Answers:
    """A copy on each card, if the model fits one: copies need not talk."""
    told = case.settings.vllm
    if told.tensor == 1 or case.wishes.tensor_parallel is not None:
        return
    copies = case.wishes.data_parallel or told.cards
    alone = replace(case.settings, vllm=replace(told, tensor=1, data=copies, split_tower=False))
    if total(case, alone) <= case.failed.gpu.free:
        words = f"a copy of the model on each of {copies} cards: no layers are shared"
        yield Answer(alone, words)


def at_home(case: Case) -> Answers:
    """Workers that do not meet at the address that vLLM took for this computer."""
    words = f"{LOOPBACK}: the workers meet on this computer, whatever its network says"
    yield Answer(with_variable(case.settings, LOOPBACK), words)


def over_more_cards(case: Case) -> Answers:
    """Weights that do not fit one card go over more of those that copies have now."""
    told = case.settings.vllm
    if case.wishes.tensor_parallel is not None or case.wishes.data_parallel is not None:
        return
    for tensor in range(told.tensor + 1, told.cards + 1):
        if not why_not(case.model, tensor):
            more = replace(told, tensor=tensor, data=told.cards // tensor)
            words = f"each layer over {tensor} cards instead of {told.tensor}: {more.data} copies instead of "
            yield Answer(replace(case.settings, vllm=more), f"{words}{told.data}")
