"""The same run on a GPU: bf16, compiled blocks, pinned batches, and a step loop that never waits for the device."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from data.config import BatchConfig, DataConfig, Source, TokenizerConfig
from model.config import GPTConfig
from train.checkpoint import read_checkpoint
from train.fit import fit
from train.metrics import read_metrics
from train.module import GPTModule
from train.schema import OptimConfig, RunConfig, TrainerConfig

pytestmark = pytest.mark.gpu


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    text = tmp_path / "text"
    text.mkdir()
    draw = random.Random(0)
    words = ["for", "in", "while", "return", "import", "def", "class", "yield"]
    for i in range(200):
        document = " ".join(draw.choice(words) for _ in range(draw.randint(20, 400)))
        (text / f"{i}.txt").write_text(document, encoding="utf-8")
    return RunConfig(
        name="gpu",
        run_root=str(tmp_path / "runs"),
        model=GPTConfig(n_layer=2, d_model=128, nheads_q=2, max_positions=256),
        data=DataConfig(
            source=Source.files,
            paths=[str(text)],
            cache_dir=str(tmp_path / "cache"),
            validation_fraction=0.2,
            processes=1,
        ),
        tokenizer=TokenizerConfig(vocab_size=300),
        batch=BatchConfig(context=256, micro_batch_tokens=512, global_batch_tokens=1024),
        optim=OptimConfig(warmup_steps=5),
        trainer=TrainerConfig(
            max_steps=30, log_every=5, validate_every=10, checkpoint_every=10, progress_bar=False, sample_tokens=16
        ),
    )


def test_a_run_with_the_defaults_of_a_gpu(config: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    result = fit(config)
    output = capsys.readouterr().out
    assert f"bf16-mixed on {torch.cuda.get_device_name()}" in output
    assert result.losses[30] < result.losses[5]
    row = read_metrics(result.metrics)[-1]
    assert 0 < row["gemm_util"] < 1.1
    weights = read_checkpoint(result.checkpoint)["state_dict"]
    assert not any("_orig_mod" in key for key in weights), "compiled blocks keep their names"
    assert {value.dtype for value in weights.values()} == {torch.float32}
    assert result.report.exists()


@pytest.mark.parametrize("compiled", [False, True])
def test_no_synchronisation_inside_a_step(config: RunConfig, monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    """CUDA raises where the host would wait for it, once the first steps are done."""
    training_step = GPTModule.training_step

    def watched(self: GPTModule, item: Any, batch_idx: int) -> None:
        torch.cuda.set_sync_debug_mode("error" if self.global_step >= 3 else "default")
        try:
            training_step(self, item, batch_idx)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(GPTModule, "training_step", watched)
    options = replace(config.trainer, max_steps=8, compile=compiled, sample_tokens=0, validate_every=4)
    assert fit(replace(config, trainer=options)).step == 8


@pytest.mark.parametrize("compiled", [False, True])
def test_a_resumed_run_stays_on_the_curve(config: RunConfig, compiled: bool) -> None:
    """Not bit by bit: the attention's backward adds up in no fixed order."""
    options = replace(config.trainer, log_every=1, compile=compiled, sample_tokens=0, max_steps=20)
    config = replace(config, trainer=options, model=replace(config.model, dropout=0.1))
    whole = fit(replace(config, name="whole"))
    crash: Any = GPTModule.training_step

    def dying(self: GPTModule, item: Any, batch_idx: int) -> None:
        if self.global_step == 13:
            raise RuntimeError("out of luck")
        crash(self, item, batch_idx)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GPTModule, "training_step", dying)
        with pytest.raises(RuntimeError, match="out of luck"):
            fit(config)
    resumed = fit(replace(config, resume="auto"))
    assert resumed.losses.keys() == whole.losses.keys()
    apart = {step: abs(loss / whole.losses[step] - 1) for step, loss in resumed.losses.items()}
    before, after = (max(x for step, x in apart.items() if (step > 10) == late) for late in (False, True))
    text = f"up to the checkpoint {before:.2e}, after it {after:.2e} apart: {apart}"
    assert all(x <= 2e-2 for x in apart.values()), text  # a NaN is none of them, and max() could pass over it
    tokens = [[row["tokens"] for row in read_metrics(run.metrics)] for run in (whole, resumed)]
    assert tokens[0] == tokens[1]


def test_checkpointed_activations_and_true_bf16(config: RunConfig) -> None:
    options = replace(
        config.trainer, max_steps=10, activation_checkpointing=True, precision="bf16-true", compile=False, log_every=1
    )
    result = fit(replace(config, trainer=options))
    assert math.isfinite(result.val_loss or math.nan)
    assert result.losses[10] < result.losses[1]
    weights = read_checkpoint(result.checkpoint)["state_dict"]
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}
