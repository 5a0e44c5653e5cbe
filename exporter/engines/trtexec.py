"""trtexec.md: how the engines of a bundle are built, timed and fed by NVIDIA's trtexec.

Written from the signatures; nothing of it is executed where a bundle is made.
"""

from __future__ import annotations

from pathlib import Path

from toprovar.exporter.engines.number_formats import allows_tf32
from toprovar.runtime.manifest import Engine, Graph, Manifest

TRTEXEC_FILE = "trtexec.md"
LOAD_FILE = "load_inputs.txt"

_INTRODUCTION = f"""# trtexec

Commands for the engines of this bundle, with NVIDIA's `trtexec` of TensorRT 10.13 or later, to be run inside this
folder. They were written by the exporter from the manifest; they were not executed where the bundle was made.

Weights are inputs of the engines, so that all engines share one copy on the device. `trtexec` fills inputs that it is
not given with random numbers: good enough for timing, not for values. The first command of an engine writes its
weights, and zeros for its cache, as raw files, and `{LOAD_FILE}` with the option's value that names them all; it needs
`toprovar`.

- The second command builds a plan. It needs the GPU that the plan is for. TensorRT 10 also needs `--stronglyTyped`
  there; from 11 on every network is.
- `PLUGINS` is the operator library: `toprovar plugins build` says where it is. An operator without a plugin there is
  built from its function body.
"""


def trtexec_page(manifest: Manifest) -> str:
    """The page for all graphs of a bundle; those with an engine for TensorRT load it, others build one first."""
    known = manifest.engines.get("tensorrt")
    parts = [_INTRODUCTION, "```\nexport PLUGINS=libtoprovar_plugins.so FILES=../trtexec_files\n```\n"]
    for graph in manifest.graphs.values():
        engine = known.engine_of(graph.file) if known else None
        parts.append(_section(manifest, graph, engine))
    return "\n".join(parts)


def _section(manifest: Manifest, graph: Graph, engine: Engine | None) -> str:
    stem = Path(graph.file).stem
    folder = f"$FILES/{stem}"
    built = f'"{folder}/{stem}.plan"'
    plan = engine.file if engine else built
    shapes = _shapes(graph)
    build = [
        f'trtexec --onnx="{folder}/{graph.file}" --saveEngine={built} --skipInference --dynamicPlugins="$PLUGINS"',
        *([] if allows_tf32(manifest, graph) else ["--noTF32"]),
        *shapes,
    ]
    time = [f'trtexec --loadEngine={plan} --dynamicPlugins="$PLUGINS"', *shapes[:1]]
    feed = [*time, f'--loadInputs="$(cat "{folder}/{LOAD_FILE}")"', f'--exportOutput="{folder}/outputs.json"']
    commands = [
        f'python -m toprovar.exporter.engines.trtexec_files . {graph.file} "{folder}"',
        " ".join(build),
        " ".join(time),
        " ".join(feed),
    ]
    return f"## {graph.file}\n\n{_used_by(manifest, graph)}\n\n```\n" + "\n".join(commands) + "\n```\n"


def _shapes(graph: Graph) -> list[str]:
    """Options for inputs whose first axis is open: a profile needs least, usual and largest shapes."""
    open_inputs = {name: facts.shape for name, facts in graph.inputs.items() if facts.is_open}
    if not open_inputs:
        return []

    def listed(least: bool) -> str:
        shapes = {name: (0, *shape[1:]) if least else shape for name, shape in open_inputs.items()}
        return ",".join(f"{name}:{'x'.join(map(str, shape))}" for name, shape in shapes.items())

    return [f"--shapes={listed(False)}", f"--minShapes={listed(True)}", f"--optShapes={listed(False)}",
            f"--maxShapes={listed(False)}"]  # fmt: skip


def _used_by(manifest: Manifest, graph: Graph) -> str:
    uses = []
    for name, steps in manifest.variants.items():
        for step in steps:
            if step.graph.file == graph.file:
                path = f", path {step.path}" if step.path else ""
                rows = "" if step.guided or manifest.rows == 1 else ", conditional rows alone"
                uses.append(f"{name}, scale {step.scale}{path}{rows}: {step.tokens} tokens, {step.images} image(s)")
    return "; ".join(dict.fromkeys(uses)) + "." if uses else "Once per picture."
