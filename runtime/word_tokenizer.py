"""Word-level tokenizer of the demo model's text encoder.

A prompt is normalised (NFKC, casefold), cut into words, and every word is looked up in a closed vocabulary. Unknown
words fall back to their singular ("dogs" -> "dog", "cherries" -> "cherry", "foxes" -> "fox") where only that is known,
and to `<unk>` otherwise. `<end>` closes every sequence and survives truncation.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from toprovar.runtime.errors import ToprovarError

PAD, UNKNOWN, END = "<pad>", "<unk>", "<end>"
PAD_ID, UNKNOWN_ID, END_ID = 0, 1, 2
SPECIAL_WORDS = (PAD, UNKNOWN, END)

# Letters and digits of any script, combining marks glued on; an apostrophe or underscore ends a word.
_WORD = re.compile(r"[^\W_]+")
# (ending of the prompt's word, what replaces it), tried in this order.
_PLURALS = (("ies", "y"), ("ves", "f"), ("es", ""), ("s", ""))


@dataclass(frozen=True)
class TokenIds:
    """One encoded prompt.

    ids:   `kept + 1` vocabulary indices, the last one `<end>`; not padded.
    kept:  words of the prompt that are in `ids`.
    total: words that the prompt has; `total > kept` means that it was truncated.
    """

    ids: list[int]
    kept: int
    total: int


def words_of(prompt: str) -> Iterator[str]:
    """Words of any Unicode text, normalised; everything between them is dropped."""
    for match in _WORD.finditer(unicodedata.normalize("NFKC", prompt).casefold()):
        yield match.group()


class WordTokenizer:
    """Maps prompts to ids of a closed vocabulary.

    vocabulary: all entries in id order; the first three are `<pad>`, `<unk>`, `<end>`.
    Raises:     ToprovarError if the first three differ or an entry appears twice.
    """

    def __init__(self, vocabulary: Sequence[str]) -> None:
        head = tuple(vocabulary[:3])
        if head != SPECIAL_WORDS:
            raise ToprovarError(
                f"vocabulary starts with {list(head)}, expected {list(SPECIAL_WORDS)}",
                "load the vocabulary.json that belongs to the text encoder",
            )
        self.vocabulary = list(vocabulary)
        self._id_of = {word: index for index, word in enumerate(self.vocabulary)}
        if len(self._id_of) != len(self.vocabulary):
            twice = next(word for index, word in enumerate(self.vocabulary) if self._id_of[word] != index)
            raise ToprovarError(f"vocabulary has {twice!r} twice", "each word may have one id only")

    @property
    def size(self) -> int:
        return len(self.vocabulary)

    def id_of(self, word: str) -> int:
        """Id of one normalised word, its singular's, or `<unk>`. Special entries can't be reached by text."""
        found = self._id_of.get(word)
        if found is not None:
            return found
        for ending, replacement in _PLURALS:
            if word.endswith(ending) and len(word) > len(ending) + 1:
                found = self._id_of.get(word[: -len(ending)] + replacement)
                if found is not None:
                    return found
        return UNKNOWN_ID

    def encode(self, prompt: str, max_tokens: int) -> TokenIds:
        """Ids of a prompt, at most `max_tokens` with `<end>` counted; never raises for any text.

        prompt:     any Unicode text, may be empty; an empty one gives `<end>` alone.
        max_tokens: at least 1.
        Raises:     ValueError if max_tokens < 1.
        """
        if max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens}; it must leave room for {END}")
        words = list(words_of(prompt))
        kept = words[: max_tokens - 1]
        return TokenIds([*(self.id_of(word) for word in kept), END_ID], len(kept), len(words))


def tokenizer_from_document(document: Any, what: str) -> WordTokenizer:
    """The tokenizer of a parsed vocabulary.json.

    what:   how messages name the file
    Raises: ToprovarError if it is no vocabulary of this version.
    """
    hint = "restore the vocabulary.json that belongs to the text encoder"
    if not isinstance(document, dict) or document.get("schema_version") != 1:
        found = document.get("schema_version") if isinstance(document, dict) else type(document).__name__
        raise ToprovarError(f"{what} is no vocabulary: found schema_version {found}, expected 1", hint)
    words = document.get("words")
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ToprovarError(f"{what} holds no list of words under the key words", hint)
    try:
        return WordTokenizer(words)
    except ToprovarError as error:
        raise ToprovarError(f"{what}: {error.message}", error.hint) from None


def vocabulary_from_texts(texts: Sequence[str]) -> list[str]:
    """Vocabulary of all words in `texts`: the special entries, then the words in sorted order."""
    return [*SPECIAL_WORDS, *sorted({word for text in texts for word in words_of(text)})]
