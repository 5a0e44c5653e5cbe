import json
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra 'text'")

from text_encoder_files import write_qwen2_vl, write_t5, write_tokenizer

from toprovar.exporter.text_encoders.encoding import encode_all
from toprovar.exporter.text_encoders.folder import encoder_folder, open_encoder
from toprovar.exporter.text_encoders.qwen2_vl import Qwen2VlTextEncoder
from toprovar.exporter.text_encoders.t5 import T5TextEncoder
from toprovar.runtime.errors import EnvironmentFault, ToprovarError

# fp32 rows against transformers' own, other shapes of the same products: measured 5e-7 of rows of size 1
FP32 = 2e-5


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    folder = tmp_path_factory.mktemp("t5") / "encoder"
    return folder, write_t5(folder)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen") / "encoder"
    return folder, write_qwen2_vl(folder)


def padded_reference(model, tokenizer, prompt: str) -> np.ndarray:
    """As the published code does it: 512 tokens, padding masked, valid rows kept."""
    batch = tokenizer([prompt], padding="max_length", truncation=True, max_length=512, return_tensors="pt")
    with torch.inference_mode():
        rows = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state[0]
    return rows[batch["attention_mask"][0].bool()].numpy()


@pytest.mark.parametrize("prompt", ["a red apple", "", "ein Überraschungsei, 红苹果 \U0001f34e", "x" * 700])
def test_t5_rows_are_those_of_the_padded_reference(t5, prompt):
    folder, model = t5
    encoder = T5TextEncoder(folder)
    found = encoder.encode(prompt)
    expected = padded_reference(model, encoder.tokenizer, prompt)
    assert found.rows.dtype == np.float32
    assert found.rows.shape == expected.shape
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(found.rows, expected, atol=FP32)
    assert found.valid.all()
    assert found.kept == len(expected) <= 512


def test_an_empty_t5_prompt_is_its_end_token(t5):
    assert T5TextEncoder(t5[0]).encode("").rows.shape == (1, 16)


def test_a_long_prompt_is_cut_at_512_tokens_with_a_warning_of_both_counts(t5, caplog):
    found = encode_all(T5TextEncoder(t5[0]), ["y" * 600, "a red apple"], negative="z" * 800)
    cut = int(found.token_counts[0])
    assert cut > 600
    assert [len(rows) for rows in found.rows] == [512, 4]
    assert f"prompt 0 has {cut} tokens; the first 512 are used: " + "y" * 39 + "…" in caplog.text
    assert "negative prompt has" in caplog.text
    assert "prompt 1" not in caplog.text


def test_a_prefix_is_encoded_and_prompts_keep_their_text(t5):
    encoder = T5TextEncoder(t5[0])
    found = encode_all(encoder, ["a red apple"], negative="dull", prefix="<<<t=5s>>>")
    assert found.prompts == ("a red apple",)
    np.testing.assert_array_equal(found.rows[0], encoder.encode("<<<t=5s>>>a red apple").rows)
    assert found.negative is not None
    np.testing.assert_array_equal(found.negative[1], encoder.encode("dull").rows)
    assert found.encoder["prefix"] == "<<<t=5s>>>"


def test_bf16_rows_stay_close_and_are_written_as_fp32(t5):
    prompt = "a red apple"
    wide, narrow = (T5TextEncoder(t5[0], dtype).encode(prompt).rows for dtype in ("fp32", "bf16"))
    assert narrow.dtype == np.float32
    difference = np.abs(wide - narrow).max() / np.abs(wide).max()
    assert 0 < difference < 0.05  # 8 bits of mantissa through two layers: measured 0.01


def test_weights_may_come_in_bf16_and_in_torch_shards(tmp_path):
    model = write_t5(tmp_path / "bf16", dtype=torch.bfloat16)
    encoder = T5TextEncoder(tmp_path / "bf16")
    expected = padded_reference(model, encoder.tokenizer, "a red apple")
    np.testing.assert_allclose(encoder.encode("a red apple").rows, expected, atol=FP32)
    state = model.state_dict()
    names = sorted(state)
    for number, part in enumerate((names[:5], names[5:])):
        torch.save({name: state[name].clone() for name in part}, tmp_path / "bf16" / f"pytorch_model-{number}.bin")
    index = {"weight_map": {name: f"pytorch_model-{int(name not in names[:5])}.bin" for name in names}}
    (tmp_path / "bf16" / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (tmp_path / "bf16" / "model.safetensors").unlink()
    np.testing.assert_allclose(T5TextEncoder(tmp_path / "bf16").encode("a red apple").rows, expected, atol=FP32)


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", ""])
def test_qwen_rows_are_those_of_the_text_model(tmp_path, prefix):
    model = write_qwen2_vl(tmp_path / "q", prefix)
    system = "describe a picture:"
    encoder = Qwen2VlTextEncoder(tmp_path / "q", system_prompt=system)
    tokenizer = encoder.tokenizer
    found = encoder.encode("a red apple")
    front = tokenizer(system)["input_ids"]
    ids = tokenizer("a red apple", padding="max_length", max_length=300)["input_ids"]
    mask = [1] * len(front) + [int(token != tokenizer.pad_token_id) for token in ids]
    with torch.inference_mode():
        states = model(
            input_ids=torch.tensor([front + ids]), attention_mask=torch.tensor([mask]), output_hidden_states=True
        ).hidden_states
    np.testing.assert_allclose(found.rows, states[-1][0, len(front) :].numpy(), atol=FP32)
    assert found.rows.shape == (300, 16)
    assert not found.valid[0]  # this tokenizer pads in front
    assert found.valid[-found.kept :].all()
    assert found.valid.sum() == found.kept


def test_the_system_prompt_changes_the_rows_and_is_noted(qwen):
    plain, led = Qwen2VlTextEncoder(qwen[0]), Qwen2VlTextEncoder(qwen[0], system_prompt="paint")
    assert np.abs(plain.encode("a red apple").rows - led.encode("a red apple").rows)[-3:].max() > 1e-3
    assert plain.facts["system_prompt_tokens"] == 0 < led.facts["system_prompt_tokens"]
    assert plain.facts["system_prompt_sha256"] != led.facts["system_prompt_sha256"]


def test_padding_follows_the_tokenizer(tmp_path):
    write_qwen2_vl(tmp_path / "q", padding_side="right")
    found = Qwen2VlTextEncoder(tmp_path / "q").encode("a red apple")
    assert found.valid[: found.kept].all()
    assert not found.valid[found.kept :].any()


def test_qwen_refuses_a_prompt_without_tokens_and_cuts_at_300(qwen, caplog):
    encoder = Qwen2VlTextEncoder(qwen[0])
    with pytest.raises(ToprovarError, match="has no tokens"):
        encoder.encode("")
    found = encode_all(encoder, ["z" * 500])
    assert found.rows[0].shape == (300, 16)
    assert "the first 300 are used" in caplog.text


def test_facts_tell_the_weights_and_the_tokenizer(t5, tmp_path):
    first = encode_all(T5TextEncoder(t5[0]), ["a"]).encoder
    write_t5(tmp_path / "other", seed=1)
    other = encode_all(T5TextEncoder(tmp_path / "other"), ["a"]).encoder
    assert first["kind"] == "t5"
    assert first["max_tokens"] == 512
    assert first["weights_sha256"] != other["weights_sha256"]
    assert first["tokenizer_sha256"] == other["tokenizer_sha256"]


def test_a_folder_of_another_model_is_refused(t5, qwen):
    with pytest.raises(ToprovarError, match=r"of type 't5'; expected qwen2_vl"):
        Qwen2VlTextEncoder(t5[0])
    with pytest.raises(ToprovarError, match=r"of type 'qwen2_vl'; expected t5"):
        T5TextEncoder(qwen[0])


def test_a_missing_tensor_and_a_missing_tokenizer_are_named(tmp_path):
    write_t5(tmp_path / "t5")
    config = json.loads((tmp_path / "t5" / "config.json").read_text())
    (tmp_path / "t5" / "config.json").write_text(json.dumps({**config, "num_layers": 3}))
    with pytest.raises(ToprovarError, match=r"encoder\.block\.2\..* is missing"):
        T5TextEncoder(tmp_path / "t5")
    (tmp_path / "t5" / "config.json").write_text(json.dumps(config))
    for file in tmp_path.glob("t5/tokenizer*"):
        file.unlink()
    with pytest.raises(ToprovarError, match="holds no tokenizer"):
        T5TextEncoder(tmp_path / "t5")


def test_a_tokenizer_with_more_words_than_the_encoder_is_refused(tmp_path):
    write_qwen2_vl(tmp_path / "q")
    encoder = Qwen2VlTextEncoder(tmp_path / "q")
    encoder.model.config.vocab_size = 4
    with pytest.raises(ToprovarError, match="the text model has 4 words"):
        encoder.encode("a red apple")


@pytest.mark.parametrize("name", ["no/such-encoder", "nothing here"])
def test_nothing_is_downloaded_unasked(name, monkeypatch):
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("a connection was made"))
    with pytest.raises(ToprovarError, match=r"nor in the hub's cache|does not exist"):
        encoder_folder(name)


def test_a_file_is_no_encoder(t5):
    with pytest.raises(ToprovarError, match="is a file"):
        encoder_folder(str(t5[0] / "config.json"))
    assert encoder_folder(str(t5[0])) == t5[0]
    assert open_encoder(t5[0], ("t5",)).weights.format == "safetensors"


def test_tokenizer_files_can_be_written_twice(tmp_path):
    for name in ("a", "b"):
        write_tokenizer(tmp_path / name, ends=True)
    assert (tmp_path / "a" / "tokenizer.json").read_bytes() == (tmp_path / "b" / "tokenizer.json").read_bytes()


def test_without_transformers_the_extra_is_named(t5, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(EnvironmentFault, match="transformers, which is not installed") as fault:
        T5TextEncoder(t5[0])
    assert fault.value.hint == "pip install 'toprovar[torch,text]'"
