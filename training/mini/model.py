"""mini in training: Qwen3-VL or Qwen3.5 as one dense, batched forward pass.

All pictures of a batch have one size. Parameters have the names of released checkpoints, so the state dict is
the checkpoint. A test compares it with the reference.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from training.mini.shape import Shape
from training.mini.text_model import Drafter, TextModel
from training.mini.vision_model import VisionTower


class Body(nn.Module):
    """The two halves under the names the checkpoint gives them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.visual = VisionTower(shape)
        self.language_model = TextModel(shape)


class Model(nn.Module):
    """mini. The embedding is also the output head (tied)."""

    def __init__(self, shape: Shape | None = None) -> None:
        super().__init__()
        self.shape = shape or Shape()
        self.model = Body(self.shape)
        self.mtp = Drafter(self.shape) if self.shape.drafts else None
        self.apply(self._start)
        depth = self.shape.depth + self.shape.vision_depth
        for name, parameter in self.named_parameters():
            # Layers that write into the residual stream start smaller, the deeper the model the more.
            if name.endswith(
                (
                    "o_proj.weight", "out_proj.weight", "down_proj.weight", "attn.proj.weight",
                    "mlp.linear_fc2.weight",
                )
            ):  # fmt: skip
                nn.init.normal_(parameter, std=0.02 / (2 * depth) ** 0.5)

    @staticmethod
    def _start(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Conv3d):
            nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, nn.Conv1d):
            # The last tap passes a token on as it is, the others begin small.
            nn.init.normal_(module.weight, std=0.1)
            with torch.no_grad():
                module.weight[..., -1] += 1

    def forward(
        self, pictures: Tensor, tokens: Tensor, positions: Tensor, visible: Tensor, slots: Tensor,
        frames: int = 1, segments: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Last hidden states [batch, length, hidden]; ``logits`` turns those that matter into scores.

        ``pictures``: [batch * pictures of each * frames, 3, height, width].
        """
        image, levels = self.encode_pictures(pictures, len(tokens), frames)
        return self.read(image, levels, tokens, positions, visible, slots, segments)

    def encode_pictures(self, pictures: Tensor, batch: int, frames: int = 1) -> tuple[Tensor, list[Tensor]]:
        """The image tokens of all pictures of each sequence, end to end: [batch, tokens, hidden]."""
        image, levels = self.model.visual(pictures, frames)
        hidden = image.shape[-1]
        return image.reshape(batch, -1, hidden), [level.reshape(batch, -1, hidden) for level in levels]

    def read(
        self,
        image: Tensor,
        levels: list[Tensor],
        tokens: Tensor,
        positions: Tensor,
        visible: Tensor,
        slots: Tensor,
        segments: Tensor | None = None,
        trace: list[Tensor] | None = None,
    ) -> Tensor:
        """The text half alone, over image tokens that are known already. ``trace``: see ``TextModel``."""
        text = self.model.language_model
        states: Tensor = text(tokens, positions, visible, slots, image, levels, segments, trace)
        return states

    def draft(
        self, states: Tensor, image: Tensor, tokens: Tensor, positions: Tensor, visible: Tensor, slots: Tensor
    ) -> Tensor:
        """From what ``read`` gave, the states of which ``logits`` scores the token after next.

        The last place of a row, and of a segment in it, says nothing: what follows it is not its own.
        """
        assert self.mtp is not None
        text = self.model.language_model
        following = text.embed(tokens, slots, image).roll(-1, 1)
        drafted: Tensor = self.mtp(states, following, *text.rotations(positions), visible)
        return drafted

    def logits(self, states: Tensor) -> Tensor:
        """Scores of the next token [..., vocabulary]."""
        return functional.linear(states, self.model.language_model.embed_tokens.weight)
