"""Buffers on a GPU: slices, strided copies and reuse, through a CUDA runtime whose GPU is host memory."""

from itertools import pairwise

import numpy as np
import pytest
from fake_cuda import FakeCuda, Status

from toprovar.runtime import cuda_memory
from toprovar.runtime.buffers import HostMemory, checked_address
from toprovar.runtime.cuda_memory import CudaMemory, DeviceBuffer, load_cuda
from toprovar.runtime.errors import EnvironmentFault
from toprovar.runtime.manifest import TensorFacts


@pytest.fixture
def memory():
    return CudaMemory(FakeCuda())


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32, np.int64, np.uint8])
def test_what_is_placed_is_read(memory, dtype):
    array = np.arange(2 * 3 * 17).reshape(2, 3, 17).astype(dtype)
    assert np.array_equal(memory.read(memory.place(array)), array)
    assert memory.read(memory.place(array)).dtype == dtype


def test_slices_of_the_first_axis_are_views(memory):
    array = np.arange(70, dtype=np.float32).reshape(7, 2, 5)
    buffer = memory.place(array)
    assert np.array_equal(memory.read(buffer[2:5]), array[2:5])
    assert np.array_equal(memory.read(buffer[4:][1:2]), array[5:6])
    assert buffer[3:3].shape == (0, 2, 5)
    assert memory.read(buffer[3:3]).shape == (0, 2, 5)
    assert buffer[1:].address == buffer.address + 40
    with pytest.raises(ValueError, match="neighbouring"):
        buffer[::2]


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("picks", [[0], [1, 0], [2, 2, 1]])
def test_gathering_is_what_numpy_takes(memory, axis, picks):
    array = np.arange(3 * 3 * 3 * 4, dtype=np.float32).reshape(3, 3, 3, 4)
    shape = [3, 3, 3, 4]
    shape[axis] = len(picks)
    for each in (memory, HostMemory()):
        out = each.empty(shape, "F32")
        source = each.place(array)
        each.gather([(source, pick) for pick in picks], axis, out)
        assert np.array_equal(each.read(out), np.take(array, picks, axis))


def test_rows_of_several_buffers_are_joined(memory):
    parts = [np.full((2, 2, 3), value, np.float16) for value in (1, 2)]
    for each in (memory, HostMemory()):
        placed = [each.place(part) for part in parts]
        out = each.empty((2, 4, 3), "F16")
        each.gather([(source, row) for row in range(2) for source in placed], 1, out)
        assert np.array_equal(each.read(out)[:, :, 0], [[1, 2, 1, 2]] * 2)


def test_bfloat16_is_copied_bit_by_bit(memory):
    buffer = memory.empty((4, 2, 8), "BF16")
    bits = np.arange(64, dtype=np.uint16).reshape(4, 2, 8)
    memory.upload(bits, buffer.address)
    one = memory.empty((4, 1, 8), "BF16")
    memory.gather([(buffer, 1)], 1, one)
    assert np.array_equal(memory.read(one), bits[:, 1:])


def test_a_scope_hands_out_the_same_addresses_again(memory):
    def run():
        with memory.scope():
            first = memory.empty((5, 3), "F32")
            with memory.scope():
                inner = memory.empty((5, 3), "F32")
            again = memory.empty((5, 3), "F32")
            return first.address, inner.address, again.address

    first, inner, again = run()
    assert first != inner
    assert again == inner
    assert run() == (first, inner, again)
    with pytest.raises(RuntimeError), memory.scope():  # noqa: PT012
        memory.empty((5, 3), "F32")
        raise RuntimeError
    assert run() == (first, inner, again)
    assert memory.allocated_bytes == 2 * 256


def test_addresses_are_aligned_and_no_two_buffers_overlap(memory):
    buffers = [memory.empty(shape, "F32") for shape in ((1,), (0, 4), (65,), (64,), (1,), ())]
    spans = sorted((b.address, b.address + max(b.size_bytes, 1)) for b in buffers)
    assert all(start % 256 == 0 for start, _ in spans)
    assert all(end <= following for (_, end), (following, _) in pairwise(spans))


def test_a_full_gpu_says_how_much_is_missing():
    memory = CudaMemory(FakeCuda(limit_bytes=10_000_000))
    with pytest.raises(EnvironmentFault, match="12 MB more are needed, 10 MB of 10 MB are free") as caught:
        memory.empty((3_000_000,), "F32")
    assert "--dtype bf16" in caught.value.hint


def test_a_copy_beyond_a_block_is_an_error(memory):
    buffer = memory.empty((4,), "F32")
    with pytest.raises(EnvironmentFault, match="cudaErrorInvalidValue"):
        memory.read(DeviceBuffer(buffer.address, (65,), "F32"))


@pytest.mark.parametrize("memory", [HostMemory(), CudaMemory(FakeCuda())], ids=["host", "cuda"])
def test_a_buffer_that_does_not_fit_a_signature_is_refused(memory):
    facts = TensorFacts(dtype="F32", shape=(3, 2))
    buffer = memory.empty((3, 2), "F32")
    assert checked_address(memory, buffer, "x", facts) == memory.address_of(buffer)
    for shape, dtype in (((2, 3), "F32"), ((3, 2), "F16"), ((2, 2), "F32"), ((3, 2, 1), "F32")):
        with pytest.raises(ValueError, match=r"x: .* given, F32\[3, 2\] expected"):
            checked_address(memory, memory.empty(shape, dtype), "x", facts)
    open_facts = TensorFacts(dtype="F32", shape=(3, 2), is_open=True)
    assert checked_address(memory, memory.empty((1, 2), "F32"), "x", open_facts)
    with pytest.raises(ValueError, match="expected"):
        checked_address(memory, memory.empty((4, 2), "F32"), "x", open_facts)


def test_an_array_with_gaps_or_of_another_type_is_refused():
    with pytest.raises(ValueError, match="not contiguous"):
        HostMemory().address_of(np.zeros((4, 4), np.float32)[:, :2])
    with pytest.raises(ValueError, match="complex64"):
        HostMemory().dtype_of(np.zeros(1, np.complex64))


def test_a_missing_package_driver_or_gpu_is_named(monkeypatch):
    import sys
    from types import ModuleType

    monkeypatch.setitem(sys.modules, "cuda", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(EnvironmentFault, match="cuda-bindings is not installed") as caught:
        load_cuda()
    assert caught.value.hint == "pip install cuda-bindings"
    for answer, message in (
        ((Status.cudaErrorInvalidValue, None), "no usable CUDA GPU here: cudaErrorInvalidValue"),
        ((Status.cudaSuccess, 0), "none is visible"),
    ):
        bindings = ModuleType("cuda.bindings")
        bindings.runtime = type("Runtime", (), {"cudaGetDeviceCount": staticmethod(lambda answer=answer: answer)})
        monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
        monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
        with pytest.raises(EnvironmentFault, match=message) as caught:
            load_cuda()
        assert "nvidia-smi" in caught.value.hint


def test_the_compute_capability_is_read():
    assert cuda_memory.compute_capability(FakeCuda(capability=(12, 0))) == "12.0"
