from __future__ import annotations

import numpy as np
import pytest

from data.config import TokenizerConfig
from data.tokenizer import END_OF_TEXT, IdTokenizer, Tokenizer
from data.workers import encode_documents, encode_in_order

TEXTS = [f"def f{i}(x):\n    return x + {i}  # caf\u00e9 \u4f60\u597d\n" for i in range(200)]


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return Tokenizer.train(TEXTS, TokenizerConfig(vocab_size=400))


@pytest.mark.parametrize(
    "text", ["", "plain", "  tabs\t and\n\n newlines \r\n", "\u0000\u00ff\U0001f600 é\u0301", "x" * 5000, END_OF_TEXT]
)
def test_round_trip(trained: Tokenizer, text: str):
    assert trained.decode(trained.encode(text)) == text


def test_training_is_deterministic(trained: Tokenizer):
    again = Tokenizer.train(iter(TEXTS), TokenizerConfig(vocab_size=400))
    assert again.to_json() == trained.to_json()
    assert again.fingerprint == trained.fingerprint
    other = Tokenizer.train(TEXTS[:50], TokenizerConfig(vocab_size=300))
    assert other.fingerprint != trained.fingerprint


def test_vocabulary_is_as_asked(trained: Tokenizer):
    assert trained.vocab_size == 400
    assert trained.eot_id == 0
    assert trained.dtype == np.uint16
    # Too little text for more pairs: the vocabulary that there is, not the one asked for.
    assert Tokenizer.train(["ab"], TokenizerConfig(vocab_size=400)).vocab_size == 258


def test_saved_tokenizer_is_the_same(trained: Tokenizer, tmp_path):
    trained.save(tmp_path / "deep" / "tokenizer.json")
    loaded = Tokenizer.from_file(tmp_path / "deep" / "tokenizer.json")
    assert loaded.fingerprint == trained.fingerprint
    assert loaded.encode_batch(TEXTS) == trained.encode_batch(TEXTS)


def test_document_cannot_inject_the_end_of_text(trained: Tokenizer):
    text = f"before {END_OF_TEXT} after{END_OF_TEXT}"
    assert trained.eot_id not in trained.encode(text)
    assert all(trained.eot_id not in ids for ids in trained.encode_batch([text]))
    ids, lengths = encode_documents(trained, [text.encode(), b"second"])
    assert np.flatnonzero(ids == trained.eot_id).tolist() == [0, lengths[0] - 1, lengths[0], len(ids) - 1]
    assert trained.decode(ids[: lengths[0]]) == text


@pytest.mark.parametrize("special", [True, False])
def test_injection_into_a_foreign_tokenizer(special: bool, tmp_path):
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Inner

    Tokenizer.train(TEXTS, TokenizerConfig(vocab_size=300)).save(tmp_path / "t.json")
    inner = Inner.from_file(str(tmp_path / "t.json"))
    token = AddedToken("<end>", special=special, normalized=False)
    inner.add_special_tokens([token]) if special else inner.add_tokens([token])
    inner.enable_truncation(4)
    inner.enable_padding(length=64)
    inner.save(str(tmp_path / "foreign.json"))
    foreign = Tokenizer.from_file(tmp_path / "foreign.json", "<end>")
    text = f"a <end> b {END_OF_TEXT} and longer than four tokens"
    assert foreign.eot_id == 300
    assert foreign.eot_id not in foreign.encode(text)
    assert foreign.decode(foreign.encode(text)) == text


def test_ids_above_65535_are_uint32():
    assert IdTokenizer(65_536).dtype == np.uint16
    assert IdTokenizer(65_537).dtype == np.uint32


def test_id_tokenizer_text_is_its_ids(tmp_path):
    tokenizer = IdTokenizer(100)
    assert tokenizer.decode(tokenizer.encode("4 8 15")) == "4 8 15"
    with pytest.raises(ValueError, match="decimal ids below 99"):
        tokenizer.encode("def main():")
    tokenizer.save(tmp_path / "t.json")
    assert Tokenizer.from_file(tmp_path / "t.json").fingerprint == tokenizer.fingerprint


def test_missing_end_of_text_names_the_key(trained: Tokenizer, tmp_path):
    trained.save(tmp_path / "t.json")
    with pytest.raises(ValueError, match=r"tokenizer\.end_of_text must be a token of the tokenizer, got '</s>'"):
        Tokenizer.from_file(tmp_path / "t.json", "</s>")


@pytest.mark.parametrize("contents", [None, "no json", "{}"])
def test_unusable_file_names_the_key(contents: str | None, tmp_path):
    if contents is not None:
        (tmp_path / "t.json").write_text(contents)
    with pytest.raises(ValueError, match=r"tokenizer\.path must be .*t\.json"):
        Tokenizer.from_file(tmp_path / "t.json")


def test_hub_name_that_cannot_be_loaded_names_the_key(monkeypatch):
    import tokenizers

    def unreachable(name):
        raise OSError("no connection")

    class Inner:
        from_pretrained = staticmethod(unreachable)

    monkeypatch.setattr(tokenizers, "Tokenizer", Inner)
    with pytest.raises(ValueError, match=r"tokenizer\.name .*'some/model' \(no connection\)"):
        Tokenizer.from_hub("some/model")


def test_hub_name_is_loaded(monkeypatch, trained: Tokenizer):
    import tokenizers

    inner = tokenizers.Tokenizer.from_str(trained.to_json())
    monkeypatch.setattr(tokenizers.Tokenizer, "from_pretrained", staticmethod(lambda name: inner), raising=False)
    assert Tokenizer.from_hub("some/model").fingerprint == trained.fingerprint


class _BrokenTokenizer(IdTokenizer):
    def encode_batch(self, texts):
        return [[7, 100 if text == "too high" else self.eot_id] for text in texts]


def test_id_beyond_the_vocabulary_names_both():
    with pytest.raises(ValueError, match="vocabulary of 50, got 100"):
        encode_documents(_BrokenTokenizer(50), [b"too high"])
    with pytest.raises(ValueError, match=r"tokenizer\.end_of_text must be a token that text never encodes to"):
        encode_documents(_BrokenTokenizer(50), [b"end of text"])


def test_processes_give_what_one_process_gives(trained: Tokenizer):
    items = [[text.encode() for text in TEXTS[i : i + 7]] for i in range(0, len(TEXTS), 7)]
    alone = list(encode_in_order(trained, items, lambda item: item, 1))
    spread = list(encode_in_order(trained, items, lambda item: item, 2))
    assert [item for item, _ in spread] == items
    for (_, (ids, lengths)), (_, (other_ids, other_lengths)) in zip(alone, spread, strict=True):
        np.testing.assert_array_equal(ids, other_ids)
        np.testing.assert_array_equal(lengths, other_lengths)


def test_error_in_a_process_is_raised_here(trained: Tokenizer):
    with pytest.raises(UnicodeDecodeError):
        list(encode_in_order(trained, [[b"fine"], [b"\xff"]], lambda item: item, 2))
