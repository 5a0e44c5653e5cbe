"""The tool's version, as written into every artifact."""

from importlib import metadata


def _version() -> str:
    try:
        return metadata.version("toprovar")
    except metadata.PackageNotFoundError:  # running from a source tree without installation
        return "0+source"


VERSION = _version()
