"""The calibration report: one offline file with every figure, the same bytes every time."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from toprovar.calibrate.figures import heat_uri, mask_uri
from toprovar.calibrate.methods.dense import dense_plan_from_stats
from toprovar.calibrate.methods.settings import MethodSettings
from toprovar.calibrate.methods.toprovar import fit_depth, toprovar_plan_from_stats
from toprovar.calibrate.report import keep_mask, report_page, typical_gate, write_report
from toprovar.calibrate.statistics import Statistics
from toprovar.runtime.plan import Backbone, Plan

SCHEDULE = tuple((side, side) for side in (1, 2, 4, 6, 8, 12, 16, 20, 24, 32))
BACKBONE = Backbone(family="infinity", layers=8, width=64, heads=4, bits=16)
HOSTILE = '<script>alert("x")</script> & a "red" apple'
VOID = {"meta", "img", "br", "link", "input", "hr"}


def smooth_picture(random: np.random.Generator, side: int) -> np.ndarray:
    """[side, side, 3] uint8: blobs, so that the file size is that of a picture and not of noise."""
    y, x = np.indices((side, side)) / side
    waves = [np.sin(random.uniform(3, 12) * x + random.uniform(3, 12) * y + random.uniform(0, 6)) for _ in range(3)]
    return ((np.stack(waves, -1) + 1) * 127).astype(np.uint8)


def synthetic_statistics(
    prompts: int = 9, schedule: tuple[tuple[int, int], ...] = SCHEDULE, layers: int = 8, side: int = 256
) -> Statistics:
    """Statistics as a falling rho curve gives them; middle layers look like Detail."""
    random = np.random.default_rng(5)
    scales = len(schedule)
    middle = 1 - np.abs(np.linspace(-1, 1, layers))
    shown = []
    for _ in range(min(prompts, 4)):
        found: dict[str, np.ndarray] = {}
        for k, (h, w) in enumerate(schedule):
            y, x = np.indices((h, w))
            bump = np.hypot((y + 0.5) / h - 0.5, (x + 0.5) / w - 0.4)
            found[f"entropy_{k}"] = (2 + bump * 2 + random.normal(0, 0.15, (layers, h, w))).astype(np.float32)
            found[f"picture_{k}"] = smooth_picture(random, side)
        shown.append(found)
    ramp = np.linspace(0, 1, scales)
    return Statistics(
        schedule=schedule,
        prompts=[HOSTILE, *(f"prompt number {i}" for i in range(1, prompts))],
        seeds=list(range(prompts)),
        rho=np.clip(0.62 - 0.3 * ramp + random.normal(0, 0.03, (prompts, scales)), 0, 1),
        mean_entropy=1 + 4 * ramp[None, :, None] + random.normal(0, 0.2, (prompts, scales, layers)),
        singular_ratio=np.exp(3.5 - 2.5 * middle + random.normal(0, 0.1, (prompts, layers))),
        truncated_ssim=np.clip(ramp**0.5 + random.normal(0, 0.02, (prompts, scales)) * (1 - ramp), -1, 1),
        shown=shown,
        digest="d" * 64,
    )


def planned(stats: Statistics, settings: MethodSettings | None = None) -> tuple[Plan, list[int | None]]:
    settings = settings or MethodSettings()
    backbone = BACKBONE.model_copy(update={"layers": stats.layers})
    return toprovar_plan_from_stats(stats, backbone, settings), fit_depth(stats, settings).per_prompt


class Reader(HTMLParser):
    """Tags, addresses and ids of a page; fails on tags that do not nest."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.ids: list[str] = []
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "srcset", "action"):
                self.addresses.append(value or "")
            if name == "id":
                self.ids.append(value or "")
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def close(self) -> None:
        super().close()
        assert not self._open


def read_page(page: bytes) -> Reader:
    reader = Reader()
    reader.feed(page.decode())
    reader.close()
    return reader


@pytest.fixture(scope="module")
def stats() -> Statistics:
    return synthetic_statistics()


@pytest.fixture(scope="module")
def page(stats: Statistics) -> bytes:
    plan, depths = planned(stats)
    return report_page(stats, plan, depths, {"model": "demo <model>", "commit": "abc"})


def test_two_runs_give_the_same_bytes(stats: Statistics, page: bytes, tmp_path: Path) -> None:
    plan, depths = planned(stats)
    write_report(tmp_path / "deep" / "report.html", stats, plan, depths, {"model": "demo <model>", "commit": "abc"})
    assert (tmp_path / "deep" / "report.html").read_bytes() == page
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["report.html"]


def test_page_is_self_contained_and_small(page: bytes) -> None:
    reader = read_page(page)
    assert reader.addresses
    assert all(address.startswith(("data:image/", "#")) for address in reader.addresses)
    assert not {"script", "link", "iframe", "object"} & set(reader.tags)
    text = page.decode()
    assert set(re.findall(r"https?://[^\s\"'<)]+", text)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert all(target.startswith(("data:", "#")) for target in re.findall(r"url\(([^)]+)", text))
    assert len(page) < 3 * 2**20


def test_ids_are_unique_and_references_resolve(page: bytes) -> None:
    reader = read_page(page)
    assert len(reader.ids) == len(set(reader.ids))
    wanted = {a[1:] for a in reader.addresses if a.startswith("#")} | set(re.findall(r"url\(#([^)]+)", page.decode()))
    assert wanted
    assert wanted <= set(reader.ids)


def test_prompts_and_facts_are_escaped(page: bytes) -> None:
    text = page.decode()
    assert "<script" not in text
    assert "&lt;script&gt;alert(&#34;x&#34;)&lt;/script&gt; &amp; a &#34;red&#34; apple" in text
    assert "demo &lt;model&gt;" in text


def test_page_tells_the_plans_numbers_first(stats: Statistics, page: bytes) -> None:
    plan, _ = planned(stats)
    head = page.decode().split("<section>")[0].split("<header>")[1]
    assert f"<dd>{plan.D.value}<small>" in head
    assert f"{plan.D.tau:.3f}" in head
    assert f"{plan.tle_speedup:.2f}×" in head
    assert "ρ ≤ τ" in head


def test_every_figure_has_a_caption_and_axes_with_units(page: bytes) -> None:
    tags = read_page(page).tags
    assert tags.count("svg") == 6
    assert tags.count("figcaption") == tags.count("figure") - page.count(b'class="empty"')
    for label in ("scale (0-based)", "layer (0-based)", "(nats)", "(count)", "SSIM to the full picture"):
        assert label in page.decode()


def test_figures_come_in_reading_order(page: bytes) -> None:
    names = re.findall(r'<svg [^>]*aria-label="([^"]+)"', page.decode())
    assert [name.split()[0] for name in names] == ["Share", "Mean", "Histogram", "SSIM", "Layer", "Tokens"]


def test_given_fact_wins_over_the_plans(stats: Statistics) -> None:
    plan, depths = planned(stats)
    text = report_page(replace(stats, shown=[]), plan, depths, {"toprovar": "9.9"}).decode()
    assert "<td>9.9</td>" in text
    assert text.count(">toprovar</th>") == 1


def test_warnings_stand_in_a_box(stats: Statistics) -> None:
    plan, depths = planned(stats)
    stats = replace(stats, shown=[])
    calib = plan.calib.model_copy(update={"warnings": ("tau <0.9> is outside",)})
    text = report_page(stats, plan.model_copy(update={"calib": calib}), depths, {}).decode()
    assert 'class="warnings"' in text
    assert "tau &lt;0.9&gt; is outside" in text
    quiet = plan.model_copy(update={"calib": plan.calib.model_copy(update={"warnings": ()})})
    assert 'class="warnings"' not in report_page(stats, quiet, depths, {}).decode()


def test_dense_plan_has_a_report(stats: Statistics) -> None:
    plan = dense_plan_from_stats(stats, BACKBONE, MethodSettings())
    text = report_page(stats, plan, [None] * len(stats.prompts), {}).decode()
    assert "The plan scores no layer" in text
    assert "1.00×" in text
    assert "dense: all 1024 tokens run in all layers" in text


def test_wide_model_with_skipped_scales_and_oblong_maps_has_a_report() -> None:
    schedule = ((1, 1), (2, 2), (4, 2), (6, 3), (10, 5), (16, 8), (22, 11), (30, 15), (38, 19), (46, 23))
    stats = synthetic_statistics(prompts=2, schedule=schedule, layers=33, side=300)
    plan, depths = planned(stats, MethodSettings(preset="paper", scale_depth=5))
    page = report_page(stats, plan, depths, {})
    read_page(page)
    assert "the plan skips this scale" in page.decode()
    assert len(page) < 3 * 2**20


def test_single_prompt_without_shown_maps_has_a_report(stats: Statistics) -> None:
    single = replace(synthetic_statistics(prompts=1), shown=[])
    plan, depths = planned(single)
    text = report_page(single, plan, depths, {}).decode()
    assert "Pictures, entropy" not in text


def test_lone_surrogate_in_a_prompt_does_not_break_the_page() -> None:
    stats = replace(synthetic_statistics(prompts=1), prompts=["caf\udce9"])
    plan, depths = planned(stats)
    assert "caf?" in report_page(stats, plan, depths, {}).decode()


def test_mask_holds_the_tokens_of_lowest_entropy() -> None:
    entropy = np.random.default_rng(1).random((17, 9))
    mask = keep_mask(entropy, 64)
    assert mask.shape == entropy.shape
    assert mask.sum() == 64
    assert entropy[mask].max() < entropy[~mask].min()


def test_typical_gate_ranks_tokens_and_has_a_source(stats: Statistics) -> None:
    plan, _ = planned(stats)
    assert plan.keep
    for k, counts in plan.keep.items():
        gate = typical_gate(plan, k)
        assert gate is not None
        assert 0 < counts[gate] < plan.tokens(k)
        assert gate in plan.score.source_layer[k]
    assert typical_gate(plan, 0) is None


def test_disagreeing_inputs_are_refused(stats: Statistics) -> None:
    plan, depths = planned(stats)
    with pytest.raises(ValueError, match="8 depths for 9 prompts"):
        report_page(stats, plan, depths[:-1], {})
    other = plan.model_copy(update={"schedule": plan.schedule[:-1]})
    with pytest.raises(ValueError, match="different models or schedules"):
        report_page(stats, other, depths, {})


def test_non_finite_entropy_is_refused() -> None:
    with pytest.raises(ValueError, match="non-finite"):
        heat_uri(np.array([[1.0, np.nan]]))


def test_constant_maps_are_drawn() -> None:
    assert heat_uri(np.ones((3, 5))).startswith("data:image/png;base64,")
    assert mask_uri(np.ones((3, 5), bool)).startswith("data:image/png;base64,")
