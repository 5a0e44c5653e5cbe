"""How commands speak: results to stdout, everything else to stderr, one message per fault."""

from __future__ import annotations

import difflib
import importlib.util
import json
import logging
import os
import re
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from typer.core import TyperCommand

from toprovar.runtime.errors import (
    EXIT_ENVIRONMENT,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_WRONG_INPUT,
    EnvironmentFault,
    ToprovarError,
)

# prompts and file names are data: no markup, no emoji codes, no colours by content
err = Console(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)
out = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)

UsageError: type[Exception] = typer.BadParameter.__mro__[1]  # typer brings its own copy of click, or uses click's
LONGEST_NAME = 200  # of a path in a message
INTERRUPTED = "interrupted; no half-written file is left, the same command goes on or starts again"


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=True, allow_nan=False) + "\n")


def plain(text: str) -> str:
    """Text that a terminal shows and does not obey: control characters and lone surrogates are written as escapes."""
    return "".join(
        char
        if char in "\n\t" or not (ord(char) < 32 or 127 <= ord(char) < 160 or 0xD800 <= ord(char) < 0xE000)
        else char.encode("unicode_escape", "surrogatepass").decode()
        for char in text
    )


def quoted(path: str | Path) -> str:
    """A path as a shell takes it."""
    return shlex.quote(str(path))


def say(text: str) -> None:
    err.print(plain(text))


def print_error(message: str, hint: str = "") -> None:
    say(f"error: {message}")
    if hint:
        say(f"  hint: {hint}")


@contextmanager
def progress(what: str) -> Iterator[Callable[[float, int], None]]:
    """A bar on a terminal, a plain line about every tenth elsewhere. Yields advance(done, total); done may be in
    between two whole numbers."""
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
        started = time.perf_counter()

        def advance(done: float, total: int) -> None:
            nonlocal told
            tenth = int(done * 10 // max(total, 1))
            if tenth > told:
                told = tenth
                left = (time.perf_counter() - started) / done * (total - done) if done else 0
                say(f"{what}: {int(done)}/{total}" + (f", about {left:.0f}s left" if 0 < done < total else ""))

        yield advance


def run_command(command: Callable[[], Any], verbose: bool = False) -> int:
    """Runs a command's body and turns its end into an exit code; faults of the user print without a traceback."""
    _log_to_stderr(verbose)
    logging.getLogger("toprovar").setLevel(logging.DEBUG if verbose else logging.WARNING)
    for noisy in ("PIL", "matplotlib"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    try:
        command()
        sys.stdout.flush()
    except ToprovarError as error:
        if verbose:
            traceback.print_exc()
        print_error(error.message, error.hint)
        return error.exit_code
    except KeyboardInterrupt:
        say(INTERRUPTED)
        return EXIT_INTERRUPTED
    except MemoryError:
        if verbose:
            traceback.print_exc()
        print_error("there is not enough memory for this", "close other programs, or use a larger machine")
        return EXIT_ENVIRONMENT
    except BrokenPipeError:  # the reader of our output went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except OSError as error:  # a place that no check foresaw: a name too long, a disk that fails
        if error.filename is None:
            raise
        if verbose:
            traceback.print_exc()
        name = os.fsdecode(error.filename)
        shown = name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}…"
        print_error(f"{shown} cannot be used: {(error.strerror or str(error)).lower()}", "check the path")
        return EXIT_WRONG_INPUT
    return EXIT_OK


class _LowerCase(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return plain(f"{record.levelname.lower()}: {super().format(record)}")


def _log_to_stderr(verbose: bool) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_LowerCase())
    logging.basicConfig(level=logging.DEBUG if verbose else logging.WARNING, handlers=[handler], force=True)


def require_packages(what: str, *modules: str) -> None:
    """Raises: EnvironmentFault naming the first module that `what` needs and this machine lacks."""
    for module in modules:
        try:
            found = importlib.util.find_spec(module) is not None
        except ImportError:
            found = False
        if not found:
            raise EnvironmentFault(
                f"{what} needs {module}, which is not installed", "install it:  pip install 'toprovar[torch]'"
            )


def _given(param: Any, args: Sequence[str]) -> str:
    """What an option was given on the command line, in quotes; nothing where that can't be told."""
    for option in getattr(param, "opts", ()):
        for i, arg in enumerate(args):
            if arg == option and i + 1 < len(args):
                return repr(args[i + 1])
            if arg.startswith(f"{option}=") and option.startswith("--"):
                return repr(arg[len(option) + 1 :])
    return ""


def end_of_usage_error(error: Exception, args: Sequence[str] = ()) -> int:
    """Prints a fault of the command line itself in the form of all others. Returns: the exit code."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()  # type: ignore[attr-defined]
        return EXIT_WRONG_INPUT
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "toprovar"
    possible = sorted(getattr(error, "possibilities", None) or ())
    nearest = difflib.get_close_matches(str(getattr(error, "option_name", "")), possible, 1, cutoff=0)
    if nearest:
        message, hint = str(getattr(error, "message", error)), f"did you mean {nearest[0]}?"
    else:
        message, _, meant = error.format_message().partition(" Did you mean ")  # type: ignore[attr-defined]
        hint = f"did you mean {meant}" if meant else f"see {command} --help"
    message, _, offered = message.replace("Value error, ", "").strip().rstrip(".").partition(" is not one of ")
    if choices := re.findall(r"'([^']+)'", offered):
        given = message.rpartition(": ")[2].strip("'")
        message = f"{message.rpartition(':')[0]}: expected {', '.join(choices)}"
        hint = f"did you mean {difflib.get_close_matches(given.lower(), choices, 1, cutoff=0)[0]}?"
    if given := _given(getattr(error, "param", None), args):
        message = message.replace("Invalid value for", f"Invalid value {given} for", 1)
    print_error(f"{command}: {message[:1].lower()}{message[1:]}", hint)
    return EXIT_WRONG_INPUT


class OneMessage:
    """Mixed into typer's commands: their own faults look like all others, and every end has its exit code."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        if not standalone_mode:
            return super().main(*args, standalone_mode=False, **extra)  # type: ignore[misc]
        self._end(*args, **extra)

    def _end(self, *args: Any, **extra: Any) -> NoReturn:
        try:
            code = super().main(*args, standalone_mode=False, **extra)  # type: ignore[misc]
        except UsageError as error:
            given = extra.get("args") or (args[0] if args else None)
            code = end_of_usage_error(error, sys.argv[1:] if given is None else given)
        except (KeyboardInterrupt, typer.Abort):
            code = EXIT_INTERRUPTED
            say(INTERRUPTED)
        sys.exit(code if isinstance(code, int) else EXIT_OK)


class Single(OneMessage, TyperCommand):
    """A command that is a program of its own."""
