"""The TensorRT backend: what it refuses before it touches a GPU, and the loop on engines that are ONNX models."""

import hashlib
import json
import shutil
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from fake_cuda import FakeCuda
from fake_tensorrt import USED_NAMES, FakeTensorRt
from helpers import open_pipeline

from toprovar.exporter.engines.weights_as_inputs import weights_as_inputs
from toprovar.plugins.errors import EXIT_ENVIRONMENT, EXIT_WRONG_INPUT
from toprovar.runtime.backends import tensorrt, tensorrt_module
from toprovar.runtime.backends.tensorrt import TensorRtBackend
from toprovar.runtime.bundle import open_bundle
from toprovar.runtime.errors import EnvironmentFault, ToprovarError
from toprovar.runtime.pipeline import Pipeline

TARGET = "tensorrt-rtx"
DIGEST = "ab" * 32


@pytest.fixture(scope="module")
def engine_bundle(tiny_bundle, tmp_path_factory):
    """The tiny bundle with an "engine" of every graph: its ONNX model with the weights as inputs."""
    folder = shutil.copytree(tiny_bundle, tmp_path_factory.mktemp("engines") / "tiny")
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "engines" / TARGET).mkdir(parents=True)
    engines = []
    for graph in sorted(path.name for path in folder.glob("*.onnx")):
        model = onnx.load(folder / graph, load_external_data=False)
        weights = weights_as_inputs(model, folder, min_bytes=1024)  # so that ranges of rows are among them
        raw, file = model.SerializeToString(), f"engines/{TARGET}/{graph.removesuffix('.onnx')}.plan"
        (folder / file).write_bytes(raw)
        manifest["files"][file] = {"size_bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
        engines.append({"file": file, "graph": graph, "weights": weights, "key": DIGEST})
    engines[-1]["plugin_layers"] = {"EntropyAttention": 4}
    manifest["engines"] = {
        TARGET: {
            "target": TARGET,
            "builder_version": FakeTensorRt.__version__,
            "compute_capabilities": ["8.6", "8.9"],
            "plugin_sha256": DIGEST,
            "engines": engines,
        }
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine that fits: (TensorRT, CUDA runtime)."""
    api = FakeCuda()
    trt = FakeTensorRt(api)
    library = SimpleNamespace(path=tmp_path / "libtoprovar_plugins.so", source_digest=DIGEST)
    monkeypatch.setattr(tensorrt, "_registered", {})
    monkeypatch.setattr(tensorrt, "require_library", lambda tensorrt: library)
    monkeypatch.setattr(tensorrt, "load_module", lambda target: trt)
    monkeypatch.setattr(tensorrt, "load_cuda", lambda: api)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return SimpleNamespace(trt=trt, api=api, library=library)


def on_engines(folder, **options):
    bundle = open_bundle(folder)
    return Pipeline(bundle, TensorRtBackend(bundle, TARGET, **options))


def assert_same_draw(mine, other):
    """Bits are equal; pixels may round apart, since convolutions with weights as inputs are not folded alike."""
    assert len(mine.bits) == len(other.bits) > 0
    assert all(np.array_equal(a, b) for a, b in zip(mine.bits, other.bits, strict=True))
    assert np.abs(mine.image.astype(int) - other.image.astype(int)).max() <= 1


def run_alone(pipeline, graph):
    """One graph on inputs of its own, in the same buffers each time. Returns: its first output."""
    memory = pipeline.backend.memory
    with memory.scope():
        draw = np.random.default_rng(1)
        inputs = {n: memory.place(draw.standard_normal(f.shape, np.float32)) for n, f in graph.inputs.items()}
        outputs = {name: memory.empty(facts.shape, facts.dtype) for name, facts in graph.outputs.items()}
        pipeline.backend.run(graph, inputs, outputs)
        return memory.read(next(iter(outputs.values())))


def refused(folder, kind, code, **options):
    """The error of opening a backend, which took no memory of the GPU."""
    with pytest.raises(ToprovarError) as caught:
        TensorRtBackend(open_bundle(folder, verify=False), options.pop("target", TARGET))
    assert type(caught.value) is kind
    assert caught.value.exit_code == code
    return f"{caught.value.message} | {caught.value.hint}"


# -- refused, in the order of the checks -------------------------------------------------------------------------------


def test_a_bundle_without_engines_says_how_to_build_them(tiny_bundle, engine_bundle, machine):
    text = refused(tiny_bundle, ToprovarError, EXIT_WRONG_INPUT)
    assert "has no engines for TensorRT-RTX | build them:  toprovar-export rebuild" in text
    text = refused(engine_bundle, ToprovarError, EXIT_WRONG_INPUT, target="tensorrt")
    assert "has no engines for TensorRT; it has tensorrt-rtx" in text
    assert "--target tensorrt" in text
    assert not machine.api.calls


def test_a_missing_library_is_named_before_tensorrt_is_loaded(engine_bundle, machine, monkeypatch, tmp_path):
    from toprovar.plugins.library import require_library

    monkeypatch.setattr(tensorrt, "require_library", require_library)
    monkeypatch.delenv("TOPROVAR_PLUGINS", raising=False)
    monkeypatch.setattr(tensorrt, "load_module", lambda target: pytest.fail("TensorRT was loaded"))
    text = refused(engine_bundle, EnvironmentFault, EXIT_ENVIRONMENT)
    assert "the operator library is missing" in text
    assert "toprovar plugins build" in text
    assert not machine.api.calls


def test_a_library_of_other_sources_is_stale(engine_bundle, machine):
    machine.library.source_digest = "cd" * 32
    text = refused(engine_bundle, EnvironmentFault, EXIT_ENVIRONMENT)
    assert "call plugins of sources abababababab" in text
    assert "is of cdcdcdcdcdcd | build the engines again:  toprovar-export rebuild" in text
    assert not machine.api.calls


def test_engines_of_another_version_are_refused(engine_bundle, machine):
    machine.trt.__version__ = "1.8.0.2"
    text = refused(engine_bundle, EnvironmentFault, EXIT_ENVIRONMENT)
    assert "were built by TensorRT-RTX 1.7.1.116; this machine has TensorRT-RTX 1.8.0.2" in text
    assert "toprovar-export rebuild" in text
    assert not machine.api.calls


def test_a_machine_without_gpu_is_named(engine_bundle, machine, monkeypatch):
    def none():
        raise EnvironmentFault("there is no usable CUDA GPU here: none is visible", "install NVIDIA's driver")

    monkeypatch.setattr(tensorrt, "load_cuda", none)
    assert "no usable CUDA GPU here" in refused(engine_bundle, EnvironmentFault, EXIT_ENVIRONMENT)
    assert not machine.trt.registry.loaded


def test_another_gpu_is_refused(engine_bundle, machine):
    machine.api.capability = (9, 0)
    text = refused(engine_bundle, EnvironmentFault, EXIT_ENVIRONMENT)
    assert "are for compute capability 8.6, 8.9; this GPU has 9.0" in text
    assert "--compute-capability 90" in text
    assert not machine.api.calls
    assert not machine.trt.registry.loaded


def test_a_library_that_tensorrt_refuses_is_named(engine_bundle, machine):
    machine.trt.registry.load_library = lambda path: None
    assert "cannot load the plugins of" in refused(engine_bundle, EnvironmentFault, EXIT_ENVIRONMENT)
    assert not machine.api.calls


def test_a_missing_module_is_named(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(EnvironmentFault) as caught:
        tensorrt_module.load_module("tensorrt")
    assert "TensorRT" in caught.value.message
    assert caught.value.hint == "pip install 'toprovar[tensorrt]'"


def test_a_plan_with_one_bit_flipped_is_found_before_it_is_loaded(engine_bundle, machine, tmp_path):
    folder = shutil.copytree(engine_bundle, tmp_path / "b")
    plan = folder / "engines" / TARGET / "step_03.plan"
    raw = bytearray(plan.read_bytes())
    raw[len(raw) // 2] ^= 1
    plan.write_bytes(raw)
    with pytest.raises(ToprovarError, match=r"step_03.plan was changed: its sha256 differs"):
        open_bundle(folder)
    bundle = open_bundle(folder, verify=False)
    backend = TensorRtBackend(bundle, TARGET)
    step = bundle.manifest.variants["dense"][3]
    with pytest.raises(ToprovarError, match=r"step_03.plan was changed: its sha256 differs"):
        backend.prepare(step.graph)
    assert not machine.trt.engines


def test_a_plan_that_tensorrt_refuses_is_named_with_its_reason(engine_bundle, machine, tmp_path):
    folder = shutil.copytree(engine_bundle, tmp_path / "b")
    manifest = json.loads((folder / "manifest.json").read_text())
    file = f"engines/{TARGET}/step_00.plan"
    (folder / file).write_bytes(b"no plan")
    manifest["files"][file] = {"size_bytes": 7, "sha256": hashlib.sha256(b"no plan").hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ToprovarError, match=r"step_00.plan cannot be loaded: magic tag does not match"):
        on_engines(folder).generate("red", 0)


def test_an_engine_of_another_graph_is_refused(engine_bundle, machine, tmp_path):
    folder = shutil.copytree(engine_bundle, tmp_path / "b")
    manifest = json.loads((folder / "manifest.json").read_text())
    plans = [f"engines/{TARGET}/step_0{scale}.plan" for scale in (1, 2)]
    shutil.copyfile(folder / plans[0], folder / plans[1])
    manifest["files"][plans[1]] = manifest["files"][plans[0]]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ToprovarError, match=r"step_02.plan (has|lacks) .*"):
        on_engines(folder).generate("red", 0)


def test_a_graph_without_engine_is_named(engine_bundle, machine, tmp_path):
    folder = shutil.copytree(engine_bundle, tmp_path / "b")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["engines"][TARGET]["engines"].pop(0)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ToprovarError, match=r"has no TensorRT-RTX engine of decoder.onnx"):
        on_engines(folder).generate("red", 0)


# -- the loop ----------------------------------------------------------------------------------------------------------


def test_engines_draw_the_picture_of_the_graphs_and_replay_it(engine_bundle, machine):
    trt, api = machine.trt, machine.api
    pipeline, reference = on_engines(engine_bundle), open_pipeline(engine_bundle)
    steps = len(pipeline.steps("planned"))
    drawn = [pipeline.generate("red apple", 7, "planned")]
    enqueued, bound, blocks = trt.enqueued, trt.bound, len(api.blocks)
    for prompt, seed in (("red apple", 7), ("green dog", 8)):
        drawn.append(pipeline.generate(prompt, seed, "planned"))
    assert np.array_equal(drawn[1].image, drawn[0].image)
    assert_same_draw(drawn[0], reference.generate("red apple", 7, "planned"))
    assert_same_draw(drawn[2], reference.generate("green dog", 8, "planned"))
    assert api.calls.count("cudaGraphLaunch") == 2 * steps
    assert trt.enqueued == enqueued + 2 * 3  # text, prompt and decoder are not captured
    assert len(api.blocks) == blocks
    assert trt.bound == bound


def test_weights_are_uploaded_once_and_ranges_of_rows_lie_inside_them(engine_bundle, machine):
    pipeline = on_engines(engine_bundle)
    weights = pipeline.backend._weights
    ranges = [name for name in weights.addresses if "[" in name]
    assert ranges
    assert all(address % 256 == 0 for address in weights.addresses.values())
    assert machine.api.calls.count("cudaMalloc") == 1
    pipeline.prepare("dense")
    contexts = [loaded.context for loaded in pipeline.backend._loaded.values()]
    used = [name for context in contexts for name in context.addresses]
    assert len(set(used)) < len(used)  # several contexts share tensors
    for context in contexts:
        assert all(weights.addresses[name] == address for name, address in context.addresses.items())


def test_all_contexts_share_one_arena_of_the_largest_size(engine_bundle, machine):
    pipeline = on_engines(engine_bundle)
    pipeline.prepare("dense")
    contexts = [loaded.context for loaded in pipeline.backend._loaded.values()]
    assert len(contexts) > 6
    assert len({context.scratch for context in contexts}) == 1
    assert pipeline.backend._scratch[1] == max(engine.device_memory_size_v2 for engine in machine.trt.engines)
    assert pipeline.backend._scratch[0] in machine.api.blocks


def test_an_arena_that_grows_captures_again(engine_bundle, machine):
    pipeline = on_engines(engine_bundle)
    dense, planned = pipeline.steps("dense")[0].graph, pipeline.steps("planned")[5].graph
    first = run_alone(pipeline, dense)
    arena = pipeline.backend._scratch
    assert np.array_equal(run_alone(pipeline, dense), first)
    assert machine.api.calls.count("cudaGraphLaunch") == 1
    run_alone(pipeline, planned)  # a larger engine
    assert pipeline.backend._scratch[1] > arena[1]
    assert arena[0] not in machine.api.blocks or pipeline.backend._scratch[0] == arena[0]
    assert np.array_equal(run_alone(pipeline, dense), first)
    assert machine.api.calls.count("cudaGraphLaunch") == 1
    assert np.array_equal(run_alone(pipeline, dense), first)
    assert machine.api.calls.count("cudaGraphLaunch") == 2


def test_compiled_kernels_are_kept_on_disk(engine_bundle, machine, tmp_path):
    first = on_engines(engine_bundle)
    run_alone(first, first.manifest.prompt)
    path = tmp_path / "cache" / "toprovar" / "tensorrt-rtx" / "1.7.1.116-sm89.cache"
    assert path.read_bytes() == b"kernels"
    assert machine.trt.cache.given is None
    on_engines(engine_bundle).backend.prepare(first.manifest.prompt)
    assert machine.trt.cache.given == b"kernels"


def test_what_cannot_be_captured_is_enqueued_and_told(engine_bundle, machine, caplog):
    machine.trt.capturable = False
    pipeline = on_engines(engine_bundle)
    graph = pipeline.steps("dense")[0].graph
    assert np.array_equal(run_alone(pipeline, graph), run_alone(pipeline, graph))
    assert machine.trt.enqueued == 2
    assert "cudaGraphLaunch" not in machine.api.calls
    assert caplog.text.count("step_00.onnx runs without a captured graph") == 1


def test_layers_are_timed_where_that_was_asked_for(engine_bundle, machine):
    pipeline = on_engines(engine_bundle, profile=True)
    for _ in range(2):
        run_alone(pipeline, pipeline.steps("dense")[0].graph)
    assert pipeline.backend.layer_times() == {"step_00.onnx": {"the only layer": [0.5, 0.5]}}
    assert "cudaGraphLaunch" not in machine.api.calls


def test_an_address_that_tensorrt_does_not_take_is_an_error(engine_bundle, machine):
    pipeline = on_engines(engine_bundle)
    graph = pipeline.manifest.prompt
    loaded = pipeline.backend._load(graph)
    with pytest.raises(ToprovarError, match="would lie at a multiple of 64 bytes; TensorRT takes multiples of 256"):
        pipeline.backend._bind(loaded, "text_rows", 64)


def test_the_plugins_of_two_libraries_cannot_be_registered(engine_bundle, machine, tmp_path):
    on_engines(engine_bundle)
    machine.library.path = tmp_path / "other.so"
    assert "run one bundle a process" in refused(engine_bundle, EnvironmentFault, EXIT_ENVIRONMENT)


def test_the_names_that_are_used_are_those_of_the_real_module():
    trt = pytest.importorskip("tensorrt_rtx_bindings", reason="needs tensorrt-rtx-cu13-bindings")
    for kind, names in USED_NAMES.items():
        missing = [name for name in names if name not in ("engine", "trt") and not hasattr(getattr(trt, kind), name)]
        assert not missing, f"{kind} has no {missing}"
    assert issubclass(type(tensorrt_module.new_log(trt)), trt.ILogger)
    assert issubclass(type(tensorrt_module.new_profiler(trt)), trt.IProfiler)
    assert tensorrt_module.new_log(trt).last_error == ""
