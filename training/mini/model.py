"""mini in training: Qwen3-VL as one dense, batched forward pass; all pictures of a batch have one size.

Parameters have the names of released checkpoints, so the state dict is the checkpoint. A test compares it
with the reference.
"""

from torch import Tensor, nn
from torch.nn import functional

from training.mini.shape import Shape
from training.mini.text_model import TextModel
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
        self.apply(self._start)
        depth = self.shape.depth + self.shape.vision_depth
        for name, parameter in self.named_parameters():
            # Layers that write into the residual stream start smaller, the deeper the model the more.
            if name.endswith(
                ("o_proj.weight", "down_proj.weight", "attn.proj.weight", "mlp.linear_fc2.weight")
            ):
                nn.init.normal_(parameter, std=0.02 / (2 * depth) ** 0.5)

    @staticmethod
    def _start(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Conv3d):
            nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(
        self, pictures: Tensor, tokens: Tensor, positions: Tensor, visible: Tensor, slots: Tensor,
        frames: int = 1,
    ) -> Tensor:  # fmt: skip
        """Last hidden states [batch, length, hidden]; ``logits`` turns those that matter into scores.

        ``pictures``: [batch * pictures of each * frames, 3, height, width].
        """
        image, levels = self.encode_pictures(pictures, len(tokens), frames)
        return self.read(image, levels, tokens, positions, visible, slots)

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
    ) -> Tensor:
        """The text half alone, over image tokens that are known already."""
        states: Tensor = self.model.language_model(tokens, positions, visible, slots, image, levels)
        return states

    def logits(self, states: Tensor) -> Tensor:
        """Scores of the next token [..., vocabulary]."""
        return functional.linear(states, self.model.language_model.embed_tokens.weight)
