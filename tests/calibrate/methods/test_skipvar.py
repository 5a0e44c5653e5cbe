"""SkipVAR: published coefficients and their classes, the fit, and the six paths."""

import numpy as np
import pytest
from made_statistics import backbone_of, statistics_of

from toprovar.calibrate.fitting import fit_plan
from toprovar.calibrate.methods.settings import MethodSettings
from toprovar.calibrate.methods.skipvar import fit_logistic, most_aggressive, published_models
from toprovar.exporter.schedules import schedule_for
from toprovar.runtime.decisions import SkipvarDecision, frequency_features
from toprovar.runtime.errors import ToprovarError

BACKBONE = backbone_of(32)


def fitted(stats=None, **settings):
    return fit_plan("skipvar", stats or statistics_of(prompts=40), BACKBONE, MethodSettings(**settings))


def test_published_classes_at_the_training_mean_and_far_from_it():
    """At the mean only the intercepts speak; many high frequencies keep all scales, few leave three out."""
    skip, uncond = published_models()
    assert skip.predict(np.array([0.1153, 0.4892])) == 2
    assert skip.predict(np.array([0.1153 + 3 * 0.0576, 0.4892 + 3 * 0.0756])) == 0
    assert skip.predict(np.array([0.1153 - 2 * 0.0576, 0.4892 - 2 * 0.0756])) == 3
    assert skip.predict(np.array([0.1153 + 0.0576, 0.4892])) == 1  # .960 + .739 over 1.924 - .891
    assert uncond.predict(np.array([0.1794, 0.5736])) == 3
    assert uncond.predict(np.array([0.1794 + 4 * 0.0627, 0.5736 + 4 * 0.0540])) == 1


def test_features_of_two_pictures_written_out():
    """The features by direct sums: 3 x 3 kernels and a discrete Fourier transform."""
    random = np.random.Generator(np.random.PCG64(5))
    before, after = random.uniform(-1, 1, (2, 3, 12, 10))
    kernel = np.array([[-1, 0, 1], [-2, 0, 2], [-1, 0, 1]])

    def gradient(picture):
        grey = np.pad(picture.mean(0), 1)
        windows = [[grey[y : y + 3, x : x + 3] for x in range(10)] for y in range(12)]
        return np.array([[np.hypot((w * kernel).sum(), (w * kernel.T).sum()) for w in row] for row in windows])

    grey, total, outside = after.mean(0), 0.0, 0.0
    for v in range(-6, 6):
        for u in range(-5, 5):
            wave = np.exp(-2j * np.pi * (v * np.arange(12)[:, None] / 12 + u * np.arange(10)[None] / 10))
            amplitude = abs((grey * wave).sum())
            total += amplitude
            outside += amplitude if v * v + u * u > int(0.4 * 10 / 2) ** 2 else 0
    found = frequency_features(before, after)
    assert found[0] == pytest.approx(np.abs(gradient(after) - gradient(before)).mean(), rel=1e-9)
    assert found[1] == pytest.approx(outside / total, rel=1e-9)


def test_labels_are_the_most_aggressive_class_that_stays_close():
    ssim = np.array([[0.99, 0.95, 0.90], [0.9, 0.83, 0.7], [0.8, 0.7, 0.6], [0.8, 0.9, 0.7]])
    assert most_aggressive(ssim, 0.84).tolist() == [3, 1, 0, 2]


def test_the_fit_separates_what_can_be_separated():
    random = np.random.Generator(np.random.PCG64(9))
    centres = np.array([[0.3, 0.6], [0.15, 0.5], [0.05, 0.4]])
    labels = np.repeat([0, 2, 3], 60)
    features = np.repeat(centres, 60, 0) + random.normal(0, 0.02, (180, 2))
    model = fit_logistic(features, labels)
    assert model.labels == (0, 2, 3)
    assert np.mean([model.predict(row) == label for row, label in zip(features, labels, strict=True)]) > 0.97


def test_the_fit_is_where_the_penalised_likelihood_is_flat():
    """The gradient vanishes: sum over prompts of (chance - truth) x, plus the weights themselves."""
    random = np.random.Generator(np.random.PCG64(3))
    features, labels = random.normal(size=(50, 2)), random.integers(0, 3, 50)
    model = fit_logistic(features, labels)
    x = (features - np.array(model.mean)) / np.array(model.std)
    scores = x @ np.array(model.weights).T + np.array(model.intercepts)
    chance = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    truth = labels[:, None] == np.array(model.labels)
    gradient = (chance - truth).T @ x + np.array(model.weights)
    assert np.abs(gradient).max() < 1e-6


def test_one_label_is_always_answered():
    model = fit_logistic(np.ones((4, 2)), np.array([2, 2, 2, 2]))
    assert model.predict(np.array([-5.0, 9.0])) == 2


def test_six_paths_leave_out_scales_or_guidance():
    plan = fitted(options={"classifier": "published"})
    decision = plan.decision(SkipvarDecision)
    assert (decision.scale, decision.feature_scale) == (9, 4)
    assert [plan.on_path(decision.skip_paths[c]).skip_scales for c in (1, 2, 3)] == [(12,), (11, 12), (10, 11, 12)]
    assert [plan.on_path(decision.uncond_paths[c]).cfg_stop.scale for c in (1, 2, 3)] == [12, 11, 10]
    assert plan.tle_speedup == 1
    low, high = plan.tle_range
    assert (low, high) == (1.0, pytest.approx(10521 / 2521))


def test_the_fitted_classifier_and_its_expected_work():
    plan = fitted()
    assert 1 < plan.expected_speedup < plan.tle_range[1]
    stronger = fitted(options={"threshold": "0.7"})
    assert stronger.expected_speedup > plan.expected_speedup
    assert any("few" in warning for warning in fitted(statistics_of(prompts=4)).calib.warnings)
    reached = fitted(target_speedup=2.0)
    assert reached.expected_speedup >= 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decision_scale": 12}, "decision_scale: found 12; the model has 13 scales"),
        ({"decision_scale": 3}, "decide after scale 3; expected 5 to 11"),
        ({"decision_scale": 10, "classifier": "published"}, "after scale 10 only 2"),
        ({"classifier": "magic"}, "option classifier"),
    ],
)
def test_impossible_decisions_are_refused(options, message):
    with pytest.raises(ToprovarError, match=message):
        fitted(options=options)


def test_a_schedule_too_short_is_refused():
    with pytest.raises(ToprovarError, match="calibrate at a larger --budget"):
        fitted(statistics_of(schedule_for(1.0, "0.06M")))


def test_the_published_classifier_has_one_strength():
    with pytest.raises(ToprovarError, match="one strength"):
        fitted(options={"classifier": "published"}, target_speedup=2.0)
