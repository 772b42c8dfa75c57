"""Draws the charts of docs/performance.md: `python3 docs/charts/make.py`. Standard library only.

The figures are in data.json beside this file, with the command and the commit they come from; those of the CPU are read
from the table that `cargo xtask bench-peers` writes into docs/performance-figures.md.
"""

import html
import json
import math
import pathlib
import re

FOLDER = pathlib.Path(__file__).parent
TABLE = FOLDER.parent / "performance-figures.md"
MARKS = ("<!-- bench-peers: begin -->", "<!-- bench-peers: end -->")
# Told apart in greyscale, too; the first is ours.
COLORS = ["#1f5fa8", "#e0933a", "#7fb069", "#c9c9c9"]
WIDTH, LEFT, RIGHT, BAR = 760, 200, 90, 15


def text(x, y, content, size=12, anchor="start", weight="normal"):
    content = html.escape(content)
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}">{content}</text>'


def number(value):
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def page(chart, height, marks):
    """The frame of every chart: white, so that it reads on a dark page, with a title, a legend and the source."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" fill="#222">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        text(16, 24, chart["title"], 15, weight="bold"),
    ]
    x = 16
    for name, color in zip(chart["series"], COLORS):
        parts.append(f'<rect x="{x}" y="36" width="12" height="12" fill="{color}"/>')
        parts.append(text(x + 17, 46, name))
        x += 40 + 7 * len(name)
    parts += marks
    parts.append(text(16, height - 10, chart["source"], 10))
    return "\n".join(parts + ["</svg>"]) + "\n"


def bars(chart):
    """A group of bars for each row. With `each` a row has its own scale: only ratios within it are meant."""
    marks, y = [], 66
    room = WIDTH - LEFT - RIGHT
    most = max(value for row in chart["rows"].values() for value in row if value)
    if "line" in chart:
        x = LEFT + room * chart["line"] / most
    for name, row in chart["rows"].items():
        scale = max(value for value in row if value) if chart.get("each") else most
        shown = [(value, color) for value, color in zip(row, COLORS) if value is not None]
        marks.append(text(LEFT - 8, y + len(shown) * BAR / 2 + 4, name, anchor="end"))
        for value, color in shown:
            wide = room * value / scale
            marks.append(f'<rect x="{LEFT}" y="{y}" width="{wide:.1f}" height="{BAR - 2}" fill="{color}"/>')
            marks.append(text(LEFT + wide + 5, y + BAR - 4, number(value), 11))
            y += BAR
        y += 10
    if "line" in chart:
        marks.append(f'<line x1="{x:.1f}" y1="60" x2="{x:.1f}" y2="{y - 6}" stroke="#222" stroke-dasharray="4 3"/>')
    return page(chart, y + 24, marks)


def lines(chart):
    """Both axes are logarithmic: a straight line is a rate that grows with the streams."""
    top, bottom = 70, 350
    names = [int(name) for name in chart["rows"]]
    values = [value for row in chart["rows"].values() for value in row if value]
    low, high = math.log10(min(values)) - 0.1, math.log10(max(values)) + 0.1

    def at(name, value):
        across = math.log2(name / names[0]) / math.log2(names[-1] / names[0])
        up = (math.log10(value) - low) / (high - low)
        return 80 + across * (WIDTH - 170), bottom - up * (bottom - top)

    marks = []
    for power in range(math.ceil(low), math.floor(high) + 1):
        y = at(names[0], 10**power)[1]
        marks.append(f'<line x1="80" y1="{y:.1f}" x2="{WIDTH - 90}" y2="{y:.1f}" stroke="#ddd"/>')
        marks.append(text(72, y + 4, f"{10**power:,}", 11, "end"))
    for name in names:
        marks.append(text(at(name, min(values))[0], bottom + 16, str(name), 11, "middle"))
    for index, color in reversed(list(enumerate(COLORS[: len(chart["series"])]))):
        points = [at(int(name), row[index]) for name, row in chart["rows"].items() if row[index]]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        marks.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2.5"/>')
        marks += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"/>' for x, y in points]
        last = [row[index] for row in chart["rows"].values() if row[index]][-1]
        below = 14 if index == 0 else 0
        marks.append(text(points[-1][0] + 8, points[-1][1] + 4 + below, number(last), 11))
    return page(chart, bottom + 48, marks)


def cpu():
    """Fornax to the better of the peers that ran, with two threads, from the table of bench-peers."""
    table = TABLE.read_text().split(MARKS[0])[1].split(MARKS[1])[0]
    commit = re.search(r"\| commit \| (\w+) \|", table)[1]
    machine = re.search(r"\| machine \| ([^|]+?) \|", table)[1]
    figures = {"decode, tokens/s": 0, "prefill 512, tokens/s": 1, "8 streams, tokens/s in all": 2}
    rows = {}
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) < 7 or cells[1] != "2" or cells[2] not in figures:
            continue
        rows.setdefault(cells[0], [None] * 3)[figures[cells[2]]] = float(cells[-1].split()[0])
    return {
        "title": "CPU, 2 threads: how many times llama.cpp's tokens/s (dashed: as many)",
        "source": f"cargo xtask bench-peers, {machine}, {commit}",
        "series": ["decode", "prefill 512", "8 streams"],
        "rows": {name.replace("-instruct", ""): row for name, row in rows.items()},
        "line": 1,
    }


def main():
    charts = json.loads((FOLDER / "data.json").read_text())
    drawn = {name: (lines if chart["kind"] == "lines" else bars)(chart) for name, chart in charts.items()}
    drawn["cpu-ratio"] = bars(cpu())
    for name, svg in drawn.items():
        (FOLDER / f"{name}.svg").write_text(svg)
        print(f"docs/charts/{name}.svg")


if __name__ == "__main__":
    main()
