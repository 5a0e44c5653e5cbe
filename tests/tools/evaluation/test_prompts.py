import random
from collections import Counter

import pytest
from evaluation_helpers import CONCEPTS

from toprovar.exporter.model import PACKAGED
from toprovar.runtime.errors import ToprovarError
from toprovar.tools.evaluation.concepts import read_concepts
from toprovar.tools.evaluation.prompts import COUNTS, SPLITS, draw_prompts, prompts_digest, prompts_of
from toprovar.tools.train_demo.captions import caption, held_out_styles, is_held_out_pair


@pytest.fixture(scope="module")
def concepts():
    return read_concepts(PACKAGED["demo"])


@pytest.fixture(scope="module")
def splits(concepts):
    return {split: prompts_of(split, concepts) for split in SPLITS}


def test_test_split_is_large_enough_and_no_text_comes_twice(splits):
    assert len(splits["test"]) == sum(COUNTS["test"].values()) >= 512
    assert len(splits["development"]) == 256
    for prompts in splits.values():
        assert len({prompt.text for prompt in prompts}) == len(prompts)
        assert [prompt.index for prompt in prompts] == list(range(len(prompts)))


def test_development_and_test_share_no_prompt(splits):
    assert not {p.text for p in splits["test"]} & {p.text for p in splits["development"]}


def test_buckets_and_layouts_have_their_counts(splits):
    found = Counter((p.bucket, p.held_out) for p in splits["test"])
    assert found == {
        ("single", ""): 144, ("single", "style"): 64, ("pattern", ""): 96, ("scene", ""): 192, ("scene", "pair"): 32,
    }  # fmt: skip
    layouts = Counter(p.scene.layout for p in splits["test"] if p.bucket == "scene" and not p.held_out)
    assert layouts == dict.fromkeys(("pair", "above", "two", "three", "four", "grid"), 32)


def test_held_out_means_what_training_leaves_out(splits, concepts):
    for prompts in splits.values():
        for prompt in prompts:
            scene = prompt.scene
            names = [concepts[i].name for i in scene.concepts]
            hidden_style = any(scene.style in held_out_styles(concepts[i]) for i in scene.concepts)
            hidden_pair = any(is_held_out_pair(a, b) for a in names for b in names)
            assert (hidden_style, hidden_pair) == (prompt.held_out == "style", prompt.held_out == "pair"), prompt.text


def test_prompts_name_concepts_exactly_and_have_no_tags(splits, concepts):
    for prompt in splits["test"]:
        assert prompt.text == caption(prompt.scene, concepts, random.Random(0), vary=False)
        assert f"{prompt.scene.style} style" in prompt.text


def test_first_prompts_are_a_mixture(splits):
    assert len({(p.bucket, p.held_out) for p in splits["test"][:32]}) >= 4


def test_splits_are_always_the_same_and_other_seeds_differ(splits, concepts):
    digest = prompts_digest(splits["test"])
    assert prompts_digest(prompts_of("test", concepts)) == digest
    assert prompts_digest(draw_prompts(concepts, 1, "test")) != digest
    assert prompts_digest(splits["test"][1:]) != digest


def test_too_few_concepts_are_refused():
    with pytest.raises(ToprovarError, match="2 concepts are too few"):
        prompts_of("test", CONCEPTS[:2])
