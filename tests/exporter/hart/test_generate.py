from __future__ import annotations

from pathlib import Path
from typing import Any

import hart_reference as reference
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'toprovar[torch]'")

from toprovar.exporter.codebook import load_quantizer  # noqa: E402
from toprovar.exporter.hart.generate import SeededNoise, generate, guidance_of  # noqa: E402
from toprovar.exporter.hart.load import load_hart  # noqa: E402
from toprovar.exporter.planned.loop import LoopOptions  # noqa: E402
from toprovar.runtime.errors import ToprovarError  # noqa: E402
from toprovar.tools.parity import compare_file  # noqa: E402

FIXTURE = Path(__file__).parents[3].parent / "shared" / "fixtures" / "hart_tiny.npz"

CASES = {
    "one prompt": reference.Case(),
    "three prompts, odd maps": reference.Case(
        (1, 2, 5, 7, 9), (3, 8, 1), text_tokens=8, width=48, heads=4, depth=3, seed=3
    ),
    "no guidance, two maps": reference.Case((1, 4), (2,), text_tokens=2, depth=1, cfg=0.0, seed=9),
    "ten maps": reference.Case((1, 2, 3, 4, 6, 8, 9, 10, 11, 12), depth=1, cfg=3.0, seed=5),
}


@pytest.mark.parametrize("name", CASES)
def test_cached_loop_and_graphs_equal_the_uncached_reference(tmp_path: Path, name: str) -> None:
    """The file's arrays come from whole sequences in float64; model and graphs run scale by scale over their caches."""
    path = reference.write_fixture(reference.run_case(CASES[name]), tmp_path / "run.npz")
    report = compare_file(path)
    assert report.passed, [row for row in report.rows if row.verdict == "fail"]
    scales, depth = len(CASES[name].sides), CASES[name].depth
    arrays = scales * (2 + depth) + scales - 1 + 3  # raw, logits, blocks; next; z, out, f_hat
    assert report.compared == 2 * arrays + 1  # the graphs are told the residual head's guidance
    assert not [row for row in report.rows if row.verdict == "unknown"]


def test_shipped_run_of_the_reference_passes() -> None:
    if not FIXTURE.exists():
        pytest.skip(f"needs the shipped parity file {FIXTURE.name} in shared/fixtures beside the repository")
    report = compare_file(FIXTURE)
    assert report.passed, [row for row in report.rows if row.verdict == "fail"]
    assert report.compared == 30 + 27


def model_of(case: reference.Case) -> tuple[Any, Any]:
    weights = {k: torch.from_numpy(a) for k, a in reference.random_weights(case).items()}
    return load_hart(weights, "case"), load_quantizer(weights, "case")


def inputs_of(case: reference.Case) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(7)
    mask = np.arange(case.text_tokens) < np.array(case.prompts)[:, None]
    text = rng.standard_normal((case.images, case.text_tokens, case.text_width)).astype(np.float32)
    return tuple(torch.from_numpy(array) for array in (text, mask, mask.cumsum(1) - 1))


def test_images_of_a_batch_are_those_of_single_runs() -> None:
    case = reference.Case(prompts=(4, 2))
    model, quantizer = model_of(case)
    text, mask, positions = inputs_of(case)
    settings = guidance_of(len(case.sides), top_k=(9,), top_p=0.3)
    both = generate(model, quantizer, model.prompt(text, mask, positions), case.sides, settings, SeededNoise([11, 12]))
    for image in range(2):
        own = slice(image, image + 1)
        prompt = model.prompt(text[own], mask[own], positions[own])
        alone = generate(model, quantizer, prompt, case.sides, settings, SeededNoise([11 + image]))
        for scale in range(3):
            assert torch.equal(alone.indices[scale][0], both.indices[scale][image])
        assert torch.allclose(alone.codes[0], both.codes[image], atol=1e-4)


@pytest.mark.parametrize("smooth", [False, True])
def test_seed_decides_the_picture(smooth: bool) -> None:
    case = reference.Case()
    model, quantizer = model_of(case)
    prompt = model.prompt(*inputs_of(case))

    def latent(seed: int) -> Any:
        return generate(
            model, quantizer, prompt, case.sides, guidance_of(len(case.sides), smooth=smooth), SeededNoise([seed])
        ).codes

    assert torch.equal(latent(1), latent(1))
    assert torch.isfinite(latent(1)).all()
    assert not torch.equal(latent(1), latent(2))


def test_without_guidance_one_row_per_image_gives_the_same_picture() -> None:
    case = reference.Case()
    model, quantizer = model_of(case)
    inputs = inputs_of(case)
    runs = [
        generate(
            model,
            quantizer,
            model.prompt(*inputs, guided=g),
            case.sides,
            guidance_of(len(case.sides), cfg=0),
            SeededNoise([3]),
        )
        for g in (False, True)
    ]
    assert torch.allclose(runs[0].codes, runs[1].codes, atol=1e-4)


def test_residual_head_changes_the_last_map_alone() -> None:
    case = reference.Case()
    model, quantizer = model_of(case)
    prompt = model.prompt(*inputs_of(case))
    runs = [
        generate(model, quantizer, prompt, case.sides, guidance_of(3), SeededNoise([3]), residual=residual)
        for residual in (False, True)
    ]
    assert all(torch.equal(a, b) for a, b in zip(runs[0].indices, runs[1].indices, strict=True))
    difference = (runs[0].codes - runs[1].codes).abs()
    assert 0 < difference.max() <= 0.6 + 1e-6  # the residual is clamped to 1 and enters with 0.6


def test_padding_takes_part_in_attention() -> None:
    case = reference.Case(prompts=(2,))
    model, quantizer = model_of(case)
    text, mask, positions = inputs_of(case)
    changed = text.clone()
    changed[:, 3] += 1
    seen = []
    for rows in (text, changed):
        prompt = model.prompt(rows, mask, positions)
        generate(
            model, quantizer, prompt, case.sides, guidance_of(len(case.sides)), SeededNoise([0]),
            options=LoopOptions(observe=lambda name, k, x: seen.append(x) if name == "raw" and k == 1 else None),
        )  # fmt: skip
    assert torch.equal(
        model.prompt(text, mask, positions).modulation, model.prompt(changed, mask, positions).modulation
    )
    assert not torch.equal(seen[0], seen[1])


def test_guidance_grows_and_the_last_scale_keeps_the_one_before() -> None:
    assert [t - 1 for t in guidance_of(5, 4.0).cfg] == [0, 1, 2, 3, 3]


def test_published_candidates() -> None:
    assert [guidance_of(14).candidates(s) for s in (0, 6, 7, 13)] == [600, 600, 300, 300]


def test_noise_is_standard_normal() -> None:
    numbers = SeededNoise([5]).residual_steps(64, 32, 1)
    assert abs(float(numbers.mean())) < 0.03
    assert abs(float(numbers.std()) - 1) < 0.03
    assert float(numbers.abs().max()) > 3


def test_guidance_without_unconditional_rows_is_refused() -> None:
    case = reference.Case()
    model, quantizer = model_of(case)
    prompt = model.prompt(*inputs_of(case), guided=False)
    with pytest.raises(ToprovarError, match=r"guidance 3.25 needs unconditional rows") as error:
        generate(model, quantizer, prompt, case.sides, guidance_of(len(case.sides)), SeededNoise([0]))
    assert "guided=True" in str(error.value.hint)
    with pytest.raises(ToprovarError, match=r"found sides \[2, 3\]"):
        generate(model, quantizer, prompt, (2, 3), guidance_of(2, 0), SeededNoise([0]))
    with pytest.raises(ToprovarError, match="given no noise"):
        generate(model, quantizer, prompt, case.sides, guidance_of(len(case.sides), 0))
