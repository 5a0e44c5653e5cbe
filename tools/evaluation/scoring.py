"""What a picture shows against what its prompt asked for: concept, style, background, pattern, count, relation.

Objects have fixed places, so a crop of each place goes to the classifier (classifier.py); background and count come
from pixels (background.py, layouts.py). Every answer is kept beside the verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from toprovar.runtime.errors import ToprovarError
from toprovar.tools.evaluation.background import Background, background_of, find_background
from toprovar.tools.evaluation.classifier import STYLES, DrawingClassifier, crop, places_of
from toprovar.tools.evaluation.layouts import OBJECTS, arrangement_of, find_arrangement, foreground
from toprovar.tools.evaluation.prompts import PAIRS
from toprovar.tools.train_demo.captions import Scene
from toprovar.tools.train_demo.data import IMAGE_SIZE

ASPECTS = ("concept", "style", "background", "pattern", "count", "relation")
TOP = 5


@dataclass(frozen=True)
class Verdict:
    """What the judge saw, per picture.

    concepts: the first answer per place, as an index; the number of concepts means "nothing"
    in_top5:  per asked concept, whether it is among the first five answers of a place of its own, in any order
    swapped:  in a pair, both concepts in each other's place
    right:    per aspect that the prompt asks for, whether it holds; a relation is asked of `pair` and `above` only
    features: [places, 112] float32, pooled features of every crop
    """

    concepts: tuple[int, ...]
    in_top5: tuple[bool, ...]
    style: str
    background: Background
    arrangement: str
    swapped: bool
    right: dict[str, bool]
    features: np.ndarray

    @property
    def all_right(self) -> bool:
        return all(self.right.values())

    def facts(self) -> dict[str, Any]:
        """The verdict without features, as JSON."""
        return {
            "concepts": list(self.concepts),
            "in_top5": list(self.in_top5),
            "style": self.style,
            "pattern": self.background.pattern,
            "colours": [colour for colour in (self.background.first, self.background.second) if colour],
            "arrangement": self.arrangement,
            "swapped": self.swapped,
            "right": dict(self.right),
        }


def asked_concepts(scene: Scene) -> tuple[int, ...]:
    """The concept that should stand in every place of the layout."""
    places = len(places_of(scene.layout))
    return scene.concepts if len(scene.concepts) == places else (scene.concepts[0],) * places


@torch.inference_mode()
def score_pictures(pictures: Tensor, scenes: Sequence[Scene], judge: DrawingClassifier) -> list[Verdict]:
    """Verdicts in the order of `scenes`. pictures: [B, 3, 256, 256] in [-1, 1]."""
    verdicts: list[Verdict | None] = [None] * len(scenes)
    for layout in dict.fromkeys(scene.layout for scene in scenes):
        rows = [i for i, scene in enumerate(scenes) if scene.layout == layout]
        images = pictures[rows].float()
        judged = [judge(crop(images, place)) for place in places_of(layout)]
        names = torch.stack([answer.concepts for answer in judged], 1)  # [rows, places, concepts + 1]
        styles = torch.stack([answer.styles.log_softmax(-1) for answer in judged], 1).sum(1)  # [rows, 4]
        features = torch.stack([answer.features for answer in judged], 1)  # [rows, places, 112]
        rgb = (images.clamp(-1, 1) + 1) / 2
        backgrounds = find_background(rgb, single=layout == "single")
        for row, i in enumerate(rows):
            verdicts[i] = _verdict(
                scenes[i],
                names[row],
                STYLES[int(styles[row].argmax())],
                backgrounds[row],
                find_arrangement(foreground(rgb[row], backgrounds[row])),
                features[row].cpu().numpy(),
            )
    return [verdict for verdict in verdicts if verdict is not None]


def verdict_of(image: np.ndarray, scene: Scene, judge: DrawingClassifier, model: str) -> Verdict:
    """Of one picture, [256, 256, 3] uint8. Raises: ToprovarError naming the model whose pictures have another size."""
    if image.shape != (IMAGE_SIZE, IMAGE_SIZE, 3):
        raise ToprovarError(
            f"model {model} draws {image.shape[0]} x {image.shape[1]} pixels; the ground truth is of "
            f"{IMAGE_SIZE} x {IMAGE_SIZE}",
            "take a model of the demo's size",
        )
    pixels = torch.from_numpy(image).permute(2, 0, 1)[None].float() / 127.5 - 1
    return score_pictures(pixels, [scene], judge)[0]


@torch.inference_mode()
def crop_features(pictures: Tensor, scenes: Sequence[Scene], judge: DrawingClassifier) -> np.ndarray:
    """The classifier's pooled features of every place of every picture. Returns: [crops, 112] float32, in no order."""
    found = []
    for layout in dict.fromkeys(scene.layout for scene in scenes):
        rows = [i for i, scene in enumerate(scenes) if scene.layout == layout]
        found += [judge(crop(pictures[rows].float(), place)).features.cpu() for place in places_of(layout)]
    return torch.cat(found).numpy()


def _verdict(
    scene: Scene, names: Tensor, style: str, background: Background, arrangement: str, features: np.ndarray
) -> Verdict:
    asked = asked_concepts(scene)  # which place shows which concept is a matter of `relation` alone
    concepts = tuple(int(answer) for answer in names.argmax(-1))
    first = names.topk(min(TOP, names.shape[-1]), -1).indices.tolist()
    orders = permutations(range(len(asked)))
    wanted = background_of(scene)
    right = {
        "concept": sorted(concepts) == sorted(asked),
        "style": style == scene.style,
        "background": background.colours == wanted.colours,
        "pattern": background.pattern == wanted.pattern,
        "count": OBJECTS.get(arrangement, 0) == OBJECTS[arrangement_of(scene.layout)],
    }
    if scene.layout in PAIRS:
        right["relation"] = concepts == asked and arrangement == arrangement_of(scene.layout)
    return Verdict(
        concepts=concepts,
        in_top5=max(
            (tuple(concept in first[place] for concept, place in zip(asked, order, strict=True)) for order in orders),
            key=sum,
        ),
        style=style,
        background=background,
        arrangement=arrangement,
        swapped=scene.layout in PAIRS and concepts == asked[::-1] and concepts != asked,
        right=right,
        features=features,
    )
