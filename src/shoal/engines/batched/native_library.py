"""The kernels of native_kernels.cpp as operations of torch: built on first use, where a compiler is found, and kept.

Without a compiler, or where building fails, `load_native_kernels` says no and torch's own operations are used: slower,
never broken. `SHOAL_NATIVE_KERNELS=off` in the environment asks for that.
"""

import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from hashlib import blake2b
from pathlib import Path

import torch

from shoal.storage.cache_folder import find_cache_folder, wait_for_lock

log = logging.getLogger("shoal")
SOURCE = Path(__file__).with_name("native_kernels.cpp")
FLAGS = ("-std=c++20", "-O2", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math")
LINKING = ("-Wno-psabi", "-fPIC", "-shared")
BUILD_SECONDS = 300.0
"""After so long a build is given up."""


@cache
def load_native_kernels() -> bool:
    """Whether `torch.ops.shoal_native` is there; at the first call it is built, or found where it was built before."""
    if os.environ.get("SHOAL_NATIVE_KERNELS", "").lower() in ("off", "0", "no"):
        return False
    compiler = find_compiler()
    if not compiler or platform.system() != "Linux":
        return False
    try:
        library = find_library(compiler)
        with wait_for_lock(library.with_suffix(".lock")):
            if not library.exists():
                build_library(compiler, library)
        torch.ops.load_library(library)
    except (OSError, subprocess.SubprocessError) as error:
        log.info(
            "The kernels for this processor could not be built (%s); training goes on without them, slower.", error
        )
        return False
    return hasattr(torch.ops.shoal_native, "conv2d")


def find_compiler() -> str:
    """The path of a C++ compiler, or nothing."""
    names = [os.environ.get("CXX", ""), "g++", "clang++"]
    return next((path for path in map(shutil.which, filter(None, names)) if path), "")


def find_library(compiler: str) -> Path:
    """Where the library for this source, compiler, torch and processor belongs."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=60).stdout
    parts = (SOURCE.read_bytes(), version, repr((FLAGS, torch.__version__)).encode(), read_processor_flags())
    key = blake2b(b"\0".join(parts), digest_size=12).hexdigest()
    return find_cache_folder() / "native" / f"kernels-{key}.so"


def read_processor_flags() -> bytes:
    """What the processor can do, by which `-march=native` chooses instructions."""
    lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    return next((line for line in lines if line.startswith((b"flags", b"Features"))), platform.machine().encode())


def build_library(compiler: str, library: Path) -> None:
    log.info("building kernels for this processor, once")
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder) / library.name
        includes = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
        command = [compiler, *FLAGS, *LINKING, str(SOURCE), "-o", str(built), *includes]
        command += [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"]
        done = subprocess.run(command, capture_output=True, timeout=BUILD_SECONDS)
        if done.returncode:
            lines = done.stderr.decode(errors="replace").splitlines()
            raise OSError(next((line for line in lines if "error" in line), f"{compiler} ended with {done.returncode}"))
        built.replace(library)
