"""Several images at once: each chooses its own tokens and takes its own decisions, and comes out as it does alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import GUIDANCE, SCHEDULE
from helpers import generate_in_torch, open_pipeline
from plans import DECIDED, STATIC, mass_parts, plan_of, rho_parts

from toprovar.exporter.bundle_writer import export_bundle
from toprovar.exporter.infinity.generate import generate
from toprovar.exporter.infinity.transformer import Prompt
from toprovar.exporter.planned.step import StepOptions
from toprovar.exporter.prompts import encode_prompt
from toprovar.runtime.decisions import LogisticModel
from toprovar.runtime.noise import uniform_noise
from toprovar.runtime.pipeline import Request

PROMPTS = ["red apple", "green dog on white", "house"]
SEEDS = [1, 4, 9]


def spread_skipvar(model):
    """A skipvar plan whose classifier tells pictures apart by their share of high frequencies."""
    plan = plan_of(model, **DECIDED["skipvar 0, 0"])
    skipvar = plan.decisions[0].model_copy(
        update={
            "skip": LogisticModel(
                mean=(0.0, 0.0), std=(1.0, 1.0), weights=((-40.0, 0.0), (0.0, 0.0), (40.0, 0.0)),
                intercepts=(0.0, 0.0, 0.0), labels=(0, 1, 2),
            )
        }
    )  # fmt: skip
    return plan, skipvar


def batch_in_torch(tiny, plan, prompts=PROMPTS, seeds=SEEDS):
    """All prompts in one call, padded to one length as the runtime pads them."""
    encoded = [padded(encode_prompt(tiny, prompt, GUIDANCE)) for prompt in prompts]

    def rows(pick):
        return torch.cat([pick(one)[half : half + 1] for half in (0, 1) for one in encoded])

    prompt = Prompt(
        rows(lambda one: one.pooled),
        rows(lambda one: one.modulation),
        rows(lambda one: one.head),
        [
            (rows(lambda one, i=i: one.cross[i][0]), rows(lambda one, i=i: one.cross[i][1]))
            for i in range(tiny.config.depth)
        ],
        rows(lambda one: one.mask),
    )

    def noise(scale, tokens):
        return torch.stack([torch.from_numpy(uniform_noise(seed, scale, tokens, 8)) for seed in seeds])

    return generate(tiny.transformer, prompt, SCHEDULE, GUIDANCE, noise, plan, tokenizer=tiny.tokenizer)


def padded(prompt, length=12):
    """Masked rows up to a common number of text tokens."""

    def wider(x, axis, value=0.0):
        shape = list(x.shape)
        shape[axis] = length - x.shape[axis]
        return torch.cat([x, torch.full(shape, value)], axis)

    return replace(
        prompt,
        cross=[(wider(k, 2), wider(v, 2)) for k, v in prompt.cross],
        mask=wider(prompt.mask, 3, -1e4),
    )


BATCHED = {
    **{name: STATIC[name] for name in STATIC},
    "energy mass, guidance decided": mass_parts(0.6, 0.3),
    "rho in between": rho_parts(0.47),
}


@pytest.mark.parametrize("name", [*BATCHED, "dense"])
def test_an_image_of_a_batch_is_the_image_alone(tiny, tmp_path, name):
    plan = plan_of(tiny, **BATCHED[name]) if name != "dense" else None
    variant = "planned" if plan else "dense"
    options = StepOptions(text_tokens=12, images=3)
    export_bundle(tiny, tmp_path / "b", GUIDANCE, options, plan, SCHEDULE)
    pipeline = open_pipeline(tmp_path / "b")
    assert {step.images for step in pipeline.steps(variant)} == {1, 3}
    together = pipeline.generate_batch(
        [Request(prompt, seed) for prompt, seed in zip(PROMPTS, SEEDS, strict=True)], variant
    )
    run = batch_in_torch(tiny, plan)
    for i, (prompt, seed) in enumerate(zip(PROMPTS, SEEDS, strict=True)):
        alone = pipeline.generate(prompt, seed, variant)
        mine = generate_in_torch(tiny, SCHEDULE, GUIDANCE, prompt, seed, plan=plan, tokenizer=tiny.tokenizer)
        assert [step.counts for step in together[i].steps] == [step.counts for step in alone.steps] == run.counts[i]
        assert together[i].decisions == alone.decisions
        for k, bits in enumerate(alone.bits):
            assert np.array_equal(bits, together[i].bits[k]), (i, k)
            assert np.array_equal(bits, run.bits[k][i].numpy()), (i, k)
            assert np.array_equal(bits, mine.bits[k][0].numpy()), (i, k)
        assert np.array_equal(together[i].image, alone.image)
        np.testing.assert_allclose(run.codes[i].numpy(), together[i].codes, atol=1e-5)
        for step, single in zip(together[i].steps, alone.steps, strict=True):
            assert step.kept.keys() == single.kept.keys()
            for layer in step.kept:
                if step.kept[layer].ndim == 1:
                    assert np.array_equal(step.kept[layer], single.kept[layer])


def test_images_that_decide_differently_go_on_apart(tiny, tmp_path):
    """Paths by a classifier that sits between the features of two pictures."""
    plan, skipvar = spread_skipvar(tiny)
    pictures = [
        generate_in_torch(tiny, SCHEDULE, GUIDANCE, p, s, plan=plan, tokenizer=tiny.tokenizer)
        for p, s in zip(PROMPTS, SEEDS, strict=True)
    ]
    assert all(run.decisions == [(0, 3, "path", "main")] for run in pictures)
    features = features_of(tiny)
    order = np.argsort(features[:, 0])
    assert len(set(features[:, 0])) == 3
    middle = float(features[order[:2], 0].mean())
    skip = skipvar.skip.model_copy(update={"mean": (middle, 0.0), "std": (1e-6, 1.0)})
    plan = plan.model_copy(update={"decisions": (skipvar.model_copy(update={"skip": skip}),)})
    export_bundle(tiny, tmp_path / "b", GUIDANCE, StepOptions(text_tokens=12, images=3), plan)
    pipeline = open_pipeline(tmp_path / "b")
    together = pipeline.generate_batch([Request(p, s) for p, s in zip(PROMPTS, SEEDS, strict=True)], "planned")
    run = batch_in_torch(tiny, plan)
    lengths = [len(result.steps) for result in together]
    assert sorted(lengths) == [4, 4, 6]  # pictures above the middle leave two scales out
    for i, (prompt, seed) in enumerate(zip(PROMPTS, SEEDS, strict=True)):
        alone = pipeline.generate(prompt, seed, "planned")
        assert len(alone.steps) == lengths[i] == len(run.counts[i])
        assert all(np.array_equal(a, b) for a, b in zip(alone.bits, together[i].bits, strict=True))
        assert all(np.array_equal(a, run.bits[k][i].numpy()) for k, a in enumerate(alone.bits))
        for k in range(lengths[i], len(run.bits)):
            assert (run.bits[k][i] == 255).all()
        assert np.array_equal(alone.image, together[i].image)


def features_of(tiny):
    from toprovar.exporter.infinity.generate import small_picture
    from toprovar.runtime.decisions import frequency_features

    rows = []
    for prompt, seed in zip(PROMPTS, SEEDS, strict=True):
        codes = {}
        generate_in_torch(tiny, SCHEDULE, GUIDANCE, prompt, seed, on_scale=codes.__setitem__)
        rows.append(frequency_features(*(small_picture(tiny.tokenizer, codes[k], (4, 4), 1) for k in (2, 3))))
    return np.stack(rows)


def test_more_images_than_a_step_takes_run_in_parts(tiny, tmp_path):
    plan = plan_of(tiny, **STATIC["variance"])
    export_bundle(tiny, tmp_path / "b", GUIDANCE, StepOptions(text_tokens=12, images=2), plan)
    pipeline = open_pipeline(tmp_path / "b")
    together = pipeline.generate_batch([Request(p, s) for p, s in zip(PROMPTS, SEEDS, strict=True)], "planned")
    for result, prompt, seed in zip(together, PROMPTS, SEEDS, strict=True):
        alone = pipeline.generate(prompt, seed, "planned")
        assert all(np.array_equal(a, b) for a, b in zip(alone.bits, result.bits, strict=True))
