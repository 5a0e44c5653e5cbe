"""The native operator library `toprovar_plugins`: where it is, what it holds, whether it fits these sources.

One shared library serves ONNX Runtime (`SessionOptions.register_custom_ops_library`), TensorRT
(`IPluginRegistry.load_library`) and PyTorch (`toprovar.plugins.torch_operators`). `toprovar plugins build` makes it;
installing the package never does. It is looked for in

    1. the file that the environment variable TOPROVAR_PLUGINS names
    2. ~/.cache/toprovar/plugins/<digest of the sources>/libtoprovar_plugins.so   (XDG_CACHE_HOME is respected)
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from toprovar.plugins.errors import EnvironmentFault

FILE_NAME = "libtoprovar_plugins.so"
VARIABLE = "TOPROVAR_PLUGINS"
SOURCE_SUFFIXES = (".h", ".cpp", ".cu", ".cuh")
BUILD_HINT = "build it:  toprovar plugins build"


@dataclass(frozen=True)
class PluginLibrary:
    """A library that was found, loaded and asked.

    path:               absolute
    version:            of the project that it was built from
    source_digest:      of the sources that it was built from, sha256 in hex
    cuda_architectures: such as ("80", "90a"); empty where it was built without CUDA
    hosts:              "ctypes", "onnxruntime", "tensorrt"
    operators:          names in the domain "toprovar"
    """

    path: Path
    version: str
    source_digest: str
    cuda_architectures: tuple[str, ...]
    hosts: tuple[str, ...]
    operators: tuple[str, ...]

    @property
    def has_cuda(self) -> bool:
        return bool(self.cuda_architectures)

    @property
    def has_tensorrt(self) -> bool:
        return "tensorrt" in self.hosts

    @property
    def is_stale(self) -> bool:
        """Whether the sources changed since it was built."""
        return self.source_digest != source_digest()


def source_folder() -> Path:
    """The folder of the C++ and CUDA sources, which are packed beside the Python files."""
    return Path(__file__).resolve().parent


def source_files() -> list[Path]:
    """All that the library is compiled from, relative to `source_folder()`, in order."""
    folder = source_folder()
    found = [path.relative_to(folder) for path in folder.rglob("*") if path.suffix in SOURCE_SUFFIXES]
    return sorted([*found, Path("CMakeLists.txt")], key=lambda path: path.as_posix())


@lru_cache(maxsize=1)
def source_digest() -> str:
    """sha256 over "path sha256" lines of the sources; CMakeLists.txt computes the same and compiles it in."""
    folder = source_folder()
    lines = (
        f"{path.as_posix()} {hashlib.sha256((folder / path).read_bytes()).hexdigest()}\n" for path in source_files()
    )
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def cache_path() -> Path:
    """Where `toprovar plugins build` puts the library of these sources, and where it is looked for."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "toprovar" / "plugins" / source_digest() / FILE_NAME


def find_library() -> PluginLibrary | None:
    """The library that this machine has, or None where none was built.

    Raises: EnvironmentFault if TOPROVAR_PLUGINS names a file that is missing, or what was found is no such library.
    A stale library is returned: ask `is_stale`, or use `require_library`.
    """
    named = os.environ.get(VARIABLE)
    if named:
        path = Path(named).absolute()
        if not path.is_file():
            raise EnvironmentFault(
                f"{VARIABLE} names {path}, which is not a file", f"{BUILD_HINT}, and unset {VARIABLE}"
            )
        return read_library(path)
    path = cache_path()
    return read_library(path) if path.is_file() else None


def require_library(cuda: bool = False, tensorrt: bool = False) -> PluginLibrary:
    """The library, fit for use.

    cuda, tensorrt: what the caller needs it to have been built with
    Raises: EnvironmentFault if it is missing, broken, stale, or lacks what is needed.
    """
    library = find_library()
    if library is None:
        raise EnvironmentFault(
            f"the operator library is missing: no {cache_path()}, and {VARIABLE} is not set", BUILD_HINT
        )
    if library.is_stale:
        raise EnvironmentFault(
            f"{library.path} was built from other sources: digest {library.source_digest[:12]}, "
            f"expected {source_digest()[:12]}",
            BUILD_HINT.replace("build it", "build it again"),
        )
    if cuda and not library.has_cuda:
        raise EnvironmentFault(
            f"{library.path} was built without CUDA; kernels for a GPU are needed",
            "build it again with nvcc on the path:  toprovar plugins build --cuda",
        )
    if tensorrt and not library.has_tensorrt:
        raise EnvironmentFault(
            f"{library.path} was built without the TensorRT host",
            "build it again with TensorRT's headers:  toprovar plugins build --tensorrt-include DIR",
        )
    return library


def read_library(path: Path) -> PluginLibrary:
    """What a library file says about itself.

    Raises: EnvironmentFault if it cannot be loaded, or is a library of something else.
    """
    native = load(path)
    count = native.toprovarOperatorCount()
    return PluginLibrary(
        path=path.absolute(),
        version=native.toprovarVersion().decode(),
        source_digest=native.toprovarSourceDigest().decode(),
        cuda_architectures=_words(native.toprovarCudaArchitectures()),
        hosts=_words(native.toprovarHosts()),
        operators=tuple(native.toprovarOperatorName(i).decode() for i in range(count)),
    )


def load(path: Path) -> ctypes.CDLL:
    """The library's C functions (core/c_api.h), with their types.

    Raises: EnvironmentFault if it cannot be loaded, or is a library of something else.
    """
    _check_whole(path)
    try:
        native = ctypes.CDLL(str(path))
    except OSError as error:
        reason = str(error).removeprefix(f"{path}: ")
        raise EnvironmentFault(f"{path} cannot be loaded: {reason}", BUILD_HINT) from None
    for name in ("toprovarVersion", "toprovarSourceDigest", "toprovarCudaArchitectures", "toprovarHosts"):
        if not hasattr(native, name):
            raise EnvironmentFault(f"{path} is a library without {name}; it is not toprovar's", BUILD_HINT)
        getattr(native, name).restype = ctypes.c_char_p
    native.toprovarOperatorName.restype = ctypes.c_char_p
    native.toprovarOperatorName.argtypes = [ctypes.c_int32]
    return native


def _check_whole(path: Path) -> None:
    """Refuses an ELF file that ends before its table of sections, which linkers put last: loading one that is cut
    short kills the process with SIGBUS. What is no ELF file is left to the loader.

    Raises: EnvironmentFault if it is cut short.
    """
    try:
        with open(path, "rb") as file:
            head = file.read(64)
            size = os.fstat(file.fileno()).st_size
    except OSError:
        return  # the loader says why
    if head[:6] != b"\x7fELF\x02\x01" or len(head) < 64:  # 64 bits, little-endian
        return
    start, entry_bytes, entries = *struct.unpack_from("<Q", head, 40), *struct.unpack_from("<HH", head, 58)
    if size < start + entry_bytes * entries:
        raise EnvironmentFault(
            f"{path} is cut short: {size} bytes, {start + entry_bytes * entries} expected",
            BUILD_HINT.replace("build it", "build it again"),
        )


def _words(text: bytes) -> tuple[str, ...]:
    return tuple(word for word in text.decode().split(";") if word)
