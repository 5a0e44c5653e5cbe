from __future__ import annotations

import pytest

from toprovar.runtime.plan import Plan, Restore, Score

LAST = 9  # the demo's last scale
KEEP = (1024, 1024, 1024, 512, 512, 256, 256, 128)


@pytest.fixture(scope="session")
def demo_bundle(tmp_path_factory):
    """The demo model in bf16, dense and with its last scale pruned. Copy it before changing it."""
    from toprovar.exporter.bundle_writer import export_bundle
    from toprovar.exporter.model import load_model
    from toprovar.exporter.planned.step import StepOptions
    from toprovar.exporter.schedules import schedule_for

    model = load_model("demo")
    settings = model.settings
    schedule = schedule_for(settings.aspect, settings.budget)
    plan = Plan(
        backbone=model.backbone,
        schedule=schedule,
        method="toprovar",
        score=Score(kind="entropy", source_layer={LAST: {layer: 2 for layer in range(3, 8)}}),
        keep={LAST: KEEP},
        restore=Restore(kind="cached_residual", ref_scale=8),
    )
    guidance = model.guidance(schedule)
    options = StepOptions.for_guidance(guidance, model.config.depth, settings.text_tokens, "bf16")
    folder = tmp_path_factory.mktemp("demo") / "bundle"
    export_bundle(model, folder, guidance, options, plan)
    return folder
