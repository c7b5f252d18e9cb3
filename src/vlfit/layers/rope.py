"""Rotary positions of a decoder: the tables that queries and keys are turned by, and the turning.

Knows every kind of frequencies that a config can ask for: as they are, stretched, dealt out to the three axes
of Qwen3-VL's positions, for a part of each head. Does not know where a token stands (``mrope.py``).

Sources: transformers' ``Qwen3VLTextRotaryEmbedding``, and ``modeling_rope_utils`` for stretched frequencies.
"""

import math

import torch
from torch import Tensor

from vlfit import kernels
from vlfit.checkpoint.text_config import LinearStretch, Llama3Stretch, LongStretch, TextConfig
from vlfit.kernels.rows import row_ops as ends


class TextRope:
    """Tables for positions on three axes (``mrope_section``), or on one.

    With three, the rotary frequencies are dealt out to time, row and column in turn. With LongRoPE the
    frequencies are those for the longest sequence that there can be (``max_position_embeddings``), for
    shorter ones as well: keys that are in the cache cannot be turned again.
    """

    def __init__(self, config: TextConfig, device: torch.device) -> None:
        rotary = config.rotary_dim
        self.inverse_frequencies = inverse_frequencies(config).to(device)
        self.scale = config.stretch.scale if isinstance(config.stretch, LongStretch) else 1.0
        self.axis: Tensor | None = None
        if config.mrope_section:
            axis = torch.zeros(rotary // 2, dtype=torch.long)
            for dimension in (1, 2):
                axis[dimension : config.mrope_section[dimension] * 3 : 3] = dimension
            self.axis = axis.to(device)

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Tables for ``rotate`` [tokens, 1, rotary_dim] for ``positions`` [3, tokens].

        Where there is one axis only, it is the first: all three are alike.
        """
        if kernels.used_on(positions.device):
            return ends.rotation_tables(positions, self.inverse_frequencies, self.axis, self.scale, dtype)
        if self.axis is None:
            angles = positions[0, :, None].float() * self.inverse_frequencies
        else:
            angles = positions.float()[self.axis].T * self.inverse_frequencies
        cosines, sines = rotation_tables(angles[:, None])
        if self.scale != 1:
            cosines, sines = cosines.mul_(self.scale), sines.mul_(self.scale)
        return cosines.to(dtype), sines.to(dtype)


def inverse_frequencies(config: TextConfig) -> Tensor:
    """How far each pair of elements is turned from one position to the next, [rotary_dim / 2] float32."""
    rotary, stretch = config.rotary_dim, config.stretch
    exponents = torch.arange(0, rotary, 2, dtype=torch.float32) / rotary
    periods = config.rope_theta**exponents  # positions for a turn, over 2 pi
    if isinstance(stretch, LongStretch):
        is_long = config.max_position_embeddings > stretch.original
        return 1.0 / (torch.tensor(stretch.long if is_long else stretch.short) * periods)
    if isinstance(stretch, LinearStretch):
        return 1.0 / periods / stretch.factor
    if isinstance(stretch, Llama3Stretch):
        return _llama3(1.0 / periods, stretch)
    return 1.0 / periods


def _llama3(frequencies: Tensor, stretch: Llama3Stretch) -> Tensor:
    """transformers' ``_compute_llama3_parameters``: between ``low`` and ``high`` turns a ramp."""
    turns = stretch.original * frequencies / (2 * math.pi)
    share = ((turns - stretch.low) / (stretch.high - stretch.low)).clamp(0, 1)
    return (1 - share) * frequencies / stretch.factor + share * frequencies


def rotation_tables(angles: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines [..., head_dim] of ``angles`` [..., head_dim / 2], in float32."""
    cosines, sines = angles.cos(), angles.sin()
    return torch.cat((cosines, cosines), dim=-1), torch.cat((-sines, sines), dim=-1)


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """``x`` [..., head_dim] turned by its position. Element i of the first half pairs with i of the second.

    The reference's ``x * cos + rotate_half(x) * sin``, with the sign of ``rotate_half`` in the table. Tables
    narrower than ``x`` turn its first elements only.
    """
    rotary = cosines.shape[-1]
    if rotary < x.shape[-1]:
        return torch.cat((rotate(x[..., :rotary], cosines, sines), x[..., rotary:]), dim=-1)
    return (x * cosines).addcmul_(x.roll(rotary // 2, -1), sines)
