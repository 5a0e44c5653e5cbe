import json

import pytest
from command_line import done, refusal, write_model
from conftest import pruning_plan

from toprovar.exporter.schedules import BUDGET_SCALES, TEMPLATES, nearest_template, schedule_for
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.plan import Plan, Restore, Score, save_plan
from toprovar.tools.options import aspect_from


@pytest.mark.parametrize(
    ("text", "aspect", "template"),
    [
        ("1.5", 1.5, "1.500"), ("2:3", 1.5, "1.500"), ("3:2", 2 / 3, "0.666"), ("16:9", 0.5625, "0.571"),
        ("9:16", 16 / 9, "1.750"), ("1024x768", 0.75, "0.750"), ("832X1248", 1.5, "1.500"), ("1", 1.0, "1.000"),
        ("3/4", 4 / 3, "1.333"), (" 21 : 9 ", 9 / 21, "0.400"),
    ],
)  # fmt: skip
def test_aspects_are_read_as_people_write_them(text: str, aspect: float, template: str) -> None:
    """A number is height over width; of a pair, width comes first."""
    found = aspect_from(text)
    assert found == pytest.approx(aspect)
    assert found is not None
    assert nearest_template(found) == template


@pytest.mark.parametrize("text", ["", "wide", "0", "-1", "nan", "inf", "0:1", "1:0", "1:1000", "1:2:3", "1e9", "4:"])
def test_other_aspects_are_refused(text: str) -> None:
    with pytest.raises(ToprovarError, match="no shape of a picture") as fault:
        aspect_from(text)
    assert "--aspect 2:3" in fault.value.hint


def test_no_aspect_is_none() -> None:
    assert aspect_from(None) is None


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_every_template_is_found_by_its_own_pixels(name: str) -> None:
    for scales in BUDGET_SCALES.values():
        height, width = (16 * side for side in TEMPLATES[name][:scales][-1])
        aspect = aspect_from(f"{width}x{height}")
        assert aspect is not None
        distance = {other: abs(float(other) - aspect) for other in TEMPLATES}
        assert nearest_template(aspect) == min(distance, key=distance.__getitem__)
        if scales == max(BUDGET_SCALES.values()):
            assert nearest_template(aspect) == name


def square_plan(model) -> Plan:
    """Of the square maps up to 16x16, where the last scale alone is large enough to prune."""
    return Plan(
        backbone=model.backbone, schedule=schedule_for(1.0, "0.06M"), method="toprovar",
        keep={6: (256, 256, 128, 64)}, score=Score(kind="entropy", source_layer={6: {2: 1, 3: 1}}),
        restore=Restore(kind="cached_residual", ref_scale=5),
    )  # fmt: skip


def test_export_carries_a_plan_over_to_another_aspect(tiny, tmp_path) -> None:
    model = write_model(tiny, tmp_path / "model")
    save_plan(square_plan(tiny), tmp_path / "plan.json")
    result = done(
        "export",
        model,
        "--plan",
        tmp_path / "plan.json",
        "--aspect",
        "2:3",
        "-o",
        tmp_path / "o",
        "--dry-run",
        "--json",
    )
    told = " ".join(result.stderr.split())
    assert "template 1.500 (height over width), 21x14 tokens" in told
    assert "counts come from template 1.000 (height over width), 16x16 tokens, scaled to 1.500" in told
    scale = json.loads(result.stdout)["scales"][-1]
    assert scale["tokens"] == 294
    # 128 and 64 of 256 tokens are 147 and 73.5 of 294: up to multiples of 64
    assert scale["planned"] == pytest.approx((294 + 294 + 192 + 128) / 4, abs=0.5)


def test_without_an_aspect_a_plan_of_other_maps_is_refused(tiny, tmp_path) -> None:
    model = write_model(tiny, tmp_path / "model")
    save_plan(pruning_plan(tiny), tmp_path / "plan.json")
    told = refusal("export", model, "--plan", tmp_path / "plan.json", "-o", tmp_path / "out")
    assert "another schedule" in told
    told = refusal("export", model, "--plan", tmp_path / "plan.json", "--aspect", "1.5", "-o", tmp_path / "out")
    assert "plan has 6 scales, the schedule asked for 7" in told
    assert not (tmp_path / "out").exists()
