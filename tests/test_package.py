"""Files of a clone that are published in the sdist, the wheel and the image, and the workflow."""

import email
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = ROOT / ".github" / "workflows"
# Private files of people who work in a clone.
PRIVATE = [
    ".env",
    "id_rsa",
    "data/rows.jsonl",
    "models/x.safetensors",
    "recipe.yaml",
    "private.py",
    "trained/adapter.py",
    "glm4v_patched/.env",
    "glm4v_patched/secret.json",
    "glm4v_patched/notes.txt",
    "glm4v_patched/key.pem",
    "glm4v_patched/.venv/lib/secret.py",
    "glm4v_patched/data/rows.jsonl",
    "glm4v_patched/data/.hidden.py",
    "glm4v_patched/remote/model.safetensors",
    "glm4v_patched/finetune/recipes/mine.yaml",
    "glm4v_patched/finetune/.ipynb_checkpoints/plan.py",
    "glm4v_patched/finetune/recipes/rows.csv",
    "hub_upload/.env",
    "hub_upload/token.txt",
    "tests/.env",
    "tests/golden/private.zip",
    "docs/private.ipynb",
    "docs/docker/.env",
    "docs/docker/key",
    ".github/token",
    ".aws/credentials",
]
ALWAYS = {"LICENSE", "README.md", "pyproject.toml"}


@pytest.fixture(scope="module")
def used(tmp_path_factory) -> Path:
    """A copy of what git has, with private files beside it."""
    folder = tmp_path_factory.mktemp("clone") / "used"
    for name in tracked():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / name)
    for name in PRIVATE:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        assert not (folder / name).exists(), name
        (folder / name).write_text("private")
    return folder


def tracked(*patterns: str) -> set[str]:
    command = ["git", "-C", ROOT, "ls-files", "-z", "--", *patterns]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    return {name for name in names if name and (ROOT / name).is_file()}


def test_sdist_and_wheel_have_what_git_has_of_the_package_and_nothing_else(used, tmp_path):
    if find_spec("hatchling") is None:
        pytest.skip("needs hatchling: `nox -f tests/noxfile.py -s release` runs this")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path)]
    subprocess.run(command, cwd=used, check=True, capture_output=True)
    [wheel], [sdist] = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    assert {*names} == tracked("glm4v_patched")
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert inside == tracked("glm4v_patched") | ALWAYS | {".gitignore", "PKG-INFO"}


# Docker's patterns: https://docs.docker.com/build/concepts/context/#syntax
MEANING = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}


def is_sent(name: str, patterns: list[str]) -> bool:
    """Whether a file is in the image's context: the last pattern that matches it decides, or one of
    the folders that it is in."""
    sent = True
    for pattern in patterns:
        parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^]]*\])", pattern.removeprefix("!"))
        expression = "".join(
            MEANING.get(part, part if part.startswith("[") else re.escape(part)) for part in parts
        )
        if re.fullmatch(f"{expression}(/.*)?", name):
            sent = pattern.startswith("!")
    return sent


def test_the_image_is_built_from_what_git_has_of_the_package_and_nothing_else(used):
    lines = (used / ".dockerignore").read_text().splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    files = [path.relative_to(used).as_posix() for path in used.rglob("*") if path.is_file()]
    sent = {name for name in files if is_sent(name, patterns)}
    install = "docs/docker/install.sh"
    assert sent == tracked("glm4v_patched") | ALWAYS | {install}
    # A builder that does not read that file gets these by name.
    copied = re.findall(r"(?m)^(?:COPY|ADD) (.*) \S+$", (used / "Dockerfile").read_text())
    assert copied == ["LICENSE README.md pyproject.toml", "docs/docker", "glm4v_patched"]


# The workflow


def release() -> dict[str, dict]:
    return yaml.safe_load((WORKFLOWS / "release.yml").read_text())["jobs"]


def step(job: str, words: str) -> str:
    """The command of a step that is named so."""
    [script] = [s["run"] for s in release()[job]["steps"] if s.get("name") == words]
    return script


def shell(command: str, folder: Path, **environment: str) -> int:
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    variables = {"PATH": path, "HOME": str(folder), "PYTHONPATH": ":".join(sys.path)} | environment
    how = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", command]
    return subprocess.run(how, cwd=folder, env=variables, capture_output=True).returncode


def test_jobs_that_publish_install_only_what_is_pinned_by_hash():
    for name in ("release.yml", "docs.yml"):
        commands = re.findall(r"pip install (.*)", (WORKFLOWS / name).read_text())
        assert commands and all(one.startswith("--require-hashes -r ") for one in commands)
        for file in (ROOT / one.split()[-1] for one in commands):
            lines = file.read_text().replace("\\\n", "").splitlines()
            pins = [line for line in lines if line and not line.startswith("#")]
            pinned = re.compile(r"[\w.-]+==[\w.]+ +(--hash=sha256:[0-9a-f]{64} *)+")
            assert pins and all(pinned.fullmatch(pin) for pin in pins), file
    requires = (ROOT / "pyproject.toml").read_text()
    [needed] = re.findall(r"(?m)^requires = (.*)$", requires)
    pinned = (ROOT / ".github" / "release.txt").read_text()
    assert all(f"\n{name}==" in pinned for name in json.loads(needed))
    # nox fetches what is not pinned.
    assert "nox" not in (WORKFLOWS / "release.yml").read_text()


def test_only_a_tag_of_main_is_released(tmp_path):
    how = "git -c user.name=a -c user.email=b -c init.defaultBranch=main"
    commit = f"{how} commit -q --allow-empty -m"
    setup = f"{how} init -q . && {commit} one && {commit} two && git update-ref "
    assert shell(setup + "refs/remotes/origin/main HEAD", tmp_path) == 0
    condition = step("build", "The tag is on main")
    for at in ("HEAD", "HEAD~1"):
        assert shell(f"git checkout -q {at}\n{condition}", tmp_path) == 0
    beside = f"{commit} three"
    assert shell(beside, tmp_path) == 0 and shell(condition, tmp_path) != 0
    assert release()["build"]["steps"][0]["with"]["fetch-depth"] == 0


def test_what_is_published_is_what_was_built(tmp_path):
    dist, output = tmp_path / "release" / "dist", tmp_path / "said"
    dist.mkdir(parents=True)
    for name in ("a.whl", "a.tar.gz"):
        (dist / name).write_text(name)
    [script] = [s["run"] for s in release()["build"]["steps"] if s.get("id") == "build"]
    assert shell(script.splitlines()[1], tmp_path, GITHUB_OUTPUT=str(output)) == 0
    digest = output.read_text().strip().removeprefix("sha256=")
    condition = step("publish", "What was downloaded is what was built")
    assert shell(condition, tmp_path, SHA256=digest) == 0
    (dist / "more.whl").write_text("more")
    assert shell(condition, tmp_path, SHA256=digest) != 0
    (dist / "more.whl").unlink()
    (dist / "a.whl").write_text("b.whl")
    assert shell(condition, tmp_path, SHA256=digest) != 0
    assert shell(condition, tmp_path, SHA256="") != 0
    publish = release()["publish"]["steps"]
    assert "What was downloaded" in publish[1]["name"] and "pypi-publish" in publish[2]["uses"]
    assert publish[2]["with"]["packages-dir"] == "release/dist/"


def test_only_the_job_that_needs_a_permission_has_it():
    """No job both builds from the sources and can write to the repository."""
    permissions = {name: {*job.get("permissions", {})} for name, job in release().items()}
    assert permissions == {
        "build": {"contents", "attestations", "id-token"},
        "publish": {"id-token"},
        "github": {"contents"},
    }
    assert release()["build"]["permissions"]["contents"] == "read"
    assert not [s for s in release()["github"]["steps"] if "checkout" in s.get("uses", "")]


# What a release publishes; nox's session "release" makes it.


@pytest.fixture
def release_folder() -> Path:
    if "RELEASE" not in os.environ:
        pytest.skip("needs what `nox -f tests/noxfile.py -s release` builds, and runs this")
    return Path(os.environ["RELEASE"])


def test_the_bill_of_materials_names_each_requirement_and_the_license(release_folder):
    bill = json.loads((release_folder / "sbom.cdx.json").read_text())
    assert bill["bomFormat"] == "CycloneDX"
    product = bill["metadata"]["component"]
    assert product["licenses"] == [{"license": {"id": "Apache-2.0"}}]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = project["dependencies"] + sum(project["optional-dependencies"].values(), [])
    names = {re.match(r"[\w-]+", text)[0].lower() for text in required} - {project["name"]}
    assert {component["name"] for component in bill["components"]} == names
    [edges] = [one for one in bill["dependencies"] if one["ref"] == product["bom-ref"]]
    assert {*edges["dependsOn"]} == names


def test_checksums_are_those_of_the_files_that_a_release_has(release_folder):
    files = {path.name for path in (release_folder / "dist").iterdir()} | {"sbom.cdx.json"}
    lines = (release_folder / "SHA256SUMS").read_text().splitlines()
    assert {line.split("  ")[1] for line in lines} == files
    together = "cp dist/* sbom.cdx.json SHA256SUMS {0} && cd {0} && sha256sum --check --strict"
    assert shell(f"d=$(mktemp -d) && {together.format('$d')} SHA256SUMS", release_folder) == 0


def test_notes_are_the_section_of_this_version(release_folder):
    notes = (release_folder / "notes.md").read_text()
    assert "\n### Fixed in the model\n" in notes and "\n## " not in notes


def test_links_of_the_page_on_pypi_lead_out_of_it(release_folder):
    """PyPI shows README alone, without the files and images beside it."""
    [wheel] = (release_folder / "dist").glob("*.whl")
    archive = zipfile.ZipFile(wheel)
    [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    page = email.message_from_bytes(archive.read(name)).get_payload()
    targets = re.findall(r"\]\(([^)\s]+)\)", page)
    assert len(targets) > 40
    assert [target for target in targets if not target.startswith(("https://", "#"))] == []
    assert "![" in page and "https://raw.githubusercontent.com/" in page


# Addresses of the repository


def test_the_organization_is_named_in_one_place():
    """What repeats an address of pyproject.toml has the same; the site reads it from there."""
    text = (ROOT / "pyproject.toml").read_text()
    urls = tomllib.loads(text)["project"]["urls"]
    owner = urls["Homepage"].removeprefix("https://github.com/").partition("/")[0]
    of_ours = re.compile(
        r"(?:github(?:usercontent)?\.com/|//)([\w-]+)(?:\.github\.io)?/glm4v-patched"
    )
    texts = [name for name in tracked() if not name.endswith((".png", ".zip", ".csv"))]
    named = {name: {*of_ours.findall((ROOT / name).read_text(errors="replace"))} for name in texts}
    assert {name: owners for name, owners in named.items() if owners - {owner}} == {}
    assert f"@{owner}/" in (ROOT / ".github" / "CODEOWNERS").read_text()


def test_a_tag_is_the_version(tmp_path):
    condition = step("build", "The tag is the version")
    (tmp_path / "hatchling.py").write_text("print('0.1.0')")
    condition = condition.replace("python -m hatchling version", "python hatchling.py")
    for tag, status in {"v0.1.0": 0, "v0.1.1": 1, "0.1.0": 1, "": 1}.items():
        assert shell(condition, tmp_path, GITHUB_REF_NAME=tag) == status
