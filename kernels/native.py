"""The C kernels of the CPU path (`csrc`): compiled at first use where there is a compiler, and kept.

Nothing needs them. Where they cannot be had, torch's own operators do the same work, more slowly.
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

from ramet.kernels import openmp
from ramet.kernels.user_cache import user_cache_dir

log = logging.getLogger("ramet")

SWITCH = "RAMET_NATIVE"  # 0 turns the C kernels off
_SOURCES = Path(__file__).parent / "csrc"
# Vectors are explicit, so nothing may reorder a sum: a row's result must not depend on the rows beside it.
_FLAGS = ("-std=gnu11", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-Wall", "-fPIC")
_COMPILERS = ("cc", "gcc", "clang")
_PATIENCE_S = 120


class Unavailable(Exception):
    """Why there are no C kernels here, in words for the log."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where they cannot be had; the log says why.

    The first call compiles for some seconds, unless an earlier process did; the result lies in the user's
    cache directory under a name that the sources, the compiler, the processor and its own bytes determine.
    """
    try:
        return ctypes.CDLL(str(_built(user_cache_dir())))
    except (Unavailable, OSError, RuntimeError) as error:  # the last one: a user without a home
        log.info("C kernels are not used: %s; torch's operators take their place, more slowly", error)
        return None


def _built(folder: Path) -> Path:
    """The path of the shared library, compiled now if it is not there yet."""
    if os.environ.get(SWITCH, "") == "0":
        raise Unavailable(f"{SWITCH}=0")
    if sys.platform != "linux":
        raise Unavailable(f"they are for Linux, this is {sys.platform}")
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise Unavailable(f"no C compiler found (looked for {', '.join(_COMPILERS)})")
    runtime = openmp.runtime()  # with a second one, two teams would fight for the cores
    if runtime is None:
        raise Unavailable("torch runs without GNU OpenMP")
    identity = _identity(compiler, runtime)
    for kept in folder.glob(_name(identity, "*")):
        if kept.name == _name(identity, _digest(kept)):  # a damaged one would end the process
            return kept
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".tmp-") as work:
        built = _compile(compiler, runtime, Path(work))
        path = folder / _name(identity, _digest(built))
        os.replace(built, path)  # another process may have been as quick: either is good
    return path


def _name(identity: str, digest: str) -> str:
    return f"kernels-{identity}-{digest}.so"


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _identity(compiler: str, runtime: str) -> str:
    """A hash of all that decides what is compiled."""
    known = hashlib.sha256(repr((_FLAGS, compiler, _run([compiler, "--version"]), runtime)).encode())
    for source in sorted(_SOURCES.iterdir()):
        known.update(source.name.encode() + source.read_bytes())
    # A cache directory may be shared by machines: the code is for this processor.
    known.update(
        "".join(sorted({s for s in _cpu_lines() if s.startswith(("flags", "Features", "model"))})).encode()
    )
    return known.hexdigest()[:16]


def _cpu_lines() -> list[str]:
    return Path("/proc/cpuinfo").read_text().splitlines()


def _compile(compiler: str, runtime: str, work: Path) -> Path:
    objects = []
    for source in sorted(_SOURCES.glob("*.c")):
        objects.append(str(work / f"{source.stem}.o"))
        _run([compiler, *_FLAGS, "-fopenmp", "-c", str(source), "-o", objects[-1]])
    # Linked with torch's runtime by its path, not with the system's by -fopenmp.
    _run([compiler, "-shared", *objects, runtime, "-lm", "-o", str(work / "kernels.so")])
    return work / "kernels.so"


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
