"""Rotary embedding (RoPE) of queries and keys: plain, scaled for long contexts, over three axes (M-RoPE), or
of a part of each head.

Sources: transformers' ``Qwen3VLTextRotaryEmbedding``, and ``modeling_rope_utils`` for scaled frequencies.
"""

import math

import torch
from torch import Tensor

from vlfit import kernels
from vlfit.checkpoint.text_config import LinearRopeScaling, Llama3RopeScaling, LongRopeScaling, TextConfig
from vlfit.kernels.rows import row_ops


class RotaryEmbedding:
    """RoPE tables of a text model, for positions on one axis or, with ``mrope_section``, on three.

    ``axis`` [rotary_dim / 2]: the axis that each pair of elements uses; None with one axis. With three (time,
    row, column) the pairs are interleaved, as in Qwen3-VL. ``scale``: LongRoPE's attention factor, which
    multiplies the tables; 1.0 otherwise. LongRoPE always uses the frequencies for
    ``max_position_embeddings``, whatever a sequence's length, as cached keys cannot be rotated again.
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
        """Cosines and sines [tokens, 1, rotary_dim] for ``apply_rope`` at ``positions`` [3, tokens].

        The first half of the sines is negated. With one axis only ``positions[0]`` is read.
        """
        if kernels.enabled_for("rows", positions.device):
            return row_ops.rope_cos_sin(positions, self.inverse_frequencies, self.axis, self.scale, dtype)
        if self.axis is None:
            angles = positions[0, :, None].float() * self.inverse_frequencies
        else:
            angles = positions.float()[self.axis].T * self.inverse_frequencies
        cosines, sines = cos_sin_tables(angles[:, None])
        if self.scale != 1:
            cosines, sines = cosines.mul_(self.scale), sines.mul_(self.scale)
        return cosines.to(dtype), sines.to(dtype)


def inverse_frequencies(config: TextConfig) -> Tensor:
    """Radians per position of each pair of elements, RoPE scaling included: [rotary_dim / 2] float32."""
    rotary, scaling = config.rotary_dim, config.rope_scaling
    exponents = torch.arange(0, rotary, 2, dtype=torch.float32) / rotary
    periods = config.rope_theta**exponents  # positions of a full rotation, over 2 pi
    if isinstance(scaling, LongRopeScaling):
        is_long = config.max_position_embeddings > scaling.original_max_positions
        return 1.0 / (torch.tensor(scaling.long_factor if is_long else scaling.short_factor) * periods)
    if isinstance(scaling, LinearRopeScaling):
        return 1.0 / periods / scaling.factor
    if isinstance(scaling, Llama3RopeScaling):
        return _llama3_frequencies(1.0 / periods, scaling)
    return 1.0 / periods


def _llama3_frequencies(frequencies: Tensor, scaling: Llama3RopeScaling) -> Tensor:
    """transformers' ``_compute_llama3_parameters``.

    Low frequencies are divided by the factor, high ones are kept, those between are interpolated.
    """
    rotations = scaling.original_max_positions * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    unscaled = ((rotations - low) / (high - low)).clamp(0, 1)
    return (1 - unscaled) * frequencies / scaling.factor + unscaled * frequencies


def cos_sin_tables(angles: Tensor) -> tuple[Tensor, Tensor]:
    """Tables for ``apply_rope`` from ``angles`` [..., head_dim / 2]: cosines and sines [..., head_dim].

    Both repeat for the second half of a head; the sines of the first half are negated.
    """
    cosines, sines = angles.cos(), angles.sin()
    return torch.cat((cosines, cosines), dim=-1), torch.cat((-sines, sines), dim=-1)


def apply_rope(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate ``x`` [..., head_dim], NeoX-style: element i of the first half pairs with i of the second.

    transformers' ``x * cos + rotate_half(x) * sin``; the sign of ``rotate_half`` is in ``sines``. Tables
    narrower than ``x`` rotate its first elements only. Returns a new tensor.
    """
    rotary = cosines.shape[-1]
    if rotary < x.shape[-1]:
        return torch.cat((apply_rope(x[..., :rotary], cosines, sines), x[..., rotary:]), dim=-1)
    return (x * cosines).addcmul_(x.roll(rotary // 2, -1), sines)
