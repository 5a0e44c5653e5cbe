"""Manifests of video bundles that contradict themselves are refused before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_star import write_tiny_star

from toprovar.exporter.bundle_writer import export_bundle
from toprovar.exporter.model import load_model
from toprovar.exporter.planned.step import StepOptions
from toprovar.runtime.bundle import open_bundle
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.noise import noise_that_draws, uniform_noise
from toprovar.runtime.pipeline import picture_from_image
from toprovar.runtime.video_decoding import decoded_frames

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'toprovar[torch]'")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five maps of codes, in chunks of three and two."""
    folder = tmp_path_factory.mktemp("video")
    model = load_model(str(write_tiny_star(folder / "model", frames=17)))
    guidance = model.guidance()
    options = StepOptions.for_guidance(guidance, model.config.depth, model.text_tokens)
    export_bundle(model, folder / "bundle", guidance, options, None, model.schedule)
    return folder / "bundle"


def refused(bundle: Path, *path: Any, value: Any = None) -> str:
    """The message for a manifest with one value replaced, or left out for None."""
    file = bundle / "manifest.json"
    before = file.read_text()
    facts = json.loads(before)
    place = facts
    for key in path[:-1]:
        place = place[key]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    file.write_text(json.dumps(facts))
    try:
        with pytest.raises(ToprovarError) as caught:
            open_bundle(bundle)
    finally:
        file.write_text(before)
    return caught.value.message


def tensor(*shape: int, **facts: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": list(shape), "is_open": False, **facts}


# passes 0 to 8 are the image clip's; the last of them leaves its keys to pass 9 and those behind it
STEPS = ("variants", "dense")


def test_chunks_must_make_the_video(bundle: Path) -> None:
    assert open_bundle(bundle).manifest.video is not None
    assert "decoders of [3, 2] maps do not make a video of 6 maps" in refused(bundle, "video", "maps", value=6)
    assert "do not make a video of 5 maps" in refused(bundle, "code_shape", 1, value=61)
    assert "decoders of [3] maps" in refused(bundle, "video", "following")
    assert "video.fps" in refused(bundle, "video", "fps", value=0)
    following = ("video", "following")
    assert "gives decoder_following.onnx the inputs" in refused(bundle, *following, "inputs", "past_00")
    shape = open_bundle(bundle).manifest.decoder.outputs["past_next_00"].shape  # type: ignore[union-attr]
    assert "gives decoder_following.onnx input past_00" in refused(
        bundle, *following, "inputs", "past_00", value=tensor(*shape[:-1], 1)
    )
    assert "expected video F32[1, 3, T, H, W]" in refused(bundle, "decoder", "outputs", "video")
    assert "expected frames of one size" in refused(
        bundle, *following, "outputs", "video", value=tensor(1, 3, 8, 96, 48)
    )
    assert "expected past_next_##" in refused(bundle, "decoder", "outputs", "more", value=tensor(1))


def test_keys_of_the_clip_before_must_be_there(bundle: Path) -> None:
    name = "context_k_02_01"
    assert f"an input {name}, which nothing provides" in refused(bundle, *STEPS, 8, "graph", "outputs", name)
    for shape in ((143, 2, 2, 8), (144, 2, 1, 8), (144, 1, 2, 8)):
        assert f"input {name} F32[" in refused(bundle, *STEPS, 9, "graph", "inputs", name, value=tensor(*shape))
    assert f"output {name} F32[100, 2, 2, 8]; expected F32[144, 2, 2, 8]" in refused(
        bundle, *STEPS, 8, "graph", "outputs", name, value=tensor(100, 2, 2, 8)
    )
    assert "pass_index F32[2]; expected F32[1]" in refused(
        bundle, *STEPS, 3, "graph", "inputs", "pass_index", value=tensor(2)
    )
    assert "text_k_00" in refused(
        bundle, *STEPS, 3, "graph", "inputs", "text_k_00", value=tensor(8, 2, 2, 8, is_open=True)
    )


def test_chunks_are_the_whole_video_and_values_must_be_finite(bundle: Path) -> None:
    from toprovar.runtime.backends.onnxruntime import OnnxRuntimeBackend

    opened = open_bundle(bundle)
    backend, video = OnnxRuntimeBackend(opened), opened.manifest.video
    assert video is not None
    assert opened.manifest.decoder is not None
    codes = np.random.default_rng(3).standard_normal(opened.manifest.code_shape).astype(np.float32)
    frames = decoded_frames(backend, opened.manifest.decoder, video, codes)
    assert frames.shape == (17, 96, 96, 3)
    model = load_model(str(bundle.parent / "model"))
    at_once = picture_from_image(model.family.decode(model, torch.from_numpy(codes)[None])[0].numpy())
    assert np.abs(at_once.reshape(frames.shape).astype(int) - frames).max() <= 1  # rounding of a value between two
    codes[0, -1, 0] = np.nan
    with pytest.raises(ToprovarError, match="non-finite"):
        decoded_frames(backend, opened.manifest.decoder, video, codes)


def test_noise_draws_what_it_is_told_and_is_the_seeds_own_behind_it() -> None:
    bits = [np.array([[1, 0], [0, 1]], np.uint8)]
    noise = noise_that_draws(bits, 5)
    made = noise(0, 2, 4)
    assert made.shape == (2, 4)
    assert ((made[:, :2] < 0.5) == (bits[0] == 1)).all()
    assert (made[:, 2:] >= 1).all()
    assert np.array_equal(noise(1, 3, 4), uniform_noise(5, 1, 3, 4))
