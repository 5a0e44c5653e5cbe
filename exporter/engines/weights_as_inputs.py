"""Large weights become inputs of a graph, so that a plan holds none and all engines of a bundle share one upload.

An initializer that points into the weights file is a whole tensor ("layers.0.qkv") or a range of its rows
("rope_cos[5:14]"); its name says which (`toprovar.runtime.manifest.tensor_rows`). Small ones become constants: they are
kilobytes, and the builder folds them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.manifest import check_file_name

if TYPE_CHECKING:
    import onnx

MIN_INPUT_BYTES = 4096


def weights_as_inputs(model: onnx.ModelProto, folder: Path, min_bytes: int = MIN_INPUT_BYTES) -> tuple[str, ...]:
    """Changes a model, loaded without its external data, so that it needs no file beside it.

    folder:    of the weights file
    min_bytes: external initializers of at least this size become inputs; smaller ones are read into the model
    Returns:   names of the new inputs, in the order in which they were added.
    Raises:    ToprovarError if a small tensor cannot be read whole.
    """
    from onnx import TensorProto, helper
    from onnx.external_data_helper import ExternalDataInfo

    moved = []
    kept = []
    for tensor in model.graph.initializer:
        if tensor.data_location != TensorProto.EXTERNAL:
            kept.append(tensor)
            continue
        place = ExternalDataInfo(tensor)
        if place.length >= min_bytes:
            model.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
            moved.append(tensor.name)
        else:
            raw = _read(folder / check_file_name(place.location), place.offset or 0, place.length, tensor.name)
            kept.append(TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims, raw_data=raw))
    copies = [TensorProto.FromString(tensor.SerializeToString()) for tensor in kept]
    del model.graph.initializer[:]
    model.graph.initializer.extend(copies)
    return tuple(moved)


def _read(path: Path, offset: int, length: int, name: str) -> bytes:
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            raw = file.read(length)
    except OSError as error:
        raise ToprovarError(f"{path} cannot be read: {error.strerror}", "export the bundle again") from None
    if len(raw) != length:
        raise ToprovarError(
            f"{path} ends inside {name}: {len(raw)} bytes found at {offset}, {length} expected",
            "export the bundle again",
        )
    return raw
