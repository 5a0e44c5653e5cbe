"""The bill against numbers worked out from the families' formulas, and the command that prints it."""

import json

import pytest
from command_line import done, refusal

from toprovar.exporter.schedules import BUDGET_SCALES, TEMPLATES, schedule_for, token_counts
from toprovar.runtime.errors import ToprovarError
from toprovar.tools.bill import NAMES, bill_of
from toprovar.tools.gpu_peaks import GPUS, GpuPeaks

# what an H200 was measured to reach: an 8192^3 product and a copy
MEASURED = GpuPeaks("measured", 790, 4300, 141)

# all parameters, millions: stated with the published weights, or summed over all tensors. Matrices alone lack biases,
# norms and tables: at most 1.2 % of these.
PARAMETERS = {
    "infinity-2b": 2204.56, "infinity-8b": 8375.79, "var-d16": 310.3, "var-d20": 600.9, "var-d24": 1033.4,
    "var-d30": 2010.0, "var-d36": 2353.9, "hart-0.7b": 732.6, "infinitystar-8b-480p": 8768.4,
    "infinitystar-8b-720p": 8768.4,
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_nearly_all_in_matrices(name: str) -> None:
    assert PARAMETERS.keys() == set(NAMES)
    found = bill_of(name)["matrix_parameters"] / 1e6
    assert 0.988 * PARAMETERS[name] < found < PARAMETERS[name]


# scale, linear TFLOP, attention TFLOP, ms: 28 C^2 flops per token, row and layer, 4 C per key; 64 tokens of text
INFINITY = {
    "infinity-2b": [
        (0, 0.008, 0.000, 0.87), (5, 1.082, 0.020, 1.40), (9, 7.697, 1.353, 11.50), (12, 30.788, 22.594, 67.75),
    ],
    "infinity-8b": [
        (0, 0.029, 0.000, 3.35), (5, 4.144, 0.044, 5.31), (9, 29.465, 2.961, 41.14), (12, 117.86, 49.424, 212.13),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", INFINITY)
def test_infinity_costs_what_its_formulas_say(name: str) -> None:
    bill = bill_of(name, text=64, peaks=MEASURED)
    rows = {row["what"]: row for row in bill["scales"]}
    for scale, linear, self_attention, ms in INFINITY[name]:
        row = rows[f"{scale}"]
        assert row["linear_flops"] / 1e12 == pytest.approx(linear, rel=2e-3, abs=6e-4)
        cross = 4 * 2 * row["tokens"] * 64 * bill["config"]["width"] * bill["config"]["depth"]
        assert (row["attention_flops"] - cross) / 1e12 == pytest.approx(self_attention, rel=2e-3, abs=6e-4)
        assert row["roofline_ms"] == pytest.approx(ms, rel=5e-3, abs=0.02)  # the text's keys are read too
    linear, total = {"infinity-2b": (79.1, 149.2), "infinity-8b": (302.7, 496.0)}[name]
    assert bill["total"]["linear_flops"] / 1e12 == pytest.approx(linear, rel=2e-3)
    assert bill["total"]["roofline_ms"] == pytest.approx(total, rel=3e-3)
    cache = {"infinity-2b": 5.52e9, "infinity-8b": 12.07e9}[name]
    assert bill["cache_bytes"] == pytest.approx(cache, rel=1e-3)
    assert bill["total"]["tokens"] == 10521


def test_small_scales_are_bound_by_memory_and_large_ones_by_computing() -> None:
    rows = bill_of("infinity-2b", text=64, peaks=MEASURED)["scales"][1:]
    assert [row["bound"] for row in rows] == ["memory"] * 5 + ["compute"] * 8


def test_activations_are_what_flows_through_products_and_attention() -> None:
    row = bill_of("infinity-2b")["scales"][-1]
    C, tokens, rows, layers, bits = 2048, 4096, 2, 32, 32
    products = (
        (C + 3 * C) + 3 * (C + C) + 2 * (C + 4 * C)
    )  # in and out: qkv; out, cross query, cross out; both of the ffn
    attention = 2 * (C + C)  # queries in and values out, self and cross
    outside = (bits + C) + (C + 2 * bits)
    assert row["activation_bytes"] == 2 * rows * tokens * (layers * (products + attention) + outside)


def test_hart_runs_its_text_and_refines_its_last_map() -> None:
    bill = bill_of("hart-0.7b", peaks=MEASURED)
    rows = {row["what"]: row for row in bill["scales"]}
    head = rows["residual head"]
    assert rows["0"]["tokens"] == 300
    assert bill["total"]["tokens"] == 9750
    assert (bill["total"]["linear_flops"] - head["linear_flops"]) / 1e12 == pytest.approx(26.7, rel=5e-3)
    assert bill["total"]["attention_flops"] / 1e12 == pytest.approx(17.7, rel=5e-3)
    assert bill["cache_bytes"] == pytest.approx(2.88e9, rel=5e-3)
    assert head["passes"] == 8
    assert head["roofline_ms"] == pytest.approx(6, rel=0.05)


@pytest.mark.parametrize(
    ("name", "passes", "tokens", "linear", "attention", "largest"),
    [
        ("infinitystar-8b-480p", 81, 161397, 5654, 3134, (31800, 33518)),
        ("infinitystar-8b-720p", 85, 244197, 8554, 9968, (72000, 75728)),
    ],
)
def test_infinitystar_costs_what_its_passes_say(
    name: str, passes: int, tokens: int, linear: float, attention: float, largest: tuple[int, int]
) -> None:
    bill = bill_of(name, text=128)
    prompt, *rows = bill["scales"]
    assert sum(row["passes"] for row in rows) == passes
    assert bill["total"]["tokens"] == tokens
    assert (bill["total"]["linear_flops"] - prompt["linear_flops"]) / 1e12 == pytest.approx(linear, rel=1e-3)
    assert bill["total"]["attention_flops"] / 1e12 == pytest.approx(attention, rel=1e-3)
    last = max(rows, key=lambda row: row["tokens"])
    assert (last["tokens"], last["keys"]) == largest
    kv_per_token = 147456 * bill["rows"]
    assert last["kv_bytes"] == last["passes"] * last["keys"] * kv_per_token


@pytest.mark.parametrize(("name", "tokens"), [("var-d16", 680), ("var-d36", 2240)])
def test_var_draws_its_published_maps(name: str, tokens: int) -> None:
    bill = bill_of(name)
    assert bill["total"]["tokens"] == tokens == bill["scales"][-1]["keys"]
    assert bill["text_tokens"] is None
    C, depth = bill["config"]["width"], bill["config"]["depth"]
    last = bill["scales"][-1]
    assert last["linear_flops"] == 2 * 2 * last["tokens"] * (12 * C * C * depth + C * (32 + 4096))


@pytest.mark.parametrize("budget", BUDGET_SCALES)
@pytest.mark.parametrize("template", sorted(TEMPLATES))
def test_every_template_and_budget_has_a_bill(template: str, budget: str) -> None:
    bill = bill_of("infinity-2b", float(template), budget)
    assert bill["template"] == template
    assert [row["tokens"] for row in bill["scales"][1:]] == token_counts(schedule_for(float(template), budget))


def test_times_follow_the_gpu() -> None:
    times = {gpu: bill_of("infinity-2b", gpu=gpu)["total"]["roofline_ms"] for gpu in GPUS}
    assert times["h200"] < times["h100"] < min(times["a100"], times["l40s"]) < times["rtx4090"]
    last = bill_of("infinity-2b", gpu="a100")["scales"][-1]
    assert last["roofline_ms"] == pytest.approx((last["linear_flops"] + last["attention_flops"]) / 312e9)
    first = bill_of("infinity-2b", gpu="l40s")["scales"][1]
    assert first["roofline_ms"] == pytest.approx((first["weight_bytes"] + first["kv_bytes"]) / 864e6)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("infinity-3b", {}, "unknown model infinity-3b"),
        ("infinity-2b", {"gpu": "tpu"}, "unknown GPU tpu"),
        ("infinity-2b", {"budget": "2M"}, "unknown budget 2M"),
        ("var-d16", {"aspect": 1.5}, "--aspect 1.5 was given"),
        ("hart-0.7b", {"text": 64}, "--text-tokens 64 was given"),
        ("infinitystar-8b-480p", {"budget": "1M"}, "has its own pixel budget"),
    ],
)
def test_wrong_choices_are_refused(name: str, options: dict, message: str) -> None:
    with pytest.raises(ToprovarError, match=message) as fault:
        bill_of(name, **options)
    assert fault.value.hint or "expected one of" in fault.value.message


def test_the_command_prints_a_table_and_one_json_document() -> None:
    arguments = ["inspect", "infinity-8b", "--aspect", "2:3", "--bill", "--gpu", "h100", "--text-tokens", 64]
    bill = json.loads(done(*arguments, "--json").stdout)
    assert bill == json.loads(json.dumps(bill_of("infinity-8b", 1.5, gpu="h100", text=64)))
    lines = done(*arguments).stdout.splitlines()
    assert lines[0].startswith("infinity-8b, template 1.500 (height over width): 8371.9 M parameters")
    assert lines[1].startswith("H100 SXM: 989.5 TFLOP/s bf16, 3350 GB/s")
    assert lines[2].split()[:3] == ["scale", "map", "passes"]
    assert lines[-2].split()[:5] == ["12", "78x52", "1", "4056", "10997"]
    assert lines[-1].split()[0] == "sum"
    assert f"{bill['total']['roofline_ms']:.2f}" in lines[-1].split()


def test_a_published_name_without_a_bill_tells_its_sizes() -> None:
    facts = json.loads(done("inspect", "hart-0.7b", "--json").stdout)
    assert facts["kind"] == "published model"
    assert facts["config"]["depth"] == 24


def test_options_of_the_bill_need_it() -> None:
    assert "--gpu h100 belongs to --bill" in refusal("inspect", "infinity-2b", "--gpu", "h100")
    assert "unknown model demo" in refusal("inspect", "demo", "--bill")
