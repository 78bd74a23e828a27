"""C that is compiled at first use, where there is a compiler, and kept.

Nothing needs the kernels of the CPU path (`csrc`): where they cannot be had, torch's own operators do the
same work, more slowly.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from ramet.kernels import openmp
from ramet.kernels.user_cache import user_cache_dir

log = logging.getLogger("ramet")

SWITCH = "RAMET_NATIVE"  # 0 turns the C kernels off
# Vectors are explicit, so nothing may reorder a sum: a row's result must not depend on the rows beside it.
_FLAGS = ("-std=gnu11", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-Wall", "-fPIC")
_COMPILERS = ("cc", "gcc", "clang")
_PATIENCE_S = 120


class Unavailable(Exception):
    """Why there is no compiled C here, in words for the log."""


class Sources(NamedTuple):
    """A folder of C files that become one shared library."""

    name: str
    folder: Path
    is_parallel: bool  # by OpenMP


KERNELS = Sources("kernels", Path(__file__).parent / "csrc", is_parallel=True)


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where they cannot be had; the log says why."""
    try:
        if os.environ.get(SWITCH, "") == "0":
            raise Unavailable(f"{SWITCH}=0")
        return ctypes.CDLL(str(built(KERNELS)))
    except (Unavailable, OSError, RuntimeError) as error:  # the last one: a user without a home
        log.info("C kernels are not used: %s; torch's operators take their place, more slowly", error)
        return None


def built(sources: Sources) -> Path:
    """The path of the shared library, compiled now if it is not there yet: some seconds.

    It lies in the user's cache directory under a name that the sources, the compiler, the processor and its
    own bytes determine. Raises Unavailable, OSError, or RuntimeError for a user without a home.
    """
    folder = user_cache_dir()
    if sys.platform != "linux":
        raise Unavailable(f"it is compiled on Linux only, this is {sys.platform}")
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise Unavailable(f"no C compiler found (looked for {', '.join(_COMPILERS)})")
    # With another runtime than torch's, two teams would fight for the cores.
    runtime = openmp.runtime() if sources.is_parallel else None
    if sources.is_parallel and runtime is None:
        raise Unavailable("torch runs without GNU OpenMP")
    stem = f"{sources.name}-{_identity(sources, compiler, runtime)}"
    for kept in folder.glob(f"{stem}-*.so"):
        if kept.name == f"{stem}-{_digest(kept)}.so":  # a damaged one would end the process
            return kept
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".tmp-") as work:
        compiled = _compile(sources, compiler, runtime, Path(work))
        path = folder / f"{stem}-{_digest(compiled)}.so"
        os.replace(compiled, path)  # another process may have been as quick: either is good
    return path


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _identity(sources: Sources, compiler: str, runtime: str | None) -> str:
    """A hash of all that decides what is compiled."""
    known = hashlib.sha256(repr((_FLAGS, compiler, _run([compiler, "--version"]), runtime)).encode())
    for source in sorted(sources.folder.iterdir()):
        known.update(source.name.encode() + source.read_bytes())
    # A cache directory may be shared by machines: the code is for this processor.
    known.update(
        "".join(sorted({s for s in _cpu_lines() if s.startswith(("flags", "Features", "model"))})).encode()
    )
    return known.hexdigest()[:16]


def _cpu_lines() -> list[str]:
    return Path("/proc/cpuinfo").read_text().splitlines()


def _compile(sources: Sources, compiler: str, runtime: str | None, work: Path) -> Path:
    # Linked with torch's runtime by its path, not with the system's by -fopenmp.
    flags, runtimes = (_FLAGS, []) if runtime is None else ((*_FLAGS, "-fopenmp"), [runtime])
    objects = []
    for source in sorted(sources.folder.glob("*.c")):
        objects.append(str(work / f"{source.stem}.o"))
        _run([compiler, *flags, "-c", str(source), "-o", objects[-1]])
    target = work / "library.so"
    _run([compiler, "-shared", *objects, *runtimes, "-lm", "-o", str(target)])
    return target


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_PATIENCE_S, check=True
        )
    except subprocess.CalledProcessError as error:
        raise Unavailable(f"{command[0]} failed: {error.stderr.strip()[-500:]}") from error
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{command[0]} took more than {_PATIENCE_S} s") from error
    return done.stdout
