"""JSON for result files that are committed: indented, with lists and objects of plain values on one line."""

from __future__ import annotations

import json
import re
from typing import Any


def compact_json(value: Any) -> str:
    """Raises: ValueError for NaN and infinity."""
    text = json.dumps(value, indent=1, allow_nan=False)
    string = r'"(?:[^"\\]|\\.)*"'
    plain = rf"(?:{string}|[^\[\]{{}}\"])*"

    def joined(match: re.Match[str]) -> str:
        return re.sub(rf"({string})|\s*\n\s*", lambda part: part[1] or " ", match[0])

    return re.sub(rf"\[{plain}\]|\{{{plain}\}}", joined, text) + "\n"
