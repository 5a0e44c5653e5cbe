"""The evaluation's small programs speak like the other commands."""

from __future__ import annotations

import importlib
import json

import pytest
from typer.testing import CliRunner

from toprovar.tools import parity, sweep


@pytest.mark.parametrize("name", ["naming", "pruning_signals", "reference", "table", "tuning"])
def test_a_wrong_option_is_one_message(name):
    app = importlib.import_module(f"toprovar.tools.evaluation.{name}").app
    end = CliRunner().invoke(app, ["--bogus"])
    assert end.exit_code == 2
    assert not end.stdout
    assert end.stderr.startswith("error: ")
    assert end.stderr.count("error: ") == end.stderr.count("  hint: ") == 1


@pytest.mark.parametrize("app", [parity.app, sweep.app])
def test_a_wrong_option_of_the_other_programs_is_one_message_too(app):
    end = CliRunner().invoke(app, ["--bogus"])
    assert (end.exit_code, end.stdout) == (2, "")
    assert end.stderr.startswith("error: ")


@pytest.mark.parametrize("variants", [[], [1], [{"name": "dense"}]])
def test_results_that_are_not_whole_are_named(tmp_path, variants):
    path = tmp_path / "evaluation.json"
    path.write_text(json.dumps({"schema_version": 1, "variants": variants, "references": [], "prompts": {}}))
    app = importlib.import_module("toprovar.tools.evaluation.table").app
    end = CliRunner().invoke(app, [str(path)])
    assert (end.exit_code, end.stdout) == (2, "")
    assert "evaluation.json holds no whole results" in end.stderr
