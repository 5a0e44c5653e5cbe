"""The judge of the evaluation: a small convolutional network that names the drawing in a square crop.

It is trained on the same drawings as the demo model, held-out pairs included (tools/train_demo/classifier_stage.py), on
clean pictures and on pictures that went through the tokenizer with flipped bits. Input: the place of one object, scaled
to 64 x 64. Answer: a concept or "nothing", and a style; the pooled features serve the Fréchet distance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor, nn

from toprovar.exporter.int8_rows import widened
from toprovar.runtime.errors import ToprovarError
from toprovar.tools.train_demo.captions import FAMILIES
from toprovar.tools.train_demo.data import OBJECT_SIZE, PLACES, SINGLE_AT, SINGLE_SIZE

CROP = 64
WIDTHS = (24, 48, 80, 112)
FEATURES = WIDTHS[-1]
STYLES = tuple(style for family in FAMILIES for style in family)
FILE = "classifier.safetensors"


@dataclass
class Judgement:
    """concepts: [B, concepts + 1] logits, the last for "nothing"; styles: [B, 4] logits; features: [B, 112]."""

    concepts: Tensor
    styles: Tensor
    features: Tensor


class _Stage(nn.Module):
    """Halves the map: strided convolution, then one residual convolution."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.down = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
        self.down_norm = nn.GroupNorm(8, outputs)
        self.same = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.same_norm = nn.GroupNorm(8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.down_norm(self.down(x)))
        return F.silu(x + self.same_norm(self.same(x)))


class DrawingClassifier(nn.Module):
    """Names drawings. concepts: how many names there are."""

    def __init__(self, concepts: int) -> None:
        super().__init__()
        self.stages = nn.ModuleList(_Stage(i, o) for i, o in zip((3, *WIDTHS), WIDTHS, strict=False))
        self.concepts = nn.Linear(FEATURES, concepts + 1)
        self.styles = nn.Linear(FEATURES, len(STYLES))

    def forward(self, crops: Tensor) -> Judgement:
        """crops: [B, 3, 64, 64] fp32 in [-1, 1]."""
        x = crops
        for stage in self.stages:
            x = stage(x)
        features = x.mean((2, 3))  # [B, 112]
        return Judgement(self.concepts(features), self.styles(features), features)


def places_of(layout: str) -> Sequence[tuple[int, int, int]]:
    """(y, x, size) of every object of a layout, in pixels of the 256-pixel picture."""
    if layout == "single":
        return ((SINGLE_AT, SINGLE_AT, SINGLE_SIZE),)
    return tuple((y, x, OBJECT_SIZE) for y, x in PLACES[layout])


def crop(images: Tensor, place: tuple[int, int, int]) -> Tensor:
    """One place of every picture. images: [B, 3, 256, 256] -> [B, 3, 64, 64]."""
    y, x, size = place
    region = images[:, :, y : y + size, x : x + size]
    return F.interpolate(region, size=(CROP, CROP), mode="bilinear", antialias=True, align_corners=False)


def classifier_from_tensors(tensors: Mapping[str, Tensor]) -> DrawingClassifier:
    """A classifier, in eval mode, from stored tensors; int8 rows are widened."""
    weights = widened(tensors)
    classifier = DrawingClassifier(weights["concepts.weight"].shape[0] - 1)
    classifier.load_state_dict(weights)
    return classifier.eval()


def load_classifier(path: Path) -> DrawingClassifier:
    """Raises: ToprovarError if the file is missing or is no classifier of this form."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        classifier = classifier_from_tensors(load_file(path))
        for name, tensor in classifier.state_dict().items():
            if not torch.isfinite(tensor).all():
                raise ValueError(f"{name} isn't finite")
        return classifier
    except (OSError, SafetensorError, KeyError, IndexError, ValueError, RuntimeError) as error:
        raise ToprovarError(
            f"{path} is not a readable drawing classifier ({str(error).splitlines()[0]})",
            "install the package again, or train one: the stage `classifier` of toprovar.tools.train_demo.train",
        ) from None
