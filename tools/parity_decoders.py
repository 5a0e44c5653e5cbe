"""Compares the VQ tokenizer and the video tokenizer with a parity file.

Names: dec/z -> dec/x, clamped or not; enc/x -> enc/z. A video decoder runs whole in PyTorch, in chunks as graphs.
Called by parity.py, which fixes the command line and the verdicts.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from toprovar.exporter.families import Family
from toprovar.runtime.errors import ToprovarError
from toprovar.tools.parity_file import MAKE_AGAIN, ParityFile
from toprovar.tools.parity_inputs import read_array
from toprovar.tools.parity_report import KINDS, Report, absent, compare_array
from toprovar.tools.parity_tokenizer import clamped_alike

if TYPE_CHECKING:
    from toprovar.exporter.video_tokenizer.tokenizer import VideoTokenizer
    from toprovar.exporter.vq_tokenizer.tokenizer import VqTokenizer

INPUTS = {"dec/z": "dec/x", "enc/x": "enc/z"}  # what is fed in, and what comes of it


def compare(file: ParityFile, runs: list[str] | None, backends: list[str] | None, report: Report) -> None:
    """Fills the report. backends: None for both. Raises: ToprovarError if an input is missing or has another shape."""
    import torch

    if runs:
        raise ToprovarError(
            f"{file.path} holds a tokenizer, which has no runs; found --run {runs[0]}", "leave --run out"
        )
    tensors = {name: torch.from_numpy(array) for name, array in file.weights().items()}
    model = _loaded(file, tensors)
    given = {name: _input(file, name, model) for name in INPUTS if name in file.shapes}
    for source, result in INPUTS.items():
        if result in file.shapes and source not in given:
            raise ToprovarError(f"{file.path} has no array {source}, what {result} was made from", MAKE_AGAIN)
    for backend in backends or ["torch", "onnxruntime"]:
        seen = _in_torch(model, given) if backend == "torch" else _in_onnxruntime(model, given)
        for name in file.shapes:
            if name.startswith("w/") or name in given:
                continue
            if name not in seen:
                report.rows.append(absent(backend, "", name, any(p.fullmatch(name) for p, _ in KINDS)))
                continue
            found, expected = seen[name], file.read(name)
            if name == "dec/x":
                found, expected, _ = clamped_alike(found, expected, backend)
            report.rows.append(compare_array(backend, "", name, found, expected))


def _loaded(file: ParityFile, tensors: dict[str, Any]) -> VqTokenizer | VideoTokenizer:
    from toprovar.exporter.video_tokenizer.tokenizer import load_video_tokenizer
    from toprovar.exporter.vq_tokenizer.tokenizer import load_vq_tokenizer

    load = load_vq_tokenizer if file.family is Family.VQ_TOKENIZER else load_video_tokenizer
    return load(tensors, str(file.path))


def _input(file: ParityFile, name: str, model: VqTokenizer | VideoTokenizer) -> np.ndarray:
    """[B, channels, h, w], with a time axis before h for videos."""
    from toprovar.exporter.vq_tokenizer.tokenizer import VqTokenizer

    channels, further = (
        (model.config.channels, 2) if isinstance(model, VqTokenizer) else (model.config.code_channels, 3)
    )
    shape = (None, 3 if name == "enc/x" else channels, *(None,) * further)
    return read_array(file, name, shape).astype(np.float32)


def _in_torch(model: VqTokenizer | VideoTokenizer, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    import torch

    seen = {}
    with torch.inference_mode():
        if "dec/z" in given:
            seen["dec/x"] = model.decode_raw(torch.from_numpy(given["dec/z"])).numpy()
        if "enc/x" in given and hasattr(model, "encoder"):
            seen["enc/z"] = model.encode(torch.from_numpy(given["enc/x"])).numpy()
    return seen


def _in_onnxruntime(model: VqTokenizer | VideoTokenizer, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    from toprovar.exporter.vq_tokenizer.tokenizer import VqTokenizer

    if "dec/z" not in given:
        return {}
    run = _picture if isinstance(model, VqTokenizer) else _video
    with tempfile.TemporaryDirectory(prefix="toprovar-parity-") as folder:
        return {"dec/x": run(model, given["dec/z"], Path(folder))}


def _picture(model: VqTokenizer, codes: np.ndarray, folder: Path) -> np.ndarray:
    from toprovar.exporter.vq_tokenizer.graphs import decoder_graph, decoder_weights

    layout = _written(decoder_weights(model), folder)
    height, width = codes.shape[-2:]
    decoder_graph(model.config, (height, width), layout, len(codes)).save(folder / "decoder.onnx")
    return _session(folder / "decoder.onnx").run(None, {"codes": codes})[0]


def _video(model: VideoTokenizer, codes: np.ndarray, folder: Path) -> np.ndarray:
    from toprovar.exporter.video_tokenizer.graphs import decoder_graph, decoder_weights
    from toprovar.exporter.video_tokenizer.tokenizer import maps_per_chunk

    layout = _written(decoder_weights(model), folder)
    height, width = codes.shape[-2:]
    chunks = maps_per_chunk(codes.shape[2])
    sessions = []
    for index, maps in enumerate(chunks[:2]):  # all behind the first are alike
        path = folder / f"chunk_{index}.onnx"
        decoder_graph(model.config, maps, (height, width), layout, index == 0).save(path)
        sessions.append(_session(path))
    videos = []
    for one in codes:
        parts: list[np.ndarray] = []
        past: dict[str, np.ndarray] = {}
        for index, part in enumerate(np.split(one[None], np.cumsum(chunks)[:-1], axis=2)):
            video, *left = sessions[min(index, 1)].run(None, {"codes": part, **past})
            past = {f"past_{i:02d}": array for i, array in enumerate(left)}
            parts.append(video)
        videos.append(np.concatenate(parts, axis=2))
    return np.concatenate(videos)


def _written(thunks: dict[str, Any], folder: Path) -> Any:
    """The layout of the tensors' file, which lies in the folder."""
    from toprovar.exporter.weights_file import WEIGHTS_FILE, WeightSpec, layout_weights, write_weights

    layout = layout_weights({name: WeightSpec("F32", tuple(thunk().shape)) for name, thunk in thunks.items()})
    write_weights(folder / WEIGHTS_FILE, layout, lambda name: thunks[name]().contiguous().numpy())
    return layout


def _session(path: Path) -> Any:
    import onnxruntime

    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
