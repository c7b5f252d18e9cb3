"""All quantizations of a repository of GGUF files on one machine: what each takes, leaves and promises."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vlfit.checkpoint import hub
from vlfit.checkpoint.gguf.places import cached_models_of
from vlfit.checkpoint.gguf.repository import GgufRepository, Quantization, list_repository
from vlfit.errors import HubError, NotDownloaded, UsageError, VlfitError
from vlfit.machine.model import Machine
from vlfit.plan.model_choice import WITHOUT_GPU, type_rank
from vlfit.plan.model_lookup import found_gguf_model, read_gguf_repository
from vlfit.plan.planner import find_plan
from vlfit.plan.plans import Plan
from vlfit.plan.processors import is_ram
from vlfit.plan.recommend import recommended
from vlfit.plan.report import VERSION, plan_to_json
from vlfit.plan.shapes import Model
from vlfit.plan.wishes import Wishes


@dataclass(frozen=True, slots=True)
class PublishedKld:
    """A mean Kullback-Leibler divergence from the bf16 model that somebody published, and where.

    Of one file: the same type of another publisher is another file, with another divergence.
    """

    mean: float
    source: str


_REDDIT_9B = "reddit.com/r/LocalLLaMA/comments/1rr72lr (March 2026, 46 files, one author)"
# By repository and type, in lower case.
PUBLISHED_KLD = {
    ("bartowski/qwen_qwen3.5-9b-gguf", "q4_k_m"): PublishedKld(0.0087, _REDDIT_9B),
    ("bartowski/qwen_qwen3.5-9b-gguf", "q4_k_s"): PublishedKld(0.0108, _REDDIT_9B),
    ("bartowski/qwen_qwen3.5-9b-gguf", "iq4_xs"): PublishedKld(0.0127, _REDDIT_9B),
    ("unsloth/qwen3.5-9b-gguf", "q4_k_m"): PublishedKld(0.0222, _REDDIT_9B),
    ("lmstudio-community/qwen3.5-9b-gguf", "q4_k_m"): PublishedKld(0.0353, _REDDIT_9B),
}


@dataclass(frozen=True, slots=True)
class QuantizationPlan:
    """One quantization on a machine.

    ``download``: bytes of its files and its vision tower's. ``plan``: None if it cannot be run; ``problem``
    then says why. ``kld``: published for this file; None if nothing is known.
    """

    type: str
    download: int
    plan: Plan | None
    problem: str = ""
    kld: PublishedKld | None = None


@dataclass(frozen=True, slots=True)
class RepositoryPlans:
    """The quantizations of ``repository``, the largest first, and the ``best`` of them.

    ``best``: the one to take; of those that do not fit the one that lacks the least; None if none can be run.
    ``unlisted``: why the hub could not be asked, in which case they are those on this computer.
    """

    repository: GgufRepository
    quantizations: tuple[QuantizationPlan, ...]
    best: Plan | None
    unlisted: HubError | None = None


def plan_quantizations(name: str, machine: Machine, wishes: Wishes) -> RepositoryPlans:
    """Plan every quantization of the repository ``org/name`` (or ``@revision``) for ``machine``.

    Reads headers from the hub: 0.4 MB, and 0.14 MB for each type beyond the first. If the hub cannot be
    asked, those in its cache are planned. Raises ``HubError`` or a subclass if there are none there,
    ``DeviceError`` without a GPU, ``UsageError`` for wishes that none can meet.
    """
    unlisted = None
    try:
        repository = list_repository(name)
        found = [
            _Found(each, _download(repository, each), model)
            for each, model in read_gguf_repository(repository, repository.quantizations)
        ]
    except HubError as error:
        unlisted = error
        found = _found_here(name)
        if not found:
            raise
        repository = GgufRepository(name, tuple(each.quantization for each in found), {})
    rows, refusals = [], []
    for each in found:
        plan, problem = None, ""
        if isinstance(each.model, VlfitError):
            problem = each.model.message
        else:
            try:
                plan = find_plan([each.model], machine, wishes)
            except UsageError as error:
                problem = error.message
                refusals.append(error)
        kld = _published(repository, each.quantization)
        rows.append(QuantizationPlan(each.quantization.type, each.download, plan, problem, kld))
    if refusals and not any(row.plan for row in rows):
        raise refusals[0]
    return RepositoryPlans(repository, tuple(rows), _best(rows), unlisted)


@dataclass(frozen=True, slots=True)
class _Found:
    """A quantization, the bytes of all its files, and its model, or why there is none."""

    quantization: Quantization
    download: int
    model: Model | VlfitError


def _found_here(name: str) -> list[_Found]:
    """The quantizations of a repository that are whole in the hub's cache, the largest first."""
    found = []
    for each in cached_models_of(*hub.split_name(name)):
        if each.problem:
            continue
        model: Model | VlfitError
        try:
            model = found_gguf_model(each)
        except VlfitError as error:
            model = error
        kind = each.name.partition(":")[2].partition("@")[0]
        found.append(_Found(Quantization(kind, (each.path.name,), (each.bytes,)), each.bytes, model))
    return sorted(found, key=lambda each: -each.download)


def choose_quantization(name: str, machine: Machine) -> tuple[str, str]:
    """The quantization of ``org/name`` to download for ``machine``, as ``org/name:TYPE``, and why.

    The best by ``plan_quantizations``; without a GPU, if none fits, the usual one, for another computer. The
    reason is a phrase. Raises ``NotDownloaded`` if none can be run, or none fits the GPU, and ``HubError``.
    """
    plans = plan_quantizations(name, machine, Wishes())
    best = plans.best
    if best is None:
        problem = plans.quantizations[0].problem
        raise NotDownloaded(f"vlfit runs none of the files of {name}: {problem}", "Name another model.")
    if is_ram(best.gpu):
        if best.fits:
            return best.model.name, WITHOUT_GPU
        usual = min((row.plan for row in plans.quantizations if row.plan is not None), key=type_rank)
        return usual.model.name, "none fits the RAM of this computer, and 4 bits are the usual size"
    if not best.fits:
        raise NotDownloaded(
            f"no quantization of {name} fits this computer; the nearest is {best.model.weights}",
            f"vlfit plan {name} shows what would make room; {best.model.name} downloads it all the same.",
        )
    return best.model.name, f"it fits {best.gpu.name} with {best.headroom >> 20:,} MiB left"


def repository_to_json(plans: RepositoryPlans) -> dict[str, Any]:
    """The plans of a repository as a JSON object; docs/plan.md describes its fields."""
    return {
        "version": VERSION,
        "repository": plans.repository.name,
        "local_only": plans.unlisted is not None,
        "recommended": plans.best.model.name if plans.best is not None and plans.best.fits else None,
        "quantizations": [
            {
                "type": row.type,
                "download": row.download,
                "problem": row.problem or None,
                "kld": None if row.kld is None else {"mean": row.kld.mean, "source": row.kld.source},
                "plan": None if row.plan is None else plan_to_json(row.plan),
            }
            for row in plans.quantizations
        ],
    }


def _best(rows: Sequence[QuantizationPlan]) -> Plan | None:
    made = [row.plan for row in rows if row.plan is not None]
    ranked = sorted(made, key=type_rank)
    if ranked and ranked[0].fits and is_ram(ranked[0].gpu):
        return ranked[0]  # not the fastest, if none is quick
    return recommended(ranked) or max(ranked, key=lambda plan: plan.headroom, default=None)


def _download(repository: GgufRepository, quantization: Quantization) -> int:
    return quantization.bytes + repository.mmprojs.get(repository.mmproj_for(quantization) or "", 0)


def _published(repository: GgufRepository, quantization: Quantization) -> PublishedKld | None:
    name, _ = hub.split_name(repository.name)
    return PUBLISHED_KLD.get((name.lower(), quantization.type.lower()))
