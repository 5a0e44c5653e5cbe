"""Which graphs may round fp32 matrix products to TF32, ten bits of mantissa, on the tensor cores."""

from toprovar.runtime.manifest import Graph, Manifest


def allows_tf32(manifest: Manifest, graph: Graph) -> bool:
    """Decoders of a bundle in 16 bits may: their inputs are bits, and a picture has eight per channel. Nothing else
    may: the fp32 products of a step make its logits, and codes are to be those of every other host."""
    return manifest.compute != "fp32" and graph in (manifest.decoder, manifest.small_decoder)
