"""`python -m train.generate`: continue a prompt with a trained model; only the text goes to standard output."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from train import cli
from train.schema import GenerateConfig


def run(config: GenerateConfig) -> None:
    print(continuation(config))


def continuation(config: GenerateConfig) -> str:
    """The prompt and what the model writes after it."""
    import torch

    from model.generate import generate
    from train.trained import open_trained

    assert config.checkpoint is not None, "GenerateConfig refuses null"
    # the key-value cache brings its own attention, so none needs to be chosen
    trained = open_trained(config.checkpoint, config.accelerator, attention="reference", say=lambda line: None)
    tokenizer = trained.tokenizer()
    # every document of the training data begins with the end-of-text token, and so does this one
    ids = [tokenizer.eot_id, *tokenizer.encode(read_prompt(config))]
    tokens = torch.tensor(ids, device=trained.device)
    generator = torch.Generator(trained.device).manual_seed(config.seed)
    with trained.autocast():
        new = generate(
            trained.model,
            tokens,
            config.max_new_tokens,
            config.temperature,
            config.top_p,
            tokenizer.eot_id,
            generator,
        )
    return tokenizer.decode([*ids[1:], *(i for i in new.tolist() if i != tokenizer.eot_id)])


def read_prompt(config: GenerateConfig) -> str:
    if config.prompt is not None:
        return config.prompt
    if config.prompt_file is not None:
        raw = Path(config.prompt_file).read_bytes()
        name = config.prompt_file
    else:
        if sys.stdin.isatty():
            print("Type a prompt and end it with Ctrl-D.", file=sys.stderr)
        raw = sys.stdin.buffer.read()
        name = "standard input"
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"the prompt in {name} must be UTF-8, got byte {raw[error.start]:#04x} at {error.start}"
        ) from error


COMMAND = cli.Command(
    "train.generate", "generate", GenerateConfig, run, literal=("checkpoint", "prompt", "prompt_file")
)


def main(argv: Sequence[str] | None = None) -> int:
    return cli.main(COMMAND, argv)


if __name__ == "__main__":
    sys.exit(main())
