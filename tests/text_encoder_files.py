"""Tiny text encoders with random weights and a tokenizer made on the spot, as folders that look like published ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

LETTERS = [chr(code) for code in range(33, 127)]
PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"
PIECES = [PAD, END, UNKNOWN, "▁", "▁red", "▁apple", "▁a", *LETTERS]


def write_tokenizer(folder: Path, ends: bool, padding_side: str = "right") -> None:
    """A Unigram tokenizer of single letters and a few words; with `ends`, every text gets an end token, as T5's do."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.Unigram([(piece, -float(i)) for i, piece in enumerate(PIECES)], unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    if ends:
        tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {END}", special_tokens=[(END, 1)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, unk_token=UNKNOWN, padding_side=padding_side
    )
    fast.save_pretrained(folder)


def tiny_t5_config(**changes: Any) -> Any:
    from transformers import T5Config

    return T5Config(
        vocab_size=len(PIECES), d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=3, feed_forward_proj="gated-gelu",
        relative_attention_num_buckets=8, relative_attention_max_distance=20, tie_word_embeddings=False,
        **changes,
    )  # fmt: skip


def write_t5(folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """Returns: transformers' own encoder with the weights that were written."""
    from transformers import T5EncoderModel

    folder.mkdir(parents=True)
    config = tiny_t5_config()
    torch.manual_seed(seed)
    model = T5EncoderModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((torch.randn_like(parameter) * 0.3 + (parameter.dim() == 1)).to(dtype).float())
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    state = {n: t.to(dtype).contiguous() for n, t in model.state_dict().items() if n != "encoder.embed_tokens.weight"}
    state["decoder.final_layer_norm.weight"] = torch.ones(16)  # whole T5s carry a decoder, which is not read
    save_file(state, folder / "model.safetensors")
    write_tokenizer(folder, ends=True)
    return model


def write_qwen2_vl(folder: Path, prefix: str = "model.", padding_side: str = "left", seed: int = 0) -> Any:
    """prefix: of the text model's tensors. Returns: transformers' own text model with the weights that were written."""
    from transformers import Qwen2VLConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLTextModel

    folder.mkdir(parents=True)
    text = {
        "vocab_size": len(PIECES), "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]},
    }  # fmt: skip
    document = {"model_type": "qwen2_vl", **text}
    (folder / "config.json").write_text(json.dumps(document))
    torch.manual_seed(seed)
    model = Qwen2VLTextModel(Qwen2VLConfig.from_dict(document).text_config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.dim() == 1))
    state = {prefix + name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    state["visual.patch_embed.proj.weight"] = torch.ones(2, 2)  # not read
    save_file(state, folder / "model.safetensors")
    write_tokenizer(folder, ends=False, padding_side=padding_side)
    return model
