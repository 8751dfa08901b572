"""Other people's frameworks, run as their users run them: an entry of JOBS for each job.

Each makes a row of the table in docs/frameworks.md (results_table.py), by test_jobs.py.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

from tests.frameworks.drawn_task import RUN

HERE = Path(__file__).parent
PYTHON = (sys.executable,)
# --standalone takes a free port.
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
# What ends with an adapter, and has no command of its own to merge it.
MERGE = (*RUN, "-m", "glm4v_patched", "merge", "adapter", "--out", "merged")
# What users write for their frameworks, by the name that it has for them.
FILES = {path.name: path.read_text() for path in (HERE / "files").iterdir() if path.is_file()}
ZERO3 = {"deepspeed.json": FILES["deepspeed.json"]}


@dataclass(frozen=True)
class Job:
    """One row. The command is run in a folder with ``model``, ``published``, ``files`` and what
    :func:`drawn_task.put_data` puts there; some start their processes by ``environment``."""

    system: str
    name: str
    package: str  # whose version is the system's
    command: tuple[object, ...]
    reads: str  # as a reader would type it
    model: str = "random"  # of drawn_task.Models
    measure: str = "answers"  # of drawn_task.measure, of the folder out
    logged: str = ""
    files: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    then: tuple[object, ...] = ()  # what is run after the command, such as what merges an adapter
    out: str = "out"
    note: str = ""
    fails: str = ""  # a pattern of what it ends with where it does not work: the row's outcome
    gpus: int = 0  # how many it needs
    beside: str = ""  # another package that it needs
    deepspeed: str = ""  # the release that it has to have: its error is one of some releases

    def __str__(self) -> str:
        return f"{self.system}: {self.name}"


# TRL
SEED = 0
REPOSITORY = "SFT, LoRA, published repository"
WHOLE_ROWS = ("--max_length", 4096)
SIGHTED = "begins at a model that had five steps of SFT"
TEXT_ONLY = "text only: TRL's RewardTrainer takes no images"
PREFERS = {"model": "blind", "measure": "preferences"}
DRAWS = {"model": "sighted", "measure": "reward"}


def trl(name: str, job: str, steps: int, rate: float, **more) -> Job:
    trainer = more.pop("reads", f"trl.{name.split(',')[0]}Trainer")
    command = (*more.pop("start", PYTHON), HERE / "trl_script.py", job, steps, rate, SEED)
    return Job("TRL", name, "trl", command, trainer, **more)


def trl_sharded(name: str, job: str, steps: int, rate: float, **more) -> Job:
    """The same on two processes under ZeRO-3; adapters are merged afterwards."""
    if job.endswith("_lora"):
        more |= {"then": MERGE, "out": "merged"}
    trainer = f"trl.{job.removesuffix('_lora').upper()}Trainer"
    return trl(name, job, steps, rate, start=TORCHRUN, reads=trainer, files=ZERO3, **more)


def trl_command(name: str, job: str, steps: int, rate: float, *options: object, **more) -> Job:
    """The same by TRL's command line, with another seed."""
    common = {
        "--model_name_or_path": "model",
        "--dtype": "float32",
        "--dataset_name": f"data/{job}",
        "--output_dir": "out",
        "--max_steps": steps,
        "--learning_rate": rate,
        "--per_device_train_batch_size": 24,
        "--seed": SEED + 1,
        "--bf16": "false",
        "--report_to": "none",
        "--logging_steps": 1,
        "--save_strategy": "steps",
        "--save_steps": steps,
    }
    arguments = [part for pair in common.items() for part in pair]
    command = (*RUN, "trl", job, "--trust_remote_code", "--use_cpu", *arguments, *options)
    reads = " ".join(map(str, ("trl", job, *options)))
    return Job("TRL", f"{name}, command line", "trl", command, reads, **more)


TRL = [
    trl("SFT", "sft", 80, 2e-3),
    trl("SFT, LoRA on all linear layers", "sft_lora", 120, 5e-3, model="blind"),
    Job(
        *("TRL", REPOSITORY, "trl", (*RUN, HERE / "sft_script.py")),
        "python -m glm4v_patched.run sft_script.py",
        out="merged",
    ),
    Job(
        *("TRL", "SFT, LoRA: the published code (a stand-in)", "trl"),
        (*PYTHON, HERE / "sft_script.py"),
        "python sft_script.py",
        fails="ValueError: .* does not seem to be a vision-language model",
    ),
    trl("DPO", "dpo", 60, 5e-4, **PREFERS),
    trl_sharded("two processes on a CPU: DPO, LoRA, ZeRO-3", "dpo_lora", 60, 5e-3, **PREFERS),
    trl_sharded("two GPUs: DPO, LoRA, ZeRO-3", "dpo_lora", 60, 5e-3, gpus=2, **PREFERS),
    trl("KTO", "kto", 100, 1e-3, **PREFERS),
    trl("Reward", "reward", 30, 1e-3, measure="scores", note=TEXT_ONLY),
    trl(
        *("Reward, LoRA", "reward_lora", 60, 5e-3),
        measure="scores",
        note=f'task_type="SEQ_CLS"; {TEXT_ONLY}',
    ),
    trl("GRPO", "grpo", 100, 4e-4, note=SIGHTED, **DRAWS),
    trl_sharded("two GPUs: GRPO, ZeRO-3", "grpo", 100, 4e-4, gpus=2, note=SIGHTED, **DRAWS),
    trl(
        name="GRPO, vLLM generates",
        job="grpo_vllm",
        steps=100,
        rate=4e-4,
        reads="trl.GRPOTrainer with use_vllm=True, one GPU",
        note=SIGHTED,
        gpus=1,
        beside="vllm",
        **DRAWS,
    ),
    trl("RLOO", "rloo", 100, 4e-4, note=SIGHTED, **DRAWS),
    trl(
        *("online DPO", "online_dpo", 120, 4e-4),
        reads="trl.experimental.online_dpo.OnlineDPOTrainer",
        logged="objective/scores",
        note=SIGHTED,
        **DRAWS,
    ),
    trl_command("SFT", "sft", 60, 2e-3, *WHOLE_ROWS),
    trl_command(
        *(REPOSITORY, "sft", 80, 1e-2, "--model_name_or_path", "published"),
        *("--use_peft", "--lora_r", 8, "--lora_target_modules", "all-linear", *WHOLE_ROWS),
        *("--output_dir", "adapter"),
        then=MERGE,
        out="merged",
    ),
    trl_command("DPO", "dpo", 60, 5e-4, "--beta", 0.3, *WHOLE_ROWS, **PREFERS),
    trl_command("KTO", "kto", 160, 1e-3, "--beta", 0.3, *WHOLE_ROWS, **PREFERS),
    trl_command("Reward", "reward", 30, 1e-3, *WHOLE_ROWS, measure="scores", note=TEXT_ONLY),
]


# Trainers that take any model.
ACCELERATE = (sys.executable, "-m", "accelerate.commands.launch", "--config_file")
BY_TORCHRUN = "torchrun --nproc_per_node 2 train.py"


def trainer(trainer: str, system: str, package: str, name: str, reads: str, **more) -> Job:
    start = more.pop("start", PYTHON)
    command = (*start, HERE / "any_trainer_script.py", trainer, 60, 2e-3)
    return Job(system, name, package, command, reads, **more)


HUGGING_FACE = ("trainer", "transformers", "transformers")
ANY_TRAINER = [
    trainer(*HUGGING_FACE, "Trainer", "Trainer"),
    trainer(*HUGGING_FACE, "Trainer, DDP", BY_TORCHRUN, start=TORCHRUN),
    trainer(*HUGGING_FACE, "Trainer, DeepSpeed ZeRO-3", BY_TORCHRUN, start=TORCHRUN, files=ZERO3),
    *(
        trainer(
            *("accelerate", "accelerate", "accelerate", name),
            "accelerate launch --config_file accelerate.yaml train.py",
            start=(*ACCELERATE, "accelerate.yaml"),
            files={"accelerate.yaml": FILES[f"accelerate_{name.lower()}.yaml"]},
        )
        for name in ("DDP", "FSDP2", "DeepSpeed")
    ),
    trainer("lightning", "Lightning", "lightning", "Trainer, DDP", "Trainer"),
    trainer("fabric", "Lightning", "lightning", "Fabric, DDP", "Fabric"),
    trainer("ray", "Ray Train", "ray", "TorchTrainer, 2 workers", "TorchTrainer"),
]


# How people train on several GPUs where they reported failures.
ON_ZERO3 = "two GPUs: LoRA, bf16, ZeRO-3, checkpoints, DeepSpeed"


def on_gpus(name: str, start: tuple, **more) -> Job:
    """Adapters of the published repository."""
    command = (*start, "-m", "glm4v_patched.run", HERE / "any_trainer_script.py")
    by = "python" if start == PYTHON else "torchrun --nproc_per_node 2"
    return Job(
        *("transformers", name, "transformers", (*command, "adapters", 60, 1e-2)),
        f"{by} -m glm4v_patched.run train.py",
        **{"model": "published", "then": MERGE, "out": "merged", "gpus": 2} | more,
    )


ON_GPUS = [
    on_gpus(f"{ON_ZERO3} 0.19.2", TORCHRUN, files=ZERO3, deepspeed="0.19.2"),
    on_gpus(f"{ON_ZERO3} 0.19.8", TORCHRUN, files=ZERO3, deepspeed="0.19.8"),
    on_gpus('two GPUs: LoRA, device_map="auto"', PYTHON),
    on_gpus("two GPUs: LoRA, DDP, checkpoints", TORCHRUN),
]


# axolotl, OpenRLHF
ITS_PIN = "its pin on transformers 5.16.1 is ignored"


def axolotl(
    name: str, more: str, *, batch: int, rate: float, options: tuple[str, ...] = (), **further
) -> Job:
    text = f"{FILES['axolotl.yaml']}micro_batch_size: {batch}\nlearning_rate: {rate}\n{more}"
    words = ("axolotl", "train", "axolotl.yaml", *options)
    further = {"files": {"axolotl.yaml": text, **ZERO3}, "note": ITS_PIN} | further
    # Without a network, axolotl waits for its telemetry server before it exits.
    further["environment"] = {"AXOLOTL_DO_NOT_TRACK": "1"}
    return Job("axolotl", name, "axolotl", (*RUN, *words), " ".join(words), **further)


OTHERS = [
    axolotl("SFT", "", batch=24, rate=2e-3),
    axolotl(
        "SFT, two processes, ZeRO-3",
        "deepspeed: deepspeed.json\n",
        batch=12,
        rate=2e-3,
        options=("--launcher", "torchrun", "--", "--nproc_per_node", "2"),
        note="with DDP alone, axolotl puts the model on GPUs 0 and 1; "
        "its pin on transformers is ignored",
    ),
    axolotl(
        "SFT, LoRA",
        FILES["axolotl_lora.yaml"],
        batch=24,
        rate=1e-2,
        then=(*RUN, "axolotl", "merge-lora", "axolotl.yaml", "--lora-model-dir", "out"),
        out="out/merged",
        note=f"merged by axolotl merge-lora; {ITS_PIN}",
    ),
    Job(
        *("OpenRLHF", "Actor and SFTLoss, images", "openrlhf"),
        (*PYTHON, HERE / "openrlhf_script.py", "actor", 60, 2e-3),
        "openrlhf.models.Actor",
        note="its pins on transformers 5.15.0 and flash-attn are ignored",
    ),
    Job(
        *("OpenRLHF", "reward model and PairWiseLoss", "openrlhf"),
        (*RUN, HERE / "openrlhf_script.py", "reward", 30, 1e-3),
        "openrlhf.models.get_llm_for_sequence_regression",
        measure="scores",
        note="text only; OpenRLHF saves no code: add the model's code files, and load with "
        "num_labels=1",
    ),
]


# ms-swift, and LLaMA-Factory: the words that are worth reading, and what all have in common.
ALL_PARTS = "--freeze_vit false --freeze_aligner false"
FULL = f"--tuner_type full {ALL_PARTS}"
SWIFT_LORA = f"--tuner_type lora --target_modules all-linear {ALL_PARTS}"
GRPO = (
    "--rlhf_type grpo --external_plugins reward.py --reward_funcs right --num_generations 32 "
    f"--max_completion_length 8 --temperature 1.0 --beta 0 --use_vllm false {FULL}"
)


def swift(name: str, words: str, data: str = "images", **more) -> Job:
    """What it saves as an adapter, it merges."""
    steps = more.pop("steps", 60)
    common = {
        "model": "model",
        "dataset": f"data/{data}.jsonl",
        "split_dataset_ratio": 0,
        "torch_dtype": "float32",
        "output_dir": "out",
        "add_version": "false",
        "max_steps": steps,
        "save_steps": steps,
        "per_device_train_batch_size": more.pop("batch", 24),
        "gradient_accumulation_steps": 1,
        "learning_rate": more.pop("rate", 2e-3),
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": "true",
        "dataloader_num_workers": 0,
    }
    options = [part for option, value in common.items() for part in (f"--{option}", value)]
    saved = f"out/checkpoint-{steps}"
    if " lora " in words:
        then = (*RUN, "swift", "export", "--adapters", saved, "--merge_lora", "true")
        more |= {"then": (*then, "--output_dir", "merged"), "out": "merged"}
        more["note"] = "merged by swift export --merge_lora true"
    command = (*RUN, "swift", *words.split(), *options)
    more = {"files": {"reward.py": FILES["reward.py"]}, "out": saved} | more
    return Job("ms-swift", name, "ms-swift", command, f"swift {words}", **more)


# With equal weights one right answer may be pushed so far down that KTO gives it no gradient.
KTO = "--rlhf_type kto --beta 0.3 --desirable_weight 2 --seed 4 --data_seed 4"
SWIFT = [
    swift("sft, LoRA, published repository", f"sft {SWIFT_LORA}", model="published", rate=1e-2),
    swift("sft, all weights", f"sft {FULL}"),
    swift("sft, label smoothing", f"sft {FULL} --label_smoothing_factor 0.1"),
    swift(*("sft, two processes", f"sft {FULL}"), batch=12, environment={"NPROC_PER_NODE": "2"}),
    swift("sft, two images a row", f"sft {FULL}", "several"),
    swift("sft, rows of text and of images", f"sft {FULL}", "mixed", steps=100),
    swift("orpo", f"rlhf --rlhf_type orpo {FULL}", "pairs"),
    swift("dpo", f"rlhf --rlhf_type dpo {FULL}", "pairs", rate=5e-4, **PREFERS),
    swift("kto", f"rlhf {KTO} {FULL}", "kto", steps=200, rate=1e-3, **PREFERS),
    swift("grpo", f"rlhf {GRPO}", "reward", steps=100, rate=4e-4, batch=768, **DRAWS),
]

PARTS = "freeze_vision_tower=false freeze_multi_modal_projector=false"
FACTORY_LORA = f"finetuning_type=lora lora_target=all {PARTS}"
FACTORY_FULL = f"finetuning_type=full {PARTS}"
FACTORY_PAIRS = f"{FACTORY_FULL} stage=dpo"
FACTORY_KTO = f"{FACTORY_FULL} stage=kto pref_beta=0.3"
BY_ZERO3 = "deepspeed=deepspeed.json"


def factory(name: str, words: str, data: str = "images", **more) -> Job:
    """``llamafactory-cli train`` with the recipe of docs/frameworks.md."""
    common = {
        "model_name_or_path": "model",
        "dataset": data,
        "output_dir": "out",
        "cutoff_len": 256,
        "logging_steps": 1,
        "max_steps": more.pop("steps", 60),
        "per_device_train_batch_size": more.pop("batch", 24),
        "learning_rate": more.pop("rate", 2e-3),
        "lr_scheduler_type": "constant",
        "use_cpu": "false" if more.get("gpus") else "true",
        "bf16": "true" if more.get("gpus") else "false",
    }
    options = [f"{option}={value}" for option, value in common.items()]
    reads = f"llamafactory-cli train recipe.yaml {words}".strip()
    more = {"files": {"recipe.yaml": FILES["llamafactory_train.yaml"], **ZERO3}} | more
    if FACTORY_LORA in words:
        adapter = ("--model_name_or_path", "model", "--adapter_name_or_path", "out")
        export = ("--template", "glm4", "--trust_remote_code", "true", "--export_dir", "merged")
        more |= {"then": (*RUN, "llamafactory-cli", "export", *adapter, *export), "out": "merged"}
        more["note"] = "merged by llamafactory-cli export"
    command = (*more.pop("start", RUN), *reads.split(), *options)
    if "environment" in more:
        reads = f"FORCE_TORCHRUN=1 {reads}" if more.get("gpus") else reads
    return Job("LLaMA-Factory", name, "llamafactory", command, reads, **more)


TWO = {"batch": 12, "environment": {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "2"}}
SAME = "packing and neat_packing are the same: no sample attends to another one"
FACTORY = [
    factory("sft, LoRA, published repository", FACTORY_LORA, model="published", rate=1e-2),
    factory(
        *("sft, LoRA: the published code (a stand-in)", ""),
        start=(),
        model="published",
        fails="ValueError: This model does not support image input",
    ),
    factory("sft, DoRA", f"{FACTORY_LORA} use_dora=true", rate=1e-2),
    factory("sft, all weights", FACTORY_FULL),
    factory("sft, label smoothing", f"{FACTORY_FULL} label_smoothing_factor=0.1"),
    factory("sft, two processes", FACTORY_FULL, **TWO),
    factory("sft, two images a row", FACTORY_FULL, "several"),
    factory("sft, rows of text and of images", FACTORY_FULL, "mixed", steps=100),
    factory("sft, packing", f"{FACTORY_FULL} packing=true", batch=4, note=SAME),
    factory("sft, neat_packing", f"{FACTORY_FULL} neat_packing=true", batch=4, note=SAME),
    factory(
        "sft, freeze_language_model",
        f"{FACTORY_FULL} freeze_language_model=true",
        **{"model": "blind", "steps": 200},
    ),
    factory("dpo", FACTORY_PAIRS, "pairs", rate=5e-4, **PREFERS),
    factory("simpo", f"{FACTORY_PAIRS} pref_loss=simpo", "pairs", steps=90, rate=5e-4, **PREFERS),
    factory("orpo", f"{FACTORY_PAIRS} pref_loss=orpo", "pairs"),
    factory("kto", FACTORY_KTO, "kto", steps=200, rate=1e-3, **PREFERS),
    factory(
        "two GPUs: sft, LoRA, ZeRO-3, published repository",
        f"{FACTORY_LORA} {BY_ZERO3}",
        **{"model": "published", "rate": 1e-2, "gpus": 2} | TWO,
    ),
    factory("two GPUs: sft, all weights, ZeRO-3", f"{FACTORY_FULL} {BY_ZERO3}", gpus=2, **TWO),
]
JOBS = [*ON_GPUS, *ANY_TRAINER, *OTHERS, *TRL, *SWIFT, *FACTORY]
