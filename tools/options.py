"""Options that several commands read the same way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.guidance import Guidance, per_scale

if TYPE_CHECKING:
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


def guidance_with(base: Guidance, cfg: str | None, tau: str | None) -> Guidance:
    """A guidance with cfg or tau replaced from the command line.

    Raises: ToprovarError for a wrong count or a value out of range.
    """
    scales = len(base.cfg)
    values = base.model_dump()
    if cfg is not None:
        values["cfg"] = per_scale(numbers(cfg, "--cfg"), scales, "--cfg")
    if tau is not None:
        values["tau"] = per_scale(numbers(tau, "--tau"), scales, "--tau")
    try:
        return Guidance(**values)
    except ValueError:
        raise ToprovarError(
            f"guidance is out of range: cfg {list(values['cfg'])}, tau {list(values['tau'])}",
            "cfg takes 0 to 1000, tau more than 0 up to 1000",
        ) from None


def schedule_with(model: Model, aspect: float | None, budget: str | None) -> Schedule:
    """The model's schedule, or that of another aspect or budget."""
    from toprovar.exporter.schedules import schedule_for

    settings = model.settings
    return schedule_for(settings.aspect if aspect is None else aspect, settings.budget if budget is None else budget)
