"""The folder that an export writes: made beside its final name, and swapped in when it is whole.

Nothing that an export did not write is ever lost: a folder is replaced only if it holds a former export alone.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.json_files import check_folder, read_json
from toprovar.runtime.manifest import ENGINES_FOLDER, MANIFEST_FILE

WORK_FOLDER = ".building"  # where engines wait until all are there


def check_out(out: Path, overwrite: bool = True, marker: str = MANIFEST_FILE) -> Path:
    """Whether a bundle may be written to `out`: it is new, empty, or holds a bundle and nothing else.

    marker:  the file that tells what the folder holds
    Returns: the folder itself, symbolic links followed.
    Raises:  ToprovarError with the first file that would be lost, or why the place cannot be written.
    """
    try:
        place = out.resolve()
    except (OSError, RuntimeError):  # a link to itself
        raise ToprovarError(
            f"{out} cannot be resolved: its symbolic links form a loop", "choose another --out"
        ) from None
    here = Path.cwd()
    if place == here or place in here.parents:
        raise ToprovarError(f"{out} is the current folder, or above it; a bundle replaces its folder", "name a new one")
    check_folder(place.parent)
    if not place.parent.is_dir():
        return place
    with _alone_in(place.parent):
        _check_replaceable(out, place, overwrite, marker)
    return place


def _check_replaceable(out: Path, place: Path, overwrite: bool, marker: str) -> None:
    if not place.exists():
        return
    check_folder(place)
    holds = sorted(path.name for path in place.iterdir())
    if holds:
        own = _files_of(place, marker)
        if own is None:
            raise ToprovarError(
                f"{out} is not empty and no bundle (it holds {holds[0]}); it is left alone", "choose another --out"
            )
        if foreign := [name for name in holds if name not in own] + _foreign_engines(place, own):
            raise ToprovarError(
                f"{out} holds {foreign[0]}, which is no part of the bundle there; it is left alone",
                "move it away, or choose another --out",
            )
        if not overwrite:
            raise ToprovarError(f"{out} already holds a bundle", "choose another --out, or pass --overwrite")
        with alone_with(place):  # whose engines nobody is building
            pass


def _files_of(folder: Path, marker: str) -> set[str] | None:
    """Names of the files that a former export wrote into a folder; None if none did."""
    try:
        facts = read_json(folder / marker)
    except ToprovarError:
        return None
    key = "files" if marker == MANIFEST_FILE else "graphs"
    is_ours = isinstance(facts, dict) and {"schema_version", "tool_version", key} <= facts.keys()
    return {marker, ENGINES_FOLDER, *facts[key]} if is_ours and isinstance(facts[key], dict) else None


def _foreign_engines(folder: Path, own: set[str]) -> list[str]:
    """What lies in the folder of engines and is neither listed nor left by an interrupted build."""
    found = sorted(path.relative_to(folder) for path in (folder / ENGINES_FOLDER).rglob("*") if not path.is_dir())
    return [str(path) for path in found if str(path) not in own and WORK_FOLDER not in path.parts]


@contextmanager
def replacing(out: Path, overwrite: bool, marker: str = MANIFEST_FILE) -> Iterator[Path]:
    """A temporary folder beside `out` that takes its place when the block ends well."""
    place = check_out(out, overwrite, marker)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{place.name[:64]}.", dir=place.parent))
    except OSError as error:
        raise ToprovarError(f"{out} cannot be written: {error.strerror}", "choose another --out") from None
    try:
        os.chmod(folder, 0o755)
        yield folder
        _take_place(folder, place)
    except OSError as error:
        raise ToprovarError(
            f"writing the bundle to {out} failed: {error.strerror or error}", "free some space, or choose another --out"
        ) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _take_place(folder: Path, place: Path) -> None:
    """Renames a finished folder to its final name; an older one there is moved away first and then removed.

    Of two exports at the same time, each meets the other's whole bundle, and the last one stays.
    """
    with _alone_in(place.parent):
        if not place.exists():
            os.replace(folder, place)
            return
        retired = Path(tempfile.mkdtemp(prefix=f".{place.name[:64]}.old.", dir=place.parent))
        try:
            os.replace(place, retired / "bundle")
            os.replace(folder, place)
        finally:
            if not place.exists() and (retired / "bundle").exists():  # interrupted in between
                os.replace(retired / "bundle", place)
            shutil.rmtree(retired, ignore_errors=True)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keeps other exports into a folder waiting, for the moment of a look or a rename."""
    with _locked(folder, waits=True):
        yield


@contextmanager
def alone_with(bundle: Path) -> Iterator[None]:
    """Keeps a bundle from being built into, or replaced, by another process.

    Raises: ToprovarError if another process is at it.
    """
    try:
        with _locked(bundle, waits=False):
            yield
    except BlockingIOError:
        raise ToprovarError(
            f"engines of {bundle} are being built by another process", "wait until it has ended, then run this again"
        ) from None


@contextmanager
def _locked(folder: Path, waits: bool) -> Iterator[None]:
    """Holds a folder's lock, which dies with the process.

    Systems and disks without such locks go on without: there two exports at once may end with an error.
    Raises: BlockingIOError if another process holds it and this one does not wait.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            raise
        except OSError:
            pass  # a network disk that has no locks
        yield
    finally:
        os.close(handle)
