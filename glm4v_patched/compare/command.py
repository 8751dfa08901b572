"""``glm4v-patched compare``: the published code and ours on the reader's own download."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..engine.environment import python_module_command
from ..engine.options import Precision
from ..paths import expand_path, to_path
from ..terminal_text import format_bytes
from .environment import (
    PYTHON_CURE,
    find_python_versions,
    describe_code,
    isolated_environment,
)

if TYPE_CHECKING:
    from .verdicts import ModelOutputs

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
WORKER = Path(__file__).with_name("worker.py")
NUM_NEW_TOKENS = 8
PUBLISHED_CODE_FILES = ("modeling_chatglm.py", "configuration_chatglm.py", "visual.py")
TOKENIZER_FILES = ("tokenizer.model", "tokenizer.json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("original", type=to_path, metavar="ORIGINAL", help="folder of the published model")
    add("--run-code", action="store_true", help="run the code that lies in ORIGINAL")
    has = "a Python with transformers 4.42 to 4.44, for that code"
    add("--python", type=expand_path, metavar="PATH", help=has)
    add("--precision", choices=[*DTYPES], default="bf16", help="default: bf16")
    add("--device", choices=("cuda", "cpu"), help="default: the CPU if there is no GPU")
    add("--json", action="store_true", help="print JSON, for programs")


def run(options: argparse.Namespace) -> int:
    """Print what was compared; 1 if ours differs where the original is right."""
    folder = options.original
    _require_original(folder)
    code = describe_code(folder)
    if not options.run_code:
        raise ValueError(f"compare runs {code}\nTo have it run: --run-code")
    from ..models.placement import place_processes

    device: Literal["cuda", "cpu"] = options.device or _device()
    place_processes(1, device)
    if options.python is None:
        raise RuntimeError(
            f"the published code does not work with transformers {version('transformers')}, and "
            f"needs an environment of its own; {PYTHON_CURE}"
        )
    versions = find_python_versions(options.python)
    print(f"running with {versions}: {code}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as work:
        lines = compare(folder, options.python, options.precision, device, Path(work))
    from .verdicts import DIFFERENT, OURS_WRONG, format_comparisons

    if options.json:
        print(json.dumps([asdict(line) for line in lines], indent=2))
    else:
        print(format_comparisons(lines))
    return int(any(line.verdict in (DIFFERENT, OURS_WRONG) for line in lines))


def compare(folder: Path, python: str, precision: Precision, device: str, work: Path) -> list:
    """Compute the same rows with the code in ``folder`` and with ours, one model at a time.

    Args:
        python: For that code.
        work: A folder for what is in between.

    Raises:
        ValueError: the model is too large for the memory that is free, or not to be loaded.
        RuntimeError: a model could not be run.
    """
    from .inputs import count_supervised_tokens, write_cases
    from .verdicts import compare_outputs

    positions = write_cases(work, folder)
    _require_memory(folder, positions, precision, device)
    job: dict[str, Any] = {"folder": str(folder.resolve()), "rows": str(work / "cases.safetensors")}
    job |= {"dtype": DTYPES[precision], "device": device, "answers": NUM_NEW_TOKENS}
    home = work / "home"
    home.mkdir()
    isolated = isolated_environment(home)
    original = _compute([python, "-I", str(WORKER)], isolated, work / "original", job)
    offline = os.environ | {"HF_HUB_OFFLINE": "1"}
    command = python_module_command("glm4v_patched.compare.worker")
    ours = _compute(command, offline, work / "ours", job | {"ours": True})
    return compare_outputs(original, ours, count_supervised_tokens(work), precision)


def _compute(
    command: list[str], environment: dict[str, str], work: Path, job: dict[str, Any]
) -> "Computed":
    from safetensors.torch import load_file

    from .verdicts import ModelOutputs

    work.mkdir()
    tensors, told = work / "tensors.safetensors", work / "told.json"
    job = {"ours": False, "tensors": str(tensors), "told": str(told)} | job
    (work / "job.json").write_text(json.dumps(job))
    log = work / "log.txt"
    with log.open("w") as output:
        done = subprocess.run(
            [*command, str(work / "job.json")],
            env=environment,
            stdout=output,
            stderr=output,
            check=False,
        )
    if done.returncode or not told.is_file():
        whose = "our model" if job["ours"] else "the original"
        end = log.read_text(errors="replace")[-2000:]
        raise RuntimeError(f"{whose} could not be run, status {done.returncode}:\n{end}")
    return ModelOutputs(json.loads(told.read_text(encoding="utf-8")), load_file(tensors))


def _require_original(folder: Path) -> None:
    """Raise ``ValueError`` if a folder does not hold a glm-4v with code that is not ours."""
    from ..models.check_weights import find_model_folder_problem, require_complete_model

    if not folder.is_dir():
        raise ValueError(
            f"{folder} is no folder; expected your download of the published model, as "
            f"`hf download zai-org/glm-4v-9b --local-dir {folder}` makes it"
        )
    if fault := find_model_folder_problem(folder):
        raise ValueError(f"{folder}: {fault}")
    require_complete_model(str(folder))
    if lacking := [name for name in PUBLISHED_CODE_FILES if not (folder / name).is_file()]:
        raise ValueError(f"{folder} has no {', '.join(lacking)}; expected the published code")
    if (folder / "checkpointing.py").is_file():  # as in all folders with our code
        raise ValueError(
            f"the code in {folder} is this package's (checkpointing.py); expected the published one"
        )
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ValueError(f"{folder} has no {' nor '.join(TOKENIZER_FILES)}; expected the published one")


def _device() -> Literal["cuda", "cpu"]:
    from ..engine.gpus import find_gpus

    return "cuda" if find_gpus().devices else "cpu"


def _require_memory(folder: Path, positions: int, precision: Precision, device: str) -> None:
    """Say what a model needs, and raise ``ValueError`` if there is less."""
    from ..engine.memory_plan import Batch, activation_bytes, count_parameters, min_free_gpu_memory
    from ..engine.options import EngineOptions
    from ..engine.ram import free_ram
    from ..remote.configuration_chatglm import ChatGLMConfig

    config = ChatGLMConfig.from_pretrained(folder)
    width = {"bf16": 2, "fp32": 4}[precision]
    # All layers of the language model keep what they need; the tower's do not, but for its last.
    options = EngineOptions(
        trained="lora_lm", precision=precision, tower="full", language="none", compile=False
    )
    weights = width * sum(count_parameters(config))
    kept = activation_bytes(config, options, Batch(num_sequences=2, sequence_length=positions))
    logits = 2 * positions * config.padded_vocab_size * (width + 12)
    needed = weights + kept + logits
    free = free_ram() if device == "cpu" else min_free_gpu_memory()
    print(
        f"{precision} on {device}, one model after the other: about {format_bytes(needed)} "
        f"({format_bytes(weights)} of weights), of which {format_bytes(free)} are free",
        file=sys.stderr,
        flush=True,
    )
    if needed > free:
        raise ValueError(
            f"comparing needs about {format_bytes(needed)} and {format_bytes(free)} are free; expected "
            "a larger machine" + (", or --precision bf16" if precision == "fp32" else "")
        )
