"""Infinity for bundles and calibration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from toprovar.exporter.families import Family
from toprovar.exporter.family import ModelFamily
from toprovar.exporter.infinity.config import PUBLISHED
from toprovar.exporter.schedules import Schedule, schedule_for
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.guidance import Guidance, per_scale
from toprovar.runtime.noise import uniform_noise

if TYPE_CHECKING:
    from torch import Tensor

    from toprovar.exporter.graph_builder import GraphBuilder
    from toprovar.exporter.infinity.config import InfinityConfig
    from toprovar.exporter.infinity.tokenizer import BitTokenizer
    from toprovar.exporter.infinity.transformer import Infinity, Prompt
    from toprovar.exporter.model import Model, ModelFile
    from toprovar.exporter.planned.loop import Generation, LoopOptions
    from toprovar.exporter.planned.step import StepOptions
    from toprovar.exporter.routes import Route
    from toprovar.exporter.weights_file import Thunks, WeightsLayout

CFG, TAU = (3.0,), (0.5,)


class InfinityFamily(ModelFamily):
    name = "infinity"
    transformer = Family.INFINITY
    tokenizer = Family.BIT_TOKENIZER
    published = tuple(PUBLISHED)
    unconditional = "cfg_uncond"
    settings = frozenset({"aspect", "budget"})

    def load(self, tensors: Mapping[str, Any], what: str, settings: ModelFile) -> Infinity:
        from toprovar.exporter.infinity.load import load_infinity

        return load_infinity(tensors, what)

    def load_tokenizer(self, tensors: Mapping[str, Any], what: str) -> BitTokenizer:
        from toprovar.exporter.infinity.load import load_tokenizer

        return load_tokenizer(tensors, what)

    def joined(self, transformer: Infinity, tokenizer: BitTokenizer, what: str) -> InfinityConfig:
        transformer.config = transformer.config.with_code_channels(tokenizer.config.channels)
        return transformer.config

    def without_weights(self, name: str) -> tuple[Infinity, BitTokenizer, ModelFile]:
        from toprovar.exporter.infinity.tokenizer import BitTokenizer, TokenizerConfig
        from toprovar.exporter.infinity.transformer import Infinity
        from toprovar.exporter.model import ModelFile

        config = PUBLISHED[name]
        widths = (128, 256, 512, 512) if config.patchify else (128, 256, 512, 512, 512)
        tokenizer = BitTokenizer(TokenizerConfig(config.code_channels, widths, encoder=False))
        settings = ModelFile(transformer=name, tau=(1.0,) if config.patchify else (0.5,))
        return Infinity(config), tokenizer, settings

    def noise_columns(self, config: InfinityConfig) -> int:
        return config.bits

    def patch(self, config: InfinityConfig) -> int:
        return config.patch

    def schedule(self, model: Model, aspect: float | None = None, budget: str | None = None) -> Schedule:
        settings = model.settings
        return schedule_for(settings.aspect if aspect is None else aspect, budget or settings.budget)

    def guidance(self, model: Model, schedule: Schedule) -> Guidance:
        settings, scales = model.settings, len(schedule)
        return Guidance(
            cfg=per_scale(settings.cfg or CFG, scales, "cfg"),
            tau=per_scale(settings.tau or TAU, scales, "tau"),
            top_p=0.97 if settings.top_p is None else settings.top_p,
        )

    def code_shape(self, model: Model, schedule: Schedule) -> tuple[int, int, int]:
        config: InfinityConfig = model.config
        height, width = schedule[-1]
        return config.code_channels, height * config.patch, width * config.patch

    def check(self, model: Model, schedule: Schedule, options: StepOptions) -> None:
        if len(schedule) > model.config.levels:
            raise ToprovarError(
                f"the schedule has {len(schedule)} scales; the checkpoint has level embeddings for "
                f"{model.config.levels}",
                "choose a smaller --budget",
            )

    def prompt(self, model: Model, prompts: Sequence[str], guidance: Guidance) -> Prompt:
        from toprovar.exporter.prompts import encode_prompts

        return encode_prompts(model, prompts, guidance)

    def generate(
        self,
        model: Model,
        prompt: Prompt,
        schedule: Schedule,
        guidance: Guidance,
        seeds: Sequence[int],
        options: LoopOptions,
    ) -> Generation:
        import torch

        from toprovar.exporter.infinity.generate import run_loop

        def noise(scale: int, tokens: int) -> Tensor:
            planes = [uniform_noise(seed, scale, tokens, model.config.bits) for seed in seeds]
            return torch.from_numpy(np.stack(planes))

        return run_loop(model.transformer, prompt, schedule, guidance, noise, options=options)

    def weights(self, model: Model, schedule: Schedule) -> Thunks:
        from toprovar.exporter.infinity.weights import decoder_weights, transformer_weights

        weights = transformer_weights(model.transformer, schedule)
        if model.tokenizer is not None:
            weights.update(decoder_weights(model.tokenizer))
        return weights

    def prompt_graph(self, model: Model, layout: WeightsLayout, options: StepOptions) -> GraphBuilder:
        from toprovar.exporter.infinity.graphs import prompt_graph

        return prompt_graph(model.config, layout, options)

    def step_graph(self, model: Model, route: Route, layout: WeightsLayout, options: StepOptions) -> GraphBuilder:
        from toprovar.exporter.infinity.step import step_graph

        return step_graph(model.config, route, layout, options)

    def decoder_graph(
        self, model: Model, size: tuple[int, int], layout: WeightsLayout, resized: tuple[int, int] | None = None
    ) -> GraphBuilder | None:
        from toprovar.exporter.infinity.graphs import decoder_graph

        if model.tokenizer is None:
            return None
        return decoder_graph(model.tokenizer.config, size, layout, 1, resized)
