"""The weights file as bytes: every tensor and every range of rows where safetensors finds it; damage is named."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from toprovar.runtime.bundle import open_bundle
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.weights import WeightsFile


def test_bytes_are_those_that_safetensors_reads(tiny_bundle):
    file = WeightsFile(tiny_bundle / "weights.safetensors")
    expected = open_bundle(tiny_bundle).weights()
    assert file.tensors.keys() == expected.keys()
    for name, array in expected.items():
        stored = file.rows(name)
        assert stored.shape == array.shape
        assert np.array_equal(file.data(stored), np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def test_rows_are_found_inside_their_tensor(tmp_path):
    array = np.arange(70, dtype=np.float16).reshape(7, 10)
    save_file({"a": array, "b": np.zeros(3, np.float32)}, tmp_path / "w.safetensors")
    file = WeightsFile(tmp_path / "w.safetensors")
    rows = file.rows("a[2:5]")
    assert (rows.dtype, rows.shape) == ("F16", (3, 10))
    assert np.array_equal(file.data(rows).view(np.float16).reshape(3, 10), array[2:5])
    with pytest.raises(ToprovarError, match=r"rows 5 to 8 of a are asked for; it is \[7, 10\]"):
        file.rows("a[5:8]")
    with pytest.raises(ToprovarError, match="holds no tensor c"):
        file.rows("c[0:1]")


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{", "header is damaged"),
        (b"[]", "header is damaged"),
        (b'{"a": {"dtype": "F32", "shape": [4]}}', "header is damaged"),
        (b'{"a": {"dtype": "X9", "shape": [4], "data_offsets": [0, 16]}}', "header is damaged"),
        (b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 12]}}', "another size than its shape says"),
        (b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]}}', "tensor a lies outside"),
        (b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]}}', "tensor a lies outside"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, header, message):
    path = tmp_path / "w.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(ToprovarError, match=message) as caught:
        WeightsFile(path)
    assert str(path) in caught.value.message
    assert caught.value.hint == "export the bundle again"


@pytest.mark.parametrize("raw", [b"\1", (10**9).to_bytes(8, "little") + b"{}", json.dumps({}).encode()])
def test_a_header_that_does_not_fit_is_named(tmp_path, raw):
    path = tmp_path / "w.safetensors"
    path.write_bytes(raw)
    with pytest.raises(ToprovarError, match="does not fit into"):
        WeightsFile(path)
