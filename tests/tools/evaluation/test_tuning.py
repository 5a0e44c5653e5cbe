import json

import pytest
from typer.testing import CliRunner

from toprovar.runtime.guidance import Guidance
from toprovar.tools.evaluation import tuning
from toprovar.tools.evaluation.prompts import prompts_digest, prompts_of
from toprovar.tools.evaluation.tuning import choose, constant, tune, with_late

BASE = Guidance(cfg=(2.0,) * 5, tau=(0.7,) * 5, top_p=0.9)


def candidate(right, frechet, **values):
    return {"right": right, "share": right.count("1") / len(right), "frechet": frechet, **values}


def test_late_scales_are_the_last_three():
    found = with_late(constant(BASE, 3.0, 0.5), 1.5, 0.1)
    assert found.cfg == (3.0, 3.0, 1.5, 1.5, 1.5)
    assert found.tau == (0.5, 0.5, 0.1, 0.1, 0.1)
    assert found.top_p == 0.9


def test_distance_decides_among_those_that_are_not_worse_for_sure():
    best = candidate("1" * 50 + "0" * 50, 9.0)
    close = candidate("1" * 47 + "0" * 53, 5.0)
    worse = candidate("1" * 20 + "0" * 80, 1.0)
    assert choose([best, close, worse]) == 1
    assert choose([best, worse]) == 0
    assert choose([close, best, close]) == 0


def test_second_round_starts_from_the_first_s_choice():
    asked = []

    def measure(guidance):
        asked.append(guidance)
        distance = abs(guidance.cfg[0] - 3) + 2 * abs(guidance.tau[0] - 0.5) + abs(guidance.tau[-1] - 0.3)
        return candidate("1" * 20, distance, cfg=list(guidance.cfg), tau=list(guidance.tau))

    ticks = []
    found = tune(measure, BASE, lambda done, total: ticks.append((done, total)))
    grid, late = len(tuning.GRID_CFG) * len(tuning.GRID_TAU), len(tuning.LATE_CFG) * len(tuning.LATE_TAU)
    assert len(found["candidates"]) == len(asked) == grid + late
    assert ticks[-1] == (grid + late, grid + late)
    assert {guidance.cfg[0] for guidance in asked[grid:]} == {3.0}
    chosen = found["candidates"][found["chosen"]]
    assert chosen["tau"] == [0.5, 0.5, 0.3, 0.3, 0.3]


@pytest.fixture
def small_grid(monkeypatch):
    for name, values in {
        "GRID_CFG": (1.0, 2.0),
        "GRID_TAU": (0.5,),
        "LATE_CFG": (2.0,),
        "LATE_TAU": (0.1, 0.5),
    }.items():
        monkeypatch.setattr(tuning, name, values)


def run(*arguments):
    return CliRunner().invoke(tuning.app, [str(argument) for argument in arguments])


def test_command_tunes_on_development_and_goes_on_where_it_stopped(judged_folder, tmp_path, small_grid, monkeypatch):
    from toprovar.tools.evaluation.concepts import read_concepts

    out = tmp_path / "tuning.json"
    options = ("--model", judged_folder, "--prompts", 2, "--out", out)
    judge, calls = tuning.judge_guidance, []

    def stops(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return judge(*arguments)

    monkeypatch.setattr(tuning, "judge_guidance", stops)
    assert run(*options).exit_code == 130
    end = run(*options)
    assert end.exit_code == 0, end.output
    assert len(calls) == 5  # two, the one that was stopped, and that again with the last
    document = json.loads(out.read_text())
    assert document["split"] == "development"
    every = prompts_of("development", read_concepts(judged_folder))
    assert document["prompts"] == {"count": 2, "of": 256, "sha256": prompts_digest(every[:2])}
    assert len(document["candidates"]) == 4
    assert {tuple(c["cfg"]) for c in document["candidates"]} >= {(1.0,) * 7, (2.0,) * 7}
    chosen = document["candidates"][document["chosen"]]
    assert json.loads(end.stdout) == {"cfg": chosen["cfg"], "tau": chosen["tau"]}
    again = run(*options, "--json")
    assert len(calls) == 5
    assert json.loads(again.stdout)["candidates"] == document["candidates"]


def test_cuda_needs_pytorch(tmp_path):
    end = run("--device", "cuda", "--out", tmp_path / "x.json")
    assert end.exit_code == 2
    assert "pass --backend pytorch" in end.stderr
