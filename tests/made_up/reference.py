"""The made-up family in plain PyTorch: whole sequences, no cache, no code of vlfit's."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]


def greedy(
    weights: Weights,
    config: dict[str, Any],
    ids: list[int],
    images: list[tuple[Tensor, int, int]],
    count: int,
) -> tuple[list[int], float]:
    """The next ``count`` tokens after ``ids``, and the smallest lead of a token over the second best.

    ``images``: pixels [height, width, 3] in -1 to 1, and rows and columns of patches.
    """
    features = [encode(weights, config["vision_config"], *image) for image in images]
    tokens, lead = list(ids), float("inf")
    for _ in range(count):
        best = forward(weights, config, tokens, features)[-1].topk(2)
        lead = min(lead, float(best.values[0] - best.values[1]))
        tokens.append(int(best.indices[0]))
    return tokens[len(ids) :], lead


def forward(weights: Weights, config: dict[str, Any], ids: list[int], features: list[Tensor]) -> Tensor:
    """Logits [tokens, vocabulary] of a whole sequence."""
    text = config["text_config"]
    heads, kv_heads, dim = (text[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    eps = text["rms_norm_eps"]
    tokens = torch.tensor(ids)
    x = weights["model.decoder.embed_tokens.weight"][tokens].clone()
    if features:
        x[tokens == config["image_token_id"]] = torch.cat(features)
    place = torch.arange(len(ids))
    frequencies = text["rope_theta"] ** -(torch.arange(0, dim, 2) / dim)
    angles = place[:, None] * frequencies
    for index in range(text["num_hidden_layers"]):
        get = {
            name.removeprefix(f"model.decoder.layers.{index}."): weight
            for name, weight in weights.items()
            if name.startswith(f"model.decoder.layers.{index}.")
        }
        y = norm(x, get["input_layernorm.weight"], eps)
        q, k, v = (
            (y @ get[f"self_attn.{name}_proj.weight"].T).view(len(ids), -1, dim) for name in ("q", "k", "v")
        )
        q = rotate(norm(q, get["self_attn.q_norm.weight"], eps), angles)
        k = rotate(norm(k, get["self_attn.k_norm.weight"], eps), angles)
        k, v = (part.repeat_interleave(heads // kv_heads, 1) for part in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) * dim**-0.5
        sees = place[None] <= place[:, None]
        if index % 2:
            sees &= place[None] > place[:, None] - text["sliding_window"]
        shares = scores.masked_fill(~sees, float("-inf")).softmax(-1)
        x = x + torch.einsum("hij,jhd->ihd", shares, v).flatten(1) @ get["self_attn.o_proj.weight"].T
        y = norm(x, get["post_attention_layernorm.weight"], eps)
        inner = F.silu(y @ get["mlp.gate_proj.weight"].T) * (y @ get["mlp.up_proj.weight"].T)
        x = x + inner @ get["mlp.down_proj.weight"].T
    return norm(x, weights["model.decoder.norm.weight"], eps) @ weights["lm_head.weight"].T


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * (1 + weight)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """``x`` [tokens, heads, dim] by ``angles`` [tokens, dim / 2]."""
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def encode(weights: Weights, vision: dict[str, Any], pixels: Tensor, rows: int, columns: int) -> Tensor:
    """Features [rows * columns / 4, hidden] of a picture, patches in raster order until they are merged."""
    get = {
        name.removeprefix("model.visual."): weight
        for name, weight in weights.items()
        if name.startswith("model.visual.")
    }
    width, heads = vision["hidden_size"], vision["num_heads"]
    dim = width // heads
    frames = pixels.permute(2, 0, 1)[:, None].repeat(1, 2, 1, 1)  # the one frame twice
    x = F.conv3d(frames[None], get["patch_embed.proj.weight"], get["patch_embed.proj.bias"], (2, 16, 16))
    side = int(vision["num_position_embeddings"] ** 0.5)
    table = get["pos_embed.weight"].T.view(1, width, side, side)
    x = x[0, :, 0] + F.interpolate(table, (rows, columns), mode="bilinear", align_corners=True)[0]
    x = x.flatten(1).T  # [patches, width]
    frequencies = 10000.0 ** -(torch.arange(0, dim // 2, 2) / (dim // 2))
    row, column = torch.arange(rows).repeat_interleave(columns), torch.arange(columns).repeat(rows)
    angles = torch.cat((row[:, None] * frequencies, column[:, None] * frequencies), 1)
    for index in range(vision["depth"]):
        block = f"blocks.{index}"
        y = layer_norm(x, get, f"{block}.norm1")
        q, k, v = linear(y, get, f"{block}.attn.qkv").view(len(x), 3, heads, dim).unbind(1)
        scores = torch.einsum("ihd,jhd->hij", rotate(q, angles), rotate(k, angles)) * dim**-0.5
        mixed = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1)
        x = x + linear(mixed, get, f"{block}.attn.proj")
        y = linear(layer_norm(x, get, f"{block}.norm2"), get, f"{block}.mlp.linear_fc1")
        x = x + linear(F.gelu(y, approximate="tanh"), get, f"{block}.mlp.linear_fc2")
    x = layer_norm(x, get, "merger.norm").view(rows // 2, 2, columns // 2, 2, width)
    merged = x.transpose(1, 2).reshape(-1, 4 * width)
    return linear(F.gelu(linear(merged, get, "merger.linear_fc1")), get, "merger.linear_fc2")


def linear(x: Tensor, get: Weights, name: str) -> Tensor:
    return F.linear(x, get[f"{name}.weight"], get[f"{name}.bias"])


def layer_norm(x: Tensor, get: Weights, name: str) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], get[f"{name}.weight"], get[f"{name}.bias"], 1e-6)
