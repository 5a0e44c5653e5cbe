"""The tiny bundle on a real GPU. Run with -m gpu on a machine with onnxruntime-gpu, cuda-bindings and an NVIDIA GPU."""

import numpy as np
import pytest
from helpers import open_pipeline

from toprovar.runtime.backends.onnxruntime import OnnxRuntimeBackend
from toprovar.runtime.bundle import open_bundle
from toprovar.runtime.errors import EnvironmentFault
from toprovar.runtime.pipeline import Pipeline

# float32 sums are ordered otherwise on a GPU: a draw within 1e-5 of its chance may fall to the other side, and what
# follows it differs with it
SHARE_OF_BITS = 0.01


@pytest.fixture(params=[False, True], ids=["launched", "captured"])
def on_gpu(request, tiny_bundle):
    bundle = open_bundle(tiny_bundle)
    try:
        backend = OnnxRuntimeBackend(bundle, device="cuda", operators="body", cuda_graph=request.param)
    except EnvironmentFault as fault:
        pytest.skip(f"needs a GPU that ONNX Runtime can use: {fault.message}")
    return Pipeline(bundle, backend)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["dense", "planned"])
def test_a_gpu_draws_what_the_cpu_draws(tiny_bundle, on_gpu, variant):
    cpu = open_pipeline(tiny_bundle).generate("red apple", 7, variant)
    drawn = [on_gpu.generate("red apple", 7, variant) for _ in range(3)]
    for gpu in drawn:
        different = sum(int((a != b).sum()) for a, b in zip(gpu.bits, cpu.bits, strict=True))
        assert different <= SHARE_OF_BITS * sum(bits.size for bits in cpu.bits)
        assert np.isfinite(gpu.codes).all()
    for gpu in drawn[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(gpu.bits, drawn[0].bits, strict=True))


@pytest.mark.gpu
def test_memory_on_a_gpu_slices_and_gathers_like_numpy(on_gpu):
    memory = on_gpu.backend.memory
    array = np.random.default_rng(1).standard_normal((17, 3, 5, 8), np.float32)
    placed = memory.place(array)
    assert np.array_equal(memory.read(placed[3:11]), array[3:11])
    for axis, picks in ((0, [4, 4, 1]), (1, [2, 0]), (2, [3])):
        shape = [*array.shape]
        shape[axis] = len(picks)
        out = memory.empty(shape, "F32")
        memory.gather([(placed, pick) for pick in picks], axis, out)
        assert np.array_equal(memory.read(out), np.take(array, picks, axis))
