"""A griffe extension: fields that ``option()`` declares have its default and its help.

griffe reads the source without running it, so it would show the call itself as the default.
"""

import ast

import griffe


class Options(griffe.Extension):
    """Replaces ``option(DEFAULT, HELP, ...)`` by its default, and the docstring by its help."""

    def on_attribute_instance(self, *, node, attr: griffe.Attribute, **_) -> None:
        call = getattr(node, "value", None)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "option":
            default, text = call.args
            attr.value = ast.unparse(default)
            attr.docstring = griffe.Docstring(ast.literal_eval(text), parent=attr)
