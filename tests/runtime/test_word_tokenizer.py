from __future__ import annotations

import pytest

from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.word_tokenizer import END_ID, UNKNOWN_ID, WordTokenizer, vocabulary_from_texts


@pytest.fixture
def tokenizer() -> WordTokenizer:
    return WordTokenizer(vocabulary_from_texts(["a dog, 3d style, on red", "cherry glass glasses leaf fox"]))


def test_words_become_ids_and_end_closes_them(tokenizer: WordTokenizer) -> None:
    encoded = tokenizer.encode("A DOG, 3D style -- on red!", 32)
    assert [tokenizer.vocabulary[i] for i in encoded.ids] == ["a", "dog", "3d", "style", "on", "red", "<end>"]
    assert (encoded.kept, encoded.total) == (6, 6)


def test_truncation_keeps_end(tokenizer: WordTokenizer) -> None:
    encoded = tokenizer.encode("dog " * 10, 4)
    assert encoded.ids[-1] == END_ID
    assert (len(encoded.ids), encoded.kept, encoded.total) == (4, 3, 10)
    assert tokenizer.encode("dog", 1).ids == [END_ID]


def test_empty_prompt_is_end_alone(tokenizer: WordTokenizer) -> None:
    assert tokenizer.encode("", 8).ids == [END_ID]
    assert tokenizer.encode(" \t\n.,!", 8).ids == [END_ID]


@pytest.mark.parametrize(
    ("plural", "singular"), [("dogs", "dog"), ("cherries", "cherry"), ("foxes", "fox"), ("leaves", "leaf")]
)
def test_unknown_plural_falls_back_to_its_singular(tokenizer: WordTokenizer, plural: str, singular: str) -> None:
    assert tokenizer.encode(plural, 8).ids == tokenizer.encode(singular, 8).ids


def test_known_plural_keeps_its_own_id(tokenizer: WordTokenizer) -> None:
    assert tokenizer.encode("glasses", 8).ids != tokenizer.encode("glass", 8).ids


@pytest.mark.parametrize(
    "text", ["\0", "狗 🐕 собака", "\ud800", "e\u0301" * 50, "a" * 10_000, "dog " * 10_000, "ﬁ ½ Å"]
)
def test_any_text_encodes(tokenizer: WordTokenizer, text: str) -> None:
    encoded = tokenizer.encode(text, 32)
    assert encoded.ids[-1] == END_ID
    assert len(encoded.ids) <= 32
    assert all(0 <= i < tokenizer.size for i in encoded.ids)


def test_special_entries_cannot_be_written(tokenizer: WordTokenizer) -> None:
    assert tokenizer.encode("<end>", 8).ids == [UNKNOWN_ID, END_ID]


def test_fullwidth_letters_are_the_same_word(tokenizer: WordTokenizer) -> None:
    assert tokenizer.encode("ｄｏｇ", 8).ids == tokenizer.encode("dog", 8).ids


def test_wrong_vocabularies_are_refused() -> None:
    with pytest.raises(ToprovarError, match="expected"):
        WordTokenizer(["dog"])
    with pytest.raises(ToprovarError, match="'dog' twice"):
        WordTokenizer(["<pad>", "<unk>", "<end>", "dog", "dog"])


def test_no_room_for_end_is_refused(tokenizer: WordTokenizer) -> None:
    with pytest.raises(ValueError, match="max_tokens"):
        tokenizer.encode("dog", 0)
