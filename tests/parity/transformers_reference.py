"""``Reference`` by transformers in float32, for tiny Qwen3-VL checkpoints: what checks are tried on."""

import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageOps
from torch import Tensor

from tests.reference_processor import reference_processor
from tests.tiny import tiny_reference
from vlfit.api.conversation import Conversation, ImagePart, TextPart, VideoPart
from vlfit.models.registry import read_config
from vlfit.parity.reference.reference_prompt import PromptReference


class TransformersReference:
    """transformers' own modules, whole and one at a time. Prompt and pixels are made by clean vlfit code."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = tiny_reference(folder)
        self.text, self.visual = self.model.model.language_model, self.model.model.visual
        self.config = read_config(folder)
        self.processor = reference_processor(folder)

    def _inputs(self, conversation: Conversation, forced: Sequence[int], limit: int | None) -> dict[str, Any]:
        if any(isinstance(part, VideoPart) for message in conversation for part in message.parts):
            return self._clip_inputs(conversation, forced, limit)
        messages = []
        pictures = []
        for message in conversation:
            content: list[dict[str, Any]] = []
            for part in message.parts:
                if isinstance(part, TextPart):
                    content.append({"type": "text", "text": part.text})
                elif isinstance(part, ImagePart):
                    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(bytes(part.data))))
                    pictures.append(upright.convert("RGB"))
                    content.append({"type": "image", "image": pictures[-1]})
            messages.append({"role": message.role, "content": content})
        text = self.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        inputs: dict[str, Any] = {}
        ids: list[int] = self.processor.tokenizer(text)["input_ids"]
        if pictures:
            made = self.processor.image_processor(images=pictures, return_tensors="pt")
            inputs = {"pixel_values": made["pixel_values"], "image_grid_thw": made["image_grid_thw"]}
            counts = iter([int(grid.prod()) // 4 for grid in made["image_grid_thw"]])
            pad = self.config.image_token_id
            ids = [each for token in ids for each in ([token] * next(counts) if token == pad else [token])]
        tokens = torch.tensor([[*ids, *forced]])
        kinds = (tokens == self.config.image_token_id).int()
        return inputs | {"input_ids": tokens, "mm_token_type_ids": kinds, "prompt": len(ids)}

    def _clip_inputs(
        self, conversation: Conversation, forced: Sequence[int], limit: int | None
    ) -> dict[str, Any]:
        """Of clips alone; the video processor of transformers needs torchvision."""
        config = json.loads((self.folder / "config.json").read_text("utf-8"))
        made = PromptReference(self.folder, config).build(conversation, limit)
        tokens = torch.cat((made.tokens, torch.tensor(list(forced), dtype=torch.int64)))[None]
        return {
            "pixel_values_videos": torch.cat([each.patches for each in made.pictures]),
            "video_grid_thw": torch.tensor([each.grid for each in made.pictures]),
            "input_ids": tokens,
            "mm_token_type_ids": 2 * (tokens == self.config.video_token_id).int(),
            "prompt": len(made.tokens),
        }

    def trace(
        self,
        conversation: Conversation,
        forced: Sequence[int],
        *,
        image_tokens: int | None = None,
        perturb: float = 0.0,
        keep: Callable[[str], bool] | None = None,
    ) -> dict[str, Tensor]:
        inputs = self._inputs(conversation, forced, image_tokens)
        count = inputs.pop("prompt")
        generator = torch.Generator().manual_seed(3)

        def noise(_: Any, __: Any, output: Any) -> Any:
            rows = output[0] if isinstance(output, tuple) else output
            size = rows.square().mean(-1, keepdim=True).sqrt()
            changed = rows + perturb * size * torch.randn(rows.shape, generator=generator)
            return (changed, *output[1:]) if isinstance(output, tuple) else changed

        hooks = []
        if perturb:
            hooks = [each.register_forward_hook(noise) for each in (*self.text.layers, *self.visual.blocks)]
        with torch.inference_mode():
            logits = self.model(**inputs).logits[0]
        for hook in hooks:
            hook.remove()
        tokens = inputs["input_ids"][0, :count]
        stages = {"tokens": tokens, "logits": logits[count - 1]}
        grids = {name: grid for name, grid in inputs.items() if name.endswith("grid_thw")}
        index, _ = self.model.model.get_rope_index(
            tokens[None], mm_token_type_ids=inputs["mm_token_type_ids"][:, :count], **grids
        )
        stages["positions"] = index[:, 0]
        for name in ("pixel_values", "pixel_values_videos"):
            if name in inputs:
                stages["patches"] = inputs[name]
        stages |= {f"forced.{step}": logits[count + step] for step in range(len(forced))}
        return {name: value for name, value in stages.items() if keep is None or keep(name)}

    def traces(
        self,
        conversation: Conversation,
        forced: Sequence[int],
        perturbs: Sequence[float],
        *,
        image_tokens: int | None = None,
        keep: Callable[[str], bool] | None = None,
        beside: Callable[[str], None] | None = None,
    ) -> list[dict[str, Tensor]]:
        del beside  # weights are in memory anyway
        return [
            self.trace(conversation, forced, image_tokens=image_tokens, perturb=each, keep=keep)
            for each in perturbs
        ]

    def layer(self, name: str, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with torch.inference_mode():
            return self._layer(name, {key: value.clone() for key, value in inputs.items()})

    def _layer(self, name: str, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        if name == "embedding":
            return {"out": self.text.embed_tokens(inputs["tokens"])}
        if name == "norm":
            return {"out": self.text.norm(inputs["hidden"])}
        if name == "logits":
            return {"out": self.model.lm_head(inputs["hidden"])}
        if name.startswith("tower"):
            return self._tower(name, inputs)
        return self._text_layer(self.text.layers[int(name.split(".")[1])], inputs)

    def _text_layer(self, layer: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        from transformers import DynamicCache

        kept: dict[str, Tensor] = {}

        def hook(part: str) -> Any:
            def keep(_: Any, __: Any, output: Any) -> None:
                kept[part] = (output[0] if isinstance(output, tuple) else output)[0]

            return keep

        places = {
            "attention": layer.self_attn,
            "mlp": layer.mlp,
            "input_norm": layer.input_layernorm,
            "post_norm": layer.post_attention_layernorm,
        }
        hooks = [module.register_forward_hook(hook(part)) for part, module in places.items()]
        positions = inputs["positions"][:, None]
        hidden = inputs["hidden"][None]
        cache = DynamicCache()
        index = layer.self_attn.layer_idx
        layer.self_attn.layer_idx = 0
        out = layer(
            hidden,
            position_embeddings=self.text.rotary_emb(hidden, positions),
            attention_mask=None,
            position_ids=positions[0],
            past_key_values=cache,
        )
        layer.self_attn.layer_idx = index
        for each in hooks:
            each.remove()
        rows = cache.layers[0]
        kept["key"], kept["value"] = rows.keys[0].transpose(0, 1), rows.values[0].transpose(0, 1)
        return kept | {"out": (out[0] if isinstance(out, tuple) else out).reshape(hidden.shape)[0]}

    def _tower(self, name: str, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        visual = self.visual
        if name == "tower.merged":
            return {"out": visual.merger(inputs["hidden"])}
        if name.startswith("tower.deepstack"):
            return {"out": visual.deepstack_merger_list[int(name.rpartition(".")[2])](inputs["hidden"])}
        grid, kept = inputs["grid"][None], dict[str, Any]()
        width = visual.patch_embed.proj.weight[0].numel()
        patches = inputs.get("patches", torch.zeros(int(grid.prod()), width))

        def entered(_: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            kept["out"], kept["options"] = args[0], options

        hook = visual.blocks[0].register_forward_pre_hook(entered, with_kwargs=True)
        visual(patches, grid_thw=grid)
        hook.remove()
        if name == "tower.embedding":
            return {"out": kept["out"]}
        block, parts = visual.blocks[int(name.rpartition(".")[2])], dict[str, Tensor]()

        def keeper(part: str) -> Any:
            return lambda _, __, out: parts.update({part: out})

        hooks = [block.attn.register_forward_hook(keeper("attention"))]
        hooks.append(block.mlp.register_forward_hook(keeper("mlp")))
        out = block(inputs["hidden"], **kept["options"])
        for each in hooks:
            each.remove()
        return parts | {"out": out}
