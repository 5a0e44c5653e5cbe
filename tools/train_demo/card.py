"""Writes the numbers of a training run into the model card.

python -m toprovar.tools.train_demo.card --metrics metrics.json --card exporter/demo/MODEL_CARD.md
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from toprovar.runtime.errors import ToprovarError

START, END = "<!-- numbers: written by `python -m toprovar.tools.train_demo.card` -->", "<!-- end of numbers -->"


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [_row(head), _row(["---"] * len(head)), *(_row(row) for row in rows), ""]


def numbers_from_metrics(metrics: dict[str, Any]) -> str:
    """Markdown of the card's numbers. Raises: ToprovarError if the run is not finished."""
    missing = [key for key in ("tokenizer", "files", "shipped", "facts") if key not in metrics]
    if missing:
        raise ToprovarError(f"the metrics have no {missing[0]!r}; the run is not finished", "run the stage finish")
    shipped, files, facts = metrics["shipped"], metrics["files"], metrics["facts"]
    sizes = files["size_bytes"]
    lines = [
        f"Trained on {facts['device']} with seed {facts['seed']}; {shipped['steps']} transformer steps; pictures seen: "
        + ", ".join(f"{count} of kind {kind}" for kind, count in shipped["views"].items())
        + ".",
        f"Parameters: {', '.join(f'{name} {count:,}' for name, count in files['parameters'].items())}. "
        f"Files: {sum(sizes.values()) / 1e6:.1f} MB together; decoder stored as {files['decoder_dtype']}.",
        "",
        "Tokenizer, PSNR in dB on fixed pictures (64 per kind), after training and as shipped:",
        "",
    ]
    lines += _table(
        ["kind", "fp32", "as shipped", "after each scale"],
        [
            [
                kind.replace("_", " "),
                f"{files['psnr_db_unrounded'][kind]:.1f}",
                f"{files['psnr_db_shipped'][kind]:.1f}",
                " ".join(f"{value:.1f}" for value in metrics["tokenizer"]["psnr_db_by_scale"][kind]),
            ]
            for kind in files["psnr_db_shipped"]
        ],
    )
    lines += ["Transformer as shipped, cross entropy in nats per bit, teacher-forced, without flips, per scale:", ""]
    losses = {
        **shipped["loss_nats_per_bit_by_scale"],
        **{f"held-out {kind}": v for kind, v in shipped["loss_held_out_nats_per_bit_by_scale"].items()},
    }
    lines += _table(["kind", "scales 0 to 9"], [[k, " ".join(f"{x:.3f}" for x in v)] for k, v in losses.items()])
    lines += [
        "Drawn singles (guidance 2, temperature 0.7) whose nearest reference is the concept asked for, among all "
        "concepts in that style and colour, at 32 × 32 pixels:",
        "",
    ]
    rows = [
        [name, f"{100 * found['top1']:.0f} %", f"{100 * found['top5']:.0f} %", f"{found['count']:.0f}"]
        for name, found in (("seen", shipped["retrieval"]), ("held out", shipped["retrieval_held_out"]))
        if found
    ]
    lines += _table(["prompts", "first", "among five", "count"], rows)
    if "size_S" in metrics:
        lines += _size_lines(shipped, metrics["size_S"]["shipped"])
    if "classifier" in metrics:
        judge = metrics["classifier"]
        clean, spoiled = (100 * judge[key]["concept"] for key in ("clean", "through_tokenizer"))
        lines += [
            f"Classifier ({judge['parameters']:,} parameters): names {clean:.2f} % of new clean crops right, and "
            f"{spoiled:.2f} % of those that went through the tokenizer with flipped bits.",
        ]
    return "\n".join(lines).rstrip()


def _size_lines(larger: dict[str, Any], smaller: dict[str, Any]) -> list[str]:
    """The decision between S and M: mean loss over scales, and the nearest-reference test, side by side."""

    def mean(losses: list[float]) -> str:
        return f"{sum(losses) / len(losses):.3f}"

    rows = []
    for prefix, key in (("", "loss_nats_per_bit_by_scale"), ("held-out ", "loss_held_out_nats_per_bit_by_scale")):
        rows += [[prefix + kind, mean(smaller[key][kind]), mean(larger[key][kind])] for kind in larger[key]]
    for name, key in (("nearest reference, seen", "retrieval"), ("nearest reference, held out", "retrieval_held_out")):
        rows.append([name, *(f"{100 * size[key]['top1']:.0f} %" for size in (smaller, larger))])
    rows.append(["transformer steps", f"{smaller['steps']}", f"{larger['steps']}"])
    return [
        "Size S (8 layers, width 192, the earlier model) beside M, both as shipped; losses are means over scales in "
        "nats per bit:",
        "",
        *_table(["", "S", "M"], rows),
    ]


def fill_card(card: str, numbers: str) -> str:
    """The card with its numbers replaced. Raises: ToprovarError if the markers are missing."""
    if START not in card or END not in card:
        raise ToprovarError("the card has no place for numbers", f"put these lines into it: {START} and {END}")
    before, rest = card.split(START, 1)
    return f"{before}{START}\n{numbers}\n{END}{rest.split(END, 1)[1]}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m toprovar.tools.train_demo.card", description=__doc__)
    parser.add_argument("--metrics", type=Path, required=True, help="metrics.json of a finished run")
    parser.add_argument("--card", type=Path, required=True, help="model card to update in place")
    options = parser.parse_args(arguments)
    try:
        numbers = numbers_from_metrics(json.loads(options.metrics.read_text(encoding="utf-8")))
        text = fill_card(options.card.read_text(encoding="utf-8"), numbers)
    except ToprovarError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    partial = options.card.with_name(options.card.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(options.card)
    print(f"wrote the numbers of {options.metrics} into {options.card}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
