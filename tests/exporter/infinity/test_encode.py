"""Bits of a picture, fed to the loop, end with the codes of the picture."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import GUIDANCE, SCHEDULE, tiny_model
from PIL import Image

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'toprovar[torch]'")

from toprovar.exporter.checkpoints import open_checkpoint  # noqa: E402
from toprovar.exporter.infinity.encode import (  # noqa: E402
    fitted_picture,
    image_bits,
    picture_size,
    token_bits,
)
from toprovar.exporter.infinity.generate import generate  # noqa: E402
from toprovar.exporter.infinity.load import load_tokenizer  # noqa: E402
from toprovar.exporter.infinity.tokenizer import BitTokenizer, TokenizerConfig, unpatch_bits  # noqa: E402
from toprovar.exporter.model import PACKAGED  # noqa: E402
from toprovar.exporter.prompts import encode_prompt  # noqa: E402
from toprovar.exporter.schedules import schedule_for  # noqa: E402
from toprovar.runtime.errors import ToprovarError  # noqa: E402
from toprovar.runtime.pipeline import picture_from_image  # noqa: E402

# the same sums of +-1/sqrt(d) in another order, fp32; measured 0
TOLERANCE = 1e-6
# the demo's tokenizer on a picture of flat shapes; measured 29.7 dB
LEAST_PSNR_DB = 27.0


def noise_picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.mark.parametrize("patchify", [False, True])
def test_forcing_the_bits_of_a_picture_gives_its_codes(patchify):
    model = tiny_model(patchify=patchify)
    patch = model.config.patch
    pictures = np.stack([noise_picture(*picture_size(SCHEDULE, model.tokenizer, patch), seed) for seed in (0, 1)])
    for picture in pictures:
        known = image_bits(model.tokenizer, picture, SCHEDULE, patch)
        assert [tuple(bits.shape) for bits in known.bits] == [(1, h * w, model.config.bits) for h, w in SCHEDULE]
        prompt = encode_prompt(model, "red apple", GUIDANCE)
        run = generate(model.transformer, prompt, SCHEDULE, GUIDANCE, forced_bits=known.bits)
        assert run.codes.shape == known.codes.shape
        assert (run.codes - known.codes).abs().max() <= TOLERANCE
    both = image_bits(model.tokenizer, pictures, SCHEDULE, patch)
    assert [torch.equal(a[1:], b) for a, b in zip(both.bits, known.bits, strict=True)] == [True] * len(SCHEDULE)


def test_bits_of_patches_are_the_inverse_of_taking_them_apart():
    bits = torch.randint(0, 2, (2, 3, 5, 24), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)
    assert torch.equal(token_bits(unpatch_bits(bits), 2), bits.flatten(1, 2))


def test_a_picture_of_the_demo_survives():
    path = PACKAGED["demo"] / "tokenizer_demo.safetensors"
    tokenizer = load_tokenizer(open_checkpoint(path).tensors, str(path))
    schedule = schedule_for(1.0, "0.25M")
    height, width = picture_size(schedule, tokenizer)
    y, x = np.mgrid[:height, :width]
    disc = (y - height / 2) ** 2 + (x - width / 2) ** 2 < (height / 4) ** 2
    picture = np.where(disc[..., None], (200, 40, 40), (240, 240, 235)).astype(np.uint8)
    codes = image_bits(tokenizer, picture, schedule).codes
    found = picture_from_image(tokenizer.decode(codes)[0].numpy())
    error = found.astype(float) - picture
    assert 10 * np.log10(255**2 / np.mean(error**2)) >= LEAST_PSNR_DB


def test_pictures_of_another_size_are_refused():
    tokenizer = BitTokenizer(TokenizerConfig(4, (32, 32)))
    with pytest.raises(ToprovarError, match=r"40x42 pixels .* last map is 20x20: expected 40x40"):
        image_bits(tokenizer, noise_picture(40, 42), SCHEDULE)
    with pytest.raises(ValueError, match="expected uint8"):
        image_bits(tokenizer, np.zeros((40, 40, 3), np.float32), SCHEDULE)
    with pytest.raises(ToprovarError, match="holds no encoder"):
        image_bits(BitTokenizer(TokenizerConfig(4, (32, 32), encoder=False)), noise_picture(40, 40), SCHEDULE)


@pytest.mark.parametrize(("height", "width"), [(40, 40), (80, 47), (13, 200), (1, 1), (200, 13)])
def test_pictures_of_any_size_are_fitted(height, width):
    fitted = fitted_picture(Image.fromarray(noise_picture(height, width)), (20, 14))
    assert fitted.shape == (20, 14, 3)
    assert fitted.dtype == np.uint8


def test_fitting_keeps_the_middle():
    columns = np.zeros((20, 60, 3), np.uint8)
    columns[:, 20:40] = (10, 200, 30)
    assert (fitted_picture(Image.fromarray(columns), (20, 20)) == (10, 200, 30)).all()
    assert (fitted_picture(Image.fromarray(columns.transpose(1, 0, 2)), (20, 20)) == (10, 200, 30)).all()
