"""The sizes of :mod:`reading_task`, and its task: a folder, its commands and its report."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from reading_lines import Share

from tests.helpers.processes import gpu_environment, heed_signals

PYTHON = sys.executable
REPORT = "reading_task.json"


@dataclass(frozen=True)
class Size:
    """The model, the data and the trainings of a task.

    ``language`` and ``tower`` override fields of :func:`tiny_model.tiny_config`. ``steps``,
    ``rate`` and ``batch`` (samples per process) apply to the training of all weights, ``lora_*`` to
    adapters.
    """

    side: int
    language: dict
    tower: dict
    train: tuple[Share, ...]
    greek: tuple[Share, ...]
    held_out: int
    watched: int
    """Number of further held-out samples, which are answered during training."""
    batch: int
    steps: int
    rate: float
    lora_steps: int
    lora_rate: float
    lora_rank: int
    precision: str
    compile: bool


SIZES = {
    "tiny": Size(
        side=56,
        language={},
        tower={},
        train=(Share(160, "latin", 1, 4, plain=0.5), Share(10, "greek", 1, 1)),
        greek=(Share(40, "greek", 2, 5),),
        held_out=8,
        watched=4,
        batch=8,
        steps=40,
        rate=1e-3,
        lora_steps=4,
        lora_rate=1e-3,
        lora_rank=4,
        precision="fp32",
        compile=False,
    ),
    "mid": Size(
        side=140,
        language={
            "num_layers": 14,
            "hidden_size": 1024,
            "ffn_hidden_size": 3584,
            "kv_channels": 64,
            "num_attention_heads": 16,
            "multi_query_group_num": 4,
            "initializer_range": 0.02,
        },
        tower={
            "num_hidden_layers": 12,
            "hidden_size": 768,
            "num_heads": 12,
            "intermediate_size": 3072,
        },
        train=(
            Share(30_000, "latin", 1, 1, plain=0.5),
            Share(50_000, "latin", 2, 3, plain=0.3),
            Share(150_000, "latin", 4, 7, plain=0.05),
            Share(10_000, "greek", 1, 1, plain=0.3),
        ),
        greek=(Share(6_000, "greek", 1, 4, plain=0.1), Share(24_000, "greek", 5, 7)),
        held_out=500,
        watched=128,
        batch=128,
        steps=5000,
        rate=3e-4,
        lora_steps=400,
        lora_rate=5e-4,
        lora_rank=32,
        precision="bf16",
        compile=True,
    ),
}


class Failed(RuntimeError):
    """A command ended as it should not; the message has the end of what it printed."""


@dataclass
class Task:
    """A task: its folder, its report and its running commands."""

    folder: Path
    size: Size
    gpus: int
    """0 for one process on the CPU."""
    report: dict = field(default_factory=dict)
    running: list[subprocess.Popen] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        seconds = time.monotonic() - self.started
        print(f"{time.strftime('%H:%M:%S')} {seconds:6.1f} s  {text}", flush=True)

    def write(self) -> None:
        text = json.dumps(self.report, indent=1, ensure_ascii=False)
        partial = self.folder / f"{REPORT}.partial"
        partial.write_text(text + "\n", encoding="utf-8")
        partial.replace(self.folder / REPORT)

    @property
    def device(self) -> list[str]:
        return [] if self.gpus else ["--device", "cpu"]

    @property
    def everywhere(self) -> list[str]:
        return ["--processes", str(self.gpus or 1), *self.device]

    @property
    def one(self) -> list[str]:
        return ["--processes", "1", *self.device]

    def log_of(self, name: str) -> Path:
        (self.folder / "logs").mkdir(exist_ok=True)
        return self.folder / "logs" / f"{name}.log"

    def start(self, name: str, *arguments: str, gpu: int | None = None) -> subprocess.Popen:
        """Start a command of glm4v-patched in the task's folder; it prints to ``logs/NAME.log``."""
        self.say(f"glm4v-patched {shlex.join(arguments)}")
        environment = gpu_environment()
        if gpu is not None and self.gpus:
            variable = os.environ.get("CUDA_VISIBLE_DEVICES")
            visible = variable.split(",") if variable else [str(n) for n in range(self.gpus)]
            environment |= {"CUDA_VISIBLE_DEVICES": visible[gpu % self.gpus]}
        with self.log_of(name).open("a") as log:
            process = subprocess.Popen(
                [PYTHON, "-m", "glm4v_patched", *arguments],
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=heed_signals,
            )
        self.running.append(process)
        return process

    def stop(self) -> None:
        """Send SIGINT to all commands that still run, and wait for them."""
        for process in self.running:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
        for process in self.running:
            process.wait()

    def wait(self, name: str, process: subprocess.Popen, expected: Sequence[int] = (0,)) -> int:
        status = process.wait()
        if status not in expected:
            end = self.log_of(name).read_text(errors="replace")[-3000:]
            raise Failed(f"{name} ended with status {status}\n{end}")
        return status

    def run(self, name: str, *arguments: str) -> None:
        self.wait(name, self.start(name, *arguments))

    def run_side_by_side(self, commands: dict[str, list[str]]) -> None:
        """Run commands concurrently; those that answer get one GPU each.

        Raises:
            Failed: one of them failed; raised when all have ended.
        """
        processes = {}
        for number, (name, arguments) in enumerate(commands.items()):
            gpu = None if arguments[0] in ("train", "merge") else number
            processes[name] = self.start(name, *arguments, gpu=gpu)
        for process in processes.values():
            process.wait()
        for name, process in processes.items():
            self.wait(name, process)
