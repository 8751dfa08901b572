"""The two pictures a training leaves behind."""

import math
from pathlib import Path

from PIL import Image, ImageDraw

CELL_WIDTH, PICTURE_SIDE, TEXT_HEIGHT, MARGIN = 180, 112, 56, 8
RIGHT, WRONG = (20, 130, 60), (190, 30, 30)


def plot_loss(history: list[dict], path: Path) -> None:
    """Draw the loss over the steps; NaN and infinity are marked where they were.

    Args:
        history: ``step`` and ``loss`` each, a number or what ``float`` reads as one.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    losses = {entry["step"]: float(entry["loss"]) for entry in history}
    finite = {step: loss for step, loss in losses.items() if math.isfinite(loss)}
    # A gap where one is not.
    axes.plot([*losses], [finite.get(step, math.nan) for step in losses])
    for step in losses.keys() - finite.keys():
        axes.axvline(step, color="red", linestyle=":", gid="not finite")
    if len(finite) < len(losses):
        axes.set_title("dotted: the loss was NaN or infinite")
    axes.set(xlabel="step", ylabel="loss (nats per supervised token)", yscale="log")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)


def draw_contact_sheet(cells: list[dict], path: Path, columns: int = 6) -> None:
    """Draw pictures with question, answer, and what was expected where they differ.

    Args:
        cells: ``image`` (path or None), ``question``, ``answer``, ``expected`` each.
    """
    rows = -(-len(cells) // columns)
    height = PICTURE_SIDE + TEXT_HEIGHT + 2 * MARGIN
    sheet = Image.new("RGB", (columns * CELL_WIDTH, rows * height), "white")
    draw = ImageDraw.Draw(sheet)
    for index, cell in enumerate(cells):
        left, top = index % columns * CELL_WIDTH + MARGIN, index // columns * height + MARGIN
        if cell["image"] is not None:
            with Image.open(cell["image"]) as picture:
                sheet.paste(
                    picture.convert("RGB").resize((PICTURE_SIDE, PICTURE_SIDE)), (left, top)
                )
        is_right = cell["answer"] == cell["expected"]
        lines = [cell["question"][:28], cell["answer"][:28]]
        lines += [] if is_right else [f"expected: {cell['expected']}"[:28]]
        for number, line in enumerate(lines):
            colour = "black" if number == 0 else RIGHT if is_right else WRONG
            draw.text((left, top + PICTURE_SIDE + 4 + 16 * number), line, fill=colour)
    sheet.save(path)
