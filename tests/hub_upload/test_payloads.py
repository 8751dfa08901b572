"""What a stranger could put into a repository or a folder, in every kind of file: it never runs.

Each payload writes a file when it runs. Manifests agree with what was planted, and name another
version, as somebody would write them who wants to be let in.
"""

import json
import pickle
from pathlib import Path

import pytest
import torch

from glm4v_patched import __version__
from hub_upload import verify as verifying
from hub_upload.errors import Failure
from hub_upload.layout import INDEX, MANIFEST
from hub_upload.load_check import FAILED, PASSED, SKIPPED, STEPS
from hub_upload.publish import read_build
from hub_upload.verify import verify
from tests.helpers.publishable import NAME, as_files, edit, shards_of, sign

EVIL = "evil-org/evil"
TOKEN = "hf_thetokenofwhoeververifies"


@pytest.fixture
def marker(tmp_path) -> Path:
    return tmp_path / "it ran"


@pytest.fixture
def evil_hub(hub, marker):
    """A Hub that also has a stranger's repository, whose code is a payload."""
    code = code_that_writes(marker).encode()
    files = {"evil.py": code, "modeling_chatglm.py": code, "config.json": b"{}"}
    hub.add_repository(EVIL, files)
    return hub


def code_that_writes(marker: Path) -> str:
    return f"open({str(marker)!r}, 'w').close()\n"


class Payload:
    """Its pickle writes a file when it is loaded."""

    def __init__(self, marker: Path):
        self.marker = str(marker)

    def __reduce__(self):
        return exec, (code_that_writes(Path(self.marker)),)


def sign_as(folder: Path, *more: str, version: str = "9.9.9", code: tuple[str, ...] = ()) -> None:
    sign(folder, *more, code=code)
    edit(folder / MANIFEST, lambda manifest: manifest.update(version=version))
    card = folder / "README.md"
    card.write_text(card.read_text().replace(f'"v{__version__}"', f'"v{version}"'))
    sign(folder)


def python(name: str, listed: bool = False):
    def plant(folder: Path, marker: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(code_that_writes(marker))
        sign_as(folder, code=(name,) if listed else ())

    return plant


def changed_python(name: str, version: str = "9.9.9"):
    def plant(folder: Path, marker: Path) -> None:
        path = folder / name
        path.write_text(code_that_writes(marker) + path.read_text())
        sign_as(folder, version=version)

    return plant


def pickled(name: str, protocol: int, listed: bool = False):
    def plant(folder: Path, marker: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_bytes(pickle.dumps(Payload(marker), protocol))
        sign_as(folder, *([name] if listed else []))

    return plant


def saved_by_torch(zipped: bool):
    def plant(folder: Path, marker: Path) -> None:
        state = {"a": Payload(marker)}
        torch.save(state, folder / "weights.dat", _use_new_zipfile_serialization=zipped)
        sign_as(folder)

    return plant


def pickled_as_weights(folder: Path, marker: Path) -> None:
    pickled(shards_of(folder)[0], 4)(folder, marker)


def pickled_as_the_only_weights(folder: Path, marker: Path) -> None:
    for name in [*shards_of(folder), INDEX]:
        (folder / name).unlink()
    torch.save({"a": Payload(marker)}, folder / "model.safetensors")
    edit(folder / MANIFEST, lambda manifest: manifest["files"].pop(INDEX))
    sign_as(folder)


def text(name: str, content: str, listed: bool = False):
    def plant(folder: Path, marker: Path) -> None:
        (folder / name).write_text(content.replace("CODE", code_that_writes(marker).strip()))
        sign_as(folder, *([name] if listed else []))

    return plant


def adapter(listed: bool, base: str = EVIL):
    values = {"base_model_name_or_path": base, "peft_type": "LORA"}
    return text("adapter_config.json", json.dumps(values), listed)


def fields(name: str, **values):
    def plant(folder: Path, marker: Path) -> None:
        edit(folder / name, lambda config: config.update(values))
        sign_as(folder)

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
    "a listed file": python("extra.py", listed=True),
    "a package": python("__init__.py"),
    "a listed site's file": python("sitecustomize.py", listed=True),
    "a file like a library": python("transformers.py", listed=True),
    "a path": text("evil.pth", "import os; CODE"),
    "custom generation": python("custom_generate/generate.py"),
    "changed code": changed_python("visual.py"),
    "a changed entry": changed_python("modeling_chatglm.py"),
    "changed code of this version": changed_python("configuration_chatglm.py", __version__),
    "a library of C": text("visual.cpython-311-x86_64-linux-gnu.so", "\x7fELF"),
    **{f"a pickle of protocol {n}": pickled("notes.txt", n) for n in range(6)},
    **{f"a listed pickle of protocol {n}": pickled("LICENSE", n) for n in range(6)},
    "a pickle by its name": pickled("pytorch_model.bin", 4),
    "what a Trainer leaves": pickled("training_args.bin", 2),
    "torch's pickle": saved_by_torch(zipped=True),
    "torch's older pickle": saved_by_torch(zipped=False),
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
    "a nested class": fields("processor_config.json", inner={"auto_map": {"A": "visual.Evil"}}),
    "a list of auto_maps": fields("processor_config.json", image_processor=[{"auto_map": AUTO}]),
    "a pipeline": fields("config.json", custom_pipelines={"a": {"impl": f"{EVIL}--evil.Evil"}}),
    "a kernel": fields("config.json", attn_implementation=EVIL),
    "a kernel of the tower": fields("config.json", text_config={"_attn_implementation": EVIL}),
    "a kernel at a revision": fields("config.json", attn_implementation=f"{EVIL}@main:evil"),
}
# Their content may be anybody's: what reads them runs none of it.
HARMLESS = {
    "a template": text("chat_template.jinja", ESCAPES),
    "a template of the tokenizer": fields("tokenizer_config.json", chat_template=ESCAPES),
    "requirements": text("requirements.txt", "evil @ file:///tmp/evil\n--index-url CODE\n"),
    "a class of the tokenizer": fields("tokenizer_config.json", tokenizer_class="os.system"),
}


def test_without_a_payload_a_signed_copy_is_not_refused(copy):
    sign_as(copy)
    read_build(copy)


@pytest.mark.parametrize("name", PLANTS)
def test_a_payload_is_refused_before_anything_runs(name, copy, evil_hub, marker, monkeypatch):
    """In a folder and in a repository; and no such folder is published."""
    PLANTS[name](copy, marker)
    monkeypatch.setattr(verifying, "_run", lambda *_: pytest.fail("it was run"))
    evil_hub.add_repository(NAME, as_files(copy))
    for where in (str(copy), NAME):
        report = verify(where)
        assert report.failures and not marker.exists()
        assert {check.status for check in report.checks if check.name in STEPS} == {SKIPPED}
        # A pickle is told as one, whatever the name of its file.
        assert "pickle of" not in name or "nothing pickled" in report.failures
    with pytest.raises(Failure):
        read_build(copy)


@pytest.mark.parametrize("name", HARMLESS)
def test_what_may_be_anybodys_runs_nothing(name, copy, evil_hub, marker, in_process):
    """The code is this clone's, so the files are loaded."""
    HARMLESS[name](copy, marker)
    report = verify(str(copy))
    assert not marker.exists(), report.as_table()
    assert {check.status for check in report.checks if check.name == "config loads"} == {PASSED}


SPY = """
import glob, json, os, pathlib, socket, sys
import huggingface_hub
found = [dict(os.environ), str(huggingface_hub.get_token()), sys.argv, os.getcwd()]
for place in ("~/.cache/huggingface/token", "~/.huggingface/token", "~/.netrc", "~/.config/*"):
    for path in glob.glob(os.path.expanduser(place)):
        found.append(pathlib.Path(path).read_text())
found.append(huggingface_hub.constants.HF_HUB_OFFLINE)
open({marker!r}, "w").write(json.dumps(found))
os._exit(7)
"""


def test_foreign_code_runs_on_request_alone_and_finds_no_token(
    copy, hub, run, marker, monkeypatch, tmp_path
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
    path = copy / "configuration_chatglm.py"
    path.write_text(SPY.format(marker=str(marker)) + path.read_text())
    sign_as(copy)
    commit = hub.add_repository(NAME, as_files(copy)).head
    status, output = run("verify", NAME)
    assert status == 1 and "code" in output and not marker.exists()
    status, output = run("verify", NAME, "--run-code")
    assert "the process ended with status 7 here" in output
    assert f"--run-code: running 1 files of code of {NAME}@{commit}" in output
    assert "configuration_chatglm.py. They get no token" in output
    assert "--run-code says so" in output
    found = marker.read_text()
    assert TOKEN not in found and hub.token not in found and str(home) not in found
    environment, token, _, _, *rest = json.loads(found)
    assert token == "None" and rest == [True]
    assert not [name for name in environment if "TOKEN" in name and name[:10] != "TOKENIZERS"]


def test_what_runs_is_what_was_checked(copy, monkeypatch, load_check, marker):
    """The process does not see what appears, or is exchanged, after the checks."""
    load_check(
        "source = request['source']\n"
        "read = lambda name: open(os.path.join(source, name), 'rb').read().hex()\n"
        "sys.exit(json.dumps({name: read(name) for name in os.listdir(source)}))"
    )
    before = as_files(copy)
    del before[MANIFEST]
    check = verifying.check_files

    def exchange(target):
        done = check(target)
        (copy / "visual.py").write_text(code_that_writes(marker))
        (copy / "adapter_config.json").write_text("{}")
        return done

    monkeypatch.setattr(verifying, "check_files", exchange)
    (first,) = [c for c in verify(str(copy)).checks if c.name == STEPS[0]]
    assert first.status == FAILED
    seen = json.loads(first.detail[first.detail.index("{") :])
    assert {name: bytes.fromhex(content) for name, content in seen.items()} == before


def test_what_a_process_says_that_is_no_check_is_not_believed(copy, load_check, tmp_path):
    changed_python("visual.py")(copy, tmp_path / "marker")
    said = "\n".join(map(json.dumps, ([STEPS[0], "passed", 5], ["card", "passed", "-"])))
    for said_by in (said, "[]", "no JSON", "{}", "[" * 100_000):
        load_check(f"open(request['results'], 'w').write({said_by!r})")
        report = verify(str(copy), run_code=True)
        assert report.failures == [STEPS[1] if said_by == said else STEPS[0]]


def test_this_suite_plants_into_every_kind_of_file_of_a_build(built):
    """So that a file which builds write one day is thought of here."""
    kinds = {Path(name).suffix or name for name in as_files(built)}
    known = {".py", ".json", ".jinja", ".md", ".txt", ".safetensors", "LICENSE", "MODEL_LICENSE"}
    assert kinds == known
