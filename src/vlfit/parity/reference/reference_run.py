"""A checkpoint computed in float32 on the CPU, as a whole or one step at a time.

RAM: a slice of weights (``stored_tensors.SLICE_BYTES``), one layer's activations, and the stages that are
kept.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vlfit.api.conversation import Conversation
from vlfit.checkpoint.gguf.gguf_folder import is_gguf_folder
from vlfit.checkpoint.source import Checkpoint
from vlfit.parity.reference.reference_prompt import Grid, PromptReference, ReferencePrompt
from vlfit.parity.reference.reference_text import TextReference
from vlfit.parity.reference.reference_tower import TowerReference
from vlfit.parity.reference.stored_tensors import SafetensorsSource, Weights, WeightSource

Trace = dict[str, Tensor]
_SEED = 3  # of the noise


class FloatReference:
    """The reference of ``checkpoint``: comparison's ``Reference``. ``template_variables``: as a request's."""

    def __init__(self, checkpoint: Checkpoint, template_variables: Mapping[str, Any] | None = None) -> None:
        folder = checkpoint.folder
        config: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
        self.weights = Weights(_source(checkpoint, config))
        self.text = TextReference(config, self.weights)
        vision = config.get("vision_config")
        self.tower = TowerReference(vision, self.weights) if vision else None
        self.prompts = PromptReference(folder, config)
        self._pads = torch.tensor([config.get("image_token_id", -1), config.get("video_token_id", -1)])
        self._variables = template_variables

    @torch.inference_mode()
    def trace(
        self,
        conversation: Conversation,
        forced: Sequence[int],
        *,
        image_tokens: int | None = None,
        perturb: float = 0.0,
        keep: Callable[[str], bool] | None = None,
    ) -> Trace:
        """Stages of ``conversation`` followed by the tokens ``forced``, computed in one pass.

        ``logits`` are those of the prompt's last token, ``forced.K`` those after ``forced[K]``. ``pixels``,
        ``patches``: of the first picture, ``.1`` and so on of further ones; tower stages are of all pictures.
        ``image_tokens``: limit for a picture. ``perturb``: after every block and layer each row is changed at
        random by that share of its size. ``keep``: which stages to return; None: all.
        """
        return self.traces(conversation, forced, (perturb,), image_tokens=image_tokens, keep=keep)[0]

    @torch.inference_mode()
    def traces(
        self,
        conversation: Conversation,
        forced: Sequence[int],
        perturbs: Sequence[float],
        *,
        image_tokens: int | None = None,
        keep: Callable[[str], bool] | None = None,
        beside: Callable[[str], None] | None = None,
    ) -> list[Trace]:
        """``trace`` for each of ``perturbs``, layer by layer side by side: weights are dequantized once.

        ``beside``: called with the name of each stage once all have it: a ``layer`` of that name then finds
        its weights dequantized.
        """
        wanted = keep or (lambda name: True)
        prompt = self.prompts.build(conversation, image_tokens, self._variables)
        stages: Trace = {"tokens": prompt.tokens, "positions": prompt.positions}
        for number, picture in enumerate(prompt.pictures):
            ending = f".{number}" if number else ""
            stages[f"pixels{ending}"], stages[f"patches{ending}"] = picture.pixels, picture.patches
        traces = [{name: value for name, value in stages.items() if wanted(name)} for _ in perturbs]
        needs_model = keep is None or any(
            keep(name) for name in ("tower.merged", "embedding", "norm", "logits", "layer.0", "forced.0")
        )
        if not needs_model:
            return traces
        runs = [self._stages(prompt, forced, _noise(perturb)) for perturb in perturbs]
        with self.weights.alone(), self.weights.keeping(several=len(runs) > 1 or beside is not None):
            for each in zip(*runs, strict=True):
                for trace, (name, value) in zip(traces, each, strict=True):
                    if wanted(name):
                        trace[name] = value.clone()
                if beside is not None:
                    beside(each[0][0])
                self.weights.forget()
        return traces

    def _stages(
        self, prompt: ReferencePrompt, forced: Sequence[int], noise: Callable[[Tensor], Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Every stage of the model by name, as it is computed."""
        added: list[Tensor] = []
        merged = None
        if prompt.pictures:
            assert self.tower is not None
            hidden = torch.cat([self.tower.embed(each.patches, each.grid) for each in prompt.pictures])
            yield "tower.embedding", hidden
            for index in range(self.tower.depth):
                parts, start = [], 0
                for each in prompt.pictures:
                    rows = hidden[start : start + len(each.patches)]
                    parts.append(self.tower.block(index, rows, each.grid)["out"])
                    start += len(rows)
                hidden = noise(torch.cat(parts))
                yield f"tower.layer.{index}", hidden
                if index in self.tower.deepstack_after:
                    level = self.tower.deepstack_after.index(index)
                    added.append(self.tower.deepstack(level, hidden))
                    yield f"tower.deepstack.{level}", added[-1]
            merged = self.tower.merged(hidden)
            yield "tower.merged", merged
        count = len(prompt.tokens)
        ids = torch.cat((prompt.tokens, torch.tensor(list(forced), dtype=torch.int64)))
        follow = int(prompt.positions.max()) + 1 + torch.arange(len(forced))
        positions = torch.cat((prompt.positions, follow.expand(3, -1)), dim=1)
        visual = torch.zeros(len(ids), dtype=torch.bool)
        visual[:count] = torch.isin(prompt.tokens, self._pads)
        hidden = self.text.embed(ids)
        if merged is not None:
            hidden[visual] = merged
        yield "embedding", hidden
        for index in range(self.text.layers):
            hidden = self.text.layer(index, hidden, positions)["out"]
            if index < len(added):
                hidden[visual] += added[index]
            hidden = noise(hidden)
            yield f"layer.{index}", hidden
        normed = self.text.norm(hidden)
        yield "norm", normed
        logits = self.text.logits(normed[count - 1 :])
        yield "logits", logits[0]
        for number in range(len(forced)):
            yield f"forced.{number}", logits[number + 1]

    @torch.inference_mode()
    def layer(self, name: str, inputs: Mapping[str, Tensor]) -> Trace:
        """One step from ``inputs``, each float32 on the CPU: its output ``out`` and its sub-stages.

        ``layer.N`` takes ``hidden`` and ``positions`` and leaves deepstack out; ``tower.layer.N`` ``hidden``
        and ``grid`` (of one picture); ``tower.embedding`` ``patches`` and ``grid``; ``tower.merged`` and
        ``tower.deepstack.N`` the ``hidden`` of their block; ``embedding`` the ``tokens``; ``norm`` and
        ``logits`` the ``hidden`` that enters. Raises ``ValueError`` for another name.
        """
        with self.weights.alone():
            return self._layer(name, inputs)

    def _layer(self, name: str, inputs: Mapping[str, Tensor]) -> Trace:
        part, _, number = name.rpartition(".")
        if part == "layer":
            return self.text.layer(int(number), inputs["hidden"], inputs["positions"])
        if name == "embedding":
            return {"out": self.text.embed(inputs["tokens"])}
        if name == "norm":
            return {"out": self.text.norm(inputs["hidden"])}
        if name == "logits":
            return {"out": self.text.logits(inputs["hidden"])}
        if self.tower is None or not name.startswith("tower."):
            raise ValueError(f"there is no stage {name!r}")
        if name == "tower.merged":
            return {"out": self.tower.merged(inputs["hidden"])}
        if part == "tower.deepstack":
            return {"out": self.tower.deepstack(int(number), inputs["hidden"])}
        frames, rows, columns = (int(each) for each in inputs["grid"])
        grid: Grid = (frames, rows, columns)
        if name == "tower.embedding":
            return {"out": self.tower.embed(inputs["patches"], grid)}
        if part == "tower.layer":
            return self.tower.block(int(number), inputs["hidden"], grid)
        raise ValueError(f"there is no stage {name!r}")


def _noise(share: float) -> Callable[[Tensor], Tensor]:
    if not share:
        return lambda rows: rows
    generator = torch.Generator().manual_seed(_SEED)

    def changed(rows: Tensor) -> Tensor:
        size = rows.square().mean(-1, keepdim=True).sqrt()
        return rows + share * size * torch.randn(rows.shape, generator=generator)

    return changed


def _source(checkpoint: Checkpoint, config: dict[str, Any]) -> WeightSource:
    if is_gguf_folder(checkpoint.folder):
        from vlfit.parity.reference.reference_gguf import GgufSource

        return GgufSource(checkpoint, config)
    return SafetensorsSource(checkpoint.folder, config)
