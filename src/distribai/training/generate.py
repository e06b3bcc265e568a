"""Text from a model: one token after the other, with the whole context each time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    temperature: float,
    seed: int,
    context: int,
    device: str,
    stop: int = -1,
    gate: Callable[[float], bool] = lambda _: True,
) -> list[int]:
    """Up to ``max_tokens`` tokens that follow ``prompt``; ``stop`` ends the text and is left out.
    ``gate`` is asked before each token; it may block or raise.

    ``temperature`` 0 takes the likeliest token. The model sees the last ``context`` tokens, the
    length it was trained with. Chance comes from ``seed`` alone (drawn on the CPU, so that every
    device type draws alike).

    Raises:
        ValueError: an empty prompt or a negative temperature.
    """
    if not prompt or temperature < 0:
        raise ValueError("generation takes a prompt and a temperature of at least 0")
    chance = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    model.eval()
    try:
        for _ in range(max_tokens):
            gate(0.0)
            window = torch.tensor([tokens[-context:]], device=device)
            logits = model(window)[0, -1].float().cpu()
            if temperature == 0:
                token = int(logits.argmax())
            else:
                share = torch.softmax(logits / temperature, -1)
                token = int(torch.multinomial(share, 1, generator=chance))
            if token == stop:
                break
            tokens.append(token)
    finally:
        model.train()
    return tokens[len(prompt) :]
