from __future__ import annotations

import random

import pytest

from toprovar.runtime.word_tokenizer import UNKNOWN_ID, WordTokenizer, vocabulary_from_texts
from toprovar.tools.train_demo import captions
from toprovar.tools.train_demo.captions import Concept, Scene
from toprovar.tools.train_demo.curation import Candidate, bare_hexcode, concept_names, select, usable_tags
from toprovar.tools.train_demo.data import SceneSampler

CONCEPTS = [Concept(f"thing{i}", (f"tag{i}",), ("noto", "blob", "flat", "3d")) for i in range(120)]


def test_plain_captions_say_what_the_scene_shows() -> None:
    rng = random.Random(0)
    concepts = [Concept("dog", (), ("flat",)), Concept("red apple", (), ("flat",)), Concept("fox", (), ("flat",))]

    def text(*parts: object) -> str:
        return captions.caption(Scene(*parts), concepts, rng, vary=False)  # type: ignore[arg-type]

    assert text("single", (0,), "flat", "plain", "blue") == "dog, flat style, on blue"
    assert text("pair", (0, 1), "flat", "plain", "blue") == "a dog and a red apple, flat style, on blue"
    assert text("above", (0, 2), "flat", "plain", "red") == "dog above fox, flat style, on red"
    assert text("three", (2,), "flat", "plain", "red") == "three foxes, flat style, on red"
    assert text("single", (0,), "3d", "striped", "red", "teal") == "dog, 3d style, on a red and teal striped background"


def test_every_caption_fits_and_has_no_unknown_word() -> None:
    words = WordTokenizer(vocabulary_from_texts(captions.vocabulary_texts(CONCEPTS)))
    sampler, rng = SceneSampler(CONCEPTS), random.Random(1)
    for _ in range(1500):
        scene = sampler.draw(rng.choice(("single", "pattern", "scene")), rng)
        found = words.encode(captions.caption(scene, CONCEPTS, rng), captions.MAX_CAPTION_TOKENS)
        assert found.kept == found.total
        assert UNKNOWN_ID not in found.ids


def test_scenes_follow_from_the_seed() -> None:
    sampler = SceneSampler(CONCEPTS)
    first, second = random.Random(7), random.Random(7)
    assert [sampler.draw("scene", first) for _ in range(50)] == [sampler.draw("scene", second) for _ in range(50)]


def test_flat_and_3d_are_held_out_together() -> None:
    hidden = [captions.held_out_styles(concept) for concept in CONCEPTS]
    assert all(("flat" in styles) == ("3d" in styles) for styles in hidden)
    pairs = sum(len(styles) for styles in hidden)
    assert 0.05 < pairs / (4 * len(CONCEPTS)) < 0.17


def test_hold_out_does_not_depend_on_other_concepts() -> None:
    few, many = SceneSampler(CONCEPTS[:10], held_out=True), SceneSampler(CONCEPTS, held_out=True)
    assert few.singles == [pair for pair in many.singles if pair[0] < 10]


def test_a_concept_of_one_family_is_never_held_out() -> None:
    concepts = [Concept(f"thing{i}", (), ("flat", "3d")) for i in range(120)]
    assert all(captions.held_out_styles(concept) == () for concept in concepts)


def test_training_never_shows_a_held_out_combination() -> None:
    sampler, rng = SceneSampler(CONCEPTS), random.Random(2)
    hidden = [captions.held_out_styles(concept) for concept in CONCEPTS]
    for scene in [sampler.draw(kind, rng) for kind in ("single", "pattern", "scene") for _ in range(700)]:
        assert all(scene.style not in hidden[i] for i in scene.concepts)
        names = [CONCEPTS[i].name for i in scene.concepts]
        assert not any(captions.is_held_out_pair(a, b) for a in names for b in names)


def test_held_out_sampler_shows_only_held_out_combinations() -> None:
    sampler, rng = SceneSampler(CONCEPTS, held_out=True), random.Random(3)
    for _ in range(100):
        single, scene = sampler.draw("single", rng), sampler.draw("scene", rng)
        assert single.style in captions.held_out_styles(CONCEPTS[single.concepts[0]])
        assert captions.is_held_out_pair(*(CONCEPTS[i].name for i in scene.concepts))


def candidate(label: str, order: int, styles: tuple[str, ...], tags: tuple[str, ...] = ()) -> Candidate:
    return Candidate(label, tags, f"{order:x}", "animal-bug", order, styles)


def test_selection_prefers_blob_then_short_labels() -> None:
    full, three = ("noto", "blob", "flat", "3d"), ("noto", "flat", "3d")
    pool = [candidate("long name", 1, full), candidate("moth", 2, three), candidate("wasp", 3, full)]
    assert [c.label for c in select(pool, scale=2 / 7)] == ["long name", "wasp"]
    assert [c.label for c in select([*pool, candidate("fly", 4, full)], scale=1 / 7)] == ["wasp"]  # fly is a duplicate


def test_names_and_tags_are_unambiguous() -> None:
    chosen = [
        candidate("dog face", 1, ("noto",), ("pet", "puppy", "brown")),
        candidate("cat face", 2, ("noto",), ("pet", "two cats", "kitty")),
    ]
    names = concept_names(chosen)
    assert names == ["dog", "cat"]
    assert usable_tags(names, chosen) == [["dog face", "puppy"], ["cat face", "kitty"]]


@pytest.mark.parametrize(("given", "bare"), [("2600-FE0F", "2600"), ("1F415", "1f415")])
def test_variation_selector_is_dropped(given: str, bare: str) -> None:
    assert bare_hexcode(given) == bare
