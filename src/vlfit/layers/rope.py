"""Rotary embedding of queries and keys: plain, scaled for long contexts, over three axes (M-RoPE), or of a
part of each head.

Sources: transformers' ``Qwen3VLTextRotaryEmbedding``, and ``modeling_rope_utils`` for scaled frequencies.
"""

import math

import torch
from torch import Tensor

from vlfit import kernels
from vlfit.checkpoint.text_config import LinearRopeScaling, Llama3RopeScaling, LongRopeScaling, TextConfig
from vlfit.kernels.rows import row_ops as ends


class RotaryEmbedding:
    """Cosine and sine tables for positions on three axes (``mrope_section``) or on one.

    With three, frequencies belong to time, row and column in turn. LongRoPE uses the frequencies for the
    longest possible sequence (``max_position_embeddings``), as cached keys cannot be rotated again.
    """

    def __init__(self, config: TextConfig, device: torch.device) -> None:
        rotary = config.rotary_dim
        self.inverse_frequencies = inverse_frequencies(config).to(device)
        self.scale = (
            config.rope_scaling.attention_factor if isinstance(config.rope_scaling, LongRopeScaling) else 1.0
        )
        self.axis: Tensor | None = None
        if config.mrope_section:
            axis = torch.zeros(rotary // 2, dtype=torch.long)
            for dimension in (1, 2):
                axis[dimension : config.mrope_section[dimension] * 3 : 3] = dimension
            self.axis = axis.to(device)

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines [tokens, 1, rotary_dim] for ``positions`` [3, tokens].

        With one axis, all three rows of ``positions`` are the same.
        """
        if kernels.enabled_on(positions.device):
            return ends.rope_cos_sin(positions, self.inverse_frequencies, self.axis, self.scale, dtype)
        if self.axis is None:
            angles = positions[0, :, None].float() * self.inverse_frequencies
        else:
            angles = positions.float()[self.axis].T * self.inverse_frequencies
        cosines, sines = cos_sin_tables(angles[:, None])
        if self.scale != 1:
            cosines, sines = cosines.mul_(self.scale), sines.mul_(self.scale)
        return cosines.to(dtype), sines.to(dtype)


def inverse_frequencies(config: TextConfig) -> Tensor:
    """Rotation of each pair of elements from one position to the next, [rotary_dim / 2] float32."""
    rotary, stretch = config.rotary_dim, config.rope_scaling
    exponents = torch.arange(0, rotary, 2, dtype=torch.float32) / rotary
    periods = config.rope_theta**exponents  # positions of a full rotation, over 2 pi
    if isinstance(stretch, LongRopeScaling):
        is_long = config.max_position_embeddings > stretch.original_max_positions
        return 1.0 / (torch.tensor(stretch.long_factor if is_long else stretch.short_factor) * periods)
    if isinstance(stretch, LinearRopeScaling):
        return 1.0 / periods / stretch.factor
    if isinstance(stretch, Llama3RopeScaling):
        return _llama3(1.0 / periods, stretch)
    return 1.0 / periods


def _llama3(frequencies: Tensor, stretch: Llama3RopeScaling) -> Tensor:
    """transformers' ``_compute_llama3_parameters``: linear between ``low`` and ``high`` rotations."""
    turns = stretch.original_max_positions * frequencies / (2 * math.pi)
    share = ((turns - stretch.low_freq_factor) / (stretch.high_freq_factor - stretch.low_freq_factor)).clamp(
        0, 1
    )
    return (1 - share) * frequencies / stretch.factor + share * frequencies


def cos_sin_tables(angles: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines [..., head_dim] of ``angles`` [..., head_dim / 2], in float32."""
    cosines, sines = angles.cos(), angles.sin()
    return torch.cat((cosines, cosines), dim=-1), torch.cat((-sines, sines), dim=-1)


def apply_rope(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """``x`` [..., head_dim] rotated. Element i of the first half pairs with element i of the second.

    The reference's ``x * cos + rotate_half(x) * sin``, with the sign of ``rotate_half`` in the table. Tables
    narrower than ``x`` rotate its first elements only.
    """
    rotary = cosines.shape[-1]
    if rotary < x.shape[-1]:
        return torch.cat((apply_rope(x[..., :rotary], cosines, sines), x[..., rotary:]), dim=-1)
    return (x * cosines).addcmul_(x.roll(rotary // 2, -1), sines)
