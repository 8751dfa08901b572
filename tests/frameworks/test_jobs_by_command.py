"""The commands of ms-swift and LLaMA-Factory, as their users type them behind the run entry.

A row for each job (results_table.py). They take minutes and packages of their own:
nox -f tests/noxfile.py -s ms_swift, and -s llamafactory.
"""

import base64
import importlib.util
import json
import os
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.frameworks import drawn_task
from tests.frameworks.drawn_task import RUN, succeed
from tests.frameworks.results_table import job
from tests.helpers.processes import cpu_environment

STEPS = 60
REWARD = """
from swift.rewards import ORM, orms

class Right(ORM):
    def __call__(self, completions, solution, **kwargs):
        return [float(text.strip() == right) for text, right in zip(completions, solution)]

orms["right"] = Right
"""


@dataclass(frozen=True)
class Job:
    """One row.

    Attributes:
        command: Of the framework, and the words of its options that are worth reading.
        data: A set of :func:`put_data`.
        model: "published", or one of :mod:`drawn_task`.
        measure: Of :func:`drawn_task.measure`.
        steps, rate, batch: Of the optimizer.
        adapter: Whether it saves an adapter, which is then merged by the framework's own command.
        processes: That the command starts by torchrun.
        fall: Of :func:`drawn_task.measure`.
    """

    name: str
    command: str
    data: str = "pictures"
    model: str = "random"
    measure: str = "answers"
    steps: int = STEPS
    rate: float = 2e-3
    batch: int = 24
    adapter: bool = False
    note: str = ""
    processes: int = 1
    fall: float = 0.5

    def words(self) -> list[str]:
        return self.command.split()


ALL_PARTS = "--freeze_vit false --freeze_aligner false"
FULL = f"--tuner_type full {ALL_PARTS}"
LORA = f"--tuner_type lora --target_modules all-linear {ALL_PARTS}"
SEED = "--seed 4 --data_seed 4"  # in no trial of settings
MERGED = "merged by swift export --merge_lora true"
GRPO = (
    "swift rlhf --rlhf_type grpo --external_plugins reward.py --reward_funcs right "
    "--num_generations 32 --max_completion_length 8 --temperature 1.0 --beta 0 "
    f"--use_vllm false {FULL}"
)
SWIFT = [
    Job(
        *("sft, LoRA, published repository", f"swift sft {LORA}"),
        model="published",
        rate=1e-2,
        adapter=True,
        note=MERGED,
    ),
    Job("sft, all weights", f"swift sft {FULL}"),
    Job("sft, two processes", f"swift sft {FULL}", batch=12, processes=2),
    Job("sft, two pictures a row", f"swift sft {FULL}", data="several"),
    Job("sft, rows of text and of pictures", f"swift sft {FULL}", data="mixed", steps=100),
    Job("orpo", f"swift rlhf --rlhf_type orpo {FULL}", data="pairs"),
    Job(
        *("dpo", f"swift rlhf --rlhf_type dpo {FULL}", "pairs", "blind", "preferences"),
        rate=5e-4,
    ),
    # With equal weights one right answer may be pushed so far down that KTO gives it no gradient.
    # One that is drawn for certain keeps about a third of its loss, which is counted twice then.
    Job(
        *("kto", f"swift rlhf --rlhf_type kto --beta 0.3 --desirable_weight 2 {SEED} {FULL}"),
        *("kto", "blind", "preferences"),
        steps=200,
        rate=1e-3,
        fall=0.6,
    ),
    Job("grpo", GRPO, "reward", "sighted", "reward", steps=100, rate=4e-4, batch=768),
]
BOTH_TOWERS = "freeze_vision_tower=false freeze_multi_modal_projector=false"
LF = "llamafactory-cli train recipe.yaml"
LF_LORA = f"{LF} finetuning_type=lora lora_target=all {BOTH_TOWERS}"
LF_FULL = f"{LF} finetuning_type=full {BOTH_TOWERS}"
LF_PAIRS = f"{LF_FULL} stage=dpo"
EXPORTED = "merged by llamafactory-cli export"
SAME = "packing and neat_packing are one: no sample of a row sees another"
MIXED = Job("sft, rows of text and of pictures", LF_FULL, data="mixed", steps=100)
FACTORY = [
    Job(
        *("sft, LoRA, published repository", LF_LORA),
        model="published",
        rate=1e-2,
        adapter=True,
        note=EXPORTED,
    ),
    Job("sft, DoRA", f"{LF_LORA} use_dora=true", rate=1e-2, adapter=True, note=EXPORTED),
    Job("sft, all weights", LF_FULL),
    Job("sft, two processes", LF_FULL, batch=12, processes=2),
    Job("sft, two pictures a row", LF_FULL, data="several"),
    MIXED,
    Job("sft, packing", f"{LF_FULL} packing=true", batch=4, note=SAME),
    Job("sft, neat_packing", f"{LF_FULL} neat_packing=true", batch=4, note=SAME),
    Job(
        "sft, freeze_language_model",
        f"{LF} finetuning_type=full freeze_vision_tower=false "
        "freeze_multi_modal_projector=false freeze_language_model=true",
        model="blind",
        steps=200,
    ),
    Job("dpo", LF_PAIRS, "pairs", "blind", "preferences", rate=5e-4),
    Job(
        "simpo", f"{LF_PAIRS} pref_loss=simpo", "pairs", "blind", "preferences", steps=90, rate=5e-4
    ),
    Job("orpo", f"{LF_PAIRS} pref_loss=orpo", "pairs"),
    Job(
        *("kto", f"{LF_FULL} stage=kto pref_beta=0.3", "kto", "blind", "preferences"),
        steps=200,
        rate=1e-3,
    ),
]
YAML = """
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
TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user"}
TAGS["assistant_tag"] = "assistant"
COLUMNS = ("messages", "images", "chosen", "rejected")


def put_data(folder: Path, conversations: list[list[dict]]) -> None:
    """Sets in ``data``: NAME.json for LLaMA-Factory, NAME.jsonl for ms-swift."""
    sets: dict[str, list[dict]] = {name: [] for name in ("pictures", "several", "mixed", "reward")}
    shifted = conversations[7:] + conversations[:7]
    for number, (row, other) in enumerate(zip(conversations, shifted, strict=True)):
        (asked, answer), (asked_next, answer_next) = map(_with_place, (row, other))
        pictures = [one[0]["image"] for one in (row, other)]
        sets["pictures"].append({"messages": [asked, answer], "images": pictures[:1]})
        turns = [asked, answer, asked_next, answer_next]
        sets["several"].append({"messages": turns, "images": pictures})
        sets["reward"].append(
            {"messages": [asked], "images": pictures[:1], "solution": answer["content"]}
        )
        page = {"role": "user", "content": f"What is on page {number}?"}
        sets["mixed"] += [sets["pictures"][-1], {"messages": [page, answer], "images": []}]
    _put_swift_and_factory(folder, sets, drawn_task.pairs_of(conversations))
    (folder / "reward.py").write_text(REWARD)


def _with_place(row: list[dict]) -> tuple[dict, dict]:
    question, answer = row
    return {"role": "user", "content": f"<image>{question['content']}"}, answer


def _put_swift_and_factory(folder: Path, sets: dict[str, list[dict]], pairs: list) -> None:
    def said(text: str) -> dict:
        return {"role": "assistant", "content": text}

    pictures = [([picture], _with_place([{"content": q}, {}])[0]) for q, picture, _, _ in pairs]
    judged = [(one, other) for _, _, one, other in pairs]
    kto = [
        {"messages": [asked, said(text)], "label": text == one, "images": images}
        for (images, asked), (one, other) in zip(pictures, judged, strict=True)
        for text in (one, other)
    ]
    swift_pairs = [
        {"messages": [asked, said(one)], "rejected_response": other, "images": images}
        for (images, asked), (one, other) in zip(pictures, judged, strict=True)
    ]
    factory_pairs = [
        {"messages": [asked], "chosen": said(one), "rejected": said(other), "images": images}
        for (images, asked), (one, other) in zip(pictures, judged, strict=True)
    ]
    others = drawn_task.with_other_pictures(pairs)
    factory_swapped = [
        pair | {"images": [picture]}
        for pair, (_, picture, _, _) in zip(factory_pairs, others, strict=True)
    ]
    data = folder / "data"
    data.mkdir()
    described = {}
    factory_sets = sets | {"pairs": factory_pairs, "swapped": factory_swapped, "kto": kto}
    for name, rows in factory_sets.items():
        columns = {column: column for column in COLUMNS if column in rows[0]}
        columns |= {"kto_tag": "label"} if name == "kto" else {}
        described[name] = {"file_name": f"{name}.json", "formatting": "sharegpt", "tags": TAGS}
        described[name] |= {"columns": columns, "ranking": "chosen" in rows[0]}
        (data / f"{name}.json").write_text(json.dumps(rows))
    (data / "dataset_info.json").write_text(json.dumps(described))
    for name, rows in (sets | {"pairs": swift_pairs, "kto": kto}).items():
        (data / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> drawn_task.Models:
    return drawn_task.Models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def place(models, tmp_path) -> Callable[[str], tuple[Path, list[list[dict]]]]:
    """Makes a folder with the model that a job begins with, and the data."""

    def make(name: str) -> tuple[Path, list[list[dict]]]:
        (tmp_path / "model").symlink_to(models(name))
        put_data(tmp_path, models.conversations)
        return tmp_path, models.conversations

    return make


def run_swift(wanted: Job, folder: Path) -> str:
    """The folder that was saved."""
    common = {
        "model": "model",
        "dataset": f"data/{wanted.data}.jsonl",
        "split_dataset_ratio": 0,
        "torch_dtype": "float32",
        "output_dir": "out",
        "add_version": "false",
        "max_steps": wanted.steps,
        "save_steps": wanted.steps,
        "per_device_train_batch_size": wanted.batch,
        "gradient_accumulation_steps": 1,
        "learning_rate": wanted.rate,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": "true",
        "dataloader_num_workers": 0,
    }
    options = [str(part) for name, value in common.items() for part in (f"--{name}", value)]
    several = {"NPROC_PER_NODE": str(wanted.processes)} if wanted.processes > 1 else {}
    succeed(folder, *RUN, *wanted.words(), *options, seconds=1800, **several)
    saved = f"out/checkpoint-{wanted.steps}"
    if not wanted.adapter:
        return saved
    merge = ("--adapters", saved, "--merge_lora", "true", "--output_dir", "merged")
    succeed(folder, *RUN, "swift", "export", *merge)
    return "merged"


def run_factory(wanted: Job, folder: Path) -> str:
    """The folder that was saved."""
    common = {
        "model_name_or_path": "model",
        "dataset": wanted.data,
        "output_dir": "out",
        "max_steps": wanted.steps,
        "per_device_train_batch_size": wanted.batch,
        "learning_rate": wanted.rate,
        "lr_scheduler_type": "constant",
    }
    (folder / "recipe.yaml").write_text(YAML)
    options = [f"{name}={value}" for name, value in common.items()]
    several = {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": str(wanted.processes)}
    more_processes = several if wanted.processes > 1 else {}
    succeed(folder, *RUN, *wanted.words(), *options, seconds=1800, **more_processes)
    if not wanted.adapter:
        return "out"
    model = ("--model_name_or_path", "model", "--adapter_name_or_path", "out")
    more = ("--template", "glm4", "--trust_remote_code", "true", "--export_dir", "merged")
    succeed(folder, *RUN, "llamafactory-cli", "export", *model, *more)
    return "merged"


needs_record = pytest.mark.skipif(
    "FRAMEWORKS_RECORD" not in os.environ,
    reason="takes minutes and packages of its own: nox -f tests/noxfile.py -s ms_swift",
)
needs_swift = pytest.mark.skipif(
    importlib.util.find_spec("swift") is None, reason="ms-swift is not installed"
)
needs_factory = pytest.mark.skipif(
    importlib.util.find_spec("llamafactory") is None, reason="LLaMA-Factory is not installed"
)


def named(wanted: Job) -> str:
    return wanted.name


@needs_record
@needs_swift
@pytest.mark.parametrize("wanted", SWIFT, ids=named)
def test_ms_swift_learns_from_pictures(wanted, place):
    folder, conversations = place(wanted.model)
    with job("ms-swift", wanted.name, wanted.command, packages=["ms-swift"]) as done:
        done.note = wanted.note
        saved = run_swift(wanted, folder)
        drawn_task.measure(wanted.measure, folder, saved, conversations, done, fall=wanted.fall)


@needs_record
@needs_factory
@pytest.mark.parametrize("wanted", FACTORY, ids=named)
def test_llamafactory_learns_from_pictures(wanted, place):
    folder, conversations = place(wanted.model)
    with job("LLaMA-Factory", wanted.name, wanted.command, packages=["llamafactory"]) as done:
        done.note = wanted.note
        saved = run_factory(wanted, folder)
        drawn_task.measure(wanted.measure, folder, saved, conversations, done)


@needs_record
@needs_swift
def test_ms_swift_infers(place):
    folder, conversations = place("random")
    saved = run_swift(SWIFT[1], folder)
    asked = {"right": conversations, "swapped": drawn_task.swapped(conversations)}
    with job("ms-swift", "infer", "swift infer --model", packages=["ms-swift"]) as done:
        for name, rows in asked.items():
            lines = [{"messages": [*_with_place(row)], "images": [row[0]["image"]]} for row in rows]
            path = folder / f"{name}.jsonl"
            path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
            data = ("--val_dataset", path.name, "--result_path", f"answers_{name}.jsonl")
            drawn = ("--temperature", "0", "--max_new_tokens", "12", "--max_batch_size", "8")
            options = (*data, *drawn, "--load_data_args", "false")
            succeed(folder, *RUN, "swift", "infer", "--model", saved, *options)
            answers = (folder / f"answers_{name}.jsonl").read_text().splitlines()
            given = [json.loads(line) for line in answers]
            share = sum(one["response"] == one["labels"] for one in given) / len(conversations)
            setattr(done, name, share)
        drawn_task.check_shares(done)


@needs_record
@needs_factory
def test_llamafactory_trains_a_reward_model(place):
    """It saves a head of its own form beside the adapter, which its own command scores with."""
    folder, _ = place("random")
    wanted = Job("reward", f"{LF_LORA} stage=rm seed=3", "pairs", steps=120, rate=4e-3)
    with job("LLaMA-Factory", "rm", wanted.command, packages=["llamafactory"]) as done:
        run_factory(wanted, folder)
        losses = drawn_task.history(folder, "loss")
        done.loss = losses[0], losses[-1]
        done.note = "with all weights LLaMA-Factory cannot save it: lm_head shares output_layer"
        done.right, done.swapped = (scored(folder, name) for name in ("pairs", "swapped"))
        drawn_task.check("last loss", losses[-1], most=losses[0] / 4)
        drawn_task.check_shares(done)


def scored(folder: Path, name: str) -> float:
    """The share of pairs of which the saved reward model scores the chosen answer higher."""
    loaded = ("model_name_or_path=model", "adapter_name_or_path=out", "finetuning_type=lora")
    given = ("stage=rm", "do_train=false", "do_predict=true", f"eval_dataset={name}")
    options = (*loaded, *given, f"output_dir=scored_{name}")
    succeed(folder, *RUN, *LF.split(), *options)
    lines = (folder / f"scored_{name}" / "generated_predictions.jsonl").read_text().splitlines()
    scores = [json.loads(line) for line in lines]
    return sum(one["chosen"] > one["rejected"] for one in scores) / len(scores)


@needs_record
@needs_factory
def test_llamafactory_chats(place):
    """Its command reads questions from the terminal, and takes no pictures."""
    folder, _ = place("random")
    saved = run_factory(MIXED, folder)
    rows = json.loads((folder / "data" / "mixed.json").read_text())
    asked = [row["messages"] for row in rows if not row["images"]]
    lines = [line for question, _ in asked for line in (question["content"], "clear")]
    options = ("--model_name_or_path", saved, "--template", "glm4", "--do_sample", "false")
    command = (*RUN, "llamafactory-cli", "chat", *options, "--max_new_tokens", "12")
    reads = "llamafactory-cli chat --model_name_or_path out --template glm4"
    with job("LLaMA-Factory", "chat", reads, packages=["llamafactory"]) as done:
        done.note = "texts only: the command takes no pictures"
        (folder / "typed.txt").write_text("\n".join([*lines, "exit\n"]))
        typed = f"{shlex.join(command)} < typed.txt 2> chat.log"
        printed = succeed(folder, "bash", "-c", typed)
        given = [part.split("User:")[0].strip() for part in printed.split("Assistant:")[1:]]
        right = [want["content"] == got for (_, want), got in zip(asked, given, strict=True)]
        done.right = sum(right) / len(right)
        drawn_task.check_shares(done)


@contextmanager
def served(folder: Path, *options: str) -> Iterator[str]:
    """The address of ``llamafactory-cli api``."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = cpu_environment() | {"API_PORT": str(port), "HF_HUB_OFFLINE": "1"}
    command = [*RUN, str(Path(sys.executable).with_name("llamafactory-cli")), "api", *options]
    with (folder / "api.log").open("w") as log:
        server = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
    try:
        yield f"http://localhost:{port}/v1/chat/completions"
    finally:
        server.terminate()
        server.wait(30)


def ask(address: str, question: str, picture: str) -> str:
    data = base64.b64encode(Path(picture).read_bytes()).decode()
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    content = [url, {"type": "text", "text": question}]
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}).encode()
    request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
    for _ in range(120):
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["choices"][0]["message"]["content"].strip()
        except urllib.error.URLError as error:  # it is not there yet
            if isinstance(error, urllib.error.HTTPError):
                raise
            time.sleep(1)
    raise TimeoutError(address)


@needs_record
@needs_factory
def test_llamafactory_answers(place):
    folder, conversations = place("random")
    saved = run_factory(FACTORY[2], folder)
    command = "llamafactory-cli api --model_name_or_path out --template glm4"
    options = ("--model_name_or_path", saved, "--template", "glm4", "--do_sample", "false")
    asked = {"right": conversations, "swapped": drawn_task.swapped(conversations)}
    with (
        job("LLaMA-Factory", "api", command, packages=["llamafactory"]) as done,
        served(folder, *options, "--max_new_tokens", "12") as address,
    ):
        for name, rows in asked.items():
            given = [ask(address, q["content"], q["image"]) == a["content"] for q, a in rows]
            setattr(done, name, sum(given) / len(given))
        done.note = "answers begin with a line feed, as those of all its glm4 models"
        drawn_task.check_shares(done)
