"""Finding the operator library, and what is said when it is missing, foreign, stale or lacks a host."""

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from toprovar.plugins import library
from toprovar.plugins.errors import EnvironmentFault
from toprovar.plugins.functions import functions

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch, tmp_path):
    monkeypatch.delenv("TOPROVAR_PLUGINS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def refused(match, **needs):
    with pytest.raises(EnvironmentFault, match=match) as caught:
        library.require_library(**needs)
    assert caught.value.exit_code == 3
    assert "toprovar plugins build" in caught.value.hint
    return caught.value


def test_the_library_says_what_it_is(plugin_library):
    assert plugin_library.source_digest == library.source_digest()  # CMake's sum over the sources and Python's
    assert not plugin_library.is_stale
    assert plugin_library.hosts[:2] == ("ctypes", "onnxruntime")
    assert plugin_library.has_cuda == bool(plugin_library.cuda_architectures)
    assert plugin_library.has_tensorrt == (plugin_library.hosts[2:] == ("tensorrt",))
    assert set(plugin_library.operators) == set(functions())
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version
    assert plugin_library.version == version[1]


def test_the_variable_comes_first_then_the_cache(plugin_library, monkeypatch, tmp_path):
    assert library.find_library() is None
    cached = library.cache_path()
    assert cached.is_relative_to(tmp_path / "cache" / "toprovar" / "plugins" / library.source_digest())
    cached.parent.mkdir(parents=True)
    cached.write_bytes(plugin_library.path.read_bytes())
    assert library.find_library() == replace(plugin_library, path=cached)
    monkeypatch.setenv("TOPROVAR_PLUGINS", str(plugin_library.path))
    assert library.find_library() == plugin_library
    assert library.require_library() == plugin_library


def test_a_missing_library_says_how_to_build_it(monkeypatch, tmp_path):
    refused("the operator library is missing: no .*libtoprovar_plugins.so, and TOPROVAR_PLUGINS is not set")
    monkeypatch.setenv("TOPROVAR_PLUGINS", str(tmp_path / "nothing.so"))
    refused("TOPROVAR_PLUGINS names .*nothing.so, which is not a file")


def test_a_file_that_is_no_library_is_told(monkeypatch, tmp_path):
    text = tmp_path / "text.so"
    text.write_text("not a library")
    monkeypatch.setenv("TOPROVAR_PLUGINS", str(text))
    refused("text.so cannot be loaded: ")


@pytest.mark.parametrize("share", [0.1, 0.9, 0.999])
def test_a_library_that_is_cut_short_is_told_before_it_is_loaded(share, plugin_library, monkeypatch, tmp_path):
    raw = plugin_library.path.read_bytes()
    short = tmp_path / "short.so"
    short.write_bytes(raw[: int(len(raw) * share)])
    monkeypatch.setenv("TOPROVAR_PLUGINS", str(short))
    refused(f"short.so is cut short: {int(len(raw) * share)} bytes, {len(raw)} expected")


def test_a_foreign_library_is_told(monkeypatch):
    import _ctypes

    monkeypatch.setenv("TOPROVAR_PLUGINS", _ctypes.__file__)
    refused("is a library without toprovarVersion; it is not toprovar's")


def test_a_stale_library_is_told(with_plugins, monkeypatch):
    monkeypatch.setenv("TOPROVAR_PLUGINS", str(with_plugins.path))
    monkeypatch.setattr(library, "source_digest", lambda: "0" * 64)
    found = library.find_library()
    assert found is not None
    assert found.is_stale
    fault = refused(f"was built from other sources: digest {found.source_digest[:12]}, expected 000000000000")
    assert fault.hint.startswith("build it again")


def test_a_library_without_what_is_needed_is_told(plugin_library, monkeypatch):
    monkeypatch.setenv("TOPROVAR_PLUGINS", str(plugin_library.path))
    bare = replace(plugin_library, cuda_architectures=(), hosts=("ctypes", "onnxruntime"))
    monkeypatch.setattr(library, "read_library", lambda path: bare)
    refused("was built without CUDA", cuda=True)
    refused("was built without the TensorRT host", tensorrt=True)
    full = replace(bare, cuda_architectures=("80",), hosts=(*bare.hosts, "tensorrt"))
    monkeypatch.setattr(library, "read_library", lambda path: full)
    assert library.require_library(cuda=True, tensorrt=True) == full


def test_only_the_c_functions_and_the_hosts_are_visible(plugin_library):
    names = subprocess.run(
        ["nm", "-D", "--defined-only", plugin_library.path], capture_output=True, text=True, check=True
    )
    visible = {line.split()[-1] for line in names.stdout.splitlines()}
    hosts = {"RegisterCustomOps", *(("getCreators", "setLoggerFinder") if plugin_library.has_tensorrt else ())}
    assert hosts <= visible
    assert all(name in hosts or name.startswith("toprovar") for name in visible), visible
