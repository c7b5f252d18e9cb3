"""A model of any architecture in this process: loaded by the plan, asked by one thread, one at a time.

The constructor goes in the order of the ledger, as the native engine's. Whatever a request does to the
model's code, the next one finds the engine as it was.
"""

import gc
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from vlfit.api.engine_options import EngineOptions
from vlfit.api.sampling_params import SamplingParams
from vlfit.api.stats import Counters, EngineAccount, EngineSettings, Holdings, Pool
from vlfit.backends.transformers import auto_model as loading
from vlfit.backends.transformers.auto_model import load_processor, transformers
from vlfit.backends.transformers.generate import Listener, Request, Words, run
from vlfit.backends.transformers.model_errors import in_words
from vlfit.backends.transformers.processor_prompts import AnyPrompt, Prompts
from vlfit.checkpoint.any_model import AnyCheckpoint
from vlfit.engine.device import dtype_for, named_device
from vlfit.engine.loop import stopped
from vlfit.engine.memory.budget import Budget
from vlfit.engine.memory.usage import gpu_uuid, resident_bytes, torch_statistics
from vlfit.engine.sampling.output_processor import Completion
from vlfit.errors import DoesNotFit, OutOfMemory, UsageError, VlfitError
from vlfit.machine.gpu import gpu_behind, read_gpus
from vlfit.machine.host import read_host
from vlfit.machine.model import Gpu
from vlfit.plan.ledger import Line
from vlfit.plan.transformers import cost as plan
from vlfit.units import format_bytes

if TYPE_CHECKING:
    from vlfit.api.outputs import Chunk


logger = logging.getLogger(__name__)

Progress = Callable[[str, float], None]

_BLOCK = 16  # tokens: in which the KV cache is told of, as there are no blocks
_WORDS = 128  # tokens that a question and a template take, which a picture leaves free


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of an engine. ``code``: the checkpoint's own Python files may be run."""

    checkpoint: AnyCheckpoint
    options: EngineOptions
    code: bool = False


class AnyEngine:
    """Everything but ``prepare``, ``prepare_text``, ``request`` and ``account`` belongs to one thread."""

    def __init__(self, load: Load, report: Progress) -> None:
        """Raises ``DoesNotFit`` before any weights are read, ``DeviceError``, ``UsageError`` and
        ``CheckpointError``.
        """
        checkpoint, options = load.checkpoint, load.options
        _check_options(options)
        report("importing transformers", 0.0)
        transformers()
        gpus = () if options.device == "cpu" else read_gpus()[0]  # as they are before CUDA is there
        self.checkpoint = checkpoint
        self.options = options
        self.device = named_device(options.device)
        config = loading.read_config(checkpoint, code=load.code)
        self.dtype = dtype_for(options.dtype, _stored(checkpoint, config), self.device)
        self._shape = plan.text_shape(config.to_dict())
        self.context = plan.context_of(self._shape, options.context)
        image_limit = min(options.image_tokens or self.context, self.context - _WORDS)
        self.resident_before = resident_bytes()
        self.gpu_uuid = gpu_uuid(self.device)
        self.gpu = _gpu(gpus, self.gpu_uuid, self.device)
        self.room = self._room(image_limit)
        self.lines: tuple[Line, ...] = self.room.lines if self.room else ()

        report("reading the processor's files", 0.0)
        processor = load_processor(checkpoint.folder, code=load.code)
        self.prompts = Prompts(processor, config, self.context, image_limit)
        report("loading weights", 0.1)
        spread = self.room is not None and self.room.weights_here < self.room.weights
        here = self.room.weights_here if self.room is not None and spread else None
        self._model = loading.load_model(checkpoint, self.device, self.dtype, here, code=load.code)
        self.generation = loading.take_over_generation(self._model, processor.tokenizer)
        self.words = Words(processor.tokenizer, frozenset(self.generation.eos_token_ids))
        self.weights = loading.weight_holdings(self._model, self.device)
        self.waiting = loading.waiting_layers(self._model)
        self.budget = Budget(self.device, self._limit() if options.keep_to_plan else None)
        self.running: Request | None = None
        self.counters = Counters()
        self.closing = False
        self.built = time.perf_counter()
        if options.keep_to_plan and self.device.type == "cuda":
            report("rehearsing the worst case", 0.9)
            rehearse(self)

    def price(self, prompt: AnyPrompt, sampling: SamplingParams) -> int:
        """How long the completion may become. Raises ``DoesNotFit``."""
        room = self.context - prompt.tokens
        if room < 1:
            raise DoesNotFit(
                f"the prompt is {prompt.tokens} tokens ({prompt.image_tokens} of them pictures); the context "
                f"holds {self.context}, with at least one for the answer",
                "send less text, fewer or smaller pictures, or start with a larger --context",
            )
        if sampling.max_tokens is None:
            return min(room, self.options.max_tokens)
        if sampling.max_tokens > room:
            raise DoesNotFit(
                f"max_tokens {sampling.max_tokens} and a prompt of {prompt.tokens} tokens are more than the "
                f"context of {self.context}",
                f"ask for at most {room} tokens, or start with a larger --context",
                param="max_tokens",
            )
        return sampling.max_tokens

    def request(
        self, prompt: AnyPrompt, sampling: SamplingParams, listener: Listener, asked: float | None = None
    ) -> Request:
        """A request that is ready to run. Any thread may ask for one."""
        most = self.price(prompt, sampling)
        completion = Completion(self.words.detokenizer(), sampling, self.words.eos_token_ids, most)
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        form = self.words.constraint(sampling.form)
        asked = time.perf_counter() if asked is None else asked
        return Request(prompt, sampling, most, completion, listener, seed, form, asked)

    def answer(self, request: Request) -> None:
        """Run ``request`` to its end, which its listener is told unless this raises: what the model's code
        raises, and ``EngineStopped`` if the engine is not to go on.
        """
        request.started = time.perf_counter()
        self.running = request
        try:
            last = run(
                self._model,
                self.device,
                self.dtype,
                request,
                self.words.token_text,
                self._told,
                lambda: request.cancelled or self.closing,
            )
        finally:
            self.running = None
        if last.finish_reason == "cancelled" and not request.cancelled:
            raise stopped()
        ended = "cancelled" if request.cancelled else "finished"
        self.counters = replace(self.counters, **{ended: getattr(self.counters, ended) + 1})
        request.listener(last)

    @property
    def kv_bytes(self) -> int:
        """Keys and values of a request as long as the context; 0 where nobody knows."""
        return 0 if self._shape is None else self._shape.kv_bytes(self.context, self.dtype.itemsize)

    def forget_what_was_done(self) -> None:
        """What was counted so far was nobody's request."""
        self.counters = Counters()

    def failed(self, memory: bool) -> None:
        """A request has failed. ``memory``: for want of it; what torch keeps in pieces is given back."""
        self.counters = replace(self.counters, failed=self.counters.failed + 1)
        if memory:
            self.budget.release()

    def let_go(self) -> None:
        """The model and its memory. Layers that wait in RAM are tied to themselves by accelerate's hooks."""
        self._model = None
        gc.collect()
        self.budget.release()

    def account(self, waiting: int) -> EngineAccount:
        """What it does and holds; nobody waits for anybody. ``waiting``: how many are in the queue.

        The KV cache of transformers grows with a request: what is told of is the whole context, which is
        planned for and, on a GPU, was taken once by the rehearsal.
        """
        running = self.running
        tokens = min(running.tokens, self.context) if running is not None else 0
        blocks = -(-self.context // _BLOCK)
        return EngineAccount(
            time.perf_counter() - self.built,
            EngineSettings(
                device=str(self.device),
                gpu_uuid=self.gpu_uuid,
                dtype=str(self.dtype).removeprefix("torch."),
                value_bytes=self.dtype.itemsize,
                context=self.context,
                image_tokens=self.prompts.image_limit,
                sequences=1,
                chunk=self.context,
                kv_tokens=blocks * _BLOCK,
                offload=self.waiting,
                speculate=False,
            ),
            int(running is not None),
            waiting,
            Pool(blocks, -(-tokens // _BLOCK), _BLOCK, 0, blocks),
            Holdings(
                self.weights,
                self.kv_bytes,
                0,
                0,
                resident=resident_bytes(),
                resident_before=self.resident_before,
                **torch_statistics(self.device),
            ),
            self.counters,
        )

    def _told(self, prompt_tokens: int, seconds: float) -> None:
        """One more pass."""
        cached = 0 if prompt_tokens or self.running is None else self.running.tokens
        self.counters = self.counters.after_step(
            seconds, prompt_tokens=prompt_tokens, sampled=1, cached=cached
        )

    def _room(self, image_limit: int) -> plan.Room | None:
        """The plan, or its refusal. None where the driver does not tell of the GPU."""
        wish = plan.Wish(self.context, image_limit, self.dtype.itemsize, self.options.offload)
        host = read_host()
        if self.device.type == "cpu":
            return plan.room_in_ram(self.checkpoint, self._shape, host, wish)
        if self.gpu is None:
            logger.warning(
                "warning: the driver's library does not tell of %s: nothing is planned", self.device
            )
            return None
        wish = replace(wish, known=plan.known_model(self.checkpoint.folder))
        return plan.room_on_gpu(self.checkpoint, self._shape, self.gpu, host, wish)

    def _limit(self) -> int | None:
        """What torch's pool may come to: all that is free but the context, and air for the desktop."""
        if self.gpu is None or self.room is None:
            return None
        apart = sum(line.bytes for line in self.room.lines if line.line in ("desktop", "context", "reserve"))
        return self.gpu.total - apart


def _check_options(options: EngineOptions) -> None:
    """Refuse what only the native engine does."""
    if options.offload is not None and options.device == "cpu":
        raise UsageError(
            "--offload lets layers wait in RAM for a GPU; on a CPU all weights are in RAM already",
            "leave it out",
            param="offload",
        )
    own = {
        "kv_dtype": (
            options.kv_dtype == "fp8",
            "--kv-dtype fp8 is a setting of the native engine: transformers keeps its KV cache in the dtype "
            "of the computation",
        ),
        "kv_tokens": (
            options.kv_tokens not in (None, "auto"),
            "--kv is a setting of the native engine: the KV cache of transformers grows with the one request "
            "that runs, up to --context",
        ),
        "idle_sleep": (
            options.idle_sleep is not None,
            "--idle-sleep is a setting of the native engine: a model under transformers never sleeps",
        ),
    }
    for name, (asked, why) in own.items():
        if asked:
            raise UsageError(why, "Leave it out; or leave out --backend transformers.", param=name)


def _stored(checkpoint: AnyCheckpoint, config: Any) -> torch.dtype:
    """What the checkpoint is to be computed in by itself."""
    named = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
    if checkpoint.stored in named:
        return named[checkpoint.stored]
    told = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    if isinstance(told, str):
        told = getattr(torch, told, None)
    return told if isinstance(told, torch.dtype) else torch.bfloat16


def _gpu(gpus: tuple[Gpu, ...], uuid: str, device: torch.device) -> Gpu | None:
    return None if device.type == "cpu" else gpu_behind(gpus, uuid, str(device))


# The worst requests that the plan admits, run once before any other: what they take is measured then.
#
# Knows: that the largest picture and the longest text are the worst. Does not know what a ledger looks
# like.


_ANSWER = SamplingParams(max_tokens=2, ignore_eos=True)
_FEWEST = 256  # tokens: fewer in a picture are not worth a model with eyes


def rehearse(engine: "AnyEngine") -> None:
    """Run the largest picture, then a text as long as the context, on the GPU; the ledger has then what they
    took. What torch keeps of it stays: nobody else may take it before a request comes.

    Raises ``DoesNotFit`` with the numbers where there is no room for them.
    """
    torch.cuda.reset_peak_memory_stats(engine.device)
    largest_picture(engine)
    longest_text(engine)
    held = torch.cuda.max_memory_reserved(engine.device)
    weights = sum(engine.weights.values())
    cache = next((line.bytes for line in engine.lines if line.line == "kv_cache"), 0)
    engine.lines = plan.measured(
        engine.lines,
        engine.weights if engine.waiting else {},
        max(held - weights - cache, 0),
        f"a picture of at most {engine.prompts.image_limit} tokens and the longest text, each alone, as they "
        "were run at the start",
    )
    engine.forget_what_was_done()


def largest_picture(engine: "AnyEngine") -> None:
    """Run a picture of as many tokens as one may have. Where there is no room for it, and nobody asked for so
    many, pictures are let have half as many, and it is said.

    Raises ``DoesNotFit`` where somebody did, or where too few are left.
    """
    prompts = engine.prompts
    while True:
        try:
            prompt = prompts.build(prompts.largest())
        except VlfitError as error:  # no template, or no room for any picture: requests are told the same
            logger.info("no picture is rehearsed: %s", error)
            return
        try:
            _run(engine, prompt, f"a picture of {prompt.image_tokens} tokens")
            return
        except DoesNotFit:
            fewer = min(prompt.image_tokens, prompts.image_limit) // 2
            if engine.options.image_tokens is not None or fewer < _FEWEST:
                raise
            prompts.image_limit = fewer
            logger.warning(
                "warning: there is no room for a picture of %d tokens: larger ones are scaled down to %d",
                prompt.image_tokens,
                fewer,
            )


def longest_text(engine: "AnyEngine") -> None:
    """Run a text that leaves room for two tokens. Raises ``DoesNotFit``."""
    length = engine.context - 2
    prompt = engine.prompts.raw((engine.prompts.plain_token,) * length)
    _run(engine, prompt, f"a prompt of {length} tokens ({format_bytes(engine.kv_bytes)} of KV cache)")


def _run(engine: "AnyEngine", prompt: AnyPrompt, what: str) -> None:
    try:
        with in_words("rehearsing"):
            engine.answer(engine.request(prompt, _ANSWER, _nobody))
    except OutOfMemory as error:
        raise DoesNotFit(
            f"{what} does not fit beside the model: {error.message}; {engine.budget.shortage()}",
            "lower --context or --image-tokens, or let layers wait in RAM: --offload auto",
        ) from None
    finally:
        engine.budget.release()  # each begins with whole memory, as the peak of the larger one counts


def _nobody(_: "Chunk | Exception") -> None:
    return None
