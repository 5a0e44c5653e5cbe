"""Low-rank adapters, merged into the weights while they are read: W + scale * B @ A.

Two forms of files: PEFT's (adapter_model.safetensors with adapter_config.json beside it, which holds alpha) and plain
safetensors with `lora_A`/`lora_B` or `lora_down`/`lora_up` and perhaps an `alpha` per target. Names may carry the usual
prefixes, write blocks by number or by chunk, and name query, key and value apart or as one.

Sources: arXiv 2106.09685; arXiv 2312.03732 (scale alpha / sqrt(rank)).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from toprovar.exporter.checkpoint_file import Entry, listed
from toprovar.exporter.checkpoints import Checkpoint, LazyTensors, check_finite, open_checkpoint
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.json_files import read_json

if TYPE_CHECKING:
    from torch import Tensor

CONFIG_FILE = "adapter_config.json"
PEFT_PREFIX = "base_model.model."
PREFIXES = (PEFT_PREFIX, "base_model.", "transformer.", "diffusion_model.", "module.", "model.")
FLAT_PREFIXES = ("lora_unet_", "lora_transformer_", "lora_te_", "lora_")  # where underscores stand for dots

# (name of the tensor behind the target, which factor it is)
_DOWN = ("lora_A.weight", "lora_A.default.weight", "lora_A", "lora_down.weight", "lora.down.weight")
_UP = ("lora_B.weight", "lora_B.default.weight", "lora_B", "lora_up.weight", "lora.up.weight")
_FACTORS = {**dict.fromkeys(_DOWN, "down"), **dict.fromkeys(_UP, "up"), "alpha": "alpha"}

# what query, key and value are called apart, and together
_APART = {
    "q": ("q_proj", "to_q", "mat_q", "q", "query"),
    "k": ("k_proj", "to_k", "mat_k", "k", "key"),
    "v": ("v_proj", "to_v", "mat_v", "v", "value"),
}
_TOGETHER = {"qkv": ("mat_qkv", "qkv_proj", "qkv", "to_qkv", "query_key_value"), "kv": ("mat_kv", "kv_proj", "to_kv")}


@dataclass(frozen=True)
class LoraFile:
    """path: a file, or PEFT's folder; scale: multiplies what the file says."""

    path: Path
    scale: float = 1.0


@dataclass(frozen=True)
class Adapters:
    """What a model is loaded with.

    allow_unmatched: merge what fits where some targets stand for no weight of the model
    on_report:       told what became of each file
    """

    files: tuple[LoraFile, ...] = ()
    allow_unmatched: bool = False
    on_report: Callable[[LoraReport], None] = lambda report: None

    def merged_into(self, checkpoint: Checkpoint) -> Checkpoint:
        """Raises: ToprovarError as `merge_lora`."""
        if not self.files:
            return checkpoint
        merged, reports = merge_lora(checkpoint, self.files, self.allow_unmatched)
        for report in reports:
            self.on_report(report)
        return merged


NO_ADAPTERS = Adapters()


@dataclass(frozen=True)
class LoraReport:
    """What became of one adapter's targets.

    merged:    name of a weight -> how many targets went into it
    unmatched: targets that no weight of the model stands for
    ranks:     of all targets
    """

    path: Path
    scale: float
    targets: int
    merged: Mapping[str, int]
    unmatched: tuple[str, ...]
    ranks: tuple[int, ...]

    def lines(self) -> list[str]:
        ranks = f"{min(self.ranks)} to {max(self.ranks)}" if len(set(self.ranks)) > 1 else f"{self.ranks[0]}"
        found = [
            f"lora {self.path}: {self.targets - len(self.unmatched)} of {self.targets} targets merged into "
            f"{len(self.merged)} weights (rank {ranks}, scale {self.scale:g})"
        ]
        if self.unmatched:
            found.append(f"lora {self.path}: no weight for {listed(list(self.unmatched))}")
        return found


@dataclass(frozen=True)
class _Target:
    """One module's factors. down: [r, in, ...]; up: [out, r, ...]; scale without the caller's own."""

    name: str
    down: Tensor
    up: Tensor
    scale: float

    @property
    def rank(self) -> int:
        return int(self.down.shape[0])

    def delta(self) -> Tensor:
        """[out, in * ...] fp32."""
        product: Tensor = (self.up.float().flatten(1) @ self.down.float().flatten(1)) * self.scale
        return product


@dataclass(frozen=True)
class _Part:
    """Rows of one weight that get rows of one target's delta. Ends are exclusive; None takes them all."""

    target: _Target
    weight_rows: tuple[int, int] | None = None
    delta_rows: tuple[int, int] | None = None


def merge_lora(
    checkpoint: Checkpoint, files: Sequence[LoraFile], allow_unmatched: bool = False
) -> tuple[Checkpoint, list[LoraReport]]:
    """A checkpoint whose weights are read with the adapters in them; its digest tells them too.

    allow_unmatched: merge what fits where some targets stand for no weight of the model
    Raises:          ToprovarError for a file that is no adapter, a factor of another shape, or an unmatched target.
    """
    import torch

    parts: dict[str, list[_Part]] = {}
    reports, lines = [], []
    for file in files:
        targets, digest = _read(file)
        unmatched, merged = [], dict[str, int]()
        for target in targets:
            found = _parts_for(target, checkpoint.shapes)
            if not found:
                unmatched.append(target.name)
            for name, part in found.items():
                _check_shape(file, name, part, checkpoint.shapes[name])
                parts.setdefault(name, []).append(part)
                merged[name] = merged.get(name, 0) + 1
        report = LoraReport(
            file.path, file.scale, len(targets), merged, tuple(unmatched), tuple(t.rank for t in targets)
        )
        if unmatched and (not allow_unmatched or not merged):
            raise ToprovarError(
                f"lora {file.path} fits {len(targets) - len(unmatched)} of its {len(targets)} targets: "
                f"{checkpoint.path} has no weight for {listed(unmatched)}",
                "pass the adapter of this model, or --lora-allow-unmatched to merge what fits"
                if merged
                else "pass the adapter of this model",
            )
        reports.append(report)
        lines.append(f"lora {digest} {file.scale!r}")
    entries = {name: checkpoint.tensors.entry(name) for name in checkpoint.tensors}
    for name, changes in parts.items():
        entry = entries[name]
        entries[name] = Entry(entry.file, entry.shape, torch.float32, _merged(entry, changes, name))
    return (
        replace(
            checkpoint,
            tensors=LazyTensors(entries),
            dtypes=MappingProxyType({name: entry.dtype for name, entry in entries.items()}),
            notes=(*checkpoint.notes, *(line for report in reports for line in report.lines())),
            changes=(*checkpoint.changes, *lines),
        ),
        reports,
    )


def _merged(entry: Entry, parts: Sequence[_Part], name: str) -> Callable[[], Tensor]:
    def read() -> Tensor:
        import torch

        weight = entry.read().to(torch.float32, copy=True)
        rows = weight.view(len(weight), -1)
        for part in parts:
            start, end = part.weight_rows or (0, len(rows))
            first, last = part.delta_rows or (0, end - start)
            rows[start:end] += part.target.delta()[first:last]
        check_finite({name: weight}, f"{entry.file} with adapters")
        return weight

    return read


# -- files ---------------------------------------------------------------------------------------------------------


def _read(file: LoraFile) -> tuple[list[_Target], str]:
    """The targets of a file, and a digest of everything that decides what they are."""
    if not math.isfinite(file.scale):
        raise ToprovarError(f"--lora-scale {file.scale} is not a finite number", "write --lora-scale 0.8")
    adapter = open_checkpoint(file.path)
    config_path = adapter.files[0].parent / CONFIG_FILE
    config = read_json(config_path) if config_path.exists() else None
    _check_config(config_path, config)
    factors: dict[str, dict[str, str]] = {}
    foreign = []
    for name in adapter.tensors:
        ending = next((ending for ending in _FACTORS if name.endswith("." + ending)), None)
        if ending is None:
            foreign.append(name)
        else:
            factors.setdefault(name.removesuffix("." + ending), {})[_FACTORS[ending]] = name
    if foreign:
        raise ToprovarError(
            f"lora {file.path} holds tensors that are no low-rank factors: found {listed(foreign)}; expected names "
            "ending in lora_A, lora_B, lora_down, lora_up or alpha",
            "merge full weights, magnitudes (DoRA) or other kinds of adapters with the tool that made them",
        )
    is_peft = any(name.startswith(PEFT_PREFIX) for name in factors)
    if is_peft and config is None:
        raise ToprovarError(
            f"lora {file.path} has PEFT's names, whose scale stands in {CONFIG_FILE}: found none in "
            f"{config_path.parent}",
            f"put {CONFIG_FILE} beside it",
        )
    targets = [_target(file, name, found, adapter, config if is_peft else None) for name, found in factors.items()]
    digest = hashlib.sha256(adapter.digest().encode())
    digest.update(json.dumps(config if is_peft else None, sort_keys=True).encode())
    return targets, digest.hexdigest()


def _check_config(path: Path, config: Any) -> None:
    """Refuses what would be merged wrong."""
    if config is None:
        return
    alpha = config.get("lora_alpha") if isinstance(config, dict) else None
    if not isinstance(alpha, int | float) or isinstance(alpha, bool):
        raise ToprovarError(f"{path} has lora_alpha {alpha!r}; expected a number", "take the adapter's own file")
    for key in ("use_dora", "fan_in_fan_out"):
        if config.get(key):
            raise ToprovarError(f"{path} has {key}, which is not supported", "merge it with PEFT and pass the result")
    if config.get("peft_type", "LORA") != "LORA":
        raise ToprovarError(f"{path} is of kind {config['peft_type']}; expected LORA", "merge it with PEFT")


def _target(
    file: LoraFile, name: str, found: Mapping[str, str], adapter: Checkpoint, config: Mapping[str, Any] | None
) -> _Target:
    if not {"down", "up"} <= set(found):
        raise ToprovarError(
            f"lora {file.path}: target {name} has {listed(list(found.values()))}; expected both factors",
            "take the whole adapter",
        )
    down, up = (adapter.tensors[found[factor]] for factor in ("down", "up"))
    rank = down.shape[0] if down.dim() else 0
    if down.dim() < 2 or up.dim() < 2 or up.shape[1] != rank or not rank:
        raise ToprovarError(
            f"lora {file.path}: factors of {name} do not fit: found {tuple(down.shape)} and {tuple(up.shape)}; "
            "expected (rank, in) and (out, rank)",
            "take the whole adapter",
        )
    scale = 1.0
    if config is not None:
        alpha = float(config["lora_alpha"])
        for pattern, value in (config.get("alpha_pattern") or {}).items():
            if re.fullmatch(rf"(.*\.)?({pattern})", name):
                alpha = float(value)
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    elif "alpha" in found:
        scale = float(adapter.tensors[found["alpha"]]) / rank
    if not math.isfinite(scale):
        raise ToprovarError(f"lora {file.path}: alpha of {name} is not finite", "take the whole adapter")
    check_finite({found["down"]: down, found["up"]: up}, str(file.path))
    return _Target(name, down, up, scale * file.scale)


# -- names ---------------------------------------------------------------------------------------------------------


def _parts_for(target: _Target, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, _Part]:
    """Weight -> what of it the target changes; empty if the model has no such weight."""
    for module in _spellings(target.name, shapes):
        if f"{module}.weight" in shapes:
            return {f"{module}.weight": _Part(target)}
        if parts := _fused(module, target, shapes) or _split(module, target, shapes):
            return parts
    return {}


def _spellings(name: str, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Module names that a target's name may stand for, the likeliest first."""
    found = [name]
    for prefix in PREFIXES:
        found += [other.removeprefix(prefix) for other in found if other.startswith(prefix)]
    flat = {_flat(module): module for module in _modules(shapes)}
    for prefix in FLAT_PREFIXES:
        if name.startswith(prefix) and "." not in name:
            found += [flat[name.removeprefix(prefix)]] if name.removeprefix(prefix) in flat else []
    chunk = _blocks_per_chunk(shapes)
    if chunk:
        found += [
            re.sub(r"^(unregistered_)?blocks\.(\d+)\.", lambda m: _chunked(int(m[2]), chunk), other)
            for other in found
            if re.match(r"(unregistered_)?blocks\.\d+\.", other)
        ]
    return list(dict.fromkeys(found))


def _modules(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Names of everything that has a weight, those too that query, key and value would have apart or together."""
    modules = [name.removesuffix(".weight") for name in shapes if name.endswith(".weight")]
    further = []
    for module in modules:
        stem, _, last = module.rpartition(".")
        for together, names in _TOGETHER.items():
            if last in names:
                further += [f"{stem}.{name}" for letter in together for name in _APART[letter]]
        if last in ("q_proj", "to_q"):
            further += [f"{stem}.{name}" for name in _TOGETHER["qkv"]]
    return modules + [name for name in further if name not in modules]


def _flat(module: str) -> str:
    return module.replace(".", "_")


def _blocks_per_chunk(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Of a transformer whose blocks are keyed by chunk; else 0."""
    inner = [int(m[1]) for name in shapes if (m := re.match(r"block_chunks\.\d+\.module\.(\d+)\.", name))]
    return max(inner) + 1 if inner else 0


def _chunked(block: int, per_chunk: int) -> str:
    return f"block_chunks.{block // per_chunk}.module.{block % per_chunk}."


def _fused(module: str, target: _Target, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, _Part]:
    """A query, key or value whose weight is some rows of one for all."""
    stem, _, last = module.rpartition(".")
    letter = next((letter for letter, names in _APART.items() if last in names), None)
    for together, names in _TOGETHER.items():
        for name in names:
            weight = f"{stem}.{name}.weight"
            if letter and letter in together and weight in shapes:
                size = shapes[weight][0] // len(together)
                start = size * together.index(letter)
                return {weight: _Part(target, weight_rows=(start, start + size))}
    return {}


def _split(module: str, target: _Target, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, _Part]:
    """One target for query, key and value whose weights are apart; its rows follow one another."""
    stem, _, last = module.rpartition(".")
    together = next((together for together, names in _TOGETHER.items() if last in names), None)
    for names in zip(*(_APART[letter] for letter in together or ()), strict=True):
        weights = [f"{stem}.{name}.weight" for name in names]
        if all(weight in shapes for weight in weights):
            sizes = [shapes[weight][0] for weight in weights]
            starts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
            if starts[-1] != target.up.shape[0]:
                return {}
            return {weight: _Part(target, delta_rows=(starts[i], starts[i + 1])) for i, weight in enumerate(weights)}
    return {}


def _check_shape(file: LoraFile, name: str, part: _Part, shape: tuple[int, ...]) -> None:
    rows = part.weight_rows or (0, shape[0])
    deltas = part.delta_rows or (0, int(part.target.up.shape[0]))
    expected = (rows[1] - rows[0], math.prod(shape[1:]))
    found = (deltas[1] - deltas[0], math.prod(part.target.down.shape[1:]))
    if len(shape) < 2 or found != expected:
        raise ToprovarError(
            f"lora {file.path}: target {part.target.name} does not fit {name}: found factors for {found}, "
            f"expected {expected} of its shape {shape}",
            "the adapter belongs to another size of the model",
        )
