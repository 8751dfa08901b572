"""``glm4v-patched export``: the model in 8 or 4 bits, calibrated with rows that have images."""

import importlib.util
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from glm4v_patched.cli import main
from glm4v_patched.data.rows import read_conversations, write_conversations
from glm4v_patched.demo.images import draw_data_set
from glm4v_patched.demo.tiny_model import IMAGE_SIDE
from glm4v_patched.engine.gpus import Gpus
from glm4v_patched.inference import export as module
from glm4v_patched.inference.answer_worker import Answerer
from glm4v_patched.inference.export import EXPORT_FORMATS, require_llm_compressor
from glm4v_patched.inference.merge import merge
from glm4v_patched.inference.questions import Generation
from glm4v_patched.models.find import find_source
from glm4v_patched.models.loading import load_with_processor
from glm4v_patched.terminal_text import pip_install
from tests.helpers.cogagent import write_cogagent
from tests.helpers.processes import run_without_package
from tests.helpers.tiny import update_json

by_compressor = pytest.mark.skipif(
    importlib.util.find_spec("llmcompressor") is None,
    reason="not installed: llmcompressor; nox -f tests/noxfile.py -s llm_compressor",
)
EXTRA = "glm4v-patched[export]"
LEFT = ["transformer.output_layer.weight", "transformer.embedding.word_embeddings.weight"]
LEFT += ["transformer.vision.linear_proj.linear_proj.weight"]


@pytest.fixture(scope="module")
def learned(tmp_path_factory) -> Path:
    """Rows with images and answers."""
    folder = tmp_path_factory.mktemp("learned")
    rows = draw_data_set(folder / "images", 8, seed=3, side=IMAGE_SIDE)
    write_conversations(folder / "rows.jsonl", rows)
    return folder / "rows.jsonl"


def export(model: Path, out: Path, rows: Path, *options: str, bits: str = "int8") -> int:
    command = ["export", str(model), "--format", bits, "--calibration", str(rows)]
    return main([*command, "--out", str(out), "--device", "cpu", *options])


def test_a_machine_without_gpu_is_told_how_to_use_the_cpu(tmp_path, learned, monkeypatch, capsys):
    monkeypatch.setattr(module, "require_llm_compressor", lambda: None)
    monkeypatch.setattr("glm4v_patched.models.placement.find_gpus", lambda: Gpus((), "a reason"))
    assert export(tmp_path, tmp_path / "out", learned, "--device", "cuda") == 1
    assert "there is no GPU: a reason; to use the CPU: --device cpu" in capsys.readouterr().err


def logits(folder: Path, rows: Path, swapped: bool = False) -> torch.Tensor:
    """Of the last position of each row's question, about its image or the next row's."""
    loaded = load_with_processor(find_source(str(folder)), "cpu")
    answerer = Answerer(loaded, Generation())
    prompts = [messages[:-1] for messages in read_conversations(rows)]
    images = [prompt[0]["image"] for prompt in prompts]
    if swapped:
        images = [*images[1:], images[0]]
    prompts = [[p[0] | {"image": image}] for p, image in zip(prompts, images, strict=True)]
    with torch.no_grad():
        return loaded.model(**answerer.encode(prompts)).logits[:, -1].float()


def apart(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


@by_compressor
@pytest.mark.parametrize("bits", EXPORT_FORMATS)
def test_a_model_in_fewer_bits_still_sees(files, learned, tmp_path, capsys, bits):
    out = tmp_path / "new" / "out"
    evaluation = ["--evaluate", str(learned), "--max-new-tokens", "2"]
    assert export(files.model, out, learned, *evaluation, bits=bits) == 0
    printed = capsys.readouterr().out
    assert "calibrating with 8 rows on cpu, in the saved dtype; weights 3.1 MB" in printed
    assert "right images" in printed
    assert [path.name for path in out.parent.iterdir()] == ["out"]  # nothing beside it
    before, after = logits(files.model, learned), logits(out, learned)
    images = apart(logits(out, learned, swapped=True), after)
    assert 0 < apart(after, before) < min(0.1, images / 2), (apart(after, before), images)
    whole, weights = (load_file(folder / "model.safetensors") for folder in (files.model, out))
    assert all(torch.equal(weights[name], whole[name]) for name in LEFT)
    fc1 = {n.rpartition(".")[2] for n in weights if ".vision.transformer.layers.0.mlp.fc1." in n}
    scales = {"weight_scale"} if EXPORT_FORMATS[bits].quantizes_tower else set()
    assert fc1 == {"weight", "bias"} | scales
    assert '"quant_method": "compressed-tensors"' in (out / "config.json").read_text()
    texts = "".join(path.read_text() for path in out.iterdir() if path.suffix != ".safetensors")
    assert str(tmp_path) not in texts and str(files.model) not in texts
    assert {path.stat().st_mode & 0o777 for path in out.iterdir()} == {0o644}


@by_compressor
def test_adapters_are_merged_first_and_it_loads_without_this_package(files, learned, tmp_path):
    merge(str(files.adapters), tmp_path / "merged")
    assert export(files.adapters, tmp_path / "out", learned) == 0
    wanted, base = logits(tmp_path / "merged", learned), logits(files.model, learned)
    actual = logits(tmp_path / "out", learned)
    assert apart(actual, wanted) < 0.05 < 0.2 < apart(actual, base)
    assert not (tmp_path / "out" / "merged").exists()
    code = """
import sys
from transformers import AutoModelForCausalLM, AutoProcessor

AutoProcessor.from_pretrained(sys.argv[1], trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
assert type(model).__module__.startswith("transformers_modules."), type(model)
"""
    run_without_package(code, tmp_path, str(tmp_path / "out"))


@by_compressor
def test_an_exported_cogagent_computes_what_the_exported_glm_4v_does(files, learned, tmp_path):
    cogagent = write_cogagent(files.model, tmp_path / "cogagent")
    for model in (files.model, cogagent):
        assert export(model, tmp_path / f"{model.name} out", learned) == 0
    exact = logits(files.model, learned)
    quantized_glm4v, quantized_cogagent = (
        apart(logits(tmp_path / f"{model.name} out", learned), exact)
        for model in (files.model, cogagent)
    )
    assert 0 < quantized_cogagent < 1.5 * quantized_glm4v < 0.05


def test_what_cannot_be_exported_is_refused_before_anything_is_written(
    files, learned, tmp_path, monkeypatch, capsys, words
):
    written = lambda *_: pytest.fail("it was written")  # noqa: E731
    monkeypatch.setattr(module, "create_folder_atomically", written)
    versions = {"llmcompressor": "0.15.0", "transformers": "5.17.0"}
    monkeypatch.setattr(module, "version", versions.__getitem__)
    monkeypatch.setattr(module, "requires", lambda name: ["transformers<=5.17.0,>=5.15.0"])
    with words.refused(RuntimeError, "0.15.0 is installed", cure=pip_install(EXTRA)):
        require_llm_compressor()
    versions |= {"llmcompressor": "0.14.0.1", "transformers": "5.24.0"}
    with words.refused(RuntimeError, "5.24.0 is installed", cure=pip_install(EXTRA)):
        require_llm_compressor()
    versions["transformers"] = "5.17.0"
    monkeypatch.setattr("glm4v_patched.models.find.require_packages", lambda *_: None)

    def told(model, rows, out="out") -> str:
        assert export(model, tmp_path / out, rows) == 1
        return capsys.readouterr().err

    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "notes.txt").touch()
    words(told(files.model, learned, out="there"))
    talk = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello!"}]
    write_conversations(tmp_path / "blind.jsonl", [talk] * 3)
    words(told(files.model, tmp_path / "blind.jsonl"))
    shutil.copytree(files.model, tmp_path / "quantized")
    config = tmp_path / "quantized" / "config.json"
    update_json(config, quantization_config={"quant_method": "awq", "bits": 4})
    assert "is quantized already, by awq" in told(tmp_path / "quantized", learned)
    needed: list[float] = []
    monkeypatch.setattr(module, "require_free_disk", lambda size, out: needed.append(size))
    monkeypatch.setattr(module, "free_ram", lambda: 1e6)
    words(told(files.model, learned))
    told(files.adapters, learned)  # which are merged first
    assert needed[1] - needed[0] == (files.model / "model.safetensors").stat().st_size
    assert not (tmp_path / "out").exists()
