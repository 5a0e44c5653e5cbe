"""`toprovar evaluate` on a small model with random weights: what it writes, resumes and refuses."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from command_line import call, done, listing, refusal, write_model
from evaluation_helpers import write_judged_model
from PIL import Image
from safetensors.torch import load_file, save_file

from toprovar.exporter.model import PACKAGED, load_model
from toprovar.runtime.plan import Plan, Restore, Score, save_plan
from toprovar.tools import evaluating
from toprovar.tools.evaluation import frechet, ground_truth
from toprovar.tools.evaluation import pictures as making
from toprovar.tools.evaluation.classifier import FILE
from toprovar.tools.evaluation.concepts import read_concepts, write_concepts
from toprovar.tools.evaluation.intervals import wilson_interval

PROMPTS = 3
CONCEPTS = read_concepts(PACKAGED["demo"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_judged_model(tmp_path_factory.mktemp("evaluated") / "tiny", CONCEPTS)


@pytest.fixture(scope="module")
def plan(folder, tmp_path_factory):
    """Prunes the last scale, ranked by layer 1."""
    model = load_model(str(folder))
    plan = Plan(
        backbone=model.backbone,
        schedule=model.schedule,
        method="toprovar",
        score=Score(kind="entropy", source_layer={6: {2: 1, 3: 1}}),
        keep={6: (256, 256, 128, 64)},
        restore=Restore(kind="cached_residual", ref_scale=5),
    )
    path = tmp_path_factory.mktemp("plans") / "half.json"
    save_plan(plan, path)
    return path


@pytest.fixture(scope="module")
def finished(folder, plan, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "evaluation"
    end = done("evaluate", folder, "--plan", plan, "--prompts", PROMPTS, "--seed", 5, "-o", out, "--json")
    return out, json.loads(end.stdout), end.stderr


def pictures(document):
    """What does not depend on time: everything but the clock and the command."""
    kept = json.loads(json.dumps(document))
    kept["command"] = ""
    for variant in kept["variants"]:
        del variant["steps_ms_median"]
        if variant["against_dense"]:
            del variant["against_dense"]["wall_speedup"]
    return kept


def test_results_table_and_sheet_are_written(finished):
    out, document, told = finished
    assert json.loads((out / "evaluation.json").read_text()) == document
    assert "full" not in [variant["name"] for variant in document["variants"]]
    assert [variant["name"] for variant in document["variants"]] == ["dense", "half"]
    dense, half = document["variants"]
    assert half["tle_speedup"] > 1 == dense["tle_speedup"]
    assert 0 < half["against_dense"]["ssim"]["mean"] < 1
    assert dense["against_dense"] is None
    share = dense["aspects"]["all"]
    assert share["count"] == PROMPTS
    assert share["interval"] == pytest.approx(wilson_interval(share["right"], PROMPTS), abs=1e-6)
    assert document["prompts"]["of"] == 528
    assert document["references"] == []
    assert "| half |" in (out / "evaluation.md").read_text()
    assert "next: python -m toprovar.tools.evaluation.table" in told
    sheet = Image.open(out / "sheet.png")
    assert sheet.size[1] > 2 * 128
    assert [name for name in listing(out / "pictures")] == [
        f"{i:03d}_{variant}.png" for i in range(PROMPTS) for variant in ("dense", "half")
    ]


def test_noise_is_that_of_the_prompt_and_the_same_for_dense_and_plan(finished):
    out, document, _ = finished
    lines = [json.loads(line) for line in (out / "pictures.jsonl").read_text().splitlines()]
    assert [(line["prompt"], line["variant"], line["seed"]) for line in lines] == [
        (i, variant, 5 + i) for i in range(PROMPTS) for variant in ("dense", "half")
    ]
    assert all(line["ssim"] == 1 for line in lines if line["variant"] == "dense")
    assert document["seed"] == 5


def test_interrupted_evaluation_resumes_to_the_same_result(folder, plan, finished, tmp_path, monkeypatch):
    out, document, _ = finished
    shutil.copytree(out, tmp_path / "out")
    journal = tmp_path / "out" / "pictures.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:3]) + lines[3][:100])  # cut off in the middle of a line
    drawn = []
    make = making.BundleMaker.make
    monkeypatch.setattr(making.BundleMaker, "make", lambda self, *what: drawn.append(what[1:]) or make(self, *what))
    options = ("evaluate", folder, "--plan", plan, "--prompts", PROMPTS, "--seed", 5, "-o", tmp_path / "out", "--json")
    end = done(*options, "--resume")
    assert "1 unfinished line" in end.stderr
    assert pictures(json.loads(end.stdout)) == pictures(document)
    assert drawn[2:] == [(6, "dense"), (6, "half"), (7, "dense"), (7, "half")]  # after one warm-up of each
    drawn.clear()
    Image.new("RGB", (256, 256)).save(tmp_path / "out" / "pictures" / "002_half.png")  # of some other evaluation
    assert pictures(json.loads(done(*options, "--resume").stdout)) == pictures(document)
    assert drawn[2:] == [(7, "dense"), (7, "half")]
    drawn.clear()
    assert pictures(json.loads(done(*options, "--resume").stdout)) == pictures(document)
    assert not drawn
    assert "an earlier evaluation was begun there" in refusal(*options)


def test_stopping_between_pictures_keeps_those_that_are_done(folder, tmp_path, monkeypatch):
    calls = iter(range(100))
    make = making.BundleMaker.make

    def stops(self, *what):
        if next(calls) == 2:
            raise KeyboardInterrupt
        return make(self, *what)

    monkeypatch.setattr(making.BundleMaker, "make", stops)
    end = call("evaluate", folder, "--prompts", PROMPTS, "-o", tmp_path / "out")
    assert end.exit_code == 130
    assert len((tmp_path / "out" / "pictures.jsonl").read_text().splitlines()) == 1
    assert not (tmp_path / "out" / "evaluation.json").exists()


def test_pytorch_draws_nearly_the_same_pictures(folder, plan, finished, tmp_path):
    out, _, _ = finished
    done("evaluate", folder, "--plan", plan, "--prompts", 1, "--seed", 5, "--backend", "pytorch", "-o", tmp_path / "o")
    for name in ("000_dense.png", "000_half.png"):
        mine, theirs = (np.asarray(Image.open(f / "pictures" / name), np.int16) for f in (tmp_path / "o", out))
        assert np.abs(mine - theirs).mean() < 1  # of 255; a tie of one bit changes a patch


def test_guidance_of_the_command_is_used_and_noted(folder, tmp_path):
    out = tmp_path / "o"
    end = done(
        "evaluate", folder, "--prompts", 1, "--split", "development", "--cfg", 1.5, "--tau", 0.3, "-o", out, "--json"
    )
    document = json.loads(end.stdout)
    assert set(document["model"]["guidance"]["cfg"]) == {1.5}
    assert set(document["model"]["guidance"]["tau"]) == {0.3}
    assert document["prompts"]["of"] == 256


def test_dry_run_says_what_would_be_drawn_and_writes_nothing(folder, plan, tmp_path):
    options = ("evaluate", folder, "--plan", plan, "--plan", "paper@3", "-o", tmp_path / "o", "--dry-run")
    facts = json.loads(done(*options, "--json").stdout)
    assert facts["prompts"] == 528
    assert facts["pictures"] == 3 * 528
    assert [variant["name"] for variant in facts["variants"]] == ["dense", "half", "paper@3"]
    assert sum(facts["groups"][bucket] for bucket in ("single", "pattern", "scene")) == 528
    assert "to be calibrated" in done(*options).stdout
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("command", ["evaluate", "compare"])
def test_a_gpu_that_onnxruntime_lacks_is_named_before_anything_is_drawn(folder, tmp_path, monkeypatch, command):
    import onnxruntime

    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    assert "has no CUDA provider" in refusal(command, folder, "--device", "cuda", "-o", tmp_path / "o", code=3)
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--plan", "nowhere.json"), "nowhere.json is neither a file nor a preset"),
        (("--plan", "full@0.5"), "the target speed-up is 0.5; expected 1 or more"),
        (("--plan", "full", "--plan", "full"), "there is already a variant named full"),
        (("--prompts", 529), "--prompts asks for 529; the split test has 528"),
        (("--seed", 2**63), "seeds 9223372036854775808 to"),
        (("--calibration", ".", "--cfg", "2"), "--cfg and --tau change it"),
        (("--cfg", "two"), "'two' is not a number"),
        (("--calibration", "absent"), "--calibration absent is no folder"),
    ],
)
def test_wrong_use_is_refused_before_anything_is_drawn(folder, tmp_path, options, message):
    assert message in refusal("evaluate", folder, *options, "-o", tmp_path / "o")
    assert not (tmp_path / "o" / "pictures.jsonl").exists()


def test_a_model_without_ground_truth_is_refused(tiny, tmp_path):
    bare = write_model(tiny, tmp_path / "bare")
    told = refusal("evaluate", bare, "-o", tmp_path / "o")
    assert "has no ground truth" in told


def test_files_of_another_training_are_refused(folder, tmp_path):
    mixed = tmp_path / "mixed"
    shutil.copytree(folder, mixed)
    write_concepts(mixed, CONCEPTS[:-1])
    assert f"knows {len(CONCEPTS)} concepts" in refusal("evaluate", mixed, "-o", tmp_path / "o")
    shutil.copytree(folder, mixed, dirs_exist_ok=True)
    (mixed / FILE).write_bytes(b"nonsense")
    assert "is not a readable drawing classifier" in refusal("evaluate", mixed, "-o", tmp_path / "o")


def changed(name, value):
    def change(tensors):
        tensors[name] = value if torch.is_tensor(value) else value(tensors[name])

    return change


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (FILE, changed("concepts.bias", lambda t: t.fill_(np.nan)), "concepts.bias isn't finite"),
        (FILE, changed("concepts.weight", torch.tensor(1.0)), "is not a readable drawing classifier"),
        (FILE, changed("concepts.weight.row_scale", torch.ones(3)), "expected one scale per row"),
        (FILE, changed("concepts.weight.row_scale", lambda t: t * np.inf), "concepts.weight isn't finite"),
        (frechet.FILE, changed("count", torch.tensor([-5])), "no covariance of two or more crops"),
        (frechet.FILE, changed("count", torch.ones(2, 2)), "holds no readable reference features"),
        (frechet.FILE, changed("covariance", lambda t: -t), "no covariance of two or more crops"),
        (frechet.FILE, changed("covariance", lambda t: t.index_fill(0, torch.tensor(0), 1e30)), "no covariance"),
    ],
)
def test_a_damaged_judge_is_named_before_anything_is_drawn(folder, tmp_path, file, change, message):
    damaged = shutil.copytree(folder, tmp_path / "damaged")
    tensors = load_file(damaged / file)
    change(tensors)
    save_file(tensors, damaged / file)
    assert message in refusal("evaluate", damaged, "-o", tmp_path / "o")
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("entries", [[1], [{}], [{"name": "x", "aspects": {}, "frechet": {}, "groups": {}}], [None]])
def test_reference_scores_that_no_table_could_show_are_refused(folder, tmp_path, entries):
    damaged = shutil.copytree(folder, tmp_path / "damaged")
    path = damaged / ground_truth.REFERENCE_SCORES
    path.write_text(json.dumps({**json.loads(path.read_text()), "entries": entries}))
    told = refusal("evaluate", damaged, "-o", tmp_path / "o")
    assert "reference_scores.json holds no whole results" in told
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("edit", [{"prompt": 1}, {"seed": 99}, {"variant": "x"}, {"places": 2}])
def test_a_record_that_contradicts_its_identity_is_drawn_again(folder, plan, finished, tmp_path, edit):
    out, document, _ = finished
    shutil.copytree(out, tmp_path / "out")
    journal = tmp_path / "out" / "pictures.jsonl"
    first, *others = journal.read_text().splitlines(keepends=True)
    journal.write_text(json.dumps({**json.loads(first), **edit}) + "\n" + "".join(others))
    options = ("--plan", plan, "--prompts", PROMPTS, "--seed", 5, "-o", tmp_path / "out", "--json", "--resume")
    assert pictures(json.loads(done("evaluate", folder, *options).stdout)) == pictures(document)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--seed", 2**63 - 5), "seeds 9223372036854775803 to"),
        (("--cfg", "nan"), "--cfg: nan is out of range"),
        (("--tau", "0"), "--tau: 0 is out of range"),
        (("--calibration", "absent"), "--calibration absent is no folder"),
    ],
)
def test_a_dry_run_refuses_what_the_run_would(folder, tmp_path, options, message):
    assert message in refusal("evaluate", folder, *options, "--dry-run", "-o", tmp_path / "o")
    (tmp_path / "file").write_text("")
    assert "is a file" in refusal("evaluate", folder, "--dry-run", "-o", tmp_path / "file")


def test_a_model_of_another_size_is_refused(tiny, folder, tmp_path):
    small = write_model(tiny, tmp_path / "small")
    for name in ("concepts.json", FILE, frechet.FILE, ground_truth.REFERENCE_SCORES):
        shutil.copy(folder / name, small / name)
    assert "draws 32 x 32 pixels; the ground truth is of 256 x 256" in refusal("evaluate", small, "-o", tmp_path / "o")


def test_real_pictures_stand_beside_results_of_the_whole_test_split_only(folder):
    truth = ground_truth.load_ground_truth(folder)
    truth.references = {"prompts_sha256": "x", "judge_sha256": truth.judge_sha256, "entries": [{"name": "real"}]}
    assert truth.references_for("x") == [{"name": "real"}]
    assert truth.references_for("y") == []
    assert evaluating.SHEET_PROMPTS == 24
