"""Traces of ONNX Runtime's profiler as times per operator kind and per layer."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toprovar.runtime.errors import ToprovarError

_NODE = re.compile(r"n(\d+)_[A-Z]")  # as graphs number their nodes, in the order in which layers are written
_LAYER = re.compile(r"layers\.(\d+)\.")


def layers_of_nodes(graph: Path) -> dict[int, int]:
    """{number of a node: layer}: that of the last layer whose weights were used up to it; none before the first layer.

    Empty where onnx is not installed.
    """
    try:
        import onnx
    except ImportError:
        return {}
    found: dict[int, int] = {}
    layer = None
    for node in onnx.load(graph, load_external_data=False).graph.node:
        number = _NODE.match(node.name)
        used = [int(match[1]) for name in node.input if (match := _LAYER.match(name))]
        layer = max(used) if used else layer
        if number and layer is not None:
            found[int(number[1])] = layer
    return found


def warm_events(trace: Path) -> tuple[list[dict[str, Any]], int]:
    """What took time behind the first run, in order: kernels of a GPU where the trace has any, else nodes on the host.

    Returns: events, and the number of runs that they are of.
    Raises:  ToprovarError if the trace is missing or cut short, as on a full disk: the profiler says nothing of it.
    """
    try:
        events = [event for event in json.loads(trace.read_text()) if "dur" in event]
    except (OSError, ValueError) as error:
        raise ToprovarError(
            f"ONNX Runtime did not write {trace} whole: {error}", "free some space, or choose another --out"
        ) from None
    runs = sorted(event["ts"] + event["dur"] for event in events if event["name"] == "model_run")
    if len(runs) < 2:
        return [], 0
    warm = [event for event in events if event["ts"] >= runs[0] and isinstance(event.get("args"), dict)]
    kernels = [event for event in warm if event.get("cat") == "Kernel"]
    nodes = [event for event in warm if event.get("cat") == "Node" and event["name"].endswith("_kernel_time")]
    return sorted(kernels or nodes, key=lambda event: event["ts"]), len(runs) - 1


def aggregated(trace: Path, layers: Mapping[int, int]) -> dict[str, Any]:
    """Times of one graph, per warm run.

    Returns: operators [{kind, provider, calls, ms}] and layers [{layer, ms}], the longest operator first. A node from
             inside a function body has no number: it counts to the layer of the node before it.
    """
    kinds: dict[tuple[str, str], list[float]] = defaultdict(list)
    by_layer: dict[int | None, float] = defaultdict(float)
    layer = None
    events, runs = warm_events(trace)
    for event in events:
        facts, ms = event["args"], event["dur"] / 1e3
        number = _NODE.search(facts.get("parent_name") or event["name"])
        if number and int(number[1]) in layers:
            layer = layers[int(number[1])]
        provider = facts.get("provider", "").removesuffix("ExecutionProvider")
        kinds[facts.get("op_name", event["name"]), provider].append(ms)
        by_layer[layer] += ms
    operators = [
        {"kind": kind, "provider": provider, "calls": len(times) / runs, "ms": sum(times) / runs}
        for (kind, provider), times in kinds.items()
    ]
    return {
        "runs": runs,
        "measured": "kernels on the GPU"
        if events and events[0].get("cat") == "Kernel"
        else "nodes, on the host's clock",
        "operators": sorted(operators, key=lambda row: -row["ms"]),
        "layers": [
            {"layer": key, "ms": ms / runs}
            for key, ms in sorted(by_layer.items(), key=lambda pair: -1 if pair[0] is None else pair[0])
        ]
        if layers
        else [],
    }
