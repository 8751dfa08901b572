"""A reader's way through README and docs: commands and Python are run as the pages have them.

A test that is marked with :func:`runs` gets all commands that begin so, whichever page they are on,
and runs them in a fresh copy of the repository, with a tiny model on the CPU; where nothing depends
on the process, in this one. To be small, options are added to them or names replaced; nothing of a
command is repeated here. What cannot be run here is in ``ELSEWHERE``, with what does run it.
"""

import contextlib
import io
import json
import re
import shlex
import shutil
import signal
import socket
import sys
from pathlib import Path

import pytest
from PIL import Image

from glm4v_patched.cli import _build_parser, main
from glm4v_patched.demo.tiny_model import IMAGE_SIDE, build_from_scratch
from glm4v_patched.finetune.recipe.sections import Recipe
from hub_upload.__main__ import _make_parser as upload_parser
from tests.helpers.legacy_repository import write_legacy_repository
from tests.helpers.pages import PAGES, README, ROOT, blocks, commands
from tests.helpers.processes import cpu_environment, on_the_cpu, run_with_limit, serving
from tests.helpers.tiny import tiny_model

# Commands that begin with a key are run elsewhere: the value says where.
ELSEWHERE = {
    "python3 -m venv .venv": "nox: first_command and test_command",
    "pip install ": "nox, or tests that are skipped without the package",
    "apt-get install ": ".ci/run, or by hand",
    "nox -f tests/noxfile.py -": "by hand: test_tests_and_sessions_that_pages_name_are_there",
    "pytest": "nox: test_command; test_tests_and_sessions_that_pages_name_are_there",
    ". .venv/bin/activate": "Reader: commands run as if it were activated",
    "ruff ": "nox: lint",
    "python tests/check_names.py": "nox: lint",
    "mypy": "nox: types",
    "pre-commit install": "tests/test_project.py: its hooks are those of .ci/run",
    "from datasets import Dataset, Image, List": "tests/data/test_page.py",
    "import json\n\nanswers = ": "tests/data/test_forms.py",
    "import json\n\ncoco = ": "tests/data/test_forms.py",
    "import json\nfrom collections import defaultdict\n\ncoco = ": "tests/test_grounding_page.py",
    "def make_prompt(": "tests/test_grounding_page.py",
    'time python -c "import transformers"': "by hand",
    "glm4v-patched demo --device cpu": "nox: first_command, with fewer steps",
    "glm4v-patched train RECIPE": "the form of those that are run",
    "glm4v-patched train lora_1x80gb": "tests/finetune/test_shipped_recipes.py",
    "glm4v-patched export merged": "nox: gguf, tests/inference/test_gguf.py",
    "llama.cpp/build/bin/": "by hand: a llama.cpp with the patch of docs/upstream",
    "python docs/upstream/build_llama_cpp.py": "by hand: it compiles for minutes",
    "glm4v-patched train cogagent_1x80gb": "tests/finetune/test_shipped_recipes.py",
    "glm4v-patched export trained": "nox: llm_compressor, tests/inference/test_export.py",
    "glm4v-patched chat demo_output": "tests/inference/test_chat.py, the page and its client",
    "glm4v-patched chat zai-org": "tests/inference/test_chat.py, the page and its client",
    "glm4v-patched adopt FOLDER": "tests/models/test_adopt.py",
    "glm4v-patched compare": "tests/compare/test_compare.py",
    "glm4v-patched bench": "tests/bench, tests/distributed/test_bench_command.py",
    "python -m glm4v_patched.bench.samples FOLDER": "tests/bench/test_answers.py",
    "python -m hub_upload ": "tests/hub_upload/test_end_to_end.py, test_adapter.py",
    "hf collections ": "tests/hub_upload/test_card.py: its text fits; by hand, for want of a Hub",
    "hf repo create ": "tests/hub_upload/test_publish.py, by HfApi.create_repo",
    "hf upload ": "tests/hub_upload/test_adapter.py, by HfApi.upload_folder",
    "python tests/helpers/local_hub.py": "by hand; its Hub is that of the tests of hub_upload",
    "PYTHONPATH=. python docs/benchmarks/": "tests/test_experiments.py, at tiny size",
    "python docs/benchmarks/": "tests/test_experiments.py, at tiny size",
    "VLLM_PLUGINS= python docs/benchmarks/": "tests/inference/test_vllm_model.py",
    "vllm serve": "by hand: its server on a CPU, with vLLM 0.32.0",
    "torchrun --nnodes 2": "tests/distributed/test_more_machines.py",
    "deepspeed --hostfile hosts": "needs ssh; its launcher was tried by hand, as the page says",
    # Frameworks, in environments of their own: nox's sessions, which are named as they are.
    "python -m glm4v_patched.run ": "nox: frameworks, jobs, llamafactory, axolotl, ms_swift",
    "FORCE_TORCHRUN=1 NPROC_PER_NODE=2 python -m glm4v_patched.run": "nox: llamafactory",
    "NPROC_PER_NODE=2 python -m glm4v_patched.run swift": "nox: ms_swift",
    "python sft_script.py": "nox: frameworks, which sees how it fails without the package",
    "torchrun --nproc_per_node 2 train.py": "nox: jobs",
}
RUN: list[str] = []
# Each once, although one page has it with ``.venv/bin/`` and another without.
TEXTS = list(dict.fromkeys(c.removeprefix(".venv/bin/") for page in PAGES for c in commands(page)))


def runs(*beginnings: str) -> pytest.MarkDecorator:
    """Give a test all commands that begin so, as ``texts``."""
    RUN.extend(beginnings)
    return pytest.mark.parametrize(
        "texts", [[t for t in TEXTS if t.startswith(beginnings)]], ids=["pages"]
    )


def test_every_command_is_run_or_says_what_runs_it():
    known = (*RUN, *ELSEWHERE)
    assert [text for text in TEXTS if not text.startswith(known)] == []
    assert [start for start in known if not any(text.startswith(start) for text in TEXTS)] == []


@runs("import torch\nfrom tests.helpers.tiny import")
def test_a_test_of_ones_own_is_green(texts):
    for code in texts:
        names: dict = {}
        exec(code, names)
        [test] = [value for name, value in names.items() if name.startswith("test_")]
        test(tiny_model())


@runs("from peft import LoraConfig")
def test_what_adapts_the_language_model_alone(texts):
    for code in texts:
        names: dict = {"model": tiny_model()}
        exec(code, names)
        by_pattern = names["get_peft_model"](tiny_model(), names["by_pattern"])
        for model in (names["model"], by_pattern):
            adapted = model.base_model.targeted_module_names
            linear = {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"}
            assert {name.split(".")[-1] for name in adapted} == linear
            assert len(adapted) == 8 and all("transformer.encoder." in name for name in adapted)


def of_program(name: str) -> list[str]:
    return [text.removeprefix(f"{name} ") for text in TEXTS if text.startswith(f"{name} ")]


@pytest.mark.parametrize(
    ("program", "parser"),
    [("glm4v-patched", _build_parser), ("python -m hub_upload", upload_parser)],
)
def test_options_are_there(program, parser):
    for arguments in of_program(program):
        if "--help" not in arguments:
            parser().parse_args(shlex.split(arguments.partition(" > ")[0]))


def test_tests_and_sessions_that_pages_name_are_there():
    for arguments in of_program("pytest"):
        paths = [ROOT / path.partition("::")[0] for path in re.findall(r"\btests/\S+", arguments)]
        assert all(path.exists() for path in paths), arguments
        for wanted in re.findall(r"-k (\w+)", arguments):
            files = [file for path in paths for file in [path, *path.rglob("*.py")]]
            assert any(wanted in file.read_text() for file in files if file.is_file()), wanted
    for arguments in of_program("nox"):
        _, file, option, name, *_ = shlex.split(arguments)
        definition = f'tags=["{name}"]' if option == "-t" else f"\ndef {name}(session: nox.Session"
        assert definition in (ROOT / file).read_text(), arguments


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

    def shell(self, command: str, **environment: str) -> str:
        """Return the output of a command; the test fails if it fails or takes longer."""
        bash = ["bash", "-euo", "pipefail", "-c", command]
        ended = run_with_limit(bash, 300, self.environment | environment, self.folder)
        assert ended.status == 0, f"{command}\n{ended.status}\n{ended.output[-6000:]}"
        return ended.output

    def here(self, command: str, typed: str = "") -> str:
        """Return the output of our command, run in this process, which tests may prepare."""
        arguments, out = shlex.split(command.partition(" > ")[0])[1:], io.StringIO()
        with contextlib.chdir(self.folder), on_the_cpu(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdin", io.StringIO(typed))
            with contextlib.redirect_stdout(out):
                assert main(arguments) == 0, f"{command}\n{out.getvalue()}"
        return out.getvalue()

    def python(self, *programs: str, without_package: bool = False) -> str:
        """Return the output of programs that run one after the other, each in its own namespace."""
        head = "import sys\nsys.modules['glm4v_patched'] = None\n" if without_package else ""
        (self.folder / "block.py").write_text(
            f"{head}for program in {programs!r}:\n    exec(program, {{'__name__': '__main__'}})\n"
        )
        return self.shell("python block.py")


@pytest.fixture(scope="module")
def reader(tmp_path_factory) -> Reader:
    """With README's line of data, its image, its recipe, and a tiny model in the real one's
    place."""
    folder = tmp_path_factory.mktemp("reader") / "clone"
    reader = Reader(folder)
    [line] = [block for block in blocks(README, "json") if "messages" in block]
    (folder / "train.jsonl").write_text(line * 16)
    for name in ("questions", "held_out"):
        (folder / f"{name}.jsonl").write_text(line * 3)
    messages = json.loads(line)["messages"]
    for message in messages:
        if "image" in message:
            Image.new("RGB", (IMAGE_SIDE, IMAGE_SIDE), "orange").save(folder / message["image"])
    build_from_scratch(folder / "tiny", [messages], seed=0)
    [recipe] = [block for block in blocks(README, "yaml") if "trainer:" in block]
    assert "zai-org/glm-4v-9b" in recipe
    (folder / "recipe.yaml").write_text(recipe.replace("zai-org/glm-4v-9b", "tiny"))
    write_legacy_repository(folder / "repository")
    return reader


@pytest.fixture(scope="module")
def trained(reader) -> Path:
    """README's training, stopped by Ctrl-C after its first checkpoint, and continued."""
    (command,) = (c for c in commands(README) if "glm4v-patched train" in c)
    few = "--device cpu --processes 2 trainer.max_steps=40 trainer.save_steps=20"
    few += " trainer.learning_rate=1e-2"  # so that adapters change more than rounding does
    log, out = reader.folder / "train.log", reader.folder / "trained"
    started = ["bash", "-c", f"exec {command} {few}"], r"(step 2[1-9]/40)", log
    with serving(*started, reader.environment, reader.folder) as (_, running):
        running.send_signal(signal.SIGINT)
        assert running.wait(60) == 128 + signal.SIGINT, log.read_text()[-6000:]
    assert "--resume" in log.read_text().rstrip().splitlines()[-1]
    (resume,) = (text for text in TEXTS if text.startswith("glm4v-patched train trained/"))
    assert "checkpoint-20" in reader.shell(f"{resume} --device cpu")
    return out


@pytest.mark.slow
@runs("glm4v-patched train recipe.yaml", "glm4v-patched train trained/recipe.json")
def test_training_is_stopped_and_goes_on(texts, reader, trained):
    history = json.loads((trained / "training.json").read_text())["history"]
    assert history[-1]["step"] == 40 and (trained / "adapter_model.safetensors").is_file()
    reader.here(f"{texts[1]} out=other --dry-run --device cpu --processes 1")


@runs("glm4v-patched train --help")
def test_fields_are_in_the_help(texts, capsys):
    with pytest.raises(SystemExit):
        main(shlex.split(texts[0])[1:])
    assert "trainer.learning_rate" in capsys.readouterr().out


@pytest.mark.slow
@runs("glm4v-patched doctor")
def test_doctor_finds_nothing_that_will_fail(texts, reader):
    for command in texts:
        fresh = "out=untouched " * ("recipe.yaml" in command)  # another test has trained there
        by_option = {"--rows": "<|assistant|>[[", "--json": '"fails": false'}
        expected = next((by_option[name] for name in by_option if name in command), " 0 will fail")
        assert expected in reader.here(f"{command} {fresh}--device cpu")


@runs("glm4v-patched recipe")
def test_a_recipe_is_printed_to_be_edited(texts, reader):
    (command,) = texts
    path = reader.folder / command.rpartition("> ")[2]
    path.write_text(reader.here(command))
    assert Recipe.read(path).trained == "lora_lm"


@pytest.fixture(scope="module")
def demo_output(reader) -> Path:
    (command,) = (c for c in commands(README) if c.endswith("glm4v-patched demo"))
    # On two processes: nox's first_command.
    reader.here(f"{command} --steps 2 --device cpu --processes 1")
    return reader.folder / "demo_output"


@pytest.mark.slow
@runs(
    "glm4v-patched demo",
    "from transformers import AutoModelForCausalLM",
    "import json\n\nimport torch\n",
)
def test_what_the_demo_saved_answers_and_classifies(texts, reader, demo_output):
    programs = [text for text in texts if "from_pretrained" in text]
    assert len(programs) == 4
    few = [program.replace("max_steps=400", "max_steps=2") for program in programs]
    reader.python(*few, without_package=True)


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
    "import glm4v_patched\n",
)
def test_scripts_are_patched(texts, reader):
    (reader.folder / "train.py").write_text(SCRIPT)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        launcher = f"deepspeed --num_gpus 2 --master_port {free.getsockname()[1]} "
    # Pages have some with and without arguments of the script.
    for command in (c for c in texts if not any(other.startswith(f"{c} ") for other in texts)):
        if command.startswith("import"):
            reader.python(f"{command}\n{SCRIPT}")
        else:
            # The variable PYTHONPATH that it sets has no place for the tests' own.
            command = command.replace("deepspeed ", launcher).replace(
                "PYTHONPATH=$", "PYTHONPATH=.:$"
            )
            reader.shell(command if "train.py" in command else f"{command}; python train.py")
        ranks = 2 if "torchrun" in command or "deepspeed" in command else 1
        for rank in range(ranks):
            written = reader.folder / f"rank{rank}"
            module, *arguments = written.read_text().split()
            assert module.startswith("glm4v_patched.remote"), command
            if "deepspeed" in command:
                assert arguments.pop(0) == f"--local_rank={rank}"
            assert arguments == command.partition("train.py")[2].split(), command
            written.unlink()


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
@runs("from peft import PeftConfig, PeftModel", "glm4v-patched merge ")
def test_adapters_load_and_are_merged(texts, reader, trained):
    load, merge = sorted(texts, key=lambda code: " merge " in code)
    reader.here(merge)
    adapters = load.replace("my_adapter", "trained")
    reader.python(adapters + MERGED_IS_THE_SAME, without_package=True)


@pytest.mark.slow
@runs("glm4v-patched serve ", "import base64")
def test_a_model_is_served(texts, reader):
    [code] = [text for text in texts if text.startswith("import")]
    [command] = [text for text in texts if text.endswith(" trained")]
    command = command.replace("trained", "tiny --served-model-name trained")
    shell = ["bash", "-c", f"exec {command} --port 0 --device cpu --max-new-tokens 3"]
    started = shell, r"is served at (\S+)", reader.folder / "serve.log"
    with serving(*started, reader.environment, reader.folder) as (url, _):
        assert "http://127.0.0.1:8000/v1" in code
        with contextlib.chdir(reader.folder):
            exec(code.replace("http://127.0.0.1:8000/v1", url), {})


@pytest.mark.slow
@runs(
    "glm4v-patched answer ",
    "glm4v-patched evaluate ",
    "glm4v-patched chat trained",
    "def starts_right",
)
def test_what_was_trained_answers_and_is_evaluated(texts, reader, trained):
    code, *texts = sorted(texts, key=lambda text: text.startswith("glm4v-patched"))
    # fp8 takes a GPU: tests/models, -m gpu.
    commands = dict.fromkeys(command.replace(" --weights fp8", "") for command in texts)
    (reader.folder / "scores.py").write_text(code)
    # As docs/fp8.md has what it trains.
    (reader.folder / "shapes").mkdir()
    (reader.folder / "reading" / "data").mkdir(parents=True)
    for name, paths in (
        ("shapes/trained", "trained"),
        ("shapes/held_out.jsonl", "held_out.jsonl"),
        ("shapes/cat.png", "cat.png"),
        ("reading/latin", "trained"),
        ("reading/data/held_out_latin.jsonl", "held_out.jsonl"),
        ("reading/data/cat.png", "cat.png"),
    ):
        (reader.folder / name).symlink_to(reader.folder / paths)
    if not (reader.folder / "merged").exists():  # the test before this one makes it
        reader.here("glm4v-patched merge trained --out merged")
    for command in commands:
        typed = "What is it?\n/image cat.png\nAnd this?\n" if " chat " in command else ""
        output = reader.here(f"{command} --device cpu --max-new-tokens 3", typed=typed)
        if "scores.py" in command:
            assert "starts_right" in output
    lines = (reader.folder / "answers.jsonl").read_text().splitlines()
    [example] = [block for block in blocks(ROOT / "docs" / "answering.md", "json")]
    assert [json.loads(line).keys() for line in lines] == [json.loads(example).keys()] * 3
    assert (reader.folder / "evaluation" / "metrics.json").is_file()


@runs('import json\nfrom pathlib import Path\n\npath = Path("merged/config.json")')
def test_another_name_is_written_to_config_json(texts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "merged").mkdir()
    config = tmp_path / "merged" / "config.json"
    config.write_text(json.dumps({"architectures": ["GLM4VForCausalLM"], "num_layers": 40}))
    for code in texts:
        exec(code, {})
    assert json.loads(config.read_text()) == {"architectures": ["ChatGLMModel"], "num_layers": 40}
