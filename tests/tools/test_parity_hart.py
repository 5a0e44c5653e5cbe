from __future__ import annotations

from pathlib import Path

import hart_reference as reference
import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("torch", reason="needs PyTorch: pip install 'toprovar[torch]'")

from parity_command import changed, refusal

from toprovar.tools.parity import app, compare_file


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = reference.run_case(reference.Case(prompts=(4, 2)))
    return reference.write_fixture(run, tmp_path_factory.mktemp("hart") / "run.npz")


def test_command_tells_what_was_compared(file: Path) -> None:
    result = CliRunner().invoke(app, [str(file)])
    assert result.exit_code == 0, result.output
    assert "all 35 comparisons pass" in result.stdout


@pytest.mark.parametrize("name", ["raw/1", "logits/2", "next/2", "block1/0", "diff/z", "diff/out", "f_hat", "diff/cfg"])
def test_a_changed_value_fails(file: Path, name: str) -> None:
    with np.load(file) as archive:
        array = archive[f"hard/{name}"]
    report = compare_file(changed(file, **{f"hard__{name.replace('/', '__')}": array + np.float32(1e-2)}))
    backends = ["torch"] if name == "diff/cfg" else ["torch", "onnxruntime"]
    assert [(row.backend, row.array) for row in report.failed] == [(backend, name) for backend in backends]


def test_nan_fails(file: Path) -> None:
    with np.load(file) as archive:
        array = archive["hard/f_hat"]
    array[0, 0, 0, 0] = np.nan
    assert [row.array for row in compare_file(changed(file, hard__f_hat=array)).failed] == ["f_hat", "f_hat"]


def test_smooth_run_is_fed_its_recorded_maps(tmp_path: Path) -> None:
    run = reference.run_case(reference.Case())
    report = compare_file(reference.write_fixture(run, tmp_path / "smooth.npz", "smooth"))
    assert report.passed
    for backend in ("torch", "onnxruntime"):
        verdicts = {row.array: row.verdict for row in report.rows if row.backend == backend}
        assert verdicts["next/1"] == verdicts["idx/2"] == "forced"
        assert verdicts["f_hat"] == "not seen"
        assert verdicts["raw/2"] == verdicts["diff/out"] == "pass"


def test_runs_of_one_prompt_may_share_its_text(file: Path) -> None:
    with np.load(file) as archive:
        second = {
            name.replace("hard/", "other__").replace("/", "__"): array
            for name, array in archive.items()
            if name.startswith("hard/") and name not in ("hard/text", "hard/mask", "hard/position_ids")
        }
    report = compare_file(changed(file, **second))
    assert report.passed
    assert report.compared == 2 * 35


def test_other_numbers_of_diffusion_steps_are_read_off_the_noise(tmp_path: Path) -> None:
    run = reference.run_case(reference.Case(steps=4, seed=8))
    report = compare_file(reference.write_fixture(run, tmp_path / "four.npz"))
    assert report.passed
    assert report.compared == 35


def test_bad_files_are_refused(file: Path) -> None:
    assert "has no run soft; it has hard" in refusal(file, "--run", "soft")
    assert "has no array hard/text" in refusal(changed(file, hard__text=None))
    assert "holds no run" in refusal(changed(file, hard__text=None, hard__idx__0=None))
    assert "has no array hard/idx/0" in refusal(changed(file, hard__idx__0=None))
    assert "has no array hard/position_ids" in refusal(changed(file, hard__position_ids=None))
    assert "meta.patch_nums is None" in refusal(changed(file, meta=np.array('{"cfg": 1}')))
    assert "meta.cfg is 'x'" in refusal(changed(file, meta=np.array('{"cfg": "x", "patch_nums": [1, 2, 3]}')))
    assert "holds indices from -1 to -1; expected 0 to 36" in refusal(
        changed(file, hard__idx__0=np.full((2, 1), -1, np.int16))
    )
    assert "hard/idx/1 is int16[2, 3]" in refusal(changed(file, hard__idx__1=np.zeros((2, 3), np.int16)))
    assert "hard/diff/noise/0 has shape [3, 6]; expected [18, 6]" in refusal(
        changed(file, hard__diff__noise__0=np.zeros((3, 6), np.float32))
    )
    assert "numbered from 0" in refusal(changed(file, hard__diff__noise__3=None))
    assert "without a token of its own" in refusal(changed(file, hard__mask=np.zeros((2, 5), bool)))
