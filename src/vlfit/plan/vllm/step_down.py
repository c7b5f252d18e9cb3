"""The next cheaper plan after a start that failed: it answers the cause that the doctor read of the log.

Knows: what helps against which cause, and by how much. A plan is never returned twice, and stepping ends:
every answer lowers a setting or is given once (``moves.py``). What a person fixed stays so while anything
else can give; where it gives, that is told apart. Does not know how a log is read (``vlfit.doctor``) or how a
plan is started.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from vlfit.machine.model import Machine
from vlfit.plan.calibration import with_bandwidth
from vlfit.plan.candidates import Choice
from vlfit.plan.ledger import VLLM, Settings, ledger
from vlfit.plan.search import Plan, finished
from vlfit.plan.shapes import Model
from vlfit.plan.vllm import cost as costs
from vlfit.plan.vllm import moves
from vlfit.plan.vllm.command import budget, share
from vlfit.plan.vllm.cost import why_not
from vlfit.plan.vllm.cpu import ram_as_gpu
from vlfit.plan.vllm.flags import LOOPBACK, OLDER_RUNNER, OLDER_SHARING, PINNED, SOCKETS, chosen_version
from vlfit.plan.vllm.moves import Mover
from vlfit.plan.vllm.placement import Group, Taken
from vlfit.plan.wishes import Wishes
from vlfit.units import GIB, format_bytes

# A start that failed, and what may be tried after it: words that all answers to it are made of.
#
# Knows: what is known around a failure, and what an answer is. Does not know any (``step_down.py``,
# ``plan/vllm/step_down.py``).


# Wishes that stay fixed, with what they are called in ``Settings`` or ``OfVllm``.
_FIXED = ("context", "image_tokens", "sequences", "kv_tokens", "chunk", "data_parallel")


@dataclass(frozen=True, slots=True)
class Failure:
    """What ended a start. ``id`` is that of the doctor's rule, "" if nothing was recognised.

    ``values`` are the groups of the rule's pattern, as the log prints them: sizes are in GiB. ``stage``: of
    memory that ran out: pictures, pass, graphs, sampler, weights or requests; "" if not known.
    """

    id: str
    values: Mapping[str, str] = field(default_factory=dict)
    stage: str = ""

    def number(self, name: str) -> float | None:
        """A value as a number; None if the log does not say it."""
        try:
            return float(self.values[name])
        except (KeyError, ValueError):
            return None


@dataclass(frozen=True, slots=True)
class Case:
    """A failure with all that is known around it."""

    failure: Failure
    failed: Plan
    machine: Machine
    wishes: Wishes
    own: tuple[str, ...]

    @property
    def model(self) -> Model:
        return self.failed.model

    @property
    def settings(self) -> Settings:
        return self.failed.settings

    @property
    def fixed(self) -> frozenset[str]:
        fixed = {name for name in _FIXED if getattr(self.wishes, name) is not None}
        return frozenset(fixed | ({"kv_tokens"} if self.wishes.kv_bytes is not None else set()))

    @property
    def version(self) -> tuple[int, int, int]:
        return chosen_version(self.settings.vllm.version or None).number


@dataclass(frozen=True, slots=True)
class Answer:
    """Settings to try, in words."""

    settings: Settings
    words: str
    broken: tuple[str, ...] = ()


Answers = Iterable[Answer]


def answered(case: Case, settings: Settings, why: str = "") -> Answer:
    """``settings`` to try after those that failed, with what that changes, and ``why``."""
    words = moves.in_words(case.settings, settings) + (f" ({why})" if why else "")
    return Answer(settings, words, moves.broken(case.settings, settings, case.fixed))


def with_variable(settings: Settings, variable: str) -> Settings:
    """``variable`` is ``NAME=VALUE``."""
    told = settings.vllm
    return replace(settings, vllm=replace(told, variables=told.variables | {variable}))


def total(case: Case, settings: Settings) -> int:
    """Bytes of what vLLM itself takes."""
    lines = ledger(case.model, case.failed.gpu, VLLM, settings)
    return sum(line.bytes for line in lines if line.line != "desktop")


# Other ways over several cards after a failure: between them, each for itself, or more of them for a layer.
#
# Knows: which ways there are, and their prices. Does not know what NCCL says when one fails
# (``doctor/rules/multi_gpu.py``).


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


# A plan for vLLM with other settings, on the same cards, as the machine is now.
#
# Knows: which cards a plan had. Does not know why its settings change (``step_down.py``).


def again_with(plan: Plan, settings: Settings, machine: Machine) -> Plan:
    """``plan`` with ``settings``; its cards as they are on ``machine`` now, or as they were."""
    model, version = plan.model, chosen_version(settings.vllm.version or None)
    if settings.vllm.in_ram:
        gpu = ram_as_gpu(machine)
        lines = ledger(model, gpu, VLLM, settings)
        return finished(model, VLLM, replace(machine, gpus=(gpu,)), gpu, settings, lines, version)
    had = plan.gpus or (plan.gpu,)
    wanted = {gpu.index for gpu in had}
    now = [with_bandwidth(gpu) for gpu in machine.gpus if gpu.index in wanted]
    group = Group(tuple(sorted(now or had, key=lambda gpu: -gpu.free)))
    gpus = group.taken(settings.vllm.cards)
    lines = ledger(model, gpus[0], VLLM, settings)
    headroom = gpus[0].total - sum(line.bytes for line in lines)
    taken = Taken(Choice(model, VLLM, settings, lines, headroom), group, gpus)
    return finished(model, VLLM, machine, gpus[0], settings, lines, version, taken)


KV_TOO_SMALL = "vllm.kv_too_small"  # the doctor's name for a KV cache that holds no request
HANG = "vllm.waits_for_peers"  # and for cards that wait for each other for good
_ONCE_MORE = 1  # times that the same is started again after a race
_NEEDED = {"--max-model-len"}  # without it the model's own length counts, which never fits
_PINNED_FROM = (0, 24, 0)  # the first version with the variable


@dataclass(frozen=True, slots=True)
class Step:
    """The ``plan`` to start next, ``what_changed`` against the one that failed, with its price, and which of
    the person's own wishes had to give for it.
    """

    plan: Plan
    what_changed: str
    broken: tuple[str, ...] = ()


def broken_words(step: Step) -> tuple[str, ...]:
    """The wishes that had to give, each as a sentence that nobody overlooks."""
    return tuple(f"NOT AS YOU ASKED: {wish}" for wish in step.broken)


def next_plan(
    failure: Failure,
    tried: Sequence[Plan],
    machine: Machine,
    wishes: Wishes,
    own: Sequence[str] = (),
) -> Step | None:
    """What to start after the last plan of ``tried`` failed; None where nothing cheaper is left.

    ``machine``: as it is now. ``own``: flags that the person typed themselves, which are never left out.
    """
    case = Case(failure, tried[-1], machine, wishes, tuple(own))
    seen = {plan.settings for plan in tried}
    answer = _ANSWERS.get(failure.id)
    if answer is None:
        return None
    for each in answer(case):
        if each.settings not in seen:
            return Step(again_with(case.failed, each.settings, machine), each.words, each.broken)
    return None


# --- what helps against which cause ------------------------------------------------------------------------


def _shorter(case: Case) -> Answers:
    """The KV cache holds less than one context: a larger one, where its size was the plan's own; else a
    context that it holds, by vLLM's own count where it has one.
    """
    available = case.failure.number("available")
    most = case.failure.number("estimate") or case.failure.number("stored")
    if most is None and available is not None and available <= 0:
        yield from _less(case)
        return
    length, needed = case.failure.number("length"), case.failure.number("needed")
    if most is None and length and needed and available:
        # Two digits of GiB are printed: one of them less is held for sure.
        most = length * (available - 0.01) / needed
    pool = costs.pool_tokens(case.settings)
    if most and most > 0:
        yield from _larger_pool(case, round(pool * case.settings.context / most))
    else:
        most = pool - costs.LARGEST_BLOCK
    shorter = moves.context_to(case.model, case.settings, int(most))
    if shorter is not None:
        # What vLLM counted is of this pool, which a shorter context alone would make smaller, too.
        shorter = replace(shorter, vllm=replace(shorter.vllm, kv_tokens=pool))
        yield answered(case, shorter, f"the KV cache of {pool} tokens holds no more")
    elif case.settings.vllm.kv_tokens is not None:
        larger = replace(case.settings, vllm=replace(case.settings.vllm, kv_tokens=None))
        if total(case, larger) <= case.failed.gpu.free:
            yield answered(case, larger, f"{pool} tokens hold no picture with a question and an answer")


def _larger_pool(case: Case, tokens: int) -> Answers:
    """Once, for a pool whose size nobody asked for: vLLM counts otherwise than the plan, in larger blocks."""
    told = case.settings.vllm
    larger = replace(case.settings, vllm=replace(told, kv_tokens=tokens + costs.LARGEST_BLOCK))
    if told.kv_tokens is None and total(case, larger) <= case.failed.gpu.free:
        yield answered(case, larger, f"vLLM counts so many for {case.settings.context}")


def _longest(case: Case) -> Answers:
    """The model was made for less."""
    shorter = moves.context_to(case.model, case.settings, int(case.failure.number("most") or 0))
    if shorter is not None:
        yield answered(case, shorter, "the model was made for no more")


def _less_share(case: Case) -> Answers:
    """Less is free than the plan counts: settings that need so much less, else the share that is free."""
    free, total = case.failure.number("free"), case.failure.number("total")
    if free is None or not total:
        return
    need = budget(case.failed.ledger)
    missing = round(need - free * GIB + total * GIB / 1000)
    yield from _less(case, missing=max(missing, 1), all_of_it=True)
    # Nothing else gives: what vLLM allocates at its start may fit still, without what it grows by later.
    later = sum(line.bytes for line in case.failed.ledger if line.line == "growth")
    most = int(free / total * 1000) / 1000
    now = case.settings.vllm.share or share(case.failed.ledger, case.failed.gpu)
    if need - later <= free * GIB and 0 < most < now:
        words = (
            f"share {now:g} -> {most:g}, all that is free: {format_bytes(later)} that vLLM grows by at its "
            "first requests are not counted any more; close what else uses the card"
        )
        yield Answer(replace(case.settings, vllm=replace(case.settings.vllm, share=most)), words)


def _no_room(case: Case) -> Answers:
    """Weights and the trial run fill the budget: less of what the trial run takes."""
    kv = case.failure.number("kv")
    pool = next(line.bytes for line in case.failed.ledger if line.line == "kv_cache")
    yield from _less(case, missing=None if kv is None else round(abs(kv) * GIB) + pool)


def _out_of_memory(case: Case) -> Answers:
    """What was running when memory ran out."""
    first: dict[str, tuple[Mover, ...]] = {
        "pictures": (moves.smaller_passes, moves.ample_pictures, moves.smaller_pictures),
        "graphs": (moves.no_graphs,),
        "sampler": (moves.fewer_requests,),
        "pass": (moves.smaller_passes, moves.fewer_requests),
        "requests": (moves.ample_pictures, moves.fewer_requests),
    }
    if case.failure.stage == "weights":
        yield from over_more_cards(case)
        return
    if case.failure.stage == "sampler":  # whatever the ledger says: pictures may stand for its peak there
        yield from _apart(case, (moves.fewer_requests,))
    yield from _less(case, first.get(case.failure.stage, ()))


def _graphs_failed(case: Case) -> Answers:
    yield from _less(case, (moves.no_graphs,))


def _sampler(case: Case) -> Answers:
    """Half of the requests that the rehearsal had."""
    rows = case.failure.number("rows")
    if rows:
        fewer = moves.requests_to(case.settings, int(rows) // 2)
        if fewer is not None:
            yield answered(case, fewer, f"there was no room to choose tokens for {int(rows)} at once")
    yield from _less(case, (moves.fewer_requests,))


def _again(case: Case) -> Answers:
    """The same once more: nothing is wrong with it."""
    told = case.settings.vllm
    if told.again < _ONCE_MORE:
        words = "the same once more: another program gave memory back while vLLM measured its own"
        yield Answer(replace(case.settings, vllm=replace(told, again=told.again + 1)), words)


def _pinned(case: Case) -> Answers:
    """Pinned memory where this version has the variable; else, or then, its older runner."""
    set_now = case.failed.environment
    if OLDER_RUNNER in set_now:
        return
    if PINNED not in set_now and case.version >= _PINNED_FROM:
        words = f"{PINNED}=1: WSL2 leaves pinned memory off, and this version needs it"
        yield Answer(with_variable(case.settings, f"{PINNED}=1"), words)
    words = f"{OLDER_RUNNER}=0: the older runner, which needs no pinned memory"
    yield Answer(with_variable(case.settings, f"{OLDER_RUNNER}=0"), words)


def _float16(case: Case) -> Answers:
    told = case.settings.vllm
    if told.dtype != "float16":
        words = "computed in float16, as the card has no bfloat16: the same bytes"
        yield Answer(replace(case.settings, vllm=replace(told, dtype="float16")), words)


def _without_flag(case: Case) -> Answers:
    """A flag of the plan that this vLLM does not read is left out, if vLLM starts without it; never one that
    the person typed.
    """
    said = f"{case.failure.values.get('flags', '')} {case.failure.values.get('flag', '')}"
    named = [word.split("=")[0] for word in said.replace("/", " ").replace(",", " ").split()]
    flags = {flag.flag: flag for flag in case.failed.flags}
    ours = [name for name in dict.fromkeys(named) if name in flags and name not in _NEEDED]
    theirs = [name for name in named if name.startswith("--") and name not in flags]
    if not ours or theirs or any(word.split("=")[0] in ours for word in case.own):
        return
    told = replace(case.settings.vllm, left_out=case.settings.vllm.left_out | set(ours))
    whose = "; ".join(f"{name} was there for {flags[name].line}: {flags[name].why}" for name in ours)
    yield Answer(
        replace(case.settings, vllm=told),
        f"without {', '.join(ours)}, which this vLLM does not take ({whose})",
    )


def _whole_pictures(case: Case) -> Answers:
    """Pictures may not be cut, and one has more tokens than a pass."""
    smaller = moves.smaller_pictures(case.model, case.settings)
    while smaller is not None and smaller.image_tokens > case.settings.chunk:
        smaller = moves.smaller_pictures(case.model, smaller)
    if smaller is not None:
        yield answered(case, smaller, "a picture may not have more tokens than a pass")


def _less_ram(case: Case) -> Answers:
    """The computer's own memory ran out: fewer processes; in RAM everything else, too."""
    if not case.settings.vllm.in_ram:
        yield from _apart(case, (moves.one_front, moves.fewer_copies))
        return
    yield from _less(case, (moves.smaller_pool,))


def _ram_for_pool(case: Case) -> Answers:
    """RAM holds less than the pool that was asked for."""
    yield from _less(case, (moves.smaller_pool, moves.fewer_requests))


_ANSWERS: Mapping[str, Callable[[Case], Answers]] = {
    KV_TOO_SMALL: _shorter,
    "vllm.kv_too_small_v0": _shorter,
    "vllm.max_len_over_model": _longest,
    "vllm.free_lt_util": _less_share,
    "vllm.kv_negative": _no_room,
    "vllm.no_kv": _no_room,
    "torch.oom": _out_of_memory,
    "cuda.oom": _out_of_memory,
    "cuda.graph_oom": _graphs_failed,
    "vllm.sampler_oom": _sampler,
    "vllm.profile_race": _again,
    "nccl.peer_access": without_peers,
    "nccl.timeout": without_peers,
    HANG: without_peers,
    "nccl.unnamed": without_peers,
    "nccl.shm": without_shared_ram,
    "nccl.out_of_memory": _out_of_memory,
    "torch.rendezvous": at_home,
    "wsl.uva": _pinned,
    "vllm.bf16": _float16,
    "vllm.unknown_flag": _without_flag,
    "vllm.bad_value": _without_flag,
    "vllm.mm_chunk": _whole_pictures,
    "vllm.encoder_cache": _whole_pictures,
    "vllm.cpu_kv": _ram_for_pool,
    "kernel.oom_kill": _less_ram,
    "kernel.cgroup_oom": _less_ram,
    "kernel.killed": _less_ram,
}


# --- how settings are lowered ------------------------------------------------------------------------------


def _less(
    case: Case, first: tuple[Mover, ...] = (), missing: int | None = None, *, all_of_it: bool = False
) -> Answers:
    """Settings that free ``missing`` bytes, or one step where that is not known.

    Where all of them together free less, they are an answer still, unless ``all_of_it`` has to be freed.
    """
    most = total(case, case.settings) - (missing or 1)

    def enough(settings: Settings) -> bool:
        return total(case, settings) <= most

    way: list[Settings] = []
    for settings in moves.downwards(case.model, case.settings, first, case.fixed):
        way.append(settings)
        if enough(settings):
            yield answered(case, moves.without_needless(case.settings, way, case.fixed, enough))
            return
    if way and not all_of_it:
        yield answered(case, way[-1])


def _apart(case: Case, movers: tuple[Mover, ...]) -> Answers:
    """These moves alone, one at a time: what else could be lowered is not what lacks."""
    for mover in movers:
        lower = mover(case.model, case.settings)
        if lower is not None:
            yield answered(case, lower)
