import json
import math

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from toprovar.tools.evaluation import pruning_signals as signals
from toprovar.tools.evaluation.layouts import objects_mask
from toprovar.tools.evaluation.prompts import Prompt
from toprovar.tools.evaluation.pruning_signals import area_under_curve, bit_entropy, markdown, summary, token_kinds
from toprovar.tools.train_demo.captions import Scene

TOLERANCE = {"entropy": 1e-9}  # float64, two ways to the same sum


def test_area_counts_pairs():
    generator = np.random.default_rng(0)
    positive, negative = generator.integers(0, 9, 17).astype(float), generator.integers(0, 7, 81).astype(float)
    pairs = [(p > n) + 0.5 * (p == n) for p in positive for n in negative]
    assert area_under_curve(positive, negative) == pytest.approx(np.mean(pairs))
    assert area_under_curve(np.array([2.0]), np.array([1.0, 1.5])) == 1
    assert area_under_curve(np.zeros(3), np.zeros(4)) == 0.5


@pytest.mark.parametrize(("positive", "negative"), [([], [1.0]), ([1.0], []), ([math.nan], [1.0])])
def test_area_of_nothing_is_refused(positive, negative):
    with pytest.raises(ValueError, match="empty or holds NaN"):
        area_under_curve(np.array(positive), np.array(negative))


def test_bit_entropy_is_that_of_its_chances():
    logits = 8 * torch.randn(17, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    chances = logits.unflatten(-1, (-1, 2)).softmax(-1).numpy()
    expected = -(chances * np.log(chances)).sum((1, 2))
    np.testing.assert_allclose(bit_entropy(logits).numpy(), expected, atol=TOLERANCE["entropy"])
    assert bit_entropy(torch.zeros(1, 8)).item() == pytest.approx(4 * math.log(2))
    assert bit_entropy(torch.tensor([[0.0, 1e6, 0.0, -1e6]])).item() == 0


@pytest.mark.parametrize("side", [4, 6, 16, 32])
def test_tokens_are_objects_or_background_and_never_both(side):
    mask = torch.zeros(256, 256, dtype=torch.bool)
    mask[80:176, 16:112] = True
    objects, ground = token_kinds(mask, "pair", (side, side))
    assert not (objects & ground).any()
    places = objects_mask("pair")
    for token in np.flatnonzero(ground):
        y, x = divmod(int(token), side)
        rows, columns = slice(y * 256 // side, (y + 1) * 256 // side), slice(x * 256 // side, (x + 1) * 256 // side)
        assert not bool((mask | places)[rows, columns].any())
    assert objects.sum() > 0
    assert ground.sum() > 0


def fake(bits, value):
    scale = {
        "attention_auc": [value, 1 - value], "bit_auc": value, "object": 2.0, "background": 1.0,
        "change_object": 9.0, "change_background": None, "psnr_to_last_db": 20.0,
    }  # fmt: skip
    return {"bits_nats": bits, "scales": [dict.fromkeys(scale), scale]}


def test_summary_means_over_pictures_and_spreads_by_bucket():
    prompts = [
        Prompt(i, "", Scene("single", (0,), "noto", "plain" if i < 3 else "striped", "red", "")) for i in range(4)
    ]
    measured = [fake(bits, value) for bits, value in ((10.0, 0.5), (20.0, 0.7), (30.0, 0.9), (99.0, 0.9))]
    found = summary(measured, prompts, ((1, 1), (2, 2)))
    assert found["scales"][0]["bit_auc"] is None
    assert found["scales"][0]["pictures"] == 0
    assert found["scales"][1]["bit_auc"] == pytest.approx(0.75)
    assert found["scales"][1]["attention_auc"] == pytest.approx([0.75, 0.25])
    assert found["scales"][1]["change_background"] is None
    assert found["bits_nats"]["single"] == {"pictures": 3, "p10": 12.0, "p50": 20.0, "p90": 28.0, "ratio": 2.333}
    assert found["bits_nats"]["pattern"]["p50"] == 99
    assert "scene" not in found["bits_nats"]


def test_command_measures_and_prints_the_same_tables_from_the_file(judged_folder, tmp_path):
    out = tmp_path / "signals.json"
    end = CliRunner().invoke(
        signals.app, ["--model", str(judged_folder), "--out", str(out), "--prompts", "2", "--seed", "3"]
    )
    assert end.exit_code == 0, end.output
    document = json.loads(out.read_text())
    assert len(document["scales"]) == 7
    assert document["prompts"]["count"] == len(document["raw_bits_nats"]) == 2
    assert document["scales"][-1]["psnr_to_last_db"] is None
    assert all(value > 0 for value in document["raw_bits_nats"])
    again = CliRunner().invoke(signals.app, ["--table", str(out)])
    assert again.stdout == end.stdout == markdown(document)
    repeated = CliRunner().invoke(
        signals.app, ["--model", str(judged_folder), "--out", str(out), "--prompts", "2", "--seed", "3", "--json"]
    )
    assert {**json.loads(repeated.stdout), "command": ""} == {**document, "command": ""}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--out is needed"),
        (["--out", "x.json", "--prompts", "999"], "--prompts asks for 999; the split development has 256"),
    ],
)
def test_wrong_use_says_what_to_do(options, message):
    end = CliRunner().invoke(signals.app, options)
    assert end.exit_code == 2
    assert message in end.stderr
