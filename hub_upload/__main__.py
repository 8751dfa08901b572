"""Command line: ``python -m hub_upload build``, ``verify`` and ``publish``."""

import argparse
import sys

from glm4v_patched.paths import expand_path, to_path

DEFAULT_NAME = "org/glm-4v-9b-trainable"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hub_upload", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    def yes(name: str, help: str) -> None:
        add(name, action="store_true", help=help)

    source = "folder of the original weights, or org/name@<commit of 40 hex digits>"
    build = commands.add_parser("build", help="make the folder that is published")
    group = build.add_mutually_exclusive_group(required=True)
    group.add_argument("--weights", type=expand_path, metavar="SOURCE", help=source)
    group.add_argument(
        "--adapter", type=to_path, metavar="DIR", help="instead: a folder of LoRA adapters"
    )
    add = build.add_argument
    add("--out", required=True, type=to_path, metavar="DIR", help="folder to write")
    add("--name", default=DEFAULT_NAME, help=f"id to name in the card (default {DEFAULT_NAME})")
    of = "what the weights were trained from; of adapters ORG/NAME@COMMIT"
    add("--fine-tune-of", metavar="ORG/NAME", help=of)
    add("--trained", metavar="TEXT", help="for the card: what was trained and on what")
    add = commands.add_parser("verify", help="check a folder or a repository").add_argument
    add("target", type=expand_path, metavar="DIR_OR_ID", help="folder, or org/name")
    add("--revision", help="of org/name: commit, tag or branch (default main)")
    yes("--weights", "also compare the sha256 of all weights (slow)")
    yes("--json", "print the checks as JSON")
    other = "interpreter that loads it, in place of this one; repeat it for more versions"
    add("--python", type=expand_path, action="append", default=[], metavar="PATH", help=other)
    add = commands.add_parser("publish", help="bring a built folder to the Hub").add_argument
    add("folder", type=to_path, metavar="DIR", help="folder that build made")
    add("--repo", required=True, metavar="ORG/NAME", help="repository to publish to")
    yes("--push", "do it; without, only show what would be done")
    yes("--allow-foreign", "publish beside (and over) files that no build of ours put there")
    return parser


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    # The imports are late: --help and mistakes are answered without loading torch.
    import huggingface_hub
    from pydantic import ValidationError

    version = huggingface_hub.__version__
    if tuple(map(int, version.split(".")[:2])) < (1, 33):
        told = f"huggingface_hub {version} is older than 1.33, which copies between repositories"
        print(f"hub_upload: {told}: pip install -U huggingface_hub transformers", file=sys.stderr)
        return 1
    from .hub import describe, limit_silence, without_secrets

    try:
        limit_silence()
        return _run(options)
    except KeyboardInterrupt:
        print("hub_upload: stopped", file=sys.stderr)
        return 130
    except Exception as error:
        if sys.flags.dev_mode:
            raise
        # Ours are ValueErrors of no other kind, as are those of what was given.
        told = str(error) if type(error) in (ValueError, ValidationError) else describe(error)
        print(f"hub_upload: {without_secrets(told)}", file=sys.stderr)
        return 1


def _run(options: argparse.Namespace) -> int:
    if options.command == "publish":
        from .publish import publish

        publish(options)
        return 0
    if options.command == "verify":
        from .verify import verify

        report = verify(options.target, options.revision, options.weights, options.python)
        print(report.to_json_bytes() if options.json else report.as_table())
        return 1 if report.failures else 0
    from . import adapter, build

    said = options.fine_tune_of, options.trained
    if options.adapter is not None:
        manifest = adapter.build(options.adapter, options.out, options.name, *said)
    else:
        source = build.read_source(options.weights, *said)
        manifest = build.build(source, options.out, options.name)
    of, origin = manifest.fine_tune, manifest.weights_from
    told = f"{len(manifest.names)} files, {len(manifest.weights)} of weights"
    told += f", adapters of {of.base}" if of and manifest.is_of_adapters else ""
    where = f"copied by the Hub from {origin}, when published" if origin else "in the folder"
    print(f"version {manifest.version}: {told}, {where}")
    if not manifest.is_of_adapters and build.WEIGHTS_LICENSE not in manifest.files:
        print("the source has no license file; the card links to the original's: read it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
