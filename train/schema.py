"""The typed schema of the whole configuration. Hydra refuses every key and type that is not here.

The groups `model`, `data`, `tokenizer` and `batch` are the config classes of their own rooms.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from data.config import BatchConfig, DataConfig, TokenizerConfig
from model.config import GPTConfig


class Attention(Enum):
    auto = "auto"  # fa2 where it is built or can be built, otherwise torch's varlen attention, on a CPU the reference
    fa2 = "fa2"  # the CUDA kernels of fa2
    torch = "torch"  # torch.nn.attention.varlen.varlen_attn (CUDA)
    reference = "reference"  # fa2's exact PyTorch path, any device
    # what train.reproduce compares fa2 with: for documents of one length, so for synthetic data that fills the context
    eager = "eager"  # matrix products and a softmax, every score in memory
    sdpa_flash = "sdpa_flash"  # torch's FlashAttention-2 kernel under SDPA
    sdpa_cudnn = "sdpa_cudnn"  # cuDNN's kernel under SDPA (CUDA)


class Schedule(Enum):
    cosine = "cosine"
    linear = "linear"
    wsd = "wsd"  # warm-up, stable, decay


class LoggerKind(Enum):
    csv = "csv"  # metrics.csv in the run directory; the other kinds write it too
    wandb = "wandb"
    tensorboard = "tensorboard"


def _require(ok: bool, key: str, rule: str, value: object) -> None:
    if not ok:
        raise ValueError(f"{key} must be {rule}, got {value!r}")


def _require_accelerator(key: str, value: str) -> None:
    _require(value in ("auto", "cpu", "gpu"), key, "auto, cpu or gpu", value)


def _require_precision(key: str, value: str | None) -> None:
    known = ("32-true", "bf16-mixed", "bf16-true", "64-true")  # fp16 would need a loss scaler
    _require(value is None or value in known, key, f"one of {', '.join(known)} or null", value)


@dataclass
class OptimConfig:
    lr: float = 3e-3  # peak learning rate
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1  # on matrices only: no biases, no norms
    clip_grad_norm: float = 1.0  # global norm; 0 turns clipping off
    schedule: Schedule = Schedule.cosine
    warmup_steps: int = 50  # optimiser steps of linear warm-up
    decay_steps: int | None = None  # wsd: length of the final decay; null: a fifth of the run
    min_lr_ratio: float = 0.1  # last learning rate over peak

    def __post_init__(self) -> None:
        _require(self.lr > 0, "optim.lr", "positive", self.lr)
        for key in ("beta1", "beta2"):
            _require(0.0 <= getattr(self, key) < 1.0, f"optim.{key}", "in [0, 1)", getattr(self, key))
        _require(self.eps > 0, "optim.eps", "positive", self.eps)
        for key in ("weight_decay", "clip_grad_norm", "warmup_steps"):
            _require(getattr(self, key) >= 0, f"optim.{key}", "at least 0", getattr(self, key))
        _require(
            self.decay_steps is None or self.decay_steps > 0,
            "optim.decay_steps",
            "positive or null",
            self.decay_steps,
        )
        _require(0.0 <= self.min_lr_ratio <= 1.0, "optim.min_lr_ratio", "in [0, 1]", self.min_lr_ratio)


@dataclass
class TrainerConfig:
    max_steps: int = 300  # optimiser steps of the run
    accelerator: str = "auto"  # auto, cpu, gpu
    devices: int = 1  # GPUs (or CPU processes) of one node
    num_nodes: int = 1
    strategy: str = "auto"  # a Lightning strategy name
    precision: str | None = None  # null: bf16-mixed on a GPU, 32-true on a CPU
    compile: bool | None = None  # torch.compile of the model, part by part; null: on a GPU yes, on a CPU no
    weight_copies: bool | None = None  # cast weights once a step; null: under bf16-mixed on one rank
    activation_checkpointing: bool = False  # recompute each block in the backward pass
    log_every: int = 10  # steps between two points of the metrics; the only synchronisations of a step loop
    validate_every: int = 100  # steps; 0 validates at the end only
    checkpoint_every: int = 100  # steps; a kill loses at most this many
    keep_checkpoints: int = 2  # newest ones kept, besides the final one
    nonfinite_budget: int = 10  # skipped steps after which the run stops with an error
    peak_tflops: float | None = None  # dense datasheet peak of one device, for mfu; null looks the GPU's name up
    progress_bar: bool = True
    profile: bool = False  # write a torch profiler trace of a few steps into the run directory
    overfit_one_batch: bool = False  # train on the first step's batch again and again
    sample_prompt: str = "def main():\n"  # continued by the model at the end of the run
    sample_tokens: int = 128  # length of that continuation; 0 turns it off

    def __post_init__(self) -> None:
        for key in ("max_steps", "devices", "num_nodes", "log_every", "checkpoint_every", "keep_checkpoints"):
            _require(getattr(self, key) > 0, f"trainer.{key}", "positive", getattr(self, key))
        for key in ("validate_every", "nonfinite_budget", "sample_tokens"):
            _require(getattr(self, key) >= 0, f"trainer.{key}", "at least 0", getattr(self, key))
        _require(
            self.peak_tflops is None or self.peak_tflops > 0,
            "trainer.peak_tflops",
            "positive or null",
            self.peak_tflops,
        )
        _require_accelerator("trainer.accelerator", self.accelerator)
        _require_precision("trainer.precision", self.precision)


@dataclass
class LoggerConfig:
    kind: LoggerKind = LoggerKind.csv
    project: str = "gpt"  # wandb
    entity: str | None = None  # wandb
    offline: bool = True  # wandb: works without an account; `wandb sync` uploads later


@dataclass
class RunConfig:
    """The whole configuration of `python -m train`."""

    name: str = "default"  # the run directory is run_root/name
    run_root: str = "runs"
    seed: int = 1234
    resume: str | None = (
        None  # null: a new run; auto: the run directory's newest checkpoint, if any; or a checkpoint's path
    )
    overwrite: bool = False  # replace an earlier run of this name
    dry_run: bool = False  # print sizes, FLOPs and memory, and exit without training
    attention: Attention = Attention.auto
    model: GPTConfig = field(default_factory=GPTConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)

    def __post_init__(self) -> None:
        _require(bool(self.name) and "=" not in self.name, "name", "non-empty, without '='", self.name)
        _require(
            self.optim.warmup_steps <= self.trainer.max_steps,
            "optim.warmup_steps",
            f"at most trainer.max_steps ({self.trainer.max_steps})",
            self.optim.warmup_steps,
        )
        _require(
            self.batch.context <= self.model.max_positions,
            "batch.context",
            f"at most model.max_positions ({self.model.max_positions})",
            self.batch.context,
        )
        self.batch.micro_batches(self.trainer.devices * self.trainer.num_nodes)


@dataclass
class GenerateConfig:
    """The configuration of `python -m train.generate`."""

    checkpoint: str | None = None  # a run directory (its newest checkpoint) or a .ckpt file
    prompt: str | None = None  # taken literally; null: prompt_file, or standard input
    prompt_file: str | None = None  # a UTF-8 file
    max_new_tokens: int = 256
    temperature: float = 0.8  # 0 takes the likeliest token
    top_p: float = 0.95  # share of the probability that may be drawn; 1 draws from all of it
    seed: int = 1234
    accelerator: str = "auto"

    def __post_init__(self) -> None:
        _require(bool(self.checkpoint), "checkpoint", "a run directory or a .ckpt file", self.checkpoint)
        _require(self.max_new_tokens > 0, "max_new_tokens", "positive", self.max_new_tokens)
        _require(self.temperature >= 0, "temperature", "at least 0", self.temperature)
        _require(0.0 < self.top_p <= 1.0, "top_p", "in (0, 1]", self.top_p)
        _require(
            self.prompt is None or self.prompt_file is None,
            "prompt_file",
            "null when prompt is given",
            self.prompt_file,
        )
        _require_accelerator("accelerator", self.accelerator)


class Split(Enum):
    validation = "validation"
    train = "train"


@dataclass
class EvaluateConfig:
    """The configuration of `python -m train.evaluate`; `data` and `batch` begin as the checkpoint's own."""

    checkpoint: str | None = None  # a run directory (its newest checkpoint) or a .ckpt file
    split: Split = Split.validation
    max_steps: int | None = None  # stop after this many global batches; null takes the whole split
    accelerator: str = "auto"
    precision: str | None = None  # null: bf16-mixed on a GPU, 32-true on a CPU
    attention: Attention = Attention.auto
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)

    def __post_init__(self) -> None:
        _require(bool(self.checkpoint), "checkpoint", "a run directory or a .ckpt file", self.checkpoint)
        _require(self.max_steps is None or self.max_steps > 0, "max_steps", "positive or null", self.max_steps)
        _require_accelerator("accelerator", self.accelerator)
        _require_precision("precision", self.precision)


@dataclass
class ExportConfig:
    """The configuration of `python -m train.export`."""

    checkpoint: str | None = None  # a run directory (its newest checkpoint) or a .ckpt file
    output: str | None = None  # null: model.safetensors in the run directory

    def __post_init__(self) -> None:
        _require(bool(self.checkpoint), "checkpoint", "a run directory or a .ckpt file", self.checkpoint)


@dataclass
class ReproduceConfig:
    """The configuration of `python -m train.reproduce`."""

    rows: list[str] = field(default_factory=lambda: ["1.3b_2k", "1.3b_8k", "2.7b_2k", "2.7b_8k"])
    attention: list[str] = field(default_factory=lambda: ["eager", "sdpa_flash", "sdpa_cudnn", "fa2", "torch"])
    documents: list[str] = field(default_factory=lambda: ["dense", "packed"])
    warm_steps: int = 2  # optimiser steps before the clock starts: the first one compiles
    steps: int = 3  # optimiser steps that are timed
    micro_batch_tokens: int | None = None  # null: the recipe's
    budget: list[str] = field(default_factory=list)  # the attentions whose cells profile one step more
    output: str = "runs/reproduce"  # folder of reproduce.json, tables.md and the pictures
    merge: list[str] = field(default_factory=list)  # records of earlier invocations that go into this one's
    seconds: float | None = None  # begin no new cell after this long; null: no limit
    overrides: list[str] = field(default_factory=list)  # of every run, as for python -m train

    def __post_init__(self) -> None:
        for key in ("warm_steps", "steps"):
            _require(getattr(self, key) > 0, key, "positive", getattr(self, key))
        for key in ("micro_batch_tokens", "seconds"):
            value = getattr(self, key)
            _require(value is None or value > 0, key, "positive or null", value)
        backends = [backend.value for backend in Attention if backend is not Attention.auto]
        for name in self.attention:
            _require(name in backends, "attention", f"of {', '.join(backends)}", name)
        for name in self.budget:
            _require(name in self.attention, "budget", f"of attention's {', '.join(self.attention)}", name)
        for kind in self.documents:
            _require(kind in ("dense", "packed"), "documents", "of dense, packed", kind)
        _require(bool(self.output), "output", "a folder", self.output)


@dataclass
class ReportConfig:
    """The configuration of `python -m train.report`."""

    run: str | None = None  # a run directory

    def __post_init__(self) -> None:
        _require(bool(self.run), "run", "a run directory", self.run)
