"""The generated blocks of docs/evaluation.md are what their files say."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from toprovar.exporter.model import PACKAGED, load_model
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.json_files import read_json, write_json
from toprovar.tools.evaluation import pruning_signals, table
from toprovar.tools.evaluation.concepts import read_concepts
from toprovar.tools.evaluation.prompts import COUNTS, prompts_digest, prompts_of

DOCS = Path(__file__).parents[3] / "docs"
PAGE = DOCS / "evaluation.md"
BLOCKS = {
    "evaluation": (DOCS / "data" / "demo_evaluation.json", table.markdown),
    "pruning signals": (DOCS / "data" / "demo_pruning_signals.json", pruning_signals.markdown),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_block_of_the_page_is_the_file_s(name):
    results, markdown = BLOCKS[name]
    assert table.block_of(PAGE, name) == markdown(read_json(results))


@pytest.mark.parametrize("name", BLOCKS)
def test_published_numbers_are_of_the_packaged_weights(name):
    results, _ = BLOCKS[name]
    document = read_json(results)
    assert document["model"]["weights_sha256"] == load_model("demo").weights_sha256
    prompts = prompts_of(document["split"], read_concepts(PACKAGED["demo"]))[: document["prompts"]["count"]]
    assert document["prompts"]["sha256"] == prompts_digest(prompts)
    if name == "evaluation":
        assert document["split"] == "test"
        assert document["prompts"]["count"] == document["prompts"]["of"]
        assert [entry["name"] for entry in document["references"]]


def test_page_tells_the_sizes_of_the_splits():
    text = PAGE.read_text()
    for split, counts in COUNTS.items():
        cells = (split, sum(counts.values()), *counts.values())
        assert f"| {' | '.join(map(str, cells))} |" in text


def test_a_block_is_replaced_and_nothing_else(tmp_path):
    page, results = tmp_path / "page.md", tmp_path / "results.json"
    begin, end = table.marks("evaluation")
    page.write_text(f"before\n{begin}old\n{end}after\n")
    entry = {
        "name": "dense", "tle_speedup": 1.0, "frechet": {}, "against_dense": None,
        "aspects": {name: {"share": 0.5, "interval": [0.4, 0.6]} for name in ("all", *table.ASPECTS)},
        "groups": {"single": {"all": {"share": 0.5, "interval": [0.4, 0.6], "count": 9}}},
    }  # fmt: skip
    document = {
        "schema_version": 1, "split": "test", "seed": 0, "command": "toprovar evaluate demo", "backend": "x",
        "judge_sha256": "b" * 64,
        "model": {"weights_sha256": "a" * 64, "guidance": {"cfg": [2.0], "tau": [0.7]}},
        "prompts": {"count": 9, "of": 9, "sha256": "c" * 64}, "variants": [entry], "references": [],
    }  # fmt: skip
    write_json(results, document)
    printed = CliRunner().invoke(table.app, [str(results)])
    assert printed.exit_code == 0, printed.output
    assert "| dense | 1.00 | 0.500 [0.400, 0.600] |" in printed.stdout
    assert CliRunner().invoke(table.app, [str(results), "--into", str(page)]).exit_code == 0
    assert page.read_text() == f"before\n{begin}{printed.stdout}{end}after\n"


@pytest.mark.parametrize("app", [table.app, pruning_signals.app])
@pytest.mark.parametrize("document", [[], {"schema_version": 2}, {"schema_version": 1, "variants": []}])
def test_another_file_is_refused(tmp_path, app, document):
    path = tmp_path / "other.json"
    write_json(path, document)
    end = CliRunner().invoke(app, [str(path)] if app is table.app else ["--table", str(path)])
    assert end.exit_code == 2
    assert "other.json holds no results of" in end.stderr


@pytest.mark.parametrize("text", ["", "begin only\n<!-- evaluation: begin, generated -->\n"])
def test_a_page_without_the_block_is_refused(tmp_path, text):
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(ToprovarError, match="no generated block named evaluation"):
        table.write_block(page, "evaluation", "x\n")
    assert page.read_text() == text
