"""`fit(config)`: the whole of `python -m train` after the command line, from data to report.

Read next: `run_dir.py` (new, continued or replaced), `build.py` (parts), `module.py` (the step),
`callbacks/__init__.py` (what happens between steps).
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from train import build
from train.callbacks.checkpoint import Checkpoint, seed_generators
from train.callbacks.garbage import GarbageCollection
from train.callbacks.metrics import MetricsWriter, TrainingMetrics
from train.callbacks.profile import Profile
from train.callbacks.progress import Progress, say
from train.callbacks.sample import Sample
from train.callbacks.signals import Signals
from train.callbacks.throughput import Throughput
from train.callbacks.validation import Validation
from train.checkpoint import AtomicCheckpointIO, checkpoint_path, plain
from train.datamodule import PackedDataModule
from train.environment import environment
from train.metrics import build_loggers, last_value, read_metrics
from train.module import GPTModule
from train.run_dir import (
    Start,
    check_same,
    check_same_shape,
    check_writable,
    locked,
    open_directory,
    plan_start,
    write_json,
)
from train.schema import RunConfig

if TYPE_CHECKING:
    from data.prepare import Prepared
    from model.config import GPTConfig

_PACKING_STEPS = 50  # steps that packing.json describes
_UNIGRAM_TOKENS = 500_000_000  # a training split beyond this is not counted through for a unigram model at start-up


@dataclass(frozen=True)
class FitResult:
    """What a run came to."""

    run_dir: Path
    step: int  # optimiser steps done
    losses: dict[int, float]  # by step: mean training loss of the log interval that ends there, nats per token
    val_loss: float | None  # newest, nats per token
    val_bits_per_byte: float | None
    checkpoint: Path  # of the last step
    metrics: Path  # metrics.csv
    report: Path  # report.html


def fit(config: RunConfig, probe: Callback | None = None) -> FitResult:
    """Train as configured, and print what a user wants to know.

    Args:
        probe: measures the run, after the other callbacks; such a run validates, saves, samples and reports nothing.

    Raises:
        ValueError: a mistake in the configuration, or too many non-finite steps; one sentence each.
        SystemExit: SIGTERM or SIGINT came; the state is saved, the code is 128 + the signal's number.
    """
    first_rank = _is_first_rank()
    tell = say if first_rank else _nothing
    _quiet_lightning()
    build.check(config)
    start = plan_start(config, tell, first_rank)
    check_writable(start.run_dir)
    with locked(start.run_dir) if first_rank else nullcontext():
        return _fit(config, start, tell, first_rank, probe)


def _fit(
    config: RunConfig, start: Start, tell: Callable[[str], None], first_rank: bool, probe: Callback | None
) -> FitResult:
    if start.checkpoint is not None:
        check_same_shape(start.checkpoint, plain(config))
    prepared = build.build_data(config, tell, progress=config.trainer.progress_bar and first_rank)
    model_config = build.build_model_config(config, prepared.tokenizer.vocab_size)
    identity = {
        "run_config": plain(config),
        "model_config": plain(model_config),
        "tokenizer_fingerprint": prepared.tokenizer.fingerprint,
        "data_fingerprint": prepared.fingerprint,
    }
    if start.checkpoint is not None:
        check_same(start.checkpoint, identity, tell)
        if start.step >= config.trainer.max_steps:
            tell(f"{start.run_dir} is complete: step {start.step} of {config.trainer.max_steps}, nothing left to train")
            _report(start.run_dir, only_if_missing=True)
            return _result(start.run_dir, start.step)
    return _train(config, start, prepared, model_config, identity, tell, probe)


def _train(
    config: RunConfig,
    start: Start,
    prepared: Prepared,
    model_config: GPTConfig,
    identity: dict[str, Any],
    tell: Callable[[str], None],
    probe: Callback | None,
) -> FitResult:
    run_dir, options = start.run_dir, config.trainer
    attention_name, attention = build.build_attention(config, tell)
    if config.attention.value == attention_name:
        tell(f"attention: {attention_name}")  # `auto` has said what it took
    device = build.resolve_device(config)
    precision = build.resolve_precision(config, device)
    if _is_first_rank():
        open_directory(start, config, tell)
        prepared.tokenizer.save(run_dir / "tokenizer.json")
        _describe_run(
            config,
            prepared,
            run_dir,
            environment(device, attention=attention_name, precision=precision, compile=build.use_compile(config)),
        )
    loggers = build_loggers(
        config.logger,
        run_dir,
        config.name,
        identity["run_config"],
        None if start.checkpoint is None else start.checkpoint["wandb_run_id"],
    )
    start_path, start = start.path, Start(run_dir)  # lets go of the checkpoint's tensors
    trainer = Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=options.devices,
        num_nodes=options.num_nodes,
        strategy=options.strategy,
        precision=precision,  # type: ignore[arg-type]
        plugins=[AtomicCheckpointIO()],
        max_steps=options.max_steps,
        max_epochs=-1,
        logger=loggers,
        default_root_dir=run_dir,
        limit_val_batches=0,  # callbacks/validation.py
        num_sanity_val_steps=0,
        enable_checkpointing=False,  # callbacks/checkpoint.py
        enable_progress_bar=False,  # callbacks/progress.py
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    seed_generators(config.seed)
    with trainer.init_module():
        model = build.build_model(config, model_config, attention)
    module = GPTModule(model, config.optim, options.max_steps, build.copy_dtype(config))
    shape = f"{model_config.n_layer} layers of {model_config.d_model}, {model_config.nheads_q} heads"
    tell(f"model: {model.n_params:,} parameters ({shape}), {precision} on {_device_name(device)}")
    tell(
        f"run: {options.max_steps} steps of {config.batch.global_batch_tokens:,} tokens "
        f"({config.batch.micro_batches(trainer.world_size)} × {config.batch.micro_batch_tokens:,} on "
        f"{trainer.world_size} rank{'s' if trainer.world_size > 1 else ''}), in {run_dir}"
    )
    data = PackedDataModule(
        prepared,
        config.batch,
        config.seed,
        pin=device.type == "cuda",
        overfit_one_batch=options.overfit_one_batch,
    )
    baselines = _baselines(prepared) if _is_first_rank() else {}
    callbacks, signals = _callbacks(config, run_dir, prepared, module, precision, identity, baselines, tell)
    if probe is not None:
        callbacks = [c for c in callbacks if not isinstance(c, Validation | Checkpoint | Signals | Sample)] + [probe]
    trainer.callbacks.extend(callbacks)  # type: ignore[attr-defined]

    summary = {
        "n_params": model.n_params,
        **{f"{name.split()[0]}_bits_per_byte": value for name, value in baselines.items()},
    }
    try:
        trainer.fit(module, datamodule=data, ckpt_path=start_path, weights_only=True)
    except SIGTERMException:
        pass  # the signal came while Lightning's own handler was in place; `signals` has saved after the step
    except BaseException:
        _write_summary(run_dir, "failed", trainer.global_step, summary, device)
        raise
    step = trainer.global_step
    status = "interrupted" if signals.received is not None else "finished"
    _write_summary(run_dir, status, step, summary, device)
    if signals.received is not None and _is_first_rank():
        # The others leave quietly: Lightning kills the first rank when one of its children ends with an error code.
        raise SystemExit(128 + signals.received)
    if probe is not None:
        return _result(run_dir, step)
    _report(run_dir)
    result = _result(run_dir, step)
    tell(f"done: {run_dir}, report {result.report}, checkpoint {result.checkpoint}")
    return result


def _callbacks(
    config: RunConfig,
    run_dir: Path,
    prepared: Prepared,
    module: GPTModule,
    precision: str,
    identity: dict[str, Any],
    baselines: dict[str, float],
    tell: Callable[[str], None],
) -> tuple[list[Callback], Signals]:
    options = config.trainer
    compiled = build.use_compile(config)
    row: dict[str, float] = {}
    throughput = Throughput(
        row,
        module.model.config,
        module.model.n_params,
        config.batch.micro_batch_tokens,
        build.compute_dtype(precision),
        options.peak_tflops,
        compiled,
        options.log_every,
        tell,
    )
    beside = ", ".join(f"{name} {value:.2f}" for name, value in baselines.items())
    checkpoint = Checkpoint(
        run_dir, options.checkpoint_every, options.keep_checkpoints, identity, throughput, config.seed, tell
    )
    signals = Signals(checkpoint, options.log_every, tell)
    tokenizer = prepared.tokenizer if prepared.tokenizer.is_text else None
    callbacks: list[Callback] = [
        throughput,
        TrainingMetrics(row, options.log_every, options.nonfinite_budget),
        Validation(row, throughput, options.validate_every, tell, beside),
        MetricsWriter(row),
        checkpoint,
        signals,
        GarbageCollection(options.log_every),
        Sample(tokenizer, options.sample_prompt, options.sample_tokens, config.seed, run_dir / "samples.txt", tell),
    ]
    if options.progress_bar:
        callbacks.insert(4, Progress(row))
    if options.profile:
        callbacks.append(Profile(run_dir, throughput.warm_steps, tell))
    return callbacks, signals


def _baselines(prepared: Prepared) -> dict[str, float]:
    """Bits per byte of a unigram model and of gzip -9 on the validation text; empty where there is no text."""
    if not prepared.tokenizer.is_text:
        return {}
    from data.stats import gzip_bits_per_byte, unigram_bits_per_byte

    baselines = {"gzip -9": gzip_bits_per_byte(prepared.validation_texts())}
    if prepared.train.n_tokens <= _UNIGRAM_TOKENS:
        baselines = {"unigram": unigram_bits_per_byte(prepared.train, prepared.validation), **baselines}
    return baselines


def _describe_run(config: RunConfig, prepared: Prepared, run_dir: Path, surroundings: dict[str, Any]) -> None:
    from data.stats import packing_stats

    write_json(run_dir / "environment.json", surroundings)
    write_json(run_dir / "data.json", prepared.manifest)
    steps = min(config.trainer.max_steps, _PACKING_STEPS)
    write_json(run_dir / "packing.json", packing_stats(prepared.train, config.batch, config.seed, steps))


@rank_zero_only
def _write_summary(run_dir: Path, status: str, step: int, known: dict[str, Any], device: torch.device) -> None:
    rows = read_metrics(run_dir / "metrics.csv")
    columns = ("tokens", "loss", "val_loss", "val_bits_per_byte", "tokens_per_s", "mfu", "mfu_exact", "gemm_util")
    newest = {column: last_value(rows, column) for column in (*columns, "skipped_steps")}
    path = checkpoint_path(run_dir, step)
    write_json(
        run_dir / "summary.json",
        {
            "status": status,
            "steps": step,
            "seconds": last_value(rows, "time"),
            **{key: value for key, value in newest.items() if value is not None},
            **known,
            "checkpoint": str(path) if path.exists() else None,
            "peak_memory_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
        },
    )


@rank_zero_only
def _report(run_dir: Path, only_if_missing: bool = False) -> None:
    from train.report import write_report

    if not (only_if_missing and (run_dir / "report.html").exists()):
        write_report(run_dir)


def _result(run_dir: Path, step: int) -> FitResult:
    metrics = run_dir / "metrics.csv"
    rows = read_metrics(metrics)
    return FitResult(
        run_dir=run_dir,
        step=step,
        losses={int(row["step"]): row["loss"] for row in rows if "loss" in row},
        val_loss=last_value(rows, "val_loss"),
        val_bits_per_byte=last_value(rows, "val_bits_per_byte"),
        checkpoint=checkpoint_path(run_dir, step),
        metrics=metrics,
        report=run_dir / "report.html",
    )


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({torch.get_num_threads()} threads)"


def _is_first_rank() -> bool:
    """Known from the environment before any process group exists."""
    return getattr(rank_zero_only, "rank", 0) == 0


def _nothing(line: str) -> None:
    """What the other ranks say."""


def _quiet_lightning() -> None:
    """Lightning's greetings and advice are about things that are decided here; its errors stay."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.WARNING)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    for message in (
        ".*You defined a `validation_step` but have no `val_dataloader`.*",
        ".*GPU available but not used.*",
        ".*isinstance.treespec.*",
    ):
        warnings.filterwarnings("ignore", message)
