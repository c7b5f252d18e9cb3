"""The engine: one checkpoint on one device, answering many requests at once, one forward pass at a time.

Its constructor reads like the ledger, top to bottom: weights, then the KV pool. Knows nothing of threads
(``loop.py`` drives it), of HTTP, or of what the words are for.
"""

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from vlfit.api.engine_options import EngineOptions
from vlfit.api.outputs import Chunk, Timings, Usage
from vlfit.api.sampling_params import SamplingParams
from vlfit.api.stats import Counters, EngineAccount, EngineSettings, Holdings, Pool
from vlfit.checkpoint.processor_files import GenerationDefaults, ImageProcessing
from vlfit.checkpoint.quantization import FP8
from vlfit.checkpoint.source import Checkpoint
from vlfit.engine.device import choose_device, choose_dtype, choose_kv_dtype
from vlfit.engine.execution.encoder_cache import ImageCache
from vlfit.engine.execution.model_runner import Runner
from vlfit.engine.execution.step_executor import Done, Passes
from vlfit.engine.memory.budget import Budget
from vlfit.engine.memory.fit import Room, Wanted, find_room
from vlfit.engine.memory.kv_resize import Pressure, no_memory_for_the_pool
from vlfit.engine.memory.sleep import Sleep
from vlfit.engine.memory.usage import gpu_uuid, resident_bytes, torch_statistics, weight_holdings
from vlfit.engine.sampling.detokenizer import Detokenizer
from vlfit.engine.sampling.grammar import Constraints
from vlfit.engine.sampling.output_processor import Completion
from vlfit.engine.sampling.sampler import Sampled, is_plain_greedy
from vlfit.engine.scheduling.block_manager import BlockPool
from vlfit.engine.scheduling.prefix_cache import PrefixCache, prompt_keys
from vlfit.engine.scheduling.scheduler import Pace, Scheduler, Work
from vlfit.engine.scheduling.sequence import Listener, PricedPrompt, Sequence
from vlfit.engine.scheduling.speculative import WORTH_ON_CPU, WORTH_ON_GPU, Guesser, with_guesses
from vlfit.errors import DoesNotFit, ModelFailed, UsageError
from vlfit.kernels.gemm.quantized import provide
from vlfit.layers.cpu_linear import halves_on
from vlfit.layers.kv_cache import KVCache
from vlfit.loading.loader import Loader
from vlfit.loading.offload import StreamedLayers
from vlfit.models.decoder import TextModel
from vlfit.models.qwen3_vl.mrope import mrope_positions
from vlfit.models.qwen3_vl.vision import VisionTower
from vlfit.plan.calibration import RESERVE
from vlfit.plan.native.cost import GUESS_ROWS
from vlfit.prompt.builder import Prompt, PromptBuilder, too_long

# The account of an engine, drawn up from what it has at this moment. Any thread may ask: nothing is waited
# for, locked or woken. Knows where each figure lies. Does not know who looks (``account.py`` has the
# records).


def account_of(engine: "Engine") -> EngineAccount:
    """What ``engine`` has done and what it holds."""
    runner, scheduler, pool = engine.runner, engine.scheduler, engine.pool
    asleep = engine.sleep.asleep
    return EngineAccount(
        time.perf_counter() - engine.built,
        _settings(engine),
        len(scheduler.running),
        len(scheduler.waiting),
        Pool(
            pool.blocks,
            pool.blocks - pool.free,
            pool.block_size,
            len(scheduler.prefixes or ()),
            engine.pressure.planned,
        ),
        Holdings(
            dict.fromkeys(engine.weights, 0) if asleep else engine.weights,
            runner.cache.nbytes,
            runner.image_cache.used_bytes,
            runner.image_cache.limit_bytes,
            resident=resident_bytes(),
            resident_before=engine.resident_before,
            graphs=sum(each.nbytes for each in (runner.graphs, runner.recorded) if each is not None),
            **torch_statistics(engine.device),
        ),
        engine.counters,
        scheduler.pauses,
        asleep,
    )


def _settings(engine: "Engine") -> EngineSettings:
    return EngineSettings(
        device=str(engine.device),
        gpu_uuid=engine.gpu_uuid,
        dtype=str(engine.dtype).removeprefix("torch."),
        value_bytes=engine.dtype.itemsize,
        context=engine.context,
        image_tokens=engine.image_tokens,
        sequences=engine.options.sequences,
        chunk=engine.options.chunk,
        kv_tokens=engine.pool.blocks * engine.pool.block_size,
        offload=len(engine.waiting_layers),
        halves=halves_on(engine.device, engine.dtype),
        kv_dtype=engine.kv_dtype,
        speculate=engine.options.speculate,
    )


DEFAULT_CONTEXT = 8192
TYPICAL_REQUEST = 2048  # tokens of a picture, a question and a long answer

logger = logging.getLogger(__name__)

Progress = Callable[[str, float], None]  # what is being done, share done


class Engine:
    def __init__(
        self,
        checkpoint: Checkpoint,
        options: EngineOptions,
        progress: Progress | None = None,
        loader_class: type[Loader] = Loader,
    ) -> None:
        config = checkpoint.config
        self.checkpoint = checkpoint
        self.options = options
        self.counters = Counters()
        self.built = time.perf_counter()
        self.resident_before = resident_bytes()
        self.device = choose_device(options.device)
        self.dtype = choose_dtype(options.dtype, checkpoint, self.device)
        self.kv_dtype = choose_kv_dtype(options.kv_dtype, self.dtype)
        self.context = _context(options.context, checkpoint)
        self.processing = ImageProcessing.read(checkpoint.folder) if config.vision else None
        tell = progress or (lambda what, share: None)
        tell("planning", 0.0)
        room = self._room()
        self.waiting_layers = room.waiting
        provide(self.device, room.means)
        budget = Budget(self.device, room.limit if options.keep_to_plan else None)
        self._budget = budget
        self._loader_class = loader_class
        tell("loading weights", 0.0)
        with self._loader(lambda read, total: tell("loading weights", read / total)) as loader:
            text, vision = self._model(loader)
            # Until the end of the block weights arrive where they stay: recording asks only for that.
            self.prompts = PromptBuilder(checkpoint.folder, config)
            self.generation = GenerationDefaults.read(checkpoint.folder)
            self.constraints = Constraints(self.prompts.tokenizer, self.generation.eos_token_ids)
            pool = BlockPool(room.kv_tokens, options.block_size)
            narrow = self.kv_dtype == FP8
            cache = KVCache(config.text, pool.blocks, pool.block_size, self.dtype, self.device, narrow=narrow)
            self.runner = Runner(
                text,
                vision,
                self.processing,
                cache,
                ImageCache(options.image_cache_bytes if vision else 0),
                self.device,
            )
            if self.device.type == "cuda" and options.graphs and not self.waiting_layers:
                tell("recording decode steps", loader.share)
                rows = GUESS_ROWS if options.speculate else 0
                self.runner.record_graphs(self.context, options.sequences, rows)
        self.passes = Passes(self.runner, budget, self.prompts.token_text)
        self.pool = pool
        prefixes = PrefixCache() if options.prefix_cache else None
        self.scheduler = Scheduler(pool, options.sequences, options.chunk, prefixes)
        self.pace = Pace(options.chunk, options.even)
        watched = options.keep_to_plan and self.device.type == "cuda"
        self.pressure = Pressure(
            self.scheduler,
            cache,
            pool.blocks_for(self.context),
            budget.device_free if watched else None,
            self._release,
        )
        self.sleep = Sleep(
            checkpoint,
            self.runner,
            self.scheduler,
            budget,
            pool.blocks_for(self.context),
            RESERVE.bytes if watched else 0,
            self._release,
            self._load_again,
        )
        self.weights = weight_holdings(text, vision)
        self.gpu_uuid = gpu_uuid(self.device)

    def _loader(self, report: Callable[[int, int], None] | None = None) -> Loader:
        return self._loader_class(self.checkpoint, self.device, self.dtype, report)

    def _model(self, loader: Loader, before: TextModel | None = None) -> tuple[TextModel, VisionTower | None]:
        """Weights as they come to stay: of the text model, then of the vision tower, if there is one."""
        config = self.checkpoint.config
        with torch.inference_mode():
            within = replace(config, text=config.text.within(self.context))
            text = TextModel(within, loader, self.waiting_layers, before)
            vision = config.vision
            if vision is None:
                return text, None
            return text, loader.together(lambda: VisionTower(vision, loader))

    def _load_again(self) -> None:
        with self._loader() as loader:
            self.runner.text, self.runner.vision = self._model(loader, self.runner.text)

    def _room(self) -> Room:
        """The ledger of what comes now. Raises ``DoesNotFit``."""
        options = self.options
        tokens = options.kv_tokens or options.sequences * min(self.context, TYPICAL_REQUEST)
        whole = None if tokens == "auto" else -(-max(tokens, self.context) // options.block_size)
        most_image_tokens = min(self.processing.most_tokens if self.processing else 0, self.context - 1)
        for words in options.changed(self.context, most_image_tokens):
            logger.warning("warning: %s", words)
        wanted = Wanted(
            self.context,
            options.sequences,
            options.chunk,
            None if whole is None else whole * options.block_size,
            options.image_tokens,
            most_image_tokens,
            options.block_size,
            options.offload,
            self.kv_dtype,
            options.speculate,
        )
        room = find_room(self.checkpoint, self.device, self.dtype, wanted)
        self.image_tokens = room.image_tokens
        self.image_limit = options.image_tokens
        if options.image_tokens is None and room.image_tokens < most_image_tokens:
            self.image_limit = room.image_tokens
            logger.info(
                "no room for larger pictures than of %d tokens: they are scaled down", room.image_tokens
            )
        return room

    def _release(self) -> None:
        """Tensors of the cache move: graphs of where they were are of no use, and what was theirs is free."""
        self.runner.release_graphs()
        layers = self.runner.text.layers
        if isinstance(layers, StreamedLayers):
            layers.forget()
        self._budget.release()

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    def account(self) -> EngineAccount:
        """What was done and what is held. Any thread may ask: nothing is waited for, locked or woken."""
        return account_of(self)

    def price(self, prompt: Prompt) -> PricedPrompt:
        """Positions and placeholders of ``prompt``. Raises ``DoesNotFit`` if no token could follow it."""
        if len(prompt.token_ids) >= self.context:
            raise too_long(prompt, self.context, self.processing, self._or_more_context())
        config = self.checkpoint.config
        token_ids = np.array(prompt.token_ids, dtype=np.int64)
        is_visual = np.isin(token_ids, (config.image_token_id, config.video_token_id))
        grids = [image.grid for image in prompt.images]
        merge = config.vision.spatial_merge_size if config.vision else 1
        positions, next_position = mrope_positions(is_visual, grids, merge)
        places = np.flatnonzero(is_visual)
        keys = prompt_keys(token_ids, places, prompt.images, self.options.block_size)
        return PricedPrompt(token_ids, places, positions, next_position, prompt.images, keys)

    def max_tokens(self, prompt_tokens: int, sampling: SamplingParams) -> int:
        """How long the completion may become. Raises ``DoesNotFit`` if more was asked for than there is."""
        room = self.context - prompt_tokens
        if sampling.max_tokens is None:
            return min(room, self.options.max_tokens)
        if sampling.max_tokens > room:
            raise DoesNotFit(
                f"max_tokens {sampling.max_tokens} and a prompt of {prompt_tokens} tokens are more than the "
                f"context of {self.context}",
                ", or ".join(filter(None, (f"ask for at most {room} tokens", self._or_more_context()))),
                param="max_tokens",
            )
        return sampling.max_tokens

    def _or_more_context(self) -> str:
        most = self.checkpoint.config.text.max_position_embeddings
        return f"start with a larger --context (at most {most})" if self.context < most else ""

    def sequence(
        self, prompt: PricedPrompt, sampling: SamplingParams, listener: Listener, asked: float | None = None
    ) -> Sequence:
        """A request ready to be added. Touches no shared state, so any thread may call it.

        ``asked``: when its preparation began (``time.perf_counter``), for the time to the first token.
        """
        asked = time.perf_counter() if asked is None else asked
        max_tokens = self.max_tokens(prompt.tokens, sampling)
        eos = frozenset(self.generation.eos_token_ids)
        completion = Completion(Detokenizer(self.prompts.tokenizer), sampling, eos, max_tokens)
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        form = self.constraints.of(sampling.form)
        guesser = None
        if self.options.speculate and is_plain_greedy(sampling):
            guesser = Guesser(prompt, WORTH_ON_CPU if self.device.type == "cpu" else WORTH_ON_GPU)
        wishes = (prompt, sampling, max_tokens, completion, listener, asked)
        return Sequence(*wishes, seed=seed, constraint=form, guesser=guesser)

    def add(self, sequence: Sequence) -> None:
        self.scheduler.add(sequence)

    def step(self) -> None:
        """One forward pass for whoever can run. What fails ends its own request, and no other."""
        self._drop_cancelled()
        try:
            self.pressure.relieve()
        except torch.OutOfMemoryError:
            self.fail_all(no_memory_for_the_pool())
            return
        for sequence in self.scheduler.admit():
            if sequence.copy is not None:
                self.runner.cache.copy(*sequence.copy)
            if sequence.admitted is None:  # not one that was paused
                sequence.admitted = time.perf_counter()
                sequence.shared = sequence.cached
                shared = self.counters.shared_tokens + sequence.shared
                self.counters = replace(self.counters, shared_tokens=shared)
        batch = self.scheduler.next_batch(self.pace.room())
        if not batch:
            return
        alike = not self.scheduler.waiting
        guessed = with_guesses(batch, min(GUESS_ROWS, self.options.chunk), self.pool.block_size)
        if guessed is not batch:
            # A pass that is under way already is taken as it is, but none behind it: guesses are next.
            batch, alike = batch if self.runner.is_ahead(batch) else guessed, False
        began = time.perf_counter()
        outcome = self.passes.run(batch, alike=alike)
        for sequence, error in outcome.failed:
            self._fail([sequence], error)
        works = [done.work for done in outcome.done]
        if not works:
            return
        prompt_tokens = sum(work.length for work in works if not work.sequence.decoding)
        self.counters = self.counters.after_step(
            time.perf_counter() - began,
            prompt_tokens=prompt_tokens,
            sampled=sum(done.sampled is not None for done in outcome.done),
            cached=sum(work.sequence.cached for work in works),
            again=outcome.again,
            guessed=sum(len(work.guesses) for work in works),
        )
        if outcome.seconds is not None and works[0].sequence.decoding:
            self.pace.note(prompt_tokens, outcome.seconds)
        for work in works:
            self.scheduler.advance(work)
        for done in outcome.done:
            if isinstance(done.sampled, ModelFailed):
                self._fail([done.work.sequence], done.sampled)
            elif done.sampled is not None:
                self._deliver(done.work.sequence, done.sampled)
                self._deliver_guessed(done)

    def fail_all(self, error: Exception) -> None:
        """End every request with ``error``: the engine is going away."""
        self._fail([*self.scheduler.running, *self.scheduler.waiting], error)

    def _deliver(self, sequence: Sequence, sampled: Sampled) -> None:
        now = time.perf_counter()
        sequence.first_token = sequence.first_token or now
        sequence.generated.append(sampled.token_id)
        if sequence.constraint is not None:
            sequence.constraint.take(sampled.token_id)
        chunk = sequence.completion.add(sampled.token_id, sampled.logprobs)
        if chunk.finish_reason is None:
            self._tell(sequence, chunk)
        else:
            self._finish(sequence, chunk, now)

    def _deliver_guessed(self, done: Done) -> None:
        """What was guessed and has come true, as if each had come of a pass of its own."""
        sequence = done.work.sequence
        if sequence.guesser is not None and done.work.guesses:
            sequence.guesser.learn(len(done.more))
        for sampled in done.more:
            if sequence not in self.scheduler.running:  # one of them was its last
                return
            if sequence.constraint is not None and not sequence.constraint.allows(sampled.token_id):
                return  # the next pass chooses another
            self.counters = self.counters.after_guess()
            self.scheduler.advance(Work(sequence, 1))
            self._deliver(sequence, sampled)

    def _finish(self, sequence: Sequence, chunk: Chunk, now: float) -> None:
        self._let_go(sequence)
        ended = "cancelled" if chunk.finish_reason == "cancelled" else "finished"
        self.counters = replace(self.counters, **{ended: getattr(self.counters, ended) + 1})
        prompt = sequence.prompt
        usage = Usage(prompt.tokens, len(prompt.placeholders), len(sequence.generated), sequence.shared)
        timings = Timings(
            queued_s=(sequence.admitted or now) - sequence.arrived,
            first_token_s=(sequence.first_token or now) - sequence.asked,
            total_s=now - sequence.asked,
            completion_tokens=len(sequence.generated),
        )
        self._tell(sequence, Chunk(chunk.text, chunk.logprobs, chunk.finish_reason, usage, timings))

    def _drop_cancelled(self) -> None:
        for sequence in [*self.scheduler.running, *self.scheduler.waiting]:
            if sequence.cancelled:
                self._finish(sequence, Chunk("", finish_reason="cancelled"), time.perf_counter())

    def _fail(self, sequences: list[Sequence], error: Exception) -> None:
        for sequence in sequences:
            self._let_go(sequence, failed=True)
            self.counters = replace(self.counters, failed=self.counters.failed + 1)
            self._tell(sequence, error)

    def _tell(self, sequence: Sequence, arrival: Chunk | Exception) -> None:
        """A listener that fails has gone away: its request ends, the others go on."""
        try:
            sequence.listener(arrival)
        except Exception:
            logger.exception("a listener failed; its request is dropped")
            self._let_go(sequence)

    def _let_go(self, sequence: Sequence, *, failed: bool = False) -> None:
        """Blocks and tensors: whoever asked may keep the sequence itself for as long as they like."""
        self.scheduler.remove(sequence, failed=failed)
        sequence.features.clear()
        sequence.slots = None
        sequence.guesser = None


def _context(wish: int | None, checkpoint: Checkpoint) -> int:
    """Tokens of the longest sequence. Raises ``UsageError`` for more than the checkpoint was made for."""
    text = checkpoint.config.text
    most = text.max_position_embeddings
    if wish is not None and wish > most:
        why = f": its attention slides over {most}, which vlfit does not do" if text.window == most else ""
        raise UsageError(
            f"a context of {wish} tokens was asked for; {checkpoint.name} runs with at most {most}{why}",
            f"use --context {most} or less",
        )
    return wish or min(DEFAULT_CONTEXT, text.usual_context)
