"""Lines of a trace file, gzip or plain, with errors that say line, field, what was found and what is expected."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from pdrelay.errors import ConfigError


class RowError(Exception):
    """One row cannot be used. `field` is empty when the whole row is meant."""

    def __init__(self, field: str, found: object, expected: str) -> None:
        super().__init__(f"{field or 'row'}: found {found!r}, expected {expected}")


class Complaints:
    """Bad rows: the first ends the reading, unless they are to be skipped."""

    KEPT = 5

    def __init__(self, path: Path, skip: bool) -> None:
        self.count, self.first = 0, []  # type: int, list[str]
        self._path, self._skip = path, skip

    def add(self, line: int, message: object) -> None:
        """Notes one bad row. Raises ConfigError unless bad rows are skipped."""
        text = f"{self._path}:{line}: {message}"
        if not self._skip:
            raise ConfigError(f"{text} (--skip-bad reads on without it)")
        self.count += 1
        if len(self.first) < self.KEPT:
            self.first.append(text)


def lines(path: Path, complaints: Complaints) -> Iterator[tuple[int, str]]:
    """Numbered lines that are not blank. A file that ends early is one bad row; what came before it was given."""
    number = 0
    try:
        with _open(path) as file:
            for number, raw in enumerate(file, start=1):
                try:
                    text = raw.decode().strip()
                except UnicodeDecodeError as error:
                    complaints.add(number, f"row: found byte {raw[error.start]:#04x}, expected UTF-8")
                    continue
                if text:
                    yield number, text
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        complaints.add(number + 1, f"file: found {str(error).lower()}, expected a whole gzip file")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error


def _open(path: Path) -> gzip.GzipFile | IO[bytes]:
    with path.open("rb") as file:
        zipped = file.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rb") if zipped else path.open("rb")


def number_of(row: dict[str, object], field: str, scale: float = 1.0, least: float = 0.0) -> float:
    """The finite number in `field`, times `scale`. Raises RowError."""
    value = row.get(field)
    try:
        number = float(value)  # type: ignore[arg-type]  # what does not convert is reported
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool) or not math.isfinite(number) or number < least:
        raise RowError(field, value, f"a number, at least {least:g}")
    return number * scale


def count_of(row: dict[str, object], field: str, least: int = 1) -> int:
    """The whole number in `field`. Raises RowError."""
    number = number_of(row, field, least=least)
    if number != int(number):
        raise RowError(field, row.get(field), f"a whole number, at least {least}")
    return int(number)
