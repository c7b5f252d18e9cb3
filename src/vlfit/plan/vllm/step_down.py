"""The next cheaper plan after a failed start, by the cause that the doctor found in its log.

No plan is returned twice, and stepping ends: every proposal lowers a setting or is made once (``moves.py``).
What a person fixed changes last, and ``NextPlan.broken`` says so.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from vlfit.machine.model import Machine
from vlfit.plan.calibration import with_bandwidth
from vlfit.plan.candidates import choice_of
from vlfit.plan.planner import fitting_plan
from vlfit.plan.plans import Plan
from vlfit.plan.processors import ram_as_gpu
from vlfit.plan.shapes import Model
from vlfit.plan.vllm import cost, moves
from vlfit.plan.vllm.args import (
    LOOPBACK,
    OLDER_RUNNER,
    OLDER_SHARING,
    SOCKETS,
    VllmSettings,
    as_vllm_settings,
)
from vlfit.plan.vllm.command import budget_bytes, memory_utilization
from vlfit.plan.vllm.cost import tensor_parallel_problem
from vlfit.plan.vllm.cost_model import COSTS, placement_on_cards, placement_on_cpu
from vlfit.plan.vllm.flags import PINNED, PINNED_FROM, chosen_version
from vlfit.plan.vllm.lines import vllm_lines
from vlfit.plan.vllm.moves import StepDown
from vlfit.plan.vllm.placement import CardChoice, CardGroup
from vlfit.plan.wishes import Wishes
from vlfit.units import GIB, format_bytes

# Wishes that stay fixed, by their names in ``VllmSettings`` or ``VllmArgs``.
_FIXED = ("context", "image_tokens", "sequences", "kv_tokens", "chunk", "data_parallel")


@dataclass(frozen=True, slots=True)
class Failure:
    """The cause of a failed start.

    - ``id``: of the doctor's rule that matched the log; "" if none did.
    - ``values``: the named groups of the rule's pattern, as the log prints them; sizes are in GiB.
    - ``stage``: what ran when memory was short: pictures, pass, graphs, sampler, weights or requests; "" if
      not known.
    """

    id: str
    values: Mapping[str, str] = field(default_factory=dict)
    stage: str = ""

    def number(self, name: str) -> float | None:
        """``values[name]`` as a number; None if it is missing or no number."""
        try:
            return float(self.values[name])
        except (KeyError, ValueError):
            return None


@dataclass(frozen=True, slots=True)
class FailedStart:
    """A failed start: its ``failure`` and ``plan``, and what the next plan must respect.

    ``machine``: as it is now. ``wishes``, ``typed_flags``: what the person fixed, and typed for vLLM.
    """

    failure: Failure
    plan: Plan
    machine: Machine
    wishes: Wishes
    typed_flags: tuple[str, ...]

    @property
    def model(self) -> Model:
        return self.plan.model

    @property
    def settings(self) -> VllmSettings:
        return as_vllm_settings(self.plan.settings)

    @property
    def fixed_names(self) -> frozenset[str]:
        """Names of the fields of ``wishes`` that the person fixed; ``kv_bytes`` counts as ``kv_tokens``."""
        fixed = {name for name in _FIXED if getattr(self.wishes, name) is not None}
        return frozenset(fixed | ({"kv_tokens"} if self.wishes.kv_bytes is not None else set()))

    @property
    def version(self) -> tuple[int, int, int]:
        """The version number of the planned vLLM."""
        return chosen_version(self.settings.vllm.version or None).number


@dataclass(frozen=True, slots=True)
class Proposal:
    """Settings to try next, and a ``description`` of what they change and cost.

    ``broken``: the wishes that they break, each as ``--context 8192 -> 4096``.
    """

    settings: VllmSettings
    description: str
    broken: tuple[str, ...] = ()


Proposals = Iterable[Proposal]


def make_proposal(case: FailedStart, settings: VllmSettings, why: str = "") -> Proposal:
    """A proposal of ``settings``, described by how they differ from those of ``case``.

    ``why``: added to the description in brackets, unless "".
    """
    words = moves.describe_change(case.settings, settings) + (f" ({why})" if why else "")
    return Proposal(settings, words, moves.broken_wishes(case.settings, settings, case.fixed_names))


def with_environment(settings: VllmSettings, variable: str) -> VllmSettings:
    """A copy of ``settings`` in which vLLM is started with one more environment variable.

    ``variable``: as ``NAME=VALUE``.
    """
    args = settings.vllm
    return replace(settings, vllm=replace(args, environment=args.environment | {variable}))


def vllm_bytes(case: FailedStart, settings: VllmSettings) -> int:
    """Bytes of the ledger of ``case.model`` with ``settings`` on its card, without the desktop."""
    lines = vllm_lines(case.model, case.plan.gpu, settings)
    return sum(line.bytes for line in lines if line.line != "desktop")


# --- several cards (``doctor/rules/multi_gpu.py``) ----------------------------------------------------------


def without_peers(case: FailedStart) -> Proposals:
    """Proposals for cards that cannot reach each other, or hang; none for one card.

    In order: share RAM in NCCL's older way, if the log points to it; no access to each other's memory; a
    copy of the model on each card, if it fits one.
    """
    args = case.settings.vllm
    if args.cards == 1:
        return
    if "shm.cc" in case.failure.values.get("place", ""):
        words = f"{OLDER_SHARING}: NCCL shares RAM between cards as it did before 2.24"
        yield Proposal(with_environment(case.settings, OLDER_SHARING), words)
    if not args.no_peer_access:
        words = "cards talk through RAM and do not read each other's memory: adding up takes longer"
        yield Proposal(replace(case.settings, vllm=replace(args, no_peer_access=True)), words)
    yield from _copy_per_card(case)


def without_shared_ram(case: FailedStart) -> Proposals:
    """Proposals for a full /dev/shm: communicate over sockets; then a copy of the model on each card."""
    if case.settings.vllm.cards > 1:
        words = f"{SOCKETS}: cards talk over the network's sockets, slower, as /dev/shm is full"
        yield Proposal(with_environment(case.settings, SOCKETS), words)
    yield from _copy_per_card(case)


def _copy_per_card(case: FailedStart) -> Proposals:
    """A copy on each card, if the model fits one: copies do not communicate."""
    args = case.settings.vllm
    if args.tensor == 1 or case.wishes.tensor_parallel is not None:
        return
    copies = case.wishes.data_parallel or args.cards
    alone = replace(case.settings, vllm=replace(args, tensor=1, data=copies, split_tower=False))
    if vllm_bytes(case, alone) <= case.plan.gpu.free:
        words = f"a copy of the model on each of {copies} cards: no layers are shared"
        yield Proposal(alone, words)


def on_loopback(case: FailedStart) -> Proposals:
    """The proposal for workers that cannot reach each other at vLLM's address: use the loopback address."""
    words = f"{LOOPBACK}: the workers meet on this computer, whatever its network says"
    yield Proposal(with_environment(case.settings, LOOPBACK), words)


def over_more_cards(case: FailedStart) -> Proposals:
    """Proposals for weights that do not fit: share layers over more cards, with fewer copies of the model.

    No proposals if the person fixed either number.
    """
    args = case.settings.vllm
    if case.wishes.tensor_parallel is not None or case.wishes.data_parallel is not None:
        return
    for tensor in range(args.tensor + 1, args.cards + 1):
        if not tensor_parallel_problem(case.model, tensor):
            more = replace(args, tensor=tensor, data=args.cards // tensor)
            words = f"each layer over {tensor} cards instead of {args.tensor}: {more.data} copies instead of "
            yield Proposal(replace(case.settings, vllm=more), f"{words}{args.data}")


# --- the next plan ------------------------------------------------------------------------------------------


def replan(plan: Plan, settings: VllmSettings, machine: Machine) -> Plan:
    """``plan`` with other ``settings`` on the same cards, with the free memory that they have now.

    ``machine``: as it is now; if it has none of the cards, they are taken as they were. Whether the plan fits
    is not checked.
    """
    version = chosen_version(settings.vllm.version or None)
    if settings.vllm.on_cpu:
        gpu = ram_as_gpu(machine)
        choice = choice_of(gpu, COSTS, settings, plan.model)
        return fitting_plan(placement_on_cpu(choice, gpu, version), machine, COSTS)
    had = plan.gpus or (plan.gpu,)
    wanted = {gpu.index for gpu in had}
    now = [with_bandwidth(gpu) for gpu in machine.gpus if gpu.index in wanted]
    group = CardGroup(tuple(sorted(now or had, key=lambda gpu: -gpu.free)))
    gpus = group.emptiest(settings.vllm.cards)
    taken = CardChoice(choice_of(gpus[0], COSTS, settings, plan.model), group, gpus)
    return fitting_plan(placement_on_cards(taken, machine, version), machine, COSTS)


KV_TOO_SMALL = "vllm.kv_too_small"  # the doctor's rule for a KV cache that holds no request
HANG = "vllm.waits_for_peers"  # and for cards that wait for each other forever
_ONCE_MORE = 1  # retries of the same plan after a race
_NEEDED = {"--max-model-len"}  # without it vLLM plans for the model's own length, which never fits


@dataclass(frozen=True, slots=True)
class NextPlan:
    """The ``plan`` to start next, and ``what_changed``, with what it costs, in words.

    ``broken``: the wishes that the plan breaks, each as ``--context 8192 -> 4096``.
    """

    plan: Plan
    what_changed: str
    broken: tuple[str, ...] = ()


def broken_wish_warnings(step: NextPlan) -> tuple[str, ...]:
    """A warning for each wish in ``step.broken``."""
    return tuple(f"NOT AS YOU ASKED: {wish}" for wish in step.broken)


def next_plan(
    failure: Failure,
    tried: Sequence[Plan],
    machine: Machine,
    wishes: Wishes,
    typed_flags: Sequence[str] = (),
) -> NextPlan | None:
    """The plan to start after the last of ``tried`` failed with ``failure``.

    None if there is no remedy for ``failure.id``, or if all that it proposes was tried. ``machine``: as it is
    now. ``wishes``: change only if nothing else is left. ``typed_flags``: words that the person typed for
    vLLM, which are never left out.
    """
    case = FailedStart(failure, tried[-1], machine, wishes, tuple(typed_flags))
    seen = {plan.settings for plan in tried}
    propose = _PROPOSALS.get(failure.id)
    if propose is None:
        return None
    for each in propose(case):
        if each.settings not in seen:
            return NextPlan(replan(case.plan, each.settings, machine), each.description, each.broken)
    return None


# --- proposals by cause -------------------------------------------------------------------------------------


def _shorter_context(case: FailedStart) -> Proposals:
    """For a KV cache smaller than one context: a larger cache if the plan chose its size.

    Else a context that it holds, by vLLM's own count if the log has one.
    """
    available = case.failure.number("available")
    most = case.failure.number("estimate") or case.failure.number("stored")
    if most is None and available is not None and available <= 0:
        yield from _free_memory(case)
        return
    length, needed = case.failure.number("length"), case.failure.number("needed")
    if most is None and length and needed and available:
        # Two digits of GiB are printed: one of them less is held for sure.
        most = length * (available - 0.01) / needed
    pool = cost.pool_tokens(case.settings)
    if most and most > 0:
        yield from _larger_pool(case, round(pool * case.settings.context / most))
    else:
        most = pool - cost.LARGEST_BLOCK
    shorter = moves.context_to(case.model, case.settings, int(most))
    if shorter is not None:
        # What vLLM counted is of this pool, which a shorter context alone would make smaller, too.
        shorter = replace(shorter, vllm=replace(shorter.vllm, kv_tokens=pool))
        yield make_proposal(case, shorter, f"the KV cache of {pool} tokens holds no more")
    elif case.settings.vllm.kv_tokens is not None:
        larger = replace(case.settings, vllm=replace(case.settings.vllm, kv_tokens=None))
        if vllm_bytes(case, larger) <= case.plan.gpu.free:
            yield make_proposal(case, larger, f"{pool} tokens hold no picture with a question and an answer")


def _larger_pool(case: FailedStart, tokens: int) -> Proposals:
    """A larger KV cache, once, unless its size was fixed: vLLM may count in larger blocks than the plan."""
    args = case.settings.vllm
    larger = replace(case.settings, vllm=replace(args, kv_tokens=tokens + cost.LARGEST_BLOCK))
    if args.kv_tokens is None and vllm_bytes(case, larger) <= case.plan.gpu.free:
        yield make_proposal(case, larger, f"vLLM counts so many for {case.settings.context}")


def _within_positions(case: FailedStart) -> Proposals:
    """For a context beyond the model's positions."""
    shorter = moves.context_to(case.model, case.settings, int(case.failure.number("most") or 0))
    if shorter is not None:
        yield make_proposal(case, shorter, "the model was made for no more")


def _less_free_memory(case: FailedStart) -> Proposals:
    """For less free memory than planned: smaller settings, else the share that is free."""
    free, total = case.failure.number("free"), case.failure.number("total")
    if free is None or not total:
        return
    need = budget_bytes(case.plan.ledger)
    missing = round(need - free * GIB + total * GIB / 1000)
    yield from _free_memory(case, missing=max(missing, 1), all_of_it=True)
    # Nothing else gives: what vLLM allocates at its start may fit still, without what it grows by later.
    later = sum(line.bytes for line in case.plan.ledger if line.line == "growth")
    most = int(free / total * 1000) / 1000
    now = case.settings.vllm.max_utilization or memory_utilization(case.plan.ledger, case.plan.gpu)
    if need - later <= free * GIB and 0 < most < now:
        words = (
            f"share {now:g} -> {most:g}, all that is free: {format_bytes(later)} that vLLM grows by at its "
            "first requests are not counted any more; close what else uses the card"
        )
        yield Proposal(replace(case.settings, vllm=replace(case.settings.vllm, max_utilization=most)), words)


def _no_kv_cache(case: FailedStart) -> Proposals:
    """For a budget filled by weights and profiling run: settings that make the profiling run smaller."""
    kv = case.failure.number("kv")
    pool = next(line.bytes for line in case.plan.ledger if line.line == "kv_cache")
    yield from _free_memory(case, missing=None if kv is None else round(abs(kv) * GIB) + pool)


def _out_of_memory(case: FailedStart) -> Proposals:
    """For memory that ran out: less of what was running then."""
    first: dict[str, tuple[StepDown, ...]] = {
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
        yield from _single_steps(case, (moves.fewer_requests,))
    yield from _free_memory(case, first.get(case.failure.stage, ()))


def _without_graphs(case: FailedStart) -> Proposals:
    yield from _free_memory(case, (moves.no_graphs,))


def _fewer_in_warmup(case: FailedStart) -> Proposals:
    """Half of the requests of the warm-up."""
    rows = case.failure.number("rows")
    if rows:
        fewer = moves.requests_to(case.settings, int(rows) // 2)
        if fewer is not None:
            yield make_proposal(case, fewer, f"there was no room to choose tokens for {int(rows)} at once")
    yield from _free_memory(case, (moves.fewer_requests,))


def _retry(case: FailedStart) -> Proposals:
    """The same plan once more: nothing is wrong with it."""
    args = case.settings.vllm
    if args.retries < _ONCE_MORE:
        words = "the same once more: another program gave memory back while vLLM measured its own"
        yield Proposal(replace(case.settings, vllm=replace(args, retries=args.retries + 1)), words)


def _pinned_memory(case: FailedStart) -> Proposals:
    """Pinned memory where this version has the variable; then, or else, the older runner."""
    set_now = case.plan.environment
    if OLDER_RUNNER in set_now:
        return
    if PINNED not in set_now and case.version >= PINNED_FROM:
        words = f"{PINNED}=1: WSL2 leaves pinned memory off, and this version needs it"
        yield Proposal(with_environment(case.settings, f"{PINNED}=1"), words)
    words = f"{OLDER_RUNNER}=0: the older runner, which needs no pinned memory"
    yield Proposal(with_environment(case.settings, f"{OLDER_RUNNER}=0"), words)


def _float16(case: FailedStart) -> Proposals:
    args = case.settings.vllm
    if args.dtype != "float16":
        words = "computed in float16, as the card has no bfloat16: the same bytes"
        yield Proposal(replace(case.settings, vllm=replace(args, dtype="float16")), words)


def _without_flag(case: FailedStart) -> Proposals:
    """Leave out flags that this vLLM does not know; never one that it needs or that the person typed."""
    said = f"{case.failure.values.get('flags', '')} {case.failure.values.get('flag', '')}"
    named = [word.split("=")[0] for word in said.replace("/", " ").replace(",", " ").split()]
    flags = {flag.flag: flag for flag in case.plan.flags}
    ours = [name for name in dict.fromkeys(named) if name in flags and name not in _NEEDED]
    theirs = [name for name in named if name.startswith("--") and name not in flags]
    if not ours or theirs or any(word.split("=")[0] in ours for word in case.typed_flags):
        return
    args = replace(case.settings.vllm, omitted_flags=case.settings.vllm.omitted_flags | set(ours))
    whose = "; ".join(f"{name} was there for {flags[name].line}: {flags[name].why}" for name in ours)
    yield Proposal(
        replace(case.settings, vllm=args),
        f"without {', '.join(ours)}, which this vLLM does not take ({whose})",
    )


def _whole_pictures(case: FailedStart) -> Proposals:
    """For pictures that have more tokens than a pass and cannot be split."""
    smaller = moves.smaller_pictures(case.model, case.settings)
    while smaller is not None and smaller.image_tokens > case.settings.chunk:
        smaller = moves.smaller_pictures(case.model, smaller)
    if smaller is not None:
        yield make_proposal(case, smaller, "a picture may not have more tokens than a pass")


def _less_ram(case: FailedStart) -> Proposals:
    """For RAM that ran out: fewer processes; with the build for processors everything else, too."""
    if not case.settings.vllm.on_cpu:
        yield from _single_steps(case, (moves.single_api_server, moves.fewer_copies))
        return
    yield from _free_memory(case, (moves.smaller_pool,))


def _less_ram_for_kv_cache(case: FailedStart) -> Proposals:
    """For less RAM than the KV cache needs."""
    yield from _free_memory(case, (moves.smaller_pool, moves.fewer_requests))


_PROPOSALS: Mapping[str, Callable[[FailedStart], Proposals]] = {
    KV_TOO_SMALL: _shorter_context,
    "vllm.kv_too_small_v0": _shorter_context,
    "vllm.max_len_over_model": _within_positions,
    "vllm.free_lt_util": _less_free_memory,
    "vllm.kv_negative": _no_kv_cache,
    "vllm.no_kv": _no_kv_cache,
    "torch.oom": _out_of_memory,
    "cuda.oom": _out_of_memory,
    "cuda.graph_oom": _without_graphs,
    "vllm.sampler_oom": _fewer_in_warmup,
    "vllm.profile_race": _retry,
    "nccl.peer_access": without_peers,
    "nccl.timeout": without_peers,
    HANG: without_peers,
    "nccl.unnamed": without_peers,
    "nccl.shm": without_shared_ram,
    "nccl.out_of_memory": _out_of_memory,
    "torch.rendezvous": on_loopback,
    "wsl.uva": _pinned_memory,
    "vllm.bf16": _float16,
    "vllm.unknown_flag": _without_flag,
    "vllm.bad_value": _without_flag,
    "vllm.mm_chunk": _whole_pictures,
    "vllm.encoder_cache": _whole_pictures,
    "vllm.cpu_kv": _less_ram_for_kv_cache,
    "kernel.oom_kill": _less_ram,
    "kernel.cgroup_oom": _less_ram,
    "kernel.killed": _less_ram,
}


# --- how settings are lowered ------------------------------------------------------------------------------


def _free_memory(
    case: FailedStart,
    first: tuple[StepDown, ...] = (),
    missing: int | None = None,
    *,
    all_of_it: bool = False,
) -> Proposals:
    """Settings that free ``missing`` bytes; one step down if that is unknown.

    If all steps together free less, they are proposed still, unless ``all_of_it`` has to be freed.
    """
    most = vllm_bytes(case, case.settings) - (missing or 1)

    def enough(settings: VllmSettings) -> bool:
        return vllm_bytes(case, settings) <= most

    way: list[VllmSettings] = []
    for settings in moves.step_down(case.model, case.settings, first, case.fixed_names):
        way.append(settings)
        if enough(settings):
            yield make_proposal(case, moves.restore_settings(case.settings, way, case.fixed_names, enough))
            return
    if way and not all_of_it:
        yield make_proposal(case, way[-1])


def _single_steps(case: FailedStart, movers: tuple[StepDown, ...]) -> Proposals:
    """Each of ``movers`` by itself."""
    for mover in movers:
        lower = mover(case.model, case.settings)
        if lower is not None:
            yield make_proposal(case, lower)
