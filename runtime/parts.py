"""What the schemas share: a strict base, and the numbers that count things."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Side = Annotated[int, Field(ge=1, le=2**20)]
Index = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class Part(BaseModel):
    """Unknown keys, NaN and infinity are refused; values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True)
