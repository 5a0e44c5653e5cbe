"""Small real-shaped models for the whole suite: random weights, seeded, built once."""

from __future__ import annotations

import os
import shutil
import signal

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command line does, before torch is loaded

from dataclasses import replace

import pytest
import triton_interpreter  # noqa: F401  before anything else can import triton

from toprovar.runtime.guidance import Guidance
from toprovar.runtime.plan import Plan, Restore, Score

SCHEDULE = tuple((side, side) for side in (1, 2, 4, 8, 16, 20))  # 256 and 400 tokens at the end: large enough to prune
WORDS = ["<pad>", "<unk>", "<end>", "red", "green", "apple", "dog", "house", "on", "white"]
GUIDANCE = Guidance(cfg=(2.5,) * len(SCHEDULE), tau=(0.8,) * len(SCHEDULE))


def pytest_collection_modifyitems(items):
    """The commands first: their files take minutes, and two processes end together only if those don't come last."""
    items.sort(key=lambda item: "tests/tools/" not in item.nodeid.replace("\\", "/"))


@pytest.fixture(autouse=True)
def _signals_stay():
    """A program run inside a test leaves signals ignored, as at the end of its process; children would inherit that."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def tiny_model(seed: int = 0, **changes):
    """An Infinity of 4 layers, width 32, with tokenizer and word encoder; weights large enough to make bits differ."""
    import torch

    from toprovar.exporter.demo.text_encoder import WordTextEncoder
    from toprovar.exporter.infinity.config import InfinityConfig
    from toprovar.exporter.infinity.tokenizer import BitTokenizer, TokenizerConfig
    from toprovar.exporter.infinity.transformer import Infinity
    from toprovar.exporter.model import Model, ModelFile

    config = InfinityConfig(
        depth=4, width=32, heads=2, ffn_width=64, text_width=16, bits=8, pool_heads=2, chunks=2, text_length=12
    )
    config = replace(config, **changes)
    torch.manual_seed(seed)
    transformer = Infinity(config)
    transformer.initialize(seed)
    with torch.no_grad():
        for name, parameter in transformer.named_parameters():
            if parameter.dim() >= 2 and "scale_mul" not in name:
                parameter.add_(torch.randn_like(parameter) * 0.15)
    tokenizer = BitTokenizer(TokenizerConfig(config.code_channels, (32, 32), rgb_shortcut=True))
    encoder = WordTextEncoder(len(WORDS), config.text_width, 2, 12)
    encoder.initialize(seed)
    for module in (transformer, tokenizer, encoder):
        module.eval().requires_grad_(False)
    vocabulary = {"schema_version": 1, "max_tokens": 12, "words": WORDS}
    settings = ModelFile(transformer="tiny", text_tokens=12, cfg=(2.5,), tau=(0.8,))
    return Model("tiny", config, transformer, tokenizer, encoder, vocabulary, settings, "")


def pruning_plan(model, **changes) -> Plan:
    """Prunes the last scale: layers 2 and 3 keep some tokens, ranked by layer 1."""
    values = {
        "backbone": model.backbone,
        "schedule": SCHEDULE,
        "method": "toprovar",
        "score": Score(kind="entropy", source_layer={5: {2: 1, 3: 1}}),
        "keep": {5: (400, 400, 192, 128)},
        "restore": Restore(kind="cached_residual", ref_scale=4),
    }
    return Plan(**{**values, **changes})


@pytest.fixture(scope="session")
def tiny():
    return tiny_model()


@pytest.fixture(scope="session")
def tiny_bundle(tiny, tmp_path_factory):
    """A bundle of the tiny model, dense and planned. Copy it before damaging it."""
    from toprovar.exporter.bundle_writer import export_bundle
    from toprovar.exporter.planned.step import StepOptions

    folder = tmp_path_factory.mktemp("bundle") / "tiny"
    export_bundle(tiny, folder, GUIDANCE, StepOptions(text_tokens=12), pruning_plan(tiny))
    return folder


@pytest.fixture(scope="session")
def plugin_library(pytestconfig, tmp_path_factory):
    """The operator library of these sources: the one that was built for this machine, else one for the processor alone,
    built once and kept in pytest's cache."""
    from toprovar.plugins import library
    from toprovar.tools.plugin_building import BuildRequest, run_build

    found = library.find_library()
    if found is not None and not found.is_stale:
        return found

    missing = [tool for tool in ("cmake", "c++") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)}")
    cache = getattr(pytestconfig, "cache", None)  # pytest can be told to do without
    folder = cache.mkdir("plugins") if cache is not None else tmp_path_factory.mktemp("plugins")
    path = folder / library.source_digest()[:16] / library.FILE_NAME
    if not path.is_file():
        run_build(BuildRequest(cuda=False, out=path), quiet=True)
    return library.read_library(path)


@pytest.fixture
def with_plugins(plugin_library, monkeypatch):
    """The library as a user has it: named by the environment."""
    monkeypatch.setenv("TOPROVAR_PLUGINS", str(plugin_library.path))
    return plugin_library
