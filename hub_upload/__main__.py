"""Command line: ``python -m hub_upload build``, ``verify`` and ``publish``."""

import argparse
import os
import sys
from pathlib import Path

DEFAULT_NAME = "org/glm-4v-9b-trainable"


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    options = _parser(argv[:1] == ["publish"]).parse_args(argv)
    try:
        from .faults import end_silence

        end_silence()
        status = options.run(options)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("hub_upload: stopped", file=sys.stderr)
        return 130
    except Exception as error:
        from .faults import reason_of, without_secrets

        reason = reason_of(error)
        if reason is None and isinstance(error, (ValueError, OSError)):
            reason = str(error)
        if reason is None:
            raise
        try:
            sys.stdout.flush()
        except OSError:  # output that waits for a full disk would fail once more when Python ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"hub_upload: {without_secrets(reason)}", file=sys.stderr)
        return 1


def _parser(publishing: bool) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hub_upload", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    build = commands.add_parser("build", help="make the folder that is published")
    build.set_defaults(run=_build)
    build.add_argument(
        "--weights",
        required=True,
        metavar="SOURCE",
        help="folder of the original weights, or org/name@<commit of 40 hex digits>",
    )
    build.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder to write")
    build.add_argument(
        "--name", default=DEFAULT_NAME, help=f"id to name in the card (default {DEFAULT_NAME})"
    )
    build.add_argument(
        "--copy", action="store_true", help="copy local weights where they cannot be hard-linked"
    )
    build.add_argument(
        "--check", action="store_true", help="write nothing; status 1 if DIR differs from a build"
    )
    build.add_argument(
        "--fine-tune-of", metavar="ORG/NAME", help="the weights were trained from those of this id"
    )
    build.add_argument(
        "--trained", metavar="TEXT", help="with that: what was trained and on what, for the card"
    )

    verify = commands.add_parser("verify", help="check a built folder or a repository of the Hub")
    verify.set_defaults(run=_verify)
    verify.add_argument("target", metavar="DIR_OR_ID", help="folder, or org/name")
    verify.add_argument("--revision", help="of org/name: commit, tag or branch (default main)")
    verify.add_argument(
        "--weights", action="store_true", help="also compare the sha256 of all weights (slow)"
    )
    verify.add_argument(
        "--code-only", action="store_true", help="it is meant to be without weights"
    )
    verify.add_argument(
        "--run-code",
        action="store_true",
        help="run its code even where it is not this clone's, without a token but with your rights",
    )
    verify.add_argument(
        "--json", metavar="FILE", help="write the checks there as JSON; - for standard output"
    )

    publish = commands.add_parser("publish", help="bring a built folder to the Hub")
    if publishing:
        from .publish import add_arguments, run

        add_arguments(publish)
        publish.set_defaults(run=run)
    return parser


# The imports are late: --help and mistakes are answered without loading torch.


def _build(options: argparse.Namespace) -> int:
    from . import build

    fine_tune = build.FineTune.of(options.fine_tune_of, options.trained)
    if options.check:
        found = build.differences(options.weights, options.out, options.name, fine_tune)
        print("\n".join(found) or f"{options.out} is what a build writes")
        return 1 if found else 0
    built = build.build(options.weights, options.out, options.name, options.copy, fine_tune)
    print(build.describe(built))
    return 0


def _verify(options: argparse.Namespace) -> int:
    from . import verify

    report = verify.verify(
        options.target,
        options.revision,
        check_weights=options.weights,
        code_only=options.code_only,
        run_code=options.run_code,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    if options.json == "-":
        print(report.as_json())
    else:
        print(report.as_table())
        if options.json:
            Path(options.json).write_text(report.as_json() + "\n", encoding="utf-8")
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
