"""One prompt through the dense model, reduced to the numbers that methods read.

Everything is of the conditional row. The formulas: docs/calibration.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from toprovar.calibrate.measures import singular_ratio, singular_values, ssim
from toprovar.exporter.schedules import Schedule
from toprovar.runtime.decisions import frequency_features, low_entropy_ratio, tokens_for_mass
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.guidance import Guidance
from toprovar.runtime.pipeline import picture_from_image
from toprovar.runtime.plan import CfgStop, dense_plan

if TYPE_CHECKING:
    from torch import Tensor

    from toprovar.exporter.model import Model
    from toprovar.exporter.planned.loop import Generation
    from toprovar.runtime.plan import Plan

REPRESENTATIVE_SCALE = 5  # s = 6 counted from 1, where ToProVAR reads the layer score (section 5.3)
FEATURE_SCALE = 4  # whose map SkipVAR decodes its small pictures at: 8 x 8 tokens
ENERGY_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
CONDITIONAL_SCALES = 3  # the last scales at which guidance may stop (SkipVAR's three classes)


def guard_scale(schedule: Schedule) -> int:
    """First scale whose longer side is at least 3/8 of the last one's: 24x24 of 64x64, 12x12 of 32x32."""
    last = max(schedule[-1])
    return next(k for k, size in enumerate(schedule) if max(size) * 8 >= last * 3)


def run_in_torch(
    model: Model,
    schedule: Schedule,
    guidance: Guidance,
    prompt: str,
    seed: int,
    plan: Plan | None = None,
    **options: Any,
) -> Generation:
    """One prompt with the seeded noise of the runtime; `options` are those of `LoopOptions`."""
    from toprovar.exporter.planned.loop import LoopOptions

    family = model.family
    if model.tokenizer is not None:
        options["small_picture"] = lambda codes, size: family.small_picture(model, codes, size)
    asked = family.prompt(model, [prompt], guidance)
    return family.generate(model, asked, schedule, guidance, [seed], LoopOptions(plan=plan, **options))


def picture_of(model: Model, codes: Tensor) -> np.ndarray:
    """Accumulated codes [1, d, h, w] -> [H, W, 3] uint8. Raises: ToprovarError if the model cannot make pictures."""
    if model.tokenizer is None:
        raise ToprovarError("calibration needs the tokenizer, to judge pictures", "pass --tokenizer")
    return picture_from_image(model.family.decode(model, codes)[0].numpy())


def measure_prompt(
    model: Model, schedule: Schedule, guidance: Guidance, prompt: str, seed: int, keep_maps: bool
) -> dict[str, np.ndarray]:
    """One dense run of one prompt. Returns: the fields of `Statistics` for it, and its maps and pictures if asked
    for."""
    from toprovar.exporter.planned.scores import code_energy

    config, family = model.config, model.family
    scales, layers = len(schedule), config.depth
    guard, features = guard_scale(schedule), min(FEATURE_SCALE, scales - 1)
    found: dict[str, np.ndarray] = {
        "rho": np.empty(scales),
        "mean_entropy": np.empty((scales, layers)),
        "singular_values": np.empty((layers, 2)),
        "singular_ratio": np.empty(layers),
        "truncated_ssim": np.full(scales, np.nan),
        "change": np.empty((scales, layers)),
        "energy_tokens": np.full((scales, len(ENERGY_SHARES)), np.nan),
        "frequency": np.full((scales, 2), np.nan),
        "guidance_gap": np.full(scales, np.nan),
    }
    pictures: dict[int, np.ndarray] = {}
    small: dict[int, np.ndarray] = {}

    def after_scale(scale: int, codes: Tensor) -> None:
        if scale >= guard:
            pictures[scale] = picture_of(model, codes)
        if scale >= features:
            small[scale] = family.small_picture(model, codes, schedule[features])
            if scale > features:
                found["frequency"][scale] = frequency_features(small.pop(scale - 1), small[scale])

    entering: list[Tensor] = []
    patch = family.patch(config)

    def watch(name: str, scale: int, tensor: Tensor) -> None:
        if name.startswith("block") and name != "blockN":
            found["change"][scale, int(name[5:])] = float((tensor[0] - entering[0]).abs().mean())
        if name == "in" or name.startswith("block"):
            entering[:] = [tensor[0]]
        elif name == "raw" and len(tensor) == 2:
            drawn = tensor[:, -schedule[scale][0] * schedule[scale][1] :]  # without text tokens that run along
            found["guidance_gap"][scale] = float((drawn[0] - drawn[1]).square().mean().sqrt())
        elif name == "code" and scale + 1 < scales:
            energy = code_energy(tensor, patch, schedule[scale + 1])[0].numpy()
            found["energy_tokens"][scale + 1] = [tokens_for_mass(energy, share) for share in ENERGY_SHARES]

    run = run_in_torch(
        model, schedule, guidance, prompt, seed, entropy_layers=range(layers), on_scale=after_scale, observe=watch
    )
    representative = min(REPRESENTATIVE_SCALE, scales - 1)
    for k, picture in pictures.items():
        found["truncated_ssim"][k] = ssim(picture, pictures[scales - 1])
    for k, (height, width) in enumerate(schedule):
        maps = np.stack([run.entropy[k, layer][0].numpy() for layer in range(layers)])  # [L, N], conditional row
        found["rho"][k] = low_entropy_ratio(maps.mean(0))
        found["mean_entropy"][k] = maps.mean(1)
        if k == representative:
            found["singular_values"][:] = [singular_values(m.reshape(height, width)) for m in maps]
            found["singular_ratio"][:] = [singular_ratio(m.reshape(height, width)) for m in maps]
        if keep_maps:
            found[f"entropy_{k}"] = maps.reshape(layers, height, width).astype(np.float32)
            if k in pictures:
                found[f"picture_{k}"] = pictures[k]
    return found


def measure_conditional(
    model: Model, schedule: Schedule, guidance: Guidance, prompt: str, seed: int
) -> dict[str, np.ndarray]:
    """SSIM to the full picture where guidance stops at each of the last scales."""
    full = picture_of(model, run_in_torch(model, schedule, guidance, prompt, seed).codes)
    found = np.full(len(schedule), np.nan)
    for scale in range(max(1, len(schedule) - CONDITIONAL_SCALES), len(schedule)):
        plan = dense_plan(model.backbone, schedule).model_copy(
            update={"method": "conditional", "cfg_stop": CfgStop(mode="static", scale=scale)}
        )
        found[scale] = ssim(picture_of(model, run_in_torch(model, schedule, guidance, prompt, seed, plan).codes), full)
    return {"conditional_ssim": found}
