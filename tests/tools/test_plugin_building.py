"""`toprovar plugins` as a user meets it: what a build makes, what it refuses, and what an interrupted one leaves."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from command_line import call, done, refusal

from toprovar.plugins import library
from toprovar.runtime.errors import EnvironmentFault
from toprovar.tools import plugin_building
from toprovar.tools.plugin_building import BuildRequest, run_build

FACTS = {"path", "version", "source_digest", "stale", "hosts", "cuda_architectures", "operators"}


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch, tmp_path):
    monkeypatch.delenv("TOPROVAR_PLUGINS", raising=False)
    monkeypatch.delenv("CUDACXX", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def compiled(plugin_library, monkeypatch):
    """A build whose compiler already ran: it copies the finished library."""

    def copy(request, folder, cuda, nvcc, include, quiet):
        assert not cuda
        shutil.copyfile(plugin_library.path, folder / library.FILE_NAME)

    monkeypatch.setattr(plugin_building, "_compile", copy)


def test_a_build_goes_where_the_library_is_looked_for(compiled, plugin_library):
    result = call("plugins", "check")
    assert result.exit_code == 3
    assert "the operator library is missing" in result.stderr
    assert "hint: build it:  toprovar plugins build" in result.stderr
    result = done("plugins", "build", "--no-cuda")
    assert result.stdout == ""
    assert f"wrote {library.cache_path()} ({plugin_building.described(plugin_library)}) in" in result.stderr
    facts = json.loads(done("plugins", "check", "--json").stdout)
    assert set(facts) == FACTS
    assert facts["path"] == str(library.cache_path())
    assert not facts["stale"]
    assert [path.name for path in library.cache_path().parent.iterdir()] == [library.FILE_NAME]
    assert str(library.cache_path()) in json.loads(done("env", "--json").stdout)["plugins"]


def test_a_build_elsewhere_says_how_to_use_it(compiled, tmp_path):
    target = tmp_path / "my plugins.so"
    result = done("plugins", "build", "--no-cuda", "--out", target)
    assert f"use it:  export TOPROVAR_PLUGINS='{target}'" in result.stderr
    facts = json.loads(done("plugins", "build", "--no-cuda", "--out", target, "--json").stdout)
    assert set(facts) == {*FACTS, "seconds"}
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == [target.name]


def test_a_library_is_described_in_one_phrase(plugin_library):
    bare = replace(plugin_library, cuda_architectures=(), hosts=("ctypes", "onnxruntime"))
    assert plugin_building.described(bare) == "10 operators, CPU only, hosts ctypes onnxruntime"
    full = replace(bare, cuda_architectures=("80", "90a"), hosts=(*bare.hosts, "tensorrt"), source_digest="0" * 64)
    told = "10 operators, CUDA 80 90a, hosts ctypes onnxruntime tensorrt, built from other sources"
    assert plugin_building.described(full) == told


def test_env_says_that_there_is_no_library(monkeypatch):
    assert json.loads(done("env", "--json").stdout)["plugins"] == "no: toprovar plugins build"
    monkeypatch.setenv("TOPROVAR_PLUGINS", "/nowhere/x.so")
    assert "no: TOPROVAR_PLUGINS names /nowhere/x.so" in json.loads(done("env", "--json").stdout)["plugins"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--no-cuda", "--architectures", "80"], "--architectures is for CUDA"),
        (["--no-cuda", "--tensorrt-headers", "pip"], "the TensorRT host runs CUDA kernels"),
        (["--cuda", "--architectures", "ampere"], "--architectures ampere: expected numbers such as 80 or 90a"),
        (["--cuda", "--tensorrt-include", "/nowhere"], "there is no /nowhere/NvInferRuntime.h"),
        (["--cuda", "--tensorrt-include", "/x", "--tensorrt-headers", "pip"], "are given together"),
        (["--cuda", "--architectures", ""], "--architectures : expected numbers such as 80 or 90a"),
        (["--out", "."], " is a folder; a file is expected"),
        (["--no-cuda", "--out", f"{__file__}/x.so"], "test_plugin_building.py is a file"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message, monkeypatch):
    monkeypatch.setenv("CUDACXX", "/somewhere/nvcc")
    assert message in refusal("plugins", "build", *options)


def test_a_device_or_pipe_is_not_replaced_by_the_library(compiled, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to(pipe)
    for place in (pipe, tmp_path / "link"):
        told = f"{place} cannot be written: it is a device or pipe; a file is expected"
        assert told in refusal("plugins", "build", "--no-cuda", "--out", place)
    assert pipe.is_fifo()
    assert (tmp_path / "link").is_symlink()


def test_missing_tools_are_told(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name, **_: None)
    monkeypatch.setattr(plugin_building.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentFault, match="cmake is not on the path") as caught:
        run_build(BuildRequest())
    assert "pip install cmake ninja" in caught.value.hint
    with pytest.raises(EnvironmentFault, match="--cuda: nvcc is not on the path") as caught:
        run_build(BuildRequest(cuda=True))
    assert "pip install 'cuda-toolkit[nvcc,cccl]" in caught.value.hint


def test_what_a_killed_build_left_is_removed_by_the_next(compiled, tmp_path):
    target = tmp_path / "x.so"
    (tmp_path / ".build-x.so-dead").mkdir()
    (tmp_path / ".build-other.so-alive").mkdir()
    run_build(BuildRequest(cuda=False, out=target), quiet=True)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "cache") == [".build-other.so-alive", "x.so"]


def test_two_builds_of_one_file_are_refused(compiled, tmp_path):
    target = tmp_path / "x.so"
    with (
        plugin_building._only_build(target),
        pytest.raises(EnvironmentFault, match=r"another build of .*x\.so is running"),
    ):
        run_build(BuildRequest(cuda=False, out=target))
    assert not target.exists()


@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")
def test_a_compiler_that_fails_is_quoted_and_leaves_the_old_library(monkeypatch, tmp_path):
    target = tmp_path / "x.so"
    target.write_bytes(b"older")
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(EnvironmentFault, match=r"cmake -S failed with exit code 1:\n.*\n") as caught:
        run_build(BuildRequest(cuda=False, out=target), quiet=True)
    assert "C++17 compiler" in caught.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["x.so"]
    assert target.read_bytes() == b"older"


@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")
@pytest.mark.parametrize("numbers", [(signal.SIGINT, signal.SIGTERM), (signal.SIGTERM, signal.SIGINT)])
def test_an_interrupted_build_leaves_nothing(numbers, tmp_path):
    target = tmp_path / "out" / "x.so"
    command = [sys.executable, "-m", "toprovar.tools.cli", "plugins", "build", "--no-cuda", "--out", str(target)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=dict(os.environ)) as process:
        deadline = time.monotonic() + 60
        while not list(target.parent.glob(".build-*/CMakeCache.txt")):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.02)
        for number in numbers:  # a second signal does not disturb the cleaning
            process.send_signal(number)
            time.sleep(0.05)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in err
    assert list(target.parent.iterdir()) == []
