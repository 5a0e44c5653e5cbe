"""The plans an evaluation compares: files, or presets calibrated for it, such as `paper` and `full@2`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from toprovar.calibrate.fitting import fit_plan
from toprovar.calibrate.methods.settings import MethodSettings
from toprovar.calibrate.statistics import Statistics
from toprovar.exporter.model import Model
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.plan import Plan, load_plan
from toprovar.tools.evaluation.pictures import DENSE

PRESETS: dict[str, tuple[str, Literal["full", "paper"]]] = {  # name -> (method, preset)
    "paper": ("toprovar", "paper"),
    "full": ("toprovar", "full"),
    "fixed_exit": ("fixed_exit", "full"),
}
_PRESET = re.compile(rf"({'|'.join(PRESETS)})(?:@(\d+(?:\.\d+)?))?")
_HINT = "pass a plan.json, or paper, full, fixed_exit, also with a target speed-up: full@2"


@dataclass(frozen=True)
class PlanSource:
    """name: what tables call it; path: a plan file, or None for a preset with an optional target (TLE speed-up)."""

    name: str
    path: Path | None = None
    preset: str = ""
    target_speedup: float | None = None


def plan_source(text: str) -> PlanSource:
    """Raises: ToprovarError if it is neither a file nor the name of a preset."""
    if match := _PRESET.fullmatch(text):
        target = float(match[2]) if match[2] else None
        if target is not None and target < 1:
            raise ToprovarError(f"--plan {text}: the target speed-up is {target:g}; expected 1 or more", _HINT)
        return PlanSource(text, preset=match[1], target_speedup=target)
    path = Path(text)
    if not path.exists():
        raise ToprovarError(f"--plan {text} is neither a file nor a preset", _HINT)
    return PlanSource(name_of_plan(path), path)


def name_of_plan(path: Path) -> str:
    """What tables call a plan file: its own name, or that of the folder that a calibration wrote it into."""
    return path.stem if path.stem != "plan" else path.absolute().parent.name or "plan"


def plan_sources(texts: Sequence[str]) -> list[PlanSource]:
    """Raises: ToprovarError if two plans would have one name, or one is called dense."""
    sources = [plan_source(text) for text in texts]
    for i, source in enumerate(sources):
        if source.name == DENSE or any(source.name == other.name for other in sources[:i]):
            raise ToprovarError(
                f"--plan {texts[i]}: there is already a variant named {source.name}",
                "name the files apart, and give every plan once; dense is always drawn",
            )
    return sources


def plans_from(sources: Sequence[PlanSource], model: Model, stats: Callable[[], Statistics]) -> dict[str, Plan]:
    """Loads or fits every plan. stats: called once, where a preset needs them.

    Raises: ToprovarError for a plan of another model, or a target out of reach.
    """
    gathered: Statistics | None = None
    plans = {}
    for source in sources:
        if source.path is not None:
            plan = load_plan(source.path)
        else:
            gathered = gathered or stats()
            method, preset = PRESETS[source.preset]
            settings = MethodSettings(preset=preset, target_speedup=source.target_speedup)
            plan = fit_plan(method, gathered, model.backbone, settings)
        plan.check_backbone(model.backbone, model.schedule)
        plans[source.name] = plan
    return plans
