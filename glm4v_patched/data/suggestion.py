"""What is said of a row of no known format: the line of ``data.columns`` that would read it, where
the names of its columns leave no choice; none otherwise. Needs no torch."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ..terminal_text import listed
from .columns import NAME, NAMES, NO_CELL, OF_TOOLS, is_empty
from .formats import OF_PREFERENCES, PREFERENCES
from .messages import MOST_KEYS_LISTED, quoted
from .pictures import IMAGE_NAMES, image_kind

QUESTIONS = ("question", "query", "prompt", "instruction", "problem", "question_text", "问题")
ANSWERS = ["answer", "answers", "multiple_choice_answer", "response", "output", "completion"]
ANSWERS += ["solution", "答案", "回答"]
CAPTIONS = ["caption", "captions", "description", "text", "txt", "label", "class", "category"]
CAPTIONS += ["cls"]
SYSTEM = ("system", "system_prompt")
MORE_OF_A_QUESTION = re.compile(
    r"input|context|passage|hint|article|document|story|paragraph|candidates|[a-d]"
    r"|(?:\w+_)?(?:choice|option)s?(?:_?\w)?"
)
"""Columns without which a question may not be understood."""
NOT_SAID = re.compile(
    r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:e[+-]?\d+)?"  # a number as a table has it, and not 007
    r"|\d{4}[-/.]\d\d?(?:[-/.].*)?|\d\d?[-/.]\d\d?[-/.]\d{4}.*"  # a date
    r"|[\da-f]{8}(?:-[\da-f]{4}){3}-[\da-f]{12}|[\da-f]{16,}"  # an id
    r"|\S*/\S*|.*[?？]",  # a path or an address; a question
    re.IGNORECASE | re.DOTALL,
)
"""What no caption is, whatever its column is called."""
QUESTION = "What is in the picture?"


def describe_unknown(row: dict) -> str:
    """Say that a row has keys of no format, and what to do about it."""
    keys = listed([quoted(key) for key in row if key not in OF_TOOLS], MOST_KEYS_LISTED)
    told = f"its keys are {keys}, of no format that is known; "
    if PREFERENCES & row.keys():
        return told + OF_PREFERENCES
    if is_table(row):
        return told + RECORDS.format('"list"')
    told += "say which of them are what, "
    if columns := suggest(row):
        told += (
            f"in the recipe or behind its name: '{line_of(columns)}' (answer, evaluate: --columns)"
        )
    else:
        told += "by data.columns (docs/data.md has examples; answer, evaluate: --columns)"
        if any(NOT_SAID.fullmatch(key) for key in row):
            told += "; if these are the cells of a first row, write a line with the names above it"
    return f"{told}, and see how that is read with 'glm4v-patched doctor RECIPE --rows 3'"


def line_of(columns: Mapping[str, Any]) -> str:
    """``data.columns={...}``, as it may stand in a recipe or on the command line."""

    def shown(value: Any) -> str:
        if isinstance(value, list):
            return f"[{', '.join(map(shown, value))}]"
        return value if NAME.fullmatch(value) else json.dumps(value, ensure_ascii=False)

    there = (f"{part}: {shown(columns[part])}" for part in NAMES if part in columns)
    return f"data.columns={{{', '.join(there)}}}"


def suggest(row: dict) -> dict[str, str] | None:
    """The columns that a row can be read by, if their names and values leave no choice."""
    every = dict(flattened(row))
    flat = {name: of for name, of in every.items() if not (of is NO_CELL or is_empty(of))}
    image = _image_of(row, flat)
    if image == "" and any(_is_unknown(name) for name in every.keys() - flat.keys()):
        return None  # of a column that is empty here it is not known what it holds elsewhere
    if image is None or any(MORE_OF_A_QUESTION.fullmatch(_plain(name)) for name in flat):
        return None
    texts = {name: value for name, value in flat.items() if as_column(name) != image}
    found = _turns_of(texts) or _exchange_of(texts, bool(image))
    if found is None:
        return None
    if system := _only(texts, SYSTEM):
        found["system"] = system
    if isinstance(texts.get("history"), list) and "turns" not in found:
        found["history"] = "history"
    columns = {part: as_column(name) for part, name in found.items()}
    return columns | ({"image": image} if image else {})


def as_column(name: str) -> str:
    """A column as ``data.columns`` names it; words stay as they are."""
    return name if NAME.fullmatch(name) or name == QUESTION else f"{{{name}}}"


def as_image(name: str, kind: str | None) -> str:
    """A column of images as ``data.columns`` names it."""
    if kind == "base64":
        return f"data:image/png;base64,{{{name}}}"
    return as_column(name)


def flattened(row: dict, before: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a row, and those of the objects in it, by their names with dots."""
    for key, value in row.items():
        if isinstance(value, dict) and not before and not value.keys() <= {"bytes", "path"}:
            yield from flattened(value, f"{key}.")
        elif key not in OF_TOOLS:
            yield before + key, value


def _is_unknown(name: str) -> bool:
    known = (*QUESTIONS, *ANSWERS, *CAPTIONS, *SYSTEM, "history", *OF_TOOLS)
    return _plain(name) not in known


def _image_of(row: dict, flat: dict[str, Any]) -> str | None:
    """The column of the image; empty, if nothing looks like one, and None, if several do."""
    kinds = {name: kind for name, value in flat.items() if (kind := image_kind(value))}
    # Beside an image in the table, paths and addresses say where it came from.
    for likely in (("embedded", "base64"), ("path",), ("url",)):
        if found := [name for name, kind in kinds.items() if kind in likely]:
            is_list = kinds[found[0]] == "base64" and isinstance(flat[found[0]], list)
            is_sure = len(found) == 1 and not is_list
            return as_image(found[0], kinds[found[0]]) if is_sure else None
    called = [name for name in row if IMAGE_NAMES.fullmatch(name)]
    if not called:
        return ""
    # One that this row has not.
    return called[0] if len(called) == 1 and called[0] not in flat else None


def _turns_of(texts: dict[str, Any]) -> dict[str, str] | None:
    talks = [
        (name, value[0])
        for name, value in texts.items()
        if name != "history" and isinstance(value, list) and isinstance(value[0], (dict, list))
    ]
    if len(talks) != 1:
        return None
    [(name, first)] = talks
    if isinstance(first, list):
        is_pair = len(first) == 2 and all(isinstance(of, str) for of in first)
        return {"turns": name} if is_pair else None
    if {"role", "content"} <= first.keys() or {"from", "value"} <= first.keys():
        return {"turns": name}
    asked, answer = _only(first, QUESTIONS), _only(first, ANSWERS)
    return {"turns": name, "question": asked, "answer": answer} if asked and answer else None


def _exchange_of(texts: dict[str, Any], has_image: bool) -> dict[str, str] | None:
    asked, answer = _only(texts, QUESTIONS), _answer_of(texts)
    if asked is None and has_image:
        captions = {name: value for name, value in texts.items() if _may_be_caption(value)}
        is_alone = len(texts) == 1
        answer = next(iter(captions), None) if is_alone else _only(captions, CAPTIONS)
        # Of one that is no caption by its value, none by its name is sure.
        unsure = any(_plain(name) in (*QUESTIONS, *ANSWERS) for name in texts)
        return {"question": QUESTION, "answer": answer} if answer and not unsure else None
    if asked is None or answer is None or texts[asked] == texts[answer]:
        return None
    is_said = all(not image_kind(texts[name]) for name in (asked, answer))
    return {"question": asked, "answer": answer} if is_said else None


def _answer_of(texts: dict[str, Any]) -> str | None:
    """VQA's commonest answer stands beside the list of all."""
    there = {_plain(name): name for name in texts}
    best = there.get("answer") or there.get("multiple_choice_answer")
    return best or _only(texts, ANSWERS)


def _only(values: dict[str, Any], names: Any) -> str | None:
    """The one column that has such a name; of several that say the same, the first."""
    found = [name for name in values if _plain(name) in names]
    same = all(values[name] == values[found[0]] for name in found)
    return found[0] if found and same else None


def _plain(name: str) -> str:
    return name.rpartition(".")[2].strip().lower().replace(" ", "_")


def _may_be_caption(value: Any) -> bool:
    if not isinstance(value, str) or image_kind(value):
        return False
    return bool(value.strip()) and not NOT_SAID.fullmatch(value.strip())


# Files of one object that is a whole set

RECORDS = (
    "it is a whole table and no row: write a row for each of its lines, as by pandas "
    '(to_dict or to_json, orient="records" in place of {})'
)


def is_table(row: dict) -> bool:
    """Whether a row is a whole table, each of its columns a list."""
    lengths = {len(of) if isinstance(of, list) else 0 for of in row.values()}
    is_even = len(row) > 1 and len(lengths) == 1 and lengths.pop() > 1
    # Images and their captions may be one row; of a table there are more columns, or rows.
    return is_even and not (len(row) == 2 and any(map(image_kind, row.values())))


def fault_of_object(value: Any) -> str | None:
    """What an object is that describes or holds a whole set, and is no row; None, if it is one."""
    if not isinstance(value, dict) or not value:
        return None
    if value.keys() == {"columns", "index", "data"}:
        return RECORDS.format('"split"')
    inner = [*value.values()]
    if not all(isinstance(of, dict) and of for of in inner):
        return None
    if all({"annotation", "root"} <= of.keys() for of in inner):
        sets = (f"{{path: {of['annotation']}, image_folder: {of['root']}}}" for of in inner)
        return (
            "it describes sets, as InternVL's meta files do, and has no rows; name the sets: "
            f"data.train: [{listed([*sets])}]"
        )
    if all({"file_name", "hf_hub_url", "ms_hub_url"} & of.keys() for of in inner):
        return (
            "it describes sets, as LLaMA-Factory's dataset_info.json, and has no rows; name its "
            "folder, and a set of it: {path: FOLDER, subset: " + next(iter(value)) + "}"
        )
    if any(of.keys() != inner[0].keys() for of in inner):
        return None
    for keys, orient in ((inner[0], '"columns"'), (value, '"index"')):
        if all(key.isdigit() for key in keys):
            return RECORDS.format(orient)
    return None
