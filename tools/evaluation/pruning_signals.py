"""Does the demo model give pruning anything to go by? Three checks on dense pictures whose objects are known.

    python -m toprovar.tools.evaluation.pruning_signals --out FILE.json [--prompts N] [--seed S] [--json]
    python -m toprovar.tools.evaluation.pruning_signals --table FILE.json [--into docs/evaluation.md]

1. Does attention entropy, or bit entropy, tell object tokens from background tokens? Area under the ROC curve per scale
   and layer: the chance that a random object token has the larger value; 0.5 tells nothing.
2. Do pictures differ in complexity? Summed bit entropy per picture: its 10, 50 and 90 % points per bucket.
3. Do late scales carry detail or noise? Bit entropy of background and object per scale, how much of the picture a scale
   changes there, and how close the picture after it is to the last one.

Object tokens are those more than half covered by what differs from the picture's background inside the places that the
prompt's layout has; background tokens lie wholly outside both. Entropies are of the conditional row (attention, mean
over heads) and of the guided, tempered logits (bits), in nats.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
import typer
from torch import Tensor

from toprovar.calibrate.measures import psnr_db
from toprovar.exporter.model import Model, load_model
from toprovar.exporter.prompts import encode_prompt
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.guidance import Guidance
from toprovar.runtime.json_files import write_json
from toprovar.runtime.noise import check_seed, uniform_noise
from toprovar.runtime.pipeline import picture_from_image
from toprovar.runtime.version import VERSION
from toprovar.tools import console
from toprovar.tools.evaluation.background import find_background
from toprovar.tools.evaluation.concepts import read_concepts
from toprovar.tools.evaluation.ground_truth import ground_truth_folder
from toprovar.tools.evaluation.layouts import foreground, objects_mask
from toprovar.tools.evaluation.prompts import BUCKETS, Prompt, prompts_digest, prompts_of
from toprovar.tools.evaluation.table import read_results, show, whole

if TYPE_CHECKING:
    from toprovar.exporter.schedules import Schedule

SCHEMA_VERSION = 1
SPLIT = "development"
DEFAULT_PROMPTS = 64
LEAST_TOKENS = 8  # of each kind, for a scale of a picture to count
COVERED = 0.5


def area_under_curve(positive: np.ndarray, negative: np.ndarray) -> float:
    """Chance that a random positive exceeds a random negative, ties half. Source: Mann and Whitney 1947.

    Raises: ValueError if a side is empty or holds NaN.
    """
    if not len(positive) or not len(negative) or np.isnan(positive).any() or np.isnan(negative).any():
        raise ValueError("a side is empty or holds NaN")
    ordered = np.sort(negative)
    below = np.searchsorted(ordered, positive, "left").sum()
    not_above = np.searchsorted(ordered, positive, "right").sum()
    return float((below + not_above) / 2 / len(positive) / len(negative))


def bit_entropy(logits: Tensor) -> Tensor:
    """Entropy of a token's bits, summed. logits: [L, 2 * bits], adjacent pairs -> [L] nats."""
    zero, one = logits.double().unflatten(-1, (-1, 2)).unbind(-1)
    odds = one - zero
    chance = odds.sigmoid()
    # H = ln(1 + e^z) - z sigmoid(z), which neither end of z breaks
    return (F.softplus(odds) - odds * chance).sum(-1)


def token_kinds(mask: Tensor, layout: str, size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Object and background tokens of a scale. mask: [256, 256] bool, the foreground. Returns: two [h * w] bool."""
    places = objects_mask(layout)
    inside = F.adaptive_avg_pool2d((mask & places)[None, None].float(), size)[0, 0]
    touched = F.adaptive_avg_pool2d((mask | places)[None, None].float(), size)[0, 0]
    return (inside > COVERED).flatten().numpy(), (touched == 0).flatten().numpy()


Measured = dict[str, Any]


def measure(model: Model, schedule: Schedule, guidance: Guidance, prompt: Prompt, seed: int) -> Measured:
    """One dense run.

    Returns: "bits_nats", the picture's bit entropy; and per scale "attention_auc" [L] and "bit_auc", "object" and
    "background" (mean bit entropy per token in nats), each None where a kind of token is too rare; "change_object" and
    "change_background" (RMS in grey levels of 255); "psnr_to_last_db", None for the last.
    """
    from toprovar.exporter.infinity.generate import generate

    tokenizer = model.tokenizer
    if tokenizer is None:
        raise ToprovarError("the model has no tokenizer, so it makes no picture", "name one in its model.json")
    logits: dict[int, Tensor] = {}
    pictures: list[np.ndarray] = []

    def watch(name: str, scale: int, tensor: Tensor) -> None:
        if name == "logits":
            logits[scale] = tensor[0]

    run = generate(
        model.transformer,
        encode_prompt(model, prompt.text, guidance),
        schedule,
        guidance,
        lambda scale, tokens: torch.from_numpy(uniform_noise(seed, scale, tokens, model.config.bits))[None],
        entropy_layers=range(model.config.depth),
        observe=watch,
        on_scale=lambda scale, codes: pictures.append(picture_from_image(tokenizer.decode(codes)[0].numpy())),
    )
    last = torch.from_numpy(pictures[-1]).permute(2, 0, 1).float() / 255
    if last.shape[-2:] != objects_mask(prompt.scene.layout).shape:
        raise ToprovarError(f"the model draws {tuple(last.shape[-2:])} pixels; the ground truth is of 256 x 256")
    background = find_background(last[None], single=prompt.scene.layout == "single")[0]
    mask = foreground(last, background)
    places = objects_mask(prompt.scene.layout)
    regions = {"object": (mask & places).numpy(), "background": (~mask & ~places).numpy()}
    scales = []
    total = 0.0
    for k, size in enumerate(schedule):
        entropy = bit_entropy(logits[k]).numpy()  # [N]
        total += float(entropy.sum())
        objects, ground = token_kinds(mask, prompt.scene.layout, size)
        found: Measured = dict.fromkeys(("attention_auc", "bit_auc", "object", "background"))
        if min(objects.sum(), ground.sum()) >= LEAST_TOKENS:
            maps = [run.entropy[k, layer][0].double().numpy() for layer in range(model.config.depth)]
            found["attention_auc"] = [area_under_curve(m[objects], m[ground]) for m in maps]
            found["bit_auc"] = area_under_curve(entropy[objects], entropy[ground])
            found["object"], found["background"] = float(entropy[objects].mean()), float(entropy[ground].mean())
        before = pictures[k - 1].astype(np.float64) if k else np.full(pictures[0].shape, 127.5)
        change = np.square(pictures[k] - before).mean(-1)  # [256, 256]
        for name, region in regions.items():
            found[f"change_{name}"] = float(np.sqrt(change[region].mean())) if region.any() else None
        found["psnr_to_last_db"] = psnr_db(pictures[k], pictures[-1]) if k + 1 < len(schedule) else None
        scales.append(found)
    return {"bits_nats": total, "scales": scales}


def _mean(values: Sequence[Any]) -> Any:
    """Mean over the pictures that have a value, rounded; element by element for lists; None if none has."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    means = np.round(np.mean(np.array(known), 0), 4)
    return means.tolist()


def summary(measured: Sequence[Measured], prompts: Sequence[Prompt], schedule: Schedule) -> dict[str, Any]:
    """Means over pictures, and the spread of complexity by bucket."""
    scales = []
    for k, (height, width) in enumerate(schedule):
        mine = [m["scales"][k] for m in measured]
        names = [name for name in mine[0]]
        facts = {name: _mean([m[name] for m in mine]) for name in names}
        counted = sum(m["bit_auc"] is not None for m in mine)
        scales.append({"scale": k, "tokens": height * width, "pictures": counted, **facts})
    spread = {}
    for bucket in ("all", *BUCKETS):
        totals = [m["bits_nats"] for m, p in zip(measured, prompts, strict=True) if bucket in ("all", p.bucket)]
        if totals:
            low, middle, high = np.percentile(totals, [10, 50, 90])
            spread[bucket] = {
                "pictures": len(totals),
                "p10": round(float(low), 2),
                "p50": round(float(middle), 2),
                "p90": round(float(high), 2),
                "ratio": round(float(high / low), 3) if low > 0 else None,
            }
    return {"scales": scales, "bits_nats": spread}


def run_signals(
    model_name: str,
    count: int,
    seed: int,
    command: str,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Measures the first `count` development prompts; prompt i runs with seed + i. Returns: the document."""
    check_seed(seed)
    every = prompts_of(SPLIT, read_concepts(ground_truth_folder(model_name)))
    if count > len(every):
        raise ToprovarError(
            f"--prompts asks for {count}; the split {SPLIT} has {len(every)}", f"pass --prompts {len(every)}"
        )
    prompts = every[:count]
    model = load_model(model_name)
    schedule, guidance = model.schedule, model.guidance()
    measured = []
    for prompt in prompts:
        measured.append(measure(model, schedule, guidance, prompt, seed + prompt.index))
        on_progress(len(measured), count)
    return {
        "schema_version": SCHEMA_VERSION,
        "tool_version": VERSION,
        "command": command,
        "model": {
            "name": model.name,
            "weights_sha256": model.weights_sha256,
            "guidance": guidance.model_dump(mode="json"),
        },
        "split": SPLIT,
        "seed": seed,
        "prompts": {"count": count, "of": len(every), "sha256": prompts_digest(prompts)},
        **summary(measured, prompts, schedule),
        "raw_bits_nats": [round(m["bits_nats"], 3) for m in measured],
    }


def _cell(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def markdown(document: dict[str, Any]) -> str:
    """Conditions and the two tables of a file."""
    rows = [
        "| scale | tokens | AUC bits | AUC attention, lowest and highest layer "
        "| bits object / background, nats per token | change object / background | PSNR to last, dB |",
        "|" + " --- |" * 7,
    ]
    for scale in document["scales"]:
        layers = scale["attention_auc"]
        ends = "–"
        if layers:
            low, high = int(np.argmin(layers)), int(np.argmax(layers))
            ends = f"{layers[low]:.3f} ({low}), {layers[high]:.3f} ({high})"
        rows.append(
            f"| {scale['scale']} | {scale['tokens']} | {_cell(scale['bit_auc'], 3)} | {ends} "
            f"| {_cell(scale['object'], 3)} / {_cell(scale['background'], 3)} "
            f"| {_cell(scale['change_object'], 1)} / {_cell(scale['change_background'], 1)} "
            f"| {_cell(scale['psnr_to_last_db'], 1)} |"
        )
    spread = ["| summed bit entropy, nats | pictures | 10 % | 50 % | 90 % | 90 % / 10 % |", "|" + " --- |" * 6]
    for bucket, facts in document["bits_nats"].items():
        spread.append(
            f"| {bucket} | {facts['pictures']} | {facts['p10']:.0f} | {facts['p50']:.0f} | {facts['p90']:.0f} "
            f"| {_cell(facts['ratio'], 2)} |"
        )
    head = (
        f"Split `{document['split']}`, {document['prompts']['count']} prompts, first seed {document['seed']}, dense, "
        f"weights {document['model']['weights_sha256'][:12]}. Command: `{document['command']}`.\n"
    )
    return "\n".join([head, *rows, "", *spread]) + "\n"


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(cls=console.Single)
def pruning_signals(
    out: Annotated[Path | None, typer.Option("--out", "-o", help="JSON file to write.")] = None,
    model: Annotated[str, typer.Option("--model", help="demo, or a folder of a trained demo model.")] = "demo",
    prompts: Annotated[
        int, typer.Option("--prompts", min=1, help="First N prompts of the development split.")
    ] = DEFAULT_PROMPTS,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the first prompt; prompt i takes seed + i.")] = 0,
    table: Annotated[
        Path | None, typer.Option("--table", help="Print the tables of a written file; runs nothing.")
    ] = None,
    into: Annotated[Path | None, typer.Option("--into", help="With --table: page whose block is replaced.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else there.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show tracebacks and debug messages.")] = False,
) -> None:
    """Check on dense pictures with known objects what entropy tells about them."""

    def work() -> None:
        if table is not None:
            document = read_results(table, ("scales", "bits_nats"), "this command")
            show(table, into, "pruning signals", whole(markdown, document, path=table))
            return
        if out is None:
            raise ToprovarError("--out is needed", "name the file to write: --out docs/data/demo_pruning_signals.json")
        command = shlex.join(["python", "-m", "toprovar.tools.evaluation.pruning_signals", *sys.argv[1:]])
        with console.progress("signals") as advance:
            document = run_signals(model, prompts, seed, command, advance)
        write_json(out, document)
        if as_json:
            console.print_json(document)
        else:
            sys.stdout.write(markdown(document))
        console.say(f"wrote {out} ({prompts} prompts)")

    code = console.run_command(work, verbose)
    if code:
        raise typer.Exit(code)


if __name__ == "__main__":
    app(prog_name="python -m toprovar.tools.evaluation.pruning_signals")
