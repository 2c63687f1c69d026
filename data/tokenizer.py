"""Text to token ids and back: a byte-level BPE trained here, a tokenizer.json, or a hub name.

Must not import torch: the tokenizer processes of `workers.py` load this file and nothing heavier.
Read next: `prepare.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data.config import TokenizerConfig

END_OF_TEXT = TokenizerConfig.end_of_text


class Tokenizer:
    """A Hugging Face `tokenizers` tokenizer that never turns text into the end-of-text token.

    The literal characters of a special token inside a document are encoded as ordinary text: otherwise a document
    that quotes "<|endoftext|>" would end in its middle.
    """

    is_text = True  # False: ids stand for no text (synthetic data)

    def __init__(self, inner: Any, end_of_text: str = END_OF_TEXT):
        eot_id = inner.token_to_id(end_of_text)
        if eot_id is None:
            raise ValueError(f"tokenizer.end_of_text must be a token of the tokenizer, got {end_of_text!r}")
        # Truncation and padding stored in a tokenizer.json would cut or lengthen documents.
        inner.no_truncation()
        inner.no_padding()
        added = inner.get_added_tokens_decoder().get(eot_id)
        if added is None or not added.special:
            # Only tokens marked special obey `encode_special_tokens`; marking keeps the id.
            inner.add_special_tokens([end_of_text])
        inner.encode_special_tokens = True
        self._inner = inner
        self.end_of_text = end_of_text
        self.eot_id: int = eot_id
        # Ids may have gaps, so the number of tokens is not always the bound of the ids.
        self.vocab_size: int = max(inner.get_vocab(with_added_tokens=True).values()) + 1
        canonical = json.dumps(json.loads(inner.to_str()), sort_keys=True, separators=(",", ":"))
        self.fingerprint: str = hashlib.sha256(f"{end_of_text}\0{canonical}".encode()).hexdigest()[:32]

    @classmethod
    def from_file(cls, path: str | Path, end_of_text: str = END_OF_TEXT) -> Tokenizer:
        """Loads a tokenizer.json.

        Raises:
            ValueError: the file is missing or no tokenizer.json, or lacks the end-of-text token.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"tokenizer.path must be a readable tokenizer.json, got {str(path)!r} ({error})") from None
        return cls.from_json(text, end_of_text, str(path))

    @classmethod
    def from_json(cls, text: str, end_of_text: str = END_OF_TEXT, name: str = "text") -> Tokenizer:
        if text.startswith(_IDS_HEADER):
            return IdTokenizer(json.loads(text)["vocab_size"])
        from tokenizers import Tokenizer as Inner

        try:
            inner = Inner.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"tokenizer.path must be a tokenizer.json, got {name!r} ({error})") from None
        return cls(inner, end_of_text)

    @classmethod
    def from_hub(cls, name: str, end_of_text: str = END_OF_TEXT) -> Tokenizer:
        """Downloads the tokenizer of a Hugging Face model (or finds it in the hub's own cache)."""
        from tokenizers import Tokenizer as Inner

        try:
            inner = Inner.from_pretrained(name)
        except Exception as error:  # the library raises bare Exception
            reason = " ".join(str(error).split())
            raise ValueError(f"tokenizer.name must be a model with a tokenizer.json, got {name!r} ({reason})") from None
        return cls(inner, end_of_text)

    @classmethod
    def train(cls, texts: Iterable[str], config: TokenizerConfig) -> Tokenizer:
        """Trains a byte-level BPE of `config.vocab_size` ids, end of text included as id 0.

        The same texts in the same order give the same tokenizer. It has fewer ids where the text has too few pairs.
        """
        from tokenizers import Tokenizer as Inner
        from tokenizers import decoders, models, pre_tokenizers, trainers

        inner = Inner(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=config.vocab_size,
            special_tokens=[config.end_of_text],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        inner.train_from_iterator(texts, trainer)
        return cls(inner, config.end_of_text)

    @property
    def dtype(self) -> np.dtype:
        """The smallest of uint16 and uint32 that holds every id."""
        return np.dtype(np.uint16 if self.vocab_size <= 65_536 else np.uint32)

    def encode(self, text: str) -> list[int]:
        """Ids of the text alone, without end of text or any other special token."""
        return self._inner.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [e.ids for e in self._inner.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; end-of-text tokens are left out."""
        kept = [int(i) for i in ids if i != self.eot_id]
        return self._inner.decode(kept, skip_special_tokens=False)

    def to_json(self) -> str:
        return self._inner.to_str(pretty=True)

    def save(self, path: str | Path) -> None:
        """Writes a tokenizer.json, atomically."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        partial.write_text(self.to_json(), encoding="utf-8")
        os.replace(partial, path)


_IDS_HEADER = '{"type": "ids"'


class IdTokenizer(Tokenizer):
    """Stands in where ids mean no text (synthetic data): its text is the ids as decimal numbers."""

    is_text = False

    def __init__(self, vocab_size: int):
        self.end_of_text = END_OF_TEXT
        self.vocab_size = vocab_size
        self.eot_id = vocab_size - 1
        self.fingerprint = hashlib.sha256(f"ids {vocab_size}".encode()).hexdigest()[:32]

    def encode(self, text: str) -> list[int]:
        words = text.split()
        if not all(word.isdecimal() and int(word) < self.eot_id for word in words):
            raise ValueError(f"text for data.source=synthetic must be decimal ids below {self.eot_id}, got {text!r}")
        return [int(word) for word in words]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(str(int(i)) for i in ids if i != self.eot_id)

    def to_json(self) -> str:
        return json.dumps({"type": "ids", "vocab_size": self.vocab_size})
