"""fa2 in other people's models: hooks into PyTorch's own attention functions and into Hugging Face transformers.

`import fa2` touches neither; nothing is registered before one of the two functions here is called.
"""

from __future__ import annotations

__all__ = ["register_with_torch", "register_with_transformers"]


def register_with_torch() -> None:
    """Make fa2 a flash attention implementation of PyTorch, by the name "fa2"; it changes nothing yet.

    `torch.nn.attention.activate_flash_attention_impl("fa2")` then makes the flash backend of
    `torch.nn.functional.scaled_dot_product_attention` and `torch.nn.attention.varlen.varlen_attn` run on fa2's kernels,
    forward and backward, on every GPU of the process; `restore_flash_attention_impl()` undoes it.
    `fa2.integrations.torch` says what falls through to torch's own.

    Raises:
        RuntimeError: this torch has no registry of flash attention implementations.
    """
    from fa2.integrations import torch as hook

    hook.register()


def register_with_transformers() -> None:
    """Make `attn_implementation="fa2"` known to every model of Hugging Face transformers.

    `fa2.integrations.transformers` says what is served and what is refused.

    Raises:
        ImportError: transformers is not installed, or older than 5.4.
    """
    from fa2.integrations import transformers as hook

    hook.register()
