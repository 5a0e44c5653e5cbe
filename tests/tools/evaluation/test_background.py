import numpy as np
import pytest
import torch
from skimage.color import rgb2lab

from toprovar.tools.evaluation.background import (
    Background,
    all_backgrounds,
    background_of,
    find_background,
    lab_from_rgb,
    render,
)
from toprovar.tools.train_demo.captions import Scene

TOLERANCE = {"lab": 2e-2}  # fp32, and white point and matrix in four to seven digits


def test_lab_agrees_with_scikit_image():
    rgb = torch.rand(2, 3, 17, 5, generator=torch.Generator().manual_seed(0))
    expected = rgb2lab(rgb.double().permute(0, 2, 3, 1).numpy())
    found = lab_from_rgb(rgb).permute(0, 2, 3, 1).numpy()
    np.testing.assert_allclose(found, expected, atol=TOLERANCE["lab"])


def test_every_background_is_found_in_its_own_picture():
    every = all_backgrounds()
    assert len(every) == 13 + 3 * 13 * 12
    pictures = torch.stack([render(background) for background in every])
    for single in (True, False):
        assert find_background(pictures, single) == list(every)


def test_background_survives_noise_softness_and_an_object_up_to_the_frame():
    generator = torch.Generator().manual_seed(1)
    chosen = all_backgrounds()[::17]
    pictures = torch.stack([render(background) for background in chosen])
    pictures = torch.nn.functional.avg_pool2d(pictures, 5, stride=1, padding=2, count_include_pad=False)
    pictures = pictures + 0.06 * torch.randn(pictures.shape, generator=generator)
    pictures[:, :, 16:240, 16:240] = torch.rand(3, 1, 1, generator=generator)
    assert find_background(pictures.clamp(0, 1), single=True) == list(chosen)


def test_a_smudge_on_the_border_does_not_decide():
    picture = render(Background("plain", "red"))
    picture[:, :40, 100:180] = 0.0
    assert find_background(picture[None], single=True) == [Background("plain", "red")]


def test_wrong_colour_is_told():
    assert find_background(render(Background("plain", "orange"))[None], True) != [Background("plain", "red")]


@pytest.mark.parametrize(
    ("scene", "expected"),
    [
        (Scene("pair", (0, 1), "flat", "plain", "red"), Background("plain", "red")),
        (Scene("single", (0,), "flat", "striped", "red", "blue"), Background("striped", "red", "blue")),
    ],
)
def test_scene_has_one_background(scene, expected):
    assert background_of(scene) == expected
    assert expected.colours == {scene.first, scene.second} - {""}
