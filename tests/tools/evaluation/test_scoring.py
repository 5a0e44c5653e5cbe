import dataclasses
import random

import numpy as np
import pytest
import torch
from evaluation_helpers import CONCEPTS, COUNTS, NAMES

from toprovar.tools.evaluation.prompts import prompts_of
from toprovar.tools.evaluation.scoring import ASPECTS, asked_concepts, crop_features, score_pictures
from toprovar.tools.train_demo.captions import COLOUR_NAMES, Scene

PAIR = Scene("pair", (0, 3), "noto", "plain", "white")


def verdict_of(composer, judge, drawn, asked):
    return score_pictures(composer.draw([drawn]), [asked], judge)[0]


def test_real_pictures_are_right_in_everything(composer, judge):
    prompts = [p for p in prompts_of("test", CONCEPTS, COUNTS) if p.scene.first in ("white", "black", "navy", "gray")]
    kinds = {(p.bucket, p.scene.layout) for p in prompts}
    assert len(kinds) >= 5
    scenes = [prompt.scene for prompt in prompts]
    for prompt, verdict in zip(prompts, score_pictures(composer.draw(scenes), scenes, judge), strict=True):
        assert verdict.all_right, (prompt.text, verdict)
        assert verdict.concepts == asked_concepts(prompt.scene)
        assert all(verdict.in_top5)
        assert verdict.features.shape == (len(verdict.concepts), 112)


def test_order_of_a_mixed_batch_is_kept(composer, judge):
    scenes = [
        Scene("single", (i % 8,), "noto", "plain", "white") if i % 2 else dataclasses.replace(PAIR, concepts=(i, i + 1))
        for i in range(6)
    ]
    together = score_pictures(composer.draw(scenes), scenes, judge)
    assert [verdict.concepts for verdict in together] == [asked_concepts(scene) for scene in scenes]


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"concepts": (0, 4)}, {"concept", "relation"}),
        ({"concepts": (3, 0)}, {"relation"}),
        ({"style": "3d"}, {"style"}),
        ({"first": "black"}, {"background"}),
        ({"layout": "above"}, {"concept", "relation"}),
        ({"layout": "grid", "concepts": (0, 3, 0, 3)}, {"concept", "relation", "count"}),
    ],
)
def test_each_fault_is_found_where_it_is(composer, judge, change, wrong):
    verdict = verdict_of(composer, judge, dataclasses.replace(PAIR, **change), PAIR)
    assert {aspect for aspect, right in verdict.right.items() if not right} == wrong
    assert not verdict.all_right
    assert verdict.swapped == (change.get("concepts") == (3, 0))


def test_two_drawn_as_one_and_as_three_has_a_wrong_count(composer, judge):
    asked = Scene("two", (2,), "noto", "plain", "white")
    for layout, count in (("two", True), ("single", False), ("three", False)):
        drawn = dataclasses.replace(asked, layout=layout)
        assert verdict_of(composer, judge, drawn, asked).right["count"] is count


def test_four_objects_may_stand_in_any_order(composer, judge):
    asked = Scene("grid", (0, 1, 2, 3), "noto", "plain", "white")
    verdict = verdict_of(composer, judge, dataclasses.replace(asked, concepts=(2, 0, 3, 1)), asked)
    assert verdict.all_right
    assert verdict.in_top5 == (True,) * 4
    twice = verdict_of(composer, judge, dataclasses.replace(asked, concepts=(2, 0, 3, 3)), asked)
    assert not twice.right["concept"]


def test_one_wrong_of_four_makes_the_concept_wrong(composer, judge):
    asked = Scene("four", (2,), "noto", "plain", "white")
    verdict = verdict_of(composer, judge, Scene("grid", (2, 2, 1, 2), "noto", "plain", "white"), asked)
    assert verdict.right["concept"] is False
    assert verdict.concepts == (2, 2, 1, 2)
    assert verdict.right["count"]


def test_pattern_and_its_colours_are_judged_apart(composer, judge):
    asked = Scene("single", (1,), "noto", "striped", "white", "navy")
    for drawn, pattern, colours in (
        (dataclasses.replace(asked, first="navy", second="white"), True, True),  # either stripe may come first
        (dataclasses.replace(asked, pattern="checkered"), False, True),
        (dataclasses.replace(asked, second="black"), True, False),
        (dataclasses.replace(asked, pattern="plain", second=""), False, False),
    ):
        verdict = verdict_of(composer, judge, drawn, asked)
        assert (verdict.right["pattern"], verdict.right["background"]) == (pattern, colours), drawn


def test_relation_is_asked_of_pairs_only(composer, judge):
    single = Scene("single", (0,), "noto", "plain", "white")
    assert set(verdict_of(composer, judge, single, single).right) == set(ASPECTS) - {"relation"}
    assert set(verdict_of(composer, judge, PAIR, PAIR).right) == set(ASPECTS)


def test_picture_without_objects_is_no_concept(composer, judge):
    pictures = torch.ones(1, 3, 256, 256)
    verdict = score_pictures(pictures, [PAIR], judge)[0]
    assert verdict.concepts == (len(NAMES), len(NAMES))
    assert verdict.arrangement == "none"
    assert not verdict.right["count"]
    assert verdict.right["background"]


def test_features_alone_are_those_of_the_verdicts(composer, judge):
    scenes = [PAIR, Scene("single", (1,), "3d", "plain", "white"), PAIR]
    pictures = composer.draw(scenes)
    expected = np.concatenate([verdict.features for verdict in score_pictures(pictures, scenes, judge)])
    found = crop_features(pictures, scenes, judge)
    assert sorted(map(tuple, found.tolist())) == sorted(map(tuple, expected.tolist()))


def test_facts_are_json_and_complete(composer, judge):
    import json

    rng = random.Random(0)
    scene = Scene("single", (0,), "noto", "gradient", *rng.sample(COLOUR_NAMES, 2))
    facts = verdict_of(composer, judge, scene, scene).facts()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["colours"] == [scene.first, scene.second]
