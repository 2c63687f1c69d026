"""The rows of the paper's table, the cells of ours, and the run configuration of each.

A row is a recipe of conf/experiment; a cell is a row with a kind of data and an attention backend.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from model.attention import DENSE_BACKENDS
from model.config import COMPUTATION, GPTConfig
from model.memory import memory_estimate
from train import build, cli
from train.__main__ import COMMAND
from train.dry_run import vocabulary
from train.schema import ReproduceConfig, RunConfig

GIB = 1 << 30
RUN_ROOT = "runs/reproduce"  # where each cell leaves its run, in place of an earlier one


@dataclass(frozen=True)
class Row:
    """One row of the paper's table; `tables.py` has its title and the paper's figures."""

    experiment: str
    overrides: tuple[str, ...] = ()


ROWS = {
    "1.3b_2k": Row("gpt3_1.3b_2k"),
    "1.3b_8k": Row("gpt3_1.3b_8k"),
    "2.7b_2k": Row("gpt3_2.7b_2k"),
    "2.7b_8k": Row("gpt3_2.7b_8k"),
    # tries the command on any machine
    "debug": Row(
        "gpt3_1.3b_2k",
        (
            "model.n_layer=2",
            "model.d_model=64",
            "model.nheads_q=2",
            "model.max_positions=64",
            "batch.context=64",
            "batch.micro_batch_tokens=256",
            "batch.global_batch_tokens=512",
            "data.synthetic_tokens=16384",
            "data.synthetic_vocab_size=1000",
        ),
    ),
}

# Real text without a network, prepared in seconds. The vocabulary of the model stays the row's; the tokenizer uses the
# first 4096 ids of it. 256 tokens a document are the least that is reckoned with: torch's varlen kernel launches a grid
# for every document there might be.
_PACKED = ("data=stdlib", "tokenizer=train", "model.vocab_size=50257")
_TOKENS_PER_DOCUMENT = 256
PACKED_TEXT = "the Python standard library's sources, BPE of 4096 ids"

# The estimate is of eager PyTorch, a compiled block keeps less: a cell that it puts a little above the memory is tried.
_ESTIMATE_MAY_EXCEED = 1.25


@dataclass(frozen=True)
class Cell:
    """One run of the table."""

    row: str
    data: str  # dense or packed
    attention: str
    config: RunConfig
    warm_steps: int
    steps: int
    budget: bool
    overrides: tuple[str, ...]
    is_recipe: bool  # the row's own micro-batch, and nothing overridden

    @property
    def name(self) -> str:
        return f"{self.row}/{self.data}/{self.attention}"

    @property
    def model(self) -> GPTConfig:
        """The shape with its vocabulary filled in."""
        return replace(self.config.model, vocab_size=vocabulary(self.config)[0])


def cells(config: ReproduceConfig) -> list[Cell]:
    """Every run that `config` asks for, composed and checked.

    Raises:
        ValueError: an unknown row, an override that is none, or one that makes another row of a row.
    """
    for name in config.rows:
        if name not in ROWS:
            raise ValueError(f"rows must be of {', '.join(ROWS)}, got {name!r}")
    combinations = [(r, d, a) for r in config.rows for d in config.documents for a in config.attention]
    return [_cell(config, *combination) for combination in dict.fromkeys(combinations)]


def _cell(config: ReproduceConfig, row: str, data: str, attention: str) -> Cell:
    steps, budget = config.warm_steps + config.steps, attention in config.budget
    arguments = [
        f"experiment={ROWS[row].experiment}",
        *ROWS[row].overrides,
        *(_PACKED if data == "packed" else ()),
        f"attention={attention}",
        f"name={row}-{data}-{attention}",
        f"run_root={RUN_ROOT}",
        "overwrite=true",
        "optim.warmup_steps=0",
        f"trainer.max_steps={steps + budget}",
        f"trainer.log_every={steps}",
        "trainer.progress_bar=false",
        "trainer.sample_tokens=0",
    ]
    plain = cli.build(COMMAND, arguments)
    run = plain
    changes = list(config.overrides)
    if config.micro_batch_tokens is not None:
        changes.insert(0, f"batch.micro_batch_tokens={config.micro_batch_tokens}")
    if changes:
        run = cli.build(COMMAND, [*arguments, *changes])
        _check_same_row(row, plain, run)
    is_recipe = not config.overrides and run.batch.micro_batch_tokens == plain.batch.micro_batch_tokens
    if data == "packed" and run.batch.max_docs is None:
        # the smallest context may hold shorter documents: never fewer than the default's 16
        run.batch.max_docs = max(16, run.batch.micro_batch_tokens // _TOKENS_PER_DOCUMENT)
    return Cell(
        row=row,
        data=data,
        attention=attention,
        config=run,
        warm_steps=config.warm_steps,
        steps=config.steps,
        budget=budget,
        overrides=tuple(config.overrides),
        is_recipe=is_recipe,
    )


def _check_same_row(row: str, plain: RunConfig, run: RunConfig) -> None:
    """Refuses overrides after which the row's name would no longer say what was measured."""
    changed = {key for key, value in vars(run.model).items() if value != getattr(plain.model, key)}
    if changed - set(COMPUTATION):
        listed = ", ".join(f"model.{key}" for key in sorted(changed - set(COMPUTATION)))
        raise ValueError(f"overrides must keep the model of the row {row}, got another {listed}")
    for key in ("context", "global_batch_tokens"):
        old, new = getattr(plain.batch, key), getattr(run.batch, key)
        if old != new:
            raise ValueError(f"overrides must keep batch.{key} of the row {row} ({old}), got {new}")
    plain.data.cache_dir, plain.data.processes = run.data.cache_dir, run.data.processes
    if plain.data != run.data or plain.tokenizer != run.tokenizer:
        raise ValueError("overrides must keep data.* and tokenizer.* as documents=dense and =packed set them")
    for key in ("name", "run_root", "attention", "overwrite", "resume", "dry_run"):
        if getattr(plain, key) != getattr(run, key):
            raise ValueError(f"overrides must keep {key}: this command's own keys set it")
    for key in ("max_steps", "log_every", "overfit_one_batch"):
        if getattr(plain.trainer, key) != getattr(run.trainer, key):
            raise ValueError(f"overrides must keep trainer.{key}: warm_steps and steps set the length of the run")
    if run.trainer.profile:
        raise ValueError(
            "overrides must keep trainer.profile=false, got true: profiled steps are slower; budget=fa2 adds one"
        )
    if run.trainer.accelerator != plain.trainer.accelerator:
        raise ValueError(
            f"overrides must keep trainer.accelerator={plain.trainer.accelerator}, got {run.trainer.accelerator}: "
            "the record says one machine's device for all"
        )
    if (run.trainer.devices, run.trainer.num_nodes) != (1, 1):
        raise ValueError(f"overrides must keep trainer.devices=1, got {run.trainer.devices}: the table is of one GPU")


def not_applicable(cell: Cell) -> str | None:
    """Why this combination is not run at all, or None."""
    if cell.data == "packed" and cell.attention in DENSE_BACKENDS:
        return "takes no document lengths"
    if cell.data == "dense" and cell.attention == "torch":
        return "sdpa_flash is the same kernel"
    return None


def does_not_fit(cell: Cell, capacity: int | None) -> str | None:
    """A sentence with what the cell needs and what would fit, or None where it may fit.

    Args:
        capacity: bytes of the device; None does not check.
    """
    if capacity is None:
        return None
    need = needed_bytes(cell)
    if need <= _ESTIMATE_MAY_EXCEED * capacity:
        return None
    return f"needs about {need / GIB:.0f} GiB of {capacity / GIB:.0f}; {what_fits(cell, capacity)}"


def needed_bytes(cell: Cell, micro_batch_tokens: int | None = None, recompute: bool = False) -> int:
    """Bytes that the run needs by `model/memory.py`'s estimate."""
    trainer, batch = cell.config.trainer, cell.config.batch
    precision = build.resolve_precision(cell.config, build.resolve_device(cell.config))
    parts = memory_estimate(
        cell.model,
        micro_batch_tokens or batch.micro_batch_tokens,
        precision,
        trainer.activation_checkpointing or recompute,
        cell.attention,
        batch.context,
    )
    return sum(parts.values())


def what_fits(cell: Cell, capacity: int) -> str:
    """What to change so that the cell fits into `capacity` bytes, in words."""
    batch = cell.config.batch
    sizes = [batch.micro_batch_tokens]
    while sizes[-1] % 2 == 0 and sizes[-1] // 2 >= batch.context:
        sizes.append(sizes[-1] // 2)
    for size in sizes[1:]:
        if (need := needed_bytes(cell, size)) <= capacity:
            return f"micro_batch_tokens={size} would fit ({need / GIB:.0f} GiB)"
    for size in sizes:
        if (need := needed_bytes(cell, size, recompute=True)) <= capacity:
            change = f"micro_batch_tokens={size} " if size != sizes[0] else ""
            return f"{change}overrides=trainer.activation_checkpointing=true would fit ({need / GIB:.0f} GiB)"
    return "no micro-batch of it fits"
