"""Draws the pictures of docs/how-it-works.md, in plain SVG: `python docs/figures.py` writes docs/figures/*.svg."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).with_name("figures")
INK, SOFT, LINE = "#22303c", "#5b6b79", "#9fb0bd"
SLOTS = ("#4c9f9a", "#e0a03b", "#8a6fb3")  # one colour for each slot, in all pictures
HOST, DEVICE = "#eef3f6", "#f7f2e8"
LIGHT, DARK = "#c9d6df", "#7f97a8"


def rect(x: float, y: float, w: float, h: float, fill: str, stroke: str = "none", dash: str = "", round_: float = 4) -> str:
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{round_:g}" fill="{fill}" stroke="{stroke}"{dashes}/>'


def text(x: float, y: float, words: str, size: float = 13, fill: str = INK, anchor: str = "start", bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{fill}" text-anchor="{anchor}"{weight}>{escape(words)}</text>'


def arrow(points: Iterable[tuple[float, float]], colour: str = INK) -> str:
    path = " ".join(f"{x:g},{y:g}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2" marker-end="url(#head)"/>'


def line(x1: float, y1: float, x2: float, y2: float, colour: str = LINE, dash: str = "4 3") -> str:
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{colour}" stroke-dasharray="{dash}"/>'


def svg(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    """A whole picture. `title`: what a screen reader says."""
    head = (
        '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto-start-reverse">'
        f'<path d="M0 0L10 5L0 10z" fill="{INK}"/></marker></defs>'
    )
    ground = rect(0.5, 0.5, width - 1, height - 1, "#ffffff", LINE, round_=8)
    body = "\n".join([f"<title>{escape(title)}</title>", head, ground, *parts])
    family = "system-ui, 'Segoe UI', 'DejaVu Sans', Helvetica, Arial, sans-serif"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'font-family="{family}">\n{body}\n</svg>\n'
    )


def page() -> str:
    """Where a page lives, and the way that it takes."""
    parts = [rect(20, 46, 420, 262, HOST, LINE), text(32, 70, "host RAM, pinned", 15, bold=True)]
    planes = [("exp_avg", "1 B", 30), ("exp_avg_sq", "1 B", 30), ("group constants", "0.16 B", 14), ("correction", "1 B", 30)]
    y, x0, w = 106, 150, 46
    for name, size, height in planes:
        parts += [text(142, y + height / 2 + 4, name, 12, anchor="end"), text(428, y + height / 2 + 4, size, 11, SOFT, "end")]
        parts += [rect(x0 + i * w, y, w - 2, height, SLOTS[1] if i == 2 else LIGHT, round_=2) for i in range(5)]
        y += height + 10
    parts += [text(x0 + i * w + w / 2 - 1, 100, f"page {i}", 11, INK if i == 2 else SOFT, "middle", i == 2) for i in range(5)]
    for i, words in enumerate(("A page is the same run of", "elements in every plane: with", "masters 3.16 bytes for each.")):
        parts.append(text(32, 266 + i * 16, words, 12, SOFT))
    parts += [rect(560, 46, 380, 262, DEVICE, LINE), text(572, 70, "GPU", 15, bold=True)]
    for i, colour in enumerate(SLOTS):
        parts += [rect(580 + i * 116, 84, 104, 46, colour), text(632 + i * 116, 112, f"slot {i}", 13, "#ffffff", "middle", True)]
    parts += [rect(580, 168, 340, 54, "#ffffff", INK), text(750, 190, "one launch: decode, AdamW in fp32, encode", 13, anchor="middle")]
    parts += [text(750, 209, "all tensors of the page, hundreds if they are small", 11, SOFT, "middle")]
    parts += [rect(580, 250, 162, 40, LIGHT), text(661, 275, "weights", 13, anchor="middle")]
    parts += [rect(758, 250, 162, 40, LIGHT), text(839, 275, "gradients", 13, anchor="middle")]
    parts += [
        arrow([(264, 86), (264, 28), (748, 28), (748, 82)]),
        text(506, 22, "1  copied in while the page before is updated", 12, anchor="middle"),
    ]
    parts += [arrow([(752, 130), (752, 167)]), arrow([(768, 167), (768, 131)]), text(780, 153, "2  updated in place", 12)]
    parts += [arrow([(652, 249), (652, 223)]), arrow([(670, 223), (670, 249)]), arrow([(839, 249), (839, 223)])]
    parts += [arrow([(716, 130), (716, 146), (500, 146), (500, 338), (264, 338), (264, 250)])]
    parts += [text(512, 336, "3  copied out while the next one is updated", 12)]
    return svg(960, 360, "A page of optimizer state travels from host RAM into a slot on the GPU, is updated there, and goes home.", parts)


def _rows(parts: list[str], names: Iterable[str], top: float, gap: float, right: float) -> None:
    for i, name in enumerate(names):
        parts += [text(122, top + i * gap + 21, name, 13, anchor="end"), line(130, top + i * gap + 37, right, top + i * gap + 37)]


def _block(x: float, y: float, w: float, number: int, fill: str) -> str:
    return rect(x, y, w, 32, fill) + text(x + w / 2, y + 21, str(number), 12, "#ffffff", "middle", True)


def step() -> str:
    """One step in time: three streams, three slots."""
    parts: list[str] = []
    _rows(parts, ("copy in", "update", "copy out"), 40, 46, 930)
    t, out_free = 140.0, 0.0
    in_end: list[float] = []
    up_end: list[float] = []
    out_end: list[float] = []
    for i in range(6):
        start = max(in_end[-1] if in_end else t, out_end[i - 3] if i >= 3 else t)
        in_end.append(start + 100)
        begin = max(in_end[i], up_end[-1] if up_end else t)
        up_end.append(begin + 46)
        leave = max(up_end[i], out_free)
        out_free = leave + 100
        out_end.append(out_free)
        colour = SLOTS[i % 3]
        parts += [_block(start, 42, 98, i, colour), _block(begin, 88, 44, i, colour), _block(leave, 134, 98, i, colour)]
    parts += [arrow([(140, 196), (930, 196)], SOFT), text(930, 214, "time", 12, SOFT, "end")]
    parts += [
        text(
            140,
            214,
            "A page waits for its slot, its copy and its kernel. Colours are slots: page 3 follows page 0.",
            12,
            SOFT,
        )
    ]
    return svg(960, 228, "Copies in, updates and copies out of six pages overlap; three slots are used in turn.", parts)


def release() -> str:
    """Gradient release: updates during backward, and the gradients that are alive."""
    parts: list[str] = []
    _rows(parts, ("backward", "copy in", "update", "copy out", "gradients"), 40, 46, 930)
    for i in range(6):
        x, colour = 140 + i * 118, SLOTS[i % 3]
        parts += [rect(x, 42, 116, 32, DARK), text(x + 58, 63, f"layer {6 - i}", 12, "#ffffff", "middle")]
        parts += [_block(x, 88, 100, i, colour), _block(x + 118, 134, 44, i, colour)]
        if i < 5:
            parts.append(_block(x + 164, 180, 100, i, colour))
        points = f"{x},258 {x + 116},232 {x + 160},232 {x + 162},258"
        parts.append(f'<polygon points="{points}" fill="{SLOTS[i % 3]}" fill-opacity="0.55"/>')
    parts += [
        text(
            140,
            290,
            "A page is updated when the last of its gradients is final, and they are freed: those of a page and of the layer",
            12,
            SOFT,
        )
    ]
    parts += [text(140, 307, "at work are alive at one time, not those of the whole model. Copies hide behind backward.", 12, SOFT)]
    return svg(960, 324, "During backward, pages are fetched, updated and written back layer by layer, and gradients are freed.", parts)


def bytes_() -> str:
    """What full fine-tuning in bf16 holds on the GPU, bytes for each parameter beyond activations."""
    bars = [
        ("mixed-precision AdamW", [("weights", 2.0), ("gradients", 2.0), ("state", 12.0)]),
        ("FlashOptim with release", [("weights", 2.0), ("gradients", 0.0), ("state", 3.0)]),
        ("paged", [("weights", 2.0), ("gradients", 2.0), ("state", 0.03)]),
        ("paged, gradient release", [("weights", 2.0), ("gradients", 0.15), ("state", 0.03)]),
    ]
    colours = {"weights": DARK, "gradients": SLOTS[1], "state": SLOTS[0]}
    parts: list[str] = []
    for i, (name, pieces) in enumerate(bars):
        x, y = 210.0, 24 + i * 44
        parts.append(text(200, y + 20, name, 13, anchor="end"))
        for piece, size in pieces:
            width = size * 40
            parts.append(rect(x, y, width, 30, colours[piece], round_=0) if width else "")
            x += width
        total = sum(size for _, size in pieces)
        parts.append(text(x + 8, y + 20, f"{total:.1f}" if total % 1 else f"{total:.0f}", 13, bold=True))
    for i, (name, colour) in enumerate(colours.items()):
        parts += [rect(210 + i * 120, 210, 14, 14, colour, round_=2), text(230 + i * 120, 222, name, 12)]
    return svg(
        960,
        240,
        "Bytes on the GPU per parameter: mixed-precision AdamW 16, FlashOptim 5, paged 4, with gradient release 2.2.",
        parts,
    )


PICTURES: dict[str, Callable[[], str]] = {"page": page, "step": step, "release": release, "bytes": bytes_}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
