"""What is compared: names, files, methods with settings and targets, and what is left out."""

import pytest
from made_statistics import backbone_of, statistics_of

from toprovar.calibrate.methods import METHODS
from toprovar.runtime.errors import ToprovarError
from toprovar.tools.comparison.lineup import (
    TARGETS,
    Contestant,
    contestant_of_method,
    every_method,
    fit_all,
    lineup,
    needs_of,
)


class Stand:
    """As much of a model as fitting looks at."""

    def __init__(self, layers, schedule):
        self.backbone, self.schedule = backbone_of(layers), schedule


def test_a_method_is_read_with_its_settings_and_target():
    one = contestant_of_method("toprovar:paper,scale_depth=6,phi_floor=0.5,restore=identity,stratified=true@2.5")
    assert one.name == "toprovar:paper,scale_depth=6,phi_floor=0.5,restore=identity,stratified=true@2.5"
    assert (one.method, one.path) == ("toprovar", None)
    settings = one.settings
    assert (settings.preset, settings.scale_depth, settings.phi_floor) == ("paper", 6, 0.5)
    assert (settings.restore, settings.target_speedup) == ("identity", 2.5)
    assert settings.options == {"stratified": "true"}
    assert contestant_of_method("fastvar").settings.target_speedup is None


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("fastva", "unknown method fastva", "did you mean fastvar?"),
        ("fastva@2", "unknown method fastva", "did you mean fastvar?"),
        ("nothing-like-it", "unknown method nothing-like-it", "choose one of: dense, fixed_exit"),
        ("dense", "dense is always drawn", "leave it out"),
        ("toprovar:papr", "unknown preset papr", "did you mean paper?"),
        ("toprovar:", "unknown preset ", "choose from: full, paper"),
        ("toprovar@two", "'two' is not a number", "write NAME"),
        ("toprovar@", "'' is not a number", "write NAME"),
        ("toprovar@nan", "nan is out of range", "write NAME"),
        ("toprovar@0.5", "the target speed-up is 0.5; expected 1 or more", "write NAME"),
        ("toprovar:scale_depth=6.5", "'6.5' is not a whole number", "write NAME"),
        ("toprovar:restore=identiti", "unknown restore identiti", "did you mean identity?"),
        ("toprovar:stratifed=1", "has no option stratifed", "did you mean stratified?"),
        ("toprovar:paper,full", "preset is given twice", "give it once"),
        ("skipvar:paper", "method skipvar does not read --preset", "leave it out"),
        ("@2", "names no method", "write NAME"),
    ],
)
def test_a_method_that_cannot_be_is_refused_with_the_nearest_name(text, message, hint):
    with pytest.raises(ToprovarError) as told:
        contestant_of_method(text)
    assert message in told.value.message
    assert hint in told.value.hint


def test_every_method_of_the_registry_is_in_the_default_lineup_at_every_target():
    names = [one.name for one in every_method()]
    assert len(set(names)) == len(names)
    for method in set(METHODS) - {"dense"}:
        assert METHODS[method].is_tunable
        assert all(f"{method}@{target:g}" in names for target in TARGETS)
    assert {"toprovar:paper", "skipvar"} <= set(names)
    assert lineup((), ()) == every_method()


def test_two_of_one_name_are_refused(tmp_path):
    (tmp_path / "dense.json").write_text("{}")
    (tmp_path / "fastvar-paper.json").write_text("{}")  # its bundle would stand in the folder of fastvar:paper
    for plans, methods in (
        ((), ("fastvar", "fastvar")),
        ((tmp_path / "dense.json",), ()),
        ((tmp_path / "fastvar-paper.json",), ("fastvar:paper",)),
    ):
        with pytest.raises(ToprovarError, match="there is already a variant named"):
            lineup(plans, methods)
    with pytest.raises(ToprovarError, match="is not a file"):
        lineup((tmp_path / "nowhere.json",), ())


def test_needs_are_those_of_the_methods_that_are_fitted(tmp_path):
    assert needs_of([contestant_of_method("skipvar"), contestant_of_method("fastvar")]) == {"conditional_ssim"}
    assert needs_of([Contestant("plan", tmp_path)]) == set()


def test_what_is_out_of_reach_or_equal_is_left_out_unless_it_was_asked_for():
    stats = statistics_of(layers=8)
    model = Stand(8, stats.schedule)
    asked = [contestant_of_method(text) for text in ("fixed_exit@1.9", "fixed_exit@1.9001", "fastvar@50")]
    plans, left_out = fit_all(asked, {}, model, stats, is_asked=False)
    assert list(plans) == ["fixed_exit@1.9"]
    assert left_out[0] == {"name": "fixed_exit@1.9001", "reason": "the same plan as fixed_exit@1.9"}
    assert left_out[1]["name"] == "fastvar@50"
    assert "out of reach" in left_out[1]["reason"]
    assert list(fit_all(asked[:2], {}, model, stats, is_asked=True)[0]) == ["fixed_exit@1.9", "fixed_exit@1.9001"]
    with pytest.raises(ToprovarError, match="fastvar@50: target speed-up 50 is out of reach"):
        fit_all(asked, {}, model, stats, is_asked=True)
