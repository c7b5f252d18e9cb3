"""Faults of pictures, the vision tower, deepstack and positions."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests.parity.fault_table import C, Patch, add_to, alter_linear, fault
from vlfit.engine.engine import NativeEngine

# Pictures -------------------------------------------------------------------------------------------------


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


# Vision tower ---------------------------------------------------------------------------------------------


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
    alter_linear(engine.runner.vision.blocks[2], "fc2", lambda out: add_to(out, (-1, slice(-16, None)), 0.01))  # type: ignore[union-attr]


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


# Positions ------------------------------------------------------------------------------------------------


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


@fault("frames of the tower attend with another scale", C.TOWER, how="patch")
def fault_scale(patch: Patch) -> None:
    import torch.nn.functional as functional

    def attention(qkv: torch.Tensor, **_: Any) -> torch.Tensor:
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


@fault("pictures of other sizes than the rule's", C.PICTURES, how="patch")
def fault_size(patch: Patch) -> None:
    import vlfit.models.qwen3_vl.image_processor as processor

    inner = processor.smart_resize
    patch.setattr(
        processor,
        "smart_resize",
        lambda height, width, factor, *rest: inner(height + factor, width, factor, *rest),
    )


# More of a picture's way -----------------------------------------------------------------------------------


@fault("EXIF is ignored", C.PICTURES, how="change")
def exif(engine: NativeEngine) -> None:
    import io

    from PIL import Image

    from vlfit.api.conversation import ImagePart

    def without(part: Any) -> Any:
        if not isinstance(part, ImagePart):
            return part
        stream = io.BytesIO()
        picture = Image.open(io.BytesIO(bytes(part.data)))
        Image.frombytes(picture.mode, picture.size, picture.tobytes()).save(stream, "PNG")
        return ImagePart(stream.getvalue())

    inner: Any = engine.prepare

    def prepare(conversation: Any, *rest: Any) -> Any:
        turned = tuple(
            dataclasses.replace(message, parts=tuple(map(without, message.parts))) for message in conversation
        )
        return inner(turned, *rest)

    engine.prepare = prepare  # type: ignore[method-assign, assignment]


@fault("the second frame of a patch is empty", C.PICTURES, how="change")
def second_frame(engine: NativeEngine) -> None:
    def alter(patches: torch.Tensor) -> torch.Tensor:
        parts = patches.clone().unflatten(1, (3, 2, -1))
        parts[:, :, 1] = 0
        flat: torch.Tensor = parts.flatten(1)
        return flat

    _on_patches(engine, alter)


@fault("channels after pixels in a patch", C.PICTURES, how="change")
def channels_last(engine: NativeEngine) -> None:
    _on_patches(engine, lambda patches: patches.unflatten(1, (3, -1)).transpose(1, 2).flatten(1))


@fault("theta of the tower's RoPE", C.TOWER, how="patch")
def tower_theta(patch: Patch) -> None:
    import vlfit.models.qwen3_vl.vision as vision

    inner = vars(vision)["vision_rope_tables"]

    def tables(config: Any, rows: int, columns: int) -> Any:
        cosines, sines = inner(config, rows, columns)
        return cosines.roll(1, -1), sines.roll(1, -1)

    patch.setattr(vision, "vision_rope_tables", tables)


@fault("keys and queries of the tower swapped", C.TOWER, how="patch")
def tower_qkv(patch: Patch) -> None:
    import vlfit.models.qwen3_vl.vision as vision

    inner = vision.attention
    patch.setattr(vision, "attention", lambda qkv, **options: inner(qkv[:, [1, 0, 2]], **options))


@fault("a larger epsilon in the tower", C.TOWER, how="patch")
def tower_eps(patch: Patch) -> None:
    patch.setattr("vlfit.models.qwen3_vl.vision.LAYER_NORM_EPS", 1e-3)


@fault("four patches of a token in another order", C.MERGER, how="change", spec="vision_head_72")
def merge_order(engine: NativeEngine) -> None:
    tower: Any = engine.runner.vision
    inner = tower.merger

    def merge(hidden: torch.Tensor, target: torch.Tensor) -> None:
        inner(hidden.unflatten(0, (-1, 4))[:, [0, 2, 1, 3]].flatten(0, 1).contiguous(), target)

    tower.merger = merge


@fault("deepstack taken one block early", C.DEEPSTACK, how="change", spec="wide_heads_one_level")
def deepstack_early(engine: NativeEngine) -> None:
    tower: Any = engine.runner.vision
    tower.deepstack_mergers = {at - 1 if at else at + 1: each for at, each in tower.deepstack_mergers.items()}


@fault("table of positions turned by a quarter", C.TOWER, how="patch", spec="vision_head_72")
def turned_table(patch: Patch) -> None:
    import vlfit.models.qwen3_vl.vision as vision

    inner = vision.VisionTower._embed

    def embed(self: Any, patches: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        table = self.position_table
        side = round(len(table) ** 0.5)
        self.position_table = table.view(side, side, -1).transpose(0, 1).reshape(table.shape)
        try:
            return inner(self, patches, rows, columns)
        finally:
            self.position_table = table

    patch.setattr(vision.VisionTower, "_embed", embed)


@fault("Qwen3.5: rows of a picture in reverse", C.EMBEDDING, how="change", spec="small")
def picture_rows(engine: NativeEngine) -> None:
    _on_visual(engine, lambda visual: dataclasses.replace(visual, rows=visual.rows.flip(0)))


# Clips ----------------------------------------------------------------------------------------------------


def _clips_only(alter: Callable[[Any], Any]) -> Callable[[NativeEngine], None]:
    def change(engine: NativeEngine) -> None:
        inner: Any = engine.runner.image_patches
        engine.runner.image_patches = lambda image: inner(
            dataclasses.replace(image, pixels=alter(image.pixels)) if image.is_video else image
        )

    return change


fault("clips: two frames of a step swapped", C.PICTURES, how="change")(
    _clips_only(
        lambda pixels: np.ascontiguousarray(pixels.reshape(-1, 2, *pixels.shape[1:])[:, ::-1]).reshape(
            pixels.shape
        )
    )
)


@fault("clips: frames in reverse", C.PICTURES, how="patch")
def reversed_frames(patch: Patch) -> None:
    import vlfit.models.qwen3_vl.image_processor as image_processor
    from vlfit.images.clips import decode_frame as inner

    patch.setattr(
        image_processor,
        "decode_frame",
        lambda part, index, choose: inner(part, len(part.frames) - 1 - index, choose),
    )


@fault("clips: the time of a step's first frame", C.TOKENIZER, C.TEMPLATE, C.PICTURES, how="patch")
def first_times(patch: Patch) -> None:
    import vlfit.models.qwen3_vl.image_processor as image_processor

    inner = image_processor._frame_seconds
    patch.setattr(
        image_processor,
        "_frame_seconds",
        lambda frames, fps, temporal: tuple(each - 0.5 / fps for each in inner(frames, fps, temporal)),
    )


@fault("clips: sizes as of pictures", C.PICTURES, how="patch", spec="untied_sharded")
def clip_sizes(patch: Patch) -> None:
    import vlfit.models.qwen3_vl.image_processor as image_processor

    inner = image_processor._capped_size
    patch.setattr(
        image_processor,
        "_capped_size",
        lambda width, height, processing, most, frames: inner(width, height, processing, most, None),
    )
