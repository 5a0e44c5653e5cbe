"""Runs the builder in a process of its own and brings back its plan's facts, or one clear error.

TensorRT-RTX ends its process without a word where it misses a library, and a build can take more memory than there is;
neither may take the tool down. The child dies with its parent, and is killed when the parent is interrupted.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from toprovar.exporter.engines import versions
from toprovar.exporter.engines.builder import Built, Job
from toprovar.runtime.errors import EnvironmentFault, ToprovarError
from toprovar.runtime.manifest import EngineTarget

COMMAND = (sys.executable, "-m", "toprovar.exporter.engines.builder")  # tests put a program here that crashes
STDERR_LINES = 3


@contextmanager
def build_environment(target: EngineTarget) -> Iterator[dict[str, str]]:
    """Environment variables of children, with the builder's library under the name by which its parser opens it."""
    with tempfile.TemporaryDirectory(prefix="toprovar-engines-") as folder:
        versions.link_libraries(target, Path(folder))
        libraries = [folder, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        yield {
            **os.environ,
            "LD_LIBRARY_PATH": os.pathsep.join(libraries),
            "PYTHONPATH": os.pathsep.join(os.path.abspath(place) for place in sys.path if place),
            "PYTHONIOENCODING": "utf-8:backslashreplace",
        }


class Children:
    """The children that run, so that one fault or an interrupt ends all of them; threads share it."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._ended = False

    def add(self, child: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._running.add(child)
            if self._ended:
                child.kill()

    def remove(self, child: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._running.discard(child)

    def end(self) -> None:
        """Kills those that run, and those that are still to come."""
        with self._lock:
            self._ended = True
            for child in self._running:
                child.kill()


def run_builder(
    job: Job,
    environment: dict[str, str],
    on_fraction: Callable[[float], None] = lambda fraction: None,
    children: Children | None = None,
) -> Built:
    """Builds one plan in a child.

    on_fraction: how far it has come, 0 to 1
    children:    where the child is noted while it runs
    Raises:      ToprovarError or EnvironmentFault: the child's own, or with its signal and last words.
    """
    return _run(asdict(job), Path(job.graph).name, environment, on_fraction, children or Children())


def installed_version(target: EngineTarget, environment: dict[str, str]) -> str:
    """Version of the installed builder, asked in a child. Raises: EnvironmentFault if it does not load."""
    return _run(
        {"target": target}, versions.TITLES[target], environment, lambda fraction: None, Children()
    ).builder_version


def _run(
    request: dict[str, Any],
    what: str,
    environment: dict[str, str],
    on_fraction: Callable[[float], None],
    children: Children,
) -> Built:
    read, write = os.pipe()
    try:
        child = subprocess.Popen(
            [*COMMAND, str(write)],
            env=environment,
            # a folder of ours: modules that lie in the current one are not meant
            cwd=environment["LD_LIBRARY_PATH"].split(os.pathsep)[0],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=(write,),
            start_new_session=True,  # Ctrl-C reaches the parent alone
        )
    except BaseException:
        os.close(read)
        raise
    finally:
        os.close(write)
    last_words: deque[str] = deque(maxlen=STDERR_LINES)
    assert child.stdin is not None
    assert child.stderr is not None
    listener = threading.Thread(target=_listen, args=(child.stderr, last_words), daemon=True)
    listener.start()
    end: dict[str, Any] = {}
    try:
        children.add(child)
        try:
            child.stdin.write(json.dumps(request).encode() + b"\n")
            child.stdin.close()
        except BrokenPipeError:
            pass  # it is gone already; its end says why
        with os.fdopen(read, encoding="ascii", errors="replace") as reports:
            for line in reports:
                message = _message(line)
                if "fraction" in message:
                    on_fraction(float(message["fraction"]))
                else:
                    end = message
        code = child.wait()
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
        children.remove(child)
        listener.join(timeout=5)
        child.stderr.close()
    if "fault" in end:
        fault = end["fault"]
        raise ToprovarError(fault["message"], fault["hint"], fault["exit_code"])
    if code or "done" not in end:
        raise _crash(what, code, list(last_words))
    done = end["done"]
    return Built(tuple(done["weights"]), done["plugin_layers"], done["inlined"], done["builder_version"])


def _message(line: str) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except ValueError:  # cut off by a crash
        return {}
    return message if isinstance(message, dict) else {}


def _listen(stream: Any, last_words: deque[str]) -> None:
    for raw in stream:
        if line := raw.decode(errors="backslashreplace").strip():
            last_words.append(line[:400])


def _crash(what: str, code: int, last_words: Sequence[str]) -> ToprovarError:
    """Signal or exit code, and the last lines that the child wrote."""
    said = " | ".join(last_words) if last_words else "it said nothing"
    if code == -signal.SIGKILL:
        return EnvironmentFault(
            f"the builder was killed at {what} (SIGKILL); that is how a system ends what takes too much memory",
            "close other programs, or use a larger machine; finished engines are kept",
        )
    end = f"ended with signal {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
    return EnvironmentFault(
        f"the builder {end} at {what}: {said}",
        "run the same command again, finished engines are kept; if it ends there again, the builder has a fault",
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
