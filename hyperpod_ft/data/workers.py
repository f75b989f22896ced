"""Chunks tokenized in several processes, whose number does not change the results or their order."""

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from hyperpod_ft.config.sections.inputs import Dataset
from hyperpod_ft.data.encoder import Encoder
from hyperpod_ft.data.reading import Chunk
from hyperpod_ft.data.tokenization import TokenizedChunk, tokenize_chunk
from hyperpod_ft.errors import UserError
from hyperpod_ft.processes import usable_cpus

# 4 MB of text: less is tokenized in the time that a process takes to start and to send its results. Images take more.
_CHUNKS_WORTH_A_PROCESS = 16


def tokenize_all(
    directory: Path, chunks: Sequence[Chunk], dataset: Dataset, encoder: Encoder
) -> Iterator[TokenizedChunk]:
    """Each chunk tokenized, in order. Raises what `tokenize_chunk` raises, and UserError when a process is killed."""
    # One thread per process: there is a process per CPU, and forking is safe only without threads.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    worth = 1 if dataset.images else _CHUNKS_WORTH_A_PROCESS
    count = min(dataset.workers or min(usable_cpus(), len(chunks) // worth), len(chunks))
    if count > 1:
        yield from _in_processes(count, directory, chunks, dataset, encoder)
    else:
        for chunk in chunks:
            yield tokenize_chunk(directory, chunk, dataset, encoder)


def _in_processes(
    count: int, directory: Path, chunks: Sequence[Chunk], dataset: Dataset, encoder: Encoder
) -> Iterator[TokenizedChunk]:
    import multiprocessing  # noqa: PLC0415 - small data does not need these
    from concurrent.futures import ProcessPoolExecutor  # noqa: PLC0415
    from concurrent.futures.process import BrokenProcessPool  # noqa: PLC0415

    # A forked process already has the tokenizer; a spawned one (macOS) receives it.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    executor = ProcessPoolExecutor(count, context, _begin, (directory, dataset, encoder))
    try:
        yield from executor.map(_tokenize, chunks)
    except BrokenProcessPool as error:
        raise UserError(
            "a tokenizing process was killed, probably for lack of memory",
            "lower dataset.workers or give the job more memory",
        ) from error
    finally:
        executor.shutdown(cancel_futures=True)


class _Work:
    """The arguments of every call in a worker process."""

    directory: Path
    dataset: Dataset
    encoder: Encoder


def _begin(directory: Path, dataset: Dataset, encoder: Encoder) -> None:
    import threading  # noqa: PLC0415

    _Work.directory, _Work.dataset, _Work.encoder = directory, dataset, encoder
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    import multiprocessing  # noqa: PLC0415
    from multiprocessing.connection import wait  # noqa: PLC0415

    # After a kill -9 of the stage, the workers would otherwise wait forever.
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _tokenize(chunk: Chunk) -> TokenizedChunk:
    return tokenize_chunk(_Work.directory, chunk, _Work.dataset, _Work.encoder)
