"""docs/quickstart.ipynb is kept without outputs; nox's session ``notebook`` runs it."""

import json

from tests.helpers.pages import ROOT


def test_the_notebook_has_no_outputs_and_trains_the_tiny_model():
    cells = json.loads((ROOT / "docs" / "quickstart.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code and not any(cell["outputs"] or cell["execution_count"] for cell in code)
    assert "REAL = False\n" in code[0]["source"]
