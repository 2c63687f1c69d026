"""A sample continuation at the end of a run: printed, and added to samples.txt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from train.module import GPTModule

if TYPE_CHECKING:
    from data.tokenizer import Tokenizer

_TEMPERATURE = 0.8
_TOP_P = 0.95


class Sample(Callback):
    """Continues `prompt` once the last step is done; the same seed gives the same text.

    Args:
        tokenizer: None where the data has no text: nothing is sampled.
        n_tokens: length of the continuation; 0 turns it off.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt: str,
        n_tokens: int,
        seed: int,
        path: Path,
        say: Callable[[str], None],
    ) -> None:
        self.tokenizer = tokenizer
        self.prompt = prompt
        self.n_tokens = n_tokens
        self.seed = seed
        self.path = path
        self.say = say

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        done = trainer.global_step == trainer.max_steps
        if not (done and trainer.is_global_zero and self.n_tokens and self.tokenizer is not None):
            return
        assert isinstance(pl_module, GPTModule), "the callbacks of fit() serve one module"
        pl_module.eval()
        text = self._continuation(pl_module, self.tokenizer)
        pl_module.train()
        self.say(f"sample (temperature {_TEMPERATURE}, top-p {_TOP_P}):\n{text}")
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"step {trainer.global_step}\n{text}\n\n")

    def _continuation(self, module: GPTModule, tokenizer: Tokenizer) -> str:
        from model.generate import generate

        room = module.model.config.max_positions
        # A document begins with end-of-text; the oldest tokens of a prompt that leaves no room go.
        ids = [tokenizer.eot_id, *tokenizer.encode(self.prompt)][-max(1, room - self.n_tokens) :]
        prompt = torch.tensor(ids, device=module.device)
        generator = torch.Generator(module.device).manual_seed(self.seed)
        n_tokens = min(self.n_tokens, room - len(ids))
        with torch.no_grad():
            out = generate(module.model, prompt, n_tokens, _TEMPERATURE, _TOP_P, tokenizer.eot_id, generator)
        return tokenizer.decode([i for i in out.tolist() if i != tokenizer.eot_id])
