"""Build all that a release publishes into a folder: ``python .ci/release.py OUT``.

OUT gets sdist and wheel (in ``dist/``), ``sbom.cdx.json`` (CycloneDX, of what the wheel declares),
``SHA256SUMS`` of these files, and ``notes.md``: the section of CHANGELOG.md of this version.
``nox -s release`` runs this as ``release.yml`` does, and adds the site.
"""

import re
import subprocess
import sys
import tomllib
from hashlib import sha256
from pathlib import Path

from cyclonedx.model import ExternalReference, ExternalReferenceType, XsUri
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import DisjunctiveLicense
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.metadata import Metadata

ROOT = Path(__file__).resolve().parents[1]
# Keys of project.urls and what CycloneDX calls them.
REFERENCES = {
    "Homepage": ExternalReferenceType.VCS,
    "Documentation": ExternalReferenceType.DOCUMENTATION,
    "Changelog": ExternalReferenceType.RELEASE_NOTES,
    "Issues": ExternalReferenceType.ISSUE_TRACKER,
}


def main(out: Path) -> None:
    """Build everything into ``out``, which must not exist."""
    out.mkdir(parents=True)
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(out / "dist")]
    subprocess.run(command, cwd=ROOT, check=True)
    metadata = Metadata.from_email(_metadata_of_the_sdist(out / "dist"))
    (out / "notes.md").write_text(release_notes((ROOT / "CHANGELOG.md").read_text(), metadata))
    (out / "sbom.cdx.json").write_text(bill_of_materials(metadata))
    files = sorted([*(out / "dist").iterdir(), out / "sbom.cdx.json"])
    lines = [f"{sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (out / "SHA256SUMS").write_text("".join(lines))


def _metadata_of_the_sdist(dist: Path) -> bytes:
    [sdist] = dist.glob("*.tar.gz")
    name = f"{sdist.name.removesuffix('.tar.gz')}/PKG-INFO"
    command = ["tar", "-xOf", str(sdist), name]
    return subprocess.run(command, capture_output=True, check=True).stdout


def release_notes(changelog: str, metadata: Metadata) -> str:
    """Return the section of a version, without its heading; it must have a date.

    Raises:
        SystemExit: the changelog has no such section.
    """
    heading = rf"^## \[{re.escape(str(metadata.version))}\] - \d{{4}}-\d\d-\d\d\n"
    match = re.search(rf"{heading}(.*?)(?=^## |\Z)", changelog, re.M | re.S)
    if match is None:
        sys.exit(f"CHANGELOG.md has no section '## [{metadata.version}] - YYYY-MM-DD': write it")
    return match[1].strip() + "\n"


def bill_of_materials(metadata: Metadata) -> str:
    """Return a CycloneDX document of the package and of what it requires, by extra.

    A requirement is a range, so components have no version: what is installed is decided by who
    installs. The range is the component's description.
    """
    product = _component(metadata.name, str(metadata.version), metadata.summary)
    product.licenses.add(DisjunctiveLicense(id=metadata.license_expression))
    urls = metadata.project_urls or {}
    for key, kind in REFERENCES.items():
        product.external_references.add(ExternalReference(type=kind, url=XsUri(urls[key])))
    requirements: dict[str, list[str]] = {}
    for requirement in metadata.requires_dist or []:
        if requirement.name != metadata.name:
            requirements.setdefault(requirement.name, []).append(str(requirement))
    components = [_component(name, None, "; ".join(r)) for name, r in requirements.items()]
    bom = Bom(components=components)
    bom.metadata.component = product
    bom.register_dependency(product, components)
    return JsonV1Dot6(bom).output_as_string(indent=2) + "\n"


def _component(name: str, version: str | None, description: str | None) -> Component:
    return Component(
        name=name,
        version=version,
        type=ComponentType.LIBRARY,
        description=description,
        purl=PackageURL("pypi", name=name, version=version),
        bom_ref=name,
    )


if __name__ == "__main__":
    with (ROOT / "pyproject.toml").open("rb") as file:
        assert tomllib.load(file)["project"]["urls"].keys() == REFERENCES.keys()
    main(Path(sys.argv[1]).absolute())
