"""The command line. Each command is thin: it reads options, calls the floor that does the work, and prints.

Heavy packages are imported inside the commands, so that `--help` works with nothing optional installed.
"""

from __future__ import annotations

import io
import os
import shlex
import signal
import sys
import time
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from toprovar.tools import console

if TYPE_CHECKING:
    from toprovar.tools.backends import BackendChoice


class Group(console.OneMessage, TyperGroup):
    """The commands of `toprovar`."""


app = typer.Typer(
    name="toprovar",
    cls=Group,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="From a visual-autoregressive checkpoint to production: calibrate, export, run.",
)

Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show tracebacks and debug messages.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else there.")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of the noise, 0 to 2^63.")]
ModelArgument = Annotated[str, typer.Argument(help="Packaged model (demo), folder with model.json, or checkpoint.")]
Tokenizer = Annotated[
    str | None, typer.Option("--tokenizer", help="Checkpoint of the bit tokenizer, for a bare checkpoint.")
]
Aspect = Annotated[
    str | None,
    typer.Option(
        "--aspect", help="Height over width (1.5), or width and height (2:3, 832x1248); the nearest template is used."
    ),
]
Budget = Annotated[
    str | None,
    typer.Option("--budget", help="Pixel budget: 0.06M, 0.25M, 0.60M or 1M; of InfinityStar 0.40M or 0.90M."),
]
Frames = Annotated[
    int | None, typer.Option("--frames", min=1, help="Length of the video in frames: 1, or a multiple of 4 plus 1.")
]
Cfg = Annotated[str | None, typer.Option("--cfg", help="Guidance: one value, or one per scale with commas.")]
Tau = Annotated[
    str | None,
    typer.Option("--tau", help="Temperature: one value, or one per scale with commas."),
]


Embeddings = Annotated[
    Path | None,
    typer.Option("--embeddings", help="Prompts encoded beforehand (toprovar encode-prompts), in place of an encoder."),
]
TimedPrompt = Annotated[
    str | None, typer.Option("--prompt", "-p", help="What to draw; red apple, or class 0, if left out.")
]
Lora = Annotated[
    list[Path] | None,
    typer.Option("--lora", help="Adapter to merge into the transformer: a file, or PEFT's folder; repeatable."),
]
LoraScale = Annotated[
    list[float] | None,
    typer.Option("--lora-scale", help="Strength of the adapters: one for all, or one for each --lora; default 1."),
]
LoraUnmatched = Annotated[
    bool, typer.Option("--lora-allow-unmatched", help="Merge what fits of an adapter that does not fit wholly.")
]
Targets = Annotated[
    list[str] | None,
    typer.Option("--target", help="onnxruntime, tensorrt or tensorrt-rtx; repeatable. Graphs are always written."),
]
Capabilities = Annotated[
    str | None,
    typer.Option(
        "--compute-capability",
        help="GPUs of tensorrt-rtx engines, with commas: 80, 86, 89, 120, 121; default 80,86,89,120.",
    ),
]
FunctionBody = Annotated[
    bool,
    typer.Option("--allow-function-body", help="Build engines without plugins where the operator library lacks them."),
]
Jobs = Annotated[
    int,
    typer.Option(
        "--jobs", min=1, max=64, help="Engines built at once; default 1. --dry-run tells the memory that each takes."
    ),
]

EXPORT_MODULES = ("torch", "onnx", "onnx_ir")
CALIBRATE_MODULES = ("torch", "skimage", "matplotlib", "jinja2")
EVALUATE_MODULES = ("torch", "onnx", "onnx_ir", "skimage")
COMPARE_MODULES = (*EVALUATE_MODULES, "matplotlib", "jinja2")


class Preset(str, Enum):
    full = "full"
    paper = "paper"


class Direction(str, Enum):
    auto = "auto"
    le = "le"
    ge = "ge"


class Restore(str, Enum):
    identity = "identity"
    cached_residual = "cached_residual"
    prev_residual = "prev_residual"


class Resample(str, Enum):
    bilinear = "bilinear"
    area = "area"


class Split(str, Enum):
    test = "test"
    development = "development"


class PictureBackend(str, Enum):
    onnxruntime = "onnxruntime"
    pytorch = "pytorch"


class Device(str, Enum):
    cpu = "cpu"
    cuda = "cuda"


class Backend(str, Enum):
    onnxruntime = "onnxruntime"
    tensorrt = "tensorrt"
    tensorrt_rtx = "tensorrt-rtx"


class Operators(str, Enum):
    auto = "auto"
    library = "library"
    body = "body"


class NumberFormat(str, Enum):
    fp32 = "fp32"
    fp16 = "fp16"
    bf16 = "bf16"


class HeaderSource(str, Enum):
    pip = "pip"


class EncoderKind(str, Enum):
    t5 = "t5"
    qwen2_vl = "qwen2-vl"


class EncoderFormat(str, Enum):
    fp32 = "fp32"
    bf16 = "bf16"


BackendOption = Annotated[
    Backend, typer.Option("--backend", help="What runs the bundle; TensorRT's need engines (toprovar rebuild).")
]
DeviceOption = Annotated[
    Device | None, typer.Option("--device", help="cpu, or cuda; the backend's own if left out: onnxruntime's is cpu.")
]
OperatorsOption = Annotated[
    Operators,
    typer.Option(
        "--operators", help="Our operators by the built library or by their ONNX bodies; auto: library on a GPU."
    ),
]
CudaGraphOption = Annotated[
    bool, typer.Option("--cuda-graph/--no-cuda-graph", help="On a GPU: capture steps once and replay them.")
]
ThreadsOption = Annotated[int, typer.Option("--threads", min=0, help="CPU threads; 0 takes all.")]


def _choice(
    backend: Backend, device: Device | None, operators: Operators, cuda_graph: bool, threads: int
) -> BackendChoice:
    from toprovar.tools.backends import BackendChoice

    return BackendChoice(backend.value, device.value if device else None, operators.value, cuda_graph, threads)


def _command_line() -> str:
    """What was typed, as results note it."""
    return shlex.join(["toprovar", *sys.argv[1:]])


def _finish(command: Any, verbose: bool) -> None:
    code = console.run_command(command, verbose)
    if code:
        raise typer.Exit(code)


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the results.")] = Path("out/demo"),
    prompts: Annotated[int, typer.Option("--prompts", min=1, max=64, help="Pictures to make, dense and planned.")] = 8,
    calibration_prompts: Annotated[
        int, typer.Option("--calibration-prompts", min=2, max=64, help="Prompts to calibrate with.")
    ] = 12,
    seed: Seed = 7,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Calibrate, export and run the packaged demo model; ends with a report. Resumes what is done."""

    def body() -> None:
        console.require_packages("demo", *CALIBRATE_MODULES, *EXPORT_MODULES)
        from toprovar.tools.demo import run_demo

        summary = run_demo(out, prompts, calibration_prompts, seed)
        if json:
            console.print_json(summary)

    _finish(body, verbose)


@app.command()
def calibrate(
    model: ModelArgument,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for plan.json, stats/ and report.html.")],
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts", help="Text file, one prompt per line, or a shipped list: demo, mixed. demo if left out."
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Use only the first N prompts.")] = None,
    method: Annotated[
        str,
        typer.Option(
            "--method",
            help="dense, fixed_exit, toprovar, fastvar, skipvar, stepvar, depthvar or ld_pruning.",
        ),
    ] = "toprovar",
    option: Annotated[
        list[str] | None,
        typer.Option("--set", help="An option of the method, NAME=VALUE; repeatable. docs/calibration.md lists them."),
    ] = None,
    preset: Annotated[Preset, typer.Option("--preset", help="paper also skips the last two scales.")] = Preset.full,
    rho_threshold: Annotated[
        float | None, typer.Option("--rho-threshold", min=0, max=1, help="Threshold on rho; fitted if left out.")
    ] = None,
    direction: Annotated[
        Direction, typer.Option("--direction", help="Side of the threshold that counts as settled.")
    ] = Direction.auto,
    scale_depth: Annotated[
        int | None,
        typer.Option("--scale-depth", min=0, help="D, 0-based; fitted if left out. Pruning starts after it."),
    ] = None,
    alpha_max: Annotated[
        float | None, typer.Option("--alpha-max", min=0, max=1, help="Largest pruning probability; default 0.9.")
    ] = None,
    beta: Annotated[float | None, typer.Option("--beta", min=0, help="Steepness of R; fitted if left out.")] = None,
    global_layers: Annotated[
        int | None, typer.Option("--global-layers", min=1, help="Layers that stay dense; Otsu's split if left out.")
    ] = None,
    target_speedup: Annotated[
        float | None,
        typer.Option(
            "--target-speedup",
            min=1,
            help="Choose D, layers and strength so that work (TLE) shrinks this much.",
        ),
    ] = None,
    target_ssim: Annotated[
        float | None,
        typer.Option(
            "--target-ssim", min=0, max=1, help="Save as much work as keeps this mean SSIM to dense, measured."
        ),
    ] = None,
    restore: Annotated[
        Restore | None, typer.Option("--restore", help="What pruned positions get; the method's own if left out.")
    ] = None,
    resample: Annotated[
        Resample | None, typer.Option("--resample", help="How residuals are resized; the method's own if left out.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Keep what an earlier run measured for the same prompts.")
    ] = True,
    embeddings: Embeddings = None,
    lora: Lora = None,
    lora_scale: LoraScale = None,
    lora_allow_unmatched: LoraUnmatched = False,
    tokenizer: Tokenizer = None,
    aspect: Aspect = None,
    budget: Budget = None,
    frames: Frames = None,
    cfg: Cfg = None,
    tau: Tau = None,
    seed: Seed = 0,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Learn from prompts what may be left out; writes plan.json, statistics and a report."""

    def body() -> None:
        console.require_packages("calibrate", *CALIBRATE_MODULES)
        from toprovar.calibrate.methods.settings import MethodSettings
        from toprovar.tools.calibration import CalibrationRequest, run_calibration
        from toprovar.tools.options import adapters_from, aspect_from, named_values

        settings = MethodSettings(
            preset=preset.value,
            tau=rho_threshold,
            direction=direction.value,
            scale_depth=scale_depth,
            beta=beta,
            global_layers=global_layers,
            alpha_max=MethodSettings.alpha_max if alpha_max is None else alpha_max,
            target_speedup=target_speedup,
            restore=None if restore is None else restore.value,
            resample=None if resample is None else resample.value,
            options=named_values(option or [], "--set"),
        )
        request = CalibrationRequest(
            model=model, tokenizer=tokenizer, prompts=prompts, limit=limit, method=method, settings=settings,
            aspect=aspect_from(aspect), budget=budget, frames=frames, cfg=cfg, tau=tau, seed=seed, out=out,
            target_ssim=target_ssim,
            resume=resume, embeddings=embeddings,
            adapters=adapters_from(lora or (), lora_scale or (), lora_allow_unmatched),
        )  # fmt: skip
        plan = run_calibration(request)
        if json:
            console.print_json(plan.model_dump(mode="json", by_alias=True))

    _finish(body, verbose)


@app.command("encode-prompts")
def encode_prompts(
    prompts: Annotated[Path, typer.Argument(help="Text file, one prompt per line.")],
    encoder: Annotated[str, typer.Option("--encoder", help="Folder of the text encoder, or its name on the hub.")],
    kind: Annotated[EncoderKind, typer.Option("--kind", help="t5 for Infinity, qwen2-vl for HART.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="File of the rows.")] = Path("embeddings.safetensors"),
    negative: Annotated[str | None, typer.Option("--negative", help="Negative prompt for all of them.")] = None,
    prefix: Annotated[
        str, typer.Option("--prefix", help="Text before every prompt; InfinityStar has been trained with <<<t=5s>>>.")
    ] = "",
    system_prompt: Annotated[
        Path | None, typer.Option("--system-prompt", help="qwen2-vl: text file, put in front of every prompt.")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Use only the first N prompts.")] = None,
    dtype: Annotated[
        EncoderFormat, typer.Option("--dtype", help="Number format of the encoder; rows are fp32 either way.")
    ] = EncoderFormat.fp32,
    device: Annotated[Device, typer.Option("--device", help="What encodes: cpu or cuda.")] = Device.cpu,
    download: Annotated[
        bool, typer.Option("--download", help="Fetch an encoder named on the hub; nothing is fetched otherwise.")
    ] = False,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Encode prompts once, with T5 or Qwen2-VL, for commands that take --embeddings."""

    def body() -> None:
        console.require_packages("encode-prompts", "torch")
        from toprovar.tools.prompt_encoding import EncodingRequest, run_encoding

        request = EncodingRequest(
            prompts=prompts, encoder=encoder, kind=kind.value, out=out, dtype=dtype.value, device=device.value,
            negative=negative, prefix=prefix, system_prompt=system_prompt, limit=limit, download=download,
        )  # fmt: skip
        facts = run_encoding(request, quiet=json)
        if json:
            console.print_json(facts)

    _finish(body, verbose)


@app.command("export-text-encoder")
def export_text_encoder(
    encoder: Annotated[str, typer.Argument(help="Folder of a T5, or its name on the hub.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of graph and weights; an older one is replaced.")],
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Longest prompt; the graph pads to it.")] = 512,
    overwrite: Annotated[bool, typer.Option("--overwrite/--no-overwrite", help="Replace an older export.")] = True,
    download: Annotated[
        bool, typer.Option("--download", help="Fetch an encoder named on the hub; nothing is fetched otherwise.")
    ] = False,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Write T5's encoder as an ONNX graph: token ids in, text rows out."""

    def body() -> None:
        console.require_packages("export-text-encoder", *EXPORT_MODULES)
        from toprovar.tools.prompt_encoding import run_graph_export

        facts = run_graph_export(encoder, tokens, out, download, overwrite, quiet=json)
        if json:
            console.print_json(facts)

    _finish(body, verbose)


@app.command()
def export(
    model: ModelArgument,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the bundle; an older bundle there is replaced.")],
    plan: Annotated[Path | None, typer.Option("--plan", help="plan.json; dense without.")] = None,
    target: Targets = None,
    compute_capability: Capabilities = None,
    allow_function_body: FunctionBody = False,
    jobs: Jobs = 1,
    dtype: Annotated[
        NumberFormat | None,
        typer.Option("--dtype", help="Number format of matrix products; fp32, or bf16 where engines are asked for."),
    ] = None,
    text_tokens: Annotated[
        int | None, typer.Option("--text-tokens", min=1, max=512, help="Prompt length; model's own default.")
    ] = None,
    images: Annotated[
        int, typer.Option("--images", min=1, max=64, help="Also write steps that draw so many images at once.")
    ] = 1,
    lora: Lora = None,
    lora_scale: LoraScale = None,
    lora_allow_unmatched: LoraUnmatched = False,
    tokenizer: Tokenizer = None,
    aspect: Aspect = None,
    budget: Budget = None,
    frames: Frames = None,
    cfg: Cfg = None,
    tau: Tau = None,
    overwrite: Annotated[bool, typer.Option("--overwrite/--no-overwrite", help="Replace an older bundle.")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be built, and build nothing.")] = False,
    graphs_only: Annotated[
        bool, typer.Option("--graphs-only", help="Write graphs without weights; also takes infinity-2b, infinity-8b.")
    ] = False,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Write a bundle: per-scale ONNX step graphs over one weights file, dense and planned, and engines of them.

    `toprovar-export rebuild BUNDLE` builds engines of an existing bundle.
    """

    def body() -> None:
        console.require_packages("export", *EXPORT_MODULES)
        from toprovar.tools.engine_building import EngineOptions
        from toprovar.tools.exporting import ExportRequest, run_export
        from toprovar.tools.options import adapters_from, aspect_from

        request = ExportRequest(
            model=model, tokenizer=tokenizer, plan=plan, out=out, dtype=dtype.value if dtype else None,
            text_tokens=text_tokens, images=images, aspect=aspect_from(aspect), budget=budget, frames=frames, cfg=cfg,
            tau=tau, overwrite=overwrite, dry_run=dry_run, graphs_only=graphs_only,
            engines=EngineOptions(tuple(target or ()), compute_capability, allow_function_body, jobs),
            adapters=adapters_from(lora or (), lora_scale or (), lora_allow_unmatched),
        )  # fmt: skip
        facts = run_export(request, quiet=json)
        if json:
            console.print_json(facts)

    _finish(body, verbose)


@app.command()
def rebuild(
    bundle: Annotated[Path, typer.Argument(help="Bundle folder; its checkpoint is not needed.")],
    target: Targets = None,
    compute_capability: Capabilities = None,
    scale: Annotated[
        int | None, typer.Option("--scale", min=0, help="Only the steps of this scale; all graphs if left out.")
    ] = None,
    allow_function_body: FunctionBody = False,
    jobs: Jobs = 1,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Build or rebuild the engines of an existing bundle; those it has, if no target is given."""

    def body() -> None:
        console.require_packages("rebuild", "onnx")
        from toprovar.tools.engine_building import EngineOptions, run_rebuild

        options = EngineOptions(tuple(target or ()), compute_capability, allow_function_body, jobs)
        facts = run_rebuild(bundle, options, scale)
        if json:
            console.print_json(facts)

    _finish(body, verbose)


@app.command()
def run(
    bundle: Annotated[Path, typer.Argument(help="Bundle folder.")],
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="What to draw.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="File to write: PNG, of a video MP4 or a folder for its frames. Default: image.png or video.mp4.",
        ),
    ] = None,
    seed: Seed = 0,
    plan: Annotated[
        str | None, typer.Option("--plan", help="Variant: dense or planned; planned where the bundle has it.")
    ] = None,
    negative: Annotated[str | None, typer.Option("--negative", help="Negative prompt.")] = None,
    cfg: Cfg = None,
    tau: Tau = None,
    preview_dir: Annotated[
        Path | None, typer.Option("--preview-dir", help="Also write the picture after every scale there.")
    ] = None,
    embeddings: Embeddings = None,
    index: Annotated[
        int | None, typer.Option("--index", min=0, help="Which prompt of --embeddings, from 0; or name it by --prompt.")
    ] = None,
    backend: BackendOption = Backend.onnxruntime,
    device: DeviceOption = None,
    operators: OperatorsOption = Operators.auto,
    cuda_graph: CudaGraphOption = True,
    threads: ThreadsOption = 0,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Make an image or a video with a bundle. Needs numpy and one backend only."""

    def body() -> None:
        from toprovar.tools.running import run_bundle

        record = run_bundle(
            bundle, prompt, seed, out, variant=plan, negative=negative, cfg=cfg, tau=tau, preview_dir=preview_dir,
            choice=_choice(backend, device, operators, cuda_graph, threads), quiet=json,
            embeddings=embeddings, index=index,
        )  # fmt: skip
        if json:
            console.print_json(record)

    _finish(body, verbose)


@app.command()
def bench(
    bundle: Annotated[Path, typer.Argument(help="Bundle folder.")],
    prompt: TimedPrompt = None,
    runs: Annotated[int, typer.Option("--runs", min=1, help="Warm runs per variant; the median counts.")] = 5,
    seed: Seed = 0,
    backend: BackendOption = Backend.onnxruntime,
    device: DeviceOption = None,
    operators: OperatorsOption = Operators.auto,
    cuda_graph: CudaGraphOption = True,
    threads: ThreadsOption = 0,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Time the variants of a bundle against each other, interleaved, on this machine."""

    def body() -> None:
        from toprovar.tools.bench import print_bench, run_bench

        facts = run_bench(bundle, prompt, runs, seed, _choice(backend, device, operators, cuda_graph, threads))
        if json:
            console.print_json(facts)
        else:
            print_bench(facts)

    _finish(body, verbose)


@app.command()
def profile(
    bundle: Annotated[Path, typer.Argument(help="Bundle folder.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of profile.json and of raw traces.")] = Path(
        "out/profile"
    ),
    variant: Annotated[
        str | None, typer.Option("--variant", help="dense or planned; planned where the bundle has it.")
    ] = None,
    prompt: TimedPrompt = None,
    runs: Annotated[int, typer.Option("--runs", min=1, help="Warm runs; medians count.")] = 5,
    seed: Seed = 0,
    peak_tflops: Annotated[
        float | None,
        typer.Option("--peak-tflops", min=0.001, max=1e9, help="Of the machine, for roofline times; TFLOP/s."),
    ] = None,
    peak_gbps: Annotated[
        float | None,
        typer.Option("--peak-gbps", min=0.001, max=1e9, help="Memory bandwidth, for roofline times; GB/s."),
    ] = None,
    backend: BackendOption = Backend.onnxruntime,
    device: DeviceOption = None,
    operators: OperatorsOption = Operators.auto,
    cuda_graph: CudaGraphOption = True,
    threads: ThreadsOption = 0,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Where a picture's time goes: per scale, per layer and per kind of operator, against what the arithmetic needs."""

    def body() -> None:
        from toprovar.tools.profiling import ProfileRequest, print_profile, run_profile

        request = ProfileRequest(
            bundle=bundle, out=out, variant=variant, prompt=prompt, runs=runs, seed=seed, command=_command_line(),
            choice=_choice(backend, device, operators, cuda_graph, threads), peak_tflops=peak_tflops,
            peak_gbps=peak_gbps,
        )  # fmt: skip
        facts = run_profile(request, quiet=json)
        if json:
            console.print_json(facts)
        else:
            print_profile(facts)

    _finish(body, verbose)


@app.command()
def evaluate(
    model: Annotated[str, typer.Argument(help="demo, or a folder that a training of the demo model wrote.")],
    plan: Annotated[
        list[str] | None,
        typer.Option(
            "--plan",
            help="plan.json, or paper, full, fixed_exit, also with a target speed-up (full@2); repeatable. "
            "Dense is always drawn.",
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option("--calibration", help="Folder of `toprovar calibrate demo` for presets; made anew if left out."),
    ] = None,
    split: Annotated[
        Split, typer.Option("--split", help="development is for tuning, test for reporting.")
    ] = Split.test,
    prompts: Annotated[
        int | None, typer.Option("--prompts", min=1, help="Only the first N prompts of the split; default all.")
    ] = None,
    backend: Annotated[
        PictureBackend, typer.Option("--backend", help="What draws: the exported graphs, or the reference loop.")
    ] = PictureBackend.onnxruntime,
    device: Annotated[Device, typer.Option("--device", help="What draws: cpu or cuda.")] = Device.cpu,
    threads: Annotated[int, typer.Option("--threads", min=0, help="CPU threads; 0 takes all.")] = 0,
    cfg: Cfg = None,
    tau: Tau = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the first prompt; prompt i takes seed + i.")] = 0,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the results.")] = Path("out/evaluation"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the pictures that are judged in --out.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be drawn, and draw nothing.")] = False,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Judge pictures of the demo model against their prompts: concept, style, background, count, relation."""

    def body() -> None:
        console.require_packages("evaluate", *EVALUATE_MODULES)
        from toprovar.tools.evaluating import EvaluationRequest, print_evaluation, run_evaluation
        from toprovar.tools.evaluating import dry_run as run_dry

        request = EvaluationRequest(
            model=model, out=out, command=_command_line(), plans=plan or (), calibration=calibration,
            split=split.value, prompts=prompts, backend=backend.value, device=device.value, threads=threads,
            cfg=cfg, tau=tau, seed=seed, resume=resume,
        )  # fmt: skip
        facts = run_dry(request, quiet=json) if dry_run else run_evaluation(request)
        if json:
            console.print_json(facts)
        elif not dry_run:
            print_evaluation(facts)

    _finish(body, verbose)


@app.command()
def compare(
    model: Annotated[str, typer.Argument(help="demo, or a folder with model.json; --split needs its ground truth.")],
    plan: Annotated[
        list[Path] | None, typer.Option("--plan", help="plan.json; repeatable. Dense is always drawn.")
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            help="NAME[:SETTING,...][@TARGET], such as fastvar@2 or toprovar:paper,scale_depth=6; repeatable. "
            "Without plans and methods: all methods at 1.5, 2 and 3 times less work, and as published.",
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option("--calibration", help="Folder of `toprovar calibrate` for methods; made anew if left out."),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="Text file, one prompt per line; nothing is judged then.")
    ] = None,
    split: Annotated[
        Split | None,
        typer.Option("--split", help="Prompts with known content: development is for tuning, test (default) reports."),
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Use only the first N prompts.")] = None,
    device: Annotated[Device, typer.Option("--device", help="What draws: cpu or cuda.")] = Device.cpu,
    threads: Annotated[int, typer.Option("--threads", min=0, help="CPU threads; 0 takes all.")] = 0,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the first prompt; prompt i takes seed + i.")] = 0,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the results.")] = Path("out/compare"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the pictures that are drawn in --out.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be drawn, and draw nothing.")] = False,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Draw plans and methods against dense: work, time, closeness and adherence in one table and one plot."""

    def body() -> None:
        console.require_packages("compare", *COMPARE_MODULES)
        from toprovar.tools.comparing import ComparisonRequest, print_comparison, run_comparison
        from toprovar.tools.comparing import dry_run as run_dry

        request = ComparisonRequest(
            model=model, out=out, command=_command_line(), plans=plan or (), methods=method or (),
            calibration=calibration, prompts=prompts, split=split.value if split else None, limit=limit,
            threads=threads, device=device.value, seed=seed, resume=resume,
        )  # fmt: skip
        facts = run_dry(request, quiet=json) if dry_run else run_comparison(request)
        if json:
            console.print_json(facts)
        elif not dry_run:
            print_comparison(facts)

    _finish(body, verbose)


@app.command()
def inspect(
    path: Annotated[
        str, typer.Argument(help="A checkpoint, a plan, a bundle, or the name of a packaged or published model.")
    ],
    bill: Annotated[
        bool,
        typer.Option("--bill", help="What a published model costs: tokens, FLOP, bytes and roofline time per scale."),
    ] = False,
    gpu: Annotated[
        str | None, typer.Option("--gpu", help="With --bill: h200 (default), h100, a100, l40s or rtx4090.")
    ] = None,
    aspect: Aspect = None,
    budget: Budget = None,
    text_tokens: Annotated[
        int | None,
        typer.Option("--text-tokens", min=1, max=512, help="With --bill: length of the prompt; default 128."),
    ] = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Say what a checkpoint, plan or bundle is, or what a published model costs."""

    def body() -> None:
        from toprovar.tools.inspection import inspect_path, print_facts
        from toprovar.tools.options import aspect_from, refuse_given

        if bill:
            from toprovar.tools.bill import bill_of, print_bill

            facts = bill_of(path, aspect_from(aspect), budget, gpu or "h200", text_tokens)
            if json:
                console.print_json(facts)
            else:
                print_bill(facts)
            return
        options = {"--gpu": gpu, "--aspect": aspect, "--budget": budget, "--text-tokens": text_tokens}
        refuse_given(options, "belongs to --bill", "add --bill")
        facts = inspect_path(path)
        if json:
            console.print_json(facts)
        else:
            print_facts(facts)

    _finish(body, verbose)


@app.command()
def env(json: Json = False, verbose: Verbose = False) -> None:
    """Print versions of what is installed and what this machine can run."""

    def body() -> None:
        from toprovar.tools.environment import environment
        from toprovar.tools.inspection import print_facts

        facts = environment()
        if json:
            console.print_json(facts)
        else:
            print_facts(facts)

    _finish(body, verbose)


plugins_app = typer.Typer(
    name="plugins",
    cls=Group,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="The native operator library: build it, or say what is there.",
)
app.add_typer(plugins_app)


@plugins_app.command("build")
def build_plugins(
    cuda: Annotated[
        bool | None, typer.Option("--cuda/--no-cuda", help="Kernels for GPUs; default: where nvcc is found.")
    ] = None,
    architectures: Annotated[
        str | None, typer.Option("--architectures", help="GPU generations; default 80;86;89;90a;120.")
    ] = None,
    tensorrt_include: Annotated[
        Path | None, typer.Option("--tensorrt-include", help="Folder of NvInfer.h; adds the TensorRT host.")
    ] = None,
    tensorrt_headers: Annotated[
        HeaderSource | None,
        typer.Option("--tensorrt-headers", help="pip downloads TensorRT's headers (0.2 MB, hash checked) for it."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File to write; default: the cache, where it is looked for.")
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=0, help="Compilers at once; 0 takes all cores.")] = 0,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Compile the operators for ONNX Runtime, TensorRT and PyTorch into one library."""

    def body() -> None:
        from toprovar.tools.plugin_building import BuildRequest, run_build

        request = BuildRequest(
            cuda=cuda, architectures=architectures, tensorrt_include=tensorrt_include,
            tensorrt_from_pip=tensorrt_headers is not None, out=out, jobs=jobs,
        )  # fmt: skip
        facts = run_build(request, quiet=json)
        if json:
            console.print_json(facts)

    _finish(body, verbose)


@plugins_app.command("check")
def check_plugins(json: Json = False, verbose: Verbose = False) -> None:
    """Say which operator library is found and whether it fits the sources."""

    def body() -> None:
        from toprovar.tools.inspection import print_facts
        from toprovar.tools.plugin_building import run_check

        facts = run_check()
        if json:
            console.print_json(facts)
        else:
            print_facts(facts)

    _finish(body, verbose)


def _version(value: bool) -> None:
    if value:
        from toprovar.runtime.version import VERSION

        console.out.print(VERSION)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...


INTERRUPT_GRACE_S = 3.0  # in which a second signal does not disturb what the first one began to clean up


def _interruptible() -> None:
    # a supervisor's SIGTERM ends like Ctrl-C: temporary files are removed on the way out
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where a shell runs us in the background
        signal.signal(signal.SIGINT, _interrupt)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that lacks a character is no fault


_interrupted_at: float | None = None


def _interrupt(number: int, frame: FrameType | None) -> None:
    # signals come in pairs: Ctrl-C and make's SIGTERM, a hand that presses twice
    global _interrupted_at
    now = time.monotonic()
    if _interrupted_at is None or now - _interrupted_at > INTERRUPT_GRACE_S:
        _interrupted_at = now
        raise KeyboardInterrupt


def _wait_passively() -> None:
    # OpenMP threads that spin while they wait starve each other on a busy machine: a demo picture in PyTorch took over
    # 30 s beside two other jobs on two cores, 1.5 s with waiting threads asleep. Must be set before torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _run(program: typer.Typer) -> None:
    try:
        program()
    finally:  # what is still to come is the end of the interpreter, in which a late signal would change the exit code
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


def main() -> None:
    """Entry point of `toprovar`."""
    _wait_passively()
    _interruptible()
    _run(app)


def export_main() -> None:
    """Entry point of `toprovar-export`, the name for build scripts."""
    _wait_passively()
    _interruptible()
    export_app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    if sys.argv[1:2] == ["rebuild"]:
        sys.argv[:2] = [f"{sys.argv[0]} rebuild"]
        export_app.command(name="toprovar-export rebuild", cls=console.Single)(rebuild)
    else:
        export_app.command(name="toprovar-export", cls=console.Single)(export)
    _run(export_app)


if __name__ == "__main__":
    main()
