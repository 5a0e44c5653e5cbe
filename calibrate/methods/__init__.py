"""Methods: small pure functions from statistics to a plan. Adding one takes a file here and a line in METHODS."""

from __future__ import annotations

from toprovar.calibrate.methods.dense import DENSE
from toprovar.calibrate.methods.depthvar import DEPTHVAR
from toprovar.calibrate.methods.fastvar import FASTVAR
from toprovar.calibrate.methods.fixed_exit import FIXED_EXIT
from toprovar.calibrate.methods.ld_pruning import LD_PRUNING
from toprovar.calibrate.methods.method import Method
from toprovar.calibrate.methods.skipvar import SKIPVAR
from toprovar.calibrate.methods.stepvar import STEPVAR
from toprovar.calibrate.methods.toprovar import TOPROVAR

METHODS: dict[str, Method] = {
    "dense": DENSE,
    "fixed_exit": FIXED_EXIT,
    "toprovar": TOPROVAR,
    "fastvar": FASTVAR,
    "skipvar": SKIPVAR,
    "stepvar": STEPVAR,
    "depthvar": DEPTHVAR,
    "ld_pruning": LD_PRUNING,
}
