import json
import re

import pytest
from evaluation_helpers import CONCEPTS
from PIL import Image
from typer.testing import CliRunner

from toprovar.exporter.model import PACKAGED
from toprovar.runtime.errors import ToprovarError
from toprovar.tools.evaluation import naming
from toprovar.tools.evaluation.concepts import read_concepts
from toprovar.tools.train_demo.captions import COLOURS, held_out_styles


@pytest.fixture(scope="module")
def concepts():
    return {concept.name: concept for concept in read_concepts(PACKAGED["demo"])}


def run(*arguments):
    return CliRunner().invoke(naming.app, [str(argument) for argument in arguments])


def test_committed_list_follows_its_rule(concepts):
    assert naming.naming_prompts() == naming.fixed_prompts(list(concepts.values()))


def test_list_is_32_plain_singles_of_trained_drawings(concepts):
    prompts = naming.naming_prompts()
    assert len({naming.concept_of(prompt) for prompt in prompts}) == len(prompts) == 32
    styles, colours = [], []
    for prompt in prompts:
        name, style, colour = re.fullmatch(r"(.+), (\w+) style, on (\w+)", prompt).groups()
        assert style in concepts[name].styles
        assert style not in held_out_styles(concepts[name])
        styles.append(style)
        colours.append(colour)
    assert set(colours) == set(COLOURS)
    assert min(map(styles.count, ("noto", "blob", "flat", "3d"))) >= 6


def test_too_few_concepts_make_no_list():
    with pytest.raises(ToprovarError, match="8 concepts give 1 prompts; expected 32"):
        naming.fixed_prompts(CONCEPTS)


@pytest.mark.parametrize("answer", ["red apple", "Apple, red", "a RED apples", "picture of a red apple", "apfel"])
def test_accepted_answers(answer):
    assert naming.is_accepted(answer, ["red apple", "apfel"])


@pytest.mark.parametrize("answer", ["", "a", "apple", "red", "red apple tree", "green apple", "pear or red apple"])
def test_refused_answers(answer):
    assert not naming.is_accepted(answer, ["red apple", "apfel"])


@pytest.mark.parametrize(
    ("plural", "one"),
    [
        ("cherries", "cherry"),
        ("foxes", "fox"),
        ("dogs", "dog"),
        ("glasses", "glass"),
        ("bus", "bus"),
        ("dress", "dress"),
    ],
)
def test_plurals_and_singulars_meet(plural, one):
    assert naming.bare(plural) == naming.bare(one)


@pytest.fixture(scope="module")
def drawn(judged_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("naming") / "out"
    end = run("--out", out, "--model", judged_folder, "--seed", 4)
    assert end.exit_code == 0, end.output
    return out


def test_pictures_are_blind_and_the_key_tells_all(drawn):
    key = json.loads((drawn / "key.json").read_text())
    assert [item["number"] for item in key["items"]] == list(range(1, 33))
    prompts = naming.naming_prompts()
    shuffled = [item["prompt"] for item in key["items"]]
    assert sorted(shuffled) == sorted(prompts)
    assert shuffled != prompts
    assert all(item["seed"] == 4 + prompts.index(item["prompt"]) for item in key["items"])
    files = sorted((drawn / "pictures").iterdir())
    assert [file.name for file in files] == [f"{number:02d}.png" for number in range(1, 33)]
    for file, item in zip(files, key["items"], strict=True):
        assert naming.concept_of(item["prompt"]) not in str(Image.open(file).info)
    assert "key.json" not in (drawn / "answers.txt").read_text()


def test_pictures_of_an_earlier_call_stay(drawn, judged_folder):
    end = run("--out", drawn, "--model", judged_folder)
    assert end.exit_code == 2
    assert "holds the pictures of an earlier call" in end.stderr


def test_answers_are_scored_by_the_rule(drawn, tmp_path):
    items = json.loads((drawn / "key.json").read_text())["items"]
    tagged = next(item for item in items if len(item["accepted"]) > 1)
    answers = {item["number"]: f"A {item['accepted'][0].upper()}" for item in items}
    answers[tagged["number"]] = tagged["accepted"][1]
    wrong = [item["number"] for item in items if item is not tagged][:3]
    answers[wrong[0]], answers[wrong[1]] = "something else", ""
    del answers[wrong[2]]
    form = tmp_path / "answers.txt"
    form.write_text("# mine\n" + "".join(f"{number:02d}: {answer}\n" for number, answer in answers.items()))
    end = run("--out", drawn, "--score", form, "--json")
    assert end.exit_code == 0, end.output
    protocol = json.loads(end.stdout)
    assert protocol == json.loads((drawn / "protocol.json").read_text())
    assert (protocol["right"], protocol["count"]) == (29, 32)
    assert {item["number"] for item in protocol["items"] if not item["right"]} == set(wrong)
    table = (drawn / "protocol.md").read_text()
    assert table.startswith("29 of 32 pictures named right (0.91 [")
    assert table.count("| yes |") == 29


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fox\n", "line 1: 'fox' is no answer"),
        ("1: fox\n01: cat\n", "line 2: number 1 comes twice"),
        ("77: fox\n", "answer 77 has no picture; there are 1 to 32"),
    ],
)
def test_unreadable_answers_are_refused(drawn, tmp_path, text, message):
    form = tmp_path / "answers.txt"
    form.write_text(text)
    end = run("--out", drawn, "--score", form)
    assert end.exit_code == 2
    assert message in end.stderr
    assert not (tmp_path / "protocol.json").exists()


def test_a_form_without_pictures_is_refused(tmp_path):
    end = run("--out", tmp_path, "--score", tmp_path / "answers.txt")
    assert end.exit_code == 2
    assert "key.json does not exist" in end.stderr


def test_the_committed_protocol_follows_from_its_answers():
    from pathlib import Path

    from toprovar.runtime.json_files import read_json

    docs = Path(__file__).parents[3] / "docs"
    protocol = read_json(docs / "data" / "demo_naming.json")
    assert [item["prompt"] for item in protocol["items"]] != naming.naming_prompts()  # shuffled
    assert sorted(item["prompt"] for item in protocol["items"]) == sorted(naming.naming_prompts())
    right = [naming.is_accepted(item["answer"], item["accepted"]) for item in protocol["items"]]
    assert right == [item["right"] for item in protocol["items"]]
    assert protocol["right"] == sum(right)
    assert f"**{sum(right)} of 32 named right**" in (docs / "evaluation.md").read_text()
    assert sum(right) >= 24  # three of four
