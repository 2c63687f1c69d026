"""The dry run: right numbers, at once, for models that do not fit here; nothing read or written."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from model.flops import exact_flops, paper_flops
from model.gpt import GPT
from train import cli
from train.__main__ import COMMAND, main
from train.dry_run import dry_run, vocabulary


def test_numbers_are_those_of_the_model() -> None:
    config = cli.build(COMMAND, ["experiment=gpt3_2.7b_8k", "trainer.accelerator=gpu"])
    text = dry_run(config)
    with torch.device("meta"):
        model = GPT(replace(config.model, vocab_size=50_257), lambda *args: args[0])
    assert f"{model.n_params:,} (2.67B)" in text
    tokens, context = config.batch.global_batch_tokens, config.batch.context
    assert "524,288 = 32 micro-batches of 16,384 on 1 rank" in text
    assert f"{exact_flops(model.config, tokens, tokens * context):.3e} needed" in text
    assert f"{paper_flops(model.n_params, 32, 2560, tokens, tokens * context):.3e} by the paper" in text
    assert f"optimiser         {8 * model.n_params / (1 << 30):.2f} GiB" in text
    assert f"one checkpoint    {12 * model.n_params / (1 << 30):.2f} GiB" in text
    assert "bf16-mixed" in text


def test_command_is_quick_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    start = time.monotonic()
    assert main(["experiment=gpt3_2.7b_8k", "dry_run=true"]) == 0
    assert time.monotonic() - start < 10
    text = capsys.readouterr().out
    for part in (
        "weights",
        "gradients",
        "optimiser",
        "activations",
        "logits",
        "tokens a step",
        "steps",
        "FLOPs a step",
    ):
        assert f"  {part}" in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("overrides", "size", "source"),
    [
        ([], 4096, "tokenizer.vocab_size"),
        (["tokenizer=gpt2"], 50_257, "openai-community/gpt2"),
        (["data=synthetic", "data.synthetic_vocab_size=999"], 999, "data.synthetic_vocab_size"),
        (["model.vocab_size=32000"], 32_000, "model.vocab_size"),
        (["tokenizer=hub", "tokenizer.name=a/b"], 50_257, "assumed: a/b is not downloaded"),
    ],
)
def test_where_the_vocabulary_is_known_from(overrides: list[str], size: int, source: str) -> None:
    found, text = vocabulary(cli.build(COMMAND, overrides))
    assert found == size
    assert text.startswith(source)


def test_vocabulary_of_a_tokenizer_file(tmp_path: Path) -> None:
    from data.config import TokenizerConfig
    from data.tokenizer import Tokenizer

    Tokenizer.train(iter(["some text to learn from"] * 3), TokenizerConfig(vocab_size=260)).save(tmp_path / "t.json")
    config = cli.build(COMMAND, ["tokenizer=file", f"tokenizer.path={tmp_path}/t.json"])
    assert vocabulary(config)[0] == Tokenizer.from_file(tmp_path / "t.json").vocab_size


def test_ranks_share_the_step() -> None:
    config = cli.build(COMMAND, ["experiment=gpt3_125m", "trainer.devices=4", "trainer.num_nodes=2"])
    assert "524,288 = 2 micro-batches of 32,768 on 8 ranks" in dry_run(config)
