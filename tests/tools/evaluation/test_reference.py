import json

import pytest
import torch.nn.functional as F
from evaluation_helpers import CONCEPTS

from toprovar.tools.evaluation import frechet
from toprovar.tools.evaluation.classifier import FEATURES, FILE
from toprovar.tools.evaluation.ground_truth import REFERENCE_SCORES
from toprovar.tools.evaluation.prompts import prompts_digest, prompts_of
from toprovar.tools.evaluation.reference import write_reference_files

COUNTS = {"test": {"seen": 5, "held_out": 2, "pattern": 3, "scene": 6, "held_out_pair": 2}}
SCHEDULE = ((1, 1), (4, 4), (16, 16))


class CoarseTokenizer:
    """Means of 16 x 16 pixels as one bit per colour: pictures come back, and not well."""

    def encode(self, image):
        return F.avg_pool2d(image, 16)  # [B, 3, 16, 16]

    def decode(self, latent):
        return F.interpolate(latent, scale_factor=16.0).clamp(-1, 1)


@pytest.fixture(scope="module")
def written(composer, judge, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    (folder / FILE).write_bytes(b"the judge's bytes name it")
    document = write_reference_files(folder, composer, CoarseTokenizer(), SCHEDULE, judge, rounds=3, counts=COUNTS)
    return folder, document


def test_real_pictures_are_the_ceiling(written):
    folder, document = written
    real, through = document["entries"]
    assert real["name"] == "real pictures"
    for aspect in ("concept", "style", "pattern", "relation"):
        assert real["aspects"][aspect]["share"] == 1, aspect
    assert through["aspects"]["concept"]["share"] < 1
    assert json.loads((folder / REFERENCE_SCORES).read_text()) == document
    assert document["prompts_sha256"] == prompts_digest(prompts_of("test", CONCEPTS, COUNTS))


def test_features_are_of_other_pictures_of_the_same_kind(written):
    folder, document = written
    stored = frechet.read_reference(folder / frechet.FILE, FEATURES)
    real, through = (entry["frechet"] for entry in document["entries"])
    assert stored.count == real["reference_crops"] > 2 * real["crops"]
    assert 0 < real["distance"] < through["distance"]
