"""A trace of the native engine: every number that the reference has too, taken while a request runs.

The request goes through ``prepare``, ``submit`` and ``step`` as any other. The engine's own modules are
wrapped for that time by objects that pass every call on and keep a copy of what goes in or comes out; no
arithmetic is added or left out. Tokens are the engine's own greedy ones. Once the prompt is computed, all is
as before, so decoding is seen as users have it: with CUDA graphs, fused, or as one call on a CPU.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vlfit.api.conversation import Conversation
from vlfit.api.outputs import Chunk
from vlfit.api.sampling_params import SamplingParams
from vlfit.engine.engine import NativeEngine
from vlfit.engine.sampling.sampler import StepOutput
from vlfit.engine.scheduling.sequence import ScheduledChunk, Sequence
from vlfit.errors import ModelFailed
from vlfit.layers.cpu_stored import StoredLinear
from vlfit.layers.kv_cache import slots_of_blocks
from vlfit.models.interface import EncoderRunner, Grid, PreparedImage, VisionFeatures
from vlfit.models.qwen3_vl.vision import ResidualStream

Trace = dict[str, Tensor]  # stage to numbers, on the CPU


@dataclass
class EngineTrace:
    """What the engine computed for one request, stage by stage, and the tokens that it generated.

    ``stages``: tensors by name, those of the reference's trace and more of each layer: ``layer.N.hidden`` is
    the residual that enters text layer N, ``layer.N.attention`` and ``layer.N.mlp`` what its halves add,
    ``layer.N.key`` and ``layer.N.value`` what the KV cache holds of the prompt after its prefill. Layers of
    the tower have the first three. The last text layer has rows of tokens with logits only. ``grids``:
    frames, rows and columns of each picture, in patches. ``deepstack_after``: layers of the tower whose
    output goes to text layers, too. ``error``: NaN or infinity ended the request; then all that was computed
    until then is here, but for the KV cache if no token was generated.
    """

    stages: Trace = field(default_factory=dict)
    generated: tuple[int, ...] = ()
    grids: tuple[Grid, ...] = ()
    text_layers: int = 0
    tower_layers: int = 0
    deepstack_after: tuple[int, ...] = ()
    error: ModelFailed | None = None

    @property
    def prompt_tokens(self) -> int:
        return len(self.stages["tokens"])


class _Recorder:
    """Copies by name; rows of several passes (chunks, pictures, slices) are joined in order."""

    def __init__(self) -> None:
        self.parts: dict[str, list[Tensor]] = {}
        self.open = True

    def keep(self, name: str, tensor: Tensor, *, add: Tensor | None = None) -> None:
        """Copy ``tensor``, plus ``add``, in float32 to the CPU."""
        if self.open:
            wide = tensor.detach().to("cpu", torch.float32, copy=True)
            self.parts.setdefault(name, []).append(wide if add is None else wide + add.detach().float().cpu())

    def trace(self) -> Trace:
        return {name: parts[0] if len(parts) == 1 else torch.cat(parts) for name, parts in self.parts.items()}


class _Passing:
    """Passes every attribute of ``inner`` on."""

    def __init__(self, inner: Any, recorder: _Recorder, name: str = "") -> None:
        self._inner, self._recorder, self._name = inner, recorder, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Called(_Passing):
    """A function or a layer of which the output is kept."""

    def __call__(self, *args: Any) -> Tensor:
        out: Tensor = self._inner(*args)
        self._recorder.keep(self._name, out)
        return out


class _Entered(_Passing):
    """A linear layer of which the input is kept."""

    def __call__(self, x: Tensor) -> Tensor:
        self._recorder.keep(self._name, x)
        out: Tensor = self._inner(x)
        return out


class _EnteredStored(StoredLinear):
    """The same of one whose weights stay as stored: by its class a CPU chooses what computes the rest."""

    def __init__(self, inner: StoredLinear, recorder: _Recorder, name: str) -> None:
        super().__init__(inner.parts, inner.bias)
        self._recorder, self._name = recorder, name

    def __call__(self, x: Tensor) -> Tensor:
        self._recorder.keep(self._name, x)
        return super().__call__(x)


class _RecordedLayer(_Passing):
    """A text layer: what enters it, and what both halves give.

    On a CPU also what its norms give: the inputs of its first projections. (On a GPU their class decides
    which kernel runs, so they stay as they are.)
    """

    def attend(self, hidden: Tensor, delta: Tensor | None, *rest: Any) -> Tensor:
        self._recorder.keep(f"{self._name}.hidden", hidden, add=delta)
        out: Tensor
        with self._entered("qkv" if hasattr(self._inner, "qkv") else "qkv_z", "input_norm", hidden):
            out = self._inner.attend(hidden, delta, *rest)
        self._recorder.keep(f"{self._name}.attention", out)
        return out

    @contextmanager
    def _entered(self, linear: str, stage: str, hidden: Tensor) -> Iterator[None]:
        """Keep what enters the projection ``linear`` as ``stage``, on a CPU."""
        with ExitStack() as stack:
            if hidden.device.type == "cpu":
                inner = getattr(self._inner, linear)
                kind = _EnteredStored if isinstance(inner, StoredLinear) else _Entered
                wrapped = kind(inner, self._recorder, f"{self._name}.{stage}")
                _replace(stack, self._inner, linear, wrapped)
            yield

    def feed_forward(self, hidden: Tensor, delta: Tensor) -> Tensor:
        out: Tensor
        with self._entered("gate_up", "post_norm", hidden):
            out = self._inner.feed_forward(hidden, delta)
        self._recorder.keep(f"{self._name}.mlp", out)
        # ``feed_forward`` has added ``delta`` to ``hidden``.
        self._recorder.keep(f"{self._name}.out", hidden, add=out)
        return out


class _RecordedLayers:
    """The layers of a text model, also where they are streamed from RAM."""

    def __init__(self, layers: Any, recorder: _Recorder) -> None:
        self._layers, self._recorder = layers, recorder

    def __len__(self) -> int:
        return len(self._layers)

    def __iter__(self) -> Iterator[_RecordedLayer]:
        for index, layer in enumerate(self._layers):
            yield _RecordedLayer(layer, self._recorder, f"layer.{index}")


class _RecordedText(_Passing):
    """A text model whose final norm and logits are kept; its two halves are what a call of it runs."""

    def __call__(self, *inputs: Any) -> Tensor:
        if inputs[-1] is None:  # a pass of decoding, which may be fused
            whole: Tensor = self._inner(*inputs)
            return whole
        states = self.hidden_states(*inputs)
        logits: Tensor = self._inner.head(states)
        return logits

    def hidden_states(self, *inputs: Any) -> Tensor:
        states: Tensor = self._inner.hidden_states(*inputs)
        self._recorder.keep("norm", states)
        return states


class _RecordedBlock(_Passing):
    """A block of the vision tower, which adds to its rows."""

    def __call__(self, stream: ResidualStream, *rest: Any) -> None:
        self._recorder.keep(f"{self._name}.hidden", stream.sum())
        block = self._inner
        projection, second = block.projection, block.fc2
        block.projection = _Called(projection, self._recorder, f"{self._name}.attention")
        block.fc2 = _Called(second, self._recorder, f"{self._name}.mlp")
        try:
            block(stream, *rest)
        finally:
            block.projection, block.fc2 = projection, second
        self._recorder.keep(self._name, stream.sum())


class _RecordedTower(_Passing):
    """A vision tower: its patches, and the rows that it gives."""

    def __call__(
        self, patches: Iterable[Tensor], grid: Grid, runner: EncoderRunner | None = None
    ) -> VisionFeatures:
        def kept() -> Iterator[Tensor]:
            for frame in patches:
                self._recorder.keep("patches", frame)
                yield frame

        features: VisionFeatures = self._inner(kept(), grid, None)
        self._recorder.keep("tower.merged", features.rows)
        for level, rows in enumerate(features.deepstack):
            self._recorder.keep(f"tower.deepstack.{level}", rows)
        return features


def engine_trace(
    engine: NativeEngine, conversation: Conversation, tokens: int = 32, template_variables: str | None = None
) -> EngineTrace:
    """Run ``conversation`` in ``engine`` alone, greedily for ``tokens`` tokens (2 or more); return its trace.

    The engine must have no request and be awake; call it on the thread that steps the engine. Pictures are
    encoded anew: the encoder cache is emptied. With a prefix cache that holds the prompt's beginning the
    hidden states of that part are not computed, and missing. Raises what ``prepare`` raises, and the
    request's error, but for ``ModelFailed``.
    """
    if tokens < 2:
        raise ValueError("a trace takes at least 2 tokens")
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, template_variables=template_variables)
    prepared = engine.prepare(conversation, params)
    result, errors = EngineTrace(), list[Exception]()

    def listen(item: Chunk | Exception) -> None:
        if isinstance(item, Exception):
            errors.append(item)

    sequence = engine.make_request(prepared, params, listen)
    recorder = _Recorder()
    engine.runner.encoder_cache.clear()
    logits: list[Tensor] = []
    with _watching(engine, logits), _recording(engine, recorder) as wrapped:
        engine.submit(sequence)
        while engine.busy:
            engine.step()
            if recorder.open and sequence.generated:
                recorder.open = False
                wrapped.close()
                recorder.parts |= {name: [rows] for name, rows in _cached_rows(engine, sequence).items()}
            if errors:
                break
    if errors:
        if not isinstance(errors[0], ModelFailed):
            raise errors[0]
        result.error = errors[0]
    result.generated = tuple(sequence.generated)
    result.stages = _named(recorder.trace(), engine, sequence, prepared.prompt.images)
    if result.error is not None:
        logits = logits[: max(len(result.generated), 1)]
    elif not logits or len(logits) != len(result.generated):
        raise ModelFailed(
            f"{len(logits)} rows of logits were seen for {len(result.generated)} tokens",
            "Turn speculative decoding off.",
        )
    result.stages |= {f"forced.{step - 1}" if step else "logits": row for step, row in enumerate(logits)}
    result.grids = tuple(image.grid for image in prepared.prompt.images)
    result.text_layers = len(engine.runner.text.layers)
    tower: Any = engine.runner.vision
    if tower is not None:
        result.tower_layers = len(tower.blocks)
        result.deepstack_after = tuple(tower.deepstack_mergers)
    return result


def _named(
    recorded: Trace, engine: NativeEngine, sequence: Sequence, images: tuple[PreparedImage, ...]
) -> Trace:
    """Stages of ``recorded`` in the reference's names, with what ``prepare`` made of the prompt."""
    stages: Trace = {
        "tokens": torch.from_numpy(sequence.prompt.token_ids.copy()),
        "positions": torch.from_numpy(sequence.prompt.positions.copy()),
        "next_position": torch.tensor([sequence.prompt.next_position]),
    }
    for number, image in enumerate(images):
        pixels = torch.from_numpy(image.pixels.copy())
        stages["pixels" if not number else f"pixels.{number}"] = pixels[0] if len(pixels) == 1 else pixels
    stages |= recorded
    if "layer.0.hidden" in recorded:
        stages["embedding"] = recorded["layer.0.hidden"]
    if "tower.layer.0.hidden" in recorded:
        stages["tower.embedding"] = recorded["tower.layer.0.hidden"]
    last = len(engine.runner.text.layers) - 1
    for index in range(last):  # deepstack rows are added after a layer, so what enters the next one counts
        if f"layer.{index + 1}.hidden" in recorded:
            stages[f"layer.{index}"] = recorded[f"layer.{index + 1}.hidden"]
    if f"layer.{last}.out" in recorded:
        stages[f"layer.{last}"] = recorded[f"layer.{last}.out"]
    return stages


def _cached_rows(engine: NativeEngine, sequence: Sequence) -> Trace:
    """Keys and values of the prompt in the KV cache, of layers that have any: [tokens, heads, head_dim]."""
    cache = engine.runner.cache
    slots = slots_of_blocks(sequence.block_table, cache.block_size).to(engine.device)
    slots = slots[: sequence.prompt.num_tokens]
    rows: Trace = {}
    for index in range(len(engine.runner.text.layers)):
        if index not in cache.states:
            keys, values = cache.read(index, slots)
            rows[f"layer.{index}.key"] = keys.float().cpu()
            rows[f"layer.{index}.value"] = values.float().cpu()
    return rows


@contextmanager
def _watching(engine: NativeEngine, logits: list[Tensor]) -> Iterator[None]:
    """Append to ``logits`` those of each row that is sampled."""
    runner = engine.runner
    run: Callable[[list[ScheduledChunk]], StepOutput] = runner.run

    def watched(batch: list[ScheduledChunk]) -> StepOutput:
        output = run(batch)
        if any(chunk.needs_sampling for chunk in batch):
            logits.extend(output.logits.float().cpu().clone())
        return output

    with ExitStack() as stack:
        _replace(stack, runner, "run", watched)
        yield


@contextmanager
def _recording(engine: NativeEngine, recorder: _Recorder) -> Iterator[ExitStack]:
    """Wrap the modules of ``engine``; when the stack that it yields is closed, everything is as before."""
    runner = engine.runner
    text, tower = runner.text, runner.vision
    with ExitStack() as stack:

        def replace(owner: Any, name: str, value: Any) -> None:
            _replace(stack, owner, name, value)

        replace(text, "layers", _RecordedLayers(text.layers, recorder))
        replace(runner, "text", _RecordedText(text, recorder))
        if tower is not None and (blocks := getattr(tower, "blocks", None)) is not None:
            recorded = [
                _RecordedBlock(block, recorder, f"tower.layer.{index}") for index, block in enumerate(blocks)
            ]
            replace(tower, "blocks", recorded)
            replace(runner, "vision", _RecordedTower(tower, recorder))
        yield stack


def _replace(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute until ``stack`` closes."""
    had = name in vars(owner)
    before = vars(owner).get(name)
    setattr(owner, name, value)
    stack.callback(setattr, owner, name, before) if had else stack.callback(delattr, owner, name)
