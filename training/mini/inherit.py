"""What a new model takes over from a trained mini: all that fits, and gated delta nets from its attention."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from training.mini.export import load_weights
from training.mini.model import Model
from training.mini.shape import Shape

TEXT, DRAFTER = "model.language_model.", "mtp."
# Which of mini's six text layers the layers of a hybrid of four begin with.
LAYERS = (0, 1, 2, 5)


def take_over(model: Model, folder: Path) -> str:
    """Put the weights of the mini in ``folder`` into ``model``, and say so, for the card.

    A gated delta net begins with the projections of the attention in whose place it stands; an output gate
    begins half open. Weights of other shapes stay as they are.
    """
    learnt = load_weights(folder)
    own, taken = model.state_dict(), 0
    for name, value in own.items():
        found = _Inheritance(learnt, model.shape).of(name)
        if found is not None and found.shape == value.shape:
            own[name] = found
            taken += found.numel()
    model.load_state_dict(own)
    return f"Begun with {taken / 1e6:.1f} million parameters of the mini that ships with vlfit and trained on"


@dataclass(frozen=True)
class _Inheritance:
    """``learnt``: the weights of a mini by name; ``shape``: of the model that takes them over."""

    learnt: dict[str, Tensor]
    shape: Shape

    def of(self, name: str) -> Tensor | None:
        """What the weight ``name`` begins with; None where mini has nothing for it."""
        if not self.shape.is_hybrid or not name.startswith((TEXT, DRAFTER)):
            return self.learnt.get(name)
        source = self.source(name)
        if name.endswith("norm.weight") and "linear_attn" not in name:
            found = self.learnt.get(source)
            return None if found is None else found - 1
        place, _, part = source.rpartition("_attn.")
        if name.partition("linear_attn.")[2]:
            return self.delta(place.removesuffix("linear"), part)
        if part == "q_proj.weight" and source in self.learnt:
            query = self.learnt[source].unflatten(0, (-1, self.shape.head_dim))
            return torch.cat([query, torch.zeros_like(query)], 1).flatten(0, 1)
        if part == "o_proj.weight" and source in self.learnt:
            return self.learnt[source] * 2
        return self.learnt.get(source)

    def source(self, name: str) -> str:
        """The name in mini: of another layer's number, and for the layer that drafts the last one's."""
        depth = 1 + max(int(each.split(".")[3]) for each in self.learnt if each.startswith(f"{TEXT}layers."))
        if name.startswith(f"{DRAFTER}layers."):
            return f"{TEXT}layers.{depth - 1}.{name.split('.', 3)[3]}"
        if name == f"{DRAFTER}norm.weight":
            return f"{TEXT}norm.weight"
        prefix = f"{TEXT}layers."
        if not name.startswith(prefix):
            return name
        number, rest = name.removeprefix(prefix).split(".", 1)
        return f"{prefix}{LAYERS[int(number)] if self.shape.depth == len(LAYERS) else number}.{rest}"

    def delta(self, layer: str, part: str) -> Tensor | None:
        """What ``part`` of a gated delta net takes from the attention of ``layer`` (a name up to its dot)."""
        shape = self.shape

        def heads(which: str, wanted: int) -> Tensor:
            each = self.learnt[f"{layer}self_attn.{which}_proj.weight"].unflatten(0, (-1, shape.head_dim))
            norm = self.learnt.get(f"{layer}self_attn.{which}_norm.weight")
            if norm is not None:
                each = each * norm[:, None]
            # Fewer heads of queries are the first of each group, more heads of values repeat them.
            index = torch.arange(wanted) * len(each) // wanted
            picked: Tensor = each[index].flatten(0, 1)
            return picked

        if f"{layer}self_attn.o_proj.weight" not in self.learnt:
            return None
        if part == "in_proj_qkv.weight":
            keys = shape.linear_key_heads
            return torch.cat([heads("q", keys), heads("k", keys), heads("v", shape.linear_value_heads)])
        return self.learnt[f"{layer}self_attn.o_proj.weight"] if part == "out_proj.weight" else None
