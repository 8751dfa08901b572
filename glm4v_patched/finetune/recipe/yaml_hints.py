"""Find the mistake behind a YAML syntax error, which the parser often reports a line too late."""

import re
import unicodedata

import yaml

# A line with a key, even if its colon is missing, full-width or a =.
ENTRY = re.compile(r"(?P<key>[A-Za-z_][\w.]*)(?P<sign>\s*[:：=]|(?=\s|$))(?P<rest>.*)")
UNCLOSED = {
    "while scanning a quoted scalar": "a quote is not closed",
    "while parsing a flow mapping": "a { is not closed, or a comma is missing after it",
    "while parsing a flow sequence": "a [ is not closed, or a comma is missing after it",
}


def explain_syntax_error(text: str, error: yaml.MarkedYAMLError) -> tuple[int, str]:
    """Return the line of the mistake, from 1, and what is wrong there.

    If no known mistake is found, line and text are those of the parser's message.
    """
    mark = error.problem_mark or error.context_mark
    assert mark is not None
    number, context = mark.line + 1, error.context or ""
    parsers_own = ", ".join(filter(None, (context, error.problem)))
    if not isinstance(error, yaml.scanner.ScannerError | yaml.parser.ParserError):
        return number, parsers_own
    lines = text.split("\n")
    candidates = [number, *_content_before(lines, number)]
    start = error.context_mark.line + 1 if error.context_mark else number
    if "simple key" in context:  # the parser has looked for a colon since that line
        candidates.insert(0, start)
    for candidate in candidates:
        if candidate <= len(lines) and (mistake := find_mistake(lines[candidate - 1])):
            return candidate, mistake
    if context in UNCLOSED:
        return start, UNCLOSED[context]
    return number, _bad_indentation(lines, number) or parsers_own


def find_mistake(line: str) -> str | None:
    """Return what is wrong with a single line and what to write instead, or None."""
    text = line.strip()
    if "\t" in line:
        return "there is a tab; expected spaces, such as two before each field of a section"
    if line[: len(line) - len(line.lstrip())].strip(" "):
        return "the line begins with a blank that is no plain space; expected spaces"
    match = ENTRY.fullmatch(text)
    if match is None:
        return None
    key, sign, rest = match["key"], match["sign"].strip(), match["rest"].strip()
    corrected = f"{key}: {rest}".strip()
    if sign == "：":
        return f"the colon is full-width; write {corrected}"
    if sign == "=":
        return f"there is = in place of a colon; write {corrected}"
    if not sign:
        return f"a colon is missing; write {corrected}"
    if rest and match["rest"][0] != " ":
        return f"a space is missing after the colon; write {corrected}"
    if rest[:1] in ("{", "["):
        if wide := re.search("[，：｛｝［］]", rest):
            return f"{wide[0]} is full-width; write {unicodedata.normalize('NFKC', wide[0])}"
    elif rest[:1] in ("@", "%", "`") or (rest[:1] not in ("'", '"') and ": " in rest):
        return f"this text needs quotes; write {key}: '{rest}'"
    return None


def _content_before(lines: list[str], number: int) -> list[int]:
    """Return, as a list of at most one, the last line before ``number`` that has content."""
    before = range(min(number - 1, len(lines)), 0, -1)
    return [n for n in before if lines[n - 1].split("#")[0].strip()][:1]


def _bad_indentation(lines: list[str], number: int) -> str | None:
    """Describe the indentation of a line and of the line before it, if they differ."""
    before = _content_before(lines, number)
    if number > len(lines) or not before:
        return None
    indents = [
        len(line) - len(line.lstrip(" ")) for line in (lines[before[0] - 1], lines[number - 1])
    ]
    if indents[0] == indents[1]:
        return None
    return (
        f"the line is indented by {indents[1]}, and the one before by {indents[0]}; expected the "
        "same for all fields of a section"
    )
