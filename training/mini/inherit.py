"""What a new model takes over from a trained mini: its tower and its embedding, as far as they fit."""

from pathlib import Path

import torch

from training.mini.export import load_weights
from training.mini.model import Model

TOWER, EMBEDDING = "model.visual.", "model.language_model.embed_tokens.weight"
# Which of a tower's blocks a tower of half as many begins with: those that together change least.
HALF = (0, 2, 3, 7)


def take_over(model: Model, folder: Path) -> str:
    """Put the weights of the mini in ``folder`` into ``model``, and say so, for the card.

    A narrower model gets the embedding's main directions, and what the tower writes along them. Weights of
    other shapes stay as they are.
    """
    learnt = load_weights(folder)
    depth = 1 + max(int(name.split(".")[3]) for name in learnt if name.startswith(f"{TOWER}blocks."))
    blocks = HALF if (depth, model.shape.vision_depth) == (8, 4) else range(model.shape.vision_depth)
    merger = f"{TOWER}merger.linear_fc2"
    width = model.shape.hidden
    if learnt[EMBEDDING].shape[1] > width:
        directions = torch.linalg.svd(learnt[EMBEDDING], full_matrices=False).Vh[:width]
        learnt[EMBEDDING] = learnt[EMBEDDING] @ directions.T
        for part in ("weight", "bias"):
            learnt[f"{merger}.{part}"] = directions @ learnt[f"{merger}.{part}"]
    # So that the first guesses are as wide as chance, whatever the length of the rows that were learnt.
    scale = 1 / (float(learnt[EMBEDDING].std()) * width**0.5) - int(model.shape.is_hybrid)
    heads = [model.model.language_model.norm, *([model.mtp.norm] if model.mtp is not None else [])]
    for norm in heads:
        torch.nn.init.constant_(norm.get_parameter("weight"), scale)
    taken = 0
    own = model.state_dict()
    for name, value in own.items():
        found = learnt.get(source(name, tuple(blocks)))
        if name.startswith((TOWER, EMBEDDING)) and found is not None and found.shape == value.shape:
            own[name] = found
            taken += found.numel()
    model.load_state_dict(own)
    return (
        f"Begun with {taken / 1e6:.1f} million parameters of the mini that ships with vlfit (its token "
        f"embedding, and of its vision tower what fits) and trained on"
    )


def source(name: str, blocks: tuple[int, ...]) -> str:
    """The name in mini of what ``name`` begins with."""
    prefix = f"{TOWER}blocks."
    if not name.startswith(prefix):
        return name
    number, rest = name.removeprefix(prefix).split(".", 1)
    return f"{prefix}{blocks[int(number)]}.{rest}"
