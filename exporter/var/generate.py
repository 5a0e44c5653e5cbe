"""VAR's generation loop in PyTorch: what its maps, blocks and indices are; plans are run by planned/loop.py.

Source: FoundationVision/VAR, models/var.py, autoregressive_infer_cfg.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from toprovar.exporter.codebook import Quantizer
from toprovar.exporter.index_sampling import IndexNoise
from toprovar.exporter.planned.images import Images
from toprovar.exporter.planned.index_loop import IndexLoop
from toprovar.exporter.planned.loop import BlockOutput, Generation, LoopOptions
from toprovar.exporter.schedules import square
from toprovar.exporter.var.transformer import Prompt, Var
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.guidance import Guidance


def guidance_of(scales: int, cfg: float = 4.0, top_k: int = 900, top_p: float = 0.95, smooth: bool = False) -> Guidance:
    """Guidance and sampling of every scale; the defaults are the published demo's.

    cfg:    t of the last scale, growing from 0 at the first; logits are (1+t)*conditional - t*unconditional.
            0 needs no rows of the null class
    top_k:  candidates; 0 keeps all
    top_p:  probability that stays; 0 keeps all
    smooth: feeds on means of codes instead of single codes
    """
    return Guidance.growing(
        (cfg,),
        scales,
        "linear",
        top_p=top_p,
        top_k=(top_k,),
        smooth=smooth,
    )


def check_sides(model: Var, sides: Sequence[int], what: str = "schedule") -> None:
    """Raises: ToprovarError if the model has other levels or positions than maps of these sides need."""
    tokens, config = sum(side * side for side in sides), model.config
    if len(sides) < 2 or sides[0] != 1 or len(sides) != config.levels or tokens != config.tokens:
        raise ToprovarError(
            f"{what}: found sides {list(sides)}, {len(sides)} maps of {tokens} tokens together; expected "
            f"{config.levels} maps of {config.tokens} tokens, the first of side 1",
            "pass the sides that the model was trained with",
        )


@torch.inference_mode()
def generate(
    model: Var,
    quantizer: Quantizer,
    prompt: Prompt,
    sides: Sequence[int],
    guidance: Guidance,
    noise: IndexNoise | None = None,
    forced_indices: Sequence[Tensor] | None = None,
    forced_maps: Mapping[int, Tensor] | None = None,
    options: LoopOptions = LoopOptions(),
) -> Generation:
    """Draws the codes of a batch of classes.

    prompt:         2B rows with those of the null class, else B
    sides:          of the square token maps; the first is 1
    noise:          may be None where indices are forced and no smoothing runs
    forced_indices: indices to use instead of drawn ones, per scale [B, n*n]
    forced_maps:    {scale: [B, d, n, n]} inputs of scales to use instead of the resized codes
    Raises:         ToprovarError if the sides, the guidance or the noise do not fit.
    """
    check_sides(model, sides)
    if guidance.uses_unconditional_row and not prompt.guided:
        raise ToprovarError(
            f"guidance {max(guidance.cfg):g} needs rows of the null class; the prompt has none",
            "make the prompt with guided=True",
        )
    return _Loop(model, quantizer, square(sides), guidance, noise, forced_indices, forced_maps, options).run(prompt)


class _Loop(IndexLoop[Prompt, IndexNoise]):
    def __init__(
        self,
        model: Var,
        quantizer: Quantizer,
        schedule: tuple[tuple[int, int], ...],
        guidance: Guidance,
        noise: IndexNoise | None,
        forced_indices: Sequence[Tensor] | None,
        forced_maps: Mapping[int, Tensor] | None,
        options: LoopOptions,
    ) -> None:
        self.model = model
        super().__init__(model.config, quantizer, schedule, guidance, noise, forced_indices, forced_maps, options)

    def is_guided(self, prompt: Prompt) -> bool:
        return prompt.guided

    def empty_cache(self, prompt: Prompt) -> Tensor:
        return prompt.condition.new_empty(0, prompt.rows, self.config.heads, self.config.head_width)

    def first_input(self, prompt: Prompt) -> Tensor:
        return self.model.first_token(prompt)

    def next_input(self, group: Images, codes: Tensor, scale: int) -> Tensor:
        return self.model.embed_codes(codes, scale, sum(self.tokens[:scale]))

    def block(
        self, group: Images, layer: int, scale: int, x: Tensor, kept: Tensor | None, want_entropy: bool
    ) -> BlockOutput:
        assert isinstance(group.prompt, Prompt)
        block, modulation = self.model.blocks[layer], group.prompt.modulations[layer]
        out = block.self_attention(x, modulation, group.k[layer], group.v[layer], want_entropy)
        out.x = x + out.x
        out.x = out.x + block.feed_forward(out.x, modulation)
        return out

    def part(
        self, group: Images, layer: int, scale: int, part: str, x: Tensor, kept: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        assert isinstance(group.prompt, Prompt)
        block, modulation = self.model.blocks[layer], group.prompt.modulations[layer]
        if part == "attention":
            out = block.self_attention(x, modulation, group.k[layer], group.v[layer])
            return out.x, out.k, out.v
        return block.feed_forward(x, modulation), None, None

    def raw_logits(self, group: Images, scale: int, x: Tensor, rows: int) -> Tensor:
        assert isinstance(group.prompt, Prompt)
        return self.model.logits(x, group.prompt, rows)
