"""Errors that are the user's to mend: printed as one message without a traceback."""

from __future__ import annotations

EXIT_OK = 0
EXIT_ANSWER_IS_NO = 1
EXIT_WRONG_INPUT = 2
EXIT_ENVIRONMENT = 3
EXIT_INTERRUPTED = 130


class ToprovarError(Exception):
    """What failed, on which object; found vs expected; and a hint that says what to do.

    message:   lower case, names the file, key or tensor and prints the values.
    hint:      one line with the way out, or "" where the message says it all.
    exit_code: 2 for wrong usage or input, 3 where the environment can't do it, 1 for the answer "no".
    """

    def __init__(self, message: str, hint: str = "", exit_code: int = EXIT_WRONG_INPUT) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.exit_code = exit_code

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message


class EnvironmentFault(ToprovarError):
    """The input is fine and this machine can't do it (no torch, no GPU, wrong version)."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, hint, EXIT_ENVIRONMENT)
