"""What a stranger could put into a repository or a folder, in every kind of file: it never runs.

Each payload writes a file when it runs. Manifests agree with what was planted.
"""

import io
import json
import pickle
from pathlib import Path

import pytest
import torch

from glm4v_patched import __version__
from hub_upload import verify as verifying
from hub_upload.layout import INDEX
from hub_upload.load_check import STEPS
from hub_upload.publish import read_build
from hub_upload.verify import FAILED, PASSED, SKIPPED, verify
from tests.helpers.publishable import NAME, amended, as_files, shards_of, sign, signed

EVIL = "evil-org/evil"
CODE = 'open(__import__("os").environ["IT_RAN"], "w").close()\n'


@pytest.fixture(autouse=True)
def marker(tmp_path, monkeypatch) -> Path:
    """What a payload writes when it runs."""
    monkeypatch.setenv("IT_RAN", str(tmp_path / "it ran"))
    return tmp_path / "it ran"


class Payload:
    def __reduce__(self):
        return exec, (CODE,)


def file(name: str, content: str | bytes, listed: bool = False, version: str = "9.9.9"):
    """Write it before what a file of code has."""

    def plant(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        before = path.read_bytes() if path.exists() and name.endswith(".py") else b""
        path.unlink(missing_ok=True)
        path.write_bytes((content.encode() if isinstance(content, str) else content) + before)
        sign(folder, *[name] * listed, version=version)

    return plant


def pickled(protocol: int) -> bytes:
    return pickle.dumps(Payload(), protocol)


def saved_by_torch(zipped: bool) -> bytes:
    saved = io.BytesIO()
    torch.save({"a": Payload()}, saved, _use_new_zipfile_serialization=zipped)
    return saved.getvalue()


def pickled_as_the_only_weights(folder: Path) -> None:
    for name in [*shards_of(folder), INDEX]:
        (folder / name).unlink()
    file("model.safetensors", saved_by_torch(True))(folder)


def adapter(listed: bool, base: str = EVIL):
    values = {"base_model_name_or_path": base, "peft_type": "LORA"}
    return file("adapter_config.json", json.dumps(values), listed)


def fields(name: str, **values):
    return signed(amended(name, **values))


# In words of Jinja, the ways out of a sandbox that people have tried.
ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('touch \"$IT_RAN\"').read() }}",
    f"{{{{ raise_exception.__globals__['__builtins__']['exec']('{CODE.strip()}') }}}}",
    "{% set x = messages.append %}{{ lipsum.__globals__ }}",
]
AUTO = {"AutoConfig": f"{EVIL}--evil.Evil", "AutoTokenizer": [f"{EVIL}--evil.Evil", None]}
PLANTS = {
    "a file that is not listed": file("extra.py", CODE),
    "a listed file": file("extra.py", CODE, listed=True),
    "a package": file("__init__.py", CODE),
    "a listed site's file": file("sitecustomize.py", CODE, listed=True),
    "a file like a library": file("transformers.py", CODE, listed=True),
    "a path": file("evil.pth", f"import os; {CODE}"),
    "custom generation": file("custom_generate/generate.py", CODE),
    "changed code": file("visual.py", CODE),
    "a changed entry": file("modeling_chatglm.py", CODE),
    "changed code of this version": file("loss.py", CODE, version=__version__),
    "a library of C": file("visual.cpython-311-x86_64-linux-gnu.so", "\x7fELF"),
    **{f"a pickle of protocol {n}": file("notes.txt", pickled(n)) for n in range(6)},
    **{f"a listed one of protocol {n}": file("LICENSE", pickled(n), True) for n in range(1, 6)},
    "a pickle by its name": file("pytorch_model.bin", pickled(4)),
    "a listed pickle by its name": file("pytorch_model.bin", pickled(4), listed=True),
    "what a Trainer leaves": file("training_args.bin", pickled(2)),
    "torch's pickle": file("weights.dat", saved_by_torch(zipped=True)),
    "torch's older pickle": file("weights.dat", saved_by_torch(zipped=False)),
    "a pickle as weights": file("model-00001-of-00002.safetensors", pickled(4)),
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
    **{f"template {n}": file("chat_template.jinja", t, True) for n, t in enumerate(ESCAPES)},
    "a template of the tokenizer": fields("tokenizer_config.json", chat_template="".join(ESCAPES)),
    "requirements": file("requirements.txt", f"evil @ file:///tmp/evil\n--index-url {CODE}", True),
    "a class of the tokenizer": fields("tokenizer_config.json", tokenizer_class="os.system"),
    "text that is a pickle": file("LICENSE", pickled(0), listed=True),
}


def test_without_a_payload_a_signed_copy_is_not_refused(copy):
    sign(copy)
    read_build(copy)


@pytest.mark.parametrize("name", PLANTS)
def test_a_payload_is_refused_before_anything_runs(name, copy, hub, marker, monkeypatch):
    """In a folder and in a repository; and no such folder is published."""
    PLANTS[name](copy)
    monkeypatch.setattr(verifying, "_run", lambda *_: pytest.fail("it was run"))
    hub.add_repository(NAME, as_files(copy))
    evil = dict.fromkeys(["evil.py", "modeling_chatglm.py"], CODE.encode())
    hub.add_repository(EVIL, evil | {"config.json": b"{}"})
    for where in (str(copy), NAME):
        report = verify(where)
        assert report.failures and not marker.exists()
        assert {check.status for check in report.checks if check.name in STEPS} == {SKIPPED}
    with pytest.raises(ValueError):
        read_build(copy)


@pytest.mark.parametrize("name", HARMLESS)
def test_what_may_be_anybodys_runs_nothing(name, copy, marker, in_process):
    """The code is this clone's, so the files are loaded."""
    HARMLESS[name](copy)
    report = verify(str(copy))
    assert not marker.exists(), report.as_table()
    assert "loads" in [check.name for check in report.checks if check.status in (PASSED, FAILED)]


def test_code_of_another_is_not_run_and_would_have_written_its_file(copy, hub, run, marker):
    """What is planted runs where it is loaded."""
    file("configuration_chatglm.py", CODE)(copy)
    hub.add_repository(NAME, as_files(copy))
    for where in (copy, NAME):
        status, output = run("verify", where)
        assert status == 1 and "None of it was run" in output and not marker.exists()
    exec((copy / "configuration_chatglm.py").read_text().splitlines()[0])
    assert marker.exists()


def test_what_runs_is_what_was_checked(copy, monkeypatch, load_check):
    """The process does not see what appears, or is exchanged, after the checks."""
    load_check(
        "source = sys.argv[1]\n"
        "read = lambda name: open(os.path.join(source, name), 'rb').read().hex()\n"
        "sys.exit(json.dumps({name: read(name) for name in os.listdir(source)}))"
    )
    before = as_files(copy)
    check = verifying.check_files

    def exchange(target):
        done = check(target)
        (copy / "visual.py").write_text(CODE)
        (copy / "adapter_config.json").write_text("{}")
        return done

    monkeypatch.setattr(verifying, "check_files", exchange)
    (first,) = [c for c in verify(str(copy)).checks if c.name == STEPS[0]]
    assert first.status == FAILED
    seen = json.loads(first.detail[first.detail.index("{") :])
    assert {name: bytes.fromhex(content) for name, content in seen.items()} == before


def test_this_suite_plants_into_every_kind_of_file_of_a_build(built):
    """So that a file which builds write one day is thought of here."""
    kinds = {Path(name).suffix or name for name in as_files(built)}
    known = {".py", ".json", ".jinja", ".md", ".txt", ".safetensors", "LICENSE", "MODEL_LICENSE"}
    assert kinds == known
