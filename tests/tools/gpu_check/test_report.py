"""What the docs say of a GPU is what was measured there."""

import json
from pathlib import Path

from toprovar.tools.gpu_check.report import ROWS, table_from_results
from toprovar.tools.gpu_check.stages import STAGES
from toprovar.tools.operator_bench import movers_table, table_from_report

DOCS = Path(__file__).parents[3] / "docs"


def test_the_gpu_page_shows_the_committed_times():
    results = json.loads((DOCS / "data" / "gpu_h200.json").read_text())
    assert {name: stage["status"] for name, stage in results["stages"].items() if stage["status"] != "done"} == {}
    assert table_from_results(results) in (DOCS / "gpu.md").read_text()
    assert results["stages"]["demo-library"]["all_equal"] is True
    assert results["stages"]["demo-body"]["all_equal"] is True


def test_every_row_is_a_stage():
    assert ROWS.keys() <= STAGES.keys()


def test_a_stage_that_failed_has_no_row():
    steps = {"steps": {"median_ms": 10.0}}
    done, failed = {"status": "done", "dense": steps, "planned": steps}, {"status": "failed: no GPU"}
    table = table_from_results({"stages": {"torch": done, "times-body": failed}})
    assert table.splitlines()[2:] == ["| PyTorch, eager, autocast | 10 | 10 | 1.00 |"]


def test_the_page_of_operators_shows_the_committed_times():
    report = json.loads((DOCS / "data" / "operators_h200.json").read_text())
    assert len(report["checks"]) > 60
    assert all(check["ok"] for check in report["checks"])
    page = (DOCS / "operators.md").read_text()
    assert table_from_report(report) in page
    assert movers_table(report) in page
