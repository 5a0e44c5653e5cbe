"""Verdicts of a comparison with recorded runs: tolerances, one row per array, and the report.

The families' comparisons (parity.py, parity_hart.py) fill it.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, field
from typing import Literal

import numpy as np

from toprovar.runtime.version import VERSION

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Tolerance:
    """Largest error allowed: `relative` times the largest reference value, plus `absolute`."""

    relative: float
    absolute: float
    reason: str


TOLERANCES = {
    "activation": Tolerance(1e-5, 0.0, "fp32 sums in another order; about 80 units in the last place of the largest"),
    "codes": Tolerance(0.0, 1e-5, "sums of at most 64 maps of +-1/sqrt(d) and their bilinear means"),
    "exact": Tolerance(0.0, 0.0, "bits: one that differs is another token"),
    "diffusion": Tolerance(
        0.0, 1e-4, "the first steps multiply rounding of the predicted noise by up to 2e4 and clamp"
    ),
    "probability": Tolerance(
        0.0, 1e-4, "guidance of 34 multiplies the rounding of the two rows' difference; measured 7e-6 and less"
    ),
    "latent": Tolerance(0.0, 1e-4, "a sum of maps in which a diffusion output takes part"),
    "picture": Tolerance(1e-5, 0.0, "fp32 convolutions; measured 1e-6 of the largest"),
    "rope": Tolerance(1e-5, 0.0, "angles up to 111 in fp32: one unit in the last place is 8e-6"),
}

Kinds = tuple[tuple[re.Pattern[str], str], ...]

# First match wins. Kinds are keys of TOLERANCES.
KINDS: Kinds = (
    (re.compile(r"(enc/)?bits/\d+"), "exact"),
    (re.compile(r"rope"), "rope"),
    (re.compile(r"(enc/)?(next|codes_in)/\d+|summed_codes|codes/from_bits\d*"), "codes"),
    (re.compile(r"enc/(summed_codes|codes|z_q|zq|quant|f_hat)"), "codes"),
    (re.compile(r"dec/x|enc/(z|h|latent|features|raw)"), "picture"),
    (re.compile(r"(in|raw|logits|block(N|\d+))/\d+|cond_BD|gss|ca_kv|cache_[kv]\d+"), "activation"),
)
# Arrays of which a file may hold a leading part only: some rows, tokens, or keys.
MAY_BE_CUT = re.compile(r"(in|raw|block(N|\d+))/\d+|cache_[kv]\d+|rope")

Verdict = Literal["pass", "fail", "not seen", "unknown", "forced"]


@dataclass(frozen=True)
class Row:
    """One array. verdict: "not seen" where the backend shows no such value, "forced" where the file's was fed in."""

    backend: str
    run: str
    array: str
    verdict: Verdict
    values: int = 0
    max_abs_error: float | None = None
    largest: float | None = None
    tolerance: float | None = None
    note: str = ""


@dataclass
class Report:
    file: str
    family: str
    rows: list[Row] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)

    @property
    def compared(self) -> int:
        return sum(row.verdict in ("pass", "fail") for row in self.rows)

    @property
    def failed(self) -> list[Row]:
        return [row for row in self.rows if row.verdict == "fail"]

    @property
    def passed(self) -> bool:
        return self.compared > 0 and not self.failed and not self.empty

    def document(self) -> dict[str, object]:
        """What --json prints. Numbers that are not finite become null."""
        rows = [
            {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(row).items()}
            for row in self.rows
        ]
        return {
            "schema_version": SCHEMA_VERSION,
            "tool_version": VERSION,
            "file": self.file,
            "family": self.family,
            "passed": self.passed,
            "compared": self.compared,
            "failed": len(self.failed),
            "compared_nothing": self.empty,
            "arrays": rows,
        }


def compare_array(
    backend: str, run: str, name: str, found: np.ndarray, expected: np.ndarray, kinds: Kinds | None = None
) -> Row:
    """found: what this project computed; expected: what the file holds. Axes of length 1 do not count.

    kinds: which tolerance goes with which name; those of Infinity if None
    """
    kind = next((kind for pattern, kind in kinds or KINDS if pattern.fullmatch(name)), None)
    if kind is None:
        return Row(backend, run, name, "unknown", note="no array of this name is known")
    note = ""
    if found.shape != expected.shape:
        squeezed = tuple(n for n in expected.shape if n != 1)
        if tuple(n for n in found.shape if n != 1) == squeezed:
            found = found.reshape(expected.shape)
        elif (
            MAY_BE_CUT.fullmatch(name)
            and found.ndim == expected.ndim
            and found.shape[-1] == expected.shape[-1]
            and all(e <= f for e, f in zip(expected.shape, found.shape, strict=True))
        ):
            note = f"leading part of {list(found.shape)}" if name[:3] != "in/" else ""
            found = found[tuple(slice(0, n) for n in expected.shape)]
        else:
            return Row(backend, run, name, "fail", note=f"shape {list(found.shape)}, expected {list(expected.shape)}")
    if expected.size == 0:
        return Row(backend, run, name, "fail", note="the array is empty: nothing to compare")
    wide_found, wide = found.astype(np.float64), expected.astype(np.float64)
    tolerance = TOLERANCES[kind]
    largest = float(np.abs(wide).max())
    limit = tolerance.relative * largest + tolerance.absolute
    for side, array in (("computed", wide_found), ("recorded", wide)):
        if not np.isfinite(array).all():
            count = int((~np.isfinite(array)).sum())
            return Row(
                backend, run, name, "fail", expected.size, math.nan, largest, limit, f"{count} {side} values not finite"
            )
    error = float(np.abs(wide_found - wide).max())
    return Row(backend, run, name, "pass" if error <= limit else "fail", expected.size, error, largest, limit, note)


def absent(backend: str, run: str, name: str, known: bool) -> Row:
    """An array that was not compared; known: of a name that this project knows."""
    if known:
        return Row(backend, run, name, "not seen", note=f"{backend} does not compute or show it")
    return Row(backend, run, name, "unknown", note="no array of this name is known")
