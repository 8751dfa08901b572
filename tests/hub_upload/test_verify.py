"""What verify finds, and what it leaves alone: each defect fails its own check and no other."""

import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hub_upload import verify as verifying
from hub_upload.build import build, read_source
from hub_upload.files import read_folder
from hub_upload.layout import INDEX, MANIFEST
from hub_upload.load_check import STEPS, LoadCheck
from hub_upload.verify import CHECKS, FAILED, PASSED, SKIPPED, Check, Report, verify
from tests.helpers.publishable import (
    NAME,
    UPSTREAM,
    amended,
    as_files,
    edit,
    failures,
    flip,
    real_files,
    shards_of,
    signed,
)

EOI = "transformer.vision.eoi"
SHARD = "model-00001-of-00002.safetensors"


def by_name(report: Report) -> dict[str, Check]:
    return {check.name: check for check in report.checks}


def test_failures_are_told_by_table_json_and_status(copy, run):
    (copy / "README.md").write_text("# another\n")
    status, output = run("verify", copy)
    rows = dict(line.split(maxsplit=1) for line in output.splitlines())
    assert status == 1 and rows["code"].startswith("passed")
    assert rows["files"].startswith("failed   README.md is not what the manifest says")
    status, output = run("verify", copy, "--json")
    answer = json.loads(output)
    assert status == 1 and not answer["passed"]
    assert [c["name"] for c in answer["checks"] if c["status"] == FAILED] == ["files"]


def test_a_target_that_is_nothing_is_said_so(run, built, hub):
    told = "neither a folder nor an id on the Hub: give DIR or org/name"
    for target in ("no/such/folder", "missing"):
        assert run("verify", target) == (1, f"hub_upload: {target} is {told}")
    status, told = run("verify", built, "--revision", "main")
    assert status == 1 and "has no revision main" in told
    status, told = run("verify", "our-org/nothing")
    assert status == 1 and "404" in told and "our-org/nothing" in told
    hub.add_repository(NAME)
    assert run("verify", NAME) == (1, f"hub_upload: {NAME} has no {MANIFEST}")


# Defects


def replaced(name: str, old: str, new: str):
    def plant(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))

    return plant


def added(name: str, content: bytes):
    def plant(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)

    return plant


def truncated(folder: Path) -> None:
    (folder / SHARD).write_bytes((folder / SHARD).read_bytes()[:-16])


def where(folder: Path) -> dict[str, str]:
    return json.loads((folder / INDEX).read_text())["weight_map"]


def rewritten(change: Callable[[dict], object]):
    """Change the tensors of the shard that holds the one named above."""

    def plant(folder: Path) -> None:
        path = folder / where(folder)[EOI]
        weights = load_file(path)
        change(weights)
        path.unlink()
        save_file(weights, path, metadata={"format": "pt"})

    return plant


def a_tensor_that_is_missing(folder: Path) -> None:
    rewritten(lambda weights: weights.pop(EOI))(folder)
    edit(folder / INDEX, lambda index: index["weight_map"].pop(EOI))


def an_index_that_names_the_wrong_shard(folder: Path) -> None:
    (other,) = {*shards_of(folder)} - {where(folder)[EOI]}
    edit(folder / INDEX, lambda index: index["weight_map"].update({EOI: other}))


UNSIGNED = [
    ("files code", replaced("visual.py", "import", "import ")),
    ("files code", added("custom_generate/generate.py", b"raise SystemExit\n")),
    ("files code", lambda folder: (folder / "sharding.py").unlink()),
    ("files weights", truncated),
    ("files weights", lambda folder: (folder / SHARD).unlink()),
    ("files config", lambda folder: (folder / "config.json").unlink()),
    ("files auto_map config", added("config.json", b"[")),
    ("files auto_map weights", added(INDEX, b"[")),
    ("files", amended("config.json", rope_ratio=2)),
    ("files", replaced("README.md", "## Use it", "## Use that")),
    ("files", lambda folder: (folder / "requirements.txt").unlink()),
    ("files", added("notes.txt", b"mine")),
    ("files", added("pytorch_model.bin", b"anything")),
    ("files", lambda f: save_file({"a": torch.ones(1)}, f / "extra.safetensors")),
]
SIGNED = [
    ("code", replaced("visual.py", '"""', '""" ')),
    ("auto_map", replaced("tokenizer_config.json", '"tokenization_c', '"a/b--tokenization_c')),
    ("auto_map", amended("generation_config.json", auto_map={"AutoConfig": "a.B"})),
    ("weights", truncated),
    ("weights", an_index_that_names_the_wrong_shard),
    ("config", amended("config.json", architectures=["ChatGLMModel"])),
    ("config", amended("config.json", boi_token_id=4)),
    ("config", amended("generation_config.json", eos_token_id=[500, 512])),
    ("config", amended("tokenizer_config.json", image_size=112)),
    ("parameters", amended("config.json", rmsnorm=False)),
    ("parameters", a_tensor_that_is_missing),
    ("parameters", rewritten(lambda weights: weights.update({EOI: weights[EOI].flatten()}))),
    ("answers", replaced("chat_template.jinja", "* images", "* 0")),
    ("answers", rewritten(lambda weights: weights[EOI].fill_(float("nan")))),
]
DEFECTS = [*UNSIGNED, *((names, signed(plant)) for names, plant in SIGNED)]
STAGES = [*CHECKS, "parameters", *STEPS]


@pytest.mark.parametrize(("names", "plant"), DEFECTS)
def test_a_defect_fails_its_own_checks_and_no_other(names, plant, copy, in_process):
    plant(copy)
    report = verify(str(copy))
    assert report.failures == names.split(), report.as_table()
    assert all(by_name(report)[name].detail for name in names.split())
    # The files are all looked at whatever else is wrong; what needs the code stops at a failure.
    after = STAGES[max(STAGES.index(names.split()[-1]) + 1, len(CHECKS)) :]
    assert {by_name(report)[stage].status for stage in after} <= {SKIPPED}


def test_a_changed_byte_of_any_file_is_found_that_of_weights_where_it_is_asked_for(copy):
    for name, content in as_files(copy).items():
        for at in (0, len(content) // 2, len(content) - 2):
            changed = bytearray(content)
            changed[at] ^= 1
            (copy / name).write_bytes(changed)
            if name == MANIFEST:
                with suppress(ValueError):  # no build of ours
                    assert failures(read_folder(copy))
            else:
                assert failures(read_folder(copy)), name
        (copy / name).write_bytes(content)
    flip(copy / shards_of(copy)[0])
    assert failures(read_folder(copy), check_weights=False) == []


def test_what_is_no_defect_passes(copy):
    """This clone's code under another version, and caches of git and of the client."""
    amended(MANIFEST, version="9.9.9")(copy)
    for name in (".git/config", ".cache/huggingface/download/x.bin", ".gitattributes"):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_text("")
    assert failures(read_folder(copy), check_weights=False) == []


ENDS = {
    "os._exit(9)": "the process ended with status 9 here: it said nothing",
    "raise MemoryError('no room')": "status 1 here: MemoryError: no room",
    "import time; time.sleep(60)": "stopped here, not done after 0.5 s",
    "sys.exit(str([k for k in os.environ if 'TOKEN' in k]))": "status 1 here: []",
}


@pytest.mark.parametrize("program", ENDS)
def test_a_process_that_ends_fails_the_check_it_was_at(program, built, monkeypatch, load_check):
    """It has told of one check before it ends; and it gets no token."""
    told = json.dumps([STEPS[0], PASSED, "-"])
    load_check(f"print({told!r}, flush=True)\n{program}")
    monkeypatch.setattr(verifying, "SECONDS", 0.5)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH"):
        monkeypatch.setenv(name, "hf_secret")
    report = verify(str(built))
    assert report.failures == [STEPS[1]] and ENDS[program] in by_name(report)[STEPS[1]].detail
    assert (
        by_name(report)[STEPS[0]].status == PASSED and by_name(report)[STEPS[2]].status == SKIPPED
    )


def test_a_class_of_another_is_not_taken_for_that_of_the_folder(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(AssertionError, match="AutoConfig loads a class of transformers.models"):
        LoadCheck(str(tmp_path)).load("AutoConfig")


# On the Hub


def test_a_repository_passes_every_check_at_the_commit_it_is_at(built, hub, in_process):
    """Also where its branch moves meanwhile. No weights are downloaded: a small model answers."""
    repository = hub.add_repository(NAME, as_files(built))
    head = repository.head
    move = partial(repository.add_commit, {"config.json": b"{}"})
    hub.fail("GET", "/resolve/", call=move)
    report = verify(NAME, "main")
    assert report.target.revision == head != repository.head
    assert {c.name: c.detail for c in report.checks if c.status != PASSED} == {}
    assert "2 + 2 layers of width 64 with random weights" in by_name(report)["loads"].detail
    read = [r.path for r in hub.requests if "/resolve/" in r.path]
    assert read and all(f"/resolve/{head}/" in path for path in read)


def test_weights_that_the_hub_stores_otherwise_are_found_without_reading_them(built, hub):
    files = as_files(built)
    files[SHARD] = files[SHARD][:-1] + bytes([files[SHARD][-1] ^ 1])
    repository = hub.add_repository(NAME, files)
    report = verify(NAME)
    assert report.failures == ["files"]
    assert f"{SHARD} is not what the manifest says: sha256 " in by_name(report)["files"].detail
    # Nor is a pickle downloaded.
    repository.add_commit({"training_args.bin": b"pickled"})
    assert "training_args.bin" in by_name(verify(NAME))["files"].detail
    assert not [r for r in hub.requests if r.sent > 100_001 and "safetensors" in r.path]
    assert not [r for r in hub.requests if "training_args" in r.path]


@pytest.mark.slow
def test_the_real_size_needs_no_byte_of_its_weights(hub, in_process, tmp_path):
    """To be built and verified; test_publish.py has the same of publish."""
    small, shards = real_files()
    commit = hub.add_repository(UPSTREAM, small | shards).head
    out = tmp_path / "out"
    manifest = build(read_source(f"{UPSTREAM}@{commit}"), out, NAME)
    assert len(manifest.weights) == 15 and shards_of(out) == []
    assert sum(weight.size for weight in shards.values()) > 27e9
    assert not any(name in request.path for name in shards for request in hub.requests)

    hub.add_repository(NAME, as_files(out) | shards)
    for where, weights, by in (
        (str(out), "left for a server-side copy", "13,906,320,896 parameters, compared with the i"),
        (NAME, "sha256 compared", "13,906,320,896 parameters, compared with the files of weights"),
    ):
        report = verify(where)
        assert not report.failures, report.as_table()
        assert weights in by_name(report)["weights"].detail
        assert by in by_name(report)["parameters"].detail
        assert "2 + 2 layers of width 64 with random weights" in by_name(report)["loads"].detail
