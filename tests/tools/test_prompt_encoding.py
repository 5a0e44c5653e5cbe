import json
import shutil

import numpy as np
import pytest
from command_line import call, done, refusal, write_model

pytest.importorskip("transformers", reason="needs the extra 'text'")

from text_encoder_files import write_qwen2_vl, write_t5

from toprovar.runtime.embeddings import read_embeddings

PROMPTS = ["a red apple", "two dogs, 红苹果", "w" * 600]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encode")
    write_t5(folder / "t5")
    write_qwen2_vl(folder / "qwen")
    (folder / "prompts.txt").write_text("# a comment\n" + "\n".join(PROMPTS))
    result = done(
        "encode-prompts", folder / "prompts.txt", "--encoder", folder / "t5", "--kind", "t5",
        "-o", folder / "rows.safetensors", "--negative", "blurry", "--json",
    )  # fmt: skip
    (folder / "facts.json").write_text(result.stdout)
    (folder / "stderr.txt").write_text(result.stderr)
    return folder


def test_the_command_writes_rows_and_says_what(folder):
    facts = json.loads((folder / "facts.json").read_text())
    found = read_embeddings(folder / "rows.safetensors")
    assert found.prompts == tuple(PROMPTS)
    assert facts["tokens"] == [len(rows) for rows in found.rows]
    assert facts["cut"] == 1
    assert facts["encoder"]["kind"] == "t5"
    assert found.negative is not None
    assert found.negative[0] == "blurry"
    told = " ".join((folder / "stderr.txt").read_text().split())
    assert "prompt 2 has 60" in told
    assert "the first 512 are used" in told


def test_two_encodings_give_the_same_bytes(folder, tmp_path):
    done(
        "encode-prompts", folder / "prompts.txt", "--encoder", folder / "t5", "--kind", "t5", "--negative", "blurry",
        "-o", tmp_path / "again.safetensors",
    )  # fmt: skip
    assert (tmp_path / "again.safetensors").read_bytes() == (folder / "rows.safetensors").read_bytes()


def test_hart_rows_come_with_a_note_about_the_system_prompt(folder, tmp_path):
    arguments = ["encode-prompts", folder / "prompts.txt", "--encoder", folder / "qwen", "--kind", "qwen2-vl"]
    plain = done(*arguments, "-o", tmp_path / "plain.safetensors", "--limit", 1)
    assert "no system prompt" in plain.stderr
    (tmp_path / "system.txt").write_text("paint this: ")
    led = done(*arguments, "-o", tmp_path / "led.safetensors", "--system-prompt", tmp_path / "system.txt", "--limit", 1)
    assert "no system prompt" not in led.stderr
    found = read_embeddings(tmp_path / "led.safetensors")
    assert found.rows[0].shape == (300, 16)
    assert found.encoder["system_prompt_tokens"] > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["-o", "rows.pt"], "does not end in .safetensors"),
        (["--encoder", "no/such"], "is neither a folder nor in the hub's cache"),
        (["--system-prompt", "x.txt"], "--system-prompt is not read by kind t5"),
        (["--kind", "qwen2-vl"], "expected qwen2_vl"),
    ],
)
def test_wrong_requests_are_refused(folder, tmp_path, monkeypatch, changes, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("a connection was made"))
    options = {"--encoder": folder / "t5", "--kind": "t5", "-o": "rows.safetensors"} | {changes[0]: changes[1]}
    words = [word for pair in options.items() for word in pair]
    result = call("encode-prompts", folder / "prompts.txt", *words)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert not list(tmp_path.iterdir())


def test_a_gpu_that_is_not_there_is_the_environments_fault(folder, tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("needs a machine without GPU")
    told = refusal(
        "encode-prompts", folder / "prompts.txt", "--encoder", folder / "t5", "--kind", "t5", "--device", "cuda",
        "-o", tmp_path / "r.safetensors", code=3,
    )  # fmt: skip
    assert "no CUDA GPU" in told


@pytest.fixture(scope="module")
def short_rows(folder):
    """Rows that the tiny model's text side of 12 tokens takes."""
    (folder / "short.txt").write_text("red\n\U0001f34e apple\n")
    done(
        "encode-prompts", folder / "short.txt", "--encoder", folder / "t5", "--kind", "t5", "--negative", "dog",
        "-o", folder / "short.safetensors",
    )  # fmt: skip
    return folder / "short.safetensors"


def test_a_picture_from_rows_is_that_of_the_rows(short_rows, tiny_bundle, tmp_path):
    from helpers import open_pipeline
    from PIL import Image

    found = read_embeddings(short_rows)
    assert found.negative is not None
    expected = open_pipeline(tiny_bundle).generate(
        None, 5, "planned", text_rows=found.rows[1], negative_rows=found.negative[1]
    )
    for choice in (["--index", 1], ["--prompt", "\U0001f34e apple"]):
        record = json.loads(
            done(
                "run", tiny_bundle, "--embeddings", short_rows, *choice, "--seed", 5, "-o", tmp_path / "p.png", "--json"
            ).stdout
        )
        np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / "p.png")), expected.image)
        assert record["prompt"] == "\U0001f34e apple"
        assert record["prompt_tokens"]["used"] == len(found.rows[1])
        assert Image.open(tmp_path / "p.png").info["negative_prompt"] == "dog"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "no prompt given"),
        (["--index", 0], "--index picks a prompt of --embeddings"),
        (["--embeddings", "ROWS"], "holds 2 prompts"),
        (["--embeddings", "ROWS", "--prompt", "blue"], "holds no prompt 'blue'"),
        (["--embeddings", "ROWS", "--index", 9], "has no prompt 9"),
    ],
)
def test_a_prompt_must_be_told(short_rows, tiny_bundle, tmp_path, options, message):
    words = [short_rows if word == "ROWS" else word for word in options]
    assert message in refusal("run", tiny_bundle, *words, "-o", tmp_path / "p.png")
    assert not (tmp_path / "p.png").exists()


def test_a_model_without_text_encoder_calibrates_from_rows(short_rows, tiny, tmp_path):
    model = write_model(tiny, tmp_path / "model")
    settings = json.loads((model / "model.json").read_text())
    bare = {name: value for name, value in settings.items() if name not in ("text_encoder", "vocabulary")}
    (model / "model.json").write_text(json.dumps(bare))
    arguments = ["calibrate", model, "--method", "fixed_exit", "-o", tmp_path / "out"]
    assert "encode-prompts" in refusal(*arguments, "--limit", 1)
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    done(*arguments, "--embeddings", short_rows)
    index = json.loads((tmp_path / "out" / "stats" / "index.json").read_text())
    assert index["prompts"] == list(read_embeddings(short_rows).prompts)
    assert index["model"]["embeddings_sha256"] == read_embeddings(short_rows).sha256
    (tmp_path / "other.txt").write_text("blue\n")
    told = refusal(*arguments, "--embeddings", short_rows, "--prompts", tmp_path / "other.txt")
    assert "holds no prompt 'blue'" in told


def test_rows_of_another_width_are_refused(short_rows, tmp_path):
    told = refusal("calibrate", "demo", "--embeddings", short_rows, "-o", tmp_path / "out")
    assert "rows of width 16; model demo reads rows of width 256" in told
