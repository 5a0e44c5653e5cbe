import pytest
import torch

from toprovar.tools.evaluation.background import Background, background_of, render
from toprovar.tools.evaluation.classifier import places_of
from toprovar.tools.evaluation.layouts import arrangement_of, find_arrangement, foreground, objects_mask
from toprovar.tools.train_demo.captions import LAYOUTS, OBJECTS_IN, Scene

WHITE = Background("plain", "white")


def scene_of(layout, pattern="plain", second=""):
    return Scene(layout, tuple(range(OBJECTS_IN[layout])), "noto", pattern, "white", second)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_found_in_its_picture(composer, layout):
    scene = scene_of(layout)
    rgb = (composer.draw([scene])[0] + 1) / 2
    assert find_arrangement(foreground(rgb, background_of(scene))) == arrangement_of(layout)


@pytest.mark.parametrize(("layout", "height", "width"), [("pair", 112, 30), ("above", 30, 112)])
def test_soft_edges_of_bars_as_long_as_their_place_stay_in_it(layout, height, width):
    rgb = render(WHITE)
    for y, x, size in places_of(layout):
        top, left = y + (size - height) // 2, x + (size - width) // 2
        rgb[:, top : top + height, left : left + width] = 0.2
    rgb = torch.nn.functional.avg_pool2d(rgb, 5, stride=1, padding=2, count_include_pad=False)
    rgb = rgb + 0.03 * torch.randn(rgb.shape, generator=torch.Generator().manual_seed(0))
    assert find_arrangement(foreground(rgb.clamp(0, 1), WHITE)) == layout


@pytest.mark.parametrize("pattern", ["checkered", "striped", "gradient"])
def test_patterns_are_no_objects(composer, pattern):
    scene = scene_of("single", pattern, "navy")
    rgb = (composer.draw([scene])[0] + 1) / 2
    mask = foreground(rgb, background_of(scene))
    assert find_arrangement(mask) == "single"
    assert not bool(mask[~objects_mask("single")].any())


def test_tall_and_wide_objects_are_still_one(composer):
    for y, x in ((slice(16, 240), slice(110, 146)), (slice(110, 146), slice(16, 240))):
        mask = torch.zeros(256, 256, dtype=torch.bool)
        mask[y, x] = True
        assert find_arrangement(mask) == "single"


def test_a_missing_object_changes_the_count(composer):
    scene = scene_of("four")
    rgb = (composer.draw([scene])[0] + 1) / 2
    rgb[:, 136:, 136:] = 1.0
    assert find_arrangement(foreground(rgb, WHITE)) != "four"


def test_empty_picture_shows_nothing():
    assert find_arrangement(foreground(render(WHITE), WHITE)) == "none"


def test_a_tinted_background_and_single_specks_make_no_foreground(composer):
    rgb = render(Background("plain", "red")) * 0.8
    rgb[:, 100, 100] = 1.0
    assert not bool(foreground(rgb, Background("plain", "red")).any())
