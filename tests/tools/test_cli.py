"""The command line as a user meets it: help, exit codes, JSON, odd prompts, interrupts, and the same bytes twice."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
from command_line import call, done, listing, refusal, write_model
from PIL import Image

from toprovar.runtime.bundle import open_bundle
from toprovar.runtime.version import VERSION
from toprovar.tools import cli, console

COMMANDS = (
    "demo",
    "calibrate",
    "export",
    "run",
    "bench",
    "profile",
    "evaluate",
    "inspect",
    "rebuild",
    "env",
    "plugins",
)
OPTIONAL = ("torch", "onnx", "onnx_ir", "skimage", "matplotlib", "jinja2", "scipy")
INTERRUPTED = 130

# as on a machine without the optional packages; prints {command: [exit code, stdout, stderr]}
BARE_MACHINE = f"""
import json, sys

for name in {OPTIONAL!r}:
    sys.modules[name] = None
from typer.testing import CliRunner
from toprovar.tools.cli import app

ends = []
for arguments in json.loads(sys.argv[1]):
    result = CliRunner().invoke(app, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    ends.append([result.exit_code, result.stdout, result.stderr])
print(json.dumps(ends))
"""


@pytest.fixture(scope="module")
def stored(tiny, tmp_path_factory):
    return write_model(tiny, tmp_path_factory.mktemp("model") / "tiny")


def on_a_bare_machine(*commands):
    arguments = json.dumps([[str(part) for part in command] for command in commands])
    output = subprocess.check_output([sys.executable, "-c", BARE_MACHINE, arguments], text=True)
    return json.loads(output.splitlines()[-1])


# -- what needs nothing optional ---------------------------------------------------------------------------------------


def test_help_works_with_nothing_optional_installed():
    ends = on_a_bare_machine(["--help"], *([command, "--help"] for command in COMMANDS))
    for command, (code, out, _) in zip(("toprovar", *COMMANDS), ends, strict=True):
        assert code == 0, command
        assert "Usage:" in out, command
    assert all(command in ends[0][1] for command in COMMANDS)


def test_running_needs_nothing_optional_and_making_says_what_it_needs(tiny_bundle, tmp_path):
    works = (
        ["run", tiny_bundle, "-p", "red apple", "-o", tmp_path / "x.png"],
        ["bench", tiny_bundle, "--runs", 1, "--json"],
        ["inspect", tiny_bundle],
        ["inspect", tiny_bundle / "plan.json"],
        ["env"],
    )
    lacks = (
        ["calibrate", "demo", "-o", tmp_path / "c"],
        ["export", "demo", "-o", tmp_path / "e"],
        ["demo", "-o", tmp_path / "d"],
        ["evaluate", "demo", "-o", tmp_path / "v"],
        ["inspect", "demo"],
    )
    ends = on_a_bare_machine(*works, *lacks)
    for command, (code, _, err) in zip(works, ends, strict=False):
        assert code == 0, (command, err)
    for command, (code, out, err) in zip(lacks, ends[len(works) :], strict=True):
        assert code == 3, (command, err)
        assert not out
        assert re.match(r"error: .*torch.*\n  hint: install it:  pip install 'toprovar\[torch\]'", err), err
    assert listing(tmp_path) == ["x.png"]


@pytest.mark.parametrize("missing", ["jinja2", "matplotlib", "skimage"])
def test_what_calibrate_needs_at_its_end_is_asked_for_at_its_start(monkeypatch, missing, stored, tmp_path):
    monkeypatch.setitem(sys.modules, missing, None)
    assert f"calibrate needs {missing}, which is not installed" in refusal(
        "calibrate", stored, "-o", tmp_path / "c", code=3
    )
    assert not listing(tmp_path)


# -- usage -------------------------------------------------------------------------------------------------------------


def test_version_is_printed():
    assert done("--version").stdout.strip() == VERSION


def test_no_command_prints_the_help():
    result = call()
    assert result.exit_code in (0, 2)
    assert "calibrate" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["calibrat"], "no such command 'calibrat' hint: did you mean 'calibrate'?"),
        (["export", "demo", "--oout", "x"], "toprovar export: no such option: --oout hint: did you mean --out?"),
        (["run", "b", "--promt", "x"], "no such option: --promt hint: did you mean --prompt?"),
        (["--bogus"], "no such option: --bogus"),
        (["run"], "missing argument"),
        (["export", "demo"], "missing option '--out'"),
        (["run", "b", "-p"], "requires an argument"),
        (["env", "surplus"], "unexpected extra argument"),
        (["bench", "b", "--runs", "many"], "invalid value 'many' for '--runs'"),
        (["export", "demo", "-o", "x", "--dtype", "int8"], "invalid value 'int8' for '--dtype'"),
    ],
)
def test_wrong_usage_is_one_error_with_a_hint(arguments, message):
    assert message in refusal(*arguments).lower()


def test_the_export_program_is_the_export_command(stored, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cli, "_interruptible", lambda: None)
    monkeypatch.setattr(sys, "argv", ["toprovar-export", str(stored), "-o", str(tmp_path / "b")])
    with pytest.raises(SystemExit) as end:
        cli.export_main()
    assert end.value.code == 0
    done("export", stored, "-o", tmp_path / "c")
    assert contents(tmp_path / "b") == contents(tmp_path / "c")
    monkeypatch.setattr(sys, "argv", ["toprovar-export", str(stored), "--oout", "x"])
    with pytest.raises(SystemExit) as end:
        cli.export_main()
    assert end.value.code == 2
    assert "toprovar-export: no such option: --oout\n  hint: did you mean --out?" in capsys.readouterr().err


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# -- JSON --------------------------------------------------------------------------------------------------------------


def test_json_is_one_document_whatever_is_warned_and_however_narrow(stored, tiny_bundle, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    plan = tmp_path / "c" / "plan.json"
    for arguments in (
        ("calibrate", stored, "-o", plan.parent, "--limit", 1),  # warns
        ("export", stored, "-o", tmp_path / "b", "--plan", plan),
        ("export", stored, "-o", tmp_path / "b", "--dry-run"),
        ("run", tiny_bundle, "-p", "red " * 40, "-o", tmp_path / "x.png", "--threads", 1000),  # warns twice
        ("bench", tiny_bundle, "--runs", 1, "-p", "red " * 40),
        ("inspect", tiny_bundle),
        ("inspect", plan),
        ("inspect", stored),
        ("inspect", stored / "tokenizer.safetensors"),
        ("env",),
    ):
        result = done(*arguments, "--json")
        assert isinstance(json.loads(result.stdout), dict), arguments
    assert "warning: " in done("run", tiny_bundle, "-p", "red " * 40, "-o", tmp_path / "x.png", "--json").stderr


def test_demo_prints_its_summary_as_json(monkeypatch, tmp_path):
    monkeypatch.setattr("toprovar.tools.demo.run_demo", lambda *arguments: {"ssim_mean": 0.9})
    assert json.loads(done("demo", "-o", tmp_path, "--json").stdout) == {"ssim_mean": 0.9}


def test_without_json_results_are_on_stdout_and_all_else_on_stderr(tiny_bundle, tmp_path):
    result = done("run", tiny_bundle, "-p", "red", "-o", tmp_path / "x.png")
    assert not result.stdout
    assert re.fullmatch(r"wrote .*/x\.png \(planned, 6 scales\) in \d+\.\d\ds\n", result.stderr)
    assert "dense" in done("bench", tiny_bundle, "--runs", 1).stdout


# -- prompts and names are data ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        "🍎 apple",
        "תפוח אדום",
        "red " * 2500,
        "a\0b",
        "a\ud800b",
        "\x07\x1b[31mred",
        "<script>",
        "[red]x[/red]",
        "-x",
    ],
)
def test_any_prompt_makes_a_picture_and_is_kept_with_it(tiny_bundle, tmp_path, prompt):
    out = tmp_path / "x.png"
    record = json.loads(done("run", tiny_bundle, "--prompt", prompt, "-o", out, "--json").stdout)
    kept = prompt.replace("\0", "\N{SYMBOL FOR NULL}").replace("\ud800", "?")
    assert record["prompt"] == kept
    with Image.open(out) as image:
        assert image.text["prompt"] == kept


def test_names_are_printed_as_they_are(tiny_bundle, tmp_path):
    name = "[red]x[/red] :smile: größe.png"
    assert name in done("run", tiny_bundle, "-p", "red", "-o", tmp_path / name).stderr
    assert (tmp_path / name).exists()
    assert "[bold]x[/bold] is missing" in refusal("run", "[bold]x[/bold]", "-p", "red")


def test_a_terminal_is_shown_control_characters_and_obeys_none(capsys):
    console.say("a\x1b[31mb\x07\udcff\u202f\n")
    assert capsys.readouterr().err == "a\\x1b[31mb\\x07\\udcff\u202f\n\n"


def test_the_next_command_can_be_pasted(stored, tmp_path):
    out = tmp_path / "a b;c"
    assert f"next: toprovar run '{out}' --prompt" in done("export", stored, "-o", out).stderr


# -- run ---------------------------------------------------------------------------------------------------------------


def test_a_picture_says_how_it_was_made(tiny_bundle, tmp_path):
    out = tmp_path / "x.png"
    done("run", tiny_bundle, "-p", "red apple", "--negative", "dog", "--seed", 2**63, "--plan", "dense", "-o", out)
    with Image.open(out) as image:
        assert image.text == {
            "prompt": "red apple",
            "negative_prompt": "dog",
            "seed": str(2**63),
            "variant": "dense",
            "bundle_sha256": open_bundle(tiny_bundle).digest,
            "software": f"toprovar {VERSION}",
        }


@pytest.mark.parametrize("options", [["--cfg", "3"], ["--tau", "0.5,0.5,0.5,0.5,0.5,1000"], ["--threads", "1"], ["-v"]])
def test_options_are_taken(tiny_bundle, tmp_path, options):
    done("run", tiny_bundle, "-p", "red", "-o", tmp_path / "x.png", *options)


@pytest.mark.parametrize("seed", [0, 2**32, 2**63])
def test_the_same_seed_gives_the_same_file(tiny_bundle, tmp_path, seed):
    for name in ("a.png", "b.png"):
        done("run", tiny_bundle, "-p", "red apple", "--seed", seed, "-o", tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_previews_are_one_per_scale_and_the_last_is_the_picture(tiny_bundle, tmp_path):
    out, previews = tmp_path / "x.png", tmp_path / "p r ö"
    done("run", tiny_bundle, "-p", "red apple", "-o", out, "--preview-dir", previews)
    assert sorted(os.listdir(previews)) == [f"scale_{k:02d}.png" for k in range(6)]
    with Image.open(out) as picture, Image.open(previews / "scale_05.png") as last:
        assert picture.tobytes() == last.tobytes()


# -- the same bytes twice ----------------------------------------------------------------------------------------------


def test_calibrating_and_exporting_twice_give_the_same_bytes(stored, tmp_path):
    for name in ("1", "2"):
        done("calibrate", stored, "-o", tmp_path / f"c{name}", "--limit", 2, "--preset", "paper")
        done("export", stored, "-o", tmp_path / f"b{name}", "--plan", tmp_path / f"c{name}" / "plan.json")
    assert contents(tmp_path / "c1") == contents(tmp_path / "c2")
    assert contents(tmp_path / "b1") == contents(tmp_path / "b2")
    assert {"plan.json", "report.html", "stats/index.json"} <= contents(tmp_path / "c1").keys()


# -- interrupts --------------------------------------------------------------------------------------------------------


def interrupt(*arguments, **options):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("command", "where"),
    [
        ("calibrate", "toprovar.calibrate.prompt_run.ssim"),
        ("calibrate", "toprovar.tools.calibration.write_report"),
        ("calibrate", "os.replace"),
        ("export", "toprovar.exporter.bundle_writer.BundleGraphs.step"),
        ("export", "toprovar.exporter.bundle_writer.sha256_of"),
        ("export", "toprovar.exporter.output_folder._take_place"),
        ("run", "toprovar.runtime.pipeline.uniform_noise"),
        ("run", "os.replace"),
        ("bench", "toprovar.runtime.pipeline.uniform_noise"),
        ("demo", "toprovar.tools.demo.load_model"),
    ],
)
def test_an_interrupted_command_says_so_and_starts_again(stored, tiny_bundle, tmp_path, command, where):
    arguments = {
        "calibrate": ("calibrate", stored, "-o", tmp_path / "c", "--limit", 1),
        "export": ("export", stored, "-o", tmp_path / "b"),
        "run": ("run", tiny_bundle, "-p", "red", "-o", tmp_path / "x.png"),
        "bench": ("bench", tiny_bundle, "--runs", 1),
        "demo": ("demo", "-o", tmp_path / "d"),
    }[command]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, interrupt)
        result = call(*arguments)
    assert result.exit_code == INTERRUPTED
    assert result.stderr.splitlines()[-1].startswith("interrupted; ")
    assert not [name for name in listing(tmp_path) if "/." in f"/{name}"]
    assert not (tmp_path / "b").exists()
    if command != "demo":
        done(*arguments)


# runs a command that sends a signal to itself when it reaches a function for the second time
SIGNALLED = """
import importlib, os, signal, sys
module, name, number, *sys.argv[1:] = sys.argv[1:]
home = importlib.import_module(module)
real, calls = getattr(home, name), []
def reached(*arguments, **options):
    calls.append(1)
    if len(calls) == 2:
        os.kill(os.getpid(), int(number))
    return real(*arguments, **options)
setattr(home, name, reached)
sys.argv[0] = "toprovar"
from toprovar.tools.cli import main
main()
"""


def signalled(where, number, *arguments):
    words = [sys.executable, "-c", SIGNALLED, *where, str(int(number)), *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_a_run_ends_it_in_one_line(tiny_bundle, tmp_path, number):
    where = ("toprovar.runtime.noise", "uniform_noise")
    result = signalled(where, number, "run", tiny_bundle, "-p", "red", "-o", tmp_path / "x.png")
    assert result.returncode == INTERRUPTED
    assert result.stderr == f"{console.INTERRUPTED}\n"
    assert not listing(tmp_path)


def test_a_terminated_export_leaves_the_older_bundle_whole(stored, tmp_path):
    out = tmp_path / "b"
    done("export", stored, "-o", out)
    before = contents(out)
    where = ("toprovar.exporter.bundle_writer", "sha256_of")
    result = signalled(where, signal.SIGTERM, "export", stored, "-o", out, "--cfg", "7")
    assert result.returncode == INTERRUPTED, result.stderr
    assert "Traceback" not in result.stderr
    assert contents(out) == before
    assert os.listdir(tmp_path) == ["b"]


def test_a_killed_calibration_goes_on_to_the_same_plan(stored, tmp_path):
    done("calibrate", stored, "-o", tmp_path / "whole", "--limit", 2)
    where = ("toprovar.calibrate.statistics", "measure_prompt")
    arguments = ("calibrate", stored, "-o", tmp_path / "killed", "--limit", 2)
    assert signalled(where, signal.SIGKILL, *arguments).returncode == -signal.SIGKILL
    assert listing(tmp_path / "killed") == ["stats", "stats/prompt_0000.npz"]
    stamp = (tmp_path / "killed" / "stats" / "prompt_0000.npz").stat().st_mtime_ns
    done(*arguments)
    assert (tmp_path / "killed" / "stats" / "prompt_0000.npz").stat().st_mtime_ns == stamp
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


# -- faults that no check foresaw --------------------------------------------------------------------------------------


def raising(fault):
    def command(*arguments, **options):
        raise fault

    return command


@pytest.mark.parametrize(
    ("fault", "code", "message"),
    [
        (MemoryError(), 3, "error: there is not enough memory for this"),
        (OSError(5, "Input/output error", "/disk/file"), 2, "error: /disk/file cannot be used: input/output error"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_a_fault_of_the_machine_is_one_message(monkeypatch, fault, code, message):
    monkeypatch.setattr("toprovar.tools.environment.environment", raising(fault))
    result = call("env")
    assert result.exit_code == code
    assert result.stderr.startswith(message)


def test_a_fault_of_ours_is_not_hidden(monkeypatch):
    monkeypatch.setattr("toprovar.tools.environment.environment", raising(ValueError("ours")))
    with pytest.raises(ValueError, match="ours"):
        call("env")


def test_verbose_shows_the_traceback(tmp_path):
    from typer.testing import CliRunner

    result = CliRunner().invoke(cli.app, ["inspect", str(tmp_path / "absent"), "-v"])
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert "error: " in result.stderr
