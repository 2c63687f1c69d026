"""train.reproduce on a CPU with its tiny row: cells, refusals, record, merging, tables and pictures."""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from train import cli, readme
from train.reproduce import cell as cell_module
from train.reproduce import plot, record, rows, tables
from train.reproduce.__main__ import COMMAND, main
from train.reproduce.kernels import Class, check_attention
from train.reproduce.monitor import Monitor, summarize
from train.schema import ReproduceConfig

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30
RUN_APART = cell_module.run_apart
TINY = ["rows=debug", "warm_steps=1", "steps=2", "overrides=trainer.peak_tflops=1000"]


def config(*arguments: str) -> ReproduceConfig:
    return cli.build(COMMAND, arguments)


def one(*arguments: str) -> rows.Cell:
    (cell,) = rows.cells(config(*arguments))
    return cell


@pytest.fixture(scope="module", autouse=True)
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No second of matrix products, no process for each cell; runs go into a temporary folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("here"))
        for module in ("train.callbacks.throughput", "train.reproduce.probe"):
            patch.setattr(f"{module}.sustained_matmul_flops", lambda *args: 1e11)
        patch.setattr(cell_module, "run_apart", lambda cell: cell_module.measure(cell, time.time()))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reproduce")


@pytest.fixture(scope="module")
def book(folder: Path) -> dict[str, Any]:
    """The record of one whole invocation."""
    assert main([*TINY, "attention=eager,sdpa_flash,reference", "documents=dense", f"output={folder}/whole"]) == 0
    return json.loads((folder / "whole" / "reproduce.json").read_text())


def test_a_cell_has_every_figure(book: dict[str, Any], folder: Path) -> None:
    assert [c["attention"] for c in book["cells"]] == ["eager", "sdpa_flash", "reference"]
    for cell in book["cells"]:
        assert cell["status"] == "ok"
        assert len(cell["step_seconds"]) == 2
        assert cell["tokens"] == 2 * 512
        assert cell["sum_len_sq"] == 2 * 512 * 64, "every document fills the context"
        assert cell["n_params"] == pytest.approx(1024 * 64 + 2 * 12 * 64 * 64, rel=0.1)
        assert 0 < cell["mfu_exact"] < cell["mfu"] < 1
        assert cell["gemm_util"] == pytest.approx(cell["mfu_exact"] * 1000e12 / 1e11)
        assert cell["tokens_per_s"] == pytest.approx(1024 / sum(cell["step_seconds"]))
        assert min(cell["step_seconds"]) > 0
        assert 0 < cell["seconds_to_first_step"] < cell["seconds_to_first_step_done"]
        assert cell["matmul_tflops"] == [0.1, 0.1]
        assert cell["precision"] == "32-true"
        assert cell["invocation"] == book["invocations"][0]["id"]
    assert "output=" not in book["invocations"][0]["command"], (
        "a folder of this machine, that the figures do not depend on"
    )
    assert book["cells"][0]["kernels"] == ["gpt::eager_attention_backward"]
    assert book["cells"][1]["kernels"] == ["aten::_scaled_dot_product_flash_attention_for_cpu_backward"]
    losses = [cell["loss"] for cell in book["cells"]]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-4), "the same run but for the attention"
    names = {path.name for path in (folder / "whole").iterdir()}
    assert names >= {"reproduce.json", "reproduce.png", "tables.md"}
    run = Path(rows.RUN_ROOT) / "debug-dense-eager"
    assert not list((run / "checkpoints").glob("*")), "a measured run saves nothing"
    assert not (run / "report.html").exists()


def test_tables(book: dict[str, Any]) -> None:
    summary = tables.summary(book)
    assert "| dense: model, context | eager | SDPA flash | reference | A100: no flash |" in summary
    assert summary.count("\n") == 2
    details = tables.details(book)
    assert details.count("debug dense") == 3
    assert "invocations" not in tables.notes(book)
    assert "512 tokens a step" in tables.notes(book)


def test_packed_documents_and_what_has_no_lengths(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = folder / "text"
    text.mkdir()
    for i in range(60):
        (text / f"{i}.txt").write_text(" ".join(f"word{i * j % 97}" for j in range(10 + i)))
    with pytest.MonkeyPatch.context() as patch:
        source = ("data=files", f"data.paths=[{text}/*.txt]", f"data.cache_dir={folder}/cache", "data.processes=1")
        split = "data.validation_fraction=0.2"
        small = ("tokenizer=train", "tokenizer.vocab_size=300", "model.vocab_size=50257")
        patch.setattr(rows, "_PACKED", (*source, split, *small))
        output = f"output={folder}/packed"
        assert main([*TINY, "attention=reference,eager,torch", "documents=packed", output]) == 2
    captured = capsys.readouterr()
    assert "debug/packed/torch: attention=torch cannot run here" in captured.err
    found = {c["attention"]: c for c in json.loads((folder / "packed" / "reproduce.json").read_text())["cells"]}
    assert found["eager"]["status"] == "not_applicable"
    assert found["torch"]["status"] == "refused"
    cell = found["reference"]
    assert cell["status"] == "ok"
    assert cell["packing"]["pieces_per_micro_batch"] > 4, "several documents share a micro-batch of four contexts"
    assert cell["sum_len_sq"] < cell["tokens"] * 64
    assert "| debug | n/a | refused |" in captured.out
    assert "varlen_attn stands in for it" in captured.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rows=7b"], "rows must be of 1.3b_2k, 1.3b_8k, 2.7b_2k, 2.7b_8k, debug, got '7b'"),
        (["attention=flash3"], "attention must be of fa2, torch, .*sdpa_cudnn, got 'flash3'"),
        (["documents=mixed"], "documents must be of dense, packed, got 'mixed'"),
        (["steps=0"], "steps must be positive, got 0"),
        (["rows=debug", "overrides=model.n_layer=3"], "overrides must keep the model.* got another model.n_layer"),
        (["rows=debug", "overrides=batch.context=32"], r"overrides must keep batch.context of the row debug \(64\)"),
        (["rows=debug", "overrides=data=stdlib"], "overrides must keep data"),
        (["rows=debug", "overrides=trainer.max_steps=9"], "overrides must keep trainer.max_steps"),
        (["rows=debug", "overrides=attention=auto"], "overrides must keep attention"),
        (["rows=debug", "overrides=optim.lrr=9"], "unknown key 'optim.lrr'"),
        (["rows=debug", "micro_batch_tokens=300"], "batch.global_batch_tokens must be a multiple"),
        (["rows=debug", "attention=eager", "budget=eager"], "budget must be empty on a machine without a CUDA GPU"),
        (["rows=debug", "attention=eager", "budget=fa2"], "budget must be of attention's eager, got 'fa2'"),
        (["rows=debug", "overrides=trainer.profile=true"], "overrides must keep trainer.profile=false"),
        (["rows=debug", "overrides=trainer.accelerator=cpu"], "overrides must keep trainer.accelerator=auto, got cpu"),
        (["rows=debug", "overrides=dry_run=true"], "overrides must keep dry_run: this command's own keys set it"),
        (["rows=[]"], "merge must name records where rows is empty"),
        (["row=debug"], "unknown key 'row', did you mean rows?"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available() and "budget=eager" in arguments:
        pytest.skip("there is a GPU")
    assert main([*arguments, f"output={tmp_path}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(rf"train.reproduce: error: {message}", line)


@pytest.mark.parametrize("output", ["/proc/nowhere", "{}/file"])
def test_an_output_that_cannot_be_written_costs_no_cell(
    output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cell_module, "run_apart", lambda cell: pytest.fail("must not run"))
    (tmp_path / "file").touch()
    assert main(["rows=debug", "attention=eager", "documents=dense", f"output={output.format(tmp_path)}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("train.reproduce: error: output must be a folder that can be written to, got /")


def test_two_commands_do_not_write_one_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "import sys; from pathlib import Path; from train.run_dir import locked\n"
        "with locked(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    arguments = [sys.executable, "-c", code, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        arguments, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        assert main(["rows=debug", "attention=eager", "documents=dense", f"output={tmp_path}"]) == 2
        other.communicate("")
    assert "is in use by another train.reproduce" in capsys.readouterr().err
    assert not (tmp_path / "reproduce.json").exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_cell_ends_with_its_command_and_without_a_traceback(tmp_path: Path, number: int) -> None:
    """To the whole group, as a terminal's Ctrl-C is."""
    arguments = ["rows=debug", "attention=eager", "documents=dense", "steps=100000", f"output={tmp_path}/out"]
    command = subprocess.Popen(
        [sys.executable, "-m", "train.reproduce", *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # a shell's background job ignores it, and so would everything below
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert command.stdout is not None
    for line in command.stdout:
        if line.startswith("model: "):
            break
    if number == signal.SIGINT:
        os.killpg(command.pid, number)
    else:
        command.send_signal(number)
    began = time.monotonic()
    rest = command.stdout.read()  # to its end, which comes when the cell has let go of it too
    assert time.monotonic() - began < 20
    assert "Traceback" not in rest
    assert command.wait() == (130 if number == signal.SIGINT else -number)
    if number == signal.SIGINT:
        assert f"interrupted: what had finished is in {tmp_path}/out/reproduce.json" in rest


def test_help(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capfd.readouterr().out
    assert text.startswith("python -m train.reproduce ")
    assert max(map(len, text.splitlines())) <= 160


@pytest.mark.parametrize("source", ["README.md", "conf/hydra/help/reproduce.yaml"])
def test_commands_that_are_written_down_compose(source: str) -> None:
    text = (ROOT / source).read_text(encoding="utf-8")
    commands = re.findall(r"^\s*python -m train\.reproduce( [a-z].*)?$", text, re.MULTILINE)
    assert commands
    for command in commands:
        command = re.split(r"\s{2,}", command)[0]
        cli.build(COMMAND, shlex.split(command, comments=True))


def test_the_whole_table() -> None:
    whole = rows.cells(config())
    assert len(whole) == len({cell.name for cell in whole}) == 4 * 2 * 5
    assert sum(rows.not_applicable(cell) is None for cell in whole) == 24
    assert {cell.config.batch.global_batch_tokens for cell in whole} == {524_288}
    assert {cell.config.trainer.max_steps for cell in whole} == {5}
    assert {cell.model.padded_vocab_size for cell in whole} == {50_304}, "packed text does not change the model"


def test_an_out_of_memory_costs_one_cell_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fit(config: Any, probe: Any) -> None:
        if config.attention.value == "eager":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8 GiB.\nMore.")
        probe.result["tokens_per_s"] = 5.0

    monkeypatch.setattr("train.fit.fit", fit)
    monkeypatch.setattr(cell_module, "_of_run", lambda cell: {})
    monkeypatch.setattr("train.reproduce.__main__._said", lambda cell, result: "")
    book = record.open_record(tmp_path / "r.json", {"gpu": None, "commit": "a"}, [])
    from train.reproduce.__main__ import measure_all

    chosen = config("rows=debug", "attention=eager,sdpa_flash", "documents=dense")
    errors = measure_all(chosen, rows.cells(chosen), book, tmp_path / "r.json")
    assert errors == [], "what does not fit is no mistake"
    written = json.loads((tmp_path / "r.json").read_text())["cells"]
    assert [cell["status"] for cell in written] == ["out_of_memory", "ok"]
    assert written[0]["reason"] == "CUDA out of memory. Tried to allocate 8 GiB."
    assert "out of memory" in tables._short(written[0])
    assert tables._reason(written[0]).startswith("out of memory; needs about ")


@pytest.mark.parametrize(
    ("raised", "status"),
    [
        (ValueError("a rule"), "refused"),
        (ModuleNotFoundError("No module named 'wandb'"), "refused"),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"), "out_of_memory"),
        (RuntimeError("CUDA error: out of memory"), "out_of_memory"),
        (RuntimeError("aoti_torch_empty_strided(layout.dims(), ...) API call failed at api.cpp"), "out_of_memory"),
    ],
)
def test_errors_are_results(monkeypatch: pytest.MonkeyPatch, raised: Exception, status: str) -> None:
    def fit(config: Any, probe: Any) -> None:
        raise raised

    monkeypatch.setattr("train.fit.fit", fit)
    result = cell_module.measure(one("rows=debug", "attention=eager", "documents=dense"), 0.0)
    assert result == {"status": status, "reason": str(raised)}


@pytest.mark.parametrize(
    ("raised", "status"),
    [(ModuleNotFoundError("No module named 'tokenizers'"), "refused"), (RuntimeError("nvcc failed"), "crashed")],
)
def test_what_a_cell_cannot_be_prepared_for_costs_that_cell_alone(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, status: str
) -> None:
    def build_data(config: Any) -> None:
        raise raised

    monkeypatch.setattr("train.build.build_data", build_data)
    found = cell_module.outcome(one("rows=debug", "attention=reference", "documents=packed"))
    assert found["status"] == status
    assert str(raised) in found["reason"]


def test_a_result_comes_out_of_the_cells_own_process() -> None:
    """It is refused there, since no CPU runs cuDNN."""
    cell = one("rows=debug", "attention=sdpa_cudnn", "documents=dense")
    result = RUN_APART(cell)
    assert result["status"] == "refused"
    assert "attention=sdpa_cudnn cannot run here" in result["reason"]


def test_time_runs_out_between_cells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rows=debug", "attention=eager", "documents=dense", "seconds=1e-9", f"output={tmp_path}"]) == 0
    assert json.loads((tmp_path / "reproduce.json").read_text())["cells"] == []
    assert "not begun: seconds=1e-09 are over" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("row", "attention", "gib", "says"),
    [
        ("1.3b_2k", "fa2", 140, None),
        ("2.7b_8k", "fa2", 140, None),
        ("1.3b_2k", "eager", 140, None),
        ("1.3b_8k", "eager", 140, r"needs about \d+ GiB of 140; micro_batch_tokens=8192 would fit \(\d+ GiB\)"),
        ("2.7b_8k", "fa2", 60, r"needs about \d+ GiB of 60; overrides=trainer.activation.*would fit \(\d+ GiB\)"),
        ("2.7b_8k", "fa2", 40, r"needs about \d+ GiB of 40; no micro-batch of it fits"),
    ],
)
def test_what_a_row_needs_and_what_would_fit(row: str, attention: str, gib: int, says: str | None) -> None:
    cell = one(f"rows={row}", f"attention={attention}", "documents=dense", "overrides=trainer.precision=bf16-mixed")
    reason = rows.does_not_fit(cell, gib * GIB)
    assert (reason is None) if says is None else re.fullmatch(says, reason or "")


def test_a_cell_that_cannot_fit_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cell_module, "device_memory", lambda device: 40 * GIB)
    monkeypatch.setattr(cell_module, "run_apart", lambda cell: pytest.fail("must not run"))
    found = cell_module.outcome(one("rows=2.7b_8k", "attention=eager", "documents=dense"))
    assert found["status"] == "does_not_fit"
    assert tables._short(found) == "does not fit"
    assert tables._reason(found).startswith("needs about ")


def test_a_recipe_is_told_from_a_variant() -> None:
    assert one("rows=1.3b_2k", "attention=fa2", "documents=packed").config.batch.max_docs == 128
    assert one("rows=1.3b_2k", "attention=fa2", "documents=packed").is_recipe
    assert one("rows=1.3b_2k", "attention=fa2", "documents=packed", "micro_batch_tokens=32768").is_recipe
    assert not one("rows=1.3b_2k", "attention=fa2", "documents=dense", "micro_batch_tokens=8192").is_recipe
    assert not one("rows=1.3b_2k", "attention=fa2", "documents=dense", "overrides=seed=1").is_recipe


def test_above_the_peak_is_an_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["rows=debug", "warm_steps=1", "steps=1", "attention=sdpa_flash", "documents=dense"]
    assert main([*arguments, "overrides=trainer.peak_tflops=1e-9", f"output={folder}/peak"]) == 2
    captured = capsys.readouterr()
    assert "mfu must be at most 100%" in captured.err
    (cell,) = json.loads((folder / "peak" / "reproduce.json").read_text())["cells"]
    assert cell["status"] == "refused"
    assert "tokens_per_s" not in cell


FA2 = "void fa2::sm90::attention_fwd<__nv_bfloat16, fa2::sm90::FwdConfig<128> >(fa2::sm90::FwdArguments)"
FLASH = (
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, false, cutlass::bfloat16_t"
)
CUDNN = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_cga1x1x1_kernel0_0"
SOFTMAX = "void (anonymous namespace)::softmax_warp_forward<c10::BFloat16, c10::BFloat16, float, 9, false, false>"
GEMM = "nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_NNN"


@pytest.mark.parametrize(
    ("backend", "own"),
    [("fa2", FA2), ("sdpa_flash", FLASH), ("torch", FLASH), ("sdpa_cudnn", CUDNN), ("eager", SOFTMAX)],
)
def test_attention_kernels_are_the_backends_own(backend: str, own: str) -> None:
    assert check_attention(backend, [GEMM, own], on_gpu=True) == [own]
    with pytest.raises(ValueError, match=f"attention={backend} must run kernels named like .*saw nvjet"):
        check_attention(backend, [GEMM], on_gpu=True)
    with pytest.raises(ValueError, match=f"attention={backend} must run kernels named like .*none at all"):
        check_attention(backend, [], on_gpu=True)
    for other in (FA2, FLASH, CUDNN):
        if other != own:
            with pytest.raises(ValueError, match=f"attention={backend} must run no other backend's kernel"):
                check_attention(backend, [GEMM, own, other], on_gpu=True)


def test_a_swapped_backend_is_an_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As torch's compile cache swaps them: eager is asked for, and another operator runs."""
    from model import attention

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(attention.DENSE_BACKENDS, "eager", attention.sdpa_flash_attention)
        arguments = ["attention=eager", "documents=dense", "steps=1", f"output={folder}/swapped"]
        assert main([*TINY[:2], *arguments]) == 2
    assert "attention=eager must run kernels named like" in capsys.readouterr().err


def measured(attention: str, invocation: str, rate: float, **changes: Any) -> dict[str, Any]:
    """A cell as an H200 might have it."""
    cell = cell_module.describe(one("rows=1.3b_2k", f"attention={attention}", "documents=dense"))
    steps = 3
    found: dict[str, Any] = {
        "status": "ok",
        "invocation": invocation,
        "tokens_per_s": rate,
        "step_seconds": [524288 / rate] * steps,
        "tokens": steps * 524288,
        "sum_len_sq": steps * 524288 * 2048,
        "n_params": 1_315_000_000,
        "mfu": rate / 110_000,
        "mfu_exact": rate / 120_000,
        "gemm_util": rate / 85_000,
        "peak_memory_bytes": 70 * GIB,
        "matmul_tflops": [680.0, 670.0],
        "peak_tflops": 989.4,
        "seconds_to_first_step": 20.0,
        "seconds_to_first_step_done": 50.0,
        "precision": "bf16-mixed",
        "packing": {"fill": 1.0, "pieces_per_micro_batch": 16.0},
        "gpu": {
            "sm_clock_mhz": {"mean": 1700},
            "power_w": {"mean": 650},
            "throttling": {"power cap": 0.5},
        },
    }
    return cell | found | changes


MACHINE = dict.fromkeys(record.IDENTITY, "x") | {"gpu": "NVIDIA H200", "torch": "2.11.0", "commit": "abc"}


def written(path: Path, *cells: dict[str, Any], **machine: Any) -> Path:
    invocations = [{"id": i, "command": "", "date": ""} for i in dict.fromkeys(c["invocation"] for c in cells)]
    record.write({"machine": MACHINE | machine, "invocations": invocations, "cells": list(cells)}, path)
    return path


def test_records_of_one_machine_and_commit_are_joined(tmp_path: Path) -> None:
    a = written(tmp_path / "a.json", measured("fa2", "1", 66_000), measured("sdpa_cudnn", "1", 65_000))
    again = measured("fa2", "2", 67_000)
    failed = {**measured("sdpa_cudnn", "2", 1.0), "status": "crashed", "reason": "why"}
    b = written(tmp_path / "b.json", again, failed, measured("sdpa_flash", "2", 60_000))
    joined = record.open_record(tmp_path / "none.json", None, [str(a), str(b)])
    assert [(c["attention"], c["invocation"], c["status"]) for c in joined["cells"]] == [
        ("fa2", "2", "ok"),
        ("sdpa_cudnn", "1", "ok"),
        ("sdpa_flash", "2", "ok"),
    ]
    assert [i["id"] for i in joined["invocations"]] == ["1", "2"]
    assert "Cells of 2 invocations" in tables.notes(joined)
    assert "| 1.12 of SDPA flash's |" in tables.details(joined), "never of cuDNN, which ran in another invocation"
    assert record.open_record(a, dict(MACHINE), [])["cells"] == json.loads(a.read_text())["cells"]


@pytest.mark.parametrize("key", record.IDENTITY, ids="of {}".format)  # "gpu" alone would be the mark
def test_records_of_another_machine_or_commit_are_refused(tmp_path: Path, key: str) -> None:
    a = written(tmp_path / "a.json", measured("fa2", "1", 66_000), **{key: "other"})
    with pytest.raises(ValueError, match=f"one machine and commit.*{key} 'other' there"):
        record.open_record(a, dict(MACHINE), [])


def test_without_a_commit_nothing_is_joined(tmp_path: Path) -> None:
    a = written(tmp_path / "a.json", measured("fa2", "1", 66_000), commit=None)
    with pytest.raises(ValueError, match="FA2_COMMIT"):
        record.open_record(a, MACHINE | {"commit": None}, [])


@pytest.mark.parametrize("text", ["no JSON", "[]", "{}"])
def test_what_is_no_record_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=r"records of train.reproduce, .*a.json is no"):
        record.open_record(tmp_path / "none.json", None, [str(tmp_path / "a.json")])


def test_table_beside_the_papers() -> None:
    cells = [measured(name, "1", rate) for name, rate in (("sdpa_flash", 63_500.0), ("fa2", 67_600.0))]
    too_large = {**measured("eager", "1", 1.0), "status": "out_of_memory", "reason": "CUDA out of memory"}
    book = {"machine": {**MACHINE, "driver": "580"}, "invocations": [{"id": "1"}], "cells": [too_large, *cells]}
    row = tables.summary(book).splitlines()[-1]
    assert row.startswith("| 1.3B, 2k | out of memory | 578 (57.7%) | 615 (61.5%) |")
    assert row.endswith("| 142 (45.5%) | 189 (60.6%) | 196 (62.8%) |")
    details = tables.details(book)
    assert "| 1.06 of SDPA flash's | 70 | 51 |" in details
    assert "- 1.3B, 2k dense, eager: out of memory; needs about" in details
    notes = tables.notes(book)
    for said in ("NVIDIA H200", "commit abc", "670 to 680 TFLOP/s", "1700 to 1700 MHz", "throttled by power cap"):
        assert said in notes


def test_what_the_paper_means_for_an_a100() -> None:
    lines = tables.a100_expectation().splitlines()
    # 196 TFLOP/s over 6·1.316e9 + 12·24·2048·2048 FLOPs a token
    assert lines[2] == "| 1.3B, 2k | 196, 63% | 21,532 | 161 |"
    assert len(lines) == 6


def test_pictures(tmp_path: Path) -> None:
    book = {"machine": MACHINE, "invocations": [], "cells": [measured("fa2", "1", 67_600.0)]}
    assert plot.plot_table(book, tmp_path / "table.png")
    assert (tmp_path / "table.png").stat().st_size > 5000
    assert not plot.plot_table({**book, "cells": []}, tmp_path / "none.png")


def test_the_readme_takes_its_table_from_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    assert "No record yet: `python -m train.reproduce" in readme.reproduce_table()
    seconds = {kind.value: 0.1 for kind in Class}
    found = {"wall_s": 0.1 * len(seconds), "seconds": seconds, "kernels": {}, "timed_step_s": 1.0}
    budget = {**found, "copy_bytes_per_s": 4e12}
    written(tmp_path / readme.REPRODUCED, measured("fa2", "1", 67_600.0, budget=budget))
    text = readme.reproduce_table()
    assert "| 1.3B, 2k | 615 (61.5%) | 142 (45.5%) |" in text
    assert "![mfu beside the paper's](train/results/reproduce_h200/reproduce.png)" in text
    assert "(train/results/reproduce_h200/budget_1.3b_2k_dense_fa2.png)" in text
    assert "| optimiser | 100.0 |" in text


def test_further_records_stand_behind_their_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    monkeypatch.setattr(readme, "FURTHER", {"one.json": "Once more"})
    written(tmp_path / "one.json", measured("fa2", "1", 67_600.0))
    text = readme.reproduce_further()
    (command,) = (
        invocation["command"] for invocation in json.loads((tmp_path / "one.json").read_text())["invocations"]
    )
    assert text.startswith(f"Once more: `{command}`")
    assert "67,600" in text


def test_a_variant_does_not_hide_the_recipe() -> None:
    variant = measured("fa2", "1", 50_000.0, recipe=False, micro_batch_tokens=65536)
    book = {"machine": MACHINE, "invocations": [], "cells": [variant, measured("fa2", "1", 67_600.0)]}
    assert tables._find(book, "1.3b_2k", "dense", "fa2")["recipe"]  # type: ignore[index]
    book["cells"].pop()
    assert tables._short(copy.deepcopy(variant)).endswith("*")


def test_details_show_the_variants_beside_the_recipe() -> None:
    copies = ["trainer.weight_copies=true"]
    variant = measured("fa2", "1", 70_000.0, recipe=False, overrides=copies, budget={})
    failed = {**variant, "status": "crashed", "reason": "why", "overrides": ["seed=1"]}
    recipe = measured("fa2", "1", 67_600.0, budget={})
    book = {"machine": MACHINE, "invocations": [], "cells": [failed, variant, recipe]}
    details = tables.details(book)
    assert details.index("| fa2 | 61.5%") < details.index("| fa2, trainer.weight_copies=true micro-batch 32,768 |")
    assert "- 1.3B, 2k dense, fa2, seed=1 micro-batch 32,768: why." in details
    assert tables.budget_name(recipe) == "budget_1.3b_2k_dense_fa2"
    assert tables.budget_name(variant) == "budget_1.3b_2k_dense_fa2_32768_trainer.weight_copies=true"


def test_small_rates_are_not_rounded_to_nothing() -> None:
    book = {"machine": MACHINE, "cells": [measured("fa2", "1", 1.0, matmul_tflops=[0.0139, 0.0243])]}
    assert "0.0139 to 0.0243 TFLOP/s" in tables.notes(book)


def test_samples_of_the_gpu() -> None:
    lines = ["1700, 650.5, 60, 700.00, 0x0000000000000004", "1500, 699.0, 66, 700.00, 0x0000000000000044", "torn, 3"]
    assert summarize(lines) == {
        "samples": 2,
        "sm_clock_mhz": {"mean": 1600, "min": 1500, "max": 1700},
        "power_w": {"mean": 675, "max": 699, "limit": 700},
        "temperature_c": {"max": 66},
        "throttling": {"power cap": 1.0, "hardware thermal": 0.5},
    }
    assert summarize([]) == {}


def test_a_copy_without_history_is_told_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FA2_COMMIT", "abc")
    assert record.describe_machine(torch.device("cpu"))["commit"] == "abc"


def test_the_gpu_is_watched_between_start_and_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an nvidia-smi of an older driver, which knows the reasons by their old name alone."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\ncase "$*" in *clocks_event*) exit 2;; esac\necho "1700, 650.0, 60, 700.00, 0x4"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr("train.reproduce.monitor._SECONDS", 0.01)
    monitor = Monitor("GPU-1")
    monitor.start()
    deadline = time.time() + 20
    while len(monitor._lines) < 3 and time.time() < deadline:
        time.sleep(0.01)
    monitor.stop()
    summary = monitor.summary()
    assert summary["samples"] >= 3
    assert summary["throttling"] == {"power cap": 1.0}
    silent = Monitor(None)
    silent.start()
    silent.stop()
    assert silent.summary() == {}
