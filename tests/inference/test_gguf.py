"""``glm4v-patched export --format gguf``: what it writes and refuses, and llama.cpp's answers.

``nox -f tests/noxfile.py -s gguf`` installs what the tests of the files and of llama.cpp need.
"""

import importlib.util
import json
import shutil
import sys
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from glm4v_patched.cli import main
from glm4v_patched.demo.tiny_model import build_processor, save, tiny_config
from glm4v_patched.inference import gguf_file as module
from glm4v_patched.inference.gguf_file import (
    TOWER,
    channel_order,
    language_tensors,
    require_expressible,
    tower_tensors,
)
from glm4v_patched.remote.image_processing_chatglm import ChatGLMImageProcessor
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM, RotaryEmbedding, apply_rotary
from glm4v_patched.remote.processing_chatglm import ChatGLMProcessor
from glm4v_patched.terminal_text import pip_install
from tests.helpers.processes import ROOT, cpu_environment, run_with_limit
from tests.helpers.tiny import update_json

SCRIPT = ROOT / "docs" / "benchmarks" / "compare_with_llama_cpp.py"
NOT_INSTALLED = "not installed: {}; nox -f tests/noxfile.py -s gguf"
with_gguf = pytest.mark.skipif(
    importlib.util.find_spec("gguf") is None, reason=NOT_INSTALLED.format("gguf")
)
with_llama_cpp = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp_py_sync") is None,
    reason=NOT_INSTALLED.format("llama-cpp-py-sync"),
)
# Texts at which pre-tokenizers differ, beside those of the golden file.
TEXTS = [
    "I'LL we'Re 12345678 ½²٣ x=1;\t\ty",
    "中文，全角　空格。\n\n  下一行 \r\n",
    "e\u0301 नमस्ते 👩‍👩‍👧 \u00a0\u2028 end   ",
    "<|user|>\n[gMASK] <|endoftext|>x",
    "   \n \n   leading",
]


def export(model: Path, out: Path, *options: str) -> int:
    command = ["export", str(model), "--format", "gguf", "--out", str(out)]
    return main([*command, *options])


@pytest.fixture
def config():
    processor = build_processor(["text"])
    return partial(tiny_config, processor.tokenizer)


@pytest.mark.parametrize("original_rope", [True, False])
def test_llama_cpp_rotates_the_pairs_that_we_rotate(config, original_rope):
    """With pairs half a head apart, of which the second half is not rotated."""
    own = config(language={"original_rope": original_rope, "rope_ratio": 3})
    size = own.kv_channels
    query, key = torch.randn(2, 1, 1, 1, size, generator=torch.Generator().manual_seed(0))
    order = channel_order(own)
    assert sorted(order.tolist()) == list(range(size))
    theta = 1 / (30000.0**2) ** (torch.arange(size // 2) * 2 / size)
    theta[size // 4 :] = 0  # by the last position, which is 0

    def rotate(x: torch.Tensor, position: int) -> torch.Tensor:
        first, second = x[..., order].chunk(2, dim=-1)
        cos, sin = (position * theta).cos(), (position * theta).sin()
        return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)

    positions = torch.tensor([[5, 2]])
    cos, sin = RotaryEmbedding(own)(positions, torch.float32)
    ours = [
        apply_rotary(x, cos[:, i : i + 1], sin[:, i : i + 1], own.rotary_distance)
        for i, x in enumerate((query, key))
    ]
    wanted = (ours[0] * ours[1]).sum()
    torch.testing.assert_close((rotate(query, 5) * rotate(key, 2)).sum(), wanted)
    assert abs((query * key).sum() - wanted) > 0.1


def test_each_weight_is_in_one_file(config):
    own = config()
    with torch.device("meta"):
        names = GLM4VForCausalLM(own).state_dict().keys()
    language, tower = language_tensors(own), tower_tensors(own)
    used = {source for source, _ in (language | tower).values()}
    assert used == names - {"transformer.rotary_pos_emb.inv_freq"}
    assert all(source.startswith(TOWER) for source, _ in tower.values())


@pytest.mark.parametrize(
    ("language", "tower", "message"),
    [
        ({"add_bias_linear": True}, {}, "add_bias_linear is True, .* expected False"),
        ({"kv_channels": 16}, {}, r"num_attention_heads \* kv_channels is 64, .* expected 128"),
        ({"eos_token_id": [1, 2, 3, 4]}, {}, "eos_token_id is 4, .* expected 3"),
        ({"eos_token_id": None}, {}, "eos_token_id is 0, .* expected 1"),
        ({"rope_ratio": 1e16}, {}, r"rope_ratio is 1e\+16, .* expected 1000000000000000.0"),
        ({"rope_ratio": -1}, {}, "rope_ratio is -1, .* expected 1e-15"),
        ({}, {"hidden_act": "relu"}, "hidden_act is 'relu', .* expected 'gelu'"),
        ({}, {"in_channels": 4}, "in_channels is 4, .* expected 3"),
    ],
)
def test_settings_that_llama_cpp_does_not_compute_are_refused(config, language, tower, message):
    require_expressible(config())
    require_expressible(config(language={"eos_token_id": 7, "add_qkv_bias": False}))
    with pytest.raises(ValueError, match=message):
        require_expressible(config(language=language, tower=tower))


def test_a_missing_package_and_other_formats_options_are_refused(
    files, tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr(module, "find_exportable", lambda *_: pytest.fail("the model was read"))

    def refused(*options: str) -> str:
        assert export(files.model, tmp_path / "out", *options) == 1
        return capsys.readouterr().err

    assert pip_install("glm4v-patched[gguf]") in refused()
    for option in ("--calibration", "--evaluate"):
        assert f"{option} is not used with --format gguf" in refused(option, "rows.jsonl")
    assert "--rows is not used with --format gguf" in refused("--rows", "256")
    assert "--format int8 needs --calibration FILE" in refused("--format", "int8")
    rows = ("--calibration", "rows.jsonl", "--gguf-type", "f16")
    assert "takes no --gguf-type" in refused("--format", "int8", *rows)


def test_special_ids_of_0_are_written(config, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", Mock())
    writer, tokenizer = Mock(), build_processor(["text"]).tokenizer
    module._add_tokenizer(
        writer, config(language={"pad_token_id": 0, "eos_token_id": 0}), tokenizer
    )
    written = {call.args for call in writer.add_uint32.call_args_list}
    assert written == {(f"tokenizer.ggml.{key}_token_id", 0) for key in ("padding", "eos")}


@with_gguf
@pytest.mark.parametrize("kind", module.GGUF_TYPES)
def test_files_hold_all_weights(files, tmp_path, kind):
    import gguf

    assert export(files.model, tmp_path / "new" / "out", "--gguf-type", kind) == 0
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out"]
    tower_kind = "f32" if kind == "f32" else "f16"
    names = {path.name for path in (tmp_path / "new" / "out").iterdir()}
    total = 0.0
    wanted_kinds = {f"language-{kind}.gguf": kind, f"mmproj-{tower_kind}.gguf": tower_kind}
    assert names == {*wanted_kinds}
    for name, wanted in wanted_kinds.items():
        for tensor in gguf.GGUFReader(tmp_path / "new" / "out" / name).tensors:
            is_matrix = len(tensor.shape) > 1 and "position" not in tensor.name
            assert tensor.tensor_type.name.lower() == (wanted if is_matrix else "f32"), tensor.name
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
            total += float((values.astype("float64") ** 2).sum())
    weights = load_file(files.model / "model.safetensors")
    squares = [w.double().square().sum().item() for n, w in weights.items() if "inv_freq" not in n]
    assert total == pytest.approx(sum(squares), rel=1e-9 if kind == "f32" else 1e-3)


@with_gguf
def test_the_tower_has_the_class_token_last_and_is_divided(tmp_path):
    import gguf

    processor = build_processor(["text"])
    torch.manual_seed(0)
    model = GLM4VForCausalLM(tiny_config(processor.tokenizer, tower={"scaling_factor": 8}))
    tower = model.transformer.vision
    for vector in (tower.boi, tower.eoi):
        torch.nn.init.normal_(vector)
    save(model, processor, tmp_path / "model")
    assert export(tmp_path / "model", tmp_path / "out", "--gguf-type", "f32") == 0
    reader = gguf.GGUFReader(tmp_path / "out" / "mmproj-f32.gguf")
    tensors = {t.name: torch.tensor(t.data) for t in reader.tensors}
    positions = tower.patch_embedding.position_embedding.weight
    assert torch.equal(tensors["v.position_embd.weight"][-1], positions[0])
    assert torch.equal(tensors["v.position_embd.weight"][:-1], positions[1:])
    assert torch.equal(tensors["mm.down.weight"] * 8, tower.linear_proj.dense_4h_to_h.weight)
    assert torch.equal(tensors["v.boi"] * 8, tower.boi.flatten())
    assert torch.equal(tensors["v.eoi"] * 8, tower.eoi.flatten())


@with_gguf
def test_what_cannot_be_exported_leaves_nothing_behind(files, tmp_path, monkeypatch, capsys):
    def refused(model: Path, *options: str) -> str:
        assert export(model, tmp_path / "out", *options) == 1
        assert not [path for path in tmp_path.iterdir() if "out" in path.name]
        return capsys.readouterr().err

    def copy(name: str) -> Path:
        return Path(shutil.copytree(files.model, tmp_path / name))

    def change(folder: Path, file: str, **values) -> Path:
        update_json(folder / file, **values)
        return folder

    assert f"glm4v-patched merge {files.adapters} --out merged" in refused(files.adapters)
    large = copy("large")
    weights = load_file(large / "model.safetensors")
    name = "transformer.encoder.layers.1.mlp.dense_4h_to_h.weight"
    for value, kind in ((7e4, "f16"), (float("nan"), "f32"), (float("inf"), "q8_0")):
        weights[name][3, 5] = value
        save_file(weights, large / "model.safetensors", metadata={"format": "pt"})
        assert f"{name} has values up to {value:.3g}; to store it as" in refused(
            large, "--gguf-type", kind
        )
    method = {"quant_method": "awq", "bits": 4}
    quantized = change(copy("quantized"), "config.json", quantization_config=method)
    monkeypatch.setattr("glm4v_patched.models.find.require_packages", lambda *_: None)
    assert "is quantized already, by awq" in refused(quantized)
    for name, values in (("pad_token_id", -1), ("eos_token_id", [331, 999])):
        wrong = change(copy(f"wrong_{name}"), "config.json", **{name: values})
        assert "has the ids" in refused(wrong)
    lower = change(copy("lower"), "tokenizer.json", normalizer={"type": "Lowercase"})
    assert "tokenizer.json: normalizer {'type': 'Lowercase'}" in refused(lower)
    monkeypatch.setattr(module, "METADATA_BYTES", 10**18)
    assert "its disk has" in refused(files.model)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").touch()
    assert export(files.model, tmp_path / "out") == 1
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["notes.txt"]


@with_llama_cpp
def test_llama_cpp_has_our_token_ids(real_tokenizer, expected, tmp_path):
    side = real_tokenizer.image_size
    processor = ChatGLMProcessor(ChatGLMImageProcessor(size=side), real_tokenizer)
    language = {"hidden_size": 32, "kv_channels": 8, "ffn_hidden_size": 32, "num_layers": 1}
    config = tiny_config(real_tokenizer, side, language)
    save(GLM4VForCausalLM(config), processor, tmp_path / "model")
    assert export(tmp_path / "model", tmp_path / "out") == 0
    spec = importlib.util.spec_from_file_location("compare_with_llama_cpp", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    llama = script.LlamaCpp(tmp_path / "out" / "language-f16.gguf")
    texts = [entry["text"] for entry in expected["encode"]]
    for text in (*texts, *TEXTS):
        ids = real_tokenizer(text, add_special_tokens=False)["input_ids"]
        assert llama.token_ids(text) == ids, text
    chats = [real_tokenizer.decode(entry["ids"]) for entry in expected["chat"] if "ids" in entry]
    for chat in chats:
        assert llama.token_ids(chat) == real_tokenizer(chat, add_special_tokens=False)["input_ids"]
    lib = llama.lib
    ends = {id for id in range(len(real_tokenizer)) if lib.llama_vocab_is_eog(llama.llm._vocab, id)}
    assert ends == {*config.eos_token_id}


@with_llama_cpp
def test_llama_cpp_has_our_logits_and_tokens(tmp_path):
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path / "rows.json")]
    ended = run_with_limit(command, 300, cpu_environment())
    assert ended.status == 0, ended.output[-4000:]
    rows = json.loads((tmp_path / "rows.json").read_text())
    # Logits up to 6; in f32 measured 8.6e-5.
    limits = {"f32": 5e-4, "bf16": 0.1, "f16": 0.02, "q8_0": 0.3, "q4_k_m": 2}
    assert len(rows) >= 2 * 4 * len(module.GGUF_TYPES)
    for row in rows:
        assert row["logit_difference"] < limits[row["type"]] and row["ids_equal"], row
        assert row["type"] in ("q8_0", "q4_k_m") or row["same_tokens"] == 16, row
        assert row.get("counted_logit_difference", 1) > 0.5, row
