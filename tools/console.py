"""How commands speak: results to stdout, everything else to stderr, one message per fault."""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from toprovar.runtime.errors import EXIT_INTERRUPTED, ToprovarError

err = Console(stderr=True, highlight=False, soft_wrap=True)
out = Console(highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=True, allow_nan=False) + "\n")


def say(text: str) -> None:
    err.print(text, markup=False)


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, a plain line about every tenth elsewhere. Yields advance(done, total)."""
    if err.is_terminal:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=err, transient=True) as bar:
            task = bar.add_task(what, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
    else:
        told = -1

        def advance(done: int, total: int) -> None:
            nonlocal told
            tenth = done * 10 // max(total, 1)
            if tenth > told:
                told = tenth
                say(f"{what}: {done}/{total}")

        yield advance


def run_command(command: Callable[[], Any], verbose: bool = False) -> int:
    """Runs a command's body and turns its end into an exit code; faults of the user print without a traceback."""
    logging.basicConfig(level=logging.DEBUG if verbose else logging.WARNING, format="%(levelname)s: %(message)s")
    logging.getLogger("toprovar").setLevel(logging.DEBUG if verbose else logging.WARNING)
    for noisy in ("PIL", "matplotlib"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    try:
        command()
        sys.stdout.flush()
    except ToprovarError as error:
        if verbose:
            traceback.print_exc()
        say(f"error: {error.message}")
        if error.hint:
            say(f"  hint: {error.hint}")
        return error.exit_code
    except KeyboardInterrupt:
        say("interrupted; what was finished is kept, the same command goes on from there")
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return 0
