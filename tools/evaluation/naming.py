"""Blind naming: does someone who sees only a picture say what was asked for?

    python -m toprovar.tools.evaluation.naming --out DIR [--seed S]          # 32 pictures, a key, a form for answers
    python -m toprovar.tools.evaluation.naming --out DIR --score ANSWERS     # the protocol

Prompts are fixed (naming_prompts.txt): of the concepts in sorted order every seventh, from the fourth on, the first 32;
style and plain background go round, and a style that training left out of a concept gives way to the next. Pictures are
shuffled and named by number alone; the key is a file of its own, not to be opened before answering.

An answer is right if it is one of the accepted names: the concept's name or one of its tags, compared as sets of words,
without case, articles, plurals, order and the words of FILLERS. Nothing else is accepted, and no one judges.
"""

from __future__ import annotations

import hashlib
import random
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.json_files import check_folder, read_json, read_text, write_bytes, write_json
from toprovar.runtime.noise import MAX_SEED, check_seed
from toprovar.runtime.version import VERSION
from toprovar.runtime.word_tokenizer import words_of
from toprovar.tools import console
from toprovar.tools.evaluation.concepts import read_concepts
from toprovar.tools.evaluation.ground_truth import ground_truth_folder
from toprovar.tools.evaluation.intervals import wilson_interval
from toprovar.tools.train_demo.captions import COLOUR_NAMES, FAMILIES, Concept, held_out_styles

SCHEMA_VERSION = 1
COUNT, STEP, FIRST = 32, 7, 3
STYLES = tuple(style for family in FAMILIES for style in family)
PROMPTS_FILE = Path(__file__).parent / "naming_prompts.txt"
KEY_FILE, FORM_FILE, PROTOCOL_FILE, TABLE_FILE = "key.json", "answers.txt", "protocol.json", "protocol.md"
FILLERS = frozenset({"a", "an", "the", "of", "picture", "image", "drawing", "icon", "emoji", "cartoon"})
MAX_ANSWERS_BYTES = 2**20
_PLURALS = (("ies", "y"), ("ves", "f"), ("sses", "ss"), ("xes", "x"), ("ches", "ch"), ("shes", "sh"), ("s", ""))
_PROMPT = re.compile(r"(.+), (\w+) style, on (\w+)")


def fixed_prompts(concepts: Sequence[Concept]) -> list[str]:
    """The list by its rule. Raises: ToprovarError if the concepts are too few."""
    ordered = sorted(concepts, key=lambda concept: concept.name)[FIRST::STEP][:COUNT]
    if len(ordered) < COUNT:
        raise ToprovarError(f"{len(concepts)} concepts give {len(ordered)} prompts; expected {COUNT}")
    prompts = []
    for i, concept in enumerate(ordered):
        turned = [STYLES[(i + j) % len(STYLES)] for j in range(len(STYLES))]
        hidden = held_out_styles(concept)
        style = next(style for style in turned if style in concept.styles and style not in hidden)
        prompts.append(f"{concept.name}, {style} style, on {COLOUR_NAMES[i % len(COLOUR_NAMES)]}")
    return prompts


def naming_prompts() -> list[str]:
    """The committed list."""
    from toprovar.calibrate.statistics import read_prompts

    return read_prompts(PROMPTS_FILE)


def singular(word: str) -> str:
    """A word without its plural ending, the same for both sides of a comparison."""
    for ending, instead in _PLURALS:
        if word.endswith(ending) and len(word) > len(ending) + 1 and not word.endswith(("ss", "us", "is")):
            return word[: -len(ending)] + instead
    return word


def bare(text: str) -> frozenset[str]:
    """The words of a name that count."""
    return frozenset(singular(word) for word in words_of(text) if word not in FILLERS)


def accepted_names(concept: Concept) -> list[str]:
    return [concept.name, *concept.tags]


def is_accepted(answer: str, names: Sequence[str]) -> bool:
    """Whether an answer is one of the names; an answer without words is none."""
    words = bare(answer)
    return bool(words) and any(words == bare(name) for name in names)


def make_pictures(out: Path, model_name: str, seed: int, threads: int = 0) -> None:
    """Draws the list through a bundle and writes numbered pictures, the key and the form.

    seed: of the shuffle and of the first prompt's noise; prompt i takes seed + i
    Raises: ToprovarError if `out` holds an earlier key, so that pictures and key stay together.
    """
    from toprovar.exporter.model import load_model
    from toprovar.runtime.image_files import write_png
    from toprovar.tools.evaluation.pictures import DENSE, BundleMaker

    check_seed(seed)
    prompts = naming_prompts()
    if seed + len(prompts) - 1 > MAX_SEED:
        raise ToprovarError(f"seeds from {seed} on pass the largest, {MAX_SEED}", "give a smaller --seed")
    if (out / KEY_FILE).exists():
        raise ToprovarError(f"{out} holds the pictures of an earlier call", "choose another folder with --out")
    check_folder(out / "pictures")
    concepts = {concept.name: concept for concept in read_concepts(ground_truth_folder(model_name))}
    model = load_model(model_name)
    maker = BundleMaker(model, out / "bundles", model.guidance(), {}, threads)
    order = list(range(len(prompts)))
    random.Random(seed).shuffle(order)
    items = []
    with console.progress("draw") as advance:
        for number, i in enumerate(order, 1):
            picture = maker.make(prompts[i], seed + i, DENSE)
            file = f"pictures/{number:02d}.png"
            write_png(out / file, picture.image, {"software": f"toprovar {VERSION}"})  # no prompt: the file is blind
            name = concept_of(prompts[i])
            if name not in concepts:
                raise ToprovarError(f"{PROMPTS_FILE.name} names {name}, which the model was not trained on")
            items.append(
                {
                    "number": number,
                    "prompt": prompts[i],
                    "seed": seed + i,
                    "accepted": accepted_names(concepts[name]),
                    "picture_sha256": hashlib.sha256((out / file).read_bytes()).hexdigest(),
                }
            )
            advance(number, len(order))
    form = "# one answer per line: the number, a colon, what the picture shows\n"
    form += "".join(f"{number:02d}: \n" for number in range(1, len(order) + 1))
    write_bytes(out / FORM_FILE, form.encode())
    facts = {"name": model.name, "weights_sha256": model.weights_sha256}
    write_json(out / KEY_FILE, {"schema_version": SCHEMA_VERSION, "model": facts, "seed": seed, "items": items})
    console.say(
        f"wrote {len(order)} pictures and {FORM_FILE} to {out}; fill in the form without looking at {KEY_FILE}; next: "
        f"python -m toprovar.tools.evaluation.naming --out {console.quoted(out)} "
        f"--score {console.quoted(out / FORM_FILE)}"
    )


def concept_of(prompt: str) -> str:
    """The name in a prompt of the list. Raises: ToprovarError if it is none of the list's form."""
    match = _PROMPT.fullmatch(prompt)
    if match is None:
        raise ToprovarError(f"{prompt!r} is no plain single with a style and a background")
    return match[1]


def read_answers(path: Path) -> dict[int, str]:
    """Answers by number. Raises: ToprovarError for a line that is none, or a number that comes twice."""
    answers: dict[int, str] = {}
    for place, line in enumerate(read_text(path, f"answers {path}", MAX_ANSWERS_BYTES).splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        number, colon, answer = line.partition(":")
        if not colon or not number.strip().isdecimal():
            raise ToprovarError(f"{path}, line {place}: {line.strip()!r} is no answer", "write 07: what is shown")
        if int(number) in answers:
            raise ToprovarError(f"{path}, line {place}: number {int(number)} comes twice", "give one answer each")
        answers[int(number)] = answer.strip()
    return answers


def score_answers(key: Any, answers: dict[int, str], command: str) -> dict[str, Any]:
    """The protocol: every picture with its answer, accepted names and verdict. A missing answer is wrong.

    Raises: ToprovarError if the key is none, or an answer has no picture.
    """
    if not isinstance(key, dict) or key.get("schema_version") != SCHEMA_VERSION or not key.get("items"):
        raise ToprovarError(f"{KEY_FILE} is no key of this version", "make the pictures again")
    numbers = {item["number"] for item in key["items"]}
    if stray := sorted(set(answers) - numbers):
        raise ToprovarError(f"answer {stray[0]} has no picture; there are {min(numbers)} to {max(numbers)}")
    items = []
    for item in key["items"]:
        answer = answers.get(item["number"], "")
        items.append({**item, "answer": answer, "right": is_accepted(answer, item["accepted"])})
    right = sum(item["right"] for item in items)
    low, high = wilson_interval(right, len(items))
    return {
        "schema_version": SCHEMA_VERSION,
        "tool_version": VERSION,
        "command": command,
        "model": key["model"],
        "seed": key["seed"],
        "rule": "answer equals the name or a tag as a set of words; case, plural, order, articles and fillers left out",
        "fillers": sorted(FILLERS),
        "right": right,
        "count": len(items),
        "interval": [round(low, 4), round(high, 4)],
        "items": items,
    }


def markdown(protocol: dict[str, Any]) -> str:
    """The protocol as a table."""
    low, high = protocol["interval"]
    lines = [
        f"{protocol['right']} of {protocol['count']} pictures named right "
        f"({protocol['right'] / protocol['count']:.2f} [{low:.2f}, {high:.2f}]), seed {protocol['seed']}, weights "
        f"{protocol['model']['weights_sha256'][:12]}.",
        "",
        "| picture | prompt | answer | right |",
        "| --- | --- | --- | --- |",
    ]
    for item in protocol["items"]:
        answer = re.sub(r"[|\r\n]", " ", item["answer"]) or "–"
        lines.append(f"| {item['number']} | {item['prompt']} | {answer} | {'yes' if item['right'] else 'no'} |")
    return "\n".join(lines) + "\n"


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(cls=console.Single)
def naming(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of pictures, key, form and protocol.")],
    model: Annotated[str, typer.Option("--model", help="demo, or a folder of a trained demo model.")] = "demo",
    seed: Annotated[int, typer.Option("--seed", help="Seed of the shuffle and of the first prompt.")] = 0,
    score: Annotated[
        Path | None, typer.Option("--score", help="Filled-in form; writes the protocol, draws nothing.")
    ] = None,
    threads: Annotated[int, typer.Option("--threads", min=0, help="CPU threads; 0 takes all.")] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else there.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show tracebacks and debug messages.")] = False,
) -> None:
    """Draw 32 fixed prompts to be named blind, or score the answers."""

    def work() -> None:
        if score is None:
            console.require_packages("naming", "torch", "onnx", "onnx_ir")
            make_pictures(out, model, seed, threads)
            return
        command = shlex.join(["python", "-m", "toprovar.tools.evaluation.naming", *sys.argv[1:]])
        protocol = score_answers(read_json(out / KEY_FILE), read_answers(score), command)
        write_json(out / PROTOCOL_FILE, protocol)
        write_bytes(out / TABLE_FILE, markdown(protocol).encode())
        if as_json:
            console.print_json(protocol)
        else:
            sys.stdout.write(markdown(protocol))
        console.say(f"wrote {out / PROTOCOL_FILE} and {TABLE_FILE}")

    code = console.run_command(work, verbose)
    if code:
        raise typer.Exit(code)


if __name__ == "__main__":
    app(prog_name="python -m toprovar.tools.evaluation.naming")
