"""VAR and HART: what their models, checkpoints, options and prompts may not be ends with one clear error."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import done, listing, refusal
from family_models import TEXT_TOKENS, TEXT_WIDTH, write_hart, write_var
from safetensors.torch import load_file, save_file

from toprovar.exporter.model import load_model
from toprovar.exporter.planned.loop import LoopOptions
from toprovar.exporter.prompts import use_embeddings
from toprovar.runtime.backends.onnxruntime import OnnxRuntimeBackend
from toprovar.runtime.bundle import open_bundle
from toprovar.runtime.embeddings import PromptEmbeddings, write_embeddings
from toprovar.runtime.pipeline import Pipeline
from toprovar.runtime.plan import dense_plan, save_plan

WRITERS = {"var": write_var, "hart": write_hart}
PROMPT = {"var": "3", "hart": "red apple"}


@pytest.fixture(scope="module", params=sorted(WRITERS))
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A model and its dense bundle, to copy and damage."""
    family: str = request.param
    folder = tmp_path_factory.mktemp(family)
    WRITERS[family](folder / "model")
    done("export", folder / "model", "-o", folder / "bundle")
    return family, folder


@pytest.fixture
def model(stored: tuple[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(stored[1] / "model", tmp_path / "model"))


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def export_refused(model: Path, tmp_path: Path, *options: object) -> str:
    before = listing(tmp_path)
    told = refusal("export", model, "-o", tmp_path / "out", *options)
    assert listing(tmp_path) == before
    return told


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sides": [1, 4, 2, 8, 16, 20]}, "side 2 of scale 2 follows 4, expected a larger one"),
        ({"heads": 7}, "with 3 heads, as blocks.0.attn.scale_mul_1H11 tells; 7 were named"),
        ({"smooth": "yes"}, "smooth: input should be a valid boolean (found 'yes')"),
        ({"aspect": 2.0}, "aspect 2.0 in its model.json"),
        ({"budget": "1M"}, "has no such setting"),
        ({"frames": 5}, "settings of the family: cfg, heads, sides, smooth, tau,"),
        ({"cfg": [1001]}, "cfg.0: input should be less than or equal to 1000"),
        ({"top_k": [1, 2]}, "top_k has 2 values; the schedule has 6 scales"),
    ],
)
def test_settings_that_mean_nothing_are_refused(
    settings: dict[str, object], message: str, model: Path, tmp_path: Path
) -> None:
    edit(model / "model.json", lambda facts: facts.update(settings))
    assert message in export_refused(model, tmp_path)


def test_a_family_refuses_another_ones_settings(stored: tuple[str, Path], model: Path, tmp_path: Path) -> None:
    edit(model / "model.json", lambda facts: facts.update(text_tokens=TEXT_TOKENS))
    if stored[0] == "var":
        assert "text_tokens 7 in its model.json" in export_refused(model, tmp_path)
        assert "draws classes, which have no tokens" in refusal(
            "export", stored[1] / "model", "--text-tokens", 5, "-o", tmp_path / "out"
        )
    else:
        told = done("export", model, "--text-tokens", 5, "-o", tmp_path / "out").stderr
        assert "padding takes part in the attention of hart" in " ".join(told.split())


@pytest.mark.parametrize("file", ["transformer", "tokenizer"])
def test_integers_are_no_weights(file: str, model: Path, tmp_path: Path) -> None:
    path = model / f"{file}.safetensors"
    save_file({name: tensor.to(torch.int32) for name, tensor in load_file(path).items()}, path)
    assert "holds int32; expected floating point numbers" in export_refused(model, tmp_path)


def test_a_missing_smoothing_convolution_is_named(model: Path, tmp_path: Path) -> None:
    path = model / "tokenizer.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("qresi_ls.3.weight"))
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, path)
    assert "tensor quantize.quant_resi.qresi_ls.3.weight is missing" in export_refused(model, tmp_path)


def test_inspect_reads_a_model_as_export_does(stored: tuple[str, Path], model: Path, tmp_path: Path) -> None:
    _, folder = stored
    path = model / "transformer.safetensors"
    save_file({name: t for name, t in load_file(path).items() if "scale_mul" not in name}, path)
    for said in (refusal("inspect", model), export_refused(model, tmp_path)):
        assert 'in a model.json: "heads"' in said
    edit(model / "model.json", lambda facts: facts.update(heads=3))
    for place in (model, model / "model.json"):
        facts = json.loads(done("inspect", place, "--json").stdout)
        assert facts["transformer"]["config"]["heads"] == 3
    for command in ("export", "calibrate"):
        assert "is a bundle; expected a model" in refusal(command, folder / "bundle", "-o", tmp_path / "out")


def test_guidance_that_grows_too_far_is_refused(stored: tuple[str, Path], model: Path, tmp_path: Path) -> None:
    family, folder = stored
    run = ("run", folder / "bundle", "-p", PROMPT[family], "-o", tmp_path / "x.png", "--cfg", 1000)
    if family == "hart":  # the last scale keeps the guidance of the one before: 801
        done(*run)
        return
    assert "--cfg: 1000 grows to 1001; expected at most 1000" in refusal(*run)
    edit(model / "model.json", lambda facts: facts.update(cfg=[1000]))
    assert "cfg: 1000 grows to 1001" in export_refused(model, tmp_path)


def test_times_need_no_prompt(stored: tuple[str, Path], tmp_path: Path) -> None:
    done("bench", stored[1] / "bundle", "--runs", 1)
    done("profile", stored[1] / "bundle", "--runs", 1, "-o", tmp_path / "profile")


# -- encoded prompts ---------------------------------------------------------------------------------------------------


def embeddings(
    path: Path, width: int = TEXT_WIDTH, valid: tuple[bool, ...] = (True, False, True), negative: bool = False
) -> PromptEmbeddings:
    draw = np.random.default_rng(3)
    rows = draw.standard_normal((2, len(valid), width)).astype(np.float32)
    mask = np.array(valid)
    found = PromptEmbeddings(
        ("a",), (rows[0],), (mask,), (3,), {"kind": "made"}, ("b", rows[1], ~mask) if negative else None, str(path)
    )
    write_embeddings(path, found)
    return found


def test_encoded_prompts_that_do_not_fit_are_refused(stored: tuple[str, Path], tmp_path: Path) -> None:
    family, folder = stored
    cases = {"of width 17": {"width": 17}, "no token among": {"valid": (False, False)}}
    for message, case in cases.items():
        embeddings(tmp_path / "e.safetensors", **case)  # type: ignore[arg-type]
        told = refusal("calibrate", folder / "model", "--embeddings", tmp_path / "e.safetensors", "-o", tmp_path / "c")
        assert ("draws classes, not texts" if family == "var" else message) in told
        told = refusal("run", folder / "bundle", "--embeddings", tmp_path / "e.safetensors", "-o", tmp_path / "x.png")
        expected = {"of width 17": "shape [3, 17]"}.get(message, message)
        assert ("draws classes" if family == "var" else expected) in told
    assert listing(tmp_path) == ["e.safetensors"]


def test_a_negative_prompt_with_padding_is_the_same_in_pytorch(stored: tuple[str, Path], tmp_path: Path) -> None:
    family, folder = stored
    if family == "var":
        pytest.skip("draws classes")
    found = embeddings(tmp_path / "e.safetensors", negative=True)
    model = load_model(str(folder / "model"))
    use_embeddings(model, found)
    asked = model.family.prompt(model, ["a"], model.guidance())
    run = model.family.generate(model, asked, model.schedule, model.guidance(), [4], LoopOptions())
    bundle = open_bundle(folder / "bundle")
    assert found.negative is not None
    _, rows, valid = found.negative
    told = {"text_rows": found.rows[0], "text_valid": found.valid[0], "negative_rows": rows, "negative_valid": valid}
    pipeline = Pipeline(bundle, OnnxRuntimeBackend(bundle))
    result = pipeline.generate(None, 4, **told)
    assert all(np.array_equal(a[0].numpy(), b) for a, b in zip(run.indices, result.indices, strict=True))
    plain = pipeline.generate(None, 4, text_rows=found.rows[0], text_valid=found.valid[0])
    assert not np.array_equal(plain.codes, result.codes)


# -- plans and manifests -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["guidance"].update(top_k=[5]), "one top_k per scale, or none"),
        (lambda m: m.update(images=2), "there are no steps for 2 images"),
        (lambda m: m.update(kv_head=[2, 8]), "step_00.onnx"),
        (lambda m: m["variants"]["dense"][0].update(along=3), "step_00.onnx"),
        (lambda m: m["prompt"]["outputs"]["head_modulation"].update(shape=[]), "expected 2 on axis 1"),
        (lambda m: m["variants"]["dense"][5]["graph"]["inputs"]["noise"].update(shape=[]), "input noise F32[]"),
    ],
)
def test_an_edited_manifest_is_refused(
    change: Callable[[dict[str, Any]], Any], message: str, stored: tuple[str, Path], tmp_path: Path
) -> None:
    family, folder = stored
    bundle = Path(shutil.copytree(folder / "bundle", tmp_path / "bundle"))
    edit(bundle / "manifest.json", change)
    assert message in refusal("inspect", bundle)
    assert message in refusal("run", bundle, "-p", PROMPT[family], "-o", tmp_path / "x.png")


def test_compare_counts_equal_codes(stored: tuple[str, Path], tmp_path: Path) -> None:
    family, folder = stored
    if family == "hart":
        pytest.skip("its last scale always runs; the parts are the same")
    told = refusal("compare", folder / "model", "-o", tmp_path / "compare")
    assert "compare needs none with --prompts FILE" in told
    (tmp_path / "prompts.txt").write_text("3\n")
    model = load_model(str(folder / "model"))
    plan = dense_plan(model.backbone, model.schedule)
    save_plan(plan.model_copy(update={"method": "fixed_exit", "skip_scales": (5,)}), tmp_path / "exit.json")
    done(
        "compare", folder / "model", "--prompts", tmp_path / "prompts.txt", "--plan", tmp_path / "exit.json",
        "-o", tmp_path / "compare",
    )  # fmt: skip
    _, exited = json.loads((tmp_path / "compare" / "compare.json").read_text())["variants"]
    assert exited["equal_bits"] == {"share": 1.0, "drawn": 1.0, "per_scale": [1.0] * 5 + [None]}
    assert exited["raw"]["drawn_bits"] == [341]
