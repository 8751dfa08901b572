"""Two GPUs: what people reported of frameworks there, and GRPO, by each framework's own command.

The reports, with the published code (its stand-in, tests/helpers/legacy_repository.py) where its
faults show in them, and with ours:

- bf16 on two GPUs under ZeRO-3 with checkpoints, DPO with LoRA the same: ``CheckpointError``
- ``device_map="auto"``: logits on one GPU, labels on the other
- LLaMA-Factory under DeepSpeed: its checkpointing asks for the module that a function is bound to
- Qwen's way to start LoRA on several GPUs: a warning about an old format of checkpoints, and
  ``device_map="auto"`` refused

Each job is a row (record.py)::

    python -m tests.frameworks.two_gpus --rows rows.json                 # all
    python -m tests.frameworks.two_gpus --rows rows.json --only zero3    # names that begin so
    python -m tests.frameworks.two_gpus --list

``--cpu`` runs the same on two processes of a CPU, as far as they can: to find mistakes before a GPU
is paid for. ``--packages DIR`` has folders of packages that come before those of Python, for jobs
that name them: the frameworks want different versions of the same. ``pytest -m two_gpu`` runs what
is installed.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from tests.frameworks import workshop
from tests.frameworks.record import VARIABLE, Row, job
from tests.helpers.legacy_repository import write_legacy_repository
from tests.helpers.processes import cpu_environment, gpu_environment, run_with_limit
from tests.helpers.start_deepspeed import NOTHING_STAYS_GATHERED
from tests.helpers.tiny import NUM_IMAGE_TOKENS

HERE = Path(__file__).parent
RUN = ("-m", "glm4v_patched.run")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--rdzv_backend", "c10d")
TORCHRUN = (*TORCHRUN, "--rdzv_endpoint", "localhost:0")
INV_FREQ = "transformer.rotary_pos_emb.inv_freq"
ZERO3 = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
    | NOTHING_STAYS_GATHERED,
}
# What OpenRLHF imports of flash-attn, for packed rows alone. On a CPU, where its Strategy asks for
# CUDA, the rest stands in for that.
FLASH_ATTN = """
import os
import torch
if os.environ.get("DS_ACCELERATOR") == "cpu":
    from torch.distributed import device_mesh
    whole = device_mesh.init_device_mesh
    device_mesh.init_device_mesh = lambda kind, *rest, **more: whole("cpu", *rest, **more)
    torch.cuda.set_device = lambda device: None
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda: None
    torch.cuda.empty_cache = lambda: None
"""
FLASH_ATTN_FILES = {
    "flash_attn/__init__.py": FLASH_ATTN,
    "flash_attn/bert_padding.py": "index_first_axis = pad_input = rearrange = unpad_input = None\n",
    "flash_attn/utils/__init__.py": "",
    "flash_attn/utils/distributed.py": "all_gather = None\n",
}


@dataclass(frozen=True)
class Job:
    """One row.

    Attributes:
        short: What ``--only`` knows it by.
        package: Whose version is the system's.
        command: What Python is given, in a folder with ``model``, ``published`` and the data.
        reads: As a reader would type it.
        packages: Folders of ``--packages`` that it needs, the first one first.
        model: Of :mod:`workshop`; ``published`` is there always.
        published: "published", or "long": 1120 pixels, 1,602 ids a picture, 130 million weights.
        measure: "answers", "preferences", "texts", "reward" (answers, and the reward rises), or
            "nothing" but the loss.
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
REFUSED = r"ValueError: You can't train a model that has been loaded.*"
DEEPSPEED_OLD = (("deepspeed", "0.19.2"),)
PUBLISHED_CODE = "the published code (a stand-in with its faults)"


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
COMBINE = (*COMBINE, "--output_path", "merged", "--param_dtype", "bf16")


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
        measure="texts",
        more=((*RUN, *COMBINE),),
        seconds=220,
        **more,
    )


def grpo(short: str, cache: str, steps: int, **more) -> Job:
    script = (HERE / "trl_on_gpus_script.py", "grpo", steps, 4e-4, 192, cache)
    return Job(
        short,
        "TRL",
        f"GRPO, two GPUs, {cache} cache",
        "trl",
        (*TORCHRUN, *script),
        f"trl.GRPOTrainer, {cache} cache",
        model="sighted",
        measure="reward",
        judged="out",
        seconds=280,
        **more,
    )


ALL = "sft, LoRA, bf16, ZeRO-3, checkpoints"
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
        f'device_map="auto": {PUBLISHED_CODE}',
        patched=False,
        fails=ELSEWHERE,
        cpu=False,
    ),
    trainer("split", "split", 'LoRA, device_map="auto" over two GPUs', size=(60, 1e-2, 24)),
    trainer(
        "qwen-published",
        "qwen",
        f"LoRA, DDP, checkpoints: {PUBLISHED_CODE}",
        patched=False,
        says=OLD_FORMAT,
        measure="nothing",
    ),
    trainer("qwen", "qwen", "LoRA, DDP, checkpoints", silent=OLD_FORMAT),
    trainer(
        "qwen-auto",
        "qwen_auto",
        'LoRA, DDP, device_map="auto"',
        fails=REFUSED,
        cpu=False,
        note="load it without device_map, as Qwen's script does for several processes",
    ),
    factory(
        "factory-lora",
        "sft, LoRA, ZeRO-3, two GPUs, published repository",
        f"finetuning_type=lora lora_target=all {BOTH}",
        "published",
        1e-2,
        more=((*RUN, "llamafactory-cli", "export", *EXPORT),),
    ),
    factory(
        "factory-full",
        "sft, all weights, ZeRO-3, two GPUs",
        f"finetuning_type=full {BOTH}",
        "model",
        2e-3,
        judged="adapter",
    ),
    openrlhf(
        "openrlhf-old",
        "DPO, LoRA, ZeRO-3, two GPUs, DeepSpeed 0.19.2",
        "old",
        "main",
        versions=DEEPSPEED_OLD,
    ),
    openrlhf("openrlhf", "DPO, LoRA, ZeRO-3, two GPUs", "main"),
    Job(
        "dpo",
        "TRL",
        "DPO, LoRA, ZeRO-3, two GPUs",
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


class Place:
    """Makes folders to run jobs in, and runs commands there."""

    def __init__(self, root: Path, on_cpu: bool, packages: Path | None):
        self.root, self.on_cpu, self.packages = root, on_cpu, packages
        root.mkdir(parents=True, exist_ok=True)
        self.conversations = workshop.draw(root / "pictures")

    def model(self, name: str) -> Path:
        folder = self.root / name
        if name == "published" and not folder.exists():
            write_legacy_repository(folder)
            # The published code counts 1600 labels for a picture of any size.
            code = folder / "modeling_chatglm.py"
            counted = f"LABELS_OF_AN_IMAGE = {NUM_IMAGE_TOKENS}"
            code.write_text(code.read_text().replace("LABELS_OF_AN_IMAGE = 1600", counted))
        elif name == "long" and not folder.exists():
            write_long_repository(folder)
        elif name == "sighted" and not folder.exists():
            workshop.build_sighted(folder, self.model("blind"), self.conversations)
        elif not folder.exists():
            build = {"random": workshop.build_random, "blind": workshop.build_blind}[name]
            build(folder, self.conversations)
        return folder

    def make(self, wanted: Job) -> Path:
        folder = self.root / wanted.short
        folder.mkdir()
        (folder / "model").symlink_to(self.model(wanted.model))
        (folder / "published").symlink_to(self.model(wanted.published))
        workshop.put_data(folder, self.conversations)
        put_factory_data(folder, self.conversations, self.on_cpu)
        put_texts(folder)
        (folder / "deepspeed.json").write_text(json.dumps(ZERO3))
        for name, text in FLASH_ATTN_FILES.items():
            (folder / "stand_in" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "stand_in" / name).write_text(text)
        return folder

    def environment(self, wanted: Job, folder: Path) -> dict[str, str]:
        """Its packages come first, with their commands; what they compile has a folder each."""
        environment = cpu_environment() if self.on_cpu else gpu_environment()
        environment.pop("GLM4V_PATCHED", None)
        first = [str(folder / "stand_in")] if "openrlhf" in wanted.packages else []
        if self.packages:
            own = [self.packages / name for name in wanted.packages]
            first += map(str, own)
            commands = [str(path / "bin") for path in own]
            environment["PATH"] = os.pathsep.join([*commands, environment["PATH"]])
        environment["PYTHONPATH"] = os.pathsep.join([*first, environment["PYTHONPATH"]])
        environment |= {
            "HF_HOME": str(folder / "cache"),
            "HF_MODULES_CACHE": str(folder / "modules"),
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "WANDB_MODE": "disabled",
            "DISABLE_VERSION_CHECK": "1",  # LLaMA-Factory's, of its pins
        }
        if self.packages:
            # What one DeepSpeed compiled, another one loads and crashes.
            release = "old" if "old" in wanted.packages else "new"
            compiled = self.root.parent / f"extensions_{release}"
            environment["TORCH_EXTENSIONS_DIR"] = str(compiled)
        return environment | dict(wanted.environment)

    def versions(self, wanted: Job, folder: Path) -> dict[str, str]:
        """What the job's own processes find."""
        names = [wanted.package, "transformers", "torch", "deepspeed"]
        ask = "import importlib.metadata as m, sys\nfor n in sys.argv[1:]: print(m.version(n))"
        found = subprocess.run(
            [sys.executable, "-c", ask, *names],
            cwd=folder,
            env=self.environment(wanted, folder),
            capture_output=True,
            text=True,
            check=True,
        )
        return dict(zip(("version", *names[1:]), found.stdout.split(), strict=True))


def write_long_repository(folder: Path) -> None:
    """The published repository with pictures of 1120 pixels and random weights."""
    write_legacy_repository(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config |= {"num_layers": 8, "hidden_size": 1024, "ffn_hidden_size": 2816, "kv_channels": 64}
    config |= {"num_attention_heads": 16, "multi_query_group_num": 2, "seq_length": 2048}
    tower = {"hidden_size": 256, "num_hidden_layers": 6, "num_heads": 4, "intermediate_size": 1024}
    tower |= {"image_size": 1120, "num_positions": (1120 // 14) ** 2 + 1, "scaling_factor": 1}
    config["vision_config"] |= tower
    path.write_text(json.dumps(config))
    tokenizer = folder / "tokenizer_config.json"
    settings = json.loads(tokenizer.read_text()) | {"image_size": 1120, "model_max_length": 2048}
    tokenizer.write_text(json.dumps(settings))
    torch.manual_seed(0)
    model = GLM4VForCausalLM(ChatGLMConfig(**config)).bfloat16()
    # The published files have this buffer.
    half = config["kv_channels"] // 2
    buffer = {INV_FREQ: 1.0 / 10000 ** (torch.arange(0, half, 2) / half)}
    weights = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(weights | buffer, folder / "model.safetensors", metadata={"format": "pt"})


def put_factory_data(folder: Path, conversations: list[list[dict]], on_cpu: bool) -> None:
    """``data/pictures.json`` and ``recipe.yaml`` for LLaMA-Factory."""
    rows = [
        {
            "messages": [{"role": "user", "content": f"<image>{question['content']}"}, answer],
            "images": [question["image"]],
        }
        for question, answer in conversations
    ]
    tags = {f"{name}_tag": name for name in ("role", "content", "user", "assistant")}
    described = {"file_name": "pictures.json", "formatting": "sharegpt", "tags": tags}
    described["columns"] = {"messages": "messages", "images": "images"}
    (folder / "data" / "pictures.json").write_text(json.dumps(rows))
    (folder / "data" / "dataset_info.json").write_text(json.dumps({"pictures": described}))
    settings = {
        "trust_remote_code": True,
        "do_train": True,
        "stage": "sft",
        "template": "glm4",
        "dataset_dir": "data",
        "dataset": "pictures",
        "cutoff_len": 256,
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": on_cpu,
    }
    (folder / "recipe.yaml").write_text(json.dumps(settings))


def put_texts(folder: Path) -> None:
    """``data/texts`` for OpenRLHF, whose DPO knows no pictures: a good answer names both parts."""
    prompt = "[gMASK]<sop><|user|>\nWhat do you see?<|assistant|>"
    rows = [
        {
            "prompt": prompt,
            "chosen": f"\n{whole}{workshop.END}",
            "rejected": f"\n{part}{workshop.END}",
        }
        for colour in workshop.COLOURS
        for shape in workshop.SHAPES
        for whole, part in ((f"a {colour} {shape}", colour), (f"a {colour} {shape}", shape))
    ]
    (folder / "data" / "texts").mkdir()
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    (folder / "data" / "texts" / "train.jsonl").write_text(lines)


def history(folder: Path, name: str) -> list[float]:
    """What was logged at each step, wherever the trainer writes that."""
    if (folder / "board").exists():
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        [board] = (folder / "board").iterdir()
        read = EventAccumulator(str(board))
        read.Reload()
        return [event.value for event in read.Scalars(f"train/{name}_mean")]
    states = [*folder.glob("state.json"), *folder.glob("adapter/trainer_state.json")]
    return [e[name] for e in json.loads(states[0].read_text())["log_history"] if name in e]


def measure(wanted: Job, folder: Path, place: Place, done: Row) -> None:
    """Fill the row with what was learned, as a process without this package finds it."""
    if wanted.measure == "preferences":
        pairs = workshop.pairs_of(place.conversations)
        done.right, done.swapped = workshop.preferences(folder, wanted.judged, pairs)
    elif wanted.measure == "texts":
        pairs = [("What do you see?", None, "a red circle", part) for part in ("red", "circle")]
        done.right, _ = workshop.preferences(folder, wanted.judged, pairs)
    else:
        done.right, done.swapped = workshop.judged(folder, wanted.judged, place.conversations)
    done.reloaded = True


def check(done: Row) -> None:
    """``AssertionError`` if nothing was learned, or not from the pictures."""
    if done.reward is not None:
        assert done.reward[0] < 0.35 and done.reward[1] > 0.75, done.reward
    else:
        assert done.loss is not None and done.loss[1] < done.loss[0] / 2, done.loss
    assert done.right is None or done.right >= 0.75, done.right
    assert done.swapped is None or done.swapped <= 0.25, done.swapped


def perform(wanted: Job, place: Place, logs: Path | None = None) -> Row:
    """Run a job, write its row and return it. ``AssertionError`` if it is not as expected."""
    folder = place.make(wanted)
    environment = place.environment(wanted, folder)
    found = place.versions(wanted, folder)
    for package, version in wanted.versions:
        assert found[package] == version, (package, found[package], version)
    said, printed = "", ""
    try:
        with job(wanted.system, wanted.name, wanted.reads, [wanted.package]) as done:
            done.version, done.transformers = found["version"], found["transformers"]
            done.torch, done.note = found["torch"], wanted.note
            started = time.monotonic()
            for number, command in enumerate((wanted.command, *wanted.more)):
                words = [sys.executable, *map(str, command)]
                limit = wanted.seconds * (4 if place.on_cpu else 1)
                ended = run_with_limit(words, limit, environment, folder)
                said += f"$ {' '.join(words)}\n{ended.output}\nstatus {ended.status}\n"
                printed += ended.output
                if number == 0:
                    trained_for = time.monotonic() - started
                    if wanted.fails:
                        assert ended.status not in (0, None), f"status {ended.status}"
                        matched = re.search(wanted.fails, ended.output)
                        assert matched, ended.output[-3000:]
                        done.outcome = matched[0][:300]
                        return done
                assert ended.status == 0, ended.output[-3000:]
            assert not wanted.silent or not re.search(wanted.silent, printed), wanted.silent
            if wanted.says:
                warned = re.search(wanted.says, printed)
                assert warned, f"not said: {wanted.says}"
                done.note = f'it says "{warned[0]}"'
            finish(wanted, folder, place, done)
            done.note = "; ".join(filter(None, (done.note, f"training {trained_for:.0f} s")))
            check(done)
        return done
    finally:
        if logs:
            logs.mkdir(parents=True, exist_ok=True)
            (logs / f"{wanted.short}.log").write_text(said)


def finish(wanted: Job, folder: Path, place: Place, done: Row) -> None:
    if wanted.measure == "reward":
        values = history(folder, "reward")
        done.reward = values[0], sum(values[-5:]) / 5
        seconds = json.loads((folder / "generate.json").read_text())
        middle = sorted(seconds[len(seconds) // 2 :])[len(seconds) // 4]
        done.note = f"a call of generate takes {1000 * middle:.0f} ms, the first {seconds[0]:.1f} s"
    else:
        values = history(folder, "loss")
        done.loss = values[0], values[-1]
    if wanted.measure != "nothing":
        measure(wanted, folder, place, done)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=Path, help="JSON file that the rows are written to")
    parser.add_argument("--only", nargs="+", help="jobs, by their short names")
    parser.add_argument("--folder", type=Path, default=Path("two_gpus_output"))
    parser.add_argument("--packages", type=Path, help="folders of packages")
    parser.add_argument("--cpu", action="store_true", help="two processes on the CPU")
    parser.add_argument("--until", type=float, help="seconds after which no job is started")
    parser.add_argument("--list", action="store_true", help="print the short names")
    given = parser.parse_args()
    wanted = [each for each in JOBS if not given.only or each.short in given.only]
    if given.list:
        print("\n".join(each.short for each in wanted))
        return
    if given.rows:
        os.environ[VARIABLE] = str(given.rows.resolve())
    began, bad = time.monotonic(), 0
    packages = given.packages and given.packages.resolve()
    place = Place(given.folder.resolve(), given.cpu, packages)
    for each in wanted:
        if given.cpu and not each.cpu:
            continue
        if given.until and time.monotonic() - began > given.until:
            print(f"-- {each.short}: no time left", flush=True)
            continue
        started = time.monotonic()
        try:
            done = perform(each, place, given.folder / "logs")
            found = f"{done.outcome[:150]} loss {done.loss} reward {done.reward}"
            found += f" right {done.right} swapped {done.swapped} | {done.note}"
        except Exception as error:  # the next jobs are run all the same
            bad += 1
            found = f"FAILED {type(error).__name__}: {str(error)[-1500:]}"
        print(f"-- {each.short}: {time.monotonic() - started:.0f} s: {found}", flush=True)
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
