"""InfinityStar for bundles and calibration. A scale is a pass here; a picture is all frames, on top of one another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from toprovar.exporter.families import Family
from toprovar.exporter.family import ModelFamily
from toprovar.exporter.infinitystar.config import PUBLISHED
from toprovar.exporter.infinitystar.schedule import (
    BUDGET_SCALES,
    FRAMES_PER_SECOND,
    TEMPLATES,
    VideoSchedule,
    clips_of,
    nearest_template,
    schedule_of,
    square_schedule,
    video_schedule,
)
from toprovar.exporter.infinitystar.settings import published_guidance
from toprovar.exporter.schedules import Schedule
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.guidance import Guidance
from toprovar.runtime.manifest import Video

if TYPE_CHECKING:
    from torch import Tensor

    from toprovar.exporter.graph_builder import GraphBuilder
    from toprovar.exporter.infinitystar.config import InfinityStarConfig
    from toprovar.exporter.infinitystar.transformer import InfinityStar, Prompt
    from toprovar.exporter.model import Model, ModelFile
    from toprovar.exporter.planned.loop import Generation, LoopOptions
    from toprovar.exporter.planned.step import StepOptions
    from toprovar.exporter.routes import Route
    from toprovar.exporter.video_tokenizer.config import VideoTokenizerConfig
    from toprovar.exporter.video_tokenizer.tokenizer import VideoTokenizer
    from toprovar.exporter.weights_file import Thunks, WeightsLayout
    from toprovar.runtime.plan import Plan

ASPECT, BUDGET, FRAMES = 0.5625, "0.40M", 81  # 480p, 5 seconds


class InfinityStarFamily(ModelFamily):
    name = "infinitystar"
    settings = frozenset({"aspect", "budget", "sides", "frames"})
    transformer = Family.INFINITYSTAR
    tokenizer = Family.VIDEO_TOKENIZER
    published = tuple(PUBLISHED)
    unconditional = "cfg_uncond"
    has_cache = False

    def load(self, tensors: Mapping[str, Any], what: str, settings: ModelFile) -> InfinityStar:
        from toprovar.exporter.infinitystar.load import load_infinitystar

        return load_infinitystar(tensors, what)

    def load_tokenizer(self, tensors: Mapping[str, Any], what: str) -> VideoTokenizer:
        from toprovar.exporter.video_tokenizer.tokenizer import load_video_tokenizer

        return load_video_tokenizer(tensors, what)

    def joined(self, transformer: InfinityStar, tokenizer: VideoTokenizer, what: str) -> InfinityStarConfig:
        if tokenizer.config.code_channels != transformer.config.detail_bits:
            raise ToprovarError(
                f"{what}: tokenizer and transformer do not belong together: the transformer predicts "
                f"{transformer.config.detail_bits} bits per token, the tokenizer has {tokenizer.config.code_channels} "
                "channels",
                "pass the tokenizer that was published with this transformer",
            )
        return transformer.config

    def without_weights(self, name: str) -> tuple[InfinityStar, VideoTokenizer, ModelFile]:
        from dataclasses import replace

        from toprovar.exporter.infinitystar.transformer import InfinityStar
        from toprovar.exporter.model import ModelFile
        from toprovar.exporter.video_tokenizer.config import PUBLISHED as PUBLISHED_TOKENIZER
        from toprovar.exporter.video_tokenizer.tokenizer import VideoTokenizer

        tokenizer = VideoTokenizer(replace(PUBLISHED_TOKENIZER, encoder=None))
        return InfinityStar(PUBLISHED[name]), tokenizer, ModelFile(transformer=name)

    # -- sizes and settings ----------------------------------------------------------------------------------------

    def noise_columns(self, config: InfinityStarConfig) -> int:
        return config.detail_bits

    def kv_head(self, config: InfinityStarConfig) -> tuple[int, int]:
        return config.kv_heads, config.head_width

    def schedule(self, model: Model, aspect: float | None = None, budget: str | None = None) -> Schedule:
        return self._own(model, aspect, budget).flat

    def _own(self, model: Model, aspect: float | None = None, budget: str | None = None) -> VideoSchedule:
        settings, frames = model.settings, _frames(model)
        if settings.sides and aspect is None and budget is None:
            return square_schedule(settings.sides, frames)
        said = settings.model_fields_set
        own_aspect = settings.aspect if "aspect" in said else ASPECT
        own_budget = settings.budget if "budget" in said else BUDGET
        return video_schedule(own_aspect if aspect is None else aspect, budget or own_budget, frames)

    def template(self, aspect: float, schedule: Schedule) -> str:
        name = nearest_template(aspect)
        height, width = next(pair for pair in reversed(TEMPLATES[name]) if pair in schedule)  # of the image clip
        return f"template {name} (height over width), {height}x{width} tokens per frame"

    def video_of(self, model: Model, schedule: Schedule) -> VideoSchedule:
        """The clips and frames behind a schedule of passes."""
        own = self._own(model)
        if own.flat == tuple(schedule):
            return own
        others = [video_schedule(float(name), budget) for name in TEMPLATES for budget in BUDGET_SCALES]
        return schedule_of(schedule, [own, *others])

    def guidance(self, model: Model, schedule: Schedule) -> Guidance:
        settings, video = model.settings, self.video_of(model, schedule)
        guidance = published_guidance(video)
        changes: dict[str, Any] = {}
        for name in ("cfg", "tau"):
            if (values := getattr(settings, name)) is not None:
                changes[name] = video.per_pass(values, name)
        if settings.top_p is not None:
            changes["top_p"] = settings.top_p
        return guidance.model_copy(update=changes)

    def code_shape(self, model: Model, schedule: Schedule) -> tuple[int, int, int]:
        video = self.video_of(model, schedule)
        return model.config.detail_bits, video.frames * video.last[0], video.last[1]

    def check(self, model: Model, schedule: Schedule, options: StepOptions) -> None:
        self.video_of(model, schedule)
        if options.images > 1:
            raise ToprovarError(
                f"{options.images} videos at a time were asked for; steps of InfinityStar draw one",
                "leave --images out",
            )

    def cached_tokens(self, model: Model, plan: Plan) -> int:
        """The last map of a clip while the next clip's is made, and the text."""
        kept = [0, *(step.tokens for step in self.video_of(model, plan.schedule).passes() if step.keeps)]
        most = max(before + own for before, own in zip(kept, [*kept[1:], 0], strict=True))
        layers: int = model.config.depth
        return (most + model.text_tokens) * layers

    # -- PyTorch -----------------------------------------------------------------------------------------------------

    def prompt(self, model: Model, prompts: Sequence[str], guidance: Guidance) -> Prompt:
        import torch

        from toprovar.exporter.prompts import text_rows

        texts, negatives = [text_rows(model, prompt) for prompt in prompts], None
        if model.embeddings is not None and model.embeddings.negative is not None:
            negatives = [torch.from_numpy(model.embeddings.negative[1])] * len(texts)
        with torch.inference_mode():
            prompt: Prompt = model.transformer.prompt(texts, negatives, guidance.uses_unconditional_row)
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
        from toprovar.exporter.infinitystar.generate import BitNoise, generate

        noise = BitNoise(seeds, model.config.detail_bits)
        video = self.video_of(model, schedule)
        return generate(model.transformer, prompt, video, guidance, noise, options=options)

    def decode(self, model: Model, codes: Tensor) -> Tensor:
        """codes: [B, d, F*H, W] -> all frames on top of one another, [B, 3, T*h, w]."""
        import torch

        maps = sum(clips_of(_frames(model)))
        video: Tensor = model.tokenizer.decode(codes.unflatten(2, (maps, -1)))  # [B, 3, T, h, w]
        if video.shape[2] > 1:  # as shown
            video = torch.cat([video[:, :, 1:2], video[:, :, 1:]], dim=2)
        return video.flatten(2, 3)

    def small_picture(self, model: Model, codes: Tensor, size: tuple[int, int]) -> np.ndarray:
        """Every frame at the map of an early pass, of the image clip: decoded on top of one another."""
        import torch.nn.functional as F

        maps = sum(clips_of(_frames(model)))
        frames = codes.unflatten(2, (maps, -1)).transpose(1, 2).flatten(0, 1)  # [B*F, d, H, W]
        small = F.interpolate(frames, size=size, mode="bilinear").unflatten(0, (-1, maps))
        decoded = self.decode(model, small.transpose(1, 2).flatten(2, 3))
        return decoded[0].cpu().numpy()

    # -- graphs ------------------------------------------------------------------------------------------------------

    def weights(self, model: Model, schedule: Schedule) -> Thunks:
        from toprovar.exporter.infinitystar.weights import star_weights
        from toprovar.exporter.video_tokenizer.graphs import decoder_weights

        weights = star_weights(model.transformer, self.video_of(model, schedule))
        if model.tokenizer is not None:
            weights.update(decoder_weights(model.tokenizer))
        return weights

    def prompt_graph(self, model: Model, layout: WeightsLayout, options: StepOptions) -> GraphBuilder:
        from toprovar.exporter.infinitystar.graphs import prompt_graph

        return prompt_graph(model.config, layout, options)

    def step_graph(self, model: Model, route: Route, layout: WeightsLayout, options: StepOptions) -> GraphBuilder:
        from toprovar.exporter.infinitystar.step import step_graph

        video = self.video_of(model, route.plan.schedule)
        return step_graph(model.config, video, route, layout, options)

    def step_key(self, model: Model, route: Route, gate_whole_layers: bool) -> tuple[object, ...]:
        """Repetitions of a map share a graph, unless the plan tells them apart."""
        from toprovar.exporter.infinitystar.step import is_context_open

        plan, scale = route.plan, route.scale
        own = self.video_of(model, plan.schedule).passes()[scale]
        contexts: tuple[object, ...] = ()
        if own.context_pass is not None:
            contexts = ("open",) if is_context_open(route) else plan.counts(own.context_pass)
        gated = plan.gated_layers(scale, route.counts, gate_whole_layers)
        told_apart = gated or plan.restored_layers(scale) or plan.residual_layers(scale) or plan.carries_score(scale)
        key = route.key(gate_whole_layers)
        if told_apart or not scale:
            return (*key, contexts)
        return ("map", own.entry, own.keeps, *key[1:], contexts)

    def decoder_graph(
        self, model: Model, size: tuple[int, int], layout: WeightsLayout, resized: tuple[int, int] | None = None
    ) -> GraphBuilder | None:
        from toprovar.exporter.video_tokenizer.graphs import small_decoder_graph

        if resized is None:
            return self._decoder(model, size, layout, is_first=True)
        maps = sum(clips_of(_frames(model)))
        return small_decoder_graph(model.tokenizer.config, maps, (size[0] // maps, size[1]), resized, layout)

    def following_decoder_graph(
        self, model: Model, size: tuple[int, int], layout: WeightsLayout
    ) -> GraphBuilder | None:
        return self._decoder(model, size, layout, is_first=False)

    def _decoder(
        self, model: Model, size: tuple[int, int], layout: WeightsLayout, is_first: bool
    ) -> GraphBuilder | None:
        from toprovar.exporter.video_tokenizer.graphs import decoder_graph
        from toprovar.exporter.video_tokenizer.tokenizer import maps_per_chunk

        maps = sum(clips_of(_frames(model)))
        chunks = maps_per_chunk(maps)
        if not is_first and len(chunks) == 1:
            return None
        config: VideoTokenizerConfig = model.tokenizer.config
        return decoder_graph(config, chunks[0 if is_first else 1], (size[0] // maps, size[1]), layout, is_first)

    def video(self, model: Model) -> Video:
        maps = sum(clips_of(_frames(model)))
        return Video(maps=maps, fps=FRAMES_PER_SECOND, first_from_second=True)


def _frames(model: Model) -> int:
    """Of the video. Raises: ToprovarError if the tokenizer makes no such number."""
    return FRAMES if model.settings.frames is None else model.settings.frames
