"""Fréchet distance between drawn and real crops in the classifier's pooled features, and its reference file.

d^2 = |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)), as in Heusel et al. 2017 with another network. Crops, not pictures:
every object's place counts once. The distance falls with the number of crops, so compare equal numbers only. Linear
algebra is PyTorch's, whose threads sleep while they wait (tools/cli.py says why).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.json_files import write_bytes
from toprovar.tools.evaluation.intervals import Z

FILE = "reference_features.safetensors"
RESAMPLES = 200
LEAST_CROPS = 2  # that have a covariance


@dataclass(frozen=True)
class Features:
    """mean [F], covariance [F, F] in float64, of `count` crops."""

    mean: Tensor
    covariance: Tensor
    count: int

    @cached_property
    def root(self) -> Tensor:
        """Symmetric square root of the covariance."""
        values, vectors = torch.linalg.eigh(self.covariance)
        return (vectors * values.clamp_min(0).sqrt()) @ vectors.T


def features_of(rows: np.ndarray) -> Features:
    """Mean and covariance of crops. rows: [N, F]. Raises: ValueError if fewer than two, or not finite."""
    if len(rows) < LEAST_CROPS or not np.isfinite(rows).all():
        raise ValueError(f"{len(rows)} crops, all finite: {bool(np.isfinite(rows).all())}")
    wide = torch.from_numpy(rows.astype(np.float64))
    mean = wide.mean(0)
    centred = wide - mean
    return Features(mean, centred.T @ centred / (len(rows) - 1), len(rows))


def frechet_distance(a: Features, b: Features) -> float:
    """Squared Fréchet distance of two normal distributions; 0 for equal ones."""
    cross = torch.linalg.eigvalsh(b.root @ a.covariance @ b.root).clamp_min(0).sqrt().sum()
    shift = (a.mean - b.mean).square().sum()
    return max(0.0, float(shift + a.covariance.trace() + b.covariance.trace() - 2 * cross))


def resampled_distances(pictures: Sequence[np.ndarray], reference: Features, resamples: int = RESAMPLES) -> np.ndarray:
    """Distances of bootstrap resamples; equal numbers of pictures are drawn alike, so that two results can be paired.

    pictures: per picture [places, F]; whole pictures are drawn, since their crops belong together
    Returns:  [resamples] float64
    """
    generator = np.random.Generator(np.random.PCG64(0))
    values = []
    for _ in range(resamples):
        picks = generator.integers(len(pictures), size=len(pictures))
        drawn = features_of(np.concatenate([pictures[i] for i in picks]))
        values.append(frechet_distance(drawn, reference))
    return np.array(values)


def half_width(values: np.ndarray) -> float:
    """Half of a 95 % interval around what was measured: 1.96 standard deviations of resampled values.

    Not their percentiles: a resample repeats pictures and so lies further away than the sample itself. Its spread is
    right, its centre is not.
    """
    return float(Z * values.std(ddof=1))


def write_reference(path: Path, features: Features, facts: dict[str, str]) -> None:
    """Stores mean and covariance as float32. facts: how they were made, as the file's metadata."""
    from safetensors.numpy import save

    tensors = {
        "mean": features.mean.numpy().astype(np.float32),
        "covariance": features.covariance.numpy().astype(np.float32),
        "count": np.array([features.count], np.int64),
    }
    write_bytes(path, save(tensors, {"schema_version": "1", **facts}))


def read_reference(path: Path, width: int) -> Features:
    """Raises: ToprovarError if the file is missing, damaged, or of features of another width."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        stored = load(path.read_bytes())
        mean, covariance, count = stored["mean"], stored["covariance"], int(stored["count"].reshape(1)[0])
    except (OSError, SafetensorError, KeyError, IndexError, ValueError, TypeError) as error:
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
    scale = np.abs(covariance).max()
    is_symmetric = np.allclose(covariance, covariance.T, rtol=0, atol=1e-5 * scale)  # up to rounding of fp32
    if count < LEAST_CROPS or not is_symmetric or (covariance.diagonal() < 0).any():
        raise ToprovarError(f"{path} holds no covariance of two or more crops", "install the package again")
    return Features(torch.from_numpy(mean).double(), torch.from_numpy(covariance).double(), count)
