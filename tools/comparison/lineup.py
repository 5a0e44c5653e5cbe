"""What is compared: plan files, and methods by name, also with settings and a target: `fastvar:paper@3`."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toprovar.calibrate.fitting import check_settings, fit_plan
from toprovar.calibrate.methods import METHODS
from toprovar.calibrate.methods.settings import MethodSettings
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.plan import Plan, dense_plan, load_plan
from toprovar.tools.evaluation.kept_pictures import file_name_of
from toprovar.tools.evaluation.plans import name_of_plan

if TYPE_CHECKING:
    from toprovar.calibrate.statistics import Statistics
    from toprovar.exporter.model import Model

DENSE = "dense"
TARGETS = (1.5, 2.0, 3.0)  # token-layer speed-ups that every method is asked for where nothing is named
PAPER_TARGET = 4.0  # beside the paper preset's own strength: the two scales it leaves out save 2.74 times on the demo
PRESETS = ("full", "paper")
NUMBERS: dict[str, type] = {
    "tau": float, "scale_depth": int, "beta": float, "global_layers": int, "alpha_min": float, "alpha_max": float,
    "phi_floor": float,
}  # fmt: skip
CHOICES = {
    "direction": ("auto", "le", "ge"),
    "restore": ("identity", "cached_residual", "prev_residual"),
    "resample": ("bilinear", "area"),
}
_FORM = re.compile(r"(?P<method>[^:@]+)(?::(?P<words>[^@]*))?(?:@(?P<target>.*))?")
_HINT = "write NAME, NAME@TARGET, NAME:paper@TARGET or NAME:SETTING=VALUE@TARGET, such as toprovar:scale_depth=6@2"


@dataclass(frozen=True)
class Contestant:
    """name: what tables call it; path: a plan file, or None for a method that is fitted with `settings`."""

    name: str
    path: Path | None = None
    method: str = ""
    settings: MethodSettings = field(default_factory=MethodSettings)


def contestant_of_method(text: str) -> Contestant:
    """NAME[:WORD,...][@TARGET]; a word is a preset, a setting of `MethodSettings` or an option of the method.

    Raises: ToprovarError for an unknown method, preset or option, with the nearest name, or a value that does not fit.
    """
    match = _FORM.fullmatch(text)
    if match is None:
        raise ToprovarError(f"--method {text!r} names no method", _HINT)
    method, words, target = match["method"], match["words"], match["target"]
    if method == DENSE:
        raise ToprovarError("--method dense: dense is always drawn", "leave it out")
    values: dict[str, Any] = {}
    options: dict[str, str] = {}
    for word in [] if words is None else words.split(","):
        name, equals, value = word.partition("=")
        key = name if equals else "preset"
        if key in values or key in options:
            raise ToprovarError(f"--method {text}: {key} is given twice", "give it once")
        if not equals:
            values[key] = _one_of(PRESETS, word, f"--method {text}: unknown preset {word}")
        elif key in NUMBERS:
            values[key] = _number(NUMBERS[key], value, text)
        elif key in CHOICES:
            values[key] = _one_of(CHOICES[key], value, f"--method {text}: unknown {key} {value}")
        else:
            options[key] = value
    if target is not None:
        values["target_speedup"] = _number(float, target, text)
        if values["target_speedup"] < 1:
            raise ToprovarError(f"--method {text}: the target speed-up is {target}; expected 1 or more", _HINT)
    settings = MethodSettings(**values, options=options)
    check_settings(method, settings)
    return Contestant(text, None, method, settings)


def _one_of(known: Sequence[str], found: str, message: str) -> str:
    if found not in known:
        near = difflib.get_close_matches(found, known, 1)
        raise ToprovarError(message, f"did you mean {near[0]}?" if near else f"choose from: {', '.join(known)}")
    return found


def _number(kind: type, value: str, text: str) -> float | int:
    try:
        number = kind(value)
    except ValueError:
        raise ToprovarError(f"--method {text}: {value!r} is not {_KINDS[kind]}", _HINT) from None
    if not (math.isfinite(number) and number >= 0):
        raise ToprovarError(f"--method {text}: {value} is out of range; expected 0 or more", _HINT)
    return number


_KINDS = {int: "a whole number", float: "a number"}


def contestant_of_file(path: Path) -> Contestant:
    """Raises: ToprovarError if there is no such file."""
    if not path.is_file():
        raise ToprovarError(f"--plan {path} is not a file", "pass a plan.json; methods are named with --method")
    return Contestant(name_of_plan(path), path)


def every_method() -> list[Contestant]:
    """All methods of the registry but dense: at every target where they have one, as published where that is known."""
    texts = []
    for name, method in METHODS.items():
        if name == DENSE:
            continue
        texts += [f"{name}@{target:g}" for target in TARGETS] if method.is_tunable else [name]
        if "preset" in method.reads:
            texts += [f"{name}:paper", f"{name}:paper@{PAPER_TARGET:g}"]
        elif method.is_tunable and name != "fixed_exit":  # one whose own setting is published, as SkipVAR's threshold
            texts.append(name)
    return [contestant_of_method(text) for text in texts]


def lineup(plans: Sequence[Path], methods: Sequence[str]) -> list[Contestant]:
    """Raises: ToprovarError if two would have one name, or one is called dense."""
    if not plans and not methods:
        return every_method()
    found = [*(contestant_of_file(path) for path in plans), *(contestant_of_method(text) for text in methods)]
    for i, one in enumerate(found):
        name = file_name_of(one.name)
        if name == DENSE or any(name == file_name_of(other.name) for other in found[:i]):
            raise ToprovarError(
                f"there is already a variant named {one.name}",
                "name the plan files apart, and give every method once; dense is always drawn",
            )
    return found


def load_files(contestants: Sequence[Contestant], model: Model) -> dict[str, Plan]:
    """The plan files. Raises: ToprovarError for a damaged plan, or one of another model; names the file."""
    plans = {}
    for one in contestants:
        if one.path is None:
            continue
        plan = load_plan(one.path)
        try:
            plan.check_backbone(model.backbone, model.schedule)
        except ToprovarError as error:
            raise ToprovarError(f"{one.path}: {error.message}", error.hint) from None
        plans[one.name] = plan
    return plans


def needs_of(contestants: Sequence[Contestant]) -> set[str]:
    """Further statistics that the fitted ones read."""
    return {need for one in contestants if one.path is None for need in METHODS[one.method].needs}


def fit_all(
    contestants: Sequence[Contestant],
    files: dict[str, Plan],
    model: Model,
    stats: Statistics | None,
    is_asked: bool,
) -> tuple[dict[str, Plan], list[dict[str, str]]]:
    """Plans by name in the order of the lineup, and those left out with the reason.

    is_asked: the user named them, so that a target out of reach is an error; otherwise it is a reason. So is a plan
              that decides the same as dense or as one before it.
    """
    plans: dict[str, Plan] = {}
    known = {_decides(dense_plan(model.backbone, model.schedule)): DENSE}
    left_out = []
    for one in contestants:
        if one.path is not None:
            plans[one.name] = files[one.name]
            known.setdefault(_decides(plans[one.name]), one.name)
            continue
        assert stats is not None
        try:
            plan = fit_plan(one.method, stats, model.backbone, one.settings)
        except ToprovarError as error:
            if is_asked:
                raise ToprovarError(f"{one.name}: {error.message}", error.hint) from None
            left_out.append({"name": one.name, "reason": error.message})
            continue
        twin = known.setdefault(_decides(plan), one.name)
        if twin != one.name and not is_asked:
            left_out.append({"name": one.name, "reason": f"the same plan as {twin}"})
            continue
        plan.check_backbone(model.backbone, model.schedule)
        plans[one.name] = plan
    return plans, left_out


def _decides(plan: Plan) -> str:
    """Everything that a picture depends on."""
    return plan.model_dump_json(exclude={"tool_version", "method", "preset", "calib", "layers", "D"})
