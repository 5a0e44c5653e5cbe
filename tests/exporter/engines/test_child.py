"""Children that crash, are killed, say nothing or never end: one clear error each, and nothing is left behind."""

import os
import time
from dataclasses import asdict

import pytest
from engine_helpers import use_fake_builder

from toprovar.exporter.engines.builder import Job
from toprovar.exporter.engines.child import build_environment, installed_version, run_builder
from toprovar.runtime.errors import EXIT_ENVIRONMENT, EnvironmentFault


@pytest.fixture
def job(tmp_path):
    (tmp_path / "step_00.onnx").write_bytes(b"a graph")
    return Job("tensorrt-rtx", str(tmp_path / "step_00.onnx"), str(tmp_path / "step_00.plan"), ("8.9",))


def run(job, on_fraction=lambda fraction: None):
    with build_environment("tensorrt-rtx") as environment:
        return run_builder(job, environment, on_fraction)


def test_a_child_tells_its_progress_and_its_plan(job, tmp_path, monkeypatch):
    use_fake_builder(monkeypatch)
    fractions = []
    built = run(job, fractions.append)
    assert fractions == [0.5]
    assert built.weights == ("head",)
    assert (tmp_path / "step_00.plan").stat().st_size == 64
    with build_environment("tensorrt-rtx") as environment:
        assert installed_version("tensorrt-rtx", environment) == "1.7.1.116"


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("abort", "the builder ended with signal SIGABRT at step_00.onnx: building step_00.onnx | terminate called"),
        ("silent", "the builder ended with exit code 3 at step_00.onnx: building step_00.onnx"),
        ("half", "the builder ended with exit code 0 at step_00.onnx"),
        ("kill", "the builder was killed at step_00.onnx (SIGKILL); that is how a system ends what takes too much"),
    ],
)
def test_a_crash_is_one_error_with_the_last_words(job, monkeypatch, behaviour, message):
    use_fake_builder(monkeypatch, behaviour)
    with pytest.raises(EnvironmentFault) as caught:
        run(job)
    assert message in caught.value.message
    assert "finished engines are kept" in caught.value.hint
    assert caught.value.exit_code == EXIT_ENVIRONMENT
    assert not os.path.exists(job.plan)


def test_an_interrupt_ends_the_child(job, tmp_path, monkeypatch):
    use_fake_builder(monkeypatch, "hang")
    monkeypatch.setenv("FAKE_BUILDER_PID", str(tmp_path / "pid"))

    def interrupt(fraction):
        raise KeyboardInterrupt

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run(job, interrupt)
    assert time.monotonic() - started < 30
    with pytest.raises(ProcessLookupError):
        os.kill(int(next(tmp_path.glob("pid.*")).suffix[1:]), 0)


def test_a_builder_that_cannot_start_is_an_error(job, monkeypatch):
    use_fake_builder(monkeypatch)
    monkeypatch.setattr("toprovar.exporter.engines.child.COMMAND", ("/nonexistent/python",))
    with pytest.raises(OSError, match="nonexistent"):
        run(job)


def test_jobs_travel_as_json(job):
    assert Job(**asdict(job)) == job
