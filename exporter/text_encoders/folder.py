"""The files of a published text encoder: its folder, its configuration, its weights filled into a module.

Weights come through `open_checkpoint`, so they are mapped, checked and never unpickled; code that a folder brings along
is never run.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toprovar.exporter.checkpoints import Checkpoint, check_finite, open_checkpoint
from toprovar.exporter.families import expect_shapes
from toprovar.runtime.errors import EnvironmentFault, ToprovarError
from toprovar.runtime.json_files import read_json

if TYPE_CHECKING:
    from torch import nn

# looked for in this order; the first that is there counts
WEIGHT_FILES = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)
_TOKENIZER_FILES = re.compile(r"(tokenizer.*\.json|spiece\.model|vocab\.json|merges\.txt|special_tokens_map\.json)")
DTYPES = ("fp32", "bf16")


def require_transformers() -> None:
    """Raises: EnvironmentFault if transformers, or PyTorch below it, is not installed."""
    for package in ("torch", "transformers"):
        try:
            __import__(package)
        except ImportError:
            raise EnvironmentFault(
                f"encoding prompts needs {package}, which is not installed", "pip install 'toprovar[torch,text]'"
            ) from None
    import transformers

    transformers.logging.set_verbosity_error()


def encoder_folder(encoder: str, download: bool = False) -> Path:
    """A local folder, or that of a hub name such as google/flan-t5-xl.

    download: fetch what is not on this machine yet; without it nothing is ever downloaded
    Raises:   ToprovarError if it is neither.
    """
    folder = Path(encoder).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ToprovarError(f"{encoder} is a file; expected the folder of a text encoder", "pass its folder")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", encoder):
        raise ToprovarError(f"{encoder} does not exist", "pass a folder, or a hub name such as google/flan-t5-xl")
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "spiece.model", "merges.txt", "pytorch_model*.bin"]
    try:
        return Path(snapshot_download(encoder, allow_patterns=patterns, local_files_only=not download))
    except Exception as fault:  # the hub's client has a dozen classes of its own and its network library's
        if not download:
            raise ToprovarError(
                f"{encoder} is neither a folder nor in the hub's cache on this machine",
                "pass --download to fetch it, or a local folder",
            ) from None
        reason = (str(fault).strip().splitlines() or [type(fault).__name__])[0][:200]
        raise ToprovarError(
            f"{encoder} cannot be fetched: {reason}", "check the name and the connection, or pass a local folder"
        ) from None


@dataclass(frozen=True)
class EncoderFiles:
    """config: config.json as read."""

    folder: Path
    config: dict[str, Any]
    weights: Checkpoint

    def tokenizer_sha256(self) -> str:
        """Over the files that decide how text becomes ids, by name."""
        digest = hashlib.sha256()
        for path in sorted(self.folder.iterdir()):
            if _TOKENIZER_FILES.fullmatch(path.name):
                digest.update(path.name.encode() + b"\0" + path.read_bytes())
        return digest.hexdigest()


def open_encoder(folder: Path, kinds: tuple[str, ...]) -> EncoderFiles:
    """kinds: accepted values of "model_type". Raises: ToprovarError if a file is missing or of another model."""
    path = folder / "config.json"
    config = read_json(path)
    found = config.get("model_type") if isinstance(config, dict) else None
    if found not in kinds:
        raise ToprovarError(
            f"{path} is of a model of type {found!r}; expected {' or '.join(kinds)}",
            "check --kind, and that the folder is the text encoder's",
        )
    file = next((folder / name for name in WEIGHT_FILES if (folder / name).exists()), folder)
    return EncoderFiles(folder, config, open_checkpoint(file))


def load_pretrained_tokenizer(folder: Path) -> Any:
    """Raises: ToprovarError if the folder holds none that transformers can read."""
    from transformers import AutoTokenizer

    hint = "take tokenizer.json, or spiece.model (needs sentencepiece), from the model's own folder"
    if not any((folder / name).is_file() for name in ("tokenizer.json", "spiece.model", "vocab.json")):
        # transformers would go on with an empty vocabulary
        raise ToprovarError(f"{folder} holds no tokenizer: found no tokenizer.json, spiece.model or vocab.json", hint)
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as fault:  # whatever a damaged or foreign tokenizer makes transformers raise
        reason = (str(fault).strip().splitlines() or [type(fault).__name__])[0][:200]
        raise ToprovarError(f"{folder} holds no tokenizer that can be read: {reason}", hint) from None


def fill(module: nn.Module, files: EncoderFiles, name_in_file: Callable[[str], list[str]], dtype: str) -> nn.Module:
    """A module made on the meta device, with its weights: mapped where the file has the number format already.

    name_in_file: a tensor's name in the module -> its possible names in the file, the likeliest first
    dtype:        "fp32" or "bf16"
    Raises:       ToprovarError for the first tensor that is missing, has another shape or is not finite.
    """
    import torch

    to = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    tensors, shapes = files.weights.tensors, files.weights.shapes
    expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    found = {name: next((other for other in name_in_file(name) if other in shapes), None) for name in expected}
    what = str(files.weights.path)
    expect_shapes({name: shapes[other] for name, other in found.items() if other is not None}, expected, what)
    state = {}
    for name, other in found.items():
        assert other is not None  # expect_shapes would have refused it
        state[name] = tensors.converted(other, to)
        check_finite({other: state[name]}, what)
    module.load_state_dict(state, assign=True)
    return module.eval().requires_grad_(False)
