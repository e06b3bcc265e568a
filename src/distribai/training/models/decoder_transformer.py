"""Torch half of :mod:`distribai.core.architectures.decoder_transformer`.

The modules are named so that ``named_parameters`` yields exactly the core manifest's names, shapes
and order. Rotary tables are non-persistent buffers in fp32: they are a function of the
configuration, so they neither travel nor count as weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from distribai.core.architectures.decoder_transformer import NAME as NAME
from distribai.core.architectures.decoder_transformer import Config

NORM_EPS = 1e-6
"""Added to the mean square in every RMSNorm (arXiv:1910.07467)."""


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed and scaled in the input's dtype."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and dtype as ``x``."""
        return functional.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), NORM_EPS)


def rope_tables(length: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of arXiv:2104.09864, each (length, head_dim) in fp32.

    The first half of a head is paired with the second half, so each table repeats itself; the
    sines of the first half are negated, which turns the rotation into two products and a sum.
    """
    frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.outer(torch.arange(length, dtype=torch.float64), frequency)
    cos, sin = angle.cos().float(), angle.sin().float()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs of ``x`` (..., length, head_dim)."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((x[..., half:], x[..., :half]), -1) * sin


class Attention(nn.Module):
    """Causal attention with grouped queries (arXiv:2305.13245), optionally within a window."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.key_heads, self.head_dim = (
            config.heads,
            config.key_heads,
            config.head_dim,
        )
        self.q = nn.Linear(config.dim, self.heads * self.head_dim, bias=False)
        self.k = nn.Linear(config.dim, self.key_heads * self.head_dim, bias=False)
        self.v = nn.Linear(config.dim, self.key_heads * self.head_dim, bias=False)
        if config.qk_norm:
            self.q_norm: nn.Module = RMSNorm(self.head_dim)
            self.k_norm: nn.Module = RMSNorm(self.head_dim)
        else:
            self.q_norm = self.k_norm = nn.Identity()
        self.o = nn.Linear(self.heads * self.head_dim, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """Same shape as ``x`` (batch, length, dim); ``mask`` (length, length), True where seen."""
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, self.heads, self.head_dim).transpose(1, 2)
        k = self.k(x).view(batch, length, self.key_heads, self.head_dim).transpose(1, 2)
        v = self.v(x).view(batch, length, self.key_heads, self.head_dim).transpose(1, 2)
        q = rotate(self.q_norm(q), cos, sin)
        k = rotate(self.k_norm(k), cos, sin)
        y = functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=self.heads != self.key_heads,
        )
        return self.o(y.transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """SwiGLU (arXiv:2002.05202): ``down(silu(gate x) * up x)``."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.up = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.down = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as ``x``."""
        return self.down(functional.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Pre-norm residual block."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(config.dim)
        self.attn = Attention(config)
        self.ffn_norm = RMSNorm(config.dim)
        self.ffn = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """Same shape as ``x``."""
        x = x + self.attn(self.attn_norm(x), cos, sin, mask)
        return x + self.ffn(self.ffn_norm(x))  # type: ignore[no-any-return]


class DecoderTransformer(nn.Module):
    """Decoder-only transformer; sequences of any length (rotary tables grow when needed)."""

    cos: Tensor
    sin: Tensor
    mask: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim)
        if not config.tied:
            self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        for name in ("cos", "sin", "mask"):
            self.register_buffer(name, torch.empty(0, 0), persistent=False)

    def prepare(self, length: int) -> None:
        """Make the tables for sequences up to ``length``, on the model's device.

        Called by ``forward`` when they are too short; a compiled model calls it beforehand.
        """
        device = self.embed.weight.device
        cos, sin = rope_tables(length, self.config.head_dim, self.config.rope_theta)
        self.cos, self.sin = cos.to(device), sin.to(device)
        if self.config.window:
            back = torch.arange(length)[:, None] - torch.arange(length)[None, :]
            self.mask = ((back >= 0) & (back < self.config.window)).to(device)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, length, vocab) of integer ``tokens`` (batch, length)."""
        length = tokens.shape[1]
        if self.cos.shape[0] < length:
            self.prepare(length)
        x = self.embed(tokens)
        cos, sin = self.cos[:length].to(x.dtype), self.sin[:length].to(x.dtype)
        mask = self.mask[:length, :length] if self.config.window else None
        recompute = self.config.checkpointing and self.training and torch.is_grad_enabled()
        for block in self.blocks:
            if recompute:
                x = checkpoint(block, x, cos, sin, mask, use_reentrant=False)
            else:
                x = block(x, cos, sin, mask)
        x = self.norm(x)
        if self.config.tied:
            return functional.linear(x, self.embed.weight)
        return self.head(x)  # type: ignore[no-any-return]


def build(config: Any) -> nn.Module:
    """The model of a checked configuration, with torch's own first values."""
    return DecoderTransformer(config)
