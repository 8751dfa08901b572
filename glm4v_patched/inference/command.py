"""The commands' arguments; imports no torch."""

import argparse
from pathlib import Path

from ..models.quantised_weights import WEIGHTS
from ..terminal_text import doing

# static: one size for all steps, which are compiled on a GPU; graph: they are recorded, and
# replayed; auto: what pays.
CACHES = ("auto", "static", "graph", "dynamic")
WHAT = "a folder of a model or of LoRA adapters, or an id of the Hub"


def add_commands(commands) -> None:
    """Add them to the subparsers of the command line."""
    answer = commands.add_parser("answer", help="answer every row of a data file")
    answer.set_defaults(run=_answer)
    _add_source(answer)
    _add_cache(answer)
    _add_data(answer)
    answer.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSONL to write")
    replaced = "replace what --out has, instead of continuing it"
    answer.add_argument("--overwrite", action="store_true", help=replaced)
    _add_generation(answer, 512)

    evaluate = commands.add_parser("evaluate", help="score a model's answers on a data file")
    evaluate.set_defaults(run=_evaluate)
    _add_source(evaluate)
    _add_cache(evaluate)
    _add_data(evaluate)
    folder = "folder for answers, picture sheet and metrics.json; default: nothing is written"
    evaluate.add_argument("--out", type=Path, metavar="FOLDER", help=folder)
    own = "a function of your own, given an answer and a reference, that returns a number"
    evaluate.add_argument("--metric", metavar="FILE.py:FUNCTION", help=own)
    evaluate.add_argument("--overwrite", action="store_true", help=replaced)
    _add_generation(evaluate, 512)

    merge = commands.add_parser("merge", help="make one model of LoRA adapters and their model")
    merge.set_defaults(run=_merge)
    merge.add_argument("adapters", metavar="ADAPTER", help="a folder of LoRA adapters")
    merge.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new folder")
    merge.add_argument("--revision", help="of the model under the adapters, if it is on the Hub")
    where = "where the check computes (default: cpu)"
    merge.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help=where)
    unchecked = "do not compare the merged model's logits with those of the adapters"
    merge.add_argument("--no-check", dest="check", action="store_false", help=unchecked)

    export = commands.add_parser(
        "export", help="write the model in 8 or 4 bits, for other programs"
    )
    export.set_defaults(run=_export, format="auto")  # of the rows
    _add_model(export)
    bits = "of the layers' weights: floating point or integers of 8 bits, or integers of 4"
    formats = ("fp8", "int8", "int4")
    export.add_argument("--format", choices=formats, required=True, dest="bits", help=bits)
    shown = "rows with pictures, such as were trained on, by which rounding is chosen"
    export.add_argument("--calibration", required=True, metavar="FILE", help=shown)
    taken = "rows of --calibration that are taken, evenly spread (default: 256)"
    export.add_argument("--rows", type=_at_least_one, default=256, metavar="N", help=taken)
    asked = "rows that are asked before and after, as evaluate does"
    export.add_argument("--evaluate", metavar="FILE", help=asked)
    export.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new folder")
    longest = "tokens of the longest answer to --evaluate (default: 512)"
    export.add_argument("--max-new-tokens", type=int, default=512, metavar="N", help=longest)
    _add_fields(export)

    chat = commands.add_parser("chat", help="ask a model about pictures, turn after turn")
    chat.set_defaults(run=_chat)
    _add_source(chat)
    _add_cache(chat)
    second = "a second model for --web, shown beside the first"
    chat.add_argument("other", nargs="?", metavar="MODEL2", help=second)
    page = "show a page in the browser, which only this machine reaches"
    chat.add_argument("--web", action="store_true", help=page)
    chat.add_argument("--port", type=int, metavar="N", help="of the page (default: 7860)")
    shown = "a picture that the first question shows; several are allowed"
    chat.add_argument("--image", action="append", default=[], metavar="PICTURE", help=shown)
    chat.add_argument("--system", metavar="TEXT", help="what the system says first")
    _add_generation(chat, 512, beams=False)

    serve = commands.add_parser("serve", help="serve a model to clients of OpenAI's API")
    serve.set_defaults(run=_serve)
    _add_source(serve)
    _add_server(serve)
    _add_generation(serve, 512, beams=False)


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL_OR_ADAPTER", help=WHAT)
    parser.add_argument("--revision", help="branch, tag or commit of an id of the Hub")
    device = "cpu: without GPUs (slow: for trials of small models)"
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=device)


def _add_source(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    add_weights(parser)


def add_weights(parser: argparse.ArgumentParser) -> None:
    told = "hold the layers' in fewer bytes: fp8 is faster, too; the others are bitsandbytes's"
    parser.add_argument("--weights", choices=[*WEIGHTS], help=told)


def _add_cache(parser: argparse.ArgumentParser) -> None:
    told = "of keys and values (default: auto)"
    parser.add_argument("--cache", choices=CACHES, default="auto", help=told)


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
    key = "what clients have to send; GLM4V_PATCHED_API_KEY in the environment is the same"
    add("--api-key", metavar="KEY", help=key)
    fetched = "fetch pictures that clients name by http(s), from the public internet"
    add("--allow-urls", action="store_true", help=fetched)
    body = "millions of bytes that a request may have (default: 32)"
    add("--max-body-mb", type=_at_least_one, default=32, metavar="N", help=body)
    pixels = "millions of pixels that a picture may have, a request 4 times (default: 50)"
    add("--max-picture-megapixels", type=_at_least_one, default=50, metavar="N", help=pixels)
    pictures = "pictures that a request may have (default: 16)"
    add("--max-pictures", type=_at_least_one, default=16, metavar="N", help=pictures)


def _add_data(parser: argparse.ArgumentParser) -> None:
    what = (
        "rows to answer: a file, a folder of tables or an id of the Hub, as data.train of a recipe"
    )
    parser.add_argument("--data", required=True, metavar="FILE", help=what)
    fields = _add_fields(parser)
    fields("--format", default="auto", metavar="NAME", help="of the rows (default: auto)")
    every = "processes, each on a GPU of its own; default: all GPUs"
    parser.add_argument("--processes", type=_at_least_one, metavar="N", help=every)
    rows = "rows that a process answers at once (default: 8)"
    parser.add_argument("--batch-size", type=_at_least_one, default=8, metavar="N", help=rows)


def _add_fields(parser: argparse.ArgumentParser):
    fields = parser.add_argument_group("the data; as the fields of a recipe's data").add_argument
    told = "which columns are what, as {question: a, answer: b, image: c} (docs/data.md)"
    fields("--columns", metavar="YAML", help=told)
    fields("--image-folder", metavar="FOLDER", help="what paths of pictures are relative to")
    fields("--ignore", action="append", default=[], metavar="KEY", help="a key that is left out")
    fields("--split", metavar="NAME", help="of a set that has them (default: train)")
    fields("--allow-urls", action="store_true", help="fetch pictures by http(s)")
    return fields


def _add_generation(
    parser: argparse.ArgumentParser, max_new_tokens: int, beams: bool = True
) -> None:
    add = parser.add_argument_group("generation; greedy by default").add_argument
    longest = f"tokens of the longest answer (default: {max_new_tokens})"
    add("--max-new-tokens", type=int, default=max_new_tokens, metavar="N", help=longest)
    add("--temperature", type=float, metavar="T", help="draw tokens at this temperature")
    add("--top-p", type=float, metavar="P", help="draw among the likeliest, up to this probability")
    add("--top-k", type=int, metavar="K", help="draw among the K likeliest")
    add("--repetition-penalty", type=float, metavar="X", help="above 1: repeat less")
    if beams:  # which cannot be shown as they come
        told = "beams of a beam search (default: 1)"
        add("--num-beams", type=int, default=1, metavar="N", help=told)
    add("--seed", type=int, default=0, help="of what is drawn (default: 0)")


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def _name_and_folder(text: str) -> tuple[str, str]:
    name, equals, folder = text.partition("=")
    if not (name and equals and folder):
        raise argparse.ArgumentTypeError(f"{text}: expected NAME=DIR, as red=trained_on_red")
    return name, folder


# The imports are late: --help is answered at once.


def _generation(options: argparse.Namespace):
    from dataclasses import fields

    from .questions import Generation

    given = vars(options)
    return Generation(**{f.name: given[f.name] for f in fields(Generation) if f.name in given})


def _request(options: argparse.Namespace):
    from .answer import Request

    return Request(
        model=options.model,
        revision=options.revision,
        data=_source(options, options.data),
        device=options.device,
        processes=options.processes,
        batch_size=options.batch_size,
        weights=options.weights,
        generation=_generation(options),
        cache=options.cache,
    )


def _source(options: argparse.Namespace, path: str):
    from ..data.formats import FORMATS
    from ..data.rows import Source

    if options.format not in ("auto", *FORMATS):
        known = ", ".join(["auto", *FORMATS])
        raise ValueError(f"--format {options.format}: expected one of {known}")
    folder = options.image_folder
    if folder is not None and not Path(folder).is_dir():
        raise ValueError(f"--image-folder {folder}: there is no such folder")
    columns = _columns(options.columns) if options.columns else None
    return Source(
        path,
        options.format,
        split=options.split,
        image_folder=folder,
        ignore=tuple(options.ignore),
        allow_urls=options.allow_urls,
        columns=columns,
    )


def _columns(text: str) -> dict:
    import yaml

    from ..data.columns import fault_of_columns

    try:
        columns = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"--columns {text}: no YAML: {error}") from None
    if fault := fault_of_columns(columns):
        raise ValueError(f"--columns {fault}")
    return columns


def _answer(options: argparse.Namespace) -> None:
    from .answer import answer_file

    lines = answer_file(_request(options), options.out, options.overwrite)
    cut = sum(line.finish_reason == "length" for line in lines)
    told = f" ({cut:,} cut at --max-new-tokens {options.max_new_tokens})" if cut else ""
    print(f"{len(lines):,} answers{told}: {options.out}")


def _evaluate(options: argparse.Namespace) -> None:
    from .evaluate import describe, evaluate

    report = evaluate(_request(options), options.out, options.metric, options.overwrite)
    print(describe(report, options.out))


def _merge(options: argparse.Namespace) -> None:
    from .merge import merge

    asked = options.adapters, options.out, options.revision, options.device, options.check
    with doing("merging the adapters into their model"):
        difference = merge(*asked)
    print(f"model {options.out}\n{difference or 'its logits were not compared (--no-check)'}")


def _export(options: argparse.Namespace) -> None:
    from .answer import Request
    from .export import describe, export

    evaluation = None
    if options.evaluate is not None:
        evaluation = Request(
            model=options.model,
            data=_source(options, options.evaluate),
            device=options.device,
            generation=_generation(options),
        )
    report = export(
        options.model,
        options.bits,
        _source(options, options.calibration),
        options.out,
        rows=options.rows,
        evaluation=evaluation,
        revision=options.revision,
        device=options.device,
    )
    print(describe(report, options.bits, options.out))


def _chat(options: argparse.Namespace) -> None:
    if options.web:
        return _chat_in_browser(options)
    for given, name in ((options.other, "a second model"), (options.port, "--port")):
        if given is not None:
            raise ValueError(f"{name} ({given}) is for the page: add --web, or leave it out")
    from .chat import chat

    chat(
        options.model,
        options.image,
        revision=options.revision,
        device=options.device,
        weights=options.weights,
        generation=_generation(options),
        system=options.system,
        cache=options.cache,
    )


def _chat_in_browser(options: argparse.Namespace) -> None:
    if options.image:
        raise ValueError(f"--image {options.image[0]}: with --web, pictures are given in the page")
    if options.cache in ("static", "graph"):
        raise ValueError(
            f"--cache {options.cache} with --web: CUDA graphs belong to one thread; leave it out"
        )
    from .web import chat_in_browser

    chat_in_browser(
        [options.model] if options.other is None else [options.model, options.other],
        port=7860 if options.port is None else options.port,
        revision=options.revision,
        device=options.device,
        weights=options.weights,
        generation=_generation(options),
        system=options.system,
    )


def _by_name(adapters: list[tuple[str, str]]) -> dict[str, str]:
    by_name = dict(adapters)
    if len(by_name) < len(adapters):
        raise ValueError(f"--adapter: of {len(adapters)}, {len(by_name)} have different names")
    return by_name


def _serve(options: argparse.Namespace) -> None:
    from .serving.limits import MOST_MEGAPIXELS, Limits
    from .serving.serve import ServeOptions, api_key_of, hosts_of, serve

    key = api_key_of(options.api_key, "GLM4V_PATCHED_API_KEY")
    if options.max_picture_megapixels > MOST_MEGAPIXELS:
        raise ValueError(
            f"--max-picture-megapixels {options.max_picture_megapixels}: more than "
            f"{MOST_MEGAPIXELS} are refused by Pillow"
        )
    limits = Limits(
        api_key=key,
        hosts=hosts_of(options.host, key),
        max_body_bytes=options.max_body_mb * 10**6,
        max_pixels=options.max_picture_megapixels * 10**6,
        max_pictures=options.max_pictures,
        allow_urls=options.allow_urls,
    )
    serve(
        ServeOptions(
            model=options.model,
            name=options.served_model_name or options.model,
            revision=options.revision,
            device=options.device,
            weights=options.weights,
            adapters=_by_name(options.adapter),
            engine=options.engine,
            host=options.host,
            port=options.port,
            generation=_generation(options),
            limits=limits,
        )
    )
