"""The native engine: one checkpoint on one device, many requests at once, one forward pass per step."""

import logging
import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from vlfit import kernels
from vlfit.api.conversation import Conversation, Message, Tool
from vlfit.api.engine_options import EngineOptions, KernelGroup, SleepLevel, plain_groups, uses_kernels
from vlfit.api.outputs import Chunk, Listener
from vlfit.api.pooling import PoolingParams, Vector
from vlfit.api.progress import ByteProgress, LoadProgress
from vlfit.api.sampling_params import SamplingParams
from vlfit.api.stats import Counters, EngineAccount, EngineSettings, KVPool, MemoryUsage, SleepState
from vlfit.checkpoint.pooling_files import read_pooling
from vlfit.checkpoint.processor_files import GenerationDefaults
from vlfit.checkpoint.quantization import FP8
from vlfit.checkpoint.source import Checkpoint
from vlfit.checkpoint.tensors import has_draft_model, used_cache_spec
from vlfit.engine.device import check_kernel_capability, choose_device, choose_dtype, choose_kv_dtype
from vlfit.engine.execution.encoder_cache import EncoderCache
from vlfit.engine.execution.model_runner import ModelRunner
from vlfit.engine.execution.step_executor import ChunkResult, StepExecutor
from vlfit.engine.memory.budget import Budget
from vlfit.engine.memory.fit import MemoryFit, MemoryRequest, check_fit
from vlfit.engine.memory.kv_resize import KVResizer, kv_pool_lost_error
from vlfit.engine.memory.sleep import Sleeper
from vlfit.engine.memory.usage import (
    gpu_uuid,
    resident_bytes,
    tensor_bytes,
    torch_statistics,
    weight_bytes_by_line,
)
from vlfit.engine.pooler import build_within, check_pooling, pool, score_tokens
from vlfit.engine.request import PreparedRequest
from vlfit.engine.sampling.detokenizer import Detokenizer
from vlfit.engine.sampling.grammar import GrammarCompiler
from vlfit.engine.sampling.output_processor import Completion
from vlfit.engine.sampling.sampler import SampledToken
from vlfit.engine.scheduling.block_manager import BlockManager
from vlfit.engine.scheduling.prefix_cache import PrefixCache, prompt_keys
from vlfit.engine.scheduling.scheduler import PrefillPacer, Scheduler
from vlfit.engine.scheduling.sequence import (
    DraftProposer,
    DraftRows,
    PreparedPrompt,
    ScheduledChunk,
    Sequence,
)
from vlfit.engine.scheduling.snapshot_index import SnapshotIndex
from vlfit.engine.scheduling.speculative import (
    MIN_ACCEPTANCE_CPU,
    MIN_ACCEPTANCE_GPU,
    BestProposer,
    DraftCosts,
    ModelProposer,
    NgramProposer,
    may_speculate,
    with_draft_tokens,
)
from vlfit.errors import DeviceError, DoesNotFit, ModelFailed, UsageError
from vlfit.kernels.gemm.quantized import set_dequant_config
from vlfit.layers.cpu_linear import uses_half_weights
from vlfit.layers.cpu_stored import keeps_stored
from vlfit.layers.kv_cache import KVCache
from vlfit.layers.linear import first_outputs
from vlfit.loading.loader import Loader
from vlfit.loading.offload import StreamedLayers
from vlfit.models.cache_spec import allows_prefix_cache
from vlfit.models.decoder import TextModel
from vlfit.models.interface import DraftModel, PreparedImage, VisionEncoder, builders_of
from vlfit.models.registry import read_image_processor_config
from vlfit.plan.calibration import RESERVE
from vlfit.plan.ledger import DEFAULT_CONTEXT, TYPICAL_REQUEST
from vlfit.plan.native.cost import MAX_DRAFT_ROWS, SHORT_VOCABULARY
from vlfit.prompt.builder import Prompt, PromptBuilder
from vlfit.units import format_bytes

logger = logging.getLogger(__name__)

# After which no further image is encoded in a step with decoding sequences. Clips can take seconds on a CPU;
# a GPU is only given the work in this time.
MAX_ENCODE_SECONDS = 0.1
_OUTSIDE_GRAPHS: frozenset[KernelGroup] = frozenset({"tower"})  # may be plain beside captured steps


class NativeEngine:
    """``Engine`` for vlfit's own models: one step is one forward pass over a batch of requests.

    The constructor checks the ledger against the free memory, and raises ``DoesNotFit`` before a weight is
    loaded; then it allocates in the ledger's order: weights, KV cache, CUDA graphs. It also raises
    ``UsageError`` and ``DeviceError`` for options that do not suit the checkpoint or the device.
    """

    prompt_class = PreparedPrompt

    def __init__(
        self,
        checkpoint: Checkpoint,
        options: EngineOptions,
        progress: LoadProgress | None = None,
        loader_class: type[Loader] = Loader,
        before_launches: Callable[[], None] = lambda: None,
    ) -> None:
        """``before_launches`` is called when all but CUDA graphs is allocated, and no kernel was launched."""
        config = checkpoint.config
        self.checkpoint = checkpoint
        self.builders = builders_of(config)
        self.options = options
        self.counters = Counters()
        self._arrivals: deque[Sequence] = deque()  # submitted since the last step
        self.built_at = time.perf_counter()
        self.resident_before = resident_bytes()
        self.device = self._choose_device()
        plain = plain_groups(options.kernels)
        kernels.use_plain(self.device, plain)
        self.dtype = choose_dtype(options.dtype, checkpoint, self.device)
        self.kv_dtype = choose_kv_dtype(options.kv_dtype, self.dtype)
        self.context = _context_length(options.max_model_len, checkpoint)
        self.image_processor_config = read_image_processor_config(config, checkpoint.folder)
        report = progress or (lambda what, share: None)
        report("planning", 0.0)
        fit = self._check_fit()
        self.cpu_stored = keeps_stored(checkpoint, self.device, self.dtype)
        self.speculates = options.speculate is not False
        self.draft_model = fit.draft_model
        self.offloaded_layers = fit.offloaded_layers
        self.table_in_ram = fit.table_in_ram
        set_dequant_config(self.device, fit.dequant_config)
        budget = Budget(self.device, fit.limit if options.enforce_plan else None)
        self._budget = budget
        self._loader_class = loader_class
        report("loading weights", 0.0)
        with self._open_loader(lambda read, total: report("loading weights", read / total)) as loader:
            text, vision, draft = self._build_model(loader)
            # Weights keep arriving in place until the end of the block; capturing needs only their addresses.
            self.prompts = PromptBuilder(checkpoint.folder, config)
            self.generation = GenerationDefaults.read(checkpoint.folder)
            self.grammar_compiler = GrammarCompiler(self.prompts.tokenizer, self.generation.eos_token_ids)
            self.pooling = read_pooling(checkpoint.folder, checkpoint.name, config)
            loader.finish_blocks()
            pool = BlockManager(fit.kv_tokens, options.block_size)
            narrow = self.kv_dtype == FP8
            within = replace(config, text=config.text.limited_to(self.context))
            spec = used_cache_spec(within, checkpoint.tensors, speculate=draft is not None)
            cache = KVCache(
                spec,
                pool.num_blocks,
                pool.block_size,
                self.dtype,
                self.device,
                fp8=narrow,
                sequences=options.max_num_seqs,
                device_snapshots=options.device_snapshots if options.prefix_cache else 0,
                snapshot_ram_bytes=options.state_snapshot_bytes if options.prefix_cache else 0,
            )
            self.runner = ModelRunner(
                text,
                vision,
                self._image_patches if vision else None,
                cache,
                EncoderCache(options.image_cache_bytes if vision else 0),
                self.device,
                draft,
            )
            if self.runner.drafter is not None and draft is not None:
                self.runner.drafter.costs = _draft_costs(text, draft)
            before_launches()
            captures = options.cuda_graphs and not self.offloaded_layers and plain <= _OUTSIDE_GRAPHS
            if self.device.type != "cpu" and captures:
                report("capturing CUDA graphs", loader.fraction_read)
                rows = MAX_DRAFT_ROWS if self.speculates else 0
                chunk = options.max_num_batched_tokens
                self.runner.capture_graphs(self.context, options.max_num_seqs, chunk, rows)
        self.runner.score_tokens = score_tokens(self.pooling, self.prompts.tokenizer, config.text.vocab_size)
        self.executor = StepExecutor(
            self.runner, budget, self.prompts.token_text, options.max_num_batched_tokens
        )
        self.block_manager = pool
        prefixes = None
        if options.prefix_cache and (allows_prefix_cache(spec) or cache.snapshots.slots):
            prefixes = PrefixCache(SnapshotIndex(cache.snapshots.slots) if cache.states else None)
        self.scheduler = Scheduler(pool, options.max_num_seqs, options.max_num_batched_tokens, prefixes)
        self.prefill_pacer = PrefillPacer(options.max_num_batched_tokens, options.even_chunks)
        watched = options.enforce_plan and self.device.type == "cuda"
        self.kv_resizer = KVResizer(
            self.scheduler,
            cache,
            pool.blocks_for(self.context),
            budget.device_free_bytes if watched else None,
            self._release_workspaces,
        )
        self.sleeper = Sleeper(
            checkpoint,
            self.runner,
            self.scheduler,
            budget,
            pool.blocks_for(self.context),
            RESERVE.bytes if watched else 0,
            self._release_workspaces,
            self._reload_weights,
        )
        self.weights = weight_bytes_by_line(text, vision, draft)
        self.gpu_uuid = gpu_uuid(self.device)

    def _choose_device(self) -> torch.device:
        """The device for the options; a dry run takes the meta device."""
        compiles = uses_kernels(self.options.kernels)
        device = choose_device(self.options.device, compiles=compiles)
        if compiles:
            check_kernel_capability(device)
        return device

    def _open_loader(self, report: ByteProgress | None = None) -> Loader:
        kernels.use_plain(self.device, plain_groups(self.options.kernels))  # another engine may be the last
        return self._loader_class(
            self.checkpoint,
            self.device,
            self.dtype,
            report,
            table_in_ram=self.table_in_ram,
            rounds_inputs=self.options.rounds_inputs,
        )

    def _build_model(
        self, loader: Loader, previous: TextModel | None = None
    ) -> tuple[TextModel, VisionEncoder | None, DraftModel | None]:
        """Text model, vision encoder (None for a text-only model) and draft model (None if there is none, if
        it was left out, or without speculative decoding), in the order of the ledger.
        """
        config = self.checkpoint.config
        with torch.inference_mode():
            within = replace(config, text=config.text.limited_to(self.context))
            text = self.builders.text(within, loader, self.offloaded_layers, previous)
            vision, build, build_draft = config.vision, self.builders.vision, self.builders.draft
            tower: VisionEncoder | None = None
            if vision is not None and build is not None:
                tower = loader.in_arena(lambda: build(vision, loader))
            if build_draft is None or not self.speculates or not config.text.draft_cache:
                return text, tower, None
            if not has_draft_model(config, self.checkpoint.tensors):
                logger.info("%s lacks the layer that drafts tokens; looking them up", self.checkpoint.name)
                return text, tower, None
            if not self.draft_model:
                return text, tower, None
            return text, tower, loader.in_arena(lambda: build_draft(within, loader, text))

    def _image_patches(self, image: PreparedImage) -> Iterator[Tensor]:
        """Patches of a picture or clip on the device, one time step at a time."""
        if self.builders.image_patches is None or self.image_processor_config is None:
            raise RuntimeError("a text-only model cannot take pictures")
        return self.builders.image_patches(image.pixels, self.image_processor_config, self.device, self.dtype)

    def _reload_weights(self) -> None:
        with self._open_loader() as loader:
            self.runner.models = self._build_model(loader, self.runner.text)

    def _check_fit(self) -> MemoryFit:
        """Check the ledger of this engine against the free memory. Raises ``DoesNotFit``."""
        options = self.options
        tokens = options.kv_tokens or options.max_num_seqs * min(self.context, TYPICAL_REQUEST)
        num_blocks = None if tokens == "auto" else -(-max(tokens, self.context) // options.block_size)
        most_image_tokens = min(
            self.image_processor_config.max_tokens if self.image_processor_config else 0, self.context - 1
        )
        for sentence in options.adjustment_notes(self.context, most_image_tokens):
            logger.warning("warning: %s", sentence)
        request = MemoryRequest(
            self.context,
            options.max_num_seqs,
            options.max_num_batched_tokens,
            None if num_blocks is None else num_blocks * options.block_size,
            options.image_tokens,
            most_image_tokens,
            options.block_size,
            options.offload,
            self.kv_dtype,
            options.speculate,
            options.device_snapshots if options.prefix_cache else 0,
        )
        fit = check_fit(self.checkpoint, self.device, self.dtype, request)
        self.image_tokens = fit.image_tokens
        self.image_limit = options.image_tokens
        if options.image_tokens is None and fit.image_tokens < most_image_tokens:
            self.image_limit = fit.image_tokens
            logger.info("pictures of more than %d tokens do not fit: they are scaled down", fit.image_tokens)
        if fit.draft_model_lacks:
            logger.info(
                "multi-token prediction is left out, as %s are missing for it: drafts are looked up",
                format_bytes(fit.draft_model_lacks),
            )
        return fit

    def _release_workspaces(self) -> None:
        """Drop what holds tensors' addresses (CUDA graphs) and return free memory to the driver."""
        self.runner.release_graphs()
        layers = self.runner.text.layers
        if isinstance(layers, StreamedLayers):
            layers.reset()
        self._budget.release()

    def defragment(self) -> None:
        """See ``Budget``: after a rehearsal, so that requests of other sizes need no more than it did."""
        self._budget.defragment()

    @property
    def busy(self) -> bool:
        """Whether any request is running or queued."""
        return bool(self._arrivals) or self.scheduler.busy

    @property
    def asleep(self) -> SleepState | None:
        """Level and freed bytes of the current sleep; None while awake."""
        return self.sleeper.asleep

    @property
    def idle_interval(self) -> float | None:
        """Seconds between calls of ``step`` while no request runs, to check the free memory of the GPU.

        None if that is not watched, as on a CPU.
        """
        return self.kv_resizer.idle_interval

    def sleep(self, level: SleepLevel = "auto") -> SleepState:
        """Free the device's memory: weights go to RAM or are dropped, as in ``Sleeper.fall_asleep``.

        Asleep with its weights in RAM, ``files`` frees that, too (``Sleeper.leave_ram``).
        """
        if self.sleeper.asleep is not None:
            return self.sleeper.leave_ram()
        return self.sleeper.fall_asleep(level)

    def wake(self) -> None:
        """Restore weights and KV cache, as in ``Sleeper.wake``. Raises ``CannotWake`` if memory is short."""
        self.sleeper.wake()

    def interrupt(self) -> None:
        """Do nothing: a step is short."""

    def close(self) -> None:
        """Do nothing: memory is freed with the engine object."""

    def account(self) -> EngineAccount:
        """Counters, settings and memory now. Any thread may call it: it takes no lock and never blocks."""
        runner, scheduler, pool = self.runner, self.scheduler, self.block_manager
        asleep = self.asleep
        return EngineAccount(
            time.perf_counter() - self.built_at,
            self._settings(),
            len(scheduler.running),
            len(scheduler.waiting) + len(self._arrivals),
            KVPool(
                pool.num_blocks,
                pool.num_blocks - pool.num_free,
                pool.block_size,
                len(scheduler.prefix_cache or ()),
                self.kv_resizer.planned_blocks,
            ),
            MemoryUsage(
                dict.fromkeys(self.weights, 0) if asleep else self.weights,
                runner.cache.nbytes - runner.cache.state_bytes,
                runner.encoder_cache.used_bytes,
                runner.encoder_cache.limit_bytes,
                resident=resident_bytes(),
                resident_before=self.resident_before,
                cuda_graphs=runner.graph_bytes,
                state_cache=runner.cache.state_bytes,
                state_snapshots=runner.cache.snapshots.device_bytes + runner.cache.snapshots.ram_bytes,
                device_snapshots=runner.cache.snapshots.device_bytes,
                state_snapshots_limit=runner.cache.snapshots.slots * runner.cache.snapshots.bytes_each,
                **torch_statistics(self.device),
            ),
            self.counters,
            scheduler.num_preemptions,
            asleep,
        )

    def _settings(self) -> EngineSettings:
        return EngineSettings(
            device=str(self.device),
            gpu_uuid=self.gpu_uuid,
            dtype=str(self.dtype).removeprefix("torch."),
            value_bytes=self.dtype.itemsize,
            context=self.context,
            image_tokens=self.image_tokens,
            sequences=self.options.max_num_seqs,
            chunk=self.options.max_num_batched_tokens,
            kv_tokens=self.block_manager.num_blocks * self.block_manager.block_size,
            offload=len(self.offloaded_layers),
            table_in_ram=self.table_in_ram,
            state_snapshots=self.runner.cache.snapshots.device_slots,
            cpu_16_bit=uses_half_weights(self.device, self.dtype),
            cpu_stored=self.cpu_stored,
            kv_dtype=self.kv_dtype,
            speculate=self.speculates,
            draft_model=self.runner.drafter is not None,
        )

    def prepare(
        self, conversation: Conversation, params: SamplingParams, tools: tuple[Tool, ...] = ()
    ) -> PreparedRequest[PreparedPrompt]:
        """``Engine.prepare``. Also compiles the grammar of ``params``; ``InvalidRequest`` if that fails."""
        began = time.perf_counter()
        prompt = self.prompts.build(
            conversation,
            self.image_limit,
            self.context,
            tools,
            self._context_hint(),
            params.template_variables,
        )
        return self._prepare_request(prompt, params, began)

    def prepare_text(
        self, prompt: str | tuple[int, ...], params: SamplingParams
    ) -> PreparedRequest[PreparedPrompt]:
        """``prepare`` for plain text or token ids, without a chat template."""
        began = time.perf_counter()
        return self._prepare_request(self.prompts.build_raw(prompt, self.context), params, began)

    def prepare_pooled(
        self, prompt: Conversation | tuple[int, ...], pooling: PoolingParams
    ) -> PreparedRequest[PreparedPrompt]:
        """``Engine.prepare_pooled``."""
        began = time.perf_counter()
        check_pooling(pooling, self.pooling, self.runner.score_tokens, self.checkpoint.name)
        messages = tuple(each for each in prompt if isinstance(each, Message))
        if not messages:
            token_ids = tuple(each for each in prompt if isinstance(each, int))
            built = self.prompts.build_raw(token_ids, self.context)
        else:
            limit = None if pooling.truncate else self.context

            def build(conversation: Conversation) -> Prompt:
                return self.prompts.build(conversation, self.image_limit, limit, remedy=self._context_hint())

            built = (
                build_within(build, self.prompts.tokenizer, messages, self.context)
                if pooling.truncate
                else build(messages)
            )
        prepared = self.prepare_prompt(built)
        return PreparedRequest(prepared, built.seen, 1, began, pooling)

    def _prepare_request(
        self, prompt: Prompt, params: SamplingParams, began: float
    ) -> PreparedRequest[PreparedPrompt]:
        prepared = self.prepare_prompt(prompt)
        max_tokens = self.resolve_max_tokens(prepared.num_tokens, params)
        # An invalid grammar is refused before the request is queued.
        self.grammar_compiler.make_matcher(params.grammar)
        images = tuple(image.seen for image in prompt.images)
        return PreparedRequest(prepared, images, max_tokens, began)

    def prepare_prompt(self, prompt: Prompt) -> PreparedPrompt:
        """Compute M-RoPE positions, placeholder indices and prefix cache keys of ``prompt``.

        Raises ``DoesNotFit`` if ``prompt`` leaves no token of the context for an answer.
        """
        if len(prompt.token_ids) >= self.context:
            raise self.prompts.too_long_error(prompt, self.context, self._context_hint())
        config = self.checkpoint.config
        token_ids = np.array(prompt.token_ids, dtype=np.int64)
        is_visual = np.isin(token_ids, (config.image_token_id, config.video_token_id))
        grids = [image.grid for image in prompt.images]
        positions, next_position = self.builders.positions(config, is_visual, grids)
        placeholders = np.flatnonzero(is_visual)
        turn_ends = None
        if self.runner.cache.states:
            turn_ends = (np.flatnonzero(np.isin(token_ids, self.generation.eos_token_ids)) + 1).tolist()
        keys = prompt_keys(token_ids, placeholders, prompt.images, self.options.block_size, turn_ends)
        return PreparedPrompt(token_ids, placeholders, positions, next_position, prompt.images, keys)

    def resolve_max_tokens(self, prompt_tokens: int, params: SamplingParams) -> int:
        """Most tokens of a completion after ``prompt_tokens`` tokens of prompt.

        ``params.max_tokens`` if set; ``DoesNotFit`` if that is more than the context has left. If None, the
        default of the engine's options, or what the context has left if that is less.
        """
        left = self.context - prompt_tokens
        if params.max_tokens is None:
            return min(left, self.options.max_tokens)
        if params.max_tokens > left:
            remedy = self._context_hint()
            raise DoesNotFit(
                f"max_tokens {params.max_tokens} and a prompt of {prompt_tokens} tokens are more than the "
                f"context of {self.context}",
                f"Ask for at most {left} tokens{f', or {remedy}' if remedy else ''}.",
                param="max_tokens",
            )
        return params.max_tokens

    def _context_hint(self) -> str:
        """A clause for the hint of errors; "" if the context is as long as the checkpoint supports."""
        most = self.checkpoint.config.text.max_position_embeddings
        return f"start with a larger --context (at most {most})" if self.context < most else ""

    def make_request(
        self, prepared: PreparedRequest[PreparedPrompt], params: SamplingParams, listener: Listener
    ) -> Sequence:
        """A new request for ``submit``, for one answer to ``prepared``; see ``Engine.make_request``."""
        if prepared.pooling is not None:
            params = SamplingParams(max_tokens=1)
        return self.make_sequence(prepared.prompt, params, listener, prepared.submitted_at, prepared.pooling)

    def make_sequence(
        self,
        prompt: PreparedPrompt,
        params: SamplingParams,
        listener: Listener,
        submitted_at: float | None = None,
        pooling: PoolingParams | None = None,
    ) -> Sequence:
        """A new request for ``submit``, as ``make_request``, from a prompt of ``prepare_prompt``.

        Any thread may call it. ``submitted_at``: when preparation of the request began
        (``time.perf_counter``); None: now. ``pooling``: as in ``PreparedRequest``. Without a seed in
        ``params`` the request gets a random one. Raises ``DoesNotFit`` as ``resolve_max_tokens``.
        """
        max_tokens = self.resolve_max_tokens(prompt.num_tokens, params)
        eos = frozenset(self.generation.eos_token_ids)
        proposer: DraftProposer | None = None
        draft_rows = None
        if self.speculates and may_speculate(params) and pooling is None:
            longer = MIN_ACCEPTANCE_CPU if self.device.type == "cpu" else MIN_ACCEPTANCE_GPU
            proposer = NgramProposer(prompt, longer)
            if self.runner.drafter is not None:
                by_model = ModelProposer(self.runner.drafter.costs, longer)
                proposer = BestProposer((proposer, by_model))
                draft_rows = DraftRows()
        return Sequence(
            prompt,
            params,
            max_tokens,
            Completion(Detokenizer(self.prompts.tokenizer), params, eos, max_tokens),
            listener,
            time.perf_counter() if submitted_at is None else submitted_at,
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            grammar_matcher=self.grammar_compiler.make_matcher(params.grammar),
            pooling=pooling,
            proposer=proposer,
            draft_rows=draft_rows,
        )

    def submit(self, sequence: Sequence) -> None:
        """Queue a request for the next step. Any thread may call it."""
        self._arrivals.append(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """End a request before its next token, with the ``finish_reason`` "cancelled". From any thread."""
        sequence.cancelled = True

    def step(self) -> None:
        """Admit requests, run one forward pass over all that can run, and deliver its tokens.

        Also ends cancelled requests and resizes the KV cache if memory requires it. A failure is not raised:
        its request's listener gets it, and only that request ends. Only if the KV cache is lost in a resize
        do all end.
        """
        self._queue_arrivals()
        self._finish_cancelled()
        try:
            self.kv_resizer.step()
        except torch.OutOfMemoryError:
            self.fail_all(kv_pool_lost_error())
            return
        for sequence in self.scheduler.admit():
            if sequence.block_copy is not None:
                self.runner.cache.copy_block(*sequence.block_copy)
            if sequence.snapshot is not None:
                self.runner.cache.restore_state(sequence.state_slot, sequence.snapshot)
                sequence.snapshot = None
            if sequence.admitted_at is None:  # not one that was preempted
                sequence.admitted_at = time.perf_counter()
                sequence.num_shared_tokens = sequence.num_cached_tokens
                shared = self.counters.cached_prompt_tokens + sequence.num_shared_tokens
                self.counters = replace(self.counters, cached_prompt_tokens=shared)
        batch = self.scheduler.schedule(self.prefill_pacer.prefill_budget())
        if not batch:
            return
        # If the next batch is expected to be identical, it is launched before this one's tokens are read.
        same_next = not self.scheduler.waiting
        with_drafts = with_draft_tokens(
            batch, min(MAX_DRAFT_ROWS, self.options.max_num_batched_tokens), self.block_manager.block_size
        )
        if with_drafts is not batch:
            # A batch that is launched already runs without drafts; the next one gets them.
            is_launched = self.runner.is_launched(batch)
            batch, same_next = batch if is_launched else self.executor.draft(with_drafts), False
        began = time.perf_counter()
        others_wait = self.prefill_pacer.enabled and batch[0].sequence.is_decoding
        outcome = self.executor.run(
            batch,
            expect_same_batch=same_next,
            encode_seconds=MAX_ENCODE_SECONDS if others_wait else math.inf,
        )
        for sequence, error in outcome.failed:
            self._fail([sequence], error)
        chunks = [done.chunk for done in outcome.results]
        if not chunks:
            return
        prompt_tokens = sum(chunk.num_tokens for chunk in chunks if not chunk.sequence.is_decoding)
        self.counters = self.counters.after_step(
            time.perf_counter() - began,
            prompt_tokens=prompt_tokens,
            sampled=sum(done.sampled is not None for done in outcome.results),
            cached=sum(chunk.sequence.num_cached_tokens for chunk in chunks),
            retried=outcome.num_retries,
            drafted=sum(len(chunk.draft_tokens) for chunk in chunks),
            drafted_by_model=sum(len(chunk.draft_tokens) for chunk in chunks if chunk.by_draft_model),
        )
        if outcome.seconds is not None and chunks[0].sequence.is_decoding:
            self.prefill_pacer.record_step(prompt_tokens, outcome.seconds)
        for chunk in chunks:
            self.scheduler.advance(chunk)
            self._take_snapshot(chunk.sequence)
        for done in outcome.results:
            if isinstance(done.sampled, ModelFailed):
                self._fail([done.chunk.sequence], done.sampled)
            elif done.sampled is not None:
                self._deliver(done.chunk.sequence, done.sampled)
                self._deliver_accepted(done)
            elif done.pooled is not None:
                self._deliver_pooled(done.chunk.sequence, done.pooled)

    def fail_all(self, error: Exception) -> None:
        """End every request, running or queued: its listener gets ``error``."""
        self._queue_arrivals()
        self._fail([*self.scheduler.running, *self.scheduler.waiting], error)

    def _queue_arrivals(self) -> None:
        while self._arrivals:
            self.scheduler.add(self._arrivals[0])
            self._arrivals.popleft()  # after ``add``, so that ``fail_all`` reaches it at any moment

    def _deliver(self, sequence: Sequence, sampled: SampledToken) -> None:
        sequence.first_token_at = sequence.first_token_at or time.perf_counter()
        sequence.generated.append(sampled.token_id)
        if sequence.grammar_matcher is not None:
            sequence.grammar_matcher.accept_token(sampled.token_id)
        chunk = sequence.completion.add(sampled.token_id, sampled.logprobs)
        if chunk.finish_reason is None:
            self._send(sequence, chunk)
        else:
            self._finish(sequence, chunk)

    def _deliver_pooled(self, sequence: Sequence, values: Vector) -> None:
        """Deliver the result of a pooled request, whose prompt has ended."""
        assert sequence.pooling is not None  # else ``values`` would have been sampled
        sequence.first_token_at = time.perf_counter()
        self._finish(sequence, Chunk("", finish_reason="stop", pooled=pool(sequence.pooling, values)))

    def _deliver_accepted(self, done: ChunkResult) -> None:
        """Deliver accepted draft tokens one by one, until one ends the answer or breaks its grammar."""
        sequence = done.chunk.sequence
        if sequence.proposer is not None and done.chunk.draft_tokens:
            sequence.proposer.record_acceptance(len(done.accepted), len(done.chunk.draft_tokens))
        for sampled in done.accepted:
            if sequence not in self.scheduler.running:  # an accepted token was its last
                return
            if sequence.grammar_matcher is not None and not sequence.grammar_matcher.allows(sampled.token_id):
                return  # the next step samples another
            self.counters = self.counters.after_accepted_token(by_model=done.chunk.by_draft_model)
            if sequence.pending_tokens:  # the step has left its tokens pending
                sequence.pending_tokens += 1
            self.scheduler.advance(ScheduledChunk(sequence, 1))
            self._deliver(sequence, sampled)

    def _take_snapshot(self, sequence: Sequence, *, ended: bool = False) -> None:
        """Copy the state of ``sequence`` for requests with the same prefix, if the scheduler wants it."""
        slot = self.scheduler.take_snapshot(sequence, ended=ended)
        if slot is None:
            return
        try:
            self.runner.cache.save_state(sequence.state_slot, slot)
        except (DeviceError, MemoryError, OSError) as error:
            logger.warning("warning: no more than %d snapshots of states: %s", slot, error)
            self.scheduler.limit_snapshots(slot)

    def _finish(self, sequence: Sequence, chunk: Chunk) -> None:
        if sequence in self.scheduler.running:
            self._take_snapshot(sequence, ended=True)
            if self.scheduler.prefix_cache is not None:
                self.executor.finish_drafts(sequence)
        self._release_request(sequence)
        counter = "cancelled" if chunk.finish_reason == "cancelled" else "finished"
        self.counters = replace(self.counters, **{counter: getattr(self.counters, counter) + 1})
        self._send(sequence, sequence.final_chunk(chunk))

    def _finish_cancelled(self) -> None:
        for sequence in [*self.scheduler.running, *self.scheduler.waiting]:
            if sequence.cancelled:
                self._finish(sequence, Chunk("", finish_reason="cancelled"))

    def _fail(self, sequences: list[Sequence], error: Exception) -> None:
        for sequence in sequences:
            self._release_request(sequence, failed=True)
            self.counters = replace(self.counters, failed=self.counters.failed + 1)
            self._send(sequence, error)

    def _send(self, sequence: Sequence, item: Chunk | Exception) -> None:
        """Pass ``item`` to the listener; if that raises, drop the request."""
        try:
            sequence.listener(item)
        except Exception:
            logger.exception("a listener failed; its request is dropped")
            self._release_request(sequence)

    def _release_request(self, sequence: Sequence, *, failed: bool = False) -> None:
        """Remove ``sequence`` and free its blocks and tensors, as the caller may keep the object."""
        self.scheduler.remove(sequence, failed=failed)
        sequence.features.clear()
        sequence.slot_mapping = None
        sequence.proposer = sequence.draft_rows = None


def _draft_costs(text: TextModel, draft: DraftModel) -> DraftCosts:
    """What a draft token takes: the share of a decode step's weights that are read for it."""
    layers, head = tensor_bytes(draft), tensor_bytes(text.head)
    step = max(tensor_bytes([text.layers, text.head]), 1)
    full = (layers + head) / step
    if text.vocabulary < 2 * SHORT_VOCABULARY or first_outputs(text.head, SHORT_VOCABULARY) is None:
        return DraftCosts(full)
    short = (layers + head * SHORT_VOCABULARY / text.vocabulary) / step
    return DraftCosts(full, short, SHORT_VOCABULARY)


def _context_length(max_model_len: int | None, checkpoint: Checkpoint) -> int:
    """Context length in tokens; None: a default. Raises ``UsageError`` if the checkpoint supports less."""
    text = checkpoint.config.text
    most = text.max_position_embeddings
    if max_model_len is not None and max_model_len > most:
        raise UsageError(
            f"--context {max_model_len} is too long: {checkpoint.name} runs with at most {most} tokens",
            f"Use --context {most} or less.",
        )
    return max_model_len or min(DEFAULT_CONTEXT, text.default_context)
