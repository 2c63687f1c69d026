"""Every mistake a user can make on the command line is one clear line on standard error and exit code 2."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from train.__main__ import main

TINY = [
    "model.n_layer=1",
    "model.d_model=32",
    "model.nheads_q=2",
    "model.max_positions=64",
    "tokenizer.vocab_size=300",
    "batch.context=64",
    "batch.micro_batch_tokens=128",
    "batch.global_batch_tokens=128",
    "optim.warmup_steps=1",
    "trainer.max_steps=2",
    "trainer.progress_bar=false",
    "trainer.accelerator=cpu",
    "trainer.sample_tokens=0",
    "data.validation_fraction=0.2",
    "data.processes=1",
]


@pytest.fixture(scope="module", autouse=True)
def quick_start() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.callbacks.throughput.sustained_matmul_flops", lambda *args: 1e11)
        patch.setattr("train.report.write_report", lambda run_dir: run_dir)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts good and bad, and a finished run named `done`."""
    folder = tmp_path_factory.mktemp("errors")
    draw = random.Random(0)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 7))) for _ in range(200)]
    for name in ("good", "other"):
        (folder / name).mkdir()
        for i in range(30):
            (folder / name / f"{i}.txt").write_text(" ".join(draw.choices(words, k=40)))
    (folder / "empty").mkdir()
    (folder / "empty" / "a.txt").write_text("")
    (folder / "one").mkdir()
    (folder / "one" / "a.txt").write_text("a single document")
    (folder / "latin1").mkdir()
    (folder / "latin1" / "a.txt").write_bytes(b"caf\xe9 au lait")
    (folder / "columns.jsonl").write_text('{"body": "x", "title": "y"}\n')
    assert main(arguments(folder, "done")) == 0
    return folder


def arguments(folder: Path, name: str, *overrides: str) -> list[str]:
    given = {override.partition("=")[0] for override in overrides}
    base = [
        "data=files",
        f"data.paths={folder}/good/*.txt",
        f"data.cache_dir={folder}/cache",
        f"run_root={folder}/runs",
        f"name={name}",
        *TINY,
    ]
    return [argument for argument in base if argument.partition("=")[0] not in given] + list(overrides)


@pytest.fixture
def mistake(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs the main job with overrides, and returns its one line after checking that it is one."""

    def run(*overrides: str, name: str = "new") -> str:
        capsys.readouterr()
        code = main(arguments(folder, name, *(text.replace("{folder}", str(folder)) for text in overrides)))
        error = capsys.readouterr().err
        assert code == 2, error
        assert error.startswith("train: error: ")
        assert error.count("\n") == 1, error
        assert "Traceback" not in error
        return error.removeprefix("train: error: ").strip()

    return run


COMPOSED = {
    "misspelt key": (["optim.lrr=1"], "unknown key 'optim.lrr', did you mean optim.lr?"),
    "key without its group": (["max_step=1"], "unknown key 'max_step', did you mean trainer.max_steps?"),
    "key of another group": (["trainer.context=1"], "unknown key 'trainer.context', did you mean batch.context?"),
    "added key": (["+optim.momentum=1"], "unknown key 'optim.momentum'"),
    "forced key": (["++foo.bar=1"], "unknown key 'foo.bar'"),
    "misspelt group": (["modle=small"], "unknown key 'modle', did you mean model?"),
    "misspelt option": (["model=gpt3_13b"], "model has no option 'gpt3_13b', did you mean model=gpt3_1.3b?"),
    "misspelt experiment": (["experiment=gpt_125m"], "did you mean experiment=gpt3_125m?"),
    "removed key": (["~optim.lr"], "'~optim.lr' must set a key"),
    "no override": (["fineweb"], "'fineweb' must be written as key=value or group=option"),
    "sweep without -m": (["seed=1,2"], "Ambiguous value for argument 'seed=1,2'"),
    "wrong type": (["optim.lr=abc"], "optim.lr=abc: Value 'abc' of type 'str' could not be converted to Float"),
    "fraction of a step": (["trainer.max_steps=1.5"], "trainer.max_steps=1.5: Value '1.5' of type 'float'"),
    "no enum value": (["optim.schedule=cos"], "expected one of [cosine, linear, wsd]"),
    "no bool": (["trainer.compile=perhaps"], "Value 'perhaps' is not a valid bool"),
    "d_model and heads": (["model.nheads_q=3"], "model.d_model must be a multiple of model.nheads_q (3), got 32"),
    "context and positions": (["batch.context=128"], "batch.context must be at most model.max_positions (64), got 128"),
    "global batch": (
        ["batch.global_batch_tokens=200"],
        "batch.global_batch_tokens must be a multiple of batch.micro_batch_tokens × ranks = 128 × 1, got 200",
    ),
    "warm-up": (["optim.warmup_steps=9"], "optim.warmup_steps must be at most trainer.max_steps (2), got 9"),
    "weight copies without mixed precision": (
        ["trainer.weight_copies=true"],
        "trainer.weight_copies must be false unless trainer.precision is bf16-mixed, got 32-true",
    ),
    "weight copies on two ranks": (
        ["trainer.weight_copies=true", "trainer.devices=2", "batch.global_batch_tokens=256"],
        "trainer.weight_copies must be false with several ranks",
    ),
    "precision": (["trainer.precision=fp8"], "trainer.precision must be one of 32-true, bf16-mixed"),
    "name": (["name='a=b'"], "name must be non-empty, without '=', got 'a=b'"),
}  # fmt: skip


@pytest.mark.parametrize("case", COMPOSED)
def test_mistake_in_the_configuration(case: str, mistake: Callable[..., str]) -> None:
    overrides, said = COMPOSED[case]
    assert said in mistake(*overrides)


def test_headdim_without_a_kernel(mistake: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    def why(device: object, dtype: object, headdim: int) -> str:
        return f"no kernel for headdim {headdim}"

    monkeypatch.setattr("fa2.why_unavailable", why)
    assert "attention=fa2 cannot run here: no kernel for headdim 16" in mistake("attention=fa2")


def test_fa2_where_its_kernels_are_not(mistake: Callable[..., str]) -> None:
    said = mistake("attention=fa2")
    assert said.startswith("attention=fa2 cannot run here: ")
    assert "attention=auto" in said


def test_auto_falls_to_the_next_and_says_so_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(folder, "auto")) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("attention: ")]
    assert len(said) == 1
    assert said[0].startswith("attention: auto takes reference (fa2: ")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data.paths={folder}/nothing/*.txt"], "data.paths"),
        (["data.paths={folder}/empty"], "must give at least one document, got none"),
        (["data.paths={folder}/one"], "data.validation_fraction must"),
        (["data.paths={folder}/columns.jsonl"], "data.text_column must be one of the columns ['body', 'title']"),
        (["model.vocab_size=100"], "model.vocab_size must be at least the tokenizer's 300 ids"),
        (["data.cache_dir={folder}/columns.jsonl/cache"], "data.cache_dir must be a writable directory"),
        (["run_root={folder}/columns.jsonl/runs"], "run_root must be a folder that can be written to"),
        (["tokenizer=file", "tokenizer.path={folder}/none.json"], "tokenizer.path must be a readable tokenizer.json"),
        (["trainer.accelerator=gpu"], "trainer.accelerator must be cpu or auto on a machine without a CUDA GPU"),
    ],
)  # fmt: skip
def test_mistake_in_what_the_run_reads(overrides: list[str], said: str, mistake: Callable[..., str]) -> None:
    if "trainer.accelerator=gpu" in overrides and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert said in mistake(*overrides)


def test_text_that_is_not_utf8(mistake: Callable[..., str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = mistake("data.paths={folder}/latin1,{folder}/good/*.txt")
    assert f"{folder}/latin1/a.txt" in said
    assert "3" in said.replace(str(folder), "")
    assert "data.errors" in said
    for errors in ("replace", "skip"):
        paths = f"data.paths={folder}/latin1,{folder}/good/*.txt"
        assert main(arguments(folder, f"errors_{errors}", paths, f"data.errors={errors}")) == 0


def test_a_run_of_that_name_exists(mistake: Callable[..., str]) -> None:
    said = mistake(name="done")
    assert "resume=auto continues it" in said
    assert "overwrite=true replaces it" in said


def test_resume_path_missing(mistake: Callable[..., str]) -> None:
    said = mistake("resume={folder}/nowhere/step_000001.ckpt")
    assert said.startswith("resume must be null, auto or a checkpoint's path; there is none at ")


def test_unreadable_checkpoint(mistake: Callable[..., str], folder: Path) -> None:
    torn = folder / "torn"
    torn.mkdir()
    (newest,) = (folder / "runs" / "done" / "checkpoints").glob("*.ckpt")
    for name, content in (("step_000001.ckpt", b""), ("step_000002.ckpt", newest.read_bytes()[:5000])):
        (torn / name).write_bytes(content)
        assert f"checkpoint {torn / name} is unreadable" in mistake(f"resume={torn / name}")


def test_another_tokenizer_than_the_checkpoints(mistake: Callable[..., str]) -> None:
    said = mistake(
        "resume=auto", "tokenizer.vocab_size=280", "model.vocab_size=300", "trainer.max_steps=4", name="done"
    )
    assert said.startswith("resume: the tokenizer differs from the checkpoint's: fingerprint ")
    assert "tokenizer.vocab_size is 280 and was 300" in said


def test_other_data_than_the_checkpoints(mistake: Callable[..., str], folder: Path) -> None:
    tokenizer = f"tokenizer.path={folder}/runs/done/tokenizer.json"
    said = mistake(
        "resume=auto",
        "data.paths={folder}/other/*.txt",
        "tokenizer=file",
        tokenizer,
        "trainer.max_steps=4",
        name="done",
    )
    assert said.startswith("resume: the data differs from the checkpoint's: fingerprint ")


def test_another_model_than_the_checkpoints(mistake: Callable[..., str]) -> None:
    assert "model.n_layer is 2 and was 1" in mistake(
        "resume=auto", "model.n_layer=2", "trainer.max_steps=4", name="done"
    )


@pytest.mark.parametrize("override", ["overwrite=true", "resume=auto"])
def test_a_run_that_another_process_trains(mistake: Callable[..., str], folder: Path, override: str) -> None:
    before = sorted((folder / "runs" / "done").rglob("*"))
    hold = (
        "import sys; from pathlib import Path; from train.run_dir import locked\n"
        "with locked(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", hold, str(folder / "runs" / "done")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        said = mistake(override, name="done")
        other.kill()
    assert said.startswith(f"{folder}/runs/done is in use by another process that trains there")
    assert sorted((folder / "runs" / "done").rglob("*")) == before
    assert main(arguments(folder, "done", "resume=auto")) == 0, "the lock ends with its process"
