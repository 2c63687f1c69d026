"""What fa2 promises to code written for flash_attn 2: signatures, an import changed and nothing else, and the tables of
fa2's README, whose errors are raised and whose differences are seen here."""

from __future__ import annotations

import inspect
import re
import textwrap
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fa2
from fa2 import reference

README = (Path(__file__).resolve().parents[2] / "fa2" / "README.md").read_text(encoding="utf-8")
SECTION = README.split("\n## For flash_attn users\n")[1].split("\n## ")[0]

# Source: flash_attn 2.8.3 (Dao-AILab/flash-attention), flash_attn/flash_attn_interface.py and bert_padding.py.
OPTIONS = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)
LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
SIGNATURES = {
    "flash_attn_func": f"(q, k, v, {OPTIONS})",
    "flash_attn_kvpacked_func": f"(q, kv, {OPTIONS})",
    "flash_attn_qkvpacked_func": f"(qkv, {OPTIONS})",
    "flash_attn_varlen_func": f"(q, k, v, {LENGTHS}, {OPTIONS}, block_table=None)",
    "flash_attn_varlen_kvpacked_func": f"(q, kv, {LENGTHS}, {OPTIONS})",
    "flash_attn_varlen_qkvpacked_func": f"(qkv, cu_seqlens, max_seqlen, {OPTIONS})",
    "index_first_axis": "(input, indices)",
    "pad_input": "(hidden_states, indices, batch, seqlen)",
    "unpad_input": "(hidden_states, attention_mask, unused_mask=None)",
}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    signature = inspect.signature(getattr(fa2, name))
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    assert str(inspect.Signature(bare)) == SIGNATURES[name]


# As models write it: unpad by the mask, attend, pad; options by position and by name.
WRITTEN_FOR_FLASH_ATTN = """
    from flash_attn import flash_attn_func, flash_attn_varlen_func
    from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input

    def attention(q, k, v, attention_mask=None, dropout=0.0, softmax_scale=None, causal=True, window=None):
        batch, seqlen_q = q.shape[:2]
        seqlen_k = k.shape[1]
        kwargs = {} if window is None else {"window_size": (window, window)}
        if attention_mask is None:
            return flash_attn_func(q, k, v, dropout, softmax_scale=softmax_scale, causal=causal, **kwargs)
        k, indices_k, cu_seqlens_k, max_seqlen_k, *_ = unpad_input(k, attention_mask)
        v = index_first_axis(v.reshape(batch * seqlen_k, *v.shape[2:]), indices_k)
        q, indices_q, cu_seqlens_q, max_seqlen_q, *_ = unpad_input(q, attention_mask[:, -seqlen_q:])
        out, lse, _ = flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout, softmax_scale, causal,
            return_attn_probs=True, **kwargs
        )
        assert lse.shape == q.shape[1::-1]
        return pad_input(out, indices_q, batch, seqlen_q)
"""


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("masked", [True, False])
def test_code_written_for_flash_attn_runs_with_its_imports_changed(masked, window):
    source = textwrap.dedent(WRITTEN_FOR_FLASH_ATTN)
    changed, count = re.subn(r"^from flash_attn(\.bert_padding)? import", "from fa2 import", source, flags=re.MULTILINE)
    assert count == 2
    namespace: dict = {}
    exec(changed, namespace)
    x = [draw(3, 12, heads, 16, seed=i).requires_grad_() for i, heads in enumerate((4, 2, 2))]
    lengths = [12, 5, 9]
    mask = torch.arange(12) >= 12 - torch.tensor(lengths)[:, None] if masked else None  # padding on the left
    out = namespace["attention"](*x, mask, window=window)
    grads = torch.autograd.grad(out.square().sum(), x)
    assert out.shape == x[0].shape
    options = {"causal": True, "window_size": (-1, -1) if window is None else (window, window)}
    for i, length in enumerate(lengths if masked else [12] * 3):
        own = [t[i : i + 1, 12 - length :].detach().requires_grad_() for t in x]
        want = reference.flash_attn_func(*own, **options)
        torch.testing.assert_close(out[i, 12 - length :], want[0])
        for got, wanted in zip(grads, torch.autograd.grad(want.square().sum(), own), strict=True):
            torch.testing.assert_close(got[i, 12 - length :], wanted[0])
            assert (got[i, : 12 - length] == 0).all()


MISSING = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|$", SECTION, re.MULTILINE)


def test_every_option_that_is_missing_is_in_the_table():
    assert len(MISSING) == 9
    text = "".join(code for code, _ in MISSING)
    assert all(option in text for option in ("dropout_p", "softcap", "alibi_slopes", "block_table", "kvcache"))


@pytest.mark.parametrize(("code", "message"), MISSING, ids=[code for code, _ in MISSING])
def test_what_is_missing_raises_what_the_readme_says(code, message):
    q = draw(1, 8, 2, 16)
    lengths = torch.tensor([0, 8], dtype=torch.int32)
    namespace = {
        "flash_attn_func": fa2.flash_attn_func,
        "flash_attn_varlen_func": fa2.flash_attn_varlen_func,
        **dict.fromkeys("qkv", q),
        "slopes": torch.ones(2),
        "varlen": (q[0], q[0], q[0], lengths, lengths, 8, 8),
        "table": torch.zeros(1, 1, dtype=torch.int32),
    }
    error = ImportError if code.startswith("from ") else ValueError
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        exec(code, namespace)


OPTION_CASES = {"dropout_p": 0.1, "softcap": 30.0, "alibi_slopes": torch.ones(2)}


@pytest.mark.parametrize("option", OPTION_CASES)
def test_all_six_functions_refuse_the_missing_options(option):
    q, qkv, kv = draw(8, 2, 16), draw(8, 3, 2, 16), draw(8, 2, 2, 16)
    lengths = torch.tensor([0, 8], dtype=torch.int32)
    calls = {
        "flash_attn_func": [q[None]] * 3,
        "flash_attn_kvpacked_func": [q[None], kv[None]],
        "flash_attn_qkvpacked_func": [qkv[None]],
        "flash_attn_varlen_func": [q, q, q, lengths, lengths, 8, 8],
        "flash_attn_varlen_kvpacked_func": [q, kv, lengths, lengths, 8, 8],
        "flash_attn_varlen_qkvpacked_func": [qkv, lengths, 8],
    }
    for name, arguments in calls.items():
        with pytest.raises(ValueError, match=f"^fa2: {option} must be "):
            getattr(fa2, name)(*arguments, **{option: OPTION_CASES[option]})


def test_the_differences_that_a_cpu_shows():
    q, k = draw(9, 4, 16), draw(4, 2, 16, seed=1).requires_grad_()
    lengths = [torch.tensor([0, n], dtype=torch.int32) for n in (7, 4)]
    out, lse, probabilities = fa2.flash_attn_varlen_func(q, k, k, *lengths, 7, 4, causal=True, return_attn_probs=True)
    assert probabilities is None
    assert (lse[:, :3] == -torch.inf).all(), "three queries before the first key"
    assert (lse[:, 3:7].isfinite()).all()
    assert (lse[:, 7:] == -torch.inf).all(), "past cu_seqlens[-1]"
    assert (out[7:] == 0).all()
    with torch.autocast("cpu", torch.bfloat16):
        assert fa2.flash_attn_varlen_func(q, k, k, *lengths, 7, 4).dtype == torch.bfloat16
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert fa2.flash_attn_func(*[q[None].to(dtype)] * 3).dtype == dtype


def test_index_first_axis():
    x = draw(5, 2, 3).requires_grad_()
    taken = fa2.index_first_axis(x, torch.tensor([3, 0, 3]))
    assert torch.equal(taken, x[[3, 0, 3]])
    taken.sum().backward()
    assert x.grad[:, 0, 0].tolist() == [1, 0, 0, 2, 0]
    with pytest.raises(ValueError, match=r"^fa2: indices must be of shape \(total,\), got \(1, 2\)$"):
        fa2.index_first_axis(x, torch.zeros(1, 2, dtype=torch.int64))


EXAMPLES = re.findall(r"^```python\n(.*?)^```", SECTION, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_the_readmes_examples_run(number):
    namespace: dict = {}
    exec(EXAMPLES[number], namespace)
    assert (namespace["padded"].shape, namespace["qkv"].grad.isfinite().all()) == ((3, 16, 4, 64), True)
