import json

import pytest
from evaluation_helpers import CONCEPTS

from toprovar.exporter.model import PACKAGED
from toprovar.runtime.errors import ToprovarError
from toprovar.tools.evaluation.concepts import FILE, read_concepts, write_concepts


def test_names_come_back_in_their_order(tmp_path):
    assert write_concepts(tmp_path, CONCEPTS) == tmp_path / FILE
    assert read_concepts(tmp_path) == CONCEPTS


def test_packaged_names_are_those_of_the_vocabulary():
    concepts = read_concepts(PACKAGED["demo"])
    words = set(json.loads((PACKAGED["demo"] / "vocabulary.json").read_text())["words"])
    assert len(concepts) > 100
    assert all(set(concept.name.replace("-", " ").split()) <= words for concept in concepts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["concepts"].append(d["concepts"][0]), "names the concept 'bat' twice"),
        (lambda d: d["concepts"][1].update(styles=["oil"]), "concept 'car' has the style 'oil'; expected 3d, blob"),
        (lambda d: d["concepts"][1].update(colour="red"), "concepts.1.colour"),
        (lambda d: d.update(schema_version=9), "schema version 9"),
        (lambda d: d.update(concepts=[]), "concepts"),
    ],
)
def test_damaged_names_are_refused(tmp_path, change, message):
    path = write_concepts(tmp_path, CONCEPTS)
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(ToprovarError, match=message) as error:
        read_concepts(tmp_path)
    assert error.value.hint
