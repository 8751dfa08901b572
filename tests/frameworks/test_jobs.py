"""Other people's frameworks, run as their users run them, with a row for each job (record.py).

They take minutes and packages of their own: nox -f tests/noxfile.py -s jobs runs those of each
system in an environment of its own, and prints the table.
"""

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.frameworks import workshop
from tests.frameworks.record import Row, cannot, job
from tests.frameworks.workshop import RUN, succeed

HERE = Path(__file__).parent
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2")
ACCELERATE = (
    sys.executable,
    "-m",
    "accelerate.commands.launch",
    "--config_file",
    "accelerate.yaml",
)
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
}
TWO_ON_A_CPU = """
compute_environment: LOCAL_MACHINE
num_machines: 1
num_processes: 2
machine_rank: 0
mixed_precision: 'no'
use_cpu: true
main_process_port: 0
"""
ACCELERATE_FILES = {
    "DDP": TWO_ON_A_CPU + "distributed_type: MULTI_CPU\n",
    "FSDP2": TWO_ON_A_CPU
    + """distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_cpu_ram_efficient_loading: false
""",
    "DeepSpeed": TWO_ON_A_CPU
    + """distributed_type: DEEPSPEED
deepspeed_config:
  zero_stage: 3
  zero3_init_flag: false
  zero3_save_16bit_model: true
  gradient_accumulation_steps: 1
""",
}


@dataclass(frozen=True)
class Job:
    """One row.

    Attributes:
        command: What is run in a folder with ``model``, ``data`` and ``rows.json``.
        reads: As a reader would type it.
        model: "random", "blind" or "sighted" (:mod:`workshop`).
        measure: "answers", "preferences", or "reward" (answers, and the reward rises).
        files: Written to the folder first.
        needs: Modules that must be there.
    """

    system: str
    name: str
    package: str
    command: tuple[object, ...]
    reads: str
    model: str = "random"
    measure: str = "answers"
    files: dict[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    out: str = "out"
    note: str = ""


def trl(job: str, steps: int, rate: float, **more) -> Job:
    names = {"sft": "SFT", "sft_lora": "SFT, LoRA on all linear layers", "reward": "Reward"}
    command = (sys.executable, HERE / "trl_script.py", job, steps, rate)
    name = names.get(job, job.upper())
    trainer = f"trl.{name.split(',')[0]}Trainer"
    return Job("TRL", name, "trl", command, trainer, needs=("trl",), **more)


def trainers(trainer: str, system: str, name: str, start: tuple = (sys.executable,), **more) -> Job:
    command = (*start, HERE / "trainers_script.py", trainer, 60, 2e-3)
    return Job(system, name, more.pop("package"), command, more.pop("reads"), **more)


TRL_COMMAND = (
    *(*RUN, "trl", "sft", "--model_name_or_path", "model", "--trust_remote_code"),
    *("--dtype", "float32", "--dataset_name", "data/sft", "--output_dir", "out"),
    *("--max_steps", 60, "--per_device_train_batch_size", 24, "--learning_rate", 2e-3),
    *("--max_length", 4096, "--bf16", "false", "--use_cpu", "--report_to", "none"),
    *("--logging_steps", 1, "--save_strategy", "steps", "--save_steps", 60),
)
BY_TORCHRUN = "torchrun --nproc_per_node 2 train.py"
ANSWERS_ONLY = "begins at a model that had five steps of SFT"

JOBS = [
    trl("sft", 80, 2e-3),
    trl("sft_lora", 120, 5e-3, model="blind"),
    trl("dpo", 60, 5e-4, model="blind", measure="preferences"),
    trl("kto", 100, 1e-3, model="blind", measure="preferences"),
    trl(
        "reward",
        30,
        1e-3,
        measure="scores",
        note="text only: TRL's RewardTrainer takes no pictures",
    ),
    trl("grpo", 80, 4e-4, model="sighted", measure="reward", note=ANSWERS_ONLY),
    trl("rloo", 80, 4e-4, model="sighted", measure="reward", note=ANSWERS_ONLY),
    Job("TRL", "SFT, command line", "trl", TRL_COMMAND, "trl sft", needs=("trl",)),
    trainers("trainer", "transformers", "Trainer", package="transformers", reads="Trainer"),
    trainers(
        "trainer",
        "transformers",
        "Trainer, DDP",
        TORCHRUN,
        package="transformers",
        reads=BY_TORCHRUN,
    ),
    trainers(
        *("trainer", "transformers", "Trainer, DeepSpeed ZeRO-3", TORCHRUN),
        package="transformers",
        reads=BY_TORCHRUN,
        files={"deepspeed.json": json.dumps(DEEPSPEED)},
        needs=("deepspeed",),
    ),
    *(
        trainers(
            *("accelerate", "accelerate", name, ACCELERATE),
            package="accelerate",
            reads="accelerate launch --config_file accelerate.yaml train.py",
            files={"accelerate.yaml": text},
        )
        for name, text in ACCELERATE_FILES.items()
    ),
    *(
        trainers(
            *(name, "Lightning", f"{reads}, DDP"),
            package="lightning",
            reads=reads,
            needs=("lightning",),
        )
        for name, reads in {"lightning": "Trainer", "fabric": "Fabric"}.items()
    ),
    trainers(
        *("ray", "Ray Train", "TorchTrainer, 2 workers"),
        package="ray",
        reads="TorchTrainer",
        needs=("ray",),
    ),
    Job(
        "OpenRLHF",
        "Actor and SFTLoss, pictures",
        "openrlhf",
        (sys.executable, HERE / "openrlhf_script.py", 60, 2e-3),
        "openrlhf.models.Actor",
        needs=("openrlhf",),
        note="its pins on transformers 5.15.0 and flash-attn are ignored",
    ),
]
# What was tried and does not run here, with what it said.
DOES_NOT_RUN = {
    ("OpenRLHF", "SFT, DPO, reward model, PPO"): (
        "openrlhf",
        'not on a CPU: its Strategy makes init_device_mesh("cuda") and calls torch.cuda.set_device',
    ),
    ("verl", "any, with pictures"): (
        "verl",
        "its hf_processor has a list of processors by name (Qwen2VL, Glm4v, ...): for others it "
        'warns "Unsupported processor type: ChatGLMProcessor" and goes on without one',
    ),
    ("unsloth", "FastVisionModel"): (
        "unsloth",
        "not on a CPU: NotImplementedError: vision / audio models are not supported on the CPU "
        "backend yet",
    ),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Callable[[Job], tuple[Path, list[list[dict]]]]:
    """Makes folders with the model that a job begins with."""
    drawn = tmp_path_factory.mktemp("drawn")
    conversations = workshop.draw(drawn / "pictures")
    built: dict[str, Path] = {}

    def model(name: str) -> Path:
        if name not in built:
            folder = drawn / name
            if name == "sighted":
                workshop.build_sighted(folder, model("blind"), conversations)
            else:
                build = {"random": workshop.build_random, "blind": workshop.build_blind}[name]
                build(folder, conversations)
            built[name] = folder
        return built[name]

    def make(wanted: Job) -> tuple[Path, list[list[dict]]]:
        folder = tmp_path_factory.mktemp("user")
        (folder / "model").symlink_to(model(wanted.model))
        workshop.put_data(folder, conversations)
        for name, text in wanted.files.items():
            (folder / name).write_text(text)
        return folder, conversations

    return make


def history(folder: Path, name: str) -> list[float]:
    """What was logged at each step, wherever a trainer writes that."""
    if (folder / "losses.json").exists():
        return json.loads((folder / "losses.json").read_text())
    [state] = [*folder.glob("state.json"), *folder.glob("out/checkpoint-*/trainer_state.json")]
    return [e[name] for e in json.loads(state.read_text())["log_history"] if name in e]


def check(wanted: Job, folder: Path, conversations: list[list[dict]], done: Row) -> None:
    """Fill the row; ``AssertionError`` if nothing was learned, or not from the pictures."""
    if wanted.measure == "reward":
        values = history(folder, "reward")
        done.reward = values[0], sum(values[-5:]) / 5
    else:
        values = history(folder, "loss")
        done.loss = values[0], values[-1]
    if wanted.measure == "preferences":
        pairs = workshop.pairs_of(conversations)
        done.right, done.swapped = workshop.preferences(folder, wanted.out, pairs)
    elif wanted.measure == "scores":
        pairs = [("What do you see?", None, "a red circle", part) for part in ("red", "circle")]
        done.right, _ = workshop.preferences(folder, wanted.out, pairs)
    else:
        done.right, done.swapped = workshop.judged(folder, wanted.out, conversations)
    done.reloaded = True
    if done.reward is not None:
        assert done.reward[0] < 0.3 and done.reward[1] > 0.8, done.reward
    elif done.loss is not None:
        assert done.loss[1] < done.loss[0] / 2, done.loss
    # Of drawn answers some stay wrong: the same for any picture, or right for the swapped one.
    least, most = (0.8, 0.2) if wanted.measure == "reward" else (0.9, 0.1)
    assert done.right >= least, done.right
    assert done.swapped is None or done.swapped <= most, done.swapped


@pytest.mark.skipif(
    "FRAMEWORKS_RECORD" not in os.environ,
    reason="takes minutes and packages of its own: nox -f tests/noxfile.py -s jobs",
)
@pytest.mark.parametrize("wanted", JOBS, ids=lambda each: f"{each.system}: {each.name}")
def test_a_job_learns_from_pictures(wanted, place):
    for module in wanted.needs:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    folder, conversations = place(wanted)
    with job(wanted.system, wanted.name, wanted.reads, packages=[wanted.package]) as done:
        done.note = wanted.note
        succeed(folder, *wanted.command, seconds=1200)
        check(wanted, folder, conversations, done)


@pytest.mark.skipif("FRAMEWORKS_RECORD" not in os.environ, reason="only rows")
@pytest.mark.parametrize(("system", "name"), DOES_NOT_RUN, ids=lambda part: part.replace(" ", "-"))
def test_what_does_not_run_is_a_row(system, name):
    package, reason = DOES_NOT_RUN[system, name]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    cannot(system, name, reason, packages=[package])
