"""The folder that is published: what is in it, where it comes from, and that it loads by itself."""

import errno
import hashlib
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file

from glm4v_patched.finetune.config import Recipe
from glm4v_patched.remote.processing_chatglm import ChatGLMProcessor
from hub_upload.__main__ import main
from hub_upload.build import (
    AUTO_MAPS,
    MANIFEST,
    UPSTREAM,
    FineTune,
    build,
    differences,
    read_source,
)
from hub_upload.faults import Failure
from tests.helpers.local_hub import LocalHub
from tests.helpers.processes import cpu_environment, run_with_limit, two_processes
from tests.helpers.publishable import (
    GENERATION,
    INDEX,
    LICENSE_TEXT,
    NAME,
    ROOT,
    as_files,
    run_cli,
    shards_of,
    write_original,
)
from tests.helpers.tiny import golden_json, grown_image, pictures, text, tiny_model

REMOTE = ROOT / "glm4v_patched" / "remote"
CODE = sorted(path.name for path in REMOTE.glob("*.py") if path.name != "__init__.py")


@pytest.fixture
def changed(tmp_path):
    """A source of one's own to change."""
    return write_original(tmp_path / "source")


@pytest.fixture
def hub(original, monkeypatch, tmp_path):
    """A Hub that has the original, and an empty cache."""
    with LocalHub() as hub:
        hub.redirect_client(monkeypatch)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        hub.add_repository(UPSTREAM, as_files(original))
        yield hub


def amend(path: Path, **fields) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


# What is in it


def test_the_code_is_copied_byte_for_byte_and_nothing_else_of_the_package(built):
    assert sorted(path.name for path in built.glob("*.py")) == CODE
    for name in CODE:
        assert (built / name).read_bytes() == (REMOTE / name).read_bytes(), name


def test_the_manifest_has_the_hash_of_every_file(built):
    manifest = json.loads((built / MANIFEST).read_text())
    hashes = manifest["code"] | manifest["files"]
    hashes |= {name: file["sha256"] for name, file in manifest["weights"]["files"].items()}
    want = {n: hashlib.sha256(c).hexdigest() for n, c in as_files(built).items() if n != MANIFEST}
    assert hashes == want
    assert sorted(manifest["code"]) == CODE
    for name, file in manifest["weights"]["files"].items():
        assert file["size"] == (built / name).stat().st_size


def test_version_and_requirements_are_those_of_the_project(built):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (built / "requirements.txt").read_text().splitlines() == project["dependencies"]
    assert json.loads((built / MANIFEST).read_text())["version"] == project["version"]


def test_every_field_of_the_config_is_kept_but_who_loads_it(original, built):
    given = json.loads((original / "config.json").read_text())
    config = json.loads((built / "config.json").read_text())
    ours = {"architectures", "auto_map"}
    assert {k: v for k, v in config.items() if k not in ours} == {
        k: v for k, v in given.items() if k not in ours
    }
    assert config["architectures"] == ["GLM4VForCausalLM"]
    assert {"boi_token_id", "eoi_token_id", "pad_token_id"} <= set(config)
    assert config["vision_config"]["image_size"] == 56


def test_auto_map_names_our_classes_in_every_file_that_the_loader_reads(built):
    for name, expected in AUTO_MAPS.items():
        assert json.loads((built / name).read_text())["auto_map"] == expected, name
    wanted = {"AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer"}
    assert wanted | {"AutoImageProcessor", "AutoProcessor"} <= set(AUTO_MAPS["config.json"])


def test_ids_that_a_config_lacks_are_the_tokenizers(changed, tmp_path):
    config = json.loads((changed / "config.json").read_text())
    for name in ("boi_token_id", "eoi_token_id", "pad_token_id"):
        del config[name]
    (changed / "config.json").write_text(json.dumps(config))
    build(str(changed), tmp_path / "out", NAME)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert [config[f"{name}_token_id"] for name in ("boi", "eoi", "pad")] == [510, 511, 500]


def test_the_generation_config_is_the_originals_or_from_its_config(built, changed, tmp_path):
    assert json.loads((built / "generation_config.json").read_text()) == GENERATION
    (changed / "generation_config.json").unlink()
    build(str(changed), tmp_path / "out", NAME)
    config = golden_json("config.json")
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {
        name: config[name] for name in ("eos_token_id", "pad_token_id")
    }


def test_both_licences_are_there_each_for_what_it_covers(built):
    assert "Apache License" in (built / "LICENSE").read_text()
    assert (built / "MODEL_LICENSE").read_text() == LICENSE_TEXT
    assert "`MODEL_LICENSE`" in (built / "README.md").read_text()


def test_a_source_without_licence_is_built_with_a_link_and_a_word(changed, tmp_path):
    (changed / "LICENSE").unlink()
    ended = run_cli("build", "--weights", changed, "--out", tmp_path / "out")
    assert ended.returncode == 0 and "the source has no licence file" in ended.stdout
    assert not (tmp_path / "out" / "MODEL_LICENSE").exists()
    assert f"{UPSTREAM}/blob/main/LICENSE" in (tmp_path / "out" / "README.md").read_text()


def test_no_file_says_which_version_wrote_it_or_where_from(original, built):
    for path in built.glob("*.json"):
        text = path.read_text()
        assert str(original) not in text, path.name
        for stamp in ("transformers_version", "is_local", "local_files_only", "_commit_hash"):
            assert f'"{stamp}"' not in text, path.name


def test_what_our_own_code_saved_can_be_built_from(original, tmp_path):
    saved = tmp_path / "saved"
    tiny_model().save_pretrained(saved)
    ChatGLMProcessor.from_pretrained(original).save_pretrained(saved)
    build(str(saved), tmp_path / "out", NAME, fine_tune=FineTune(UPSTREAM, "nothing"))
    assert logits_of_a_stranger(tmp_path / "out", tmp_path).shape[-1] == 512


# Weights


def test_weights_are_hard_links_and_stay_as_they_were(original, built):
    assert len(shards_of(built)) == 2
    for name in shards_of(original):
        assert os.path.samefile(original / name, built / name)
        assert (built / name).stat().st_nlink >= 2
    assert (built / INDEX).read_bytes() == (original / INDEX).read_bytes()


def cached(source: Path, folder: Path) -> Path:
    """The snapshot of a cache of the Hub: every file is a link to one that is named by its hash."""
    repository = folder / "models--zai-org--glm-4v-9b"
    snapshot, blobs = repository / "snapshots" / ("a" * 40), repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in source.iterdir():
        blob = hashlib.sha256(path.name.encode()).hexdigest()
        (blobs / blob).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(Path("../../blobs") / blob)
    return snapshot


def test_links_of_a_cache_become_links_to_what_they_point_at(original, tmp_path):
    snapshot = cached(original, tmp_path)
    build(str(snapshot), tmp_path / "out", NAME)
    placed = tmp_path / "out" / shards_of(original)[0]
    assert not placed.is_symlink() and os.path.samefile(placed, snapshot / placed.name)
    # The exception is for the cache's own: what its blobs point at is not.
    (tmp_path / "secret").write_text("secret")
    blob = Path(os.path.realpath(snapshot / "LICENSE"))
    blob.unlink()
    blob.symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match=f"LICENSE is a link .* to {tmp_path / 'secret'}"):
        build(str(snapshot), tmp_path / "other", NAME)


SECRETS = {
    "a licence": "LICENSE",
    "a generation config": "generation_config.json",
    "a template": "chat_template.jinja",
    "a shard": "model-00001-of-00002.safetensors",
    "a file that nobody reads": "notes.txt",
    "a folder": "additional_chat_templates",
}


@pytest.mark.parametrize("absolute", [False, True], ids=["relative", "absolute"])
@pytest.mark.parametrize("name", SECRETS.values(), ids=SECRETS)
def test_a_link_out_of_the_source_is_refused_by_its_name_and_end(name, absolute, changed, tmp_path):
    secret = tmp_path / "id_rsa"
    if name == "additional_chat_templates":
        secret.mkdir()
        (secret / "key.jinja").write_text("BEGIN PRIVATE KEY")
    else:
        given = changed / name
        secret.write_bytes(given.read_bytes() if given.exists() else b"BEGIN PRIVATE KEY")
        given.unlink(missing_ok=True)
    (changed / name).symlink_to(secret if absolute else Path("..") / "id_rsa")
    with pytest.raises(ValueError) as refused:
        build(str(changed), tmp_path / "out", NAME)
    assert str(changed / name) in str(refused.value) and str(secret) in str(refused.value)
    assert "is not followed" in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_a_link_that_stays_in_the_source_is_followed(changed, tmp_path):
    (changed / "LICENSE").rename(changed / "terms")
    (changed / "LICENSE").symlink_to("terms")
    build(str(changed), tmp_path / "out", NAME)
    assert (tmp_path / "out" / "MODEL_LICENSE").read_text() == LICENSE_TEXT
    assert not (tmp_path / "out" / "MODEL_LICENSE").is_symlink()


def test_two_file_systems_are_named_and_copying_is_the_cure(original, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(ValueError, match=r"file system at /.*the output on that at /.*--copy"):
        build(str(original), tmp_path / "out", NAME)
    assert [*tmp_path.iterdir()] == []
    build(str(original), tmp_path / "out", NAME, copy=True)
    for name in shards_of(original):
        assert (tmp_path / "out" / name).read_bytes() == (original / name).read_bytes()
        assert not os.path.samefile(tmp_path / "out" / name, original / name)


# Pure


@pytest.mark.slow
def test_two_processes_write_the_same_bytes(original, tmp_path):
    for number, language in (("1", "C"), ("2", "C.UTF-8")):
        out = tmp_path / number
        environment = {"PYTHONHASHSEED": number, "LC_ALL": language}
        ended = run_cli("build", "--weights", original, "--out", out, **environment)
        assert ended.returncode == 0, ended.stderr
    assert as_files(tmp_path / "1") == as_files(tmp_path / "2")


@pytest.mark.slow
def test_check_is_silent_about_a_build_and_names_every_difference(original, tmp_path):
    out = tmp_path / "out"
    command = ("build", "--weights", original, "--out", out, "--check")
    missing = run_cli(*command)
    assert missing.returncode == 1 and "does not exist" in missing.stdout
    assert not out.exists()
    build(str(original), out, building_name())
    assert run_cli(*command).returncode == 0
    (out / "visual.py").write_text((out / "visual.py").read_text() + "\n")
    (out / "LICENSE").unlink()
    (out / "notes.txt").write_text("mine")
    shard = out / shards_of(out)[0]
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.unlink()
    shard.write_bytes(content)
    ended = run_cli(*command)
    assert ended.returncode == 1
    assert ended.stdout.splitlines() == [
        "LICENSE: missing",
        f"{shard.name}: differs",
        "notes.txt: not part of a build",
        "visual.py: differs",
    ]


def building_name() -> str:
    from hub_upload.__main__ import DEFAULT_NAME

    return DEFAULT_NAME


# Where it is written


def test_an_earlier_build_is_replaced_whole(original, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    build(str(original), out, NAME)
    before = as_files(out)
    (out / "visual.py").write_text("old")
    build(str(original), out, NAME)
    assert as_files(out) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("name", "message"),
    [("notes.txt", "no CODE_MANIFEST.json of an earlier build"), (MANIFEST, "has no code, files")],
)
def test_a_folder_that_is_no_build_is_refused_and_left(name, message, original, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("{}")
    with pytest.raises(ValueError, match=message):
        build(str(original), tmp_path / "out", NAME)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [name]


def test_a_build_with_somebody_elses_file_is_refused_by_its_name(original, tmp_path):
    build(str(original), tmp_path / "out", NAME)
    (tmp_path / "out" / "results").mkdir()
    (tmp_path / "out" / "results" / "mine.txt").write_text("precious")
    with pytest.raises(ValueError, match=r"1 files that no build wrote.*results/mine.txt"):
        build(str(original), tmp_path / "out", NAME)
    assert (tmp_path / "out" / "results" / "mine.txt").exists()


def test_the_source_is_never_the_output(original, changed):
    build(str(original), changed.parent / "out", NAME)
    with pytest.raises(ValueError, match="is the source itself"):
        build(str(changed.parent / "out"), changed.parent / "out", NAME)


def test_a_link_as_output_stays_one(original, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to("disk")
    for _ in range(2):
        build(str(original), tmp_path / "out", NAME)
        assert os.readlink(tmp_path / "out") == "disk"
        assert (tmp_path / "disk" / MANIFEST).exists()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "out"]


def test_an_earlier_build_is_put_back_if_the_new_one_cannot_take_its_place(
    original, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    build(str(original), out, NAME)
    (out / "visual.py").write_text("earlier")
    before = as_files(out)
    rename = Path.rename

    def fail(path, target):
        if ".new-" in path.name:
            raise OSError(errno.EACCES, "Permission denied")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="Permission denied"):
        build(str(original), out, NAME)
    assert as_files(out) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_check_notices_a_byte_of_copied_weights(original, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(errno.EXDEV, "no")))
    out = tmp_path / "out"
    build(str(original), out, NAME, copy=True)
    assert differences(str(original), out, NAME) == []
    shard = out / shards_of(out)[0]
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert differences(str(original), out, NAME) == [f"{shard.name}: differs"]


@pytest.mark.parametrize("earlier", [False, True])
def test_a_failed_build_leaves_what_was_there(earlier, original, tmp_path, monkeypatch):
    out = tmp_path / "out"
    if earlier:
        build(str(original), out, NAME)
    before = as_files(out) if earlier else None

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "link", fail)
    with pytest.raises(OSError, match="No space left"):
        build(str(original), out, NAME)
    assert [path.name for path in tmp_path.iterdir()] == ["out"] * earlier
    assert not earlier or as_files(out) == before


# What is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vision_config": None}, "no glm-4v's .model_type 'chatglm', vision_config missing"),
        ({"model_type": "llama"}, "no glm-4v's .model_type 'llama'"),
        ({"boi_token_id": 4}, r"boi_token_id 4, but <\|begin_of_image\|> is 510"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True is not supported"),
    ],
)
def test_a_config_that_would_not_work_is_refused(change, message, changed, tmp_path):
    amend(changed / "config.json", **change)
    with pytest.raises(ValueError, match=message):
        build(str(changed), tmp_path / "out", NAME)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [("[]", "holds a list, expected a JSON object"), ("{", "is no JSON .*: download it again")],
)
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", INDEX])
def test_a_file_that_holds_no_object_is_named(name, content, message, changed, tmp_path):
    (changed / name).write_text(content)
    with pytest.raises(ValueError, match=f"{name} {message}"):
        build(str(changed), tmp_path / "out", NAME)
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_for_other_images_is_refused(changed, tmp_path):
    amend(changed / "tokenizer_config.json", image_size=112)
    with pytest.raises(ValueError, match="image_size 112, config.json has 56"):
        build(str(changed), tmp_path / "out", NAME)


def test_missing_weights_are_counted_and_named(changed):
    missing = shards_of(changed)[1]
    (changed / missing).unlink()
    with pytest.raises(ValueError, match=f"lacks 1 of 2 files of weights: {missing}"):
        read_source(str(changed))


def test_weights_outside_of_the_folder_are_refused(changed):
    index = json.loads((changed / INDEX).read_text())
    index["weight_map"]["transformer.vision.boi"] = "../other.safetensors"
    (changed / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"names \['../other.safetensors'\]"):
        read_source(str(changed))


WEIGHT_MAPS = {
    "a number": {"a": 5},
    "null": {"a": None},
    "a list": {"a": ["model.safetensors"]},
    "a list of all": ["model.safetensors"],
    "none": {},
    "an absolute path": {"a": "/etc/passwd.safetensors"},
    "a folder above": {"a": "../model.safetensors"},
    "a folder below": {"a": "weights/model.safetensors"},
    "a backslash": {"a": "..\\model.safetensors"},
    "a pickle": {"a": "pytorch_model.bin"},
    "a hidden file": {"a": ".safetensors"},
    "a null byte": {"a": "model\0.safetensors"},
    "a line feed": {"a": "model.safetensors\n"},
}


@pytest.mark.parametrize("where", WEIGHT_MAPS.values(), ids=WEIGHT_MAPS)
def test_an_odd_index_is_refused(where, changed, tmp_path):
    (changed / INDEX).write_text(json.dumps({"weight_map": where}))
    with pytest.raises(ValueError, match=f"{INDEX} (names|has no weight_map)"):
        build(str(changed), tmp_path / "out", NAME)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("source", ["no/such/folder", "./missing", "glm-4v-9b"])
def test_what_is_neither_folder_nor_repository_is_refused(source):
    with pytest.raises(ValueError, match="neither a folder nor a repository of the Hub"):
        read_source(source)


# From the Hub


def test_an_unpinned_source_is_refused_with_the_commit_it_is_at(hub):
    head = hub.repositories[UPSTREAM].head
    for source, given in ((UPSTREAM, "no revision is given"), (f"{UPSTREAM}@main", "main is no")):
        with pytest.raises(ValueError, match=f"{given}.*give {UPSTREAM}@{head}"):
            read_source(source)
    with pytest.raises(ValueError, match="could not be asked for: RevisionNotFoundError"):
        read_source(f"{UPSTREAM}@v9")
    hub.fail("GET", "/api/models", answer={"id": UPSTREAM})
    with pytest.raises(ValueError, match="give .*@<commit of 40 hex digits> .*could not be asked"):
        read_source(UPSTREAM)
    hub.fail("GET", "/api/models", status=401)
    with pytest.raises(ValueError, match="give .*@<commit of 40 hex digits> .*could not be asked"):
        read_source(UPSTREAM)


def test_a_commit_that_is_not_there_is_said_so(hub):
    with pytest.raises(Failure, match=r"not there, or not for this token.*\(404"):
        read_source(f"{UPSTREAM}@{'0' * 40}")


def test_no_byte_of_the_weights_comes_from_the_hub(hub, original, built, tmp_path):
    head = hub.repositories[UPSTREAM].head
    out = tmp_path / "out"
    manifest = build(f"{UPSTREAM}@{head}", out, NAME)
    asked = [request.path for request in hub.requests]
    assert not [path for path in asked if path.endswith(".safetensors")]
    assert not [path for path in asked if path.endswith(".py")]
    assert shards_of(out) == []
    local = json.loads((built / MANIFEST).read_text())
    assert manifest["weights"] == {
        "repository": UPSTREAM,
        "revision": head,
        "files": local["weights"]["files"],
    }
    assert manifest["upstream_revision"] == head
    same = as_files(built)
    for name, content in as_files(out).items():
        assert name in (MANIFEST, "README.md") or content == same[name], name
    card = (out / "README.md").read_text()
    assert f"{UPSTREAM}/blob/{head}/LICENSE" in card and f"revision `{head}`" in card
    assert differences(f"{UPSTREAM}@{head}", out, NAME) == []


# Weights that were trained


def body_of(folder: Path) -> str:
    return " ".join(card_of(folder)[1].split())


def claims(folder: Path) -> bool:
    return "unchanged" in body_of(folder) or "finetuned" in body_of(folder)


def trained_here(folder):
    (folder / "training.json").write_text("{}")


def saved_by_another_class(folder):
    amend(folder / "config.json", architectures=["GLM4VForCausalLM"])


def saved_by_the_published_class(folder):
    amend(folder / "config.json", architectures=["ChatGLMForConditionalGeneration"])


def left_by_a_trainer(folder):
    (folder / "trainer_state.json").write_text("{}")


TRAINED = [trained_here, saved_by_another_class, saved_by_the_published_class, left_by_a_trainer]


@pytest.mark.parametrize("train", TRAINED)
def test_trained_weights_are_refused_until_their_base_is_told(train, changed, tmp_path):
    train(changed)
    command = ("build", "--weights", str(changed), "--out", str(tmp_path / "out"), "--name", NAME)
    with pytest.raises(ValueError, match="--fine-tune-of .* --trained"):
        build(str(changed), tmp_path / "out", NAME)
    assert not (tmp_path / "out").exists()
    base = "our-org/glm-4v-receipts"
    what = "the language model, on 2,000 receipts"
    assert main([*command, "--fine-tune-of", base]) == 1
    assert main([*command, "--fine-tune-of", base, "--trained", what]) == 0
    out = tmp_path / "out"
    data, body = card_of(out)
    assert data["base_model"] == base and data["base_model_relation"] == "finetune"
    assert f"Fine-tuned from [{base}](https://huggingface.co/{base}): {what}." in body
    assert not claims(out) and body.lstrip().startswith(
        "# A fine-tuned glm-4v-9b\n\nBuilt with glm-4."
    )
    told = {"base": base, "trained": what}
    assert json.loads((out / MANIFEST).read_text())["fine_tune"] == told
    # A build of that build says the same without being told again.
    build(str(out), tmp_path / "again", NAME)
    assert as_files(tmp_path / "again")["README.md"] == as_files(out)["README.md"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trained", "all"], "give the id of the base"),
        (["--fine-tune-of", "glm-4v"], "give the id of the base as org/name"),
        (["--fine-tune-of", UPSTREAM], "takes --trained too"),
        (["--fine-tune-of", UPSTREAM, "--trained", " "], "takes --trained too"),
        (["--fine-tune-of", UPSTREAM, "--trained", "a\n# b"], "takes --trained too"),
    ],
)
def test_half_of_what_a_fine_tune_is_is_refused(arguments, message, original, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["build", "--weights", str(original), "--out", str(out), *arguments]) == 1
    assert message in capsys.readouterr().err and not out.exists()


def test_only_the_published_commit_is_called_unchanged(hub, built, original, tmp_path):
    assert not claims(built) and "in a folder; the sha256 in" in body_of(built)
    build(f"{UPSTREAM}@{hub.repositories[UPSTREAM].head}", tmp_path / "published", NAME)
    assert claims(tmp_path / "published")
    another = hub.add_repository("our-org/another", as_files(original))
    build(f"our-org/another@{another.head}", tmp_path / "another", NAME)
    assert not claims(tmp_path / "another") and "whose card says what" in body_of(
        tmp_path / "another"
    )


def test_an_adapter_in_the_source_is_refused(changed, tmp_path):
    (changed / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"holds an adapter \(adapter_config.json\).*merge"):
        build(str(changed), tmp_path / "out", NAME, fine_tune=FineTune(UPSTREAM, "LoRA"))


def test_our_own_licence_is_not_taken_for_that_of_the_weights(changed, tmp_path):
    """A build without MODEL_LICENSE has a LICENSE, which is that of the code."""
    (changed / "LICENSE").unlink()
    build(str(changed), tmp_path / "first", NAME)
    assert not (tmp_path / "first" / "MODEL_LICENSE").exists()
    build(str(tmp_path / "first"), tmp_path / "second", NAME)
    assert as_files(tmp_path / "first") == as_files(tmp_path / "second")


# By a stranger

STRANGER = """
import sys
sys.modules["glm4v_patched"] = None  # cannot be imported
import transformers
from safetensors.torch import load_file, save_file
folder, out = sys.argv[1:]
model = transformers.AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
assert type(model).__module__.startswith("transformers_modules"), type(model).__module__
processor = transformers.AutoProcessor.from_pretrained(folder, trust_remote_code=True)
assert processor.num_image_tokens == 4
save_file({"logits": model(**load_file(out + "/inputs.safetensors")).logits}, out + "/logits")
"""


def inputs() -> dict[str, torch.Tensor]:
    row = [*text(3, seed=1), *grown_image(), *text(4, seed=2)]
    return {"input_ids": torch.tensor([row]), "pixel_values": pictures(1)}


def logits_of_a_stranger(folder: Path, out: Path) -> torch.Tensor:
    save_file(inputs(), out / "inputs.safetensors")
    script = out / "stranger.py"
    script.write_text(STRANGER)
    environment = os.environ | {
        "HF_HOME": str(out / "home"),
        "HF_MODULES_CACHE": str(out / "modules"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.run(
        [sys.executable, "-I", script, folder, out],
        cwd=out,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return load_file(out / "logits")["logits"]


@torch.no_grad()
def test_a_stranger_gets_the_logits_of_our_model(built, tmp_path):
    want = tiny_model()(**inputs()).logits
    assert torch.equal(logits_of_a_stranger(built, tmp_path), want)


# The card


def card_of(folder: Path) -> tuple[dict, str]:
    _, front, body = (folder / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(front), body


def test_the_card_has_what_the_hub_files_a_model_by(built):
    data, body = card_of(built)
    assert data["license"] == "other" and data["license_name"] == "glm-4"
    assert data["license_link"] == f"https://huggingface.co/{UPSTREAM}/blob/main/LICENSE"
    assert data["base_model"] == UPSTREAM and data["base_model_relation"] == "finetune"
    assert data["library_name"] == "transformers" and data["language"] == ["zh", "en"]
    assert data["pipeline_tag"] == "image-text-to-text" and "custom_code" in data["tags"]
    for wanted in ("Built with glm-4", "2406.12793", 'revision="v0.1.0"', NAME):
        assert wanted in body, wanted
    assert "{{" not in body and "{%" not in body


def test_figures_of_this_code_in_the_card_are_those_of_the_pages(built):
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    text = "".join(page.read_text() for page in pages)
    _, body = card_of(built)
    ours = body[body.index("That the numbers") : body.index("## Use it")]
    figures = set(re.findall(r"\d+(?:[.,]\d+)+(?:e-\d+)?", ours))
    assert len(figures) >= 7
    for figure in figures:
        assert figure in text, figure


def test_the_cards_memory_is_that_of_the_results(built):
    """Every row of the table is one row of the results, by what is trained and kept."""
    files = sorted((ROOT / "docs" / "benchmarks").glob("bench_*.json"))
    results = [row for file in files for row in json.loads(file.read_text())]
    _, body = card_of(built)
    table = body[body.index("## Memory") : body.index("## Pin the revision")]
    rows = [
        [cell.strip().replace("`", "") for cell in line.strip("|").split("|")]
        for line in table.splitlines()
        if line.startswith("| `") and not line.startswith("| `trained`")
    ]
    assert len(rows) >= 7
    for row in rows:
        assert row in [cells_of(result) for result in results if "error" not in result]


def cells_of(result: dict) -> list[str]:
    """What the card would say of a measured row."""
    chosen = result.get("policies") or result["settings"]
    # A frozen tower keeps nothing in any case.
    tower = chosen["tower"] if result["workload"] in ("full", "lora_all") else "-"
    cap = result["memory_limit_gib"]
    trained = result["workload"]
    optimizer = result["settings"].get("optimizer", "adamw")
    trained += "" if optimizer == "adamw" else f", engine.optimizer: {optimizer}"
    trained += ", engine.offload: true" if result["offload"] else ""
    trained += ", engine.zero_stage: 0" if result["zero_stage"] == 0 else ""
    return [
        trained,
        f"{result['micro_batch']}, {result['text_tokens']}",
        f"{result['gpus']}" + ("" if cap is None else f", {cap:g}"),
        f"{tower}, {chosen['language']}",
        f"{result['peak_allocated_gib']:.1f}, {result['peak_reserved_gib']:.1f}",
        f"{result['samples_per_s_per_gpu']:.2f}",
    ]


def test_the_card_names_packages_and_no_file_that_a_reader_lacks(built):
    _, body = card_of(built)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = " ".join(f'"{package}"' for package in project["dependencies"])
    assert body.count(f"pip install {named}") == 3
    assert "requirements.txt" not in body


def code_blocks(folder: Path, where: Path) -> list[str]:
    """The card's Python, with the folder in place of the repository; its picture is drawn."""
    Image.new("RGB", (40, 30), "red").save(where / "picture.png")
    blocks = re.findall(r"```python\n(.*?)```", card_of(folder)[1], re.DOTALL)
    pinned = f'name, revision = "{NAME}", "v0.1.0"'
    assert all(pinned in block for block in blocks)
    return [block.replace(pinned, f'name, revision = "{folder}", None') for block in blocks]


def test_the_cards_code_answers_a_question(built, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "use.py"
    script.write_text(code_blocks(built, tmp_path)[0])
    ended = run_with_limit([sys.executable, str(script)], 300, where(tmp_path))
    assert ended.status == 0, ended.output[-4000:]


@pytest.mark.slow
def test_the_cards_code_trains_on_two_processes(built, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(code_blocks(built, tmp_path)[1])
    ended = run_with_limit(two_processes(script), 600, where(tmp_path))
    assert ended.status == 0, ended.output[-6000:]
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    learned = [name for name, value in adapter.items() if "lora_B" in name and value.any()]
    assert len(learned) == 4  # two layers of each tower


def test_the_cards_recipe_can_be_read(built, tmp_path):
    (recipe,) = re.findall(r"```yaml\n(.*?)\n```", card_of(built)[1], re.DOTALL)
    (tmp_path / "recipe.yaml").write_text(recipe)
    assert Recipe.read(tmp_path / "recipe.yaml").model == NAME
    assert len(recipe.splitlines()) <= 10


@pytest.mark.slow
def test_the_cards_recipe_trains_on_two_processes_from_the_hub(built, tmp_path):
    """As written, but for its steps; and what is saved loads as the card says."""
    _, body = card_of(built)
    recipe, line = re.findall(r"```(?:yaml|json)\n(.*?)\n```", body, re.DOTALL)
    (tmp_path / "recipe.yaml").write_text(recipe)
    (tmp_path / "train.jsonl").write_text(f"{line}\n" * 16)
    use = code_blocks(built, tmp_path)[0]
    use = use.replace(f'"{built}", None', f'"{NAME}", "v0.1.0"')
    (command,) = re.findall(r"`glm4v-patched (train .*?)`", body)
    statements = re.findall(r"`([^`]*PeftModel[^`]*)`", body)
    assert len(statements) == 2
    answer = use.index("answer = ")
    script = 'import sys\nsys.modules["glm4v_patched"] = None  # cannot be imported\n'
    script += use[:answer] + "\n".join(statements) + "\n" + use[answer:]
    script += "learned = [n for n, p in model.named_parameters() if 'lora_B' in n and p.any()]\n"
    (tmp_path / "loads.py").write_text(f"{script}assert len(learned) == 2, learned\n")
    with LocalHub() as hub:
        repository = hub.add_repository(NAME, as_files(built))
        repository.refs["refs/tags/v0.1.0"] = repository.head
        repository.add_commit("refs/heads/main", {"config.json": b"no JSON"}, "not pinned")
        online = {"HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home")}
        environment = where(tmp_path) | online | hub.environment
        train = [sys.executable, "-m", "glm4v_patched.cli", *command.split()]
        train += ["trainer.max_steps=4", "--device", "cpu"]
        ended = run_in(tmp_path, train, environment)
        assert ended.status == 0, ended.output[-6000:]
        ended = run_in(tmp_path, [sys.executable, "loads.py"], environment)
        assert ended.status == 0, ended.output[-6000:]


def run_in(folder: Path, command: list[str], environment: dict[str, str]):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return run_with_limit(command, 900, environment)


def where(folder: Path) -> dict[str, str]:
    """The environment of a stranger, with caches of its own."""
    caches = {"HF_MODULES_CACHE": str(folder / "modules"), "HF_HUB_OFFLINE": "1"}
    return cpu_environment() | caches
