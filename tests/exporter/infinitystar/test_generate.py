from __future__ import annotations

from pathlib import Path
from typing import Any

import infinitystar_reference as reference
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'toprovar[torch]'")

from toprovar.exporter.infinitystar.codes import contribution  # noqa: E402
from toprovar.exporter.infinitystar.generate import BitNoise, generate  # noqa: E402
from toprovar.exporter.infinitystar.guidance import projected_difference  # noqa: E402
from toprovar.exporter.infinitystar.load import load_infinitystar  # noqa: E402
from toprovar.exporter.infinitystar.schedule import VideoSchedule, video_schedule  # noqa: E402
from toprovar.exporter.infinitystar.settings import published_guidance  # noqa: E402
from toprovar.exporter.planned.loop import LoopOptions  # noqa: E402
from toprovar.runtime.errors import ToprovarError  # noqa: E402
from toprovar.runtime.guidance import Guidance, Projection  # noqa: E402
from toprovar.runtime.plan import Backbone, Score, dense_plan  # noqa: E402
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
def test_loop_and_graphs_equal_the_uncached_reference(tmp_path: Path, name: str) -> None:
    """The file's arrays come from whole sequences in float64; model and graphs run pass by pass over kept keys."""
    case = CASES[name]
    run = reference.run_case(case)
    report = compare_file(reference.write_fixture(run, tmp_path / "run.npz"))
    assert report.passed, [row for row in report.rows if row.verdict == "fail"]
    forced = sum(key.startswith("bits/") for key in run.arrays)
    inputs = sum(key in ("text", "neg_text") for key in run.arrays)
    arrays = len(run.arrays) - forced - inputs
    assert report.compared == 2 * arrays - 1  # the last layer's output for the text is not needed by the graphs
    assert all(row.verdict == "forced" for row in report.rows if row.array.startswith("bits/"))
    assert not [row for row in report.rows if row.verdict == "unknown"]


def test_shipped_run_of_the_reference_passes() -> None:
    if not FIXTURE.exists():
        pytest.skip(f"needs the shipped parity file {FIXTURE.name} in shared/fixtures beside the repository")
    report = compare_file(FIXTURE)
    assert report.passed, [row for row in report.rows if row.verdict == "fail"]
    assert report.compared == 52 + 40  # positions are no output of the graphs


def model_of(case: reference.Case) -> Any:
    return load_infinitystar({k: torch.from_numpy(a) for k, a in reference.random_weights(case).items()}, "case")


def schedule_of(case: reference.Case) -> VideoSchedule:
    return VideoSchedule(
        tuple(case.schedule), case.image_repetitions, case.video_repetitions, case.semantic_scales
    )  # fmt: skip


def guidance_of(case: reference.Case, **changes: Any) -> Guidance:
    schedule = schedule_of(case)
    cfg, tau = (schedule.per_pass(values, "case") for values in ((case.scale,), case.taus))
    return Guidance(**{"cfg": cfg, "tau": tau, "top_p": 0, "projection": Projection(), **changes})


def noise_of(*seeds: int) -> BitNoise:
    return BitNoise(seeds, reference.Case().detail_bits)


def texts(*lengths: int) -> list[Any]:
    rng = np.random.default_rng(5)
    return [torch.from_numpy(rng.standard_normal((n, 10)).astype(np.float32)) for n in lengths]


def test_videos_of_a_batch_are_those_of_single_runs() -> None:
    """Prompts of several lengths: padding takes no part."""
    case = reference.Case()
    model, schedule, guidance = model_of(case), schedule_of(case), guidance_of(case)
    rows = texts(5, 2, 4)
    together = generate(model, model.prompt(rows), schedule, guidance, noise_of(1, 2, 3))
    for i, row in enumerate(rows):
        alone = generate(model, model.prompt([row]), schedule, guidance, noise_of(i + 1))
        assert torch.equal(alone.codes[0], together.codes[i])
        assert all(torch.equal(a[0], b[i]) for a, b in zip(alone.bits, together.bits, strict=True))


def test_seed_decides_the_video() -> None:
    case = reference.Case()
    model, schedule, guidance = model_of(case), schedule_of(case), guidance_of(case)
    prompt = model.prompt(texts(4))
    one, again, other = (generate(model, prompt, schedule, guidance, noise_of(s)).codes for s in (7, 7, 8))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert one.shape == (1, case.detail_bits, 3 * 3, 4)


def test_scale_one_runs_one_row_and_draws_what_two_rows_draw() -> None:
    case = reference.Case(scale=1.0)
    model, schedule, guidance = model_of(case), schedule_of(case), guidance_of(case)
    assert not guidance.uses_unconditional_row
    one = generate(model, model.prompt(texts(4), guided=False), schedule, guidance, noise_of(3))
    last = (1.0,) * (len(guidance.cfg) - 1) + (5.0,)
    two = generate(model, model.prompt(texts(4)), schedule, guidance_of(case, cfg=last), noise_of(3))
    assert all(torch.equal(a, b) for a, b in zip(one.bits[:-1], two.bits[:-1], strict=True))
    assert not torch.equal(one.bits[-1], two.bits[-1])


def test_a_given_image_runs_no_pass_but_the_one_that_is_seen_later() -> None:
    case = reference.Case()
    model, schedule, guidance = model_of(case), schedule_of(case), guidance_of(case)
    prompt = model.prompt(texts(4))
    whole = generate(model, prompt, schedule, guidance, noise_of(3))
    count = sum(case.image_repetitions)
    widths = [model.config.bits(step.is_semantic) for step in schedule.passes()[:count]]
    image = [bits[..., :width] for bits, width in zip(whole.bits, widths, strict=False)]
    again = generate(model, prompt, schedule, guidance, noise_of(3), given_bits=image)
    ran = [step for step, counts in enumerate(again.counts[0]) if any(counts)]
    assert ran == [count - 1, *range(count, len(whole.bits))]
    assert torch.equal(again.codes, whole.codes)
    other = [1 - bits for bits in image]
    changed = generate(model, prompt, schedule, guidance, noise_of(3), given_bits=other)
    assert not torch.equal(changed.bits[-1], whole.bits[-1])


@pytest.mark.parametrize("granularity", ["block", "sublayer"])
def test_sending_whole_layers_through_gather_changes_nothing(granularity: str) -> None:
    case = reference.Case()
    model, schedule, guidance = model_of(case), schedule_of(case), guidance_of(case)
    backbone = Backbone(family="infinitystar", layers=2, width=24, heads=4, bits=20)
    plan = dense_plan(backbone, schedule.flat)
    plan = plan.model_copy(update={"score": Score(kind="variance", granularity=granularity)})
    prompt = model.prompt(texts(4))
    plain = generate(model, prompt, schedule, guidance, noise_of(3))
    options = LoopOptions(plan=plan, gate_whole_layers=True, entropy_layers=(0,))
    gated = generate(model, prompt, schedule, guidance, noise_of(3), options=options)
    assert torch.equal(plain.codes, gated.codes)


def test_entropy_is_that_of_the_keys_that_are_seen() -> None:
    """One token of a clip without context sees the text and itself."""
    case = reference.Case()
    model, schedule, guidance = model_of(case), schedule_of(case), guidance_of(case)
    options = LoopOptions(entropy_layers=(0, 1))
    done = generate(model, model.prompt(texts(4)), schedule, guidance, noise_of(3), options=options)
    assert {shape for shape in (e.shape for e in done.entropy.values())} == {(2, n) for n in {1, 6, 12, 2, 24}}
    assert float(done.entropy[0, 0].max()) <= np.log(5) + 1e-6
    assert float(done.entropy[8, 1].max()) <= np.log(12 + 4 + 24) + 1e-6
    assert all(float(e.min()) > 0 for e in done.entropy.values())


def test_projected_difference_is_bounded_and_across() -> None:
    rng = np.random.default_rng(1)
    c, u = (torch.from_numpy(rng.standard_normal((6, 8)).astype(np.float32)) for _ in range(2))
    found = projected_difference(c, u, Projection())
    assert abs(float((found.double() * c).sum())) <= 1e-5
    assert float(found.square().mean().sqrt()) <= 0.05 + 1e-6
    whole = projected_difference(c, u, Projection(norm_threshold=0, eta=1))
    assert torch.allclose(whole, c - u, atol=1e-6)
    assert not projected_difference(c, c, Projection()).any()


def test_few_bits_are_stretched_over_the_channels() -> None:
    schedule = VideoSchedule(((1, 1, 1), (1, 2, 2), (2, 1, 1), (2, 2, 2)), (1, 1), (1, 1), 1)
    half = 0.5**0.5
    code = torch.tensor([half, -half]).view(1, 2, 1, 1)
    found = contribution(code, schedule.passes()[0], 4, schedule)
    assert found.shape == (1, 4, 6, 2)
    expected = torch.tensor([half, half / 2, -half / 2, -half])
    assert torch.allclose(found[0, :, 1, 0], expected, atol=1e-6)
    assert not found[0, :, 2:].any()
    later = contribution(torch.cat([code, -code], dim=2), schedule.passes()[2], 4, schedule)
    assert torch.allclose(later[0, :, 2], expected[:, None].expand(4, 2), atol=1e-6)
    assert torch.allclose(later[0, :, 5], -expected[:, None].expand(4, 2), atol=1e-6)
    assert not later[0, :, :2].any()


def test_published_settings() -> None:
    guidance = published_guidance(video_schedule())
    assert guidance.tau == (1.0,) * 42 + (0.4,) * 39
    assert set(guidance.cfg) == {34.0}
    assert guidance.projection == Projection(norm_threshold=0.05, eta=0)


def test_what_does_not_fit_is_refused() -> None:
    case = reference.Case()
    model, schedule, guidance = model_of(case), schedule_of(case), guidance_of(case)
    one_row = model.prompt(texts(4), guided=False)
    with pytest.raises(ToprovarError, match="needs unconditional rows") as error:
        generate(model, one_row, schedule, guidance, noise_of(0))
    assert "guided=True" in str(error.value.hint)
    prompt = model.prompt(texts(4))
    with pytest.raises(ToprovarError, match="given no noise"):
        generate(model, prompt, schedule, guidance)
    with pytest.raises(ToprovarError, match=r"guidance is for 1 passes; the schedule has 9"):
        generate(model, prompt, schedule, Guidance(cfg=(34.0,), tau=(1.0,)), noise_of(0))
    with pytest.raises(ToprovarError, match=r"bits of pass 0 have shape \[1, 1, 5\]; expected \[1, 1, 6\]"):
        generate(model, prompt, schedule, guidance, noise_of(0), given_bits=[torch.zeros(1, 1, 5)])
    with pytest.raises(ToprovarError, match="3 values; the schedule has 6 maps and 9 passes"):
        schedule.per_pass((1.0, 2.0, 3.0), "tau")
