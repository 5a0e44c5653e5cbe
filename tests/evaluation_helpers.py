"""Drawings whose colour tells what they are, and a judge that reads colours: evaluation with known answers."""

from __future__ import annotations

import colorsys
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from command_line import write_model
from conftest import tiny_model
from PIL import Image, ImageDraw
from torch import Tensor, nn

from toprovar.exporter.infinity.tokenizer import BitTokenizer, TokenizerConfig
from toprovar.tools.evaluation import frechet, ground_truth
from toprovar.tools.evaluation.classifier import FEATURES, FILE, STYLES, DrawingClassifier, Judgement
from toprovar.tools.evaluation.concepts import write_concepts
from toprovar.tools.train_demo.captions import Concept
from toprovar.tools.train_demo.data import Sprites, sprites_from_images
from toprovar.tools.train_demo.finish import packed
from toprovar.tools.train_demo.state import save_tensors

# names with held-out styles (raccoon, snail, rhinoceros) and held-out pairs among them
NAMES = ("bat", "car", "pushpin", "laptop", "backpack", "raccoon", "snail", "rhinoceros")
CONCEPTS = [Concept(name, (f"tag of {name}",), STYLES) for name in NAMES]
COUNTS = {
    "test": {"seen": 10, "held_out": 4, "pattern": 8, "scene": 12, "held_out_pair": 4},
    "development": {"seen": 5, "held_out": 2, "pattern": 4, "scene": 6, "held_out_pair": 2},
}


def colour_of(concept: int, style: str) -> tuple[int, int, int]:
    """A colour per drawing: hue for the concept, saturation and lightness for the style."""
    saturation, value = ((1.0, 1.0), (1.0, 0.6), (0.55, 1.0), (0.55, 0.6))[STYLES.index(style)]
    red, green, blue = colorsys.hsv_to_rgb((concept + 0.5) / len(NAMES), saturation, value)
    return round(red * 255), round(green * 255), round(blue * 255)


def coloured_sprites() -> Sprites:
    """A disc per drawing; it touches the four edges of its place."""
    images = {}
    for i, concept in enumerate(CONCEPTS):
        for style in concept.styles:
            image = Image.new("RGBA", (256, 256))
            ImageDraw.Draw(image).ellipse((0, 0, 255, 255), fill=(*colour_of(i, style), 255))
            images[i, style] = image
    return sprites_from_images(CONCEPTS, images)


class ColourJudge(nn.Module):
    """Names a crop by the colour of its middle; "nothing" where no drawing has that colour."""

    def __init__(self) -> None:
        super().__init__()
        keys = [(i, s) for i in range(len(NAMES)) for s in range(len(STYLES))]
        self.keys = torch.tensor(keys)
        self.palette = torch.tensor([colour_of(i, STYLES[s]) for i, s in keys]) / 255.0

    def forward(self, crops: Tensor) -> Judgement:
        middle = (crops[:, :, 28:36, 28:36].mean((2, 3)) + 1) / 2  # [B, 3]
        distance = torch.cdist(middle, self.palette)  # [B, drawings]
        least, which = distance.min(1)
        concepts = torch.zeros(len(crops), len(NAMES) + 1)
        styles = torch.zeros(len(crops), len(STYLES))
        for row in range(len(crops)):
            concept, style = self.keys[which[row]].tolist()
            near = bool(least[row] < 0.05)
            concepts[row, concept if near else len(NAMES)] = 9.0
            styles[row, style] = 9.0 * near
        features = torch.zeros(len(crops), FEATURES)
        features[:, :3] = middle
        return Judgement(concepts, styles, features)


def write_judged_model(folder: Path, concepts: Sequence[Concept]) -> Path:
    """A model that draws 256 x 256 pixels from 16 x 16 tokens, and files to judge it by; all weights are random."""
    model = tiny_model()
    torch.manual_seed(1)
    model.tokenizer = BitTokenizer(TokenizerConfig(model.config.code_channels, (32,) * 5, res_blocks=1))
    write_model(model, folder)
    write_concepts(folder, concepts)
    save_tensors(packed(DrawingClassifier(len(concepts)).state_dict()), folder / FILE)
    rows = np.random.default_rng(0).normal(size=(300, FEATURES))
    frechet.write_reference(folder / frechet.FILE, frechet.features_of(rows), {})
    nothing = {"schema_version": 1, "prompts_sha256": "", "judge_sha256": "", "entries": []}
    (folder / ground_truth.REFERENCE_SCORES).write_text(json.dumps(nothing))
    return folder
