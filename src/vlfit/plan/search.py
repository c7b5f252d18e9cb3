"""From a machine, a model and wishes to a plan: what is fixed stays so, the rest is chosen in a stated order.

The order: the better model first, then context, image tokens, sequences, weights format (the more exact), and
last tokens of a pass, which cost only time. Of each the largest that fits is taken, down the steps below.
Knows that order and those steps. Does not know what a line costs (``ledger.py``) or how to get memory back
(``changes.py``).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from vlfit.checkpoint.catalog import FORMATS
from vlfit.errors import DeviceError, UsageError
from vlfit.machine.model import Gpu, Machine
from vlfit.plan.calibration import with_bandwidth
from vlfit.plan.changes import Change, Refused, cheapest
from vlfit.plan.commands import start_of
from vlfit.plan.ledger import BACKENDS, NATIVE, TRANSFORMERS, VLLM, Line, Settings, ledger
from vlfit.plan.model import Model
from vlfit.plan.speed import Speed, predict
from vlfit.plan.vllm.command import Flag, remarks
from vlfit.plan.vllm.costs import LEAST_PIXELS, pixels_of_token
from vlfit.plan.vllm.versions import Version, check_card, chosen_version, parse_version

CONTEXTS = (8192, 4096, 2048)
IMAGE_TOKENS = (2560, 1280, 1024, 768, 512, 256)
SEQUENCES = (4, 2, 1)
CHUNKS = (1024, 512, 256, 128)
VLLM_CHUNKS = (2048, 1024, 512)
_LEAST_CONTEXT = 16  # of ``EngineOptions``
_LEAST_IMAGE_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a person fixed; None leaves it to the plan. Raises ``UsageError`` for what makes no sense."""

    context: int | None = None
    image_tokens: int | None = None
    sequences: int | None = None
    weights: str | None = None
    backend: str | None = None
    vllm_version: str | None = None

    def __post_init__(self) -> None:
        least = {"context": _LEAST_CONTEXT, "image_tokens": _LEAST_IMAGE_TOKENS, "sequences": 1}
        for name, lowest in least.items():
            value = getattr(self, name)
            if value is not None and value < lowest:
                option = name.replace("_", "-")
                raise UsageError(f"--{option} is {value}", f"it must be at least {lowest}", param=name)
        for name, known in (("weights", FORMATS), ("backend", BACKENDS)):
            value = getattr(self, name)
            if value is not None and value not in known:
                raise UsageError(
                    f"--{name} is {value!r}", f"plans are made for {', '.join(known)}", param=name
                )
        if self.vllm_version is not None:
            if self.backend != VLLM:
                raise UsageError(
                    "--vllm-version says which vLLM a plan is for",
                    f"add --backend {VLLM}",
                    param="vllm_version",
                )
            parse_version(self.vllm_version)
        if self.context and self.image_tokens and self.image_tokens >= self.context:
            raise UsageError(
                f"a picture of {self.image_tokens} tokens fills a context of {self.context}",
                "ask for a larger --context or fewer --image-tokens",
            )


@dataclass(frozen=True, slots=True)
class Plan:
    """One model on one GPU: settings, ledger, speed, and what to change if it does not fit."""

    model: Model
    backend: str
    gpu: Gpu
    wsl2: bool
    settings: Settings
    ledger: tuple[Line, ...]
    speed: Speed | None
    command: tuple[str, ...] | None
    environment: dict[str, str] = field(default_factory=dict)
    changes: tuple[Change, ...] = ()
    flags: tuple[Flag, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """Bytes of all lines."""
        return sum(line.bytes for line in self.ledger)

    @property
    def headroom(self) -> int:
        """Bytes left over; negative: the deficit."""
        return self.gpu.total - self.total

    @property
    def fits(self) -> bool:
        return self.headroom >= 0

    @property
    def rank(self) -> tuple[Any, ...]:
        """Sorts plans, best first: what fits, sees pictures, knows more, then the order of preference."""
        settings = self.settings
        preference = (settings.context, settings.image_tokens, settings.sequences)
        format_rank = FORMATS.index(self.model.weights) if self.model.weights in FORMATS else len(FORMATS)
        return (
            not self.fits,
            self.model.vision is None,
            -self.model.parameters,
            tuple(-value for value in preference),
            format_rank,
        )


def plan(
    models: list[Model], machine: Machine, wishes: Wishes, others: Callable[[], list[Model]] = list
) -> Plan:
    """The best plan for one of ``models`` (one model in several formats); it may not fit, and then says why.

    ``others`` gives models that may be proposed instead; it is asked if the plan does not fit. Raises
    ``DeviceError`` where there is no GPU, and ``UsageError`` for wishes that this model cannot have.
    """
    gpu = emptiest(machine)
    version = chosen_version(wishes.vllm_version) if wishes.backend == VLLM else None
    candidates = _runnable(models, wishes, gpu, version)
    smallest: tuple[int, Model, str, Settings] | None = None
    for settings, model, backend in _candidates(candidates, wishes):
        lines = ledger(model, gpu, backend, settings)
        spent = sum(line.bytes for line in lines)
        if spent <= gpu.total:
            return _finished(model, backend, machine, gpu, settings, lines, version)
        if smallest is None or spent < smallest[0]:
            smallest = (spent, model, backend, settings)
    if smallest is None:
        raise UsageError(
            f"no settings are left to try for {models[0].name if models else 'this model'}",
            "wish for a smaller --context or fewer --image-tokens",
        )
    _, model, backend, settings = smallest
    return _refused(model, backend, machine, gpu, settings, tuple(others()), version)


def emptiest(machine: Machine) -> Gpu:
    """The GPU with the most free memory. Raises ``DeviceError`` where there is none."""
    if not machine.gpus:
        raise DeviceError(
            f"there is no GPU to plan for: {machine.no_gpu_reason}",
            'Plan for a card that you might use: --gpu "RTX 5060" --desktop 951MiB, or --machine FILE.',
        )
    return with_bandwidth(max(machine.gpus, key=lambda gpu: gpu.free))


def _runnable(
    models: list[Model], wishes: Wishes, gpu: Gpu, version: Version | None
) -> list[tuple[Model, str]]:
    """Each model with its backend; of several, those that it runs on this GPU. Raises if it runs none."""
    found, refusals = [], []
    for model in models:
        try:
            backend = _backend(model, wishes)
            if version is not None:
                _check_pictures(model, wishes)
                check_card(model, gpu.name, gpu.compute_capability, version)
            found.append((model, backend))
        except UsageError as error:
            refusals.append(error)
    if refusals and not found:
        raise refusals[0]
    return found


def _backend(model: Model, wishes: Wishes) -> str:
    backend = wishes.backend or (NATIVE if model.vision is not None else TRANSFORMERS)
    if backend == NATIVE and model.vision is None:
        raise UsageError(
            f"{model.name} is a text-only model, which the native engine does not run",
            "leave out --backend, or take --backend transformers",
        )
    if backend == TRANSFORMERS and model.weights != FORMATS[0]:
        raise UsageError(
            f"{model.name} is in {model.weights}; transformers is planned for with bf16 weights only",
            "leave out --backend, or add --weights bf16",
        )
    return backend


def _check_pictures(model: Model, wishes: Wishes) -> None:
    """Raises ``UsageError`` for pictures smaller than the processor in vLLM makes them."""
    if model.vision is None or wishes.image_tokens is None:
        return
    least = LEAST_PIXELS // pixels_of_token(model.vision)
    if wishes.image_tokens < least:
        raise UsageError(
            f"--image-tokens is {wishes.image_tokens}; vLLM enlarges pictures of fewer than {least} tokens",
            f"use --image-tokens {least} or more",
            param="image_tokens",
        )


def _candidates(models: list[tuple[Model, str]], wishes: Wishes) -> Iterator[tuple[Settings, Model, str]]:
    """Settings in the order of preference, each with every format before the next step down."""
    sees = [model.vision is not None for model, _ in models]
    if not all(sees) and wishes.image_tokens is not None:
        raise UsageError(
            f"{models[sees.index(False)][0].name} is a text-only model and takes no pictures",
            "leave out --image-tokens",
        )
    for context in _steps(wishes.context, CONTEXTS):
        for image_tokens in _steps(wishes.image_tokens, IMAGE_TOKENS if all(sees) else (0,)):
            for sequences in _steps(wishes.sequences, SEQUENCES):
                for model, backend in models:
                    if not _possible(model, context, image_tokens, wishes):
                        continue
                    for chunk, graphs in _passes(backend, context):
                        settings = Settings(model.weights, context, image_tokens, sequences, chunk, graphs)
                        yield settings, model, backend


def _passes(backend: str, context: int) -> Iterator[tuple[int, bool]]:
    """Tokens of a pass, and whether there are CUDA graphs: both cost only time, and graphs are worth more."""
    if backend == TRANSFORMERS:
        yield context, False
    elif backend == NATIVE:
        yield from ((chunk, False) for chunk in CHUNKS)
    else:
        yield from ((chunk, graphs) for graphs in (True, False) for chunk in VLLM_CHUNKS)


def _steps(wish: int | None, steps: Iterable[int]) -> tuple[int, ...]:
    return tuple(steps) if wish is None else (wish,)


def _possible(model: Model, context: int, image_tokens: int, wishes: Wishes) -> bool:
    most = model.text.max_position_embeddings
    if context > most and wishes.context is not None:
        raise UsageError(
            f"a context of {context} tokens was asked for; {model.name} was made for at most {most}",
            f"use --context {most} or less",
        )
    return context <= most and image_tokens < context


def _finished(
    model: Model,
    backend: str,
    machine: Machine,
    gpu: Gpu,
    settings: Settings,
    lines: tuple[Line, ...],
    version: Version | None,
) -> Plan:
    start = start_of(model, backend, settings, lines, machine, gpu, version)
    return Plan(
        model=model,
        backend=backend,
        gpu=gpu,
        wsl2=machine.host.wsl2,
        settings=settings,
        ledger=lines,
        speed=predict(model, gpu, backend, settings),
        command=None if start is None else start.words,
        environment={} if start is None else start.environment,
        flags=() if start is None else start.flags,
        remarks=_remarks(version, settings, gpu),
    )


def _refused(
    model: Model,
    backend: str,
    machine: Machine,
    gpu: Gpu,
    settings: Settings,
    others: tuple[Model, ...],
    version: Version | None,
) -> Plan:
    lines = ledger(model, gpu, backend, settings)
    deficit = sum(line.bytes for line in lines) - gpu.total
    refused = Refused(model, gpu, machine.host, backend, settings, deficit, others)
    return Plan(
        model=model,
        backend=backend,
        gpu=gpu,
        wsl2=machine.host.wsl2,
        settings=settings,
        ledger=lines,
        speed=predict(model, gpu, backend, settings, deficit),
        command=None,
        changes=cheapest(refused, CONTEXTS, IMAGE_TOKENS),
        remarks=_remarks(version, settings, gpu),
    )


def _remarks(version: Version | None, settings: Settings, gpu: Gpu) -> tuple[str, ...]:
    return () if version is None else tuple(remarks(version, settings, capability=gpu.compute_capability))
