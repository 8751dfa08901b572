"""``glm4v-patched bench --generate``: how fast answers are generated, ours and the original's code.

Each code is measured in a process of its own, which builds the model with random weights.
"""

import argparse
import json
import shlex
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from subprocess import Popen, TimeoutExpired

from ..bench.settings import Settings
from ..engine.environment import python_module, training_environment
from ..row_files import add_rows, markdown, read_rows

CACHES = ("static", "dynamic")


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What is measured, and how.

    Attributes:
        batch: Numbers of rows, each of which gets rows of its own.
        new_tokens: Of each answer.
        prompt_tokens: Ids of text in a prompt, beside its picture.
        cache: ``static`` compiles a step on a GPU, ``dynamic`` runs it as it is.
        compile_options: Inductor's options that are laid over ours, as JSON.
        compile_layers: Compile the layers of tower and decoder for the prompt, too.
        repeats: Timed answers of each batch; their median counts.
        config: ``config.json`` of another size.
        against: Folder of the published repository; ``None``: ours.
    """

    batch: tuple[int, ...] = (1, 8, 32)
    new_tokens: int = 128
    prompt_tokens: int = 40
    cache: str = "static"
    compile_options: str = "{}"
    compile_layers: bool = False
    attn_implementation: str = "sdpa"
    repeats: int = 3
    config: str | None = None
    against: str | None = None
    device: str = "cuda"

    def __post_init__(self) -> None:
        for name in ("batch", "new_tokens", "prompt_tokens", "repeats"):
            given = getattr(self, name)
            least = 2 if name == "new_tokens" else 1
            if not given or min(given if isinstance(given, tuple) else [given]) < least:
                raise ValueError(f"{_flag(name)} is {given}; expected at least {least}")
        try:
            is_object = isinstance(json.loads(self.compile_options), dict)
        except ValueError:
            is_object = False
        if not is_object:
            raise ValueError(
                f"--compile-options is {self.compile_options!r}; expected a JSON object as "
                """'{"max_autotune": true}'"""
            )
        if self.device == "cpu" and self.config is None:
            raise ValueError(
                "--device cpu with the real model, of 13.9 billion weights: expected --config of "
                "a small one"
            )
        if self.against is not None and not Path(self.against, "config.json").is_file():
            raise ValueError(
                f"--against {self.against} has no config.json: expected a folder with the "
                "published repository"
            )


DEFAULTS = Speed(config="")
# Options of bench that are no settings, by their defaults.
OF_TRAINING = {"gpus": 2, "pictures": None, "into": None}
REQUIRED = "batch", "implementation"
COLUMNS: dict[str, Callable[[dict], str]] = {
    "code": lambda row: row["implementation"],
    "transformers": lambda row: row.get("versions", {}).get("transformers", "-"),
    "device": lambda row: row.get("device", "-"),
    "cache": lambda row: row.get("cache", "-"),
    "batch": lambda row: str(row["batch"]),
    "first token, s": lambda row: row.get("error") or f"{row['first_token_s']:.3f}",
    "tokens/s": lambda row: f"{row['tokens_per_s']:,.1f}" if "tokens_per_s" in row else "-",
    "bandwidth": lambda row: f"{row['bandwidth_share']:.0%}" if "bandwidth_share" in row else "-",
    "GiB": lambda row: f"{row['peak_allocated_gib']:.1f}" if row.get("peak_allocated_gib") else "-",
}


def add_speed_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("--generate").add_argument
    add("--generate", action="store_true", help="measure generation, not training")
    add("--batch", type=int, nargs="+", help="rows at once (default: 1 8 32)")
    add("--new-tokens", type=int, help="of each answer (default: 128)")
    add("--prompt-tokens", type=int, help="beside a prompt's picture (default: 40)")
    add("--cache", choices=CACHES, help="static: compiled steps (default)")
    add("--compile-options", metavar="JSON", help="laid over ours for inductor")
    add("--compile-layers", action="store_true", help="compile what reads the prompt, too")
    add("--repeats", type=int, help="timed answers of each batch (default: 3)")
    add("--python", metavar="FILE", help="Python that has the original's transformers")


def measure_speed(options: argparse.Namespace) -> None:
    """Measure ours and, with ``--against``, the original's code; print the rows and add them to
    ``--out``; or, with ``--rows``, print the table of old ones. Raises ``ValueError`` for what
    cannot be measured, before anything runs."""
    for name, default in OF_TRAINING.items():
        if getattr(options, name) != default:
            raise ValueError(f"{_flag(name)} is of training: leave it out with --generate")
    if options.rows:
        print(table([row for path in options.rows for row in read_rows(REQUIRED, path)]), end="")
        return
    names = {each.name for each in fields(Speed)}
    for each in fields(Settings):
        value = getattr(options, each.name)
        if each.name not in names and value not in (each.default, [each.default]):
            raise ValueError(f"{_flag(each.name)} is of training: leave it out with --generate")
    given = {name: getattr(options, name) for name in names}
    given = {name: value for name, value in given.items() if value is not None}
    given["batch"] = tuple(given.get("batch", DEFAULTS.batch))
    original = given.pop("against", None)
    asked = [Speed(**given)]
    if original is not None:
        asked.append(Speed(**given | {"against": original}))
    if options.out:
        read_rows(REQUIRED, options.out, may_be_new=True)
    for speed in asked:
        rows = _measure(speed, options.python, options.timeout * len(speed.batch))
        if options.out:
            add_rows(REQUIRED, options.out, rows)


def table(rows: list[dict]) -> str:
    """In Markdown, by device and batch; else in the order of the rows."""
    order = sorted(rows, key=lambda row: (row.get("device", "-"), row["batch"]))
    return markdown([*COLUMNS], ([cell(row) for cell in COLUMNS.values()] for row in order))


def _measure(speed: Speed, python: str | None, timeout: float) -> list[dict]:
    """A row of each batch; ``error`` where there is none. What the process says is printed."""
    command = python_module("glm4v_patched.inference.speed_worker")
    if speed.against is not None and python is not None:
        command = [python, *command[1:]]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rows.json")
        environment = training_environment(1, speed.device == "cpu")
        error = _run([*command, json.dumps(asdict(speed)), str(out)], environment, timeout)
        rows = json.loads(out.read_text()) if out.exists() else []
    whole = command_of(speed)
    implementation = "ours" if speed.against is None else "original"
    common = {"workload": "generate", "implementation": implementation}
    measured = {row["batch"] for row in rows}
    if error is not None:
        missing = [batch for batch in speed.batch if batch not in measured]
        print(f"{implementation}, batch {missing}: {error}")
        rows += [{"batch": batch, "error": error} for batch in missing]
    return [common | row | {"command": whole} for row in rows]


def _run(command: list[str], environment: dict[str, str], timeout: float) -> str | None:
    """What went wrong, if anything did."""
    with Popen(command, env=environment) as process:
        try:
            status = process.wait(timeout)
        except TimeoutExpired:
            process.kill()
            return f"not done after {timeout:.0f} s"
    return f"the process ended with status {status}" if status else None


def command_of(speed: Speed) -> str:
    """The shortest command line that measures these rows."""
    arguments = []
    for each in fields(Speed):
        value = getattr(speed, each.name)
        if value != each.default:
            values = value if isinstance(value, tuple) else [value] * (value is not True)
            arguments += [_flag(each.name), *map(str, values)]
    return "glm4v-patched bench --generate " + shlex.join(arguments)


def _flag(name: str) -> str:
    return f"--{name}".replace("_", "-")
