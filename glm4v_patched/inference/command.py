"""Command-line arguments of answer, evaluate, merge, export, chat and serve; imports no torch."""

import argparse
import dataclasses
from pathlib import Path

from ..option_fields import add_options, from_namespace
from ..paths import expand_path, to_path
from ..terminal_text import pluralize, write_line
from .questions import AnswerOptions, Generation, ModelOptions
from .serving.limits import ServerLimits

MODEL_HELP = "a folder of a model or of LoRA adapters, or an id on the Hub"
STREAMING_OPTIONS = [
    field.name for field in dataclasses.fields(Generation) if field.name != "num_beams"
]
"""Generation options of commands that stream answers; beam search cannot stream."""


def add_commands(commands) -> None:
    """Add the commands to the subparsers of the command line."""
    answer = commands.add_parser("answer", help="answer every row of a data file")
    answer.set_defaults(run=_run_answer)
    _add_answering(answer)
    answer.add_argument("--out", type=to_path, required=True, metavar="FILE", help="JSONL to write")

    evaluate = commands.add_parser("evaluate", help="score a model's answers on a data file")
    evaluate.set_defaults(run=_run_evaluate)
    _add_answering(evaluate)
    out_help = "folder for answers, image sheet and metrics.json; default: nothing is written"
    evaluate.add_argument("--out", type=to_path, metavar="FOLDER", help=out_help)
    metric_help = "your own function, which takes an answer and a reference and returns a number"
    evaluate.add_argument(
        "--metric", type=expand_path, metavar="FILE.py:FUNCTION", help=metric_help
    )

    merge = commands.add_parser("merge", help="merge LoRA adapters into their model")
    merge.set_defaults(run=_run_merge)
    merge.add_argument(
        "adapters", type=expand_path, metavar="ADAPTER", help="a folder of LoRA adapters"
    )
    merge.add_argument("--out", type=to_path, required=True, metavar="DIR", help="a new folder")
    merge.add_argument("--revision", help="revision of the base model, if it is on the Hub")

    export_help = "write the model for other programs: in 8 or 4 bits, or as GGUF"
    export = commands.add_parser("export", help=export_help)
    # The attribute format is the format of the rows. The value of export's own --format is in
    # export_format.
    export.set_defaults(run=_run_export, format="auto")
    _add_model(export, ["revision", "device"])
    format_help = (
        "store the layers' weights as 8-bit floating point, 8-bit integers or 4-bit integers, or "
        "write gguf for llama.cpp, which takes only --gguf-type, --revision and --out"
    )
    formats = ("fp8", "int8", "int4", "gguf")
    export.add_argument(
        "--format", choices=formats, required=True, dest="export_format", help=format_help
    )
    type_help = "type of the language model's matrices in GGUF files (default: f16)"
    export.add_argument("--gguf-type", choices=("f32", "bf16", "f16", "q8_0"), help=type_help)
    calibration_help = "rows with images, like the training data, to calibrate the rounding with"
    export.add_argument("--calibration", type=expand_path, metavar="FILE", help=calibration_help)
    rows_help = "rows of --calibration to use, evenly spaced (default: 256)"
    export.add_argument("--rows", type=_positive_integer, metavar="N", help=rows_help)
    evaluation_help = "rows to evaluate before and after, as the command evaluate does"
    export.add_argument("--evaluate", type=expand_path, metavar="FILE", help=evaluation_help)
    export.add_argument("--out", type=to_path, required=True, metavar="DIR", help="a new folder")
    _add_generation(export, ["max_new_tokens"])
    _add_data_fields(export)

    chat = commands.add_parser("chat", help="ask a model about images, turn after turn")
    chat.set_defaults(run=_run_chat)
    _add_model(chat)
    second_help = "a second model for --web, shown beside the first"
    chat.add_argument("other", type=expand_path, nargs="?", metavar="MODEL2", help=second_help)
    page_help = "show a page in the browser, reachable from this machine only"
    chat.add_argument("--web", action="store_true", help=page_help)
    chat.add_argument("--port", type=int, metavar="N", help="port of the page (default: 7860)")
    image_help = "an image for the first question; may be given several times"
    chat.add_argument(
        "--image", type=expand_path, action="append", default=[], metavar="IMAGE", help=image_help
    )
    chat.add_argument("--system", metavar="TEXT", help="the system message")
    _add_generation(chat, STREAMING_OPTIONS)

    serve = commands.add_parser("serve", help="serve a model to clients of OpenAI's API")
    serve.set_defaults(run=_run_serve)
    _add_model(serve, ["revision", "device", "dtype", "weights"])
    _add_server(serve)
    _add_generation(serve, STREAMING_OPTIONS)


def _add_model(parser: argparse.ArgumentParser, names: list[str] | None = None) -> None:
    parser.add_argument("model", type=expand_path, metavar="MODEL_OR_ADAPTER", help=MODEL_HELP)
    add_options(parser, ModelOptions, names)


def _add_server(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    engine_help = "what computes answers; auto: vllm on a GPU if it is installed (default: auto)"
    add("--engine", choices=("auto", "transformers", "vllm"), default="auto", help=engine_help)
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    add("--port", type=int, default=8000, help="0 chooses a free port (default: 8000)")
    name_help = "name of the model for clients (default: MODEL_OR_ADAPTER)"
    add("--served-model-name", metavar="NAME", help=name_help)
    adapter_help = "LoRA adapters on the same model, which clients request by NAME; may be repeated"
    add(
        "--adapter",
        action="append",
        default=[],
        type=_name_and_folder,
        metavar="NAME=DIR",
        help=adapter_help,
    )
    add_options(parser, ServerLimits)
    body_help = "largest request, in megabytes (default: 32)"
    add("--max-body-mb", type=_positive_integer, default=32, metavar="N", help=body_help)
    pixels_help = "largest image (default: 50); all images of a request may have 4 times as many"
    add("--max-image-megapixels", type=_positive_integer, default=50, metavar="N", help=pixels_help)


def _add_answering(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=expand_path, metavar="MODEL_OR_ADAPTER", help=MODEL_HELP)
    add_options(parser, AnswerOptions)
    data_help = "rows to answer: a file, a folder of tables or an id on the Hub, as in a recipe"
    parser.add_argument("--data", type=expand_path, required=True, metavar="FILE", help=data_help)
    add_field = _add_data_fields(parser)
    add_field("--format", default="auto", metavar="NAME", help="format of the rows (default: auto)")
    overwrite_help = "replace --out instead of continuing it"
    parser.add_argument("--overwrite", action="store_true", help=overwrite_help)
    _add_generation(parser)


def _add_data_fields(parser: argparse.ArgumentParser):
    """Add the fields of a recipe's ``data`` as a group of options.

    Returns:
        The group's ``add_argument``.
    """
    add = parser.add_argument_group("data, like the fields of data in a recipe").add_argument
    columns_help = "columns by their meaning: {question: a, answer: b, image: c} (docs/data.md)"
    add("--columns", metavar="YAML", help=columns_help)
    add(
        "--image-folder",
        type=expand_path,
        metavar="FOLDER",
        help="folder that image paths are relative to",
    )
    add("--image-root", metavar="PREFIX", help="beginning of paths that --image-folder replaces")
    add("--ignore", action="append", default=[], metavar="KEY", help="a key to leave out")
    add("--split", metavar="NAME", help="split to read, if there are splits (default: train)")
    add("--allow-urls", action="store_true", help="fetch images by http(s)")
    add("--boxes", metavar="FORMAT", help="format of boxes: pixels_xyxy, ... (docs/grounding.md)")
    return add


def _add_generation(parser: argparse.ArgumentParser, names: list[str] | None = None) -> None:
    add_options(parser.add_argument_group("generation; greedy by default"), Generation, names)


def _positive_integer(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def _name_and_folder(text: str) -> tuple[str, str]:
    name, equals, folder = text.partition("=")
    if not (name and equals and folder):
        raise argparse.ArgumentTypeError(f"{text}: expected NAME=DIR, such as red=trained_on_red")
    return name, expand_path(folder)


# Imports below are inside the functions, so that --help is answered at once.


def _answer_options(options: argparse.Namespace, path: str) -> AnswerOptions:
    generation = from_namespace(Generation, options)
    return from_namespace(
        AnswerOptions, options, data=_data_source(options, path), generation=generation
    )


def _data_source(options: argparse.Namespace, path: str):
    """Return the source of rows at ``path``, with the options of :func:`_add_data_fields`."""
    import yaml

    from ..data.boxes import BOX_FORMATS
    from ..data.columns import find_columns_problem
    from ..data.formats import ROW_FORMATS
    from ..data.rows import DataSource

    if options.format not in ("auto", *ROW_FORMATS):
        known = ", ".join(["auto", *ROW_FORMATS])
        raise ValueError(f"--format {options.format}: expected one of {known}")
    if options.image_folder is not None and not Path(options.image_folder).is_dir():
        raise ValueError(f"--image-folder {options.image_folder}: no such folder")
    columns = None
    if options.columns:
        try:
            columns = yaml.safe_load(options.columns)
        except (yaml.YAMLError, RecursionError) as error:
            raise ValueError(f"--columns {options.columns}: not valid YAML: {error}") from None
        if problem := find_columns_problem(columns):
            raise ValueError(f"--columns {problem}")
    if options.boxes not in (None, *BOX_FORMATS):
        raise ValueError(f"--boxes {options.boxes}: expected one of {', '.join(BOX_FORMATS)}")
    names = ("format", "split", "image_folder", "image_root", "allow_urls", "boxes")
    fields = {name: getattr(options, name) for name in names}
    return DataSource(path, ignore=tuple(options.ignore), columns=columns, **fields)


def _run_answer(options: argparse.Namespace) -> None:
    from .answer import answer_file

    lines = answer_file(_answer_options(options, options.data), options.out, options.overwrite)
    num_cut = sum(line.finish_reason == "length" for line in lines)
    note = f" ({num_cut:,} cut at --max-new-tokens {options.max_new_tokens})" if num_cut else ""
    write_line(f"{pluralize(len(lines), 'answer')}{note}: {options.out}")


def _run_evaluate(options: argparse.Namespace) -> None:
    from .evaluate import describe_scores, evaluate

    answer_options = _answer_options(options, options.data)
    report = evaluate(answer_options, options.out, options.metric, options.overwrite)
    write_line(describe_scores(report, options.out))


def _run_merge(options: argparse.Namespace) -> None:
    from .merge import merge

    merge(options.adapters, options.out, options.revision)
    write_line(f"model {options.out}")


def _run_export(options: argparse.Namespace) -> None:
    if options.export_format == "gguf":
        from .gguf_file import export_gguf

        for name in ("calibration", "rows", "evaluate"):
            if getattr(options, name) is not None:
                raise ValueError(f"--{name} is not used with --format gguf; leave it out")
        gguf_type = options.gguf_type or "f16"
        write_line(export_gguf(options.model, options.out, gguf_type, options.revision))
        return
    from .export import export

    if options.gguf_type is not None or options.calibration is None:
        raise ValueError(
            f"--format {options.export_format} needs --calibration FILE, and takes no --gguf-type"
        )
    report = export(
        options.model,
        options.export_format,
        _data_source(options, options.calibration),
        options.out,
        rows=options.rows or 256,
        evaluation=_answer_options(options, options.evaluate) if options.evaluate else None,
        revision=options.revision,
        device=options.device,
    )
    write_line(f"{report}\nmodel {options.out}")


def _run_chat(options: argparse.Namespace) -> None:
    if options.web:
        from .web import chat_in_browser as chat
    else:
        from .chat import chat
    chat(options)


def _run_serve(options: argparse.Namespace) -> None:
    from .serving.serve import serve

    serve(options)
