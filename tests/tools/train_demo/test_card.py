from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from toprovar.runtime.errors import ToprovarError
from toprovar.tools.train_demo import card


@pytest.fixture
def metrics() -> dict[str, Any]:
    scales = [0.1] * 10
    judged = {
        "loss_nats_per_bit_by_scale": {"single": scales},
        "loss_held_out_nats_per_bit_by_scale": {"single": scales},
        "views": {"single": 1000},
        "steps": 77,
        "retrieval": {"top1": 0.75, "top5": 1.0, "count": 128.0},
        "retrieval_held_out": {},
    }
    files = {
        "size_bytes": {"a": 9_000_000, "b": 2_000_000},
        "decoder_dtype": "int8",
        "parameters": {"infinity": 5_000_000},
        "psnr_db_unrounded": {"single": 33.33},
        "psnr_db_shipped": {"single": 33.21},
    }
    return {
        "facts": {"device": "some GPU", "seed": 1},
        "tokenizer": {"psnr_db_by_scale": {"single": [10.0, 33.33]}},
        "files": files,
        "shipped": judged,
    }


def test_numbers_replace_the_old_ones(tmp_path: Path, metrics: dict[str, Any]) -> None:
    path = tmp_path / "MODEL_CARD.md"
    path.write_text(f"before\n{card.START}\nold\n{card.END}\nafter\n", encoding="utf-8")
    source = tmp_path / "metrics.json"
    source.write_text(json.dumps(metrics), encoding="utf-8")
    assert card.main(["--metrics", str(source), "--card", str(path)]) == 0
    text = path.read_text(encoding="utf-8")
    assert "old" not in text
    assert text.startswith("before")
    assert text.endswith("after\n")
    for number in (
        "some GPU",
        "77 transformer steps",
        "11.0 MB",
        "| single | 33.3 | 33.2 |",
        "| seen | 75 % | 100 % |",
    ):
        assert number in text


def test_unfinished_runs_are_refused(metrics: dict[str, Any]) -> None:
    del metrics["shipped"]
    with pytest.raises(ToprovarError, match="run is not finished"):
        card.numbers_from_metrics(metrics)


def test_the_shipped_card_has_a_place_for_numbers() -> None:
    shipped = Path(card.__file__).resolve().parents[2] / "exporter" / "demo" / "MODEL_CARD.md"
    assert "X" in card.fill_card(shipped.read_text(encoding="utf-8"), "X")
