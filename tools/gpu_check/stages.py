"""The stages: each returns facts as data, runs in a process of its own, and needs nothing of others but bundles."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from toprovar.runtime.errors import ToprovarError
from toprovar.tools.backends import BackendChoice, DeviceName, OperatorChoice
from toprovar.tools.gpu_check.models import TEXT_TOKENS, make_bundle, pruning_plan, random_model


@dataclass(frozen=True)
class Context:
    """work: folder of the bundles; size: of models.CONFIGS; runs: warm runs per time."""

    work: Path
    device: DeviceName
    size: str
    runs: int
    seeds: int

    @property
    def compute(self) -> str:
        """ONNX Runtime has no bf16 on the CPU."""
        return "bf16" if self.device == "cuda" else "fp32"


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def environment(context: Context) -> dict[str, Any]:
    """What is installed, and whether GPU, providers and operator library are there."""
    from importlib.metadata import PackageNotFoundError, version

    facts: dict[str, Any] = {"python": sys.version.split()[0], "packages": {}}
    for package in ("torch", "triton", "onnx", "onnx-ir", "onnxruntime", "onnxruntime-gpu", "cuda-bindings", "numpy"):
        try:
            facts["packages"][package] = version(package)
        except PackageNotFoundError:
            facts["packages"][package] = None
    query = "--query-gpu=name,driver_version,memory.total,memory.used,clocks.sm,clocks.mem,power.draw"
    facts["gpu"] = _printed(["nvidia-smi", query, "--format=csv,noheader"])
    import onnxruntime

    facts["providers"] = onnxruntime.get_available_providers()
    facts["operator_library"] = _library_facts()
    if context.device == "cuda":
        import torch

        facts["torch_sees"] = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        from toprovar.runtime.backends.onnxruntime_cuda import check_cuda
        from toprovar.runtime.cuda_memory import CudaMemory, compute_capability

        api = check_cuda(onnxruntime)
        memory = CudaMemory(api)
        array = np.arange(24, dtype=np.float32).reshape(4, 3, 2)
        placed = memory.place(array)
        rows = memory.empty((4, 2, 2), "F32")
        memory.gather([(placed, 2), (placed, 0)], 1, rows)
        facts["memory_gathers"] = bool(np.array_equal(memory.read(rows), array[:, [2, 0]]))
        facts["memory_slices"] = bool(np.array_equal(memory.read(placed[1:3]), array[1:3]))
        facts["compute_capability"] = compute_capability(api)
    return facts


def _library_facts() -> dict[str, Any] | str | None:
    from toprovar.plugins.library import find_library

    try:
        library = find_library()
    except (ToprovarError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    if library is None:
        return None
    return {
        "source_digest": library.source_digest,
        "architectures": library.cuda_architectures,
        "hosts": library.hosts,
        "operators": library.operators,
        "is_stale": library.is_stale,
    }


def _printed(command: list[str]) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"{type(error).__name__}: {error}"


def demo_parity(context: Context, operators: OperatorChoice) -> dict[str, Any]:
    """The packaged model in fp32: bits of PyTorch and of the bundle, dense and planned; and a picture."""
    model = _demo(context)
    folder = context.work / "demo-fp32"
    facts: dict[str, Any] = {"export_s": make_bundle(model, folder, "fp32"), "runs": []}
    for cuda_graph in (False, True) if context.device == "cuda" else (False,):
        pipeline = _pipeline(context, folder, operators, cuda_graph)
        facts["backend"] = pipeline.backend.version
        for variant in ("dense", "planned"):
            for seed in range(context.seeds):
                from toprovar.tools.gpu_check.parity import compare_bits

                with _exact_torch():
                    found = compare_bits(model, pipeline, _demo_text(model, seed), seed, variant)
                facts["runs"].append({"variant": variant, "seed": seed, "cuda_graph": cuda_graph, **found})
                say(f"  {variant} seed {seed} graph {cuda_graph}: {found}")
        picture = pipeline.generate("red apple", 7, "planned").image
        facts.setdefault("picture_mean", []).append(None if picture is None else float(picture.mean()))
    facts["all_equal"] = all(run["equal"] for run in facts["runs"])
    return facts


def demo_logits(context: Context, operators: OperatorChoice) -> dict[str, Any]:
    """The packaged model in half width: logits against PyTorch in fp32, bits forced."""
    model = _demo(context)
    return _logits(context, model, f"demo-{context.compute}-watched", operators, _demo_text(model, 0))


def large_export(context: Context) -> dict[str, Any]:
    """The large random model's bundles: one to time, one that watches its logits."""
    begin = time.perf_counter()
    model = random_model(context.size, context.device)
    facts: dict[str, Any] = {"weights_s": time.perf_counter() - begin, "parameters": _parameters(model)}
    say(f"  random weights made in {facts['weights_s']:.1f} s")
    folder = context.work / f"{context.size}-{context.compute}"
    facts["export_s"] = make_bundle(model, folder, context.compute)
    say(f"  exported in {facts['export_s']:.1f} s")
    facts["bytes"] = sum(path.stat().st_size for path in folder.iterdir())
    plan = pruning_plan(model.backbone, model.schedule)
    facts["keep"] = {scale: list(counts) for scale, counts in plan.keep.items()}
    return facts


def large_logits(context: Context, operators: OperatorChoice) -> dict[str, Any]:
    """The large model: logits against PyTorch in fp32, bits forced."""
    from toprovar.tools.gpu_check.parity import random_text

    model = random_model(context.size, context.device)
    name = f"{context.size}-{context.compute}-watched"
    return _logits(context, model, name, operators, random_text(model, TEXT_TOKENS, 1))


def large_torch(context: Context) -> dict[str, Any]:
    """PyTorch eager, dense and planned, bf16 products by autocast."""
    import torch

    from toprovar.tools.gpu_check.parity import random_text, torch_noise, torch_prompt, torch_run
    from toprovar.tools.gpu_check.timing import time_torch

    model = random_model(context.size, context.device)
    prompt = torch_prompt(model, random_text(model, TEXT_TOKENS, 1))
    facts: dict[str, Any] = {"boundary": "the loop over all scales, sampling included; prompt and noise apart"}
    noise = {scale: made for scale, made in enumerate(torch_noise(model, seed=1))}
    for variant, plan in (("dense", None), ("planned", pruning_plan(model.backbone, model.schedule))):

        def run(seed: int, plan: Any = plan) -> None:
            with torch.autocast(context.device, torch.bfloat16, enabled=context.device == "cuda"):
                torch_run(model, prompt, seed, plan, noise=lambda scale, tokens: noise[scale])

        facts[variant] = time_torch(run, context.device, context.runs, say)
        if context.device == "cuda":
            facts[variant]["peak_bytes"] = torch.cuda.max_memory_allocated()
    return facts


def large_times(context: Context, operators: OperatorChoice, cuda_graph: bool) -> dict[str, Any]:
    """The bundle of the large model, dense and planned."""
    from toprovar.tools.gpu_check.timing import time_pipeline

    folder = context.work / f"{context.size}-{context.compute}"
    before = _used_bytes(context)
    begin = time.perf_counter()
    pipeline = _pipeline(context, folder, operators, cuda_graph)
    facts: dict[str, Any] = {
        "backend": pipeline.backend.version,
        "open_s": time.perf_counter() - begin,
        "boundary": "the loop over all scales, sampling included; text, prompt and reading back apart",
    }
    rows = _rows_for(folder)
    for variant in pipeline.manifest.variants:
        begin = time.perf_counter()
        pipeline.prepare(variant)
        say(f"  {variant}: sessions opened in {time.perf_counter() - begin:.1f} s")
        facts[variant] = time_pipeline(pipeline, rows, variant, context.runs, say)
        facts[variant]["used_bytes_after"] = _used_bytes(context) - before
    facts["speedup"] = facts["dense"]["steps"]["median_ms"] / facts["planned"]["steps"]["median_ms"]
    return facts


def profile_large(context: Context, operators: OperatorChoice) -> dict[str, Any]:
    """Time per operator kind and layer of one dense and one planned picture of the large model."""
    from toprovar.tools.profiling import ProfileRequest, run_profile

    facts = {}
    folder = context.work / f"{context.size}-{context.compute}"
    for variant in ("dense", "planned"):
        request = ProfileRequest(
            bundle=folder,
            out=context.work / f"profile-{variant}-{operators}",
            variant=variant,
            text_rows=_rows_for(folder),
            runs=context.runs,
            choice=BackendChoice(device=context.device, operators=operators),
        )
        found = run_profile(request, quiet=True)
        facts[variant] = {name: found[name] for name in ("first_call_ms", "parts", "scales", "traces")}
        for row in found["scales"]:
            speed = row.get("achieved_tflops", 0.0)
            say(f"  {variant} scale {row['scale']}: {row['median_ms']:.2f} ms, {speed:.1f} TFLOP/s")
    return facts


# -- what they share ---------------------------------------------------------------------------------------------------


def _demo(context: Context) -> Any:
    from toprovar.exporter.model import load_model

    model = load_model("demo")
    model.transformer.to(context.device)
    return model


def _rows_for(folder: Path) -> np.ndarray:
    """Text rows of a bundle's width. Returns: [TEXT_TOKENS, width] float32."""
    from toprovar.runtime.bundle import open_bundle

    text = open_bundle(folder, verify=False).manifest.text
    assert text is not None
    return np.random.default_rng(1).standard_normal((TEXT_TOKENS, text.width), np.float32)


def _demo_text(model: Any, seed: int) -> np.ndarray:
    from toprovar.exporter.prompts import text_rows

    prompts = ("red apple on white", "two blue birds", "a green dog left of a house", "yellow")
    return text_rows(model, prompts[seed % len(prompts)]).numpy()


def _logits(context: Context, model: Any, name: str, operators: OperatorChoice, rows: np.ndarray) -> dict[str, Any]:
    from toprovar.tools.gpu_check.parity import compare_logits

    facts: dict[str, Any] = {"export_s": make_bundle(model, context.work / name, context.compute, ("logits",))}
    say(f"  exported in {facts['export_s']:.1f} s")
    pipeline = _pipeline(context, context.work / name, operators, cuda_graph=False)
    facts["backend"] = pipeline.backend.version
    with _exact_torch():
        facts |= compare_logits(model, pipeline, rows, seed=3)
    for scale in facts["scales"]:
        say(f"  {scale}")
    facts["largest_share_of_torch_error"] = max(s["rms"] / max(s["torch_rms"], 1e-12) for s in facts["scales"])
    return facts


@contextmanager
def _exact_torch() -> Iterator[None]:
    """No TF32, and attention by plain products: the reference is float32 throughout."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    settings = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [each.allow_tf32 for each in settings]
    for each in settings:
        each.allow_tf32 = False
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        for each, value in zip(settings, before, strict=True):
            each.allow_tf32 = value


def _pipeline(context: Context, folder: Path, operators: OperatorChoice, cuda_graph: bool) -> Any:
    from toprovar.runtime.bundle import open_bundle
    from toprovar.runtime.pipeline import Pipeline

    bundle = open_bundle(folder, verify=False)
    backend = BackendChoice(device=context.device, operators=operators, cuda_graph=cuda_graph).open(bundle)
    say(f"  backend {backend.version}")
    return Pipeline(bundle, backend)


def _parameters(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.transformer.parameters())


def _used_bytes(context: Context) -> int:
    """Of the whole GPU, as its driver counts."""
    if context.device != "cuda":
        return 0
    from toprovar.runtime.cuda_memory import load_cuda

    _, free, total = load_cuda().cudaMemGetInfo()
    return int(total - free)


STAGES: dict[str, Callable[[Context], dict[str, Any]]] = {
    "environment": environment,
    "demo-body": lambda context: demo_parity(context, "body"),
    "demo-library": lambda context: demo_parity(context, "library"),
    "demo-logits-body": lambda context: demo_logits(context, "body"),
    "demo-logits-library": lambda context: demo_logits(context, "library"),
    "export": large_export,
    "logits-body": lambda context: large_logits(context, "body"),
    "logits-library": lambda context: large_logits(context, "library"),
    "torch": large_torch,
    "times-body": lambda context: large_times(context, "body", cuda_graph=False),
    "times-body-graph": lambda context: large_times(context, "body", cuda_graph=True),
    "times-library": lambda context: large_times(context, "library", cuda_graph=False),
    "times-library-graph": lambda context: large_times(context, "library", cuda_graph=True),
    "profile-body": lambda context: profile_large(context, "body"),
    "profile-library": lambda context: profile_large(context, "library"),
}
