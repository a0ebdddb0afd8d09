"""`outrider ngram`: builds and inspects static tables of the n-gram cache.

Trigrams of a piece of text are packed, sorted and counted with numpy. A corpus of any size is
processed in pieces of bounded size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ConfigError
from .console import err, note, say, writing

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

app = typer.Typer(help="Static tables for the n-gram cache.", no_args_is_help=True)

_PIECE_BYTES = 1 << 16
_MAX_TOKEN = 2**21 - 1  # three of them are packed into 63 bits
_PENDING = 1 << 22  # trigrams collected between merges


@app.command()
def build(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The table's file.")],
    inputs: Annotated[
        list[Path], typer.Option("--input", "-i", help="Text or token files; may be repeated.")
    ],
    tokenizer: Annotated[
        Path, typer.Option("--tokenizer", "-t", help="Folder of the model or its tokenizer.")
    ],
    more: Annotated[
        list[Path] | None, typer.Argument(metavar="[FILES]...", help="More inputs.")
    ] = None,
    tokens: Annotated[
        bool,
        typer.Option("--tokens", help="Inputs are token ids: .npy, or numbers between spaces."),
    ] = False,
    min_count: Annotated[
        int, typer.Option(min=1, help="Continuations seen less often are left out.")
    ] = 1,
) -> None:
    """Counts the tokens that follow every two tokens of a corpus, for `--lookup-cache-static`."""
    from ..config.files import check_writable
    from ..drafters.lookup.ngram_file import save
    from ..drafters.vocabulary import fingerprint

    paths = [*inputs, *(more or [])]
    check_writable(out, "OUT")
    mark = fingerprint(tokenizer)
    encode, vocab_size = _encoder(tokenizer)
    counter, start = _Counter(), time.perf_counter()
    with _progress(sum(_size(path) for path in paths)) as advance:
        for path in paths:
            pieces = _token_pieces(path) if tokens else _text_pieces(path, encode)
            counter.count(path, pieces, vocab_size, advance)
    arrays = counter.arrays(min_count)
    if not len(arrays.keys):
        often = f"{min_count} times" if min_count > 1 else "once"
        raise ConfigError.at("--input", f"no three tokens in a row are in the text {often}")
    facts = {"kind": "static", "num_tokens": counter.num_tokens, "num_files": len(paths)}
    with writing(out, "OUT"):
        save(out, [arrays], mark, facts)
    say(
        f"{out}: {len(arrays.keys)} keys, {len(arrays.pairs)} continuations from "
        f"{counter.num_tokens} tokens in {time.perf_counter() - start:.1f} s"
    )


@app.command()
def inspect(file: Annotated[Path, typer.Argument(metavar="FILE", help="A table's file.")]) -> None:
    """Shows the contents of a table after verifying its checksum."""
    from dataclasses import asdict

    import yaml

    from ..drafters.lookup.ngram_file import read

    header, _ = read(file, "FILE")
    shown = asdict(header)
    shown["tables"] = list(shown["tables"])
    say(yaml.safe_dump(shown, sort_keys=False).rstrip())
    note("The file is sound.")


class _Counter:
    """Counts trigrams in packed form."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._pending: list[NDArray[np.int64]] = []
        self._num_pending = 0
        self._keys: Any = None  # sorted, distinct
        self._counts: Any = None

    def count(
        self,
        path: Path,
        pieces: Iterable[tuple[NDArray[np.int64], int]],
        vocab_size: int,
        advance: Callable[[int], None],
    ) -> None:
        """Counts all trigrams of a file, including those across its pieces."""
        import numpy as np

        last = np.zeros(0, dtype=np.int64)
        for ids, num_bytes in pieces:
            if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
                raise ConfigError.at(
                    "--input", f"{path} holds tokens outside the vocabulary of {vocab_size}"
                )
            text = np.concatenate([last, ids])
            if len(text) > 2:
                self._add(text[:-2] << 42 | text[1:-1] << 21 | text[2:])
            last = text[-2:]
            self.num_tokens += len(ids)
            advance(num_bytes)

    def arrays(self, min_count: int) -> Any:
        import numpy as np

        from ..drafters.lookup.ngram_file import Arrays

        self._merge()
        often = self._counts >= min_count
        packed, counts = self._keys[often], self._counts[often]
        keys, sizes = np.unique(packed >> 21, return_counts=True)
        return Arrays(
            "",
            np.stack([keys >> 21, keys & _MAX_TOKEN], axis=1).astype(np.int32),
            sizes.astype(np.int32),
            np.stack([packed & _MAX_TOKEN, np.minimum(counts, 2**31 - 1)], axis=1).astype(np.int32),
        )

    def _add(self, packed: NDArray[np.int64]) -> None:
        self._pending.append(packed)
        self._num_pending += len(packed)
        if self._num_pending > _PENDING:
            self._merge()

    def _merge(self) -> None:
        import numpy as np

        none = np.zeros(0, dtype=np.int64)
        keys, counts = np.unique(np.concatenate([none, *self._pending]), return_counts=True)
        self._pending, self._num_pending = [], 0
        if self._keys is None:
            self._keys, self._counts = keys, counts
            return
        every, where = np.unique(np.concatenate([self._keys, keys]), return_inverse=True)
        self._counts = np.bincount(
            where, np.concatenate([self._counts, counts]), len(every)
        ).astype(np.int64)
        self._keys = every


def _encoder(folder: Path) -> tuple[Callable[[str], list[int]], int]:
    """Returns the function that encodes text, and the size of the vocabulary."""
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json" if folder.is_dir() else folder
    tokenizer = Tokenizer.from_file(str(file))
    size: int = tokenizer.get_vocab_size(with_added_tokens=True)
    if size > _MAX_TOKEN:
        raise ConfigError.at("--tokenizer", f"a vocabulary of {size} tokens; at most {_MAX_TOKEN}")
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids), size


def _text_pieces(
    path: Path, encode: Callable[[str], list[int]]
) -> Iterator[tuple[NDArray[np.int64], int]]:
    """Yields the tokens of a text file in pieces of some lines, with each piece's size in bytes."""
    import numpy as np

    try:
        with path.open(encoding="utf-8") as file:
            while lines := file.readlines(_PIECE_BYTES):
                text = "".join(lines)
                yield np.array(encode(text), dtype=np.int64), len(text.encode())
    except UnicodeDecodeError as error:
        raise ConfigError.at("--input", f"{path} is not UTF-8: {error}") from None


def _token_pieces(path: Path) -> Iterator[tuple[NDArray[np.int64], int]]:
    """Yields the token ids of a file."""
    import numpy as np

    try:
        if path.suffix == ".npy":
            with path.open("rb") as file:
                stored = np.lib.format.read_array(file, allow_pickle=False).ravel()
            if stored.dtype.kind not in "iu":
                raise ValueError(f"its numbers are {stored.dtype}, not integers")
            ids = stored.astype(np.int64)
        else:
            ids = np.array(path.read_text().split(), dtype=np.int64)
    except (ValueError, OverflowError, EOFError) as error:
        raise ConfigError.at("--input", f"{path} holds no token ids: {error}") from None
    yield ids, _size(path)


def _size(path: Path) -> int:
    try:
        if not path.is_file():
            raise ConfigError.at("--input", f"{path} is not a file")
        return path.stat().st_size
    except OSError as error:
        raise ConfigError.at("--input", f"{path}: {error.strerror}") from None


@contextmanager
def _progress(num_bytes: int) -> Iterator[Callable[[int], None]]:
    """Shows a progress bar over the input's bytes on stderr."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("Counting"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err()) as progress:
        task = progress.add_task("", total=num_bytes)
        yield lambda size: progress.advance(task, size)
