"""Pictures of one model, dense and by plans, from the same noise: through bundles as in production, or in PyTorch."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from toprovar.exporter.bundle_writer import export_bundle
from toprovar.exporter.model import Model
from toprovar.exporter.planned.step import StepOptions
from toprovar.exporter.prompts import encode_prompt
from toprovar.runtime.errors import EnvironmentFault, ToprovarError
from toprovar.runtime.guidance import Guidance
from toprovar.runtime.noise import uniform_noise
from toprovar.runtime.pipeline import Pipeline, Result, picture_from_image
from toprovar.runtime.plan import Plan
from toprovar.tools.evaluation.kept_pictures import file_name_of

if TYPE_CHECKING:
    import torch

DENSE = "dense"


@dataclass(frozen=True)
class Picture:
    """image: [H, W, 3] uint8; steps_ms: time of the scales with sampling, text and decoder apart."""

    image: np.ndarray
    steps_ms: float


class Maker(Protocol):
    """variant: "dense" or the name of a plan; guidance: instead of the one the maker was built with."""

    description: str

    def make(self, prompt: str, seed: int, variant: str, guidance: Guidance | None = None) -> Picture: ...

    def make_dense(self, prompts: Sequence[str], seeds: Sequence[int], guidance: Guidance) -> list[np.ndarray]:
        """Dense pictures of several prompts, [H, W, 3] uint8 each, together where the maker can."""
        ...


class BundleMaker:
    """One bundle per plan, run by ONNX Runtime. Dense pictures come from the first bundle.

    Weights and equal graphs are loaded once: memory grows by what a plan adds.
    """

    def __init__(
        self,
        model: Model,
        folder: Path,
        guidance: Guidance,
        plans: Mapping[str, Plan],
        threads: int = 0,
        device: str = "cpu",
    ) -> None:
        from toprovar.runtime.backends.onnxruntime import OnnxRuntimeBackend
        from toprovar.runtime.bundle import open_bundle
        from toprovar.tools import console

        options = StepOptions.for_guidance(guidance, model.config.depth, model.text_tokens)
        self._pipelines: dict[str, tuple[Pipeline, str]] = {}
        shared: OnnxRuntimeBackend | None = None
        with console.progress("export") as advance:
            for done, (name, plan) in enumerate(plans.items() or ((DENSE, None),)):
                place = folder / file_name_of(name)
                export_bundle(model, place, guidance, options, plan, model.schedule)
                bundle = open_bundle(place, verify=False)
                backend = OnnxRuntimeBackend(bundle, threads, shared, device=device)
                shared = shared or backend
                pipeline = Pipeline(bundle, backend)
                # a plan that prunes nothing has no variant of its own
                variant = "planned" if "planned" in bundle.manifest.variants else DENSE
                self._pipelines.setdefault(DENSE, (pipeline, DENSE))
                if plan is not None:
                    self._pipelines[name] = pipeline, variant
                self.description = f"{backend.version}, {backend.threads} threads, fp32"
                advance(done + 1, max(1, len(plans)))
        for pipeline, variant in self._pipelines.values():
            pipeline.prepare(variant)

    def draw(self, prompt: str, seed: int, variant: str, guidance: Guidance | None = None) -> Result:
        """Everything the runtime tells about a picture: bits, steps, decisions, times."""
        pipeline, own = self._pipelines[variant]
        return pipeline.generate(prompt, seed, own, guidance=guidance)

    def make(self, prompt: str, seed: int, variant: str, guidance: Guidance | None = None) -> Picture:
        result = self.draw(prompt, seed, variant, guidance)
        if result.picture is None:
            raise ToprovarError("the model has no tokenizer, so it makes no picture", "name one in its model.json")
        return Picture(result.picture, result.latency_ms["steps"])

    def make_dense(self, prompts: Sequence[str], seeds: Sequence[int], guidance: Guidance) -> list[np.ndarray]:
        return [self.make(*pair, DENSE, guidance).image for pair in zip(prompts, seeds, strict=True)]


class TorchMaker:
    """The reference loop in PyTorch, fp32, on the CPU or a GPU."""

    def __init__(self, model: Model, guidance: Guidance, plans: Mapping[str, Plan], device: str) -> None:
        import torch

        self.device = torch.device(device)
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise EnvironmentFault("there is no CUDA device here", "leave --device out, or pass --device cpu")
        if model.tokenizer is None:
            raise ToprovarError("the model has no tokenizer, so it makes no picture", "name one in its model.json")
        self.tokenizer = copy.deepcopy(model.tokenizer).to(self.device)
        self.model = replace(
            model,
            transformer=copy.deepcopy(model.transformer).to(self.device),
            text_encoder=copy.deepcopy(model.text_encoder).to(self.device) if model.text_encoder else None,
        )
        self.guidance, self.plans = guidance, dict(plans)
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        self.description = f"PyTorch {torch.__version__}, {name}, fp32"

    def _wait(self) -> None:
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def make(self, prompt: str, seed: int, variant: str, guidance: Guidance | None = None) -> Picture:
        import torch

        from toprovar.exporter.infinity.generate import generate

        def noise(scale: int, tokens: int) -> torch.Tensor:
            drawn = uniform_noise(seed, scale, tokens, self.model.config.bits)
            return torch.from_numpy(drawn)[None].to(self.device)

        guidance = guidance or self.guidance
        with torch.device(self.device):
            rows = encode_prompt(self.model, prompt, guidance)
            self._wait()
            started = time.perf_counter()
            run = generate(
                self.model.transformer, rows, self.model.schedule, guidance, noise, plan=self.plans.get(variant)
            )
            self._wait()
            steps_ms = (time.perf_counter() - started) * 1e3
            image = self.tokenizer.decode(run.codes)[0].float().cpu().numpy()
        return Picture(picture_from_image(image), steps_ms)

    def make_dense(self, prompts: Sequence[str], seeds: Sequence[int], guidance: Guidance) -> list[np.ndarray]:
        import torch

        from toprovar.exporter.infinity.generate import generate
        from toprovar.exporter.prompts import encode_prompts

        def noise(scale: int, tokens: int) -> torch.Tensor:
            drawn = [self._noise(seed, scale, tokens) for seed in seeds]
            return torch.from_numpy(np.stack(drawn)).to(self.device)

        with torch.device(self.device):
            rows = encode_prompts(self.model, prompts, guidance)
            run = generate(self.model.transformer, rows, self.model.schedule, guidance, noise)
            images = self.tokenizer.decode(run.codes).float().cpu().numpy()
        return [picture_from_image(image) for image in images]

    @functools.cache  # noqa: B019  # candidates of a tuning draw from the same noise; one maker per run
    def _noise(self, seed: int, scale: int, tokens: int) -> np.ndarray:
        return uniform_noise(seed, scale, tokens, self.model.config.bits)
