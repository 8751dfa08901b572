"""A reader's way through README and docs: commands and Python are run as the pages have them.

A test that is marked with :func:`runs` gets all commands that begin so, whichever page they are on,
and runs them in a fresh copy of the repository, with a tiny model on the CPU. To be small, options
are added to them or names replaced; nothing of a command is repeated here. What cannot be run here
is in ``ELSEWHERE``, with what does run it.
"""

import contextlib
import json
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

from glm4v_patched.cli import _parser, main
from glm4v_patched.demo.tiny_model import IMAGE_SIDE, build_from_scratch
from glm4v_patched.finetune.recipe import Recipe
from tests.helpers.legacy_repository import write_legacy_repository
from tests.helpers.local_hub import LocalHub
from tests.helpers.pages import PAGES, README, ROOT, blocks, commands
from tests.helpers.processes import (
    cpu_environment,
    heed_signals,
    on_the_cpu,
    run_with_limit,
    serving,
)
from tests.helpers.publishable import as_files, write_original
from tests.helpers.tiny import tiny_model

COMMANDS = [command for page in PAGES for command in commands(page)]

# What begins so is not run by this file, but by what stands behind it.
ELSEWHERE = {
    # The first two blocks of README.
    "python3 -m venv .venv": "nox: first_command and test_command",
    ".venv/bin/pip install": "nox: first_command and test_command",
    # Packages: of the sessions of nox and of .ci/run, or for tests that are skipped without them.
    "pip install ": "nox",
    "apt-get install ": ".ci/run, or by hand",
    # What contributing.md says to do before a change is sent: .ci/run does the same.
    ". .venv/bin/activate": "Reader: commands run as if it were activated",
    ".venv/bin/pytest": "nox: test_command",
    "glm4v-patched demo --device cpu": "nox: first_command, with fewer steps",
    "glm4v-patched export trained": "nox: llm_compressor, tests/inference/test_export.py",
    "python -m hub_upload build --adapter": "tests/hub_upload/test_adapter.py",
    "glm4v-patched chat demo_output": "tests/inference/test_web.py, in a browser",
    "glm4v-patched chat zai-org": "tests/inference/test_web.py, in a browser",
    # What makes versions of its own, of gigabytes or for an hour.
    "nox -f tests/noxfile.py -s ": "by hand: test_sessions_are_there",
    "nox -f tests/noxfile.py -t ": "by hand: test_sessions_are_there",
    ".venv/bin/nox -f tests/noxfile.py -s ": "by hand: test_sessions_are_there",
    "python -m glm4v_patched.run sft_script.py": "nox: frameworks",
    "python -m glm4v_patched.run trl sft": "nox: frameworks",
    "torchrun --nproc_per_node 2 train.py": "nox: jobs",
    "python -m glm4v_patched.run llamafactory": "nox: llamafactory",
    "FORCE_TORCHRUN=1 NPROC_PER_NODE=2 python -m glm4v_patched.run": "nox: llamafactory",
    "python -m glm4v_patched.run axolotl": "nox: axolotl",
    "python -m glm4v_patched.run -m openrlhf": "nox: jobs, its model and loss: it asks for a GPU",
    "python -m glm4v_patched.run swift": "nox: ms_swift",
    "NPROC_PER_NODE=2 python -m glm4v_patched.run swift": "nox: ms_swift",
    # Rows in each format.
    "from datasets import Dataset, Image, List": "tests/data/test_page.py",
    # Two GPUs.
    "python train.py": "pytest -m two_gpu: tests/frameworks/test_jobs.py",
    "PYTHONPATH=. python docs/benchmarks/": "tests/test_experiments.py, at tiny size",
    "python docs/benchmarks/": "tests/test_experiments.py, at tiny size",
    "glm4v-patched bench --generate --load-in": "tests/bench/test_generation.py, on a GPU",
    "glm4v-patched bench --generate --torchao": "tests/bench/test_generation.py, where it is",
    # Weights of the real size.
    "python -m glm4v_patched.bench.from_files FOLDER": "tests/bench/test_from_files.py",
    "pip install bitsandbytes": "tests/distributed/test_recipe_choices.py, on a GPU",
    "pip install torchao": "tests/models/test_quantised_weights.py: skipped where it is missing",
    "pip install liger-kernel": "tests/patch/test_liger_kernels_gpu.py, on a GPU",
    # vLLM, in an environment of its own.
    "VLLM_PLUGINS= python docs/benchmarks/": "tests/inference/test_vllm_model.py",
    "vllm serve": "by hand: its server on a CPU, with vLLM 0.32.0",
    # Needs an environment of its own, or other machines.
    "glm4v-patched compare": "tests/compare/test_compare.py",
    "torchrun --nnodes 2": "tests/distributed/test_more_machines.py",
    "deepspeed --hostfile hosts": "needs ssh; its launcher was tried by hand, as the page says",
    # Other tests: .ci/run runs them, or a person with GPUs.
    "pytest": "test_tests_that_pages_name_are_there",
    "ruff check .": "nox: lint",
    "ruff format .": "nox: lint",
    "mypy": "nox: types",
    "pre-commit install": "tests/test_project.py: its hooks are those of .ci/run",
    # The form of commands that the pages have in full, too.
    "python -m glm4v_patched.run SCRIPT_OR_COMMAND": "test_scripts_are_patched",
    "glm4v-patched train RECIPE": "test_training_is_stopped_and_goes_on",
    # It loads the published model: at tiny size here.
    "glm4v-patched train lora_1x80gb": "tests/finetune/test_shipped_recipes.py",
}
RUN: list[str] = []


def runs(*beginnings: str) -> pytest.MarkDecorator:
    """Give a test the texts of all commands that begin so, as ``given``."""
    RUN.extend(beginnings)
    given = list(dict.fromkeys(c.text for c in COMMANDS if c.text.startswith(beginnings)))
    return pytest.mark.parametrize("given", [given], ids=["pages"])


def once(given: list[str]) -> list[str]:
    """Commands that one page has with ``.venv/bin/`` and another without."""
    return list(dict.fromkeys(text.removeprefix(".venv/bin/") for text in given))


def test_every_command_is_run_or_says_what_runs_it():
    known = (*RUN, *ELSEWHERE)
    assert [command for command in COMMANDS if not command.text.startswith(known)] == []
    texts = [command.text for command in COMMANDS]
    assert [each for each in known if not any(text.startswith(each) for text in texts)] == []


@runs("import torch\nfrom tests.helpers.tiny import")
def test_a_test_of_ones_own_is_green(given):
    for code in given:
        names: dict = {}
        exec(code, names)
        [test] = [value for name, value in names.items() if name.startswith("test_")]
        test(tiny_model())


def of_program(name: str) -> list[str]:
    pattern = re.compile(rf"(?:\.venv/bin/)?{name} ")
    texts = {c.text for c in COMMANDS if pattern.match(c.text)}
    return sorted(pattern.sub("", text) for text in texts)


@pytest.mark.parametrize("arguments", of_program("glm4v-patched"))
def test_options_are_there(arguments):
    if "--help" not in arguments:
        _parser().parse_args(shlex.split(arguments.partition(" > ")[0]))


@pytest.mark.parametrize("arguments", of_program("pytest"))
def test_tests_that_pages_name_are_there(arguments):
    words = shlex.split(arguments)
    paths = [word.partition("::")[0] for word in words if word.startswith("tests")]
    assert [path for path in paths if not (ROOT / path).exists()] == []
    if "-k" in words:
        wanted = words[words.index("-k") + 1]
        files = [file for path in paths for file in [ROOT / path, *(ROOT / path).rglob("*.py")]]
        assert any(wanted in file.read_text() for file in files if file.is_file()), wanted


@pytest.mark.parametrize("arguments", of_program("nox"))
def test_sessions_are_there(arguments):
    words = shlex.split(arguments)
    source = (ROOT / words[words.index("-f") + 1]).read_text()
    if "-t" in words:
        assert f'tags=["{words[words.index("-t") + 1]}"]' in source
        return
    assert f"\ndef {words[words.index('-s') + 1]}(session: nox.Session" in source


class Reader:
    """Types what the pages say, in a copy of the repository whose environment is activated."""

    def __init__(self, folder: Path):
        self.folder = folder
        for name in ("docs", "glm4v_patched", "hub_upload", "tests"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        for name in ("LICENSE", "README.md", "pyproject.toml"):
            shutil.copy(ROOT / name, folder)
        self.environment = cpu_environment() | {"PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1"}
        self.environment |= {"HF_HOME": str(folder / "home"), "PET_STANDALONE": "1"}
        self.environment.pop("GLM4V_PATCHED", None)
        (folder / ".venv").symlink_to(sys.prefix)

    def shell(self, command: str, seconds: float = 300, **environment: str) -> str:
        """What the command printed; it fails the test if it fails or takes longer."""
        bash = ["bash", "-euo", "pipefail", "-c", command]
        ended = run_with_limit(bash, seconds, self.environment | environment, self.folder)
        assert ended.status == 0, f"{command}\n{ended.status}\n{ended.output[-6000:]}"
        return ended.output

    def here(self, command: str) -> None:
        """A command of ours in this process, which tests may have prepared."""
        _, *arguments = shlex.split(command)
        with contextlib.chdir(self.folder):
            assert main(arguments) == 0, command

    def python(self, code: str) -> str:
        (self.folder / "block.py").write_text(code)
        return self.shell("python block.py")


@pytest.fixture(scope="module")
def reader(tmp_path_factory) -> Reader:
    """With README's line of data, its picture, its recipe, and a tiny model in the real one's
    place."""
    folder = tmp_path_factory.mktemp("reader") / "clone"
    reader = Reader(folder)
    [line] = [block for block in blocks(README, "json") if "messages" in block]
    (folder / "train.jsonl").write_text(line * 16)
    messages = json.loads(line)["messages"]
    for message in messages:
        if "image" in message:
            Image.new("RGB", (IMAGE_SIDE, IMAGE_SIDE), "orange").save(folder / message["image"])
    build_from_scratch(folder / "tiny", [messages], seed=0)
    [recipe] = [block for block in blocks(README, "yaml") if "trainer:" in block]
    (folder / "recipe.yaml").write_text(tiny(recipe))
    write_legacy_repository(folder / "repository")
    return reader


def tiny(text: str) -> str:
    assert "zai-org/glm-4v-9b" in text
    return text.replace("zai-org/glm-4v-9b", "tiny")


@pytest.fixture(scope="module")
def trained(reader) -> Path:
    """README's training, stopped by Ctrl-C after its first checkpoint."""
    (command,) = (c.text for c in commands(README) if "glm4v-patched train" in c.text)
    few = "--device cpu --processes 2 trainer.max_steps=40 trainer.save_steps=20"
    few += " trainer.learning_rate=1e-2"  # so that adapters change more than rounding does
    shell = ["bash", "-c", f"exec {command} {few}"]
    log = reader.folder / "train.log"
    with log.open("w") as output:
        running = subprocess.Popen(
            shell,
            cwd=reader.folder,
            env=reader.environment,
            stdout=output,
            stderr=output,
            preexec_fn=heed_signals,
        )
    out = reader.folder / "trained"
    end = time.monotonic() + 300
    while not (out / "checkpoint-20" / "complete.json").exists():
        if running.poll() is not None or time.monotonic() > end:
            running.kill()
            pytest.fail(f"no checkpoint, status {running.poll()}\n{log.read_text()[-6000:]}")
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    assert running.wait(60) == 128 + signal.SIGINT, log.read_text()[-6000:]
    assert "--resume" in log.read_text().rstrip().splitlines()[-1]
    return out


@pytest.mark.slow
@runs(".venv/bin/glm4v-patched train recipe.yaml", "glm4v-patched train trained/recipe.json")
def test_training_is_stopped_and_goes_on(given, reader, trained):
    _, resume = given
    assert "checkpoint-20" in reader.shell(f"{resume} --device cpu")
    steps = [
        each["step"] for each in json.loads((trained / "training.json").read_text())["history"]
    ]
    assert steps[-1] == 40 and (trained / "adapter_model.safetensors").is_file()


@pytest.mark.slow
@runs("glm4v-patched doctor", ".venv/bin/glm4v-patched doctor")
def test_doctor_finds_nothing_that_will_fail(given, reader):
    for command in once(given):
        fresh = "out=untouched " * ("recipe.yaml" in command)  # another test has trained there
        told = {"--rows": "<|assistant|>[[", "--json": '"fails": false'}
        expected = next((told[name] for name in told if name in command), " 0 will fail")
        assert expected in reader.shell(f"{command} {fresh}--device cpu")


@pytest.mark.slow
@runs("glm4v-patched train recipe.yaml", "glm4v-patched train --help")
def test_fields_are_given_on_the_command_line(given, reader):
    overridden, help_ = given
    reader.shell(f"{overridden} out=other trainer.max_steps=2 --device cpu --processes 1")
    recipe = json.loads((reader.folder / "other" / "recipe.json").read_text())
    assert (recipe["engine"]["zero_stage"], recipe["trainer"]["learning_rate"]) == (2, 2e-5)
    assert "trainer.learning_rate" in reader.shell(help_)


@runs("glm4v-patched recipe")
def test_a_recipe_is_printed_to_be_edited(given, reader):
    (command,) = given
    reader.shell(command)
    assert Recipe.read(reader.folder / command.rpartition("> ")[2]).trained == "lora_lm"


@pytest.fixture(scope="module")
def demo_output(reader) -> Path:
    (command,) = (c.text for c in commands(README) if c.text.endswith("glm4v-patched demo"))
    with on_the_cpu():
        reader.here(f"{command} --steps 2 --device cpu")
    return reader.folder / "demo_output"


@pytest.mark.slow
@runs(
    ".venv/bin/glm4v-patched demo",
    "from transformers import AutoModelForCausalLM",
    "import json\n\nimport torch\n",
)
def test_what_the_demo_saved_answers_and_classifies(given, reader, demo_output):
    programs = [text for text in given if "from_pretrained" in text]
    assert len(programs) == 3
    for code in programs:
        code = code.replace("max_steps=20", "max_steps=2")
        reader.python("import sys\nsys.modules['glm4v_patched'] = None\n" + code)


@pytest.mark.slow
@runs("import glm4v_patched\n")
def test_the_two_lines_patch(given, reader):
    for code in given:
        patched = "from transformers import AutoConfig\n"
        patched += "print(type(AutoConfig.from_pretrained('repository')).__module__)\n"
        assert "glm4v_patched.remote" in reader.python(f"{code}\n{patched}")


SCRIPT = """
import os, sys
from transformers import AutoConfig
name = type(AutoConfig.from_pretrained("repository")).__module__
with open("rank" + os.environ.get("RANK", "0"), "w") as file:
    print(name, *sys.argv[1:], file=file)
"""


@pytest.mark.slow
@runs(
    "python -m glm4v_patched.run train.py",
    "torchrun --nproc_per_node 2 -m glm4v_patched.run train.py",
    "deepspeed --module glm4v_patched.run",
    "export GLM4V_PATCHED=1",
)
def test_scripts_are_patched(given, reader):
    (reader.folder / "train.py").write_text(SCRIPT)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        here = f"deepspeed --num_gpus 2 --master_port {free.getsockname()[1]} "
    for command in given:
        if any(other.startswith(f"{command} ") for other in given):
            continue  # once, with arguments
        # The variable PYTHONPATH that it sets has no place for the tests' own.
        command = command.replace("deepspeed ", here).replace("PYTHONPATH=$", "PYTHONPATH=.:$")
        if "train.py" not in command:
            command += "; python train.py --lr 1e-5"
        reader.shell(command)
        handed_on = command.partition("train.py")[2].split()
        ranks = 2 if "torchrun" in command or "deepspeed" in command else 1
        for rank in range(ranks):
            module, *arguments = (reader.folder / f"rank{rank}").read_text().split()
            assert module.startswith("glm4v_patched.remote"), command
            if "deepspeed" in command:
                assert arguments.pop(0) == f"--local_rank={rank}"
            assert arguments == handed_on, command
            (reader.folder / f"rank{rank}").unlink()


@pytest.mark.slow
@runs('time python -c "import transformers"')
def test_what_is_timed_is_timed(given, reader):
    for command in given:
        reader.shell(command)


GENERATION = "--config tiny/config.json --device cpu --new-tokens 4 --prompt-tokens 8 --repeats 1"


@pytest.mark.slow
@runs("glm4v-patched bench")
def test_bench_measures_and_makes_its_page_and_pictures_again(given, reader):
    """One command that measures is typed; the others are called."""
    small = "--config tiny/config.json --device cpu --text-tokens 20 --no-compile"
    small += " --warm-up 1 --steps 1"
    page = reader.folder / "docs" / "benchmarks" / "README.md"
    before = page.read_text()
    for command in given:
        if command == "glm4v-patched bench" or command.startswith(tuple(ELSEWHERE)):
            continue  # its name, in running text
        if "--rows" not in command:
            command += f" {GENERATION if '--generate' in command else small}"
        if "--steps 4" in command or "*" in command:
            reader.shell(command)
        else:
            with on_the_cpu():
                reader.here(command)
        if "--pictures" in command:
            drawn = sorted(path.name for path in (reader.folder / "pictures").iterdir())
            # Memory is measured on GPUs only, as that of the page's rows was.
            assert drawn == ["memory.png"] * ("--rows" in command) + ["speed.png"]
            shutil.rmtree(reader.folder / "pictures")
    assert page.read_text() == before
    rows = json.loads((reader.folder / "rows.json").read_text())
    assert [row["settings"]["micro_batch"] for row in rows] == [1, 4]
    assert not any("error" in row for row in rows)


@pytest.mark.slow
@runs("python -m hub_upload ", ".venv/bin/python -m hub_upload ", "python tests/helpers/local_hub")
def test_the_model_is_published(given, reader, demo_output, tmp_path):
    with LocalHub(("org",)) as hub:
        original = as_files(write_original(tmp_path / "original"))
        commit = hub.add_repository("zai-org/glm-4v-9b", original).head
        online = hub.environment | {"HF_HUB_OFFLINE": "0"}
        for command in of_the_original(given):
            reader.shell(command.replace("@COMMIT", f"@{commit}"), **online)
        assert hub.repositories["org/glm-4v-9b-trainable"].tags

    (serve,) = (text for text in given if "local_hub" in text)
    shell = ["bash", "-c", f"exec {serve}"]
    with subprocess.Popen(
        shell, cwd=reader.folder, env=reader.environment, stdout=subprocess.PIPE, text=True
    ) as serving:
        try:
            told = [serving.stdout.readline().split("export ")[1].strip() for _ in range(3)]
            online = dict(line.split("=", 1) for line in told) | {"HF_HUB_OFFLINE": "0"}
            for command in given:
                if "built" in command:
                    reader.shell(command, **online)
        finally:
            serving.kill()


def of_the_original(given: list[str]) -> list[str]:
    """Each command once, although two pages have it, README's way and that of docs."""
    plain = (text.removeprefix(".venv/bin/") for text in given)
    return [text for text in dict.fromkeys(plain) if "published" in text]


MERGED_IS_THE_SAME = """
import torch
from transformers import AutoModelForCausalLM, AutoProcessor

merged = AutoModelForCausalLM.from_pretrained("merged", trust_remote_code=True)
base = AutoModelForCausalLM.from_pretrained("tiny", trust_remote_code=True)
AutoProcessor.from_pretrained("merged", trust_remote_code=True)
ids = torch.arange(100, 120)[None]
got, want, before = (each.float().eval()(ids).logits for each in (merged, model, base))
# Merged weights are rounded to bf16.
assert (got - want).abs().max() < 0.1 * (want - before).abs().max(), (got, want, before)
"""


@pytest.mark.slow
@runs(
    "from peft import PeftConfig, PeftModel",
    "glm4v-patched merge ",
    ".venv/bin/glm4v-patched merge ",
)
def test_adapters_load_and_are_merged(given, reader, trained):
    load, merge = sorted(once(given), key=lambda code: " merge " in code)
    reader.shell(merge)
    without_package = "import sys\nsys.modules['glm4v_patched'] = None\n"
    adapters = load.replace("my_adapter", "trained")
    reader.python(without_package + adapters + MERGED_IS_THE_SAME)


@pytest.mark.slow
@runs("glm4v-patched serve ", "import base64")
def test_a_model_is_served(given, reader):
    [code] = [text for text in given if text.startswith("import")]
    [command] = [text for text in given if text.endswith(" trained")]
    command = command.replace("trained", "tiny --served-model-name trained")
    shell = ["bash", "-c", f"exec {command} --port 0 --device cpu --max-new-tokens 3"]
    started = shell, r"is served at (\S+)", reader.folder / "serve.log"
    with serving(*started, reader.environment, reader.folder) as (url, _):
        assert "http://127.0.0.1:8000/v1" in code
        reader.python(code.replace("http://127.0.0.1:8000/v1", url))


@pytest.mark.slow
@runs(
    "glm4v-patched answer ",
    "glm4v-patched evaluate ",
    "glm4v-patched chat trained",
    ".venv/bin/glm4v-patched answer ",
    ".venv/bin/glm4v-patched evaluate ",
    ".venv/bin/glm4v-patched chat trained",
    "def starts_right",
)
def test_what_was_trained_answers_and_is_evaluated(given, reader, trained):
    code, *given = sorted(once(given), key=lambda text: text.startswith("glm4v-patched"))
    (reader.folder / "scores.py").write_text(code)
    questions = (reader.folder / "train.jsonl").read_text().splitlines(keepends=True)[:3]
    (reader.folder / "questions.jsonl").write_text("".join(questions))
    (reader.folder / "held_out.jsonl").write_text("".join(questions))
    for command in given:
        piped = "printf 'What is it?\\n/image cat.png\\nAnd this?\\n' | " * (" chat " in command)
        told = reader.shell(f"{piped}{command} --device cpu --max-new-tokens 3")
        if "scores.py" in command:
            assert "starts_right" in told
    lines = (reader.folder / "answers.jsonl").read_text().splitlines()
    [example] = [block for block in blocks(ROOT / "docs" / "answering.md", "json")]
    assert [json.loads(line).keys() for line in lines] == [json.loads(example).keys()] * 3
    assert (reader.folder / "evaluation" / "metrics.json").is_file()


@runs('import json\nfrom pathlib import Path\n\npath = Path("merged/config.json")')
def test_another_name_is_written_to_config_json(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "merged").mkdir()
    config = tmp_path / "merged" / "config.json"
    config.write_text(json.dumps({"architectures": ["GLM4VForCausalLM"], "num_layers": 40}))
    for code in given:
        exec(code, {})
    assert json.loads(config.read_text()) == {"architectures": ["ChatGLMModel"], "num_layers": 40}
