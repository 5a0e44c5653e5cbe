"""Measures this machine's GPU path: `python -m toprovar.tools.gpu_check --out gpu.json`.

Stages run one after another, each in a process of its own: what one breaks, the next does not see. Results are written
after every stage; bundles stay in --work and are used again.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from toprovar.runtime.errors import EXIT_INTERRUPTED, ToprovarError
from toprovar.runtime.json_files import check_folder, check_replaceable, write_json
from toprovar.runtime.version import VERSION
from toprovar.tools import console
from toprovar.tools.backends import check_device
from toprovar.tools.gpu_check.models import CONFIGS
from toprovar.tools.gpu_check.stages import STAGES, Context, say


def _arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m toprovar.tools.gpu_check", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"), help="JSON file of the results.")
    parser.add_argument("--work", type=Path, default=Path("out/gpu_check"), help="Folder of the bundles; kept.")
    parser.add_argument("--stages", default="all", help=f"Names with commas, or all: {', '.join(STAGES)}.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", choices=tuple(CONFIGS), default="2b", help="Large model: 2b, or small to try this.")
    parser.add_argument("--runs", type=int, default=5, help="Warm runs per time.")
    parser.add_argument("--seeds", type=int, default=4, help="Pictures per comparison.")
    parser.add_argument("--budget-s", type=float, default=570, help="Seconds for all stages; the rest is left out.")
    parser.add_argument("--stage-s", type=float, default=300, help="Seconds for one stage.")
    parser.add_argument("--only-stage", help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    names = list(STAGES) if arguments.stages == "all" else arguments.stages.split(",")
    unknown = [name for name in names if name not in STAGES]
    if unknown:
        parser.error(f"unknown stage {unknown[0]}; expected {', '.join(STAGES)}")
    arguments.names = names
    return arguments


def main(words: list[str] | None = None) -> int:
    arguments = _arguments(words)
    try:
        return _run(arguments)
    except ToprovarError as error:
        console.print_error(error.message, error.hint)
        return error.exit_code
    except KeyboardInterrupt:
        console.say(console.INTERRUPTED)
        return EXIT_INTERRUPTED


def _run(arguments: argparse.Namespace) -> int:
    """Raises: EnvironmentFault without the packages or the GPU; ToprovarError for places that cannot be written."""
    console.require_packages("gpu_check", "torch", "onnx", "onnx_ir", "onnxruntime")
    check_folder(arguments.work)
    check_folder(arguments.out.parent)
    check_replaceable(arguments.out)
    if not arguments.only_stage:
        check_device(arguments.device)
    arguments.work.mkdir(parents=True, exist_ok=True)
    if arguments.only_stage:
        return _run_here(arguments)
    started = time.perf_counter()
    results: dict[str, Any] = {
        "schema_version": 1,
        "tool_version": VERSION,
        "command": f"python -m toprovar.tools.gpu_check --stages {','.join(arguments.names)}",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "stages": {},
    }
    for name in arguments.names:
        left = arguments.budget_s - (time.perf_counter() - started)
        if left < 5:
            results["stages"][name] = {"status": "left out: no time"}
            say(f"{name}: left out, no time")
        else:
            results["stages"][name] = _run_apart(arguments, name, min(left, arguments.stage_s))
        write_json(arguments.out, results)
    failed = [name for name, facts in results["stages"].items() if facts["status"] != "done"]
    say(
        f"wrote {arguments.out}; {len(failed)} of {len(arguments.names)} stages not done: {', '.join(failed) or 'none'}"
    )
    return 1 if failed else 0


def _run_apart(arguments: argparse.Namespace, name: str, limit_s: float) -> dict[str, Any]:
    """One stage in a new process, whose words go to this one's."""
    say(f"{name}: starts, at most {limit_s:.0f} s")
    answer = arguments.work / f"stage-{name}.json"
    answer.unlink(missing_ok=True)
    command = [sys.executable, "-u", "-m", "toprovar.tools.gpu_check", "--only-stage", name]
    for option in ("work", "device", "size", "runs", "seeds"):
        command += [f"--{option}", str(getattr(arguments, option))]
    begin = time.perf_counter()
    try:
        code: int | str = subprocess.run(command, timeout=limit_s, check=False).returncode
    except subprocess.TimeoutExpired:
        code = f"stopped after {limit_s:.0f} s"
    wall_s = time.perf_counter() - begin
    facts = json.loads(answer.read_text()) if answer.exists() else {"status": f"failed: exit code {code}"}
    say(f"{name}: {facts['status']} in {wall_s:.1f} s")
    return {**facts, "wall_s": wall_s, "exit_code": code}


def _run_here(arguments: argparse.Namespace) -> int:
    name = arguments.only_stage
    context = Context(arguments.work, arguments.device, arguments.size, arguments.runs, arguments.seeds)
    answer: dict[str, Any]
    try:
        answer = {"status": "done", **STAGES[name](context)}
    except Exception as error:  # one stage's failure is a result, whatever it is
        traceback.print_exc()
        answer = {"status": f"failed: {type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    (arguments.work / f"stage-{name}.json").write_text(json.dumps(answer))
    return 0 if answer["status"] == "done" else 1


if __name__ == "__main__":
    sys.exit(main())
