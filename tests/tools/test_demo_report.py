"""The demo's report: measured numbers, pictures and masks on one offline page."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from toprovar.runtime.plan import Backbone, LayerScores, Plan, Score
from toprovar.tools.demo_report import (
    DemoReport,
    PromptResult,
    demo_page,
    difference_picture,
    headline,
    median_ms,
    write_demo_report,
)

SIDES = (1, 2, 4, 6, 8, 12, 16, 20, 24, 32)
PRUNED_SCALES = {8: 256, 9: 384}


def picture(random: np.random.Generator, side: int = 256) -> np.ndarray:
    """[side, side, 3] uint8: a smooth backdrop with a disc on it."""
    y, x = np.indices((side, side)) / side
    disc = np.hypot(y - random.uniform(0.35, 0.65), x - random.uniform(0.35, 0.65)) < random.uniform(0.15, 0.3)
    colour = random.uniform(30, 225, 3)
    backdrop = (np.stack([x, y, 1 - x], -1) * 60 + 160) * random.uniform(0.7, 1, 3)
    return np.where(disc[..., None], colour, backdrop).astype(np.uint8)


def result(index: int, prompt: str) -> PromptResult:
    random = np.random.default_rng(index)
    dense = picture(random)
    blur = np.clip(dense.astype(int) + (random.normal(0, 6, (32, 32, 1)).repeat(8, 0).repeat(8, 1)), 0, 255)
    kept, entropy = {}, {}
    for scale, count in PRUNED_SCALES.items():
        side = SIDES[scale]
        y, x = (np.indices((side, side)) + 0.5) / side
        entropy[scale] = (2 + 2 * np.hypot(y - 0.5, x - 0.5) + random.normal(0, 0.1, (side, side))).astype(np.float32)
        kept[scale] = entropy[scale] <= np.sort(entropy[scale], axis=None)[count - 1]
    base = np.array(SIDES, float) ** 1.5
    return PromptResult(
        prompt=prompt,
        seed=7 + index,
        dense=dense,
        planned=blur.astype(np.uint8),
        ssim=0.91,
        psnr_db=28.4,
        kept=kept,
        entropy_nats=entropy,
        dense_ms=list(base + index * 0.1),
        planned_ms=[t * (0.55 if k in PRUNED_SCALES else 1.0) for k, t in enumerate(base + index * 0.1)],
    )


def demo_plan() -> Plan:
    keep = {k: (SIDES[k] ** 2, count, count, SIDES[k] ** 2) for k, count in PRUNED_SCALES.items()}
    plan = Plan(
        backbone=Backbone(family="infinity", layers=4, width=64, heads=4, bits=16),
        schedule=tuple((side, side) for side in SIDES),
        method="toprovar",
        preset="full",
        score=Score(kind="entropy", source_layer={k: {1: 0, 2: 0} for k in PRUNED_SCALES}),
        keep=keep,
        layers=LayerScores(R=(0.1, 0.8, 0.9, 0.2), classes=("global", "detail", "detail", "global")),
    )
    plan.check()
    return plan


def demo_report(count: int = 8) -> DemoReport:
    prompts = ['<script>alert("x")</script> a red apple', *(f"a round thing, number {i}" for i in range(1, count))]
    return DemoReport(
        results=[result(i, prompt) for i, prompt in enumerate(prompts)],
        summary={
            "tle_speedup": 2.013,
            "wall_speedup": 1.618,
            "ssim_mean": 0.9123,
            "psnr_mean": 28.44,
            "steps_ms_median": {"dense": 532.4, "planned": 329.1},
            "codes_equal_torch_vs_onnxruntime": True,
            "codes_compared": 2,
            "bundle_bytes": 31_234_567,
            "weights_bytes": 28_000_000,
            "graphs": 23,
            "seconds": {"calibrate": 41.2, "run_dense": 4.4},
        },
        facts={
            "machine": "x86_64, 2 cores, 2 threads",
            "clock": "step graphs with sampling; text encoder, prompt graph and decoder apart",
            "timing": "one warm run of each prompt per variant; medians over prompts",
            "backend": "onnxruntime <1.20>",
        },
        plan=demo_plan(),
    )


@pytest.fixture(scope="module")
def report() -> DemoReport:
    return demo_report()


@pytest.fixture(scope="module")
def page(report: DemoReport) -> bytes:
    return demo_page(report)


def test_two_runs_give_the_same_bytes(report: DemoReport, page: bytes, tmp_path: Path) -> None:
    write_demo_report(tmp_path / "report.html", report)
    assert (tmp_path / "report.html").read_bytes() == page
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_page_asks_no_other_host_and_is_small(page: bytes) -> None:
    text = page.decode()
    assert set(re.findall(r"https?://[^\s\"'<)]+", text)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert all(a.startswith("data:image/") for a in re.findall(r'src="([^"]*)"', text))
    assert len(page) < 3 * 2**20


def test_links_are_relative(page: bytes) -> None:
    links = re.findall(r'<a href="([^"]*)"', page.decode())
    assert links == ["calibration/report.html", "summary.json"]


def test_prompts_and_facts_are_escaped(page: bytes) -> None:
    text = page.decode()
    assert "<script" not in text
    assert "&lt;script&gt;alert(&#34;x&#34;)&lt;/script&gt; a red apple" in text
    assert "onnxruntime &lt;1.20&gt;" in text


def test_headline_gives_every_measured_number(report: DemoReport, page: bytes) -> None:
    sentence = headline(report)
    for number in ("2.01 times less", "1.62 times as fast", "532 ms", "329 ms", "SSIM 0.912", "28.4 dB", "8 prompts"):
        assert number in sentence
    assert "decoder apart" in sentence
    assert "draw equal codes (2 dense pictures compared)" in sentence
    assert sentence in page.decode()


def test_different_codes_are_said_plainly(report: DemoReport) -> None:
    different = replace(report, summary={**report.summary, "codes_equal_torch_vs_onnxruntime": False})
    assert "draw different codes" in headline(different)
    assert "codes differ" in demo_page(different).decode()
    silent = replace(report, summary={**report.summary, "codes_compared": 0})
    assert "were not compared" in headline(silent)


def test_sections_come_in_reading_order(page: bytes) -> None:
    titles = re.findall(r"<h2>([^<]+)</h2>", page.decode())
    assert titles == [
        "Dense and planned pictures",
        "Entropy and kept tokens of the planned runs",
        "Time per scale",
        "Milliseconds",
        "Sizes on disk",
        "Seconds per stage",
        "Conditions",
        "Plan",
    ]


def test_every_prompt_has_three_pictures_and_its_masks(report: DemoReport, page: bytes) -> None:
    text = page.decode()
    assert text.count('<div class="card">') == len(report.results)
    assert text.count("difference ×4</figcaption>") == len(report.results)
    assert text.count("kept 384 of 1024 tokens") == len(report.results)


def test_plan_free_report_with_skipped_scales_is_drawn(report: DemoReport) -> None:
    bare = [replace(r, kept={}, entropy_nats={}, planned_ms=list(r.planned_ms)[:8]) for r in report.results[:1]]
    text = demo_page(replace(report, results=bare, plan=None)).decode()
    assert "The plan prunes no tokens." in text
    assert "skipped" in text
    assert "1 prompt)" in text


def test_times_are_medians_over_prompts() -> None:
    np.testing.assert_array_equal(median_ms([[1, 10], [3, 20], [100, 0]]), [3, 10])
    with pytest.raises(ValueError, match="inhomogeneous"):
        median_ms([[1, 2], [1]])


def test_difference_is_absolute_amplified_and_clipped() -> None:
    a = np.array([[[10, 0, 255]]], np.uint8)
    b = np.array([[[13, 100, 255]]], np.uint8)
    np.testing.assert_array_equal(difference_picture(a, b), [[[12, 255, 0]]])
    np.testing.assert_array_equal(difference_picture(b, a), difference_picture(a, b))
    with pytest.raises(ValueError, match="different shapes"):
        difference_picture(a, np.zeros((2, 1, 3), np.uint8))


def test_report_without_results_is_refused(report: DemoReport) -> None:
    with pytest.raises(ValueError, match="without results"):
        demo_page(replace(report, results=[]))
