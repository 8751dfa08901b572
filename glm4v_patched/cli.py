"""The command ``glm4v-patched`` and its subcommands."""

import argparse
import difflib
import re
import signal
import sys
from pathlib import Path

from . import __version__
from .bench.command import add_arguments as add_bench_arguments
from .compare.command import add_arguments as add_compare_arguments
from .doctor.command import add_arguments as add_doctor_arguments
from .finetune.arguments import DEVICES, add_recipe, add_run_options
from .inference.command import add_commands as add_inference_commands
from .installed_versions import versions
from .paths import to_path
from .terminal_text import error_text, pip_install, show_progress, write_line

# The example in each command's help, and what it writes or prints.
EXAMPLES = {
    "demo --out demo_output": "demo_output/metrics.json: accuracy before and after",
    "train lora_1x80gb data.train=train.jsonl out=trained": "trained: adapters, training.json; "
    "the last lines are the results, or after a stop the command that resumes",
    "recipe lora_1x80gb > my.yaml": "my.yaml: a recipe to edit",
    "answer trained --data questions.jsonl --out answers.jsonl": "a JSON line for each row, in "
    "order; after a stop, the same command goes on",
    "evaluate trained --data rows.jsonl --out scores": "a table; scores/metrics.json, answers.png",
    "merge trained --out merged": "merged: a model with its code",
    "export merged --format gguf --out files": "files for llama.cpp; other formats are models",
    "chat trained --image cat.png": "an answer to each line of standard input",
    "serve trained --port 8000 --api-key KEY": "a line with 'is served at'; it runs until stopped",
    "adopt weights --out adopted": "adopted: the weights, with this package's code",
    "bench --trained lora_lm --out rows.json": "a table of rows; rows.json has them as JSON",
    "doctor recipe.yaml --json": "findings and cures; exit status 1 if something will fail",
    "compare original --run-code --python old/bin/python": "a verdict for each case",
}
STATUSES = """exit status: 0 success, 1 error, 2 wrong arguments, 128 + N after signal N.
Results are on standard output, errors on standard error; the last line of an
error has the cure. No command asks a question."""
VERSIONED_PACKAGES = ("torch", "transformers", "deepspeed", "accelerate", "peft")


def main(argv: list[str] | None = None) -> int:
    """Run a command, and return its exit status: 1 after an error, 128 + N after signal N."""
    parser = _build_parser()
    argv = sys.argv[1:] if argv is None else argv
    _require_command(parser, argv)
    options, rest = parser.parse_known_args(argv)
    # argparse accepts positional field=value only before the first option.
    takes_fields = options.command in ("train", "doctor")
    if rest and (not takes_fields or any(text.startswith("-") for text in rest)):
        options.parser.error(_describe_unknown(options.parser, rest, takes_fields))
    options.rest = rest
    try:
        # Each phase prints a line of its own. This line is for the time between phases.
        with show_progress(f"glm4v-patched {options.command}"):
            return options.run(options) or 0
    except ModuleNotFoundError as error:
        if error.name not in ("yaml", "pydantic"):
            raise
        cure = f"recipes need PyYAML and pydantic: {pip_install('glm4v-patched[train]')}"
        print(f"glm4v-patched: {cure}", file=sys.stderr)
        return 1
    except (ValueError, RuntimeError, OSError) as error:
        print(f"glm4v-patched: {error_text(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as stop:
        print(f"glm4v-patched: {str(stop) or 'stopped'}", file=sys.stderr)
        return 128 + getattr(stop, "signum", signal.SIGINT)


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="glm4v-patched",
        description="Fine-tune glm-4v-9b, and evaluate, merge, export and serve the result.",
        epilog=f"{STATUSES}\n\nFirst: glm4v-patched demo. Options: glm4v-patched COMMAND --help.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version_help = "print the versions of this package and of what it runs on"
    parser.add_argument("--version", action=_Version, help=version_help)
    commands = parser.add_subparsers(dest="command", required=True)

    demo = commands.add_parser("demo", help="fine-tune a tiny glm-4v on drawn images and test it")
    demo.set_defaults(run=_run_demo)
    demo.add_argument("--out", type=to_path, default=Path("demo_output"), help="folder to write to")
    processes_help = "training processes; default: two, or one where there is only one GPU"
    demo.add_argument("--processes", type=_positive_count, metavar="N", help=processes_help)
    demo.add_argument("--device", choices=DEVICES, help="default: the CPU if there is no GPU")
    task_help = "shapes: name what is drawn; boxes: point to it (default: shapes)"
    demo.add_argument("--task", choices=("shapes", "boxes"), default="shapes", help=task_help)
    demo.add_argument("--steps", type=_positive_count, default=100, help="training steps")

    train = commands.add_parser(
        "train",
        help="run a recipe, or continue one that was stopped",
        usage="glm4v-patched train RECIPE [field=value ...] [options]",
        add_help=False,
    )
    train.set_defaults(run=_run_train)
    train.add_argument("-h", "--help", action=_HelpWithFields, help="show help with all fields")
    add_recipe(train)
    processes_help = "training processes, each on a GPU of its own; default: all GPUs"
    train.add_argument("--processes", type=_positive_count, metavar="N", help=processes_help)
    add_run_options(train)
    train.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything, say what would be trained, and train nothing",
    )

    recipe = commands.add_parser("recipe", help="print a recipe that ships, to be edited")
    recipe.set_defaults(run=_run_recipe)
    recipe.add_argument("name", nargs="?", metavar="NAME", help="without it, all are listed")

    add_inference_commands(commands)

    adopt = commands.add_parser("adopt", help="write this package's code beside existing weights")
    adopt.set_defaults(run=_run_adopt)
    adopt.add_argument("folder", type=to_path, metavar="FOLDER", help="a glm-4v or cogagent-9b")
    out_help = "new folder; default: FOLDER-adopted, beside it. FOLDER itself is never changed"
    adopt.add_argument("--out", type=to_path, metavar="OUT", help=out_help)

    bench = commands.add_parser("bench", help="measure training on this machine")
    bench.set_defaults(run=_run_bench)
    add_bench_arguments(bench)

    doctor = commands.add_parser("doctor", help="report what will fail here, and the cure")
    doctor.set_defaults(run=_run_doctor)
    add_doctor_arguments(doctor)

    compare = commands.add_parser("compare", help="compare the published code with ours")
    compare.set_defaults(run=_run_compare)
    add_compare_arguments(compare)
    for command in commands.choices.values():
        command.set_defaults(parser=command)
        command.formatter_class = argparse.RawDescriptionHelpFormatter
    for example, result in EXAMPLES.items():
        epilog = f"example:\n  glm4v-patched {example}\n  -> {result}\n\n{STATUSES}"
        commands.choices[example.split()[0]].epilog = epilog
    parser.set_defaults(commands=commands.choices)
    return parser


def _require_command(parser: argparse.ArgumentParser, argv: list[str]) -> None:
    """Exit with a message that names the nearest command if ``argv`` has an unknown one."""
    commands = parser.get_default("commands")
    # The options before the command take no values.
    name = next((text for text in argv if not text.startswith("-")), None)
    if name is not None and name not in commands:
        near = difflib.get_close_matches(name.lower(), commands, 1)
        hint = f"did you mean {near[0]}?" if near else "--help lists what there is"
        parser.error(f"there is no command {name!r}; {hint}")


def _describe_unknown(parser: argparse.ArgumentParser, rest: list[str], takes_fields: bool) -> str:
    """Return argparse's message for unknown arguments, with the nearest options."""
    rest = [text for text in rest if text.startswith("-") or not (takes_fields and "=" in text)]
    message = f"unrecognized arguments: {' '.join(rest)}"
    known = re.findall(r"(?<![\w-])--[a-z][\w-]*", parser.format_help())
    names = [text.partition("=")[0] for text in rest if text.startswith("-")]
    known.remove("--help")
    near = [match for name in names for match in difflib.get_close_matches(name, known, 1)]
    if near:
        return f"{message}; did you mean {', '.join(dict.fromkeys(near))}?"
    fields = "; fields of a recipe have no dashes, as trainer.learning_rate=1e-4"
    return message + (fields if takes_fields and names else "; --help lists what there is")


# Each command imports its modules when it runs, so --help and usage errors do not load torch.


def _run_demo(options: argparse.Namespace) -> None:
    from .demo.command import place_demo, run_demo

    placement = place_demo(options.processes, options.device)
    metrics = run_demo(options.out, placement, options.steps, options.task)
    score, name = ("iou", "mean IoU") if "iou_after" in metrics else ("accuracy", "exact match")
    write_line(
        f"""
{name} on images it has not seen, answered by a fresh process without this package:
  before training       {metrics[f"{score}_before"]:.3f}
  after training        {metrics[f"{score}_after"]:.3f}
  with images swapped   {metrics[f"{score}_swapped"]:.3f}
loss curve     {options.out / "loss.png"}
contact sheet  {options.out / "answers.png"}
model          {options.out / "trained"}
figures        {options.out / "metrics.json"}   ({metrics["seconds"]:.0f} s)"""
    )


def _run_train(options: argparse.Namespace) -> int:
    from .finetune.ending import describe_end
    from .finetune.job import resolve_recipe
    from .finetune.preflight import validate_recipe
    from .finetune.recipe.file import RecipeError

    overrides = [*options.overrides, *options.rest]
    try:
        with show_progress("reading the recipe"):
            recipe, placement = validate_recipe(
                options.recipe, overrides, options.processes, options.device
            )
            job = resolve_recipe(recipe)
    except RecipeError as error:
        print(error, file=sys.stderr)  # each line begins with file and line
        return 1
    from .finetune.launch import launch

    launch(
        job,
        placement,
        resume=options.resume_from or options.resume,
        overwrite=options.overwrite,
        accept_changed_data=options.accept_changed_data,
        dry_run=options.dry_run,
    )
    if options.dry_run:
        return 0
    write_line(describe_end(job, placement.on_cpu))
    return 0


def _run_recipe(options: argparse.Namespace) -> None:
    from .finetune.recipe.shipped import describe_shipped, shipped_text

    write_line(describe_shipped() if options.name is None else shipped_text(options.name))


def _run_adopt(options: argparse.Namespace) -> None:
    with show_progress("importing torch and transformers"):
        from .models.adopt import adopt

    write_line(adopt(options.folder, options.out))


def _run_bench(options: argparse.Namespace) -> None:
    from .bench.command import run

    run(options)


def _run_doctor(options: argparse.Namespace) -> int:
    from .doctor.command import run

    return run(options)


def _run_compare(options: argparse.Namespace) -> int:
    from .compare.command import run

    return run(options)


class _Version(argparse.Action):
    """Prints versions without importing the packages."""

    def __init__(self, option_strings: list[str], dest: str, help: str):
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *parsed) -> None:
        by_name = versions(VERSIONED_PACKAGES)
        print(f"glm4v-patched {__version__}\nPython {by_name['python']}")
        for name in VERSIONED_PACKAGES:
            print(name, by_name.get(name, "is not installed"))
        parser.exit()


class _HelpWithFields(argparse.Action):
    """Prints the help with the fields of a recipe below the options."""

    def __init__(self, option_strings: list[str], dest: str, help: str):
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *parsed) -> None:
        from .finetune.recipe.sections import describe_fields
        from .finetune.recipe.shipped import shipped_names

        names = "\n".join(f"  {name}" for name in shipped_names())
        fields = f"recipes that ship:\n\n{names}\n\nfields of a recipe:\n\n{describe_fields()}"
        parser.epilog = f"{parser.epilog}\n\n{fields}"
        parser.print_help()
        parser.exit()


def _positive_count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
