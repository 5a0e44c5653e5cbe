from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import var_reference as reference
from typer.testing import CliRunner

pytest.importorskip("torch", reason="needs PyTorch: pip install 'toprovar[torch]'")

from parity_command import changed, refusal

from toprovar.tools.parity import app, compare_file


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reference.write_fixture(reference.Case(labels=(4, 2)), tmp_path_factory.mktemp("var") / "run.npz")


def test_command_tells_what_was_compared(file: Path) -> None:
    result = CliRunner().invoke(app, [str(file)])
    assert result.exit_code == 0, result.output
    assert "all 30 comparisons pass" in result.stdout


def test_the_graphs_are_compared_alone_too(file: Path) -> None:
    result = CliRunner().invoke(app, [str(file), "--backend", "onnxruntime"])
    assert result.exit_code == 0
    assert "all 15 comparisons pass" in result.stdout


@pytest.mark.parametrize("name", ["raw/1", "logits/2", "next/2", "block1/0", "f_hat"])
def test_a_changed_value_fails(file: Path, name: str) -> None:
    with np.load(file) as archive:
        array = archive[name]
    report = compare_file(changed(file, **{name.replace("/", "__"): array + np.float32(1e-2)}))
    assert [(row.backend, row.array) for row in report.failed] == [(b, name) for b in ("torch", "onnxruntime")]


def test_nan_fails(file: Path) -> None:
    with np.load(file) as archive:
        array = archive["f_hat"]
    array[0, 0, 0, 0] = np.nan
    assert [row.array for row in compare_file(changed(file, f_hat=array)).failed] == ["f_hat", "f_hat"]


def test_smooth_run_is_fed_its_recorded_maps(file: Path) -> None:
    report = compare_file(changed(file, {"more_smooth": True}))
    assert report.passed
    for backend in ("torch", "onnxruntime"):
        verdicts = {row.array: row.verdict for row in report.rows if row.backend == backend}
        assert verdicts["next/1"] == verdicts["idx/2"] == "forced"
        assert verdicts["f_hat"] == "not seen"
        assert verdicts["raw/2"] == "pass"
    assert "has no array next/1" in refusal(changed(file, {"more_smooth": True}, next__1=None))


def test_runs_may_have_names(tmp_path: Path) -> None:
    path = reference.write_fixture(reference.Case(), tmp_path / "named.npz", "first", first={"labels": [2]}, labels=[0])
    report = compare_file(path)
    assert report.passed
    assert report.compared == 30
    assert "has no run second; it has first" in refusal(path, "--run", "second")


def test_unknown_arrays_are_told(file: Path) -> None:
    report = compare_file(changed(file, stranger=np.zeros(3, np.float32)))
    assert report.passed
    assert {row.array for row in report.rows if row.verdict == "unknown"} == {"stranger"}


def test_bad_files_are_refused(file: Path) -> None:
    assert "has no run soft; it has one without a name" in refusal(file, "--run", "soft")
    assert "holds no run" in refusal(changed(file, idx__0=None))
    assert "meta.patch_nums is None" in refusal(changed(file, {"patch_nums": None}))
    assert "expected 3 maps of 14 tokens" in refusal(changed(file, {"patch_nums": [1, 2]}))
    assert "meta.cfg is 'x'" in refusal(changed(file, {"cfg": "x"}))
    assert "meta.labels is [4, 6]; expected classes from 0 to 4" in refusal(changed(file, {"labels": [4, 6]}))
    assert "meta.labels is 3" in refusal(changed(file, {"labels": 3}))
    assert "idx/0 is int16[2, 1]; expected whole numbers [1, 1]" in refusal(changed(file, {"labels": [4]}))
    assert "holds indices from 37 to 37; expected 0 to 36" in refusal(
        changed(file, idx__0=np.full((2, 1), 37, np.int16))
    )
    assert "tensor quantize.embedding.weight is missing" in refusal(
        changed(file, **{"w__vae.quantize.embedding.weight": None})
    )
