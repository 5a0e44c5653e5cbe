"""HART for bundles and calibration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from toprovar.exporter.families import Family
from toprovar.exporter.family import ModelFamily, square_only
from toprovar.exporter.hart.config import PUBLISHED, PUBLISHED_SIDES, STEPS, TEXT_TOKENS
from toprovar.exporter.schedules import Schedule, check_growing, square
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.guidance import Guidance

if TYPE_CHECKING:
    from toprovar.exporter.codec import Codec
    from toprovar.exporter.graph_builder import GraphBuilder
    from toprovar.exporter.hart.config import HartConfig
    from toprovar.exporter.hart.transformer import Hart, Prompt
    from toprovar.exporter.model import Model, ModelFile
    from toprovar.exporter.planned.loop import Generation, LoopOptions
    from toprovar.exporter.planned.step import StepOptions
    from toprovar.exporter.routes import Route
    from toprovar.exporter.weights_file import Thunks, WeightsLayout

CFG, TOP_P = 4.5, 0.0


class HartFamily(ModelFamily):
    name = "hart"
    transformer = Family.HART
    tokenizer = Family.VQ_TOKENIZER
    needs_tokenizer = True
    settings = frozenset({"sides", "heads", "top_k", "smooth"})
    published = tuple(PUBLISHED)
    text_tokens = TEXT_TOKENS
    attends_padding = True

    def __init__(self, residual: bool = True, steps: int = STEPS) -> None:
        """residual: whether the last map gets the residual head's; steps: its reverse steps."""
        self.residual, self.steps = residual, steps

    def load(self, tensors: Mapping[str, Any], what: str, settings: ModelFile) -> Hart:
        from toprovar.exporter.hart.load import load_hart

        return load_hart(tensors, what, settings.heads)

    def load_tokenizer(self, tensors: Mapping[str, Any], what: str) -> Codec:
        from toprovar.exporter.codec import load_codec

        return load_codec(tensors, what)

    def joined(self, transformer: Hart, tokenizer: Codec, what: str) -> HartConfig:
        from toprovar.exporter.codebook import check_belong_together

        config = transformer.config
        check_belong_together(config.vocabulary, config.code_channels, tokenizer.quantizer, what)
        return config

    def without_weights(self, name: str) -> tuple[Hart, Codec, ModelFile]:
        from toprovar.exporter.codec import published_codec
        from toprovar.exporter.hart.transformer import Hart
        from toprovar.exporter.model import ModelFile

        config = PUBLISHED[name]
        return Hart(config), published_codec(config.vocabulary), ModelFile(transformer=name)

    def noise_columns(self, config: HartConfig) -> int:
        return config.vocabulary

    def schedule(self, model: Model, aspect: float | None = None, budget: str | None = None) -> Schedule:
        square_only("HART", aspect, budget)
        sides = model.settings.sides or PUBLISHED_SIDES
        if len(sides) < 2 or sides[0] != 1:
            raise ToprovarError(
                f"model {model.name}: sides {list(sides)}; expected at least two, the first of them 1",
                "name the sides that it was trained with in its model.json",
            )
        check_growing(sides, model.name)
        return square(sides)

    def guidance(self, model: Model, schedule: Schedule) -> Guidance:
        from toprovar.exporter.hart.generate import published_candidates

        settings, scales = model.settings, len(schedule)
        return Guidance.growing(
            settings.cfg or (CFG,),
            scales,
            "stale",
            tau=settings.tau or (1.0,),
            top_p=TOP_P if settings.top_p is None else settings.top_p,
            top_k=settings.top_k or tuple(published_candidates(scale) for scale in range(scales)),
            smooth=settings.smooth is not False,
        )

    def code_shape(self, model: Model, schedule: Schedule) -> tuple[int, int, int]:
        return (model.config.code_channels, *schedule[-1])

    def along(self, scale: int, options: StepOptions) -> int:
        return options.text_tokens - 1 if scale == 0 else 0

    def prompt(self, model: Model, prompts: Sequence[str], guidance: Guidance) -> Prompt:
        """Rows are padded to the model's `text_tokens`: padding takes part in attention."""
        import torch

        from toprovar.exporter.prompts import padded_negative, padded_rows

        text, mask = padded_rows(model, prompts, model.text_tokens)
        guided = guidance.uses_unconditional_row
        negative = padded_negative(model, len(prompts), model.text_tokens) if guided else None
        if negative is not None:
            text, mask = torch.cat([text, negative[0]]), torch.cat([mask, negative[1]])
        positions = (mask.long().cumsum(1) - 1).clamp(min=0)
        with torch.inference_mode():
            prompt: Prompt = model.transformer.prompt(text, mask, positions, guided, len(prompts))
            return prompt

    def generate(
        self,
        model: Model,
        prompt: Prompt,
        schedule: Schedule,
        guidance: Guidance,
        seeds: Sequence[int],
        options: LoopOptions,
    ) -> Generation:
        from toprovar.exporter.hart.generate import SeededNoise, generate

        sides = [side for side, _ in schedule]
        return generate(
            model.transformer, model.tokenizer.quantizer, prompt, sides, guidance, SeededNoise(seeds), options=options
        )

    def weights(self, model: Model, schedule: Schedule) -> Thunks:
        from toprovar.exporter.hart.weights import hart_weights

        made = hart_weights(model.transformer, model.tokenizer.quantizer, len(schedule), self.steps)
        return {**made, **model.tokenizer.weights()}

    def prompt_graph(self, model: Model, layout: WeightsLayout, options: StepOptions) -> GraphBuilder:
        from toprovar.exporter.hart.graphs import prompt_graph

        return prompt_graph(model.config, layout, options)

    def step_graph(self, model: Model, route: Route, layout: WeightsLayout, options: StepOptions) -> GraphBuilder:
        from toprovar.exporter.hart.graphs import step_graph

        return step_graph(model.config, route, layout, options, self.residual, self.steps)

    def decoder_graph(
        self, model: Model, size: tuple[int, int], layout: WeightsLayout, resized: tuple[int, int] | None = None
    ) -> GraphBuilder | None:
        codec: Codec = model.tokenizer
        return codec.graph(size, layout, resized)
