from __future__ import annotations

import json
from pathlib import Path

import infinitystar_reference as reference
import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("torch", reason="needs PyTorch: pip install 'toprovar[torch]'")

from parity_command import changed, refusal

from toprovar.tools.parity import app, compare_file

NAMES = ["block1/text", "raw/1", "logits/8", "prob/2", "block1/0", "block0/text", "in/text", "in/3", "codes"]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reference.write_fixture(
        reference.run_case(reference.Case()), tmp_path_factory.mktemp("star") / "run.npz"
    )  # fmt: skip


def test_command_tells_what_was_compared(file: Path) -> None:
    result = CliRunner().invoke(app, [str(file)])
    assert result.exit_code == 0, result.output
    assert "all 115 comparisons pass" in result.stdout  # the graphs have no output of the text's last layer


@pytest.mark.parametrize("name", NAMES)
def test_a_changed_value_fails(file: Path, name: str) -> None:
    with np.load(file) as archive:
        array = archive[f"apg/{name}"]
    other = changed(file, **{f"apg__{name.replace('/', '__')}": array + np.float32(1e-2)})
    assert [row.array for row in compare_file(other, backends=["torch"]).failed] == [name]


def test_graphs_are_compared_too(file: Path) -> None:
    with np.load(file) as archive:
        changes = {f"apg__{name}__7": archive[f"apg/{name}/7"] + np.float32(1e-2) for name in ("raw", "logits", "prob")}
    report = compare_file(changed(file, **changes), backends=["onnxruntime"])
    assert {row.array for row in report.failed} == {"raw/7", "logits/7", "prob/7"}


def test_nan_fails(file: Path) -> None:
    with np.load(file) as archive:
        array = archive["apg/codes"]
    array[0, 0, 0, 0, 0] = np.nan
    report = compare_file(changed(file, apg__codes=array), backends=["torch"])
    assert [row.array for row in report.failed] == ["codes"]


def test_a_second_run_may_share_the_text_and_stop_early(file: Path) -> None:
    """Classic guidance, as the settings without threshold and share say."""
    other = reference.run_case(reference.Case(kind="cfg", scale=2.0))
    second = {
        f"cfg__{name.replace('/', '__')}": np.asarray(array, np.float32 if array.dtype == np.float64 else array.dtype)
        for name, array in other.arrays.items()
        if name.endswith(("/0", "/1", "/2"))
    }
    path = changed(file, {"cfg": {"scale": 2.0, "tau": other.case.taus}}, **second)
    report = compare_file(path, ["cfg"], ["torch"])
    assert report.passed
    assert report.compared == 3 * 6
    assert compare_file(path, backends=["torch"]).compared == 58 + 3 * 6


def test_settings_may_be_longer_or_left_out(tmp_path: Path) -> None:
    """An image alone needs no repetitions of further clips; lists of settings may be longer than the schedule."""
    run = reference.run_case(reference.Case(clips=(1,)))
    file = reference.write_fixture(run, tmp_path / "image.npz")
    meta = {"tau": [*run.case.taus, 0.4, 0.4], "scale": 34.0, "norm_threshold": 0.05, "eta": 0.0}
    with np.load(file) as archive:
        settings = json.loads(str(archive["meta"]))
    del settings["video_rep"]
    path = changed(file, meta=np.array(json.dumps({**settings, "apg": meta})))
    assert compare_file(path, backends=["torch"]).passed


def test_bad_files_are_refused(file: Path) -> None:
    assert "has no run cfg; it has apg" in refusal(file, "--run", "cfg")
    assert "has no array apg/text" in refusal(changed(file, apg__text=None))
    assert "holds no run" in refusal(changed(file, apg__text=None, apg__bits__0=None))
    assert "has no array apg/bits/0" in refusal(changed(file, apg__bits__0=None))
    assert "apg/bits/0 has shape [1, 5]; expected [1, 1, 6]" in refusal(
        changed(file, apg__bits__0=np.zeros((1, 5), np.uint8))
    )
    assert "holds values other than 0 and 1" in refusal(changed(file, apg__bits__0=np.full((1, 6), 2, np.uint8)))
    assert "apg/text has shape [5, 9]; expected [any, 10]" in refusal(
        changed(file, apg__text=np.zeros((5, 9), np.float32))
    )
    assert "text of run apg has 8 rows; cfg_uncond has 7" in refusal(
        changed(file, apg__text=np.zeros((8, 10), np.float32))
    )
    for settings, words in (
        ({"sched": [[1, 2]]}, "meta.sched is [[1, 2]]; expected 1 to"),
        ({"sched": None}, "meta.sched is None"),
        ({"sched": [[4000, 4000, 4000]]}, "meta.sched has a map of more than"),
        ({"image_rep": [1, 2]}, "image repetitions [1, 2] do not fit"),
        ({"video_rep": [1, 2, 0]}, "meta.video_rep is [1, 2, 0]"),
        ({"semantic_scales": "x"}, "meta.semantic_scales is 'x'"),
        ({"detail_scale_min_tokens": 5}, "is semantic by its place"),
        ({"apg": {"scale": 34.0, "tau": [1.0, 1.0]}}, "meta.apg.tau has 2 values; the schedule has 6 maps"),
        ({"apg": {"scale": "x", "tau": [1.0]}}, "meta.scale is 'x'"),
    ):
        assert words in refusal(changed(file, settings)), json.dumps(settings)
