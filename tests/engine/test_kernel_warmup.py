"""The warm-up launches every kernel that requests launch: none is compiled later.

On a GPU Triton itself is watched; without one, launches are recorded with what Triton would compile a new
variant for.
"""

import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import ON_GPU
from vlfit import kernels
from vlfit.api.engine_options import EngineOptions
from vlfit.api.stats import Counters
from vlfit.checkpoint.source import open_checkpoint
from vlfit.engine.engine import NativeEngine
from vlfit.engine.execution import warmup
from vlfit.engine.execution.model_runner import ModelRunner
from vlfit.engine.execution.warmup import image_prompt, run_requests, text_prompt
from vlfit.engine.memory.usage import tensors_in
from vlfit.engine.sampling import sampler
from vlfit.engine.sampling.sampler import StepOutput
from vlfit.engine.scheduling.sequence import ScheduledChunk
from vlfit.kernels.sampling.draw import sample_tokens
from vlfit.prompt.builder import Prompt

OPTIONS = EngineOptions(
    max_model_len=1500, max_num_batched_tokens=600, max_num_seqs=20, image_tokens=200, kv_tokens=20_000
)
ROUNDS = 6
WISHES: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.0},
    {"top_k": 7},
    {"top_k": 300, "min_p": 0.1},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 1.0, "top_logprobs": 3},
)


def started(folder: Path, **options: Any) -> NativeEngine:
    built = NativeEngine(open_checkpoint(folder), EngineOptions(**(vars_of(OPTIONS) | options)))
    warmup.profile_peak_memory(built)
    warmup.warm_up_kernels(built)
    return built


def vars_of(options: EngineOptions) -> dict[str, Any]:
    names = ("max_model_len", "max_num_batched_tokens", "max_num_seqs", "image_tokens", "kv_tokens")
    return {name: getattr(options, name) for name in names}


def serve(built: NativeEngine, chance: random.Random) -> None:
    """Prompts of any length, pictures of any size, some who come while others speak."""

    def one() -> tuple[Any, int]:
        tokens = chance.choice((chance.randint(1, 40), chance.randint(1, 700)))
        if chance.random() < 0.4 and built.image_processor_config is not None:
            # The factory's smallest picture has as many tokens as the sizes begin with.
            least = next(warmup.image_token_sizes(built))
            return about_some(
                built, [chance.randint(least, 200) for _ in range(chance.randint(1, 3))], tokens
            )
        return text_prompt(tokens), chance.randint(1, 5)

    for _ in range(ROUNDS):
        first = [one() for _ in range(chance.randint(1, 19))]
        late = [one() for _ in range(chance.randint(0, 4))]
        run_requests(built, first, late, chance.sample(WISHES, len(WISHES)))


def about_some(built: NativeEngine, sizes: list[int], tokens: int) -> tuple[Prompt, int]:
    """A prompt with pictures of so many tokens, and text before them; three tokens are answered."""
    prompts = [image_prompt(built, size, size) for size in sizes]
    ids = tuple(token for prompt in prompts for token in prompt.token_ids)
    images = tuple(image for prompt in prompts for image in prompt.images)
    before = text_prompt(max(min(tokens, 700 - len(ids)), 1)).token_ids
    return Prompt(before + ids, images, sum(sizes)), 3


class Launches:
    """What kernels were launched with, as far as Triton compiles another for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from triton.runtime.interpreter import InterpretedFunction

        self.seen: set[tuple[Any, ...]] = set()
        self.most_features = 0  # rows of pictures that are there in one pass
        self._counting = True

        def look(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
            if self._counting:
                apart = kernel.kwargs.get("do_not_specialize") or ()
                given = dict(zip(kernel.arg_names, arguments, strict=False))
                apart = (*apart, *(kernel.kwargs.get("do_not_specialize_on_alignment") or ()))
                kinds = tuple((name, kind_of(value, name not in apart)) for name, value in given.items())
                self.seen.add((kernel.fn.__name__, kinds, tuple(sorted(named.items(), key=str))))

        run = ModelRunner.run

        def watched(runner: ModelRunner, batch: list[ScheduledChunk], *more: Any) -> Any:
            # On a GPU these are graphs, recorded before all else.
            self._counting = not all(work.sequence.is_decoding for work in batch)
            try:
                scores = run(runner, batch, *more)
            finally:
                self._counting = True
            scores.logits.zero_()  # which nobody has computed
            features = [each for work in batch for each in work.sequence.features.values()]
            self.most_features = max(self.most_features, sum(len(each.rows) for each in features))
            return scores

        monkeypatch.setattr(InterpretedFunction, "run", look)
        monkeypatch.setattr(ModelRunner, "run", watched)
        monkeypatch.setattr(StepOutput, "read", read)
        monkeypatch.setattr(sampler, "sample_tokens", lambda *of, **more: sample_tokens(*of, **more).zero_())
        monkeypatch.setattr(kernels, "enabled_on", lambda _: True)


def read(scores: StepOutput) -> tuple[list[int], list[bool], list[bool]]:
    """Nothing was drawn where it could have been, so that the host's ways are gone through as well."""
    count = len(scores.logits)
    return [0] * count, [True] * count, [False] * count


def kind_of(argument: Any, specialized: bool) -> Any:
    if isinstance(argument, Tensor):
        return argument.dtype, specialized and argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return specialized and (argument % 16 == 0, argument == 1)
    return type(argument)


@pytest.mark.skipif(ON_GPU, reason="on a GPU the next test watches Triton itself")
@pytest.mark.parametrize("name", ["tied", "fp8"])
def test_no_request_launches_what_the_start_did_not(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    launches = Launches(monkeypatch)
    at_defragment: list[int] = []
    monkeypatch.setattr(NativeEngine, "defragment", lambda _: at_defragment.append(launches.most_features))
    built = started(tiny(name), device="cpu")
    assert built.counters == Counters()
    assert built.block_manager.num_free == built.block_manager.num_blocks
    assert len(built.runner.text.layers) == built.checkpoint.config.text.num_hidden_layers
    tower: Any = built.runner.vision
    assert len(tower.blocks) == built.checkpoint.config.required_vision.depth
    before, most_features = set(launches.seen), launches.most_features
    serve(built, random.Random(4))
    assert built.counters.failed == 0
    assert launches.seen - before == set()
    assert len(before) > 15
    # Pools of memory grow with them, too.
    assert most_features > 600 + 200  # those of a whole pass, and of what it reaches of large pictures
    assert launches.most_features <= most_features
    assert at_defragment == [most_features]  # so the pool's one segment is large enough for them


class CountedTower:
    """A vision tower that counts the image tokens of each call."""

    def __init__(self, tower: Any) -> None:
        self._tower = tower
        self.encoded: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tower, name)

    def __call__(self, *arguments: Any) -> Any:
        features = self._tower(*arguments)
        self.encoded.append(len(features.rows))
        return features


@pytest.mark.skipif(ON_GPU, reason="on a GPU pictures are encoded for the graph of the tower, too")
@pytest.mark.parametrize(("image_tokens", "times"), [(400, 1), (40, 3)])
def test_a_card_encodes_the_largest_picture_once(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, image_tokens: int, times: int
) -> None:
    """Unless a pass has several of them."""
    Launches(monkeypatch)
    options = EngineOptions(
        device="cpu", max_model_len=512, max_num_batched_tokens=64, max_num_seqs=2, image_tokens=image_tokens
    )
    built = NativeEngine(open_checkpoint(tiny("tied")), options)
    tower = CountedTower(built.runner.vision)
    monkeypatch.setattr(built.runner, "vision", tower)
    seen = warmup.run_worst_case(built, image_tokens)
    assert seen.num_images == 1
    assert len([tokens for tokens in tower.encoded if tokens == image_tokens]) >= times
    assert (len(tower.encoded) == 1) is (times == 1)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["tied", "fp8"])
def test_nothing_is_compiled_for_a_request(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    from triton.runtime.jit import JITFunction

    compiled: list[str] = []
    compile_it = JITFunction._do_compile

    def watched(kernel: Any, *arguments: Any, **named: Any) -> Any:
        compiled.append(kernel.fn.__name__)
        return compile_it(kernel, *arguments, **named)

    monkeypatch.setattr(JITFunction, "_do_compile", watched)
    built = started(tiny(name), device="cuda", dtype="bfloat16")
    assert built.counters == Counters()
    compiled.clear()  # other tests may have had all of them compiled before
    serve(built, random.Random(4))
    torch.cuda.synchronize()
    assert compiled == []


def test_few_layers_follow_each_other_as_all_do() -> None:
    """The first kernel of a layer may do the end of the one before, so pairs of kinds count."""
    folder = Path(__file__).parents[1] / "mini35"
    built = NativeEngine(open_checkpoint(folder), EngineOptions(device="cpu", max_model_len=256))
    built.runner.text.layers = [*built.runner.text.layers] * 3  # with full attention before linear attention

    def pairs() -> set[tuple[Any, Any]]:
        shapes = [tuple(each.shape for each in tensors_in(layer)) for layer in built.runner.text.layers]
        return set(pairwise(shapes))

    every, number = pairs(), len(built.runner.text.layers)
    with warmup.few_layers(built):
        assert pairs() == every
        assert len(built.runner.text.layers) < number
    assert len(every) == 3
    assert len(built.runner.text.layers) == number
