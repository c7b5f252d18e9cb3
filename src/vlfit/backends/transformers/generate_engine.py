"""The engine of any architecture: transformers' ``generate()`` runs one request at a time.

The constructor goes in the order of the ledger.
"""

import gc
import logging
import secrets
import time
from collections import deque
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from vlfit.api.conversation import Conversation, Tool
from vlfit.api.engine_options import EngineOptions, SleepLevel
from vlfit.api.outputs import Chunk, Listener
from vlfit.api.pooling import PoolingParams
from vlfit.api.progress import LoadProgress
from vlfit.api.sampling_params import SamplingParams
from vlfit.api.stats import Counters, EngineAccount, EngineSettings, KVPool, MemoryUsage, SleepState
from vlfit.backends.transformers import auto_model
from vlfit.backends.transformers.auto_model import import_transformers, load_processor
from vlfit.backends.transformers.generate import ModelTokenizer, generate
from vlfit.backends.transformers.model_errors import model_error, translate_model_errors
from vlfit.backends.transformers.processor_prompts import ProcessorPrompt, ProcessorPromptBuilder
from vlfit.checkpoint.any_model import AnyCheckpoint
from vlfit.engine.device import dtype_for, parse_device
from vlfit.engine.engine_thread import engine_stopped_error
from vlfit.engine.memory.budget import Budget
from vlfit.engine.memory.usage import gpu_uuid, resident_bytes, torch_statistics
from vlfit.engine.request import PreparedRequest, Request
from vlfit.engine.sampling.output_processor import Completion
from vlfit.errors import DoesNotFit, EngineStopped, OutOfMemory, UsageError, VlfitError
from vlfit.machine.gpu import gpu_of_device, read_gpus
from vlfit.machine.host import read_host
from vlfit.machine.model import Gpu
from vlfit.plan.ledger import Line
from vlfit.plan.transformers import cost
from vlfit.units import format_bytes

logger = logging.getLogger(__name__)

_BLOCK = 16  # tokens; the account counts the KV cache in blocks, though there are none
_PROMPT_TOKENS = 128  # of the context, kept free of pictures for a question and the template


class TransformersEngine:
    """An ``Engine`` over transformers. ``step`` runs one request to its end; others wait in a queue.

    The constructor loads the model; ``report`` gets its progress. Raises ``DoesNotFit`` before any weights
    are read or in the profiling run, ``DeviceError``, ``UsageError`` and ``CheckpointError``.

    ``lines``: the ledger; empty if the driver does not report the GPU. ``fit``: the plan behind it, else
    None. ``weights``: bytes on the device by ledger line.
    """

    prompt_class = ProcessorPrompt

    def __init__(
        self,
        checkpoint: AnyCheckpoint,
        options: EngineOptions,
        report: LoadProgress,
        *,
        trust_remote_code: bool = False,
    ) -> None:
        _check_options(options)
        report("importing transformers", 0.0)
        import_transformers()
        gpus = () if options.device == "cpu" else read_gpus()[0]  # before the CUDA context takes its share
        self.checkpoint = checkpoint
        self.options = options
        self.device = parse_device(options.device)
        config = auto_model.read_config(checkpoint, trust_remote_code=trust_remote_code)
        self.dtype = dtype_for(options.dtype, _stored_dtype(checkpoint, config), self.device)
        self._shape = cost.parse_text_shape(config.to_dict())
        self.context = cost.choose_context(self._shape, options.max_model_len)
        image_limit = min(options.image_tokens or self.context, self.context - _PROMPT_TOKENS)
        self.resident_before = resident_bytes()
        self.gpu_uuid = gpu_uuid(self.device)
        self.gpu = _gpu(gpus, self.gpu_uuid, self.device)
        self.fit = self._check_fit(image_limit)
        self.lines: tuple[Line, ...] = self.fit.lines if self.fit else ()

        report("reading the processor's files", 0.0)
        processor = load_processor(checkpoint.folder, trust_remote_code=trust_remote_code)
        self.prompts = ProcessorPromptBuilder(processor, config, self.context, image_limit)
        report("loading weights", 0.1)
        spread = self.fit is not None and self.fit.weights_on_device < self.fit.weights
        here = self.fit.weights_on_device if self.fit is not None and spread else None
        self.model = auto_model.load_model(
            checkpoint, self.device, self.dtype, here, trust_remote_code=trust_remote_code
        )
        self.generation = auto_model.extract_generation_defaults(self.model, processor.tokenizer)
        self.tokenizer = ModelTokenizer(processor.tokenizer, frozenset(self.generation.eos_token_ids))
        self.weights = auto_model.weight_bytes_by_line(self.model, self.device)
        self.num_offloaded = auto_model.num_offloaded_modules(self.model)
        self.budget = Budget(self.device, self._limit() if options.enforce_plan else None)
        self.running: Request | None = None
        self._waiting: deque[Request] = deque()
        self.counters = Counters()
        self._interrupted = False
        self.built_at = time.perf_counter()
        if options.enforce_plan and self.device.type == "cuda":
            report("profiling the worst case", 0.9)
            profile_peak_memory(self)

    def prepare(
        self, conversation: Conversation, params: SamplingParams, tools: tuple[Tool, ...] = ()
    ) -> PreparedRequest[ProcessorPrompt]:
        """Decode pictures, build the prompt, and check it against the context and ``params``.

        Raises ``PictureError``, ``InvalidRequest`` or ``DoesNotFit``.
        """
        began = time.perf_counter()
        prompt = self.prompts.build(conversation, tools, params.template_variables)
        return self._prepare_request(prompt, params, began)

    def prepare_text(
        self, prompt: str | tuple[int, ...], params: SamplingParams
    ) -> PreparedRequest[ProcessorPrompt]:
        """``prepare`` for plain text or token ids, without a chat template."""
        began = time.perf_counter()
        return self._prepare_request(self.prompts.build_raw(prompt), params, began)

    def prepare_pooled(
        self, prompt: Conversation | tuple[int, ...], pooling: PoolingParams
    ) -> PreparedRequest[ProcessorPrompt]:
        """Raise ``UsageError``: this engine only generates text."""
        raise UsageError("a model under transformers gives no vectors", "Open it with the native backend.")

    def _prepare_request(
        self, prompt: ProcessorPrompt, params: SamplingParams, began: float
    ) -> PreparedRequest[ProcessorPrompt]:
        max_tokens = self.max_tokens(prompt, params)
        self.tokenizer.grammar_matcher(params.grammar)  # a bad grammar is refused before the request waits
        return PreparedRequest(prompt, prompt.images, max_tokens, began)

    def max_tokens(self, prompt: ProcessorPrompt, params: SamplingParams) -> int:
        """Most tokens of the completion: as requested, else the default cut to what the context leaves.

        Raises ``DoesNotFit`` if the prompt, or the requested length beside it, exceeds the context.
        """
        room = self.context - prompt.num_tokens
        if room < 1:
            raise DoesNotFit(
                f"the prompt is {prompt.num_tokens} tokens ({prompt.num_image_tokens} of them pictures); "
                f"at most {self.context - 1} fit the context of {self.context}",
                "Send less text, fewer or smaller pictures, or start with a larger --context.",
            )
        if params.max_tokens is None:
            return min(room, self.options.max_tokens)
        if params.max_tokens > room:
            raise DoesNotFit(
                f"max_tokens {params.max_tokens} and a prompt of {prompt.num_tokens} tokens are more than "
                f"the context of {self.context}",
                f"Ask for at most {room} tokens, or start with a larger --context.",
                param="max_tokens",
            )
        return params.max_tokens

    def make_request(
        self, prepared: PreparedRequest[ProcessorPrompt], params: SamplingParams, listener: Listener
    ) -> Request:
        """A new request for ``submit``. If ``params`` has no seed, the request gets a random one."""
        max_tokens = self.max_tokens(prepared.prompt, params)
        return Request(
            prepared.prompt,
            params,
            max_tokens,
            Completion(self.tokenizer.detokenizer(), params, self.tokenizer.eos_token_ids, max_tokens),
            listener,
            prepared.submitted_at,
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            grammar_matcher=self.tokenizer.grammar_matcher(params.grammar),
        )

    @property
    def busy(self) -> bool:
        """Whether any request runs or waits."""
        return self.running is not None or bool(self._waiting)

    @property
    def asleep(self) -> SleepState | None:
        """Always None: this engine never sleeps."""
        return None

    @property
    def idle_interval(self) -> float | None:
        """Always None: an idle engine has nothing to do."""
        return None

    def sleep(self, level: SleepLevel = "auto") -> SleepState:
        """Raise ``UsageError``: this engine cannot sleep."""
        raise UsageError("a model under transformers cannot sleep", "Stop it instead.")

    def wake(self) -> None:
        """Do nothing: this engine never sleeps."""

    def submit(self, request: Request) -> None:
        """Queue a request, from any thread."""
        self._waiting.append(request)

    def cancel(self, request: Request) -> None:
        """End a queued request at once, or a running one after its next token. From any thread."""
        request.cancelled = True
        try:
            self._waiting.remove(request)
        except ValueError:  # it runs, or has ended
            return
        _send(request, request.final_chunk(Chunk("", finish_reason="cancelled")))

    def interrupt(self) -> None:
        """End the running request after its next token, with ``EngineStopped``, and all later ones likewise.

        To be called before ``close``, from any thread.
        """
        self._interrupted = True

    def step(self) -> None:
        """Run the oldest queued request to its end; nothing if none is queued.

        If the model's code raises, the request's listener gets the error; other requests go on.
        """
        request = self._next_waiting()
        if request is None:
            return
        try:
            self.run_request(request)
        except Exception as error:
            failure = model_error(error, "the model was answering")
            error.__traceback__ = None  # its frames hold the tensors of the forward pass
            self.counters = replace(self.counters, failed=self.counters.failed + 1)
            if isinstance(failure, OutOfMemory):
                self.budget.release()
            if not isinstance(failure, EngineStopped):
                logger.warning("a request failed: %s", failure.message)
            _send(request, failure)

    def run_request(self, request: Request) -> None:
        """Run ``request`` to its end.

        Raises what the model's code raises, and ``EngineStopped`` after ``interrupt``; the listener does not
        get such an error from here.
        """
        request.admitted_at = time.perf_counter()
        self.running = request
        try:
            last = generate(
                self.model,
                self.device,
                self.dtype,
                request,
                self.tokenizer.token_text,
                self._record_step,
                lambda: request.cancelled or self._interrupted,
            )
        finally:
            self.running = None
        if last.finish_reason == "cancelled" and not request.cancelled:
            raise engine_stopped_error()
        ended = "cancelled" if request.cancelled else "finished"
        self.counters = replace(self.counters, **{ended: getattr(self.counters, ended) + 1})
        _send(request, last)

    def fail_all(self, error: Exception) -> None:
        """End every queued request with ``error``. Between steps none is running."""
        while (request := self._next_waiting()) is not None:
            _send(request, error)

    def _next_waiting(self) -> Request | None:
        with suppress(IndexError):  # another thread may cancel the last one at any time
            return self._waiting.popleft()
        return None

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV cache of one request that fills the context; 0 if the model's shape is unknown."""
        return 0 if self._shape is None else self._shape.kv_bytes(self.context, self.dtype.itemsize)

    def reset_counters(self) -> None:
        """Set all counters to zero, so that they leave out the profiling run."""
        self.counters = Counters()

    def close(self) -> None:
        """Release the model and its memory."""
        self.model = None
        gc.collect()  # accelerate's hooks on layers in RAM are reference cycles
        self.budget.release()

    def account(self) -> EngineAccount:
        """Counters, settings and memory of the engine, from any thread, without a lock.

        The size of the KV cache is that for a whole context, as in the plan, though it grows with a request.
        """
        running = self.running
        tokens = min(running.num_tokens, self.context) if running is not None else 0
        blocks = -(-self.context // _BLOCK)
        return EngineAccount(
            time.perf_counter() - self.built_at,
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
                offload=self.num_offloaded,
                speculate=False,
            ),
            int(running is not None),
            len(self._waiting),
            KVPool(blocks, -(-tokens // _BLOCK), _BLOCK, 0, blocks),
            MemoryUsage(
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

    def _record_step(self, prompt_tokens: int, seconds: float) -> None:
        cached = 0 if prompt_tokens or self.running is None else self.running.num_tokens
        self.counters = self.counters.after_step(
            seconds, prompt_tokens=prompt_tokens, sampled=1, cached=cached
        )

    def _check_fit(self, image_limit: int) -> cost.DeviceFit | None:
        """The plan; None if the driver does not report the GPU. Raises ``DoesNotFit``."""
        run = cost.RunOptions(self.context, image_limit, self.dtype.itemsize, self.options.offload)
        host = read_host()
        if self.device.type == "cpu":
            return cost.fit_in_ram(self.checkpoint, self._shape, host, run)
        if self.gpu is None:
            logger.warning("warning: NVML does not report %s: nothing is planned", self.device)
            return None
        run = replace(run, known=cost.known_model(self.checkpoint.folder))
        return cost.fit_on_gpu(self.checkpoint, self._shape, self.gpu, host, run)

    def _limit(self) -> int | None:
        """Cap of torch's pool: the card without the desktop, the CUDA context and the reserve; None: none."""
        if self.gpu is None or self.fit is None:
            return None
        others = sum(line.bytes for line in self.fit.lines if line.line in ("desktop", "context", "reserve"))
        return self.gpu.total - others


def _check_options(options: EngineOptions) -> None:
    """Raise ``UsageError`` for options of the native engine alone."""
    if options.offload is not None and options.device == "cpu":
        raise UsageError(
            "--offload lets layers wait in RAM for a GPU; on a CPU all weights are in RAM already",
            "Leave it out.",
            param="offload",
        )
    native_only = {
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
        "kernels": (
            options.kernels != "auto",
            "--kernels is a setting of the native engine: transformers has none of its kernels",
        ),
        "idle_sleep": (
            options.idle_sleep is not None,
            "--idle-sleep is a setting of the native engine: a model under transformers never sleeps",
        ),
    }
    for name, (is_set, why) in native_only.items():
        if is_set:
            raise UsageError(why, "Leave it out, or leave out --backend transformers.", param=name)


def _stored_dtype(checkpoint: AnyCheckpoint, config: Any) -> torch.dtype:
    """The dtype that the checkpoint's weights or its config name; bfloat16 if they name none."""
    named = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
    if checkpoint.main_dtype in named:
        return named[checkpoint.main_dtype]
    dtype = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, None)
    return dtype if isinstance(dtype, torch.dtype) else torch.bfloat16


def _gpu(gpus: tuple[Gpu, ...], uuid: str, device: torch.device) -> Gpu | None:
    return None if device.type == "cpu" else gpu_of_device(gpus, uuid, str(device))


_PROFILING_PARAMS = SamplingParams(max_tokens=2, ignore_eos=True)
MIN_IMAGE_TOKENS = 256  # with fewer, pictures are of little use


def profile_peak_memory(engine: TransformersEngine) -> None:
    """Profiling run on the GPU: the largest picture, then a text as long as the context.

    Puts the measured bytes into ``engine.lines``, and may lower ``engine.prompts.image_limit``. torch's pool
    keeps the memory of the run, so that no other program takes it. Raises ``DoesNotFit``.
    """
    torch.cuda.reset_peak_memory_stats(engine.device)
    profile_largest_picture(engine)
    profile_longest_text(engine)
    held = torch.cuda.max_memory_reserved(engine.device)
    weights = sum(engine.weights.values())
    cache = next((line.bytes for line in engine.lines if line.line == "kv_cache"), 0)
    engine.lines = cost.with_measured_bytes(
        engine.lines,
        engine.weights if engine.num_offloaded else {},
        max(held - weights - cache, 0),
        f"a picture of at most {engine.prompts.image_limit} tokens and the longest text, each alone, as they "
        "ran at the start",
    )
    engine.reset_counters()


def profile_largest_picture(engine: TransformersEngine) -> None:
    """Run a prompt with the largest picture. If it does not fit, halve ``image_limit`` and try again.

    ``engine.prompts.image_limit`` stays lowered. Raises ``DoesNotFit`` instead of halving if
    ``engine.options.image_tokens`` is set or half is below ``MIN_IMAGE_TOKENS``. Returns without a run if no
    prompt with a picture can be built, as for a checkpoint without chat template.
    """
    prompts = engine.prompts
    while True:
        try:
            prompt = prompts.build(prompts.largest_conversation())
        except VlfitError as error:  # no template, or no picture fits: requests get the same error
            logger.info("no picture in the profiling run: %s", error)
            return
        try:
            _profile_prompt(engine, prompt, f"a picture of {prompt.num_image_tokens} tokens")
            return
        except DoesNotFit:
            fewer = min(prompt.num_image_tokens, prompts.image_limit) // 2
            if engine.options.image_tokens is not None or fewer < MIN_IMAGE_TOKENS:
                raise
            prompts.image_limit = fewer
            logger.warning(
                "warning: there is no room for a picture of %d tokens: larger ones are scaled down to %d",
                prompt.num_image_tokens,
                fewer,
            )


def profile_longest_text(engine: TransformersEngine) -> None:
    """Run a prompt of text two tokens shorter than the context. Raises ``DoesNotFit``."""
    length = engine.context - 2
    prompt = engine.prompts.build_raw((engine.prompts.plain_token,) * length)
    _profile_prompt(
        engine, prompt, f"a prompt of {length} tokens ({format_bytes(engine.kv_bytes)} of KV cache)"
    )


def _profile_prompt(engine: TransformersEngine, prompt: ProcessorPrompt, what: str) -> None:
    prepared = PreparedRequest(prompt, prompt.images, _PROFILING_PARAMS.max_tokens or 0, time.perf_counter())
    try:
        with translate_model_errors("profiling"):
            engine.run_request(engine.make_request(prepared, _PROFILING_PARAMS, lambda _: None))
    except OutOfMemory as error:
        raise DoesNotFit(
            f"{what} does not fit beside the model: {error.message}; {engine.budget.describe_free()}",
            "Lower --context or --image-tokens, or let layers wait in RAM: --offload auto.",
        ) from None
    finally:
        engine.budget.release()  # each begins with unfragmented memory: the larger peak is what counts


def _send(request: Request, item: Chunk | Exception) -> None:
    try:
        request.listener(item)
    except Exception:
        logger.debug("a listener has gone away", exc_info=True)
