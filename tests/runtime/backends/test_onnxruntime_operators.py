"""The same bundle with function bodies and with the operator library's kernels, on the processor."""

import numpy as np
import pytest

from toprovar.runtime.backends.onnxruntime import OnnxRuntimeBackend
from toprovar.runtime.bundle import open_bundle
from toprovar.runtime.pipeline import Pipeline


@pytest.mark.parametrize("variant", ["dense", "planned"])
def test_kernels_and_bodies_draw_the_same_bits(tiny_bundle, with_plugins, variant):
    bundle = open_bundle(tiny_bundle)
    by = {name: Pipeline(bundle, OnnxRuntimeBackend(bundle, 1, operators=name)) for name in ("body", "library")}
    assert by["library"].backend.operators == "library"
    for seed in range(3):
        body, library = (by[name].generate("red apple", seed, variant) for name in ("body", "library"))
        assert all(np.array_equal(a, b) for a, b in zip(body.bits, library.bits, strict=True))
        for one, other in zip(body.steps, library.steps, strict=True):
            assert one.kept.keys() == other.kept.keys()
            assert all(np.array_equal(one.kept[layer], other.kept[layer]) for layer in one.kept)
            for layer, entropy in one.entropy_nats.items():
                np.testing.assert_allclose(other.entropy_nats[layer], entropy, atol=1e-5)  # nats; float32 sums differ
