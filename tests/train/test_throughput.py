"""The clock counts training alone; rates follow their definitions; an impossible share is said aloud once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from data.batch import StepBatch
from model.config import GPTConfig
from model.flops import exact_flops, paper_flops
from train.callbacks.throughput import Throughput
from train.datamodule import StreamItem

CONFIG = GPTConfig(vocab_size=100, n_layer=2, d_model=16, nheads_q=2)
N_PARAMS = 12_345
TOKENS, SUM_LEN_SQ = 50, 700  # of each step


class Clock:
    """A time that passes only when told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("train.callbacks.throughput.time.perf_counter", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr("train.callbacks.throughput.sustained_matmul_flops", lambda *args: 1e8)
    return Clock(monkeypatch)


class Run:
    """The callback in a loop whose steps take as long as they are said to."""

    def __init__(self, clock: Clock, peak_tflops: float | None = 1e-5, compiled: bool = False, devices: int = 1):
        self.clock, self.row, self.said = clock, {}, []  # type: ignore[var-annotated]
        self.trainer: Any = SimpleNamespace(global_step=0, world_size=devices)
        self.callback = Throughput(
            self.row, CONFIG, N_PARAMS, 64, torch.float32, peak_tflops, compiled, 2, self.said.append
        )
        self.callback.on_train_start(self.trainer, SimpleNamespace(device=torch.device("cpu")))  # type: ignore[arg-type]

    def step(self, seconds: float) -> dict[str, float]:
        self.row.clear()
        self.clock.now += seconds
        self.trainer.global_step += 1
        item = StreamItem(StepBatch([], TOKENS, TOKENS, SUM_LEN_SQ), {})
        self.callback.on_train_batch_end(self.trainer, None, None, item, 0)  # type: ignore[arg-type]
        return dict(self.row)

    def between_steps(self, seconds: float) -> None:
        with self.callback.paused():
            self.clock.now += seconds


def test_rates_of_an_interval_follow_their_definitions(clock: Clock) -> None:
    run = Run(clock, devices=2)
    assert run.step(50.0) == {}, "the first step is left out"
    row = run.step(3.0)
    assert row["tokens_per_s"] == pytest.approx(TOKENS / 3)
    assert run.step(3.0) == {}
    row = run.step(1.0)
    assert row["tokens_per_s"] == pytest.approx(2 * TOKENS / 4)
    exact = exact_flops(CONFIG, 2 * TOKENS, 2 * SUM_LEN_SQ) / 4 / 2
    assert row["mfu"] == pytest.approx(paper_flops(N_PARAMS, 2, 16, 2 * TOKENS, 2 * SUM_LEN_SQ) / 4 / 2 / 1e7)
    assert row["mfu_exact"] == pytest.approx(exact / 1e7)
    assert row["gemm_util"] == pytest.approx(exact / 1e8)


def test_validation_and_checkpoints_are_left_out(clock: Clock) -> None:
    run = Run(clock)
    run.step(1.0)
    run.step(1.0)
    run.between_steps(1000.0)  # between intervals
    run.step(2.0)
    run.between_steps(500.0)  # within one
    assert run.step(2.0)["tokens_per_s"] == pytest.approx(2 * TOKENS / 4)
    assert "without validation, checkpoints and the first 1 step" in run.said[-1]


def test_steps_that_compile_are_left_out(clock: Clock) -> None:
    run = Run(clock, compiled=True)
    assert [run.step(60.0) for _ in range(5)] == [{}] * 5
    assert run.step(1.0)["tokens_per_s"] == pytest.approx(TOKENS)
    assert "the first 5 steps" in run.said[-1]


def test_more_than_everything_is_one_loud_warning(clock: Clock) -> None:
    run = Run(clock, peak_tflops=1e-9)
    for _ in range(6):
        run.step(1.0)
    warnings = [line for line in run.said if "WARNING" in line]
    assert len(warnings) == 1
    assert "mfu" in warnings[0]
    assert "trainer.peak_tflops" in warnings[0]


def test_a_disturbed_measurement_of_the_matrix_rate_is_said(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.callbacks.throughput.sustained_matmul_flops", lambda *args: 1e3)
    run = Run(clock, peak_tflops=None)
    for _ in range(4):
        run.step(1.0)
    assert sum("WARNING: gemm_util is" in line for line in run.said) == 1


def test_a_rate_disturbed_at_start_up_is_measured_again(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = iter([1e3, 1e8])
    monkeypatch.setattr("train.callbacks.throughput.sustained_matmul_flops", lambda *args: next(rates))
    run = Run(clock, peak_tflops=None)
    run.step(1.0)
    assert run.step(1.0)["gemm_util"] == pytest.approx(exact_flops(CONFIG, TOKENS, SUM_LEN_SQ) / 1e8)
    assert any("busy at start-up" in line for line in run.said)
    assert not any("WARNING" in line for line in run.said)


def test_an_unknown_gpu_has_no_mfu_and_is_told_which_key_to_set(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.callbacks.throughput.torch.cuda.get_device_name", lambda device: "Some GPU 9")
    run = Run(clock, peak_tflops=None)
    run.step(1.0)
    assert not {"mfu", "mfu_exact"} & set(run.step(1.0)), "a CPU has no datasheet peak"
    assert not any("mfu" in line for line in run.said)
    run.callback._device = torch.device("cuda")
    run.callback._describe()
    told = [line for line in run.said if "trainer.peak_tflops" in line]
    assert len(told) == 1
    assert told[0].startswith("mfu: n/a")
    assert "Some GPU 9" in told[0]


def test_a_known_gpu_takes_its_datasheet_peak(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.callbacks.throughput.torch.cuda.get_device_name", lambda device: "NVIDIA H200")
    run = Run(clock, peak_tflops=None)
    run.callback._device = torch.device("cuda")
    run.callback._describe()
    assert run.callback.peak_flops == pytest.approx(989.4e12)
