"""The GPU path of the ONNX Runtime backend on a GPU that is host memory: what is uploaded, bound, captured and read."""

import sys

import numpy as np
import pytest
from conftest import GUIDANCE
from fake_cuda import FakeCuda, fake_onnxruntime
from helpers import open_pipeline

from toprovar.runtime.backends import onnxruntime_cuda, ort_values
from toprovar.runtime.backends.onnxruntime import OnnxRuntimeBackend
from toprovar.runtime.bundle import open_bundle
from toprovar.runtime.errors import EnvironmentFault, ToprovarError
from toprovar.runtime.pipeline import Pipeline, Request


@pytest.fixture
def cuda(monkeypatch):
    """(onnxruntime, CUDA runtime): both fakes."""
    monkeypatch.setattr(ort_values, "CUDA", ort_values.CPU)
    fakes = fake_onnxruntime(), FakeCuda()
    monkeypatch.setitem(sys.modules, "onnxruntime", fakes[0])
    monkeypatch.setattr(onnxruntime_cuda, "check_cuda", lambda ort: fakes[1])
    return fakes


def on_gpu(folder, **options):
    bundle = open_bundle(folder)
    return Pipeline(bundle, OnnxRuntimeBackend(bundle, device="cuda", operators="body", **options))


@pytest.fixture(scope="module")
def on_cpu(tiny_bundle):
    return open_pipeline(tiny_bundle)


@pytest.mark.parametrize("variant", ["dense", "planned"])
def test_a_picture_is_the_same_as_on_the_cpu(tiny_bundle, on_cpu, cuda, variant):
    gpu = on_gpu(tiny_bundle).generate("red apple", 7, variant)
    cpu = on_cpu.generate("red apple", 7, variant)
    assert np.array_equal(gpu.image, cpu.image)
    assert np.array_equal(gpu.codes, cpu.codes)
    assert all(np.array_equal(a, b) for a, b in zip(gpu.bits, cpu.bits, strict=True))
    for mine, other in zip(gpu.steps, cpu.steps, strict=True):
        assert mine.counts == other.counts
        assert mine.kept.keys() == other.kept.keys()
        assert all(np.array_equal(mine.kept[layer], other.kept[layer]) for layer in mine.kept)


def test_a_batch_is_the_same_as_on_the_cpu(tiny_bundle, on_cpu, cuda):
    requests = [Request("red apple", 1), Request("green dog", 2)]
    gpu = on_gpu(tiny_bundle).generate_batch(requests, "planned")
    cpu = on_cpu.generate_batch(requests, "planned")
    assert all(np.array_equal(a.image, b.image) for a, b in zip(gpu, cpu, strict=True))


def test_a_second_picture_runs_in_the_same_buffers_and_replays_every_step(tiny_bundle, cuda):
    ort, api = cuda
    pipeline = on_gpu(tiny_bundle)
    first = pipeline.generate("red apple", 7, "planned")
    taken = len(api.blocks)
    again = pipeline.generate("red apple", 7, "planned")
    other = pipeline.generate("green dog", 8, "planned")
    assert len(api.blocks) == taken
    assert np.array_equal(first.image, again.image)
    assert not np.array_equal(first.image, other.image)
    steps = [session for session in ort.opened if session.settings["enable_cuda_graph"] == "1"]
    assert len(steps) == len(pipeline.steps("planned"))
    assert all(session.runs == ["1", "1", "1"] for session in steps)


def test_what_is_not_captured_says_so_to_no_session(tiny_bundle, cuda):
    ort, _ = cuda
    on_gpu(tiny_bundle, cuda_graph=False).generate("red apple", 7)
    assert ort.opened
    assert all(session.settings["enable_cuda_graph"] == "0" and set(session.runs) == {None} for session in ort.opened)


def test_other_buffers_are_captured_apart_and_too_many_not_at_all(tiny_bundle, cuda):
    ort, _ = cuda
    pipeline = on_gpu(tiny_bundle)
    step = pipeline.steps("dense")[0]
    memory = pipeline.backend.memory
    for _ in range(6):  # no scope: addresses differ each time
        inputs = {n: memory.place(np.zeros(f.shape, np.float32)) for n, f in step.graph.inputs.items()}
        outputs = {name: memory.empty(facts.shape, facts.dtype) for name, facts in step.graph.outputs.items()}
        pipeline.backend.run(step.graph, inputs, outputs)
        pipeline.backend.run(step.graph, inputs, outputs)
    assert ort.opened[0].runs == ["1", "1", "2", "2", "3", "3", "4", "4", "-1", "-1", "-1", "-1"]


def test_weights_are_uploaded_once_for_all_sessions(tiny_bundle, cuda):
    ort, api = cuda
    pipeline = on_gpu(tiny_bundle)
    uploads = api.calls.count("cudaMemcpyHostToDevice")
    assert uploads == len(open_bundle(tiny_bundle).weights())
    assert api.calls.count("cudaMalloc") == 1
    pipeline.prepare("dense")
    assert len(ort.opened) > 1
    assert api.calls.count("cudaMalloc") == 1


def test_nothing_comes_to_the_host_but_what_the_loop_looks_at(tiny_bundle, cuda):
    _, api = cuda
    pipeline = on_gpu(tiny_bundle)
    memory, written, names = pipeline.backend.memory, {}, []
    real_run, real_read = pipeline.backend.run, memory.read

    def run(graph, inputs, outputs):
        written.update({buffer.address: name for name, buffer in outputs.items()})
        real_run(graph, inputs, outputs)

    def read(buffer):
        names.append(written[buffer.address])
        return real_read(buffer)

    pipeline.backend.run, memory.read = run, read
    result = pipeline.generate("red apple", 7, "planned")
    assert len(names) == len(api.reads)  # there is no other way to the host
    gates = {gate for step in pipeline.steps("planned") for gate in step.gates.values()}
    maps = {n for step in pipeline.steps("planned") for n in step.graph.outputs if n.startswith("entropy_")}
    assert set(names) == {"rows", "bits", "codes_next", "image", *gates, *(maps - {"entropy_mean"})}
    assert names.count("bits") == len(result.steps)
    assert names.count("codes_next") == 2  # the last one, to be held against NaN and for the result
    assert names.count("image") == names.count("rows") == 1


def test_non_finite_codes_name_their_scale_on_a_gpu(tiny_bundle, cuda):
    pipeline = on_gpu(tiny_bundle)
    real = pipeline.backend.run

    def run(graph, inputs, outputs):
        real(graph, inputs, outputs)
        if graph.file == "step_02.onnx":
            codes = outputs["codes_next"]
            pipeline.backend.memory.upload(np.full(codes.shape, np.nan, np.float32), codes.address)

    pipeline.backend.run = run
    with pytest.raises(ToprovarError, match="codes of scale 2 are not finite"):
        pipeline.generate("red", 0)


def test_a_graph_that_cannot_be_captured_runs_without_and_says_so(tiny_bundle, cuda, caplog):
    ort, _ = cuda
    real = ort.InferenceSession

    def session(path, options, providers, enable_fallback=1):
        if providers[0][1]["enable_cuda_graph"] == "1" and path.name == "step_01.onnx":
            raise RuntimeError("This session cannot use the graph capture feature as requested by the user")
        return real(path, options, providers, enable_fallback)

    ort.InferenceSession = session
    pipeline = on_gpu(tiny_bundle)
    assert pipeline.generate("red apple", 7).image is not None
    assert caplog.text.count("step_01.onnx runs without a captured graph") == 1


def test_a_session_that_took_the_cpu_is_an_error(tiny_bundle, cuda):
    ort, _ = cuda
    real = ort.InferenceSession

    def session(*arguments, **options):
        opened = real(*arguments, **options)
        opened.get_providers = lambda: ["CPUExecutionProvider"]
        return opened

    ort.InferenceSession = session
    with pytest.raises(EnvironmentFault, match=r"took the CPU for .*; CUDA was asked for"):
        on_gpu(tiny_bundle).generate("red", 0)


@pytest.mark.parametrize(
    ("changes", "message", "hint"),
    [
        ({"get_available_providers": lambda: ["CPUExecutionProvider"]}, "has no CUDA provider", "toprovar[gpu]"),
        ({"OrtValue": object}, "cannot share weights on a GPU", "toprovar[gpu]"),
    ],
)
def test_an_onnxruntime_without_cuda_is_refused_before_anything_is_allocated(
    tiny_bundle, monkeypatch, changes, message, hint
):
    monkeypatch.setattr(ort_values, "CUDA", ort_values.CPU)
    monkeypatch.setitem(sys.modules, "onnxruntime", fake_onnxruntime(**changes))
    with pytest.raises(EnvironmentFault, match=message) as caught:
        OnnxRuntimeBackend(open_bundle(tiny_bundle), device="cuda")
    assert hint in caught.value.hint


def test_a_cuda_provider_that_cannot_be_loaded_is_named(tiny_bundle, monkeypatch):
    monkeypatch.setattr(ort_values, "CUDA", ort_values.CPU)
    monkeypatch.setattr(onnxruntime_cuda, "load_cuda", FakeCuda)
    ort = fake_onnxruntime()  # the real one of this machine makes no values on a GPU
    monkeypatch.setitem(sys.modules, "onnxruntime", ort)
    with pytest.raises(EnvironmentFault, match="cannot load its CUDA provider"):
        OnnxRuntimeBackend(open_bundle(tiny_bundle), device="cuda")


def test_guidance_that_ends_drops_rows_on_the_gpu_too(tiny, tmp_path, cuda):
    from conftest import pruning_plan

    from toprovar.exporter.bundle_writer import export_bundle
    from toprovar.exporter.planned.step import StepOptions
    from toprovar.runtime.plan import CfgStop

    plan = pruning_plan(tiny, cfg_stop=CfgStop(mode="static", scale=4))
    export_bundle(tiny, tmp_path / "b", GUIDANCE, StepOptions(text_tokens=12), plan)
    gpu = on_gpu(tmp_path / "b").generate("red apple", 7, "planned")
    cpu = open_pipeline(tmp_path / "b").generate("red apple", 7, "planned")
    assert [step.guided for step in gpu.steps] == [True] * 4 + [False] * 2
    assert np.array_equal(gpu.image, cpu.image)
