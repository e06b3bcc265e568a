"""Decoder-only transformer: RMSNorm, RoPE, SwiGLU, grouped-query attention.

Sources of the shape: RMSNorm arXiv:1910.07467, RoPE arXiv:2104.09864, SwiGLU arXiv:2002.05202,
grouped queries arXiv:2305.13245, query-key norm arXiv:2010.04245, residual scaling at the start as
in GPT-2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from distribai.core.tensors import Init, ParameterManifest, TensorSpec
from distribai.errors import InvalidSpec

NAME = "decoder_transformer"


@dataclass(frozen=True, slots=True)
class Config:
    """Knobs of the family.

    ``dim`` model width; ``kv_heads`` key and value heads, dividing ``heads`` (0: as many);
    ``ffn_dim`` hidden width of the SwiGLU; ``tied`` whether the head is the embedding;
    ``qk_norm`` RMSNorm on queries and keys per head; ``window`` how many positions back a query
    sees (0: all); ``rope_theta`` base of the rotary frequencies; ``checkpointing`` recomputes
    blocks in the backward pass to save memory; ``vocab_size`` 256 for bytes (plus the
    end-of-document token makes 257).
    """

    dim: int
    layers: int
    heads: int
    ffn_dim: int
    kv_heads: int = 0
    vocab_size: int = 257
    tied: bool = True
    qk_norm: bool = False
    window: int = 0
    rope_theta: float = 10000.0
    checkpointing: bool = False

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.heads

    @property
    def key_heads(self) -> int:
        """Key and value heads after the default."""
        return self.kv_heads or self.heads


PROFILES: Mapping[str, Config] = {
    "tiny": Config(dim=128, layers=2, heads=4, ffn_dim=352),
    "small": Config(dim=192, layers=3, heads=6, ffn_dim=576),
    "base": Config(dim=320, layers=6, heads=5, ffn_dim=768),
    "medium": Config(dim=512, layers=6, heads=8, ffn_dim=1408),
    "large": Config(dim=768, layers=16, heads=12, ffn_dim=2048),
    "xl": Config(dim=1024, layers=24, heads=16, ffn_dim=2752),
}


MAX_WIDTH = 2**24
"""The largest of any knob: far beyond every model, and small enough to count with."""

MAX_LAYERS = 4096
"""So that a file of weights has fewer tensors than its header can name."""


def check(config: Config) -> None:
    """Refuse impossible dimensions.

    Raises:
        InvalidSpec: ``spec.model`` or ``spec.model_too_large``, with the knob in ``field``.
    """
    for knob in ("dim", "layers", "heads", "ffn_dim", "vocab_size"):
        if getattr(config, knob) < 1:
            _refuse(knob, f"{knob} is {getattr(config, knob)}: it must be at least 1.")
    for knob in ("kv_heads", "window"):
        if getattr(config, knob) < 0:
            _refuse(knob, f"{knob} is {getattr(config, knob)}: it must not be negative.")
    for knob in ("layers", "dim", "heads", "ffn_dim", "vocab_size", "kv_heads", "window"):
        limit = MAX_LAYERS if knob == "layers" else MAX_WIDTH
        if getattr(config, knob) > limit:
            raise InvalidSpec(
                "spec.model_too_large",
                f"The model is too large to plan: {knob} is beyond {limit}.",
                "Take fewer layers, or smaller ones.",
                field=f"model.architecture_config.{knob}",
            )
    if config.dim % config.heads:
        _refuse("heads", f"{config.heads} heads do not divide a width of {config.dim}.")
    if config.head_dim % 2:
        _refuse("heads", f"a head of {config.head_dim} is odd: RoPE rotates pairs.")
    if config.heads % config.key_heads:
        _refuse("kv_heads", f"{config.key_heads} key heads do not divide {config.heads} heads.")
    if not 1 < config.rope_theta < math.inf:
        _refuse("rope_theta", f"rope_theta is {config.rope_theta}: it must be above 1 and finite.")


def _refuse(knob: str, message: str) -> None:
    raise InvalidSpec(
        "spec.model",
        f"The decoder transformer is not possible: {message}",
        "Change the knob, or take a profile: " + ", ".join(PROFILES) + ".",
        field=f"model.architecture_config.{knob}",
    )


def manifest(config: Config) -> ParameterManifest:
    """Names, shapes and first values, in the order of the forward pass.

    Matrices are (out, in), as torch's ``Linear`` keeps them. Linear layers start uniform with
    standard deviation ``in ** -0.5``; those that write into the residual stream are divided by
    ``sqrt(2 layers)``.
    """
    d, f, hd = config.dim, config.ffn_dim, config.head_dim
    q, kv = config.heads * hd, config.key_heads * hd
    # 1 / sqrt rather than ** -0.5: both are correctly rounded everywhere, pow is not, and the
    # manifest's hash and version 0 must be the same on every machine.
    residual = 1 / math.sqrt(2 * config.layers)
    one = Init("constant", value=1.0)

    def linear(name: str, out: int, inp: int, gain: float = 1.0) -> TensorSpec:
        return TensorSpec(name, (out, inp), init=Init("uniform", std=gain / math.sqrt(inp)))

    tensors = [TensorSpec("embed.weight", (config.vocab_size, d), init=Init("uniform", std=0.02))]
    for i in range(config.layers):
        p = f"blocks.{i}."
        tensors += [
            TensorSpec(p + "attn_norm.weight", (d,), init=one),
            linear(p + "attn.q.weight", q, d),
            linear(p + "attn.k.weight", kv, d),
            linear(p + "attn.v.weight", kv, d),
        ]
        if config.qk_norm:
            tensors += [
                TensorSpec(p + "attn.q_norm.weight", (hd,), init=one),
                TensorSpec(p + "attn.k_norm.weight", (hd,), init=one),
            ]
        tensors += [
            linear(p + "attn.o.weight", d, q, residual),
            TensorSpec(p + "ffn_norm.weight", (d,), init=one),
            linear(p + "ffn.gate.weight", f, d),
            linear(p + "ffn.up.weight", f, d),
            linear(p + "ffn.down.weight", d, f, residual),
        ]
    tensors.append(TensorSpec("norm.weight", (d,), init=one))
    if not config.tied:
        tensors.append(linear("head.weight", config.vocab_size, d))
    return ParameterManifest(tuple(tensors))


def parameters(config: Config) -> int:
    """Trainable elements of :func:`manifest`, in constant time and memory."""
    one = manifest(replace(config, layers=1)).parameters
    block = manifest(replace(config, layers=2)).parameters - one
    return one + (config.layers - 1) * block


def activation_bytes(config: Config, sequences: int, seq_len: int) -> int:
    """Estimate of what a step keeps for its backward pass, in fp32.

    Per token and block, counted from the forward pass: both norms' inputs and outputs and the two
    sums (6 dim), queries and keys before and after their rotation, values and the attention's
    output (3 query widths, 3 key widths), and the four hidden vectors of the SwiGLU; attention is
    fused and keeps no scores. With ``checkpointing`` each block keeps its input, and one block at a
    time is recomputed. Logits are there three times: as such, normalised, and as a gradient.
    Measured against the tensors that torch saves (tiny, small, base; 8 x 64 tokens, CPU): 10 to 14
    percent above.
    """
    d = config.dim
    q, kv = config.heads * config.head_dim, config.key_heads * config.head_dim
    block = 6 * d + 3 * q + 3 * kv + 4 * config.ffn_dim
    kept = config.layers * d + block if config.checkpointing else config.layers * block
    return 4 * sequences * seq_len * (kept + 2 * d + 3 * config.vocab_size)


def hidden_matrices(config: Config) -> frozenset[str]:
    """Names of the tensors that Muon may take: matrices between embedding and head."""
    return frozenset(
        t.name
        for t in manifest(config).tensors
        if len(t.shape) == 2 and t.name not in ("embed.weight", "head.weight")
    )
