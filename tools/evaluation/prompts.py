"""The fixed prompts of the evaluation: a test split, and a development split that shares no prompt with it.

Prompts are drawn from the scene grammar by seed and name every concept exactly; tags, other articles and prompts
without a style, which training also shows, are not evaluated. The order is shuffled, so that the first N are a fair
sample.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from toprovar.runtime.errors import ToprovarError
from toprovar.tools.train_demo.captions import (
    COLOUR_NAMES,
    FAMILIES,
    LAYOUTS,
    OBJECTS_IN,
    PATTERNS,
    Concept,
    Scene,
    caption,
    held_out_styles,
    is_held_out_pair,
)

BUCKETS = ("single", "pattern", "scene")
SCENE_LAYOUTS = LAYOUTS[1:]
PAIRS = ("pair", "above")  # layouts in which concepts that never met in training can meet
# prompts per part; the scenes are shared out evenly over the layouts
COUNTS = {
    "test": {"seen": 144, "held_out": 64, "pattern": 96, "scene": 192, "held_out_pair": 32},
    "development": {"seen": 70, "held_out": 31, "pattern": 47, "scene": 90, "held_out_pair": 18},
}
SPLITS = tuple(COUNTS)
_SEEDS = {"test": 20_001, "development": 20_002}
_TRIES = 10_000


@dataclass(frozen=True)
class Prompt:
    """index: place in the split, which also picks the noise; held_out: "", "style" or "pair"."""

    index: int
    text: str
    scene: Scene
    held_out: str = ""

    @property
    def bucket(self) -> str:
        """Complexity: a single object on a plain ground, on a pattern, or several objects."""
        if self.scene.layout != "single":
            return "scene"
        return "single" if self.scene.pattern == "plain" else "pattern"


class _Scenes:
    """Draws scenes of each part of a split."""

    def __init__(self, concepts: Sequence[Concept], rng: random.Random) -> None:
        self.rng = rng
        self.concepts = concepts
        hidden = [set(held_out_styles(concept)) for concept in concepts]
        pairs = [(i, style) for i, concept in enumerate(concepts) for style in concept.styles]
        self.seen = [(i, style) for i, style in pairs if style not in hidden[i]]
        self.held_out_singles = [(i, style) for i, style in pairs if style in hidden[i]]
        of_style = {
            style: [i for i, s in self.seen if s == style] for family in FAMILIES for style in family
        }  # scenes show drawings that training shows
        self.of_style = {style: found for style, found in of_style.items() if len(found) >= max(OBJECTS_IN.values())}

    def _single(self, pairs: list[tuple[int, str]]) -> Scene | None:
        if not pairs:
            return None
        concept, style = self.rng.choice(pairs)
        return Scene("single", (concept,), style, "plain", self.rng.choice(COLOUR_NAMES))

    def single(self) -> Scene | None:
        return self._single(self.seen)

    def held_out_single(self) -> Scene | None:
        return self._single(self.held_out_singles)

    def pattern(self) -> Scene | None:
        if not self.seen:
            return None
        concept, style = self.rng.choice(self.seen)
        first, second = self.rng.sample(COLOUR_NAMES, 2)
        return Scene("single", (concept,), style, self.rng.choice(PATTERNS[1:]), first, second)

    def several(self, layout: str, held_out: bool) -> Scene | None:
        """Several objects; held out: two concepts that training never combines."""
        if not self.of_style:
            return None
        style = self.rng.choice(list(self.of_style))
        chosen = self.rng.sample(self.of_style[style], OBJECTS_IN[layout])
        names = [self.concepts[i].name for i in chosen]
        if any(is_held_out_pair(a, b) for a in names for b in names) != held_out:
            return None
        return Scene(layout, tuple(chosen), style, "plain", self.rng.choice(COLOUR_NAMES))


Counts = dict[str, dict[str, int]]


def draw_prompts(
    concepts: Sequence[Concept],
    seed: int,
    split: str,
    avoid: Collection[str] = (),
    counts: Counts | None = None,
) -> list[Prompt]:
    """Prompts in the proportions of a split, by another seed.

    avoid:  texts that must not come up
    counts: of both splits, for tests with few concepts
    Raises: ToprovarError if the concepts are too few for so many different prompts.
    """
    wanted = (COUNTS if counts is None else counts)[split]
    rng = random.Random(seed)
    scenes = _Scenes(concepts, rng)
    parts: list[tuple[str, str, Callable[[], Scene | None]]] = []  # (part, held out, how to draw one)
    parts += [("seen", "", scenes.single)] * wanted["seen"]
    parts += [("held_out", "style", scenes.held_out_single)] * wanted["held_out"]
    parts += [("pattern", "", scenes.pattern)] * wanted["pattern"]
    for i in range(wanted["scene"]):
        layout = SCENE_LAYOUTS[i % len(SCENE_LAYOUTS)]
        parts.append(("scene", "", lambda layout=layout: scenes.several(layout, False)))  # type: ignore[misc]
    for i in range(wanted["held_out_pair"]):
        layout = PAIRS[i % len(PAIRS)]
        parts.append(("held_out_pair", "pair", lambda layout=layout: scenes.several(layout, True)))  # type: ignore[misc]
    found: dict[str, tuple[Scene, str]] = {}
    for part, held_out, draw in parts:
        for _ in range(_TRIES):
            scene = draw()
            text = caption(scene, concepts, rng, vary=False) if scene else ""
            if scene and text not in found and text not in avoid:
                found[text] = scene, held_out
                break
        else:
            raise ToprovarError(
                f"no further prompt for the part {part} of the split {split}: {len(concepts)} concepts are too few",
                "restore concepts.json of the package",
            )
    order = list(found.items())
    rng.shuffle(order)
    return [Prompt(i, text, scene, held_out) for i, (text, (scene, held_out)) in enumerate(order)]


def prompts_of(split: str, concepts: Sequence[Concept], counts: Counts | None = None) -> list[Prompt]:
    """All prompts of a split, always the same for the same concepts; raises as `draw_prompts` does."""
    test = draw_prompts(concepts, _SEEDS["test"], "test", counts=counts)
    if split == "test":
        return test
    return draw_prompts(concepts, _SEEDS[split], split, {prompt.text for prompt in test}, counts)


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    """Digest of texts and scenes in order."""
    facts = [[p.text, p.scene.layout, p.scene.concepts, p.scene.style, p.held_out] for p in prompts]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
