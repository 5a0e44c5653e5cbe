"""The errors of `toprovar.plugins.errors`, under the name by which all floors above know them."""

from toprovar.plugins.errors import (
    EXIT_ANSWER_IS_NO,
    EXIT_ENVIRONMENT,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_WRONG_INPUT,
    EnvironmentFault,
    ToprovarError,
)

__all__ = [
    "EXIT_ANSWER_IS_NO",
    "EXIT_ENVIRONMENT",
    "EXIT_INTERRUPTED",
    "EXIT_OK",
    "EXIT_WRONG_INPUT",
    "EnvironmentFault",
    "ToprovarError",
]
