"""Sampling: one document grown token by token, keys and values of earlier tokens cached.

The cache is an attention backend of its own, one for each block, so the model has no second forward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from model.gpt import GPT


class KeyValueCache:
    """Attention of new tokens to themselves and to all earlier ones; an `AttentionFn` with a memory."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.kv: Tensor | None = None  # (2, Hkv, capacity, D), allocated when the first keys show dtype and device

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        n = q.shape[0]
        assert n == 1 or self.length == 0, "several tokens at once only into an empty cache"
        if self.kv is None:
            self.kv = k.new_empty(2, k.shape[1], self.capacity, k.shape[2])
        self.kv[0, :, self.length : self.length + n] = k.transpose(0, 1)
        self.kv[1, :, self.length : self.length + n] = v.transpose(0, 1)
        self.length += n
        keys, values = self.kv[:, None, :, : self.length]
        # n > 1 is the prompt, where queries and keys are the same tokens; a single query sees every key
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None], keys, values, is_causal=n > 1, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out[0].transpose(0, 1)


class Decoder:
    """The model reading one document: `read` takes the next tokens and gives the scores of the one after them."""

    def __init__(self, model: GPT) -> None:
        self.model = model
        self.limit = model.config.max_positions
        self.restart()

    def restart(self) -> None:
        """Forget everything; the next token read is at position 0."""
        self.length = 0
        self.caches = [KeyValueCache(self.limit) for _ in self.model.blocks]

    def read(self, tokens: Tensor) -> Tensor:
        """(n,) ids -> (padded_vocab,) scores of the next token, fp32 or wider. n > 1 only right after a restart."""
        n = tokens.shape[0]
        positions = torch.arange(self.length, self.length + n, dtype=torch.int32, device=tokens.device)
        cu_seqlens = torch.tensor([0, n], dtype=torch.int32, device=tokens.device)
        hidden = self.model(tokens, positions, cu_seqlens, n, attentions=self.caches)
        self.length += n
        logits = self.model.logits(hidden[-1:])[0]
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


@torch.no_grad()
def generate(
    model: GPT,
    prompt: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    stop_id: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continue a prompt. Runs in the caller's autocast region, if any, and leaves the model's mode as it was.

    Where a document outgrows `max_positions`, the model forgets all but the newer half of its context and reads that
    again from position 0: positions never exceed what it was trained on, and the cost stays linear.

    Args:
        prompt: (n,) int64 ids on the model's device, n >= 1; its last `max_positions` ids are read.
        max_new_tokens: at most this many.
        temperature: divides the scores; 0 always takes the likeliest token.
        top_p: draw from the smallest set of tokens whose probability reaches this, in (0, 1].
        stop_id: ends the continuation, and is not part of it.
        generator: for the draws, on any device; None is torch's global one.

    Returns:
        (m,) the continuation alone, m <= max_new_tokens; ids of the padded vocabulary never occur.

    Raises:
        ValueError: an argument out of its range.
    """
    if prompt.dim() != 1 or prompt.numel() == 0:
        raise ValueError(f"prompt must be a non-empty 1-d tensor of ids, got shape {tuple(prompt.shape)}")
    if temperature < 0:
        raise ValueError(f"temperature must be at least 0, got {temperature}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1], got {top_p}")

    was_training = model.training
    model.eval()
    try:
        # Compiled blocks would be compiled anew for each prompt length.
        with torch.compiler.set_stance("force_eager"):
            decoder = Decoder(model)
            ids = prompt[-decoder.limit :]
            unread = ids
            for _ in range(max_new_tokens):
                if decoder.length == decoder.limit:
                    decoder.restart()
                    unread = ids[-max(1, decoder.limit // 2) :]
                drawn = draw(decoder.read(unread), temperature, top_p, generator)
                if stop_id is not None and drawn.item() == stop_id:
                    break
                unread = drawn
                ids = torch.cat((ids, drawn))
    finally:
        model.train(was_training)
    return ids[min(prompt.shape[0], model.config.max_positions) :]


def draw(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator | None = None) -> Tensor:
    """One id, (1,), from scores (V,); −inf is never drawn."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    probs = (logits / temperature).softmax(dim=-1)
    if top_p < 1:
        ordered, ids = probs.sort(descending=True, stable=True)
        # a token stays when those before it do not reach top_p yet: the likeliest always does
        ordered = torch.where(ordered.cumsum(dim=-1) - ordered < top_p, ordered, 0)
        probs = torch.zeros_like(probs).scatter(0, ids, ordered)
    where = generator.device if generator is not None else probs.device
    return torch.multinomial(probs.to(where), 1, generator=generator).to(logits.device)
