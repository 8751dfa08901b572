"""The commands' arguments; imports no torch."""

import argparse
from dataclasses import fields
from pathlib import Path

from ..option_fields import add_options, from_namespace
from ..paths import expand_path, to_path
from ..terminal_text import show_progress
from .questions import Generation, ModelOptions, AnswerOptions
from .serving.limits import ServerLimits

WHAT = "a folder of a model or of LoRA adapters, or an id of the Hub"
AS_THEY_COME = [each.name for each in fields(Generation) if each.name != "num_beams"]
"""Of what is shown while it is generated."""


def add_commands(commands) -> None:
    """Add them to the subparsers of the command line."""
    answer = commands.add_parser("answer", help="answer every row of a data file")
    answer.set_defaults(run=_answer)
    _add_data(answer)
    answer.add_argument("--out", type=to_path, required=True, metavar="FILE", help="JSONL to write")

    evaluate = commands.add_parser("evaluate", help="score a model's answers on a data file")
    evaluate.set_defaults(run=_evaluate)
    _add_data(evaluate)
    folder = "folder for answers, image sheet and metrics.json; default: nothing is written"
    evaluate.add_argument("--out", type=to_path, metavar="FOLDER", help=folder)
    own = "a function of your own, given an answer and a reference, that returns a number"
    evaluate.add_argument("--metric", type=expand_path, metavar="FILE.py:FUNCTION", help=own)

    merge = commands.add_parser("merge", help="make one model of LoRA adapters and their model")
    merge.set_defaults(run=_merge)
    merge.add_argument("adapters", type=expand_path, metavar="ADAPTER", help="a folder of LoRA adapters")
    merge.add_argument("--out", type=to_path, required=True, metavar="DIR", help="a new folder")
    merge.add_argument("--revision", help="of the model under the adapters, if it is on the Hub")

    told = "write the model in 8 or 4 bits, for other programs"
    export = commands.add_parser("export", help=told)
    export.set_defaults(run=_export, format="auto")  # of the rows
    _add_model(export, ["revision", "device"])
    bits = "of the layers' weights: floating point or integers of 8 bits, or integers of 4"
    formats = ("fp8", "int8", "int4")
    export.add_argument("--format", choices=formats, required=True, dest="bits", help=bits)
    shown = "rows with images, such as were trained on, by which rounding is chosen"
    export.add_argument("--calibration", type=expand_path, required=True, metavar="FILE", help=shown)
    taken = "rows of --calibration that are taken, evenly spread (default: 256)"
    export.add_argument("--rows", type=_at_least_one, default=256, metavar="N", help=taken)
    asked = "rows that are asked before and after, as evaluate does"
    export.add_argument("--evaluate", type=expand_path, metavar="FILE", help=asked)
    export.add_argument("--out", type=to_path, required=True, metavar="DIR", help="a new folder")
    _add_generation(export, ["max_new_tokens"])
    _add_fields(export)

    chat = commands.add_parser("chat", help="ask a model about images, turn after turn")
    chat.set_defaults(run=_chat)
    _add_model(chat)
    second = "a second model for --web, shown beside the first"
    chat.add_argument("other", type=expand_path, nargs="?", metavar="MODEL2", help=second)
    page = "show a page in the browser, which only this machine reaches"
    chat.add_argument("--web", action="store_true", help=page)
    chat.add_argument("--port", type=int, metavar="N", help="of the page (default: 7860)")
    shown = "an image that the first question shows; several are allowed"
    chat.add_argument(
        "--image", type=expand_path, action="append", default=[], metavar="IMAGE", help=shown
    )
    chat.add_argument("--system", metavar="TEXT", help="what the system says first")
    _add_generation(chat, AS_THEY_COME)

    serve = commands.add_parser("serve", help="serve a model to clients of OpenAI's API")
    serve.set_defaults(run=_serve)
    _add_model(serve, ["revision", "device", "weights"])
    _add_server(serve)
    _add_generation(serve, AS_THEY_COME)


def _add_model(parser: argparse.ArgumentParser, names: list[str] | None = None) -> None:
    parser.add_argument("model", type=expand_path, metavar="MODEL_OR_ADAPTER", help=WHAT)
    add_options(parser, ModelOptions, names)


def _add_server(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    engine = "what computes; auto: vllm on a GPU where it is installed (default: auto)"
    add("--engine", choices=("auto", "transformers", "vllm"), default="auto", help=engine)
    add("--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1)")
    add("--port", type=int, default=8000, help="0 is any that is free (default: 8000)")
    name = "what clients call the model (default: MODEL_OR_ADAPTER)"
    add("--served-model-name", metavar="NAME", help=name)
    beside = "LoRA adapters on the same model, which clients ask for by NAME; several are allowed"
    pair = _name_and_folder
    add("--adapter", action="append", default=[], type=pair, metavar="NAME=DIR", help=beside)
    add_options(parser, ServerLimits)
    body = "millions of bytes that a request may have (default: 32)"
    add("--max-body-mb", type=_at_least_one, default=32, metavar="N", help=body)
    pixels = "millions of pixels that an image may have, a request 4 times (default: 50)"
    add("--max-image-megapixels", type=_at_least_one, default=50, metavar="N", help=pixels)


def _add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=expand_path, metavar="MODEL_OR_ADAPTER", help=WHAT)
    add_options(parser, AnswerOptions)
    what = "rows to answer: a file, a folder of tables or an id of the Hub, as in a recipe"
    parser.add_argument("--data", type=expand_path, required=True, metavar="FILE", help=what)
    add_field = _add_fields(parser)
    add_field("--format", default="auto", metavar="NAME", help="of the rows (default: auto)")
    replaced = "replace what --out has, instead of continuing it"
    parser.add_argument("--overwrite", action="store_true", help=replaced)
    _add_generation(parser)


def _add_fields(parser: argparse.ArgumentParser):
    add = parser.add_argument_group("the data; as the fields of a recipe's data").add_argument
    told = "which columns are what, as {question: a, answer: b, image: c} (docs/data.md)"
    add("--columns", metavar="YAML", help=told)
    add(
        "--image-folder",
        type=expand_path,
        metavar="FOLDER",
        help="what paths of images are relative to",
    )
    add("--ignore", action="append", default=[], metavar="KEY", help="a key that is left out")
    add("--split", metavar="NAME", help="of a set that has them (default: train)")
    add("--allow-urls", action="store_true", help="fetch images by http(s)")
    return add


def _add_generation(parser: argparse.ArgumentParser, names: list[str] | None = None) -> None:
    add_options(parser.add_argument_group("generation; greedy by default"), Generation, names)


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def _name_and_folder(text: str) -> tuple[str, str]:
    name, equals, folder = text.partition("=")
    if not (name and equals and folder):
        raise argparse.ArgumentTypeError(f"{text}: expected NAME=DIR, as red=trained_on_red")
    return name, expand_path(folder)


# The imports are late: --help is answered at once.


def _request(options: argparse.Namespace, path: str) -> AnswerOptions:
    generation = from_namespace(Generation, options)
    return from_namespace(AnswerOptions, options, data=_source(options, path), generation=generation)


def _source(options: argparse.Namespace, path: str):
    import yaml

    from ..data.columns import find_columns_problem
    from ..data.formats import ROW_FORMATS
    from ..data.rows import DataSource

    if options.format not in ("auto", *ROW_FORMATS):
        known = ", ".join(["auto", *ROW_FORMATS])
        raise ValueError(f"--format {options.format}: expected one of {known}")
    if options.image_folder is not None and not Path(options.image_folder).is_dir():
        raise ValueError(f"--image-folder {options.image_folder}: there is no such folder")
    columns = None
    if options.columns:
        try:
            columns = yaml.safe_load(options.columns)
        except yaml.YAMLError as error:
            raise ValueError(f"--columns {options.columns}: no YAML: {error}") from None
        if fault := find_columns_problem(columns):
            raise ValueError(f"--columns {fault}")
    names = ("format", "split", "image_folder", "allow_urls")
    given = {name: getattr(options, name) for name in names}
    return DataSource(path, ignore=tuple(options.ignore), columns=columns, **given)


def _answer(options: argparse.Namespace) -> None:
    from .answer import answer_file

    lines = answer_file(_request(options, options.data), options.out, options.overwrite)
    cut = sum(line.finish_reason == "length" for line in lines)
    told = f" ({cut:,} cut at --max-new-tokens {options.max_new_tokens})" if cut else ""
    print(f"{len(lines):,} answers{told}: {options.out}")


def _evaluate(options: argparse.Namespace) -> None:
    from .evaluate import describe_scores, evaluate

    asked = _request(options, options.data)
    report = evaluate(asked, options.out, options.metric, options.overwrite)
    print(describe_scores(report, options.out))


def _merge(options: argparse.Namespace) -> None:
    from .merge import merge

    with show_progress("merging the adapters into their model"):
        merge(options.adapters, options.out, options.revision)
    print(f"model {options.out}")


def _export(options: argparse.Namespace) -> None:
    from .export import export

    report = export(
        options.model,
        options.bits,
        _source(options, options.calibration),
        options.out,
        rows=options.rows,
        evaluation=_request(options, options.evaluate) if options.evaluate else None,
        revision=options.revision,
        device=options.device,
    )
    print(f"{report}\nmodel {options.out}")


def _chat(options: argparse.Namespace) -> None:
    if options.web:
        from .web import chat_in_browser as chat
    else:
        from .chat import chat
    chat(options)


def _serve(options: argparse.Namespace) -> None:
    from .serving.serve import serve

    serve(options)
