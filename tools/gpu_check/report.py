"""The results of a measurement as a Markdown table, as docs/gpu.md shows them."""

from __future__ import annotations

from typing import Any

# stage -> how the table calls it
ROWS = {
    "torch": "PyTorch, eager, autocast",
    "times-body": "ONNX bodies",
    "times-body-graph": "ONNX bodies, captured",
    "times-library": "operator library",
    "times-library-graph": "operator library, captured",
}


def table_from_results(results: dict[str, Any]) -> str:
    """Milliseconds of the loop over all scales, dense and planned, and how many times as fast planned is."""
    lines = ["| | dense, ms | planned, ms | times as fast |", "| --- | --- | --- | --- |"]
    for stage, title in ROWS.items():
        facts = results["stages"].get(stage, {})
        if facts.get("status") != "done":
            continue
        dense, planned = (facts[variant]["steps"]["median_ms"] for variant in ("dense", "planned"))
        lines.append(f"| {title} | {dense:.0f} | {planned:.0f} | {dense / planned:.2f} |")
    return "\n".join(lines)
