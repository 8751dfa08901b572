"""Other people's frameworks, run as their users run them: an entry of JOBS for each job.

Each makes a row of the table in docs/frameworks.md (results_table.py), by test_jobs.py.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tests.frameworks.drawn_task import RUN

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
        command: What is run in a folder with ``model`` and :func:`drawn_task.put_data`.
        reads: As a reader would type it.
        model: Of :class:`drawn_task.Models`.
        measure, logged, fall: Of :func:`drawn_task.measure`.
        files: Written to the folder first.
        needs: The module that must be there.
        environment: Of the command, which some start their processes by.
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
    needs: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    then: tuple[object, ...] = ()
    out: str = "out"
    note: str = ""
    fall: float = 0.5

    def __str__(self) -> str:
        return f"{self.system}: {self.name}"


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
    return Job("TRL", name, "trl", command, trainer, needs="trl", **more)


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
    return Job("TRL", name, "trl", command, reads, needs="trl", **more)


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
        needs="axolotl",
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
        needs="deepspeed",
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
            needs="lightning",
        )
        for name, reads in {"lightning": "Trainer", "fabric": "Fabric"}.items()
    ),
    trainers(
        *("ray", "Ray Train", "TorchTrainer, 2 workers"),
        package="ray",
        reads="TorchTrainer",
        needs="ray",
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
        needs="openrlhf",
        note="its pins on transformers 5.15.0 and flash-attn are ignored",
    ),
    Job(
        "OpenRLHF",
        "reward model and PairWiseLoss",
        "openrlhf",
        (*RUN, HERE / "openrlhf_script.py", "reward", 30, 1e-3),
        "openrlhf.models.get_llm_for_sequence_regression",
        measure="scores",
        needs="openrlhf",
        note="text only, as its rows are; it saves no code: put the model's files beside it, and "
        "load it with num_labels=1",
    ),
]


# The commands of ms-swift and LLaMA-Factory.

ALL_PARTS = "--freeze_vit false --freeze_aligner false"
FULL = f"--tuner_type full {ALL_PARTS}"
LORA = f"--tuner_type lora --target_modules all-linear {ALL_PARTS}"
IN_NO_TRIAL = "--seed 4 --data_seed 4"  # of settings
GRPO = (
    "--rlhf_type grpo --external_plugins reward.py --reward_funcs right --num_generations 32 "
    f"--max_completion_length 8 --temperature 1.0 --beta 0 --use_vllm false {FULL}"
)
REWARD = """
from swift.rewards import ORM, orms

class Right(ORM):
    def __call__(self, completions, solution, **kwargs):
        return [float(text.strip() == right) for text, right in zip(completions, solution)]

orms["right"] = Right
"""


def swift(
    name: str,
    words: str,
    data: str = "pictures",
    *,
    steps: int = 60,
    rate: float = 2e-3,
    batch: int = 24,
    processes: int = 1,
    merge: bool = False,
    **more,
) -> Job:
    """``swift`` with the words that are worth reading. What it saves as an adapter, it merges."""
    common = {
        "model": "model",
        "dataset": f"data/{data}.jsonl",
        "split_dataset_ratio": 0,
        "torch_dtype": "float32",
        "output_dir": "out",
        "add_version": "false",
        "max_steps": steps,
        "save_steps": steps,
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": 1,
        "learning_rate": rate,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": "true",
        "dataloader_num_workers": 0,
    }
    options = [part for option, value in common.items() for part in (f"--{option}", value)]
    saved = f"out/checkpoint-{steps}"
    if merge:
        then = (*RUN, "swift", "export", "--adapters", saved, "--merge_lora", "true")
        merged = "merged by swift export --merge_lora true"
        more |= {"then": (*then, "--output_dir", "merged"), "note": merged}
    if processes > 1:
        more["environment"] = {"NPROC_PER_NODE": str(processes)}
    return Job(
        *("ms-swift", name, "ms-swift", (*RUN, "swift", *words.split(), *options)),
        f"swift {words}",
        needs="swift",
        files={"reward.py": REWARD},
        out="merged" if merge else saved,
        **more,
    )


SWIFT = [
    swift(
        *("sft, LoRA, published repository", f"sft {LORA}"),
        model="published",
        rate=1e-2,
        merge=True,
    ),
    swift("sft, all weights", f"sft {FULL}"),
    swift("sft, two processes", f"sft {FULL}", batch=12, processes=2),
    swift("sft, two pictures a row", f"sft {FULL}", "several"),
    swift("sft, rows of text and of pictures", f"sft {FULL}", "mixed", steps=100),
    swift("orpo", f"rlhf --rlhf_type orpo {FULL}", "pairs"),
    swift(
        *("dpo", f"rlhf --rlhf_type dpo {FULL}", "pairs"),
        model="blind",
        measure="preferences",
        rate=5e-4,
    ),
    # With equal weights one right answer may be pushed so far down that KTO gives it no gradient.
    # One that is drawn for certain keeps about a third of its loss, which is counted twice then.
    swift(
        "kto",
        f"rlhf --rlhf_type kto --beta 0.3 --desirable_weight 2 {IN_NO_TRIAL} {FULL}",
        "kto",
        model="blind",
        measure="preferences",
        steps=200,
        rate=1e-3,
        fall=0.6,
    ),
    swift(
        *("grpo", f"rlhf {GRPO}", "reward"),
        model="sighted",
        measure="reward",
        steps=100,
        rate=4e-4,
        batch=768,
    ),
]

BOTH_TOWERS = "freeze_vision_tower=false freeze_multi_modal_projector=false"
FACTORY_LORA = f"finetuning_type=lora lora_target=all {BOTH_TOWERS}"
FACTORY_FULL = f"finetuning_type=full {BOTH_TOWERS}"
FACTORY_PAIRS = f"{FACTORY_FULL} stage=dpo"
RECIPE = """
trust_remote_code: true
do_train: true
stage: sft
template: glm4
dataset_dir: data
cutoff_len: 256
logging_steps: 1
report_to: none
use_cpu: true
"""


def factory(
    name: str,
    words: str,
    data: str = "pictures",
    *,
    steps: int = 60,
    rate: float = 2e-3,
    batch: int = 24,
    processes: int = 1,
    merge: bool = False,
    **more,
) -> Job:
    """``llamafactory-cli train`` with the words that are worth reading."""
    common = {
        "model_name_or_path": "model",
        "dataset": data,
        "output_dir": "out",
        "max_steps": steps,
        "per_device_train_batch_size": batch,
        "learning_rate": rate,
        "lr_scheduler_type": "constant",
    }
    options = [f"{option}={value}" for option, value in common.items()]
    reads = f"llamafactory-cli train recipe.yaml {words}"
    if merge:
        adapter = ("--model_name_or_path", "model", "--adapter_name_or_path", "out")
        export = ("--template", "glm4", "--trust_remote_code", "true", "--export_dir", "merged")
        more["then"] = (*RUN, "llamafactory-cli", "export", *adapter, *export)
        more["note"] = "merged by llamafactory-cli export"
    if processes > 1:
        more["environment"] = {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": str(processes)}
    return Job(
        *("LLaMA-Factory", name, "llamafactory", (*RUN, *reads.split(), *options), reads),
        needs="llamafactory",
        files={"recipe.yaml": RECIPE},
        out="merged" if merge else "out",
        **more,
    )


SAME = "packing and neat_packing are one: no sample of a row sees another"
PREFERS = {"model": "blind", "measure": "preferences"}
FACTORY = [
    factory(
        *("sft, LoRA, published repository", FACTORY_LORA),
        model="published",
        rate=1e-2,
        merge=True,
    ),
    factory("sft, DoRA", f"{FACTORY_LORA} use_dora=true", rate=1e-2, merge=True),
    factory("sft, all weights", FACTORY_FULL),
    factory("sft, two processes", FACTORY_FULL, batch=12, processes=2),
    factory("sft, two pictures a row", FACTORY_FULL, "several"),
    factory("sft, rows of text and of pictures", FACTORY_FULL, "mixed", steps=100),
    factory("sft, packing", f"{FACTORY_FULL} packing=true", batch=4, note=SAME),
    factory("sft, neat_packing", f"{FACTORY_FULL} neat_packing=true", batch=4, note=SAME),
    factory(
        "sft, freeze_language_model",
        f"finetuning_type=full {BOTH_TOWERS} freeze_language_model=true",
        model="blind",
        steps=200,
    ),
    factory("dpo", FACTORY_PAIRS, "pairs", rate=5e-4, **PREFERS),
    factory("simpo", f"{FACTORY_PAIRS} pref_loss=simpo", "pairs", steps=90, rate=5e-4, **PREFERS),
    factory("orpo", f"{FACTORY_PAIRS} pref_loss=orpo", "pairs"),
    factory(
        *("kto", f"{FACTORY_FULL} stage=kto pref_beta=0.3", "kto"),
        steps=200,
        rate=1e-3,
        **PREFERS,
    ),
]
JOBS += [*SWIFT, *FACTORY]


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
