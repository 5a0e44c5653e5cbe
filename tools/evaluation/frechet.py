"""Fréchet distance between drawn and real crops in the classifier's pooled features, and its reference file.

d^2 = |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)), as in Heusel et al. 2017 with another network. Crops, not pictures:
every object's place counts once. The distance falls with the number of crops, so compare equal numbers only.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.json_files import write_bytes
from toprovar.tools.evaluation.intervals import Z

FILE = "reference_features.safetensors"
RESAMPLES = 200
LEAST_CROPS = 2  # that have a covariance


@dataclass(frozen=True)
class Features:
    """mean [F], covariance [F, F] in float64, of `count` crops."""

    mean: np.ndarray
    covariance: np.ndarray
    count: int


def features_of(rows: np.ndarray) -> Features:
    """Mean and covariance of crops. rows: [N, F]. Raises: ValueError if fewer than two, or not finite."""
    if len(rows) < LEAST_CROPS or not np.isfinite(rows).all():
        raise ValueError(f"{len(rows)} crops, all finite: {bool(np.isfinite(rows).all())}")
    wide = rows.astype(np.float64)
    return Features(wide.mean(0), np.cov(wide, rowvar=False), len(rows))


def _root(matrix: np.ndarray) -> np.ndarray:
    """Square root of a symmetric matrix without negative eigenvalues."""
    values, vectors = np.linalg.eigh(matrix)
    return (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T


def frechet_distance(a: Features, b: Features) -> float:
    """Squared Fréchet distance of two normal distributions; 0 for equal ones."""
    root = _root(a.covariance)
    cross = np.sqrt(np.maximum(np.linalg.eigvalsh(root @ b.covariance @ root), 0)).sum()
    shift = float(np.square(a.mean - b.mean).sum())
    return max(0.0, shift + float(np.trace(a.covariance) + np.trace(b.covariance) - 2 * cross))


def bootstrap_spread(
    pictures: list[np.ndarray], reference: Features, base: list[np.ndarray] | None = None, resamples: int = RESAMPLES
) -> float:
    """Half width of the 95 % interval of the distance, or of its difference to `base` over the same pictures.

    A resample repeats pictures and so lies further away than the sample itself; its spread is right, its centre is not.
    Hence 1.96 standard deviations of the resampled distances around the measured one, not their percentiles.
    pictures: per picture [places, F]; whole pictures are drawn, since their crops belong together
    """
    generator = np.random.Generator(np.random.PCG64(0))
    values = []
    for _ in range(resamples):
        picks = generator.integers(len(pictures), size=len(pictures))
        value = frechet_distance(features_of(np.concatenate([pictures[i] for i in picks])), reference)
        if base is not None:
            value -= frechet_distance(features_of(np.concatenate([base[i] for i in picks])), reference)
        values.append(value)
    return float(Z * np.std(values, ddof=1))


def write_reference(path: Path, features: Features, facts: dict[str, str]) -> None:
    """Stores mean and covariance as float32. facts: how they were made, as the file's metadata."""
    from safetensors.numpy import save

    tensors = {
        "mean": features.mean.astype(np.float32),
        "covariance": features.covariance.astype(np.float32),
        "count": np.array([features.count], np.int64),
    }
    write_bytes(path, save(tensors, {"schema_version": "1", **facts}))


def read_reference(path: Path, width: int) -> Features:
    """Raises: ToprovarError if the file is missing, damaged, or of features of another width."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        stored = load(path.read_bytes())
        mean, covariance, count = stored["mean"], stored["covariance"], int(stored["count"][0])
    except (OSError, SafetensorError, KeyError, IndexError, ValueError) as error:
        raise ToprovarError(
            f"{path} holds no readable reference features ({str(error).splitlines()[0]})", "install the package again"
        ) from None
    if mean.shape != (width,) or covariance.shape != (width, width):
        raise ToprovarError(
            f"{path} holds features of shape {list(mean.shape)}; the classifier has {width}",
            "take both files from the same training run",
        )
    if not (np.isfinite(mean).all() and np.isfinite(covariance).all()):
        raise ToprovarError(f"{path} holds values that are not finite", "install the package again")
    return Features(mean.astype(np.float64), covariance.astype(np.float64), count)
