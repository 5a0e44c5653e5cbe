"""Calling the command line in process, and model files to call it with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from typer.testing import CliRunner

from toprovar.tools.cli import app

PARTS = ("transformer", "tokenizer", "text_encoder")


def call(*arguments: object) -> Any:
    """Runs a command; any end but an exit code fails the test."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert "Traceback" not in result.stderr
    return result


def done(*arguments: object) -> Any:
    result = call(*arguments)
    assert result.exit_code == 0, result.stderr
    return result


def refusal(*arguments: object, code: int = 2, hint: bool = True) -> str:
    """The one error, in the project's form, that a command ends with; nothing may stand on stdout."""
    result = call(*arguments)
    assert result.exit_code == code, result.output
    assert not result.stdout
    assert result.stderr.count("error: ") == 1
    told = result.stderr[result.stderr.index("error: ") :]
    assert ("\n  hint: " in told) >= hint, told
    return " ".join(told.split())


def write_model(model: Any, folder: Path, **settings: Any) -> Path:
    """The three checkpoints, the vocabulary and the model.json of a model; 7 scales up to 16x16."""
    folder.mkdir(parents=True)
    files = {part: f"{part}.safetensors" for part in PARTS}
    for part, file in files.items():
        state = getattr(model, part).state_dict()
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / file)
    (folder / "vocabulary.json").write_text(json.dumps(model.vocabulary))
    facts = {"schema_version": 1, **files, "vocabulary": "vocabulary.json", "budget": "0.06M"}
    facts |= {"text_tokens": 12, "cfg": [2.5], "tau": [0.8], **settings}
    (folder / "model.json").write_text(json.dumps(facts))
    return folder


def listing(folder: Path) -> list[str]:
    """All names below a folder, hidden ones too."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
