"""vLLM: the command that starts it, and the plug-in; test_vllm_model.py has what needs it."""

import importlib.util
import json
import os
import pkgutil
import sys
import tomllib
from argparse import Namespace
from collections.abc import Callable
from importlib.metadata import EntryPoint
from inspect import Parameter, Signature
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import save_file

from glm4v_patched.cli import main
from glm4v_patched.inference import questions, vllm_plugin
from glm4v_patched.inference.questions import Generation
from glm4v_patched.inference.serving import serve, vllm
from glm4v_patched.inference.serving.guard import Guard
from glm4v_patched.inference.serving.limits import LIMITS_VARIABLE
from glm4v_patched.inference.vllm_plugin import SharedPositions, register, shared_positions
from glm4v_patched.models import limits
from glm4v_patched.models.base import ModelSource
from glm4v_patched.remote.image_checks import PromptFormat
from glm4v_patched.remote.image_layout import InputBatch, expand_image_placeholders
from glm4v_patched.terminal_text import own_command, pip_install
from tests.helpers.tiny import BOI, EOI, FILL, tiny_model


@pytest.fixture
def executed(monkeypatch, tmp_path) -> list:
    """The commands that start vLLM, on a machine that seems to have it and a GPU."""
    program = tmp_path / "vllm"
    program.touch()
    commands: list = []
    plugin = EntryPoint("glm4v", "glm4v_patched.inference.vllm_plugin:register", vllm.PLUGIN_GROUP)
    installed = {vllm.PLUGIN_GROUP: [plugin]}
    monkeypatch.setattr(vllm, "entry_points", lambda group: installed.get(group, []))
    monkeypatch.setattr(serve, "find_vllm", lambda: str(program))
    monkeypatch.setattr(questions, "place_processes", lambda processes, device: None)
    monkeypatch.setattr(serve, "open_listener", lambda host, port: open(os.devnull))  # noqa: SIM115

    def execve(*arguments):
        commands.append(arguments)
        raise SystemExit(0)  # this process would be vLLM's server

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.delenv("GLM4V_PATCHED_API_KEY", raising=False)
    monkeypatch.setattr(limits, "require_valid_adapters", lambda base: None)  # ours are names alone
    return commands


def start(*arguments: object) -> None:
    with pytest.raises(SystemExit):
        main(["serve", *map(str, arguments)])


LANGUAGE = "transformer.encoder.layers.0"


def options(command: list[str], name: str) -> list[str]:
    """Return the values of an option."""
    after = command[command.index(name) + 1 :]
    return [*takewhile(lambda argument: not argument.startswith("--"), after)]


def option(command: list[str], name: str) -> str:
    [value] = options(command, name)
    return value


def test_a_model_is_served_with_our_plugin_and_limits(files, executed, tmp_path):
    arguments = ["--api-key", "secret", "--max-body-mb", "3", "--max-new-tokens", "7"]
    start(str(files.model), *arguments)
    [(program, command, environment)] = executed
    assert command[:3] == [str(tmp_path / "vllm"), "serve", str(files.model)]
    assert program == command[0]
    # A published cogagent names a class that is a text model in vLLM.
    assert json.loads(option(command, "--hf-overrides")) == {"architectures": ["GLM4VForCausalLM"]}
    assert options(command, "--served-model-name") == [str(files.model), "glm-4v", "glm-4v-9b"]
    defaults = json.loads(option(command, "--override-generation-config"))
    assert defaults == {"max_new_tokens": 7, "temperature": 0}
    assert option(command, "--generation-config") == "vllm"
    assert option(command, "--allowed-media-domains").endswith(".invalid")
    module, _, name = option(command, "--middleware").rpartition(".")
    assert (module, name) == (Guard.__module__, "Guard")
    # Not in the command, which other users of the machine see.
    assert "secret" not in " ".join(command) and environment["VLLM_API_KEY"] == "secret"
    of_hub = ModelSource("our-org/model", "c0ffee")
    command = vllm.vllm_command(program, of_hub, "m", {}, ("localhost", 1), Generation())
    assert option(command, "--revision") == "c0ffee"
    assert "--disable-fastapi-docs" in command
    of_guard = json.loads(environment[LIMITS_VARIABLE])
    assert of_guard["max_body_bytes"] == 3_000_000 and of_guard["max_requests"] == 1024


def write_adapters(folder: Path, model: Path, rank: int, name: str = LANGUAGE, **more) -> None:
    LoraConfig(r=rank, base_model_name_or_path=str(model), **more).save_pretrained(folder)
    weights = {f"base_model.model.{name}.lora_A.weight": torch.ones(1)}
    save_file(weights, folder / "adapter_model.safetensors")


def test_adapters_are_served_beside_their_model_in_the_next_rank_that_vllm_takes(
    files, executed, tmp_path
):
    folder, other = tmp_path / "adapters", tmp_path / "other"
    write_adapters(folder, files.model, 8)
    write_adapters(other, files.model, 9)
    start(str(folder), "--served-model-name", "mine", "--temperature", "2")
    by_name = ["--adapter", f"b={other}", "--adapter", f"glm-4v={folder}"]
    start(str(files.model), *by_name)
    write_adapters(other, files.model, 512)
    start(str(other))
    mine, both, largest = (command for _, command, _ in executed)
    assert mine[2] == str(files.model) and "--enable-lora" in mine
    assert option(mine, "--lora-modules") == f"mine={folder}"
    assert option(mine, "--max-lora-rank") == "8"
    assert json.loads(option(mine, "--override-generation-config"))["temperature"] == 2
    assert options(both, "--lora-modules") == [f"b={other}", f"glm-4v={folder}"]
    assert option(both, "--max-lora-rank") == "16" and option(both, "--max-loras") == "2"
    assert options(both, "--served-model-name") == [str(files.model), "glm-4v-9b"]
    assert option(largest, "--max-lora-rank") == "512"


@pytest.mark.parametrize(
    ("named", "rank", "more"),
    [
        ("rank 513", 513, {}),
        ("alpha_pattern", 4, {"alpha_pattern": {"dense": 2}}),
        ("rank_pattern", 4, {"rank_pattern": {"dense": 2}}),
        ("1 of the adapters' weights", 4, {"name": "transformer.vision.layers.0"}),
    ],
)
def test_adapters_that_vllm_does_not_support_are_refused(
    files, executed, tmp_path, refused, named, rank, more
):
    write_adapters(tmp_path / "adapters", files.model, rank, **more)
    refused(["serve", tmp_path / "adapters"], named, program=own_command())
    assert not executed


def test_options_that_vllm_does_not_support_are_refused(files, executed, refused, monkeypatch):
    for arguments, named in (
        (["--seed", "4294967296"], "--seed 4294967296"),
        (["--engine", "vllm", "--device", "cpu"], "--device cpu"),
        (["--engine", "vllm", "--port", "0"], "--port 0"),
    ):
        refused(["serve", files.model, *arguments], named)
    monkeypatch.setattr(vllm, "entry_points", lambda group: [])  # without the plug-in
    refused(["serve", files.model], "wrong positions")
    assert not executed


def test_the_engine_is_vllm_where_it_can_do_what_is_asked_for(executed, monkeypatch):
    def chosen(engine="auto", device="cuda") -> bool:
        options = Namespace(engine=engine, device=device, weights=None, port=1)
        return serve.choose_vllm(options) is not None

    assert chosen() and not chosen(device="cpu") and not chosen(engine="transformers")
    monkeypatch.setattr(serve, "find_vllm", lambda: None)
    assert not chosen()
    with pytest.raises(RuntimeError, match="vllm is not installed"):
        chosen(engine="vllm")


PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def taking(parameters: str) -> Callable:
    """Return a function with these parameters."""
    function: Any = lambda **kwargs: None  # noqa: E731
    named = [Parameter(name, Parameter.KEYWORD_ONLY) for name in parameters.split()]
    function.__signature__ = Signature(named)
    return function


class FakeVllm(dict[str, Any]):
    """Modules of a compatible vLLM, by name."""

    def __init__(self) -> None:
        super().__init__(vllm=SimpleNamespace(__version__=vllm_plugin.NEWEST_VLLM))
        newest = [*vllm_plugin._PROMPT_HOOKS.items()][-1:]
        hooks = {"vllm.model_executor.models.glm4v": dict(newest)}
        every = [*vllm_plugin._USED_NAMES.items(), *hooks.items()]
        for module, path, wanted in ((m, *item) for m, names in every for item in names.items()):
            holder = self.setdefault(module, SimpleNamespace())
            *owners, name = path.split(".")
            for owner in owners:
                holder = vars(holder).setdefault(owner, SimpleNamespace())
            setattr(holder, name, taking(wanted or ""))
        self.registered: dict[str, str] = {}
        self.hooks: dict[str, object] = {}
        self.config = self["vllm.model_executor.models.config"]
        self.config.MODELS_CONFIG_MAP = self.hooks
        self.vllm = self["vllm"]
        self.vllm.ModelRegistry = SimpleNamespace(register_model=self.registered.__setitem__)


@pytest.fixture
def fake(monkeypatch) -> FakeVllm:
    fake = FakeVllm()
    for name, module in fake.items():
        monkeypatch.setitem(sys.modules, name, module)
    return fake


@pytest.fixture
def logged(caplog):
    vllm_plugin.logger.addHandler(caplog.handler)
    yield caplog
    vllm_plugin.logger.removeHandler(caplog.handler)


def settings(**fields) -> SimpleNamespace:
    """Return vLLM's settings of a model."""
    values = {"model_type": "chatglm", "vision_config": {}}
    config = SimpleNamespace(kv_channels=128, to_dict=lambda: values, **fields)
    return SimpleNamespace(hf_config=config, uses_mrope=True)


@pytest.mark.parametrize("inner", [2, 1600])
@pytest.mark.parametrize("parts", ["7", "i i 7", "7 8 i 9 9 9 i 5 6 7"])
def test_positions_are_those_of_the_model(parts, inner):
    row, images = [], []
    for part in parts.split():
        ids = [BOI, *[FILL] * inner, EOI] if part == "i" else [int(part)]
        images += [(len(row), len(ids))] if part == "i" else []
        row += ids
    form = PromptFormat(BOI, EOI, num_image_tokens=inner, vocab_size=512, max_positions=8192)
    batch = InputBatch(torch.tensor([row]))
    expanded = expand_image_placeholders(batch, form, num_images=len(images))
    assert expanded.input_ids[0].tolist() == row
    assert shared_positions(len(row), images).tolist() == expanded.position_ids[0].tolist()


def test_the_entry_point_and_the_model_that_it_names_are_there():
    [(name, place)] = PROJECT["entry-points"]["vllm.general_plugins"].items()
    assert name == "glm4v_patched" and pkgutil.resolve_name(place) is register
    module, _, name = vllm_plugin.MODEL_CLASS.partition(":")
    assert f"class {name}(" in Path(importlib.util.find_spec(module).origin).read_text()
    # The extra asks for what was tested.
    oldest, newest = vllm_plugin.OLDEST_VLLM.split("."), vllm_plugin.NEWEST_VLLM.split(".")
    above = f"{newest[0]}.{int(newest[1]) + 1}"
    assert PROJECT["optional-dependencies"]["vllm"] == [f"vllm>={'.'.join(oldest[:2])},<{above}"]


def test_an_incompatible_vllm_serves_other_models_and_no_glm4v(fake, logged, words):
    fake.hooks["Qwen3ForCausalLM"] = other = object()
    register()
    register()
    assert fake.hooks == {"Qwen3ForCausalLM": other, "GLM4VForCausalLM": SharedPositions}
    registry = fake.vllm.__dict__.pop("ModelRegistry")
    register()
    assert "would get wrong positions" in logged.text and "ModelRegistry" in logged.text
    fake.vllm.ModelRegistry = registry
    del fake.config.MODELS_CONFIG_MAP
    register()
    assert fake.registered == {"GLM4VForCausalLM": vllm_plugin.MODEL_CLASS}
    with words.refused(RuntimeError, "models.config.MODELS_CONFIG_MAP", pip=pip_install()):
        vllm_plugin.check_vllm()
    fake.config.MODELS_CONFIG_MAP = others = {"GLM4VForCausalLM": dict}  # of somebody else
    register()
    assert others == {"GLM4VForCausalLM": dict}
    with pytest.raises(RuntimeError, match="MODELS_CONFIG_MAP has <class 'dict'>"):
        vllm_plugin.check_vllm()


def test_all_incompatible_names_are_reported_with_version_and_cure(fake, words):
    register()
    vllm_plugin.check_vllm()
    glm4v = fake["vllm.model_executor.models.glm4v"]
    glm4v.GLM4VForCausalLM.compute_logits = taking("grid")
    del glm4v.GLM4VProcessingInfo, fake["vllm.multimodal"].MULTIMODAL_REGISTRY
    del glm4v.GLM4VMultiModalProcessor
    moved = [*vllm_plugin._PROMPT_HOOKS, "GLM4VProcessingInfo", "MULTIMODAL_REGISTRY"]
    moved += ["takes (grid)", vllm_plugin.NEWEST_VLLM]
    with words.refused(RuntimeError, *moved, pip=pip_install()):
        vllm_plugin.check_vllm()


def test_an_older_vllm_is_refused_and_a_newer_one_is_warned_about(fake, logged):
    for version, is_said in (("0.33.0+cpu", False), ("0.33.1", True)):
        fake.vllm.__version__ = version
        register()
        vllm_plugin.check_vllm()
        assert ("tested with vLLM up to 0.33.0" in logged.text) == is_said
    fake.vllm.__version__ = "0.25.1"
    register()
    with pytest.raises(RuntimeError, match="in vLLM 0.25.1: this package was tested with"):
        SharedPositions.verify_and_update_model_config(settings())


def test_vllm_will_ask_the_model_for_positions(fake):
    register()
    for own_parameters in (None, {"a": 1}, {"rope_type": "own"}):
        model = settings(rope_parameters=own_parameters)
        SharedPositions.verify_and_update_model_config(model)
        wanted = {"rope_type": "default"} | (own_parameters or {}) | {"mrope_section": [32, 0, 0]}
        assert model.hf_config.rope_parameters == wanted
    model.uses_mrope = False
    with pytest.raises(RuntimeError, match="uses_mrope stays False"):
        SharedPositions.verify_and_update_model_config(model)


def test_vllm_rotates_as_the_config_says(fake, logged, words):
    register()
    vllm_plugin.logger.setLevel("INFO")
    for fields in ({}, {"original_rope": True}):
        model = settings(**fields)
        SharedPositions.verify_and_update_model_config(model)
        assert model.hf_config.original_rope is True and "rotate_half" not in logged.text
    SharedPositions.verify_and_update_model_config(settings(original_rope=False))
    assert "rotate_half" in logged.text
    for value in ("false", "true", 0, None):
        with pytest.raises(ValueError, match=f"original_rope is {value!r}; expected true"):
            SharedPositions.verify_and_update_model_config(settings(original_rope=value))
    for original_rope in (True, False):
        vllm_plugin.require_rotation(original_rope, [not original_rope] * 2)
        with words.refused(RuntimeError, f"{original_rope=}", pip=pip_install()):
            vllm_plugin.require_rotation(original_rope, [not original_rope, original_rope])


def test_adapters_on_the_tower_are_refused(words):
    for lora in (None, SimpleNamespace(enable_tower_connector_lora=False)):
        SharedPositions.verify_and_update_config(SimpleNamespace(lora_config=lora))
    vllm_config = SimpleNamespace(lora_config=SimpleNamespace(enable_tower_connector_lora=True))
    with words.refused(ValueError, "--enable-tower-connector-lora", program=own_command()):
        SharedPositions.verify_and_update_config(vllm_config)


def test_image_tokens_are_not_generated_as_in_our_model():
    for fill in (None, 7, 0):
        model = tiny_model(image_token_id=fill)
        assert vllm_plugin.never_generated_ids(model.config) == model._image_token_ids()
        published = SimpleNamespace(**vars(model.config))
        del published.image_token_id
        assert vllm_plugin.never_generated_ids(published) == model._image_token_ids()[:2]


def test_expanded_prompts_of_our_processor_are_collapsed_for_vllm():
    config = SimpleNamespace(boi_token_id=BOI, eoi_token_id=EOI, pad_token_id=1, image_token_id=2)
    image, short = [BOI, 2, 2, 2, EOI], [BOI, 1, EOI]
    row = [7, *image, 8, *image, *image, 2, 9]
    assert vllm_plugin.collapse_image_tokens(row, config, 3) == [7, *short, 8, *short, *short, 2, 9]
    for other in ([7, *short, 8], [7, BOI, 2, 2, EOI], [7, *image[:-1]]):  # one that was cut
        assert vllm_plugin.collapse_image_tokens(other, config, 3) == other
    del config.image_token_id  # a published one
    assert vllm_plugin.collapse_image_tokens(row, config, 3) == row
