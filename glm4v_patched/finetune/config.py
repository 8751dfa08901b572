"""The fields of a recipe, typed and checked; needs no torch, so that mistakes are reported at once.

A recipe is a YAML or JSON file. Fields of ``trainer`` have the names of transformers'
``TrainingArguments``.
"""

import difflib
import json
import os
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin

from ..engine.activation_policies import POLICIES, check_policy
from ..engine.options import trains_tower
from ..printed import pip_install
from .recipe_file import (
    Document,
    Fault,
    RecipeError,
    place_all,
    read_document,
    read_scalar,
    shown,
    shown_name,
)

try:
    from pydantic import (
        AfterValidator,
        BaseModel,
        BeforeValidator,
        ConfigDict,
        Field,
        TypeAdapter,
        ValidationError,
        model_validator,
    )
    from pydantic.fields import FieldInfo
except ImportError as error:
    raise RuntimeError(
        f"recipes need PyYAML and pydantic: {pip_install('glm4v-patched[train]')}"
    ) from error


class _Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )


@dataclass(frozen=True)
class _Expected:
    """What a value may be, in words, of a type that does not say it by itself."""

    words: str


def _check_policy(policy: str) -> str:
    check_policy("layers", policy, or_auto=True)
    return policy


def _check_text(text: str) -> str:
    if not text.isprintable():  # nor a lone surrogate, which no file name can have
        raise ValueError("control characters")
    return text


def _check_whole(value: Any) -> Any:
    # To pydantic, True and 1.0 are among the choices of Literal[1].
    if type(value) is not int:
        raise ValueError("not a whole number")
    return value


Policy = Annotated[
    str, AfterValidator(_check_policy), _Expected(f"auto, {', '.join(POLICIES)} or every N, N > 0")
]
AtLeastOne = Annotated[int, Field(ge=1), _Expected("a whole number of at least 1")]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), _Expected("a number above 0")]
# numpy takes no larger one.
Seed = Annotated[int, Field(ge=0, lt=2**32), _Expected("a whole number from 0 to 4294967295")]
Text = Annotated[
    str,
    Field(min_length=1),
    AfterValidator(_check_text),
    _Expected("text without control characters"),
]
Folder = Annotated[Text, _Expected("a folder")]


class Data(_Section):
    """What is learned."""

    train: Annotated[Text, _Expected("a file")]
    """JSONL file of conversations."""
    pack_to: AtLeastOne | None = None
    """Pack conversations into rows of at most so many positions, none longer; the batch size then
    counts such rows."""
    on_bad: Literal["fail", "skip"] = "fail"
    """What to do about rows that cannot be used: end with their list, or leave them out."""
    reuse_features: bool | Folder = False
    """A picture goes through the vision tower, which must be frozen, only the first time. What came
    out is kept in the folder named; or, if true, in the memory of each process, up to 16 GiB, which
    is of use to a single process: others draw other pictures in each epoch."""


class Lora(_Section):
    """Adapters, where ``trained`` asks for them."""

    rank: AtLeastOne = 8
    """Rank of the adapters."""


class Engine(_Section):
    """How it is computed: numbers may round differently, what is learned is the same."""

    zero_stage: Annotated[Literal[0, 1, 2, 3], BeforeValidator(_check_whole)] = 3
    """Of DeepSpeed; 0 is a single process without it. What is trained is then held in fp32, and
    computed with under autocast where precision is bf16."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """Of the computation and of what is saved."""
    tower: Policy = "auto"
    """Which activations the vision tower's layers keep; "auto" is the fastest
    for which the GPUs' free memory suffices ("full" on a CPU)."""
    language: Policy = "auto"
    """The same for the language model's layers."""
    compile: bool | Literal["auto"] = "auto"
    """Compile the layers; "auto": on a GPU, for 300 steps or more. Compiling takes about a minute,
    and a step is then a quarter shorter."""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """AdamW with its states in fp32, or in 8 bits (bitsandbytes)."""
    offload: bool | Literal["auto"] = "auto"
    """Keep the optimizer's states and the fp32 weights on the CPU; "auto": where nothing else
    fits."""
    zero_hpz_partition_size: AtLeastOne = 1
    """DeepSpeed's ZeRO++ (hpZ): the GPUs of one machine, which then keep a second copy of the
    weights between them, so that the backward pass gathers nothing over the network; 1 for none."""
    zero_quantized_weights: bool = False
    """DeepSpeed's ZeRO++ (qwZ): gather weights in 8 bits; needs CUDA's compiler."""
    zero_quantized_gradients: bool = False
    """DeepSpeed's ZeRO++ (qgZ): sum gradients in 4 bits; needs CUDA's compiler."""


class TrainerFields(_Section):
    """Fields of transformers' ``TrainingArguments``."""

    max_steps: AtLeastOne
    """Updates of the weights."""
    per_device_train_batch_size: AtLeastOne
    """Rows in a step of one process."""
    learning_rate: Positive
    """The highest of the schedule."""
    seed: Seed = 0
    """Of the order of rows, and of adapters."""
    save_steps: AtLeastOne | None = None
    """Save a checkpoint to continue from every so many steps (not at the last one, where the model
    itself is saved); none if null."""
    save_total_limit: AtLeastOne | None = None
    """Keep so many of the newest checkpoints; all if null."""


class Recipe(_Section):
    """What to train and how."""

    model: Annotated[Text, _Expected("a folder or an id of the Hub")]
    """What to start from."""
    out: Folder
    """For checkpoints and what is trained; of LoRA, the adapters alone."""
    data: Data
    trainer: TrainerFields
    trained: Literal["full", "lm", "lora_lm", "lora_all", "qlora"] = "full"
    """full: all weights; lm: all but the vision tower and its adapter; lora_lm: LoRA on the
    language model; lora_all: on the vision tower, too; qlora: as lora_lm, on weights of 4 bits."""
    lora: Lora = Lora()
    engine: Engine = Engine()
    revision: Annotated[Text, _Expected("a branch, tag or commit")] | None = None
    """Of a model on the Hub; where model is a folder of adapters, of the one under them."""
    max_nonfinite_steps: AtLeastOne = 3
    """End the run after so many steps in a row whose loss or gradient norm is NaN or infinite. One
    may be a matter of its batch, and newer DeepSpeed leaves it out; of weights that have become
    NaN, every later step is such a one."""

    @model_validator(mode="after")
    def _check_together(self) -> "Recipe":
        if faults := conflicts(self.flat()):
            raise ValueError("\n".join(fault.text for fault in faults))
        return self

    @classmethod
    def of(cls, values: Any) -> "Recipe":
        """Raises :class:`RecipeError` with all faults."""
        checked = check_values(values)
        if checked.recipe is None:
            raise RecipeError.of([fault.text for fault in checked.faults])
        return checked.recipe

    def override(self, values: Mapping[str, Any]) -> "Recipe":
        """This recipe with other values of some fields, by dotted names as ``engine.compile``.

        Raises:
            RecipeError: a field is unknown or a value cannot be.
        """
        nested, misplaced = place_all(self.model_dump(), values)
        if misplaced:
            raise RecipeError.of([fault.text for fault in misplaced])
        return self.of(nested)

    def flat(self) -> dict[str, Any]:
        """Values by dotted names."""
        values: dict[str, Any] = {}
        for name, value in self.model_dump().items():
            if isinstance(value, dict):
                values |= {f"{name}.{field}": part for field, part in value.items()}
            else:
                values[name] = value
        return values

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Of the fields that a recipe may leave out, by dotted names."""
        return {name: field.default for name, field in fields() if not field.is_required()}

    def write(self, path: Path) -> None:
        """As JSON, which is YAML, too."""
        text = json.dumps(self.model_dump(), indent=2, ensure_ascii=False)
        path.write_text(text + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path, overrides: Sequence[str] = ()) -> "Recipe":
        """The recipe of a file, with fields laid over it, as ``engine.compile=true``.

        Raises:
            RecipeError: with a line for each fault, which begins with the file, or "command line".
        """
        document = read_document(path).override(overrides)
        checked = check_values(document.values)
        if checked.recipe is None or document.faults:
            raise located(document, checked.faults)
        return checked.recipe


@dataclass(frozen=True)
class Checked:
    """``known`` has the values, by dotted names, that can be relied on although others cannot."""

    recipe: Recipe | None
    faults: list[Fault]
    known: dict[str, Any]


def check_values(values: Any) -> Checked:
    """All that is wrong with nested values, or the recipe that they make."""
    if not isinstance(values, Mapping):
        kind = "is empty" if values is None else f"is {shown(values)}"
        text = f"the recipe {kind}; expected sections and fields, as in model: FOLDER"
        return Checked(None, [Fault("", text)], {})
    recipe, faults = None, []
    try:
        recipe = Recipe.model_validate(dict(values))
    except ValidationError as error:
        faults = list(_faults_of(error))
    wrong = {fault.name for fault in faults}
    known = {}
    for name, field in fields():
        value = _given(values, name, field)
        if not any(name == fault or name.startswith(fault + ".") for fault in wrong):
            known[name] = value
    faults += conflicts(known)
    assert (recipe is None) == bool(faults)
    return Checked(recipe, faults, known)


def located(document: Document, faults: Sequence[Fault]) -> RecipeError:
    """The error that lists these faults and the document's with file and line, in their order."""
    ordered = sorted([*document.faults, *faults], key=lambda f: document.lines.get(f.name, 0))
    return RecipeError.of([document.where(fault.name) + fault.text for fault in ordered])


def fields(section: type[_Section] = Recipe) -> Iterator[tuple[str, FieldInfo]]:
    """Every field, by its dotted name."""
    for name, field in section.model_fields.items():
        if _is_section(field.annotation):
            yield from ((f"{name}.{inner}", found) for inner, found in fields(field.annotation))
        else:
            yield name, field


def describe_fields() -> str:
    """A paragraph for each field: its name, what it may be, its default, what it does."""
    lines = []
    for name, field in fields():
        default = "required" if field.is_required() else f"default {_word(field.default)}"
        lines.append(f"{name}: {expected(field)} ({default})")
        told = " ".join((field.description or "").split())
        lines += textwrap.wrap(told, 96, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)


def expected(field: FieldInfo) -> str:
    """What a field may be, in words."""
    return _any_of(_choices(_annotated(field)))


def _annotated(field: FieldInfo) -> Any:
    return Annotated[(field.annotation, *field.metadata, None)]


def _choices(annotation: Any) -> list[str]:
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        words = [item.words for item in metadata if isinstance(item, _Expected)]
        return words[-1:] or _choices(inner)
    if get_origin(annotation) in (Union, UnionType):
        return [words for part in get_args(annotation) for words in _choices(part)]
    if get_origin(annotation) is Literal:
        return [_word(value) for value in get_args(annotation)]
    return {bool: ["true", "false"], NoneType: ["null"]}[annotation]


def _any_of(choices: Sequence[str]) -> str:
    *first, last = choices
    return f"{', '.join(first)} or {last}" if first else last


def _word(value: Any) -> str:
    return value if isinstance(value, str) else shown(value)


def _is_section(annotation: Any) -> TypeGuard[type[_Section]]:
    return isinstance(annotation, type) and issubclass(annotation, _Section)


def _given(values: Mapping, name: str, field: FieldInfo) -> Any:
    for part in name.split("."):
        if not isinstance(values, Mapping) or part not in values:
            return field.default
        values = values[part]
    return values


def _faults_of(error: ValidationError) -> Iterator[Fault]:
    told = set()
    for detail in error.errors(include_url=False, include_context=False):
        path = [str(part) for part in detail["loc"]]
        kind, value = detail["type"], detail["input"]
        if not path:
            continue  # the fields together: reported by conflicts()
        if kind in ("extra_forbidden", "invalid_key"):
            yield Fault(".".join(path), _unknown(path))
            continue
        name, found = _find(path)
        if name in told:
            continue  # each choice of a union is an error
        told.add(name)
        if kind == "missing":
            for inner, missing in _fields_under(name, found):
                if missing.is_required():
                    yield Fault(inner, f"{inner} is missing; expected {expected(missing)}")
        elif isinstance(found, FieldInfo):
            yield Fault(
                name, f"{name} is {shown(value)}; expected {expected(found)}{_hint(value, found)}"
            )
        else:
            text = f"expected a section with {', '.join(found.model_fields)}"
            yield Fault(name, f"{name} is {shown(value)}; {text}")


def _hint(value: Any, field: FieldInfo) -> str:
    """Where quotes, or their absence, are all that is wrong."""
    match value:
        case str():
            other, hint = read_scalar(value), " (without quotes)"
        case bool() | int() | float():
            other, hint = shown(value), " (in quotes)"
        case _:
            return ""
    try:
        TypeAdapter(_annotated(field)).validate_python(other, strict=True)
    except ValidationError:
        return ""
    return hint


def _find(path: Sequence[str]) -> tuple[str, FieldInfo | type[_Section]]:
    """The name of the field that a path leads to or into, and the field or, if it is one, the
    section."""
    section: type[_Section] = Recipe
    names = []
    for part in path:
        names.append(part)
        field = section.model_fields[part]
        if not _is_section(field.annotation):
            return ".".join(names), field
        section = field.annotation
    return ".".join(names), section


def _fields_under(name: str, found: FieldInfo | type[_Section]) -> list[tuple[str, FieldInfo]]:
    if isinstance(found, FieldInfo):
        return [(name, found)]
    return [(f"{name}.{inner}", field) for inner, field in fields(found)]


# Words of other programs.
OTHER_NAMES = {
    "micro_batch": "trainer.per_device_train_batch_size",
    "batch_size": "trainer.per_device_train_batch_size",
    "lr": "trainer.learning_rate",
    "keep_checkpoints": "trainer.save_total_limit",
}


def _unknown(path: Sequence[str]) -> str:
    names = [name for name, _ in fields()]
    name = shown_name(".".join(path))
    told = f"{name} is not a field of a recipe"
    if len(path) == 1 and path[0] in names:
        section, _, field = path[0].partition(".")
        return f"{name} is one key; expected {field} under {section}"
    section = ".".join(path[:-1])
    near = {known.rpartition(".")[2]: known for known in names}
    near |= {inner: f"{section}.{inner}".strip(".") for inner in _section(path[:-1]).model_fields}
    found = OTHER_NAMES.get(path[-1])
    if found is None and (close := difflib.get_close_matches(path[-1], near, 1)):
        found = near[close[0]]
    if found is not None:
        return f"{told}; did you mean {found}?"
    return f"{told}; expected {_any_of(list(_section(path[:-1]).model_fields))}"


def _section(path: Sequence[str]) -> type[_Section]:
    section: type[_Section] = Recipe
    for part in path:
        annotation = section.model_fields[part].annotation
        assert _is_section(annotation)
        section = annotation
    return section


Rule = Callable[..., str | None]
_RULES: list[tuple[tuple[str, ...], Rule]] = []


def _rule(*names: str) -> Callable[[Rule], Rule]:
    """For a function of these fields' values that says what is wrong with them together."""

    def add(rule: Rule) -> Rule:
        _RULES.append((names, rule))
        return rule

    return add


def conflicts(known: Mapping[str, Any]) -> list[Fault]:
    """What cannot go together, of the values that are known."""
    faults = []
    for names, rule in _RULES:
        if known.keys() >= {*names} and (text := rule(*(known[name] for name in names))):
            faults.append(Fault(names[0], text))
    return faults


@_rule("engine.offload", "engine.zero_stage")
def _offload_needs_zero(offload, zero_stage) -> str | None:
    if offload is True and zero_stage == 0:
        return (
            "engine.offload with engine.zero_stage 0: ZeRO offloads the optimizer; expected "
            "engine.zero_stage 1, 2 or 3, or engine.offload to be false"
        )
    return None


@_rule("engine.offload", "engine.optimizer")
def _offload_needs_adamw(offload, optimizer) -> str | None:
    if offload is True and optimizer == "adamw_8bit":
        return (
            "engine.offload with adamw_8bit, which runs on a GPU: expected engine.optimizer to be "
            "adamw, or engine.offload to be false"
        )
    return None


@_rule("engine.zero_hpz_partition_size", "engine.zero_stage")
def _second_copies_need_stage_3(size, zero_stage) -> str | None:
    if size > 1 and zero_stage != 3:
        return (
            f"engine.zero_hpz_partition_size {size} with engine.zero_stage {zero_stage}: only "
            "stage 3 shards weights; expected engine.zero_stage 3, or 1 in its place"
        )
    return None


@_rule("engine.zero_quantized_weights", "engine.zero_quantized_gradients", "engine.zero_stage")
def _quantized_gathers_need_stage_3(weights, gradients, zero_stage) -> str | None:
    if (weights or gradients) and zero_stage != 3:
        return (
            f"engine.zero_quantized_weights or _gradients with engine.zero_stage {zero_stage}: "
            "only stage 3 gathers weights; expected engine.zero_stage 3, or false"
        )
    return None


@_rule("trained", "engine.zero_stage")
def _four_bits_are_not_sharded(trained, zero_stage) -> str | None:
    if trained == "qlora" and zero_stage != 0:
        return (
            f"qlora with engine.zero_stage {zero_stage}: weights of 4 bits cannot be sharded; "
            "expected engine.zero_stage 0, and one process"
        )
    return None


@_rule("revision", "model")
def _folders_have_no_revision(revision, model) -> str | None:
    if os.path.isfile(os.path.join(model, "adapter_config.json")):
        return None  # it is of the model under the adapters
    if revision is not None and os.path.isdir(model):
        return f"revision is {shown(revision)} of {model}, a folder; expected null"
    return None


@_rule("data.reuse_features", "trained")
def _trained_features_change(reuse_features, trained) -> str | None:
    if reuse_features and trains_tower(trained):
        return (
            f"data.reuse_features with trained {trained}, which trains the vision tower: its "
            "features change with every step; expected trained to be lm, lora_lm or qlora, or "
            "data.reuse_features to be false"
        )
    return None
