import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from toprovar.runtime.embeddings import METADATA, PromptEmbeddings, read_embeddings, write_embeddings
from toprovar.runtime.errors import ToprovarError


def made(negative: bool = False) -> PromptEmbeddings:
    rows = tuple(np.full((n, 4), n, np.float32) for n in (3, 1, 2))
    valid = (np.array([False, True, True]), np.ones(1, bool), np.ones(2, bool))
    other = ("dull", np.zeros((2, 4), np.float32), np.ones(2, bool)) if negative else None
    return PromptEmbeddings(("a red apple", "", "два 🍎"), rows, valid, (9, 1, 2), {"kind": "t5"}, other)


@pytest.mark.parametrize("negative", [False, True])
def test_what_was_written_comes_back(tmp_path, negative):
    path = tmp_path / "e.safetensors"
    write_embeddings(path, made(negative))
    found = read_embeddings(path)
    assert found.prompts == made().prompts
    for mine, theirs in zip((*found.rows, *found.valid), (*made().rows, *made().valid), strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)
    assert found.token_counts == (9, 1, 2)
    assert found.encoder == {"kind": "t5"}
    assert (found.negative is not None) == negative
    assert found.width == 4
    assert len(found.sha256) == 64


def test_prompts_are_picked_by_text_or_number(tmp_path):
    found = made()
    assert found.select("два 🍎", None) == 2
    assert found.select(None, 1) == 1
    for prompt, index, message in [
        (None, None, "holds 3 prompts"),
        (None, 3, "has no prompt 3; it has 0 to 2"),
        ("a red apple", 0, "both given"),
    ]:
        with pytest.raises(ToprovarError, match=message):
            found.select(prompt, index)
    with pytest.raises(ToprovarError) as fault:
        found.select("a red appel", None)
    assert fault.value.hint == "did you mean 'a red apple'?"


def test_the_only_prompt_needs_no_number():
    one = PromptEmbeddings(("x",), (np.zeros((1, 4), np.float32),), (np.ones(1, bool),), (1,))
    assert one.select(None, None) == 0


def metadata(**changes) -> dict[str, str]:
    return {METADATA: json.dumps({"schema_version": 1, "prompts": ["a"], "negative": None, "encoder": {}, **changes})}


def tensors(**changes):
    facts = {
        "rows": np.zeros((2, 4), np.float32),
        "row_counts": np.array([2]),
        "token_counts": np.array([2]),
        "valid": np.ones(2, np.uint8),
    }
    return {name: array for name, array in {**facts, **changes}.items() if array is not None}


def test_the_file_that_is_damaged_below_is_whole(tmp_path):
    save_file(tensors(), tmp_path / "e.safetensors", metadata())
    assert read_embeddings(tmp_path / "e.safetensors").prompts == ("a",)


@pytest.mark.parametrize(
    ("changed", "facts", "message"),
    [
        ({}, {"schema_version": 2}, "schema version 2; expected 1"),
        ({}, {"prompts": [1]}, "no list of texts"),
        ({}, {"prompts": ["a", "b"]}, "2 prompts, 1 row counts"),
        ({}, {"more": 1}, "its metadata has schema_version, .*more"),
        ({}, {"encoder": 1}, "its metadata has"),
        ({}, {"negative": "n"}, "do not stand together"),
        ({"rows": None}, {}, "tensor rows is missing"),
        ({"rows": np.zeros((2, 4), np.float64)}, {}, "expected F32 with 2 axes"),
        ({"row_counts": np.array([3])}, {}, "for 3 counted ones"),
        ({"row_counts": np.array([-1])}, {}, "expected 1 to 512"),
        ({"row_counts": np.array([513])}, {}, "expected 1 to 512"),
        ({"rows": np.full((2, 4), np.nan, np.float32)}, {}, "non-finite"),
        ({"negative_rows": np.zeros((1, 5), np.float32), "negative_valid": np.ones(1, np.uint8)}, {"negative": "n"},
         "negative rows .1, 5. beside"),
        ({"negative_valid": np.ones(1, np.uint8)}, {}, "negative_rows is missing"),
    ],
)  # fmt: skip
def test_files_that_no_writer_makes_are_refused(tmp_path, changed, facts, message):
    path = tmp_path / "e.safetensors"
    save_file(tensors(**changed), path, metadata(**facts))
    with pytest.raises(ToprovarError, match=message) as fault:
        read_embeddings(path)
    assert fault.value.hint


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_truncated_file_is_refused(tmp_path, keep):
    path = tmp_path / "e.safetensors"
    write_embeddings(path, made())
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ToprovarError, match="cannot be read as safetensors"):
        read_embeddings(path)


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(ToprovarError, match="does not exist"):
        read_embeddings(tmp_path / "none.safetensors")
    with pytest.raises(ToprovarError, match="is a folder"):
        read_embeddings(tmp_path)


def test_metadata_that_is_no_json_is_refused(tmp_path):
    save_file(tensors(), tmp_path / "e.safetensors", {METADATA: "{"})
    with pytest.raises(ToprovarError, match="not valid JSON"):
        read_embeddings(tmp_path / "e.safetensors")


def test_a_checkpoint_is_no_list_of_prompts(tmp_path):
    save_file({"w": np.zeros(3, np.float32)}, tmp_path / "w.safetensors", {"format": json.dumps("pt")})
    with pytest.raises(ToprovarError, match="holds no encoded prompts"):
        read_embeddings(tmp_path / "w.safetensors")
