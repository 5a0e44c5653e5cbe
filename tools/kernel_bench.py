"""`python -m toprovar.tools.kernel_bench`: is the entropy kernel right on this GPU, how fast, and with which tile.

Every number is compared in the same run: the kernel with entropy, the same kernel without, cuDNN's and PyTorch's own
attention, and a square matrix product as the roof. Times are medians of interleaved runs from a cold L2 cache; the
clock covers the attention kernels alone. Needs PyTorch, Triton and a CUDA GPU, and nothing else of this project.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import math
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toprovar.runtime.version import VERSION

if TYPE_CHECKING:
    import torch

    from toprovar.plugins.attention.triton_kernel import Tile

SHAPES = ((1024, 2521), (1600, 4121), (2304, 6425), (4096, 10521))  # the last scales of Infinity at 1M pixels
FEW_QUERIES = ((1, 10521), (16, 10521), (64, 10521))
B, H, D = 2, 16, 128
MIN_RUNS, MAX_RUNS = 7, 200
# float32 scores up to 30 carry 2e-6 each; outputs (over 1 + |o|) are rounded to the format's own precision
TOLERANCE = {"entropy_nats": 1e-5, "float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}


# -- right? ------------------------------------------------------------------------------------------------------------


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, key_mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense float64: output [B, H, L, D], entropy [B, H, L]; zeros in rows without a key."""
    import torch

    group = q.shape[1] // k.shape[1]
    wide_q, wide_k, wide_v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = wide_q @ wide_k.transpose(-1, -2) * scale
    if key_mask is not None:
        scores = scores.masked_fill(~key_mask[:, None, None], -math.inf)
        scores = scores.where(key_mask.any(-1)[:, None, None, None], 0)
    p = scores.softmax(-1)
    o, entropy = p @ wide_v, -torch.special.xlogy(p, p).sum(-1)
    if key_mask is not None:
        seen = key_mask.any(-1)[:, None, None]
        o, entropy = o.where(seen[..., None], 0), entropy.where(seen, 0)
    return o, entropy


def check_cases() -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = []
    for dtype in ("bfloat16", "float16", "float32"):
        sizes = ((1, 1, 128), (17, 81, 64), (81, 987, 80), (130, 1497, 96), (64, 4121, 112), (400, 921, 128))
        for L, S, width in sizes:
            cases.append({"dtype": dtype, "L": L, "S": S, "D": width})
        for mask in ("random", "first_row", "prefix"):
            cases.append({"dtype": dtype, "L": 81, "S": 987, "D": 128, "mask": mask})
        for splits in (2, 7):
            cases.append({"dtype": dtype, "L": 33, "S": 1497, "D": 128, "splits": splits, "mask": "random"})
        cases.append({"dtype": dtype, "L": 100, "S": 777, "D": 128, "late_maximum": True})
        cases.append({"dtype": dtype, "L": 100, "S": 777, "D": 64, "group": 4})
        cases.append({"dtype": dtype, "L": 100, "S": 777, "D": 128, "time_major": True})
        cases.append({"dtype": dtype, "L": 40, "S": 300, "D": 256})
        cases.append({"dtype": dtype, "L": 40, "S": 300, "D": 128, "temperature": 6.0})
    cases.append({"dtype": "bfloat16", "L": 1024, "S": 2521, "D": 128})
    cases.append({"dtype": "float32", "L": 256, "S": 10521, "D": 128})
    return cases


def check_inputs(case: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    import torch

    L, S, width = case["L"], case["S"], case["D"]
    heads, key_heads = 4, 4 // case.get("group", 1)
    generator = torch.Generator("cuda").manual_seed(L * 7919 + S)

    def made(h: int, n: int) -> torch.Tensor:
        if case.get("time_major"):
            return torch.randn(n, 2, h, width, device="cuda", generator=generator).permute(1, 2, 0, 3)
        return torch.randn(2, h, n, width, device="cuda", generator=generator)

    q, k, v = made(heads, L) * case.get("temperature", 1.0), made(key_heads, S), made(key_heads, S)
    if case.get("late_maximum"):  # ever larger keys: the maximum moves in every block, and last in the last
        k = k * torch.linspace(0.1, 4.0, S, device="cuda")[:, None]
    dtype = getattr(torch, case["dtype"])
    return q.to(dtype), k.to(dtype), v.to(dtype)


def check(case: dict[str, Any], tile: Tile | None = None) -> dict[str, Any]:
    """The case with the largest errors found in it, and whether they are within tolerance."""
    import torch

    from toprovar.plugins.attention import triton_kernel

    q, k, v = check_inputs(case)
    mask = None
    if case.get("mask"):
        mask = torch.rand(2, case["S"], device="cuda", generator=torch.Generator("cuda").manual_seed(5)) > 0.5
        if case["mask"] == "first_row":
            mask[0] = False
        elif case["mask"] == "prefix":
            mask[:] = torch.arange(case["S"], device="cuda") > case["S"] - 5
    scale = case["D"] ** -0.5
    o, entropy = triton_kernel.attend(q, k, v, scale, mask, splits=case.get("splits"), tile=tile)
    assert entropy is not None
    expected_o, expected = reference(q, k, v, scale, mask)
    error = (entropy.double() - expected).abs().max().item()
    o_error = ((o.double() - expected_o).abs() / (1 + expected_o.abs())).max().item()
    good = error <= TOLERANCE["entropy_nats"] and o_error <= TOLERANCE[case["dtype"]]  # NaN is neither
    return {**case, "entropy_error_nats": error, "output_error": o_error, "ok": good}


# -- how fast? ---------------------------------------------------------------------------------------------------------


def timed(calls: dict[str, Callable[[], Any]], seconds: float) -> dict[str, list[float]]:
    """Milliseconds per call, taken in turns so that drifting clocks meet all alike; L2 is flushed before each.

    seconds: wall time for all calls together; at least MIN_RUNS and at most MAX_RUNS each.
    """
    import torch

    # 1 GiB: many times any L2, and long enough to write that the launch from Python is over before the clock starts
    flush = torch.empty(2**30, dtype=torch.int8, device="cuda")
    for call in calls.values():
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    begin = time.perf_counter()
    runs = 0
    while runs < MIN_RUNS or (runs < MAX_RUNS and time.perf_counter() - begin < seconds):
        for name, call in calls.items():
            flush.zero_()
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            stop.record()
            events[name].append((start, stop))
        torch.cuda.synchronize()
        runs += 1
    return {name: [start.elapsed_time(stop) for start, stop in pairs] for name, pairs in events.items()}


def randoms(L: int, S: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    import torch

    def made(n: int) -> torch.Tensor:
        return torch.randn(B, H, n, D, device="cuda", dtype=torch.bfloat16)

    return made(L), made(S), made(S)


def rivals(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Stock attention without entropy; a backend that refuses the shape is left out with a message."""
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def stock(backend: Any) -> Callable[[], Any]:
        def call() -> Any:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, scale=D**-0.5)

        return call

    found: dict[str, Callable[[], Any]] = {}
    for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash2", SDPBackend.FLASH_ATTENTION)):
        call = stock(backend)
        try:
            call()
            torch.cuda.synchronize()
        except RuntimeError as error:
            print(f"warning: {name} attention doesn't run here: {error}", file=sys.stderr)
        else:
            found[name] = call
    return found


def summary(samples_ms: list[float], flops: float) -> dict[str, Any]:
    median = statistics.median(samples_ms)
    return {"median_ms": median, "runs": len(samples_ms), "tflops": flops / median / 1e9, "samples_ms": samples_ms}


def time_shapes(seconds: float, tile: Tile | None = None) -> list[dict[str, Any]]:
    from toprovar.plugins.attention import triton_kernel

    rows = []
    for L, S in SHAPES + FEW_QUERIES:
        q, k, v = randoms(L, S)
        chosen = tile if L > 64 else None

        def kernel(
            entropy: bool,
            splits: int | None = None,
            q: torch.Tensor = q,
            k: torch.Tensor = k,
            v: torch.Tensor = v,
            tile: Tile | None = chosen,
        ) -> Callable[[], Any]:
            return lambda: triton_kernel.attend(q, k, v, D**-0.5, with_entropy=entropy, splits=splits, tile=tile)

        calls = {"entropy": kernel(True), "no_entropy": kernel(False)}
        if L <= 64:
            calls["entropy_unsplit"] = kernel(True, 1)
        calls.update(rivals(q, k, v))
        flops = 4.0 * B * H * L * S * D
        results = {name: summary(ms, flops) for name, ms in timed(calls, seconds).items()}
        key_bytes = 2 * k.numel() * k.element_size()
        for result in results.values():
            result["key_value_gb_per_s"] = key_bytes / result["median_ms"] / 1e6
        overhead = results["entropy"]["median_ms"] / results["no_entropy"]["median_ms"] - 1
        used = str(chosen or triton_kernel.chosen_tile(q.dtype, L, D))
        shape = {"B": B, "H": H, "L": L, "S": S, "D": D, "dtype": "bfloat16", "tile": used}
        rows.append({**shape, "entropy_cost": overhead, "results": results})
    return rows


def time_matmul(seconds: float) -> dict[str, Any]:
    import torch

    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return summary(timed({"matmul": lambda: a @ b}, seconds)["matmul"], 2.0 * 8192**3)


# -- which tile? -------------------------------------------------------------------------------------------------------


def candidates() -> list[Tile]:
    """What may win on Hopper; two programs per processor need at most 128 registers with 8 warps, 255 with 4."""
    from toprovar.plugins.attention.triton_kernel import Tile

    return [
        Tile(128, 64, 4, 2),
        Tile(128, 64, 4, 3),
        Tile(128, 64, 4, 2, late=True),
        Tile(128, 64, 4, 2, tma=False),
        Tile(128, 32, 4, 2),
        Tile(128, 32, 4, 3),
        Tile(128, 32, 4, 3, late=True),
        Tile(128, 32, 8, 2, registers=128),
        Tile(128, 32, 8, 3, registers=128),
        Tile(128, 32, 8, 3, late=True, registers=128),
        Tile(128, 64, 8, 2),
        Tile(128, 64, 8, 2, registers=128),
        Tile(128, 64, 8, 2, tma=False, registers=128),
        Tile(128, 64, 8, 2, late=True),
        Tile(128, 64, 8, 3),
        Tile(128, 64, 8, 3, ahead=True),
        Tile(128, 64, 8, 3, late=True, ahead=True),
        Tile(128, 128, 8, 2),
        Tile(128, 128, 8, 2, late=True),
        Tile(128, 128, 8, 2, tma=False),
        Tile(128, 128, 8, 2, lazy=True),
        Tile(128, 128, 8, 2, lanes=True, late=True),
        Tile(64, 64, 4, 2),
        Tile(64, 64, 4, 1),
        Tile(64, 64, 4, 2, late=True),
        Tile(64, 32, 4, 2),
        Tile(64, 128, 4, 1),
        Tile(64, 128, 4, 2, late=True),
        Tile(256, 64, 8, 2),
    ]


def float32_candidates() -> list[Tile]:
    """Ways to multiply float32 without losing what the entropy needs: plain, or as three or six narrower products."""
    from toprovar.plugins.attention.triton_kernel import Tile

    sizes = ((32, 32, 8), (64, 16, 8), (64, 32, 8), (64, 64, 8), (128, 32, 8))
    kinds = ("ieee", "tf32x3", "bf16x6")
    tiles = [Tile(m, n, w, 2, tma=False, products=kind) for kind in kinds for m, n, w in sizes]
    return [tile for tile in tiles if tile.products != "ieee" or tile.block_m * tile.block_n <= 1024]


def _compiled(job: tuple[Tile, bool]) -> str:
    """In a worker: fills Triton's cache on disk by one launch. Returns "" or why it failed."""
    import torch

    from toprovar.plugins.attention import triton_kernel

    tile, entropy = job
    try:
        triton_kernel.attend(*randoms(*SHAPES[-1]), D**-0.5, with_entropy=entropy, tile=tile)
        torch.cuda.synchronize()
    except Exception as error:  # a tile that the compiler or the device refuses is a finding
        return f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return ""


def _checked(job: tuple[dict[str, Any], Tile | None]) -> dict[str, Any]:
    """In a worker: `check`, with a failure to run as a wrong answer."""
    try:
        return check(*job)
    except Exception as error:
        return {**job[0], "ok": False, "failure": f"{type(error).__name__}: {error}".splitlines()[0][:300]}


SWEEP_CHECK = {"dtype": "bfloat16", "L": 130, "S": 1497, "D": D}
FLOAT32_CHECK = {"dtype": "float32", "L": 130, "S": 1497, "D": D, "temperature": 4.0}


def sweep_float32(seconds: float, checks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The float32 candidates at the smallest shape, with the errors that `check` found."""
    from toprovar.plugins.attention import triton_kernel

    L, S = SHAPES[0]
    q, k, v = (x.float() for x in randoms(L, S))
    rows = []
    for tile, checked in zip(float32_candidates(), checks, strict=True):
        row = {"tile": str(tile), "failure": checked.get("failure", ""), "check": checked}
        if not row["failure"]:
            samples = timed({"entropy": functools.partial(triton_kernel.attend, q, k, v, D**-0.5, tile=tile)}, seconds)
            row.update(summary(samples["entropy"], 4.0 * B * H * L * S * D))
        rows.append(row)
    return rows


def sweep(seconds: float, failures: dict[tuple[Tile, bool], str], checks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every candidate at the largest shape with and without entropy, fastest with entropy first.

    failures: what the compiler said to (tile, with entropy); checks: a result of `check` per candidate
    """
    from toprovar.plugins.attention import triton_kernel

    L, S = SHAPES[-1]
    q, k, v = randoms(L, S)
    flops = 4.0 * B * H * L * S * D
    rows: list[dict[str, Any]] = []
    for tile, checked in zip(candidates(), checks, strict=True):
        row: dict[str, Any] = {"tile": str(tile), "settings": asdict(tile)}
        row["failure"] = failures[tile, True] or failures[tile, False] or checked.get("failure", "")
        rows.append(row)
        if row["failure"]:
            continue
        row["ok"], row["entropy_error_nats"] = checked["ok"], checked["entropy_error_nats"]

        def kernel(entropy: bool, tile: Tile = tile) -> Callable[[], Any]:
            return lambda: triton_kernel.attend(q, k, v, D**-0.5, with_entropy=entropy, tile=tile)

        samples = timed({"entropy": kernel(True), "no_entropy": kernel(False)}, seconds)
        row.update({name: summary(ms, flops) for name, ms in samples.items()})
        row["entropy_cost"] = row["entropy"]["median_ms"] / row["no_entropy"]["median_ms"] - 1
    return sorted(rows, key=lambda row: row["entropy"]["median_ms"] if "entropy" in row else math.inf)


# -- the report --------------------------------------------------------------------------------------------------------


def conditions(arguments: list[str]) -> dict[str, Any]:
    import torch
    import triton

    try:
        query = "nvidia-smi --query-gpu=driver_version,clocks.max.sm,power.limit --format=csv,noheader -i 0"
        driver = subprocess.run(query.split(), capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        driver = ""
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "processors": properties.multi_processor_count,
        "driver_maxclock_powerlimit": driver,
        "versions": {
            "toprovar": VERSION, "torch": torch.__version__, "triton": triton.__version__,
            "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "python": platform.python_version(),
        },
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": "python -m toprovar.tools.kernel_bench " + " ".join(arguments),
        "clock": "CUDA events around the kernels, launched while L2 is being flushed before each run",
    }  # fmt: skip


def print_sweep(rows: list[dict[str, Any]]) -> None:
    print(f"{'tile':48} {'ms':>7} {'TFLOP/s':>8} {'without':>8} {'cost':>7}  error (nats)")
    for row in rows:
        if row["failure"]:
            print(f"{row['tile']:48} {row['failure']}")
            continue
        on, off = row["entropy"], row["no_entropy"]
        print(
            f"{row['tile']:48} {on['median_ms']:7.3f} {on['tflops']:8.1f} {off['tflops']:8.1f} "
            f"{row['entropy_cost']:7.1%}  {row['entropy_error_nats']:.1e}{'' if row['ok'] else '  WRONG'}"
        )


def print_shapes(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        print(f"{row['L']} x {row['S']} ({row['tile']}), entropy costs {row['entropy_cost']:.1%}")
        for name, result in row["results"].items():
            print(
                f"    {name:16} {result['median_ms']:8.4f} ms {result['tflops']:7.1f} TFLOP/s "
                f"{result['key_value_gb_per_s']:7.0f} GB/s of keys and values"
            )


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= 60:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 60")
    return value


def _workers(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 64:
        raise argparse.ArgumentTypeError(f"{text} is not between 1 and 64")
    return value


def main(arguments: list[str] | None = None) -> int:
    """Exit codes: 0 all within tolerance, 1 not, 3 no GPU or no Triton."""
    arguments = sys.argv[1:] if arguments is None else arguments
    prog = "python -m toprovar.tools.kernel_bench"
    parser = argparse.ArgumentParser(prog=prog, description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write everything, raw samples included")
    parser.add_argument("--sweep", action="store_true", help="try every candidate tile at the largest shape first")
    parser.add_argument(
        "--seconds", type=_seconds, default=0.5, metavar="N", help="measuring time per row, in seconds; default 0.5"
    )
    parser.add_argument(
        "--workers", type=_workers, default=min(12, os.cpu_count() or 1), metavar="N", help="processes that compile"
    )
    options = parser.parse_args(arguments)
    if options.json and not options.json.parent.is_dir():
        parser.error(f"--json: folder {options.json.parent} does not exist; make it first")
    try:
        import torch
        import triton  # noqa: F401
    except ImportError as error:
        print(f"error: {error}\n  hint: pip install torch triton", file=sys.stderr)
        return 3
    if not torch.cuda.is_available():
        print("error: no CUDA GPU is visible\n  hint: run this on a machine with one", file=sys.stderr)
        return 3
    begin = time.perf_counter()
    report: dict[str, Any] = {"schema_version": 1, "conditions": conditions(arguments)}

    def save() -> None:
        if options.json:
            report["wall_s"] = time.perf_counter() - begin
            part = options.json.with_name(options.json.name + ".part")
            part.write_text(json.dumps(report, indent=1) + "\n")
            part.replace(options.json)

    tiles = candidates() if options.sweep else []
    jobs = [(tile, entropy) for tile in tiles for entropy in (True, False)]
    cases: list[tuple[dict[str, Any], Tile | None]] = [(SWEEP_CHECK, tile) for tile in tiles]
    wide_tiles = float32_candidates() if options.sweep else []
    cases += [(FLOAT32_CHECK, tile) for tile in wide_tiles]
    swept = len(cases)
    cases += [(case, None) for case in check_cases()]
    # compiling takes most of the time, and is done before any clock runs
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        failures = dict(zip(jobs, pool.map(_compiled, jobs, chunksize=1), strict=True))
        checks = pool.map(_checked, cases, chunksize=1)
    ranked: list[dict[str, Any]] = []
    if options.sweep:
        ranked = report["sweep"] = sweep(options.seconds, failures, checks[: len(tiles)])
        print_sweep(ranked)
        save()
        report["sweep_float32"] = sweep_float32(options.seconds / 2, checks[len(tiles) : swept])
        for row in report["sweep_float32"]:
            if row["failure"]:
                print(f"float32 {row['tile']:32} {row['failure']}")
            else:
                errors = f"{row['check']['entropy_error_nats']:.1e} nats, output {row['check']['output_error']:.1e}"
                print(f"float32 {row['tile']:32} {row['median_ms']:8.3f} ms {row['tflops']:6.1f} TFLOP/s {errors}")
        save()
    report["matmul_8192"] = time_matmul(options.seconds)
    print(f"8192^3 bf16 matrix product: {report['matmul_8192']['tflops']:.0f} TFLOP/s")
    report["shapes"] = time_shapes(options.seconds)
    print_shapes(report["shapes"])
    report["checks"] = checks[swept:]
    wrong = [case for case in report["checks"] if not case["ok"]]
    for case in wrong:
        print(f"WRONG: {case}")
    worst = max(case.get("entropy_error_nats", math.inf) for case in report["checks"])
    print(f"{len(report['checks'])} cases against float64: {len(wrong)} wrong, entropy off by at most {worst:.1e} nats")
    save()
    print(f"took {time.perf_counter() - begin:.0f} s" + (f"; wrote {options.json}" if options.json else ""))
    return 1 if wrong or any(row.get("ok") is False for row in ranked) else 0


if __name__ == "__main__":
    sys.exit(main())
