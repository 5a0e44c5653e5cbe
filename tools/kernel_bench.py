"""`python -m toprovar.tools.kernel_bench`: is the entropy kernel right on this GPU, how fast, and with which tile.

Every number is compared in the same run: the kernel with entropy, the same kernel without, cuDNN's and PyTorch's own
attention, and a square matrix product as the roof. Times are medians of interleaved runs from a cold L2 cache; the
clock covers the attention kernels alone. Needs PyTorch, Triton and a CUDA GPU, and nothing else of this project.

Kernels are compiled by several processes first, without being launched. Timings then run one by one in a process of
their own, which is replaced after a failure: a fault on the device stays with the process that caused it.
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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toprovar.runtime.version import VERSION

if TYPE_CHECKING:
    import torch

    from toprovar.plugins.attention.triton_kernel import Tile

B, H = 2, 16
# The last scales of Infinity at 1M pixels, other widths at the largest, and few queries over many keys: L, S, D
SHAPES = (
    *((1024, 2521, 128), (1600, 4121, 128), (2304, 6425, 128), (4096, 10521, 128)),
    *((4096, 10521, 64), (4096, 10521, 80)),
    *((1, 10521, 128), (16, 10521, 128), (64, 10521, 128)),
)
FEW_QUERIES = 64
MIN_RUNS, MAX_RUNS = 7, 200
JOB_TIMEOUT_S = 60
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
        for width in (72, 128):
            cases.append({"dtype": dtype, "L": 100, "S": 777, "D": width, "inside_nan": True})
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
    q, k, v = (x.to(dtype) for x in (q, k, v))
    if case.get("inside_nan"):  # slices of buffers that hold NaN everywhere else
        slices = []
        for x in (q, k, v):
            around = torch.full((3, x.shape[1] + 1, x.shape[2] + 130, width + 16), math.nan, device="cuda", dtype=dtype)
            inner = around[1:, 1:, 65 : 65 + x.shape[2], 8 : 8 + width]
            inner.copy_(x)
            slices.append(inner)
        q, k, v = slices
    return q, k, v


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


def randoms(case: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v of a timing: [B, H, L or S, D]."""
    import torch

    def made(n: int) -> torch.Tensor:
        return torch.randn(B, H, n, case["D"], device="cuda", dtype=getattr(torch, case["dtype"]))

    return made(case["L"]), made(case["S"]), made(case["S"])


def rivals(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Stock attention without entropy; a backend that refuses the shape is left out with a message."""
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def stock(backend: Any) -> Callable[[], Any]:
        def call() -> Any:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, scale=q.shape[-1] ** -0.5)

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


def kernels(case: dict[str, Any], tile: Tile | None) -> dict[str, functools.partial[Any]]:
    """The kernel's ways to compute a case; few queries also without cutting the keys into ranges."""
    from toprovar.plugins.attention import triton_kernel

    q, k, v = randoms(case)
    attend = functools.partial(triton_kernel.attend, q, k, v, case["D"] ** -0.5, tile=tile)
    calls = {"entropy": attend, "no_entropy": functools.partial(attend, with_entropy=False)}
    if case["L"] <= FEW_QUERIES:
        calls["entropy_unsplit"] = functools.partial(attend, splits=1)
    return calls


def time_case(case: dict[str, Any], tile: Tile | None, seconds: float, against: bool) -> dict[str, Any]:
    """Times of one shape and tile; against: beside stock attention, on the same tensors."""
    import torch

    from toprovar.plugins.attention import triton_kernel

    own = kernels(case, tile)
    q, k, v = own["entropy"].args[:3]
    calls: dict[str, Callable[[], Any]] = {**own, **(rivals(q, k, v) if against else {})}
    L, S, D = case["L"], case["S"], case["D"]
    results = {name: summary(ms, 4.0 * B * H * L * S * D) for name, ms in timed(calls, seconds).items()}
    dtype = getattr(torch, case["dtype"])
    for result in results.values():
        result["key_value_gb_per_s"] = 2 * B * H * S * D * dtype.itemsize / result["median_ms"] / 1e6
    used = tile or triton_kernel.chosen_tile(dtype, L, D, triton_kernel.on_hopper(q))
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    return {
        **case, "B": B, "H": H, "tile": str(used), "default_tile": tile is None,
        "splits": triton_kernel.chosen_splits(-(-L // used.block_m) * B * H, S, used.block_n, processors),
        "entropy_cost": results["entropy"]["median_ms"] / results["no_entropy"]["median_ms"] - 1,
        "results": results,
    }  # fmt: skip


def time_matmul(seconds: float) -> dict[str, Any]:
    import torch

    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return summary(timed({"matmul": lambda: a @ b}, seconds)["matmul"], 2.0 * 8192**3)


# -- which tile? -------------------------------------------------------------------------------------------------------


def shapes() -> list[dict[str, Any]]:
    return [{"dtype": "bfloat16", "L": L, "S": S, "D": D} for L, S, D in SHAPES]


def candidates() -> list[tuple[dict[str, Any], Tile]]:
    """Tiles that may beat the default one at a shape of `shapes`, and those for float32 at the smallest."""
    from toprovar.plugins.attention.triton_kernel import Tile

    large, few = {"dtype": "bfloat16", "L": 4096, "S": 10521}, {"dtype": "bfloat16", "L": 16, "S": 10521}
    wide = {"dtype": "float32", "L": 1024, "S": 2521, "D": 128}
    return [
        ({**large, "D": 128}, Tile(128, 64, 4, 2, tma=False)),
        ({**large, "D": 64}, Tile(128, 128, 8, 2)),
        ({**large, "D": 64}, Tile(128, 64, 4, 2)),
        ({**large, "D": 80}, Tile(64, 64, 4, 1)),
        ({**few, "D": 128}, Tile(16, 128, 4, 2)),
        ({**few, "D": 128}, Tile(64, 64, 4, 2)),
        (wide, Tile(32, 32, 8, 1, tma=False)),
        (wide, Tile(32, 32, 8, 2, tma=False)),
        (wide, Tile(16, 16, 8, 1, tma=False)),
        (wide, Tile(64, 16, 8, 1, tma=False)),
    ]


def candidate_check(case: dict[str, Any]) -> dict[str, Any]:
    """A case that float64 can follow, with a candidate's type and width.

    float32 inputs get smaller scores: their products are rounded, and at scores of 20 that alone moves the entropy by
    1e-5 nats, whatever the tile. Products of 16-bit inputs are exact.
    """
    temperature = 2.0 if case["dtype"] == "float32" else 4.0
    return {"dtype": case["dtype"], "L": 130, "S": 1497, "D": case["D"], "temperature": temperature}


def time_candidate(case: dict[str, Any], tile: Tile, seconds: float) -> dict[str, Any]:
    checked = check(candidate_check(case), tile)
    return {**time_case(case, tile, seconds, against=False), "check": checked, "ok": checked["ok"]}


# -- processes ---------------------------------------------------------------------------------------------------------


class _CompileOnly:
    """Stands in for a kernel: `kernel[grid](...)` compiles into Triton's cache on disk and launches nothing."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return functools.partial(self.kernel.warmup, grid=grid)


def compile_case(case: dict[str, Any], tile: Tile | None) -> None:
    """Every kernel that timing a case needs."""
    from toprovar.plugins.attention import triton_kernel

    names = ("_attend", "_merge")
    real = [getattr(triton_kernel, name) for name in names]
    try:
        for name, kernel in zip(names, real, strict=True):
            setattr(triton_kernel, name, _CompileOnly(kernel))
        for call in kernels(case, tile).values():
            call()
    finally:
        for name, kernel in zip(names, real, strict=True):
            setattr(triton_kernel, name, kernel)


def answer(job: tuple[Any, ...]) -> tuple[Any, str]:
    """In a process of its own: (what the job's function returns, "") or (None, why it failed)."""
    function, *arguments = job
    try:
        return function(*arguments), ""
    except Exception as error:  # whatever compiler or device refuse is a finding, not the end
        return None, f"{type(error).__name__}: {error}".splitlines()[0][:300]


def awaited(pending: Any) -> tuple[Any, str]:
    """The `answer` of a process pool, which never comes from a process that died."""
    try:
        result: tuple[Any, str] = pending.get(JOB_TIMEOUT_S)
    except multiprocessing.TimeoutError:
        return None, f"no answer within {JOB_TIMEOUT_S} s: the process hangs or died"
    return result


class Isolated:
    """Jobs one by one in another process; a job that fails or hangs takes its process along, and no other job."""

    def __init__(self) -> None:
        self.pool: Any = None

    def __call__(self, *job: Any) -> tuple[Any, str]:
        if self.pool is None:
            self.pool = multiprocessing.get_context("spawn").Pool(1)
        result, failure = awaited(self.pool.apply_async(answer, (job,)))
        if failure:
            self.close()
        return result, failure

    def close(self) -> None:
        if self.pool is not None:
            self.pool.terminate()
            self.pool.join()
            self.pool = None


def compiled_and_checked(
    sweep: bool, workers: int, alone: Callable[..., tuple[Any, str]]
) -> tuple[list[str], list[dict[str, Any]]]:
    """What the compiler refused, and `check` of every case; a case that failed to run gets a second chance alone."""
    cases = check_cases()
    jobs: list[tuple[Any, ...]] = [(compile_case, case, None) for case in shapes()]
    jobs += [(compile_case, case, tile) for case, tile in (candidates() if sweep else [])]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        pending = [pool.apply_async(answer, (job,)) for job in [*jobs, *((check, case) for case in cases)]]
        answers = [awaited(result) for result in pending]
    refused = [f"{case} {tile or ''}: {why}" for (_, case, tile), (_, why) in zip(jobs, answers, strict=False) if why]
    checks = []
    for case, (checked, failure) in zip(cases, answers[len(jobs) :], strict=True):
        if failure:
            checked, failure = alone(check, case)
        checks.append({**case, "ok": False, "failure": failure} if failure else checked)
    return refused, checks


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


def print_row(row: dict[str, Any]) -> None:
    title = f"{row['dtype']} {row['L']} x {row['S']}, width {row['D']}, tile {row['tile']}"
    if row.get("failure"):
        print(f"{title}: FAILED, {row['failure']}")
        return
    error = f", off by {row['check']['entropy_error_nats']:.1e} nats" if "check" in row else ""
    print(f"{title}, {row['splits']} ranges of keys: entropy costs {row['entropy_cost']:.1%}{error}")
    for name, result in row["results"].items():
        print(
            f"    {name:16} {result['median_ms']:8.4f} ms {result['tflops']:7.1f} TFLOP/s "
            f"{result['key_value_gb_per_s']:7.0f} GB/s of keys and values"
        )


def table_from_report(report: dict[str, Any]) -> str:
    """Markdown of a report's shapes: milliseconds and TFLOP/s with entropy, without, and of the rivals."""

    def cell(results: dict[str, Any], name: str) -> str:
        return f"{results[name]['median_ms']:.3f} / {results[name]['tflops']:.0f}" if name in results else "–"

    lines = [
        "| q × keys, width | with entropy | without | cost | keys in one range | cuDNN | FlashAttention-2 |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in report["shapes"]:
        found = row["results"]
        cells = [f"{row['L']} × {row['S']}, {row['D']}", cell(found, "entropy"), cell(found, "no_entropy")]
        cells += [f"{100 * row['entropy_cost']:.1f} %", cell(found, "entropy_unsplit")]
        lines.append("| " + " | ".join([*cells, cell(found, "cudnn"), cell(found, "flash2")]) + " |")
    return "\n".join(lines)


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
    parser.add_argument(
        "--sweep", action=argparse.BooleanOptionalAction, default=True, help="time other tiles too; default on"
    )
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

    def timed_row(case: dict[str, Any], tile: Tile | None, *job: Any) -> dict[str, Any]:
        row, failure = alone(*job)
        row = row or {**case, "tile": str(tile or "default"), "failure": failure}
        print_row(row)
        return row

    alone = Isolated()
    try:
        report["not_compiled"], report["checks"] = compiled_and_checked(options.sweep, options.workers, alone)
        for refused in report["not_compiled"]:
            print(f"warning: not compiled ahead: {refused}", file=sys.stderr)
        wrong = [case for case in report["checks"] if not case["ok"]]
        for case in wrong:
            print(f"WRONG: {case}")
        worst = max(case.get("entropy_error_nats", math.inf) for case in report["checks"])
        count = len(report["checks"])
        print(f"{count} cases against float64: {len(wrong)} wrong, entropy off by at most {worst:.1e} nats")
        save()
        matmul, failure = alone(time_matmul, options.seconds)
        report["matmul_8192"] = matmul or {"failure": failure}
        print(f"8192^3 bf16 matrix product: {failure or format(matmul['tflops'], '.0f') + ' TFLOP/s'}")
        rows: list[dict[str, Any]] = []
        report["shapes"] = rows
        for case in shapes():
            rows.append(timed_row(case, None, time_case, case, None, options.seconds, True))
            save()
        report["candidates"] = []
        for case, tile in candidates() if options.sweep else []:
            row = timed_row(case, tile, time_candidate, case, tile, options.seconds / 2)
            report["candidates"].append(row)
            save()
    finally:
        alone.close()
    save()
    print(f"took {time.perf_counter() - begin:.0f} s" + (f"; wrote {options.json}" if options.json else ""))
    bad = bool(wrong or failure) or any("failure" in row for row in rows)
    return 1 if bad or any(row.get("ok") is False for row in report["candidates"]) else 0


if __name__ == "__main__":
    sys.exit(main())
