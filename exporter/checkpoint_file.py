"""What every checkpoint file shares, whatever its form: the entries read from it, and the checks before it is read."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.json_files import no_duplicates

if TYPE_CHECKING:
    import torch

MAX_HEADER_BYTES = 100_000_000  # safetensors header, index JSON, and the pickled record of a torch file
MAX_LISTED = 8
COPY_AGAIN = "download or copy the file again and compare its size with the source"


@dataclass(frozen=True)
class Entry:
    """One named tensor: where it lies, what it is, and how to read it.

    is_mapped: whether `read` gives the file's own bytes, rather than a copy of them
    """

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]
    is_mapped: bool = False


@dataclass
class Contents:
    """What one file holds, before shards are joined and int8 rows paired."""

    entries: dict[str, Entry]
    metadata: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def path_status(path: Path) -> os.stat_result:
    """Status of an existing file or folder; distinct errors for every way of not being one."""
    if "\0" in str(path):
        raise ToprovarError(f"checkpoint path {str(path)!r} holds a NUL character", "pass the path of a file or folder")
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        if path.is_symlink():
            raise ToprovarError(
                f"checkpoint {path} is a symbolic link to {os.readlink(path)}, which doesn't exist",
                "restore the link's target, or pass the file itself",
            ) from None
        hint = "check the spelling; relative paths start at the current folder"
        if os.sep != "\\" and "\\" in str(path):
            hint = "write the path with forward slashes: a backslash is part of a name on this system"
        raise ToprovarError(f"checkpoint {path} doesn't exist", hint) from None
    except OSError as fault:
        raise unreadable(path, fault) from None
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise ToprovarError(
            f"checkpoint {path} is neither a file nor a folder: found a pipe, socket or device",
            "write the data to a file first",
        )
    return status


def unreadable(path: Path, fault: OSError) -> ToprovarError:
    if isinstance(fault, PermissionError):
        return ToprovarError(
            f"checkpoint {path} can't be read: permission denied",
            f"give this user the right to read it:  chmod u+r {path}  (and u+x on its folders)",
        )
    reason = (fault.strerror or str(fault)).lower()
    return ToprovarError(f"checkpoint {path} can't be read: {reason}", "check the path and the disk it lies on")


def readable_size(path: Path) -> int:
    """Size in bytes of a file that can be opened and isn't empty."""
    if stat.S_ISDIR(path_status(path).st_mode):
        raise ToprovarError(
            f"checkpoint file {path} is a folder; expected a file", "pass a path to one checkpoint file"
        )
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
    except OSError as fault:
        raise unreadable(path, fault) from None
    if size == 0:
        raise ToprovarError(f"checkpoint {path} is empty: found 0 bytes", COPY_AGAIN)
    return size


def strict_json(raw: bytes) -> Any:
    """The JSON of a header or index.

    Raises: DuplicateKeyError; ValueError or RecursionError if it isn't UTF-8 or JSON, or holds NaN or infinity.
    """
    return json.loads(raw.decode("utf-8"), object_pairs_hook=no_duplicates, parse_constant=_no_constant)


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def listed(names: list[str]) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return (", ".join(names[:MAX_LISTED]) or "nothing") + more


def first_line(fault: BaseException) -> str:
    return (str(fault).strip().splitlines() or [type(fault).__name__])[0][:200]
