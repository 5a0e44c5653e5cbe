from __future__ import annotations

from pathlib import Path
from typing import Any

import infinitystar_reference as reference
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'toprovar[torch]'")

from toprovar.exporter.infinitystar.codes import contribution  # noqa: E402
from toprovar.exporter.infinitystar.generate import BitNoise, generate  # noqa: E402
from toprovar.exporter.infinitystar.guidance import (  # noqa: E402
    StarGuidance,
    per_map,
    projected_difference,
    published_guidance,
)
from toprovar.exporter.infinitystar.load import load_infinitystar  # noqa: E402
from toprovar.exporter.infinitystar.schedule import VideoSchedule, video_schedule  # noqa: E402
from toprovar.runtime.errors import ToprovarError  # noqa: E402
from toprovar.tools.parity import compare_file  # noqa: E402

FIXTURE = Path(__file__).parents[3].parent / "shared" / "fixtures" / "infinitystar_tiny.npz"

CASES = {
    "image and clip": reference.Case(),
    "image alone, one row": reference.Case(clips=(1,), scale=1.0, chunks=1, seed=2),
    "three clips, classic guidance, longer negative text": reference.Case(
        clips=(1, 3, 2), kind="cfg", scale=3.0, negative_tokens=7, depth=3, chunks=1, seed=3
    ),
    "four maps, share kept, no threshold, shorter negative text": reference.Case(
        ((1, 2), (2, 3), (3, 5), (5, 7)), (1, 2), (1, 2, 3, 1), (2, 1, 1, 2), heads=6, kv_heads=3, head_width=16,
        detail_bits=33, semantic_bits=8, negative_tokens=2, eta=0.3, norm_threshold=0.0, scale=5.0, seed=4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_loop_equals_the_uncached_reference(tmp_path: Path, name: str) -> None:
    """The file's arrays come from whole sequences in float64; the model runs pass by pass over kept keys."""
    case = CASES[name]
    run = reference.run_case(case)
    report = compare_file(reference.write_fixture(run, tmp_path / "run.npz"), backends=["torch"])
    assert report.passed, [row for row in report.rows if row.verdict == "fail"]
    forced = sum(key.startswith("bits/") for key in run.arrays)
    inputs = sum(key in ("text", "neg_text") for key in run.arrays)
    assert report.compared == len(run.arrays) - forced - inputs
    assert not [row for row in report.rows if row.verdict == "unknown"]


def test_shipped_run_of_the_reference_passes() -> None:
    if not FIXTURE.exists():
        pytest.skip(f"needs the shipped parity file {FIXTURE.name} in shared/fixtures beside the repository")
    report = compare_file(FIXTURE, backends=["torch"])
    assert report.passed, [row for row in report.rows if row.verdict == "fail"]
    assert report.compared == 52


def model_of(case: reference.Case) -> Any:
    return load_infinitystar({k: torch.from_numpy(a) for k, a in reference.random_weights(case).items()}, "case")


def schedule_of(case: reference.Case) -> VideoSchedule:
    return VideoSchedule(
        tuple(case.schedule), case.image_repetitions, case.video_repetitions, case.semantic_scales
    )  # fmt: skip


def guidance_of(case: reference.Case, **changes: Any) -> StarGuidance:
    settings = {"scale": (case.scale,) * len(case.schedule), "tau": tuple(case.taus), **changes}
    return StarGuidance(**settings)


def texts(*lengths: int) -> list[Any]:
    rng = np.random.default_rng(5)
    return [torch.from_numpy(rng.standard_normal((n, 10)).astype(np.float32)) for n in lengths]


def test_videos_of_a_batch_are_those_of_single_runs() -> None:
    """Prompts of several lengths: padding takes no part."""
    case = reference.Case()
    model, schedule, guidance = model_of(case), schedule_of(case), guidance_of(case)
    rows = texts(5, 2, 4)
    together = generate(model, model.prompt(rows), schedule, guidance, BitNoise([1, 2, 3]))
    for i, row in enumerate(rows):
        alone = generate(model, model.prompt([row]), schedule, guidance, BitNoise([i + 1]))
        assert torch.equal(alone.latent[0], together.latent[i])
        assert all(torch.equal(a[0], b[i]) for a, b in zip(alone.bits, together.bits, strict=True))


def test_seed_decides_the_video() -> None:
    case = reference.Case()
    model, schedule, guidance = model_of(case), schedule_of(case), guidance_of(case)
    prompt = model.prompt(texts(4))
    one, again, other = (generate(model, prompt, schedule, guidance, BitNoise([s])).latent for s in (7, 7, 8))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert one.shape == (1, case.detail_bits, 3, 3, 4)


def test_scale_one_runs_one_row_and_draws_what_two_rows_draw() -> None:
    case = reference.Case(scale=1.0)
    model, schedule, guidance = model_of(case), schedule_of(case), guidance_of(case)
    assert not guidance.uses_unconditional_row
    one = generate(model, model.prompt(texts(4), guided=False), schedule, guidance, BitNoise([3]))
    two = generate(model, model.prompt(texts(4)), schedule, guidance, BitNoise([3]))
    assert model.prompt(texts(4), guided=False).context[0][0].shape[1] == 1
    assert torch.equal(one.latent, two.latent)


def test_a_given_image_runs_no_pass_but_the_one_that_is_seen_later() -> None:
    case = reference.Case()
    model, schedule, guidance = model_of(case), schedule_of(case), guidance_of(case)
    prompt = model.prompt(texts(4))
    whole = generate(model, prompt, schedule, guidance, BitNoise([3]))
    count = sum(case.image_repetitions)
    again = generate(model, prompt, schedule, guidance, BitNoise([3]), given_bits=whole.bits[:count])
    assert again.ran == [count - 1, *range(count, len(whole.bits))]
    assert torch.equal(again.latent, whole.latent)
    other = [1 - bits for bits in whole.bits[:count]]
    changed = generate(model, prompt, schedule, guidance, BitNoise([3]), given_bits=other)
    assert not torch.equal(changed.bits[-1], whole.bits[-1])


def test_projected_difference_is_bounded_and_across() -> None:
    rng = np.random.default_rng(1)
    c, u = (torch.from_numpy(rng.standard_normal((6, 8)).astype(np.float32)) for _ in range(2))
    found = projected_difference(c, u, 0.05, 0.0)
    assert abs(float((found.double() * c).sum())) <= 1e-5
    assert float(found.square().mean().sqrt()) <= 0.05 + 1e-6
    whole = projected_difference(c, u, 0.0, 1.0)
    assert torch.allclose(whole, c - u, atol=1e-6)
    assert not projected_difference(c, c, 0.05, 0.0).any()


def test_few_bits_are_stretched_over_the_channels() -> None:
    step = VideoSchedule(((1, 1, 1), (1, 2, 2)), (1, 1), (1, 1), 1).passes()[0]
    bits = torch.tensor([[[1, 0]]])
    found = contribution(bits, step, 4, (2, 2))
    half = 0.5**0.5
    assert found.shape == (1, 4, 1, 2, 2)
    expected = torch.tensor([half, half / 2, -half / 2, -half])
    assert torch.allclose(found[0, :, 0, 1, 0], expected, atol=1e-6)


def test_published_settings() -> None:
    guidance = published_guidance(video_schedule())
    assert guidance.tau == (1.0,) * 14 + (0.4,) * 14
    assert set(guidance.scale) == {34.0}
    assert guidance.kind == "apg"


def test_what_does_not_fit_is_refused() -> None:
    case = reference.Case()
    model, schedule, guidance = model_of(case), schedule_of(case), guidance_of(case)
    one_row = model.prompt(texts(4), guided=False)
    with pytest.raises(ToprovarError, match="needs unconditional rows") as error:
        generate(model, one_row, schedule, guidance, BitNoise([0]))
    assert "guided=True" in str(error.value.hint)
    prompt = model.prompt(texts(4))
    with pytest.raises(ToprovarError, match="given no noise"):
        generate(model, prompt, schedule, guidance)
    with pytest.raises(ToprovarError, match=r"guidance is for 1 maps; the schedule has 6"):
        generate(model, prompt, schedule, StarGuidance((34.0,), (1.0,)), BitNoise([0]))
    with pytest.raises(ToprovarError, match=r"bits of pass 0 have shape \[1, 1, 5\]; expected \[1, 1, 6\]"):
        generate(model, prompt, schedule, guidance, BitNoise([0]), given_bits=[torch.zeros(1, 1, 5)])
    with pytest.raises(ToprovarError, match="3 values; the schedule has 6 maps"):
        per_map((1.0, 2.0, 3.0), schedule, "tau")
