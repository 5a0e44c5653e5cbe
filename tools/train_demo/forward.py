"""The transformer's teacher-forced pass as training runs it, and drawing samples with it.

`TrainingForward` computes what `Infinity.teacher_forced_logits` computes; it keeps the rotation table on the device and
compiles one block, which all blocks share.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from toprovar.exporter.infinity.rope import rope_table
from toprovar.exporter.infinity.tokenizer import latent_from_bits, resize_bilinear, tokens_from_latent
from toprovar.exporter.infinity.transformer import Infinity, block_causal
from toprovar.exporter.schedules import Schedule, token_counts


class TrainingForward:
    """Callable: text rows and code inputs -> logits of all scales given."""

    def __init__(self, model: Infinity, schedule: Schedule, device: torch.device, compile_block: bool) -> None:
        self.model = model
        self.counts = token_counts(schedule)
        self._table = torch.from_numpy(rope_table(model.config.head_width, schedule)).to(device)
        self._block = torch.compile(block_causal, dynamic=False) if compile_block else block_causal

    def __call__(self, text_rows: Tensor, text_mask: Tensor, code_inputs: Sequence[Tensor]) -> Tensor:
        """Shapes as `Infinity.teacher_forced_logits`. Returns: [B, N_0 + ..., 2*bits] fp32."""
        model = self.model
        counts = tuple(self.counts[: len(code_inputs) + 1])
        prompt = model.prompt(text_rows, text_mask)
        embedded = [model.embed_codes(tokens, k + 1) for k, tokens in enumerate(code_inputs)]
        x = torch.cat([model.first_input(prompt), *embedded], dim=1).float()
        cos, sin = self._table[:, : sum(counts)]
        for block, cross in zip(model.layers, prompt.cross, strict=True):
            x = self._block(block, x, prompt.modulation, cross, prompt.mask, cos, sin, counts)
        return model.logits(x, prompt)


@torch.no_grad()
def sample(
    forward: TrainingForward,
    schedule: Schedule,
    text_rows: Tensor,
    text_mask: Tensor,
    *,
    full: tuple[int, int],
    guidance: float,
    temperature: float,
    generator: torch.Generator,
) -> Tensor:
    """Draws latents scale by scale without a cache.

    text_rows: [B, T, W]; full: the tokenizer's grid, on which codes are summed, also for a shortened schedule.
    Returns:   [B, d, *full] fp32.
    """
    model = forward.model
    B, T = text_mask.shape
    rows = torch.cat([text_rows, model.cfg_uncond[:T].expand(B, -1, -1).to(text_rows.dtype)])
    mask = torch.cat([text_mask, text_mask])
    device = text_rows.device
    summed = torch.zeros(B, model.config.bits, *full, device=device)
    inputs: list[Tensor] = []
    for k, (height, width) in enumerate(schedule):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = forward(rows, mask, [torch.cat([i, i]) for i in inputs])[:, -height * width :].float()
        mixed = guidance * logits[:B] + (1 - guidance) * logits[B:]
        delta = (mixed[..., 1::2] - mixed[..., 0::2]) / temperature  # [B, L, bits]
        uniform = torch.rand(delta.shape, generator=generator, device=device)
        bits = (uniform < torch.sigmoid(delta)).view(B, height, width, -1)
        code = latent_from_bits(bits)
        summed = summed + (code if (height, width) == full else resize_bilinear(code, full))
        if k + 1 < len(schedule):
            inputs.append(tokens_from_latent(resize_bilinear(summed, schedule[k + 1]), 1))
    return summed
