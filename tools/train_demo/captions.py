"""Scene grammar of the demo model: what a picture shows, how it is captioned, and what is held out.

A picture is a background and sprites of one style in fixed places, so every caption can be checked against it.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

COLOURS: dict[str, tuple[int, int, int]] = {
    "white": (255, 255, 255),
    "black": (20, 20, 22),
    "gray": (140, 140, 145),
    "red": (214, 45, 45),
    "orange": (245, 140, 30),
    "yellow": (250, 215, 60),
    "green": (60, 160, 70),
    "teal": (30, 150, 150),
    "blue": (60, 120, 230),
    "navy": (25, 40, 100),
    "purple": (130, 70, 180),
    "pink": (250, 160, 190),
    "brown": (125, 80, 45),
}
COLOUR_NAMES = tuple(COLOURS)
PATTERNS = ("plain", "checkered", "striped", "gradient")
LAYOUTS = ("single", "pair", "above", "two", "three", "four", "grid")
OBJECTS_IN = {"single": 1, "pair": 2, "above": 2, "two": 1, "three": 1, "four": 1, "grid": 4}  # different concepts
# Drawing families: flat and 3d share Fluent's drawings, so they are held out together.
FAMILIES = (("noto",), ("blob",), ("flat", "3d"))
HELD_OUT_CONCEPT_SHARE = 0.28  # of concepts, one family each: about 10 % of the (concept, style) pairs
HELD_OUT_PAIR_SHARE = 0.05
MAX_CAPTION_TOKENS = 32  # room for every caption of the grammar; a multiple of 16 for the masked attention kernels

_NUMBERS = {"two": "two", "three": "three", "four": "four"}


@dataclass(frozen=True)
class Concept:
    """name and tags as they appear in captions; styles that draw it."""

    name: str
    tags: tuple[str, ...]
    styles: tuple[str, ...]


@dataclass(frozen=True)
class Scene:
    """One picture. concepts: indices, as many as OBJECTS_IN[layout]; second is "" on a plain background."""

    layout: str
    concepts: tuple[int, ...]
    style: str
    pattern: str
    first: str
    second: str = ""


def _fraction(*parts: str) -> float:
    """Uniform number in [0, 1) that depends on the parts only."""
    return int.from_bytes(hashlib.sha256("\0".join(parts).encode()).digest()[:7], "big") / 2**56


def held_out_styles(concept: Concept) -> tuple[str, ...]:
    """Styles of a concept that training never sees: none, or one whole drawing family.

    Depends on the concept's name alone, so that adding concepts moves nothing. A concept with a single family keeps it.
    """
    families = [f for f in FAMILIES if any(style in concept.styles for style in f)]
    if len(families) < 2 or _fraction("style", concept.name) >= HELD_OUT_CONCEPT_SHARE:
        return ()
    family = families[int(_fraction("family", concept.name) * len(families))]
    return tuple(style for style in family if style in concept.styles)


def is_held_out_pair(first: str, second: str) -> bool:
    """Whether two concepts never meet in a training scene; symmetric."""
    return first != second and _fraction("pair", *sorted((first, second))) < HELD_OUT_PAIR_SHARE


def _with_article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _plural(noun: str) -> str:
    if noun.endswith("s"):
        return noun
    if noun.endswith(("x", "ch", "sh")):
        return noun + "es"
    if noun.endswith("y") and noun[-2:-1] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + "s"


def caption(scene: Scene, concepts: Sequence[Concept], rng: random.Random, vary: bool = True) -> str:
    """Text of a scene.

    vary: swap a name for one of its tags (20 %), leave the style out (10 %), and change articles; else the plain form.
    """

    def noun(index: int) -> str:
        concept = concepts[index]
        return rng.choice(concept.tags) if vary and concept.tags and rng.random() < 0.2 else concept.name

    nouns = [noun(index) for index in scene.concepts]
    if scene.layout == "single":
        subject = _with_article(nouns[0]) if vary and rng.random() < 0.5 else nouns[0]
    elif scene.layout == "pair":
        subject = f"{_with_article(nouns[0])} and {_with_article(nouns[1])}"
        if vary and rng.random() < 0.2:
            subject = f"{_with_article(nouns[0])} left of {_with_article(nouns[1])}"
    elif scene.layout == "above":
        subject = f"{nouns[0]} above {nouns[1]}"
        if vary and rng.random() < 0.2:
            subject = f"{nouns[1]} below {nouns[0]}"
    elif scene.layout == "grid":
        subject = f"{nouns[0]}, {nouns[1]}, {nouns[2]} and {nouns[3]}"
    else:
        subject = f"{_NUMBERS[scene.layout]} {_plural(nouns[0])}"
    style = "" if vary and rng.random() < 0.1 else f", {scene.style} style"
    if scene.pattern == "plain":
        ground = f"on {scene.first}"
        if vary and rng.random() < 0.2:
            ground = f"on a {scene.first} background"
    else:
        ground = f"on a {scene.first} and {scene.second} {scene.pattern} background"
    return f"{subject}{style}, {ground}"


def grammar_words() -> list[str]:
    """Every word that captions can contain beside names and tags."""
    fixed = ["a an and on left of above below background style", *COLOUR_NAMES, *PATTERNS, *_NUMBERS]
    return [*fixed, *(style for family in FAMILIES for style in family)]


def vocabulary_texts(concepts: Sequence[Concept]) -> list[str]:
    """Texts whose words make up the vocabulary: names, tags, their plurals, and the grammar's words."""
    texts = grammar_words()
    for concept in concepts:
        for noun in (concept.name, *concept.tags):
            texts += [noun, _plural(noun)]
    return texts
