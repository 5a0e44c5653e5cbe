"""The folder engines/<target>/ of a bundle: what is finished there, what may be used again, and how it is swapped in.

A build works in engines/<target>/.building/. Each finished plan is noted in a journal there, so that an interrupted
build goes on where it was, while the bundle's manifest and its older engines stay as they are until all is ready.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Literal, get_args

from pydantic import Field

from toprovar.exporter.output_folder import WORK_FOLDER
from toprovar.runtime.bundle import sha256_of
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.json_files import read_json, write_json
from toprovar.runtime.manifest import ENGINES_FOLDER, MANIFEST_FILE, Engine, EngineTarget, FileFacts, Manifest
from toprovar.runtime.parts import Part
from toprovar.runtime.plan import model_from_json

JOURNAL_FILE = "finished.json"
TIMING_CACHE_FILE = "timing.cache"


class Finished(Part):
    """An engine whose plan is written, and the plan's size and digest."""

    engine: Engine
    facts: FileFacts


class Journal(Part):
    schema_version: Literal[1] = 1
    finished: tuple[Finished, ...] = Field(default=(), max_length=100_000)


class EngineStore:
    """One target's engines in a bundle folder."""

    def __init__(self, bundle: Path, target: EngineTarget) -> None:
        self.bundle, self.target = bundle, target
        self.folder = bundle / ENGINES_FOLDER / target
        self.work = self.folder / WORK_FOLDER

    def name(self, graph: str) -> str:
        """The plan of a graph, relative to the bundle."""
        return f"{ENGINES_FOLDER}/{self.target}/{Path(graph).stem}.plan"

    def work_plan(self, engine_file: str) -> Path:
        return self.work / Path(engine_file).name

    def timing_cache(self) -> Path:
        """The cache in the work folder, begun with that of former builds."""
        cache, before = self.work / TIMING_CACHE_FILE, self.folder / TIMING_CACHE_FILE
        if before.exists() and not cache.exists():
            shutil.copyfile(before, cache)
        return cache

    def finished(self, manifest: Manifest | None) -> dict[str, Finished]:
        """{key: engine} that need not be built again, from an interrupted build and from a manifest; each plan lies in
        the work folder or at its place, and is as it was written."""
        noted = list(_journal(self.work).finished)
        if manifest is not None and self.target in manifest.engines:
            noted += [Finished(engine=e, facts=manifest.files[e.file]) for e in manifest.engines[self.target].engines]
        return {item.engine.key: item for item in noted if self.place(item) is not None}

    def place(self, item: Finished) -> Path | None:
        """Where the plan of a finished engine lies, whole; None if it does not."""
        for path in (self.work_plan(item.engine.file), self.bundle / item.engine.file):
            with suppress(OSError):
                if path.stat().st_size == item.facts.size_bytes and sha256_of(path) == item.facts.sha256:
                    return path
        return None

    def note(self, item: Finished) -> None:
        """Adds a finished engine to the journal, in place of an older one of the same name."""
        others = [other for other in _journal(self.work).finished if other.engine.file != item.engine.file]
        journal = Journal(finished=(*others, item))
        write_json(self.work / JOURNAL_FILE, journal.model_dump(mode="json"))

    def commit(self, items: list[Finished]) -> dict[str, FileFacts]:
        """Moves the plans to their places and removes others. Returns: facts of all files of this target."""
        files = {item.engine.file: item.facts for item in items}
        for item in items:
            waiting = self.work_plan(item.engine.file)
            if waiting.exists():
                os.replace(waiting, self.bundle / item.engine.file)
        cache = self.folder / TIMING_CACHE_FILE
        if (self.work / TIMING_CACHE_FILE).exists():
            os.replace(self.work / TIMING_CACHE_FILE, cache)
        if cache.exists():
            name = f"{ENGINES_FOLDER}/{self.target}/{TIMING_CACHE_FILE}"
            files[name] = FileFacts(size_bytes=cache.stat().st_size, sha256=sha256_of(cache))
        kept = {Path(name).name for name in files}
        for path in self.folder.glob("*.plan"):
            if path.name not in kept:
                path.unlink()
        return files

    def clear_work(self) -> None:
        shutil.rmtree(self.work, ignore_errors=True)


def _journal(work: Path) -> Journal:
    """What an interrupted build noted; nothing where there is no journal, or none that can be read."""
    path = work / JOURNAL_FILE
    if not path.exists():
        return Journal()
    try:
        return model_from_json(Journal, read_json(path), str(path))
    except ToprovarError:
        return Journal()  # its engines are built again


def carry_finished(old: Path, new: Path) -> None:
    """Links the finished engines of a bundle into the one that replaces it; a build there takes what still fits."""
    try:
        manifest = model_from_json(Manifest, read_json(old / MANIFEST_FILE), str(old))
    except ToprovarError:
        manifest = None  # of another version: whatever it holds is built again
    for target in get_args(EngineTarget):
        before, after = EngineStore(old, target), EngineStore(new, target)
        items = list(before.finished(manifest).values())
        if not items:
            continue
        after.work.mkdir(parents=True)
        for item in items:
            place = before.place(item)
            assert place is not None
            _link(place, after.work_plan(item.engine.file))
        write_json(after.work / JOURNAL_FILE, Journal(finished=tuple(items)).model_dump(mode="json"))
        if (before.folder / TIMING_CACHE_FILE).exists():
            _link(before.folder / TIMING_CACHE_FILE, after.work / TIMING_CACHE_FILE)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a disk without hard links
        shutil.copyfile(source, target)
