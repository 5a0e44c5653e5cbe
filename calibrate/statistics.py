"""One dense run per prompt, reduced to a handful of numbers: memory does not grow with the number of prompts.

Every prompt leaves one small file, so an interrupted calibration goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import io
import json
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from toprovar.calibrate.measures import low_entropy_ratio, singular_ratio, ssim
from toprovar.exporter.prompts import encode_prompt
from toprovar.exporter.schedules import Schedule
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.guidance import Guidance
from toprovar.runtime.json_files import read_text, write_bytes, write_json
from toprovar.runtime.noise import uniform_noise
from toprovar.runtime.pipeline import picture_from_image

if TYPE_CHECKING:
    from toprovar.exporter.model import Model

STATS_SCHEMA_VERSION = 1
REPRESENTATIVE_SCALE = 5  # s = 6 counted from 1, where ToProVAR reads the layer score (section 5.3)
MAX_PROMPTS_BYTES = 64 * 2**20
SHOWN_PROMPTS = 4  # prompts whose entropy maps and pictures are kept for the report
# what reading a damaged .npz file raises
DAMAGE = (
    OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error, struct.error, RuntimeError, MemoryError,
)  # fmt: skip
FIELDS = ("rho", "mean_entropy", "singular_ratio", "truncated_ssim")


@dataclass
class Statistics:
    """What calibration knows; P prompts, K scales, L layers.

    rho:            [P, K] share of low-entropy tokens, entropy averaged over layers
    mean_entropy:   [P, K, L] nats
    singular_ratio: [P, L] sigma1/sigma2 of the entropy map at the representative scale
    truncated_ssim: [P, K] SSIM of the picture after scale k to the full one; NaN before the guard scale
    prompts, seeds: what was run
    shown:          of the first prompts, {"entropy_k": [L, h, w] nats, "picture_k": [H, W, 3] uint8 from the guard on}
    """

    schedule: Schedule
    prompts: list[str]
    seeds: list[int]
    rho: np.ndarray
    mean_entropy: np.ndarray
    singular_ratio: np.ndarray
    truncated_ssim: np.ndarray
    shown: list[dict[str, np.ndarray]]
    digest: str

    @property
    def layers(self) -> int:
        return int(self.singular_ratio.shape[1])

    @property
    def guard_scale(self) -> int:
        """Below this scale structure is still forming: no pruning, no statistics that decide."""
        return guard_scale(self.schedule)


def guard_scale(schedule: Schedule) -> int:
    """First scale whose longer side is at least 3/8 of the last one's: 24x24 of 64x64, 12x12 of 32x32."""
    last = max(schedule[-1])
    return next(k for k, size in enumerate(schedule) if max(size) * 8 >= last * 3)


def read_prompts(path: Path) -> list[str]:
    """Non-empty lines of a text file; lines that start with # are comments.

    Raises: ToprovarError if the file is missing, not UTF-8, holds NUL or no prompt.
    """
    text = read_text(path, f"prompt file {path}", MAX_PROMPTS_BYTES)
    if "\0" in text:
        raise ToprovarError(f"prompt file {path} holds NUL characters; expected plain text", "save it as UTF-8")
    lines = [line.strip() for line in text.splitlines()]
    prompts = [line for line in lines if line and not line.startswith("#")]
    if not prompts:
        raise ToprovarError(f"prompt file {path} holds no prompt", "write one prompt per line")
    return prompts


def prompts_digest(prompts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(prompts).encode("utf-8", "surrogatepass")).hexdigest()


def measure_prompt(
    model: Model, schedule: Schedule, guidance: Guidance, prompt: str, seed: int, keep_maps: bool
) -> dict[str, np.ndarray]:
    """One dense run of one prompt. Returns: the fields of `Statistics` for it, and its maps and pictures if asked
    for."""
    import torch

    from toprovar.exporter.infinity.generate import generate

    if model.tokenizer is None:
        raise ToprovarError("calibration needs the tokenizer, to judge pictures", "pass --tokenizer")
    tokenizer = model.tokenizer
    config = model.config
    pictures: dict[int, np.ndarray] = {}
    guard = guard_scale(schedule)

    def decode(scale: int, codes: torch.Tensor) -> None:
        if scale >= guard:
            pictures[scale] = picture_from_image(tokenizer.decode(codes)[0].numpy())

    run = generate(
        model.transformer,
        encode_prompt(model, prompt, guidance),
        schedule,
        guidance,
        lambda scale, tokens: torch.from_numpy(uniform_noise(seed, scale, tokens, config.bits))[None],
        entropy_layers=range(config.depth),
        on_scale=decode,
    )
    scales, layers = len(schedule), config.depth
    found: dict[str, np.ndarray] = {
        "rho": np.empty(scales),
        "mean_entropy": np.empty((scales, layers)),
        "singular_ratio": np.empty(layers),
        "truncated_ssim": np.full(scales, np.nan),
    }
    representative = min(REPRESENTATIVE_SCALE, scales - 1)
    for k, picture in pictures.items():
        found["truncated_ssim"][k] = ssim(picture, pictures[scales - 1])
    for k, (height, width) in enumerate(schedule):
        maps = np.stack([run.entropy[k, layer][0].numpy() for layer in range(layers)])  # [L, N], conditional row
        found["rho"][k] = low_entropy_ratio(maps.mean(0))
        found["mean_entropy"][k] = maps.mean(1)
        if k == representative:
            found["singular_ratio"][:] = [singular_ratio(m.reshape(height, width)) for m in maps]
        if keep_maps:
            found[f"entropy_{k}"] = maps.reshape(layers, height, width).astype(np.float32)
            if k in pictures:
                found[f"picture_{k}"] = pictures[k]
    return found


def collect_statistics(
    model: Model,
    schedule: Schedule,
    guidance: Guidance,
    prompts: Sequence[str],
    seed: int,
    folder: Path,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Statistics:
    """Runs every prompt that has no file in `folder` yet, and gathers all.

    seed: of the first prompt; prompt i runs with seed + i.
    """
    key = _key(model, schedule, guidance)
    results = []
    paths = [folder / f"prompt_{i:04d}.npz" for i in range(len(prompts))]
    for i, (prompt, path) in enumerate(zip(prompts, paths, strict=True)):
        identity = hashlib.sha256(json.dumps([key, prompt, seed + i]).encode()).hexdigest()
        found = _read_prompt_file(path, identity)
        if found is None:
            found = measure_prompt(model, schedule, guidance, prompt, seed + i, i < SHOWN_PROMPTS)
            buffer = io.BytesIO()
            np.savez_compressed(buffer, identity=np.frombuffer(bytes.fromhex(identity), np.uint8), **found)  # type: ignore[arg-type]
            write_bytes(path, buffer.getvalue())
        results.append(found)
        on_progress(i + 1, len(prompts))
    # files of prompts beyond these stay, for a run with more of them; the index names those in use
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
    facts = {
        "schema_version": STATS_SCHEMA_VERSION,
        "model": key,
        "prompts": list(prompts),
        "first_seed": seed,
        "files": digests,
    }
    write_json(folder / "index.json", facts)
    shown = [{name: array for name, array in found.items() if name not in FIELDS} for found in results[:SHOWN_PROMPTS]]
    return Statistics(
        schedule=schedule,
        prompts=list(prompts),
        seeds=[seed + i for i in range(len(prompts))],
        shown=shown,
        digest=hashlib.sha256(json.dumps(digests).encode()).hexdigest(),
        **{name: np.stack([found[name] for found in results]) for name in FIELDS},
    )


def _key(model: Model, schedule: Schedule, guidance: Guidance) -> dict[str, object]:
    return {
        "weights_sha256": model.weights_sha256,
        "schedule": [list(size) for size in schedule],
        "guidance": guidance.model_dump(mode="json"),
    }


def _read_prompt_file(path: Path, identity: str) -> dict[str, np.ndarray] | None:
    """What an earlier run measured for the very same prompt, or None; a damaged file is measured again."""
    if not path.exists():
        return None
    try:
        with np.load(path, allow_pickle=False) as stored:
            found = {name: stored[name] for name in stored.files}
    except DAMAGE:
        return None
    return found if found.pop("identity", np.empty(0, np.uint8)).tobytes().hex() == identity else None
