"""Find the mistake behind a YAML syntax error, which the parser often reports a line too late."""

import re
import unicodedata

import yaml

# A line with a key, even if the colon after it is missing, full-width or replaced by "=".
ENTRY = re.compile(r"(?P<key>[A-Za-z_][\w.]*)(?P<colon>\s*[:：=]|(?=\s|$))(?P<rest>.*)")
# What an unclosed quote or bracket causes: the context of the parser's error, and the mistake.
UNCLOSED = {
    "while scanning a quoted scalar": "a quote is not closed",
    "while parsing a flow mapping": "a { is not closed, or a comma is missing after it",
    "while parsing a flow sequence": "a [ is not closed, or a comma is missing after it",
}


def explain_syntax_error(text: str, error: yaml.MarkedYAMLError) -> tuple[int, str]:
    """Return the line number of the mistake, from 1, and what is wrong there.

    If the mistake is not one that this module knows, both are those of the parser's message.
    """
    mark = error.problem_mark or error.context_mark
    assert mark is not None
    number, context = mark.line + 1, error.context or ""
    parser_message = ", ".join(filter(None, (context, error.problem)))
    if not isinstance(error, yaml.scanner.ScannerError | yaml.parser.ParserError):
        return number, parser_message
    lines = text.split("\n")
    candidates = [number, *_line_before(lines, number)]
    start = error.context_mark.line + 1 if error.context_mark else number
    if "simple key" in context:  # the parser has looked for a colon since the line ``start``
        candidates.insert(0, start)
    for candidate in candidates:
        if candidate <= len(lines) and (mistake := explain_line_mistake(lines[candidate - 1])):
            return candidate, mistake
    if context in UNCLOSED:
        return start, UNCLOSED[context]
    return number, _bad_indentation(lines, number) or parser_message


def explain_line_mistake(line: str) -> str | None:
    """Return what is wrong with a single line and what to write instead, or None."""
    text = line.strip()
    if "\t" in line:
        return "there is a tab; expected spaces, such as two before each field of a section"
    if line[: len(line) - len(line.lstrip())].strip(" "):
        return "the line begins with whitespace other than spaces; expected spaces"
    match = ENTRY.fullmatch(text)
    if match is None:
        return None
    key, colon, rest = match["key"], match["colon"].strip(), match["rest"].strip()
    corrected = f"{key}: {rest}".strip()
    if colon == "：":
        return f"the colon is full-width; write {corrected}"
    if colon == "=":
        return f"there is = in place of a colon; write {corrected}"
    if not colon:
        return f"a colon is missing; write {corrected}"
    if rest and match["rest"][0] != " ":
        return f"a space is missing after the colon; write {corrected}"
    if rest[:1] in ("{", "["):
        if wide := re.search("[，：｛｝［］]", rest):
            return f"{wide[0]} is full-width; write {unicodedata.normalize('NFKC', wide[0])}"
    elif rest[:1] in ("@", "%", "`") or (rest[:1] not in ("'", '"') and ": " in rest):
        return f"this text needs quotes; write {key}: '{rest}'"
    return None


def _line_before(lines: list[str], number: int) -> list[int]:
    """Return the number of the last line before ``number`` that has content, or an empty list."""
    earlier = range(min(number - 1, len(lines)), 0, -1)
    return [n for n in earlier if lines[n - 1].split("#")[0].strip()][:1]


def _bad_indentation(lines: list[str], number: int) -> str | None:
    """Describe the indentation of a line and of the line before it, if they differ."""
    before = _line_before(lines, number)
    if number > len(lines) or not before:
        return None
    indent_before, indent = (
        len(line) - len(line.lstrip(" ")) for line in (lines[before[0] - 1], lines[number - 1])
    )
    if indent_before == indent:
        return None
    return (
        f"the line is indented by {indent}, and the one before by {indent_before}; expected the "
        "same for all fields of a section"
    )
