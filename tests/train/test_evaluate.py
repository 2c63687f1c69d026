"""`train.evaluate`: its figures are those of a loop over the documents, on the data of the run and on other."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from train import cli
from train.__main__ import main as train_main
from train.checkpoint import load_model
from train.evaluate import COMMAND, evaluate, main, offer_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluate")
    for i in range(30):
        (folder / f"{i}.txt").write_text(f"ünïcode text {i} about the number {i * i}. " * (1 + i % 7))
    (folder / "other").mkdir()
    for i in range(30):
        (folder / "other" / f"{i}.txt").write_text(f"completely different words: {i * 17 % 11} zebras. " * 3)
    arguments = [
        "data=files",
        f"data.paths={folder}/*.txt",
        f"data.cache_dir={folder}/cache",
        "data.validation_fraction=0.3",
        f"run_root={folder}/runs",
        "name=tiny",
        "model.n_layer=1",
        "model.d_model=32",
        "model.nheads_q=2",
        "model.max_positions=64",
        "tokenizer.vocab_size=300",
        "batch.context=64",
        "batch.micro_batch_tokens=128",
        "batch.global_batch_tokens=256",
        "optim.warmup_steps=2",
        "trainer.max_steps=10",
        "trainer.sample_tokens=0",
        "trainer.progress_bar=false",
        "trainer.accelerator=cpu",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.callbacks.throughput.sustained_matmul_flops", lambda *args: 1e11)
        patch.setattr("train.report.write_report", lambda run_dir: run_dir)
        assert train_main(arguments) == 0
    return folder


def arguments(folder: Path, *more: str) -> list[str]:
    return [f"checkpoint={folder}/runs/tiny", "accelerator=cpu", *more]


def figures(capsys: pytest.CaptureFixture[str], *given: str) -> dict[str, float]:
    capsys.readouterr()
    assert main(list(given)) == 0
    text = capsys.readouterr().out
    found = re.findall(r"^(tokens|loss|perplexity|bits per byte) +([\d.,]+)", text, re.MULTILINE)
    return {name: float(value.replace(",", "")) for name, value in found}


def test_figures_are_those_of_a_loop_over_the_documents(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from data.config import DataConfig, TokenizerConfig
    from data.prepare import prepare
    from train.checkpoint import from_plain

    model, checkpoint = load_model(folder / "runs" / "tiny", torch.device("cpu"), "reference")
    run_config = checkpoint["run_config"]
    prepared = prepare(from_plain(DataConfig, run_config["data"]), from_plain(TokenizerConfig, run_config["tokenizer"]))
    nats, n_targets, n_bytes = 0.0, 0, 0
    for i in range(len(prepared.validation)):
        document = torch.tensor(prepared.validation.document(i).astype("int64"))
        n_bytes += len(prepared.tokenizer.decode(document[1:-1].tolist()).encode())
        for piece in range(0, len(document) - 1, 64):  # pieces of the context, each from position 0
            tokens, targets = document[piece : piece + 65][:-1], document[piece : piece + 65][1:]
            positions = torch.arange(len(tokens), dtype=torch.int32)
            cu_seqlens = torch.tensor([0, len(tokens)], dtype=torch.int32)
            with torch.no_grad():
                nats += model.loss(tokens, targets, positions, cu_seqlens, 64).item()
            n_targets += len(targets)
    got = figures(capsys, *arguments(folder))
    assert got["tokens"] == n_targets
    assert got["loss"] == pytest.approx(nats / n_targets, abs=1e-4)
    assert got["perplexity"] == pytest.approx(math.exp(nats / n_targets), abs=1e-1)
    assert got["bits per byte"] == pytest.approx(nats / math.log(2) / n_bytes, abs=1e-3)


def test_it_agrees_with_the_runs_own_validation(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from train.metrics import last_value, read_metrics

    rows = read_metrics(folder / "runs" / "tiny" / "metrics.csv")
    got = figures(capsys, *arguments(folder))
    assert got["loss"] == pytest.approx(last_value(rows, "val_loss"), abs=1e-4)
    assert got["bits per byte"] == pytest.approx(last_value(rows, "val_bits_per_byte"), abs=1e-4)


def test_data_and_batch_begin_as_the_checkpoints(folder: Path) -> None:
    given = arguments(folder, "data.max_documents=5")
    offer_checkpoint(given)
    config = cli.build(COMMAND, given)
    assert config.data.paths == [f"{folder}/*.txt"]
    assert config.data.validation_fraction == 0.3
    assert config.data.max_documents == 5
    assert config.batch.context == 64


def test_other_data_other_figures(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = ["data=files", f"data.paths={folder}/other/*.txt", f"data.cache_dir={folder}/cache"]
    own = figures(capsys, *arguments(folder))
    assert figures(capsys, *arguments(folder, *other, "data.validation_fraction=0.5"))["loss"] != own["loss"]
    assert figures(capsys, *arguments(folder, "split=train"))["tokens"] > own["tokens"]
    assert figures(capsys, *arguments(folder, "split=train", "max_steps=1"))["tokens"] <= 256


def test_one_document_alone(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a=b.txt").write_text("just this")
    one = [f"data.paths={tmp_path}/a=b.txt", f"data.cache_dir={tmp_path}/cache", "data.validation_fraction=1e-9"]
    assert main(arguments(folder, "data=files", *one, "split=train")) == 0
    assert "over 9 bytes of UTF-8 text" in capsys.readouterr().out


def test_precision_and_packing_change_the_figure_little(folder: Path) -> None:
    def loss(*more: str) -> float:
        given = arguments(folder, *more)
        offer_checkpoint(given)
        return evaluate(cli.build(COMMAND, given)).loss

    assert loss("precision=64-true") == pytest.approx(loss(), abs=1e-4)
    assert loss("batch.packing=pad") == pytest.approx(loss(), abs=1e-4)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (["batch.context=128"], "batch.context must be at most the model's 64 positions, got 128"),
        (["data=fineweeb"], "data has no option 'fineweeb', did you mean data=fineweb?"),
        (["split=test"], "split=test: Invalid value 'test', expected one of [validation, train]"),
        (["model.n_layer=3"], "unknown key 'model.n_layer'"),
        (["checkpoint=/nowhere"], "checkpoint /nowhere does not exist"),
    ],
)
def test_mistakes(more: list[str], text: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(folder, *more)) == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1


def test_a_run_without_its_tokenizer(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkpoint,) = (folder / "runs" / "tiny" / "checkpoints").glob("*.ckpt")
    moved = tmp_path / "moved.ckpt"
    moved.write_bytes(checkpoint.read_bytes())
    assert main([f"checkpoint={moved}", "accelerator=cpu"]) == 2
    assert "checkpoint must lie in its run directory, beside tokenizer.json" in capsys.readouterr().err
