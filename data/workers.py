"""Tokenizing in several processes, in order.

Workers are plain `python -c` processes that speak pickles over pipes. `multiprocessing` would import the parent's
`__main__` in each of them: seconds of torch and Lightning for a launcher, and trouble for an unguarded script.
Must not import torch.
"""

from __future__ import annotations

import os
import pickle
import signal
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, TypeVar

import numpy as np

from data.tokenizer import Tokenizer

Item = TypeVar("Item")
Encoded = tuple[np.ndarray, np.ndarray]


def encode_documents(tokenizer: Tokenizer, texts: list[bytes]) -> Encoded:
    """Encodes UTF-8 texts as documents.

    Returns:
        ids of all documents side by side, each `[EOT] text [EOT]`, in the tokenizer's dtype; ids of each, (n,) int64.

    Raises:
        ValueError: the tokenizer gave an id outside its vocabulary, or end of text inside a text.
    """
    eot = tokenizer.eot_id
    encoded = tokenizer.encode_batch([text.decode() for text in texts])
    lengths = np.array([len(ids) + 2 for ids in encoded], dtype=np.int64)
    flat = np.empty(int(lengths.sum()), dtype=np.int64)
    end = 0
    for ids in encoded:
        start, end = end, end + len(ids) + 2
        flat[start] = flat[end - 1] = eot
        flat[start + 1 : end - 1] = ids
    if len(flat) and flat.max() >= tokenizer.vocab_size:
        raise ValueError(
            f"token ids must be below the tokenizer's vocabulary of {tokenizer.vocab_size}, got {flat.max()}"
        )
    if np.count_nonzero(flat == eot) != 2 * len(texts):
        raise ValueError(
            f"tokenizer.end_of_text must be a token that text never encodes to, got {tokenizer.end_of_text!r}"
        )
    return flat.astype(tokenizer.dtype), lengths


def encode_in_order(
    tokenizer: Tokenizer, items: Iterable[Item], texts: Callable[[Item], list[bytes]], processes: int
) -> Iterator[tuple[Item, Encoded]]:
    """Encodes the texts of each item, in `processes` processes; one process is this one. Results keep the order."""
    if processes == 1:
        for item in items:
            yield item, encode_documents(tokenizer, texts(item))
        return
    workers = [_Worker(tokenizer) for _ in range(processes)]
    idle: SimpleQueue[_Worker] = SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def encode(batch: list[bytes]) -> Encoded:
        worker = idle.get()
        try:
            return worker.encode(batch)
        finally:
            idle.put(worker)

    executor = ThreadPoolExecutor(processes)
    pending: deque[tuple[Item, Future[Encoded]]] = deque()
    try:
        for item in items:
            pending.append((item, executor.submit(encode, texts(item))))
            if len(pending) >= 2 * processes:
                first, future = pending.popleft()
                yield first, future.result()
        while pending:
            first, future = pending.popleft()
            yield first, future.result()
    finally:
        for worker in workers:
            worker.stop()
        executor.shutdown(cancel_futures=True)


class _Worker:
    def __init__(self, tokenizer: Tokenizer):
        root = str(Path(__file__).resolve().parent.parent)
        # Each worker is one core's share: the tokenizer's own threads would fight over the cores.
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
        program = f"import sys; sys.path.insert(0, {root!r}); from data.workers import serve; serve()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        self._first: tuple[str, str] | None = (tokenizer.to_json(), tokenizer.end_of_text)

    def encode(self, texts: list[bytes]) -> Encoded:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            if self._first is not None:
                _send(self._process.stdin, self._first)
                self._first = None
            _send(self._process.stdin, texts)
            answer = _receive(self._process.stdout)
        except (EOFError, OSError):
            code = self._process.wait()
            raise RuntimeError(f"a tokenizer process ended with exit code {code} (killed, or out of memory?)") from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # what was still buffered has no reader any more
                    pipe.close()


def _send(pipe: IO[bytes], value: Any) -> None:
    data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    pipe.write(struct.pack("<Q", len(data)))
    pipe.write(data)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> Any:
    header = pipe.read(8)
    if len(header) < 8:
        raise EOFError
    (size,) = struct.unpack("<Q", header)
    data = pipe.read(size)
    if len(data) < size:
        raise EOFError
    return pickle.loads(data)


def serve() -> None:
    """The worker's loop: a tokenizer first, then batches of texts, until the parent closes the pipe or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a stray print must not end up between the answers
    requests = sys.stdin.buffer
    try:
        tokenizer = Tokenizer.from_json(*_receive(requests))
        while True:
            texts = _receive(requests)
            try:
                answer: Any = encode_documents(tokenizer, texts)
            except Exception as error:
                answer = error
            _send(answers, answer)
    except (EOFError, BrokenPipeError):
        pass
