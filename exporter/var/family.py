"""VAR for bundles and calibration: a prompt is the number of a class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from toprovar.exporter.families import Family
from toprovar.exporter.family import ModelFamily, square_only
from toprovar.exporter.schedules import Schedule, check_growing, square
from toprovar.exporter.var.config import PUBLISHED
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.guidance import Guidance
from toprovar.runtime.text import class_number

if TYPE_CHECKING:
    from toprovar.exporter.codec import Codec
    from toprovar.exporter.graph_builder import GraphBuilder
    from toprovar.exporter.model import Model, ModelFile
    from toprovar.exporter.planned.loop import Generation, LoopOptions
    from toprovar.exporter.planned.step import StepOptions
    from toprovar.exporter.routes import Route
    from toprovar.exporter.var.config import VarConfig
    from toprovar.exporter.var.transformer import Prompt, Var
    from toprovar.exporter.weights_file import Thunks, WeightsLayout

CFG, TOP_K, TOP_P = 4.0, 900, 0.95


class VarFamily(ModelFamily):
    name = "var"
    transformer = Family.VAR
    tokenizer = Family.VQ_TOKENIZER
    needs_tokenizer = True
    settings = frozenset({"sides", "heads", "top_k", "smooth"})
    published = tuple(PUBLISHED)
    takes_classes = True

    def load(self, tensors: Mapping[str, Any], what: str, settings: ModelFile) -> Var:
        from toprovar.exporter.var.load import load_var

        return load_var(tensors, what, settings.heads)

    def load_tokenizer(self, tensors: Mapping[str, Any], what: str) -> Codec:
        from toprovar.exporter.codec import load_codec

        return load_codec(tensors, what)

    def joined(self, transformer: Var, tokenizer: Codec, what: str) -> VarConfig:
        from toprovar.exporter.codebook import check_belong_together

        config = transformer.config
        check_belong_together(config.vocabulary, config.code_channels, tokenizer.quantizer, what)
        return config

    def without_weights(self, name: str) -> tuple[Var, Codec, ModelFile]:
        from toprovar.exporter.codec import published_codec
        from toprovar.exporter.model import ModelFile
        from toprovar.exporter.var.transformer import Var

        config = PUBLISHED[name]
        return Var(config), published_codec(config.vocabulary), ModelFile(transformer=name)

    def noise_columns(self, config: VarConfig) -> int:
        return config.vocabulary

    def schedule(self, model: Model, aspect: float | None = None, budget: str | None = None) -> Schedule:
        square_only("VAR", aspect, budget)
        config: VarConfig = model.config
        sides = model.settings.sides or config.published_sides
        if sides is None:
            raise ToprovarError(
                f"model {model.name} has positions for {config.levels} maps of {config.tokens} tokens together; "
                "no published list of maps fits",
                'name the sides of its maps in its model.json: "sides": [1, 2, 3, ...]',
            )
        tokens = sum(n * n for n in sides)
        if len(sides) != config.levels or tokens != config.tokens or sides[0] != 1:
            raise ToprovarError(
                f"model {model.name}: sides {list(sides)} make {len(sides)} maps of {tokens} tokens; "
                f"expected {config.levels} maps of {config.tokens} tokens, the first of side 1",
                "name the sides that it was trained with in its model.json",
            )
        check_growing(sides, model.name)
        return square(sides)

    def guidance(self, model: Model, schedule: Schedule) -> Guidance:
        settings, scales = model.settings, len(schedule)
        return Guidance.growing(
            settings.cfg or (CFG,),
            scales,
            "linear",
            tau=settings.tau or (1.0,),
            top_p=TOP_P if settings.top_p is None else settings.top_p,
            top_k=settings.top_k or (TOP_K,),
            smooth=bool(settings.smooth),
        )

    def code_shape(self, model: Model, schedule: Schedule) -> tuple[int, int, int]:
        return (model.config.code_channels, *schedule[-1])

    def prompt(self, model: Model, prompts: Sequence[str], guidance: Guidance) -> Prompt:
        import torch

        labels = [class_number(prompt, model.config.classes) for prompt in prompts]
        with torch.inference_mode():
            prompt: Prompt = model.transformer.prompt(torch.tensor(labels), guidance.uses_unconditional_row)
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
        from toprovar.exporter.index_sampling import IndexNoise
        from toprovar.exporter.var.generate import generate

        sides = [side for side, _ in schedule]
        return generate(
            model.transformer, model.tokenizer.quantizer, prompt, sides, guidance, IndexNoise(seeds), options=options
        )

    def weights(self, model: Model, schedule: Schedule) -> Thunks:
        from toprovar.exporter.var.weights import var_weights

        return {**var_weights(model.transformer, model.tokenizer.quantizer, schedule), **model.tokenizer.weights()}

    def prompt_graph(self, model: Model, layout: WeightsLayout, options: StepOptions) -> GraphBuilder:
        from toprovar.exporter.var.graphs import prompt_graph

        return prompt_graph(model.config, layout, options)

    def step_graph(self, model: Model, route: Route, layout: WeightsLayout, options: StepOptions) -> GraphBuilder:
        from toprovar.exporter.var.graphs import step_graph

        return step_graph(model.config, route, layout, options)

    def decoder_graph(
        self, model: Model, size: tuple[int, int], layout: WeightsLayout, resized: tuple[int, int] | None = None
    ) -> GraphBuilder | None:
        codec: Codec = model.tokenizer
        return codec.graph(size, layout, resized)
