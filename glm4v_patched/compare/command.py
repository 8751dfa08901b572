"""``glm4v-patched compare``: compare the published code with ours on a downloaded model."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..engine.environment import python_module_command
from ..engine.options import Precision
from ..paths import expand_path, to_path
from ..terminal_text import format_bytes, show_progress, write_line
from .environment import describe_code, find_python_versions, isolated_environment

if TYPE_CHECKING:
    from ..remote.configuration_chatglm import ChatGLMConfig
    from .verdicts import Comparison, ModelOutputs

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
WORKER = Path(__file__).with_name("worker.py")
NUM_NEW_TOKENS = 8
PUBLISHED_CODE_FILES = ("modeling_chatglm.py", "configuration_chatglm.py", "visual.py")
TOKENIZER_FILES = ("tokenizer.model", "tokenizer.json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``glm4v-patched compare``."""
    add = parser.add_argument
    add("original", type=to_path, metavar="ORIGINAL", help="folder of the published model")
    add("--run-code", action="store_true", help="allow the code in ORIGINAL to run")
    python = "Python of an environment in which the code in ORIGINAL works"
    add("--python", type=expand_path, metavar="PATH", help=python)
    add("--precision", choices=[*DTYPES], default="bf16", help="default: bf16")
    add("--device", choices=("cuda", "cpu"), help="default: the CPU if there is no GPU")
    add("--json", action="store_true", help="print JSON, for programs")


def run(options: argparse.Namespace) -> int:
    """Print the comparison; return 1 if our code is wrong, or differs from a valid original."""
    folder = options.original
    original_rope = _require_original(folder).original_rope
    code = describe_code(folder)
    if not options.run_code:
        raise ValueError(f"compare runs {code}\nTo allow this, add --run-code")
    from ..engine.gpus import find_gpus
    from ..models.placement import place_processes

    device: Literal["cuda", "cpu"] = options.device or ("cuda" if find_gpus().devices else "cpu")
    place_processes(1, device)
    versions = find_python_versions(options.python, original_rope)
    print(f"running with {versions}: {code}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as work:
        comparisons = compare(folder, options.python, options.precision, device, Path(work))
    from .verdicts import DIFFERENT, OURS_WRONG, format_comparisons

    if options.json:
        write_line(json.dumps([asdict(item) for item in comparisons], indent=2))
    else:
        write_line(format_comparisons(comparisons))
    return int(any(item.verdict in (DIFFERENT, OURS_WRONG) for item in comparisons))


def compare(
    folder: Path, python: str, precision: Precision, device: str, work: Path
) -> list["Comparison"]:
    """Compute the same cases with the code in ``folder`` and with our code, one model at a time.

    Args:
        folder: The published model with its code.
        python: The Python that runs that code.
        work: A folder for intermediate files.

    Raises:
        ValueError: the model is too large for the free memory, or cannot be loaded.
        RuntimeError: one of the two processes failed.
    """
    from .inputs import CASES_FILE, write_cases
    from .verdicts import compare_outputs

    length, supervised = write_cases(work, folder)
    _require_memory(folder, length, precision, device)
    job: dict[str, Any] = {"folder": str(folder.resolve()), "cases": str(work / CASES_FILE)}
    job |= {"dtype": DTYPES[precision], "device": device, "answer_tokens": NUM_NEW_TOKENS}
    home = work / "home"
    home.mkdir()
    original = _compute(
        [python, "-I", str(WORKER)], isolated_environment(home), work / "original", job
    )
    offline = os.environ | {"HF_HUB_OFFLINE": "1"}
    command = python_module_command("glm4v_patched.compare.worker")
    ours = _compute(command, offline, work / "ours", job | {"ours": True})
    return compare_outputs(original, ours, supervised, precision)


def _compute(
    command: list[str], environment: dict[str, str], work: Path, job: dict[str, Any]
) -> "ModelOutputs":
    """Run a worker on a job in the folder ``work``, and read what it wrote."""
    from safetensors.torch import load_file

    from .verdicts import ModelOutputs

    work.mkdir()
    tensors, results = work / "tensors.safetensors", work / "results.json"
    job = {"ours": False, "tensors": str(tensors), "results": str(results)} | job
    (work / "job.json").write_text(json.dumps(job))
    log = work / "log.txt"
    command = [*command, str(work / "job.json")]
    model = "our model" if job["ours"] else "the original"
    with log.open("w") as output, show_progress(f"computing with {model}"):
        done = subprocess.run(command, env=environment, stdout=output, stderr=output, check=False)
    if done.returncode or not results.is_file():
        end = log.read_text(errors="replace")[-2000:]
        raise RuntimeError(
            f"the process of {model} failed with exit status {done.returncode}; its last output "
            f"was:\n{end}"
        )
    return ModelOutputs(json.loads(results.read_text(encoding="utf-8")), load_file(tensors))


def _require_original(folder: Path) -> "ChatGLMConfig":
    """Return the config of a folder; raise ``ValueError`` unless it has a complete glm-4v with the
    published code."""
    from ..models.check_weights import find_model_folder_problem, require_complete_model
    from ..remote.configuration_chatglm import ChatGLMConfig

    if not folder.is_dir():
        raise ValueError(
            f"{folder} is not a folder; expected your download of the published model, made by "
            f"`hf download zai-org/glm-4v-9b --local-dir {folder}`"
        )
    if problem := find_model_folder_problem(folder):
        raise ValueError(f"{folder}: {problem}")
    require_complete_model(str(folder))
    if (folder / "checkpointing.py").is_file():  # only our code has this file
        raise ValueError(
            f"the code in {folder} is this package's (checkpointing.py); expected the published one"
        )
    missing = [name for name in PUBLISHED_CODE_FILES if not (folder / name).is_file()]
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        missing.append(" or ".join(TOKENIZER_FILES))
    if missing:
        raise ValueError(f"{folder} has no {', '.join(missing)}; expected the published files")
    return ChatGLMConfig.from_pretrained(folder)


def _require_memory(folder: Path, length: int, precision: Precision, device: str) -> None:
    """Print the memory that one model needs; raise ``ValueError`` if less is free.

    Args:
        length: Length of the longest sequence, with its image placeholder expanded.
    """
    from ..engine import memory_plan
    from ..engine.options import EngineOptions
    from ..engine.ram import free_ram
    from ..remote.configuration_chatglm import ChatGLMConfig

    config = ChatGLMConfig.from_pretrained(folder)
    bytes_per_element = {"bf16": 2, "fp32": 4}[precision]
    # An upper bound. The language model has no activation checkpointing here, because gradients
    # flow through all its layers; the tower has full checkpointing, because only its last layer
    # has gradients.
    options = EngineOptions(
        trained="lora_lm", precision=precision, tower="full", language="none", compile=False
    )
    weights = bytes_per_element * sum(memory_plan.count_parameters(config))
    batch = memory_plan.BatchShape(num_sequences=2, sequence_length=length)
    activations = memory_plan.activation_bytes(config, options, batch)
    # The estimate for the loss and its gradient: three tensors of the logits' shape in fp32.
    logits = 2 * length * config.padded_vocab_size * (bytes_per_element + 3 * 4)
    needed = weights + activations + logits
    free = free_ram() if device == "cpu" else memory_plan.min_free_gpu_memory()
    text = f"comparing in {precision} on {device}, one model after the other, needs about "
    text += f"{format_bytes(needed)} ({format_bytes(weights)} of weights)"
    print(f"{text}; {format_bytes(free)} are free", file=sys.stderr, flush=True)
    if needed > free:
        cure = "a larger machine" + (", or --precision bf16" if precision == "fp32" else "")
        raise ValueError(f"{text} and {format_bytes(free)} are free; expected {cure}")
