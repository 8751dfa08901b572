"""``glm4v-patched demo``: fine-tune a tiny glm-4v, and test that it uses the images.

1. Draw a data set of images with questions, and write it to files.
2. Save a tiny model with random weights, and train it from those files on several processes with
   DeepSpeed ZeRO-3 and activation checkpointing.
3. Load the saved models in a fresh process that cannot import this package, and let them answer
   questions about unseen images: before training, after it, and with the images swapped.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

from transformers.utils.logging import disable_progress_bar

from ..atomic import write_atomically
from ..data.rows import DataSource, read_conversations, write_conversations
from ..engine.deepspeed.config import require_deepspeed
from ..engine.gpus import find_gpus
from ..engine.options import EngineSection
from ..finetune.job import resolve_recipe
from ..finetune.launch import launch
from ..finetune.plots import plot_loss
from ..finetune.recipe.sections import Data, Recipe, TrainerFields
from ..finetune.run_folder import locked
from ..inference.contact_sheet import draw_sheet
from ..inference.questions import Question, digest_image_files, make_question
from ..inference.scoring import mean_score, swap_images
from ..models.placement import Device, Placement, place_processes
from ..terminal_text import pluralize, show_progress, write_line
from .images import TASKS, draw_data_set
from .tiny_model import IMAGE_SIDE, build_from_scratch

NUM_TRAIN, NUM_HELD_OUT = 2400, 96
# More steps of fewer samples would take longer: DeepSpeed's own code takes most of a step's time.
MICRO_BATCH, LEARNING_RATE, SEED = 32, 2.5e-3, 0
# With one layer, ZeRO-3 gathers 36 parameters a step. A second layer would take a third more time.
ONE_LAYER: dict[str, dict[str, Any]] = {
    "language": {"num_layers": 1, "initializer_range": 0.1},
    "tower": {"num_hidden_layers": 1},
}
ZERO_STAGE: Final = 3
# Files and folders that the demo writes. MARKER_FILE beside them shows that a demo wrote them.
EXCHANGE_FILES = ["requests.json", "replies.json"]  # to and from the fresh process
OUTPUT_NAMES = [
    "data",
    "initial",
    "trained",
    *EXCHANGE_FILES,
    "loss.png",
    "answers.png",
    "metrics.json",
]
MARKER_FILE = "demo.txt"
# This script must never be imported, because it makes this package unimportable.
ANSWER_SCRIPT = Path(__file__).with_name("fresh_process.py")


def place_demo(processes: int | None, device: Device | None) -> Placement:
    """Choose the number of processes and the device.

    The default is two processes, or one if there is a single GPU; on the CPU if there is no GPU.

    Raises:
        PlacementError: There are GPUs, but fewer than ``processes``.
    """
    gpus = find_gpus()
    if device is None and not gpus.devices:
        write_line(f"the demo runs on the CPU, because there is no GPU: {gpus.reason}")
        device = "cpu"
    if processes is None:
        processes = 1 if device != "cpu" and len(gpus) == 1 else 2
    return place_processes(processes, device or "cuda")


def run_demo(out: Path, placement: Placement, steps: int, task: str = "shapes") -> dict:
    """Run the demo, and return the figures that it also writes to ``out/metrics.json``.

    Args:
        out: Folder of all outputs; files of an earlier demo are overwritten.
        placement: Processes and device.
        steps: Training steps.
        task: What the model learns, a key of :data:`TASKS`.

    Raises:
        ValueError: The demo would overwrite a file in ``out`` that no demo has written.
        RuntimeError: Training cannot run or failed.
    """
    require_deepspeed()
    with locked(out):
        out = out.resolve()
        _require_replaceable(out)
        (out / MARKER_FILE).write_text("glm4v-patched demo has written the files of this folder.\n")
        return _run_with_fresh_process(out, placement, steps, task)


def _require_replaceable(out: Path) -> None:
    """Raise ``ValueError`` if the demo would overwrite files that no demo has written."""
    present = [name for name in OUTPUT_NAMES if os.path.lexists(out / name)]
    cure = "expected --out to be another folder"
    if present and not (out / MARKER_FILE).is_file():
        raise ValueError(
            f"{out} contains {', '.join(present)}, not written by a demo, which would be "
            f"overwritten; {cure}"
        )
    for name in present:
        if (out / name).is_symlink():
            raise ValueError(
                f"{out / name} is a symbolic link, whose target would be overwritten; {cure}"
            )


def _run_with_fresh_process(out: Path, placement: Placement, steps: int, task: str) -> dict:
    """Start the process that answers, then train and evaluate; return the figures."""
    started = time.time()
    command = [sys.executable, str(ANSWER_SCRIPT), *(str(out / name) for name in EXCHANGE_FILES)]
    # The process imports torch now, while a core is idle, and answers when its stdin closes.
    pipe: dict[str, Any] = {"stdin": subprocess.PIPE, "start_new_session": True}
    with subprocess.Popen(command, **pipe) as fresh_process:
        try:
            return _train_and_evaluate(out, placement, steps, task, fresh_process, started)
        except BaseException:
            fresh_process.kill()
            raise


def _train_and_evaluate(
    out: Path,
    placement: Placement,
    steps: int,
    task: str,
    fresh_process: subprocess.Popen,
    started: float,
) -> dict:
    disable_progress_bar()  # loading a tiny model needs none
    train_file = _write_data_set(out / "data", "train", NUM_TRAIN, SEED, task)
    held_out_file = _write_data_set(out / "data", "held_out", NUM_HELD_OUT, SEED + 1, task)
    boxes = "pixels_xyxy" if task == "boxes" else None
    train, held_out = (
        read_conversations(DataSource(str(path), boxes=boxes))
        for path in (train_file, held_out_file)
    )
    build_from_scratch(out / "initial", train, SEED, **ONE_LAYER)
    write_line(f"data: {train_file}, {len(held_out)} conversations held out")

    recipe = Recipe(
        model=str(out / "initial"),
        out=str(out / "trained"),
        data=Data(train=str(train_file), boxes=boxes),
        # Full checkpointing is set, because "auto" would choose none for such a small model.
        engine=EngineSection(zero_stage=ZERO_STAGE, tower="full", language="full", offload=False),
        trainer=TrainerFields(
            max_steps=steps,
            # A single process takes the batch of two, because half of it would teach too little.
            per_device_train_batch_size=MICRO_BATCH * (2 if placement.processes == 1 else 1),
            learning_rate=LEARNING_RATE,
            seed=SEED,
        ),
    )
    write_line(
        f"training {pluralize(steps, 'step')} on {pluralize(placement.processes, 'process')}, "
        f"ZeRO-{ZERO_STAGE}, activation checkpointing"
    )
    launch(resolve_recipe(recipe), placement, overwrite=True)
    report = json.loads((out / "trained" / "training.json").read_text())

    questions = [make_question(index, messages) for index, messages in enumerate(held_out)]
    swapped = swap_images(questions, digest_image_files(questions))
    before, after, after_swapped = _ask(
        fresh_process,
        out,
        [
            (out / "initial", questions),
            (out / "trained", questions),
            (out / "trained", swapped),
        ],
    )
    plot_loss(report["history"], out / "loss.png")
    draw_sheet(questions, after, out / "answers.png")
    score = TASKS[task].score_name
    metrics = {
        f"{score}_before": _mean_score(task, before, questions),
        f"{score}_after": _mean_score(task, after, questions),
        f"{score}_swapped": _mean_score(task, after_swapped, swapped),
        "seconds": round(time.time() - started, 1),
        "world_size": report["world_size"],
        "zero_stage": ZERO_STAGE,
        "steps": steps,
        "held_out": len(held_out),
        "loss_first": report["history"][0]["loss"],
        "loss_last": report["history"][-1]["loss"],
    }
    write_atomically(out / "metrics.json", json.dumps(metrics, indent=2) + "\n")
    return metrics


def _write_data_set(folder: Path, name: str, num_images: int, seed: int, task: str) -> Path:
    """Write images and a conversation about each, and return the file of conversations."""
    conversations = draw_data_set(folder / name, num_images, seed, IMAGE_SIDE, task)
    write_conversations(folder / f"{name}.jsonl", conversations, overwrite=True)
    return folder / f"{name}.jsonl"


def _ask(
    fresh_process: subprocess.Popen, out: Path, requests: list[tuple[Path, list[Question]]]
) -> list[list[str]]:
    """Return the answers to each list of questions by the model in its folder."""
    request_file, reply_file = (out / name for name in EXCHANGE_FILES)
    serialized = [
        {"model": str(folder), "prompts": [question.prompt for question in questions]}
        for folder, questions in requests
    ]
    request_file.write_text(json.dumps(serialized))
    with show_progress("loading the saved model in a fresh process, and asking it"):
        fresh_process.communicate()
    if fresh_process.returncode:
        raise RuntimeError(
            f"the process that answers with the saved model failed with exit status "
            f"{fresh_process.returncode}; its error is printed above (questions: {request_file})"
        )
    return json.loads(reply_file.read_text())


def _mean_score(task: str, answers: list[str], questions: list[Question]) -> float | None:
    pairs = zip(answers, (question.reference or "" for question in questions), strict=True)
    return mean_score(TASKS[task].score_name, TASKS[task].score, pairs)
