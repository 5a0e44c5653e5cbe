"""The video tokenizer equals a plain float64 reference, in chunks of any length; misfits are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from video_reference import ReferenceVideoTokenizer, random_video_tokenizer

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'toprovar[torch]'")

from toprovar.exporter.video_tokenizer.config import PUBLISHED, VideoStage, VideoTokenizerConfig  # noqa: E402
from toprovar.exporter.video_tokenizer.tokenizer import (  # noqa: E402
    VideoTokenizer,
    load_video_tokenizer,
    maps_per_chunk,
)
from toprovar.runtime.errors import ToprovarError  # noqa: E402

# fp32 convolutions against float64; measured 2.5e-6 of the largest value
TOLERANCE = 1e-5
# chunks against the whole, both fp32: other shapes take other convolution kernels; measured 0 here, 2e-6 of the largest
# value at the published widths
CHUNK_TOLERANCE = 1e-5


def torch_weights(weights: dict[str, np.ndarray]) -> dict[str, Any]:
    return {name: torch.from_numpy(array) for name, array in weights.items()}


@pytest.fixture(scope="module")
def weights() -> dict[str, np.ndarray]:
    return random_video_tokenizer()


@pytest.fixture(scope="module")
def model(weights):
    return load_video_tokenizer(torch_weights(weights), "test")


def test_sizes_are_read_from_the_shapes(model):
    assert model.config == VideoTokenizerConfig(
        2,
        (VideoStage(16, 3), VideoStage(16, 3, 16), VideoStage(16, 3, 8, 2), VideoStage(8, 3, 4, 2)),
        (VideoStage(4, 2, 8, 2), VideoStage(8, 2, 16, 2), VideoStage(16, 2, 16), VideoStage(16, 2)),
    )
    assert (model.config.stride, model.config.frames_per_code, model.config.code_channels) == (16, 4, 8)


@pytest.mark.parametrize(("maps", "size"), [(1, (1, 1)), (2, (1, 2)), (4, (2, 3))])
def test_decoder_equals_the_plain_reference(weights, model, maps, size):
    codes = np.random.default_rng(3).standard_normal((1, 8, maps, *size)).astype(np.float32)
    expected = ReferenceVideoTokenizer(weights).decode(codes[0])
    found = model.decode_raw(torch.from_numpy(codes), [maps]).numpy()[0]
    assert found.shape == (3, 4 * maps - 3, 16 * size[0], 16 * size[1])
    assert np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max()
    assert np.abs(model.decode(torch.from_numpy(codes)).numpy()).max() <= 1


@pytest.mark.parametrize("chunks", [None, [1, 1, 1, 1, 1], [2, 3], [1, 4], [4, 1]], ids=str)
def test_chunks_give_what_the_whole_gives(model, chunks):
    codes = torch.randn(2, 8, 5, 2, 1, generator=torch.Generator().manual_seed(0))
    whole, found = model.decode_raw(codes, [5]), model.decode_raw(codes, chunks)
    assert (found - whole).abs().max() <= CHUNK_TOLERANCE * whole.abs().max()


def test_a_chunk_depends_on_the_chunk_before(model):
    codes = torch.randn(1, 8, 2, 2, 2, generator=torch.Generator().manual_seed(1))
    _, before = model.decode_chunk(codes[:, :, :1], None)
    following, _ = model.decode_chunk(codes[:, :, 1:], before)
    forgetful, _ = model.decode_chunk(codes[:, :, 1:], [torch.zeros_like(past) for past in before])
    assert following.shape[2] == 4
    assert (following - forgetful).abs().max() > 0.1


@pytest.mark.parametrize(("maps", "chunks"), [(1, [1]), (2, [2]), (3, [3]), (6, [2, 2, 2]), (21, [3] + [2] * 9)])
def test_chunks_are_the_published_ones(maps, chunks):
    assert maps_per_chunk(maps) == chunks


@pytest.mark.parametrize("chunks", [[2, 2], [0, 5], [6, -1]], ids=str)
def test_chunks_that_do_not_add_up_are_refused(model, chunks):
    with pytest.raises(ToprovarError, match="do not add up to the video's 5 maps"):
        model.decode(torch.zeros(1, 8, 5, 1, 1), chunks)


@pytest.mark.parametrize("frames", [1, 5, 13])
def test_encoder_equals_the_plain_reference(weights, model, frames):
    video = np.random.default_rng(4).uniform(-1, 1, (1, 3, frames, 16, 32)).astype(np.float32)
    reference = ReferenceVideoTokenizer(weights)
    mean, log_variance = reference.encode(video[0])
    noise = np.random.default_rng(5).standard_normal((1, *mean.shape)).astype(np.float32)
    for maps in (1, 2):
        found = model.encode(torch.from_numpy(video), maps=maps).numpy()[0]
        expected = reference.codes(mean)
        assert found.shape == (8, (frames - 1) // 4 + 1, 1, 2)
        assert np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max()
    drawn = model.encode(torch.from_numpy(video), torch.from_numpy(noise)).numpy()[0]
    expected = reference.codes(mean + np.exp(log_variance / 2) * noise[0])
    assert np.abs(drawn - expected).max() <= TOLERANCE * np.abs(expected).max()


@pytest.mark.parametrize("shape", [(4, 16, 16), (1, 24, 16), (5, 16, 8)])
def test_videos_that_do_not_fit_the_encoder_are_refused(model, shape):
    with pytest.raises(ToprovarError, match=r"has no codes: expected 1 \+ a multiple of 4 frames"):
        model.encode(torch.zeros(1, 3, *shape))


def test_files_without_encoder_or_with_a_prefix_load_alike(weights, model):
    tensors = {f"vae.{name}": array for name, array in torch_weights(weights).items() if not name.startswith("enc")}
    tensors["vae.proj_up_two.weight"] = torch.zeros(8, 8)
    del tensors["vae.proj_down.weight"], tensors["vae.proj_down.bias"]
    other = load_video_tokenizer(tensors, "test")
    codes = torch.randn(1, 8, 3, 1, 1, generator=torch.Generator().manual_seed(2))
    assert torch.equal(other.decode(codes), model.decode(codes))
    with pytest.raises(ToprovarError, match="holds no encoder"):
        other.encode(torch.zeros(1, 3, 1, 16, 16))


def zeros(*shape: int) -> Any:
    return torch.zeros(shape)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("decoder.conv_in.conv.weight", None, "decoder.conv_in.conv.weight is missing"),
        ("decoder.conv_in.conv.weight", zeros(16, 2, 3, 3), "expected 5 axes"),
        ("decoder.up_blocks.1.resnets.0.conv1.conv.weight", None, r"resnets.0.conv1.conv.weight is missing"),
        (
            "decoder.up_blocks.2.upsamplers.0.conv.conv.conv.weight",
            zeros(96, 16, 3, 3, 3),
            "96 rows; expected 32",
        ),
        ("decoder.up_blocks.2.upsamplers.0.conv.conv.conv.weight", None, "up_blocks.2 is 16 wide and has no change"),
        ("decoder.up_blocks.2.upsamplers.0.conv.norm.gamma", None, "test: tensor .*conv.norm.gamma is missing"),
        (
            "encoder.down_blocks.1.downsamplers.0.conv.conv.conv.weight",
            zeros(8, 8, 3, 3, 3),
            "8 rows behind width 8",
        ),
        ("encoder.conv_out.conv.weight", zeros(2, 16, 3, 3, 3), "makes 2 channels; expected 4"),
        ("decoder.up_blocks.0.attentions.0.weight", zeros(2), "attentions.0.weight belongs to no part"),
        ("proj_up.weight", zeros(8, 6), "proj_up.weight has the wrong shape"),
        ("decoder.norm_out.norm_layer.gamma", torch.full((4, 1, 1, 1), float("inf")), "norm_out.norm_layer.gamma"),
    ],
)
def test_tensors_that_fit_no_tokenizer_are_refused(weights, name, tensor, message):
    tensors = torch_weights(weights)
    tensors.pop(name, None)
    if tensor is not None:
        tensors[name] = tensor
    with pytest.raises(ToprovarError, match=message):
        load_video_tokenizer(tensors, "test")


def test_the_published_sizes_have_the_published_number_of_parameters():
    with torch.device("meta"):
        model = VideoTokenizer(PUBLISHED)
    assert round(sum(parameter.numel() for parameter in model.decoder.parameters()) / 1e6, 1) == 129.9
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6, 1) == 184.7
