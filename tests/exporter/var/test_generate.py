from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import var_reference as reference

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'toprovar[torch]'")

from toprovar.exporter.codebook import load_quantizer  # noqa: E402
from toprovar.exporter.index_sampling import IndexNoise  # noqa: E402
from toprovar.exporter.var.generate import generate, guidance_of  # noqa: E402
from toprovar.exporter.var.load import load_var  # noqa: E402
from toprovar.runtime.errors import ToprovarError  # noqa: E402
from toprovar.tools.parity import compare_file  # noqa: E402

FIXTURE = Path(__file__).parents[3].parent / "shared" / "fixtures" / "var_tiny.npz"

CASES = {
    "one class": reference.Case(),
    "shared AdaLN, three images, odd maps": reference.Case(
        (1, 2, 5, 7, 9), (0, 4, 5), width=48, heads=4, depth=3, shared=True, seed=3
    ),
    "no guidance, two maps": reference.Case((1, 4), (1, 1), depth=1, cfg=0.0, seed=9),
    "ten maps": reference.Case((1, 2, 3, 4, 5, 6, 8, 10, 11, 12), depth=1, cfg=4.0, seed=5),
    "scaled dot products": reference.Case(cosine=False, seed=6),
}


@pytest.mark.parametrize("name", CASES)
def test_cached_loop_and_graphs_equal_the_uncached_reference(tmp_path: Path, name: str) -> None:
    """The file's arrays come from whole sequences in float64; model and graphs run scale by scale over their caches."""
    report = compare_file(reference.write_fixture(CASES[name], tmp_path / "run.npz"))
    assert report.passed, [row for row in report.rows if row.verdict == "fail"]
    scales, depth = len(CASES[name].sides), CASES[name].depth
    assert report.compared == 2 * (scales * (2 + depth) + scales)  # raw, logits, blocks; next; f_hat
    assert not [row for row in report.rows if row.verdict == "unknown"]


def test_shipped_run_of_the_reference_passes() -> None:
    if not FIXTURE.exists():
        pytest.skip(f"needs the shipped parity file {FIXTURE.name} in shared/fixtures beside the repository")
    report = compare_file(FIXTURE)
    assert report.passed, [row for row in report.rows if row.verdict == "fail"]
    assert report.compared == 60


def model_of(case: reference.Case) -> tuple[Any, Any]:
    weights = {k: torch.from_numpy(a) for k, a in reference.random_weights(case).items()}
    return load_var(weights, "case"), load_quantizer(weights, "case")


@pytest.mark.parametrize("smooth", [False, True])
def test_images_of_a_batch_are_those_of_single_runs(smooth: bool) -> None:
    case = reference.Case()
    model, quantizer = model_of(case)
    settings = guidance_of(len(case.sides), top_k=9, top_p=0.6, smooth=smooth)
    both = generate(model, quantizer, model.prompt(torch.tensor([3, 1])), case.sides, settings, IndexNoise([11, 12]))
    for image, label in enumerate((3, 1)):
        prompt = model.prompt(torch.tensor([label]))
        alone = generate(model, quantizer, prompt, case.sides, settings, IndexNoise([11 + image]))
        for scale in range(3):
            assert torch.equal(alone.indices[scale][0], both.indices[scale][image])
        assert torch.allclose(alone.codes[0], both.codes[image], atol=1e-4)


@pytest.mark.parametrize("smooth", [False, True])
def test_seed_and_class_decide_the_picture(smooth: bool) -> None:
    case = reference.Case()
    model, quantizer = model_of(case)

    def latent(seed: int, label: int) -> Any:
        prompt = model.prompt(torch.tensor([label]))
        return generate(
            model, quantizer, prompt, case.sides, guidance_of(len(case.sides), smooth=smooth), IndexNoise([seed])
        ).codes

    assert torch.equal(latent(1, 0), latent(1, 0))
    assert torch.isfinite(latent(1, 0)).all()
    assert not torch.equal(latent(1, 0), latent(2, 0))
    assert not torch.equal(latent(1, 0), latent(1, 1))


def test_smooth_run_feeds_means_of_codes() -> None:
    """The first scale draws the same index; the map behind it is a mean instead of that code."""
    case = reference.Case()
    model, quantizer = model_of(case)
    prompt = model.prompt(torch.tensor([2]))
    runs = [
        generate(
            model,
            quantizer,
            prompt,
            case.sides,
            guidance_of(len(case.sides), top_k=0, top_p=0, smooth=s),
            IndexNoise([1]),
        )
        for s in (False, True)
    ]
    assert torch.equal(runs[0].indices[0], runs[1].indices[0])
    assert not torch.equal(runs[0].codes, runs[1].codes)


def test_without_guidance_one_row_per_image_gives_the_same_picture() -> None:
    case = reference.Case()
    model, quantizer = model_of(case)
    runs = [
        generate(
            model,
            quantizer,
            model.prompt(torch.tensor([4]), guided=g),
            case.sides,
            guidance_of(len(case.sides), cfg=0),
            IndexNoise([3]),
        )
        for g in (False, True)
    ]
    assert torch.allclose(runs[0].codes, runs[1].codes, atol=1e-4)


def test_guidance_grows_from_nothing_to_the_end() -> None:
    assert [t - 1 for t in guidance_of(5, 4.0).cfg] == [0, 1, 2, 3, 4]


def test_what_does_not_fit_is_refused() -> None:
    case = reference.Case()
    model, quantizer = model_of(case)
    alone = model.prompt(torch.tensor([0]), guided=False)
    with pytest.raises(ToprovarError, match="needs rows of the null class") as error:
        generate(model, quantizer, alone, case.sides, guidance_of(len(case.sides)), IndexNoise([0]))
    assert "guided=True" in str(error.value.hint)
    for sides in ((1, 2, 4), (1, 3, 2, 0), (2, 1, 3)):
        with pytest.raises(ToprovarError, match="expected 3 maps of 14 tokens, the first of side 1"):
            generate(model, quantizer, alone, sides, guidance_of(len(sides), 0), IndexNoise([0]))
    with pytest.raises(ToprovarError, match="given no noise"):
        generate(model, quantizer, alone, case.sides, guidance_of(len(case.sides), 0))
