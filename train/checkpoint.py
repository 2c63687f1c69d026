"""Checkpoint files: written so that a kill tears none, found again, checked, and opened without a trainer.

What a checkpoint holds is decided where it is known: `module.py` (counters), `datamodule.py` (stream position),
`callbacks/checkpoint.py` (configuration, fingerprints, random number generators). Must not know the training loop.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

import torch
from lightning.pytorch.plugins.io import CheckpointIO

from model.config import GPTConfig

if TYPE_CHECKING:
    from model.gpt import GPT

FOLDER = "checkpoints"
_NAME = re.compile(r"step_(\d+)\.ckpt")
_KEYS = ("state_dict", "optimizer_states", "global_step", "run_config", "model_config")
_MODEL_PREFIX = "model."  # the GPT is the attribute `model` of the LightningModule

T = TypeVar("T")


def checkpoint_path(run_dir: Path, step: int) -> Path:
    """The file of one optimiser step; no '=' in the name, which Hydra could not parse as a value."""
    return run_dir / FOLDER / f"step_{step:06d}.ckpt"


def checkpoint_step(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"checkpoint must be named step_NNNNNN.ckpt, got {path.name!r}")
    return int(match[1])


def list_checkpoints(run_dir: Path) -> list[Path]:
    """The run's checkpoint files, newest first."""
    found = [path for path in (run_dir / FOLDER).glob("step_*.ckpt") if _NAME.fullmatch(path.name)]
    return sorted(found, key=checkpoint_step, reverse=True)


class AtomicCheckpointIO(CheckpointIO):
    """A checkpoint is either whole under its name or not there: temporary file, fsync, rename, fsync of the folder."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Hidden and without the .ckpt ending: what a kill leaves behind is never taken for a checkpoint.
        temporary = path.parent / f".{path.name}.partial"
        with temporary.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the rename itself must outlive a power cut
        finally:
            os.close(folder)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        return read_checkpoint(Path(path), mmap=False)  # training may outlive the file

    def remove_checkpoint(self, path: Any) -> None:
        with contextlib.suppress(FileNotFoundError):
            Path(path).unlink()


def read_checkpoint(path: Path, mmap: bool = True) -> dict[str, Any]:
    """Load a checkpoint onto the CPU; only tensors and plain Python values, never code.

    Args:
        mmap: leave the tensors in the file until they are touched.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it cannot be read, or is no checkpoint of this trainer.
    """
    if not path.is_file():
        raise FileNotFoundError(f"checkpoint {path} does not exist")
    try:
        checkpoint = torch.load(path, map_location="cpu", mmap=mmap, weights_only=True)
    except Exception as error:  # torch raises RuntimeError, UnpicklingError, EOFError, OSError… for a torn file
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"checkpoint {path} is unreadable: {first_line[:160]}") from error
    missing = [key for key in _KEYS if not isinstance(checkpoint, dict) or key not in checkpoint]
    if missing:
        raise ValueError(f"checkpoint {path} must be one written by `python -m train`, it lacks {missing}")
    return checkpoint


def newest_readable(run_dir: Path, say: Callable[[str], None]) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint that can be read; says one line for each newer one that cannot."""
    for path in list_checkpoints(run_dir):
        try:
            return path, read_checkpoint(path)
        except ValueError as error:
            say(f"{error}; taking the one before it")
    return None


def find_checkpoint(path: Path) -> Path:
    """The checkpoint meant by a path: the file itself, or the newest one of a run directory.

    Raises:
        FileNotFoundError: no such file, or a directory without checkpoints.
    """
    if path.is_dir():
        found = list_checkpoints(path) or list_checkpoints(path.parent)
        if not found:
            raise FileNotFoundError(f"checkpoint: no step_NNNNNN.ckpt under {path}")
        return found[0]
    if not path.is_file():
        raise FileNotFoundError(f"checkpoint {path} does not exist")
    return path


def plain(config: Any) -> Any:
    """A config dataclass as dicts, lists and scalars (enums by value): what checkpoints and config.yaml hold."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {f.name: plain(getattr(config, f.name)) for f in dataclasses.fields(config)}
    if isinstance(config, Enum):
        return config.value
    if isinstance(config, dict):
        return {str(key): plain(value) for key, value in config.items()}
    if isinstance(config, list | tuple):
        return [plain(value) for value in config]
    return config


def from_plain(cls: type[T], values: dict[str, Any]) -> T:
    """The config dataclass that `plain` took apart; keys it does not know (an older version's) are an error."""
    hints = get_type_hints(cls)
    unknown = sorted(set(values) - set(hints))
    if unknown:
        raise ValueError(f"{cls.__name__} has no keys {unknown}")
    return cls(**{key: _typed(hints[key], value) for key, value in values.items()})


def _typed(hint: Any, value: Any) -> Any:
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint(value)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return from_plain(hint, value)
    return value


def load_model(
    path: Path, device: torch.device, attention: str = "auto", say: Callable[[str], None] = print
) -> tuple[GPT, dict[str, Any]]:
    """The GPT of a checkpoint, in evaluation mode, and the checkpoint itself (`run_config`, fingerprints, …).

    Args:
        path: a checkpoint file or a run directory (its newest checkpoint).
        device: where the weights go; attention runs there in the parameters' dtype.
        attention: auto, fa2, torch or reference.
        say: hears once which attention was taken.
    """
    from model.attention import resolve_attention
    from model.gpt import GPT

    checkpoint = read_checkpoint(find_checkpoint(path))
    config = from_plain(GPTConfig, checkpoint["model_config"])
    weights = {
        name.removeprefix(_MODEL_PREFIX): value
        for name, value in checkpoint["state_dict"].items()
        if name.startswith(_MODEL_PREFIX)
    }
    # fa2's kernels take half precision alone; the CPU path takes what is there.
    dtype = torch.bfloat16 if device.type == "cuda" else next(iter(weights.values())).dtype
    _, attend = resolve_attention(attention, device, dtype, config.headdim, say)
    with device:
        model = GPT(config, attend)
    model.load_state_dict(weights)
    return model.eval(), checkpoint


def tokenizer_path(checkpoint: Path) -> Path:
    """tokenizer.json beside the run's checkpoints folder."""
    return checkpoint.resolve().parent.parent / "tokenizer.json"


def flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys of a plain config."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def differences(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ between two plain configs, with (old, new)."""
    before, now = dict(flat(old)), dict(flat(new))
    keys = [*now, *(key for key in before if key not in now)]
    return {key: (before.get(key), now.get(key)) for key in keys if before.get(key) != now.get(key)}
