"""The parity tool repeats recorded runs of the VQ tokenizer and of the video tokenizer, and notices what differs."""

from __future__ import annotations

import json

import numpy as np
import pytest
from parity_command import changed, refusal
from typer.testing import CliRunner
from video_reference import ReferenceVideoTokenizer, random_video_tokenizer
from vq_reference import ReferenceVqTokenizer, random_vq_tokenizer

pytest.importorskip("torch", reason="needs PyTorch: pip install 'toprovar[torch]'")

from toprovar.tools.parity import app, compare_file

RNG = np.random.default_rng(7)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A parity file of each tokenizer."""
    folder = tmp_path_factory.mktemp("parity")
    weights, widths = random_vq_tokenizer(4, (32, 32)), (32, 32)
    model = ReferenceVqTokenizer(weights, widths)
    z = RNG.standard_normal((2, 4, 3, 2)).astype(np.float32)
    image = RNG.uniform(-1, 1, (1, 3, 4, 6)).astype(np.float32)
    codebook = {"quantize.embedding.weight": RNG.standard_normal((7, 4)).astype(np.float16)}
    arrays = {"dec/z": z, "dec/x": model.decode(z), "enc/x": image, "enc/z": model.encode(image)}
    write(folder / "vq.npz", weights | codebook, arrays)

    weights = random_video_tokenizer(blocks=1)
    video = ReferenceVideoTokenizer(weights)
    z = RNG.standard_normal((2, 8, 5, 1, 2)).astype(np.float32) * 0.2
    frames = RNG.uniform(-1, 1, (3, 5, 16, 16)).astype(np.float32)
    clamped = np.stack([video.decode(one) for one in z]).clip(-1, 1)
    arrays = {"dec/z": z, "dec/x": clamped, "enc/x": frames[None], "enc/z": video.codes(video.encode(frames)[0])}
    write(folder / "video.npz", weights, arrays)
    return folder


def write(path, weights, arrays):
    floats = {name: np.asarray(array, np.float32) for name, array in arrays.items()}
    np.savez(path, meta=np.array(json.dumps({})), **{f"w/{n}": a for n, a in weights.items()}, **floats)


@pytest.mark.parametrize("kind", ["vq", "video"])
def test_recorded_arrays_agree(files, kind):
    report = compare_file(files / f"{kind}.npz")
    assert report.passed, report.failed
    verdicts = {(row.backend, row.array): row.verdict for row in report.rows}
    assert verdicts == {
        ("torch", "dec/x"): "pass",
        ("torch", "enc/z"): "pass",
        ("onnxruntime", "dec/x"): "pass",
        ("onnxruntime", "enc/z"): "not seen",
    }


@pytest.mark.parametrize("kind", ["vq", "video"])
@pytest.mark.parametrize("array", ["dec/x", "enc/z"])
def test_a_difference_is_noticed(files, kind, array):
    with np.load(files / f"{kind}.npz") as archive:
        wrong = archive[array].copy()
    wrong.flat[3] += 1e-3 if array == "enc/z" else 0.5 * (1 if wrong.flat[3] < 0 else -1)
    path = changed(files / f"{kind}.npz", **{array.replace("/", "__"): wrong})
    result = CliRunner().invoke(app, [str(path), "--backend", "torch"])
    assert result.exit_code == 1
    assert f"first {array}" in result.output


def test_files_that_cannot_be_repeated_are_refused(files):
    assert "holds a tokenizer, which has no runs" in refusal(files / "vq.npz", "--run", "a")
    assert "has no array dec/z" in refusal(changed(files / "video.npz", dec__z=None))
    flat = np.zeros((2, 8, 1, 2), np.float32)
    assert "expected [any, 8, any, any, any]" in refusal(changed(files / "video.npz", dec__z=flat))
    assert "expected [any, 4, any, any]" in refusal(changed(files / "vq.npz", dec__z=flat))
