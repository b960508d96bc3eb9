"""The picture of architecture.md: the rooms in the order of their imports, and how data flows through them.

`python docs/site/picture.py > docs/images/architecture.svg` draws it.
"""

from itertools import accumulate, pairwise

from modules import layers

# From top to bottom, in turns: what there is, and the rooms that make what follows. Each has a share of the width, in
# thirds.
FLOW = (
    {"parallel text": 3},
    {"data.prepare": 3},
    {"data folder: shards, vocabulary": 3},
    {"data.loading": 3},
    {"packs, micro-batches": 3},
    {"training": 2},
    {"run folder with ledger": 2, "other models": 1},
    {"averaging": 2, "importing": 1},
    {"model folder": 3},
    {"inference": 1, "serving": 1, "export": 1},
    {"translations": 1, "local page": 1, "exports": 1},
    {"evaluation": 1},
    {"scores": 1},
)
STACK, LEFT, THIRD, TOP, ROW, BOX, LEVEL = 280, 304, 96, 30, 30, 25, 41
STYLE = """<style>
  text { font: 13px system-ui, sans-serif; fill: #24292f; text-anchor: middle; }
  .room { fill: #eaeef2; stroke: #8c959f; }
  .works { fill: #cfe3ff; stroke: #0969da; }
  .file { fill: #fff8dc; stroke: #bf8700; }
  path { fill: none; stroke: #6e7781; stroke-width: 1.5; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    .room { fill: #21262d; stroke: #6e7681; }
    .works { fill: #0c2d57; stroke: #58a6ff; }
    .file { fill: #3a2e05; stroke: #d29922; }
  }
</style>"""


def picture() -> str:
    rows = layers()
    working = {room for level in FLOW[1::2] for room in level}
    if unknown := working - {room for row in rows for room in row}:
        raise SystemExit(f"error: no layer has {', '.join(sorted(unknown))}: correct FLOW")
    parts = [_text(STACK / 2, 18, "rooms: each imports from those below")]
    parts += [_text(LEFT + 1.5 * THIRD, 18, "data, and the rooms that process it")]
    for number, row in enumerate(rows):
        width = STACK / len(row)
        for place, room in enumerate(row):
            parts += _box(place * width, TOP + number * ROW, width, room, "works" if room in working else "room")
    levels = [_cells(level) for level in FLOW]
    for number, level in enumerate(levels):
        for x, width, text in level:
            parts += _box(x, TOP + number * LEVEL, width, text, "works" if text in working else "file")
    for number, (upper, lower) in enumerate(pairwise(levels), 1):
        # An arrow in the middle of each narrower cell that has the other above or below it.
        for x, width, _ in [min(a, b, key=lambda cell: cell[1]) for a in upper for b in lower if _meet(a, b)]:
            parts.append(f'<path d="M{x + width / 2 - 2:g} {TOP + number * LEVEL - 14}v11m-4 -5l4 5l4 -5"/>')
    size = f"{LEFT + 3 * THIRD} {TOP + len(FLOW) * LEVEL}"
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}">', STYLE, *parts, "</svg>"])


def _cells(level: dict[str, int]) -> list[tuple[int, int, str]]:
    """List left edge, width and text of each cell."""
    widths = [THIRD * thirds for thirds in level.values()]
    return list(zip(accumulate(widths, initial=LEFT), widths, level, strict=False))


def _meet(one: tuple[int, int, str], other: tuple[int, int, str]) -> bool:
    return one[0] < other[0] + other[1] and other[0] < one[0] + one[1]


def _box(x: float, y: float, width: float, text: str, kind: str) -> list[str]:
    box = f'<rect class="{kind}" x="{x + 1:g}" y="{y:g}" width="{width - 5:g}" height="{BOX}" rx="4"/>'
    return [box, _text(x + width / 2 - 2, y + 17, text.replace(".", "/"))]


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:g}" y="{y:g}">{text}</text>'


if __name__ == "__main__":
    print(picture())
