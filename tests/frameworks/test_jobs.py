"""Other people's frameworks, run as their users run them: an entry of JOBS for each job.

Each makes a row of the table in docs/frameworks.md (results_table.py).

They take minutes and packages of their own: nox -f tests/noxfile.py -s jobs runs those of each
system in an environment of its own, and prints the table.
"""

import importlib.util
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.frameworks import drawn_task
from tests.frameworks.drawn_task import RUN, succeed
from tests.frameworks.results_table import cannot, job

HERE = Path(__file__).parent
TWO = ("--nproc_per_node", "2")
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
AXOLOTL = """
base_model: model
trust_remote_code: true
processor_type: AutoProcessor
datasets:
  - {path: messages.jsonl, ds_type: json, type: chat_template, field_messages: messages}
chat_template: tokenizer_default
skip_prepare_dataset: true
remove_unused_columns: false
sample_packing: false
sequence_len: 4096
gradient_accumulation_steps: 1
max_steps: 60
lr_scheduler: constant
optimizer: adamw_torch
bf16: false
tf32: false
output_dir: out
logging_steps: 1
save_steps: 60
"""
AXOLOTL_LORA = "adapter: lora\nlora_r: 8\nlora_alpha: 16\nlora_target_modules: all-linear\n"


@dataclass(frozen=True)
class Job:
    """One row.

    Attributes:
        command: What is run in a folder with ``model``, ``data`` and ``rows.json``.
        reads: As a reader would type it.
        model: "random", "blind" or "sighted" (:mod:`drawn_task`).
        measure, logged: :func:`drawn_task.measure`.
        files: Written to the folder first.
        needs: Modules that must be there.
        then: What is run after the command, such as what merges an adapter.
        out: The folder that is judged.
    """

    system: str
    name: str
    package: str
    command: tuple[object, ...]
    reads: str
    model: str = "random"
    measure: str = "answers"
    logged: str = ""
    files: dict[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    then: tuple[object, ...] = ()
    out: str = "out"
    note: str = ""


def trl(job: str, steps: int, rate: float, **more) -> Job:
    names = {
        "sft": "SFT",
        "sft_lora": "SFT, LoRA on all linear layers",
        "reward": "Reward",
        "reward_lora": "Reward, LoRA",
        "online_dpo": "online DPO",
    }
    command = (sys.executable, HERE / "trl_script.py", job, steps, rate, SEED)
    name = names.get(job, job.upper())
    trainer = {"online_dpo": "trl.experimental.online_dpo.OnlineDPOTrainer"}.get(
        job, f"trl.{name.split(',')[0]}Trainer"
    )
    return Job("TRL", name, "trl", command, trainer, needs=("trl",), **more)


def trl_command(job: str, steps: int, rate: float, *options: object, **more) -> Job:
    """The same by TRL's command line, with another seed."""
    common = (
        *("--model_name_or_path", "model", "--trust_remote_code", "--dtype", "float32"),
        *("--dataset_name", f"data/{job}", "--output_dir", "out", "--max_steps", steps),
        *("--learning_rate", rate, "--per_device_train_batch_size", 24, "--seed", SEED + 1),
        *("--bf16", "false", "--use_cpu", "--report_to", "none", "--logging_steps", 1),
        *("--save_strategy", "steps", "--save_steps", steps),
    )
    names = {"reward": "Reward"}
    name = f"{names.get(job, job.upper())}, command line"
    reads = " ".join(map(str, ("trl", job, *options)))
    command = (*RUN, "trl", job, *common, *options)
    return Job("TRL", name, "trl", command, reads, needs=("trl",), **more)


def trainers(trainer: str, system: str, name: str, start: tuple = (sys.executable,), **more) -> Job:
    command = (*start, HERE / "any_trainer_script.py", trainer, 60, 2e-3)
    return Job(system, name, more.pop("package"), command, more.pop("reads"), **more)


def axolotl(name: str, more: str, batch: int, rate: float, *options: str, **further) -> Job:
    text = f"{AXOLOTL}micro_batch_size: {batch}\nlearning_rate: {rate}\n{more}"
    command = (*RUN, "axolotl", "train", "axolotl.yaml", *options)
    reads = " ".join(("axolotl train axolotl.yaml", *options))
    files = {"axolotl.yaml": text, "deepspeed.json": json.dumps(DEEPSPEED)}
    note = "its pin on transformers 5.16.1 is ignored"
    return Job(
        *("axolotl", name, "axolotl", command, reads),
        files=files,
        needs=("axolotl",),
        **{"note": note} | further,
    )


SEED = 0
WHOLE_ROWS = ("--max_length", 4096)
ONLINE = (
    *("--reward_funcs", "trl_script.right_answers", "--num_generations", 32),
    *("--per_device_train_batch_size", 768, "--max_completion_length", 8),
    *("--temperature", 1.0, "--beta", 0.0),
)
REWARD_FUNCTION = {"trl_script.py": (HERE / "trl_script.py").read_text()}
BY_TORCHRUN = "torchrun --nproc_per_node 2 train.py"
SIGHTED = "begins at a model that had five steps of SFT"
TEXT_ONLY = "text only: TRL's RewardTrainer takes no pictures"
ONE_LINE = f"needs one line, trainer.is_vision_model = True; {SIGHTED}"

JOBS = [
    trl("sft", 80, 2e-3),
    trl("sft_lora", 120, 5e-3, model="blind"),
    trl("dpo", 60, 5e-4, model="blind", measure="preferences"),
    trl("kto", 100, 1e-3, model="blind", measure="preferences"),
    trl("reward", 30, 1e-3, measure="scores", note=TEXT_ONLY),
    trl("reward_lora", 60, 5e-3, measure="scores", note=f'task_type="SEQ_CLS"; {TEXT_ONLY}'),
    trl("grpo", 100, 4e-4, model="sighted", measure="reward", note=SIGHTED),
    trl("rloo", 100, 4e-4, model="sighted", measure="reward", note=SIGHTED),
    trl(
        *("online_dpo", 120, 4e-4),
        model="sighted",
        measure="reward",
        logged="objective/scores",
        note=ONE_LINE,
    ),
    trl_command("sft", 60, 2e-3, *WHOLE_ROWS),
    trl_command(
        *("dpo", 60, 5e-4, "--beta", 0.3, *WHOLE_ROWS), model="blind", measure="preferences"
    ),
    trl_command(
        *("kto", 160, 1e-3, "--beta", 0.3, *WHOLE_ROWS), model="blind", measure="preferences"
    ),
    trl_command("reward", 30, 1e-3, *WHOLE_ROWS, measure="scores", note=TEXT_ONLY),
    # The seed that is given last counts. RLOO learned to 0.79 in 100 steps of seed 1.
    *(
        trl_command(
            *(job, steps, 4e-4, *ONLINE, "--seed", seed),
            model="sighted",
            measure="reward",
            files=REWARD_FUNCTION,
            note=f"another seed; {SIGHTED}",
        )
        for job, steps, seed in (("grpo", 100, SEED + 1), ("rloo", 180, SEED + 2))
    ),
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
    axolotl("SFT", "", 24, 2e-3),
    axolotl(
        *("SFT, two processes, ZeRO-3", "deepspeed: deepspeed.json\n", 12, 2e-3),
        *("--launcher", "torchrun", "--", *TWO),
        note="by DDP alone it puts the model on GPU 0 and 1; its pin on transformers is ignored",
    ),
    axolotl(
        *("SFT, LoRA", AXOLOTL_LORA, 24, 1e-2),
        then=(*RUN, "axolotl", "merge-lora", "axolotl.yaml", "--lora-model-dir", "out"),
        out="out/merged",
        note="merged by axolotl merge-lora; its pin on transformers 5.16.1 is ignored",
    ),
    Job(
        "OpenRLHF",
        "Actor and SFTLoss, pictures",
        "openrlhf",
        (sys.executable, HERE / "openrlhf_script.py", "actor", 60, 2e-3),
        "openrlhf.models.Actor",
        needs=("openrlhf",),
        note="its pins on transformers 5.15.0 and flash-attn are ignored",
    ),
    Job(
        "OpenRLHF",
        "reward model and PairWiseLoss",
        "openrlhf",
        (*RUN, HERE / "openrlhf_script.py", "reward", 30, 1e-3),
        "openrlhf.models.get_llm_for_sequence_regression",
        measure="scores",
        needs=("openrlhf",),
        note="text only, as its rows are; it saves no code: put the model's files beside it, and "
        "load it with num_labels=1",
    ),
]


@dataclass(frozen=True)
class DoesNotRun:
    """A row of what was tried: ``command`` says ``said``, and ``reason`` explains that."""

    system: str
    name: str
    package: str
    command: tuple[str, ...]
    reads: str
    said: str
    reason: str


DOES_NOT_RUN = [
    DoesNotRun(
        *("OpenRLHF", "SFT, DPO, reward model, PPO", "openrlhf"),
        ("-m", "openrlhf.cli.train_sft"),
        "python -m openrlhf.cli.train_sft",
        "No module named 'flash_attn'",
        "not on a CPU: they import flash_attn, which is installed beside CUDA alone; with an empty "
        'one in its place, their Strategy calls torch.cuda.set_device, which ends with "module '
        "'torch._C' has no attribute '_cuda_setDevice'\"",
    ),
    DoesNotRun(
        *("verl", "any, with pictures", "verl"),
        (
            "-c",
            "from verl.utils.tokenizer import hf_processor\n"
            "assert hf_processor('model', trust_remote_code=True) is None",
        ),
        "verl.utils.tokenizer.hf_processor",
        "Unsupported processor type: ChatGLMProcessor",
        "its hf_processor has a list of processors by name (Qwen2VL, Glm4v, ...): for others it "
        'warns "Unsupported processor type: ChatGLMProcessor" and goes on without one',
    ),
    DoesNotRun(
        *("unsloth", "FastVisionModel", "unsloth"),
        (
            "-c",
            "from unsloth import FastVisionModel\n"
            "FastVisionModel.from_pretrained('model', trust_remote_code=True)",
        ),
        "unsloth.FastVisionModel.from_pretrained",
        "vision / audio models are not supported on the CPU backend yet",
        "not on a CPU: NotImplementedError: vision / audio models are not supported on the CPU "
        "backend yet",
    ),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> drawn_task.Models:
    return drawn_task.Models(tmp_path_factory.mktemp("models"))


@pytest.mark.skipif(
    "FRAMEWORKS_RECORD" not in os.environ,
    reason="takes minutes and packages of its own: nox -f tests/noxfile.py -s jobs",
)
@pytest.mark.parametrize("wanted", JOBS, ids=lambda each: f"{each.system}: {each.name}")
def test_a_job_learns_from_pictures(wanted, models, tmp_path):
    for module in wanted.needs:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    (tmp_path / "model").symlink_to(models(wanted.model))
    drawn_task.put_data(tmp_path, models.conversations)
    for name, text in wanted.files.items():
        (tmp_path / name).write_text(text)
    with job(wanted.system, wanted.name, wanted.reads, packages=[wanted.package]) as done:
        done.note = wanted.note
        succeed(tmp_path, *wanted.command, seconds=1800)
        if wanted.then:
            succeed(tmp_path, *wanted.then)
        drawn_task.measure(
            wanted.measure, tmp_path, wanted.out, models.conversations, done, wanted.logged
        )


@pytest.mark.skipif("FRAMEWORKS_RECORD" not in os.environ, reason="packages of its own")
@pytest.mark.parametrize("tried", DOES_NOT_RUN, ids=lambda each: f"{each.system}: {each.name}")
def test_what_does_not_run_says_why(tried, models, tmp_path):
    if importlib.util.find_spec(tried.package) is None:
        pytest.skip(f"{tried.package} is not installed")
    (tmp_path / "model").symlink_to(models("random"))
    ended = drawn_task.run(tmp_path, sys.executable, *tried.command)
    assert tried.said in ended.output, ended.output[-6000:]
    packages = [tried.package]
    cannot(tried.system, tried.name, tried.reason, packages=packages, command=tried.reads)
