"""Find the subsets and splits of a folder, by its card (the YAML in README.md) or by file names.

The rules for file names are those of ``datasets``. That library is not used, because it opens any
file that a card names. Needs no torch.
"""

import re
from collections import Counter
from collections.abc import Collection
from itertools import takewhile
from typing import Any, NamedTuple

import yaml

from ..terminal_text import listed
from .folders import Folder, find_matching_files
from .messages import describe_value

README, STANDALONE_CARD = "README.md", ".huggingface.yaml"
MAX_CARD_BYTES = 2**20
MAX_NESTING = 100  # levels of lists and mappings in a card, and of values in a Parquet file
MAX_COMPARISONS = 10_000_000
"""Limit on the number of files times the number of patterns that they are compared with."""
LINE_END_RE = re.compile(r"\r\n?|\n")
KNOWN_CONFIG_KEYS = ["config_name", "data_files", "data_dir", "default", "description", "version"]
KNOWN_CONFIG_KEYS += ["features", "drop_labels", "drop_metadata", "sep", "delimiter", "encoding"]
KNOWN_CONFIG_KEYS += ["columns", "field"]
"""Keys of a subset's config that are accepted: they choose files, or have no effect here."""
# The Hub's name for a file of a split, such as data/train-00000-of-00004.parquet.
SPLIT_SHARD_RE = re.compile(r"data/(\w+(?:\.\w+)*)-\d{5}-of-\d{5}[^/]*\.[^/]*")
# Any file that has its number and the number of all files in its name.
NUMBERED_SHARD_RE = re.compile(r"(.*)-(\d{5})-of-(\d{5})[^/]*(\.[^/.]*)")
YAML_TRUE = ("true", "True", "TRUE")
# Words in the name of a file or folder that assign it to a split, by split.
SPLIT_KEYWORDS = {
    "train": "train|training",
    "validation": "validation|valid|dev|val",
    "test": "test|testing|eval|evaluation",
}
KEYWORD_SEPARATOR = "[-._ 0-9]"  # what may precede or follow a keyword in a name


class Subset(NamedTuple):
    """The files of one split of a subset, and the class names of its columns of labels."""

    files: list[str]
    class_names: dict[str, list[str]]


def read_subset(folder: Folder, name: str | None, split: str | None) -> Subset:
    """Return one split of the subset ``name`` of a folder; None means the default subset.

    Files that a card names for other splits need not exist, because a user may download one split.

    Raises:
        ValueError: There is no such subset or split, the card cannot be read, or it names something
            that is not a file of the folder.
    """
    card, configs_path = _read_card(folder)
    location, config = _choose_config(folder, card, configs_path, name)
    if unknown := [key for key in config if key not in KNOWN_CONFIG_KEYS]:
        raise ValueError(f"{location}: the key {describe_value(unknown[0])} is not read; remove it")
    files, prefix = folder.files, ""
    if config.get("data_dir"):
        prefix = _expect_text(config["data_dir"], f"{location}: data_dir").strip("/") + "/"
        prefix = prefix.removeprefix("./")
        files = [file.removeprefix(prefix) for file in files if file.startswith(prefix)]
        if not files:
            raise ValueError(
                _describe_unknown_file(folder, f"{location}: data_dir", config["data_dir"])
            )
    if config.get("data_files") is None:
        splits = _splits_by_name(files)
        split_files = splits[choose_split(folder, splits, split)]
        _check_shards(folder, split_files)
    else:
        location = f"{location}: data_files"
        patterns = _patterns_of_config(location, config["data_files"])
        chosen_patterns = patterns[choose_split(folder, patterns, split)]
        split_files = _files_of_patterns(folder, files, location, chosen_patterns)
    subset = config.get("config_name", name or "default")
    class_names = _class_names_of_card(card.get("dataset_info"), subset)
    return Subset([prefix + file for file in split_files], class_names)


def choose_split(folder: Folder, splits: Collection[str], split: str | None) -> str:
    """Return the split to read, by default "train"; raise ``ValueError`` if it is not in
    ``splits``."""
    split = split or "train"
    if split not in splits:
        raise ValueError(
            f"{folder.path} has the splits {listed([*splits], 20)} and not {split}: set split to "
            "one of them"
        )
    return split


# The loader in C, which may be missing, is ten times as fast.
BaseLoader: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)


class _CardLoader(BaseLoader):
    """Loads YAML, with all scalars as strings. A repeated key is an error, and a merge key (``<<``)
    is a key like others."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        values = super().construct_mapping(node, deep)
        if len(values) < len(node.value):
            keys = Counter(key.value for key, _ in node.value)
            [(repeated, times)] = keys.most_common(1)
            problem = f"the key {describe_value(repeated)} occurs {times} times"
            raise yaml.constructor.ConstructorError(problem=problem, problem_mark=node.start_mark)
        return values


def _read_card(folder: Folder) -> tuple[dict[str, Any], str]:
    """Return the content of the card, and the path of the file that has its ``configs``; without
    ``configs``, the path of the folder."""
    card: dict[str, Any] = {}
    configs_path = folder.path
    for file in filter(folder.has, (README, STANDALONE_CARD)):
        path = f"{folder.path}/{file}"
        text = folder.read_text(file, MAX_CARD_BYTES)
        text = _front_matter(text) if file == README else text
        try:
            _check_nesting(text)
            content = yaml.load(text, _CardLoader)
        except yaml.YAMLError as error:
            raise ValueError(f"{path}: its YAML cannot be read: {error}") from None
        if isinstance(content, dict):
            card |= content
            configs_path = path if "configs" in content else configs_path
    return card, configs_path


def _check_nesting(text: str) -> None:
    """Raise ``yaml.YAMLError`` if lists or mappings are nested too deeply.

    ``CBaseLoader`` loads nested values by recursion in C, which ends the process on Python 3.12.
    Parsing events needs no recursion.
    """
    depth = 0
    for event in yaml.parse(text, BaseLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_NESTING:
                raise yaml.YAMLError(
                    f"lists and mappings are nested more than {MAX_NESTING} levels deep"
                )
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _front_matter(text: str) -> str:
    """Return the text between the first two ``---`` lines; empty if there are none."""
    first, *lines = LINE_END_RE.split(text.lstrip())
    front_matter = [*takewhile(lambda line: line.rstrip() != "---", lines)]
    is_closed = first.rstrip() == "---" and len(front_matter) < len(lines)
    return "\n".join(front_matter) if is_closed else ""


def _choose_config(
    folder: Folder, card: dict, configs_path: str, name: str | None
) -> tuple[str, dict]:
    """Return the location of a subset's config for messages, and the config; empty without
    ``configs``.

    The default subset has ``default: true``, has the name "default", or is the only one.
    """
    configs = card.get("configs") or []
    location = f"{configs_path}: configs"
    if not isinstance(configs, list) or not all(
        isinstance(item, dict) and isinstance(item.get("config_name"), str) for item in configs
    ):
        expected = "a list of {config_name: NAME, data_files: FILES}"
        raise ValueError(f"{location} is {describe_value(configs)}; expected {expected}")
    if not configs and name in (None, "default"):
        return location, {}
    names = [item["config_name"] for item in configs]
    if name is not None:
        chosen = [item for item in configs if item["config_name"] == name]
    else:
        defaults = [
            item
            for item in configs
            if item.get("default") in YAML_TRUE or item["config_name"] == "default"
        ]
        chosen = defaults or configs
    if not names:
        raise ValueError(f"{folder.path} has no subsets: remove subset, which is {name}")
    if len(chosen) != 1:
        other = "" if name is None else f" and not {name}"
        raise ValueError(
            f"{folder.path} has the subsets {listed(names, 20)}{other}: set subset to one of them"
        )
    return f"{location}, {chosen[0]['config_name']}", chosen[0]


def _patterns_of_config(location: str, data_files: Any) -> dict[str, list[Any]]:
    """Return the paths and patterns of each split in a config's ``data_files``."""
    patterns: dict[str, list[Any]] = {}
    for item in data_files if isinstance(data_files, list) else [data_files]:
        entry = {"split": "train", "path": item} if isinstance(item, str) else item
        if not isinstance(entry, dict) or entry.keys() != {"split", "path"}:
            expected = "a path, or a list of paths or of {split: NAME, path: FILES}"
            raise ValueError(f"{location} is {describe_value(data_files)}; expected {expected}")
        split_patterns = patterns.setdefault(_expect_text(entry["split"], f"{location}: split"), [])
        split_patterns += entry["path"] if isinstance(entry["path"], list) else [entry["path"]]
    return patterns


def _files_of_patterns(
    folder: Folder, files: list[str], location: str, patterns: list[Any]
) -> list[str]:
    """Return the files that match any of the patterns, each once. A path is a pattern, too."""
    paths, num_compared = {*files}, 0
    chosen: dict[str, None] = {}
    for pattern in patterns:
        matching = [pattern] if _expect_text(pattern, location) in paths else None
        if matching is None:
            num_compared += len(files)
            if num_compared > MAX_COMPARISONS:
                raise ValueError(
                    f"{location} has {len(patterns):,} paths for {len(files):,} files; expected "
                    f"at most {MAX_COMPARISONS:,} comparisons: write fewer patterns"
                )
            matching = find_matching_files(files, pattern)
            _check_shards(folder, matching)
        if not matching:
            raise ValueError(_describe_unknown_file(folder, location, pattern))
        chosen |= dict.fromkeys(matching)
    return [*chosen]


def _check_shards(folder: Folder, files: list[str]) -> None:
    """Raise ``ValueError`` if names such as a-00000-of-00002.parquet show that a file is missing.

    Without this check, rows would be lost silently after an interrupted download.
    """
    present: dict[tuple[str, str, str], set[int]] = {}
    for file in files:
        if match := NUMBERED_SHARD_RE.fullmatch(file):
            present.setdefault((match[1], match[3], match[4]), set()).add(int(match[2]))
    for (name, total, suffix), numbers in present.items():
        missing = next((k for k in range(int(total)) if k not in numbers), None)
        if missing is not None:
            raise ValueError(
                f"{folder.path} has {len(numbers)} of {int(total)} files of {name}: "
                f"{name}-{missing:05}-of-{total}{suffix} is missing; download the data set again, "
                "or name the files that you want in the recipe itself"
            )


def _expect_text(value: Any, location: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{location} is {describe_value(value)}; expected text")
    return value


def _describe_unknown_file(folder: Folder, location: str, name: str) -> str:
    return (
        f"{location} names {describe_value(name)}, which is not a file inside of {folder.path}; a "
        "data set may name only its own files: correct it, or name the other files in the recipe "
        "itself"
    )


def _splits_by_name(files: list[str]) -> dict[str, list[str]]:
    """Return the files of each split, as the names of files and folders show it. If no name shows a
    split, all files are in the split ``train``."""
    shards = [(match[1], file) for file in files if (match := SPLIT_SHARD_RE.fullmatch(file))]
    if shards:
        names = dict.fromkeys([*SPLIT_KEYWORDS, *sorted({split for split, _ in shards})])
        by_name = {name: [file for split, file in shards if split == name] for name in names}
        return {name: shard_files for name, shard_files in by_name.items() if shard_files}
    # The keywords are searched in the names of folders first, then in those of files.
    before_re = f"(?:.*/)?(?:[^/]*{KEYWORD_SEPARATOR})?"
    for after_re in (f"(?:{KEYWORD_SEPARATOR}[^/]*)?/.*", f"{KEYWORD_SEPARATOR}[^/]*"):
        by_name = {}
        for split, words in SPLIT_KEYWORDS.items():
            split_re = re.compile(f"{before_re}(?:{words}){after_re}", re.DOTALL)
            by_name[split] = [file for file in files if split_re.fullmatch(file)]
        if any(by_name.values()):
            return {split: split_files for split, split_files in by_name.items() if split_files}
    return {"train": files}


def _class_names_of_card(dataset_info: Any, subset: str) -> dict[str, list[str]]:
    """Return the class names of a subset by column, from ``dataset_info`` of its card."""
    class_names = {}
    for item in dataset_info if isinstance(dataset_info, list) else [dataset_info]:
        if not isinstance(item, dict) or item.get("config_name", subset) != subset:
            continue
        features = item.get("features")
        for feature in features if isinstance(features, list) else ():
            dtype = feature.get("dtype") if isinstance(feature, dict) else None
            label = dtype.get("class_label") if isinstance(dtype, dict) else None
            names = label.get("names") if isinstance(label, dict) else None
            if isinstance(names, dict):  # its keys are numbers as text; "10" is after "9"
                names = [names[key] for key in sorted(names, key=lambda key: (len(str(key)), key))]
            if isinstance(names, list) and isinstance(feature.get("name"), str):
                class_names[feature["name"]] = [*map(str, names)]
    return class_names
