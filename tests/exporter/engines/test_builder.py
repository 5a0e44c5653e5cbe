"""Real builds through TensorRT-RTX, without a GPU: plans without weights, the same bytes each time, clear refusals.

No plan is executed: that needs a GPU.
"""

import resource
import shutil
import subprocess
import sys
import zlib
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import onnx
import pytest
from engine_helpers import needs_rtx
from onnx import helper
from plans import full_size_plan

from toprovar.exporter.bundle_writer import BundleGraphs, export_graphs
from toprovar.exporter.engines import builder, versions
from toprovar.exporter.engines.builder import Job, _Phases, plugin_nodes
from toprovar.exporter.engines.child import build_environment, run_builder
from toprovar.exporter.engines.engine_set import EngineRequest, build_engines, plugin_library
from toprovar.exporter.engines.trtexec_files import raw_weight
from toprovar.exporter.engines.weights_as_inputs import MIN_INPUT_BYTES
from toprovar.exporter.model import published_without_weights
from toprovar.exporter.planned.step import StepOptions
from toprovar.plugins.library import find_library
from toprovar.runtime.bundle import open_bundle
from toprovar.runtime.errors import EXIT_ENVIRONMENT, ToprovarError

RTX = "tensorrt-rtx"
# of one plan of the demo, packed: kernel sources inside are text, weights would not pack. Measured: 1.2 MB, beside
# 14 MB of weights that a step takes
PACKED_BYTES = 2_000_000
CAPABILITIES = ("8.0", "8.6", "8.9", "12.0")


def build(job):
    with build_environment(RTX) as environment:
        return run_builder(job, environment)


def job_of(folder, name, tmp_path, **changes):
    job = Job(RTX, str(folder / name), str(tmp_path / "made.plan"), ("8.9",), allow_function_body=True)
    return replace(job, **changes)


@pytest.fixture(scope="module")
def built(demo_bundle, tmp_path_factory):
    """The demo with engines of its last scale, dense and planned, under a name that shells and C strings dislike."""
    needs_rtx()
    folder = shutil.copytree(demo_bundle, tmp_path_factory.mktemp("rtx") / "bündel mit räumen 图")
    summaries = build_engines(folder, EngineRequest((RTX,), CAPABILITIES, scale=9, allow_function_body=True))
    return SimpleNamespace(folder=folder, summary=summaries[0], bundle=open_bundle(folder))


def test_dense_and_planned_steps_of_the_demo_build(built):
    engines = built.bundle.manifest.engines[RTX]
    assert (built.summary.built, built.summary.reused) == (2, 0)
    assert [engine.graph for engine in engines.engines] == ["step_09.onnx", "step_09_planned.onnx"]
    assert engines.compute_capabilities == CAPABILITIES
    for engine in engines.engines:
        model = onnx.load(built.folder / engine.graph, load_external_data=False)
        wanted = Counter(plugin_nodes(model).values())
        assert wanted
        assert Counter(engine.plugin_layers) + Counter(engine.inlined) == wanted


def test_plans_hold_no_large_weight(built):
    manifest = built.bundle.manifest
    for engine in manifest.engines[RTX].engines:
        plan = (built.folder / engine.file).read_bytes()
        assert len(engine.weights) > 50
        for name in engine.weights:
            raw = raw_weight(built.bundle, name)
            assert len(raw) >= MIN_INPUT_BYTES
            middle = raw[len(raw) // 2 :][:64]
            assert middle not in plan, name
        assert len(zlib.compress(plan)) < PACKED_BYTES
    weights = manifest.files[manifest.weights_file].size_bytes
    graphs = sum(facts.size_bytes for name, facts in manifest.files.items() if name.endswith(".onnx"))
    others = built.bundle.size_bytes - weights - graphs - built.summary.plan_bytes
    assert graphs + others < 0.05 * weights


def test_a_second_build_gives_the_same_bytes(built, tmp_path):
    engine = built.bundle.manifest.engines[RTX].engine_of("step_09_planned.onnx")
    plugins = plugin_library(allow_function_body=True)
    library = str(plugins.path) if plugins else None
    build(job_of(built.folder, engine.graph, tmp_path, capabilities=CAPABILITIES, plugin_library=library))
    assert (tmp_path / "made.plan").read_bytes() == (built.folder / engine.file).read_bytes()


def test_without_a_library_plugins_are_a_fault_unless_bodies_are_allowed(built, tmp_path):
    with pytest.raises(ToprovarError) as caught:
        build(job_of(built.folder, "step_09.onnx", tmp_path, allow_function_body=False))
    assert (
        "step_09.onnx wants plugins (8 CachedAttention, 8 MaskedAttention); there is no operator library"
        in caught.value.message
    )
    assert "--allow-function-body" in caught.value.hint
    assert caught.value.exit_code == EXIT_ENVIRONMENT
    assert not (tmp_path / "made.plan").exists()


@pytest.fixture(scope="module")
def library():
    needs_rtx()
    found = find_library()
    if found is None or found.is_stale or not found.has_tensorrt:
        pytest.skip("needs the operator library with its TensorRT host: toprovar plugins build --tensorrt-include DIR")
    return str(found.path)


def test_every_wanted_plugin_is_taken(demo_bundle, tmp_path, library):
    job = job_of(demo_bundle, "step_09_planned.onnx", tmp_path, plugin_library=library, allow_function_body=False)
    built = build(job)
    model = onnx.load(demo_bundle / "step_09_planned.onnx", load_external_data=False)
    assert built.plugin_layers == dict(Counter(plugin_nodes(model).values()))
    assert {"CachedAttention", "EntropyAttention", "TokenGate"} <= built.plugin_layers.keys()
    assert built.inlined == {}


def test_a_library_that_lacks_a_plugin_is_an_environment_fault(tmp_path, library):
    save_graph(tmp_path / "g.onnx", "NoSuchOperator", domain="toprovar", plugin_namespace="toprovar")
    with pytest.raises(ToprovarError) as caught:
        build(job_of(tmp_path, "g.onnx", tmp_path, plugin_library=library, allow_function_body=False))
    assert "has no plugin toprovar::NoSuchOperator, version 1" in caught.value.message
    assert caught.value.exit_code == EXIT_ENVIRONMENT


@pytest.mark.slow
def test_steps_of_a_full_size_model_build_in_little_memory(tmp_path):
    """Infinity-2B, 32 layers of width 2048, last scale of 1M pixels: the weights file has holes alone."""
    needs_rtx()
    model = published_without_weights("infinity-2b")
    graphs = BundleGraphs(model, full_size_plan(model), StepOptions(compute="bf16"))
    export_graphs(graphs, tmp_path / "graphs")
    with open(tmp_path / "graphs" / "weights.safetensors", "wb") as file:
        file.write(graphs.layout.header)
        file.truncate(graphs.layout.size_bytes)
    for name in ("step_12.onnx", "step_12_planned.onnx"):
        built = build(job_of(tmp_path / "graphs", name, tmp_path))
        assert len(built.weights) > 400
        assert (tmp_path / "made.plan").stat().st_size < 40e6  # measured 15 MB; the weights are 4.8 GB
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 1.5 * 2**20  # KiB: 1.5 GiB


def test_a_fault_of_the_builder_program_is_one_line(tmp_path):
    needs_rtx()
    with pytest.raises(ToprovarError) as caught:
        build(job_of(tmp_path, "absent.onnx", tmp_path))
    assert "ended with exit code 1 at absent.onnx: FileNotFoundError: [Errno 2] No such file" in caught.value.message
    assert "|" not in caught.value.message


def save_graph(path, kind, **attributes):
    a, b = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2]) for name in "ab")
    node = helper.make_node(kind, ["a"], ["b"], name="the_node", **attributes)
    graph = helper.make_graph([node], "g", [a], [b])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("toprovar", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)


def test_a_graph_that_is_refused_names_the_node(tmp_path):
    needs_rtx()
    save_graph(tmp_path / "odd.onnx", "NoSuchOperator", domain="toprovar")
    with pytest.raises(ToprovarError) as caught:
        build(job_of(tmp_path, "odd.onnx", tmp_path))
    assert f"{tmp_path / 'odd.onnx'} is refused by TensorRT-RTX" in caught.value.message
    assert "the_node (NoSuchOperator)" in caught.value.message


@pytest.mark.filterwarnings("ignore:.*Timing cache operations are no-ops:DeprecationWarning")
def test_the_way_of_full_tensorrt_keeps_a_timing_cache(tmp_path, monkeypatch):
    """The same path with the other target's settings, on the builder that is here: it shares TensorRT's interface."""
    needs_rtx()
    import tensorrt_rtx_bindings

    monkeypatch.setattr(versions, "import_module", lambda target: tensorrt_rtx_bindings)
    save_graph(tmp_path / "small.onnx", "Relu")
    told = []
    reports = SimpleNamespace(fraction=told.append)
    cache = tmp_path / "timing.cache"
    job = job_of(tmp_path, "small.onnx", tmp_path, target="tensorrt", capabilities=(), timing_cache=str(cache))
    for _ in range(2):  # without a cache, and with one
        builder.build(job, reports)
        assert (tmp_path / "made.plan").stat().st_size > 1000
        assert cache.stat().st_size > 0
    assert told[-1] == max(told) <= 1


def test_a_full_disk_is_one_message(tmp_path):
    needs_rtx()
    save_graph(tmp_path / "small.onnx", "Relu")
    code = (
        "import sys; from toprovar.exporter.engines.builder import Job\n"
        "from toprovar.exporter.engines.child import build_environment, run_builder\n"
        "job = Job('tensorrt-rtx', sys.argv[1] + '/small.onnx', sys.argv[1] + '/made.plan', ('8.9',))\n"
        "with build_environment('tensorrt-rtx') as environment: run_builder(job, environment)"
    )

    def no_room():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))

    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, preexec_fn=no_room, check=False
    )
    assert "made.plan cannot be written: File too large" in done.stderr
    assert "free some space" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["small.onnx"]


def test_only_nodes_with_a_namespace_want_a_plugin(tmp_path):
    for namespace, wanted in (({}, {}), ({"plugin_namespace": ""}, {}), ({"plugin_namespace": "toprovar"}, 1)):
        save_graph(tmp_path / "g.onnx", "TokenGate", domain="toprovar", **namespace)
        found = plugin_nodes(onnx.load(tmp_path / "g.onnx"))
        assert found == ({"the_node": "TokenGate"} if wanted else {})


def test_nested_phases_rise_to_one():
    phases = _Phases()
    phases.start("all", None, 2)
    phases.start("inner", "all", 4)
    seen = []
    for index in range(4):
        phases.step("inner", index)
        seen.append(phases.fraction)
    phases.finish("inner")
    phases.step("all", 0)
    seen.append(phases.fraction)
    phases.step("all", 1)
    phases.step("unknown", 1)
    assert [*seen, phases.fraction] == [0.125, 0.25, 0.375, 0.5, 0.5, 1.0]
