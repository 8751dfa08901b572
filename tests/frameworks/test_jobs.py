"""Each job of jobs.py learns from pictures, and makes a row of the table in docs/frameworks.md.

They take minutes and packages of their own: the sessions of tests/noxfile.py with the tag "table"
run those of each system in an environment of its own, and print the table.
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
from pathlib import Path

import pytest

from tests.frameworks import drawn_task
from tests.frameworks.drawn_task import RUN, put_data, succeed, with_place
from tests.frameworks.jobs import DOES_NOT_RUN, FACTORY, FACTORY_LORA, JOBS, SWIFT, Job, factory
from tests.frameworks.results_table import cannot, job
from tests.helpers.processes import cpu_environment

pytestmark = pytest.mark.skipif(
    "FRAMEWORKS_RECORD" not in os.environ,
    reason="takes minutes and packages of its own: nox -f tests/noxfile.py -t table",
)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> drawn_task.Models:
    return drawn_task.Models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def train(models, tmp_path) -> Callable[[Job], Path]:
    """Runs a job in a folder with its model, data and files, which is returned."""

    def run(wanted: Job) -> Path:
        (tmp_path / "model").symlink_to(models(wanted.model))
        put_data(tmp_path, models.conversations)
        for name, text in wanted.files.items():
            (tmp_path / name).write_text(text)
        succeed(tmp_path, *wanted.command, seconds=1800, **wanted.environment)
        if wanted.then:
            succeed(tmp_path, *wanted.then)
        return tmp_path

    return run


def need(module: str) -> None:
    if module and importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")


@pytest.mark.parametrize("wanted", JOBS, ids=str)
def test_a_job_learns_from_pictures(wanted, models, train):
    need(wanted.needs)
    with job(wanted.system, wanted.name, wanted.reads, packages=[wanted.package]) as done:
        done.note = wanted.note
        how = wanted.logged, wanted.fall
        folder, seen = train(wanted), models.conversations
        drawn_task.measure(wanted.measure, folder, wanted.out, seen, done, *how)


@pytest.mark.parametrize("tried", DOES_NOT_RUN, ids=lambda each: f"{each.system}: {each.name}")
def test_what_does_not_run_says_why(tried, models, tmp_path):
    need(tried.package)
    (tmp_path / "model").symlink_to(models("random"))
    ended = drawn_task.run(tmp_path, sys.executable, *tried.command)
    assert tried.said in ended.output, ended.output[-6000:]
    packages = [tried.package]
    cannot(tried.system, tried.name, tried.reason, packages=packages, command=tried.reads)


# What frameworks do with what they have trained.


def job_named(jobs: list[Job], name: str) -> Job:
    [found] = [each for each in jobs if each.name == name]
    return found


def test_ms_swift_infers(models, train):
    need("swift")
    wanted, conversations = job_named(SWIFT, "sft, all weights"), models.conversations
    folder = train(wanted)
    asked = {"right": conversations, "swapped": drawn_task.swapped(conversations)}
    with job("ms-swift", "infer", "swift infer --model", packages=["ms-swift"]) as done:
        for name, rows in asked.items():
            lines = [{"messages": [*with_place(row)], "images": [row[0]["image"]]} for row in rows]
            path = folder / f"{name}.jsonl"
            path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
            data = ("--val_dataset", path.name, "--result_path", f"answers_{name}.jsonl")
            drawn = ("--temperature", "0", "--max_new_tokens", "12", "--max_batch_size", "8")
            options = (*data, *drawn, "--load_data_args", "false")
            succeed(folder, *RUN, "swift", "infer", "--model", wanted.out, *options)
            answers = (folder / f"answers_{name}.jsonl").read_text().splitlines()
            given = [json.loads(line) for line in answers]
            share = sum(one["response"] == one["labels"] for one in given) / len(conversations)
            setattr(done, name, share)
        drawn_task.check_shares({"right": done.right, "swapped": done.swapped})


def test_llamafactory_trains_a_reward_model(train):
    """It saves a head of its own form beside the adapter, which its own command scores with."""
    need("llamafactory")
    wanted = factory("rm", f"{FACTORY_LORA} stage=rm seed=3", "pairs", steps=120, rate=4e-3)
    with job(wanted.system, wanted.name, wanted.reads, packages=["llamafactory"]) as done:
        folder = train(wanted)
        losses = drawn_task.history(folder, "loss")
        done.loss = losses[0], losses[-1]
        done.note = "with all weights LLaMA-Factory cannot save it: lm_head shares output_layer"
        done.right, done.swapped = (scored(folder, name) for name in ("pairs", "swapped"))
        drawn_task.check_shares({"last loss": losses[-1]}, {"last loss": losses[0] / 4})
        drawn_task.check_shares({"right": done.right, "swapped": done.swapped})


def scored(folder: Path, name: str) -> float:
    """The share of pairs of which the saved reward model scores the chosen answer higher."""
    loaded = ("model_name_or_path=model", "adapter_name_or_path=out", "finetuning_type=lora")
    given = ("stage=rm", "do_train=false", "do_predict=true", f"eval_dataset={name}")
    options = (*loaded, *given, f"output_dir=scored_{name}")
    succeed(folder, *RUN, "llamafactory-cli", "train", "recipe.yaml", *options)
    lines = (folder / f"scored_{name}" / "generated_predictions.jsonl").read_text().splitlines()
    scores = [json.loads(line) for line in lines]
    return sum(one["chosen"] > one["rejected"] for one in scores) / len(scores)


def test_llamafactory_chats(train):
    """Its command reads questions from the terminal, and takes no pictures."""
    need("llamafactory")
    folder = train(job_named(FACTORY, "sft, rows of text and of pictures"))
    rows = json.loads((folder / "data" / "mixed.json").read_text())
    asked = [row["messages"] for row in rows if not row["images"]]
    lines = [line for question, _ in asked for line in (question["content"], "clear")]
    options = ("--model_name_or_path", "out", "--template", "glm4", "--do_sample", "false")
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
        drawn_task.check_shares({"right": done.right, "swapped": done.swapped})


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


def test_llamafactory_answers(models, train):
    need("llamafactory")
    folder, conversations = train(job_named(FACTORY, "sft, all weights")), models.conversations
    command = "llamafactory-cli api --model_name_or_path out --template glm4"
    options = ("--model_name_or_path", "out", "--template", "glm4", "--do_sample", "false")
    asked = {"right": conversations, "swapped": drawn_task.swapped(conversations)}
    with (
        job("LLaMA-Factory", "api", command, packages=["llamafactory"]) as done,
        served(folder, *options, "--max_new_tokens", "12") as address,
    ):
        for name, rows in asked.items():
            given = [ask(address, q["content"], q["image"]) == a["content"] for q, a in rows]
            setattr(done, name, sum(given) / len(given))
        done.note = "answers begin with a line feed, as those of all its glm4 models"
        drawn_task.check_shares({"right": done.right, "swapped": done.swapped})
