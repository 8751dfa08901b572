"""The tests that need versions of their own: ``nox -f tests/noxfile.py -s NAME``.

``matrix`` trains every cell on every pair of versions (more than an hour on two cores) and fills
docs/benchmarks/matrix.json; ``-s matrix -- 5.23.0/0.19.8`` does one pair. ``frameworks`` runs the
code of LLaMA-Factory and TRL, ``llamafactory`` all of LLaMA-Factory, with 6 GB of what it requires,
``ms_swift`` all of ms-swift, ``axolotl`` all of axolotl, ``llm_compressor`` its quantisers.
``-t table`` runs other people's frameworks, each in an environment of its own, fills
docs/benchmarks/frameworks.json and the table of docs/frameworks.md, and prints it:
``jobs``, of which ``-s "jobs(system='TRL')"`` does one, and the three that were named last. What
follows ``--`` chooses among their jobs, as pytest's ``-k`` does: ``-- "SFT and not LoRA"``.
``versions`` runs the tests of the model, of ``apply()`` and of parity, and a recipe, on every minor
release of transformers that is supported, with and without torchvision (some hours on two cores),
and fills docs/benchmarks/transformers.json and the table of docs/numerics.md; what follows ``--``
are releases. ``suites`` runs transformers' own shared suites on our classes and writes
docs/suites.md; what follows ``--`` goes to tests/suites/run.py. ``oldest`` runs all default tests
on the oldest versions that pyproject.toml allows; .ci/run leaves out what does not depend on them.
"""

import re
import sys
import tempfile
from itertools import product
from pathlib import Path

import nox

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.helpers.cells import (  # noqa: E402
    DEEPSPEED,
    EVERY_TRANSFORMERS,
    TRANSFORMERS,
    WITHOUT_DEEPSPEED,
)

nox.options.default_venv_backend = "venv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["frameworks"]

ROOT = Path(__file__).parents[1]
TO_TEST = ["pytest", "pytest-xdist", "psutil"]
HERE = ROOT / "tests" / "frameworks"
RESULTS = ROOT / "docs" / "benchmarks" / "matrix.json"


def install(session: nox.Session, transformers: str, deepspeed: str, *more: str) -> None:
    """This package with these versions, and a folder for what this DeepSpeed compiles."""
    session.install("torch==2.13.0")
    session.install("-e", f"{ROOT}[dev]", f"transformers=={transformers}", *more)
    session.install("--no-deps", f"deepspeed=={deepspeed}")
    # What one version compiled, another one loads and crashes.
    folder = Path(session.virtualenv.location, f"torch_extensions-{deepspeed}")
    session.env["TORCH_EXTENSIONS_DIR"] = str(folder)
    session.env["PYTHONPATH"] = str(ROOT)


@nox.session
def matrix(session: nox.Session) -> None:
    pairs = [pair.split("/") for pair in session.posargs]
    command = ["python", str(ROOT / "tests/distributed/matrix.py"), "--out", str(RESULTS)]
    for transformers, deepspeed in pairs or product(TRANSFORMERS, DEEPSPEED):
        install(session, transformers, deepspeed)
        session.run(*command, success_codes=[0, 1])  # 1: a cell failed, as the table says
        if deepspeed == DEEPSPEED[-1]:
            session.run(*command, "--strategy", *WITHOUT_DEEPSPEED, success_codes=[0, 1])


@nox.session
@nox.parametrize("torchvision", [False, True], ids=["without torchvision", "with torchvision"])
def versions(session: nox.Session, torchvision: bool) -> None:
    # Those of PyPI belong to builds of torch for GPUs alone.
    pair = ["torch===2.14.1", "torchvision==0.29.1"] if torchvision else ["torch==2.13.0"]
    for transformers in session.posargs or EVERY_TRANSFORMERS:
        session.install(*pair)
        session.install("-e", f"{ROOT}[dev]", f"transformers=={transformers}")
        # 1: a test failed, as the row says.
        session.run("python", "-m", "tests.every_version", success_codes=[0, 1])
    session.run("python", "-m", "tests.every_version", "--page")


@nox.session
def oldest(session: nox.Session) -> None:
    names = "accelerate|datasets|jinja2|peft|pydantic"
    claimed = re.findall(rf'^ *"({names})>=([0-9.]+)', (ROOT / "pyproject.toml").read_text(), re.M)
    install(session, TRANSFORMERS[0], DEEPSPEED[-1], *map("==".join, claimed))
    session.run("pytest", "-q", *(session.posargs or [str(ROOT / "tests")]))


@nox.session
@nox.parametrize("transformers", [TRANSFORMERS[0], EVERY_TRANSFORMERS[-1]])
def frameworks(session: nox.Session, transformers: str) -> None:
    # Newer pyarrow cannot pickle what datasets pickles.
    trl = ["trl==1.16.0", "datasets==4.7.0", "pyarrow==21.0.0"]
    install(session, transformers, DEEPSPEED[-1], *trl)
    for name in ("test_trl.py", "test_patched_training.py"):
        session.run("pytest", "-q", str(HERE / name))
    for version in ("0.9.2", "0.9.5"):  # before and after LLaMA-Factory's own fix
        session.install("--no-deps", "--ignore-requires-python", f"llamafactory=={version}")
        session.run("pytest", "-q", str(HERE / "test_llamafactory.py"))


# Each system of tests/frameworks/test_jobs.py: what it is installed with.
SYSTEMS = {
    "TRL": ["trl==1.16.0"],
    "transformers": [],
    "accelerate": [],
    "peft": [],
    "Lightning": ["lightning==2.6.6"],
    "Ray": ["ray[train]==2.60.0"],
    "OpenRLHF": ["ray[train]==2.60.0", "pylatexenc", "sympy", "torchdata"],
    "verl": ["ray[train]==2.60.0", "tensordict==0.10.0", "hydra-core", "codetiming"],
    "unsloth": [],
}
# Each pins a transformers of its own, and some what needs a GPU.
WITHOUT_DEPENDENCIES = {
    "OpenRLHF": ["openrlhf==0.11.2"],
    "verl": ["verl==0.9.1"],
    "unsloth": ["unsloth==2026.10.9"],
}


@nox.session(tags=["table"])
@nox.parametrize("system", [*SYSTEMS])
def jobs(session: nox.Session, system: str) -> None:
    """A row of docs/benchmarks/frameworks.json for each job of a system, and the table."""
    install(session, EVERY_TRANSFORMERS[-1], DEEPSPEED[-1], *SYSTEMS[system])
    if alone := WITHOUT_DEPENDENCIES.get(system):
        session.install("--no-deps", *alone)
    run_jobs(session, "test_jobs.py", "test_peft.py", of=system)


@nox.session(tags=["table"])
def llamafactory(session: nox.Session) -> None:
    # Not a build of torch for CPUs, which pip would prefer wherever it finds one: the torchvision
    # and torchaudio of PyPI do not load beside it.
    session.install("torch===2.13.0", "torchvision==0.28.0", "torchaudio==2.11.0")
    session.install("-e", str(ROOT), "llamafactory==0.9.5", "pyarrow==21.0.0", *TO_TEST)
    session.env["PYTHONPATH"] = str(ROOT)
    for transformers in (TRANSFORMERS[0], "5.6.0"):  # the oldest of ours, the newest of its
        session.install(f"transformers=={transformers}")
        session.run("pytest", "-q", str(HERE / "test_patched_training.py"))
        session.run("pytest", "-q", str(ROOT / "tests/integrations/test_llamafactory.py"))
    run_jobs(session, "test_jobs_by_command.py")


@nox.session
def llm_compressor(session: nox.Session) -> None:
    # It requires one version of torch, and of transformers one of a few.
    session.install("llmcompressor==0.14.0.1", *TO_TEST)
    session.install("-e", f"{ROOT}[train]", "hypothesis")
    session.run("pytest", "-q", str(HERE / "test_llm_compressor.py"))


@nox.session(tags=["table"])
def axolotl(session: nox.Session) -> None:
    session.install("torch==2.13.0")
    with_zero = [f"deepspeed=={DEEPSPEED[-1]}", "ninja"]
    session.install("-e", str(ROOT), "axolotl==0.19.0", *with_zero, *TO_TEST)
    # It does not load beside a build of torch for CPUs, nothing here needs it, and beside a build
    # for GPUs two processes of axolotl ask these whether they reach each other.
    session.run("pip", "uninstall", "-q", "-y", "torchvision")
    session.install(f"transformers=={EVERY_TRANSFORMERS[-1]}")  # it pins 5.16.1
    session.env["PYTHONPATH"] = str(ROOT)
    session.run("pytest", "-q", str(ROOT / "tests/integrations/test_axolotl.py"))
    run_jobs(session, "test_jobs.py", of="axolotl")


@nox.session(tags=["table"])
def ms_swift(session: nox.Session) -> None:
    session.install("torch==2.13.0")
    # msgspec: its GRPO imports it, and it does not require it.
    session.install("-e", str(ROOT), "ms-swift==4.6.0", "msgspec", "pyarrow==21.0.0", *TO_TEST)
    session.env["PYTHONPATH"] = str(ROOT)
    session.run("pytest", "-q", str(ROOT / "tests/integrations/test_ms_swift.py"))
    run_jobs(session, "test_jobs_by_command.py")


def run_jobs(session: nox.Session, *tests: str, of: str = "") -> None:
    """The rows of the framework that is installed, and the table."""
    session.env["FRAMEWORKS_RECORD"] = str(ROOT / "docs" / "benchmarks" / "frameworks.json")
    chosen = " and ".join(f"({words})" for words in (of, *session.posargs) if words)
    options = ["-k", chosen] if chosen else []
    paths = [str(HERE / name) for name in tests]
    # 1: a job failed, as its row says.
    session.run("pytest", "-q", "-n", "0", *paths, *options, success_codes=[0, 1])
    session.run("python", "-m", "tests.frameworks.results_table", "--page")


@nox.session
def suites(session: nox.Session) -> None:
    folder = ROOT / "tests" / "suites"
    with tempfile.TemporaryDirectory() as temporary:
        results = []
        for version in (TRANSFORMERS[0], *EVERY_TRANSFORMERS[-2:]):
            session.install("torch==2.13.0")
            # The suites import the rest; httpx is for what a checkout has.
            needed = ["pytest", "parameterized", "requests", "protobuf", "sentencepiece", "httpx"]
            session.install("-e", str(ROOT), f"transformers=={version}", "accelerate", *needed)
            sdist = ["--no-deps", "--no-binary", "transformers", "--dest", temporary]
            session.run("pip", "download", "-q", *sdist, f"transformers=={version}")
            (archive,) = Path(temporary).glob(f"transformers-{version}.*")
            results.append(str(Path(temporary, f"{version}.json")))
            command = ["python", str(folder / "run.py"), str(archive), "--out", results[-1]]
            session.run(*command, *session.posargs)
        page = str(ROOT / "docs" / "suites.md")
        session.run("python", str(folder / "table.py"), *results, "--out", page)
