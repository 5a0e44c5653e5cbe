"""`python -m toprovar.tools.operator_bench`: is the operator library right on this GPU, and how fast.

Every operator is held against float64 on the same inputs, at awkward sizes and at those of Infinity-2B's last scale.
Times are medians of interleaved runs from a cold L2 cache; the clock covers the kernels alone. Attention stands beside
cuDNN's, PyTorch's own and this project's Triton kernel; the others, which move memory and little else, beside a copy.
Needs PyTorch, a CUDA GPU and the library (`toprovar plugins build --cuda`).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toprovar.runtime.errors import EnvironmentFault
from toprovar.tools.kernel_bench import conditions, randoms, reference, rivals, summary, time_matmul, timed

if TYPE_CHECKING:
    import torch

# new tokens, cached keys, width of the last scales of Infinity-2B, of its first ones, and of narrower heads
SHAPES = (
    *((1, 0, 128), (16, 5, 128), (64, 80, 128), (256, 321, 128), (576, 921, 128), (1024, 1497, 128)),
    *((1600, 2521, 128), (2304, 4121, 128), (4096, 6425, 128), (4096, 6425, 64), (4096, 6425, 96)),
)
R, H = 2, 16  # rows and heads of those
# new tokens, cached keys, rows, heads, key heads, width of what is compared with float64
CHECKED = (
    *((1, 0, 2, 4, 4, 64), (17, 64, 2, 4, 2, 64), (81, 987, 2, 3, 3, 128), (64, 81, 1, 4, 2, 80)),
    *((33, 500, 1, 4, 4, 112), (9, 4000, 2, 4, 4, 128), (5, 4000, 1, 2, 1, 72), (130, 1497, 1, 4, 1, 96)),
    *((257, 1497, 2, 4, 4, 128), (300, 129, 2, 4, 4, 64), (400, 0, 2, 4, 2, 128), (1024, 1497, 2, 16, 16, 128)),
)
# outputs over 1 + |o|, rounded to the format's own precision; float32 scores up to 30 carry 2e-6 each
TOLERANCE = {"entropy_nats": 3e-5, "float32": 2e-5, "float16": 2e-3, "bfloat16": 1.6e-2}


@dataclass(frozen=True)
class Prepared:
    """A call of the library with its tensors, ready to launch without allocating."""

    launch: Callable[[], None]
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]


def prepared(
    kind: str, inputs: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, ...], **attributes: float
) -> Prepared:
    import torch

    from toprovar.plugins.native import Call, RawTensor, found_library
    from toprovar.plugins.torch_operators import ONNX_TYPES

    def raw(x: torch.Tensor) -> RawTensor:
        return RawTensor(x.data_ptr(), tuple(x.shape), ONNX_TYPES[x.dtype])

    call = Call(found_library(), kind, [raw(x) for x in inputs], [raw(x) for x in outputs], attributes)
    scratch = torch.empty(max(call.scratch_bytes(), 1), dtype=torch.uint8, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    return Prepared(lambda: call.run_on_cuda(scratch.data_ptr(), stream), inputs, outputs)


def attention(
    q: torch.Tensor, past: torch.Tensor, new: torch.Tensor, scale: float, with_entropy: bool, per_head: bool = False
) -> Prepared:
    """q: [L, R, H, D]; past, new: [2, S or L, R, G, D], keys and values."""
    import torch

    entropy = torch.full(q.shape[:3] if per_head else q.shape[:2], torch.nan, device="cuda")
    outputs = (torch.full_like(q, torch.nan), entropy) if with_entropy else (torch.full_like(q, torch.nan),)
    kind = "EntropyAttention" if with_entropy else "CachedAttention"
    return prepared(kind, (q, new[0], new[1], past[0], past[1]), outputs, scale=scale)


def check_attention(case: tuple[int, ...], dtype: str, temperature: float) -> dict[str, Any]:
    import torch

    L, S, rows, heads, key_heads, D = case
    generator = torch.Generator("cuda").manual_seed(L * 7919 + S)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator).to(getattr(torch, dtype))

    q = (made(L, rows, heads, D) * temperature).to(getattr(torch, dtype))
    past, new = made(2, S, rows, key_heads, D), made(2, L, rows, key_heads, D)
    joined = torch.cat([past, new], 1).permute(0, 2, 3, 1, 4)  # [2, R, G, S + L, D]
    o, entropy = reference(q.permute(1, 2, 0, 3), joined[0], joined[1], D**-0.5, None)  # [R, H, L, D], [R, H, L]
    o, entropy = o.permute(2, 0, 1, 3), entropy.permute(2, 0, 1)
    errors = {"entropy_nats": 0.0, dtype: 0.0}
    for with_entropy, per_head in ((True, False), (True, True), (False, False)):
        call = attention(q, past, new, D**-0.5, with_entropy, per_head)
        call.launch()
        errors[dtype] = _largest(errors[dtype], (call.outputs[0].double() - o).abs() / (1 + o.abs()))
        if with_entropy:
            expected = entropy if per_head else entropy.mean(-1)
            errors["entropy_nats"] = _largest(errors["entropy_nats"], (call.outputs[1].double() - expected).abs())
    ok = all(error <= TOLERANCE[name] for name, error in errors.items())  # NaN is not
    return {"case": case, "dtype": dtype, "temperature": temperature, "errors": errors, "ok": ok}


def _largest(known: float, errors: torch.Tensor) -> float:
    """The larger of a number and a tensor's largest; NaN wins."""
    largest = errors.max().item()
    return largest if largest != largest else max(known, largest)


def time_attention(L: int, S: int, D: int, seconds: float) -> dict[str, Any]:
    """This library's attention with and without entropy, beside stock attention over joined, row-major keys."""
    import torch

    from toprovar.plugins.attention import triton_kernel

    q, k, v = randoms({"L": L, "S": S + L, "D": D, "dtype": "bfloat16"})  # [R, H, ., D]
    keys = torch.stack([x.permute(2, 0, 1, 3).contiguous() for x in (k, v)])  # [2, S + L, R, H, D]
    queries, past, new = q.permute(2, 0, 1, 3).contiguous(), keys[:, :S].contiguous(), keys[:, S:].contiguous()
    own = {name: attention(queries, past, new, D**-0.5, name == "entropy") for name in ("entropy", "no_entropy")}
    calls: dict[str, Callable[[], Any]] = {name: call.launch for name, call in own.items()}
    calls |= rivals(q, k, v)
    calls["triton_entropy"] = lambda: triton_kernel.attend(q, k, v, D**-0.5)
    flops = 4.0 * R * H * L * (S + L) * D
    results = {name: summary(ms, flops) for name, ms in timed(calls, seconds).items()}
    cost = results["entropy"]["median_ms"] / results["no_entropy"]["median_ms"] - 1
    return {"L": L, "S": S + L, "D": D, "R": R, "H": H, "dtype": "bfloat16", "entropy_cost": cost, "results": results}


def movers() -> dict[str, Prepared]:
    """The other operators at Infinity-2B's last scale, and those of a pruned one."""
    import torch

    L, C, kept = 4096, 2048, 1216

    def f(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda")

    def b(*shape: int) -> torch.Tensor:
        return f(*shape).bfloat16()

    def like(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*shape, device="cuda", dtype=dtype)

    x = f(L, R, C)
    places = torch.randperm(L, device="cuda")[:kept].sort().values
    rows = torch.zeros(64, 48, device="cuda")
    rows[range(64), [i * 48 // 64 for i in range(64)]] = 0.75  # two taps per row, as bilinear matrices have
    rows[range(64), [min(i * 48 // 64 + 1, 47) for i in range(64)]] = 0.25
    angles = f(L, 1, 1, C // H // 2)
    heads = tuple(like(L, R, H, C // H) for _ in range(3))
    return {
        "ModulatedNorm": prepared("ModulatedNorm", (x, f(1, R, C), f(1, R, C)), (like(L, R, C),), epsilon=1e-6, to=16),
        "RotaryHeads": prepared(
            "RotaryHeads", (b(L, R, 3 * C), b(3 * C), f(H, 1), angles.cos(), angles.sin()), heads, heads=H
        ),
        "GatedResidual": prepared(
            "GatedResidual", (x, b(L, R, C), b(C), f(1, R, C)), (like(L, R, C, dtype=torch.float32),)
        ),
        "BiasGelu": prepared("BiasGelu", (b(L, R, 4 * C), b(4 * C)), (like(L, R, 4 * C),)),
        "TokenRestore": prepared(
            "TokenRestore",
            (x, f(48 * 48, R, C), rows, rows.clone(), places, f(kept, R, C)),
            (like(L, R, C, dtype=torch.float32),),
        ),
        "TokenGate": prepared("TokenGate", (f(L),), (like(kept, dtype=torch.int64),), count=kept),
        "BitSampler": prepared(
            "BitSampler",
            (f(L, 1, 32, 2), torch.rand(L, 1, 32, device="cuda"), f(1).abs()),
            (like(L, 1, 32, dtype=torch.int32),),
        ),
        "MaskedAttention": prepared(
            "MaskedAttention",
            (b(L, R, H, C // H), b(64, R, H, C // H), b(64, R, H, C // H), torch.zeros(R, 64, device="cuda")),
            (like(L, R, H, C // H),),
            scale=128**-0.5,
        ),
    }


def time_movers(seconds: float) -> dict[str, Any]:
    import torch

    calls = movers()
    bytes_moved = {name: sum(x.nbytes for x in (*call.inputs, *call.outputs)) for name, call in calls.items()}
    source = torch.empty(2**28, device="cuda")
    target = torch.empty_like(source)
    samples = timed({"copy": lambda: target.copy_(source), **{n: c.launch for n, c in calls.items()}}, seconds)
    bytes_moved["copy"] = 2 * source.nbytes
    found = {}
    for name, ms in samples.items():
        facts = summary(ms, 0.0)
        del facts["tflops"]
        found[name] = {**facts, "bytes": bytes_moved[name], "gb_per_s": bytes_moved[name] / facts["median_ms"] / 1e6}
    return found


def table_from_report(report: dict[str, Any]) -> str:
    """Markdown of the attention times: milliseconds and TFLOP/s."""

    def cell(results: dict[str, Any], name: str) -> str:
        return f"{results[name]['median_ms']:.3f} / {results[name]['tflops']:.0f}" if name in results else "–"

    names = ("entropy", "no_entropy", "cudnn", "flash2", "triton_entropy")
    lines = [
        "| q × keys, width | with entropy | without | cuDNN | FlashAttention-2 | Triton, with entropy |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in report["attention"]:
        cells = [f"{row['L']} × {row['S']}, {row['D']}", *(cell(row["results"], name) for name in names)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def movers_table(report: dict[str, Any]) -> str:
    """Markdown of the other operators' times: milliseconds, and bytes per second of what they must read and write."""
    lines = ["| operator | ms | GB/s |", "| --- | --- | --- |"]
    for name, facts in report["movers"].items():
        lines.append(f"| {name} | {facts['median_ms']:.3f} | {facts['gb_per_s']:.0f} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Exit codes: 0 all within tolerance, 1 not, 3 no GPU, no PyTorch or no library."""
    arguments = sys.argv[1:] if arguments is None else arguments
    prog = "python -m toprovar.tools.operator_bench"
    parser = argparse.ArgumentParser(prog=prog, description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write everything, raw samples included")
    parser.add_argument("--seconds", type=float, default=0.4, metavar="N", help="measuring time per row; default 0.4")
    options = parser.parse_args(arguments)
    if options.json and not options.json.parent.is_dir():
        parser.error(f"--json: folder {options.json.parent} does not exist; make it first")
    try:
        library = _ready()
    except EnvironmentFault as fault:
        print(f"error: {fault}", file=sys.stderr)
        return fault.exit_code
    begin = time.perf_counter()
    report: dict[str, Any] = {"schema_version": 1, "conditions": {**conditions(arguments), "library": library}}
    report["conditions"]["command"] = " ".join([prog, *arguments])
    report["checks"] = [
        check_attention(case, dtype, temperature)
        for dtype in ("float32", "float16", "bfloat16")
        for case in CHECKED
        for temperature in (0.3, 3.0)
    ]
    wrong = [check for check in report["checks"] if not check["ok"]]
    for check in wrong:
        print(f"WRONG: {check}")
    worst = max(check["errors"]["entropy_nats"] for check in report["checks"])
    print(f"{len(report['checks'])} cases against float64: {len(wrong)} wrong, entropy off by at most {worst:.1e} nats")
    report["matmul_8192"] = time_matmul(options.seconds)
    print(f"8192^3 bf16 matrix product: {report['matmul_8192']['tflops']:.0f} TFLOP/s")
    report["attention"] = [time_attention(*shape, options.seconds) for shape in SHAPES]
    print(table_from_report(report))
    report["movers"] = time_movers(2 * options.seconds)
    for name, facts in report["movers"].items():
        print(f"{name:16} {facts['median_ms']:8.4f} ms {facts['gb_per_s']:6.0f} GB/s")
    report["wall_s"] = time.perf_counter() - begin
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if wrong else 0


def _ready() -> dict[str, Any]:
    """Facts about the library. Raises: EnvironmentFault without PyTorch, GPU or library."""
    from toprovar.plugins.library import require_library

    try:
        import torch
    except ImportError as error:
        raise EnvironmentFault(str(error), "pip install torch") from None
    if not torch.cuda.is_available():
        raise EnvironmentFault("no CUDA GPU is visible", "run this on a machine with one")
    library = require_library(cuda=True)
    return {"source_digest": library.source_digest, "architectures": list(library.cuda_architectures)}


if __name__ == "__main__":
    sys.exit(main())
