"""One dense run per prompt, reduced to small arrays: memory does not grow with the number of prompts.

Every prompt leaves one small file, and one more for the runs that only some methods need, so that an interrupted
calibration goes on where it stopped. What a run is reduced to: prompt_run.py.
"""

from __future__ import annotations

import hashlib
import io
import json
import struct
import zipfile
import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from toprovar.calibrate.prompt_run import guard_scale, measure_conditional, measure_prompt
from toprovar.exporter.schedules import Schedule
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.guidance import Guidance
from toprovar.runtime.json_files import read_text, write_bytes, write_json

if TYPE_CHECKING:
    from toprovar.exporter.model import Model

STATS_SCHEMA_VERSION = 2
MAX_PROMPTS_BYTES = 64 * 2**20
SHOWN_PROMPTS = 4  # prompts whose entropy maps and pictures are kept for the report
# what reading a damaged .npz file raises
DAMAGE = (
    OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error, struct.error, RuntimeError, MemoryError,
)  # fmt: skip
FIELDS = (
    "rho", "mean_entropy", "singular_values", "singular_ratio", "truncated_ssim", "change", "energy_tokens",
    "frequency", "guidance_gap",
)  # fmt: skip
# further runs of a prompt, by what they measure; a method names those it needs
FURTHER: dict[str, Callable[..., dict[str, np.ndarray]]] = {"conditional_ssim": measure_conditional}


@dataclass
class Statistics:
    """What calibration knows; P prompts, K scales, L layers. All of the conditional row.

    rho:             [P, K] share of low-entropy tokens, entropy averaged over heads and layers
    mean_entropy:    [P, K, L] nats, mean over heads and tokens
    singular_values: [P, L, 2] sigma1 and sigma2 of the entropy map at the representative scale, from its Gram matrix
    singular_ratio:  [P, L] sigma1/sigma2
    truncated_ssim:  [P, K] SSIM of the picture after scale k to the full one; NaN before the guard scale
    change:          [P, K, L] mean absolute change of the hidden state in a layer
    energy_tokens:   [P, K, S] tokens of scale k that hold each of ENERGY_SHARES of the code energy of scale k - 1; NaN
                     at scale 0
    frequency:       [P, K, 2] SkipVAR's HF_Diff and HF_Ratio after scale k; NaN before the feature scale
    guidance_gap:    [P, K] RMS of conditional minus unconditional logits before temperature; NaN without guidance
    conditional_ssim: [P, K] SSIM to the full picture where guidance stops at scale k; NaN where it was not run
    prompts, seeds:  what was run
    shown:           of the first prompts, {"entropy_k": [L, h, w] nats, "picture_k": [H, W, 3] uint8 from the guard on}

    A field is None where it was not measured.
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
    singular_values: np.ndarray | None = None
    change: np.ndarray | None = None
    energy_tokens: np.ndarray | None = None
    frequency: np.ndarray | None = None
    guidance_gap: np.ndarray | None = None
    conditional_ssim: np.ndarray | None = None

    def measured(self, name: str) -> np.ndarray:
        """A field that a method cannot do without. Raises: ToprovarError if it was not measured."""
        found = getattr(self, name)
        if found is None:
            raise ToprovarError(f"the statistics hold no {name}", "measure again:  toprovar calibrate --no-resume")
        return np.asarray(found)

    @property
    def layers(self) -> int:
        return int(self.singular_ratio.shape[1])

    @property
    def guard_scale(self) -> int:
        """Below this scale structure is still forming: no pruning, no statistics that decide."""
        return guard_scale(self.schedule)


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


def collect_statistics(
    model: Model,
    schedule: Schedule,
    guidance: Guidance,
    prompts: Sequence[str],
    seed: int,
    folder: Path,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    further: Collection[str] = (),
    resume: bool = True,
) -> Statistics:
    """Runs every prompt that has no file in `folder` yet, and gathers all.

    seed:    of the first prompt; prompt i runs with seed + i
    further: names of FURTHER that are measured too
    resume:  False measures every prompt again
    """
    key = _key(model, schedule, guidance)
    results, digests = [], {}
    for i, prompt in enumerate(prompts):
        found: dict[str, np.ndarray] = {}
        measures: dict[str, Callable[[], dict[str, np.ndarray]]] = {
            "": lambda p=prompt, i=i: measure_prompt(  # type: ignore[misc]
                model, schedule, guidance, p, seed + i, i < SHOWN_PROMPTS
            )
        }
        for name in sorted(further):
            measures[f"_{name}"] = lambda p=prompt, i=i, name=name: FURTHER[name](  # type: ignore[misc]
                model, schedule, guidance, p, seed + i
            )
        for name, measure in measures.items():
            path = folder / f"prompt_{i:04d}{name}.npz"
            identity = hashlib.sha256(
                json.dumps([STATS_SCHEMA_VERSION, key, prompt, seed + i, name]).encode()
            ).hexdigest()
            part = _read_prompt_file(path, identity) if resume else None
            if part is None:
                part = measure()
                buffer = io.BytesIO()
                np.savez_compressed(buffer, identity=np.frombuffer(bytes.fromhex(identity), np.uint8), **part)  # type: ignore[arg-type]
                write_bytes(path, buffer.getvalue())
            found |= part
            digests[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
        results.append(found)
        on_progress(i + 1, len(prompts))
    # files of prompts beyond these stay, for a run with more of them; the index names those in use
    facts = {
        "schema_version": STATS_SCHEMA_VERSION,
        "model": key,
        "prompts": list(prompts),
        "first_seed": seed,
        "files": digests,
    }
    write_json(folder / "index.json", facts)
    fields = (*FIELDS, *sorted(further))
    shown = [{name: array for name, array in found.items() if name not in fields} for found in results[:SHOWN_PROMPTS]]
    return Statistics(
        schedule=schedule,
        prompts=list(prompts),
        seeds=[seed + i for i in range(len(prompts))],
        shown=shown,
        digest=hashlib.sha256(json.dumps(digests).encode()).hexdigest(),
        **{name: np.stack([found[name] for found in results]) for name in fields},
    )


def _key(model: Model, schedule: Schedule, guidance: Guidance) -> dict[str, object]:
    rows = {} if model.embeddings is None else {"embeddings_sha256": model.embeddings.sha256}
    return {
        "weights_sha256": model.weights_sha256,
        "schedule": [list(size) for size in schedule],
        "guidance": guidance.model_dump(mode="json"),
        **rows,
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
