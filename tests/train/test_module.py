"""One optimiser step: the mean over all targets of all micro-batches, and counters that wait for nobody."""

from __future__ import annotations

import gc
import math
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer

from data.batch import StepBatch, VarlenBatch
from model.attention import reference_attention
from model.config import GPTConfig
from model.gpt import GPT
from train.datamodule import Prefetcher, StreamItem
from train.module import GPTModule, StepStatistics
from train.schema import OptimConfig, Schedule

CONTEXT = 16


def micro_batch(seed: int, lengths: list[int], size: int = 32) -> VarlenBatch:
    generator = torch.Generator().manual_seed(seed)
    real = sum(lengths)
    targets = torch.full((size,), -100)
    targets[:real] = torch.randint(40, (real,), generator=generator)
    positions = torch.zeros(size, dtype=torch.int32)
    positions[:real] = torch.cat([torch.arange(n, dtype=torch.int32) for n in lengths] or [positions[:0]])
    cu_seqlens = torch.full((9,), real, dtype=torch.int32)
    cu_seqlens[: len(lengths) + 1] = torch.tensor([0, *lengths]).cumsum(0)
    tokens = torch.randint(40, (size,), generator=generator)
    return VarlenBatch(tokens, targets, positions, cu_seqlens, CONTEXT)


def step_of(batches: list[VarlenBatch]) -> StepBatch:
    n_targets = sum(int((batch.targets != -100).sum()) for batch in batches)
    return StepBatch(batches, n_targets, n_targets, 1)


def tiny() -> GPT:
    torch.manual_seed(0)
    config = GPTConfig(
        vocab_size=40, vocab_multiple=8, n_layer=2, d_model=16, nheads_q=2, max_positions=CONTEXT, init_std=0.2
    )
    return GPT(config, reference_attention)


def trained(
    batches: list[StepBatch],
    precision: Any = "32-true",
    copy_dtype: torch.dtype | None = None,
    callbacks: Sequence[Callback] = (),
    checkpointing: bool = False,
    compiler: Any = None,
    **optim: Any,
) -> GPTModule:
    module = GPTModule(tiny(), OptimConfig(**{"warmup_steps": 0, **optim}), len(batches), copy_dtype)
    module.model.activation_checkpointing = checkpointing
    if compiler is not None:
        module.model.compile(backend=compiler)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        precision=precision,
        max_steps=len(batches),
        max_epochs=-1,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # an iterator, because Lightning takes a list for a list of loaders
    trainer.fit(module, iter([StreamItem(batch, {}) for batch in batches]))
    return module


def test_uneven_micro_batches_weigh_by_their_targets() -> None:
    """Σ nats / Σ targets and not a mean of means: the same documents in one micro-batch give the same step."""
    a, b, c = [16, 9], [3], [2, 1]
    split = [micro_batch(1, a), micro_batch(2, b), micro_batch(3, c), micro_batch(4, [])]
    joined = VarlenBatch(
        *(torch.cat([getattr(x, name)[: sum(n)] for x, n in zip(split, (a, b, c), strict=False)]) for name in FIELDS),
        torch.tensor([0, *a, *b, *c]).cumsum(0).int(),
        CONTEXT,
    )
    many, one = trained([step_of(split)]), trained([step_of([joined])])
    for (name, mine), theirs in zip(many.model.named_parameters(), one.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    with torch.no_grad():
        nats = sum(float(tiny().loss(x.tokens, x.targets, x.positions, x.cu_seqlens, CONTEXT)) for x in split)
    interval = many.statistics.read()
    assert interval.loss == pytest.approx(nats / 31)
    assert interval.grad_norm > 0


FIELDS = ("tokens", "targets", "positions")


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_every_precision_steps_near_fp32(precision: str) -> None:
    batches = [step_of([micro_batch(s, [16, 9]), micro_batch(s + 9, [10])]) for s in range(3)]
    exact, other = trained(batches), trained(batches, precision)
    expected, got = exact.statistics.read().loss, other.statistics.read().loss
    assert got == pytest.approx(expected, rel=0.02)
    moved = [float((p - q).abs().max()) for p, q in zip(other.model.parameters(), tiny().parameters(), strict=True)]
    assert min(moved) > 0, "every parameter has a gradient and moves"


def test_copies_of_the_weights_train_like_autocast_and_leave_the_model_as_it_was() -> None:
    batches = [step_of([micro_batch(s, [16, 9]), micro_batch(s + 9, [10])]) for s in range(6)]
    exact = trained(batches).statistics.read().loss
    plain, copies = trained(batches, "bf16-mixed"), trained(batches, "bf16-mixed", torch.bfloat16)
    expected, got = plain.statistics.read(), copies.statistics.read()
    assert abs(got.loss - expected.loss) < 2 * abs(expected.loss - exact) + 1e-4 * exact
    assert got.grad_norm == pytest.approx(expected.grad_norm, rel=0.02)
    for module in copies.model.modules():
        assert not any(isinstance(value, torch.Tensor) for value in vars(module).values())
    assert {p.dtype for p in copies.model.parameters()} == {torch.float32}
    assert copies.state_dict().keys() == plain.state_dict().keys()


def test_a_step_that_is_not_finite_leaves_copies_and_gradient_buffers_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [step_of([micro_batch(s, [16, 9]), micro_batch(s + 9, [10])]) for s in range(3)]
    nats = GPTModule.nats
    calls = iter(range(100))

    def poisoned(self: GPTModule, batch: VarlenBatch) -> torch.Tensor:
        return nats(self, batch) * (math.nan if next(calls) == 2 else 1)

    monkeypatch.setattr(GPTModule, "nats", poisoned)
    skipped = trained(batches, "bf16-mixed", torch.bfloat16, schedule=Schedule.linear, min_lr_ratio=1.0)
    monkeypatch.undo()
    before = trained([batches[0], batches[2]], "bf16-mixed", torch.bfloat16, schedule=Schedule.linear, min_lr_ratio=1.0)
    assert skipped.statistics.read().skipped_steps == 1
    for mine, theirs in zip(skipped.model.parameters(), before.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("copy_dtype", [None, torch.bfloat16])
def test_nothing_is_compiled_again_after_the_first_step(copy_dtype: torch.dtype | None) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    compiled: list[int] = []

    class Count(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            compiled.append(counter.frame_count)

    torch._dynamo.reset()
    packings = [([16, 9], [10]), ([32 // 4] * 4, []), ([1] * 8, [16, 16]), ([5, 4, 3, 2, 1], [13])]
    batches = [step_of([micro_batch(s, a), micro_batch(s + 9, b)]) for s, (a, b) in enumerate(packings)]
    trained(batches, "bf16-mixed", copy_dtype, [Count()], compiler=counter)
    assert compiled == [5, 5, 5, 5], "embedding, the first block, the others, final norm, softmax"


class Cycles(Callback):
    """Tensors that steps 3 to 5 leave to the garbage collector."""

    def __init__(self) -> None:
        self.tensors: list[torch.Size] | None = None

    def on_train_batch_end(self, trainer: Trainer, *rest: Any) -> None:
        if trainer.global_step == 2:
            while gc.collect():  # one pass may free what keeps the next cycle, such as graphs of other tests
                pass
            gc.disable()
            gc.set_debug(gc.DEBUG_SAVEALL)
        elif trainer.global_step == 5:
            gc.collect()
            self.tensors = [x.shape for x in gc.garbage if isinstance(x, torch.Tensor)]
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("copy_dtype", [None, torch.bfloat16])
def test_no_tensor_waits_for_the_garbage_collector(checkpointing: bool, copy_dtype: torch.dtype | None) -> None:
    """So that it may rest between two log points: what it would free is small."""
    batches = [step_of([micro_batch(s, [16, 9]), micro_batch(s + 9, [10])]) for s in range(6)]
    cycles = Cycles()
    trained(batches, "bf16-mixed", copy_dtype, [cycles], checkpointing)
    assert cycles.tensors == []


def test_steps_are_counted_once_each_and_the_mean_is_over_the_interval() -> None:
    batches = [step_of([micro_batch(s, [12]), micro_batch(s + 5, [7])]) for s in range(4)]
    module = trained(batches)
    assert module.global_step == 4
    last = trained(batches[3:], lr=1e-9).statistics.read().loss
    still = trained(batches, lr=1e-12)  # weights that hardly move: the mean is that of four independent losses
    losses = [trained([batch], lr=1e-12).statistics.read().loss for batch in batches]
    assert losses[3] == pytest.approx(last)
    assert still.statistics.read().loss == pytest.approx(sum(losses) / 4)
    assert module.statistics.read().skipped_steps == 0
    assert math.isnan(module.statistics.read().loss), "a new interval has no step yet"


def test_statistics_leave_skipped_steps_out_of_the_mean() -> None:
    statistics = StepStatistics(torch.device("cpu"))
    for loss, skipped in [(1.0, 0.0), (math.nan, 1.0), (3.0, 0.0)]:
        statistics.update(torch.tensor(loss), torch.tensor(7.0), torch.tensor(skipped))
    state = statistics.state()
    again = StepStatistics(torch.device("cpu"))
    again.load(state)
    for values in (statistics, again):
        interval = values.read()
        assert (interval.loss, interval.grad_norm, interval.skipped_steps) == (2.0, 7.0, 1)
    statistics.update(torch.tensor(5.0), torch.tensor(1.0), torch.tensor(0.0))
    assert statistics.read().loss == 5.0


def test_a_step_reads_nothing_back_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each of these would wait for it; the places that may are between the steps."""
    read: list[str] = []

    def forbid(name: str) -> None:
        original = getattr(torch.Tensor, name)

        def spy(self: torch.Tensor, *args: Any) -> Any:
            import traceback

            frames = traceback.extract_stack()
            if any(f.name == "training_step" for f in frames) and not any("fa2" in f.filename for f in frames):
                read.append(name)
            return original(self, *args)

        monkeypatch.setattr(torch.Tensor, name, spy)

    for name in ("item", "tolist", "__float__", "__bool__", "__int__", "__index__"):
        forbid(name)
    trained([step_of([micro_batch(s, [12])]) for s in range(2)], clip_grad_norm=0.5)
    assert read == []


def test_prefetched_items_come_in_order_ahead_of_time_and_with_their_errors() -> None:
    made: list[int] = []

    def items() -> Iterator[Any]:
        for i in range(4):
            made.append(i)
            yield i
        raise ValueError("the disk is gone")

    prefetcher = Prefetcher(items(), ahead=2)
    assert next(prefetcher) == 0
    deadline = time.monotonic() + 5
    while len(made) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert made == [0, 1, 2, 3], "one taken, two waiting, one in the thread's hand"
    assert [next(prefetcher) for _ in range(3)] == [1, 2, 3]
    for _ in range(2):
        with pytest.raises(ValueError, match="the disk is gone"):
            next(prefetcher)


def test_a_closed_prefetcher_leaves_no_thread() -> None:
    def endless() -> Iterator[Any]:
        while True:
            yield 1

    prefetcher = Prefetcher(endless(), ahead=1)
    next(prefetcher)
    prefetcher.close()
    assert not any(thread.name == "batches" and thread.is_alive() for thread in threading.enumerate())
