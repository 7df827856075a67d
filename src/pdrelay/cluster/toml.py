"""TOML files into structs, with errors that name file, key, what was found and what is expected."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import msgspec.inspect

from pdrelay.errors import ConfigError

T = TypeVar("T")
Table = dict[str, object]


def read(path: Path) -> dict[str, object]:
    """The tables of a TOML file. Raises ConfigError."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error


def find(kind: str, name: str, package: str, folder: str) -> Path:
    """The path of a file: `name` itself, or one of that name that `package` ships in `folder`.

    Raises ConfigError, naming those there are, for a `kind` of file that is neither.
    """
    path = Path(name)
    if path.suffix == ".toml" or path.exists():
        return path
    directory = Path(str(resources.files(package))) / folder
    shipped = directory / f"{name}.toml"
    if not shipped.is_file():
        names = ", ".join(sorted(file.stem for file in directory.glob("*.toml")))
        raise ConfigError(f"{kind}: found {name!r}, expected a .toml file or one of {names}")
    return shipped


def value(text: str) -> Any:
    """A TOML value, or else plain text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def table(header: str, entries: Table) -> Iterator[str]:
    """Lines of a table with its `[header]`, an empty line before it."""
    yield ""
    yield header
    for key, entry in entries.items():
        yield f"{key} = {text_of(entry)}"


def text_of(entry: object) -> str:
    """TOML of strings, numbers, truth values, lists and inline tables."""
    if isinstance(entry, dict):
        return "{ " + ", ".join(f"{key} = {text_of(each)}" for key, each in entry.items()) + " }"
    if isinstance(entry, list):
        return "[" + ", ".join(map(text_of, entry)) + "]"
    return json.dumps(entry, ensure_ascii=False)  # the escapes of JSON strings are TOML's


def convert(path: Path, raw: dict[str, object], kind: type[T]) -> T:
    """`raw`, read from `path`, as a struct. Raises ConfigError naming the first key that does not fit."""
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {_explain(kind, raw, str(error))}") from error


_ERROR = re.compile(r"(?P<what>.*?)(?: - at `\$(?P<path>.*)`)?", re.DOTALL)


def _explain(struct: type, raw: object, message: str) -> str:
    """Turns msgspec's message into `key: found ..., expected ...`."""
    match = _ERROR.fullmatch(message)
    assert match is not None
    what, path = match["what"], (match["path"] or "").lstrip(".")
    if "unknown field" in what or "missing required field" in what:
        key = ".".join(filter(None, (path, what.rsplit("`", 2)[1])))
        if "unknown" in what:
            return f"{key}: found a key that nothing reads, expected no such key (is it misspelt?)"
        return f"{key}: found nothing, expected a value (the key is required)"
    expected = what.partition(", got ")[0].removeprefix("Expected ").replace("`", "")
    if "Invalid enum value" in what:
        expected = "one of " + ", ".join(_allowed(struct, path))
    return f"{path or 'file'}: found {_lookup(raw, path)!r}, expected {expected}"


def _allowed(struct: type, path: str) -> list[str]:
    """The values that the choice at `path` allows."""
    kind: Any = msgspec.inspect.type_info(struct)
    for name, _ in _STEP.findall(path):
        kind = next(f.type for f in kind.fields if f.name == name) if name else kind.item_type
    return [str(value) for value in (kind.values if hasattr(kind, "values") else [m.value for m in kind.cls])]


_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")


def _lookup(raw: object, path: str) -> object:
    for name, index in _STEP.findall(path):
        try:
            raw = raw[int(index)] if index else raw[name]  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            return None
    return raw
