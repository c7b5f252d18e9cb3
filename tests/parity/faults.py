"""Named faults, put into the engine or into its copy of a checkpoint, and the component that must be named.

A fault changes what the engine runs and nothing that the reference uses. ``run_fault`` runs all checks over
one; ``benchmarks/verify_faults.py`` runs the table.
"""

import dataclasses
import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vlfit.api.engine_options import EngineOptions
from vlfit.checkpoint.source import open_checkpoint
from vlfit.engine.engine import NativeEngine
from vlfit.parity.findings import CheckReport, Component, Level
from vlfit.parity.run_checks import ReferenceFactory, run_checks

Patch = pytest.MonkeyPatch
C = Component


@dataclass(frozen=True)
class Fault:
    """One fault.

    ``names``: components that name it rightly. ``patch``: changes modules before an engine is built;
    ``change``: an engine after; ``edit``: its copy of the checkpoint. ``spec``: of ``tests/tiny.py``.
    ``both``: the copy is the reference's, too, as a file on the user's disk is.
    """

    name: str
    names: tuple[Component, ...]
    patch: Callable[[Patch], None] | None = None
    change: Callable[[NativeEngine], None] | None = None
    edit: Callable[[Path], None] | None = None
    spec: str = "tied"
    level: Level = "normal"
    both: bool = False


FAULTS: dict[str, Fault] = {}


def fault(name: str, *names: Component, how: str, **more: Any) -> Callable[[Any], Any]:
    """Add the decorated function to the table, as ``patch``, ``change`` or ``edit``."""

    def add(function: Any) -> Any:
        FAULTS[name] = Fault(name, names, **{how: function}, **more)
        return function

    return add


def run_fault(each: Fault, clean: Path, scratch: Path, reference: ReferenceFactory) -> CheckReport:
    """Run the checks over an engine with the fault.

    ``clean``: the checkpoint; ``scratch``: an empty folder.
    """
    folder = clean
    if each.edit is not None:
        folder = shutil.copytree(clean, scratch / "copy")
        each.edit(folder)
    checkpoint = open_checkpoint(folder)
    options = EngineOptions(device="cpu", max_model_len=1024)
    judge = reference(open_checkpoint(folder if each.both else clean))  # before anything is patched
    with pytest.MonkeyPatch.context() as patch:
        if each.patch is not None:
            each.patch(patch)

        def build(**changes: Any) -> NativeEngine:
            engine = NativeEngine(checkpoint, dataclasses.replace(options, **changes))
            if each.change is not None:
                with torch.inference_mode():
                    each.change(engine)
            return engine

        return run_checks(build, checkpoint, each.level, reference_factory=lambda _: judge)


# Pictures --------------------------------------------------------------------------------------------------


def _on_patches(engine: NativeEngine, alter: Callable[[torch.Tensor], torch.Tensor]) -> None:
    inner: Any = engine.runner.image_patches
    engine.runner.image_patches = lambda image: (alter(part) for part in inner(image))


def _on_pixels(engine: NativeEngine, alter: Callable[[Any], Any]) -> None:
    inner: Any = engine.runner.image_patches
    engine.runner.image_patches = lambda image: inner(dataclasses.replace(image, pixels=alter(image.pixels)))


@fault("channels in the order BGR", C.PICTURES, how="change")
def fault_1(engine: NativeEngine) -> None:
    _on_pixels(engine, lambda pixels: np.ascontiguousarray(pixels[..., ::-1]))


def _processing(**changes: Any) -> Callable[[NativeEngine], None]:
    def change(engine: NativeEngine) -> None:
        engine.image_processor_config = dataclasses.replace(engine.image_processor_config, **changes)  # type: ignore[type-var]

    return change


fault("mean of ImageNet", C.PICTURES, how="change")(_processing(mean=(0.485, 0.456, 0.406)))
fault("standard deviation of ImageNet", C.PICTURES, how="change")(_processing(std=(0.229, 0.224, 0.225)))
fault("bytes over 256", C.PICTURES, how="change")(_processing(rescale_factor=1 / 256))


@fault("last row of patches dropped", C.PICTURES, how="change")
def fault_2(engine: NativeEngine) -> None:
    def alter(patches: torch.Tensor) -> torch.Tensor:
        changed = patches.clone()
        changed[-4:] = 0
        return changed

    _on_patches(engine, alter)


@fault("patches in raster order", C.PICTURES, how="change")
def fault_3(engine: NativeEngine) -> None:
    _on_patches(
        engine,
        lambda patches: patches.view(-1, 2, 2, patches.shape[-1]).transpose(1, 2).reshape(patches.shape),
    )


@fault("resized by a box filter", C.PICTURES, how="patch", spec="untied_sharded")
def fault_4(patch: Patch) -> None:
    from PIL import Image

    import vlfit.models.qwen3_vl.image_processor as processor

    inner = processor.prepare_image

    def prepare(part: Any, *args: Any, **options: Any) -> Any:
        image = inner(part, *args, **options)
        small = Image.fromarray(image.pixels[0]).resize(
            (image.pixels.shape[2] // 2, image.pixels.shape[1] // 2)
        )
        pixels = np.asarray(
            small.resize((image.pixels.shape[2], image.pixels.shape[1]), Image.Resampling.BOX)
        )
        return dataclasses.replace(image, pixels=pixels[None].copy())

    patch.setattr("vlfit.models.qwen3_vl.prompt.prepare_image", prepare)


# Vision tower ----------------------------------------------------------------------------------------------


@fault("corners not aligned", C.TOWER, how="patch")
def fault_5(patch: Patch) -> None:
    def interpolation(side: int, count: int) -> Any:
        place = np.clip((np.arange(count) + 0.5) * side / count - 0.5, 0, side - 1).astype(np.float32)
        before = np.floor(place)
        return before.astype(np.int64), place - before

    patch.setattr("vlfit.models.qwen3_vl.vision._interpolation", interpolation)


@fault("positions of the nearest entry", C.TOWER, how="patch")
def fault_6(patch: Patch) -> None:
    import vlfit.models.qwen3_vl.vision as vision

    inner = vision._interpolation

    def nearest(side: int, count: int) -> Any:
        before, past = inner(side, count)
        return before + (past > 0.5), np.zeros_like(past)

    patch.setattr(vision, "_interpolation", nearest)


@fault("rows and columns of the tower's RoPE swapped", C.TOWER, how="patch")
def fault_7(patch: Patch) -> None:
    import vlfit.models.qwen3_vl.mrope as mrope

    inner = mrope.merge_order_indices
    patch.setattr(mrope, "merge_order_indices", lambda *args: inner(*args)[::-1])


@fault("exact GELU in the tower", C.TOWER, how="patch")
def fault_8(patch: Patch) -> None:
    import torch.nn.functional as functional

    patch.setattr("vlfit.models.qwen3_vl.vision.gelu_", lambda x, approximate="none": functional.gelu(x))


@fault("tanh GELU in the merger", C.MERGER, C.DEEPSTACK, how="patch")
def fault_9(patch: Patch) -> None:
    import torch.nn.functional as functional

    patch.setattr(
        "vlfit.models.qwen3_vl.vision.gelu_",
        lambda x, approximate="none": functional.gelu(x, approximate="tanh"),
    )


@fault("one tile of a tower's product", C.TOWER, how="change")
def fault_10(engine: NativeEngine) -> None:
    _linear_fault(engine.runner.vision.blocks[2], "fc2", lambda out: _add(out, (-1, slice(-16, None)), 0.01))  # type: ignore[union-attr]


@fault("two deepstack levels swapped", C.DEEPSTACK, how="change")
def fault_11(engine: NativeEngine) -> None:
    tower: Any = engine.runner.vision
    mergers = tower.deepstack_mergers
    first, second, *_ = mergers
    mergers[first], mergers[second] = mergers[second], mergers[first]


@fault("deepstack left out", C.DEEPSTACK, how="change")
def fault_12(engine: NativeEngine) -> None:
    _on_visual(engine, lambda visual: dataclasses.replace(visual, deepstack=()))


@fault("deepstack added in reverse", C.DEEPSTACK, how="change")
def fault_13(engine: NativeEngine) -> None:
    _on_visual(engine, lambda visual: dataclasses.replace(visual, deepstack=visual.deepstack[::-1]))


@fault("picture rows one place late", C.EMBEDDING, how="change")
def fault_14(engine: NativeEngine) -> None:
    _on_visual(engine, lambda visual: dataclasses.replace(visual, rows=visual.rows.roll(1, 0)))


def _on_visual(engine: NativeEngine, alter: Callable[[Any], Any]) -> None:
    inner = engine.runner._visual_rows

    def changed(batch: Any) -> Any:
        visual = inner(batch)
        return None if visual is None else alter(visual)

    engine.runner._visual_rows = changed  # type: ignore[method-assign]


# Positions -------------------------------------------------------------------------------------------------


def _on_positions(alter: Callable[[Any, int], tuple[Any, int]]) -> Callable[[NativeEngine], None]:
    def change(engine: NativeEngine) -> None:
        inner = engine.builders.positions
        engine.builders = dataclasses.replace(engine.builders, positions=lambda *args: alter(*inner(*args)))

    return change


fault("rows and columns of positions swapped", C.POSITIONS, how="change")(
    _on_positions(lambda positions, after: (positions[[0, 2, 1]], after))
)
fault("answer begins one position late", C.POSITIONS, how="change")(
    _on_positions(lambda positions, after: (positions, after + 1))
)
fault("positions on one axis", C.POSITIONS, how="change")(
    _on_positions(
        lambda positions, after: (np.tile(np.arange(positions.shape[1]), (3, 1)), positions.shape[1])
    )
)


@fault("sections of M-RoPE in another order", C.ROPE, how="change")
def fault_15(engine: NativeEngine) -> None:
    axis = engine.runner.text.rope.axis
    assert axis is not None
    engine.runner.text.rope.axis = torch.tensor([0, 2, 1])[axis]


@fault("sections of M-RoPE side by side", C.ROPE, how="change")
def fault_16(engine: NativeEngine) -> None:
    rope: Any = engine.runner.text.rope
    rope.axis = rope.axis.sort().values


@fault("twice the theta of RoPE", C.ROPE, how="change")
def fault_17(engine: NativeEngine) -> None:
    rope: Any = engine.runner.text.rope
    count = len(rope.inverse_frequencies)
    rope.inverse_frequencies *= 2.0 ** (-torch.arange(count) / count)


@fault("RoPE of neighbours in place of halves", C.ROPE, how="patch")
def fault_18(patch: Patch) -> None:
    def apply(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        half = cosines.shape[-1] // 2
        cos, sin = (table[..., half:].repeat_interleave(2, -1) for table in (cosines, sines))
        pairs = x.unflatten(-1, (-1, 2))
        turned = torch.stack((-pairs[..., 1], pairs[..., 0]), -1).flatten(-2)
        return x * cos + turned * sin

    patch.setattr("vlfit.layers.attention.apply_rope", apply)


# Text layers -----------------------------------------------------------------------------------------------


def _add(out: torch.Tensor, where: Any, value: float) -> torch.Tensor:
    out[where] += value * float(out.abs().mean())
    return out


def _linear_fault(owner: Any, name: str, alter: Callable[[torch.Tensor], torch.Tensor]) -> None:
    inner = getattr(owner, name)
    setattr(owner, name, lambda x: alter(inner(x)))


def _layer(engine: NativeEngine, index: int = 1) -> Any:
    return engine.runner.text.layers[index]


@fault("heads in another order", C.ATTENTION, how="change")
def fault_19(engine: NativeEngine) -> None:
    _linear_fault(_layer(engine), "output", lambda out: out.roll(1, -1))


@fault("queries of two heads swapped", C.ATTENTION, how="change")
def fault_20(engine: NativeEngine) -> None:
    width = engine.checkpoint.config.text.head_dim

    def alter(out: torch.Tensor) -> torch.Tensor:
        first, second = out[:, :width].clone(), out[:, width : 2 * width].clone()
        out[:, :width], out[:, width : 2 * width] = second, first
        return out

    _linear_fault(_layer(engine), "qkv", alter)


@fault("values of one head scaled", C.ATTENTION, how="change")
def fault_21(engine: NativeEngine) -> None:
    _linear_fault(_layer(engine), "qkv", lambda out: _scaled(out, slice(-8, None), 1.01))


def _scaled(out: torch.Tensor, columns: slice, factor: float) -> torch.Tensor:
    out[:, columns] *= factor
    return out


@fault("no norm of queries and keys", C.NORM, C.ATTENTION, how="change")
def fault_22(engine: NativeEngine) -> None:
    _layer(engine).query_key_norm = torch.ones_like(_layer(engine).query_key_norm)


@fault("a larger epsilon in a norm", C.NORM, how="change")
def fault_23(engine: NativeEngine) -> None:
    _layer(engine).eps = 1e-3


@fault("one weight of a norm", C.NORM, how="change")
def fault_24(engine: NativeEngine) -> None:
    weight = _layer(engine).post_attention_norm = _layer(engine).post_attention_norm.clone()
    weight[3] *= 1.001


@fault("gate and up swapped", C.MLP, how="patch")
def fault_25(patch: Patch) -> None:
    import torch.nn.functional as functional

    def swapped(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(up) * gate

    patch.setattr("vlfit.layers.fused.silu_mul", swapped)


@fault("edge of a tile of the MLP", C.MLP, how="change")
def fault_26(engine: NativeEngine) -> None:
    _linear_fault(_layer(engine, 0), "down", lambda out: _add(out, (slice(None), slice(-1, None)), 0.001))


@fault("a split of a sum left out", C.MLP, how="change")
def fault_27(engine: NativeEngine) -> None:
    inner = _layer(engine, 0).down
    width = 16

    def without(x: torch.Tensor) -> torch.Tensor:
        part = x.clone()
        part[:, -width:] = 0
        out: torch.Tensor = inner(part)
        return out

    _layer(engine, 0).down = without


@fault("weight of the final norm", C.NORM, how="change")
def fault_28(engine: NativeEngine) -> None:
    engine.runner.text.norm = engine.runner.text.norm * 1.0001


@fault("two rows of the output head swapped", C.HEAD, how="change", spec="untied_sharded")
def fault_29(engine: NativeEngine) -> None:
    order = torch.arange(engine.runner.text.vocabulary)
    order[[20, 21]] = order[[21, 20]]
    _linear_fault(engine.runner.text, "head", lambda out: out[:, order])


@fault("rows of the embedding one off", C.EMBEDDING, how="change", spec="untied_sharded")
def fault_30(engine: NativeEngine) -> None:
    inner: Any = engine.runner.text.embedding
    engine.runner.text.embedding = lambda ids: inner((ids + 1) % 400)  # type: ignore[assignment]


# Files -----------------------------------------------------------------------------------------------------


def _tensor_bytes(folder: Path, name: str) -> tuple[Path, int, int]:
    """The file of a tensor, and where in it its bytes begin and end."""
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        if name in header:
            begin, end = header[name]["data_offsets"]
            return path, 8 + length + begin, 8 + length + end
    raise KeyError(name)


def _flip(folder: Path, name: str, byte: int, bit: int) -> None:
    path, begin, _ = _tensor_bytes(folder, name)
    data = bytearray(path.read_bytes())
    data[begin + byte] ^= 1 << bit
    path.write_bytes(data)


LAYER = "model.language_model.layers.1."


@fault("one scale block off by one", C.MLP, how="edit", spec="fp8")
def fault_31(folder: Path) -> None:
    path, begin, end = _tensor_bytes(folder, f"{LAYER}mlp.down_proj.weight_scale_inv")
    data = bytearray(path.read_bytes())
    scales = np.frombuffer(data[begin:end], np.uint16).copy()
    scales[-1] += 1  # of the last bit of its mantissa
    data[begin:end] = scales.tobytes()
    path.write_bytes(data)


@fault("scale blocks in another order", C.MLP, how="edit", spec="fp8")
def fault_32(folder: Path) -> None:
    path, begin, end = _tensor_bytes(folder, f"{LAYER}mlp.gate_proj.weight_scale_inv")
    data = bytearray(path.read_bytes())
    scales = np.frombuffer(data[begin:end], np.uint16).copy()
    data[begin:end] = scales[::-1].tobytes()
    path.write_bytes(data)


@fault("one bit of a weight misread", C.ATTENTION, how="edit")
def fault_33(folder: Path) -> None:
    _flip(folder, f"{LAYER}self_attn.o_proj.weight", 4 * 100 + 2, 6)


@fault("one bit of a shard", C.FILE, how="edit", both=True, level="full", spec="untied_sharded")
def fault_34(folder: Path) -> None:
    import hashlib

    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        for path in sorted(folder.glob("*.safetensors"))
    ]
    (folder / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")
    _flip(folder, f"{LAYER}mlp.down_proj.weight", 400, 2)


@fault("a scale that is not a number", C.FILE, how="edit", both=True, spec="fp8")
def fault_35(folder: Path) -> None:
    path, begin, _ = _tensor_bytes(folder, f"{LAYER}mlp.down_proj.weight_scale_inv")
    data = bytearray(path.read_bytes())
    data[begin : begin + 2] = b"\xc0\x7f"
    path.write_bytes(data)


@fault("a control token as end of turn left out", C.STOP, how="edit", both=True)
def fault_36(folder: Path) -> None:
    path = folder / "generation_config.json"
    values = json.loads(path.read_text("utf-8"))
    values["eos_token_id"] = values["eos_token_id"][1]
    path.write_text(json.dumps(values), encoding="utf-8")


@fault("an end token that is a word", C.STOP, how="edit", both=True)
def fault_37(folder: Path) -> None:
    path = folder / "generation_config.json"
    values = json.loads(path.read_text("utf-8"))
    values["eos_token_id"] = [300, *values["eos_token_id"]]
    path.write_text(json.dumps(values), encoding="utf-8")


# Words -----------------------------------------------------------------------------------------------------


def _template_edit(old: str, new: str) -> Callable[[Patch], None]:
    def change(patch: Patch) -> None:
        from vlfit.checkpoint.processor_files import read_chat_template as inner

        def read(folder: Path) -> str:
            text = inner(folder)
            assert old in text
            return text.replace(old, new)

        patch.setattr("vlfit.prompt.builder.read_chat_template", read)

    return change


fault("no line break after the role", C.TEMPLATE, how="patch")(
    _template_edit("'<|im_start|>assistant\\n'", "'<|im_start|>assistant'")
)
fault("no header of the answer", C.TEMPLATE, how="patch")(_template_edit("'<|im_start|>assistant\\n'", "''"))


@fault("control tokens as text", C.TOKENIZER, how="patch")
def fault_38(patch: Patch) -> None:
    from vlfit.prompt.control_tokens import ControlTokens, encode_plain

    def encode(self: Any, text: str) -> list[int]:
        # Of pictures alone they stay, as the prompt could not be built without.
        ids = list(encode_plain(self._tokenizer, "<|im_start|>"))
        out: list[int] = []
        for token in self._tokenizer.encode(text, add_special_tokens=False).ids:
            out += ids if self._tokenizer.id_to_token(token) == "<|im_start|>" else [token]
        return out

    patch.setattr(ControlTokens, "_encode", encode)


@fault("a user's text forges control tokens", C.TOKENIZER, how="patch")
def fault_39(patch: Patch) -> None:
    from vlfit.prompt.control_tokens import ControlTokens

    patch.setattr(ControlTokens, "_encode_plain", ControlTokens._encode)


# KV cache, scheduler, prefix cache, drafts -----------------------------------------------------------------


@fault("first token of each block in a wrong slot", C.KV_CACHE, how="change")
def fault_40(engine: NativeEngine) -> None:
    inner = engine.runner.cache.write

    def write(layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        wrong = torch.where(slots % engine.options.block_size == 0, slots + 1, slots)
        inner(layer, wrong, keys, values)

    engine.runner.cache.write = write  # type: ignore[method-assign]


@fault("decoding does not see the first token", C.KV_CACHE, how="patch")
def fault_41(patch: Patch) -> None:
    import vlfit.layers.attention as attention

    inner = attention._decode

    def decode(query: Any, layer: int, cache: Any, group: Any) -> Any:
        if group.mask is None and group.slots.shape[1] > 1:
            group = attention.DecodeGroup(group.slots[:, 1:], None, None)
        return inner(query, layer, cache, group)

    patch.setattr(attention, "_decode", decode)


@fault("scales of the FP8 KV cache doubled", C.KV_CACHE, how="patch")
def fault_42(patch: Patch) -> None:
    import vlfit.layers.kv_cache as kv_cache

    inner = kv_cache.dequantize_kv_rows
    patch.setattr(kv_cache, "dequantize_kv_rows", lambda *args: inner(*args) * 2)


@fault("a stale prefix block: pictures not in the key", C.PREFIX_CACHE, how="patch")
def fault_43(patch: Patch) -> None:
    import vlfit.engine.scheduling.prefix_cache as prefix_cache

    inner = prefix_cache.block_key
    patch.setattr(prefix_cache, "block_key", lambda key, ids, images: inner(key, ids, ()))


@fault("a shared block is overwritten", C.PREFIX_CACHE, how="change")
def fault_44(engine: NativeEngine) -> None:
    cache, inner = engine.runner.cache, engine.scheduler.admit

    def admit() -> list[Any]:
        admitted = inner()
        for sequence in admitted:
            if sequence.num_cached_tokens >= engine.options.block_size:
                first = sequence.block_table[0] * engine.options.block_size
                cache.layer(0)[1][first + 2] *= -1
        return admitted

    engine.scheduler.admit = admit  # type: ignore[method-assign]


@fault("wrong slots after preemption", C.SCHEDULER, how="patch")
def fault_45(patch: Patch) -> None:
    from vlfit.engine.scheduling.sequence import Sequence

    inner = Sequence.reset_for_preemption

    def reset(self: Any) -> None:
        inner(self)
        self.prompt = dataclasses.replace(self.prompt, next_position=self.prompt.next_position + 1)

    patch.setattr(Sequence, "reset_for_preemption", reset)


@fault("a chunk sees one token too few", C.SCHEDULER, how="patch")
def fault_46(patch: Patch) -> None:
    from vlfit.engine.execution.model_runner import AttentionMetadataBuilder

    def mask(self: Any, past: int, length: int) -> torch.Tensor:
        columns = torch.arange(past + length)
        inside: torch.Tensor = columns <= torch.arange(past, past + length)[:, None]
        inside[:, past - 1] = False
        return inside

    patch.setattr(AttentionMetadataBuilder, "_causal_mask", mask)


@fault("company: the last slot of shorter sequences is seen twice", C.SCHEDULER, how="patch")
def fault_47(patch: Patch) -> None:
    import vlfit.layers.attention as attention

    inner = attention._decode

    def decode(query: Any, layer: int, cache: Any, group: Any) -> Any:
        if group.mask is not None:
            group = attention.DecodeGroup(group.slots, torch.ones_like(group.mask), None)
        return inner(query, layer, cache, group)

    patch.setattr(attention, "_decode", decode)


@fault("every draft is accepted", C.SPECULATION, how="patch")
def fault_48(patch: Patch) -> None:
    from vlfit.engine.sampling.sampler import SampledToken
    from vlfit.engine.sampling.verification import verify_draft as inner

    def accept(
        logits: Any, tokens: Any, is_finite: Any, on_device: Any, row: Any, draft: Any, text: Any
    ) -> Any:
        last = inner(logits[-1:], tokens[-1:], is_finite[-1:], None, row, type(draft)(), text)
        return [*(SampledToken(token) for token in draft.token_ids), *last] if draft.token_ids else last

    patch.setattr("vlfit.engine.execution.step_executor.verify_draft", accept)


@fault("a weight is lost in sleep", C.SLEEP, how="change")
def fault_49(engine: NativeEngine) -> None:
    inner = engine.sleeper.wake

    def wake() -> None:
        inner()
        engine.runner.text.norm = engine.runner.text.norm * 1.1
        _linear_fault(_layer(engine, 0), "down", torch.zeros_like)

    engine.sleeper.wake = wake  # type: ignore[method-assign]


# Sampling and stopping -------------------------------------------------------------------------------------


@fault("the second likeliest token", C.SAMPLER, how="patch")
def fault_50(patch: Patch) -> None:
    from vlfit.engine.sampling.sampler import select_tokens as inner

    def second(logits: torch.Tensor, *args: Any, **options: Any) -> Any:
        output = inner(logits, *args, **options)
        if len(logits):
            output.summary[0] = logits.topk(2).indices[:, 1]
        return output

    patch.setattr("vlfit.engine.execution.model_runner.select_tokens", second)


@fault("seeds are ignored", C.SAMPLER, how="patch")
def fault_51(patch: Patch) -> None:
    import random

    chance = random.Random(1)
    patch.setattr("vlfit.engine.sampling.sampler.philox_uniform", lambda *args: chance.random())


@fault("top_k is ignored", C.SAMPLER, how="patch")
def fault_52(patch: Patch) -> None:
    import vlfit.engine.sampling.sampler as sampler

    inner = sampler._draw_sorted

    def draw(scores: Any, params: Any, uniform: float) -> int:
        return inner(scores, dataclasses.replace(params, top_k=0), uniform)

    patch.setattr(sampler, "_draw_sorted", draw)


@fault("stop tokens are ignored", C.STOP, how="patch")
def fault_53(patch: Patch) -> None:
    from vlfit.engine.sampling.output_processor import Completion

    inner = Completion.__init__

    def start(self: Any, detokenizer: Any, sampling: Any, eos: Any, most: int) -> None:
        inner(self, detokenizer, dataclasses.replace(sampling, stop_token_ids=()), eos, most)

    patch.setattr(Completion, "__init__", start)


# More of the same kinds, elsewhere -------------------------------------------------------------------------


@fault("frames of the tower attend with another scale", C.TOWER, how="patch")
def fault_scale(patch: Patch) -> None:
    import torch.nn.functional as functional

    def attention(qkv: torch.Tensor) -> torch.Tensor:
        query, key, value = (qkv[:, part].transpose(0, 1)[None] for part in range(3))
        mixed = functional.scaled_dot_product_attention(query, key, value, scale=1.02 * qkv.shape[-1] ** -0.5)
        return mixed[0].transpose(0, 1).reshape(len(qkv), -1)

    patch.setattr("vlfit.models.qwen3_vl.vision.attention", attention)


@fault("a layer norm of the tower without its bias", C.TOWER, how="change")
def fault_bias(engine: NativeEngine) -> None:
    block: Any = engine.runner.vision.blocks[1]  # type: ignore[union-attr]
    block.norm2.bias = torch.zeros_like(block.norm2.bias)


@fault("a bias of the merger left out", C.MERGER, how="change")
def fault_merger_bias(engine: NativeEngine) -> None:
    merger: Any = engine.runner.vision.merger  # type: ignore[union-attr]
    merger.fc2.bias = torch.zeros_like(merger.fc2.bias)


@fault("biases of the attention left out", C.ATTENTION, how="change", spec="half_with_biases")
def fault_attention_bias(engine: NativeEngine) -> None:
    _layer(engine).qkv.bias = torch.zeros_like(_layer(engine).qkv.bias)


@fault("attention is not causal", C.ATTENTION, how="patch")
def fault_causal(patch: Patch) -> None:
    import torch.nn.functional as functional

    inner = functional.scaled_dot_product_attention

    def attention(query: Any, key: Any, value: Any, **options: Any) -> Any:
        if options.get("is_causal"):
            options["is_causal"] = False
        return inner(query, key, value, **options)

    import types

    import vlfit.layers.attention as module

    wrapped = types.SimpleNamespace(scaled_dot_product_attention=attention)
    patch.setattr(module, "F", wrapped)


@fault("a whole layer left out", C.ATTENTION, C.KV_CACHE, how="change")
def fault_layer(engine: NativeEngine) -> None:
    def attend(hidden: torch.Tensor, delta: torch.Tensor | None, *rest: Any) -> torch.Tensor:
        if delta is not None:
            hidden.add_(delta)
        return torch.zeros_like(hidden)

    _layer(engine).attend = attend
    _layer(engine).feed_forward = lambda hidden, delta: torch.zeros_like(hidden)


@fault("logits in 16 bits", C.HEAD, how="change")
def fault_head(engine: NativeEngine) -> None:
    _linear_fault(engine.runner.text, "head", lambda out: out.bfloat16().float())


@fault("weights of the MLP in 8 bits", C.MLP, how="change")
def fault_mlp(engine: NativeEngine) -> None:
    weight = _layer(engine, 0).down.weight
    step = weight.abs().amax(1, keepdim=True) / 127
    _layer(engine, 0).down.weight = (weight / step).round() * step


@fault("keys and values of two requests swapped in company", C.SCHEDULER, how="patch")
def fault_company(patch: Patch) -> None:
    import vlfit.layers.attention as attention

    inner = attention._decode

    def decode(query: Any, layer: int, cache: Any, group: Any) -> Any:
        if len(group.slots) > 2:
            slots = group.slots.clone()
            slots[[0, 1]] = slots[[1, 0]]
            group = attention.DecodeGroup(slots, group.mask, None)
        return inner(query, layer, cache, group)

    patch.setattr(attention, "_decode", decode)


@fault("an answer ends one token early", C.STOP, C.SCHEDULER, C.SAMPLER, how="patch")
def fault_early(patch: Patch) -> None:
    from vlfit.engine.sampling.output_processor import Completion

    inner = Completion.__init__

    def start(self: Any, detokenizer: Any, sampling: Any, eos: Any, most: int) -> None:
        inner(self, detokenizer, sampling, eos, max(most - 1, 1))

    patch.setattr(Completion, "__init__", start)


@fault("pictures of other sizes than the rule's", C.PICTURES, how="patch")
def fault_size(patch: Patch) -> None:
    import vlfit.models.qwen3_vl.image_processor as processor

    inner = processor.smart_resize
    patch.setattr(
        processor,
        "smart_resize",
        lambda height, width, factor, *rest: inner(height + factor, width, factor, *rest),
    )
