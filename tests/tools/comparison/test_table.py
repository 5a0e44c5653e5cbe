"""The generated block of docs/compare.md is what its file says."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from toprovar.exporter.model import PACKAGED, load_model
from toprovar.runtime.json_files import read_json
from toprovar.tools.comparison import charts, table
from toprovar.tools.comparison.winners import find_winners
from toprovar.tools.evaluation.concepts import read_concepts
from toprovar.tools.evaluation.prompts import prompts_digest, prompts_of
from toprovar.tools.evaluation.table import block_of, marks

DOCS = Path(__file__).parents[3] / "docs"
PAGE = DOCS / "compare.md"
RESULTS = DOCS / "data" / "demo_compare.json"
CHART = DOCS / "images" / "compare.png"


def measured():
    return read_json(RESULTS)


def test_block_of_the_page_is_the_file_s():
    assert block_of(PAGE, table.BLOCK) == table.with_chart(measured(), "images/compare.png")


def test_published_numbers_are_of_the_packaged_weights_and_of_the_command_on_the_page():
    document = measured()
    assert document["model"]["weights_sha256"] == load_model("demo").weights_sha256
    prompts = prompts_of(document["prompts"]["split"], read_concepts(PACKAGED["demo"]))[: document["prompts"]["count"]]
    assert document["prompts"]["sha256"] == prompts_digest(prompts)
    text = PAGE.read_text()
    begin, end = marks(table.BLOCK)
    assert document["command"] in text.split(begin)[0] + text.split(end)[1]
    assert {variant["method"] for variant in document["variants"]} >= set(charts.LOOKS)
    assert CHART.exists()


def test_what_wins_follows_from_the_raw_values():
    document = measured()
    assert document["winners"] == find_winners(document["variants"])


def test_the_page_names_every_column_of_the_table():
    text = PAGE.read_text()
    for name in table.HEADER:
        assert name in text, name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.json"], "nowhere.json does not exist"),
        ([str(DOCS / "data" / "toprovar_demo_sweep.json")], "holds no results of toprovar compare"),
    ],
)
def test_a_file_that_is_no_comparison_is_refused(arguments, message):
    end = CliRunner().invoke(table.app, arguments)
    assert end.exit_code == 2
    assert message in end.stderr
