"""Trains the demo model in stages, each within a given time.

    python -m toprovar.tools.train_demo.train all --data .data/demo --out DIR --minutes 24

or stage by stage, where a later call goes on from the working folder `--work-dir` of an earlier one:

    ... train tokenizer=360 transformer-a=rest@0:0.3 --data .data/demo --work-dir .data/demo_work --deadline 570
    ... train transformer-a=200@0.3:1 transformer-b=rest@0:0.4 --data ... --work-dir ... --deadline 570
    ... train transformer-b=rest@0.4:1 finish --data ... --work-dir ... --deadline 570

A stage is NAME[=SECONDS|rest][@FROM:TO]; FROM:TO is the part of the stage's learning-rate schedule that the call covers
(0:1 if left out). Stages: tokenizer, decoder (the tokenizer's decoder alone, codes fixed), classifier (the judge of
`toprovar evaluate demo`), transformer-a (first seven scales), transformer-b (all ten), transformer-c (all ten, with
many more coarse views of scenes between), finish.

With several GPUs, `torchrun --nproc-per-node N -m toprovar.tools.train_demo.train ...` shares the transformer stages.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
import re
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toprovar.runtime.errors import EXIT_ENVIRONMENT, EXIT_INTERRUPTED, ToprovarError
from toprovar.runtime.json_files import check_folder

if TYPE_CHECKING:
    from toprovar.exporter.infinity.config import InfinityConfig
    from toprovar.exporter.infinity.tokenizer import BitTokenizer
    from toprovar.tools.train_demo.bank import Bank

STAGES = ("tokenizer", "decoder", "classifier", "transformer-a", "transformer-b", "transformer-c", "finish")
# Shares of `all --minutes`; the finish takes what its two sheets and the metrics need.
ALL_SHARES = {
    "tokenizer": 0.15,
    "decoder": 0.1,
    "classifier": 0.05,
    "transformer-a": 0.14,
    "transformer-b": 0.35,
    "transformer-c": 0.15,
}
STAGE_TAIL_S = 35.0  # kept back of a deadline for metrics, sheets and files
FINISH_S = 60.0
LARGEST_SEED = 2**32  # steps and processes add to it, and generators take 64 bits
_STAGE = re.compile(r"([a-z-]+)(?:=(rest|\d+(?:\.\d+)?))?(?:@([\d.]+):([\d.]+))?")


@dataclass(frozen=True)
class StageRequest:
    """seconds: None means up to the deadline."""

    name: str
    seconds: float | None
    span: tuple[float, float]


def parse_stage(text: str) -> StageRequest:
    match = _STAGE.fullmatch(text)
    if match is None or match[1] not in STAGES:
        raise ToprovarError(
            f"unknown stage {text!r}; expected NAME[=SECONDS|rest][@FROM:TO] with NAME one of {', '.join(STAGES)}"
        )
    span = (float(match[3]), float(match[4])) if match[3] else (0.0, 1.0)
    if not 0 <= span[0] < span[1] <= 1:
        raise ToprovarError(f"stage {text!r}: the part {span[0]:g}:{span[1]:g} is not within 0:1")
    return StageRequest(match[1], None if match[2] in (None, "rest") else float(match[2]), span)


def requests_for_all(minutes: float) -> list[StageRequest]:
    return [
        *(StageRequest(name, share * minutes * 60, (0.0, 1.0)) for name, share in ALL_SHARES.items()),
        StageRequest("finish", None, (0.0, 1.0)),
    ]


class Session:
    """One call: loads the data once, runs stages, copies results to the output folder."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch

        from toprovar.exporter.schedules import schedule_for
        from toprovar.runtime.word_tokenizer import WordTokenizer, vocabulary_from_texts
        from toprovar.tools.train_demo import captions, state
        from toprovar.tools.train_demo.data import Composer, load_sprites
        from toprovar.tools.train_demo.workers import local_device, start_workers

        self.options = options
        self.workers = start_workers(options.device)
        self.started = time.monotonic()
        self.run: Path = options.work_dir
        self.run.mkdir(parents=True, exist_ok=True)
        self.device = local_device(options.device)
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
        self.log = state.Log(self.run / "log.jsonl", silent=not self.workers.is_first)
        self.schedule = schedule_for(1.0, "0.25M")
        self.composer = Composer(load_sprites(options.data, options.concepts).to(self.device))
        concepts = self.composer.sprites.concepts
        self.words = WordTokenizer(vocabulary_from_texts(captions.vocabulary_texts(concepts)))
        self._tokenizer: BitTokenizer | None = None
        self._bank: Bank | None = None
        self._judging: tuple[Bank, Bank] | None = None
        self.log(event="data", concepts=len(concepts), sprites=len(self.composer.sprites.index), words=self.words.size)

    @property
    def left_s(self) -> float:
        return self.options.deadline - (time.monotonic() - self.started)

    def seconds_for(self, request: StageRequest, before_finish: bool = False) -> float:
        """Training time of a stage, so that its own tail, or the finish, still fits before the deadline."""
        available = self.left_s - (FINISH_S if before_finish else STAGE_TAIL_S) * self.scale
        return max(1.0, available if request.seconds is None else min(request.seconds, available))

    @property
    def scale(self) -> float:
        return 0.1 if self.options.rehearsal else 1.0

    @property
    def config(self) -> InfinityConfig:
        from toprovar.tools.train_demo.transformer_stage import SIZES

        if self.options.rehearsal:
            return dataclasses.replace(SIZES["S"], depth=2, width=96, ffn_width=192)
        return SIZES[self.options.size]

    def tokenizer(self) -> BitTokenizer:
        from toprovar.tools.train_demo.tokenizer_stage import load_tokenizer

        if self._tokenizer is None:
            self.use_tokenizer(load_tokenizer(self.run, self.device))
        assert self._tokenizer is not None
        return self._tokenizer

    def use_tokenizer(self, tokenizer: BitTokenizer) -> None:
        """Sets the tokenizer and drops the latents of another one."""
        self._tokenizer, self._bank, self._judging = tokenizer, None, None

    def training_bank(self) -> Bank:
        from toprovar.tools.train_demo import state
        from toprovar.tools.train_demo.bank import CAPTIONS_PER_SCENE, build_bank

        if self._bank is None:
            small = self.options.rehearsal
            began = time.monotonic()
            # Another pool for every call that goes on, from the steps already made, and for every worker.
            steps = int(state.read_json(self.run / "transformer.json").get("step", 0))
            seed = self.options.seed + steps + 1_000_003 * self.workers.rank
            self._bank = build_bank(
                self.tokenizer(),
                self.composer,
                self.words,
                seed=seed,
                pool=24 if small else self.options.pool,
                singles=24 if small else None,
                versions=CAPTIONS_PER_SCENE,
            )
            rows = {kind: len(ids) for kind, ids in self._bank.captions.items()}
            self.log(stage="cache", rows=rows, pool_seed=seed, seconds=time.monotonic() - began)
        return self._bank

    def judging_banks(self) -> tuple[Bank, Bank]:
        """Validation pictures of seen drawings, and of held-out ones."""
        from toprovar.tools.train_demo.bank import build_bank

        if self._judging is None:
            count = 6 if self.options.rehearsal else 384
            tokenizer, composer, words = self.tokenizer(), self.composer, self.words
            validation = build_bank(tokenizer, composer, words, seed=71, pool=count, singles=count)
            hidden = build_bank(tokenizer, composer, words, seed=72, pool=count, singles=count, held_out=True)
            self._judging = validation, hidden
        return self._judging

    def save_metrics(self, name: str, facts: Any) -> None:
        from toprovar.tools.train_demo import state

        path = self.run / "metrics.json"
        document = state.read_json(path)
        document[name] = facts
        document["facts"] = {
            "seed": self.options.seed,
            "size": self.options.size,
            "workers": self.workers.count,
            "device": self.device_name(),
            "concepts": len(self.composer.sprites.concepts),
            "sprites": len(self.composer.sprites.index),
            "words": self.words.size,
        }
        state.write_json(path, document)

    def device_name(self) -> str:
        import torch

        return torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu"

    # --- Stages ---

    def run_tokenizer(self, request: StageRequest) -> None:
        import torch

        from toprovar.tools.train_demo import tokenizer_stage as stage
        from toprovar.tools.train_demo.sheet import save_sheet

        small = self.options.rehearsal
        tokenizer = stage.train_tokenizer(
            self.run,
            self.composer,
            self.schedule,
            self.seconds_for(request),
            seed=self.options.seed,
            batch=2 if small else 64,
            compile_model=self.options.compile,
            log=self.log,
            max_steps=self.options.max_steps,
            widths=(32, 32, 32, 32) if small else stage.WIDTHS,
            span=request.span,
            part=stage.DECODER if request.name == "decoder" else stage.WHOLE,
        )
        self.use_tokenizer(tokenizer)
        metrics = stage.tokenizer_metrics(tokenizer, self.composer, self.schedule, 4 if small else 64)
        self.log(stage=request.name, event="done", **metrics)
        self.save_metrics("tokenizer", metrics)
        self.copy_results(finished=False)
        images = stage.validation_images(self.composer, 8, seed=3)
        with torch.no_grad():
            pairs = [x for image in images.values() for x in (image, self._reconstructed(image))]
        save_sheet(torch.cat(pairs), [], self.run / "sheet_tokenizer.png")

    def _reconstructed(self, image: Any) -> Any:
        from toprovar.exporter.infinity.tokenizer import quantise_residual

        tokenizer = self.tokenizer()
        return tokenizer.decode(quantise_residual(tokenizer.encode(image).float(), self.schedule).summed)

    def run_classifier(self, request: StageRequest) -> None:
        from toprovar.tools.train_demo.classifier_stage import train_classifier

        small = self.options.rehearsal
        metrics = train_classifier(
            self.run,
            self.composer,
            self.tokenizer(),
            self.schedule,
            self.seconds_for(request),
            seed=self.options.seed,
            pool=48 if small else 60_000,
            batch=32 if small else 512,
            log=self.log,
            max_steps=self.options.max_steps,
        )
        self.log(stage="classifier", event="done", **metrics)
        self.save_metrics("classifier", metrics)

    def run_transformer(self, request: StageRequest, before_finish: bool) -> None:
        from toprovar.tools.train_demo import transformer_stage as stage

        phase = stage.PHASES[request.name]
        if self.options.rehearsal:
            between = phase.between and dataclasses.replace(phase.between, batch=6)
            phase = dataclasses.replace(phase, batch=6, between=between)
        training = self.training_bank()
        if self.workers.is_first:
            self.judging_banks()
        model = stage.train_transformer(
            self.run,
            training,
            self.words,
            self.schedule,
            phase,
            self.seconds_for(request, before_finish),
            config=self.config,
            seed=self.options.seed,
            compile_model=self.options.compile,
            log=self.log,
            max_steps=self.options.max_steps,
            span=request.span,
            workers=self.workers,
        )
        if not self.workers.is_first:
            return
        self.copy_results(finished=False)  # before the judging, so that nothing trained is lost to it
        if not before_finish:  # which judges the same model as shipped
            self.judge(request.name, model, phase.scales)

    def judge(self, name: str, model: Any, scales: int) -> None:
        from toprovar.tools.train_demo import captions, state
        from toprovar.tools.train_demo import transformer_stage as stage
        from toprovar.tools.train_demo.forward import TrainingForward
        from toprovar.tools.train_demo.sheet import save_sheet

        small = self.options.rehearsal
        validation, hidden = self.judging_banks()
        schedule, full = self.schedule[:scales], self.schedule[-1]
        model = model.eval()
        forward = TrainingForward(model.infinity, schedule, self.device, compile_block=False)
        metrics: dict[str, Any] = {
            "loss_nats_per_bit_by_scale": stage.clean_losses(model, forward, schedule, validation),
            "loss_held_out_nats_per_bit_by_scale": stage.clean_losses(model, forward, schedule, hidden),
            "views": state.read_json(self.run / "transformer.json").get("views", {}),
            "steps": state.read_json(self.run / "transformer.json").get("step", 0),
        }
        for key, held_out in (("retrieval", False), ("retrieval_held_out", True)):
            metrics[key] = stage.retrieval(
                model,
                self.tokenizer(),
                self.words,
                self.composer,
                schedule,
                full,
                held_out=held_out,
                count=4 if small else 128,
            )
        self.log(stage=name, event="judged", **metrics)
        self.save_metrics(name, metrics)
        scenes = stage.sheet_scenes(self.composer)[:: 12 if small else 1]
        rng = random.Random(0)
        texts = [captions.caption(s, self.composer.sprites.concepts, rng, vary=False) for s in scenes]
        images = stage.draw_scenes(model, self.tokenizer(), self.words, schedule, texts, full=full)
        save_sheet(images, texts, self.run / "sheet.png", cell=160)

    def run_finish(self) -> None:
        from toprovar.tools.train_demo import tokenizer_stage
        from toprovar.tools.train_demo.finish import is_finite, write_demo
        from toprovar.tools.train_demo.transformer_stage import load_averaged

        model = load_averaged(self.run, self.config, self.words, self.device)
        if not is_finite(model):
            raise ToprovarError(f"{self.run}: the averaged weights are not finite", "train again with another seed")
        images = tokenizer_stage.validation_images(self.composer, 4 if self.options.rehearsal else 64)
        metadata = {"schema_version": "1", "seed": str(self.options.seed), "tool": "toprovar.tools.train_demo"}
        files = write_demo(self.run / "demo", model, self.tokenizer(), self.words, self.schedule, images, metadata)
        self.write_companions(self.run / "demo")
        self.save_metrics("files", files)
        self.log(stage="finish", **files)
        self.use_tokenizer(self.tokenizer())  # latents of the rounded encoder
        self.judge("shipped", model, len(self.schedule))

    def write_companions(self, folder: Path) -> None:
        """What makes the folder a model that the commands load: settings and names, and the judge with its references.

        Settings are the packaged ones: sampling is tuned afterwards (toprovar.tools.evaluation.tuning).
        """
        from toprovar.exporter.model import MODEL_FILE, PACKAGED
        from toprovar.tools.evaluation import classifier
        from toprovar.tools.evaluation.concepts import write_concepts
        from toprovar.tools.evaluation.reference import write_reference_files

        shutil.copyfile(PACKAGED["demo"] / MODEL_FILE, folder / MODEL_FILE)
        write_concepts(folder, self.composer.sprites.concepts)
        if not (self.run / classifier.FILE).exists():
            return
        shutil.copyfile(self.run / classifier.FILE, folder / classifier.FILE)
        if not self.options.rehearsal:  # whose few concepts do not fill the test split
            judge = classifier.load_classifier(folder / classifier.FILE).to(self.device)
            write_reference_files(folder, self.composer, self.tokenizer(), self.schedule, judge)

    def copy_results(self, finished: bool) -> None:
        """Copies what a later call, or at the end the repository, needs: at most eight files until the finish.

        The finished set replaces the state that an earlier stage of the same call copied.
        """
        if self.options.out is None:
            return
        self.options.out.mkdir(parents=True, exist_ok=True)
        kept = ["metrics.json", "log.jsonl", "sheet.png", "classifier.safetensors"]
        state_only = ["transformer.json"]
        for stem in ("tokenizer", "transformer_ema"):
            state_only += [path.name for path in sorted(self.run.glob(f"{stem}-*.safetensors"))]
        if finished:
            kept += sorted(f"demo/{path.name}" for path in (self.run / "demo").iterdir())
            for name in state_only:
                (self.options.out / name).unlink(missing_ok=True)
        else:
            kept += state_only
        for name in kept:
            source = self.run / name
            if source.exists():
                shutil.copyfile(source, self.options.out / Path(name).name)


def train(options: argparse.Namespace) -> None:
    from toprovar.tools.train_demo.workers import stop_workers

    requests = (
        requests_for_all(options.minutes) if options.stages == ["all"] else [parse_stage(s) for s in options.stages]
    )
    session = Session(options)
    for i, request in enumerate(requests):
        before_finish = i + 1 < len(requests) and requests[i + 1].name == "finish"
        if request.name.startswith("transformer"):
            session.run_transformer(request, before_finish)
        elif session.workers.is_first:
            if request.name in ("tokenizer", "decoder"):
                session.run_tokenizer(request)
            elif request.name == "classifier":
                session.run_classifier(request)
            else:
                session.run_finish()
        session.workers.wait()
        if session.workers.is_first:
            session.copy_results(finished=request.name == "finish")
    stop_workers(session.workers)
    if not session.workers.is_first:
        return
    last = "demo" if requests[-1].name == "finish" else "state"
    print(
        f"wrote {options.out or options.work_dir} ({last}) in {time.monotonic() - session.started:.0f} s; "
        "next: look at sheet.png and metrics.json"
    )


def check_options(options: argparse.Namespace) -> None:
    """Raises: ToprovarError for the first value that no training could have, or a folder that takes no files."""
    for name, least in (("pool", 1), ("concepts", 1), ("max_steps", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise ToprovarError(f"--{name.replace('_', '-')} is {value}; expected {least} or more", "see --help")
    for name in ("minutes", "deadline"):
        value = getattr(options, name)
        if not (math.isfinite(value) and value > 0):
            raise ToprovarError(f"--{name} is {value}; expected a finite number above 0", "see --help")
    if not re.fullmatch(r"(cpu|cuda)(:\d+)?", options.device):
        raise ToprovarError(f"unknown device {options.device}", "pass --device cuda, or --device cpu")
    if not 0 <= options.seed <= LARGEST_SEED:
        raise ToprovarError(f"--seed is {options.seed}; expected 0 to {LARGEST_SEED}", "see --help")
    for folder in (options.work_dir, options.out):
        if folder is not None:
            check_folder(folder)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m toprovar.tools.train_demo.train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("stages", nargs="+", help='"all", or stages NAME[=SECONDS|rest][@FROM:TO]')
    parser.add_argument("--data", type=Path, required=True, help="folder that `prepare` wrote")
    parser.add_argument("--work-dir", type=Path, help="working folder with full state (default: <out>/work)")
    parser.add_argument("--out", type=Path, help="folder for the small results; flat")
    parser.add_argument("--minutes", type=float, default=24.0, help="time for `all`, in minutes (default 24)")
    parser.add_argument("--deadline", type=float, help="seconds after which the call should have ended (default: none)")
    parser.add_argument("--device", default="cuda", help="cuda or cpu (default cuda)")
    parser.add_argument("--size", choices=("S", "M"), default="M", help="transformer: S 8 x 192, M 8 x 256 (default M)")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights, scenes and flips (default 1)")
    parser.add_argument("--pool", type=int, default=40_000, help="cached scenes and patterns (default 40000)")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="use torch.compile")
    parser.add_argument("--concepts", type=int, help="use only that many concepts (default: all)")
    parser.add_argument("--max-steps", type=int, help="end every training stage after that many steps")
    parser.add_argument("--rehearsal", action="store_true", help="tiny widths, batches and pools, to try the stages")
    options = parser.parse_args(arguments)
    try:
        if options.work_dir is None:
            if options.out is None:
                raise ToprovarError("neither --work-dir nor --out is given", "say where to write: --out DIR")
            options.work_dir = options.out / "work"
        if options.deadline is None:
            options.deadline = options.minutes * 60 if options.stages == ["all"] else 1e9
        check_options(options)
        import torch

        if options.device.startswith("cuda") and not torch.cuda.is_available():
            print(
                "error: no CUDA device here\n  hint: rehearse on the CPU: --device cpu --no-compile --rehearsal",
                file=sys.stderr,
            )
            return EXIT_ENVIRONMENT
        train(options)
    except ToprovarError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the last saved state", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
