"""Compile the stub of a CUDA driver and its libraries, for the PyTorch that runs this.

One shared library answers in place of libcuda, libcudart, libcublas, libcudnn and libnccl, loaded before them
(LD_PRELOAD). Functions that PyTorch calls and that no file here defines return 0, success.
"""

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

SOURCES = ("memory.c", "streams.c", "libraries.c", "nccl.c")
HEADERS = "nvidia/cu13/include"
"""Of the wheel of CUDA 13's runtime, from the folder of packages."""
CALLERS = (
    *("torch_cuda", "c10_cuda", "torch_python", "torch_cuda_linalg"),
    *("caffe2_nvrtc", "torch_nvshmem", "torch_cpu"),
)
ANSWERED = re.compile(r"(_*cuda|cu[A-Z](?!ile)|cublas|cudnn|cupti|nccl)\w*")
"""Names of functions to answer; cuFile is left alone."""
REFUSED = "cupti"
"""Functions of these names fail: a profile holds what the host does, and no kernels."""
LIBRARY = "libcuda.so.1"
HERE = Path(__file__).parent


class UnavailableError(Exception):
    """The stub cannot be built here; the text says why."""


def library(cache: Path) -> Path:
    """Path of the library in a folder of `cache`, built there if it is not. Raises UnavailableError."""
    packages, headers = installed()
    identity = hashlib.sha256(version("torch").encode())
    for name in ("fake.h", "host_defines.h", *SOURCES, "build.py"):
        identity.update((HERE / name).read_bytes())
    folder = cache / identity.hexdigest()[:12]
    built = folder / LIBRARY
    if not built.exists():
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=cache) as scratch:  # two commands may build at once
                made = Path(scratch) / folder.name
                made.mkdir()
                build(made, packages, headers)
                try:
                    made.rename(folder)
                except OSError:
                    if not built.exists():  # else another command has just put its own there
                        raise
        except OSError as error:
            raise UnavailableError(f"{cache}: {error.strerror}") from None
    return built


def installed() -> tuple[Path, Path]:
    """The folders of packages and of CUDA's headers. Raises UnavailableError."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise UnavailableError("torch is not installed")
    packages = Path(spec.origin).parents[1]
    if not (packages / "torch/lib/libtorch_cuda.so").exists():
        raise UnavailableError("this PyTorch is built for CPUs; the stub needs a build for CUDA")
    if not (packages / HEADERS / "cuda_runtime_api.h").exists():
        raise UnavailableError(
            f"no {HEADERS}/cuda_runtime_api.h beside torch: use a PyTorch built for CUDA 13"
        )
    return packages, packages / HEADERS


def build(folder: Path, packages: Path, headers: Path) -> None:
    """Compile into a folder. Raises UnavailableError."""
    crt = folder / "include" / "crt"
    crt.mkdir(parents=True, exist_ok=True)
    shutil.copy(HERE / "host_defines.h", crt)
    from torch._C import _cudnn  # PyTorch accepts no other cuDNN than it was compiled with

    major, minor, _ = _cudnn.getCompileVersion()
    flags = ["-std=gnu11", "-O2", "-w", "-fPIC", "-I", str(crt.parent), "-I", str(headers)]
    flags += [f"-DMLM_FAKE_GPU_CUDNN_MAJOR={major}", f"-DMLM_FAKE_GPU_CUDNN_MINOR={minor}"]
    objects = []
    for name in SOURCES:
        made = folder / f"{name}.o"
        run(["gcc", *flags, "-c", str(HERE / name), "-o", str(made)])
        objects.append(made)
    defined = {line.split()[-1] for line in symbols(objects, "--defined-only")}
    # what PyTorch's libraries ask for, and all functions of the driver
    libraries = [packages / "torch/lib" / f"lib{name}.so" for name in CALLERS]
    undefined = symbols([path for path in libraries if path.exists()], "--undefined-only", "-D")
    names = (line.split()[-1].partition("@")[0] for line in undefined)
    asked = {name for name in names if ANSWERED.fullmatch(name)}
    header = (headers / "cuda.h").read_text(errors="replace")
    asked |= set(re.findall(r"\bCUDAAPI\s+(cu[A-Z]\w+)\s*\(", header))
    asked |= set(re.findall(r"#define\s+cu[A-Z]\w+\s+(cu[A-Z]\w+_v\d)", header))
    rest = folder / "rest.c"
    answers = ((name, int(name.startswith(REFUSED))) for name in sorted(asked - defined))
    rest.write_text("".join(f"int {name}(void) {{ return {code}; }}\n" for name, code in answers))
    run(["gcc", "-w", "-fPIC", "-c", str(rest), "-o", str(folder / "rest.o")])
    parts = [str(path) for path in (*objects, folder / "rest.o")]
    whole = str(folder / LIBRARY)
    run(["gcc", "-shared", f"-Wl,-soname,{LIBRARY}", *parts, "-o", whole, "-lpthread", "-ldl"])
    (folder / "libcuda.so").symlink_to(LIBRARY)  # the name that Triton links


def symbols(paths: Iterable[Path], *flags: str) -> list[str]:
    out = run(["nm", *flags, *(str(path) for path in paths)])
    return [line for line in out.splitlines() if re.search(r"\s[TUtWw]\s+\w", line) or " U " in line]


def run(command: list[str]) -> str:
    """Output of a program. Raises UnavailableError."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise UnavailableError(f"{command[0]} is not installed") from None
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no message"])[0]
        raise UnavailableError(f"{command[0]} failed: {said[:300]}")
    return done.stdout


if __name__ == "__main__":
    print(library(Path(sys.argv[1])))
