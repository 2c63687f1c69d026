"""Every option of every config group composes, passes its checks and builds; recipes do what their first lines say."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch

from data.config import Source
from model.gpt import GPT
from train import cli
from train.__main__ import COMMAND, GROUPS
from train.dry_run import vocabulary
from train.evaluate import COMMAND as EVALUATE
from train.export import COMMAND as EXPORT
from train.generate import COMMAND as GENERATE
from train.optim import build_adamw
from train.reproduce.__main__ import COMMAND as REPRODUCE
from train.schema import ReportConfig, RunConfig

# what an option cannot know by itself
NEEDS = {
    "optim=gpt3": ["trainer.max_steps=1000"],
    "data=files": ["data.paths=[corpus]"],
    "data=hub": ["data.hub_name=owner/name"],
    "tokenizer=file": ["tokenizer.path=tokenizer.json"],
    "tokenizer=hub": ["tokenizer.name=owner/name"],
}
OPTIONS = [f"{group}={option}" for group in GROUPS for option in cli.group_options(group)]
EXPERIMENTS = cli.group_options("experiment")


def build(*arguments: str) -> RunConfig:
    return cli.build(COMMAND, arguments)


def no_attention(*tensors: Any) -> torch.Tensor:
    raise AssertionError("nothing runs here")


def model_on_meta(config: RunConfig) -> GPT:
    # the file behind tokenizer=file is not there; its size does not matter here
    size = 1000 if config.tokenizer.path else vocabulary(config)[0]
    with torch.device("meta"):
        return GPT(replace(config.model, vocab_size=size), no_attention)


def test_no_argument_is_the_schemas_defaults() -> None:
    defaults = RunConfig()
    # The default run lasts minutes: four pieces in a batch of 2048 tokens teach it twice as fast as one long one.
    defaults.batch.context = defaults.model.max_positions = 512
    assert build() == defaults


@pytest.mark.parametrize("option", OPTIONS)
def test_option_composes_and_instantiates(option: str) -> None:
    config = build(option, *NEEDS.get(option, []))
    model = model_on_meta(config)
    assert len(model.blocks) == config.model.n_layer
    assert sum(p.numel() for group in build_adamw(model, config.optim).param_groups for p in group["params"]) > 0


@pytest.mark.parametrize("experiment", ["gpt3_1.3b_8k", "llama_1.1b"])
@pytest.mark.parametrize("debug", cli.group_options("debug"))
def test_every_debug_option_fits_an_experiment(experiment: str, debug: str) -> None:
    config = build(f"experiment={experiment}", f"debug={debug}")
    assert config.name == f"debug_{debug}"
    assert config.trainer.max_steps <= 100


@pytest.mark.parametrize(
    "recipe", [f"{group}/{name}" for group in ("experiment", "debug") for name in cli.group_options(group)]
)
def test_recipe_begins_with_its_command(recipe: str) -> None:
    header, command = (cli.CONF_DIR / f"{recipe}.yaml").read_text().splitlines()[:2]
    assert header == "# @package _global_"
    words = shlex.split(command.removeprefix("# "))
    assert words == ["python", "-m", "train", recipe.replace("/", "=")]


@pytest.mark.parametrize(
    ("option", "millions"),
    [
        ("gpt3_125m", 125),
        ("gpt3_350m", 356),
        ("gpt3_760m", 760),
        ("gpt3_1.3b", 1316),
        ("gpt3_2.7b", 2652),
        ("gpt3_2.7b_hd128", 2652),
        ("llama_1.1b", 1198),
    ],
)
def test_presets_have_the_size_of_their_name(option: str, millions: int) -> None:
    n_params = model_on_meta(build(f"model={option}", "model.vocab_size=50257")).n_params
    assert n_params == pytest.approx(millions * 1e6, rel=0.01)


@pytest.mark.parametrize(
    ("experiment", "shape"),
    [
        ("gpt3_1.3b_2k", (24, 2048, 16, 128, 2048)),
        ("gpt3_1.3b_8k", (24, 2048, 16, 128, 8192)),
        ("gpt3_2.7b_2k", (32, 2560, 20, 128, 2048)),
        ("gpt3_2.7b_8k", (32, 2560, 20, 128, 8192)),
    ],
)
def test_rows_of_the_papers_table(experiment: str, shape: tuple[int, ...]) -> None:
    config = build(f"experiment={experiment}")
    model = config.model
    assert (model.n_layer, model.d_model, model.nheads_q, model.headdim, config.batch.context) == shape
    assert config.batch.global_batch_tokens == 524_288
    assert config.data.source is Source.synthetic
    assert config.data.synthetic_document_tokens == config.batch.context


def test_the_command_line_wins_over_the_experiment() -> None:
    config = build("experiment=gpt3_1.3b_8k", "data=fineweb", "trainer.max_steps=1000", "batch.context=4096")
    assert config.data == build("data=fineweb").data
    assert config.trainer.max_steps == 1000
    assert config.batch.context == 4096
    assert config.tokenizer.name == "openai-community/gpt2"
    assert config.model.n_layer == 24


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_no_experiment_fights_a_choice_of_data(experiment: str) -> None:
    assert build(f"experiment={experiment}", "data=c4").data == build("data=c4").data


def test_order_of_arguments_does_not_matter() -> None:
    arguments = ["trainer.max_steps=900", "data=fineweb", "experiment=gpt3_125m", "model=llama_1.1b"]
    assert build(*arguments) == build(*reversed(arguments))
    assert build(*arguments).model.norm.value == "rmsnorm"


@pytest.mark.parametrize(
    ("file", "schema"),
    [
        *((f"{name}/{option}.yaml", name) for name, option in (("model", "small"), ("data", "stdlib"))),
        *((f"{name}/{option}.yaml", name) for name, option in (("tokenizer", "train"), ("optim", "default"))),
        *((f"{name}/{option}.yaml", name) for name, option in (("trainer", "default"), ("logger", "csv"))),
    ],
)
def test_default_options_name_every_key_of_their_group(file: str, schema: str) -> None:
    group = get_type_hints(RunConfig)[schema]
    keys = re.findall(r"^(\w+):", (cli.CONF_DIR / file).read_text(), re.MULTILINE)
    assert keys == [field.name for field in fields(group)]


@pytest.mark.parametrize("command", [GENERATE, EVALUATE, EXPORT, REPRODUCE, "report"])
def test_other_commands_name_every_key_of_their_schema(command: Any) -> None:
    name, schema = ("report", ReportConfig) if command == "report" else (command.config_name, command.schema)
    keys = re.findall(r"^(\w+):", (cli.CONF_DIR / f"{name}.yaml").read_text(), re.MULTILINE)
    hints = get_type_hints(schema)
    assert keys[0] == "defaults"
    assert keys[1:] == [field.name for field in fields(schema) if not is_dataclass(hints[field.name])]


def test_config_yaml_names_every_top_level_key() -> None:
    text = (cli.CONF_DIR / "config.yaml").read_text()
    keys = re.findall(r"^(\w+):", text, re.MULTILINE)
    hints = get_type_hints(RunConfig)
    groups = [name for name, kind in hints.items() if is_dataclass(kind) and name != "batch"]
    assert keys == ["defaults", *(field.name for field in fields(RunConfig) if field.name not in groups)]
    batch = re.findall(r"^  (\w+):", text.split("\nbatch:")[1], re.MULTILINE)
    assert batch == [field.name for field in fields(hints["batch"])]


def test_no_file_of_conf_is_outside_a_known_group() -> None:
    folders = {path.relative_to(cli.CONF_DIR).parts[0] for path in Path(cli.CONF_DIR).rglob("*.yaml")}
    assert {folder for folder in folders if not folder.endswith(".yaml")} == {*GROUPS, "hydra"}
