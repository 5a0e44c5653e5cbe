"""Files that trtexec needs for one graph of a bundle: the graph with its weights as inputs, and their raw bytes.

    python -m toprovar.exporter.engines.trtexec_files BUNDLE GRAPH.onnx FOLDER

writes FOLDER/GRAPH.onnx, one FOLDER/<name>.bin per weight, zeros for the cache, and FOLDER/load_inputs.txt with the
value of `--loadInputs`. Other inputs are left to trtexec.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from toprovar.exporter.engines.trtexec import LOAD_FILE
from toprovar.exporter.engines.weights_as_inputs import weights_as_inputs
from toprovar.runtime.bundle import Bundle, open_bundle
from toprovar.runtime.errors import EXIT_WRONG_INPUT, ToprovarError
from toprovar.runtime.json_files import check_folder, write_bytes
from toprovar.runtime.manifest import tensor_rows


def write_trtexec_files(bundle: Bundle, graph_file: str, folder: Path) -> list[Path]:
    """Returns: the files it wrote. Raises: ToprovarError for a graph that the bundle lacks, or a place without room."""
    import onnx

    graph = bundle.manifest.graphs.get(graph_file)
    if graph is None:
        raise ToprovarError(
            f"{bundle.folder} has no graph {graph_file}", f"choose from {', '.join(bundle.manifest.graphs)}"
        )
    if "," in str(folder) or ":" in str(folder):
        raise ToprovarError(f"{folder} holds a comma or colon, which trtexec takes apart", "choose another folder")
    check_folder(folder)
    model = onnx.load(str(bundle.path(graph_file)), load_external_data=False)
    names = weights_as_inputs(model, bundle.folder)
    written = [folder / graph_file]
    write_bytes(written[0], model.SerializeToString())
    pairs = []
    for name in names:
        path = folder / f"{name.replace('[', '_').replace(':', '_').replace(']', '')}.bin"
        write_bytes(path, raw_weight(bundle, name))
        pairs.append((name, path))
    for name, facts in graph.inputs.items():
        if name.startswith(("k_past_", "v_past_")):
            path = folder / f"{name}.bin"
            write_bytes(path, bytes(facts.size_bytes))
            pairs.append((name, path))
    written += [path for _, path in pairs]
    value = ",".join(f"{name}:{path}" for name, path in pairs)
    write_bytes(folder / LOAD_FILE, value.encode())
    return [*written, folder / LOAD_FILE]


def raw_weight(bundle: Bundle, name: str) -> bytes:
    """Bytes of a weight input as they lie in the weights file, row-major. name: as `tensor_rows` takes it."""
    tensor, rows = tensor_rows(name)
    path = bundle.path(bundle.manifest.weights_file)
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        facts = json.loads(file.read(length))[tensor]
        start, end = facts["data_offsets"]
        if rows is not None:
            row_bytes = (end - start) // facts["shape"][0]
            start, end = start + rows[0] * row_bytes, start + rows[1] * row_bytes
        file.seek(8 + length + start)
        raw = file.read(end - start)
    assert len(raw) == end - start
    return raw


def main() -> None:
    if len(sys.argv) != 4:
        print("usage: python -m toprovar.exporter.engines.trtexec_files BUNDLE GRAPH.onnx FOLDER", file=sys.stderr)
        raise SystemExit(EXIT_WRONG_INPUT)
    try:
        written = write_trtexec_files(open_bundle(Path(sys.argv[1])), sys.argv[2], Path(sys.argv[3]))
    except ToprovarError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    print(f"wrote {len(written)} files to {sys.argv[3]}")


if __name__ == "__main__":
    main()
