import json

import numpy as np
import pytest
from evaluation_helpers import CONCEPTS, COUNTS

from toprovar.tools.evaluation.frechet import features_of
from toprovar.tools.evaluation.journal import Record
from toprovar.tools.evaluation.prompts import prompts_of
from toprovar.tools.evaluation.results import GROUPS, against_dense, scores, variant_facts
from toprovar.tools.evaluation.scoring import ASPECTS
from toprovar.tools.evaluation.table import markdown

PROMPTS = prompts_of("test", CONCEPTS, COUNTS)


def records(wrong, steps_ms=100.0, shift=0.0, aspect="concept"):
    """Everything right but one aspect of the prompts in `wrong`."""
    found = []
    for prompt in PROMPTS:
        asked = [a for a in ASPECTS if a != "relation" or prompt.scene.layout in ("pair", "above")]
        places = {"single": 1, "three": 3, "four": 4, "grid": 4}.get(prompt.scene.layout, 2)
        verdict = {
            "concepts": [prompt.scene.concepts[0]] * places,
            "in_top5": [True] * places,
            "style": prompt.scene.style,
            "pattern": prompt.scene.pattern,
            "colours": [prompt.scene.first],
            "arrangement": "single",
            "swapped": False,
            "right": {a: not (a == aspect and prompt.index in wrong) for a in asked},
        }
        features = np.random.default_rng(prompt.index).normal(size=(places, 4)).astype(np.float32) + shift
        found.append(Record(prompt.index, "x", 0, steps_ms, 0.9, 30.0, verdict, features))
    return found


def test_shares_count_what_was_asked():
    found = scores(records({0, 1, 2}), PROMPTS)
    total = len(PROMPTS)
    assert found["aspects"]["concept"]["right"] == found["aspects"]["all"]["right"] == total - 3
    assert found["aspects"]["style"]["share"] == 1
    pairs = sum(p.scene.layout in ("pair", "above") for p in PROMPTS)
    assert found["aspects"]["relation"]["count"] == pairs > 0
    assert sum(found["groups"][bucket]["all"]["count"] for bucket in ("single", "pattern", "scene")) == total
    assert sum(found["groups"][group]["all"]["count"] for group in list(GROUPS)[-3:]) == total
    low, high = found["aspects"]["all"]["interval"]
    assert low < (total - 3) / total < high


def test_a_plan_is_compared_prompt_by_prompt():
    dense, plan = records({0, 1}), records({1, 2, 3, 4}, steps_ms=40.0)
    found = against_dense(plan, dense)
    assert found["differences"]["all"]["difference"] == pytest.approx(-2 / len(PROMPTS), abs=1e-6)
    low, high = found["differences"]["all"]["interval"]
    assert low < -2 / len(PROMPTS) < high
    assert found["differences"]["style"]["mcnemar_p"] == 1
    assert found["wall_speedup"] == 2.5


def entry(name, mine, dense, speedup):
    reference = features_of(np.random.default_rng(1).normal(size=(500, 4)))
    return variant_facts(mine, dense, PROMPTS, CONCEPTS, reference, {"name": name, "tle_speedup": speedup})


@pytest.fixture(scope="module")
def document():
    dense, plan = records({0, 1}), records({1, 2, 3, 4}, steps_ms=40.0, shift=0.5)
    return {
        "split": "test", "seed": 3, "command": "toprovar evaluate demo", "backend": "onnxruntime",
        "judge_sha256": "b" * 64,
        "model": {"weights_sha256": "a" * 64, "guidance": {"cfg": [2.0, 2.0], "tau": [0.7, 0.5]}},
        "prompts": {"count": len(PROMPTS), "of": len(PROMPTS), "sha256": "c" * 64},
        "variants": [entry("dense", dense, None, 1.0), entry("full@2", plan, dense, 2.04)],
        "references": [{"name": "real pictures", **scores(records(()), PROMPTS), "frechet": {}}],
    }  # fmt: skip


def test_raw_verdicts_tell_the_shares_again(document):
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    for variant in document["variants"]:
        for aspect in ASPECTS:
            marks = variant["verdicts"]["right"][aspect]
            assert len(marks) == len(PROMPTS)
            assert marks.count("1") == variant["aspects"][aspect]["right"]
            assert marks.count("1") + marks.count("0") == variant["aspects"][aspect]["count"]
        assert len(variant["verdicts"]["answers"]) == len(PROMPTS)


def test_shifted_features_are_further_away(document):
    dense, plan = (variant["frechet"] for variant in document["variants"])
    assert plan["distance"] > dense["distance"]
    assert plan["to_dense"]["difference"] == pytest.approx(plan["distance"] - dense["distance"], abs=2e-5)
    assert plan["to_dense"]["difference"] > plan["to_dense"]["half_width"] > 0
    assert plan["crops"] == sum(len(record.features) for record in records(()))


def test_tables_show_every_entry_with_its_numbers(document):
    text = markdown(document)
    tables = text.split("\n\n")[1:]
    assert len(tables) == 3
    share = document["variants"][1]["aspects"]["all"]["share"]
    assert f"| full@2 | 2.04 | {share:.3f} [" in text
    assert "| real pictures | – | 1.000 [" in text
    assert "cfg 2, tau 0.7 0.5" in text
    assert "2.04 / 2.50" in text
    for table in tables:
        widths = {line.count("|") for line in table.strip().splitlines()}
        assert len(widths) == 1
