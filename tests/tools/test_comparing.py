"""`toprovar compare` on a small model with random weights: what it writes, resumes and refuses."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys

import pytest
from command_line import call, done, refusal, write_model
from evaluation_helpers import write_judged_model
from PIL import Image

from toprovar.exporter.model import PACKAGED, load_model
from toprovar.runtime.plan import save_plan
from toprovar.tools.comparison import table
from toprovar.tools.evaluation import pictures as making
from toprovar.tools.evaluation.concepts import read_concepts

PROMPTS = 2
CONCEPTS = read_concepts(PACKAGED["demo"])
METHODS = ("--method", "fixed_exit:scale_depth=5", "--method", "skipvar:decision_scale=5")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_judged_model(tmp_path_factory.mktemp("compared") / "tiny", CONCEPTS)


@pytest.fixture(scope="module")
def calibration(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("calibration")
    done("calibrate", folder, "-o", out, "--limit", 2, "--method", "skipvar", "--set", "decision_scale=5")
    return out


@pytest.fixture(scope="module")
def plan(folder, calibration, tmp_path_factory):
    """Prunes the last scale in all layers, with a choice once per scale."""
    path = tmp_path_factory.mktemp("plans") / "half.json"
    model = load_model(str(folder))
    from toprovar.tools.calibration import read_calibration
    from toprovar.tools.comparison.lineup import contestant_of_method, fit_all

    asked = [contestant_of_method("stepvar:ratios=0.5")]
    plans, _ = fit_all(asked, {}, model, read_calibration(calibration, model), is_asked=True)
    save_plan(plans[asked[0].name], path)
    return path


def options(folder, calibration, plan, out):
    return (
        "compare", folder, "--calibration", calibration, "--plan", plan, *METHODS, "--split", "development",
        "--limit", PROMPTS, "--seed", 5, "-o", out, "--json",
    )  # fmt: skip


@pytest.fixture(scope="module")
def finished(folder, calibration, plan, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "comparison"
    end = done(*options(folder, calibration, plan, out))
    return out, json.loads(end.stdout), end.stderr


def timeless(document):
    """What does not depend on time: everything but the clock, what it decides, and the command."""
    kept = json.loads(json.dumps(document))
    for name in ("command", "date", "machine", "apart_ms_median"):
        del kept[name]
    kept["winners"] = [entry for entry in kept["winners"] if entry["axis"] == "TLE"]
    for variant in kept["variants"]:
        del variant["steps_ms"], variant["scale_ms_median"], variant["raw"]["steps_ms"]
    return kept


def test_table_chart_page_and_results_are_written(finished):
    out, document, told = finished
    assert json.loads((out / "compare.json").read_text()) == document
    names = [variant["name"] for variant in document["variants"]]
    assert names == ["dense", "half", "fixed_exit:scale_depth=5", "skipvar:decision_scale=5"]
    dense, half, exited, _ = document["variants"]
    assert dense["ssim"]["mean"] == 1
    assert dense["equal_bits"]["share"] == 1
    assert half["tle"]["planned"] == half["tle"]["taken"] == pytest.approx(load_plan_speedup(half), abs=1e-3)
    assert exited["equal_bits"] == {"share": 1.0, "drawn": 1.0, "per_scale": [1.0] * 6 + [None]}
    assert 0 < half["ssim"]["mean"] < 1
    assert len(half["raw"]["steps_ms"]) == PROMPTS
    assert all(ms > 0 for ms in half["raw"]["steps_ms"])
    assert document["judge_sha256"]
    assert document["machine"]["threads"] >= 1
    assert document["machine"]["cpu"]
    assert document["calibration"]["prompts"] == 2
    assert document["prompts"]["source"] == "development split"
    assert sum(document["prompts"]["groups"].values()) == PROMPTS
    assert "warning: 2 pictures per plan" in told
    written = (out / "compare.md").read_text()
    assert written == table.markdown(document)
    assert written.count("\n| ") == len(names) + 2  # under the header and its line
    page = (out / "compare.html").read_text()
    assert page.count("<img ") == len(names) * PROMPTS
    assert not re.search(r"(src|href)=\"(?!data:|#)", page)
    assert "<script" not in page
    assert (out / "frontier.svg").read_text().startswith("<svg ")
    with Image.open(out / "frontier.png") as chart:
        assert chart.size[0] > 1000


def load_plan_speedup(variant):
    """The tiny model's work by hand: 7 scales, the last of 256 tokens keeps half."""
    assert variant["method"] == "stepvar"
    sides = (1, 2, 4, 6, 8, 12, 16)
    tokens = [side * side for side in sides]
    return sum(tokens) / (sum(tokens) - 128)


def test_paths_that_are_taken_count_as_they_were(finished):
    _, document, _ = finished
    skip = document["variants"][3]
    assert skip["tle"]["is_decided_per_picture"]
    low, high = skip["tle"]["range"]
    assert low <= skip["tle"]["taken"] <= high
    dense = document["variants"][0]["raw"]["work_tokens"][0]
    for work, decisions in zip(skip["raw"]["work_tokens"], skip["raw"]["decisions"], strict=True):
        (scale, what, path), *_ = decisions
        assert (scale, what) == (5, "path")
        assert (work == dense) == (path == "main")


def test_an_interrupted_comparison_resumes_to_the_same_numbers(
    folder, calibration, plan, finished, tmp_path, monkeypatch
):
    out, document, _ = finished
    shutil.copytree(out, tmp_path / "out")
    journal = tmp_path / "out" / "pictures.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    assert len(lines) == 4 * PROMPTS
    journal.write_bytes(b"".join(lines[:6]) + lines[6][:90])  # cut off in the middle of a line
    drawn = []
    draw = making.BundleMaker.draw
    monkeypatch.setattr(making.BundleMaker, "draw", lambda self, *what: drawn.append(what[1:3]) or draw(self, *what))
    asked = options(folder, calibration, plan, tmp_path / "out")
    end = done(*asked, "--resume")
    assert "1 unfinished line" in end.stderr
    assert timeless(json.loads(end.stdout)) == timeless(document)
    assert len(drawn) == 4 + 3  # one warm-up each; dense again, since what is missing is held against it
    assert (6, "dense") in drawn[4:]
    drawn.clear()
    assert (
        json.loads(done(*asked, "--resume").stdout)["variants"]
        == json.loads((tmp_path / "out" / "compare.json").read_text())["variants"]
    )
    assert not drawn
    assert "an earlier comparison was begun there" in refusal(*asked)


def test_stopping_keeps_the_prompts_that_are_done(folder, calibration, plan, tmp_path, monkeypatch):
    calls = iter(range(100))
    draw = making.BundleMaker.draw

    def stops(self, *what):
        if next(calls) == 4 + 4 + 1:  # warm-up, the first prompt, one of the second
            raise KeyboardInterrupt
        return draw(self, *what)

    monkeypatch.setattr(making.BundleMaker, "draw", stops)
    end = call(*options(folder, calibration, plan, tmp_path / "out"))
    assert end.exit_code == 130
    assert len((tmp_path / "out" / "pictures.jsonl").read_text().splitlines()) == 4
    assert not (tmp_path / "out" / "compare.json").exists()


def test_prompts_of_a_file_are_not_judged(folder, calibration, tmp_path):
    (tmp_path / "prompts.txt").write_text("red apple\ngreen dog on white\n")
    end = done(
        "compare", folder, "--calibration", calibration, "--prompts", tmp_path / "prompts.txt", "--limit", 1,
        "--method", "fixed_exit:scale_depth=5", "-o", tmp_path / "o",
    )  # fmt: skip
    document = json.loads((tmp_path / "o" / "compare.json").read_text())
    assert document["prompts"]["list"] == ["red apple"]
    assert document["prompts"]["source"] == "prompts.txt"
    assert document["judge_sha256"] is None
    assert all(variant["adherence"] is None for variant in document["variants"])
    assert all(entry["score"] == "SSIM" for entry in document["winners"])
    assert "| – | – |" in (tmp_path / "o" / "compare.md").read_text()
    assert "has the best SSIM" in end.stdout or not document["winners"]


def test_without_plans_and_methods_the_whole_registry_is_named_and_nothing_is_written(folder, tmp_path):
    asked = ("compare", folder, "--limit", 3, "-o", tmp_path / "o", "--dry-run")
    facts = json.loads(done(*asked, "--json").stdout)
    names = [variant["name"] for variant in facts["variants"]]
    assert {"dense", "toprovar@2", "fastvar@2", "stepvar@2", "depthvar@2", "ld_pruning@2", "skipvar"} <= set(names)
    assert facts["pictures"] == 3 * len(names)
    assert facts["source"] == "test split"
    assert "to be fitted: TLE 1.50 times less" in done(*asked).stdout
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (("--plan", "nowhere.json"), "nowhere.json is not a file"),
        (("--method", "fastva@2"), "unknown method fastva hint: did you mean fastvar?"),
        (("--method", "fastvar", "--method", "fastvar"), "already a variant named fastvar"),
        (("--limit", 257, "--split", "development"), "--limit asks for 257 prompts; development split has 256"),
        (("--prompts", "nowhere.txt"), "nowhere.txt does not exist"),
        (("--prompts", "x.txt", "--split", "test"), "--prompts and --split are both given"),
        (("--seed", 2**63), "seeds 9223372036854775808 to"),
        (("--calibration", "nowhere", "--method", "fastvar"), "nowhere holds no statistics"),
    ],
)
def test_wrong_use_is_refused_before_anything_is_drawn(folder, tmp_path, asked, message):
    assert message in refusal("compare", folder, *asked, "-o", tmp_path / "o")
    assert not (tmp_path / "o").exists()


def test_a_plan_of_another_model_is_refused_by_its_file(folder, plan, tmp_path):
    facts = json.loads(plan.read_text())
    facts["backbone"]["width"] = 64
    (tmp_path / "other.json").write_text(json.dumps(facts))
    told = refusal("compare", folder, "--plan", tmp_path / "other.json", "--limit", 1, "-o", tmp_path / "o")
    assert "other.json: plan was made for another model: width 64 in the plan, 32 in the checkpoint" in told
    assert not (tmp_path / "o").exists()


def test_a_target_out_of_reach_names_the_method(folder, calibration, tmp_path):
    told = refusal(
        "compare", folder, "--calibration", calibration, "--method", "fastvar@40", "--limit", 1, "-o", tmp_path / "o"
    )
    assert "fastvar@40: target speed-up 40 is out of reach" in told


def test_a_model_without_ground_truth_needs_a_prompt_file(tiny, tmp_path):
    bare = write_model(tiny, tmp_path / "bare")
    assert "has no ground truth" in refusal("compare", bare, "-o", tmp_path / "o")


def test_out_that_is_a_file_is_refused(folder, tmp_path):
    (tmp_path / "o").write_text("")
    assert "is a file" in refusal("compare", folder, "--method", "fastvar", "--limit", 1, "-o", tmp_path / "o")


def test_help_needs_no_torch():
    code = (
        "import sys\n"
        "for name in ('torch', 'matplotlib', 'onnx', 'skimage'): sys.modules[name] = None\n"
        "sys.argv = ['toprovar', 'compare', '--help']\n"
        "from toprovar.tools.cli import main\n"
        "main()\n"
    )
    end = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert end.returncode == 0, end.stderr
    assert "--method" in end.stdout
