"""Takes a job as exporter/engines/builder.py does, and writes a plan that is a digest of it, or ends badly."""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

job = json.loads(sys.stdin.readline())
reports = os.fdopen(int(sys.argv[1]), "w", buffering=1)
graph = Path(job.get("graph", "")).name
kind, where, others = (*os.environ.get("FAKE_BUILDER", "").split(), "", "", "")[:3]


def hang():
    place = Path(os.environ["FAKE_BUILDER_PID"])
    place.with_name(f"{place.name}.{os.getpid()}").touch()
    reports.write('{"fraction": 0.5}\n')
    time.sleep(600)


facts = {"weights": ["head"], "plugin_layers": {}, "inlined": {}, "builder_version": "1.7.1.116"}
if graph:
    print(f"building {graph}", file=sys.stderr, flush=True)
    if where in ("", graph):
        if kind == "abort":
            print("terminate called without an active exception", file=sys.stderr, flush=True)
            os.abort()
        if kind == "kill":
            os.kill(os.getpid(), 9)
        if kind == "silent":
            os._exit(3)
        if kind == "half":
            reports.write('{"done": {"weig')
            reports.flush()
            os._exit(0)
        if kind == "hang":
            hang()
    elif others == "hang":
        hang()
    reports.write('{"fraction": 0.5}\n')
    content = Path(job["graph"]).read_bytes() + json.dumps(job["capabilities"]).encode()
    Path(job["plan"]).write_bytes(hashlib.sha256(content).hexdigest().encode())
reports.write(json.dumps({"done": facts}) + "\n")
