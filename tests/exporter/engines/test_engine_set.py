"""Engine sets with a stand-in for the builder: complete or absent, resumed, locked, reused where nothing changed."""

import os
import shutil
import subprocess
import sys
import time

import pytest
from command_line import listing
from conftest import GUIDANCE, pruning_plan
from engine_helpers import use_fake_builder

from toprovar.exporter.bundle_writer import export_bundle
from toprovar.exporter.engines.engine_set import EngineRequest, build_engines, engine_graphs
from toprovar.exporter.output_folder import alone_with, check_out
from toprovar.exporter.planned.step import StepOptions
from toprovar.runtime.bundle import open_bundle
from toprovar.runtime.errors import EXIT_ENVIRONMENT, EnvironmentFault, ToprovarError

GRAPHS = 11  # text encoder, prompt, 6 dense and 2 planned steps, decoder
WORK = "engines/tensorrt-rtx/.building"


def request(**changes):
    return EngineRequest(**{"targets": ("tensorrt-rtx",), "allow_function_body": True, **changes})


@pytest.fixture
def bundle(tiny_bundle, tmp_path, monkeypatch):
    use_fake_builder(monkeypatch)
    return shutil.copytree(tiny_bundle, tmp_path / "bündle mit räumen 图")


def engines_of(folder):
    return open_bundle(folder).manifest.engines["tensorrt-rtx"].engines


def counts(summaries):
    return [(summary.built, summary.reused) for summary in summaries]


def test_every_graph_gets_an_engine_and_the_bundle_opens(bundle):
    told = []
    assert counts(build_engines(bundle, request(), lambda done, total: told.append((done, total)))) == [(GRAPHS, 0)]
    manifest = open_bundle(bundle).manifest
    engines = manifest.engines["tensorrt-rtx"]
    assert [engine.graph for engine in engines.engines] == list(manifest.graphs)
    assert len(manifest.graphs) == GRAPHS
    assert engines.builder_version == "1.7.1.116"
    assert engines.compute_capabilities == ("8.0", "8.6", "8.9", "12.0")
    assert {name for name in manifest.files if name.startswith("engines/")} == {e.file for e in engines.engines}
    assert told[0] == (0, GRAPHS)
    assert told[-1] == (GRAPHS, GRAPHS)
    assert (0.5, GRAPHS) in told
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert not (bundle / WORK).exists()
    assert len({engine.key for engine in engines.engines}) == GRAPHS


def test_two_builds_give_the_same_bytes(bundle, tiny_bundle, tmp_path):
    other = shutil.copytree(tiny_bundle, tmp_path / "other")
    for folder in (bundle, other):
        build_engines(folder, request(scale=5))
    assert listing(bundle) == listing(other)
    for name in listing(bundle):
        if (bundle / name).is_file():
            assert (bundle / name).read_bytes() == (other / name).read_bytes(), name


def test_what_did_not_change_is_not_built_again(bundle):
    build_engines(bundle, request(scale=5))
    before = (bundle / "manifest.json").read_bytes()
    assert counts(build_engines(bundle, request(scale=5))) == [(0, 2)]
    assert (bundle / "manifest.json").read_bytes() == before
    assert counts(build_engines(bundle, request(scale=5, capabilities=("8.9",)))) == [(2, 0)]


def test_a_crash_keeps_what_is_finished_and_the_next_build_goes_on(bundle, monkeypatch):
    build_engines(bundle, request())
    before = (bundle / "manifest.json").read_bytes()
    use_fake_builder(monkeypatch, "abort step_02.onnx")
    with pytest.raises(EnvironmentFault, match="SIGABRT at step_02"):
        build_engines(bundle, request(capabilities=("8.9",)))
    assert (bundle / "manifest.json").read_bytes() == before
    open_bundle(bundle)  # with the older engines
    use_fake_builder(monkeypatch)
    assert counts(build_engines(bundle, request(capabilities=("8.9",)))) == [(GRAPHS - 4, 4)]
    assert open_bundle(bundle).manifest.engines["tensorrt-rtx"].compute_capabilities == ("8.9",)


def test_an_interrupt_in_the_middle_keeps_what_is_finished(bundle):
    def interrupt(done, total):
        if done > 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_engines(bundle, request(), interrupt)
    assert open_bundle(bundle).manifest.engines == {}
    assert counts(build_engines(bundle, request())) == [(GRAPHS - 3, 3)]


def test_plans_built_at_once_give_the_same_bundle(bundle, tiny_bundle, tmp_path):
    other = shutil.copytree(tiny_bundle, tmp_path / "other")
    told = []
    assert counts(build_engines(bundle, request(jobs=4), lambda done, total: told.append(done))) == [(GRAPHS, 0)]
    build_engines(other, request())
    assert (bundle / "manifest.json").read_bytes() == (other / "manifest.json").read_bytes()
    open_bundle(bundle)
    assert told == sorted(told)
    assert told[-1] == GRAPHS


def test_a_crash_ends_those_that_are_built_beside_it(bundle, tmp_path, monkeypatch):
    """Three children wait for ever when the fourth aborts."""
    use_fake_builder(monkeypatch, "abort step_02.onnx hang")
    monkeypatch.setenv("FAKE_BUILDER_PID", str(tmp_path / "pid"))
    started = time.monotonic()
    with pytest.raises(EnvironmentFault):
        build_engines(bundle, request(jobs=GRAPHS))
    assert time.monotonic() - started < 60
    for path in tmp_path.glob("pid.*"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.suffix[1:]), 0)
    open_bundle(bundle)


def test_a_damaged_journal_or_plan_is_built_again(bundle, monkeypatch):
    use_fake_builder(monkeypatch, "abort step_02.onnx")
    for damage in ("finished.json", "prompt.plan"):
        with pytest.raises(EnvironmentFault):
            build_engines(bundle, request())
        (bundle / WORK / damage).write_bytes(b"{")
    use_fake_builder(monkeypatch)
    assert counts(build_engines(bundle, request())) == [(GRAPHS - 3, 3)]
    open_bundle(bundle)


def test_a_flipped_bit_is_caught_and_mended(bundle):
    build_engines(bundle, request(scale=5))
    path = bundle / engines_of(bundle)[1].file
    raw = path.read_bytes()
    path.write_bytes(bytes([raw[0] ^ 1]) + raw[1:])
    with pytest.raises(ToprovarError) as caught:
        open_bundle(bundle)
    assert f"{path} was changed" in caught.value.message
    assert "toprovar-export rebuild" in caught.value.hint
    assert "--target tensorrt-rtx" in caught.value.hint
    assert counts(build_engines(bundle, request(scale=5))) == [(1, 1)]
    assert path.read_bytes() == raw
    open_bundle(bundle)


def test_a_build_of_one_scale_never_passes_on_a_broken_engine_of_another(bundle):
    build_engines(bundle, request(scale=4))
    path = bundle / engines_of(bundle)[0].file
    build_engines(bundle, request(scale=5))
    before = (bundle / "manifest.json").read_bytes()
    path.unlink()
    with pytest.raises(
        ToprovarError, match=f"{path.name} of .*, which --scale leaves as it is, is missing or"
    ) as caught:
        build_engines(bundle, request(scale=5))
    assert "leave --scale out" in caught.value.hint
    assert (bundle / "manifest.json").read_bytes() == before


def test_two_builds_at_once_are_one_clear_message(bundle):
    with alone_with(bundle), pytest.raises(ToprovarError, match="are being built by another process"):
        build_engines(bundle, request())
    with alone_with(bundle), pytest.raises(ToprovarError, match="are being built by another process"):
        check_out(bundle)
    build_engines(bundle, request(scale=5))


def test_the_lock_dies_with_its_process(bundle):
    code = (
        "import sys, os, pathlib; from toprovar.exporter.output_folder import alone_with\n"
        "with alone_with(pathlib.Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(bundle)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(ToprovarError, match="are being built by another process"):
        build_engines(bundle, request())
    holder.kill()
    holder.communicate()
    build_engines(bundle, request(scale=5))


def test_one_scale_alone_and_then_the_rest(bundle):
    assert counts(build_engines(bundle, request(scale=5))) == [(2, 0)]
    assert [engine.graph for engine in engines_of(bundle)] == ["step_05.onnx", "step_05_planned.onnx"]
    assert counts(build_engines(bundle, request(scale=4))) == [(2, 0)]
    assert len(engines_of(bundle)) == 4
    assert counts(build_engines(bundle, request())) == [(GRAPHS - 4, 4)]


def test_a_scale_built_otherwise_than_the_rest_is_refused(bundle):
    build_engines(bundle, request(scale=5))
    with pytest.raises(ToprovarError) as caught:
        build_engines(bundle, request(scale=2, capabilities=("12.0",)))
    assert "built by 1.7.1.116 for 8.0, 8.6, 8.9, 12.0" in caught.value.message
    assert "leave --scale out" in caught.value.hint


def test_a_scale_that_is_not_there_names_those_that_are(bundle):
    with pytest.raises(ToprovarError, match="--scale 6: the bundle has steps of scales 0 to 5"):
        engine_graphs(open_bundle(bundle).manifest, 6)


def test_an_export_over_a_bundle_takes_the_engines_that_still_fit(tiny, bundle):
    build_engines(bundle, request())
    for text_tokens, fitting in ((12, GRAPHS), (11, 1)):  # prompts of another length reach all but the decoder
        options = StepOptions(text_tokens=text_tokens)
        export_bundle(tiny, bundle, GUIDANCE, options, pruning_plan(tiny), keep_engines=True)
        assert open_bundle(bundle).manifest.engines == {}
        assert counts(build_engines(bundle, request())) == [(GRAPHS - fitting, fitting)]
    export_bundle(tiny, bundle, GUIDANCE, options, pruning_plan(tiny))
    assert not (bundle / "engines").exists()


def test_a_foreign_file_among_engines_keeps_a_bundle_from_being_replaced(bundle):
    build_engines(bundle, request(scale=5))
    (bundle / "engines" / "tensorrt-rtx" / "notes.txt").write_text("mine")
    with pytest.raises(ToprovarError, match=r"holds engines/tensorrt-rtx/notes\.txt, which is no part"):
        check_out(bundle)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs POSIX permissions")
def test_a_bundle_that_cannot_be_written_is_one_message(bundle, monkeypatch):
    if os.geteuid() == 0:  # may write everywhere: a file where the folder of engines should be
        (bundle / "engines").write_text("")
        with pytest.raises((ToprovarError, OSError), match="engines"):
            build_engines(bundle, request())
        return
    bundle.chmod(0o555)
    with pytest.raises(ToprovarError, match="cannot be written"):
        build_engines(bundle, request())
    bundle.chmod(0o755)


def test_a_library_without_the_builder_is_an_environment_fault(bundle, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr("toprovar.exporter.engines.versions.MODULES", {"tensorrt-rtx": ("no_such_module",)})
    with pytest.raises(EnvironmentFault) as caught:
        build_engines(bundle, request())
    assert caught.value.message == "--target tensorrt-rtx needs TensorRT-RTX, which is not installed"
    assert caught.value.exit_code == EXIT_ENVIRONMENT
