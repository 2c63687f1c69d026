"""The command line that every `python -m train...` shares: compose with Hydra, check, run, say mistakes in one line.

A user's mistake (an unknown key, a wrong type, a missing file, a ValueError of any room) ends in one line on standard
error and exit code 2; HYDRA_FULL_ERROR=1 lets the traceback through. Must not know what a command does.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from train.schema import EvaluateConfig, ExportConfig, GenerateConfig, ReportConfig, ReproduceConfig, RunConfig

CONF_DIR = Path(__file__).resolve().parent.parent / "conf"
USER_ERROR = 2

# What a user can cause; by name where the package is not imported here. All else is a bug and keeps its traceback.
USER_ERRORS = (ValueError, OSError, ModuleNotFoundError, NotImplementedError)
USER_ERROR_NAMES = ("OutOfMemoryError", "MisconfigurationException", "UsageError", "AuthenticationError")

# Hydra leaves no folders and no logging set-up of its own: the run directory is the run's whole output.
QUIET = (
    "hydra.run.dir=.",
    "hydra.output_subdir=null",
    "hydra/job_logging=none",
    "hydra/hydra_logging=none",
    "hydra.sweep.subdir=.",
)


@dataclass(frozen=True)
class Command:
    """One command line."""

    module: str  # as in `python -m module`
    config_name: str  # its file in conf/; its help is conf/hydra/help/<last part of module>.yaml
    schema: type  # the dataclass that `run` is handed
    run: Callable[[Any], object]
    groups: tuple[str, ...] = ()  # the config groups it takes
    literal: tuple[str, ...] = ()  # keys of text that is taken as written, past Hydra's grammar
    before: Callable[[Sequence[str]], None] | None = None  # sees the arguments before they are composed


def register_schemas() -> None:
    """Makes the typed schemas known to Hydra under the names that conf/*.yaml begin with."""
    store = ConfigStore.instance()
    store.store(name="schema", node=RunConfig)
    for name, schema in (
        ("generate", GenerateConfig),
        ("evaluate", EvaluateConfig),
        ("export", ExportConfig),
        ("report", ReportConfig),
        ("reproduce", ReproduceConfig),
    ):
        store.store(name=f"{name}_schema", node=schema)


def main(command: Command, argv: Sequence[str] | None = None) -> int:
    """Runs `command` with the arguments `argv` (null: the process's) and returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if command.before is not None:
            command.before(arguments)
        if any(argument.startswith("-") for argument in arguments):
            return _hydra_command_line(command, arguments)
        command.run(build(command, arguments))
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        return _mistake(command, error)
    return 0


def build(command: Command, arguments: Sequence[str]) -> Any:
    """Composes the overrides `arguments` into a checked object of the command's schema.

    Raises:
        ValueError: an unknown key (the nearest one is named), a wrong type, or a value that a config class refuses.
    """
    return to_object(compose(command, _quote_texts(command, arguments)))


def compose(command: Command, overrides: Sequence[str]) -> DictConfig:
    """Composes with Hydra; its every refusal becomes a ValueError of one line."""
    register_schemas()
    for text in overrides:
        _check_override(command, text)
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(CONF_DIR), version_base="1.3", job_name=command.module):
            return hydra.compose(command.config_name, list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(_hydra_text(error)) from error


def to_object(config: DictConfig) -> Any:
    """The dataclass that `config` was typed by; its `__post_init__` checks run here."""
    try:
        return OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise ValueError(_hydra_text(error)) from error


def schema_keys(schema: type, prefix: str = "") -> dict[str, Any]:
    """Every dotted key of a schema with its type, inner nodes included."""
    keys: dict[str, Any] = {}
    hints = get_type_hints(schema)
    for field in fields(schema):
        key, kind = prefix + field.name, hints[field.name]
        keys[key] = kind
        if is_dataclass(kind):
            keys |= schema_keys(kind, f"{key}.")  # type: ignore[arg-type]
    return keys


def group_options(group: str) -> list[str]:
    """The options of a config group: the files in conf/."""
    return sorted(path.stem for path in (CONF_DIR / group).glob("*.yaml"))


def _quote_texts(command: Command, arguments: Sequence[str]) -> list[str]:
    """Quotes texts and paths that Hydra's grammar would refuse or change, so that they arrive as they were written.

    Of a list of paths, the brackets may be left out.
    """
    kinds = schema_keys(command.schema)
    quoted = []
    for text in arguments:
        key, _, value = text.partition("=")
        kind = kinds.get(key)
        if kind == list[str] and not value.startswith("["):
            text = f"{key}=[{','.join(map(_quote, value.split(',')))}]"
        elif key in command.literal or (kind in (str, str | None) and not _parses(text)):
            text = f"{key}={_quote(value)}"
        quoted.append(text)
    return quoted


def _quote(text: str) -> str:
    """`text` for Hydra's grammar and after it OmegaConf's, where a backslash keeps `${` from being an interpolation."""
    escaped = re.sub(r"(\\*)\$\{", lambda found: 2 * found[1] + r"\${", text)
    return QuotedString(escaped, Quote.single).with_quotes()


def _parses(text: str) -> bool:
    try:
        OverridesParser.create().parse_override(text)
    except HydraException:
        return False
    return True


def _check_override(command: Command, text: str) -> None:
    """Refuses what is no override, and unknown keys and options with the nearest one that exists."""
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        if "=" not in text:
            raise ValueError(f"{text!r} must be written as key=value or group=option") from error
        raise ValueError(f"{text!r} cannot be parsed ({_first_line(error)}): quote the value, key='...'") from error
    key = override.key_or_group
    if key.split(".")[0].split("/")[0] == "hydra":
        return
    if override.is_delete():
        raise ValueError(f"{text!r} must set a key: a key or a group cannot be removed")
    if key in command.groups:
        option, options = override.value(), group_options(key)
        if isinstance(option, str) and option not in options:
            nearest = _did_you_mean(option, options, f"{key}=")
            raise ValueError(f"{key} has no option {option!r}{nearest or ','} It has {', '.join(options)}")
        return
    keys = schema_keys(command.schema)
    if key not in keys:
        leaves = [name for name, kind in keys.items() if not is_dataclass(kind)]
        raise ValueError(
            f"unknown key {key!r}{_did_you_mean(key, leaves if '.' in key else [*leaves, *command.groups])}"
        )


def _did_you_mean(word: str, known: Sequence[str], prefix: str = "") -> str:
    nearest = difflib.get_close_matches(word, known, n=1, cutoff=0.75)
    if not nearest:
        # `lr` for `optim.lr`, `optim.max_step` for `trainer.max_steps`
        by_name = {key.rsplit(".", 1)[-1]: key for key in reversed(known)}
        nearest = [by_name[n] for n in difflib.get_close_matches(word.rsplit(".", 1)[-1], by_name, n=1, cutoff=0.6)]
    nearest = nearest or difflib.get_close_matches(word, known, n=1, cutoff=0.3)
    return f", did you mean {prefix}{nearest[0]}?" if nearest else ""


def _hydra_command_line(command: Command, arguments: list[str]) -> int:
    """Hydra's own flags: --help, --cfg job, --info, --multirun, --config-dir, shell completion."""
    # Hydra 1.3.8 gives argparse a help object that is no string, which a check new in Python 3.14 refuses.
    argparse.ArgumentParser._check_help = lambda self, action: None  # type: ignore[attr-defined]
    register_schemas()
    arguments = _quote_texts(command, arguments)
    overrides = [argument for argument in arguments if "=" in argument and not argument.startswith("-")]
    # argparse takes the overrides of one place only: flags may stand between them all the same
    arguments = [argument for argument in arguments if argument not in overrides] + overrides
    if not any(argument in ("-h", "--help", "-cd", "--config-dir", "-sc") for argument in arguments):
        for override in overrides:
            _check_override(command, override)
    if "--cfg" in arguments or "-c" in arguments:
        compose(command, overrides)

    def job(config: DictConfig) -> None:
        try:
            command.run(to_object(config))
        except Exception as error:
            sys.exit(_mistake(command, error))

    quiet = [*QUIET, f"hydra/help={command.module.rsplit('.', 1)[-1]}"]
    if command.schema is RunConfig:
        quiet.append("hydra.sweep.dir=${run_root}")
    GlobalHydra.instance().clear()
    before = sys.argv
    sys.argv = [command.module, *arguments, *quiet]
    try:
        hydra.main(config_path=str(CONF_DIR), config_name=command.config_name, version_base="1.3")(job)()
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 0
    finally:
        sys.argv = before
    return 0


def _mistake(command: Command, error: Exception) -> int:
    """Says a user's mistake in one line; raises again what is none."""
    is_users = isinstance(error, USER_ERRORS) or type(error).__name__ in USER_ERROR_NAMES
    if not is_users or os.environ.get("HYDRA_FULL_ERROR") == "1":
        raise error
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror + (f": {error.filename}" if error.filename else "")
    if type(error).__name__ == "OutOfMemoryError":
        text = (
            "out of memory on the device: lower batch.micro_batch_tokens or set trainer.activation_checkpointing=true"
        )
    print(f"{command.module}: error: {' '.join(text.split()) or type(error).__name__}", file=sys.stderr)
    return USER_ERROR


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _hydra_text(error: BaseException) -> str:
    """Hydra says which override, its cause says why: both, in one line."""
    text, cause = _first_line(error), error.__cause__
    if cause is not None and _first_line(cause) not in text:
        text = f"{text.removeprefix('Error merging override ').removeprefix('Error merging ')}: {_first_line(cause)}"
    key = getattr(error, "full_key", None)
    return f"{key}: {text}" if key else text
