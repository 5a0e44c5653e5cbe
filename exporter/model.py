"""A model ready to calibrate or export: transformer, tokenizer, text encoder and the settings it is meant to run with.

A model is named by a `model.json` (a folder that holds one, or the name of a packaged model such as "demo"), or by a
checkpoint path with the tokenizer beside it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool

from toprovar.exporter.checkpoints import Checkpoint, open_checkpoint
from toprovar.exporter.families import Family, recognise_family
from toprovar.exporter.family import ModelFamily
from toprovar.exporter.family_table import FAMILIES
from toprovar.exporter.infinity.family import InfinityFamily
from toprovar.exporter.lora import NO_ADAPTERS, Adapters
from toprovar.exporter.schedules import Schedule
from toprovar.runtime.errors import EnvironmentFault, ToprovarError
from toprovar.runtime.guidance import Guidance
from toprovar.runtime.json_files import read_json
from toprovar.runtime.manifest import MANIFEST_FILE
from toprovar.runtime.plan import Backbone, model_from_json
from toprovar.runtime.word_tokenizer import tokenizer_from_document

if TYPE_CHECKING:
    from toprovar.exporter.demo.text_encoder import WordTextEncoder
    from toprovar.exporter.weights_file import Thunks
    from toprovar.runtime.embeddings import PromptEmbeddings

PACKAGED = {"demo": Path(__file__).parent / "demo"}
MODEL_FILE = "model.json"


class ModelFile(BaseModel):
    """model.json: the files of a model, relative to it, and how it is meant to be sampled; what is left out is the
    family's published default.

    sides:  of the square maps of VAR and HART, or of InfinityStar's where they are not the published ones
    frames: of InfinityStar's video
    smooth: VAR and HART feed on means of codes instead of single ones
    heads:  where no learned factor of the checkpoint tells them
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    schema_version: int = 1
    transformer: str
    tokenizer: str | None = None
    text_encoder: str | None = None
    vocabulary: str | None = None
    aspect: Annotated[float, Field(gt=0, le=100)] = 1.0
    budget: str = "1M"
    sides: Annotated[tuple[Annotated[int, Field(ge=1, le=4096)], ...], Field(min_length=1, max_length=64)] | None = None
    frames: Annotated[int, Field(ge=1, le=65536)] | None = None
    heads: Annotated[int, Field(ge=1, le=4096)] | None = None
    cfg: Annotated[tuple[Annotated[float, Field(ge=0, le=1000)], ...], Field(min_length=1)] | None = None
    tau: Annotated[tuple[Annotated[float, Field(gt=0, le=1000)], ...], Field(min_length=1)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[tuple[Annotated[int, Field(ge=0, le=2**31 - 1)], ...], Field(min_length=1)] | None = None
    smooth: StrictBool | None = None
    text_tokens: Annotated[int, Field(ge=1, le=512)] | None = None


@dataclass
class Model:
    """transformer, tokenizer and text_encoder in eval mode on the CPU; `settings` are the model's own defaults."""

    name: str
    config: Any
    transformer: Any
    tokenizer: Any
    text_encoder: WordTextEncoder | None
    vocabulary: Any
    settings: ModelFile
    weights_sha256: str
    embeddings: PromptEmbeddings | None = None  # rows of prompts encoded beforehand, in place of a text encoder
    family: ModelFamily = field(default_factory=InfinityFamily)

    @property
    def backbone(self) -> Backbone:
        c = self.config
        return Backbone(
            family=self.family.name,
            layers=c.depth,
            width=c.width,
            heads=c.heads,
            bits=self.family.noise_columns(c),
            weights_sha256=self.weights_sha256,
        )

    @property
    def schedule(self) -> Schedule:
        return self.family.schedule(self)

    @property
    def text_tokens(self) -> int:
        """T, the length prompts are padded to."""
        return self.settings.text_tokens or self.family.text_tokens

    def guidance(self, schedule: Schedule | None = None) -> Guidance:
        return self.family.guidance(self, schedule or self.schedule)

    def exported_weights(self, schedule: Schedule) -> Thunks:
        """Every tensor of a bundle's weights file, by name, computed when called."""
        weights = self.family.weights(self, schedule)
        if self.text_encoder is not None:
            from toprovar.exporter.demo.graph import text_encoder_weights

            weights.update(text_encoder_weights(self.text_encoder))
        return weights


def require_torch() -> None:
    """Raises: EnvironmentFault if PyTorch is not installed."""
    try:
        import torch  # noqa: F401
    except ImportError:
        raise EnvironmentFault("PyTorch is not installed", "pip install 'toprovar[torch]'") from None


def read_model_file(path: Path) -> ModelFile:
    """Raises: ToprovarError for the first setting that is unknown or out of range."""
    return model_from_json(ModelFile, read_json(path), str(path), "mend the file, or leave the setting out")


def _model_file(model: str) -> tuple[str, Path, ModelFile] | None:
    """The model.json a name stands for, if it stands for one."""
    folder = PACKAGED.get(model, Path(model))
    path = folder / MODEL_FILE if folder.is_dir() else folder
    if path.name != MODEL_FILE or not path.exists():
        return None
    return (
        (model if model in PACKAGED else folder.name),
        path.parent,
        read_model_file(path),
    )


def load_model(model: str, tokenizer: str | None = None, adapters: Adapters = NO_ADAPTERS) -> Model:
    """Loads a model by name, model.json or checkpoint path.

    model:     "demo", a folder with model.json, or a checkpoint (file, index, folder)
    tokenizer: checkpoint of the bit tokenizer, where `model` is a bare checkpoint
    adapters:  merged into the transformer's weights
    Raises:    ToprovarError or EnvironmentFault with what is wrong and what to do.
    """
    require_torch()
    named = _model_file(model)
    if (Path(model) / MANIFEST_FILE).is_file():
        raise ToprovarError(
            f"{model} is a bundle; expected a model",
            "pass the checkpoint, or the folder with model.json, it was made of",
        )
    if named is None:
        name, folder, facts = Path(model).name, Path(), ModelFile(transformer=model, tokenizer=tokenizer)
    else:
        name, folder, facts = named
        if tokenizer is not None:
            raise ToprovarError(
                f"model {model} brings its own tokenizer ({facts.tokenizer}); --tokenizer {tokenizer} cannot be used",
                "leave --tokenizer out, or name the transformer's checkpoint itself",
            )
    return _load(name, folder, facts, adapters)


def _load(name: str, folder: Path, facts: ModelFile, adapters: Adapters) -> Model:
    checkpoint = open_checkpoint(folder / facts.transformer)
    found = recognise_family(checkpoint.shapes, str(folder / facts.transformer))
    if found not in FAMILIES:
        known = ", ".join(family.value for family in FAMILIES)
        raise ToprovarError(
            f"{folder / facts.transformer} holds a model of family {found.value}; expected a transformer: {known}",
            "check which file is which",
        )
    family = FAMILIES[found]
    family.check_settings(name, facts)
    checkpoint = adapters.merged_into(checkpoint)
    transformer = family.load(checkpoint.tensors, str(folder / facts.transformer), facts)
    digest = hashlib.sha256(checkpoint.digest().encode())
    tokenizer = None
    config = transformer.config
    if facts.tokenizer:
        files = _expect(folder / facts.tokenizer, family.tokenizer)
        tokenizer = family.load_tokenizer(files.tensors, str(folder / facts.tokenizer))
        config = family.joined(transformer, tokenizer, str(folder / facts.tokenizer))
        digest.update(files.digest().encode())
    elif family.needs_tokenizer:
        raise ToprovarError(
            f"model {name} names no tokenizer; a model of family {family.name} draws codes of its codebook",
            "pass --tokenizer, or name it in a model.json",
        )
    encoder, vocabulary = None, None
    if bool(facts.text_encoder) != bool(facts.vocabulary):
        raise ToprovarError(
            f"model {name} has text_encoder {facts.text_encoder} and vocabulary {facts.vocabulary}; expected both",
            f"name both in its {MODEL_FILE}, or neither",
        )
    if facts.text_encoder and family.takes_classes:
        raise ToprovarError(
            f"model {name} has a text encoder; a model of family {family.name} is told the number of a class",
            f"leave text_encoder and vocabulary out of its {MODEL_FILE}",
        )
    if facts.text_encoder and facts.vocabulary:
        from toprovar.exporter.demo.text_encoder import text_encoder_from_weights

        files = _expect(folder / facts.text_encoder, Family.WORD_TEXT_ENCODER)
        encoder = text_encoder_from_weights(dict(files.tensors)).requires_grad_(False)
        vocabulary = read_json(folder / facts.vocabulary)
        _check_text_encoder(encoder, vocabulary, config, folder / facts.text_encoder, folder / facts.vocabulary)
        text_tokens = facts.text_tokens or family.text_tokens
        if text_tokens > encoder.position_table.num_embeddings:
            raise ToprovarError(
                f"model {name} has text_tokens {text_tokens}; its text encoder has positions for "
                f"{encoder.position_table.num_embeddings}",
                f"lower text_tokens in its {MODEL_FILE}",
            )
        digest.update(files.digest().encode())
    return Model(name, config, transformer, tokenizer, encoder, vocabulary, facts, digest.hexdigest(), family=family)


def _check_text_encoder(
    encoder: WordTextEncoder, vocabulary: Any, config: Any, file: Path, vocabulary_file: Path
) -> None:
    words = tokenizer_from_document(vocabulary, str(vocabulary_file)).size
    rows, width = encoder.word_table.weight.shape
    if words != rows:
        raise ToprovarError(
            f"{vocabulary_file} has {words} words; the word table of {file} has {rows} rows",
            "take both files from the same training run",
        )
    if width != config.text_width:
        raise ToprovarError(
            f"{file} makes rows of width {width}; the transformer reads rows of width {config.text_width}",
            "take the text encoder that was trained with this transformer",
        )


def _expect(path: Path, family: Family) -> Checkpoint:
    checkpoint = open_checkpoint(path, family.part)
    found = recognise_family(checkpoint.shapes, str(path))
    if found is not family:
        raise ToprovarError(
            f"{path} holds a model of family {found.value}; expected {family.value}", "check which file is which"
        )
    return checkpoint


def published_without_weights(name: str) -> Model:
    """A full-size published model on the meta device: shapes only, for dry runs and graph-only exports.

    Raises: ToprovarError if the name is unknown.
    """
    require_torch()
    import torch

    for family in FAMILIES.values():
        if name in family.published:
            with torch.device("meta"):
                transformer, tokenizer, settings = family.without_weights(name)
            return Model(name, transformer.config, transformer, tokenizer, None, None, settings, "", family=family)
    known = [name for family in FAMILIES.values() for name in family.published]
    raise ToprovarError(f"unknown model {name}; expected one of {', '.join(known)}")


def is_published(name: str) -> bool:
    """Whether a full-size model goes by this name."""
    return any(name in family.published for family in FAMILIES.values())
