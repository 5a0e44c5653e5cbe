"""What bundles and calibration ask of a model family, beyond what plans are about (exporter/planned).

One object per family, without state; `FAMILIES` (family_table.py) lists them. All methods that touch weights take the
loaded `Model`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from toprovar.exporter.families import Family
from toprovar.exporter.schedules import nearest_template
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.guidance import Guidance

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from toprovar.exporter.graph_builder import GraphBuilder
    from toprovar.exporter.model import Model, ModelFile
    from toprovar.exporter.planned.loop import Generation, LoopOptions
    from toprovar.exporter.planned.step import StepOptions
    from toprovar.exporter.routes import Route
    from toprovar.exporter.schedules import Schedule
    from toprovar.exporter.weights_file import Thunks, WeightsLayout
    from toprovar.runtime.manifest import Video
    from toprovar.runtime.plan import Plan


class ModelFamily(ABC):
    """name:              as plans and manifests spell it
    transformer, tokenizer: what their checkpoints are recognised as
    needs_tokenizer:   no step runs without it (its codebook is the transformer's vocabulary)
    takes_classes:     a prompt is the number of a class instead of a text
    attends_padding:   prompts of another length are other prompts
    text_tokens:       length that prompts are padded to, where the model does not say
    settings:          what it reads of model.json, besides files, cfg, tau, top_p and of texts text_tokens
    published:         names of full-size models that need no weights
    unconditional:     tensor with the learned text rows that stand for no prompt; None: no text is zeros
    has_cache:         every scale sees the keys of all earlier ones; False where steps say themselves what they see
    """

    name: str
    transformer: Family
    tokenizer: Family
    needs_tokenizer = False
    takes_classes = False
    attends_padding = False
    text_tokens = 128
    settings: frozenset[str] = frozenset()
    published: tuple[str, ...] = ()
    unconditional: str | None = None
    has_cache = True

    # -- loading ---------------------------------------------------------------------------------------------------

    def check_settings(self, name: str, facts: ModelFile) -> None:
        """Raises: ToprovarError for a setting of model.json that would not change anything."""
        read = EVERYWHERE | self.settings | (frozenset() if self.takes_classes else {"text_tokens"})
        given = sorted(key for key in facts.model_fields_set - read if getattr(facts, key) is not None)
        if given:
            raise ToprovarError(
                f"model {name} has {given[0]} {_shown(getattr(facts, given[0]))} in its model.json; "
                f"a model of family {self.name} has no such setting",
                f"leave it out; settings of the family: {', '.join(sorted(read - FILES - {'schema_version'}))}",
            )

    @abstractmethod
    def load(self, tensors: Mapping[str, Any], what: str, settings: ModelFile) -> Any:
        """The transformer, fp32, in eval mode. Raises: ToprovarError for the first tensor that does not fit."""

    @abstractmethod
    def load_tokenizer(self, tensors: Mapping[str, Any], what: str) -> Any:
        """Likewise."""

    def joined(self, transformer: Any, tokenizer: Any, what: str) -> Any:
        """The configuration of the transformer beside this tokenizer.

        Raises: ToprovarError if they do not belong together.
        """
        return transformer.config

    @abstractmethod
    def without_weights(self, name: str) -> tuple[Any, Any, ModelFile]:
        """A published transformer, its tokenizer and settings; called with the meta device as default."""

    # -- sizes and settings ----------------------------------------------------------------------------------------

    @abstractmethod
    def noise_columns(self, config: Any) -> int:
        """Uniform numbers that drawing one token takes: its bits, or the codes of the codebook."""

    @abstractmethod
    def schedule(self, model: Model, aspect: float | None = None, budget: str | None = None) -> Schedule:
        """The maps. None takes the model's own. Raises: ToprovarError if the model cannot draw such maps."""

    def template(self, aspect: float, schedule: Schedule) -> str:
        """Which aspect a schedule really has, in words."""
        height, width = schedule[-1]
        return f"template {nearest_template(aspect)} (height over width), {height}x{width} tokens"

    @abstractmethod
    def guidance(self, model: Model, schedule: Schedule) -> Guidance:
        """As model.json says, or as published."""

    @abstractmethod
    def code_shape(self, model: Model, schedule: Schedule) -> tuple[int, int, int]:
        """Of the accumulated codes that the decoder takes, without images."""

    def check(self, model: Model, schedule: Schedule, options: StepOptions) -> None:  # noqa: B027
        """Raises: ToprovarError where learned tables have fewer rows than schedule and prompt need."""

    def kv_head(self, config: Any) -> tuple[int, int]:
        """Heads of keys and values, and their width."""
        return config.heads, config.head_width

    def cached_tokens(self, model: Model, plan: Plan) -> int:
        """Keys that a run holds at most, summed over layers."""
        return sum(plan.cached_tokens(plan.run_scales[-1]))

    def along(self, scale: int, options: StepOptions) -> int:
        """Text tokens that run along at a scale and stay in the cache."""
        return 0

    # -- PyTorch ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def prompt(self, model: Model, prompts: Sequence[str], guidance: Guidance) -> Any:
        """What the loop needs of the prompts. Raises: ToprovarError for a prompt that cannot be encoded."""

    @abstractmethod
    def generate(
        self,
        model: Model,
        prompt: Any,
        schedule: Schedule,
        guidance: Guidance,
        seeds: Sequence[int],
        options: LoopOptions,
    ) -> Generation:
        """The loop with the seeded noise of the runtime, one image per seed."""

    def decode(self, model: Model, codes: Tensor) -> Tensor:
        """codes: [B, d, H, W] -> pictures [B, 3, h, w] in [-1, 1]."""
        decoded: Tensor = model.tokenizer.decode(codes)
        return decoded

    def small_picture(self, model: Model, codes: Tensor, size: tuple[int, int]) -> np.ndarray:
        """Accumulated codes as a picture at a small map of tokens. codes: [1, d, H, W]. Returns: [3, h, w]."""
        from toprovar.exporter.planned.restore import resampled

        patch = self.patch(model.config)
        small = self.decode(model, resampled(codes, (size[0] * patch, size[1] * patch)))
        picture: np.ndarray = small[0].cpu().numpy()
        return picture

    def patch(self, config: Any) -> int:
        """Cells of the code map along a token's side."""
        return 1

    # -- graphs ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def weights(self, model: Model, schedule: Schedule) -> Thunks:
        """Every tensor that prompt, step and decoder graphs read, computed when called."""

    def is_fp32(self, name: str) -> bool:
        """Whether an exported tensor stays fp32 in half-precision bundles."""
        return any(part in name for part in ALWAYS_FP32)

    @abstractmethod
    def prompt_graph(self, model: Model, layout: WeightsLayout, options: StepOptions) -> GraphBuilder: ...

    @abstractmethod
    def step_graph(self, model: Model, route: Route, layout: WeightsLayout, options: StepOptions) -> GraphBuilder: ...

    @abstractmethod
    def decoder_graph(
        self, model: Model, size: tuple[int, int], layout: WeightsLayout, resized: tuple[int, int] | None = None
    ) -> GraphBuilder | None:
        """Codes to picture; None where the tokenizer holds no decoder. resized: codes are first brought to this map."""

    def step_key(self, model: Model, route: Route, gate_whole_layers: bool) -> tuple[object, ...]:
        """What determines a step's graph: routes of equal keys share it."""
        return route.key(gate_whole_layers)

    def video(self, model: Model) -> Video | None:
        """What codes of several frames become; None for pictures. `following` is left to the writer."""
        return None

    def following_decoder_graph(
        self, model: Model, size: tuple[int, int], layout: WeightsLayout
    ) -> GraphBuilder | None:
        """Decoder of a video's further chunks, where one chunk is not all."""
        return None


FILES = frozenset({"transformer", "tokenizer", "text_encoder", "vocabulary"})
EVERYWHERE = FILES | {"schema_version", "cfg", "tau", "top_p"}


def _shown(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


# norms, modulation, embeddings, head, positions, codebook, decoder
ALWAYS_FP32 = (
    "rope_", "ada", "scale_mul", "norm", "head", "embed", "positions", "pos_start", "lvl_", "cfg_uncond", "pool_",
    "class_emb", "codebook", "smoothing", "residual", "decoder.", "rgb_", "text_encoder.",
)  # fmt: skip


def square_only(family: str, aspect: float | None, budget: str | None) -> None:
    """Raises: ToprovarError where a family of square maps is asked for another aspect or a budget."""
    if aspect not in (None, 1.0):
        raise ToprovarError(f"{family} draws square pictures; aspect {aspect:g} was asked for", "leave --aspect out")
    if budget is not None:
        raise ToprovarError(f"{family} has no pixel budgets; {budget} was asked for", "leave --budget out")
