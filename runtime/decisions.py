"""Decisions taken while a picture is made: their constants, as data, and the arithmetic, in NumPy.

PyTorch and the graph runtimes call the same functions on small outputs of a step, so they decide alike. A decision
either leads to another path of the plan, lets guidance end, or picks a count from a scale's ladder.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

import numpy as np
from pydantic import Field, model_validator

from toprovar.runtime.parts import Index, Part, Share

Feature = Annotated[float, Field(allow_inf_nan=False)]
FEATURES = 2  # HF_Diff and HF_Ratio


class RhoDecision(Part):
    """After each scale of `paths`: once rho has crossed tau, its path is taken (ToProVAR, adaptive D).

    layers: whose entropy is averaged; all of them run whole at these scales.
    """

    kind: Literal["rho"] = "rho"
    tau: Share
    direction: Literal["le", "ge"]
    layers: Annotated[tuple[Index, ...], Field(min_length=1)]
    paths: Annotated[dict[Index, str], Field(min_length=1)]

    def path(self, scale: int, rho: float) -> str | None:
        crossed = rho <= self.tau if self.direction == "le" else rho >= self.tau
        return self.paths[scale] if crossed else None


class LogisticModel(Part):
    """Multinomial logistic regression on standardised features: the largest weights . (x - mean) / std + intercept.

    weights: one row per class, FEATURES columns; labels: what each row stands for.
    """

    mean: tuple[float, ...]
    std: tuple[Annotated[float, Field(gt=0)], ...]
    weights: tuple[tuple[float, ...], ...]
    intercepts: tuple[float, ...]
    labels: tuple[Index, ...]

    @model_validator(mode="after")
    def _shapes(self) -> LogisticModel:
        widths = {len(row) for row in self.weights} | {len(self.mean), len(self.std)}
        if widths != {FEATURES} or not len(self.weights) == len(self.intercepts) == len(self.labels) > 0:
            raise ValueError(f"a class needs {FEATURES} weights, an intercept and a label")
        if len(set(self.labels)) != len(self.labels):
            raise ValueError("a label stands twice")
        return self

    def predict(self, features: np.ndarray) -> int:
        """features: [FEATURES] -> the label with the largest score, the first of equal ones."""
        scaled = (np.asarray(features, np.float64) - np.array(self.mean)) / np.array(self.std)
        return self.labels[int(np.argmax(np.array(self.weights) @ scaled + np.array(self.intercepts)))]


class SkipvarDecision(Part):
    """After `scale`: a class from the frequencies of two small pictures (SkipVAR, arXiv 2506.08908).

    feature_scale: both pictures are decoded at this scale's map
    skip, uncond:  the classifiers; class 0 of `skip` asks `uncond`, class 0 of that stays on the main path
    skip_paths, uncond_paths: class -> path
    """

    kind: Literal["skipvar"] = "skipvar"
    scale: Index
    feature_scale: Index
    skip: LogisticModel
    uncond: LogisticModel | None = None
    skip_paths: dict[Index, str]
    uncond_paths: dict[Index, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _covered(self) -> SkipvarDecision:
        missing = set(self.skip.labels) - {0} - self.skip_paths.keys()
        if self.uncond is not None:
            missing |= set(self.uncond.labels) - {0} - self.uncond_paths.keys()
        if missing:
            raise ValueError(f"class {min(missing)} leads to no path")
        return self

    def path(self, features: np.ndarray) -> str | None:
        label = self.skip.predict(features)
        if label:
            return self.skip_paths[label]
        label = self.uncond.predict(features) if self.uncond is not None else 0
        return self.uncond_paths[label] if label else None


class SatsDecision(Part):
    """After each of `scales`: where guidance hardly changed any more, it ends (LD-Pruning's SATS, arXiv 2606.00310).

    gamma = |gap_k - gap_(k-1)| / (gap_(k-1) + epsilon) < delta, where gap is the RMS ("rms") or L2 norm ("l2"), over
    computed tokens and logits, of conditional minus unconditional logits before temperature.
    """

    kind: Literal["sats"] = "sats"
    scales: Annotated[tuple[Index, ...], Field(min_length=1)]
    delta: Annotated[float, Field(ge=0)]
    norm: Literal["rms", "l2"] = "rms"
    epsilon: Annotated[float, Field(ge=0)] = 1e-6

    def gap(self, rms: float, values: int) -> float:
        """rms: over `values` logits."""
        return rms if self.norm == "rms" else float(rms * np.sqrt(values))

    def ends_guidance(self, gap: float, before: float) -> bool:
        return bool(abs(gap - before) / (before + self.epsilon) < self.delta)


class EnergyMassDecision(Part):
    """Before each scale with a ladder: the smallest count whose tokens hold `mass` of the score (LD-Pruning's LHEP)."""

    kind: Literal["energy_mass"] = "energy_mass"
    mass: Share

    def count(self, energy: np.ndarray, ladder: tuple[int, ...]) -> int:
        """energy: [N] >= 0. Returns: a rung, never below the number of tokens that the rule asks for."""
        needed = tokens_for_mass(energy, self.mass)
        return next((rung for rung in ladder if rung >= needed), ladder[-1])


Decision = Annotated[RhoDecision | SkipvarDecision | SatsDecision | EnergyMassDecision, Field(discriminator="kind")]


DecisionKind = TypeVar("DecisionKind", RhoDecision, SkipvarDecision, SatsDecision, EnergyMassDecision)


def tokens_for_mass(energy: np.ndarray, mass: float) -> int:
    """k* = smallest j whose j largest values hold `mass` of the sum. energy: [N] >= 0. Returns: 1..N."""
    ordered = np.sort(energy.astype(np.float64))[::-1]
    reached = np.cumsum(ordered) >= mass * ordered.sum()
    return int(np.argmax(reached)) + 1 if reached.any() else ordered.size


def low_entropy_ratio(entropy_nats: np.ndarray) -> float:
    """rho: share of tokens whose entropy is below the scale's mean (ToProVAR eq. 3).

    entropy_nats: [N] >= 0.
    Returns:      in [0, 1); 0 for a single token.
    Raises:       ValueError if a value is NaN or the map is empty.
    """
    if entropy_nats.size == 0 or np.isnan(entropy_nats).any():
        raise ValueError("entropy map is empty or holds NaN")
    wide = entropy_nats.astype(np.float64)
    return float((wide < wide.mean()).mean())


def frequency_features(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """HF_Diff and HF_Ratio of two small pictures, one scale apart.

    before, after: [3, H, W] in [-1, 1].
    Returns: [2] float64: mean |Sobel(after) - Sobel(before)|; share of the amplitude spectrum of `after` outside radius
             floor(0.4 min(H, W) / 2). Sobel: gradient magnitude of the channel mean, zero padding.
    Source:  SkipVAR, fakerone-li/SkipVAR.
    """
    old, new = (picture.astype(np.float64).mean(0) for picture in (before, after))
    difference = np.abs(sobel_magnitude(new) - sobel_magnitude(old)).mean()
    spectrum = np.abs(np.fft.fftshift(np.fft.fft2(new)))
    height, width = new.shape
    y, x = np.ogrid[:height, :width]
    radius = int(0.4 * min(height, width) / 2)
    outside = (y - height // 2) ** 2 + (x - width // 2) ** 2 > radius**2
    total = spectrum.sum()
    return np.array([difference, spectrum[outside].sum() / total if total > 0 else 0.0])


def sobel_magnitude(image: np.ndarray) -> np.ndarray:
    """[H, W] -> [H, W] gradient magnitude by the 3x3 Sobel kernels, zeros beyond the border."""
    p = np.pad(image, 1)
    columns = p[:, 2:] - p[:, :-2]  # [H+2, W]
    rows = p[2:] - p[:-2]  # [H, W+2]
    across = columns[:-2] + 2 * columns[1:-1] + columns[2:]
    down = rows[:, :-2] + 2 * rows[:, 1:-1] + rows[:, 2:]
    return np.hypot(across, down)
