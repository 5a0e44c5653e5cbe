"""`toprovar plugins`: compiles the operator library from the sources packed with these files, and says what is there.

The build runs in a temporary folder beside its result and replaces the result in one step; an interrupted build leaves
nothing. One build at a time holds a lock. Headers of TensorRT come from a folder of the user's, or, asked for by name,
from a pinned package whose hash is checked.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toprovar.plugins import library
from toprovar.plugins.library import PluginLibrary
from toprovar.runtime.errors import EnvironmentFault, ToprovarError
from toprovar.runtime.json_files import check_folder, check_replaceable
from toprovar.tools import console

# carries NVIDIA's TensorRT 10.14 headers (Apache-2.0); NVIDIA packs them into no wheel of its own
HEADERS_PACKAGE = "kernel-lens==2.0.1"
HEADERS_SHA256 = "07cc714e8b5e7f34b672f7c7fad93febe7c747be5837ba276b1527370134ffe0"
HEADERS_FOLDER = "kernel_lens/include/tensorrt/"

STEP = re.compile(r"^\[\s*(\d+)(?:/(\d+)|%)\]")  # of ninja, or of make
LINES_SHOWN = 12  # of a failed build


@dataclass(frozen=True)
class BuildRequest:
    """cuda: None takes what the machine has; architectures: as CMake writes them; jobs: 0 takes all cores."""

    cuda: bool | None = None
    architectures: str | None = None
    tensorrt_include: Path | None = None
    tensorrt_from_pip: bool = False
    out: Path | None = None
    jobs: int = 0


def find_nvcc() -> str | None:
    """nvcc of a toolkit on the path or in CUDACXX, else of the package nvidia-cuda-nvcc."""
    named = os.environ.get("CUDACXX") or shutil.which("nvcc")
    if named:
        return named
    try:
        packages = importlib.util.find_spec("nvidia")
    except ImportError:
        return None
    for folder in (packages.submodule_search_locations or ()) if packages else ():
        for nvcc in sorted(Path(folder).glob("cu*/bin/nvcc"), reverse=True):
            return str(nvcc)
    return None


def run_build(request: BuildRequest, quiet: bool = False) -> dict[str, Any]:
    """Builds the library where `find_library` looks, or at `request.out`.

    Returns: what was built (`facts_of`), and how long it took.
    Raises: EnvironmentFault if a tool is missing, the compiler fails, or another build runs; ToprovarError for options
    that contradict each other.
    """
    target = (request.out or library.cache_path()).absolute()
    if target.is_dir():
        raise ToprovarError(f"{target} is a folder; a file is expected", f"write --out {target / library.FILE_NAME}")
    check_replaceable(target)
    check_folder(target.parent)
    nvcc = find_nvcc()
    cuda = nvcc is not None if request.cuda is None else request.cuda
    _check(request, cuda, nvcc)
    for tool in ("cmake", "c++"):
        if shutil.which(tool) is None:
            hint = "install it:  pip install cmake ninja" if tool == "cmake" else "install a C++17 compiler (g++ 11)"
            raise EnvironmentFault(f"{tool} is not on the path", hint)
    started = time.perf_counter()
    target.parent.mkdir(parents=True, exist_ok=True)
    with _only_build(target), _temporary_folder(target) as folder:
        include = request.tensorrt_include
        if request.tensorrt_from_pip:
            include = _headers_from_pip(folder)
        _compile(request, folder, cuda, nvcc, include, quiet)
        built = folder / library.FILE_NAME
        library.read_library(built)
        os.replace(built, target)
    found = library.read_library(target)
    seconds = time.perf_counter() - started
    if not quiet:
        named = f"; use it:  export {library.VARIABLE}={console.quoted(target)}" if request.out else ""
        console.say(f"wrote {target} ({described(found)}) in {seconds:.0f}s{named}")
    return {**facts_of(found), "seconds": round(seconds, 1)}


def run_check() -> dict[str, Any]:
    """What `find_library` finds: facts of the library, and whether it fits these sources.

    Raises: EnvironmentFault if there is none, or none that fits.
    """
    found = library.find_library()
    if found is not None:
        console.say(f"found {found.path} ({described(found)})")
    return facts_of(library.require_library())


def facts_of(found: PluginLibrary) -> dict[str, Any]:
    return {
        "path": str(found.path),
        "version": found.version,
        "source_digest": found.source_digest,
        "stale": found.is_stale,
        "hosts": list(found.hosts),
        "cuda_architectures": list(found.cuda_architectures),
        "operators": list(found.operators),
    }


def described(found: PluginLibrary) -> str:
    """One phrase: hosts and architectures."""
    cuda = f"CUDA {' '.join(found.cuda_architectures)}" if found.has_cuda else "CPU only"
    stale = ", built from other sources" if found.is_stale else ""
    return f"{len(found.operators)} operators, {cuda}, hosts {' '.join(found.hosts)}{stale}"


def _check(request: BuildRequest, cuda: bool, nvcc: str | None) -> None:
    if request.cuda and nvcc is None:
        raise EnvironmentFault(
            "--cuda: nvcc is not on the path",
            "install it:  pip install 'cuda-toolkit[nvcc,cccl]==13.0.*', or set CUDACXX",
        )
    if request.tensorrt_include and request.tensorrt_from_pip:
        raise ToprovarError(
            "--tensorrt-include and --tensorrt-headers are given together", "give the folder, or pip, not both"
        )
    wants_tensorrt = request.tensorrt_include is not None or request.tensorrt_from_pip
    if wants_tensorrt and not cuda:
        raise ToprovarError("the TensorRT host runs CUDA kernels, and this build has none", "build with --cuda")
    if request.architectures is not None and not cuda:
        raise ToprovarError("--architectures is for CUDA, and this build has none", "build with --cuda")
    if request.architectures is not None and not re.fullmatch(r"\d{2,3}a?(;\d{2,3}a?)*", request.architectures):
        raise ToprovarError(
            f"--architectures {request.architectures}: expected numbers such as 80 or 90a with semicolons",
            "write --architectures '80;90a'",
        )
    if request.tensorrt_include and not (request.tensorrt_include / "NvInferRuntime.h").is_file():
        raise ToprovarError(
            f"--tensorrt-include: there is no {request.tensorrt_include / 'NvInferRuntime.h'}",
            "name the folder of TensorRT's headers, or write --tensorrt-headers pip",
        )


@contextlib.contextmanager
def _only_build(target: Path) -> Iterator[None]:
    """Holds the lock of a target; the system drops it with the process."""
    lock = target.with_name(f".{target.name}.lock")
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise EnvironmentFault(f"another build of {target} is running", "wait for it, then try again") from None
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


@contextlib.contextmanager
def _temporary_folder(target: Path) -> Iterator[Path]:
    """A folder beside a target whose lock is held; those of builds that were killed are removed."""
    prefix = f".build-{target.name[:64]}-"
    for left in target.parent.glob(glob.escape(prefix) + "*"):
        shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _headers_from_pip(folder: Path) -> Path:
    """Downloads the pinned headers into a folder. Raises: EnvironmentFault if that fails or the hash differs."""
    console.say(f"downloading TensorRT's headers: {HEADERS_PACKAGE}")
    wanted = folder / "headers.txt"
    wanted.write_text(f"{HEADERS_PACKAGE} --hash=sha256:{HEADERS_SHA256}\n")
    options = ["--no-deps", "--require-hashes", "--only-binary", ":all:", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), "-r", str(wanted)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = next((line for line in done.stderr.splitlines() if line.startswith("ERROR")), done.stderr.strip())
        raise EnvironmentFault(
            f"{HEADERS_PACKAGE} cannot be downloaded: {reason[:300]}", "name a folder:  --tensorrt-include DIR"
        )
    wheel = next(folder.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.startswith(HEADERS_FOLDER)])
    return folder / HEADERS_FOLDER


def _compile(
    request: BuildRequest, folder: Path, cuda: bool, nvcc: str | None, include: Path | None, quiet: bool
) -> None:
    options = [f"-DTOPROVAR_CUDA={'ON' if cuda else 'OFF'}", "-DCMAKE_BUILD_TYPE=Release"]
    if cuda:
        options.append(f"-DCMAKE_CUDA_COMPILER={nvcc}")
    if request.architectures:
        options.append(f"-DCMAKE_CUDA_ARCHITECTURES={request.architectures}")
    if include is not None:
        options.append(f"-DTENSORRT_INCLUDE_DIR={include.absolute()}")
    if shutil.which("ninja"):
        options += ["-G", "Ninja"]
    jobs = request.jobs or len(os.sched_getaffinity(0))
    variables = _library_path(nvcc) if cuda and nvcc else {}
    with console.progress("building") if not quiet else contextlib.nullcontext(lambda done, total: None) as advance:
        _watch(["cmake", "-S", str(library.source_folder()), "-B", str(folder), *options], variables, advance)
        _watch(["cmake", "--build", str(folder), "--parallel", str(jobs)], variables, advance)


def _library_path(nvcc: str) -> dict[str, str]:
    """Where the linker finds the CUDA runtime of pip's nvcc, which itself looks in lib64 and has lib."""
    folder = Path(nvcc).parent.parent / "lib"
    if not (folder / "libcudart_static.a").is_file():
        return {}
    return {"LIBRARY_PATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("LIBRARY_PATH")]))}


def _watch(command: list[str], variables: dict[str, str], advance: Any) -> None:
    """Runs a step of the build, ended with its children when this process is interrupted.

    variables: added to the environment

    Raises: EnvironmentFault with the last lines if it fails.
    """
    lines: list[str] = []
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        env={**os.environ, **variables},
    ) as process:
        try:
            for line in process.stdout or ():
                lines.append(line.rstrip())
                step = STEP.match(line)
                if step:
                    advance(int(step[1]), int(step[2] or 100))
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        first = next((i for i, line in enumerate(lines) if re.search(r"\berror\b|Error at", line, re.I)), None)
        shown = lines[-LINES_SHOWN:] if first is None else lines[first : first + LINES_SHOWN]
        raise EnvironmentFault(
            f"{' '.join(command[:2])} failed with exit code {process.returncode}:\n" + "\n".join(shown),
            "a C++17 compiler, cmake 3.24 and, for --cuda, nvcc 12.8 are needed; --no-cuda builds without nvcc",
        )
