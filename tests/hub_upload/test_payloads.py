"""What a stranger could put into a repository or a folder, in every kind of file: it never runs.

Each payload writes a file when it runs. Manifests agree with what was planted, and name another
version, as somebody would write them who wants to be let in.
"""

import hashlib
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from glm4v_patched import __version__
from hub_upload import verify as verifying
from hub_upload.__main__ import main
from hub_upload.build import MANIFEST
from hub_upload.publish import PublishError, read_build
from hub_upload.stranger import FAILED, NAMES, SKIPPED
from hub_upload.verify import verify
from tests.helpers.local_hub import LocalHub
from tests.helpers.publishable import INDEX, NAME, as_files, shards_of

EVIL = "evil-org/evil"
TOKEN = "hf_thetokenofwhoeververifies"


@pytest.fixture
def marker(tmp_path) -> Path:
    return tmp_path / "it ran"


@pytest.fixture
def copy(built, tmp_path) -> Path:
    return shutil.copytree(built, tmp_path / "copy")


@pytest.fixture
def hub(monkeypatch, tmp_path, marker):
    """A Hub that also has a stranger's repository, whose code is a payload."""
    with LocalHub() as hub:
        hub.redirect_client(monkeypatch)
        for name, value in hub.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        code = code_that_writes(marker)
        files = {f"{n.removesuffix('.py')}.py": code.encode() for n in ("evil", "modeling_chatglm")}
        hub.add_repository(EVIL, files | {"config.json": b"{}"})
        yield hub


def code_that_writes(marker: Path) -> str:
    return f"open({str(marker)!r}, 'w').close()\n"


class Payload:
    """Its pickle writes a file when it is loaded."""

    def __init__(self, marker: Path):
        self.marker = str(marker)

    def __reduce__(self):
        return exec, (code_that_writes(Path(self.marker)),)


def sign(folder: Path, *more: str, version: str = "9.9.9", code: tuple[str, ...] = ()) -> None:
    """Let the manifest agree with the files that are there, and list ``more`` and ``code``."""
    manifest = json.loads((folder / MANIFEST).read_text())
    card = folder / "README.md"
    card.write_text(card.read_text().replace(f'"v{manifest["version"]}"', f'"v{version}"'))

    def digest(name: str) -> str:
        return hashlib.sha256((folder / name).read_bytes()).hexdigest()

    manifest["version"] = version
    manifest["code"] = {name: digest(name) for name in [*manifest["code"], *code]}
    manifest["files"] = {name: digest(name) for name in [*manifest["files"], *more]}
    manifest["weights"]["files"] = {
        name: {"size": (folder / name).stat().st_size, "sha256": digest(name)}
        for name in manifest["weights"]["files"]
    }
    (folder / MANIFEST).write_text(json.dumps(manifest))


def amend(path: Path, **fields) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def python(name: str):
    def plant(folder: Path, marker: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(code_that_writes(marker))
        sign(folder)

    return plant


def listed_python(name: str):
    def plant(folder: Path, marker: Path) -> None:
        python(name)(folder, marker)
        sign(folder, code=(name,))

    return plant


def changed_python(name: str, version: str):
    def plant(folder: Path, marker: Path) -> None:
        path = folder / name
        path.write_text(code_that_writes(marker) + path.read_text())
        sign(folder, version=version)

    return plant


def pickled(name: str, protocol: int, listed: bool = False):
    def plant(folder: Path, marker: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_bytes(pickle.dumps(Payload(marker), protocol))
        sign(folder, *([name] if listed else []))

    return plant


def saved_by_torch(name: str, zipped: bool):
    def plant(folder: Path, marker: Path) -> None:
        state = {"a": Payload(marker)}
        torch.save(state, folder / name, _use_new_zipfile_serialization=zipped)
        sign(folder)

    return plant


def pickled_as_weights(folder: Path, marker: Path) -> None:
    pickled(shards_of(folder)[0], 4)(folder, marker)


def pickled_as_the_only_weights(folder: Path, marker: Path) -> None:
    for name in [*shards_of(folder), INDEX]:
        (folder / name).unlink()
    torch.save({"a": Payload(marker)}, folder / "model.safetensors")
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["files"][INDEX]
    manifest["weights"]["files"] = {"model.safetensors": {}}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    sign(folder)


def adapter(listed: bool, base: str = EVIL):
    def plant(folder: Path, marker: Path) -> None:
        values = {"base_model_name_or_path": base, "peft_type": "LORA"}
        (folder / "adapter_config.json").write_text(json.dumps(values))
        sign(folder, *(["adapter_config.json"] if listed else []))

    return plant


def fields(name: str, **values):
    def plant(folder: Path, marker: Path) -> None:
        amend(folder / name, **values)
        sign(folder)

    return plant


def binary(name: str):
    def plant(folder: Path, marker: Path) -> None:
        (folder / name).write_bytes(b"\x7fELF" + bytes(100))
        sign(folder)

    return plant


def text(name: str, content: str, listed: bool = False):
    def plant(folder: Path, marker: Path) -> None:
        (folder / name).write_text(content.replace("CODE", code_that_writes(marker).strip()))
        sign(folder, *([name] if listed else []))

    return plant


# In words of Jinja, the ways out of a sandbox that people have tried.
ESCAPES = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    "{{ cycler.__init__.__globals__.os.popen('python -c \"CODE\"').read() }}"
    "{{ raise_exception.__globals__['__builtins__']['exec']('CODE') }}"
    "{% set x = messages.append %}{{ lipsum.__globals__ }}"
)
AUTO = {"AutoConfig": f"{EVIL}--evil.Evil", "AutoTokenizer": [f"{EVIL}--evil.Evil", None]}
PLANTS = {
    "a file that is not listed": python("extra.py"),
    "a listed file": listed_python("extra.py"),
    "a package": python("__init__.py"),
    "a listed package": listed_python("__init__.py"),
    "a site's file": python("sitecustomize.py"),
    "a listed site's file": listed_python("sitecustomize.py"),
    "a user's file": python("usercustomize.py"),
    "a file like a library": listed_python("transformers.py"),
    "a setup": python("setup.py"),
    "tests": python("conftest.py"),
    "a path": text("evil.pth", "import os; CODE"),
    "a file below": python("custom/extra.py"),
    "custom generation": python("custom_generate/generate.py"),
    "changed code": changed_python("visual.py", "9.9.9"),
    "a changed entry": changed_python("modeling_chatglm.py", "9.9.9"),
    "changed code of this version": changed_python("configuration_chatglm.py", __version__),
    "a library of C": binary("visual.cpython-311-x86_64-linux-gnu.so"),
    **{f"a pickle of protocol {n}": pickled("notes.txt", n) for n in range(6)},
    **{f"a listed pickle of protocol {n}": pickled("LICENSE", n) for n in range(6)},
    "a pickle by its name": pickled("pytorch_model.bin", 4),
    "what a Trainer leaves": pickled("training_args.bin", 2),
    "torch's pickle": saved_by_torch("weights.dat", zipped=True),
    "torch's older pickle": saved_by_torch("weights.dat", zipped=False),
    "a pickle as weights": pickled_as_weights,
    "a pickle as the only weights": pickled_as_the_only_weights,
    "an adapter": adapter(listed=False),
    "a listed adapter": adapter(listed=True),
    "a listed adapter of a folder": adapter(listed=True, base="/tmp/evil"),
    "auto_map of the config": fields("config.json", auto_map=AUTO),
    "auto_map of the tokenizer": fields("tokenizer_config.json", auto_map=AUTO),
    "auto_map of the processor": fields("processor_config.json", auto_map=AUTO),
    "auto_map of the images": fields("preprocessor_config.json", auto_map=AUTO),
    "auto_map of generation": fields("generation_config.json", auto_map=AUTO),
    "a nested auto_map": fields("processor_config.json", image_processor={"auto_map": AUTO}),
    "a list of auto_maps": fields("processor_config.json", image_processor=[{"auto_map": AUTO}]),
    "a pipeline": fields("config.json", custom_pipelines={"a": {"impl": f"{EVIL}--evil.Evil"}}),
    "a kernel": fields("config.json", attn_implementation=EVIL),
    "a kernel of the tower": fields("config.json", text_config={"_attn_implementation": EVIL}),
    "a kernel at a revision": fields("config.json", attn_implementation=f"{EVIL}@main:evil"),
}
# Their content may be anybody's: what reads them runs none of it.
HARMLESS = {
    "a template": text("chat_template.jinja", ESCAPES, listed=False),
    "a template of the tokenizer": fields("tokenizer_config.json", chat_template=ESCAPES),
    "requirements": text("requirements.txt", "evil @ file:///tmp/evil\n--index-url CODE\n"),
    "a class of the tokenizer": fields("tokenizer_config.json", tokenizer_class="os.system"),
}


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("name", ["LICENSE", "notes.txt"])
def test_a_raw_pickle_is_told_as_one_whatever_its_name(name, protocol, copy, marker):
    pickled(name, protocol)(copy, marker)
    checks = verifying.check_files(verifying.read_folder(copy))
    assert checks.failed("nothing pickled")
    assert name in checks.done["nothing pickled"].detail and not marker.exists()


def test_without_a_payload_a_signed_copy_is_not_refused(copy):
    sign(copy)
    checks = verifying.check_files(verifying.read_folder(copy))
    assert not [name for name in checks.done if checks.failed(name)]
    read_build(copy)


@pytest.mark.parametrize("where", ["folder", "Hub"])
@pytest.mark.parametrize("name", PLANTS)
def test_a_payload_is_refused_before_anything_runs(name, where, copy, hub, marker, monkeypatch):
    PLANTS[name](copy, marker)
    monkeypatch.setattr(verifying, "STRANGER", Path("must not be started"))
    if where == "folder":
        report = verify(str(copy))
        with pytest.raises(PublishError):
            read_build(copy)
    else:
        hub.add_repository(NAME, files_below(copy))
        report = verify(NAME)
    assert not report.passed and not marker.exists()
    told = {check.name: check for check in report.checks}
    assert {told[check].status for check in NAMES} == {SKIPPED}, report.as_table()


def files_below(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "a template" else pytest.mark.slow) for n in HARMLESS]
)
def test_what_may_be_anybodys_runs_nothing(name, copy, hub, marker):
    """The code is this clone's, so the files are loaded."""
    HARMLESS[name](copy, marker)
    report = verify(str(copy))
    assert not marker.exists(), report.as_table()
    assert {check.status for check in report.checks if check.name == "config loads"} == {"passed"}


SPY = """
import glob, json, os, pathlib, socket, sys
import huggingface_hub
found = [dict(os.environ), str(huggingface_hub.get_token()), sys.argv, os.getcwd()]
for place in ("~/.cache/huggingface/token", "~/.huggingface/token", "~/.netrc", "~/.config/*"):
    for path in glob.glob(os.path.expanduser(place)):
        found.append(pathlib.Path(path).read_text())
found.append(huggingface_hub.constants.HF_HUB_OFFLINE)
open({marker!r}, "w").write(json.dumps(found))
"""


def test_foreign_code_runs_on_request_alone_and_finds_no_token(
    copy, hub, marker, monkeypatch, tmp_path, capsys
):
    """This also shows that the payloads of the other tests would write their file."""
    home = tmp_path / "home of the user"
    for name in (".cache/huggingface/token", ".huggingface/token", ".netrc"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(TOKEN)
    monkeypatch.setenv("HOME", str(home))
    for name in ("HUGGING_FACE_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY"):
        monkeypatch.setenv(name, TOKEN)
    monkeypatch.setenv("HF_TOKEN_PATH", str(home / ".huggingface/token"))
    path = copy / "visual.py"
    path.write_text(SPY.format(marker=str(marker)) + path.read_text())
    sign(copy)
    commit = hub.add_repository(NAME, as_files(copy)).head
    assert main(["verify", NAME]) == 1
    assert "code" in capsys.readouterr().out and not marker.exists()
    assert main(["verify", NAME, "--run-code"]) == 0
    output, errors = capsys.readouterr()
    assert f"--run-code: running 1 files of code of {NAME}@{commit}" in errors
    assert "visual.py. They get no token" in errors and "--run-code says so" in output
    found = marker.read_text()
    assert TOKEN not in found and hub.token not in found and str(home) not in found
    environment, token, _, _, *rest = json.loads(found)
    assert token == "None" and rest == [True]
    assert not [name for name in environment if "TOKEN" in name and name[:10] != "TOKENIZERS"]
    assert hub.token not in output + errors


def test_what_runs_is_what_was_checked(copy, monkeypatch, tmp_path, marker):
    """The process does not see what appears, or is exchanged, after the checks."""
    script = tmp_path / "script.py"
    script.write_text(
        "import json, os, sys\n"
        "request = json.load(open(sys.argv[1]))\n"
        "source = request['source']\n"
        "sys.exit(json.dumps({n: open(os.path.join(source, n), 'rb').read().hex() for n in "
        "sorted(os.listdir(source))}))\n"
    )
    before = as_files(copy)
    del before[MANIFEST]
    check = verifying.check_files

    def exchange(target, *rest):
        done = check(target, *rest)
        (copy / "visual.py").write_text(code_that_writes(marker))
        (copy / "adapter_config.json").write_text("{}")
        return done

    monkeypatch.setattr(verifying, "check_files", exchange)
    monkeypatch.setattr(verifying, "STRANGER", script)
    report = verify(str(copy))
    (first,) = [c for c in report.checks if c.name == NAMES[0]]
    assert first.status == FAILED
    seen = json.loads(first.detail[first.detail.index("{") :])
    assert {name: bytes.fromhex(content) for name, content in seen.items()} == before


def test_what_a_process_says_that_is_no_check_is_not_believed(copy, monkeypatch, tmp_path):
    changed_python("visual.py", "9.9.9")(copy, tmp_path / "marker")
    lines = [
        {"name": NAMES[0], "status": "passed", "detail": 5},
        {"name": "card", "status": "passed", "detail": "-"},
    ]
    said = "\n".join(map(json.dumps, lines))
    for said_by in (said, "[]", "no JSON", "{}", "[" * 100_000):
        script = tmp_path / "script.py"
        script.write_text(
            "import json, sys\n"
            f"open(json.load(open(sys.argv[1]))['results'], 'w').write({said_by!r})\n"
        )
        monkeypatch.setattr(verifying, "STRANGER", script)
        report = verify(str(copy), run_code=True)
        assert report.failures == [NAMES[1] if said_by == said else NAMES[0]]


def test_this_suite_plants_into_every_kind_of_file_of_a_build(built):
    """So that a file which builds write one day is thought of here."""
    kinds = {Path(name).suffix or name for name in os.listdir(built)}
    known = {".py", ".json", ".jinja", ".md", ".txt", ".safetensors", "LICENSE", "MODEL_LICENSE"}
    assert kinds == known
