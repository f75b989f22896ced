"""Draw pictures with a question about each: which color, which shape, how many. One file of rows, and images/*.png.

python make_pictures.py DIRECTORY [COUNT]
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

COLORS = {"red": (220, 30, 30), "green": (30, 160, 60), "blue": (40, 70, 220), "yellow": (240, 200, 40)}
SHAPES = ("square", "circle", "triangle")
QUESTIONS = {"color": "Which color?", "shape": "Which shape?", "count": "How many?"}
SIZE = 32  # pixels of each side
_CORNERS = ((1, 1), (17, 1), (1, 17), (17, 17))  # of the shapes, each 14 pixels wide


def write(directory: Path, count: int, seed: int = 17, questions: tuple[str, ...] = tuple(QUESTIONS)) -> list[Any]:
    """Write `count` pictures and their rows; returns the rows."""
    drawn = random.Random(seed)  # noqa: S311
    (directory / "images").mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(count):
        color, shape, shapes = drawn.choice(list(COLORS)), drawn.choice(SHAPES), drawn.randint(1, 4)
        name = f"images/{number:03d}.png"
        _draw(COLORS[color], shape, drawn.sample(_CORNERS, shapes)).save(directory / name)
        asked = drawn.choice(questions)
        answer = {"color": color, "shape": shape, "count": str(shapes)}[asked]
        question = [{"type": "image"}, {"type": "text", "text": QUESTIONS[asked]}]
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        rows.append({"images": [name], "messages": messages})
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def _draw(color: tuple[int, int, int], shape: str, corners: list[tuple[int, int]]) -> Image.Image:
    image = Image.new("RGB", (SIZE, SIZE), "white")
    pen = ImageDraw.Draw(image)
    for left, top in corners:
        box = (left, top, left + 13, top + 13)
        if shape == "square":
            pen.rectangle(box, fill=color)
        elif shape == "circle":
            pen.ellipse(box, fill=color)
        else:
            pen.polygon([(left, top + 13), (left + 13, top + 13), (left + 6, top)], fill=color)
    return image


if __name__ == "__main__":
    write(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 100)
