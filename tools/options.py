"""Options that several commands read the same way."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.guidance import LARGEST, Guidance, grown, per_scale
from toprovar.tools import console

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from toprovar.exporter.lora import Adapters, LoraReport
    from toprovar.exporter.model import Model
    from toprovar.exporter.schedules import Schedule


def numbers(text: str, name: str) -> list[float]:
    """Comma-separated numbers.

    Raises: ToprovarError naming the part that is none.
    """
    values = []
    for part in text.split(","):
        try:
            values.append(float(part))
        except ValueError:
            raise ToprovarError(
                f"{name}: {part.strip()!r} is not a number", f"write {name} 3 or {name} 3,3,2.5,…"
            ) from None
    return values


def in_range(values: list[float], name: str, least: float, is_open: bool = False) -> list[float]:
    """Raises: ToprovarError naming the first value that is no number from `least` (without it, if open) to 1000."""
    for value in values:
        if not least <= value <= LARGEST or (is_open and value == least):
            expected = f"more than {least:g} and at most {LARGEST:g}" if is_open else f"{least:g} to {LARGEST:g}"
            raise ToprovarError(f"{name}: {value:g} is out of range; expected {expected}", f"write {name} 3")
    return values


def guidance_with(base: Guidance, cfg: str | None, tau: str | None) -> Guidance:
    """A guidance with cfg or tau replaced from the command line.

    Raises: ToprovarError for a wrong count or a value out of range.
    """
    scales = len(base.cfg)
    values = base.model_dump()
    if cfg is not None:
        values["cfg"] = grown(in_range(numbers(cfg, "--cfg"), "--cfg", 0), scales, base.growth, "--cfg")
    if tau is not None:
        values["tau"] = per_scale(in_range(numbers(tau, "--tau"), "--tau", 0, is_open=True), scales, "--tau")
    return Guidance(**values)


_PAIR = re.compile(r"(\d+(?:\.\d+)?)\s*(?::|x|×|/)\s*(\d+(?:\.\d+)?)", re.IGNORECASE)


def aspect_from(text: str | None) -> float | None:
    """Height over width: of a number as it is; of a pair (16:9, 1024x768) width comes first, as people write them.

    Raises: ToprovarError if it is neither, or not between 0.01 and 100.
    """
    if text is None:
        return None
    pair = _PAIR.fullmatch(text.strip())
    try:
        aspect = float(pair[2]) / float(pair[1]) if pair else float(text)
    except (ValueError, ZeroDivisionError):
        aspect = math.nan
    if not 0.01 <= aspect <= 100:
        raise ToprovarError(
            f"--aspect {text} is no shape of a picture; expected height over width, or width and height",
            "write --aspect 1.5, --aspect 2:3 or --aspect 832x1248",
        )
    return aspect


def refuse_given(options: Mapping[str, object], why: str, hint: str) -> None:
    """Raises: ToprovarError for the first option that has a value."""
    for name, value in options.items():
        if value is not None:
            raise ToprovarError(f"{name} {value} {why}", hint)


def schedule_with(model: Model, aspect: float | None, budget: str | None, frames: int | None = None) -> Schedule:
    """The model's schedule, or that of another aspect, budget or length; says which template an aspect fell on.

    frames: of the video, from now on the model's own
    Raises: ToprovarError if the model draws no videos, or has no such aspect, budget or length.
    """
    if frames is not None:
        if model.family.video(model) is None:
            raise ToprovarError(f"--frames {frames}: model {model.name} draws pictures", "leave --frames out")
        model.settings = model.settings.model_copy(update={"frames": frames})
    schedule = model.family.schedule(model, aspect, budget)
    if aspect is not None:
        console.say(f"aspect {aspect:g}: {model.family.template(aspect, schedule)}")
    return schedule


def adapters_from(files: Sequence[Path], scales: Sequence[float], allow_unmatched: bool) -> Adapters:
    """Adapters that say on stderr what became of them.

    scales: one for each file, one for all, or none, which is 1
    Raises: ToprovarError for another number of scales, or one without files.
    """
    from toprovar.exporter.lora import Adapters, LoraFile

    if len(scales) not in (0, 1, len(files)) or (scales and not files):
        raise ToprovarError(
            f"{len(scales)} --lora-scale for {len(files)} --lora",
            "give one for each file, in their order, or one for all",
        )
    each = list(scales) or [1.0]
    each = each * len(files) if len(each) == 1 else each
    pairs = zip(files, each, strict=True)

    def tell(report: LoraReport) -> None:
        for line in report.lines():
            console.say(line)

    return Adapters(tuple(LoraFile(file, scale) for file, scale in pairs), allow_unmatched, tell)


def named_values(pairs: list[str], name: str) -> dict[str, str]:
    """NAME=VALUE words as a mapping; dashes in names become underscores.

    Raises: ToprovarError for a word without "=" or a name that stands twice.
    """
    values: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not key:
            raise ToprovarError(f"{name} {pair}: expected NAME=VALUE", f"write {name} ratios=0.4,0.5")
        if key in values:
            raise ToprovarError(f"{name}: {key} is given twice", "give it once")
        values[key] = value.strip()
    return values
