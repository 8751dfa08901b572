"""Building the published folder: its content, its sources, and refused sources."""

import errno
import hashlib
import json
import os
import shutil
import tomllib
from pathlib import Path

import pytest
import yaml
from huggingface_hub.errors import RevisionNotFoundError

from glm4v_patched import __version__
from glm4v_patched.models.adopt import adopt
from glm4v_patched.models.weight_files import WEIGHTS_INDEX as INDEX
from hub_upload import checks
from hub_upload.build import build_model_repository, read_source
from hub_upload.manifest import MANIFEST
from hub_upload.publish import read_built_folder
from hub_upload.verify import verify
from tests.helpers.publishable import (
    CODE,
    LICENSE_TEXT,
    NAME,
    ROOT,
    UPSTREAM,
    as_files,
    edit,
    shards_of,
)
from tests.helpers.tiny import golden_json


@pytest.fixture
def changed(original, tmp_path) -> Path:
    """A copy of the source that a test may change."""
    return shutil.copytree(original, tmp_path / "source")


@pytest.fixture
def head(hub, original) -> str:
    """The original's commit on the local Hub."""
    return hub.add_repository(UPSTREAM, as_files(original)).head


@pytest.fixture
def make(tmp_path):
    """Build from a folder or an id, and return the folder."""

    def make(source, *training, out="out"):
        build_model_repository(read_source(str(source), *training), tmp_path / out, NAME)
        return tmp_path / out

    return make


def test_code_and_manifest_have_every_file_byte_for_byte(original, built):
    files = as_files(built)
    assert {name: files[name] for name in files if name.endswith(".py")} == CODE
    manifest = json.loads(files.pop(MANIFEST))
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    assert manifest["files"] == {n: {"size": len(files[n]), "sha256": hashes[n]} for n in files}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert files["requirements.txt"].decode().splitlines() == project["dependencies"]
    assert (manifest["version"], manifest["weights_from"]) == (__version__, None)
    assert b"Apache License" in files["LICENSE"]
    assert files["MODEL_LICENSE"].decode() == LICENSE_TEXT
    # Weights are hard links, so they are unchanged.
    assert len(shards_of(built)) == 2 and files[INDEX] == (original / INDEX).read_bytes()
    assert all(os.path.samefile(original / name, built / name) for name in shards_of(original))


def test_a_build_has_the_files_of_adopt(original, built, tmp_path):
    adopt(original, tmp_path / "adopted")
    files, adopted = as_files(built), as_files(tmp_path / "adopted")
    assert files["MODEL_LICENSE"] == adopted.pop("LICENSE")
    assert {name: files.get(name) for name in adopted} == adopted
    more = {MANIFEST, "LICENSE", "MODEL_LICENSE", "README.md", "requirements.txt"}
    assert files.keys() - adopted.keys() == more


def test_files_and_ids_that_the_original_lacks_are_added(changed, make, run, tmp_path):
    edit(changed / "config.json", lambda c: [c.pop(f"{n}_token_id") for n in ("boi", "eoi", "pad")])
    (changed / "generation_config.json").unlink()
    (changed / "LICENSE").unlink()
    # Links within the folder are followed.
    (changed / "config.json").rename(changed / "config of the original")
    (changed / "config.json").symlink_to("config of the original")
    out = tmp_path / "out"
    status, output = run("build", "--weights", changed, "--out", out)
    assert status == 0 and "the source has no license file" in output
    config = json.loads((out / "config.json").read_text())
    assert [config[f"{name}_token_id"] for name in ("boi", "eoi", "pad")] == [510, 511, 500]
    original = golden_json("config.json")
    expected = {name: original[name] for name in ("eos_token_id", "pad_token_id")}
    assert json.loads((out / "generation_config.json").read_text()) == expected
    assert not (out / "MODEL_LICENSE").exists()
    assert f"{UPSTREAM}/blob/main/LICENSE" in (out / "README.md").read_text()
    # Building from a build: our LICENSE is not mistaken for the weights'.
    assert as_files(make(changed, out="first")) == as_files(make(tmp_path / "first", out="second"))


PLANTS = {
    "a link": lambda path, secret: path.symlink_to(secret),
    "a link to a folder": lambda path, secret: path.symlink_to(secret.parent),
    "hard links": lambda path, secret: path.hardlink_to(secret),
    "a pipe": lambda path, secret: os.mkfifo(path),
}


@pytest.mark.parametrize("kind", PLANTS)
@pytest.mark.parametrize("name", ["LICENSE", "model-00001-of-*"])
def test_links_and_pipes_out_of_the_source_are_refused(name, kind, changed, run, tmp_path):
    path = next(changed.glob(name))
    secret = tmp_path / "outside" / "id_rsa"
    secret.parent.mkdir()
    path.rename(secret)
    PLANTS[kind](path, secret)
    status, output = run("build", "--weights", changed, "--out", tmp_path / "out")
    if kind == "hard links" and "model" in name:
        assert status == 0  # build itself hard-links weights
    else:
        assert status == 1 and str(path) in output and kind.split(" to ")[0] in output, output
        assert not (tmp_path / "out").exists()


def test_an_output_that_exists_is_refused_and_unchanged(original, run, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    status, output = run("build", "--weights", original, "--out", out, "--name", NAME)
    assert status == 1 and f"--out {out} exists and would not be replaced" in output
    assert as_files(out) == {"mine.txt": b"mine"}


def test_the_source_itself_is_never_written_to(changed, run, tmp_path):
    (tmp_path / "link").symlink_to(changed)
    before = as_files(changed)
    for source, out in ((changed, tmp_path / "link"), (tmp_path / "link", changed)):
        status, output = run("build", "--weights", source, "--out", out)
        assert status == 1 and "--out is the source itself" in output
    assert as_files(changed) == before


@pytest.mark.parametrize("step", ["copy", "rename"])
def test_a_failed_build_leaves_nothing(step, original, make, tmp_path, monkeypatch):
    rename = Path.rename

    def fail(*_):
        raise OSError(errno.EACCES, "Permission denied")

    def rename_but_new(path, target):
        return fail() if path.suffix == ".partial" else rename(path, target)

    if step == "rename":
        monkeypatch.setattr(Path, "rename", rename_but_new)
    else:
        monkeypatch.setattr(os, "link", fail)  # as on another file system
        monkeypatch.setattr(shutil, "copyfile", fail)
    with pytest.raises(OSError, match="Permission denied"):
        make(original)
    assert not [*tmp_path.iterdir()]


# Refused sources

REFUSED = [
    ("config.json", {"vision_config": None}, "not belong to a glm-4v: vision_config is None"),
    ("model-00002-of-00002.safetensors", None, "missing 1 of 2 files of"),
    ("config.json", "[]", "config.json holds a list; expected an object"),
    ("tokenizer_config.json", "{", "tokenizer_config.json cannot be read: "),
    (INDEX, '{"weight_map": ["a.safetensors"]}', "weight_map .*; expected the file of each"),
    (INDEX, '{"metadata": {}, "weight_map": {"a": "../b.safetensors"}}', f"{INDEX} names "),
    ("adapter_config.json", "{}", r"has an adapter \(adapter_config.json\).*merge"),
]


@pytest.mark.parametrize(("name", "change", "message"), REFUSED)
def test_a_source_that_would_not_work_is_refused(name, change, message, changed, make, tmp_path):
    if isinstance(change, dict):
        edit(changed / name, lambda values: values.update(change))
    else:
        (changed / name).unlink(missing_ok=True)
        if change is not None:
            (changed / name).write_text(change)
    with pytest.raises(ValueError, match=message):
        make(changed)
    assert not (tmp_path / "out").exists()


REFUSED_SETTINGS = [
    ("config.json", "quantization_config", {"quant_method": "torchao"}),
    ("config.json", "attn_implementation", "paged|x/y"),
    ("config.json", "kernel_config", {"RMSNorm": "x/y:Z"}),
    ("config.json", "custom_generate", "x/y"),
    ("config.json", "num_layers", float("nan")),
    ("generation_config.json", "cache_implementation", "evil"),
    ("generation_config.json", "custom_generate", "x/y"),
    ("generation_config.json", "temperature", float("inf")),
]


@pytest.mark.parametrize(("name", "key", "value"), REFUSED_SETTINGS)
def test_settings_that_the_published_code_refuses_are_not_built(
    name, key, value, changed, make, tmp_path
):
    edit(changed / name, lambda values: values.update({key: value}))
    with pytest.raises(ValueError, match=rf"{name}.* {key}\b.*(expected|remove)"):
        make(changed)
    assert not (tmp_path / "out").exists()


def test_a_source_that_the_published_code_cannot_load_is_neither_built_nor_published(
    original, built, make, tmp_path, monkeypatch
):
    def fail(*_):
        raise ValueError("it ended with status 1")

    monkeypatch.setattr(checks, "run_published_code", fail)
    with pytest.raises(ValueError, match="it ended with status 1"):
        make(original)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="does not pass verify: loads: it ended"):
        read_built_folder(built)


def test_a_missing_or_unpinned_source_is_refused_with_the_cure(head):
    pinned = f".*give {UPSTREAM}@{head}"
    for source, message in {
        **dict.fromkeys(("no/such/folder", "./missing", "glm-4v-9b"), "neither a folder nor a rep"),
        UPSTREAM: f"no commit is given{pinned}",
        f"{UPSTREAM}@main": f"main is not a full commit{pinned}",
    }.items():
        with pytest.raises(ValueError, match=message):
            read_source(source)
    for revision in ("v9", "0" * 40):
        with pytest.raises(RevisionNotFoundError, match="404"):
            read_source(f"{UPSTREAM}@{revision}")


def test_a_cogagent_is_built_under_its_own_name(changed, run, tmp_path):
    """The card says what nobody here could read, and how to find out."""
    published = {"original_rope": False, "architectures": ["ChatGLMForConditionalGeneration"]}
    edit(changed / "config.json", lambda config: config.update(published))
    status, output = run("build", "--weights", changed, "--out", tmp_path / "out")
    assert status == 0 and output.startswith("version "), output
    _, front, body = (tmp_path / "out" / "README.md").read_text().split("---\n", 2)
    data, body = yaml.safe_load(front), " ".join(body.split())
    base = "zai-org/cogagent-9b-20241220"
    assert data["base_model"] == base and data["license_name"] != "glm-4"
    assert data["license_link"] == f"https://huggingface.co/{base}/blob/main/LICENSE"
    assert "cogagent" in data["tags"] and "# cogagent-9b, made to be trained" in body
    for wanted in ("have read neither its modeling file", "glm4v-patched compare FOLDER"):
        assert wanted in body, wanted
    assert '"org/cogagent-9b-trainable", "v' in body and "the license of cogagent-9b" in body
    assert "glm-4 license" not in body
    assert verify(str(tmp_path / "out")).failures == []


def claims_original_weights(folder: Path) -> bool:
    body = " ".join((folder / "README.md").read_text().split("---\n", 2)[2].split())
    return "unchanged" in body or "finetuned" in body


def test_no_byte_of_the_weights_comes_from_the_hub(head, hub, built, make):
    out = make(f"{UPSTREAM}@{head}")
    assert not [r.path for r in hub.requests if r.path.endswith(".safetensors")]
    manifest, local = (json.loads((folder / MANIFEST).read_text()) for folder in (out, built))
    weights = {n: f for n, f in local["files"].items() if n.endswith(".safetensors")}
    assert shards_of(out) == [] and weights.items() <= manifest["files"].items()
    assert manifest["weights_from"] == {"repository": UPSTREAM, "revision": head}
    local_files = as_files(built)
    for name, content in as_files(out).items():
        assert name in (MANIFEST, "README.md") or content == local_files[name], name
    card = (out / "README.md").read_text()
    assert f"{UPSTREAM}/blob/{head}/LICENSE" in card and f"revision `{head}`" in card
    assert claims_original_weights(out) and not claims_original_weights(built)
    assert as_files(make(f"{UPSTREAM}@{head}", out="again")) == as_files(out)


def test_a_download_that_differs_from_the_hubs_list_is_refused(head, hub, original):
    changed = (original / "config.json").read_bytes().replace(b'"', b"'", 1)  # of the same size
    hub.fail("GET", r"/resolve/.*/config\.json", answer=changed)
    with pytest.raises(ValueError, match=r"config\.json does not have the hash that the Hub lists"):
        read_source(f"{UPSTREAM}@{head}")


TRAINED = [
    ("training.json", {}),
    ("config.json", {"architectures": ["ChatGLMForConditionalGeneration"]}),
]


@pytest.mark.parametrize(("file", "values"), TRAINED, ids=str)
def test_trained_weights_need_their_base_model(file, values, changed, make, run, tmp_path):
    path = changed / file
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | values))
    out, base, what = tmp_path / "out", "our-org/receipts", "the language model, on 2,000 receipts"
    command = ("build", "--weights", changed, "--out", out, "--name", NAME)
    for options in ([], ["--fine-tune-of", base]):
        status, output = run(*command, *options)
        assert status == 1 and "--fine-tune-of " in output and "--trained" in output
        assert not out.exists()
    assert run(*command, "--fine-tune-of", base, "--trained", what)[0] == 0
    card = (out / "README.md").read_text()
    assert f"base_model: {base}\nbase_model_relation: finetune\n" in card
    assert not claims_original_weights(out)
    assert "\n# A fine-tuned glm-4v-9b\n\nBuilt with glm-4." in card
    assert f"Fine-tuned from [{base}](https://huggingface.co/{base}): {what}." in card
    fine_tune = {"base": base, "trained": what}
    assert json.loads((out / MANIFEST).read_text())["fine_tune"] == fine_tune
    # Building from that build needs no options.
    assert (make(out, out="again") / "README.md").read_text() == card


def test_the_manifest_of_an_earlier_build_describes_no_other_weights(original, make):
    out = make(original, "our-org/receipts", "the language model")
    assert read_source(str(out)).fine_tune.trained == "the language model"
    [shard, *_] = sorted(out.glob("*.safetensors"))
    content = shard.read_bytes()
    shard.unlink()  # it is hard-linked to the original's
    shard.write_bytes(content[:-1] + b"x")
    with pytest.raises(ValueError, match="is not .* as it was published .* give --fine-tune-of"):
        read_source(str(out))
