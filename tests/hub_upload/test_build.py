"""The folder that is published: what is in it, where it comes from, and what is refused."""

import errno
import hashlib
import json
import os
import shutil
import tomllib
from pathlib import Path

import pytest
from huggingface_hub.errors import RevisionNotFoundError

from glm4v_patched import __version__
from hub_upload import loading
from hub_upload.build import build, read_source
from hub_upload.layout import INDEX, MANIFEST
from hub_upload.publish import read_build
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
    """A source of one's own to change."""
    return shutil.copytree(original, tmp_path / "source")


@pytest.fixture
def head(hub, original) -> str:
    """The commit at which the Hub has the original."""
    return hub.add_repository(UPSTREAM, as_files(original)).head


@pytest.fixture
def make(tmp_path):
    """Build from a folder or an id; the folder that was built."""

    def make(source, *said, out="out"):
        build(read_source(str(source), *said), tmp_path / out, NAME)
        return tmp_path / out

    return make


# What is in it


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
    # Weights are links, so nothing has rewritten them.
    assert len(shards_of(built)) == 2 and files[INDEX] == (original / INDEX).read_bytes()
    assert all(os.path.samefile(original / name, built / name) for name in shards_of(original))


def test_what_the_original_lacks_is_made_up_for(changed, make, run, tmp_path):
    edit(changed / "config.json", lambda c: [c.pop(f"{n}_token_id") for n in ("boi", "eoi", "pad")])
    (changed / "generation_config.json").unlink()
    (changed / "LICENSE").unlink()
    # A link that stays inside is followed.
    (changed / "config.json").rename(changed / "config of the original")
    (changed / "config.json").symlink_to("config of the original")
    out = tmp_path / "out"
    status, output = run("build", "--weights", changed, "--out", out)
    assert status == 0 and "the source has no license file" in output
    config = json.loads((out / "config.json").read_text())
    assert [config[f"{name}_token_id"] for name in ("boi", "eoi", "pad")] == [510, 511, 500]
    given = golden_json("config.json")
    expected = {name: given[name] for name in ("eos_token_id", "pad_token_id")}
    assert json.loads((out / "generation_config.json").read_text()) == expected
    assert not (out / "MODEL_LICENSE").exists()
    assert f"{UPSTREAM}/blob/main/LICENSE" in (out / "README.md").read_text()
    # A build of it does not take our LICENSE for that of the weights.
    assert as_files(make(changed, out="first")) == as_files(make(tmp_path / "first", out="second"))


# Links, devices, and two file systems


PLANTS = {
    "a link": lambda path, secret: path.symlink_to(secret),
    "a link to a folder": lambda path, secret: path.symlink_to(secret.parent),
    "hard links": lambda path, secret: path.hardlink_to(secret),
    "a pipe": lambda path, secret: os.mkfifo(path),
}


@pytest.mark.parametrize("kind", PLANTS)
@pytest.mark.parametrize("name", ["LICENSE", "model-00001-of-*"])
def test_what_would_let_a_secret_in_is_refused(name, kind, changed, run, tmp_path):
    path = next(changed.glob(name))
    secret = tmp_path / "outside" / "id_rsa"
    secret.parent.mkdir()
    path.rename(secret)
    PLANTS[kind](path, secret)
    status, told = run("build", "--weights", changed, "--out", tmp_path / "out")
    if kind == "hard links" and "model" in name:
        assert status == 0  # weights are linked by build itself
    else:
        assert status == 1 and str(path) in told and kind.split(" to ")[0] in told, told
        assert not (tmp_path / "out").exists()


# Where it is written


FOREIGN = {
    MANIFEST: r"for CODE_MANIFEST.json\nversion\n  Field required",
    "results/mine.txt": "1 files that no build wrote .results/mine.txt",
    ".git/config": "1 files that no build wrote .*git/config",
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_no_build_of_ours_is_refused_and_left(name, original, make, tmp_path):
    if "/" in name:
        make(original)
    (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "out" / name).write_text("{}")
    before = as_files(tmp_path / "out")
    with pytest.raises(ValueError, match=FOREIGN[name]):
        make(original)
    assert as_files(tmp_path / "out") == before


def test_the_source_itself_is_never_written_to(changed, tmp_path):
    (tmp_path / "link").symlink_to(changed)
    before = as_files(changed)
    for source, out in ((changed, tmp_path / "link"), (tmp_path / "link", changed)):
        with pytest.raises(ValueError, match="--out is the source itself"):
            build(read_source(str(source)), out, NAME)
    assert as_files(changed) == before


@pytest.mark.parametrize("step", ["copy", "rename"])
def test_a_failed_build_leaves_what_was_there(step, original, make, tmp_path, monkeypatch):
    make(original)
    (tmp_path / "out" / "visual.py").write_text("earlier")
    before = as_files(tmp_path)
    rename = Path.rename

    def fail(*_):
        raise OSError(errno.EACCES, "Permission denied")

    def rename_but_new(path, target):
        return fail() if path.name == "new" else rename(path, target)

    if step == "rename":
        monkeypatch.setattr(Path, "rename", rename_but_new)
    else:
        monkeypatch.setattr(os, "link", fail)  # as to another file system
        monkeypatch.setattr(shutil, "copyfile", fail)
    with pytest.raises(OSError, match="Permission denied"):
        make(original)
    assert as_files(tmp_path) == before


# What is refused

REFUSED = [
    ("config.json", {"vision_config": None}, "not a glm-4v's: vision_config is None"),
    ("model-00002-of-00002.safetensors", None, "lacks 1 of 2 files of"),
    ("config.json", "[]", "config.json holds a list; expected an object"),
    ("tokenizer_config.json", "{", "tokenizer_config.json cannot be read: "),
    (
        INDEX,
        json.dumps({"weight_map": ["a.safetensors"]}),
        "weight_map ..a.safetensors..; expected the file of each",
    ),
    ("adapter_config.json", "{}", r"holds an adapter \(adapter_config.json\).*merge"),
]
ODD = [5, "../model.safetensors", "pytorch_model.bin", "weights/model.safetensors"]
OF_ODD = [json.dumps({"metadata": {}, "weight_map": {"a": name}}) for name in ODD]
REFUSED += [(INDEX, content, f"{INDEX} names") for content in OF_ODD]


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


LOADED_OTHERWISE = [
    ("config.json", "quantization_config", {"quant_method": "torchao"}),
    ("config.json", "_attn_implementation", "flash_attention_4"),
    ("config.json", "attn_implementation", "paged|x/y"),
    ("config.json", "use_kernels", True),
    ("config.json", "kernel_config", {"RMSNorm": "x/y:Z"}),
    ("config.json", "custom_generate", "x/y"),
    ("config.json", "num_layers", float("nan")),
    ("generation_config.json", "cache_implementation", "evil"),
    ("generation_config.json", "compile_config", {"backend": "evil"}),
    ("generation_config.json", "custom_generate", "x/y"),
    ("generation_config.json", "watermarking_config", {"bias": 2.0}),
    ("generation_config.json", "temperature", float("inf")),
]


@pytest.mark.parametrize(("name", "key", "value"), LOADED_OTHERWISE)
def test_settings_that_the_published_code_refuses_are_not_built(
    name, key, value, changed, make, tmp_path
):
    edit(changed / name, lambda values: values.update({key: value}))
    with pytest.raises(ValueError, match=rf"{name}.* {key}\b.*(expected|take it out|remove)"):
        make(changed)
    assert not (tmp_path / "out").exists()


def test_what_the_published_code_does_not_load_is_neither_built_nor_published(
    original, built, make, tmp_path, monkeypatch
):
    monkeypatch.setattr(loading, "run", lambda *_: ([], "the process ended: ValueError: no"))
    with pytest.raises(ValueError, match="does not pass verify: loads: .*ValueError: no"):
        make(original)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="does not pass verify: loads: .*ValueError: no"):
        read_build(built)


# From the Hub, and weights that were trained


def test_a_source_that_is_nothing_or_not_pinned_is_refused_with_the_cure(head):
    pinned = f".*give {UPSTREAM}@{head}"
    for source, told in {
        **dict.fromkeys(("no/such/folder", "./missing", "glm-4v-9b"), "neither a folder nor a rep"),
        UPSTREAM: f"no revision is given{pinned}",
        f"{UPSTREAM}@main": f"main is no full commit{pinned}",
    }.items():
        with pytest.raises(ValueError, match=told):
            read_source(source)
    for revision in ("v9", "0" * 40):
        with pytest.raises(RevisionNotFoundError, match="404"):
            read_source(f"{UPSTREAM}@{revision}")


def claims(folder: Path) -> bool:
    body = " ".join((folder / "README.md").read_text().split("---\n", 2)[2].split())
    return "unchanged" in body or "finetuned" in body


def test_no_byte_of_the_weights_comes_from_the_hub(head, hub, built, make):
    out = make(f"{UPSTREAM}@{head}")
    assert not [r.path for r in hub.requests if r.path.endswith(".safetensors")]
    manifest, local = (json.loads((folder / MANIFEST).read_text()) for folder in (out, built))
    weights = {n: f for n, f in local["files"].items() if n.endswith(".safetensors")}
    assert shards_of(out) == [] and weights.items() <= manifest["files"].items()
    assert manifest["weights_from"] == {"repository": UPSTREAM, "revision": head}
    same = as_files(built)
    for name, content in as_files(out).items():
        assert name in (MANIFEST, "README.md") or content == same[name], name
    card = (out / "README.md").read_text()
    assert f"{UPSTREAM}/blob/{head}/LICENSE" in card and f"revision `{head}`" in card
    assert claims(out) and not claims(built)
    assert as_files(make(f"{UPSTREAM}@{head}", out="again")) == as_files(out)


def test_a_download_that_is_not_what_the_hub_lists_is_refused(head, hub, original):
    changed = (original / "config.json").read_bytes().replace(b'"', b"'", 1)  # of the same size
    hub.fail("GET", r"/resolve/.*/config\.json", answer=changed)
    with pytest.raises(ValueError, match=r"config\.json has another hash than its list of files"):
        read_source(f"{UPSTREAM}@{head}")


TRAINED = [
    ("training.json", {}),
    ("config.json", {"architectures": ["ChatGLMForConditionalGeneration"]}),
]


@pytest.mark.parametrize(("file", "values"), TRAINED, ids=str)
def test_trained_weights_need_their_base_told(file, values, changed, make, run, tmp_path):
    path = changed / file
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | values))
    out, base, what = tmp_path / "out", "our-org/receipts", "the language model, on 2,000 receipts"
    command = ("build", "--weights", changed, "--out", out, "--name", NAME)
    for said in ([], ["--fine-tune-of", base]):
        status, output = run(*command, *said)
        assert status == 1 and "--fine-tune-of " in output and "--trained" in output
        assert not out.exists()
    assert run(*command, "--fine-tune-of", base, "--trained", what)[0] == 0
    card = (out / "README.md").read_text()
    assert f"base_model: {base}\nbase_model_relation: finetune\n" in card and not claims(out)
    assert "\n# A fine-tuned glm-4v-9b\n\nBuilt with glm-4." in card
    assert f"Fine-tuned from [{base}](https://huggingface.co/{base}): {what}." in card
    told = {"base": base, "trained": what}
    assert json.loads((out / MANIFEST).read_text())["fine_tune"] == told
    # A build of that build says the same without being told again.
    assert (make(out, out="again") / "README.md").read_text() == card
