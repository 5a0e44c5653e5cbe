"""Operators' cases through the PyTorch binding, on any device."""

import torch

from toprovar.plugins.torch_operators import ONNX_TYPES

DTYPES = {number: dtype for dtype, number in ONNX_TYPES.items()}
NAMES = {
    "EntropyAttention": "entropy_attention", "CachedAttention": "cached_attention",
    "MaskedAttention": "masked_attention", "TokenGate": "token_gate", "ModulatedNorm": "modulated_norm",
    "RotaryHeads": "rotary_heads", "GatedResidual": "gated_residual", "BiasGelu": "bias_gelu",
    "BitSampler": "bit_sampler", "TokenRestore": "token_restore",
}  # fmt: skip


def called(case, device=None, half=torch.float16):
    """The operator's outputs. half: the type that stands for float16."""

    def kind(dtype):
        return half if dtype == torch.float16 else dtype

    attributes = dict(case.numbers)
    if "to" in attributes:
        attributes["to"] = kind(DTYPES[attributes["to"]])
    tensors = {name: torch.from_numpy(x) for name, x in case.inputs.items()}
    tensors = {name: x.to(device=device, dtype=kind(x.dtype)) for name, x in tensors.items()}
    found = getattr(torch.ops.toprovar, NAMES[case.kind])(**tensors, **attributes)
    return list(found) if isinstance(found, tuple | list) else [found]
