"""Statistics of one streaming pass: equal to what they are defined as, resumable, with digests."""

import hashlib
import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from conftest import GUIDANCE, SCHEDULE
from helpers import generate_in_torch

from toprovar.calibrate.measures import singular_values, ssim
from toprovar.calibrate.prompt_run import ENERGY_SHARES, picture_of
from toprovar.calibrate.statistics import collect_statistics
from toprovar.exporter.infinity.tokenizer import latent_from_bits
from toprovar.exporter.planned.scores import code_energy
from toprovar.runtime.decisions import tokens_for_mass
from toprovar.runtime.plan import CfgStop, dense_plan

PROMPTS = ["red apple", "green dog on white"]


@pytest.fixture(scope="module")
def measured(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stats")
    return folder, collect_statistics(tiny, SCHEDULE, GUIDANCE, PROMPTS, 5, folder, further=("conditional_ssim",))


def test_shapes_do_not_depend_on_the_number_of_tokens(measured):
    _, stats = measured
    P, K, L = len(PROMPTS), len(SCHEDULE), 4
    assert stats.singular_values.shape == (P, L, 2)
    assert stats.change.shape == (P, K, L)
    assert stats.energy_tokens.shape == (P, K, len(ENERGY_SHARES))
    assert stats.frequency.shape == (P, K, 2)
    assert stats.guidance_gap.shape == stats.conditional_ssim.shape == (P, K)
    np.testing.assert_allclose(stats.singular_values[..., 0] / stats.singular_values[..., 1], stats.singular_ratio)


def test_numbers_are_what_they_are_defined_as(tiny, measured):
    """Recomputed from the hidden states and logits of a run of its own."""
    _, stats = measured
    seen = {}
    run = generate_in_torch(
        tiny, SCHEDULE, GUIDANCE, PROMPTS[1], 6, entropy_layers=range(4),
        observe=lambda name, scale, tensor: seen.__setitem__((name, scale), tensor.double().numpy()),
    )  # fmt: skip
    for k, (height, width) in enumerate(SCHEDULE):
        states = [seen["in", k], *(seen[f"block{layer}", k] for layer in range(4))]
        expected = [np.abs(after[0] - before[0]).mean() for before, after in pairwise(states)]
        np.testing.assert_allclose(stats.change[1, k], expected, rtol=1e-5)
        raw = seen["raw", k]
        assert stats.guidance_gap[1, k] == pytest.approx(np.sqrt(((raw[0] - raw[1]) ** 2).mean()), rel=1e-5)
        if k:
            bits = run.bits[k - 1].unflatten(1, SCHEDULE[k - 1])
            energy = code_energy(latent_from_bits(bits), 1, (height, width))[0].numpy()
            assert stats.energy_tokens[1, k].tolist() == [tokens_for_mass(energy, share) for share in ENERGY_SHARES]
    maps = run.entropy[5, 2][0].numpy().reshape(20, 20).astype(np.float64)
    np.testing.assert_allclose(singular_values(maps), np.linalg.svd(maps, compute_uv=False)[:2], rtol=1e-6)
    np.testing.assert_allclose(stats.singular_values[1, 2], np.linalg.svd(maps, compute_uv=False)[:2], rtol=1e-6)
    assert np.isnan(stats.frequency[1, :5]).all()
    assert (stats.frequency[1, 5] > 0).all()
    full = picture_of(tiny, run.codes)
    stop = dense_plan(tiny.backbone, SCHEDULE).model_copy(
        update={"method": "x", "cfg_stop": CfgStop(mode="static", scale=4)}
    )
    other = picture_of(tiny, generate_in_torch(tiny, SCHEDULE, GUIDANCE, PROMPTS[1], 6, plan=stop).codes)
    assert stats.conditional_ssim[1, 4] == pytest.approx(ssim(other, full), abs=1e-9)
    assert not torch.equal(torch.from_numpy(other), torch.from_numpy(full))


def test_the_folder_lists_digests_and_is_not_measured_twice(tiny, measured, monkeypatch):
    folder, stats = measured
    index = json.loads((folder / "index.json").read_text())
    assert sorted(index["files"]) == sorted(path.name for path in folder.glob("*.npz"))
    assert len(index["files"]) == 4
    for name, digest in index["files"].items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
        assert (folder / name).stat().st_size < 200_000

    def measure(*arguments, **options):
        raise AssertionError("measured again")

    monkeypatch.setattr("toprovar.calibrate.statistics.measure_prompt", measure)
    again = collect_statistics(tiny, SCHEDULE, GUIDANCE, PROMPTS, 5, folder)
    np.testing.assert_array_equal(again.rho, stats.rho)
    assert again.conditional_ssim is None
    with pytest.raises(AssertionError, match="measured again"):
        collect_statistics(tiny, SCHEDULE, GUIDANCE, PROMPTS, 5, folder, resume=False)
    with pytest.raises(AssertionError, match="measured again"):
        collect_statistics(tiny, SCHEDULE, GUIDANCE, PROMPTS, 6, folder)
