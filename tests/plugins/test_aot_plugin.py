"""The single attention kernel: right on the processor, PTX that an ahead-of-time plugin can hold, valid registration.

Neither a GPU nor TensorRT runs here: the kernel's source runs with threads for threads, and the registration is held
against a stand-in, and against TensorRT's own Python sources where they are installed.
"""

import ctypes
import importlib.util
import inspect
import re
import shutil
import subprocess
import sys
import types
import typing
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest

from toprovar.plugins.attention import aot_plugin
from toprovar.plugins.attention.aot_plugin import KERNEL, QUERIES, THREADS, attention_ptx, register_attention
from toprovar.plugins.errors import EnvironmentFault, ToprovarError

# fp16 inputs of size 1 and fp32 sums: half of the last bit of outputs up to 4, and the order of sums
TOLERANCE = {"o": 4e-3, "entropy": 2e-5}
SHAPES = [(1, 0, 1, 1), (17, 81, 2, 3), (33, 1, 1, 2), (40, 57, 2, 2)]  # L, S, R, H
MAX_SHARED_BYTES = 48 * 1024

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc of a CUDA toolkit")


@pytest.fixture(scope="module")
def on_host(tmp_path_factory):
    """{(head width, with entropy): the kernel's source as a function of the processor}; scale 0.3."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++ 12 or later")
    includes = [Path(__file__).parent / "half_on_host", Path(aot_plugin.__file__).parent]
    folder = tmp_path_factory.mktemp("host")
    found = {}
    for width, with_entropy in ((16, True), (64, False)):
        library = folder / f"kernel_{width}_{with_entropy}.so"
        command = [compiler, "-std=c++20", "-O2", "-w", "-shared", "-fPIC", "-pthread", "-o", str(library)]
        command += [f"-I{place}" for place in includes] + [f"-DHEAD_WIDTH={width}", "-DSCALE=0.3f"]
        command += ["-DWITH_ENTROPY"] if with_entropy else []
        source = str(Path(__file__).with_name("attention_single_host.cpp"))
        subprocess.run([*command, source], check=True)
        found[width, with_entropy] = ctypes.CDLL(str(library)).run
    return found


def expected(q, k_new, v_new, k_past, v_past, scale):
    """float64. Returns: o [L, R, H, D], entropy [L, R]."""
    q, k_new, v_new, k_past, v_past = (x.astype(np.float64) for x in (q, k_new, v_new, k_past, v_past))
    k, v = np.concatenate([k_past, k_new]), np.concatenate([v_past, v_new])
    s = scale * np.einsum("lrhd,krhd->lrhk", q, k)
    s -= s.max(-1, keepdims=True)
    p = np.exp(s) / np.exp(s).sum(-1, keepdims=True)
    entropy = np.log(np.exp(s).sum(-1)) - (p * s).sum(-1)
    return np.einsum("lrhk,krhd->lrhd", p, v), entropy.mean(-1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("width", "with_entropy"), [(16, True), (64, False)])
def test_the_kernel_gives_attention_and_entropy(on_host, shape, width, with_entropy):
    L, S, R, H = shape
    random = np.random.default_rng(7)
    q, k_new, v_new, k_past, v_past = (
        random.standard_normal((tokens, R, H, width)).astype(np.float16) for tokens in (L, L, L, S, S)
    )
    o = np.full((L, R, H, width), np.nan, np.float16)
    entropy = np.full((L, R), np.nan, np.float32)
    pointers = [ctypes.c_void_p(x.ctypes.data) for x in (q, k_new, v_new, k_past, v_past)]
    grid = (-(-L // QUERIES), R, 1 if with_entropy else H)
    on_host[width, with_entropy](
        *pointers, L, S, R, H, ctypes.c_void_p(o.ctypes.data), ctypes.c_void_p(entropy.ctypes.data), *grid, THREADS
    )
    true_o, true_entropy = expected(q, k_new, v_new, k_past, v_past, np.float32(0.3))
    np.testing.assert_allclose(o, true_o, atol=TOLERANCE["o"], rtol=0, equal_nan=False)
    if with_entropy:
        np.testing.assert_allclose(entropy, true_entropy, atol=TOLERANCE["entropy"], rtol=0, equal_nan=False)
    else:
        assert np.isnan(entropy).all()


@needs_nvcc
@pytest.mark.parametrize("with_entropy", [False, True])
def test_ptx_is_one_kernel_that_fits(with_entropy):
    ptx = attention_ptx(128, 0.125, with_entropy, "sm_90").decode()
    assert re.findall(r"\.entry (\w+)", ptx) == [KERNEL]
    head = ptx[ptx.index(".entry") : ptx.index(")", ptx.index(".entry"))]
    kinds = re.findall(r"\.param \.(u64|u32)", head)
    assert kinds == ["u64"] * 5 + ["u32"] * 4 + ["u64"] * (1 + with_entropy)  # inputs, sizes, outputs
    shared = sum(int(size) for size in re.findall(r"\.shared .*\[(\d+)\]", ptx))
    assert 0 < shared < MAX_SHARED_BYTES
    assert ".target sm_90" in ptx


@needs_nvcc
def test_what_nvcc_refuses_is_an_environment_fault():
    with pytest.raises(EnvironmentFault, match="nvcc cannot compile"):
        attention_ptx(64, 1.0, False, "sm_12345")


def test_other_head_widths_and_a_missing_compiler_are_named(monkeypatch):
    for width in (0, 12, 136):
        with pytest.raises(ToprovarError, match=f"no head width {width}"):
            attention_ptx(width, 1.0, False)
    monkeypatch.setattr(aot_plugin.shutil, "which", lambda name: None)
    with pytest.raises(EnvironmentFault, match="nvcc is not on the path"):
        attention_ptx(64, 0.987, False)


class Size(int):
    def constant_value(self):
        return int(self)


class Desc:
    """A tensor as `tensorrt.plugin` describes it."""

    def __init__(self, shape, dtype="half"):
        self.shape_expr, self.dtype = tuple(Size(extent) for extent in shape), dtype

    def like(self):
        return Desc(self.shape_expr, self.dtype)


class Stand:
    """What is used of `tensorrt.plugin`."""

    TensorDesc = Desc
    SymInt32 = int

    class KernelLaunchParams(dict):
        pass

    class SymIntExprs(tuple):
        @classmethod
        def from_tuple(cls, values):
            return cls(values)

    def __init__(self):
        self.described, self.compiled = {}, {}

    def register(self, name):
        return lambda function: self.described.setdefault(name, function)

    def aot_impl(self, name):
        return lambda function: self.compiled.setdefault(name, function)

    def cdiv(self, a, b):
        return -(-a // b)

    def from_shape_expr(self, shape, dtype):
        return Desc(shape, dtype)


def test_shapes_launch_and_arguments_are_those_of_the_operator(monkeypatch):
    asked = []
    monkeypatch.setattr(aot_plugin, "attention_ptx", lambda *arguments: asked.append(arguments) or b"ptx")
    stand = Stand()
    register_attention("sm_89", types.SimpleNamespace(float32="float"), stand)
    assert set(stand.described) == {"toprovar::CachedAttention", "toprovar::EntropyAttention"}
    q, past = Desc((40, 2, 16, 128)), Desc((57, 2, 16, 128))
    tensors = (q, q, q, past, past)
    o, entropy = stand.described["toprovar::EntropyAttention"](*tensors, 0.25)
    assert (o.shape_expr, o.dtype) == (q.shape_expr, "half")
    assert (entropy.shape_expr, entropy.dtype) == ((40, 2), "float")
    assert stand.described["toprovar::CachedAttention"](*tensors, 0.25).shape_expr == q.shape_expr
    for name, heads, with_entropy in (("CachedAttention", 16, False), ("EntropyAttention", 1, True)):
        kernel, ptx, launch, sizes = stand.compiled[f"toprovar::{name}"](*tensors, 0.25, (), 0)
        assert (kernel, ptx) == (KERNEL.encode(), b"ptx")
        assert launch == {"grid_x": 2, "grid_y": 2, "grid_z": heads, "block_x": THREADS}
        assert sizes == (40, 57, 2, 16)
        assert asked.pop() == (128, 0.25, with_entropy, "sm_89")


def test_annotations_are_classes_and_not_text():
    stand = Stand()
    register_attention("sm_89", types.SimpleNamespace(float32="float"), stand)
    for function in (*stand.described.values(), *stand.compiled.values()):
        signature = inspect.signature(function)
        kinds = [parameter.annotation for parameter in signature.parameters.values()]
        assert kinds[:6] == [Desc] * 5 + [float]
        assert not isinstance(signature.return_annotation, str)
    compiled = typing.get_args(inspect.signature(stand.compiled["toprovar::CachedAttention"]).return_annotation)
    assert compiled == (bytes, bytes, Stand.KernelLaunchParams, Stand.SymIntExprs)


def test_tensorrts_own_checks_accept_the_registration(monkeypatch):
    """The Python sources of `tensorrt.plugin`, over a stand-in for the library that they call."""
    spec = importlib.util.find_spec("tensorrt_bindings")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs tensorrt_cu13_bindings (its Python sources; the library is not used)")
    place = Path(spec.submodule_search_locations[0]) / "plugin"
    check_with_sources(place, monkeypatch)


def check_with_sources(place, monkeypatch):
    base = type("Base", (), {"__init__": lambda self, *arguments: None})
    trt = MagicMock(name="tensorrt")
    for name in (
        "IPluginCreatorV3Quick", "IPluginV3", "IPluginV3QuickCore", "IPluginV3QuickBuild", "IPluginV3QuickRuntime",
        "IPluginV3QuickAOTBuild", "IPluginV3OneCore", "IPluginV3OneBuild", "IPluginV3OneRuntime", "ISymExpr",
    ):  # fmt: skip
        setattr(trt, name, type(name, (base,), {}))
    for name in ("IDimensionExpr", "DynamicPluginTensorDesc", "PluginTensorDesc", "ITensor", "DataType", "TensorFormat",
                 "DimensionOperation", "QuickPluginCreationRequest", "PluginFieldType"):  # fmt: skip
        setattr(trt, name, MagicMock if name in ("DimensionOperation", "PluginFieldType") else type(name, (), {}))
    trt.DataType, trt.PluginFieldType = MagicMock(), MagicMock()
    monkeypatch.setitem(sys.modules, "tensorrt", trt)
    spec = importlib.util.spec_from_file_location(
        "tensorrt.plugin", place / "__init__.py", submodule_search_locations=[str(place)]
    )
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "tensorrt.plugin", module)
    spec.loader.exec_module(module)
    register_attention("sm_90", trt, module)
    from importlib import import_module

    registry = import_module("tensorrt.plugin._lib").QDP_REGISTRY
    assert set(registry) == {"toprovar::CachedAttention", "toprovar::EntropyAttention"}
    for name, outputs in (("CachedAttention", 1), ("EntropyAttention", 2)):
        definition = registry[f"toprovar::{name}"]
        assert definition.num_outputs == outputs
        assert definition.input_tensor_names == ["q", "k_new", "v_new", "k_past", "v_past"]
        assert definition.input_attrs == {"scale": float}
        assert definition.aot_impl_func is not None
