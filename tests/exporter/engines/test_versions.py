"""Names of compute capabilities, and what a machine lacks."""

import ctypes
import sys
from types import SimpleNamespace

import pytest

from toprovar.exporter.engines import versions
from toprovar.runtime.errors import EXIT_ENVIRONMENT, EnvironmentFault, ToprovarError


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def test_capabilities_are_written_in_several_ways_and_sorted():
    assert versions.capabilities_from("120,8.9,sm80,SM_86") == ("8.0", "8.6", "8.9", "12.0")
    assert versions.capabilities_from("89,89") == ("8.9",)


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("90", "TensorRT-RTX has no Hopper target", "choose from 80,86,89,120,121"),
        ("89,sm_90", "--compute-capability sm_90: TensorRT-RTX has no Hopper", "choose from"),
        ("100", "data-centre Blackwell", "choose from"),
        ("75", "no fp32 or bf16 matrix product", "choose from"),
        ("88", "'88' is unknown", "did you mean 89?"),
        ("sm_112", "'sm_112' is unknown", "did you mean 12"),
        ("ada", "'ada' is unknown", "did you mean"),
        ("", "'' is unknown", "did you mean"),
    ],
)
def test_other_capabilities_are_refused_with_the_reason(text, message, hint):
    with pytest.raises(ToprovarError) as caught:
        versions.capabilities_from(text)
    assert message in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.skipif(has_driver(), reason="needs a machine without an NVIDIA driver")
def test_tensorrt_without_a_gpu_is_an_environment_fault():
    with pytest.raises(EnvironmentFault) as caught:
        versions.gpu_at_hand()
    assert "builds for the GPU at hand; this machine has no NVIDIA driver" in caught.value.message
    assert "--target tensorrt-rtx" in caught.value.hint
    assert caught.value.exit_code == EXIT_ENVIRONMENT


@pytest.mark.parametrize(("version", "is_enough"), [("1.6.9", False), ("1.7.0", True), ("1.10.1", True), ("2.0", True)])
def test_a_builder_that_is_too_old_is_an_environment_fault(monkeypatch, version, is_enough):
    monkeypatch.setattr(versions, "installed_module", lambda target: "made_up_builder")
    monkeypatch.setitem(sys.modules, "made_up_builder", SimpleNamespace(__version__=version))
    if is_enough:
        assert versions.import_module("tensorrt-rtx").__version__ == version
        return
    with pytest.raises(EnvironmentFault, match=r"TensorRT-RTX 1\.6\.9 is too old; expected 1\.7"):
        versions.import_module("tensorrt-rtx")


def test_a_builder_that_does_not_load_says_why(monkeypatch):
    monkeypatch.setattr(versions, "installed_module", lambda target: "no_such_module_at_all")
    with pytest.raises(EnvironmentFault, match="TensorRT cannot be loaded: No module named"):
        versions.import_module("tensorrt")


def test_the_strongly_typed_flag_is_set_where_there_is_one():
    flags = SimpleNamespace(NetworkDefinitionCreationFlag=SimpleNamespace(STRONGLY_TYPED=1))
    assert versions.network_flags(flags) == 2
    assert versions.network_flags(SimpleNamespace(NetworkDefinitionCreationFlag=SimpleNamespace())) == 0
