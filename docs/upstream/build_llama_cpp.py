"""Build llama.cpp with the patch beside this file, from the sources in llama-cpp-python's sdist.

``python docs/upstream/build_llama_cpp.py llama.cpp`` writes sources and programs to a new folder
and prints the folder of the programs: ``llama-mtmd-cli``, ``llama-quantize`` and
their libraries. It needs g++, cmake, ninja and patch (``apt-get install g++ cmake ninja-build
patch``). With ``--targets mtmd`` only the libraries are built.
"""

import argparse
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

SDIST = "llama-cpp-python==0.3.36"  # has llama.cpp of 2026-10-01, commit 0c1e570
PATCH = Path(__file__).with_name("llama_cpp.patch")
TARGETS = ["llama-mtmd-cli", "llama-quantize"]
OPTIONS = ["-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", "-DLLAMA_BUILD_TESTS=OFF"]
OPTIONS += ["-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_OPENSSL=OFF", "-DGGML_OPENMP=OFF"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--targets", nargs="+", default=TARGETS)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as name:
        options = ["--no-deps", "--no-binary", ":all:", "--dest", name]
        subprocess.run([sys.executable, "-m", "pip", "download", *options, SDIST], check=True)
        [archive] = Path(name).glob("*.tar.gz")
        with tarfile.open(archive) as sources:
            sources.extractall(name, filter="data")
        [extracted] = Path(name).glob("*/vendor/llama.cpp")
        extracted.rename(arguments.folder / "sources")
    sources, build = arguments.folder / "sources", arguments.folder / "build"
    subprocess.run(["patch", "-p1", "-d", sources, "-i", PATCH.resolve()], check=True)
    subprocess.run(["cmake", "-G", "Ninja", "-S", sources, "-B", build, *OPTIONS], check=True)
    jobs = ["-j", str(arguments.jobs)]
    subprocess.run(["cmake", "--build", build, *jobs, "--target", *arguments.targets], check=True)
    print(build / "bin")


if __name__ == "__main__":
    main()
