"""`train.generate` and `train.export` on a tiny trained run: prompts by every way in, and weights that load back."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from train import cli, export, generate
from train.__main__ import main as train_main
from train.checkpoint import load_model

TEXT = "the quick brown fox jumps over the lazy dog; "


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generate")
    for i in range(20):
        (folder / f"{i}.txt").write_text(TEXT * (2 + i))
    arguments = [
        "data=files",
        f"data.paths={folder}/*.txt",
        f"data.cache_dir={folder}/cache",
        "data.validation_fraction=0.2",
        f"run_root={folder}/runs",
        "name=tiny",
        "model.n_layer=1",
        "model.d_model=64",
        "model.nheads_q=2",
        "model.max_positions=128",
        "tokenizer.vocab_size=300",
        "batch.context=128",
        "batch.micro_batch_tokens=512",
        "batch.global_batch_tokens=512",
        "optim.warmup_steps=5",
        "trainer.max_steps=60",
        "trainer.sample_tokens=0",
        "trainer.progress_bar=false",
        "trainer.accelerator=cpu",
        "trainer.validate_every=0",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.callbacks.throughput.sustained_matmul_flops", lambda *args: 1e11)
        patch.setattr("train.report.write_report", lambda run_dir: run_dir)
        assert train_main(arguments) == 0
    return folder / "runs" / "tiny"


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert generate.main([*arguments, "accelerator=cpu"]) == 0
    done = capsys.readouterr()
    assert done.err == ""
    return done.out


def test_it_has_learned_the_text(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, f"checkpoint={run_dir}", "prompt=the quick", "temperature=0", "max_new_tokens=12")
    assert text.startswith("the quick brown fox jumps")


@pytest.mark.parametrize(
    "prompt", ["def main():\n    x = {'a': [1, 2]}", "a=b=c", "${oc.env:HOME}", "null", "[", "é 日本", ""]
)
def test_any_prompt_goes_through_as_written(prompt: str, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert output(capsys, f"checkpoint={run_dir}", f"prompt={prompt}", "max_new_tokens=1").startswith(prompt)


def test_prompt_from_a_file_and_from_standard_input_are_the_same(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = output(capsys, f"checkpoint={run_dir}", "prompt=the lazy", "seed=3")
    (tmp_path / "a=b.txt").write_text("the lazy")
    assert output(capsys, f"checkpoint={run_dir}", f"prompt_file={tmp_path}/a=b.txt", "seed=3") == given
    piped = SimpleNamespace(buffer=io.BytesIO(b"the lazy"), isatty=lambda: False)
    monkeypatch.setattr("sys.stdin", piped)
    assert output(capsys, f"checkpoint={run_dir}", "seed=3") == given


def test_options_take_effect(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = [f"checkpoint={run_dir}", "prompt=fox", "max_new_tokens=40", "temperature=3", "top_p=1"]
    first = output(capsys, *base, "seed=1")
    assert output(capsys, *base, "seed=1") == first
    assert output(capsys, *base, "seed=2") != first
    greedy = output(capsys, *base[:3], "temperature=0")
    assert output(capsys, *base, "top_p=1e-9") == greedy
    assert len(output(capsys, *base[:2], "max_new_tokens=2", "temperature=0")) < len(greedy)


def test_checkpoint_may_be_a_file(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file,) = (run_dir / "checkpoints").glob("*.ckpt")
    arguments = ["prompt=the", "temperature=0", "max_new_tokens=5"]
    assert output(capsys, f"checkpoint={file}", *arguments) == output(capsys, f"checkpoint={run_dir}", *arguments)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "checkpoint must be a run directory or a .ckpt file, got None"),
        (["checkpoint=/nowhere"], "checkpoint /nowhere does not exist"),
        (["checkpoint=x", "top_p=0"], "top_p must be in (0, 1], got 0.0"),
        (["checkpoint=x", "temprature=1"], "unknown key 'temprature', did you mean temperature?"),
        (["checkpoint=x", "prompt=a", "prompt_file=b"], "prompt_file must be null when prompt is given, got 'b'"),
        (["checkpoint={run}", "prompt_file=/nowhere/p.txt"], "No such file or directory: /nowhere/p.txt"),
        (["checkpoint={run}", "prompt_file={run}/latin1"], "must be UTF-8, got byte 0xe9 at 3"),
        (["checkpoint={run}/broken.ckpt", "prompt=a"], "broken.ckpt is unreadable"),
    ],
)
def test_mistakes(arguments: list[str], text: str, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "latin1").write_bytes(b"caf\xe9")
    (run_dir / "broken.ckpt").write_bytes(b"no checkpoint")
    capsys.readouterr()
    assert generate.main([argument.replace("{run}", str(run_dir)) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("train.generate: error: ")
    assert text in error
    assert error.count("\n") == 1


def test_exported_weights_load_back(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from model.attention import resolve_attention
    from model.weights import load_safetensors

    assert export.main([f"checkpoint={run_dir}", f"output={tmp_path}/new/a=b.safetensors"]) == 0
    assert f"{tmp_path}/new/a=b.safetensors" in capsys.readouterr().out
    attention = resolve_attention("reference", torch.device("cpu"), torch.float32, 32)[1]
    loaded = load_safetensors(tmp_path / "new" / "a=b.safetensors", attention)
    trained, _ = load_model(run_dir, torch.device("cpu"), "reference")
    assert loaded.config == trained.config
    for name, weight in trained.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name
    assert export.main([f"checkpoint={run_dir}"]) == 0
    assert (run_dir / "model.safetensors").is_file()


def test_prompts_are_no_part_of_the_typed_config() -> None:
    config = cli.build(generate.COMMAND, ["checkpoint=x", "prompt=1"])
    assert config.prompt == "1"
