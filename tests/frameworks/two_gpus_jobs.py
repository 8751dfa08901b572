"""The jobs of two_gpus.py: what is run, and how it is expected to end."""

from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
RUN = ("-m", "glm4v_patched.run")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--rdzv_backend", "c10d")
TORCHRUN = (*TORCHRUN, "--rdzv_endpoint", "localhost:0")


@dataclass(frozen=True)
class Job:
    """One row.

    Attributes:
        short: What ``--only`` knows it by.
        package: Whose version is the system's.
        command: What Python is given, in a folder with ``model``, ``published`` and the data.
        reads: As a reader would type it.
        packages: Folders of ``--packages`` that it needs, the first one first.
        model: Of :mod:`drawn_task`; ``published`` is there always.
        published: "published", or "long": 1120 pixels, 1,602 ids a picture, 130 million weights.
        measure: Of :func:`drawn_task.measure`.
        more: Commands that make the folder that is judged out of what was trained.
        fails: A pattern of what it is expected to end with.
        says, silent: Patterns of what it prints, and of what it must not print.
        cpu: Whether a CPU can show it.
        versions: Of packages that it has to have: the error is one of some releases.
    """

    short: str
    system: str
    name: str
    package: str
    command: tuple[object, ...]
    reads: str
    packages: tuple[str, ...] = ("main",)
    model: str = "random"
    published: str = "published"
    measure: str = "answers"
    judged: str = "merged"
    more: tuple[tuple[object, ...], ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    fails: str = ""
    says: str = ""
    silent: str = ""
    note: str = ""
    cpu: bool = True
    versions: tuple[tuple[str, str], ...] = ()
    seconds: int = 150


MERGE = ("-m", "glm4v_patched", "merge", "adapter", "--out", "merged", "--no-check")
OLD_FORMAT = "You are using an old version of the checkpointing format that is deprecated"
CHECKPOINT_ERROR = r"CheckpointError: .*have different metadata.*"
ELSEWHERE = r"RuntimeError: Expected all tensors to be on the same device.*"
REFUSED = r"ValueError: You can't train a model that has been loaded with .* distributed mode"
DEEPSPEED_OLD = (("deepspeed", "0.19.2"),)
PUBLISHED_CODE = "the published code (a stand-in)"


def trainer(
    short: str, way: str, name: str, patched: bool = True, size: tuple = (60, 1e-2, 12), **more
) -> Job:
    """transformers' Trainer by zero3_script.py, on the published repository.

    ``size``: steps, learning rate, rows of a process.
    """
    start = () if way == "split" else TORCHRUN
    script = (HERE / "zero3_script.py", way, *size)
    by = "python" if way == "split" else "torchrun --nproc_per_node 2"
    command = (*start, *RUN, *script) if patched else (*start, *script)
    reads = f"{by} -m glm4v_patched.run train.py" if patched else f"{by} train.py"
    finish = {} if more.get("fails") else {"more": (MERGE,)}
    return Job(short, "transformers", name, "transformers", command, reads, **(finish | more))


def factory(short: str, name: str, options: str, model: str, rate: float, **more) -> Job:
    words = f"llamafactory-cli train recipe.yaml {options} deepspeed=deepspeed.json"
    settings = {
        "model_name_or_path": model,
        "output_dir": "adapter",
        "max_steps": 60,
        "per_device_train_batch_size": 12,
        "learning_rate": rate,
        "lr_scheduler_type": "constant",
        "bf16": "true",
    }
    return Job(
        short,
        "LLaMA-Factory",
        name,
        "llamafactory",
        (*RUN, *words.split(), *(f"{name}={value}" for name, value in settings.items())),
        f"FORCE_TORCHRUN=1 {words}",
        packages=("factory", "main"),
        environment=(("FORCE_TORCHRUN", "1"), ("NPROC_PER_NODE", "2")),
        **more,
    )


BOTH = "freeze_vision_tower=false freeze_multi_modal_projector=false"
EXPORT = ("--model_name_or_path", "published", "--adapter_name_or_path", "adapter")
EXPORT = (*EXPORT, "--template", "glm4", "--trust_remote_code", "true", "--export_dir", "merged")
OPENRLHF = {
    "--model.model_name_or_path": "model",
    "--data.dataset": "data/texts",
    "--data.prompt_key": "prompt",
    "--data.max_len": 128,
    "--ckpt.output_dir": "adapter",
    "--ds.zero_stage": 3,
    "--ds.lora.rank": 32,
    "--ds.attn_implementation": "sdpa",
    "--train.batch_size": 24,
    "--train.micro_batch_size": 12,
    "--train.max_epochs": 30,
    "--adam.lr": 5e-3,
    "--lr_scheduler": "constant",
    "--logger.tensorboard_dir": "board",
}
OPENRLHF_FLAGS = ("--model.gradient_checkpointing_enable", "--ds.adam_offload")
COMBINE = ("-m", "openrlhf.cli.lora_combiner", "--model_path", "model", "--lora_path", "adapter")
COMBINE = (*COMBINE, "--output_path", "merged", "--ds.param_dtype", "bf16")

SAVE_PROCESSOR = """
from transformers import AutoProcessor
AutoProcessor.from_pretrained("model", trust_remote_code=True).save_pretrained("merged")
"""


def openrlhf(short: str, name: str, *packages: str, **more) -> Job:
    options = [str(part) for pair in OPENRLHF.items() for part in pair]
    module = ("-m", "openrlhf.cli.train_dpo")
    return Job(
        short,
        "OpenRLHF",
        name,
        "openrlhf",
        (*TORCHRUN, *RUN, *module, *options, *OPENRLHF_FLAGS),
        "torchrun --nproc_per_node 2 -m glm4v_patched.run -m openrlhf.cli.train_dpo "
        "--ds.zero_stage 3 --ds.lora.rank 32 --model.gradient_checkpointing_enable "
        "--ds.adam_offload",
        packages=("openrlhf", *packages),
        measure="scores",
        more=((*RUN, *COMBINE), ("-c", SAVE_PROCESSOR)),
        note="merged by openrlhf.cli.lora_combiner, which saves no processor",
        seconds=220,
        **more,
    )


HOW = {
    "dynamic": "a cache that grows",
    "static": "a static cache, steps not compiled (TRL's default for it)",
    "compiled": "a static cache, steps compiled",
}


def grpo(short: str, cache: str, steps: int, **more) -> Job:
    script = (HERE / "trl_on_gpus_script.py", "grpo", steps, 4e-4, 192, cache)
    return Job(
        short,
        "TRL",
        f"two GPUs: GRPO, {HOW[cache]}",
        "trl",
        (*TORCHRUN, *script),
        "trl.GRPOTrainer",
        model="sighted",
        measure="reward",
        judged="out",
        seconds=280,
        **more,
    )


ALL = "two GPUs: LoRA, bf16, ZeRO-3, checkpoints"
JOBS = [
    trainer(
        "zero3-published",
        "zero3",
        f"{ALL}, DeepSpeed 0.19.2: {PUBLISHED_CODE}",
        patched=False,
        packages=("old", "main"),
        fails=CHECKPOINT_ERROR,
        versions=DEEPSPEED_OLD,
    ),
    trainer(
        "zero3-old",
        "zero3",
        f"{ALL}, DeepSpeed 0.19.2",
        packages=("old", "main"),
        versions=DEEPSPEED_OLD,
    ),
    trainer("zero3", "zero3", f"{ALL}, DeepSpeed 0.19.8"),
    trainer(
        "zero3-long",
        "zero3",
        f"{ALL}, DeepSpeed 0.19.2, pictures of 1120 pixels",
        size=(20, 1e-3, 2),
        packages=("old", "main"),
        versions=DEEPSPEED_OLD,
        published="long",
        measure="nothing",
        cpu=False,
    ),
    trainer(
        "split-published",
        "split",
        f'two GPUs: LoRA, device_map="auto": {PUBLISHED_CODE}',
        patched=False,
        fails=ELSEWHERE,
        cpu=False,
    ),
    trainer("split", "split", 'two GPUs: LoRA, device_map="auto"', size=(60, 1e-2, 24)),
    trainer(
        "qwen-published",
        "qwen",
        f"two GPUs: LoRA, DDP, checkpoints: {PUBLISHED_CODE}",
        patched=False,
        says=OLD_FORMAT,
        measure="nothing",
    ),
    trainer("qwen", "qwen", "two GPUs: LoRA, DDP, checkpoints", silent=OLD_FORMAT),
    trainer(
        "qwen-auto",
        "qwen_auto",
        'two GPUs: LoRA, DDP, device_map="auto"',
        fails=REFUSED,
        cpu=False,
        note="load it without device_map, as Qwen's script does for several processes",
    ),
    factory(
        "factory-lora",
        "two GPUs: sft, LoRA, ZeRO-3, published repository",
        f"finetuning_type=lora lora_target=all {BOTH}",
        "published",
        1e-2,
        more=((*RUN, "llamafactory-cli", "export", *EXPORT),),
    ),
    factory(
        "factory-full",
        "two GPUs: sft, all weights, ZeRO-3",
        f"finetuning_type=full {BOTH}",
        "model",
        2e-3,
        judged="adapter",
    ),
    openrlhf(
        "openrlhf-old",
        "two GPUs: DPO, LoRA, ZeRO-3, checkpoints, DeepSpeed 0.19.2",
        "old",
        "main",
        versions=DEEPSPEED_OLD,
    ),
    openrlhf("openrlhf", "two GPUs: DPO, LoRA, ZeRO-3", "main"),
    Job(
        "dpo",
        "TRL",
        "two GPUs: DPO, LoRA, ZeRO-3",
        "trl",
        (*TORCHRUN, HERE / "trl_on_gpus_script.py", "dpo", 60, 5e-3, 18),
        "trl.DPOTrainer",
        model="blind",
        measure="preferences",
        more=(MERGE,),
    ),
    grpo("grpo", "compiled", 80),
    grpo("grpo-static", "static", 80),
    grpo("grpo-dynamic", "dynamic", 80),
]
