"""Models and plans to measure with: random weights of any size, made on the device; a plan as ToProVAR makes them."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

from toprovar.exporter.infinity.config import PUBLISHED, InfinityConfig
from toprovar.runtime.plan import COUNT_GRID, MIN_PRUNED_TOKENS, Backbone, Plan, Restore, Score

if TYPE_CHECKING:
    from toprovar.exporter.model import Model

TEXT_TOKENS = 64  # of every prompt that the random models are measured with
CONFIGS = {
    "2b": PUBLISHED["infinity-2b"],
    "small": InfinityConfig(4, 256, 4, 1024, 64, 16, pool_heads=4, text_length=TEXT_TOKENS),
}
BUDGETS = {"2b": "1M", "small": "0.25M"}
GLOBAL_EVERY = 4  # one layer in so many stays whole and ranks the tokens of those behind it
KEPT_OF_LAST = (0.75, 0.6, 0.45, 0.3)  # share of tokens that pruned layers keep at the last scales


def random_model(name: str, device: str, seed: int = 0) -> Model:
    """An Infinity with random weights of a real model's size and magnitudes; no tokenizer, no text encoder.

    name: of CONFIGS
    """
    import torch

    from toprovar.exporter.infinity.transformer import Infinity
    from toprovar.exporter.model import Model, ModelFile

    config = CONFIGS[name]
    with torch.device("meta"):
        transformer = Infinity(config)
    transformer = transformer.to_empty(device=device).eval().requires_grad_(False)
    torch.manual_seed(seed)
    with torch.inference_mode():
        for key, tensor in transformer.state_dict().items():
            if key.endswith("scale_mul_1H11"):
                tensor.fill_(math.log(4.0))
            elif key.endswith(("norm.weight", "text_norm.weight")):
                tensor.fill_(1.0)
            elif key.endswith("ada_gss"):
                tensor.normal_(0.0, 0.05)
                tensor[:, :, :2] += 0.5  # gamma: residual branches are open, and sums stay small over 32 layers
            elif key.endswith("mat_q") and tensor.dim() == 3:
                tensor.normal_(0.0, config.width**-0.5)
            elif tensor.dim() < 2:
                tensor.normal_(0.0, 0.02)
            else:
                tensor.normal_(0.0, 0.7 * tensor.shape[-1] ** -0.5)
        transformer.shared_ada_lin[1].weight.mul_(0.1)
        transformer.head_nm.ada_lin[1].weight.mul_(0.1)
        for key, tensor in transformer.state_dict().items():
            if key.endswith("zero_k_bias"):
                tensor.zero_()
    settings = ModelFile(transformer=f"random-{name}", budget=BUDGETS[name], text_tokens=TEXT_TOKENS, cfg=(3.0,))
    return Model(f"random-{name}", config, transformer, None, None, None, settings, "")


def pruning_plan(backbone: Backbone, schedule: tuple[tuple[int, int], ...]) -> Plan:
    """Prunes the last scales: one layer in four whole, the others keep the tokens of lowest entropy in its map."""
    keep, sources = {}, {}
    pruned = [scale for scale in range(len(schedule)) if math.prod(schedule[scale]) >= MIN_PRUNED_TOKENS]
    pruned = pruned[-len(KEPT_OF_LAST) :]
    for scale, share in zip(pruned, KEPT_OF_LAST[-len(pruned) :], strict=True):
        tokens = math.prod(schedule[scale])
        kept = max(round(tokens * share / COUNT_GRID), 1) * COUNT_GRID
        layers = [layer for layer in range(backbone.layers) if layer % GLOBAL_EVERY]
        keep[scale] = tuple(kept if layer in layers else tokens for layer in range(backbone.layers))
        sources[scale] = {layer: layer - layer % GLOBAL_EVERY for layer in layers}
    restore = Restore(kind="cached_residual", ref_scale=pruned[0] - 1)
    score = Score(kind="entropy", source_layer=sources)
    return Plan(backbone=backbone, schedule=schedule, method="toprovar", score=score, keep=keep, restore=restore)


def make_bundle(model: Model, folder: Path, compute: str, watched: tuple[str, ...] = ()) -> float:
    """Dense and planned. Returns: seconds it took; 0 where an earlier run has left it."""
    if (folder / "manifest.json").exists():
        return 0.0
    from toprovar.exporter.bundle_writer import export_bundle
    from toprovar.exporter.planned.step import StepOptions

    begin = time.perf_counter()
    guidance = model.guidance(model.schedule)
    options = StepOptions(text_tokens=model.text_tokens, compute=compute, watched=watched)
    export_bundle(model, folder, guidance, options, pruning_plan(model.backbone, model.schedule))
    return time.perf_counter() - begin
