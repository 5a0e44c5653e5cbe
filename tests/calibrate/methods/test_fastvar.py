"""FastVAR: published counts, layers and reference; and the published selection and restore, token for token."""

import math

import numpy as np
import pytest
import torch
from made_statistics import HART, backbone_of, statistics_of

from toprovar.calibrate.fitting import fit_plan
from toprovar.calibrate.methods.settings import MethodSettings
from toprovar.exporter.planned.restore import put_rows, resampled_residual
from toprovar.exporter.planned.scores import lowest_scores, variance_score
from toprovar.runtime.errors import ToprovarError


def fitted(stats=None, layers=32, **options):
    return fit_plan("fastvar", stats or statistics_of(), backbone_of(layers), MethodSettings(**options))


def test_the_deployed_form_keeps_published_shares_on_the_grid():
    plan = fitted(preset="paper")
    assert plan.skip_scales == (11, 12)
    assert sorted(plan.keep) == [9, 10]
    assert set(plan.counts(9)[3:28]) == {640}
    assert set(plan.counts(10)[3:28]) == {832}
    assert set(plan.counts(9)[:3] + plan.counts(9)[28:]) == {1024}
    assert (plan.restore.kind, plan.restore.ref_scale, plan.restore.resample) == ("cached_residual", 8, "area")
    assert (plan.score.kind, plan.score.granularity, plan.score.row) == ("variance", "block", "cond")


def test_the_exact_form_keeps_published_counts_per_part_and_row():
    plan = fitted(preset="paper", options={"exact": "true"})
    assert plan.counts(9)[3] == 615
    assert plan.counts(10)[27] == 800
    assert (plan.score.granularity, plan.score.row, plan.grid) == ("sublayer", "each", 1)
    settings = {"exact": True, "ratios": (0.5, 0.75), "first_layer": 0, "last_layer": 23}
    plan = fitted(statistics_of(HART, 24), 24, options=settings)
    assert set(plan.counts(12)) == {1152}
    assert set(plan.counts(13)) == {1024}
    assert plan.restore.ref_scale == 11  # 36 x 36


@pytest.mark.parametrize(("layers", "expected"), [(32, (3, 27)), (40, (4, 33)), (8, (1, 6))])
def test_layers_are_pruned_in_proportion(layers, expected):
    plan = fitted(statistics_of(layers=layers), layers)
    pruned = [layer for layer, count in enumerate(plan.counts(10)) if count < 1600]
    assert (pruned[0], pruned[-1], len(pruned)) == (*expected, expected[1] - expected[0] + 1)


@pytest.mark.parametrize(
    ("side", "ratio", "reference", "kept"),
    [(32, 0.4, 24, 615), (40, 0.5, 24, 800), (48, 0.5, 36, 1152), (64, 0.75, 36, 1024)],
)
def test_selection_and_restore_equal_the_published_ones(side, ratio, reference, kept):
    """The reference's steps, plain and in float64: farthest tokens from the mean; the others take the cached output,
    resampled by averaging; fresh outputs go back to their places."""
    random = np.random.Generator(np.random.PCG64(side))
    tokens, width = side * side, 7
    x, cached = random.normal(size=(2, tokens, width)), random.normal(size=(2, reference * reference, width))
    fresh = random.normal(size=(2, kept, width))
    assert tokens - math.floor(tokens * ratio) == kept
    for row in range(2):
        distance = ((x[row] - x[row].mean(0)) ** 2).sum(1)
        chosen = np.sort(np.argsort(-distance, kind="stable")[:kept])
        grid, expected = cached[row].reshape(reference, reference, width), np.empty((side, side, width))
        for i in range(side):
            for j in range(side):
                window = grid[
                    i * reference // side : -(-(i + 1) * reference // side),
                    j * reference // side : -(-(j + 1) * reference // side),
                ]
                expected[i, j] = window.mean((0, 1))
        expected = expected.reshape(tokens, width)
        expected[chosen] = fresh[row]
        score = variance_score(torch.from_numpy(x[row][None]).float())
        mine = lowest_scores(score[0], kept)
        assert np.array_equal(mine.numpy(), chosen)
        base = torch.from_numpy(cached[row][None]).float()
        restored = resampled_residual(base, (reference, reference), (side, side), "area")
        found = put_rows(restored, mine[None], torch.from_numpy(fresh[row][None]).float())[0].numpy()
        np.testing.assert_allclose(found, expected, atol=1e-5)  # fp32 means of at most four numbers


def test_a_target_is_reached_and_the_best_is_named():
    plan = fitted(target_speedup=2.0)
    assert 2.0 <= plan.tle_speedup < 2.1
    with pytest.raises(ToprovarError, match=r"out of reach: at most \d\.\d\d times"):
        fitted(target_speedup=9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ratio": "0.5"}, "method fastvar has no option ratio"),
        ({"ratios": "0.5,2"}, "option ratios.1 of method fastvar"),
        ({"exact": "perhaps"}, "option exact of method fastvar"),
        ({"first_layer": "-1"}, "option first_layer"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ToprovarError, match=message):
        fitted(options=options)


def test_the_nearest_option_is_suggested():
    with pytest.raises(ToprovarError) as caught:
        fitted(options={"ratio": "0.5"})
    assert caught.value.hint == "did you mean ratios?"
