"""Small JSON files: bounded and strict when read, complete or absent when written."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from toprovar.runtime.errors import ToprovarError

MAX_NAME_BYTES = 255  # of one part of a path, on every file system that matters
MAX_JSON_BYTES = 64 * 2**20


class DuplicateKeyError(ValueError):
    def __init__(self, key: str) -> None:
        super().__init__(f"key {key!r} stands twice in one object")
        self.key = key


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Hook of `json.loads` for objects. Raises: DuplicateKeyError."""
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if key in seen:
            raise DuplicateKeyError(key)
        seen[key] = value
    return seen


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"number {text} is out of range")
    return value


def parse_json(text: str, what: str) -> Any:
    """Strict JSON: no NaN or infinity, no duplicate keys.

    Raises: ToprovarError with the place of the fault.
    """
    try:
        return json.loads(text, object_pairs_hook=no_duplicates, parse_constant=_no_constant, parse_float=_finite)
    except RecursionError:
        raise ToprovarError(f"{what} is not valid JSON: nested too deeply", "check that it is the right file") from None
    except ValueError as error:
        raise ToprovarError(f"{what} is not valid JSON: {error}", "make the file again, or restore it") from None


def read_text(path: Path, what: str, max_bytes: int, kind: str = "text") -> str:
    """A whole UTF-8 file of bounded size, with or without byte order mark; never reads further than the bound.

    what, kind: how messages name the file, its path included, and what it should be
    Raises: ToprovarError if it is missing, a folder, unreadable, too large or not UTF-8.
    """
    try:
        with open(path, "rb") as file:
            raw = file.read(max_bytes + 1)  # the size that the system tells is 0 for devices and pipes
    except FileNotFoundError:
        raise ToprovarError(f"{what} does not exist", "check the path") from None
    except IsADirectoryError:
        raise ToprovarError(f"{what} is a folder; expected a {kind} file", "pass the file itself") from None
    except OSError as error:
        raise ToprovarError(f"{what} cannot be read: {error.strerror}", "check its permissions") from None
    if len(raw) > max_bytes:
        raise ToprovarError(
            f"{what} has more than {max_bytes} bytes; expected at most {max_bytes}", "check that it is the right file"
        )
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ToprovarError(
            f"{what} is not UTF-8 text (byte {error.start})", "check that it is the right file"
        ) from None


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Reads a JSON file of bounded size.

    Raises: ToprovarError as `read_text` does, and if it is empty or not strict JSON.
    """
    text = read_text(path, str(path), max_bytes, "JSON")
    if not text:
        raise ToprovarError(f"{path} is empty; expected a JSON document", "make the file again")
    return parse_json(text, str(path))


def check_folder(folder: Path) -> None:
    """Refuses, before long work, a folder that files could not be written into later. Makes nothing.

    Raises: ToprovarError if the folder, or the nearest one above it that exists, is a file or takes no files.
    """
    hint = "choose another place with --out, or mend its permissions"
    place = folder.absolute()
    try:
        while not os.path.lexists(place):
            if place.parent == place:
                break
            place = place.parent
        if not place.is_dir():
            kind = "a file" if place.exists() else "a symbolic link to nothing"
            raise ToprovarError(f"{folder} cannot be a folder: {place} is {kind}", hint)
        with tempfile.TemporaryFile(dir=place):
            pass
        for part in folder.absolute().relative_to(place).parts:
            if len(os.fsencode(part)) > MAX_NAME_BYTES:
                raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    except OSError as error:
        shown = str(folder) if len(str(folder)) <= MAX_NAME_BYTES else f"{str(folder)[:MAX_NAME_BYTES]}…"
        raise ToprovarError(f"{shown} cannot be written: {error.strerror}", hint) from None


def check_replaceable(path: Path) -> None:
    """Refuses what must not be replaced by a file: a folder, a device, a pipe, also behind a symbolic link.

    Raises: ToprovarError naming what is there.
    """
    if path.exists() and not path.is_file():
        kind = "folder" if path.is_dir() else "device or pipe"
        raise ToprovarError(f"{path} cannot be written: it is a {kind}; a file is expected", "name a file with --out")


def write_bytes(path: Path, data: bytes) -> None:
    """Writes under a temporary name and renames: the file is complete or absent.

    Raises: ToprovarError if the place cannot be written.
    """
    check_replaceable(path)
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name[:64]}.", dir=path.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except OSError as error:
        raise ToprovarError(
            f"{path} cannot be written: {error.strerror}", "choose another place with --out, or mend its permissions"
        ) from None
    finally:
        if temporary and os.path.exists(temporary):
            os.unlink(temporary)


def write_json(path: Path, value: Any) -> None:
    """Writes indented UTF-8 JSON atomically; NaN is a fault of ours and raises ValueError."""
    write_bytes(path, (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())
