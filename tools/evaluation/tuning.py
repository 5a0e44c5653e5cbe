"""Chooses how the demo model is sampled, cfg and tau per scale, on the development split alone.

    python -m toprovar.tools.evaluation.tuning --out FILE.json [--prompts N] [--backend pytorch --device cuda]

First one cfg and one tau for all scales, over a grid; then, from the best, other values for the last three scales,
where detail is drawn. All candidates draw the same prompts from the same noise. Chosen is the lowest Fréchet distance
among the candidates that the best share of "all right" does not beat for sure: the interval of their paired difference
holds 0. The file keeps every finished candidate, so an interrupted call goes on. What was chosen goes into model.json,
from where every bundle takes it.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
import typer

from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.guidance import Guidance
from toprovar.runtime.json_files import check_folder, read_json, write_json
from toprovar.runtime.noise import check_seed
from toprovar.runtime.version import VERSION
from toprovar.tools import console
from toprovar.tools.evaluation.classifier import FILE, DrawingClassifier, load_classifier
from toprovar.tools.evaluation.frechet import features_of, frechet_distance
from toprovar.tools.evaluation.ground_truth import GroundTruth, ground_truth_folder, load_ground_truth
from toprovar.tools.evaluation.intervals import paired_difference, wilson_interval
from toprovar.tools.evaluation.pictures import BundleMaker, Maker, TorchMaker
from toprovar.tools.evaluation.prompts import Prompt, prompts_digest, prompts_of
from toprovar.tools.evaluation.scoring import Verdict, score_pictures
from toprovar.tools.train_demo.captions import Scene

if TYPE_CHECKING:
    from toprovar.exporter.model import Model

SCHEMA_VERSION = 1
SPLIT = "development"
GRID_CFG = (1.0, 1.5, 2.0, 3.0, 4.0)
GRID_TAU = (0.3, 0.5, 0.7, 1.0)
LATE_SCALES = 3
LATE_CFG = (1.0, 1.5, 2.0, 3.0)
LATE_TAU = (0.1, 0.3, 0.5, 0.7)


class Backend(str, Enum):
    onnxruntime = "onnxruntime"
    pytorch = "pytorch"


class Device(str, Enum):
    cpu = "cpu"
    cuda = "cuda"


def constant(base: Guidance, cfg: float, tau: float) -> Guidance:
    """One cfg and one tau for all scales."""
    scales = len(base.cfg)
    return base.model_copy(update={"cfg": (cfg,) * scales, "tau": (tau,) * scales})


def with_late(base: Guidance, cfg: float, tau: float) -> Guidance:
    """Other values for the last scales."""
    early = len(base.cfg) - LATE_SCALES
    return base.model_copy(
        update={"cfg": (*base.cfg[:early], *(cfg,) * LATE_SCALES), "tau": (*base.tau[:early], *(tau,) * LATE_SCALES)}
    )


Scorer = Callable[[Sequence[np.ndarray], Sequence[Scene]], list[Verdict]]


def scored(images: Sequence[np.ndarray], scenes: Sequence[Scene], judge: DrawingClassifier) -> list[Verdict]:
    """Verdicts of pictures as makers give them, [H, W, 3] uint8."""
    pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 127.5 - 1
    return score_pictures(pixels, scenes, judge)


_judge_of_process: DrawingClassifier | None = None


def _start_process(judge_path: Path) -> None:
    global _judge_of_process
    torch.set_num_threads(1)
    _judge_of_process = load_classifier(judge_path)


def _scored_in_process(images: list[np.ndarray], scenes: list[Scene]) -> list[Verdict]:
    assert _judge_of_process is not None
    return scored(images, scenes, _judge_of_process)


@contextmanager
def scorer(truth: GroundTruth, judge_path: Path, processes: int) -> Iterator[Scorer]:
    """Scores in this process, or in several; a GPU draws faster than one core judges."""
    if processes == 1:
        yield lambda images, scenes: scored(images, scenes, truth.judge)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, _start_process, (judge_path,)) as pool:

        def score(images: Sequence[np.ndarray], scenes: Sequence[Scene]) -> list[Verdict]:
            size = -(-len(images) // processes)
            starts = range(0, len(images), size)
            parts = [(list(images[i : i + size]), list(scenes[i : i + size])) for i in starts]
            jobs = [pool.submit(_scored_in_process, *part) for part in parts]
            return [verdict for job in jobs for verdict in job.result()]

        yield score


def judge_guidance(
    maker: Maker,
    truth: GroundTruth,
    prompts: Sequence[Prompt],
    guidance: Guidance,
    seed: int,
    score: Scorer,
    batch: int = 64,
) -> dict[str, Any]:
    """Draws every prompt and judges it. Returns: cfg, tau, one mark per prompt (1 all right), Fréchet distance."""
    images: list[np.ndarray] = []
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        images += maker.make_dense([p.text for p in part], [seed + p.index for p in part], guidance)
    verdicts = score(images, [prompt.scene for prompt in prompts])
    marks = [verdict.all_right for verdict in verdicts]
    features = [verdict.features for verdict in verdicts]
    low, high = wilson_interval(sum(marks), len(marks))
    return {
        "cfg": list(guidance.cfg),
        "tau": list(guidance.tau),
        "share": round(sum(marks) / len(marks), 6),
        "interval": [round(low, 6), round(high, 6)],
        "frechet": round(frechet_distance(features_of(np.concatenate(features)), truth.features), 5),
        "right": "".join("01"[mark] for mark in marks),
    }


def choose(candidates: Sequence[dict[str, Any]]) -> int:
    """Index of the chosen candidate, by the rule above; the first of equals."""
    best = max(candidates, key=lambda candidate: candidate["share"])

    def is_beaten(candidate: dict[str, Any]) -> bool:
        mine, base = ([mark == "1" for mark in c["right"]] for c in (candidate, best))
        return paired_difference(mine, base)[2] < 0

    left = [i for i, candidate in enumerate(candidates) if not is_beaten(candidate)]
    return min(left, key=lambda i: (candidates[i]["frechet"], -candidates[i]["share"]))


def tune(
    measure: Callable[[Guidance], dict[str, Any]],
    base: Guidance,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    grid: tuple[Sequence[float], Sequence[float]] | None = None,
    late: bool = True,
) -> dict[str, Any]:
    """Both rounds. measure: `judge_guidance` of one candidate; grid: cfg and tau values of the first round.

    Returns: all candidates, and the chosen one's index.
    """
    grid_cfg, grid_tau = grid or (GRID_CFG, GRID_TAU)
    total = len(grid_cfg) * len(grid_tau) + late * len(LATE_CFG) * len(LATE_TAU)
    candidates: list[dict[str, Any]] = []

    def run(guidance: Guidance) -> None:
        candidates.append(measure(guidance))
        on_progress(len(candidates), total)

    for cfg in grid_cfg:
        for tau in grid_tau:
            run(constant(base, cfg, tau))
    first = candidates[choose(candidates)]
    start = base.model_copy(update={"cfg": tuple(first["cfg"]), "tau": tuple(first["tau"])})
    for cfg in LATE_CFG if late else ():
        for tau in LATE_TAU:
            run(with_late(start, cfg, tau))
    return {"candidates": candidates, "chosen": choose(candidates)}


class _Kept:
    """Finished candidates in the result file, by what decided them."""

    def __init__(self, path: Path, key: list[Any]) -> None:
        self.path, self.key = path, hashlib.sha256(json.dumps(key).encode()).hexdigest()
        self.found: dict[str, Any] = {}
        if path.exists():
            stored = read_json(path)
            if isinstance(stored, dict) and stored.get("key") == self.key:
                self.found = {self._name(c): c for c in stored["candidates"]}

    @staticmethod
    def _name(candidate: dict[str, Any]) -> str:
        return json.dumps([candidate["cfg"], candidate["tau"]])

    def measured(self, guidance: Guidance, measure: Callable[[Guidance], dict[str, Any]]) -> dict[str, Any]:
        name = self._name({"cfg": list(guidance.cfg), "tau": list(guidance.tau)})
        if name not in self.found:
            self.found[name] = measure(guidance)
            write_json(self.path, {"key": self.key, "candidates": list(self.found.values())})
        return self.found[name]


def run_tuning(
    out: Path,
    model_name: str,
    count: int | None,
    seed: int,
    backend: str,
    device: str,
    command: str,
    processes: int = 1,
    grid: tuple[Sequence[float], Sequence[float]] | None = None,
    late: bool = True,
) -> dict[str, Any]:
    """Measures, writes `out`, and returns what it holds."""
    from toprovar.exporter.model import load_model

    check_seed(seed)
    check_folder(out.absolute().parent)
    folder = ground_truth_folder(model_name)
    truth = load_ground_truth(folder)
    every = prompts_of(SPLIT, truth.concepts)
    if count is not None and count > len(every):
        raise ToprovarError(f"--prompts asks for {count}; the split {SPLIT} has {len(every)}", "leave it out for all")
    prompts = every[:count]
    model: Model = load_model(model_name)
    base = constant(model.guidance(), 2.0, 0.7)  # guided, so that the bundle has both rows
    digest = prompts_digest(prompts)
    key = [VERSION, model.weights_sha256, truth.judge_sha256, digest, seed, backend, device, base.top_p]
    kept = _Kept(out, key)
    maker: Maker
    if backend == "pytorch":
        maker = TorchMaker(model, base, {}, device)
    else:
        maker = BundleMaker(model, out.with_name(f".{out.stem}.bundles"), base, {})
    with scorer(truth, folder / FILE, processes) as score, console.progress("tune") as advance:
        found = tune(
            lambda g: kept.measured(g, lambda own: judge_guidance(maker, truth, prompts, own, seed, score)),
            base,
            advance,
            grid,
            late,
        )
    document = {
        "schema_version": SCHEMA_VERSION,
        "tool_version": VERSION,
        "command": command,
        "key": kept.key,
        "model": {"name": model.name, "weights_sha256": model.weights_sha256, "top_p": base.top_p},
        "judge_sha256": truth.judge_sha256,
        "split": SPLIT,
        "prompts": {"count": len(prompts), "of": len(every), "sha256": digest},
        "seed": seed,
        "backend": maker.description,
        **found,
    }
    write_json(out, document)
    return document


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(cls=console.Single)
def tuning(
    out: Annotated[Path, typer.Option("--out", "-o", help="JSON file to write; candidates in it are kept.")],
    model: Annotated[str, typer.Option("--model", help="demo, or a folder of a trained demo model.")] = "demo",
    prompts: Annotated[
        int | None, typer.Option("--prompts", min=2, help="First N prompts of the development split; default all.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the first prompt; prompt i takes seed + i.")] = 0,
    backend: Annotated[
        Backend, typer.Option("--backend", help="What draws: the exported graphs, or the reference loop.")
    ] = Backend.onnxruntime,
    device: Annotated[Device, typer.Option("--device", help="cuda needs --backend pytorch.")] = Device.cpu,
    cfg: Annotated[
        list[float] | None, typer.Option("--cfg", help=f"A cfg of the first round; repeatable. Default: {GRID_CFG}.")
    ] = None,
    tau: Annotated[
        list[float] | None, typer.Option("--tau", help=f"A tau of the first round; repeatable. Default: {GRID_TAU}.")
    ] = None,
    late: Annotated[bool, typer.Option(help="Also try other values for the last three scales.")] = True,
    processes: Annotated[
        int, typer.Option("--processes", min=1, help="Processes that judge; a GPU keeps about 16 busy.")
    ] = 1,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else there.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show tracebacks and debug messages.")] = False,
) -> None:
    """Choose cfg and tau per scale on the development split."""

    def work() -> None:
        if device is Device.cuda and backend is not Backend.pytorch:
            raise ToprovarError("--device cuda: ONNX Runtime runs on the CPU here", "pass --backend pytorch")
        command = shlex.join(["python", "-m", "toprovar.tools.evaluation.tuning", *sys.argv[1:]])
        document = run_tuning(
            out,
            model,
            prompts,
            seed,
            backend.value,
            device.value,
            command,
            processes,
            (cfg or GRID_CFG, tau or GRID_TAU),
            late,
        )
        chosen = document["candidates"][document["chosen"]]
        if as_json:
            console.print_json(document)
        else:
            sys.stdout.write(json.dumps({"cfg": chosen["cfg"], "tau": chosen["tau"]}) + "\n")
        console.say(
            f"wrote {out} ({len(document['candidates'])} candidates; chosen: all right {chosen['share']:.3f}, Fréchet "
            f"{chosen['frechet']:.3f}); next: put cfg and tau into the model's model.json"
        )

    code = console.run_command(work, verbose)
    if code:
        raise typer.Exit(code)


if __name__ == "__main__":
    app(prog_name="python -m toprovar.tools.evaluation.tuning")
