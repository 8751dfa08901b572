"""``adopt``: folders of others get our code, load without the package, and stay as they are."""

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from glm4v_patched.cli import main
from glm4v_patched.models.adopt import adopt, read_our_code
from glm4v_patched.models.weight_files import SINGLE_FILE, WEIGHTS_INDEX
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from glm4v_patched.remote.processing_chatglm import ChatGLMProcessor
from tests.helpers.full_disk import files_of_at_most
from tests.helpers.processes import run_without_package
from tests.helpers.publishable import as_files, edit, shards_of, write_original
from tests.helpers.tiny import expanded_image, random_pixels, text

ENCODER = "transformer.encoder.layers.0."


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """A stand-in of the published repository; tests must not change it."""
    return write_original(tmp_path_factory.mktemp("published") / "glm-4v-9b")


@pytest.fixture
def folder(published, tmp_path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(published, tmp_path / "model"))


def set_config(folder: Path, **values) -> None:
    edit(folder / "config.json", lambda config: config.update(values))


def state_of(folder: Path) -> dict[str, tuple]:
    """Return content, mode and time of change of each file."""
    paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*")}
    return {
        name: (path.read_bytes() if path.is_file() else None, path.stat().st_mode)
        + (path.stat().st_mtime_ns,)
        for name, path in paths.items()
    }


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {n: w for path in folder.glob("*.safetensors") for n, w in load_file(path).items()}


def save_tensors(folder: Path, tensors: dict[str, torch.Tensor], name: str = SINGLE_FILE) -> None:
    """Replace all weights by one file."""
    for path in [*folder.glob("*.safetensors"), folder / WEIGHTS_INDEX]:
        path.unlink(missing_ok=True)
    save_file(tensors, folder / name, metadata={"format": "pt"})


# Folders that are adopted: functions that change a copy of the published one.


def as_cogagent(folder: Path) -> None:
    set_config(folder, original_rope=False, architectures=["ChatGLMForConditionalGeneration"])


def as_saved_by_transformers(folder: Path) -> None:
    """As merges of ms-swift and LLaMA-Factory: no ranks, other names, files of the trainer."""
    model, processor = (c.from_pretrained(folder) for c in (GLM4VForCausalLM, ChatGLMProcessor))
    for path in folder.iterdir():
        path.unlink()
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    set_config(folder, custom_pipelines={"x": {"impl": "evil.Evil"}}, use_kernels=True)
    set_config(folder, auto_map={"AutoModel": "evil/evil--evil.Evil"}, vocab_size=512)
    set_config(folder, _attn_implementation="evil/kernel", transformers_version="5.6.0")
    generation = {"eos_token_id": [500], "custom_generate": "evil/evil", "use_model_defaults": True}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    # LLaMA-Factory writes the template that its data were rendered with.
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    (folder / "args.json").write_text("{}")


def as_of_an_earlier_version(folder: Path) -> None:
    """Adopted before: other code of ours, a file that is gone, a key that is unknown by now."""
    first = folder.with_name("first")
    adopt(folder, first)
    shutil.rmtree(folder)
    first.rename(folder)
    (folder / "visual.py").write_text("raise SystemExit('older')\n")
    (folder / "left.py").write_text("raise SystemExit('older')\n")
    set_config(folder, fused_loss=True, num_hidden_layers=2)


def as_named_by_a_quantizer(folder: Path) -> None:
    save_tensors(folder, read_tensors(folder), "gptq_model-4bit-128g.safetensors")


def as_shards_without_an_index(folder: Path) -> None:
    (folder / WEIGHTS_INDEX).unlink()
    for number, name in enumerate(shards_of(folder)):
        (folder / name).rename(folder / f"part-{number}.safetensors")


def as_in_the_hubs_cache(folder: Path) -> None:
    """Links to blobs, as ``hf download`` makes them."""
    blobs = folder.parent / "models--our-org--a" / "blobs"
    snapshot = blobs.parent / "snapshots" / ("a" * 40)
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / f"{number:040d}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:040d}")
    folder.rmdir()
    folder.symlink_to(snapshot)


ADOPTED = {
    "published": lambda folder: None,
    "cogagent": as_cogagent,
    "saved by transformers": as_saved_by_transformers,
    "an earlier version": as_of_an_earlier_version,
    "named by a quantizer": as_named_by_a_quantizer,
    "shards without an index": as_shards_without_an_index,
    "the Hub's cache": as_in_the_hubs_cache,
}
LOAD = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoProcessor, AutoTokenizer
sys.modules["glm4v_patched"] = None
inputs = torch.load("inputs.pt")
for folder in sys.argv[1:]:
    options = {"trust_remote_code": True, "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    processor = AutoProcessor.from_pretrained(folder, **options)
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    assert AutoTokenizer.from_pretrained(folder, **options).chat_template
    chat = [{"role": "user", "image": "image.png", "content": "What?"}]
    options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
    prompt = processor.apply_chat_template(chat, tokenize=True, **options)
    with torch.no_grad():
        torch.save(model(**inputs).logits, folder + "/logits.pt")
        tokens = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    print(json.dumps([folder, tokens[0].tolist()]))
"""


def test_adopted_folders_load_without_the_package_and_compute_the_same(published, tmp_path, capsys):
    """In a process that has only transformers and torch those whose settings differ; of the others
    the weights and settings are those of the first."""
    from PIL import Image

    Image.new("RGB", (40, 30), "red").save(tmp_path / "image.png")
    inputs = {"input_ids": torch.tensor([[*text(3), *expanded_image(), *text(4, seed=2)]])}
    inputs["pixel_values"] = random_pixels(1)
    torch.save(inputs, tmp_path / "inputs.pt")
    outs = []
    for number, (kind, change) in enumerate(ADOPTED.items()):
        folder = Path(shutil.copytree(published, tmp_path / str(number) / "model"))
        change(folder)
        before = state_of(folder)
        outs.append(tmp_path / f"adopted {number}")
        report = adopt(folder, outs[-1])
        assert state_of(folder) == before, kind
        assert "hard links, which take no space" in report
        code = {n: c for n, c in as_files(outs[-1]).items() if n.endswith(".py")}
        assert code == read_our_code(), kind
        assert ("cogagent-9b" in report) == (kind == "cogagent")
        # On the download: compare refuses the adopted folder, which has our code.
        note = (
            f"{folder} has the rotary embedding of cogagent",
            "`glm4v-patched compare FOLDER` tests this",
        )
        assert [*map(capsys.readouterr().err.__contains__, note)] == [kind == "cogagent"] * 2
        config = json.loads((outs[-1] / "config.json").read_text())
        assert config.get("original_rope") is (kind != "cogagent")
        settings = "".join(path.read_text() for path in outs[-1].glob("*.json*"))
        assert "evil" not in settings and "kernel" not in settings, kind
        assert (outs[-1] / "chat_template.jinja").read_text() != "{{ messages[0]['content'] }}"
    adopted = dict(zip(ADOPTED, outs, strict=True))
    loaded = [str(adopted[kind]) for kind in ("published", "cogagent", "saved by transformers")]
    output = run_without_package(LOAD, tmp_path, *loaded)
    lines = [json.loads(line) for line in output.splitlines() if line.startswith('["')]
    assert [name for name, _ in lines] == loaded
    as_cogagent(Path(shutil.copytree(published, tmp_path / "reference")))
    with torch.no_grad():
        published_logits, cogagent_logits = (
            GLM4VForCausalLM.from_pretrained(reference).eval()(**inputs).logits
            for reference in (published, tmp_path / "reference")
        )
        for kind, out in adopted.items():
            expected = cogagent_logits if kind == "cogagent" else published_logits
            logits = GLM4VForCausalLM.from_pretrained(out).eval()(**inputs).logits
            assert torch.equal(logits, expected), kind
            if str(out) in loaded:
                assert torch.equal(torch.load(out / "logits.pt"), expected), kind
    assert not torch.equal(published_logits, cogagent_logits)


# Links, copies, and interrupted runs


def test_weights_that_cannot_be_linked_are_copied_and_modes_stay(folder, tmp_path, monkeypatch):
    for name in shards_of(folder):
        (folder / name).chmod(0o400)
    before = state_of(folder)
    linked, copied = tmp_path / "linked", tmp_path / "copied"
    assert "2 hard links" in adopt(folder, linked)
    assert all(os.path.samefile(folder / n, linked / n) for n in shards_of(folder))

    def fail(*_, **__):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", fail)
    assert "2 copies, because they cannot be linked" in adopt(folder, copied)
    assert as_files(copied) == as_files(linked) and state_of(folder) == before
    assert (copied / shards_of(copied)[0]).stat().st_nlink == 1
    with files_of_at_most(200_000), pytest.raises(RuntimeError, match="cannot be written.*--out"):
        adopt(folder, tmp_path / "full")
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(ValueError, match=r"has 1.0 kB free, and the model needs 860.9 kB"):
        adopt(folder, tmp_path / "full")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copied", "linked", "model"]


@pytest.mark.parametrize("spelling", [".", "here/.."])
def test_without_out_the_folder_is_beside_however_it_is_spelled_and_a_second_run_says_so(
    folder, capsys, monkeypatch, spelling
):
    monkeypatch.chdir(folder)
    Path("here").mkdir()
    assert main(["adopt", spelling]) == 0
    out = folder.with_name("model-adopted")
    report = capsys.readouterr().out
    assert f"{out}: a glm-4v with the code of version" in report
    assert f"left out of {folder}: configuration_chatglm.py, here, model" in report
    state = state_of(out)
    assert main(["adopt", str(out)]) == 0
    assert f"{out} has the code of version" in capsys.readouterr().out
    # Another model's weights may have the same sizes, so that nothing says that this is the same.
    assert main(["adopt", str(folder)]) == 1
    assert f"{out} exists and would not be replaced" in capsys.readouterr().err
    assert state_of(out) == state
    assert sorted(path.name for path in folder.parent.iterdir()) == ["model", "model-adopted"]


def adopt_until_half(folder: Path, out: Path, half_copied) -> None:
    """Copy the settings and a half of the first weights, say so, and wait."""
    copy = shutil.copyfile

    def copy_half(source, target, **options):
        if Path(target).suffix != ".safetensors":
            return copy(source, target, **options)
        Path(target).write_bytes(b"half")
        half_copied.set()
        time.sleep(600)

    def link(source, target):
        raise OSError("no links here")

    os.link, shutil.copyfile = link, copy_half
    adopt(folder, out)


def test_a_killed_run_leaves_no_folder_and_the_next_removes_its_rest(folder, tmp_path):
    out = tmp_path / "into" / "out"
    fork = multiprocessing.get_context("fork")
    half_copied = fork.Event()
    process = fork.Process(target=adopt_until_half, args=(folder, out, half_copied))
    process.start()
    try:
        assert half_copied.wait(120)
        # A run beside it leaves the files of the running one alone.
        adopt(folder, out)
        names = {path.name for path in out.parent.iterdir()}
        assert len(names) == 2 and "out" in names
        shutil.rmtree(out)
    finally:
        process.kill()
        process.join()
    assert not out.exists() and len([*out.parent.iterdir()]) == 1
    adopt(folder, out)
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert len(as_files(out)) == len(read_our_code()) + 11


# Refused folders, and what to do


def without(*names: str):
    return lambda folder: [(folder / name).unlink() for name in names]


def pickled(folder: Path) -> None:
    torch.save(read_tensors(folder), folder / "pytorch_model.bin")
    without(WEIGHTS_INDEX, *shards_of(folder))(folder)


def changed_weights(change):
    def apply(folder: Path) -> None:
        tensors = read_tensors(folder)
        change(tensors)
        save_tensors(folder, tensors)

    return apply


def settings(**values):
    return lambda folder: set_config(folder, **values)


def written(name: str, content: str):
    return lambda folder: (folder / name).write_text(content)


def linked_out(folder: Path) -> None:
    (folder.parent / "secret").write_text("secret")
    (folder / "LICENSE").unlink()
    (folder / "LICENSE").symlink_to(folder.parent / "secret")


NORM, HEAD = "transformer.encoder.final_layernorm.weight", "transformer.output_layer.weight"
REFUSED = {
    "adapters": (
        lambda folder: (
            [*map(lambda path: path.unlink(), folder.glob("model*"))]
            + [(folder / "adapter_config.json").write_text("{}")]
        ),
        r"has adapters .*Merge the adapters.*merge .*model --out OUT",
    ),
    "adapters beside a model": (
        written("adapter_config.json", "{}"),
        "move the adapters' files away",
    ),
    "a text model": (
        lambda folder: edit(folder / "config.json", lambda config: config.pop("vision_config")),
        "vision_config is None, expected an object .*text models of GLM-4 have none",
    ),
    "another model": (settings(model_type="glm4v"), "model_type is 'glm4v', expected 'chatglm'"),
    "no config": (without("config.json"), "has no config.json"),
    "pickles": (pickled, r"its weights are pickles .*this command converts them to safetensors"),
    "no weights": (lambda folder: without(WEIGHTS_INDEX, *shards_of(folder))(folder), "without w"),
    "a weight is missing": (
        changed_weights(lambda tensors: tensors.pop(NORM)),
        rf"1 of 55 weights are missing.*{NORM} \[64\]",
    ),
    "another dtype": (
        changed_weights(lambda tensors: tensors.update({HEAD: tensors[HEAD].to(torch.int8)})),
        f"1 weights are not BF16, F16, F32, F64, and there is no quantization_config .{HEAD} I8",
    ),
    "no vocabulary": (without("tokenizer.model"), "in their place tokenizer_config.json and token"),
    "no tokenizer": (without("tokenizer_config.json"), "has no tokenizer_config.json"),
    "another image size": (
        lambda folder: edit(folder / "tokenizer_config.json", lambda c: c.update(image_size=112)),
        r"image_size 56, but preprocessor_config.json has 112",
    ),
    "another tokenizer": (settings(boi_token_id=4), "boi_token_id is 4, but the tokenizer has 510"),
    "an unknown quantizer": (
        settings(quantization_config={"quant_method": "mine"}),
        "quant_method 'mine'; expected one of",
    ),
    "fetched kernels": (
        settings(quantization_config={"quant_method": "fp8"}),
        "quant_method 'fp8', which would download and run code",
    ),
    "a link out of the folder": (linked_out, "LICENSE is a link to .*secret, outside"),
    "not JSON": (written("config.json", "{"), "config.json cannot be read"),
    "an endless template": (
        written("chat_template.jinja", "<|begin_of_image|>{% for i in range(10**9) %}{% endfor %}"),
        r"(?s)its chat template.*expected the tokenizer",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_folder_that_would_not_work_is_refused_and_nothing_is_written(
    kind, folder, tmp_path, monkeypatch
):
    from glm4v_patched.models import limited_process

    monkeypatch.setattr(limited_process, "BASE_SECONDS", 1)
    change, message = REFUSED[kind]
    change(folder)
    before = state_of(folder)
    with pytest.raises(ValueError, match=message) as raised:
        adopt(folder, tmp_path / "out")
    assert str(folder) in str(raised.value)
    elsewhere = str(raised.value).replace(str(tmp_path), "")
    assert not any(
        at in elsewhere for at in {tempfile.gettempdir(), os.path.realpath(tempfile.gettempdir())}
    )
    assert state_of(folder) == before
    assert {path.name for path in tmp_path.iterdir()} <= {"model", "secret"}


def test_the_printed_conversion_of_pickles_makes_a_folder_that_is_adopted(folder, tmp_path):
    expected = read_tensors(folder)
    pickled(folder)
    with pytest.raises(ValueError, match="pickles") as raised:
        adopt(folder)
    command = str(raised.value).partition("without running that code: ")[2]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(command, shell=True, check=True, timeout=120, env=environment)
    adopt(folder, tmp_path / "out")
    tensors = read_tensors(tmp_path / "out")
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_outputs_that_would_lose_something_are_refused(folder, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    as_in_the_hubs_cache(Path(shutil.copytree(folder, tmp_path / "downloaded")))
    snapshot = (tmp_path / "downloaded").resolve()
    for source, out, message in (
        (folder, folder / "in", "lies in the folder itself"),
        (folder, folder, "--out is the folder itself"),
        (folder, tmp_path / "other", "exists and would not be replaced"),
        (folder, tmp_path / "other" / "notes.txt", "exists and would not be replaced"),
        (snapshot, None, "is in the Hub's cache; give a folder outside"),
        (tmp_path / "none", None, "is not a folder; .*hf download"),
        (tmp_path / "other", None, "other has no config.json"),
    ):
        with pytest.raises(ValueError, match=message):
            adopt(source, out)
    assert (tmp_path / "other" / "notes.txt").read_text() == "mine"


def test_a_gptq_folder_names_the_layers_that_are_quantized(folder, tmp_path):
    """docs/patching.md has a run that loaded such a folder."""
    modules = [f"{ENCODER}{name}" for name in ("mlp.dense_4h_to_h", "self_attention.dense")]
    tensors = read_tensors(folder)
    for name in modules:
        outputs, inputs = tensors.pop(f"{name}.weight").shape
        tensors |= {
            f"{name}.qweight": torch.zeros(inputs // 8, outputs, dtype=torch.int32),
            f"{name}.qzeros": torch.zeros(1, outputs // 8, dtype=torch.int32),
            f"{name}.scales": torch.zeros(1, outputs, dtype=torch.float16),
        }
    save_tensors(folder, tensors, "gptq_model-4bit-128g.safetensors")
    stranger = {"model_name_or_path": "/home/stranger/glm-4v-9b"}
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": -1} | stranger
    set_config(folder, quantization_config=quantization)
    report = adopt(folder, tmp_path / "out")
    assert "saved quantized by gptq: loading needs" in report and "gptqmodel optimum" in report
    saved = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert saved["modules_in_block_to_quantize"] == [modules]
    assert saved["block_name_to_quantize"] == "transformer" and stranger.keys().isdisjoint(saved)
