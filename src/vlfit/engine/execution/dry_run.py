"""An engine without a card: its start on torch's meta device, to know every kernel that it launches.

The engine itself runs: it builds its layers, captures decode steps, runs the worst case and the warm-up.
Tensors have no bytes, weights are not read, and launches are recorded. What the host reads of the card is
made up: every token is 1.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from vlfit.api.engine_options import EngineOptions
from vlfit.checkpoint.headers import TensorInfo
from vlfit.checkpoint.source import MINI, Checkpoint, mini_folder, read_checkpoint
from vlfit.checkpoint.tensors import G_IDX_SUFFIX
from vlfit.engine.engine import NativeEngine
from vlfit.engine.execution import warmup
from vlfit.engine.memory.fit import MemoryFit
from vlfit.engine.sampling.sampler import StepOutput
from vlfit.engine.scheduling.sequence import ScheduledChunk
from vlfit.kernels.launches import Launch, record_launches
from vlfit.kernels.target import TargetCard, simulate_card
from vlfit.loading.loader import Loader
from vlfit.plan.native.tiles import DEFAULT_DEQUANT_CONFIG, DequantConfig

_META = torch.device("meta")
_HOST = torch.device("cpu")
_TOKEN = 1
_IMAGE_TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
_MOST_IMAGE_TOKENS = 4096  # kernels of larger pictures are the same


def engine_launches(
    checkpoint: Checkpoint,
    options: EngineOptions,
    card: TargetCard,
    dequant: DequantConfig = DEFAULT_DEQUANT_CONFIG,
    found: Callable[[Launch], None] = lambda launch: None,
) -> dict[Launch, int]:
    """The launches of an engine's start on ``card``, in order, with how often each is asked for.

    Of ``checkpoint`` only config and headers are used: its weights need not be here. Pictures are as large as
    options and context allow. ``dequant``: as in ``MemoryFit``. ``found``: told each launch when it is first
    asked for. Raises what the engine raises. Changes global state of the kernels, so for a process of its
    own.
    """
    with (
        simulate_card(card),
        record_launches(found) as launches,
        _UnreadTensors(),
        torch.no_grad(),
        ExitStack() as short,
    ):
        engine = _DryEngine(checkpoint, options, dequant, short)
        warmup.profile_peak_memory(engine)
        warmup.warm_up_kernels(engine)
        return dict(launches)


class HollowLoader(Loader):
    """The loader without reading: tensors have their shapes, and no bytes."""

    def _copy(self, info: TensorInfo, target: Tensor, *, asynchronous: bool = False) -> None:
        pass

    def _order(self, name: str) -> Tensor | None:
        stored = self.checkpoint.tensors.get(f"{name}{G_IDX_SUFFIX}")
        return None if stored is None else torch.arange(stored.shape[0])


class _DryEngine(NativeEngine):
    """The engine on the meta device, which the caller has made a card. mini lends the tokenizer.

    From the first launch on it has a few layers of each kind, until ``short`` ends: the rest launch the same
    kernels.
    """

    def __init__(
        self, checkpoint: Checkpoint, options: EngineOptions, dequant: DequantConfig, short: ExitStack
    ) -> None:
        self._dequant = dequant
        super().__init__(
            _with_minis_tokens(checkpoint),
            options,
            loader_class=HollowLoader,
            before_launches=lambda: short.enter_context(warmup.few_layers(self)),
        )
        run = self.runner.run

        def run_and_make_up(batch: list[ScheduledChunk]) -> StepOutput:
            output = run(batch)
            rows = output.summary.shape[1]
            # Not sampled on the card: so what the host launches to sample a row is launched, too.
            summary = torch.tensor([[_TOKEN] * rows, [1] * rows, [0] * rows])
            return replace(output, summary=summary)

        self.runner.run = run_and_make_up  # type: ignore[method-assign]

    def _choose_device(self) -> torch.device:
        return _META

    def _check_fit(self) -> MemoryFit:
        options = self.options
        blocks = options.max_num_seqs * -(-self.context // options.block_size)
        has_vision = self.checkpoint.config.vision is not None
        self.image_tokens = min(self.context - 1, options.image_tokens or _MOST_IMAGE_TOKENS) * has_vision
        self.image_limit = self.image_tokens
        tokens = blocks * options.block_size
        return MemoryFit(
            (),
            0,
            0,
            tokens,
            self.image_tokens,
            dequant_config=self._dequant,
            # With less memory than it needs there is none, and some kernels are compiled for nothing.
            draft_model=options.speculate is not False,
        )


def _with_minis_tokens(checkpoint: Checkpoint) -> Checkpoint:
    """``checkpoint`` with mini's tokenizer and settings of pictures, on which no kernel depends.

    With its own if its patches have another size, or it is of a text-only model: then its files must be here.
    """
    mini = read_checkpoint(MINI, mini_folder())
    vision, other = checkpoint.config.vision, mini.config.required_vision
    sizes = ("patch_size", "temporal_patch_size", "spatial_merge_size")
    if vision is None or any(getattr(vision, name) != getattr(other, name) for name in sizes):
        return checkpoint
    tokens = {name: getattr(mini.config, name) for name in _IMAGE_TOKENS}
    return replace(checkpoint, folder=mini.folder, config=replace(checkpoint.config, **tokens))


class _UnreadTensors(TorchDispatchMode):
    """Copies of meta tensors to the host are tensors of ones; what has no shape on meta is computed there."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._can_decompose() and _composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        packet = func.overloadpacket
        first: Any = args[0] if args else None
        if packet is torch.ops.aten._local_scalar_dense and first.is_meta:
            return func(torch.ones((), dtype=first.dtype))
        if packet is torch.ops.aten._to_copy and first.is_meta and kwargs.get("device") == _HOST:
            return torch.ones(first.shape, dtype=kwargs.get("dtype") or first.dtype)
        if packet is torch.ops.aten.copy_ and not first.is_meta and args[1].is_meta:
            return first
        try:
            return func(*args, **kwargs)
        except NotImplementedError:
            on_host = tree_map_only(Tensor, lambda each: torch.ones(each.shape, dtype=each.dtype), args)
            return tree_map_only(Tensor, lambda each: each.to(_META), func(*on_host, **kwargs))


def _composite(func: Any) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))
