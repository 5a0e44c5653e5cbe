"""The backend that options ask for: through the commands, and what contradicts itself."""

import json

import numpy as np
import pytest
from command_line import done, refusal
from PIL import Image

from toprovar.plugins.errors import EXIT_ENVIRONMENT
from toprovar.runtime.backends.onnxruntime import OnnxRuntimeBackend
from toprovar.runtime.bundle import open_bundle
from toprovar.tools.backends import BackendChoice


@pytest.mark.parametrize("command", ["run", "bench", "profile"])
def test_a_gpu_that_onnxruntime_cannot_use_is_an_environment_fault(tiny_bundle, tmp_path, command, monkeypatch):
    import onnxruntime

    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    where = {"run": ("-p", "red", "-o", tmp_path / "x.png"), "profile": ("-o", tmp_path)}.get(command, ())
    text = refusal(command, tiny_bundle, *where, "--device", "cuda", code=EXIT_ENVIRONMENT)
    assert "has no CUDA provider" in text
    assert "pip install 'toprovar[gpu]'" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--backend", "tensorrt"), "has no engines for TensorRT hint: build them: toprovar-export rebuild"),
        (("--backend", "tensorrt-rtx"), "has no engines for TensorRT-RTX"),
        (("--backend", "tensorrt", "--device", "cpu"), "runs on a GPU only; --device is cpu"),
        (("--backend", "tensorrt", "--operators", "body"), "runs what its engines were built from"),
        (("--backend", "tensort"), "invalid value 'tensort'"),
        (("--device", "gpu"), "invalid value 'gpu'"),
        (("--operators", "plugin"), "invalid value 'plugin'"),
    ],
)
def test_options_that_fit_no_bundle_or_each_other_are_refused(tiny_bundle, options, message):
    assert message.lower() in refusal("bench", tiny_bundle, *options, hint=False).lower()


def test_a_missing_operator_library_is_named_where_it_is_asked_for(tiny_bundle, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TOPROVAR_PLUGINS", raising=False)
    text = refusal("bench", tiny_bundle, "--operators", "library", code=EXIT_ENVIRONMENT)
    assert "the operator library is missing" in text
    assert "toprovar plugins build" in text


def test_command_and_api_draw_the_same_and_the_record_says_with_what(tiny_bundle, tmp_path):
    out = tmp_path / "x.png"
    record = json.loads(
        done("run", tiny_bundle, "-p", "red apple", "--seed", 7, "-o", out, "--device", "cpu", "--json").stdout
    )
    assert (record["device"], record["operators"]) == ("cpu", "body")
    from toprovar.runtime.pipeline import Pipeline

    bundle = open_bundle(tiny_bundle)
    backend = BackendChoice(device="cpu", operators="body", threads=1).open(bundle)
    assert isinstance(backend, OnnxRuntimeBackend)
    drawn = Pipeline(bundle, backend).generate("red apple", 7, "planned").image
    assert np.array_equal(np.asarray(Image.open(out)), drawn)


def test_the_bench_names_device_and_operators(tiny_bundle):
    conditions = json.loads(done("bench", tiny_bundle, "--runs", 1, "--json").stdout)["conditions"]
    assert (conditions["device"], conditions["operators"]) == ("cpu", "body")


@pytest.mark.parametrize(
    ("gpu", "providers", "bindings", "expected"),
    [
        (None, ["CUDAExecutionProvider"], "13", "no: nvidia-smi shows no GPU"),
        (
            "NVIDIA H200",
            ["CPUExecutionProvider"],
            "13",
            "no: pip install 'toprovar[gpu]', then pip uninstall -y onnxruntime, then",
        ),
        ("NVIDIA H200", ["CUDAExecutionProvider"], None, "no: pip install cuda-bindings"),
        ("NVIDIA H200", ["CUDAExecutionProvider"], "13", "yes"),
    ],
)
def test_the_environment_says_whether_a_gpu_can_be_used(monkeypatch, gpu, providers, bindings, expected):
    import onnxruntime

    from toprovar.tools import environment

    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: providers)
    monkeypatch.setattr(environment, "_first_line", lambda command: gpu)
    monkeypatch.setattr(environment, "_installed", lambda package: bindings)
    assert environment.environment()["commands"]["run, bench --device cuda"].startswith(expected)


@pytest.mark.parametrize(
    ("option", "given", "message"),
    [
        ("--device", "cda", "'cda' for '--device': expected cpu, cuda hint: did you mean cuda?"),
        (
            "--operators",
            "libary",
            "'libary' for '--operators': expected auto, library, body hint: did you mean library",
        ),
        ("--backend", "tensorrt_rtx", "onnxruntime, tensorrt, tensorrt-rtx hint: did you mean tensorrt-rtx?"),
    ],
)
def test_a_word_that_is_no_choice_gets_the_nearest_one(option, given, message, tiny_bundle):
    assert message in refusal("run", tiny_bundle, "-p", "red apple", option, given)


def test_a_variant_that_is_almost_there_gets_its_name(tiny_bundle):
    assert "has no variant plannd; it has dense, planned hint: did you mean planned?" in refusal(
        "run", tiny_bundle, "-p", "red apple", "--plan", "plannd"
    )
    assert "hint: export it with --plan" in refusal("run", tiny_bundle, "-p", "red apple", "--plan", "skipped")
