"""Two GPUs: what people reported of frameworks there, and GRPO, by each framework's own command.

The reports, with the published code (its stand-in, tests/helpers/legacy_repository.py) where its
faults show in them, and with ours:

- bf16 on two GPUs under ZeRO-3 with checkpoints, DPO with LoRA the same: ``CheckpointError``
- ``device_map="auto"``: logits on one GPU, labels on the other
- LLaMA-Factory under DeepSpeed: its checkpointing asks for the module that a function is bound to
- Qwen's way to start LoRA on several GPUs: a warning about an old format of checkpoints, and
  ``device_map="auto"`` refused

Each job is a row (results_table.py)::

    python -m tests.frameworks.two_gpus --rows rows.json                 # all
    python -m tests.frameworks.two_gpus --rows rows.json --only zero3    # some of them
    python -m tests.frameworks.two_gpus --list
    python -m tests.frameworks.two_gpus --merge rows.json                # into docs/benchmarks

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
from pathlib import Path

import torch
from safetensors.torch import save_file

from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from tests.frameworks import drawn_task
from tests.frameworks.drawn_task import offline_environment
from tests.frameworks.jobs import RECIPE
from tests.frameworks.results_table import RESULTS, VARIABLE, Row, job, merge, read
from tests.frameworks.two_gpus_jobs import JOBS, Job
from tests.helpers.legacy_repository import write_legacy_repository
from tests.helpers.processes import cpu_environment, gpu_environment, run_with_limit
from tests.helpers.start_deepspeed import NOTHING_STAYS_GATHERED
from tests.helpers.tiny import NUM_IMAGE_TOKENS

MARKS = {"last rewards": 0.75, "right": 0.75, "first reward": 0.35, "swapped": 0.25}
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


class Place:
    """Makes folders to run jobs in, and runs commands there."""

    def __init__(self, root: Path, on_cpu: bool, packages: Path | None):
        self.root, self.on_cpu, self.packages = root, on_cpu, packages
        root.mkdir(parents=True, exist_ok=True)
        self.models = drawn_task.Models(root)
        self.conversations = self.models.conversations

    def model(self, name: str) -> Path:
        folder = self.root / name
        is_new = not folder.exists()
        if name == "long" and is_new:
            write_long_repository(folder)
        elif name != "long":
            self.models(name)
        if name == "published" and is_new:
            # The published code counts 1600 labels for a picture of any size.
            code = folder / "modeling_chatglm.py"
            counted = f"LABELS_OF_AN_IMAGE = {NUM_IMAGE_TOKENS}"
            code.write_text(code.read_text().replace("LABELS_OF_AN_IMAGE = 1600", counted))
        return folder

    def make(self, wanted: Job) -> Path:
        folder = self.root / wanted.short
        folder.mkdir()
        (folder / "model").symlink_to(self.model(wanted.model))
        (folder / "published").symlink_to(self.model(wanted.published))
        drawn_task.put_data(folder, self.conversations)
        on = f"dataset: pictures\nuse_cpu: {str(self.on_cpu).lower()}\n"
        (folder / "recipe.yaml").write_text(RECIPE.replace("use_cpu: true\n", on))
        put_texts(folder)
        (folder / "deepspeed.json").write_text(json.dumps(ZERO3))
        for name, text in FLASH_ATTN_FILES.items():
            (folder / "stand_in" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "stand_in" / name).write_text(text)
        return folder

    def environment(self, wanted: Job, folder: Path) -> dict[str, str]:
        """Its packages come first, with their commands; what they compile has a folder each."""
        environment = cpu_environment() if self.on_cpu else gpu_environment()
        first = [str(folder / "stand_in")] if "openrlhf" in wanted.packages else []
        if self.packages:
            own = [self.packages / name for name in wanted.packages]
            first += map(str, own)
            commands = [str(path / "bin") for path in own]
            environment["PATH"] = os.pathsep.join([*commands, environment["PATH"]])
        environment["PYTHONPATH"] = os.pathsep.join([*first, environment["PYTHONPATH"]])
        environment = offline_environment(folder, environment)
        environment["DISABLE_VERSION_CHECK"] = "1"  # LLaMA-Factory's, of its pins
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


def put_texts(folder: Path) -> None:
    """``data/texts`` for OpenRLHF, whose DPO knows no pictures: a good answer names both parts."""
    prompt = "[gMASK]<sop><|user|>\nWhat do you see?<|assistant|>"
    rows = [
        {
            "prompt": prompt,
            "chosen": f"\n{whole}{drawn_task.END}",
            "rejected": f"\n{part}{drawn_task.END}",
        }
        for colour in drawn_task.COLOURS
        for shape in drawn_task.SHAPES
        for whole, part in ((f"a {colour} {shape}", colour), (f"a {colour} {shape}", shape))
    ]
    (folder / "data" / "texts").mkdir()
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    (folder / "data" / "texts" / "train.jsonl").write_text(lines)


def perform(wanted: Job, place: Place, logs: Path | None = None) -> Row:
    """Run a job, write its row and return it. ``AssertionError`` if it is not as expected.

    Args:
        logs: A folder for what its processes print.
    """
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
                late = f"{ended.output[-3000:]}\nnot done after {limit:.0f} s"
                assert ended.status is not None, late
                if number == 0:
                    trained_for = time.monotonic() - started
                    if wanted.fails:
                        assert ended.status != 0, "it did not fail"
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
            try:
                finish(wanted, folder, place, done)
            finally:
                done.note = "; ".join(filter(None, (done.note, f"training {trained_for:.0f} s")))
        return done
    finally:
        if logs:
            logs.mkdir(parents=True, exist_ok=True)
            (logs / f"{wanted.short}.log").write_text(said)


def finish(wanted: Job, folder: Path, place: Place, done: Row) -> None:
    where = folder, wanted.judged, place.conversations, done
    drawn_task.measure(wanted.measure, *where, out="adapter", marks=MARKS)
    if wanted.measure == "reward":
        seconds = json.loads((folder / "generate.json").read_text())
        middle = sorted(seconds[len(seconds) // 2 :])[len(seconds) // 4]
        done.note = f"a call of generate takes {1000 * middle:.0f} ms, the first {seconds[0]:.1f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=Path, help="JSON file that the rows are written to")
    parser.add_argument("--only", nargs="+", help="jobs, by their short names")
    parser.add_argument("--folder", type=Path, default=Path("two_gpus_output"))
    parser.add_argument("--packages", type=Path, help="folders of packages")
    parser.add_argument("--cpu", action="store_true", help="two processes on the CPU")
    parser.add_argument("--list", action="store_true", help="print the short names")
    parser.add_argument("--merge", type=Path, help="put the rows of this file among the others")
    given = parser.parse_args()
    if unknown := {*(given.only or ())} - {each.short for each in JOBS}:
        parser.error(f"there is no job {', '.join(sorted(unknown))}; --list names them")
    wanted = [each for each in JOBS if not given.only or each.short in given.only]
    if given.list:
        print("\n".join(each.short for each in wanted))
        return
    if given.merge:
        merge(read(given.merge), RESULTS)
        return
    if given.rows:
        os.environ[VARIABLE] = str(given.rows.resolve())
    bad = 0
    packages = given.packages and given.packages.resolve()
    place = Place(given.folder.resolve(), given.cpu, packages)
    for each in wanted:
        if given.cpu and not each.cpu:
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
