"""Command line: ``python -m hub_upload build``, ``verify`` and ``publish``."""

import argparse
import sys

from glm4v_patched.atomic import require_new_folder
from glm4v_patched.paths import expand_path, refuse_overlap, to_path
from glm4v_patched.terminal_text import pluralize, printable, show_progress, write_line


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hub_upload", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    source = "folder of the original weights, or org/name@<commit of 40 hex digits>"
    build = commands.add_parser("build", help="build the folder that is published")
    group = build.add_mutually_exclusive_group(required=True)
    group.add_argument("--weights", type=expand_path, metavar="SOURCE", help=source)
    group.add_argument(
        "--adapter",
        type=to_path,
        metavar="DIR",
        help="or build from a folder of LoRA adapters",
    )
    add = build.add_argument
    add("--out", required=True, type=to_path, metavar="DIR", help="folder to write")
    default = "org/glm-4v-9b-trainable or org/cogagent-9b-trainable"
    add("--name", help=f"id for the model card (default {default})")
    base = "model that the weights were trained from; ORG/NAME@COMMIT for adapters"
    add("--fine-tune-of", metavar="ORG/NAME", help=base)
    add("--trained", metavar="TEXT", help="for the card: what was trained, and on which data")
    metrics = "metrics.json of glm4v-patched evaluate on these weights: scores for the card"
    add("--evaluation", type=to_path, metavar="FILE", help=metrics)
    data = "the data set of --evaluation: its id on the Hub, or its name"
    add("--evaluated-on", metavar="TEXT", help=data)
    add = commands.add_parser("verify", help="check a folder or a repository").add_argument
    add("target", type=expand_path, metavar="DIR_OR_ID", help="folder, or org/name")
    add("--revision", help="of org/name: commit, tag or branch (default main)")
    add("--weights", action="store_true", help="also compare the sha256 of all weights (slow)")
    add("--json", action="store_true", help="print the checks as JSON")
    python = "Python interpreter to load it with, in place of this one; may be repeated"
    add("--python", type=expand_path, action="append", default=[], metavar="PATH", help=python)
    add = commands.add_parser("publish", help="publish a built folder on the Hub").add_argument
    add("folder", type=to_path, metavar="DIR", help="folder written by build")
    add("--repo", required=True, metavar="ORG/NAME", help="repository to publish to")
    add("--push", action="store_true", help="publish; without it, only print what would be done")
    add(
        "--allow-foreign",
        action="store_true",
        help="publish beside, and over, files that no build of ours wrote",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    options = _make_parser().parse_args(argv)
    try:
        # Long steps have a line of their own; this line is shown between them.
        with show_progress(f"hub_upload {options.command}"):
            return _run_command(options)
    except KeyboardInterrupt:
        print("hub_upload: stopped", file=sys.stderr)
        return 130
    except Exception as error:
        if sys.flags.dev_mode:
            raise
        from pydantic import ValidationError

        from .hub import describe_error, without_secrets

        # Errors that we raise are plain ValueErrors; pydantic's are about the manifest.
        is_ours = type(error) in (ValueError, ValidationError)
        message = str(error) if is_ours else describe_error(error)
        print(f"hub_upload: {without_secrets(message)}", file=sys.stderr)
        return 1


def _run_command(options: argparse.Namespace) -> int:
    # Imported here, so that --help and usage errors are answered without loading torch.
    import huggingface_hub

    version = huggingface_hub.__version__
    if tuple(map(int, version.split(".")[:2])) < (1, 33):
        print(
            f"hub_upload: huggingface_hub {version} is installed, but 1.33 or newer is needed, to "
            "copy between repositories: pip install -U huggingface_hub transformers",
            file=sys.stderr,
        )
        return 1
    from .hub import limit_request_time

    limit_request_time()
    if options.command == "publish":
        from .publish import publish

        publish(options)
        return 0
    if options.command == "verify":
        from .verify import verify

        report = verify(options.target, options.revision, options.weights, options.python)
        write_line(report.as_json() if options.json else report.as_table())
        return 1 if report.failures else 0
    location = options.weights or options.adapter
    refuse_overlap(options.out, [("the source itself", location)], "--out")
    require_new_folder(options.out)
    print(printable(f"building {options.out} from {location}"), file=sys.stderr, flush=True)
    from . import adapter, build, evaluation

    if options.adapter is not None:
        if options.trained is not None:
            raise ValueError("--trained is for --weights: the card of adapters has it already")
        if options.evaluation or options.evaluated_on:
            raise ValueError(
                "--evaluation is for --weights: the card of adapters has scores already"
            )
        name = options.name or "org/glm-4v-9b-adapters"
        base = adapter.build_adapter_repository(
            options.adapter, options.out, name, options.fine_tune_of
        )
        write_line(f"adapters of {base}; to publish them: hf upload {name} {options.out}")
        return 0
    source = build.read_source(options.weights, options.fine_tune_of, options.trained)
    scores = evaluation.read_evaluation(options.evaluation, options.evaluated_on, source)
    source.evaluation = scores or source.evaluation
    name = options.name or f"org/{build.published_model(source).name}-trainable"
    manifest = build.build_model_repository(source, options.out, name)
    origin = manifest.weights_from
    weights = f"the Hub will copy the weights from {origin}" if origin else "weights in the folder"
    summary = (
        f"{pluralize(len(manifest.names), 'file')}, {len(manifest.weights)} of weights; {weights}"
    )
    write_line(f"version {manifest.version}: {summary}")
    if build.WEIGHTS_LICENSE not in manifest.files:
        write_line(
            "the source has no license file; the card links to the original's: please read it"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
