"""Every method through the command line: calibrate, export, run; and a seventh from the docs."""

import importlib.util
import json
import re
from pathlib import Path

import numpy as np
import pytest
from command_line import done, refusal, write_model
from helpers import differing_bits, generate_in_torch, open_pipeline
from PIL import Image

from toprovar.calibrate.methods import METHODS
from toprovar.exporter.model import load_model
from toprovar.runtime.plan import load_plan

DOCS = Path(__file__).parents[2] / "docs" / "calibration.md"
PROMPT, SEED = "red apple on white", 3
# what statistics of random weights decide nothing about
SETTLED = {"fixed_exit": ("--scale-depth", 6), "toprovar": ("--scale-depth", 6, "--global-layers", 1)}
SCALES = ("--budget", "0.25M")  # ten scales, up to 32 x 32 tokens


@pytest.fixture(scope="module")
def stored(tiny, tmp_path_factory):
    """The tiny model as files."""
    return write_model(tiny, tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One folder for all methods: the prompts are measured once."""
    return tmp_path_factory.mktemp("calibration")


def through(stored, folder, tmp_path, method, *options):
    """Calibrates, exports and runs; the picture of the command is that of PyTorch. Returns: the plan and the result."""
    done("calibrate", stored, "-o", folder, *SCALES, "--limit", 2, "--method", method, *options)
    done("export", stored, *SCALES, "--plan", folder / "plan.json", "-o", tmp_path / "b")
    done("run", tmp_path / "b", "-p", PROMPT, "--seed", SEED, "-o", tmp_path / "x.png")
    plan = load_plan(folder / "plan.json")
    pipeline = open_pipeline(tmp_path / "b")
    result = pipeline.generate(PROMPT, SEED, "planned" if method != "dense" else "dense")
    with Image.open(tmp_path / "x.png") as picture:
        assert np.array_equal(np.asarray(picture), result.image)
    model = load_model(str(stored))
    run = generate_in_torch(
        model, plan.schedule, model.guidance(plan.schedule), PROMPT, SEED, plan=plan, tokenizer=model.tokenizer
    )
    assert sum(differing_bits(run, result.bits)) == 0
    assert (folder / "report.html").stat().st_size > 10_000
    return plan, result


@pytest.mark.parametrize("method", list(METHODS))
def test_every_method_calibrates_exports_and_runs(stored, folder, tmp_path, method):
    plan, result = through(stored, folder, tmp_path, method, *SETTLED.get(method, ()))
    assert plan.method == method
    assert plan.calib.stats or method == "dense"
    pruned = any(min(step.counts) < step.map[0] * step.map[1] for step in result.steps)
    shorter = len(result.steps) < len(plan.schedule)
    halved = not all(step.guided for step in result.steps)
    assert (pruned or shorter or halved) == (method not in ("dense",))


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("toprovar", ("--set", "depth=adaptive")),
        ("toprovar", ("--set", "stages=scale,layer", "--scale-depth", 6)),
        ("fastvar", ("--set", "exact=true", "--preset", "paper")),
        ("ld_pruning", ("--set", "counts=fixed", "--set", "norm=l2")),
    ],
)
def test_forms_of_methods_run_too(stored, folder, tmp_path, method, options):
    plan, _ = through(stored, folder, tmp_path, method, *options)
    assert plan.method == method


def test_a_target_ssim_is_measured_and_told(stored, folder):
    said = done(
        "calibrate", stored, "-o", folder, *SCALES, "--limit", 2, "--method", "fixed_exit", "--target-ssim", 0.8
    )
    plan = load_plan(folder / "plan.json")
    assert plan.calib.measured_ssim >= 0.8
    assert f"SSIM {plan.calib.measured_ssim:.3f}" in said.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--method", "fastva"), "unknown method fastva"),
        (("--method", "fastvar", "--set", "exact"), "--set exact: expected NAME=VALUE"),
        (("--method", "fastvar", "--set", "exact=1", "--set", "exact=0"), "exact is given twice"),
        (("--method", "fastvar", "--set", "exacct=1"), "no option exacct hint: did you mean exact?"),
        (("--method", "dense", "--set", "exact=1"), "method dense has no option exact hint: it has: none"),
        (("--method", "skipvar", "--preset", "paper"), "method skipvar does not read --preset"),
        (("--method", "stepvar", "--restore", "identity"), "method stepvar does not read --restore"),
        (("--method", "fastvar", "--rho-threshold", 0.4), "method fastvar does not read --rho-threshold"),
        (("--method", "dense", "--target-ssim", 0.9), "method dense has one strength"),
        (("--target-ssim", 0.9, "--target-speedup", 2), "--target-ssim and --target-speedup are both given"),
    ],
)
def test_wrong_options_are_refused_before_any_prompt_runs(stored, tmp_path, options, message):
    said = refusal("calibrate", stored, "-o", tmp_path / "c", "--limit", 1, *options, hint=False)
    assert message in said
    assert not (tmp_path / "c").exists()


def test_a_shipped_list_is_taken_by_its_name(stored, tmp_path):
    done("calibrate", stored, "-o", tmp_path / "c", "--limit", 1, "--prompts", "mixed", "--method", "dense")
    index = json.loads((tmp_path / "c" / "stats" / "index.json").read_text())
    assert index["prompts"] == ["a lemon on a white table"]


def test_the_seventh_method_of_the_docs_takes_one_file_and_one_line(stored, folder, tmp_path, monkeypatch):
    """The example as it stands in docs/calibration.md, written to a file and registered as the docs say."""
    text = DOCS.read_text()
    code = re.search(r"```python\n(# calibrate/methods/half\.py\n.*?)```", text, re.DOTALL)[1]
    line = re.search(r"```python\n(    \"half\": HALF,)\n```", text)[1]
    assert len(code.strip().splitlines()) <= 20
    (tmp_path / "half.py").write_text(code)
    spec = importlib.util.spec_from_file_location("half", tmp_path / "half.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, method in eval("{" + line + "}", {"HALF": module.HALF}).items():
        monkeypatch.setitem(METHODS, name, method)
    plan, result = through(stored, folder, tmp_path, "half")
    assert [plan.counts(k)[0] for k in (7, 8, 9)] == [256, 320, 512]
    assert [len(step.kept[0]) for step in result.steps[7:]] == [256, 320, 512]
