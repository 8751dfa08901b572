"""Subsets and splits of a folder: by its card (the YAML of README.md), or by names of its files.

The rules for names are those of ``datasets``, which is not asked, for it opens whatever a card
names. Needs no torch.
"""

import re
from collections import Counter
from collections.abc import Collection
from itertools import takewhile
from typing import Any, NamedTuple

import yaml

from ..terminal_text import listed
from .folders import Folder, find_matching
from .messages import describe_value

README, STANDALONE = "README.md", ".huggingface.yaml"
MOST_CHARACTERS = 2**20
MOST_COMPARED = 10_000_000
"""Files, times the patterns that they are compared with."""
LINE_END = re.compile(r"\r\n?|\n")
OF_CONFIG = ["config_name", "data_files", "data_dir", "default", "description", "version"]
OF_CONFIG += ["features", "drop_labels", "drop_metadata", "sep", "delimiter", "encoding", "columns"]
OF_CONFIG += ["field"]
"""Keys of a subset that choose files, or that change nothing of what is read here."""
SHARDED = re.compile(r"data/(\w+(?:\.\w+)*)-\d{5}-of-\d{5}[^/]*\.[^/]*")
TRUE = ("true", "True", "TRUE")
KEYWORDS = {
    "train": "train|training",
    "validation": "validation|valid|dev|val",
    "test": "test|testing|eval|evaluation",
}
SEPARATOR = "[-._ 0-9]"


class Subset(NamedTuple):
    """The files of a split of a subset, and the names of classes by columns."""

    files: list[str]
    classes: dict[str, list[str]]


def read_subset(folder: Folder, name: str | None, split: str | None) -> Subset:
    """Return a split of a subset of a folder; without a name that of its default one.

    What a card names for other splits need not be there: it may not have been downloaded.

    Raises:
        ValueError: There is no such subset or split, or the card cannot be read, or names what is
            no file of the folder.
    """
    card = _read_card(folder)
    where, config = _choose_config(folder, card, name)
    if unknown := [key for key in config if key not in OF_CONFIG]:
        raise ValueError(f"{where}: the key {describe_value(unknown[0])} is not read; take it out")
    files, before = folder.files, ""
    if config.get("data_dir"):
        before = _as_text(config["data_dir"], f"{where}: data_dir").strip("/") + "/"
        before = before.removeprefix("./")
        files = [file.removeprefix(before) for file in files if file.startswith(before)]
        if not files:
            raise ValueError(_describe_other(folder, f"{where}: data_dir", config["data_dir"]))
    if config.get("data_files") is None:
        splits = _splits_by_name(files)
        split_files = splits[choose_split(folder, splits, split)]
    else:
        where = f"{where}: data_files"
        patterns = _patterns_of_config(where, config["data_files"])
        chosen_patterns = patterns[choose_split(folder, patterns, split)]
        split_files = _files_of_patterns(folder, files, where, chosen_patterns)
    chosen = config.get("config_name", name or "default")
    return Subset(
        [before + file for file in split_files], _classes_of_card(card.get("dataset_info"), chosen)
    )


def choose_split(folder: Folder, splits: Collection[str], split: str | None) -> str:
    """Return the split of a recipe's set. Raise ``ValueError`` if there is no such split."""
    split = split or "train"
    if split not in splits:
        raise ValueError(
            f"{folder.path} has the splits {listed([*splits], 20)} and not {split}: name one of "
            "them (split)"
        )
    return split


BaseLoader: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)  # ten times as fast


class _Loader(BaseLoader):
    """YAML of texts, lists and mappings, whose keys stand once; no word makes anything else of
    them, so that a merge key (``<<``) is a key as others."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        values = super().construct_mapping(node, deep)
        if len(values) < len(node.value):
            keys = Counter(key.value for key, _ in node.value)
            [(twice, times)] = keys.most_common(1)
            problem = f"the key {describe_value(twice)} stands {times} times"
            raise yaml.constructor.ConstructorError(problem=problem, problem_mark=node.start_mark)
        return values


def _read_card(folder: Folder) -> dict[str, Any]:
    """Return what the card says, and under ``where`` the file that names the configs."""
    card: dict[str, Any] = {}
    for file in filter(folder.has, (README, STANDALONE)):
        where = f"{folder.path}/{file}"
        text = folder.read_text(file, MOST_CHARACTERS)
        try:
            said = yaml.load(_front_matter(text) if file == README else text, _Loader)
        except (yaml.YAMLError, RecursionError) as error:
            raise ValueError(f"{where}: its YAML cannot be read: {error}") from None
        if isinstance(said, dict):
            card |= said | ({"where": where} if "configs" in said else {})
    return card


def _front_matter(text: str) -> str:
    """Return what stands between the first two lines of ``---``; nothing, if a text lacks them."""
    first, *lines = LINE_END.split(text.lstrip())
    above = [*takewhile(lambda line: line.rstrip() != "---", lines)]
    return "\n".join(above) if first.rstrip() == "---" and len(above) < len(lines) else ""


def _choose_config(folder: Folder, card: dict, name: str | None) -> tuple[str, dict]:
    configs = card.get("configs") or []
    where = f"{card.get('where', folder.path)}: configs"
    if not isinstance(configs, list) or not all(
        isinstance(of, dict) and isinstance(of.get("config_name"), str) for of in configs
    ):
        expected = "a list of {config_name: NAME, data_files: FILES}"
        raise ValueError(f"{where} is {describe_value(configs)}; expected {expected}")
    if not configs and name in (None, "default"):
        return where, {}
    names = [of["config_name"] for of in configs]
    if name is not None:
        chosen = [of for of in configs if of["config_name"] == name]
    else:
        default = [
            of for of in configs if of.get("default") in TRUE or of["config_name"] == "default"
        ]
        chosen = default or configs
    if len(chosen) != 1:
        has = f"the subsets {listed(names, 20)}" if names else "no subsets"
        other = "" if name is None else f" and not {name}"
        raise ValueError(f"{folder.path} has {has}{other}: name one of them (subset)")
    return f"{where}, {chosen[0]['config_name']}", chosen[0]


def _patterns_of_config(where: str, given: Any) -> dict[str, list[Any]]:
    patterns: dict[str, list[Any]] = {}
    for item in given if isinstance(given, list) else [given]:
        entry = {"split": "train", "path": item} if isinstance(item, str) else item
        if not isinstance(entry, dict) or entry.keys() != {"split", "path"}:
            expected = "a path, or a list of paths or of {split: NAME, path: FILES}"
            raise ValueError(f"{where} is {describe_value(given)}; expected {expected}")
        split_files = patterns.setdefault(_as_text(entry["split"], f"{where}: split"), [])
        split_files += entry["path"] if isinstance(entry["path"], list) else [entry["path"]]
    return patterns


def _files_of_patterns(
    folder: Folder, files: list[str], where: str, patterns: list[Any]
) -> list[str]:
    known, compared = {*files}, 0
    chosen: dict[str, None] = {}
    for pattern in patterns:
        matching = [pattern] if _as_text(pattern, where) in known else None
        if matching is None:
            compared += len(files)
            if compared > MOST_COMPARED:
                raise ValueError(
                    f"{where} has {len(patterns):,} paths for {len(files):,} files; expected "
                    f"{MOST_COMPARED:,} comparisons at most: write fewer patterns"
                )
            matching = find_matching(files, pattern)
        if not matching:
            raise ValueError(_describe_other(folder, where, pattern))
        chosen |= dict.fromkeys(matching)
    return [*chosen]


def _as_text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where} is {describe_value(value)}; expected text")
    return value


def _describe_other(folder: Folder, where: str, named: str) -> str:
    return (
        f"{where} names {describe_value(named)}, which is no file inside of {folder.path}; a set may "
        "name its own files only: correct it, or name the other files in the recipe itself"
    )


def _splits_by_name(files: list[str]) -> dict[str, list[str]]:
    """Return the splits that names of files and folders show; without any, all is ``train``."""
    shards = [(found[1], file) for file in files if (found := SHARDED.fullmatch(file))]
    if shards:
        names = dict.fromkeys([*KEYWORDS, *sorted({split for split, _ in shards})])
        by_name = {name: [file for split, file in shards if split == name] for name in names}
        return {name: of for name, of in by_name.items() if of}
    # The words are looked for in the names of folders first, then in those of files.
    for end in (f"(?:{SEPARATOR}[^/]*)?/.*", f"{SEPARATOR}[^/]*"):
        by_name = {}
        for split, words in KEYWORDS.items():
            is_of = re.compile(f"(?:.*/)?(?:[^/]*{SEPARATOR})?(?:{words}){end}", re.DOTALL)
            by_name[split] = [file for file in files if is_of.fullmatch(file)]
        if any(by_name.values()):
            return {split: of for split, of in by_name.items() if of}
    return {"train": files}


def _classes_of_card(info: Any, config: str) -> dict[str, list[str]]:
    """Return the names of classes that ``dataset_info`` of a card gives to columns of numbers."""
    classes = {}
    for of in info if isinstance(info, list) else [info]:
        if not isinstance(of, dict) or of.get("config_name", config) != config:
            continue
        features = of.get("features")
        for feature in features if isinstance(features, list) else ():
            kind = feature.get("dtype") if isinstance(feature, dict) else None
            label = kind.get("class_label") if isinstance(kind, dict) else None
            names = label.get("names") if isinstance(label, dict) else None
            if isinstance(names, dict):  # by numbers, as text
                names = [names[key] for key in sorted(names, key=lambda key: (len(str(key)), key))]
            if isinstance(names, list) and isinstance(feature.get("name"), str):
                classes[feature["name"]] = [*map(str, names)]
    return classes
