"""The families that can be calibrated and exported."""

from __future__ import annotations

from toprovar.exporter.families import Family
from toprovar.exporter.family import ModelFamily
from toprovar.exporter.hart.family import HartFamily
from toprovar.exporter.infinity.family import InfinityFamily
from toprovar.exporter.infinitystar.family import InfinityStarFamily
from toprovar.exporter.var.family import VarFamily

FAMILIES: dict[Family, ModelFamily] = {
    family.transformer: family for family in (InfinityFamily(), VarFamily(), HartFamily(), InfinityStarFamily())
}
