"""What verify finds, and what it leaves alone: each defect fails its own check and no other."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from glm4v_patched import __version__
from hub_upload import verify as verifying
from hub_upload.build import build, read_source
from hub_upload.checks import CHECKS, Target, check_files
from hub_upload.files import read_folder
from hub_upload.layout import INDEX, MANIFEST
from hub_upload.load_check import FAILED, PASSED, SKIPPED, STEPS, Check, Skip, run_check
from hub_upload.verify import Report, verify
from tests.helpers.publishable import (
    NAME,
    UPSTREAM,
    as_files,
    edit,
    flip,
    real_files,
    shards_of,
    sign,
)

EOI = "transformer.vision.eoi"


def results(report: Report) -> dict[str, str]:
    return {check.name: check.status for check in report.checks}


def detail(report: Report, name: str) -> str:
    return next(check.detail for check in report.checks if check.name == name)


def failures_of_files(folder: Path, check_weights: bool = False) -> list[str]:
    """What fails of all that runs nothing."""
    target = Target(str(folder), read_folder(folder), check_weights=check_weights)
    return [check.name for check in check_files(target) if check.status == FAILED]


def test_failures_are_told_by_table_file_and_status(copy, run, tmp_path):
    (copy / "README.md").write_text("# no metadata\n")
    status, output = run("verify", copy, "--json", tmp_path / "checks.json")
    rows = dict(line.split(maxsplit=1) for line in output.splitlines())
    assert status == 1 and rows["manifest"].startswith("passed")
    assert rows["card"].startswith("failed   README.md does not begin with its metadata")
    answer = json.loads((tmp_path / "checks.json").read_text())
    assert [c["name"] for c in answer["checks"] if c["status"] == FAILED] == ["card"]
    assert not answer["passed"]


@pytest.mark.parametrize("target", ["no/such/folder", "missing"])
def test_a_target_that_is_nothing_is_said_so(target, run):
    status, told = run("verify", target)
    assert status == 1 and "neither a folder nor an id on the Hub: give DIR or org/name" in told


def test_a_folder_has_no_revision(built):
    with pytest.raises(ValueError, match="has no revision main"):
        verify(str(built), "main")


# Defects


def replaced(name: str, old: str, new: str, signed: bool = False):
    def plant(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))
        if signed:
            sign(folder)

    return plant


def amended(name: str, signed: bool = True, **values):
    def plant(folder: Path) -> None:
        edit(folder / name, lambda config: config.update(values))
        if signed:
            sign(folder)

    return plant


def removed(name: str | None):
    return lambda folder: (folder / (name or shards_of(folder)[0])).unlink()


def added(name: str, content: bytes):
    def plant(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)

    return plant


def truncated(signed: bool):
    def plant(folder: Path) -> None:
        path = folder / shards_of(folder)[0]
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content[:-16])
        if signed:
            sign(folder)

    return plant


def rewritten(change: Callable[[dict], object]):
    """Change the tensors of the shard that holds the one named above."""

    def plant(folder: Path) -> None:
        path = folder / json.loads((folder / INDEX).read_text())["weight_map"][EOI]
        weights = load_file(path)
        change(weights)
        path.unlink()
        save_file(weights, path, metadata={"format": "pt"})
        sign(folder)

    return plant


def a_tensor_that_is_missing(folder: Path) -> None:
    def forget(index: dict) -> None:
        del index["weight_map"][EOI]
        index["metadata"]["total_size"] -= 4 * 64  # fp32, as wide as the model

    rewritten(lambda weights: weights.pop(EOI))(folder)
    edit(folder / INDEX, forget)
    sign(folder)


def an_index_that_names_the_wrong_shard(folder: Path) -> None:
    first, second = shards_of(folder)
    held = json.loads((folder / INDEX).read_text())["weight_map"][EOI]
    other = {EOI: second if held == first else first}
    edit(folder / INDEX, lambda index: index["weight_map"].update(other))
    sign(folder)


def an_index_with_a_wrong_size(folder: Path) -> None:
    edit(folder / INDEX, lambda index: index["metadata"].update(total_size=1))
    sign(folder)


def a_fine_tune(base: str, said: str = ""):
    def plant(folder: Path) -> None:
        fine_tune = {"base": base, "trained": "all"}
        amended(MANIFEST, signed=False, fine_tune=fine_tune)(folder)
        replaced("README.md", "## Use it", f"{said}\n## Use it")(folder)

    return plant


BASE, CARD = f"base_model: {UPSTREAM}\n", "README.md"
DEFECTS = {
    "manifest": {
        "none": removed(MANIFEST),
        "without a revision": lambda f: edit(f / MANIFEST, lambda m: m.pop("upstream_revision")),
    },
    "code": {
        "a byte": replaced("visual.py", "import", "import "),
        "a byte that the manifest agrees with": replaced("visual.py", '"""', '""" ', signed=True),
        "unlisted": added("custom_generate/generate.py", b"raise SystemExit\n"),
        "a missing sibling": removed("sharding.py"),
    },
    "auto_map": {
        "foreign": replaced(
            "tokenizer_config.json", '"tokenization_c', '"a/b--tokenization_c', True
        ),
        "where none belongs": amended("generation_config.json", auto_map={"AutoConfig": "a.B"}),
    },
    "other files": {
        "changed after the build": amended("config.json", signed=False, rope_ratio=2),
        "gone": removed("requirements.txt"),
        "unlisted": added("notes.txt", b"mine"),
    },
    "nothing pickled": {
        "by name": added("pytorch_model.bin", b"anything"),
        "by first bytes": lambda folder: torch.save({}, folder / "weights.dat"),
    },
    "weight files": {
        "truncated": truncated(signed=True),
        "cut after the build": truncated(signed=False),
        "missing": removed(None),
        "unlisted": lambda folder: save_file({"a": torch.ones(1)}, folder / "extra.safetensors"),
    },
    "index": {
        "wrong shard": an_index_that_names_the_wrong_shard,
        "wrong size": an_index_with_a_wrong_size,
    },
    "config": {
        "another architecture": amended("config.json", architectures=["ChatGLMModel"]),
        "other ids": amended("config.json", boi_token_id=4),
        "an end outside": amended("generation_config.json", eos_token_id=[500, 512]),
        "another image size": amended("tokenizer_config.json", image_size=112),
    },
    "card": {
        "no yaml": replaced(CARD, "license: other", "license: [other"),
        "no base": replaced(CARD, BASE, ""),
        "another version": replaced(CARD, f'"v{__version__}"', '"v0.0.7"'),
        "not filled in": replaced(CARD, "## Use it", "## Use {{ name }}"),
        "unchanged, of a folder": replaced(CARD, "## Use it", "Nothing was finetuned.\n## Use it"),
        "unchanged, of a fine-tune": a_fine_tune(
            UPSTREAM, f"The weights of {UPSTREAM}, unchanged."
        ),
        "another base": a_fine_tune("our-org/base"),
    },
    "config loads": {"refused by the code": amended("config.json", rmsnorm=False)},
    "processor loads": {
        "a template that loses images": replaced("chat_template.jinja", "* images", "* 0", True)
    },
    "parameters": {
        "a missing tensor": a_tensor_that_is_missing,
        "another shape": rewritten(lambda weights: weights.update({EOI: weights[EOI].flatten()})),
    },
    "weights load": {"not a number": rewritten(lambda weights: weights[EOI].fill_(float("nan")))},
}
PLANTED = [
    pytest.param(name, plant, id=f"{name}: {title}")
    for name, plants in DEFECTS.items()
    for title, plant in plants.items()
]


@pytest.mark.parametrize(("name", "plant"), PLANTED)
def test_a_defect_fails_its_own_check_and_no_other(name, plant, copy, in_process):
    plant(copy)
    report = verify(str(copy))
    assert report.failures == [name], report.as_table()
    assert detail(report, name)
    # The files are all looked at whatever else is wrong; what runs stops at the first failure.
    assert len([c for c in CHECKS if results(report)[c] == PASSED]) >= 3, report.as_table()
    after = STEPS[STEPS.index(name) + 1 :] if name in STEPS else STEPS
    assert {results(report)[step] for step in after} <= {SKIPPED}


@pytest.mark.parametrize("content", [None, "["], ids=["missing", "no JSON"])
def test_a_config_that_cannot_be_read_is_a_failed_check(content, copy):
    for name in ("config.json", MANIFEST):
        (copy / name).unlink()
    (copy / INDEX).write_text("[")
    if content:
        (copy / "config.json").write_text(content)
    assert {"config", "manifest"} <= {*failures_of_files(copy)}


def test_a_changed_byte_of_any_file_is_found_that_of_weights_where_it_is_asked_for(copy):
    for name, content in as_files(copy).items():
        if name == "README.md":  # people edit it
            continue
        for at in (0, len(content) // 2, len(content) - 2):
            changed = bytearray(content)
            changed[at] ^= 1
            (copy / name).write_bytes(changed)
            assert failures_of_files(copy, check_weights=True), name
        (copy / name).write_bytes(content)
    flip(copy / shards_of(copy)[0])
    assert failures_of_files(copy) == []


def test_this_clone_s_code_is_that_under_whatever_version(copy):
    amended(MANIFEST, signed=False, version="9.9.9")(copy)
    replaced(CARD, f'"v{__version__}"', '"v9.9.9"')(copy)
    assert failures_of_files(copy) == []


def test_caches_of_git_and_of_the_client_are_no_part_of_a_build(copy):
    for name in (".git/config", ".cache/huggingface/download/x.bin", ".gitattributes"):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_text("")
    assert failures_of_files(copy) == []


# The process

ENDS = {
    "os._exit(9)": "the process ended with status 9 here: it said nothing",
    "raise MemoryError('no room')": "status 1 here: MemoryError: no room",
    "import time; time.sleep(60)": "stopped here, not done after 0.5 s",
}


@pytest.mark.parametrize("program", ENDS)
def test_a_process_that_ends_fails_the_check_it_was_at(program, built, monkeypatch, load_check):
    """It has told of one check before it ends."""
    told = json.dumps([STEPS[0], PASSED, "-"])
    load_check(f"with open(request['results'], 'w') as f:\n    f.write({told!r})\n{program}")
    monkeypatch.setattr(verifying, "SECONDS", 0.5)
    report = verify(str(built))
    assert report.failures == [STEPS[1]] and ENDS[program] in detail(report, STEPS[1])
    assert [results(report)[name] for name in STEPS[2:]] == [SKIPPED] * (len(STEPS) - 2)


def test_the_process_gets_no_token_for_a_folder(built, monkeypatch, load_check):
    load_check("sys.exit(str([k for k in os.environ if 'TOKEN' in k]))")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert detail(verify(str(built)), STEPS[0]).endswith("['TOKENIZERS_PARALLELISM']")


def test_a_check_that_crashes_has_failed():
    def crash():
        raise KeyError("field")

    def nothing():
        raise Skip("nothing to see")

    assert run_check("first", crash) == Check("first", FAILED, "KeyError: 'field'")
    assert run_check("second", nothing) == Check("second", SKIPPED, "nothing to see")
    assert run_check("third", lambda: "fine") == Check("third", PASSED, "fine")


# On the Hub


def test_a_repository_passes_every_check_at_the_commit_it_is_at(built, hub, nothing_runs):
    """Also where its branch moves meanwhile."""
    repository = hub.add_repository(NAME, as_files(built))
    head = repository.head
    move = {"config.json": b"{}"}
    hub.fail("GET", "/tree/", call=lambda: repository.add_commit("refs/heads/main", move, "moved"))
    report = verify(NAME, "main")
    assert report.target.revision == head != repository.head
    assert {c.name: c.detail for c in report.checks if c.status != PASSED} == {}
    read = [r.path for r in hub.requests if "/resolve/" in r.path]
    assert read and all(f"/resolve/{head}/" in path for path in read)


def test_weights_that_the_hub_stores_otherwise_are_found_without_reading_them(built, hub):
    files = as_files(built)
    name = shards_of(built)[0]
    files[name] = files[name][:-1] + bytes([files[name][-1] ^ 1])
    hub.add_repository(NAME, files | {"training_args.bin": b"pickled"})
    report = verify(NAME)
    assert report.failures == ["nothing pickled", "weight files"]
    assert f"{name}: sha256 " in detail(report, "weight files")
    # Nor is a pickle downloaded.
    assert not [r for r in hub.requests if r.sent > 100_001 and "safetensors" in r.path]
    assert not [r for r in hub.requests if "training_args" in r.path]


def test_a_repository_of_code_only_is_verified_as_such_and_only_as_such(built, hub, in_process):
    files = {n: c for n, c in as_files(built).items() if ".safetensors" not in n}
    hub.add_repository(NAME, files)
    report = verify(NAME, code_only=True)
    assert not report.failures, report.as_table()
    assert "random weights" in detail(report, "training step")
    assert set(verify(NAME).failures) == {"weight files", "other files"}
    for name in ("model.safetensors", "sub/x.safetensors"):
        hub.add_repository(NAME, files | {name: b"weights of somebody"})
        assert "weight files" in verify(NAME, code_only=True).failures


def test_a_repository_that_does_not_exist_is_said_so(hub, run):
    status, told = run("verify", "our-org/nothing")
    assert status == 1 and "404" in told and "our-org/nothing" in told


@pytest.mark.slow
def test_the_real_size_is_published_and_verified_without_a_byte_of_its_weights(
    hub, run, in_process, tmp_path
):
    small, shards = real_files()
    commit = hub.add_repository(UPSTREAM, small | shards).head
    out = tmp_path / "out"
    manifest = build(read_source(f"{UPSTREAM}@{commit}"), out, NAME)
    assert len(manifest.weights.files) == 15 and shards_of(out) == []

    report = verify(str(out))
    assert not report.failures, report.as_table()
    assert "left for a server-side copy" in detail(report, "weight files")
    assert "13,906,320,896 parameters, compared with the index" in detail(report, "parameters")
    assert "random weights, 2 + 2 layers" in detail(report, "training step")

    begin = len(hub.requests)
    assert run("publish", out, "--repo", NAME, "--push")[0] == 0
    received, sent = (
        sum(getattr(r, w) for r in hub.requests[begin:]) for w in ("received", "sent")
    )
    print(f"the Hub received {received:,} and sent {sent:,} bytes")
    published = hub.repositories[NAME].files
    assert all(published[name].content is weight for name, weight in shards.items())
    assert sum(weight.size for weight in shards.values()) > 27e9
    # Code and tokenizer.json.
    assert received < 6 * sum(len(content) for content in small.values()) + 5e6
    assert not any(name in request.path for name in shards for request in hub.requests)

    report = verify(NAME)
    assert not report.failures, report.as_table()
    assert "compared with the files of weights" in detail(report, "parameters")
