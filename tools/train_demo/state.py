"""Training state on disk: safetensors files of bounded size, each written under a temporary name and renamed.

The working folder holds full-precision states so that a stage resumes as it stopped; the small copies of the output
folder are fp16 and resume too, with a short warm-up instead of the optimizer's moments.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from toprovar.runtime.errors import ToprovarError

PIECE_BYTES = 15 * 2**20


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, partial, dict(metadata or {}))
    partial.replace(path)


def as_fp16(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {k: v.detach().half() if v.is_floating_point() else v.detach() for k, v in tensors.items()}


def save_pieces(tensors: Mapping[str, Tensor], folder: Path, stem: str) -> list[Path]:
    """Writes `stem-0.safetensors`, `stem-1...`: whole tensors, at most 15 MiB a file. Removes leftover pieces."""
    pieces: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        bytes_here = tensor.numel() * tensor.element_size()
        if pieces[-1] and size + bytes_here > PIECE_BYTES:
            pieces.append({})
            size = 0
        pieces[-1][name] = tensor
        size += bytes_here
    paths = [folder / f"{stem}-{i}.safetensors" for i in range(len(pieces))]
    for piece, path in zip(pieces, paths, strict=True):
        save_tensors(piece, path, {"pieces": str(len(pieces))})
    for leftover in set(folder.glob(f"{stem}-*.safetensors")) - set(paths):
        leftover.unlink()
    return paths


def load_pieces(folder: Path, stem: str) -> dict[str, Tensor] | None:
    """All tensors of a stem in fp32, or None if no piece is there."""
    paths = sorted(folder.glob(f"{stem}-*.safetensors"))
    if not paths:
        return None
    tensors: dict[str, Tensor] = {}
    for path in paths:
        tensors.update(load_file(path))
    return {k: v.float() if v.is_floating_point() else v for k, v in tensors.items()}


def load_required(folder: Path, stem: str, stage: str) -> dict[str, Tensor]:
    found = load_pieces(folder, stem)
    if found is None:
        raise ToprovarError(f"{folder} has no {stem}-0.safetensors", f"run the stage {stage} first")
    return found


def prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def with_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name[len(prefix) + 1 :]: t for name, t in tensors.items() if name.startswith(prefix + ".")}


class Ema:
    """Moving average of weights with the warm-up form min(0.999, (1+t)/(10+t))."""

    def __init__(self, parameters: Mapping[str, Tensor], step: int = 0) -> None:
        self.names = list(parameters)
        self._live = [parameters[name] for name in self.names]
        self.values = [p.detach().clone().float() for p in self._live]
        self.step = step

    @torch.no_grad()
    def update(self) -> None:
        decay = min(0.999, (1 + self.step) / (10 + self.step))
        torch._foreach_lerp_(self.values, [p.detach() for p in self._live], 1 - decay)
        self.step += 1

    def tensors(self) -> dict[str, Tensor]:
        return dict(zip(self.names, self.values, strict=True))

    def load(self, tensors: Mapping[str, Tensor], step: int) -> None:
        for name, value in zip(self.names, self.values, strict=True):
            if name in tensors:
                value.copy_(tensors[name])
        self.step = step


class Log:
    """JSON lines in a file and on stderr, or nowhere if silent."""

    def __init__(self, path: Path, silent: bool = False) -> None:
        self._silent = silent
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._started = time.monotonic()

    def __call__(self, **facts: Any) -> None:
        if self._silent:
            return
        facts = {"t": round(time.monotonic() - self._started, 1), **facts}
        line = json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in facts.items()})
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        print(line, file=sys.stderr, flush=True)


def write_json(path: Path, document: Any) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.replace(path)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
