"""A bundle: a folder that holds a model ready to run. Opening one checks it whole before anything is allocated."""

from __future__ import annotations

import hashlib
import shlex
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.json_files import read_json
from toprovar.runtime.manifest import ENGINES_FOLDER, GRAPHS_FILE, MANIFEST_FILE, Manifest
from toprovar.runtime.plan import Plan, load_plan, model_from_json
from toprovar.runtime.signatures import check_signatures
from toprovar.runtime.weights import WeightsFile


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


@dataclass(frozen=True)
class Bundle:
    """folder, its manifest, and the digest of the manifest, which stands for the whole bundle."""

    folder: Path
    manifest: Manifest
    digest: str

    def path(self, name: str) -> Path:
        return self.folder / name

    def plan(self) -> Plan | None:
        """The plan of the planned variant. Raises: ToprovarError if it is damaged or of another model."""
        if self.manifest.plan_file is None:
            return None
        plan = load_plan(self.path(self.manifest.plan_file))
        plan.check_backbone(self.manifest.model, self.manifest.schedule)
        return plan

    def weights(self) -> dict[str, np.ndarray]:
        """All tensors of the weights file, by name."""
        path = self.path(self.manifest.weights_file)
        try:
            with safe_open(path, framework="numpy") as file:
                weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ToprovarError(f"{path} is not readable as safetensors: {error}", "export the bundle again") from None
        return weights

    def unconditional_rows(self) -> np.ndarray:
        """The learned text rows that stand for no prompt. Returns: [rows, text width] float32.

        Raises: ToprovarError if the weights file has none, or of another width.
        """
        path, text = self.path(self.manifest.weights_file), self.manifest.text
        assert text is not None
        assert text.unconditional is not None
        try:
            with safe_open(path, framework="numpy") as file:
                names = set(file.keys())
                table = file.get_tensor(text.unconditional) if text.unconditional in names else None
        except SafetensorError as error:
            raise ToprovarError(f"{path} is not readable as safetensors: {error}", "export the bundle again") from None
        if table is None or table.ndim != 2 or table.shape[1] != text.width:
            found = "missing" if table is None else f"{table.dtype}{list(table.shape)}"
            raise ToprovarError(
                f"{path}: tensor {text.unconditional} is {found}; expected [rows, {text.width}]",
                "export the bundle again",
            )
        return table.astype(np.float32)

    @property
    def size_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())


def open_bundle(folder: Path, verify: bool = True, engines: bool = True) -> Bundle:
    """Reads and checks a bundle.

    verify:  also compares digests (sizes are always compared).
    engines: also checks files of engines; their builder mends what it finds.
    Raises: ToprovarError naming the first thing that is wrong: no bundle, another schema, a missing, short or
            changed file.
    """
    if not folder.is_dir():
        raise ToprovarError(
            f"{folder} is {'a file' if folder.exists() else 'missing'}; expected a bundle folder",
            "make one:  toprovar-export demo -o out/bundle",
        )
    path = folder / MANIFEST_FILE
    if not path.exists() and (folder / GRAPHS_FILE).is_file():
        raise ToprovarError(
            f"{folder} is no bundle: it holds graphs without weights ({GRAPHS_FILE})",
            "export it with weights: leave --graphs-only out",
        )
    if not path.exists():
        raise ToprovarError(
            f"{folder} is no bundle: it holds no {MANIFEST_FILE}", "make one:  toprovar-export demo -o out/bundle"
        )
    manifest = model_from_json(Manifest, read_json(path), str(path))
    try:
        check_signatures(manifest)
    except ToprovarError as error:
        raise ToprovarError(f"{path}: {error.message}", error.hint) from None
    for name, facts in manifest.files.items():
        is_engine = name.startswith(f"{ENGINES_FOLDER}/")
        if is_engine and not engines:
            continue
        hint = "copy the bundle again, or export it again"
        missing_hint = "copy the whole folder again"
        if is_engine:
            hint = f"build it again:  {rebuild_command(folder, name.split('/')[1])}"
            missing_hint += f", or {hint}"
        file = folder / name
        if not file.is_file():
            raise ToprovarError(f"bundle {folder} lacks {name}, which its manifest names", missing_hint)
        size = file.stat().st_size
        if size != facts.size_bytes:
            kind = "cut short" if size < facts.size_bytes else "longer than it was"
            raise ToprovarError(f"{file} is {kind}: {size} bytes, {facts.size_bytes} expected", hint)
        if verify and sha256_of(file) != facts.sha256:
            raise ToprovarError(f"{file} was changed: its sha256 differs from the manifest", hint)
    if engines:
        _check_weights_of_engines(folder, manifest)
    return Bundle(folder, manifest, sha256_of(path))


def rebuild_command(folder: Path, target: str) -> str:
    """What a user types to build the engines of a bundle again."""
    return f"toprovar-export rebuild {shlex.quote(str(folder))} --target {target}"


def _check_weights_of_engines(folder: Path, manifest: Manifest) -> None:
    """Raises: ToprovarError naming the first weight input of an engine that the weights file does not hold."""
    if not manifest.engines:
        return
    weights = WeightsFile(folder / manifest.weights_file)
    for target, engines in manifest.engines.items():
        for engine in engines.engines:
            for name in engine.weights:
                try:
                    weights.rows(name)
                except ToprovarError as error:
                    raise ToprovarError(
                        f"{engine.file} of bundle {folder} takes {name} as a weight; {error.message}",
                        f"build it again:  {rebuild_command(folder, target)}",
                    ) from None
