"""What a user may turn when a plan is fitted; every field has the default the docs describe."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_origin

from pydantic import ValidationError, model_validator

from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.parts import Part


@dataclass(frozen=True)
class MethodSettings:
    """What several methods read:

    preset:         "full" keeps every scale; "paper" also skips the last two, as published 2B results imply
    scale_depth:    ToProVAR's D, fixed exit's last scale; None fits it
    target_speedup: token-layer speed-up to reach by stronger settings; None leaves them alone
    restore, resample: what pruned positions get, where the method leaves a choice; None is its own default
    ssim_threshold: a truncated picture this close to the full one counts as settled
    options:        the method's own options by name, as text or as values; its `Options` class checks them

    What ToProVAR reads:

    tau:            threshold on rho; None fits it to the statistics
    direction:      which side of tau counts as settled; "auto" reads it off the calibration curve
    beta:           steepness of R; None puts R = 1/2 at the split between Global and Detail
    global_layers:  how many layers stay dense, those with the largest sigma1/sigma2; None splits by Otsu's rule
    alpha_min, alpha_max: bounds of the pruning probability (ToProVAR eq. 6)
    phi_floor:      smallest phi(s) = s / S_max; 0 is the paper's ramp, 1 prunes late scales all alike
    """

    preset: Literal["full", "paper"] = "full"
    tau: float | None = None
    direction: Literal["auto", "le", "ge"] = "auto"
    scale_depth: int | None = None
    beta: float | None = None
    global_layers: int | None = None
    alpha_min: float = 0.0
    alpha_max: float = 0.9
    phi_floor: float = 0.0
    target_speedup: float | None = None
    restore: Literal["identity", "cached_residual", "prev_residual"] | None = None
    resample: Literal["bilinear", "area"] | None = None
    ssim_threshold: float = 0.8
    options: Mapping[str, Any] = field(default_factory=dict)


class MethodOptions(Part):
    """Options of one method; a list may be written with commas."""

    @model_validator(mode="before")
    @classmethod
    def _split(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        split = dict(values)
        for name, value in values.items():
            spec = cls.model_fields.get(name)
            if (
                spec is not None
                and isinstance(value, str)
                and "tuple" in str(get_origin(spec.annotation) or spec.annotation)
            ):
                split[name] = [part.strip() for part in value.split(",") if part.strip()]
        return split

    def largest(self, scales: int, layers: int) -> dict[str, int]:
        """The largest value of options that name a scale or layer, and the longest of lists, for a model."""
        return {}


Options = TypeVar("Options", bound=MethodOptions)


def options_of(kind: type[Options], settings: MethodSettings, method: str) -> Options:
    """The method's options, checked.

    Raises: ToprovarError for an unknown name, with the nearest known one, or a value that does not fit.
    """
    for name in settings.options:
        if name not in kind.model_fields:
            near = difflib.get_close_matches(name, kind.model_fields, 1)
            known = ", ".join(kind.model_fields) or "none"
            raise ToprovarError(
                f"method {method} has no option {name}", f"did you mean {near[0]}?" if near else f"it has: {known}"
            )
    try:
        return kind.model_validate(dict(settings.options))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "options"
        raise ToprovarError(
            f"option {place} of method {method}: {first['msg'].lower()} (found {first['input']!r})",
            "see docs/calibration.md",
        ) from None
