"""What the schemas share: a strict base, and the numbers that count things."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _whole(value: Any) -> Any:
    # keys of JSON objects are text: of several spellings of one number ("5", "05", "5.0") the last would win in silence
    if isinstance(value, str) and not (value.isdecimal() and (value == "0" or not value.startswith("0"))):
        raise ValueError("expected a whole number in decimal digits, without leading zeros")
    if isinstance(value, bool | float):
        raise ValueError("expected a whole number")
    return value


Whole = BeforeValidator(_whole)
Side = Annotated[int, Whole, Field(ge=1, le=2**20)]
Index = Annotated[int, Whole, Field(ge=0)]
Count = Annotated[int, Whole, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class Part(BaseModel):
    """Unknown keys, NaN and infinity are refused; values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True)
