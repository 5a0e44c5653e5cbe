"""What perfect pictures score: the ceiling of the evaluation, and the features that Fréchet distances are taken to.

    python -m toprovar.tools.evaluation.reference --data PACK [--out exporter/demo]

Draws the test prompts from the data pack, as they are and through the tokenizer, and judges them like any picture.
Reference features come from other pictures of the same distribution of prompts, so that real pictures have a distance
too: the floor. The training's last stage calls `write_reference_files`; users do not need the pack.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from toprovar.runtime.json_files import write_json
from toprovar.tools import console
from toprovar.tools.evaluation import classifier as judges
from toprovar.tools.evaluation import frechet
from toprovar.tools.evaluation.classifier import DrawingClassifier, load_classifier
from toprovar.tools.evaluation.ground_truth import REFERENCE_SCHEMA_VERSION, REFERENCE_SCORES
from toprovar.tools.evaluation.journal import Record
from toprovar.tools.evaluation.prompts import Prompt, draw_prompts, prompts_digest, prompts_of
from toprovar.tools.evaluation.results import frechet_facts, scores
from toprovar.tools.evaluation.scoring import crop_features, score_pictures

if TYPE_CHECKING:
    from torch import Tensor

    from toprovar.exporter.infinity.tokenizer import BitTokenizer
    from toprovar.exporter.schedules import Schedule
    from toprovar.tools.train_demo.data import Composer

ROUNDS = 8  # reference pictures per test prompt
FIRST_SEED = 30_001
BATCH = 32


def _judged(
    prompts: Sequence[Prompt], draw: Callable[[Sequence[Prompt]], Tensor], judge: DrawingClassifier, name: str
) -> list[Record]:
    records = []
    with console.progress(name) as advance:
        for start in range(0, len(prompts), BATCH):
            part = prompts[start : start + BATCH]
            for prompt, verdict in zip(part, score_pictures(draw(part), [p.scene for p in part], judge), strict=True):
                records.append(Record(prompt.index, name, 0, 0.0, 1.0, 100.0, verdict.facts(), verdict.features))
            advance(min(start + BATCH, len(prompts)), len(prompts))
    return records


def write_reference_files(
    folder: Path,
    composer: Composer,
    tokenizer: BitTokenizer,
    schedule: Schedule,
    judge: DrawingClassifier,
    *,
    rounds: int = ROUNDS,
    counts: dict[str, dict[str, int]] | None = None,
) -> dict[str, Any]:
    """Writes `reference_features.safetensors` and `reference_scores.json` into the folder that holds the classifier.

    judge:  the classifier as stored in `folder`; pictures and networks stay on the composer's device
    rounds: pictures per test prompt behind the reference features, drawn with other seeds
    counts: of the splits, for tests with few concepts
    Returns: the document of `reference_scores.json`.
    """
    import torch

    from toprovar.exporter.infinity.tokenizer import quantise_residual

    device = composer.device
    concepts = composer.sprites.concepts
    prompts = prompts_of("test", concepts, counts)
    judge = judge.to(device).eval()

    def real(part: Sequence[Prompt]) -> Tensor:
        # 8 bits, as every picture file has
        return ((composer.draw([p.scene for p in part]) + 1) * 127.5).round() / 127.5 - 1

    @torch.inference_mode()
    def through_tokenizer(part: Sequence[Prompt]) -> Tensor:
        codes = quantise_residual(tokenizer.encode(real(part)).float(), schedule)
        return tokenizer.decode(codes.summed).float()

    others = [prompt for i in range(rounds) for prompt in draw_prompts(concepts, FIRST_SEED + i, "test", counts=counts)]
    rows = []
    with console.progress("reference features") as advance:
        for start in range(0, len(others), BATCH):
            part = others[start : start + BATCH]
            rows.append(crop_features(real(part), [p.scene for p in part], judge))
            advance(min(start + BATCH, len(others)), len(others))
    features = frechet.features_of(np.concatenate(rows))
    judge_sha256 = hashlib.sha256((folder / judges.FILE).read_bytes()).hexdigest()
    frechet.write_reference(
        folder / frechet.FILE,
        features,
        {"pictures": str(len(others)), "crops": str(features.count), "judge_sha256": judge_sha256},
    )
    entries = []
    for name, draw in (("real pictures", real), ("real, through the tokenizer", through_tokenizer)):
        records = _judged(prompts, draw, judge, name)
        entries.append({"name": name, **scores(records, prompts), "frechet": frechet_facts(records, features, None)})
    document = {
        "schema_version": REFERENCE_SCHEMA_VERSION,
        "split": "test",
        "prompts_sha256": prompts_digest(prompts),
        "judge_sha256": judge_sha256,
        "entries": entries,
    }
    write_json(folder / REFERENCE_SCORES, document)
    return document


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(cls=console.Single)
def reference(
    data: Annotated[Path, typer.Option("--data", help="Folder that train_demo.prepare wrote.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder that holds the classifier. Default: the packaged demo's.")
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Reference pictures per test prompt.")] = ROUNDS,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show tracebacks and debug messages.")] = False,
) -> None:
    """Judge real pictures of the test prompts: scores and features that every evaluation is shown beside."""

    def work() -> None:
        from toprovar.exporter.model import PACKAGED, load_model
        from toprovar.runtime.errors import ToprovarError
        from toprovar.tools.evaluation.concepts import read_concepts
        from toprovar.tools.train_demo.data import Composer, load_sprites

        folder = out or PACKAGED["demo"]
        judge = load_classifier(folder / judges.FILE)
        sprites = load_sprites(data)
        if sprites.concepts != read_concepts(folder):
            raise ToprovarError(
                f"{data} holds other concepts than {folder}", "take the pack that the model was trained on"
            )
        model = load_model(str(folder) if out else "demo")
        if model.tokenizer is None:
            raise ToprovarError(f"model {folder} has no tokenizer", "name one in its model.json")
        document = write_reference_files(
            folder, Composer(sprites), model.tokenizer, model.schedule, judge, rounds=rounds
        )
        for entry in document["entries"]:
            console.say(f"{entry['name']}: all right {entry['aspects']['all']['share']:.3f}")
        console.say(f"wrote {folder / frechet.FILE} and {REFERENCE_SCORES}; next: toprovar evaluate demo")

    code = console.run_command(work, verbose)
    if code:
        raise typer.Exit(code)


if __name__ == "__main__":
    app(prog_name="python -m toprovar.tools.evaluation.reference")
