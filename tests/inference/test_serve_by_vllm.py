"""``glm4v-patched serve`` where vLLM is installed: the command, and the limits that it lacks."""

import json
import os
import socket
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import save_file

from glm4v_patched.cli import main
from glm4v_patched.inference.serving import serve, vllm
from glm4v_patched.inference.serving.guard import Guard
from glm4v_patched.inference.serving.limits import VARIABLE
from glm4v_patched.inference.serving.serve import hold_address
from glm4v_patched.terminal_text import own_command


@pytest.fixture
def executed(monkeypatch, tmp_path) -> list:
    """What vLLM is started with, on a machine that has it and a GPU."""
    program = tmp_path / "vllm"
    program.touch()
    found: list = []
    plugin = EntryPoint("glm4v", "glm4v_patched.inference.vllm_plugin:register", vllm.GROUP)
    monkeypatch.setattr(vllm, "entry_points", lambda group: [plugin] if group == vllm.GROUP else [])
    monkeypatch.setattr(serve, "find_vllm", lambda: str(program))
    monkeypatch.setattr(serve, "place", lambda processes, device: None)
    monkeypatch.setattr(serve, "listen", lambda host, port: open(os.devnull))  # noqa: SIM115
    # The port is vLLM's own, and tests of other processes hold it, too.
    own = f"127.0.0.1, process {os.getpid()}"
    monkeypatch.setattr(serve, "hold_address", lambda host, port: hold_address(own, port))
    monkeypatch.setattr(os, "execve", lambda *given: found.append(given))
    monkeypatch.delenv("GLM4V_PATCHED_API_KEY", raising=False)
    return found


LANGUAGE = "transformer.encoder.layers.0"


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def options(command: list[str], name: str) -> list[str]:
    after = command[command.index(name) + 1 :]
    return after[: next(n for n, each in enumerate([*after, "--"]) if each.startswith("--"))]


def test_a_model_is_served_with_our_plugin_and_limits(files, executed, tmp_path):
    arguments = ["--api-key", "secret", "--max-body-mb", "3", "--max-new-tokens", "7"]
    assert main(["serve", str(files.model), *arguments]) == 0
    [(program, command, environment)] = executed
    assert command[:3] == [str(tmp_path / "vllm"), "serve", str(files.model)]
    assert program == command[0]
    assert options(command, "--served-model-name") == [str(files.model), "glm-4v", "glm-4v-9b"]
    defaults = json.loads(option(command, "--override-generation-config"))
    assert defaults == {"max_new_tokens": 7, "temperature": 0}
    assert option(command, "--generation-config") == "vllm"
    assert option(command, "--allowed-media-domains").endswith(".invalid")
    module, _, name = option(command, "--middleware").rpartition(".")
    assert (module, name) == (Guard.__module__, "Guard")
    # Not in the command, which other users of the machine see.
    assert "secret" not in " ".join(command) and environment["VLLM_API_KEY"] == "secret"
    limits = json.loads(environment[VARIABLE])
    assert limits["max_body_bytes"] == 3_000_000 and limits["most_at_once"] is None


def write_adapters(folder: Path, model: Path, name: str, rank: int, **more) -> None:
    LoraConfig(r=rank, base_model_name_or_path=str(model), **more).save_pretrained(folder)
    weights = {f"base_model.model.{name}.lora_A.weight": torch.ones(1)}
    save_file(weights, folder / "adapter_model.safetensors")


def test_adapters_are_served_beside_their_model(files, executed, tmp_path, refused):
    folder, other = tmp_path / "adapters", tmp_path / "other"
    write_adapters(folder, files.model, LANGUAGE, 4)
    write_adapters(other, files.model, LANGUAGE, 9)
    assert main(["serve", str(folder), "--served-model-name", "mine", "--temperature", "2"]) == 0
    by_name = ["--adapter", f"b={other}", "--adapter", f"glm-4v={folder}"]
    assert main(["serve", str(files.model), *by_name]) == 0
    [(_, mine, _), (_, both, _)] = executed
    assert mine[2] == str(files.model) and "--enable-lora" in mine
    assert option(mine, "--lora-modules") == f"mine={folder}"
    assert option(mine, "--max-lora-rank") == "8"  # vLLM takes no 4
    assert json.loads(option(mine, "--override-generation-config"))["temperature"] == 2
    assert options(both, "--lora-modules") == [f"b={other}", f"glm-4v={folder}"]
    assert option(both, "--max-lora-rank") == "16" and option(both, "--max-loras") == "2"
    assert options(both, "--served-model-name") == [str(files.model), "glm-4v-9b"]
    write_adapters(folder, files.model, "transformer.vision.layers.0", 4)
    refused(["serve", folder], "1 of the adapters' weights", program=own_command())


def test_the_rank_is_the_next_that_vllm_takes_and_others_are_refused(
    files, executed, tmp_path, refused
):
    folder = tmp_path / "adapters"
    for rank, taken in ((8, 8), (9, 16), (512, 512)):
        write_adapters(folder, files.model, LANGUAGE, rank)
        assert main(["serve", str(folder)]) == 0
        assert option(executed.pop()[1], "--max-lora-rank") == str(taken)
    for rank, more, named in (
        (513, {}, "rank 513"),
        (4, {"alpha_pattern": {"dense": 2}}, "alpha_pattern"),
        (4, {"rank_pattern": {"dense": 2}}, "rank_pattern"),
    ):
        write_adapters(folder, files.model, LANGUAGE, rank, **more)
        refused(["serve", folder], named, program=own_command())
    assert not executed


def test_what_vllm_cannot_do_is_refused(files, executed, refused, monkeypatch, words):
    for arguments, named in (
        (["--seed", "4294967296"], "--seed 4294967296"),
        (["--engine", "vllm", "--device", "cpu"], "--device cpu"),
        (["--engine", "vllm", "--port", "0"], "--port 0"),
    ):
        refused(["serve", files.model, *arguments], named)
    monkeypatch.setattr(vllm, "entry_points", lambda group: [])  # without the plug-in
    refused(["serve", files.model], "other positions")
    assert not executed
    with words.refused(ValueError, "--port 48123"):  # which is not called taken
        hold_address("h" * 200, 48123)


def test_the_engine_is_vllm_where_it_can_do_what_is_asked_for(executed, monkeypatch):
    def chosen(**changes) -> str:
        return serve.choose_engine(serve.ServeOptions(model="m", name="m", **changes))[0]

    assert chosen() == "vllm"
    assert chosen(device="cpu") == chosen(engine="transformers") == "transformers"
    monkeypatch.setattr(serve, "find_vllm", lambda: None)
    assert chosen() == "transformers"
    with pytest.raises(RuntimeError, match="vllm is not installed"):
        chosen(engine="vllm")


def test_of_two_that_start_at_once_the_second_is_refused(files, executed, monkeypatch, capsys):
    """vLLM listens only when it has loaded, and lets others bind the address until then."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command, held = ["serve", str(files.model), "--port", str(port)], []

    def become_vllm(*given):
        assert held[0].get_inheritable()  # by what this process becomes
        assert main(command) == 1
        there = f"--port {port}: another glm4v-patched serve is starting or running there"
        assert there in capsys.readouterr().err

    hold = lambda *address: held.append(hold_address(*address)) or held[-1]  # noqa: E731
    monkeypatch.setattr(serve, "hold_address", hold)
    monkeypatch.setattr(os, "execve", become_vllm)
    assert main(command) == 0
    monkeypatch.setattr(os, "execve", lambda *given: None)
    assert main(command) == 0  # that one has ended
