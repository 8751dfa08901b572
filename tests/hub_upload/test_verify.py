"""What verify finds, and what it leaves alone: each defect fails its own check and no other."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from glm4v_patched import __version__
from hub_upload import verify as verifying
from hub_upload.__main__ import main
from hub_upload.build import FILES, MANIFEST, REMOTE, build, fingerprint
from hub_upload.stranger import FAILED, PASSED, SKIPPED, Check, Checks, Skip
from hub_upload.verify import NAMES, Report, check_files, read_folder, verify
from tests.helpers.local_hub import LocalHub, Sparse
from tests.helpers.publishable import (
    INDEX,
    NAME,
    as_files,
    real_files,
    run_cli,
    shards_of,
)

UPSTREAM = "zai-org/glm-4v-9b"
CODE = sorted(path.name for path in REMOTE.glob("*.py") if path.name != "__init__.py")


@pytest.fixture
def copy(built, tmp_path) -> Path:
    """A build of one's own to damage."""
    return shutil.copytree(built, tmp_path / "copy")


def results(report: Report) -> dict[str, str]:
    return {check.name: check.status for check in report.checks}


def detail(report: Report, name: str) -> str:
    return next(check.detail for check in report.checks if check.name == name)


# A sound build


def test_a_build_passes_every_check(built):
    ended = run_cli("verify", built, "--weights", "--json", "-")
    assert ended.returncode == 0, ended.stdout
    answer = json.loads(ended.stdout)
    assert answer["passed"] is True and answer["target"] == str(built)
    assert {check["status"] for check in answer["checks"]} == {PASSED}
    assert set(NAMES) < {check["name"] for check in answer["checks"]}
    details = {check["name"]: check["detail"] for check in answer["checks"]}
    assert details["training step"].endswith("2 of the vision tower; real weights")
    assert "2 of the language model" in details["training step"]
    assert details["generation"].endswith("real weights")


@pytest.mark.slow
def test_failures_are_told_by_table_file_and_status(copy, tmp_path):
    (copy / "README.md").write_text("# no metadata\n")
    ended = run_cli("verify", copy, "--json", tmp_path / "checks.json")
    assert ended.returncode == 1
    rows = dict(line.split(maxsplit=1) for line in ended.stdout.splitlines())
    assert rows["card"].startswith("failed   README.md does not begin with its metadata")
    assert rows["manifest"].startswith("passed")
    answer = json.loads((tmp_path / "checks.json").read_text())
    assert [c["name"] for c in answer["checks"] if c["status"] == FAILED] == ["card"]
    assert not answer["passed"]


@pytest.mark.parametrize("target", ["no/such/folder", "missing"])
def test_a_target_that_is_nothing_is_said_so(target, capsys):
    assert main(["verify", target]) == 1
    told = capsys.readouterr().err
    assert "neither a folder nor an id on the Hub: give DIR or org/name" in told


def test_a_folder_has_no_revision(built):
    with pytest.raises(ValueError, match="has no revision main"):
        verify(str(built), "main")


# Defects


def amend(path: Path, **fields) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def sign(folder: Path) -> None:
    """Make the manifest agree, as it would if the build itself had gone wrong."""
    manifest = json.loads((folder / MANIFEST).read_text())
    for name in manifest["files"]:
        manifest["files"][name] = fingerprint(folder / name)["sha256"]
    manifest["weights"]["files"] = {name: fingerprint(folder / name) for name in shards_of(folder)}
    (folder / MANIFEST).write_text(json.dumps(manifest))


EOI = "transformer.vision.eoi"


def rewrite(folder: Path, change: Callable[[dict], None]) -> None:
    """Change the tensors of the shard that holds the one named above, and sign."""
    path = folder / json.loads((folder / INDEX).read_text())["weight_map"][EOI]
    weights = load_file(path)
    change(weights)
    path.unlink()
    save_file(weights, path, metadata={"format": "pt"})
    sign(folder)


def a_changed_byte_of_code(folder):
    replace(folder / "visual.py", "import", "import ")


def a_changed_byte_of_code_that_the_manifest_agrees_with(folder):
    replace(folder / "visual.py", '"""', '""" ')
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["code"]["visual.py"] = fingerprint(folder / "visual.py")["sha256"]
    (folder / MANIFEST).write_text(json.dumps(manifest))


def code_that_nobody_listed(folder):
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text("raise SystemExit\n")


def a_missing_sibling(folder):
    (folder / "sharding.py").unlink()


def a_foreign_auto_map(folder):
    replace(folder / "tokenizer_config.json", '"tokenization_chatglm.', '"a/b--tokenization.')
    sign(folder)


def an_auto_map_where_none_belongs(folder):
    amend(folder / "generation_config.json", auto_map={"AutoConfig": "visual.Config"})
    sign(folder)


def a_pickle_by_name(folder):
    (folder / "pytorch_model.bin").write_bytes(b"anything")


def a_pickle_by_its_first_bytes(folder):
    torch.save({}, folder / "weights.dat")


def a_truncated_shard(folder):
    path = folder / shards_of(folder)[0]
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[:-16])
    sign(folder)


def a_shard_that_was_cut_after_the_build(folder):
    path = folder / shards_of(folder)[0]
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[:-16])


def a_missing_shard(folder):
    (folder / shards_of(folder)[0]).unlink()


def a_shard_that_nobody_listed(folder):
    save_file({"a": torch.ones(1)}, folder / "extra.safetensors")


def a_tensor_of_another_shape(folder):
    def change(weights):
        weights[EOI] = weights[EOI].flatten()

    rewrite(folder, change)


def a_tensor_that_is_missing(folder):
    rewrite(folder, lambda weights: weights.pop(EOI))
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"][EOI]
    index["metadata"]["total_size"] -= 4 * 64  # fp32, as wide as the model
    (folder / INDEX).write_text(json.dumps(index))
    sign(folder)


def a_tensor_that_is_not_a_number(folder):
    rewrite(folder, lambda weights: weights[EOI].fill_(float("nan")))


def an_index_that_names_the_wrong_shard(folder):
    index = json.loads((folder / INDEX).read_text())
    first, second = shards_of(folder)
    index["weight_map"][EOI] = second if index["weight_map"][EOI] == first else first
    (folder / INDEX).write_text(json.dumps(index))
    sign(folder)


def an_index_with_a_wrong_size(folder):
    index = json.loads((folder / INDEX).read_text())
    index["metadata"]["total_size"] += 1
    (folder / INDEX).write_text(json.dumps(index))
    sign(folder)


def card_metadata_that_is_no_yaml(folder):
    replace(folder / "README.md", "license: other", "license: [other")


def a_card_without_base_model(folder):
    replace(folder / "README.md", "base_model: zai-org/glm-4v-9b\n", "")


def a_card_with_a_licence_link_the_hub_refuses(folder):
    replace(folder / "README.md", "license_link: https://huggingface.co/", "license_link: ./")


def a_card_with_a_tag_that_is_no_word(folder):
    replace(folder / "README.md", "- custom_code\n", "- {custom: code}\n")


def a_card_that_pins_another_version(folder):
    text = (folder / "README.md").read_text()
    (folder / "README.md").write_text(text.replace(f'"v{__version__}"', '"v0.0.7"'))


def a_card_that_says_unchanged_of_weights_of_a_folder(folder):
    replace(folder / "README.md", "## Use it", "Nothing was finetuned.\n\n## Use it")


def a_card_of_a_fine_tune_that_says_unchanged(folder):
    amend(folder / MANIFEST, fine_tune={"base": UPSTREAM, "trained": "all"})
    replace(folder / "README.md", "## Use it", f"The weights of {UPSTREAM}, unchanged.\n## Use it")


def a_card_of_a_fine_tune_that_names_another_base(folder):
    amend(folder / MANIFEST, fine_tune={"base": "our-org/base", "trained": "all"})


def a_card_that_was_not_filled_in(folder):
    replace(folder / "README.md", "## Use it", "## Use {{ name }}")


def another_image_size(folder):
    amend(folder / "tokenizer_config.json", image_size=112)
    sign(folder)


def another_architecture(folder):
    amend(folder / "config.json", architectures=["ChatGLMModel"])
    sign(folder)


def other_token_ids(folder):
    amend(folder / "config.json", boi_token_id=4)
    sign(folder)


def an_end_outside_of_the_vocabulary(folder):
    amend(folder / "generation_config.json", eos_token_id=[500, 512])
    sign(folder)


def no_manifest(folder):
    (folder / MANIFEST).unlink()


def a_manifest_without_revision(folder):
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["upstream_revision"]
    (folder / MANIFEST).write_text(json.dumps(manifest))


def a_config_changed_after_the_build(folder):
    amend(folder / "config.json", rope_ratio=2)


def a_file_that_is_gone(folder):
    (folder / "requirements.txt").unlink()


def a_file_that_nobody_listed(folder):
    (folder / "notes.txt").write_text("mine")


def a_config_that_the_code_refuses(folder):
    amend(folder / "config.json", rmsnorm=False)
    sign(folder)


def a_chat_template_that_loses_images(folder):
    replace(folder / "chat_template.jinja", "* images", "* 0")
    sign(folder)


DEFECTS = {
    "manifest": [no_manifest, a_manifest_without_revision],
    "code": [
        a_changed_byte_of_code,
        a_changed_byte_of_code_that_the_manifest_agrees_with,
        code_that_nobody_listed,
    ],
    "loader files": [a_missing_sibling],
    "auto_map": [a_foreign_auto_map, an_auto_map_where_none_belongs],
    "other files": [
        a_config_changed_after_the_build,
        a_file_that_is_gone,
        a_file_that_nobody_listed,
    ],
    "nothing pickled": [a_pickle_by_name, a_pickle_by_its_first_bytes],
    "weight files": [
        a_truncated_shard,
        a_shard_that_was_cut_after_the_build,
        a_missing_shard,
        a_shard_that_nobody_listed,
    ],
    "index": [an_index_that_names_the_wrong_shard, an_index_with_a_wrong_size],
    "architecture": [another_architecture],
    "token ids": [other_token_ids, an_end_outside_of_the_vocabulary],
    "image size": [another_image_size],
    "card": [
        card_metadata_that_is_no_yaml,
        a_card_without_base_model,
        a_card_with_a_licence_link_the_hub_refuses,
        a_card_with_a_tag_that_is_no_word,
        a_card_that_pins_another_version,
        a_card_that_was_not_filled_in,
        a_card_that_says_unchanged_of_weights_of_a_folder,
        a_card_of_a_fine_tune_that_says_unchanged,
        a_card_of_a_fine_tune_that_names_another_base,
    ],
    "config loads": [a_config_that_the_code_refuses],
    "processor loads": [a_chat_template_that_loses_images],
    "parameter names": [a_tensor_that_is_missing],
    "parameter shapes": [a_tensor_of_another_shape],
    "weights load": [a_tensor_that_is_not_a_number],
}
# Those that are found by running the code take seconds each: one of them runs always.
QUICK = {a_tensor_of_another_shape}
PLANTED = [
    pytest.param(
        name,
        plant,
        id=plant.__name__,
        marks=pytest.mark.slow if name in NAMES and plant not in QUICK else (),
    )
    for name, plants in DEFECTS.items()
    for plant in plants
]


@pytest.mark.parametrize(("name", "plant"), PLANTED)
def test_a_defect_fails_its_own_check_and_no_other(name, plant, copy):
    plant(copy)
    report = verify(str(copy))
    assert report.failures == [name], report.as_table()
    assert detail(report, name)
    # The files are all looked at whatever else is wrong.
    files_only = set(results(report)) - set(NAMES)
    ran = {check for check in files_only if results(report)[check] == PASSED}
    assert len(ran) >= 6, report.as_table()


@pytest.mark.parametrize("content", [None, "["], ids=["missing", "no JSON"])
def test_a_config_that_cannot_be_read_is_a_failed_check(content, copy):
    (copy / "config.json").unlink()
    (copy / INDEX).write_text("[")
    (copy / MANIFEST).unlink()
    if content:
        (copy / "config.json").write_text(content)
    report = verify(str(copy))
    assert "config" in report.failures and "manifest" in report.failures


def test_a_changed_byte_of_weights_is_found_where_it_is_asked_for(copy):
    flip(copy / shards_of(copy)[0])
    assert failures_of_files(copy) == []
    assert failures_of_files(copy, check_weights=True) == ["sha256 of weights"]


def flip(path: Path) -> None:
    """Change the last byte, and not in the file that it may be a link to."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.unlink()
    path.write_bytes(content)


def failures_of_files(folder: Path, **options) -> list[str]:
    """What fails of all that runs nothing."""
    checks = check_files(read_folder(folder), **options)
    return [name for name in checks.done if checks.failed(name)]


LISTED = (*FILES, *CODE, MANIFEST)


@pytest.mark.parametrize("name", sorted(LISTED))
def test_a_changed_byte_of_any_file_is_found(name, copy):
    """Of all that a build writes; the card, which people edit, is checked for what it says."""
    content = (copy / name).read_bytes()
    for at in (0, len(content) // 2, len(content) - 2):
        changed = bytearray(content)
        changed[at] ^= 1
        (copy / name).write_bytes(changed)
        assert failures_of_files(copy, check_weights=True) or name == "README.md", at
    (copy / name).unlink()
    assert failures_of_files(copy)


def test_code_that_is_not_the_manifests_is_never_run(copy, tmp_path):
    trace = tmp_path / "it ran"
    replace(copy / "sharding.py", '"""', f'open({str(trace)!r}, "w").close()\n"""')
    report = verify(str(copy))
    assert report.failures == ["code"] and not trace.exists()
    assert {results(report)[name] for name in NAMES} == {SKIPPED}
    assert "nothing is run because of: code" in detail(report, "config loads")


def of_version(folder: Path, version: str) -> None:
    amend(folder / MANIFEST, version=version)
    replace(folder / "README.md", f'"v{__version__}"', f'"v{version}"')


def test_this_clone_s_code_is_that_under_whatever_version(copy):
    of_version(copy, "9.9.9")
    assert failures_of_files(copy) == []


def test_two_defects_fail_two_checks(copy):
    another_architecture(copy)
    card_metadata_that_is_no_yaml(copy)
    a_pickle_by_name(copy)
    assert sorted(verify(str(copy)).failures) == ["architecture", "card", "nothing pickled"]


def test_caches_of_git_and_of_the_client_are_no_part_of_a_build(copy):
    for name in (".git/config", ".cache/huggingface/download/x.bin", ".gitattributes"):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_text("")
    assert failures_of_files(copy) == []


# The process


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import os; os._exit(9)", "the process ended with status 9 here: it said nothing"),
        ("raise MemoryError('no room')", "status 1 here: MemoryError: no room"),
        ("import time; time.sleep(60)", "status None here: not done after 1 s"),
    ],
)
def test_a_process_that_ends_fails_the_check_it_was_at(
    program, message, built, monkeypatch, tmp_path
):
    """It has told of one check before it ends."""
    told = json.dumps({"name": NAMES[0], "status": PASSED, "detail": "-"})
    script = tmp_path / "script.py"
    script.write_text(
        "import json, sys\n"
        "with open(json.load(open(sys.argv[1]))['results'], 'w') as file:\n"
        f"    file.write({told!r})\n{program}\n"
    )
    monkeypatch.setattr(verifying, "STRANGER", script)
    monkeypatch.setattr(verifying, "SECONDS", 1)
    report = verify(str(built))
    assert report.failures == [NAMES[1]]
    assert message in detail(report, NAMES[1])
    assert [results(report)[name] for name in NAMES[2:]] == [SKIPPED] * (len(NAMES) - 2)


def test_the_process_gets_no_token_for_a_folder(built, monkeypatch, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nsys.exit(str([k for k in os.environ if 'TOKEN' in k]))")
    monkeypatch.setattr(verifying, "STRANGER", script)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    report = verify(str(built))
    assert detail(report, NAMES[0]).endswith("['TOKENIZERS_PARALLELISM']")


def test_a_check_that_crashes_has_failed_and_those_that_need_it_are_skipped():
    def crash():
        raise KeyError("field")

    def nothing():
        raise Skip("nothing to see")

    heard = []
    checks = Checks({"second": ["first"], "third": ["second"], "fifth": ["fourth"]}, heard.append)
    checks.run("first", crash)
    checks.run("second", lambda: "fine")
    checks.run("third", lambda: "fine")
    checks.run("fourth", nothing)
    checks.run("fifth", lambda: "fine")
    assert list(checks.done.values()) == heard
    assert heard == [
        Check("first", FAILED, "KeyError: 'field'"),
        Check("second", SKIPPED, "cannot be checked without: first"),
        Check("third", SKIPPED, "cannot be checked without: second"),
        Check("fourth", SKIPPED, "nothing to see"),
        Check("fifth", PASSED, "fine"),
    ]


# On the Hub


@pytest.fixture
def nothing_runs(monkeypatch, tmp_path):
    """The process that would run the published code says that all is well."""
    script = tmp_path / "script.py"
    checks = [{"name": name, "status": PASSED, "detail": "-"} for name in NAMES]
    told = "".join(json.dumps(check) + "\n" for check in checks)
    script.write_text(
        f"import json, sys\nopen(json.load(open(sys.argv[1]))['results'], 'w').write({told!r})\n"
    )
    monkeypatch.setattr(verifying, "STRANGER", script)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with LocalHub() as hub:
        hub.redirect_client(monkeypatch)
        for name, value in hub.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        yield hub


def test_a_repository_passes_every_check_at_the_commit_it_is_at(built, hub):
    repository = hub.add_repository(NAME, as_files(built))
    report = verify(NAME, "main")
    assert report.revision == repository.head
    assert {c.name: c.detail for c in report.checks if c.status != PASSED} == {}, report.as_table()
    assert "real weights" in detail(report, "training step")
    assert hub.token not in report.as_table() + report.as_json()
    read = [r.path for r in hub.requests if "/resolve/" in r.path]
    elsewhere = [path for path in read if f"/resolve/{repository.head}/" not in path]
    if transformers.__version__ < "5":
        # AutoProcessor of 4.57 forgets the revision where it looks for the name of the class.
        elsewhere = [path for path in elsewhere if not path.endswith("_config.json")]
    assert elsewhere == []


def test_a_branch_that_moves_meanwhile_changes_nothing(built, hub, nothing_runs):
    repository = hub.add_repository(NAME, as_files(built))
    head = repository.head

    def move():
        repository.add_commit("refs/heads/main", {"config.json": b"{}"}, "moved")

    hub.fail("GET", "/resolve/", after=3, call=move)
    report = verify(NAME, "main")
    assert report.passed and report.revision == head != repository.head, report.as_table()


def test_weights_that_the_hub_stores_otherwise_are_found_without_reading_them(built, hub):
    files = as_files(built)
    name = shards_of(built)[0]
    files[name] = files[name][:-1] + bytes([files[name][-1] ^ 1])
    hub.add_repository(NAME, files)
    report = verify(NAME)
    assert report.failures == ["weight files"] and "the Hub has sha256" in detail(
        report, "weight files"
    )
    assert not [r for r in hub.requests if r.sent > 100_001 and "safetensors" in r.path]


def test_a_pickle_on_the_hub_is_found_and_not_downloaded(built, hub):
    hub.add_repository(NAME, as_files(built) | {"training_args.bin": b"pickled"})
    assert verify(NAME).failures == ["nothing pickled"]
    assert not [r for r in hub.requests if "training_args" in r.path]


@pytest.mark.slow
def test_a_repository_of_code_only_is_verified_as_such_and_only_as_such(built, hub):
    files = {n: c for n, c in as_files(built).items() if ".safetensors" not in n}
    hub.add_repository(NAME, files)
    report = verify(NAME, code_only=True)
    assert report.passed, report.as_table()
    assert "random weights" in detail(report, "training step")
    assert set(verify(NAME).failures) == {"weight files", "other files"}
    hub.add_repository(NAME, as_files(built))
    assert verify(NAME, code_only=True).failures == ["weight files"]


@pytest.mark.parametrize("name", ["model.safetensors", "sub/x.safetensors"])
def test_a_repository_of_code_only_holds_no_weights_at_all(built, hub, name):
    files = {n: c for n, c in as_files(built).items() if ".safetensors" not in n}
    hub.add_repository(NAME, files | {name: b"weights of somebody"})
    assert "weight files" in verify(NAME, code_only=True).failures


def test_a_repository_that_does_not_exist_is_said_so(hub, capsys):
    assert main(["verify", "our-org/nothing"]) == 1
    told = capsys.readouterr().err
    assert "it is not there, or not" in told
    assert "Traceback" not in told and hub.token not in told


# The real size


@pytest.mark.slow
def test_the_real_size_is_verified_without_a_byte_of_its_weights(hub, tmp_path):
    small, shards = real_files()
    sparse = {
        name: Sparse(size, f"{number:064x}", head + bytes(100_001))
        for number, (name, (head, size)) in enumerate(shards.items())
    }
    commit = hub.add_repository(UPSTREAM, small | sparse).head
    out = tmp_path / "out"
    manifest = build(f"{UPSTREAM}@{commit}", out, NAME)
    assert len(manifest["weights"]["files"]) == 15 and shards_of(out) == []

    report = verify(str(out))
    assert report.passed, report.as_table()
    assert "left for a server-side copy" in detail(report, "weight files")
    assert "13,906,320,896 parameters" in detail(report, "parameter names")
    assert "27,812,641,856 bytes are the parameters'" in detail(report, "parameter shapes")
    assert "random weights, 2 + 2 layers" in detail(report, "training step")

    hub.add_repository(NAME, as_files(out) | sparse)
    report = verify(NAME)
    assert report.passed, report.as_table()
    assert "shapes, read from the files of weights" in detail(report, "parameter shapes")

    index = json.loads((out / INDEX).read_text())
    index["metadata"]["total_size"] -= 2
    (out / INDEX).write_text(json.dumps(index))
    manifest["files"][INDEX] = fingerprint(out / INDEX)["sha256"]
    (out / MANIFEST).write_text(json.dumps(manifest))
    assert verify(str(out)).failures == ["parameter shapes"]
